"""Fills the tables of the page on what we expect on a GPU: ``PYTHONPATH=.:tests python docs/make_gpu_expectations.py``.

With ``--read`` the kernels are compiled and their machine code read first, and a training step is counted on the
stand-in for CuPy; both are kept in ``explanation/gpu-figures.json``. Without, the page is filled from that file: every
number of ours on it comes from there and from `MODEL`. With ``--check`` nothing is written, and the exit status says
whether the page is up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "explanation" / "what-we-expect-on-a-gpu.md"
FIGURES = PAGE.with_name("gpu-figures.json")

CLOCK, MULTIPROCESSORS, BANDWIDTH, L2 = 1.98e9, 132, 4.8e12, 50e6
LAUNCH, NODE, OTHER, GRAPH = 10e-6, 1.5e-6, 2.5e-6, 10e-6
MODEL = {
    "boost clock of an H200": (f"{CLOCK / 1e9:.2f} GHz", "data sheet"),
    "multiprocessors, four schedulers each": (f"{MULTIPROCESSORS}", "data sheet"),
    "memory bandwidth": (f"{BANDWIDTH / 1e12:.1f} TB/s", "data sheet"),
    "L2 cache, which holds all values of T = 1000": (f"{L2 / 1e6:.0f} MB", "data sheet"),
    "a launch from Python": (f"{LAUNCH * 1e6:.0f} µs", "guess: others see 3 to 8 µs, plus our checks"),
    "from one kernel of a captured graph to the next": (f"{NODE * 1e6:.1f} µs", "others' measurements"),
    "a small kernel (loss, product, update), including that": (f"{OTHER * 1e6:.1f} µs", "guess"),
    "the launch of a graph": (f"{GRAPH * 1e6:.0f} µs", "others' measurements"),
}
BEGIN = {"reduce": 1500, "combine": 700, "backward": 800, "forward": 800}
"""Cycles from a kernel's first instruction to its first step: weights to registers, the first loads. Estimates."""
ERROR = 1.25
"""By which times may be longer than the model's; the longer ones also count every word of a uniform load as a pass."""
CUDNN = {"forward": (0.26e-6, 0.36e-6), "backward": (0.8e-6, 1.1e-6)}
"""Seconds that a time step of cuDNN's tanh RNN takes at these sizes, in float32: derived, not measured by us."""
CUDNN_OTHERS = 20
"""Small kernels of PyTorch's step besides: loss, linear layer, fused Adam."""
BATCH, HIDDEN = 16, 20
CHUNKS = {1000: (16, 32, 64, 128), 30_000: (32, 64, 128, 258, 512)}
NAMES = {"rnn": "tanh RNN", "gru": "GRU"}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read() -> dict[str, Any]:
    """Return what machine code, launchers and the stand-in for CuPy say."""
    from gpu_model.kernels import COMPILER
    from gpu_model.step import chosen_chunks, step_counts
    from sass import nvrtc

    if nvrtc.version() != COMPILER:
        raise SystemExit(f"the page is made with NVRTC {COMPILER}, this is {nvrtc.version()}")
    chosen = {cell: {str(length): chosen_chunks(cell, length) for length in CHUNKS} for cell in NAMES}
    return {
        "compiler": ".".join(map(str, COMPILER)),
        "chosen": chosen,
        "runs": {c: {str(t): runs(c, t, chosen[c][str(t)]) for t in CHUNKS} for c in NAMES},
        "steps": {cell: step_counts(cell.upper(), "chunked") for cell in NAMES},
    }


def runs(cell: str, length: int, chosen: int) -> dict[str, Any]:
    """Return forward, recursion and scans of a cell: phases with warps a multiprocessor, steps, cycles a step."""
    from gpu_model.launches import recurrence

    memory = "L2" if length * BATCH * HIDDEN * 4 * (8 if cell == "gru" else 4) < L2 else "DRAM"
    found: dict[str, Any] = {"memory": memory}
    for chunks in sorted({1, chosen, *CHUNKS[length]}):
        forward, *phases = recurrence(cell, length, BATCH, HIDDEN, chunks, MULTIPROCESSORS)
        phases = [one for one in phases if one.kernel != "sum_weights"]  # a small kernel
        found["forward"] = [_phase(forward, length, "L2")]  # where it has asked for it two rounds before
        steps = [length] if chunks == 1 else [ceil(length / chunks), chunks - 2, ceil(length / chunks)]
        found[str(chunks)] = [_phase(one, count, memory) for one, count in zip(phases, steps, strict=True)]
    return found


