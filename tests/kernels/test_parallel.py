"""Work split between threads is bitwise equal to the same work on one, into arrays full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from matrices import csr, disjoint, of_blocks
from sparsebp import SparsityPattern, kernels
from sparsebp.core.check import FUNCTIONS, LOSS_FUNCTIONS, SLOPES
from sparsebp.products import product, strategies
from thread_counts import assert_same_for_any_number_of_threads
from update_options import options_of

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
    """`each` entries, one in each stretch of columns, in all rows but the last ones, which are empty."""
    stretch = columns // each
    chosen = np.random.default_rng(rows).integers(0, stretch, (rows - empty_rows, each)) + stretch * np.arange(each)
    indptr = np.minimum(np.arange(rows + 1), rows - empty_rows) * each
    return SparsityPattern(indptr, chosen.ravel(), (rows, columns))


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


def pointwise(k) -> list[Array]:
    results, x, gy = [], normal(BIG), normal(BIG)
    for function in FUNCTIONS:
        results += [empty(BIG), empty(BIG)]
        k.pointwise(x, function, (0.5, 2.0, 1.5), results[-2])
        k.pointwise_grad(gy, x, function, (0.5, 2.0, 1.5), results[-1])
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
    start, first = 2 * np.arange(100) - 1, np.zeros(100, np.int64)
    rows = np.stack([start, first + (start < 0), first + 3], axis=1)
    columns = np.stack([2 * np.arange(75), first[:75], first[:75] + 2], axis=1)
    window = rows, columns, (3, 2), (1, 1)
    y, winner, gx = empty(37, 100, 75), empty(37, 100, 75, dtype=np.uint8), empty(37, 200, 150)
    k.max_pool(normal(37, 200, 150), *window, y, winner)
    k.max_pool_grad(normal(37, 100, 75), winner, *window, gx)
    return [y, gx]


def band(k) -> list[Array]:
    first, lines, planes = np.arange(50), empty(20_001, 50, 1), empty(2_001, 50, 19)
    for out in (lines, planes):
        k.band_product(normal(len(out), 52, out.shape[2]), first, np.arange(51) * 3, normal(150), out)
    return [lines, planes]


def dense_matvec(k) -> list[Array]:
    steps, out = np.arange(4_001), empty(4_001, 7, 33)
    k.dense_matvec(normal(4_001, 7, 7, 1), steps, normal(4_001, 7, 33), steps, normal(4_001, 7, 33), steps, out, steps)
    return [out]


def dense_chain(k, own: int) -> list[Array]:
    cuts, out = np.array([0, 3, 3, 1_500, 4_001]), empty(4_001, 7, 33)
    a, index = 0.2 * normal(4_001, 7, 7, own), np.arange(4_001)  # products of many stay finite
    k.dense_chain(a, cuts, normal(4, 7, 33), normal(4_001, 7, 33), out)
    matrix, vector, product = empty(4, 7, 7, own), empty(4, 7, 33), empty(4_001, 7, 7, own)
    k.dense_reduce(a, cuts, normal(4_001, 7, 33), matrix, vector)
    k.dense_matmul(a, index, a, index[::-1].copy(), product, index)
    return [out, matrix, vector, product]


def loss(k) -> list[Array]:
    target = np.random.default_rng(0).integers(0, 10, 9_001)
    losses, slope = empty(9_001), empty(9_001, 10)
    k.softmax_cross_entropy(normal(9_001, 10), target, losses, slope)
    return [losses, slope]


def softmax(k) -> list[Array]:
    results = []
    for shape in ((2_001, 300, 1), (3, 40, 5_003)):
        for log in (False, True):
            y, gx = empty(*shape), empty(*shape)
            k.softmax(normal(*shape), log, y)
            k.softmax_grad(normal(*shape), y, log, gx)
            results += [y, gx]
    return results


def element_loss(k) -> list[Array]:
    results = []
    for function in LOSS_FUNCTIONS:
        slopes, value = empty(BIG), empty(dtype=np.float64)
        k.element_loss(normal(BIG), normal(BIG)[::-1].copy(), None, None, function, 0.7, 3.0, None, slopes, value)
        results += [slopes, value]
    return results


def rows(k) -> list[Array]:
    results = []
    for shape, weights in (((64, 8, BIG // 512), 32), ((BIG // 512, 512, 1), 512)):
        x, gy, w = normal(*shape), normal(*shape), normal(weights)
        mean, scale, y, gx = (empty(*sizes) for sizes in (shape[:1], shape[:1], shape, shape))
        sums, products = empty(weights), empty(weights)
        k.row_normalise(x, w, w, 1e-5, True, mean, scale, y)
        k.row_back(gy, x, w, True, mean, scale, gx)
        k.row_products(gy, x, mean, scale, sums, products)
        results += [mean, scale, y, gx, sums, products]
    return results


def channels(k) -> list[Array]:
    x, gy = normal(9, 37, 999), normal(9, 37, 999)[::-1].copy()
    mean, var, scale, sums, products = (empty(37) for _ in range(5))
    y, z, gx = (empty(9, 37, 999) for _ in range(3))
    k.channel_normalise(x, None, None, 1e-5, mean, var, scale, y)
    k.channel_back(gy, x, mean, scale, var, sums, products, gx)
    k.channel_scale(x, mean, var, sums, z)
    sloped, slopes = empty(9, 37, 999), empty(37)
    k.channel_slope(gy, x, var, sloped)
    k.channel_slope_grad(gy, x, slopes)
    return [mean, var, scale, sums, products, y, z, gx, sloped, slopes]


def update(k) -> list[Array]:
    params, grads, mean, square = ([abs(normal(n)) for n in (900_003, 17, 250_000, 0, 100)] for _ in range(4))
    buffers, sums = [mean, square, [None] * 5], empty(5, dtype=float)
    k.optimizer_update("adam", params, grads, buffers, options_of("adam", 5), np.ones(5, np.int64))
    k.square_sums(grads, sums)
    return [*params, *mean, sums]


def min_gru(k) -> list[Array]:
    x, gh, h0 = normal(61, 37, 2 * 301), normal(61, 37, 301), normal(37, 301)
    h, gx, gh0 = empty(61, 37, 301), empty(61, 37, 2 * 301), empty(37, 301)
    k.min_gru_forward(x, h0, None, "positive", False, h)
    k.min_gru_backward(x, h, gh, h0, None, "positive", False, gx, gh0)
    return [h, gx, gh0]


KERNELS: dict[str, Callable[..., list[Array]]] = {
    "csr_matvec": lambda k: csr_matvec(k, 1),
    "csr_matvec_vectors": lambda k: csr_matvec(k, 16),
    "csr_matvec_batch": lambda k: csr_matvec(k, 17),
    "gather": gather,
    "scale": scale,
    "clamp": clamp,
    "pointwise": pointwise,
    "slopes": slopes,
    "winners": winners,
    "max_pool": max_pool,
    "band": band,
    "min_gru": min_gru,
    "dense_matvec": dense_matvec,
    "dense_chain": lambda k: dense_chain(k, 33),
    "dense_chain_shared": lambda k: dense_chain(k, 1),
    "loss": loss,
    "softmax": softmax,
    "element_loss": element_loss,
    "channels": channels,
    "rows": rows,
    "update": update,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_on_any_number_of_threads(name):
    def run():
        found = KERNELS[name](kernels.get(np))
        assert not any(np.isnan(array).any() for array in found)
        return found

    assert_same_for_any_number_of_threads(run)


def runs(rows: int, columns: int, length: int) -> SparsityPattern:
    starts = np.arange(rows) * 7 % (columns - length)
    return SparsityPattern(np.arange(rows + 1) * length, (starts[:, None] + np.arange(length)).ravel(), (rows, columns))


PRODUCTS = {
    "pairs": (lambda: pattern(2_003, 500, 6, empty_rows=301), lambda: pattern(500, 400, 9)),
    "positions": (lambda: pattern(2_003, 500, 6, empty_rows=301), lambda: pattern(500, 400, 40)),
    "accumulate": (lambda: pattern(2_003, 500, 6, empty_rows=301), lambda: pattern(500, 400, 9)),
    "filled": (lambda: pattern(501, 400, 200, empty_rows=30), lambda: pattern(400, 307, 150)),
    "select_rows": (lambda: pattern(9_001, 500, 1, empty_rows=801), lambda: pattern(500, 400, 9)),
    "select_columns": (lambda: pattern(9_001, 500, 6, empty_rows=801), lambda: pattern(500, 40, 1, empty_rows=99)),
    "runs": (lambda: pattern(2_003, 500, 6, empty_rows=301), lambda: runs(500, 400, 20)),
    "blocks": (lambda: of_blocks(901, 200, 3, 3), lambda: of_blocks(200, 150, 3, 2)),
    "gather": (lambda: pattern(9_001, 500, 6), lambda: disjoint(500)),
    "masked": (lambda: pattern(2_003, 500, 6), lambda: pattern(500, 400, 40), lambda: pattern(2_003, 400, 60, 301)),
    "dense": (lambda: SparsityPattern.dense(211, 53), lambda: SparsityPattern.dense(53, 47)),
    "scale_rows": (lambda: SparsityPattern.diagonal(2_003), lambda: pattern(2_003, 500, 20)),
    "scale_columns": (lambda: pattern(2_003, 500, 20), lambda: SparsityPattern.diagonal(500)),
}


@pytest.mark.parametrize("batch", [1, 17])
@pytest.mark.parametrize("strategy", PRODUCTS)
def test_a_product_on_any_number_of_threads(strategy, batch, monkeypatch):
    a, b, *mask = (make() for make in PRODUCTS[strategy])
    if strategy == "accumulate":  # more products than there are indices
        monkeypatch.setattr(strategies, "INDEX_LIMIT", 0)
    plan = product._make_plan(a, b, None, *mask)
    assert plan.strategy == strategy
    a_data, b_data = normal(a.nnz, batch), normal(b.nnz, batch)
    sample = min(3, batch - 1)
    expected = (csr(a, a_data[:, sample]) @ csr(b, b_data[:, sample])).toarray()
    for kept in mask:
        expected *= csr(kept, np.ones(kept.nnz)).toarray()

    def run():
        out = plan(a_data, b_data, out=empty(plan.pattern.nnz, batch))
        np.testing.assert_allclose(csr(plan.pattern, out[:, sample]).toarray(), expected, rtol=1e-4, atol=1e-4)
        return [out]

    assert_same_for_any_number_of_threads(run)
