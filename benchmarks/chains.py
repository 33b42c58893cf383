"""The scan of a chain of sparse matrices, against a loop over SciPy's products.

``python -m benchmarks chains``. ``plan_scan(patterns, "linear")`` is planned once; a call checks fifty arrays of
values, multiplies, and returns fifty new vectors, as does the loop ``y = m @ y``. SciPy multiplies on one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, refuse_difference, with_threads
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

SIZES = ((50, 0.1), (200, 0.05), (1000, 0.01))
"""Rows and columns of every matrix, and its share of entries."""
TARGET = 2.0


def measure(run: Run) -> Iterator[Row]:
    """Measure every size, for one vector and for a batch."""
    for count in run.threads():
        for size, density in SIZES:
            matrices = random_matrices(run.settings["length"], size, density)
            for batch in (None, run.settings["batch"]):
                yield measure_row(matrices, batch, run.rounds) | {"threads": count}


def random_matrices(length: int, size: int, density: float) -> list[Any]:
    """Return SciPy matrices whose products neither grow nor vanish, the same ones at every call."""
    from scipy.sparse import random_array

    rng = np.random.default_rng(size)
    found = []
    for _ in range(length):
        matrix = random_array((size, size), density=density, format="csr", rng=rng, dtype=np.float32)
        matrix.sum_duplicates()
        matrix.data[:] = rng.standard_normal(matrix.nnz) / np.sqrt(size * density)
        found.append(matrix)
    return found


def measure_row(matrices: list[Any], batch: int | None, rounds: Any) -> Row:
    """Time both sides in turn, after comparing what they return."""
    from sparsebp.patterns import SparsityPattern
    from sparsebp.scan import plan_scan

    size, values = matrices[0].shape[0], [m.data for m in matrices]
    plan = plan_scan([SparsityPattern.from_scipy(m) for m in matrices], "linear", batch=batch or 1)
    shape = (size,) if batch is None else (size, batch)
    g = np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def loop() -> list[Any]:
        found, y = [], g
        for matrix in matrices:
            y = matrix @ y
            found.append(y)
        return found

    pairs = zip(plan(g, values), loop(), strict=True)
    worst = max(float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in pairs)
    refuse_difference(f"{len(matrices)} matrices of {size} rows", "SciPy", worst)
    timings = timing.measure({"ours": lambda: plan(g, values), "scipy": loop}, **rounds)
    row = timing.side_by_side(timings)
    vectors = "one" if batch is None else f"{batch}"
    missed = [] if row["scipy_ratio"]["median"] >= TARGET else [f"≥ {TARGET:g}×"]
    matrix = f"{size} × {size}, {sum(m.nnz for m in matrices) // len(matrices)} entries"
    return {"matrix": matrix, "vectors": vectors, "target": f"≥ {TARGET:g}× SciPy", "met": report.outcome(missed)} | row


def picture(result: Result) -> Any:
    """Draw how many times slower the loop is, a bar a row, for the least number of threads."""
    threads, rows = with_threads(result, min)
    drawing, axes = pictures.figure(1, 1, width=7.0, height=3.5)
    ax = axes[0, 0]
    names = [f"{row['matrix']}, {row['vectors']}" for row in rows]
    ax.barh(names, [row["scipy_ratio"]["median"] for row in rows], color="#1e40af", label="measured")
    ax.axvline(TARGET, color="black", linewidth=1, label=f"target, {TARGET:g}×")
    pictures.legend_below(drawing)
    ax.set_xlabel(f"SciPy's time over ours, {threads}")
    return drawing


BENCHMARK = Benchmark(
    name="chains",
    title="A chain of {length} random sparse matrices times vectors: the linear scan, float32, CPU",
    leaves_out="planning, once for the patterns",
    settings={"dtype": "float32", "target": TARGET},
    sizes={"length": 50, "batch": 16},
    quick={"length": 3, "batch": 2},
    rounds={"rounds": 25, "least_rounds": 5, "budget": 2.0},
    measure=measure,
    columns=(
        Column("matrices", "matrix", number=False),
        Column("vectors", "vectors"),
        Column("threads", "threads"),
        Column("sparsebp", "ours", tables.seconds),
        Column("SciPy", "scipy", tables.seconds),
        Column("over SciPy", "scipy_ratio", tables.times),
        Column("target", "target", number=False),
        Column("outcome", "met", number=False),
    ),
    tables={"The scan and the loop": ("matrix", "vectors", "threads", "ours", "scipy", "scipy_ratio", "target", "met")},
    short=("matrix", "vectors", "threads", "ours", "scipy", "scipy_ratio", "met"),
    picture=picture,
)
