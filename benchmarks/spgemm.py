"""Sparse products on a fixed pattern, against SciPy and, where installed, MKL and GraphBLAS.

``python -m benchmarks spgemm``. The pattern is planned once, outside of the time that is compared, as in training,
where the pattern belongs to the architecture; the table gives that time too, and in how many products it is earned
back. One row measures a plan and one run together. SciPy and GraphBLAS analyse at every call; MKL is measured both so
and on a structure that it keeps. None of them has a batch of values: a sample of ours stands against one product of
theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Overview, Row, Run, columns, copy_bandwidth, refuse_difference
from benchmarks.workloads import Pair, Targets, pairs, sorted_csr
from sparsebp.core import tables, timing
from sparsebp.core.errors import MissingDependencyError, SparseBPError
from sparsebp.patterns import SparsityPattern
from sparsebp.products import plan_product, product

# Sparse products of Intel MKL through its C interface: anew each time, or values alone on a structure that it keeps.
#
# MKL's inspector-executor routines take the structure and the values apart: ``mkl_sparse_sp2m`` with
# ``SPARSE_STAGE_FULL_MULT_NO_VAL`` makes the structure of C, and ``SPARSE_STAGE_FINALIZE_MULT`` then computes values
# into it, any number of times. That second stage does the same as a call of our plan.

_GENERAL, _AS_IT_IS = 20, 10  # SPARSE_MATRIX_TYPE_GENERAL, SPARSE_OPERATION_NON_TRANSPOSE
_FULL, _VALUES, _STRUCTURE = 90, 92, 93  # SPARSE_STAGE_FULL_MULT, _FINALIZE_MULT, _FULL_MULT_NO_VAL


class _Description(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("mode", ctypes.c_int), ("diagonal", ctypes.c_int))


class MklProduct:
    """The product of two CSR arrays of float32 with 4-byte indices, in MKL."""

    def __init__(self, a: Any, b: Any) -> None:
        library = load()
        if library is None:
            raise MissingDependencyError(
                "MKL is not installed, and this measures it", remedy="Install the extra: pip install 'sparsebp[peers]'"
            )
        self._mkl = library
        self.shape = (a.shape[0], b.shape[1])
        self._kept: list[Any] = []  # MKL reads the caller's arrays
        self._handles = [self._matrix(a), self._matrix(b), ctypes.c_void_p()]
        self._multiply(_STRUCTURE, self._handles[2])
        self.values()

    def fresh(self) -> None:
        """Multiply as if for the first time, structure and values, and drop the result."""
        result = ctypes.c_void_p()
        self._multiply(_FULL, result)
        self._mkl.mkl_sparse_destroy(result)

    def values(self) -> None:
        """Compute the values into the kept structure."""
        self._multiply(_VALUES, self._handles[2])

    def result(self) -> Any:
        """Return a copy of the kept product as a SciPy CSR array (columns as MKL left them, unsorted)."""
        import scipy.sparse as sp

        numbers = [ctypes.c_int() for _ in range(3)]
        begin, end, columns, values = arrays = [ctypes.c_void_p() for _ in range(4)]
        pointers = [ctypes.byref(item) for item in (*numbers, *arrays)]
        self._check(self._mkl.mkl_sparse_s_export_csr(self._handles[2], *pointers))
        rows = self.shape[0]
        indptr = np.concatenate(([0], _array(end, ctypes.c_int, rows))).astype(np.int32)
        if not np.array_equal(indptr[:-1], _array(begin, ctypes.c_int, rows)):
            raise SparseBPError("MKL's product has gaps between its rows", remedy="Use another version of MKL")
        nnz = int(indptr[-1])
        parts = (_array(values, ctypes.c_float, nnz), _array(columns, ctypes.c_int, nnz), indptr)
        return sp.csr_array(parts, shape=self.shape)

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", ()):
            if handle:
                self._mkl.mkl_sparse_destroy(handle)

    def _matrix(self, matrix: Any) -> ctypes.c_void_p:
        indptr, indices = (np.ascontiguousarray(x, dtype=np.int32) for x in (matrix.indptr, matrix.indices))
        data = np.ascontiguousarray(matrix.data, dtype=np.float32)
        self._kept += [indptr, indices, data]
        handle = ctypes.c_void_p()
        begin = indptr.ctypes.data
        addresses = [ctypes.c_void_p(p) for p in (begin, begin + 4, indices.ctypes.data, data.ctypes.data)]
        status = self._mkl.mkl_sparse_s_create_csr(
            ctypes.byref(handle), 0, *map(ctypes.c_int, matrix.shape), *addresses
        )
        self._check(status)
        return handle

    def _multiply(self, stage: int, into: ctypes.c_void_p) -> None:
        plain = _Description(_GENERAL, 0, 0)
        a, b = self._handles[:2]
        status = self._mkl.mkl_sparse_sp2m(_AS_IT_IS, plain, a, _AS_IT_IS, plain, b, stage, ctypes.byref(into))
        self._check(status)

    def _check(self, status: int) -> None:
        if status:
            raise SparseBPError("MKL refused a sparse product", expected="status 0", got=status)


def _array(pointer: ctypes.c_void_p, kind: Any, length: int) -> np.ndarray:
    if length == 0:
        return np.empty(0, kind)
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (length,)).copy()


@cache
def load() -> Any:
    """Return MKL's single dynamic library, from the package ``mkl`` or else from where the system looks; None without.

    Its worker threads spin for 10 ms after a product, not for the usual 200: by the next side's turn they sleep.
    """
    os.environ.setdefault("KMP_BLOCKTIME", "10")
    path = ctypes.util.find_library("mkl_rt")
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libmkl_rt.so"):
            path = str(Path(str(file.locate())).resolve())
    try:
        return ctypes.CDLL(path) if path else None
    except OSError:
        return None


# Who else multiplies sparse matrices on this machine: SciPy, and MKL and GraphBLAS where they are installed.

Prepare: TypeAlias = Callable[[Pair], dict[str, Callable[[], object]]]
"""Takes a pair, and returns the calls to time, by side."""


def sparse_peers(note: Callable[[str], None]) -> list[Prepare]:
    """Return the peers that are installed; tell `note` which are not.

    Their sides are ``scipy``; ``mkl`` (structure and values at every call) and ``mkl_numeric`` (values into a structure
    that is kept); ``graphblas``.
    """
    here: list[Prepare] = [lambda pair: {"scipy": lambda: in_scipy(pair)}]
    if load() is None:
        note("MKL: not compared, the package mkl is not installed")
    else:
        here.append(_in_mkl)
    if harness.optional("graphblas") is None:
        note("GraphBLAS: not compared, python-graphblas is not installed")
    else:
        here.append(_in_graphblas)
    return here


@contextlib.contextmanager
def using_threads_too(count: int) -> Iterator[None]:
    """As `benchmarks.harness.using_threads`, which sets MKL too, and for GraphBLAS."""
    graphblas: Any = harness.optional("graphblas")
    settings = graphblas.ss.config if graphblas else {}
    before = settings.get("nthreads")
    with harness.using_threads(count):
        settings["nthreads"] = count
        try:
            yield
        finally:
            settings["nthreads"] = before


def _in_mkl(pair: Pair) -> dict[str, Callable[[], object]]:
    if pair.mask is not None:  # it has none
        return {}
    product = MklProduct(pair.a, pair.b)
    return {"mkl": product.fresh, "mkl_numeric": product.values}


def in_scipy(pair: Pair) -> Any:
    """Return the product; with a mask the whole one, times the mask's ones."""
    found = pair.a @ pair.b
    return found if pair.mask is None else found.multiply(pair.mask != 0).tocsr()


