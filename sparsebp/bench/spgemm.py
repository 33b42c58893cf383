"""Sparse products on a fixed pattern, against SciPy and, where installed, GraphBLAS and MKL.

``sparsebp bench spgemm``. The pattern is planned once, outside of the time that is compared, as in training, where the
pattern belongs to the architecture; the table gives that time too, and in how many products it is earned back. The
peers offer no kept structure here and analyse at every call; none of them has a batch of values, so B samples cost them
B calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebp.bench import report, timing
from sparsebp.bench.report import Column
from sparsebp.errors import SparseBPError

if TYPE_CHECKING:
    from sparsebp.patterns import SparsityPattern

BATCH = 16

COLUMNS = (
    Column("product", "name", number=False),
    Column("A", "a_text", number=False),
    Column("B", "b_text", number=False),
    Column("values", "values", number=False),
    Column("threads", "threads"),
    Column("strategy", "strategy", number=False),
    Column("products", "products", report.count),
    Column("plan once", "plan_seconds", report.seconds),
    Column("sparsebp", "ours", report.seconds),
    Column("SciPy", "scipy", report.seconds),
    Column("over SciPy", "scipy_ratio", report.times),
    Column("over GraphBLAS", "graphblas_ratio", report.times),
    Column("over MKL", "mkl_ratio", report.times),
    Column("plan earned back after", "earned_after", lambda calls: f"{calls:.0f} calls"),
)
SHORT = ("name", "values", "threads", "ours", "scipy", "scipy_ratio")
"""Columns of the README's table."""


@dataclass(frozen=True)
class Pair:
    """Two sparse matrices that a scan would multiply, as SciPy CSR arrays of float32."""

    name: str
    a: Any
    b: Any


