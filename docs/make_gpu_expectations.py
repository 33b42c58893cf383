"""Fills the tables of the page on what we expect on a GPU: ``PYTHONPATH=.:tests python docs/make_gpu_expectations.py``.

Predictions come from ``explanation/gpu-figures.json``, read off machine code before the first run on a GPU, and from
`MODEL`; they do not change any more. Measured numbers come from the results of GPU runs in ``benchmarks/``;
``--from ARCHIVE`` takes them there from what a run has brought back, and the sentences on GPUs in README and on the
first page follow. With ``--check`` nothing is written, and the exit status says whether all of it is up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parent / "explanation" / "what-we-expect-on-a-gpu.md"
FIGURES = PAGE.with_name("gpu-figures.json")
BENCHMARKS = PAGE.parents[1] / "benchmarks"
FIRST = PAGE.parents[2] / "README.md", PAGE.parents[1] / "index.md"
"""Pages with a sentence on what has run."""

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


# ---- what was measured -----------------------------------------------------------------------------------------------


MODULE = {"what": "accelerate", "cell": "GRU", "length": 1000, "batch": BATCH}
"""Rows of ``gpu-peers`` of which the first pages speak."""


class Compared(NamedTuple):
    """A row: what is expected of ours and of a peer, where it is measured, and the keys of both."""

    what: str
    ours: Range | None
    peer: str
    benchmark: str
    where: Mapping[str, Any]
    key: str
    peer_key: str
    a_step: bool = False


def compared(figures: dict[str, Any]) -> list[Compared]:
    """Return the rows, in the order of the page."""

    def whole(cell: str) -> Range:
        """Forward and backward of a module, captured: six small kernels besides."""
        of_length = figures["runs"][cell]["1000"]
        parts = zip(
            seconds(of_length["forward"]), seconds(of_length[str(best_scan(of_length))]), (1, ERROR), strict=True
        )
        low, high = (forward + back + 6 * OTHER * error for forward, back, error in parts)
        return low, high

    def step(cell: str, key: str) -> Range:
        cycles = figures["runs"][cell]["1000"][key][0]["cycles"]
        return cycles / CLOCK, ERROR * cycles / CLOCK

    def module(cell: str, hidden: int, length: int = 1000, batch: int = 16) -> dict[str, Any]:
        return {"what": "accelerate", "cell": cell, "hidden": hidden, "length": length, "batch": batch}

    def number(what: str, cell: str, **more: Any) -> dict[str, Any]:
        return {"what": what, "cell": cell, "dtype": "float32", "hidden": HIDDEN} | more

    def recurrence(length: int, batch: int, hidden: int) -> dict[str, Any]:
        return {"what": "recurrence", "length": length, "batch": batch, "hidden": hidden}

    times = {length: figures["runs"]["rnn"][str(length)] for length in CHUNKS}
    scans = {length: seconds(found[str(best_scan(found))]) for length, found in times.items()}
    theirs = ("captured_ours", "captured_torch")
    cudnn = _range(_nano((sum(CUDNN[part][0] for part in CUDNN), sum(CUDNN[part][1] for part in CUDNN))))
    grid = {"cell": "RNN", "dtype": "float32", "batch": BATCH}
    beside = [
        Compared(f"{NAMES[cell]}, {part}{' by the recursion' * (part == 'backward')}, a step", step(cell, key),
                 f"cuDNN {_span(CUDNN[part])}" if cell == "rnn" else "–", "gpu-numbers", number("cudnn", cell.upper()),
                 f"{part}_ours", f"{part}_torch", True)
        for cell in NAMES for part, key in (("forward", "forward"), ("backward", "1"))
    ]  # fmt: skip
    rows = [
        *beside,
        *(Compared(f"tanh RNN, backward by the scan, T = {length}", scan,
                   f"cuDNN {_span((length * CUDNN['backward'][0], length * CUDNN['backward'][1]))}", "gpu-grid",
                   grid | {"length": length}, "kernel_chunked", "backward_torch") for length, scan in scans.items()),
        *(Compared(f"tanh RNN, training step, captured, T = {length}", step_seconds(figures, "rnn", length)["captured"],
                   f"cuDNN {_span(cudnn_step(length))}", "gpu-grid", grid | {"length": length}, "captured",
                   "captured_torch") for length in CHUNKS),
        Compared("nn.RNN, H = 20, forward and backward", whole("rnn"), f"cuDNN {cudnn} ns a step", "gpu-peers",
                 module("RNN", 20), *theirs),
        Compared("nn.GRU, H = 20, forward and backward", whole("gru"), "–", "gpu-peers", module("GRU", 20), *theirs),
        Compared("GRU, H = 64, backward by the recursion, a step", (0.8e-6, 0.8e-6), "–", "gpu-numbers",
                 number("cudnn", "GRU", hidden=64), "backward_ours", "backward_torch", True),
        Compared("nn.LSTM, H = 64, forward and backward, a step", (1.06e-6, 1.06e-6), "cuDNN 1.04 µs, backward alone",
                 "gpu-peers", module("LSTM", 64), *theirs, True),
        Compared("nn.LSTM, H = 128, forward and backward, a step", (4.1e-6, 4.1e-6), "cuDNN 3 µs, backward alone",
                 "gpu-peers", module("LSTM", 128), *theirs, True),
        Compared("nn.GRU, H = 256, forward and backward, a step", (12.4e-6, 12.4e-6), "cuDNN 8–14 µs, backward alone",
                 "gpu-peers", module("GRU", 256), *theirs, True),
        Compared("nn.LSTM, H = 40, B = 6, T = 3047", None, "cuDNN 2.0 + 5.0 ms", "gpu-peers",
                 module("LSTM", 40, 3047, 6), *theirs),
        Compared("nn.LSTM, H = 128, B = 16, T = 3854", None, "cuDNN 10.2 + 15.9 ms", "gpu-peers",
                 module("LSTM", 128, 3854), *theirs),
        Compared("nn.RNN, H = 120, B = 34, T = 1406", None, "cuDNN 1.1 + 2.6 ms", "gpu-peers",
                 module("RNN", 120, 1406, 34), *theirs),
        Compared("nn.LSTM, H = 64, beside FlashRNN, backward", None, "–", "gpu-numbers",
                 {"what": "flashrnn", "cell": "LSTM"}, "backward_ours", "backward_flashrnn"),
        Compared("linear recurrence, T = 16 384, B = 16, H = 128, forward", (0.12e-3, 0.12e-3),
                 "chunk_hgrn (H800) 1.27 ms", "gpu-peers", recurrence(16_384, 16, 128), "forward_ours",
                 "forward_hillis_steele"),
        Compared("the same with gradients", None, "chunk_hgrn (H800) 1.27 + 3.45 ms", "gpu-peers",
                 recurrence(16_384, 16, 128), "ours", "hillis_steele"),
        Compared("linear recurrence, T = 1000, B = 64, H = 100, with gradients", None, "associative_scan in one block",
                 "gpu-peers", {"what": "compiled recurrence", "compiled": "associative_scan", "batch": 64}, "ours",
                 "associative_scan"),
        Compared("VGG-11, B = 128, training step, captured", None, "3–10 times as fast as ours", "gpu-peers",
                 {"what": "step", "network": "VGG-11", "batch": 128}, "ours", "torch_channels_last"),
        Compared("Adam on 9.2 million parameters", None, "–", "gpu-peers", {"what": "adam"}, "ours", "torch"),
        Compared("sparse product, random, 8 a row, B = 16", None, "–", "gpu-numbers",
                 {"what": "spgemm", "product": "random, 8 a row", "batch": 16}, "time", "cusparse"),
    ]  # fmt: skip
    return rows


def results(name: str) -> list[dict[str, Any]]:
    """Return the rows of a benchmark that were measured on a GPU, those of the newest result first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in BENCHMARKS.glob(f"{name}-*.json")]
    found.sort(key=lambda one: one["environment"]["date"], reverse=True)
    return [row for result in found for row in result["rows"]]