def _in_graphblas(pair: Pair) -> dict[str, Callable[[], object]]:
    graphblas: Any = harness.optional("graphblas")
    left, right = graphblas.io.from_scipy_sparse(pair.a), graphblas.io.from_scipy_sparse(pair.b)
    mask = None if pair.mask is None else graphblas.io.from_scipy_sparse(pair.mask).S
    return {"graphblas": lambda: left.mxm(right).new(mask=mask).wait()}


TARGET_THREADS = 2
"""The number of threads that targets are stated for; some products have others for one."""

SIDES = {"scipy": "SciPy", "mkl": "MKL", "mkl_numeric": "MKL numeric-only", "graphblas": "GraphBLAS"}


def measure_spgemm(run: Run) -> Iterator[Row]:
    peers = sparse_peers(run.note)
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
        for count in run.threads(using_threads_too):
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
    product._cache.clear()
    mask = None if pair.mask is None else SparsityPattern.from_scipy(pair.mask)
    return plan_product(SparsityPattern.from_scipy(pair.a), SparsityPattern.from_scipy(pair.b), mask=mask)


def measure_rows(
    pair: Pair,
    plan: Any,
    plan_seconds: float,
    batch: int,
    peers: Sequence[Prepare],
    rounds: Mapping[str, Any],
    threads: int,
) -> list[Row]:
    sides: dict[str, Callable[[], object]] = {}
    for prepare in peers:
        sides |= prepare(pair)
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
    timings["ours"] = harness.each(timings["ours"], samples)
    row = {"samples": samples} | timing.side_by_side(timings)
    return row | judge_spgemm(row, targets)


