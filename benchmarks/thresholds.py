"""Shipped thresholds, measured: PyTorch or our kernels, and one thread or all.

``python -m benchmarks thresholds`` times both ways of calls that are drawn from a grid, for each case of `accelerate`'s
size rule; ``python -m benchmarks choices`` does so for calls outside the grid, and says how the rule chooses. ``python
-m benchmarks sharing`` walks through lengths until all threads are faster than one in a recurrent layer's forward.
``python -m benchmarks.thresholds RESULT`` writes what the first or the last has found to the source. A third choice,
`bp` or a scan on a host, is the fastest algorithm of ``python -m benchmarks scan``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
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
from sparsebp.kernels.host.rnn import forward
from sparsebp.torch import rule
from sparsebp.torch.one_step import is_faster
from sparsebp.torch.rule import GATES, Case, Sizes, predicted

CELLS = ("RNN", "GRU", "LSTM")
CASES = tuple(
    (cell, in_float64, packed, trains)
    for cell in CELLS for in_float64 in (False, True) for packed in (False, True) for trains in (True, False)
)  # fmt: skip
"""The cases of the size rule but for the threads, in the order of its table."""
TABLE = re.compile(r"(^COSTS: [^\n]* = \{\n +#[^\n]*\n).*?(^\})", re.DOTALL | re.MULTILINE)
Costs = tuple[tuple[float, ...], tuple[float, ...]]
"""Nanoseconds for each term of a call's time: by the kernels, and by PyTorch."""
Key = tuple[str, bool, bool, bool, bool]
CLOSE = 0.97
"""Share of the faster way's speed that the rule's choice should reach nearly always."""


def measure_thresholds(run: Run) -> Iterator[Row]:
    """Time both ways of calls with sizes of a grid."""
    yield from _drawn_rows(run, lambda rng: {name: int(rng.choice(run.settings[name])) for name in SIZES})


SIZES = ("features", "hidden", "batch", "length")


def measure_choices(run: Run) -> Iterator[Row]:
    """Time both ways of calls of any sizes, and say which way the rule takes."""

    def draw(rng: np.random.Generator) -> dict[str, int]:
        spans = {name: np.log(run.settings[name]) for name in SIZES}
        return {name: int(np.exp(rng.uniform(low, high)).round()) for name, (low, high) in spans.items()}

    for row in _drawn_rows(run, draw):
        yield row | chosen(row)
    shares = [row["of_best"] for row in run.result["rows"] if "of_best" in row]
    if shares:
        run.note(f"{np.mean(np.array(shares) >= CLOSE):.1%} of {len(shares)} calls go within 3 % of the faster way's "
                 f"speed, the worst at {min(shares):.2f} of it.")  # fmt: skip


def _drawn_rows(run: Run, draw: Callable[[np.random.Generator], dict[str, int]]) -> Iterator[Row]:
    """Yield a row for each of the calls that are drawn for each case."""
    import_torch()
    for count in run.threads():
        rng = np.random.default_rng(count)
        for case, (calls, least, most) in product(run.settings["cases"], run.settings["calls"]):
            done = 0
            while done < calls:
                cell, in_float64, packed, trains = case
                of_case = {"cell": cell, "in_float64": in_float64, "packed": packed, "trains": trains}
                row: Row = of_case | draw(rng) | {"threads": count}
                if not least <= _work(row) < most or _is_decided_unpacked(row):
                    continue
                done += 1
                yield row | measure_row(run, row)


def measure_row(run: Run, row: Row) -> Row:
    case = row["cell"], row["in_float64"], row["packed"], row["trains"]
    sides = {
        name: call(case, row["features"], row["hidden"], row["batch"], row["length"], name == "ours")
        for name in ("ours", "torch")
    }
    return timing.side_by_side(timing.measure(sides, **run.rounds))


def _work(row: Row) -> int:
    """Return the multiply-adds of a call, as if in float32."""
    weights = GATES[row["cell"]] * row["hidden"] * (row["features"] + row["hidden"])
    return int(row["length"] * row["batch"] * weights * (3 if row["trains"] else 1) * (2 if row["in_float64"] else 1))


