"""Products with a diagonal whose left operand repeats a few row shapes, against SciPy."""

import pickle
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import convolution_t
from matrices import csr
from sparsebp import SparsityPattern, plan_product
from sparsebp.core.threads import get_threads, set_threads
from sparsebp.products import strategies
from sparsebp.products.product import plan_by
from sparsebp.products.strategies import ScaleColumns, ScaleRuns
from sparsebp.products.symbolic import SymbolicProduct
from strategies import reals, seeds


def strategy_of(kind, pattern):
    return kind(SymbolicProduct(pattern, SparsityPattern.diagonal(pattern.shape[1])))


def forced(pattern, gaps):
    """Return the plan that scales runs however small the matrix is, with or without gaps where those are possible."""
    limits = {"SCALE_RUNS_LEAST": 0, "LENGTH": 1, "SCALE_RUNS_SHARE": 1, "PER_COLUMN": 0 if gaps else 2**40}
    with mock.patch.multiple(strategies, **limits):
        strategy = strategy_of(ScaleRuns, pattern)
        assert strategy.fits
        return plan_by(strategy)


def drawn(rng, pattern, batch, dtype, special):
    shape = (pattern.nnz,) if batch is None else (pattern.nnz, batch)
    values = rng.standard_normal(shape).astype(dtype)
    if special:
        places = rng.integers(0, max(values.size, 1), 5 if values.size else 0)
        values.flat[places] = [np.nan, np.inf, -np.inf, -0.0, 0.0][: len(places)]
    return values


def expected(plan, left, right):
    """Return what SciPy computes, sample for sample."""
    if left.ndim == right.ndim == 1:
        found = (csr(plan.a, left) @ csr(plan.b, right)).toarray()  # SciPy leaves out what is exactly zero
        values = found[plan.pattern.row_of_entry, plan.pattern.indices]
        found[plan.pattern.row_of_entry, plan.pattern.indices] = 0
        assert not found.any()
        return values
    batch = max(v.shape[1] for v in (left, right) if v.ndim == 2)
    samples = [[v if v.ndim == 1 else v[:, s] for v in (left, right)] for s in range(batch)]
    return np.stack([expected(plan, *s) for s in samples], axis=1) if samples else np.empty((plan.pattern.nnz, 0))


def shifted(starts, offsets, columns):
    """Return the pattern of rows that begin at `starts`, each with one of a few sets of columns from there on."""
    rows = [np.asarray(offsets[i % len(offsets)], int) + start for i, start in enumerate(starts)]
    rows = [row[row < columns] for row in rows]
    indptr = np.cumsum([0, *map(len, rows)])
    return SparsityPattern(indptr, np.concatenate([np.empty(0, int), *rows]), (len(rows), columns))


sets_of_columns = st.sets(st.integers(0, 12) | st.sampled_from([1024, 1025, 1026, 2047, 2048, 2049, 3000]), max_size=12)


@given(
    starts=st.lists(st.integers(0, 40) | st.sampled_from([1023, 1024, 2040]), max_size=9),
    offsets=st.lists(sets_of_columns.map(sorted), min_size=1, max_size=3), more=st.integers(0, 3), gaps=st.booleans(),
    batch=st.sampled_from([None, 0, 1, 3, 16]), a_shared=st.booleans(), special=st.booleans(), dtype=reals, seed=seeds,
)  # fmt: skip
def test_columns_are_scaled_as_in_scipy(starts, offsets, more, gaps, batch, a_shared, special, dtype, seed):
    last = max((s + o[-1] for s, o in zip(starts, offsets * 9, strict=False) if o), default=0)
    a = shifted(starts, offsets, last + more)  # the last row may lose its last column
    plan, rng = forced(a, gaps), np.random.default_rng(seed)
    left, right = drawn(rng, a, None if a_shared else batch, dtype, special), drawn(rng, plan.b, batch, dtype, special)
    with np.errstate(invalid="ignore"):
        right_answer = expected(plan, left, right)
    guarded = np.full(right_answer.size + 2 * 64, 7, dtype)  # what is beyond the result is not touched
    out = guarded[64 : 64 + right_answer.size].reshape(right_answer.shape)
    for array in (left, right):
        array.flags.writeable = False
    np.testing.assert_array_equal(plan(left, right, out=out), right_answer)
    assert (guarded[:64] == 7).all() and (guarded[64 + right_answer.size :] == 7).all()


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1), (4, 3)])
def test_matrices_without_entries(shape):
    a = SparsityPattern(np.zeros(shape[0] + 1, int), np.empty(0, int), shape)
    plan = forced(a, True)
    assert plan(np.empty(0), np.ones(shape[1])).shape == (0,)


def convolution(side, channels=8):
    return SparsityPattern.from_scipy(convolution_t(3, channels, side))


@pytest.mark.parametrize("side, gap", [(16, 16), (28, 0), (32, 16)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_convolution_reads_no_columns_and_gives_the_same_bits(side, gap, dtype):
    a = convolution(side)
    plan, by_columns = plan_product(a, SparsityPattern.diagonal(a.shape[1])), plan_by(strategy_of(ScaleColumns, a))
    assert plan.strategy == "scale_runs" and plan.pattern is plan.a
    assert plan.arrays["gap"].size == gap  # rows of 28 x 28 pixels meet the ends of pages at other places each
    assert plan.index_bytes < a.nnz
    rng, before = np.random.default_rng(0), get_threads()
    try:
        for batch in (None, 1, 3, 16):
            data = [drawn(rng, p, batch, dtype, True) for p in (plan.a, plan.b)]
            for threads in (1, before):
                set_threads(threads)
                np.testing.assert_array_equal(plan(*data), by_columns(*data))
    finally:
        set_threads(before)


def test_many_parts_and_more_columns_than_two_bytes_number():
    """As large as the benchmark's, so that threads share it; rows at the ends of parts are written by one thread."""
    a = convolution(32, 65)
    assert a.shape[1] > 2**16
    plan, by_columns = plan_product(a, SparsityPattern.diagonal(a.shape[1])), plan_by(strategy_of(ScaleColumns, a))
    assert plan.strategy == "scale_runs" and plan.arrays["gap"].size
    rng, before = np.random.default_rng(0), get_threads()
    data = [drawn(rng, p, None, np.float32, False) for p in (plan.a, plan.b)]
    right_answer = by_columns(*data)
    try:
        for threads in (1, before, before):
            set_threads(threads)
            np.testing.assert_array_equal(plan(*data), right_answer)
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(plan))(*data), right_answer)
    finally:
        set_threads(before)


def test_what_does_not_repeat_is_scaled_by_its_columns():
    rng = np.random.default_rng(0)
    rows = [np.sort(rng.choice(2000, 40, replace=False)) for _ in range(500)]
    scattered = SparsityPattern(40 * np.arange(501), np.concatenate(rows), (500, 2000))
    apart = shifted(range(500), [range(0, 200, 2)], 1000)  # one shape, no runs
    for pattern in (scattered, apart, convolution(8, 4)):  # the last one is small
        plan = plan_product(pattern, SparsityPattern.diagonal(pattern.shape[1]))
        assert plan.strategy == "scale_columns"


def test_a_limit_takes_what_keeps_nothing():
    a = convolution(16)
    b = SparsityPattern.diagonal(a.shape[1])
    assert plan_product(a, b, memory_limit=0).strategy == "scale_columns"
    assert plan_product(a, b, memory_limit=plan_product(a, b).index_bytes).strategy == "scale_runs"