def judge_spgemm(row: Mapping[str, Any], targets: Targets) -> dict[str, str | None]:
    if not targets:
        return {"targets": None, "met": None}
    measured = {side: row[f"{side}_ratio"]["median"] for side in targets if f"{side}_ratio" in row}
    missed = [SIDES[side] for side, times in measured.items() if times < targets[side]]
    absent = [SIDES[side] for side in targets if side not in measured]
    outcome = harness.outcome(missed)
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
    expected = in_scipy(replace(pair, a=_with(pair.a, a_data[:, 0]), b=_with(pair.b, b_data[:, 0])))
    refuse_difference(f"The product {pair.name}", "SciPy", difference(ours, expected))


def difference(ours: Any, expected: Any) -> float:
    """Return the largest difference of two sparse matrices, over the largest value that is expected."""
    scale = float(np.abs(expected.data).max()) if expected.nnz else 1.0
    return float(np.abs((ours - expected).data).max(initial=0.0)) / scale


def _with(matrix: Any, data: np.ndarray) -> Any:
    import scipy.sparse as sp

    return sp.csr_array((np.ascontiguousarray(data), matrix.indices, matrix.indptr), shape=matrix.shape)


def _describe(matrix: Any) -> str:
    return f"{matrix.shape[0]} × {matrix.shape[1]}, nnz {tables.count(matrix.nnz)}"


ASKED_FOR = (
    "conv · ReLU", "pruned conv · pruned conv", "Poisson 300 × 300, A·P", "R-MAT graph, squared", "tall random, AᵀA",
    "random, n = 3000, 12 a row",
)  # fmt: skip
"""The products that documents show."""

