"""Sparse products on a fixed pattern, against SciPy and, where installed, MKL and GraphBLAS.

``python -m benchmarks spgemm``. The pattern is planned once, outside of the time that is compared, as in training,
where the pattern belongs to the architecture; the table gives that time too, and in how many products it is earned
back. One row measures a plan and one run together. SciPy and GraphBLAS analyse at every call; MKL is measured both so
and on a structure that it keeps. None of them has a batch of values: a sample of ours stands against one product of
theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.spgemm import sparse_peers
from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, refuse_difference, with_threads
from benchmarks.tools.environment import copy_bandwidth
from benchmarks.tools.matrices import Pair, Targets, pairs
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

TARGET_THREADS = 2
"""The number of threads that targets are stated for; some products have others for one."""

SIDES = {"scipy": "SciPy", "mkl": "MKL", "mkl_numeric": "MKL numeric-only", "graphblas": "GraphBLAS"}


def measure(run: Run) -> Iterator[Row]:
    """Measure every product: shared values, those of a batch, and plan and product together, as asked for."""
    peers = sparse_peers.found(run.note)
    for small in pairs(quick=True):
        plan_pair(small)  # compiles the symbolic phase
    for pair in pairs(run.quick):
        plan, seconds = plan_pair(pair)
        about = {
            "name": pair.name, "a_text": _describe(pair.a), "b_text": _describe(pair.b), "strategy": plan.strategy,
            "products": int(plan.products), "nnz": int(plan.pattern.nnz), "flops": int(plan.flops),
            "plan_seconds": seconds, "index": plan.index_bytes / max(plan.products, 1),
        }  # fmt: skip
        check(pair, plan)
        for count in run.threads(sparse_peers.threads):
            for row in measure_rows(pair, plan, seconds, run.settings["batch"], peers, run.rounds, count):
                if run.quick:
                    row["targets"] = row["met"] = None
                yield about | row | {"threads": count}


def plan_pair(pair: Pair) -> tuple[Any, float]:
    """Plan the product anew; return the plan and the seconds that this took, patterns included."""
    start = time.perf_counter()
    plan = _fresh_plan(pair)
    return plan, time.perf_counter() - start


def _fresh_plan(pair: Pair) -> Any:
    from sparsebp.patterns import SparsityPattern
    from sparsebp.products import plan_product, product

    product._cache.clear()
    return plan_product(SparsityPattern.from_scipy(pair.a), SparsityPattern.from_scipy(pair.b))


def measure_rows(
    pair: Pair,
    plan: Any,
    plan_seconds: float,
    batch: int,
    peers: Sequence[sparse_peers.Prepare],
    rounds: Mapping[str, Any],
    threads: int,
) -> list[Row]:
    """Time one product with shared values, with those of `batch` samples, and together with its plan, as asked for."""
    sides: dict[str, Callable[[], object]] = {}
    for prepare in peers:
        sides |= prepare(pair.a, pair.b)
    rows = []
    for samples, of_two, of_one in ((None, pair.targets, pair.alone_targets), (batch, pair.batch_targets, {})):
        if of_two is None:
            continue
        targets = {1: of_one, TARGET_THREADS: of_two}.get(threads, {})
        a_data, b_data = values(pair, samples)
        out = np.empty((plan.pattern.nnz, *a_data.shape[1:]), np.float32)
        row = compare(partial(plan, a_data, b_data, out=out), sides, rounds, samples or 1, targets)
        row["values"] = "shared" if samples is None else f"B = {samples}"
        row["each"] = row["ours"]["median"] / max(plan.products, 1)
        row["moved"] = bytes_moved(plan, a_data, b_data, out) / (samples or 1)
        row["floor"] = row["moved"] / copy_bandwidth(threads)
        row["floor_times"] = row["ours"]["median"] / row["floor"]
        gained = row["scipy"]["median"] - row["ours"]["median"]
        row["earned_after"] = float(np.ceil(plan_seconds / gained)) if gained > 0 else None
        rows.append(row)
    if pair.plan_targets is not None:
        targets = pair.plan_targets if threads == TARGET_THREADS else {}
        row = compare(lambda: _fresh_plan(pair)(pair.a.data, pair.b.data), sides, rounds, 1, targets)
        rows.append(row | {"values": "shared, plan + one run", "each": None})
    return rows


def values(pair: Pair, batch: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return random values on both operands, (nnz,) or (nnz, batch)."""
    rng = np.random.default_rng(0)
    shape = () if batch is None else (batch,)
    a_data, b_data = (rng.standard_normal((m.nnz, *shape), dtype=np.float32) for m in (pair.a, pair.b))
    return a_data, b_data


def compare(
    ours: Callable[[], object],
    sides: Mapping[str, Callable[[], object]],
    rounds: Mapping[str, Any],
    samples: int,
    targets: Targets,
) -> Row:
    """Time `ours`, which does `samples` products, in turn with one product of every other side."""
    timings = timing.measure({"ours": ours, **sides}, **rounds)
    timings["ours"] = timing.Timing(tuple(seconds / samples for seconds in timings["ours"].seconds))
    row = {"samples": samples} | timing.side_by_side(timings)
    return row | judge(row, targets)


