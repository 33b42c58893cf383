"""Dense products on the host, and updates by gradients that are products."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp import kernels
from sparsebp.core import threads
from sparsebp.core.threads import get_threads, set_threads
from sparsebp.kernels.checks import OPTIONAL_BUFFERS, UPDATE_BUFFERS
from sparsebp.kernels.host import matmul, matmul_batches, matmul_many, update_by_product, worth_update_by_product
from sparsebp.kernels.host.dense import products
from sparsebp.kernels.host.dense.products import SMALL
from sparsebp.kernels.host.engine.tiles import gemm_of
from strategies import normal, reals, seeds, sizes, tolerance
from thread_counts import assert_same_for_any_number_of_threads
from update_options import options_of

LARGE = st.sampled_from([509, 1024, 2048, 3203])  # as k, the last one is cut into partial sums
MIDDLE = st.sampled_from([257, 512, 1000])
THIN = st.one_of(sizes(1, 33), st.sampled_from([61, 64, 65, 130]))


def matrix(rng, rows, columns, dtype, layout):
    """A matrix whose rows, or whose columns, or neither, are contiguous."""
    if layout == "columns":
        return normal(rng, (columns, rows), dtype).T
    return (
        normal(rng, (rows, 2 * columns), dtype)[:, ::2] if layout == "neither" else normal(rng, (rows, columns), dtype)
    )


def rounding(a, b, dtype):
    """Return the likely bound of the rounding of a product's sums."""
    return 4 * np.sqrt(a.shape[1]) * np.finfo(dtype).eps * (abs(a) @ abs(b))


@contextlib.contextmanager
def cut_for(small, own):
    """Cut products as for a BLAS with, or without, kernels for small ones, and multiply by our own or by the BLAS's.

    This machine's has one of each.
    """

    def blas_of(dtype, alone=False):
        return *library(dtype, True)[:4], gemm_of(dtype) if own and not alone else 0

    library = products.blas_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "has_small_kernels", lambda: small)
        patch.setattr(products, "blas_of", blas_of)
        yield