def run(
    out: Path | None = None,
    quick: bool = False,
    threads: tuple[int, ...] = (1, 2),
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table, write ``spgemm.json`` and ``spgemm.png``; return the result.

    Parameters are those of `sparsebp.bench.recurrent.run`.
    """
    rounds = {"rounds": 2, "least_rounds": 2, "warmup": 1} if quick else {"rounds": 15, "budget": 8.0}
    batch = 2 if quick else BATCH
    result = report.start(
        "spgemm",
        f"Sparse products on a fixed pattern, float32: shared values, and values of each of {batch} samples",
        quick=quick,
        settings={"batch": batch, "threads": threads, "dtype": "float32"},
        leaves_out="our symbolic phase (column 'plan once'); the peers repeat theirs at every call",
    )
    peers = _peers(result["notes"])
    for small in pairs(quick=True):
        plan_pair(small)  # compiles the symbolic phase
    for pair in pairs(quick):
        plan, plan_seconds = plan_pair(pair)
        for count in timing.thread_counts_here(threads, result["notes"].append):
            with timing.threads(count):
                for samples in (None, batch):
                    row = measure_row(pair, plan, plan_seconds, samples, peers, rounds) | {"threads": count}
                    result["rows"].append(row)
                    echo(
                        f"{pair.name}, {row['values']}, threads={count}: {report.times(row['scipy_ratio'])} over SciPy"
                    )
    result["notes"] = list(dict.fromkeys(result["notes"]))
    report.finish(result, COLUMNS, picture, out, echo)
    return result


def plan_pair(pair: Pair) -> tuple[Any, float]:
    """Plan the product; return the plan and the seconds that this took, patterns included."""
    from sparsebp.patterns import SparsityPattern, plan_product

    start = time.perf_counter()
    plan = plan_product(SparsityPattern.from_scipy(pair.a), SparsityPattern.from_scipy(pair.b))
    return plan, time.perf_counter() - start


def measure_row(
    pair: Pair,
    plan: Any,
    plan_seconds: float,
    batch: int | None,
    peers: Mapping[str, Callable[[Any, Any], Callable[[], object]]],
    rounds: Mapping[str, Any],
) -> dict[str, Any]:
    """Time one product with values shared by the batch (`batch` None) or of each sample."""
    rng = np.random.default_rng(0)
    shape = () if batch is None else (batch,)
    a_data, b_data = (rng.standard_normal((m.nnz, *shape), dtype=np.float32) for m in (pair.a, pair.b))
    _check(pair, plan, a_data, b_data)
    out = np.empty((plan.pattern.nnz, *shape), np.float32)
    samples = [
        (
            _with(pair.a, a_data if batch is None else a_data[:, s]),
            _with(pair.b, b_data if batch is None else b_data[:, s]),
        )
        for s in range(batch or 1)
    ]
    calls = {"ours": timing.Call(lambda _: plan(a_data, b_data, out=out))}
    for name, prepare in peers.items():
        ready = [prepare(a, b) for a, b in samples]
        calls[name] = timing.Call(run=_run_all, prepare=partial(list, ready))
    timings = timing.measure(calls, **rounds)
    row: dict[str, Any] = {
        "name": pair.name,
        "a_text": _describe(pair.a),
        "b_text": _describe(pair.b),
        "values": "shared" if batch is None else f"B = {batch}",
        "batch": batch,
        "strategy": plan.strategy,
        "products": int(plan.products),
        "nnz": int(plan.pattern.nnz),
        "flops": int(plan.flops) * (batch or 1),
        "plan_seconds": plan_seconds,
        "ours": timings["ours"].to_dict(),
    }
    for name in peers:
        row[name] = timings[name].to_dict()
        row[f"{name}_ratio"] = timing.ratio(timings[name], timings["ours"])
    gained = timings["scipy"].median - timings["ours"].median
    row["earned_after"] = float(np.ceil(plan_seconds / gained)) if gained > 0 else None
    return row


def _run_all(products: list[Callable[[], object]]) -> list[object]:
    return [product() for product in products]


def pairs(quick: bool) -> Iterator[Pair]:
    """Yield the products: what a scan over a convolutional network meets, and random matrices."""
    side, channels, n = (8, 4, 50) if quick else (32, 64, 5000)
    first = convolution_t(3, channels, side)
    yield Pair("conv · ReLU", first, _diagonal(first.shape[1]))
    yield Pair("conv · max-pool", first, max_pool_t(channels, side))
    small = (2, 4, 4) if quick else (64, 128, 8)
    yield Pair(
        "pruned conv · pruned conv",
        convolution_t(small[0], small[1], small[2], keep=0.03 if not quick else 0.5),
        convolution_t(small[1], small[1], small[2], keep=0.03 if not quick else 0.5, seed=1),
    )
    yield Pair("random · random", _random(n, 0), _random(n, 1))


def convolution_t(channels_in: int, channels_out: int, side: int, keep: float = 1.0, seed: int = 0) -> Any:
    """Return the transposed Jacobian of a 3×3 convolution with padding 1 on side × side images, as a CSR array.

    `keep` is the share of weights that pruning left; pruned weights are no entries.
    """
    from sparsebp.jacobians import conv_jacobian_t

    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((channels_out, channels_in, 3, 3)).astype(np.float32)
    weight[rng.random(weight.shape) >= keep] = 0
    matrix = conv_jacobian_t(weight, (side, side), padding=1).to_scipy().copy()
    matrix.eliminate_zeros()
    return matrix


def max_pool_t(channels: int, side: int, seed: int = 0) -> Any:
    """Return the transposed Jacobian of a 2×2 max-pooling: one entry an input pixel, zeros stored."""
    from sparsebp.patterns import pool_pattern

    pattern = pool_pattern(channels, (side, side), 2).pattern
    return _on(pattern, (np.random.default_rng(seed).random(pattern.nnz) < 0.25).astype(np.float32))


def _diagonal(n: int) -> Any:
    from sparsebp.patterns import pointwise_pattern

    return _on(pointwise_pattern(n), np.ones(n, np.float32))


def _on(pattern: SparsityPattern, data: np.ndarray) -> Any:
    from sparsebp.jacobians import TransposedJacobian

    return TransposedJacobian(pattern, data).to_scipy()


def _random(n: int, seed: int) -> Any:
    import scipy.sparse as sp

    density = min(1.0, 20 / n)
    return _canonical(sp.random_array((n, n), density=density, format="csr", dtype=np.float32, rng=seed))


def _canonical(matrix: Any) -> Any:
    matrix.sum_duplicates()
    matrix.sort_indices()
    return matrix


def _with(matrix: Any, data: np.ndarray) -> Any:
    import scipy.sparse as sp

    return sp.csr_array((np.ascontiguousarray(data), matrix.indices, matrix.indptr), shape=matrix.shape)


def _check(pair: Pair, plan: Any, a_data: np.ndarray, b_data: np.ndarray) -> None:
    """Compare one sample with SciPy before anything is timed."""
    c = plan(a_data, b_data)
    one = slice(None) if a_data.ndim == 1 else (slice(None), 0)
    expected = _with(pair.a, a_data[one]) @ _with(pair.b, b_data[one])
    import scipy.sparse as sp

    pattern = plan.pattern
    ours = sp.csr_array((np.ascontiguousarray(c[one]), pattern.indices, pattern.indptr), shape=pattern.shape)
    scale = float(np.abs(expected.data).max()) if expected.nnz else 1.0
    difference = float(np.abs((ours - expected).data).max(initial=0.0)) / scale
    if not difference < 1e-4:
        raise SparseBPError(
            f"The product {pair.name} differs from SciPy's",
            expected="a relative difference below 1e-4",
            got=f"{difference:.3g}",
            remedy="Do not trust this build: please report it with the output of sparsebp info",
        )


def _peers(notes: list[str]) -> dict[str, Callable[[Any, Any], Callable[[], object]]]:
    found: dict[str, Callable[[Any, Any], Callable[[], object]]] = {"scipy": lambda a, b: lambda: a @ b}
    graphblas = timing.optional("graphblas")
    if graphblas is None:
        notes.append("GraphBLAS: not compared, python-graphblas is not installed")
    else:

        def with_graphblas(a: Any, b: Any) -> Callable[[], object]:
            left, right = graphblas.io.from_scipy_sparse(a), graphblas.io.from_scipy_sparse(b)
            return lambda: left.mxm(right).new().wait()

        found["graphblas"] = with_graphblas
    mkl = timing.optional("sparse_dot_mkl")
    if mkl is None:
        notes.append("MKL: not compared, sparse_dot_mkl is not installed")
    else:
        found["mkl"] = lambda a, b: lambda: mkl.dot_product_mkl(a, b)
    return found


def _describe(matrix: Any) -> str:
    return f"{matrix.shape[0]} × {matrix.shape[1]}, nnz {report.count(matrix.nnz)}"


def picture(result: Mapping[str, Any]) -> Any:
    """Draw the speed-up over SciPy, one bar a product and kind of values, for the largest number of threads."""
    most = max(row["threads"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["threads"] == most]
    drawing, axes = report.figure(1, 1, width=8.0, height=0.4 * len(rows) + 1.4)
    ax = axes[0, 0]
    middle = [row["scipy_ratio"]["median"] for row in rows]
    low = [row["scipy_ratio"]["median"] - row["scipy_ratio"]["low"] for row in rows]
    high = [row["scipy_ratio"]["high"] - row["scipy_ratio"]["median"] for row in rows]
    colors = ["#93c5fd" if row["batch"] is None else "#1e40af" for row in rows]
    ax.barh(range(len(rows)), middle, color=colors, xerr=[low, high], error_kw={"elinewidth": 1})
    ax.set_yticks(range(len(rows)), [f"{row['name']}, {row['values']}" for row in rows], fontsize=8)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.invert_yaxis()
    ours = f"{most} thread{'s' if most > 1 else ''}"
    ax.set_xlabel(f"times faster than SciPy (one thread; ours: {ours}), median and quartiles", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing
