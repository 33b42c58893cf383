"""Shipped thresholds, measured: PyTorch or our kernels, and one thread or all.

``python -m benchmarks thresholds`` walks, for each case of `accelerate`'s size rule, through lengths until the kernels
are faster, for all batches and numbers of threads; its note is the table in the form of the source. ``python -m
benchmarks sharing`` does so for a recurrent layer's forward until all threads are faster than one. ``python -m
benchmarks.thresholds RESULT`` writes what either has found to the source. A third choice, `bp` or a scan on a host,
is the fastest algorithm of ``python -m benchmarks scan``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, import_torch
from sparsebp import nn
from sparsebp.core import timing
from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import write_atomically
from sparsebp.core.threads import get_threads
from sparsebp.kernels.host import forward

CELLS = ("RNN", "GRU", "LSTM")
CASES = tuple(
    (cell, in_float64, packed, trains)
    for cell in CELLS for in_float64 in (False, True) for packed in (False, True) for trains in (True, False)
)  # fmt: skip
"""The cases of the size rule, in the order of its table."""
TABLE = re.compile(r"(^FEWEST_STEPS: [^\n]* = \{\n +#[^\n]*\n).*?(^\})", re.DOTALL | re.MULTILINE)
Rule = tuple[tuple[int, int], ...]
"""Pairs of a largest hidden size and the number of steps from which the kernels run a call."""


def measure_thresholds(run: Run) -> Iterator[Row]:
    import_torch()
    for count in run.threads():
        for case in run.settings["cases"]:
            for hidden in run.settings["hidden"]:
                for batch in run.settings["batches"]:
                    if batch > 1 or not case[2]:  # a packed sequence alone is decided as one that is not packed
                        yield measure_thresholds_row(run, tuple(case), hidden, batch) | {"threads": count}
    run.note(f"FEWEST_STEPS:\n{source(rules(run.result['rows']))}")


def measure_thresholds_row(run: Run, case: tuple[str, bool, bool, bool], hidden: int, batch: int) -> Row:
    """Time both ways of a call at growing lengths; return the shortest from which the kernels are faster."""
    cell, in_float64, packed, trains = case

    def sides(length: int) -> dict[str, Any]:
        return {name: call(case, run.settings["features"], hidden, batch, length, name == "ours")
                for name in ("ours", "torch")}  # fmt: skip

    return {"cell": cell, "in_float64": in_float64, "packed": packed, "trains": trains, "hidden": hidden,
            "batch": batch} | first_win(run, sides, "torch")  # fmt: skip


def first_win(run: Run, sides: Callable[[int], dict[str, Any]], other: str) -> Row:
    """Return the times at the shortest length from which ours is faster, twice in a row; else at the last one."""
    found: Row | None = None
    for length in run.settings["lengths"]:
        times = timing.side_by_side(timing.measure(sides(length), **run.rounds))
        wins = times[f"{other}_ratio"]["low"] >= 1
        if wins and found is not None and found["wins"]:
            break  # and so at the next longer one
        if not wins or found is None or not found["wins"]:
            found = {"length": length, "wins": wins} | times
    assert found is not None, "there are lengths"
    return found


def call(case: tuple[str, bool, bool, bool], features: int, hidden: int, batch: int, length: int, ours: bool) -> Any:
    """Return a call of a layer, with its backward if it trains."""
    torch = import_torch()
    from sparsebp.torch import accelerate

    cell, in_float64, packed, trains = case
    dtype = torch.float64 if in_float64 else torch.float32
    torch.manual_seed(0)
    layer = getattr(torch.nn, cell)(features, hidden, dtype=dtype)
    x = torch.randn(length, batch, features, dtype=dtype)
    if packed:
        lengths = torch.linspace(length, 1, batch).round().long()
        x = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    if ours:
        accelerate(layer, faster_only=False)

    def forward() -> Any:
        y = layer(x)[0]
        return y.data if packed else y

    def infer() -> None:
        with torch.no_grad():
            forward()

    gy = torch.randn_like(forward())
    return (lambda: forward().backward(gy)) if trains else infer


def rules(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, bool, bool, bool], Rule]:
    """Return the table: for no batch and no number of threads is a call by the kernels slower."""
    fewest: dict[tuple[str, bool, bool, bool], dict[int, int | None]] = {}
    for row in rows:
        case = row["cell"], row["in_float64"], row["packed"], row["trains"]
        sizes = fewest.setdefault(case, {})
        before = sizes.get(row["hidden"], 0)
        sizes[row["hidden"]] = max(before, row["length"]) if row["wins"] and before is not None else None
    return {case: _pairs(sizes) for case, sizes in fewest.items()}


def _pairs(sizes: Mapping[int, int | None]) -> Rule:
    """Return the pairs for the fewest steps by hidden size: a larger size never needs fewer."""
    pairs: list[tuple[int, int]] = []
    for hidden, steps in sorted(sizes.items()):
        if steps is None:
            break
        least = max(steps, pairs[-1][1] if pairs else 0)
        if pairs and pairs[-1][1] == least:
            pairs.pop()
        pairs.append((hidden, least))
    return tuple(pairs)


def source(table: Mapping[tuple[str, bool, bool, bool], Rule]) -> str:
    """Return the table's lines in the source."""
    return "".join(f"    {case!r}: {rule!r},\n".replace("'", '"') for case, rule in table.items())