def _phase(launch: Any, steps: int, memory: str) -> dict[str, Any]:
    return {
        "kernel": launch.kernel,
        "rows": launch.defines.get("ROWS"),
        "warps": launch.warps,
        "steps": steps,
        "cycles": round(launch.cycles(memory), 1),
        "cycles, four passes": round(launch.cycles(memory, wide=True), 1),
    }


# ---- the model -------------------------------------------------------------------------------------------------------


Range = tuple[float, float]
"""The least and the most seconds, or their ratios."""


def seconds(phases: Sequence[dict[str, Any]]) -> Range:
    """Return the time of kernels one after the other in a graph."""
    begin = sum(BEGIN[one["kernel"].split("_")[1]] for one in phases)
    low, high = (
        (begin + sum(one["steps"] * one[name] for one in phases)) / CLOCK + NODE * (len(phases) - 1)
        for name in ("cycles", "cycles, four passes")
    )
    return low, ERROR * high


def tried(of_length: dict[str, Any]) -> list[int]:
    """Return the numbers of chunks of which there are figures."""
    return sorted(int(name) for name in of_length if name.isdigit() and name != "1")


def best_scan(of_length: dict[str, Any]) -> int:
    """Return the number of chunks, of those tried, with the shortest scan."""
    return min(tried(of_length), key=lambda chunks: seconds(of_length[str(chunks)]))


def over(theirs: Range, ours: Range) -> str:
    """Return how many times as fast ours is, at least and at most."""
    return _range(tuple(_digits(ratio) for ratio in (theirs[0] / ours[1], theirs[1] / ours[0]))) + "×"


def step_seconds(figures: dict[str, Any], cell: str, length: int) -> dict[str, Range]:
    """Return the time of a whole training step: captured, and launched one by one."""
    of_length, counts = figures["runs"][cell][str(length)], figures["steps"][cell]["launched"]
    scan = of_length[str(best_scan(of_length))]
    streamed = 4 * 16 * length * BATCH * HIDDEN / BANDWIDTH if cell == "gru" else 0.0  # what the products read
    small = counts["launches"] - 1 - len(scan)
    host = (counts["launches"] + counts["uploads"]) * LAUNCH
    parts = zip(seconds(of_length["forward"]), seconds(scan), (1.0, ERROR), strict=True)
    low, high = (forward + back + (small * OTHER + streamed) * error for forward, back, error in parts)
    return {"captured": (GRAPH + low, GRAPH + high), "launched": (max(low, host), max(high, host))}


def cudnn_step(length: int) -> Range:
    """Return the time of PyTorch's step of the tanh RNN."""
    low, high = (length * sum(part) + CUDNN_OTHERS * OTHER for part in zip(*CUDNN.values(), strict=True))
    return low, high


# ---- the page --------------------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Return the page's tables by name."""
    return {
        "model": _table(("input", "value", "source"), [(name, *entry) for name, entry in MODEL.items()]),
        "steps": _steps(figures),
        "scans": _scans(figures),
        "times": _times(figures),
        "whole": _whole(figures),
        "counts": _counts(figures),
    }


def _steps(figures: dict[str, Any]) -> str:
    rows = []
    for cell, name in NAMES.items():
        for part, key in (("forward", "forward"), ("backward, sequential", "1")):
            cycles = [figures["runs"][cell][str(length)][key][0]["cycles"] for length in CHUNKS]
            time = cycles[0] / CLOCK, ERROR * cycles[0] / CLOCK
            theirs = CUDNN[part.split(",")[0]] if cell == "rnn" else None
            rows.append((
                f"{name}, {part}", f"{cycles[0]:.0f}", f"{cycles[1]:.0f}", f"{_range(_nano(time))} ns",
                f"{_range(_nano(theirs))} ns" if theirs else "–", over(theirs, time) if theirs else "–",
            ))  # fmt: skip
    header = ("kernel", "cycles per step, T = 1000", "T = 30 000", "time, T = 1000", "cuDNN", "ratio")
    return _table(header, rows)