def _is_decided_unpacked(row: Row) -> bool:
    return bool(row["packed"] and row["batch"] == 1 and row["cell"] == "LSTM" and not row["in_float64"])


def sizes_of(row: Mapping[str, Any]) -> tuple[Case, Sizes]:
    """Return the case and the sizes that the rule sees."""
    case = Case(row["cell"], row["in_float64"], row["packed"], row["trains"], row["threads"] > 1)
    batch, length = row["batch"], row["length"]
    rows = int(lengths_of(length, batch).sum()) if row["packed"] else length * batch
    return case, Sizes(row["features"], row["hidden"], batch, length, rows)


def chosen(row: Row) -> Row:
    """Return the way that the rule takes, and its speed as a share of the faster way's."""
    ours, torchs = predicted(*sizes_of(row))
    taken, ratio = _is_few_steps(row) or ours < torchs, row["torch_ratio"]["median"]
    share = min(ratio, 1.0) if taken else min(1 / ratio, 1.0)
    return {"way": "kernels" if taken else "torch.nn", "of_best": float(share)}


def _is_few_steps(row: Mapping[str, Any]) -> bool:
    """Whether `one_step` runs the call, whatever the size rule says."""
    return not row["packed"] and is_faster(row["length"], row["batch"], row["features"], row["hidden"])


def lengths_of(length: int, batch: int) -> np.ndarray:
    """Return the lengths of the sequences of a packed batch: all kinds, the longest first."""
    return np.linspace(length, 1, batch).round().astype(np.int64) if batch > 1 else np.array([length])


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
        x = torch.nn.utils.rnn.pack_padded_sequence(x, torch.from_numpy(lengths_of(length, batch)))
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


def fitted(rows: Iterable[Mapping[str, Any]]) -> dict[Key, Costs]:
    """Return the table: the costs, none below zero, with the least relative errors of the times of each case."""
    cases: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "ours" in row and not _is_few_steps(row):
            cases.setdefault(sizes_of(row)[0], []).append(row)
    return {key: (_costs(found, "ours"), _costs(found, "torch")) for key, found in cases.items()}


def _costs(rows: Sequence[Mapping[str, Any]], side: str) -> tuple[float, ...]:
    """Fit one side's costs; rows where the two sides are far apart, and a choice is easy, weigh less."""
    from scipy.optimize import nnls

    terms: np.ndarray = np.array([sizes.terms(GATES[case.cell]) for case, sizes in map(sizes_of, rows)], float)
    times: np.ndarray = 1e9 * np.array([row[side]["median"] for row in rows], float)
    ratios: np.ndarray = np.array([row["torch_ratio"]["median"] for row in rows], float)
    weights = 1 / (1 + np.abs(np.log(ratios)) / NEAR)
    known, costs = times, np.zeros(terms.shape[1])
    for _ in range(PASSES):  # an error counts as much above as below: it is relative to what both numbers have between
        between = np.sqrt(known * times)
        relative = terms / between[:, None] * weights[:, None]
        scale = relative.max(axis=0)
        costs = nnls(relative / scale, weights * times / between)[0] / scale
        known = np.maximum(terms @ costs, times / 50)
    return tuple(float(f"{cost:.3g}") for cost in costs)


PASSES = 3
NEAR = 0.3
"""Logarithm of the ratio of two times at which a row weighs half."""


def source(table: Mapping[Key, Costs]) -> str:
    """Return the table's lines in the source."""
    return "".join(
        f"    {key!r}: (\n        {ours!r},\n        {torchs!r},\n    ),\n".replace("'", '"')
        for key, (ours, torchs) in table.items()
    )


