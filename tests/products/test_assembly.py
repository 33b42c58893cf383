"""Matrices assembled from triplets, against sums of dense ones, and against SciPy."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from backends import BACKENDS, make_backend
from matrices import dense
from sparsebp.core.errors import DTypeError, LayoutError, PatternError, ShapeError
from strategies import reals, seeds, sizes
from thread_counts import assert_same_for_any_number_of_threads


def triplets(m, n, count, seed, dtype=np.int64):
    rng = np.random.default_rng(seed)
    count = count if m and n else 0
    return (rng.integers(size, size=count, dtype=dtype) if count else np.zeros(0, dtype) for size in (m, n))


@given(
    m=sizes(0, 9), n=sizes(0, 9), count=sizes(0, 40), batch=st.sampled_from([None, 1, 3, 17]), dtype=reals,
    index=st.sampled_from([np.int8, np.uint64, np.int64]), seed=seeds,
)  # fmt: skip
def test_random_triplets(m, n, count, batch, dtype, index, seed):
    """Values and gradients are those of ``np.add.at``; read-only values; every sample; patterns are canonical."""
    rows, cols = triplets(m, n, count, seed, index)
    plan = sb.plan_assembly(rows, cols, (m, n))
    sb.SparsityPattern(plan.pattern.indptr, plan.pattern.indices, plan.pattern.shape)
    rng = np.random.default_rng(seed)
    values = rng.integers(-8, 9, (len(rows), *([batch] if batch else []))).astype(dtype)  # sums are exact
    values.flags.writeable = False
    got = plan(values)
    assert got.dtype == dtype and got.shape == (plan.pattern.nnz, *values.shape[1:])
    np.testing.assert_array_equal(plan(values, out=np.full_like(got, np.nan)), got)
    grad = rng.standard_normal(got.shape).astype(dtype)
    back = plan.vjp(grad, out=np.full_like(values, np.nan))
    for b in range(batch or 1):
        one = (lambda a, b=b: a[:, b]) if batch else (lambda a: a)
        expected, there = np.zeros((m, n)), np.zeros((m, n), bool)
        np.add.at(expected, (rows, cols), one(values))
        there[rows, cols] = True
        np.testing.assert_array_equal(dense(plan.pattern, one(got)), expected)
        np.testing.assert_array_equal(dense(plan.pattern) > 0, there)
        np.testing.assert_array_equal(one(back), dense(plan.pattern, one(grad))[rows.astype(int), cols.astype(int)])


def test_sums_are_in_the_order_of_the_triplets_at_any_number_of_threads():
    rng = np.random.default_rng(0)
    rows, cols = rng.integers(300, size=(2, 400_000))
    values = (rng.standard_normal(len(rows)) * 10.0 ** rng.integers(-8, 9, len(rows))).astype(np.float32)
    plan = sb.plan_assembly(rows, cols, (300, 300))
    expected = np.zeros(plan.pattern.nnz, np.float32)
    np.add.at(expected, plan.places, values)
    np.testing.assert_array_equal(plan(values), expected)
    wide = np.stack([values, -values, 2 * values], axis=1)
    assert_same_for_any_number_of_threads(lambda: [plan(values), plan(wide), plan.vjp(expected)])


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in BACKENDS.items()])
def test_on_every_backend(name):
    backend = make_backend(name)
    rows, cols = [2, 0, 2, 1, 2], [1, 1, 1, 0, 3]
    plan = sb.plan_assembly(rows, cols, (4, 4))
    with backend.in_use():
        got = backend.numpy(plan(backend.array([1.0, 2, 4, 8, 16])))
        back = backend.numpy(plan.vjp(backend.array(np.arange(4.0))))
    np.testing.assert_array_equal(got, [2, 8, 5, 16])
    np.testing.assert_array_equal(back, [2, 0, 2, 1, 3])


def test_element_matrices_as_scipy_assembles_them():
    """Indices of any shape, in C order; zeros that SciPy keeps too; NaN stays where it is."""
    elements = np.array([[0, 1, 3], [1, 4, 3]])
    rows, cols = np.broadcast_arrays(elements[:, :, None], elements[:, None, :])
    plan = sb.plan_assembly(rows, cols, (5, 5))
    matrices = np.random.default_rng(0).standard_normal((2, 3, 3))
    matrices[0, 0, 0] = np.nan
    expected = sp.csr_array(sp.coo_array((matrices.ravel(), (rows.ravel(), cols.ravel())), (5, 5)))
    expected.sort_indices()
    np.testing.assert_allclose(plan(matrices.ravel()), expected.data)
    np.testing.assert_array_equal(plan.pattern.indices, expected.indices)
    assert np.isnan(plan(matrices.ravel())).sum() == 1
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        np.testing.assert_array_equal(other(matrices.ravel()), plan(matrices.ravel()))
        assert not other.places.flags.writeable


def test_changed_indices_do_not_change_a_plan():
    rows, cols = np.array([0, 1]), np.array([1, 0])
    plan = sb.plan_assembly(rows, cols, (2, 2))
    rows[:] = 0
    np.testing.assert_array_equal(dense(plan.pattern, plan(np.array([3.0, 4.0]))), [[0, 3], [4, 0]])


@pytest.mark.parametrize(
    ("rows", "cols", "shape", "match"),
    [
        ([0, 2], [0, 0], (2, 2), "rows has an index out of range"),
        ([0, 1], [0, -1], (2, 2), "cols has an index out of range"),
        ([0], [0, 1], (2, 2), "do not belong together"),
        ([0.0], [0], (2, 2), "rows is not an index array"),
        (None, [0], (2, 2), "rows is not an index array"),
        ([[0], [1, 2]], [0], (2, 2), "lists of different lengths"),
        ([True], [0], (2, 2), "rows is not an index array"),
        ([0], [0], (2,), "shape of a pattern"),
        ([0], [0], (2, -2), "shape of a pattern"),
    ],
)
def test_wrong_indices_are_refused(rows, cols, shape, match):
    with pytest.raises(PatternError, match=match):
        sb.plan_assembly(rows, cols, shape)


def test_wrong_values_are_refused():
    plan = sb.plan_assembly([0, 0, 1], [1, 1, 0], (2, 2))
    for values in (np.ones(2), np.ones((3, 1, 1)), np.float64(1)):
        with pytest.raises((ShapeError, LayoutError)):
            plan(values)
    with pytest.raises(DTypeError):
        plan(np.ones(3, int))
    with pytest.raises(LayoutError, match="C-contiguous"):
        plan(np.ones((3, 4))[:, ::2])
    with pytest.raises(ShapeError, match="grad does not fit"):
        plan.vjp(np.ones(3))
    with pytest.raises(DTypeError, match="out has the wrong dtype"):
        plan(np.ones(3), out=np.ones(2, np.float32))
    with pytest.raises(LayoutError, match="read-only"):
        plan(np.ones(3), out=frozen(2))
    both = np.ones(5)
    with pytest.raises(LayoutError, match="overlaps"):
        plan(both[:3], out=both[2:4])


def frozen(count):
    array = np.ones(count)
    array.flags.writeable = False
    return array