def _measured(figures: dict[str, Any]) -> str:
    rows = []
    for row in compared(figures):
        found = [one for one in results(row.benchmark) if row.where.items() <= one.items() and row.key in one]
        cells = ["", "", ""]
        if found:
            one = found[0]
            per = one["length"] if row.a_step else 1
            ours, *theirs = ((one[key]["median"] / per,) * 2 for key in (row.key, row.peer_key) if key in one)
            against = "–" if row.ours is None else over(ours, row.ours)
            cells = [_span(ours), _span(theirs[0]) if theirs else "–", against]
        rows.append((row.what, "–" if row.ours is None else _span(row.ours), row.peer, *cells))
    header = ("what", "expected", "peer, expected or published", "measured", "peer, measured", "measured over expected")
    return _table(header, rows)


def _span(value: Range) -> str:
    """Return seconds in the largest unit of which they are at least one, in three digits at most."""
    scale, unit = next(((each, name) for each, name in ((1e-3, "ms"), (1e-6, "µs")) if value[1] >= each), (1e-9, "ns"))
    return _range([f"{one / scale:.3g}" for one in value]) + f" {unit}"


def what_has_run() -> str:
    """Return the sentence on what has run on a GPU, from the results of the newest first run."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (BENCHMARKS / "gpu-runs").glob("first-1-*.json")]
    if not found:
        return "GPU kernels, in CUDA C++, are tested on the CPU but have not run on a GPU yet."
    run = max(found, key=lambda one: one["versions"]["environment"]["date"])
    counts = Counter(run["tests"]["counts"]) + Counter(run["end_to_end"]["counts"])
    wrong, calls = run["launches"]["wrong"], run["launches"]["calls"]
    right = "all" if wrong == 0 else f"{calls - wrong} of"
    said = (
        f"GPU kernels, in CUDA C++, have run on a GPU ({run['gpu']}): "
        f"{right} {calls} calls of {run['launches']['kernels']} kernels are right, "
        f"and {counts['passed']} of {counts['passed'] + counts['failed']} GPU tests passed."
    )
    layers = {row["hidden"]: row for row in reversed(results("gpu-peers")) if MODULE.items() <= row.items()}
    ratios = [f"{layers[hidden]['captured_ratio']['median']:.2g} times ({hidden} units)" for hidden in (20, 128, 256)
              if "captured_ratio" in layers.get(hidden, {})]  # fmt: skip
    return f"{said} In a CUDA graph, `nn.GRU` is {', '.join(ratios)} as fast as cuDNN's." if ratios else said


def take(archive: Path) -> None:
    """Put the results of an archive into the folder of benchmarks."""
    with tarfile.open(archive) as packed:
        inside = {member.name: packed.extractfile(member) for member in packed.getmembers()}
        files = {name: file.read() for name, file in inside.items() if file is not None}
    taken = {name: data for name, data in files.items()
             if name.startswith("gpu-") and name.endswith((".json", ".png")) and ".partial." not in name}  # fmt: skip
    for name, data in taken.items():  # all is read before anything is written
        if name.endswith(".json"):
            json.loads(data)
    run = first_run(files) if "summary-first-1.json" in files else None
    for name, data in taken.items():
        (BENCHMARKS / name).write_bytes(data)
    if run is not None:
        slug = re.sub("[^a-z0-9]+", "-", run["gpu"].lower())
        path = BENCHMARKS / "gpu-runs" / f"first-1-{slug}-{run['commit']}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def first_run(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return what the first call says: versions, stages, launches, tests, and by how much results differ."""

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in files[name].decode().splitlines() if line.startswith("{")]

    def counted(name: str) -> dict[str, Any]:
        tests = lines(name)
        return {
            "counts": dict(Counter(test["outcome"] for test in tests)),
            "failed": [{"test": test["test"], "why": test["why"]} for test in tests if test["outcome"] == "failed"],
            "skipped": dict(Counter(test["why"] for test in tests if test["outcome"] == "skipped")),
            "worst": {test["test"].partition("::")[2]: test["measured"]["worst"] for test in tests
                      if "worst" in test.get("measured", {})},
        }  # fmt: skip

    summary, launches = json.loads(files["summary-first-1.json"]), lines("check-launches.jsonl")
    versions: dict[str, Any] = {}
    for line in lines("versions.log"):
        versions |= line
    wrong = sum("error" in launch for launch in launches)
    kernels = len({launch["kernel"] for launch in launches})
    return {
        "run": "first-1", "gpu": versions["environment"]["gpu"]["name"], "commit": summary["commit"],
        "versions": {name: versions[name] for name in ("python", "packages", "environment")},
        "stages": summary["stages"],
        "launches": {"calls": len(launches), "kernels": kernels, "wrong": wrong},
        "tests": counted("check-tests.jsonl"), "end_to_end": counted("end-to-end-tests.jsonl"),
        "memcheck": files.get("check-memcheck.txt", b"").decode().strip(),
    }  # fmt: skip


# ---- the page --------------------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Return the page's tables by name."""
    return {
        "measured": _measured(figures),
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


def say(text: str) -> str:
    """Return a first page with the sentence on what has run."""
    return re.sub(r"<!-- gpu -->.*?<!-- /gpu -->", f"<!-- gpu -->{what_has_run()}<!-- /gpu -->", text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", type=Path, dest="archive", help="take the results of a GPU run from its archive")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    options = parser.parse_args(arguments)
    if options.archive:
        try:
            take(options.archive)
        except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, ValueError) as error:
            parser.error(f"{options.archive} is no archive of a GPU run, or lacks a file: {error}")
    figures, stale = json.loads(FIGURES.read_text(encoding="utf-8")), False
    made: dict[Path, Callable[[str], str]] = {PAGE: lambda text: fill(text, figures), **dict.fromkeys(FIRST, say)}
    for path, make in made.items():
        before = path.read_text(encoding="utf-8")
        after = make(before)
        stale |= before != after
        if not options.check:
            path.write_text(after, encoding="utf-8")
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main())