SPGEMM = Benchmark(
    name="spgemm",
    title="Sparse products on a fixed pattern, float32: shared values, or values of {batch} samples (time per sample)",
    leaves_out="our symbolic phase (column 'plan once'), except in rows 'plan + one run', and MKL's where its "
    "structure is kept; the other libraries analyse in every call",
    settings={"dtype": "float32"},
    sizes={"batch": 16},
    quick={"batch": 2},
    rounds={"rounds": 15, "budget": 5.0},
    measure=measure_spgemm,
    columns=columns(
        words={
            "name": "product", "a_text": "A", "b_text": "B", "values": "values", "strategy": "strategy",
            "targets": "targets",
        },
        seconds={"plan_seconds": "plan once", "each": "per multiplication", "floor": "at copy speed"},
        times={**{f"{name}_ratio": f"over {side}" for name, side in SIDES.items()}, "floor_times": "× copy floor"},
        sizes={"moved": "bytes moved"},
        counts={"products": "multiplications"},
        formats={
            "{:.1f}": {"index": "index bytes per multiplication"},
            "{:.0f} calls": {"earned_after": "plan pays off after"},
        },
    ),
    short=("name", "values", "ours", "scipy_ratio", "mkl_numeric_ratio", "targets", "met", "floor_times"),
    in_short=lambda row: row["threads"] == TARGET_THREADS and row["name"] in ASKED_FOR and row["values"] != "B = 16",
    overview=Overview(task="A sparse product with new values", peer="SciPy", ratio="scipy_ratio",
                      label="{name}", page="products.md", of=lambda row: "plan" not in row["values"]),
    picture=harness.bars(
        "{name}, {values}", {"scipy_ratio": "over SciPy (1 thread)", "mkl_numeric_ratio": "over MKL numeric-only"},
        harness.SPEED_UP, (harness.SCIPY, harness.MKL), line=1.0,
    ),
)  # fmt: skip


# Sparse products on structures that are drawn at random, from tiny to large: is a plan ever slower than SciPy?
#
# ``python -m benchmarks spgemm-sweep``. Ten families of structures, of each as many with sizes, lengths of rows and
# densities drawn from wide ranges by a fixed seed. A row is a family, judged by its slowest structure.

MOST = 4_000_000
"""Multiplications of a product at most; a structure with more is drawn again."""


def measure_spgemm_sweep(run: Run) -> Iterator[Row]:
    ratios: dict[int, list[tuple[float, str]]] = {}
    for number, (family, draw) in enumerate(FAMILIES.items()):
        drawn = [drawn_pair(family, draw, (number, i), run.settings["largest"]) for i in range(run.settings["each"])]
        plans = [plan_pair(pair)[0] for pair in drawn]
        for pair, plan in zip(drawn, plans, strict=True):
            check(pair, plan)
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
                "met": harness.outcome([f"{sum(r < 1 for r, _, _ in found)} slower"] if worst < 1 else []),
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
    a_data, b_data = values(pair, None)
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


def drawn_pair(family: str, draw: Draw, seed: tuple[int, int], largest: int) -> Pair:
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
    for count, width in ((m, k), (k, n)):
        lengths = np.full(count, _size(rng, 1, 8))
        lengths[rng.integers(0, count, int(rng.integers(0, 4)))] = width // 2
        matrices.append(_of_lengths(rng, lengths, width))
    return matrices[0], matrices[1]


FAMILIES: dict[str, Draw] = {
    "rows of one length": _even, "rows of many lengths": _uneven, "power law": _power_law, "diagonals": _band,
    "stencils": _stencil, "blocks": _blocks, "runs": _runs, "coarsening": _coarsening, "normal equations": _gram,
    "a few full rows": _arrow,
}  # fmt: skip


SPGEMM_SWEEP = Benchmark(
    name="spgemm-sweep",
    title="Sparse products on structures drawn at random, {each} a family, float32: times faster than SciPy",
    leaves_out="our symbolic phase",
    settings={"dtype": "float32"},
    sizes={"each": 20, "largest": 20_000},
    quick={"each": 1, "largest": 60},
    rounds={"rounds": 5, "least_rounds": 3, "warmup": 1, "budget": 0.5},
    measure=measure_spgemm_sweep,
    columns=columns(
        words={
            "family": "structures", "met": "never slower than SciPy", "strategies": "strategies",
            "slowest_text": "slowest structure",
        },
        numbers={"count": "count"},
        times={"slowest": "slowest", "median": "median", "fastest": "fastest"},
    ),
    short=("family", "threads", "slowest", "median", "fastest", "met"),
    in_short=lambda row: row["threads"] == 1,
    picture=harness.bars(
        "{family}", {"slowest": "slowest", "median": "median", "fastest": "fastest"},
        "speed-up over SciPy", (harness.SCIPY_TINTS[1], harness.SCIPY, harness.SCIPY_TINTS[0]), line=1.0,
    ),
)  # fmt: skip