def written(module: str, table: Mapping[tuple[str, bool, bool, bool], Rule]) -> str:
    """Return the source of the module with this table."""
    if set(table) != set(CASES):
        raise FileFormatError("A result does not hold the size rule", expected="a row for every case",
                              got=f"{len(table)} of {len(CASES)} cases", remedy="Run it without --quick")  # fmt: skip
    text, count = TABLE.subn(lambda match: match[1] + source({case: table[case] for case in CASES}) + match[2], module)
    if count != 1:
        raise FileFormatError("The module does not hold the size rule", expected="one FEWEST_STEPS", got=count)
    return text


# ---- one thread or all ---------------------------------------------------------------------------------------------

WORK = re.compile(r"^(WORTH_THREADS = )[\d_]+$", re.MULTILINE)


def measure_sharing(run: Run) -> Iterator[Row]:
    for cell, features, hidden in run.settings["layers"]:
        for batch in run.settings["batches"]:
            layer = getattr(nn, cell)(features, hidden, rng=0)
            row = first_win(run, partial(_shared_and_alone, layer, batch), "alone")
            work = 2 * row["length"] * batch * layer.params["weight_hh_l0"].size
            yield {
                "model": f"{cell}({features}, {hidden})",
                "batch": batch,
                "threads": get_threads(),
                "work": work,
            } | row
    if any(row["wins"] for row in run.result["rows"]):
        run.note(f"WORTH_THREADS = {worth(run.result['rows'])}")


def _shared_and_alone(layer: Any, batch: int, length: int) -> dict[str, Callable[[], object]]:
    x = np.random.default_rng(0).standard_normal((length, batch, layer.input_size)).astype(np.float32)

    def from_work_of(least: int) -> None:
        kept, forward.WORTH_THREADS = forward.WORTH_THREADS, least
        try:
            layer.forward(x)
        finally:
            forward.WORTH_THREADS = kept

    return {"ours": partial(from_work_of, 0), "alone": partial(from_work_of, sys.maxsize)}


def worth(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the work from which all threads are faster, the median over the rows where they are, in two digits."""
    found = [row["work"] for row in rows if row["wins"]]
    if not found:
        raise FileFormatError("A result does not hold a threshold", expected="a row in which all threads are faster",
                              got="none", remedy="Run it on a quiet machine of two cores or more")  # fmt: skip
    return int(float(f"{np.median(found):.1e}"))


def main(arguments: list[str] | None = None) -> None:
    from sparsebp.torch import rule

    parser = argparse.ArgumentParser(description="Write what a benchmark of thresholds has found to the source.")
    parser.add_argument("result", type=Path)
    result = harness.load_result(parser.parse_args(arguments).result)
    path = Path(str((forward if result["benchmark"] == "sharing" else rule).__file__))
    text = path.read_text(encoding="utf-8")
    if result["benchmark"] == "sharing":
        text = WORK.sub(lambda match: f"{match[1]}{worth(result['rows']):_}", text)
    else:
        text = written(text, rules(result["rows"]))
    write_atomically(path, text.encode())


SHARING = Benchmark(
    name="sharing",
    title="From how much work a recurrent layer's forward is faster on all threads than on one",
    leaves_out="nothing",
    threads=None,
    settings={"dtype": "float32"},
    sizes={
        "layers": (("RNN", 1, 20), ("GRU", 38, 20), ("LSTM", 38, 20), ("GRU", 38, 64)), "batches": (8, 32),
        "lengths": (4, 8, 16, 32, 64, 128, 256, 512),
    },
    quick={"layers": (("GRU", 1, 3),), "batches": (8,), "lengths": (2, 4)},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 0.3},
    measure=measure_sharing,
    columns=columns(
        numbers={"work": "operations"}, seconds={"alone": "one thread"}, times={"alone_ratio": "over one thread"},
        words={"wins": "faster from here"},
    ),
    short=("model", "batch", "length", "threads", "work", "ours", "alone_ratio", "wins"),
    picture=harness.bars("{model}, B = {batch}, T = {length}", {"alone_ratio": "over one thread"},
                         harness.SPEED_UP, (harness.OURS,), line=1.0),
)  # fmt: skip


THRESHOLDS = Benchmark(
    name="thresholds",
    title="From how many steps accelerate's kernels are faster than PyTorch",
    leaves_out="the optimizer; a call that trains is forward and backward, all gradients of parameters",
    settings={"features": 32},
    sizes={
        "cases": CASES, "hidden": (20, 64, 128, 256, 512), "batches": (1, 16, 128),
        "lengths": (8, 16, 32, 64, 128, 256, 512),
    },
    quick={"cases": CASES[:2], "hidden": (3,), "batches": (2,), "lengths": (2, 4)},
    rounds={"rounds": 9, "least_rounds": 5, "budget": 0.3},
    measure=measure_thresholds,
    columns=columns(
        words={"in_float64": "float64", "packed": "packed", "trains": "trains", "wins": "faster from here"},
        numbers={"hidden": "H"},
        times={"torch_ratio": "over torch.nn"},
    ),
    short=("cell", "in_float64", "packed", "trains", "hidden", "batch", "threads", "length", "wins", "torch_ratio"),
    in_short=lambda row: (
        row["threads"] == 1 and row["trains"] and not (row["in_float64"] or row["packed"]) and row["batch"] == 16
    ),
    picture=harness.bars("{cell}({hidden}), B = {batch}, T = {length}", {"torch_ratio": "over torch.nn"},
                         harness.SPEED_UP, (harness.TORCH,), line=1.0),
)  # fmt: skip


if __name__ == "__main__":
    main()
