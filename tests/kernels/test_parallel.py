"""Work split between threads is bitwise equal to the same work on one, into arrays full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from sparsebp import SparsityPattern, kernels, plan_product
from sparsebp.core.check import SLOPES
from sparsebp.core.threads import serial_kernels
from sparsebp.products import product, strategies

Array = np.ndarray
BIG = 1_100_003
"""Values that are worth several threads in every kernel; a prime, so that parts differ in length."""


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def empty(*shape: int, dtype: Any = np.float32) -> Array:
    return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 99, dtype)


def index(*values: int) -> Array:
    return np.array(values, np.int32)


def pattern(rows: int, columns: int, each: int, empty_rows: int = 0) -> SparsityPattern:
    """`each` entries in all rows but the last ones, which are empty."""
    rng = np.random.default_rng(rows)
    chosen = np.concatenate([np.sort(rng.choice(columns, each, replace=False)) for _ in range(rows - empty_rows)])
    indptr = np.minimum(np.arange(rows + 1), rows - empty_rows) * each
    return SparsityPattern(indptr, chosen, (rows, columns))


def csr_matvec(k, batch: int) -> list[Array]:
    a, out = pattern(60_000, 900, 20, empty_rows=7_001), empty(60_000, batch)
    k.csr_matvec(a.indptr, a.indices, normal(a.nnz, 1), normal(900, batch), out, None)
    return [out]


def gather(k) -> list[Array]:
    out = empty(BIG, 1)
    k.gather(normal(777, 1), (np.arange(BIG) % 777).astype(np.int32), out)
    return [out]


def scale(k) -> list[Array]:
    a = pattern(60_000, 900, 20)
    rows, columns = empty(a.nnz, 1), empty(a.nnz, 1)
    k.scale_rows(a.indptr, normal(a.nnz, 1), normal(60_000, 1), rows)
    k.scale_columns(a.indices, normal(a.nnz, 1), normal(900, 1), columns)
    return [rows, columns]


def clamp(k) -> list[Array]:
    x, out, grad = normal(BIG), empty(BIG), empty(BIG)
    k.clamp(x, -0.5, 0.5, out)
    k.clamp_grad(normal(BIG), out, -0.5, 0.5, grad)
    return [out, grad]


def gelu(k) -> list[Array]:
    results, x, gy = [], normal(BIG), normal(BIG)
    for approximate in (False, True):
        results += [empty(BIG), empty(BIG)]
        k.gelu(x, approximate, results[-2])
        k.gelu_grad(gy, x, approximate, results[-1])
    return results


def slopes(k) -> list[Array]:
    results = []
    for function in SLOPES:
        out = empty(40_009, 31)
        k.pointwise_slopes(normal(31, 40_009), function, out)
        results.append(out)
    return results


def winners(k) -> list[Array]:
    rng, out = np.random.default_rng(0), empty(1_009 * 9 * 4, 31)
    winner = rng.integers(0, 8, (31, 20)).astype(np.uint8)
    window, offset = rng.integers(0, 6, 1_009), 4 * rng.integers(0, 2, 1_009)
    k.max_pool_values(winner, window.astype(np.int32), offset.astype(np.int32), 9, 4, out)
    return [out]


def max_pool(k) -> list[Array]:
    window = ((3, 2), (2, 2), (1, 0), (1, 1))
    y, winner, gx = empty(37, 100, 75), empty(37, 100, 75, dtype=np.uint8), empty(37, 200, 150)
    k.max_pool(normal(37, 200, 150), *window, y, winner)
    k.max_pool_grad(normal(37, 100, 75), winner, *window, gx)
    return [y, gx]


def dense_matvec(k) -> list[Array]:
    steps, out = np.arange(4_001), empty(4_001, 7, 33)
    k.dense_matvec(normal(4_001, 7, 7, 1), steps, normal(4_001, 7, 33), steps, normal(4_001, 7, 33), steps, out, steps)
    return [out]


def dense_chain(k) -> list[Array]:
    cuts, out = np.array([0, 3, 3, 1_500, 4_001]), empty(4_001, 7, 33)
    a = 0.2 * normal(4_001, 7, 7, 1)  # products of many stay finite
    k.dense_chain(a, cuts, normal(4, 7, 33), normal(4_001, 7, 33), out)
    matrix, vector = empty(4, 7, 7, 1), empty(4, 7, 33)
    k.dense_reduce(a, cuts, normal(4_001, 7, 33), matrix, vector)
    return [out, matrix, vector]


KERNELS: dict[str, Callable[..., list[Array]]] = {
    "csr_matvec": lambda k: csr_matvec(k, 1),
    "csr_matvec_batch": lambda k: csr_matvec(k, 17),
    "gather": gather,
    "scale": scale,
    "clamp": clamp,
    "gelu": gelu,
    "slopes": slopes,
    "winners": winners,
    "max_pool": max_pool,
    "dense_matvec": dense_matvec,
    "dense_chain": dense_chain,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_on_any_number_of_threads(name):
    k = kernels.get(np)
    together = KERNELS[name](k)
    with serial_kernels():
        alone = KERNELS[name](k)
    for several, one in zip(together, alone, strict=True):
        assert not np.isnan(one).any()
        np.testing.assert_array_equal(several, one)


def runs(rows: int, columns: int, length: int) -> SparsityPattern:
    starts = np.arange(rows) * 7 % (columns - length)
    return SparsityPattern(np.arange(rows + 1) * length, (starts[:, None] + np.arange(length)).ravel(), (rows, columns))


def selection(rows: int, columns: int, empty_rows: int) -> SparsityPattern:
    return pattern(rows, columns, 1, empty_rows)


PRODUCTS = {
    "pairs": (lambda: pattern(2_003, 500, 6, empty_rows=301), lambda: pattern(500, 400, 9), 17),
    "positions": (lambda: pattern(2_003, 500, 6, empty_rows=301), lambda: pattern(500, 400, 40), 17),
    "accumulate": (lambda: pattern(2_003, 500, 6, empty_rows=301), lambda: pattern(500, 400, 9), 17),
    "filled": (lambda: pattern(501, 400, 200, empty_rows=30), lambda: pattern(400, 307, 150), 1),
    "select_rows": (lambda: selection(9_001, 500, 801), lambda: pattern(500, 400, 9), 17),
    "select_columns": (lambda: pattern(9_001, 500, 6, empty_rows=801), lambda: selection(500, 40, 99), 17),
    "runs": (lambda: pattern(2_003, 500, 6, empty_rows=301), lambda: runs(500, 400, 20), 17),
    "blocks": (lambda: of_blocks(901, 200, 3, 3), lambda: of_blocks(200, 150, 3, 2), 17),
    "gather": (lambda: pattern(9_001, 500, 6), lambda: SparsityPattern.from_scipy(spread(500)), 17),
    "dense": (lambda: SparsityPattern.dense(211, 53), lambda: SparsityPattern.dense(53, 47), 17),
}


def of_blocks(rows: int, columns: int, m: int, n: int) -> SparsityPattern:
    """Dense blocks (m, n) in place of entries."""
    one = pattern(rows, columns, 6, empty_rows=rows // 9)
    entries = scipy.sparse.csr_array((np.ones(one.nnz), one.indices, one.indptr), shape=one.shape)
    blocks = scipy.sparse.csr_array(scipy.sparse.kron(entries, np.ones((m, n))))
    blocks.sum_duplicates()
    return SparsityPattern.from_scipy(blocks)


def spread(rows: int) -> scipy.sparse.csr_array:
    """Two entries a row, in columns that no other row has."""
    return scipy.sparse.csr_array((np.ones(2 * rows), np.arange(2 * rows), 2 * np.arange(rows + 1)))


@pytest.mark.parametrize("strategy", PRODUCTS)
def test_a_product_on_any_number_of_threads(strategy, monkeypatch):
    make_a, make_b, batch = PRODUCTS[strategy]
    a, b = make_a(), make_b()
    if strategy == "accumulate":
        monkeypatch.setattr(strategies, "INDEX_LIMIT", 0)
    plan = product._make_plan(a, b, None) if strategy == "accumulate" else plan_product(a, b)
    assert plan.strategy == strategy
    a_data, b_data = normal(a.nnz, batch), normal(b.nnz, batch)
    together = plan(a_data, b_data, out=empty(plan.pattern.nnz, batch))
    with serial_kernels():
        alone = plan(a_data, b_data, out=empty(plan.pattern.nnz, batch))
    np.testing.assert_array_equal(together, alone)
    sample = min(3, batch - 1)
    csr = [scipy.sparse.csr_array((d[:, sample], p.indices, p.indptr), shape=p.shape) for d, p in
           ((a_data, a), (b_data, b))]  # fmt: skip
    c = plan.pattern
    got = scipy.sparse.csr_array((alone[:, sample], c.indices, c.indptr), shape=c.shape)
    np.testing.assert_allclose(got.toarray(), (csr[0] @ csr[1]).toarray(), rtol=1e-4, atol=1e-4)