@given(
    m=sizes(0, 300), n=st.one_of(sizes(0, 100), st.sampled_from([769, 1551])), k=sizes(0, 300), dtype=reals, seed=seeds,
    turned=st.tuples(st.booleans(), st.booleans()), added=st.booleans(), wide=st.sampled_from([0, 1, 1024]),
)  # fmt: skip
@settings(deadline=None)
def test_our_own_product_is_blass(m, n, k, dtype, seed, turned, added, wide):
    """Of parts of larger matrices, also in rows of 1024 numbers; nothing is written beside C."""
    rng = np.random.default_rng(seed)

    def part(rows, columns, turned):
        rows, columns = (columns, rows) if turned else (rows, columns)
        whole = normal(rng, (rows, max(columns + wide // 1024, wide)), dtype)
        return whole, whole[:, :columns].T if turned else whole[:, :columns]

    (left, a), (right, b) = part(m, k, turned[0]), part(k, n, turned[1])
    c = normal(rng, (m, n + 3), dtype)
    before, beside = c[:, :n].astype(np.float64) if added else np.zeros((m, n)), c[:, n:].copy()
    c[:, :n] = before if added else np.nan
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    blas = *products.blas_of(np.dtype(dtype))[:4], gemm_of(np.dtype(dtype))
    run_gemm(blas, m, n, k, left, turned[0], right, turned[1], added, c)
    bound = rounding(wide_a, wide_b, dtype) + 2 * np.finfo(dtype).eps * abs(before)
    assert (abs(c[:, :n] - (wide_a @ wide_b + before)) <= bound).all()
    np.testing.assert_array_equal(c[:, n:], beside)


@numba.njit
def run_gemm(blas, m, n, k, a, a_turned, b, b_turned, added, c):
    """Multiply by our own product, whatever the size."""
    products.gemm(
        (blas[4], *blas[1:4], 0), m, n, k, a.ctypes.data, a_turned, a.shape[1], b.ctypes.data, b_turned, b.shape[1],
        added, c.ctypes.data, c.shape[1],
    )  # fmt: skip


@given(large=LARGE, middle=MIDDLE, thin=THIN, order=st.permutations(range(3)), dtype=reals, seed=seeds,
       layouts=st.tuples(*[st.sampled_from(["rows", "columns", "neither"])] * 2), small=st.booleans(),
       own=st.booleans())  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_products_are_right_and_the_same_for_every_number_of_threads(
    large, middle, thin, order, dtype, seed, layouts, small, own
):
    with cut_for(small, own):
        check_a_product(large, middle, thin, order, dtype, seed, layouts)


def check_a_product(large, middle, thin, order, dtype, seed, layouts):
    m, n, k = ((large, middle, thin)[place] for place in order)
    rng, before = np.random.default_rng(seed), get_threads()
    a, b = matrix(rng, m, k, dtype, layouts[0]), matrix(rng, k, n, dtype, layouts[1])
    results = [matmul(a, b, np.full((m, n), np.nan, dtype))]
    with threads.serial_kernels():
        results.append(matmul(a, b, np.full((m, n), np.nan, dtype)))
    try:
        set_threads(1)
        results.append(matmul(a, b, np.full((m, n), np.nan, dtype)))
    finally:
        set_threads(before)
    wide = [factor.astype(np.float64) for factor in (a, b)]
    bound = rounding(*wide, dtype)
    assert (abs(results[0] - wide[0] @ wide[1]) <= bound).all()
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (1, 1, 1), (2000, 2000, 1), (1200, 900, 1)])
def test_products_of_edges(shape):
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    np.testing.assert_allclose(matmul(a, b, np.full((m, n), np.nan)), a @ b, rtol=1e-12)


@given(
    count=sizes(0, 33), m=sizes(0, 33), n=sizes(0, 33), k=sizes(0, 33), dtype=reals, seed=seeds,
    layouts=st.tuples(*[st.sampled_from(["rows", "columns", "neither", "every other"])] * 2),
)  # fmt: skip
def test_products_of_many_pairs(count, m, n, k, dtype, seed, layouts):
    rng = np.random.default_rng(seed)

    def matrices(rows, columns, layout):
        if layout == "every other":
            return normal(rng, (2 * count, rows, columns), dtype)[::2]
        if layout == "columns":
            return normal(rng, (count, columns, rows), dtype).transpose(0, 2, 1)
        wide = normal(rng, (count, rows, 2 * columns), dtype)
        return wide[:, :, ::2] if layout == "neither" else wide[:, :, :columns]

    a, b = matrices(m, k, layouts[0]), matrices(k, n, layouts[1])
    a.flags.writeable = b.flags.writeable = False
    found = matmul_batches(a, b, np.full((count, m, n), np.nan, dtype))
    np.testing.assert_allclose(found, a @ b, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_many_pairs_are_the_same_for_every_number_of_threads(dtype):
    rng = np.random.default_rng(0)
    a, b = normal(rng, (96, 64, 80), dtype), normal(rng, (96, 72, 80), dtype).transpose(0, 2, 1)

    def run():
        result = matmul_batches(a, b, np.full((96, 64, 72), np.nan, dtype))
        np.testing.assert_allclose(result, a @ b, **tolerance(dtype))
        return [result]

    assert_same_for_any_number_of_threads(run)


@given(
    rule=st.sampled_from(sorted(UPDATE_BUFFERS)), optional=st.booleans(), dtype=reals, seed=seeds,
    m=st.sampled_from([301, 512, 1001]), n=st.sampled_from([440, 512, 1031]), k=st.sampled_from([8, 16, 17, 33, 64]),
    step=st.integers(1, 3), layouts=st.tuples(*[st.sampled_from(["rows", "columns"])] * 2), small=st.booleans(),
    own=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_an_update_by_a_product_is_the_product_the_look_and_the_update(
    rule, optional, dtype, seed, m, n, k, step, layouts, small, own
):
    with cut_for(small, own):
        check_an_update(rule, optional, dtype, seed, m, n, k, step, layouts)


def check_an_update(rule, optional, dtype, seed, m, n, k, step, layouts):
    rng, host, before = np.random.default_rng(seed), kernels.get(np), get_threads()
    a, b = matrix(rng, m, k, dtype, layouts[0]), matrix(rng, k, n, dtype, layouts[1])
    assert worth_update_by_product(a, b)
    param, steps, options = normal(rng, (m, n), dtype), np.array([step]), options_of(rule)
    buffers = [
        None if not optional and name in OPTIONAL_BUFFERS else abs(normal(rng, (m, n), dtype))
        for name in UPDATE_BUFFERS[rule]
    ]

    def copies():
        return param.copy(), [None if buffer is None else buffer.copy() for buffer in buffers]

    wanted, wanted_buffers = copies()
    gradient, sums = matmul(a, b, np.empty((m, n), dtype)), np.empty(1)
    host.square_sums([gradient], sums)
    host.optimizer_update(rule, [wanted], [gradient], [[buffer] for buffer in wanted_buffers], options, steps)
    try:
        for count in (1, before):
            set_threads(count)
            got, got_buffers = copies()
            assert update_by_product(rule, got, a, b, got_buffers, options, steps) == sums[0]
            np.testing.assert_array_equal(got, wanted)
            for one, other in zip(got_buffers, wanted_buffers, strict=True):
                np.testing.assert_array_equal(one, other)
    finally:
        set_threads(before)


def test_rows_that_are_not_finite_are_not_used():
    rng = np.random.default_rng(0)
    a, b, param = rng.standard_normal((600, 8)), rng.standard_normal((8, 512)), np.ones((600, 512))
    a[599, 3] = np.inf
    squares = update_by_product("sgd", param, a, b, [None], options_of("sgd"), np.array([1]))
    assert not np.isfinite(squares)
    assert np.isfinite(param).all() and (param[:300] != 1).any() and (param[599] == 1).all()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 64, 8), (2048, 2048, 65), (100, 17_000, 8), (512, 512, 1), (4, 100_000, 64)]
)
def test_products_that_are_small_thick_or_wide_are_not_worth_it(m, n, k):
    assert not worth_update_by_product(np.ones((m, k)), np.ones((k, n)))
    assert m * n * k <= SMALL or k > 64 or n > 1 << 14


