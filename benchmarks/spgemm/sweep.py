"""Sparse products on structures that are drawn at random, from tiny to large: is a plan ever slower than SciPy?

``python -m benchmarks spgemm-sweep``. Ten families of structures, of each as many with sizes, lengths of rows and
densities drawn from wide ranges by a fixed seed. A row is a family; what is judged is the slowest of its structures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.spgemm import products
from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, with_threads
from benchmarks.tools.matrices import Pair
from benchmarks.tools.meshes import sorted_csr
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

MOST = 4_000_000
"""Multiplications of a product at most; a structure with more is drawn again."""


def measure(run: Run) -> Iterator[Row]:
    """Measure the structures of every family."""
    ratios: dict[int, list[tuple[float, str]]] = {}
    for number, (family, draw) in enumerate(FAMILIES.items()):
        drawn = [_drawn(family, draw, (number, i), run.settings["largest"]) for i in range(run.settings["each"])]
        plans = [products.plan_pair(pair)[0] for pair in drawn]
        for pair, plan in zip(drawn, plans, strict=True):
            products.check(pair, plan)
        for count in run.threads():
            found = [(_ratio(pair, plan, run), pair, plan) for pair, plan in zip(drawn, plans, strict=True)]
            found.sort(key=lambda one: one[0])
            worst, pair, plan = found[0]
            about = f"{_sizes(pair)}, {tables.count(plan.products)} products, {plan.strategy}"
            ratios.setdefault(count, []).extend((ratio, f"{family}: {_sizes(p)}") for ratio, p, _ in found)
            yield {
                "family": family, "count": len(found), "threads": count, "slowest": worst, "slowest_text": about,
                "median": float(np.median([ratio for ratio, _, _ in found])), "fastest": found[-1][0],
                "strategies": _counted([plan.strategy for plan in plans]),
                "met": report.outcome([f"{sum(r < 1 for r, _, _ in found)} slower"] if worst < 1 else []),
            }  # fmt: skip
    for count, all_of in ratios.items():
        run.note(_summary(count, sorted(all_of)))


def _summary(threads: int, ratios: list[tuple[float, str]]) -> str:
    slower = sum(ratio < 1 for ratio, _ in ratios)
    low, middle = np.quantile([ratio for ratio, _ in ratios], (0.1, 0.5))
    ten = "; ".join(f"{ratio:.2f}× {about}" for ratio, about in ratios[:10])
    return (f"{tables.in_threads(threads)}: {slower or 'none'} of {len(ratios)} structures slower than SciPy; median "
            f"{middle:.1f}×, a tenth below {low:.1f}×. The slowest: {ten}")  # fmt: skip


def _ratio(pair: Pair, plan: Any, run: Run) -> float:
    """Return how many times faster than SciPy's product a call of the plan is."""
    a_data, b_data = products.values(pair, None)
    out = np.empty(plan.pattern.nnz, np.float32)
    sides: dict[str, Callable[[], object]] = {
        "ours": partial(plan, a_data, b_data, out=out),
        "scipy": lambda: pair.a @ pair.b,
    }
    times = timing.measure(sides, **run.rounds)
    return timing.ratio(times["scipy"], times["ours"])["median"]


def _sizes(pair: Pair) -> str:
    (m, k), n = pair.a.shape, pair.b.shape[1]
    return f"{m} × {k} × {n}, nnz {tables.count(pair.a.nnz)} and {tables.count(pair.b.nnz)}"


def _counted(names: list[str]) -> str:
    return ", ".join(f"{name} {names.count(name)}" for name in sorted(set(names), key=names.count, reverse=True))


# ---- structures ----------------------------------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, int], tuple[Any, Any]]
"""Takes a source of random numbers and the largest number of rows; returns A and B."""


def _drawn(family: str, draw: Draw, seed: tuple[int, int], largest: int) -> Pair:
    rng = np.random.default_rng(seed)
    while True:
        a, b = (sorted_csr(matrix) for matrix in draw(rng, largest))
        products = int(np.diff(b.indptr)[a.indices].sum())
        if 0 < products <= MOST:
            return Pair(f"{family} {seed[1]}", a, b, {})