def _scans(figures: dict[str, Any]) -> str:
    rows = []
    for cell, name in NAMES.items():
        for length in CHUNKS:
            of_length, chosen = figures["runs"][cell][str(length)], figures["chosen"][cell][str(length)]
            for chunks in tried(of_length):
                phases = of_length[str(chunks)]
                shown = [f"{one['warps']} × {_cycles(one)}" for one in phases]
                label = f"{chunks} (`auto`)" if chunks == chosen else f"{chunks}"
                rows.append((name, f"{length}", label, f"{phases[0]['rows']}", *shown, _time(seconds(phases))))
    header = ("cell", "T", "chunks", "rows per lane", "reduce: warps × cycles", "combine", "last phase", "time")
    return _table(header, rows)


def _times(figures: dict[str, Any]) -> str:
    rows = []
    for length in CHUNKS:
        of_length = figures["runs"]["rnn"][str(length)]
        chunks, theirs = best_scan(of_length), (length * CUDNN["backward"][0], length * CUDNN["backward"][1])
        recursion, scan = seconds(of_length["1"]), seconds(of_length[str(chunks)])
        rows.append((
            f"{length}", _time(recursion), f"{_time(scan)} ({chunks} chunks)", _time(theirs),
            over(theirs, min(recursion, scan)),
        ))  # fmt: skip
    return _table(("T", "recursion", "scan", "cuDNN", "ratio"), rows)


def _whole(figures: dict[str, Any]) -> str:
    rows = []
    for length in CHUNKS:
        ours, theirs = step_seconds(figures, "rnn", length), cudnn_step(length)
        times = _time(ours["captured"]), _time(ours["launched"]), _time(theirs)
        rows.append((f"{length}", *times, over(theirs, ours["captured"])))
    return _table(("T", "captured", "launched", "PyTorch with cuDNN", "ratio, captured"), rows)


def _counts(figures: dict[str, Any]) -> str:
    rows = [
        (
            NAMES[cell],
            mode,
            *(f"{counts[name]}" for name in ("graphs", "launches", "own kernels", "host reads", "uploads")),
        )
        for cell, modes in figures["steps"].items()
        for mode, counts in modes.items()
    ]
    return _table(("cell", "step", "graphs", "launches", "own kernels", "host reads", "uploads"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _range(texts: Sequence[str]) -> str:
    return "–".join(dict.fromkeys(texts))


def _digits(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _nano(value: Range) -> list[str]:
    return [f"{each * 1e9:.0f}" for each in value]


def _cycles(phase: dict[str, Any]) -> str:
    return _range([f"{phase[name]:.0f}" for name in ("cycles", "cycles, four passes")])


def _time(value: Range) -> str:
    if value[1] >= 1e-3:
        return _range([f"{each * 1e3:.2f}" for each in value]) + " ms"
    return _range([f"{each * 1e6:.0f}" for each in value]) + " µs"


def fill(text: str, figures: dict[str, Any]) -> str:
    """Return the page with the tables between its markers made anew."""
    made = tables(figures)

    def block(match: re.Match[str]) -> str:
        return f"<!-- expected:{match[1]} -->\n\n{made[match[1]]}\n\n<!-- /expected -->"

    return re.sub(r"<!-- expected:(\w+) -->\n.*?<!-- /expected -->", block, text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--read", action="store_true", help="read machine code and count a step anew")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args(arguments)
    if options.read:
        FIGURES.write_text(json.dumps(read(), indent=1) + "\n", encoding="utf-8")
    before = PAGE.read_text(encoding="utf-8")
    after = fill(before, json.loads(FIGURES.read_text(encoding="utf-8")))
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    return int(options.check and before != after)


if __name__ == "__main__":
    sys.exit(main())