def written(module: str, table: Mapping[Key, Costs]) -> str:
    """Return the source of the module with this table."""
    keys = [(*case, threaded) for case in CASES for threaded in (False, True)]
    if set(table) != set(keys):
        raise FileFormatError("A result does not hold the size rule", expected="rows for every case",
                              got=f"{len(table)} of {len(keys)} cases",
                              remedy="Run it without --quick, on a machine of two cores or more")  # fmt: skip
    text, count = TABLE.subn(lambda match: match[1] + source({key: table[key] for key in keys}) + match[2], module)
    if count != 1:
        raise FileFormatError("The module does not hold the size rule", expected="one COSTS", got=count)
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
    parser = argparse.ArgumentParser(description="Write what a benchmark of thresholds has found to the source.")
    parser.add_argument("result", type=Path)
    result = harness.load_result(parser.parse_args(arguments).result)
    path = Path(str((forward if result["benchmark"] == "sharing" else rule).__file__))
    text = path.read_text(encoding="utf-8")
    if result["benchmark"] == "sharing":
        text = WORK.sub(lambda match: f"{match[1]}{worth(result['rows']):_}", text)
    else:
        text = written(text, fitted(result["rows"]))
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


GRID = {
    "cases": CASES, "calls": ((48, 0, 2e8), (8, 2e8, 1e9)),
    "hidden": (8, 20, 32, 48, 64, 96, 100, 127, 128, 129, 192, 256, 384, 512),
    "features": (1, 8, 16, 32, 64, 128, 300, 512), "batch": (1, 2, 3, 4, 8, 16, 32, 64, 128),
    "length": (1, 2, 4, 8, 16, 32, 64, 100, 200, 400),
}  # fmt: skip


def _is_plain(row: Row) -> bool:
    return row["threads"] == 1 and row["trains"] and not (row["in_float64"] or row["packed"])


WORDS = {"in_float64": "float64", "packed": "packed", "trains": "trains"}

# calls: how many, and between which numbers of multiply-adds
THRESHOLDS = Benchmark(
    name="thresholds",
    title="Both ways of an accelerated call, with sizes drawn from a grid",
    leaves_out="the optimizer; a call that trains is forward and backward, all gradients of parameters",
    sizes=GRID,
    quick={"cases": CASES[:2], "calls": ((1, 0, 2e8),), "hidden": (3,), "features": (2,), "batch": (2,),
           "length": (2, 4)},
    rounds={"rounds": 3, "least_rounds": 3, "warmup": 1},
    measure=measure_thresholds,
    columns=columns(words=WORDS, numbers={"features": "I", "hidden": "H"}, times={"torch_ratio": "over torch.nn"}),
    short=("cell", *SIZES, "torch_ratio"),
    in_short=lambda row: _is_plain(row) and row["batch"] == 16 and row["hidden"] in (64, 128, 256),
    picture=harness.bars("{cell}({features}, {hidden}), B = {batch}, T = {length}", {"torch_ratio": "over torch.nn"},
                         harness.SPEED_UP, (harness.TORCH,), line=1.0),
)  # fmt: skip

CHOICES = Benchmark(
    name="choices",
    title="The way that accelerate's rule takes, for calls of any sizes",
    leaves_out=THRESHOLDS.leaves_out,
    sizes={
        "cases": CASES, "calls": ((5, 0, 2e8), (2, 2e8, 1e9)), "hidden": (4, 512), "features": (1, 512),
        "batch": (1, 128), "length": (1, 400),
    },
    quick={"cases": CASES[:2], "calls": ((1, 0, 2e8),), "hidden": (3, 5), "features": (1, 2), "batch": (1, 2),
           "length": (2, 4)},
    rounds={"rounds": 9, "least_rounds": 5, "budget": 0.3},
    measure=measure_choices,
    columns=columns(
        words=WORDS | {"way": "way"}, numbers={"features": "I", "hidden": "H"},
        times={"torch_ratio": "over torch.nn", "of_best": "of the faster way"},
    ),
    short=("cell", *SIZES, "torch_ratio", "way", "of_best"),
    in_short=lambda row: _is_plain(row) and row["cell"] != "RNN",
    picture=harness.bars("{cell}({features}, {hidden}), B = {batch}, T = {length}", {"of_best": "of the faster way"},
                         harness.SPEED_UP, (harness.TORCH,), line=1.0),
)  # fmt: skip


if __name__ == "__main__":
    main()