def _size(rng: np.random.Generator, low: int, high: int) -> int:
    """Return a number from low to high whose logarithm is uniform."""
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 0.99))))


def _sizes_of(rng: np.random.Generator, largest: int) -> tuple[int, int, int]:
    """Return m, k and n, of one order."""
    m = _size(rng, 10, largest)
    return m, _size(rng, max(m // 4, 5), min(4 * m, largest)), _size(rng, max(m // 4, 5), min(4 * m, largest))


def _of_lengths(rng: np.random.Generator, lengths: np.ndarray, columns: int) -> Any:
    """Return a matrix whose rows have about these lengths, with columns anywhere."""
    import scipy.sparse as sp

    rows = np.repeat(np.arange(len(lengths)), np.clip(lengths, 0, columns))
    entries = np.ones(len(rows), np.float32)
    return sp.coo_array((entries, (rows, rng.integers(0, columns, len(rows)))), shape=(len(lengths), columns))


def _even(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    m, k, n = _sizes_of(rng, largest)
    return tuple(_of_lengths(rng, np.full(r, _size(rng, 1, 60)), c) for r, c in ((m, k), (k, n)))


def _uneven(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    """Geometric lengths, many rows empty."""
    m, k, n = _sizes_of(rng, largest)
    return tuple(_of_lengths(rng, rng.geometric(1 / _size(rng, 1, 30), r) - 1, c) for r, c in ((m, k), (k, n)))


def _power_law(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    m, k, n = _sizes_of(rng, largest)
    exponent = rng.uniform(1.6, 3)
    return tuple(_of_lengths(rng, np.minimum(rng.zipf(exponent, r), c), c) for r, c in ((m, k), (k, n)))


def _band(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    """Diagonals, some near the main one and some far."""
    import scipy.sparse as sp

    n = _size(rng, 10, largest)
    matrices = []
    for _ in range(2):
        near, far = rng.integers(-4, 5, _size(rng, 1, 9)), rng.integers(-n + 1, n, _size(rng, 1, 6))
        offsets = np.unique(np.clip(np.concatenate((near, far)), -n + 1, n - 1))
        matrices.append(sp.diags_array(np.ones((len(offsets), n)), offsets=offsets, shape=(n, n)))
    return matrices[0], matrices[1]


def _stencil(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    """Neighbours on a grid of one to three dimensions, the same for all points."""
    import scipy.sparse as sp

    shape = rng.integers(3, int(largest ** (1 / (dimensions := int(rng.integers(1, 4))))) + 4, dimensions)
    points = np.indices(tuple(shape.tolist())).reshape(dimensions, -1)
    rows, columns = [], []
    for step in np.unique(rng.integers(-2, 3, (_size(rng, 2, 20), dimensions)), axis=0):
        moved = points + step[:, None]
        inside = ((moved >= 0) & (moved < shape[:, None])).all(axis=0)
        rows.append(np.flatnonzero(inside))
        columns.append(np.ravel_multi_index(tuple(moved[:, inside]), tuple(shape)))
    row, n = np.concatenate(rows), points.shape[1]
    matrix = sp.coo_array((np.ones(len(row)), (row, np.concatenate(columns))), shape=(n, n))
    return matrix, matrix


def _blocks(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    """Dense blocks of one size, up to 6 × 6, in uneven rows."""
    import scipy.sparse as sp

    m, k, n = rng.integers(1, 7, 3)
    left, right = _uneven(rng, max(largest // 6, 12))
    return sp.kron(left, np.ones((m, k))), sp.kron(right, np.ones((k, n)))


def _runs(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    """A few runs of neighbouring columns a row."""
    import scipy.sparse as sp

    m, k, n = _sizes_of(rng, largest)
    count, length = _size(rng, 1, 4), _size(rng, 2, 40)
    starts = rng.integers(0, n, (k, count, 1)) + np.arange(length)
    rows = np.broadcast_to(np.arange(k)[:, None, None], starts.shape)
    inside = starts < n
    right = sp.coo_array((np.ones(inside.sum()), (rows[inside], starts[inside])), shape=(k, n))
    return _of_lengths(rng, np.full(m, _size(rng, 1, 30)), k), right


def _coarsening(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    """A sparse matrix times a tall one with one to three entries a row near the diagonal, or the way back."""
    import scipy.sparse as sp

    n = _size(rng, 20, largest)
    ratio, each = int(rng.integers(2, 20)), int(rng.integers(1, 4))
    coarse = max(n // ratio, 1)
    columns = np.clip(np.arange(n)[:, None] // ratio + np.arange(each) - each // 2, 0, coarse - 1)
    entries = np.ones(columns.size)
    down = sp.csr_array((entries, columns.ravel(), np.arange(n + 1) * each), shape=(n, coarse))
    offsets = np.unique(np.clip((-int(n**0.5), -1, 0, 1, int(n**0.5)), 1 - n, n - 1))
    matrix = sp.diags_array(np.ones((len(offsets), n)), offsets=offsets, shape=(n, n))
    return (matrix, down) if rng.random() < 0.5 else (down.T, sorted_csr(matrix) @ sorted_csr(down))


def _gram(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    """The normal equations of a tall matrix."""
    rows, columns = _size(rng, 50, 4 * largest), _size(rng, 5, largest // 4)
    tall = _of_lengths(rng, rng.poisson(_size(rng, 1, 12), rows), columns)
    return tall.T, tall


def _arrow(rng: np.random.Generator, largest: int) -> tuple[Any, Any]:
    """Short rows, and a few that are nearly full, in A or in B."""
    m, k, n = _sizes_of(rng, largest)
    matrices = []
    for rows, columns in ((m, k), (k, n)):
        lengths = np.full(rows, _size(rng, 1, 8))
        lengths[rng.integers(0, rows, int(rng.integers(0, 4)))] = columns // 2
        matrices.append(_of_lengths(rng, lengths, columns))
    return matrices[0], matrices[1]


FAMILIES: dict[str, Draw] = {
    "rows of one length": _even, "rows of many lengths": _uneven, "power law": _power_law, "diagonals": _band,
    "stencils": _stencil, "blocks": _blocks, "runs": _runs, "coarsening": _coarsening, "normal equations": _gram,
    "a few full rows": _arrow,
}  # fmt: skip


def picture(result: Result) -> Any:
    """Draw the slowest, the median and the fastest of every family, for the largest number of threads."""
    threads, rows = with_threads(result, max)
    drawing, ax = pictures.bar_chart(
        [row["family"] for row in rows], [], f"times faster than SciPy ({threads})", each=0.4
    )
    low, middle, high = (np.array([row[key] for row in rows]) for key in ("slowest", "median", "fastest"))
    ax.barh(range(len(rows)), middle, color="#1e40af", label="median")
    spread = [middle - low, high - middle]
    ax.errorbar(
        middle, range(len(rows)), xerr=spread, fmt="none", ecolor="black", elinewidth=1, label="slowest to fastest"
    )
    ax.axvline(1, color="#b91c1c", linewidth=1, label="SciPy")
    pictures.legend_below(drawing, columns=3)
    return drawing


BENCHMARK = Benchmark(
    name="spgemm-sweep",
    title="Sparse products on structures drawn at random, {each} a family, float32: times faster than SciPy",
    leaves_out="our symbolic phase",
    settings={"dtype": "float32"},
    sizes={"each": 20, "largest": 20_000},
    quick={"each": 1, "largest": 60},
    rounds={"rounds": 5, "least_rounds": 3, "warmup": 1, "budget": 0.5},
    measure=measure,
    columns=(
        Column("structures", "family", number=False),
        Column("how many", "count"),
        Column("threads", "threads"),
        Column("slowest", "slowest", tables.times),
        Column("median", "median", tables.times),
        Column("fastest", "fastest", tables.times),
        Column("never below SciPy", "met", number=False),
        Column("strategies", "strategies", number=False),
        Column("the slowest one", "slowest_text", number=False),
    ),
    tables={
        "Times faster than SciPy": ("family", "count", "threads", "slowest", "median", "fastest", "met"),
        "Structures": ("family", "threads", "strategies", "slowest_text"),
    },
    short=("family", "threads", "slowest", "median", "fastest", "met"),
    picture=picture,
)
