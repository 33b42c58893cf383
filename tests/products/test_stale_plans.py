"""Plans and patterns own their arrays: later changes to a caller's arrays never change a result."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from products.operands import OPERANDS
from sparsebp import SparsityPattern, TransposedJacobian, plan_product
from sparsebp.core.errors import LayoutError
from sparsebp.interop import scipy as scipy_bridge
from sparsebp.patterns import linear_pattern
from sparsebp.products import plan_addition
from strategies import seeds


def matrix(seed, shape=(30, 40)):
    """Sorted, with room for every column to move on by one."""
    one = scipy.sparse.random_array(shape, density=0.2, rng=np.random.default_rng(seed), format="csr")
    one.resize(shape[0], shape[1] + 1)
    one.sum_duplicates()
    return one


@given(seed=seeds, where=st.integers(0, 10**6))
@settings(max_examples=30)
def test_a_fresh_pattern_of_a_changed_matrix_has_a_plan_of_its_own(seed, where):
    a, b = matrix(seed), matrix(seed + 1, (41, 23))
    old = plan_product(SparsityPattern.from_scipy(a), SparsityPattern.from_scipy(b))
    before, data = (a @ b).toarray(), a.data.copy()
    k = where % a.nnz
    last_of_row = k + 1 in a.indptr
    if last_of_row or a.indices[k] + 1 < a.indices[k + 1]:
        a.indices[k] += 1
    else:
        a.indices[:] += 1
    fresh = SparsityPattern.from_scipy(a)
    plan = plan_product(fresh, SparsityPattern.from_scipy(b))
    dense = plan.pattern.to_scipy(plan(a.data, b.data)).toarray()
    np.testing.assert_allclose(dense, (a @ b).toarray(), rtol=1e-12, atol=1e-12)
    a.indices[:] = 2**30
    a.indptr[1:] = 2**30
    b.indices[:] = 2**30
    np.testing.assert_allclose(old.pattern.to_scipy(old(data, b.data)).toarray(), before, rtol=1e-12, atol=1e-12)


def test_jacobians_of_a_changed_matrix_stay():
    a, b = matrix(0), matrix(1, (41, 23))
    j, k = scipy_bridge.from_scipy(a), scipy_bridge.from_scipy(b)
    left, right, g = a.toarray(), b.toarray(), np.ones(24)
    (j @ k) @ g  # plans both
    a.indices[:], b.indices[:], a.indptr[:], b.indptr[:] = 2**30, 2**30, 2**30, 2**30
    np.testing.assert_allclose((j @ k).to_dense(), left @ right, rtol=1e-12)
    np.testing.assert_allclose(k @ g, right @ g, rtol=1e-12)
    np.testing.assert_allclose(j.T.to_dense(), left.T)


def test_arguments_that_are_equal_but_not_the_same_are_kept_as_one():
    """True == 1 == 1.0 to a cache: what is refused is refused, whatever was asked for before."""
    one = linear_pattern(3, 1, 2)
    assert linear_pattern(np.int64(3), True, np.uint8(2)) is one
    with pytest.raises(ValueError, match="size"):
        linear_pattern(3.0, 1, 2)


@pytest.mark.parametrize("strategy", OPERANDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_read_only_output_is_refused(strategy, batch, tmp_path):
    patterns = OPERANDS[strategy]
    plan = plan_product(*patterns)
    data = [np.ones((p.nnz, batch)) for p in patterns]
    right = plan(*data)
    flags = np.full(right.shape, 5.0)
    flags.flags.writeable = False
    path = tmp_path / "out"
    np.full(right.shape, 5.0).tofile(path)
    mapped = np.memmap(path, dtype=float, mode="r", shape=right.shape)
    for out in (flags, mapped, np.frombuffer(bytes(right.nbytes)).reshape(right.shape)):
        before = out.copy()
        with pytest.raises(LayoutError, match="out is read-only"):
            plan(*data, out=out)
        np.testing.assert_array_equal(out, before)
    np.testing.assert_array_equal(plan(*data, out=flags.copy()), right)


@pytest.mark.parametrize("strategy", OPERANDS)
def test_read_only_operands_are_read(strategy):
    patterns = OPERANDS[strategy]
    plan = plan_product(*patterns)
    data = [np.arange(1.0, p.nnz + 1) for p in patterns]
    right = plan(*data)
    for array in data:
        array.flags.writeable = False
    np.testing.assert_array_equal(plan(*data), right)
    j = TransposedJacobian(patterns[0], data[0])
    g = np.ones(j.shape[1])
    g.flags.writeable = False
    np.testing.assert_array_equal(j @ g, TransposedJacobian(patterns[0], data[0].copy()) @ g.copy())
    ones = np.ones(patterns[0].nnz)
    ones.flags.writeable = False
    np.testing.assert_array_equal(plan_addition(patterns[0], patterns[0])(data[0], ones), data[0] + 1)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))], ids=["deep", "pickle"]
)
def test_the_arrays_of_a_copied_plan_are_read_only(copied):
    a, b = matrix(0), matrix(1, (41, 23))
    plan = plan_product(SparsityPattern.from_scipy(a), SparsityPattern.from_scipy(b))
    values = plan(a.data, b.data)
    made = copied(plan)
    assert made.strategy == plan.strategy and made.arrays.keys() == plan.arrays.keys()
    for array in (*made.arrays.values(), made.pattern.indices):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    np.testing.assert_array_equal(made(a.data, b.data), values)
    sums = plan_addition(plan.pattern, plan.pattern)
    made = copied(sums)
    for array in made.indices:
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    np.testing.assert_array_equal(made(values, values), 2 * values)