LENGTHS = st.one_of(sizes(1, 20), st.sampled_from([64, 127, 200, 300]))


@given(shapes=st.lists(st.tuples(LENGTHS, LENGTHS, LENGTHS, st.booleans(), st.booleans()), min_size=1, max_size=4),
       dtype=reals, seed=seeds, small=st.booleans(), own=st.booleans())  # fmt: skip
def test_many_products_are_those_of_single_calls(shapes, dtype, seed, small, own):
    """Bit for bit, or None where NumPy computes in another way than the library: dot products and outer ones."""
    rng = np.random.default_rng(seed)
    layouts = {False: "rows", True: "columns"}
    pairs = [(matrix(rng, m, k, dtype, layouts[left]), matrix(rng, k, n, dtype, layouts[right]))
             for m, k, n, left, right in shapes]  # fmt: skip
    with cut_for(small, own), threads.one_core():
        found = matmul_many(pairs)
        wanted = [matmul(a, b, np.empty((len(a), b.shape[1]), dtype)) for a, b in pairs]
    if found is None:
        assert not products.is_numpys() or any(
            1 in (k, m * n) or products.describe(a, b)[0].outer == products.K
            for (m, k, n, *_), (a, b) in zip(shapes, pairs, strict=True)
        )
        return
    for one, other in zip(found, wanted, strict=True):
        assert one.tobytes() == other.tobytes()


def test_many_products_of_other_layouts_dtypes_or_libraries_are_left_alone(monkeypatch):
    a, b = np.ones((4, 4), np.float32), np.ones((4, 8), np.float32)
    assert (matmul_many([(a, b)]) is None) == (not products.is_numpys())
    assert matmul_many([(a, b), (a.astype(np.float64), b.astype(np.float64))]) is None
    assert matmul_many([(a[:, ::2], b[:2])]) is None
    assert matmul_many([(a, a.T)]) is None  # NumPy computes half of it
    monkeypatch.setattr(products, "is_numpys", lambda: False)
    assert matmul_many([(a, b)]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' table of pages")
def test_what_the_blas_prefetches_behind_its_operands_is_mapped():
    """A page that was never touched made products of some thousand rows 2.4 times as slow in a virtual machine."""
    code = """
import ctypes, mmap, struct
import numpy as np
from sparsebp.core import threads
from sparsebp.kernels.host.dense import products
from sparsebp.kernels.host import matmul

matmul(np.ones((200, 200)), np.ones((200, 200)))
library = ctypes.CDLL(products._library()["filepath"])
library.blas_memory_alloc.restype = ctypes.c_void_p
buffers = [library.blas_memory_alloc(0) for _ in range(threads.most_threads())]
for buffer in buffers:
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(buffer // mmap.PAGESIZE * 8)
        entries = struct.iter_unpack("<Q", file.read((1 << 22) // mmap.PAGESIZE * 8))
        print(all(entry >> 63 for (entry,) in entries))
"""
    if not products._library()["filepath"]:
        pytest.skip("the BLAS is not OpenBLAS")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) == {"True"}