def judge(row: Mapping[str, Any], targets: Targets) -> dict[str, str | None]:
    """Say what a row is to reach, and whether it does; a side that was not measured is named."""
    if not targets:
        return {"targets": None, "met": None}
    measured = {side: row[f"{side}_ratio"]["median"] for side in targets if f"{side}_ratio" in row}
    missed = [SIDES[side] for side, times in measured.items() if times < targets[side]]
    absent = [SIDES[side] for side in targets if side not in measured]
    outcome = report.outcome(missed)
    return {
        "targets": ", ".join(f"≥ {times:g}× {SIDES[side]}" for side, times in targets.items()),
        "met": outcome if missed or not absent else f"{outcome}; {', '.join(absent)} not measured",
    }


def bytes_moved(plan: Any, *arrays: np.ndarray) -> int:
    """Return the bytes of every array that a call of the plan reads or writes, each counted once."""
    read = [array for operand in plan.operands(np) for array in (operand if isinstance(operand, tuple) else (operand,))]
    return sum(array.nbytes for array in (*arrays, *read) if isinstance(array, np.ndarray))


def check(pair: Pair, plan: Any) -> None:
    """Compare the first of two samples with SciPy before anything is timed."""
    import scipy.sparse as sp

    a_data, b_data = values(pair, 2)
    ours = sp.csr_array((plan(a_data, b_data)[:, 0], plan.pattern.indices, plan.pattern.indptr), plan.pattern.shape)
    expected = _with(pair.a, a_data[:, 0]) @ _with(pair.b, b_data[:, 0])
    scale = float(np.abs(expected.data).max()) if expected.nnz else 1.0
    difference = float(np.abs((ours - expected).data).max(initial=0.0)) / scale
    refuse_difference(f"The product {pair.name}", "SciPy", difference)


def _with(matrix: Any, data: np.ndarray) -> Any:
    import scipy.sparse as sp

    return sp.csr_array((np.ascontiguousarray(data), matrix.indices, matrix.indptr), shape=matrix.shape)


def _describe(matrix: Any) -> str:
    return f"{matrix.shape[0]} × {matrix.shape[1]}, nnz {tables.count(matrix.nnz)}"


def picture(result: Result) -> Any:
    """Draw the speed-up over SciPy, one bar a product and kind of values, for the largest number of threads."""
    threads, rows = with_threads(result, max)
    labels = [f"{row['name']}, {row['values']}" for row in rows]
    xlabel = f"times faster than SciPy on one thread (ours: {threads})"
    drawing, ax = pictures.bar_chart(labels, [], xlabel, each=0.4)
    middle, low, high = (np.array([row["scipy_ratio"][key] for row in rows]) for key in ("median", "low", "high"))
    shared, each = "#93c5fd", "#1e40af"
    colours = [shared if row["samples"] == 1 else each for row in rows]
    ax.barh(range(len(rows)), middle, color=colours, xerr=[middle - low, high - middle], error_kw={"elinewidth": 1})
    ax.axvline(1, color="black", linewidth=0.8)
    for colour, label in ((shared, "values shared"), (each, "values of each of 16 samples, time of one")):
        ax.barh([0], [0], color=colour, label=label)
    pictures.legend_below(drawing)
    return drawing


BENCHMARK = Benchmark(
    name="spgemm",
    title="Sparse products on a fixed pattern, float32: values shared, or of each of {batch} samples (time of one)",
    leaves_out="our symbolic phase but for the rows that name it (column 'plan once'); that of MKL on a kept "
    "structure; the other sides analyse at every call",
    settings={"dtype": "float32"},
    sizes={"batch": 16},
    quick={"batch": 2},
    rounds={"rounds": 15, "budget": 5.0},
    measure=measure,
    columns=(
        Column("product", "name", number=False),
        Column("A", "a_text", number=False),
        Column("B", "b_text", number=False),
        Column("values", "values", number=False),
        Column("threads", "threads"),
        Column("strategy", "strategy", number=False),
        Column("products", "products", tables.count),
        Column("plan once", "plan_seconds", tables.seconds),
        Column("sparsebp", "ours", tables.seconds),
        Column("SciPy", "scipy", tables.seconds),
        *(Column(f"over {side}", f"{name}_ratio", tables.times) for name, side in SIDES.items()),
        Column("targets", "targets", number=False),
        Column("outcome", "met", number=False),
        Column("a product", "each", tables.seconds),
        Column("index bytes a product", "index", lambda value: f"{value:.1f}"),
        Column("bytes moved", "moved", tables.size),
        Column("at copy speed", "floor", tables.seconds),
        Column("× copy floor", "floor_times", tables.times),
        Column("plan earned back after", "earned_after", lambda calls: f"{calls:.0f} calls"),
    ),
    tables={
        "Operands and plans": ("name", "a_text", "b_text", "strategy", "products", "index", "plan_seconds"),
        "Time, and whether the target is met": ("name", "values", "threads", "ours", "each", "scipy", "targets", "met"),
        "Ratios": ("name", "values", "threads", *(f"{side}_ratio" for side in SIDES)),
        "Beside a copy of as many bytes": (
            "name",
            "values",
            "threads",
            "moved",
            "floor",
            "floor_times",
            "earned_after",
        ),
    },
    short=("name", "values", "ours", "scipy_ratio", "mkl_numeric_ratio", "targets", "met", "floor_times"),
    in_short=lambda row: row["targets"] is not None and row["threads"] == TARGET_THREADS,
    picture=picture,
)
