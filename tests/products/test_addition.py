"""Sums on fixed patterns against dense sums."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrices import dense, wide
from sparsebp import SparsityPattern
from sparsebp.core.errors import DTypeError, PatternError, ShapeError
from sparsebp.patterns import plan_concatenation
from sparsebp.products import plan_addition, product
from strategies import csr_patterns, seeds, sizes


def test_index_types_may_differ_and_index_arrays_are_copied_to_a_device_once():
    a, b = SparsityPattern([0, 2], [0, 3], (1, 5)), SparsityPattern([0, 2], [1, 3], (1, 5))
    plan, mixed = plan_addition(a, b), product._addition_plan.__wrapped__(a, wide(b))
    assert mixed.pattern == plan.pattern
    np.testing.assert_array_equal(mixed(np.ones(2), np.ones(2)), [1, 1, 2])
    stream = SimpleNamespace(null=contextlib.nullcontext(SimpleNamespace(synchronize=lambda: None)))
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=3), Stream=stream, using_allocator=contextlib.nullcontext)
    pool = SimpleNamespace(malloc=None)
    device = SimpleNamespace(__name__="device", cuda=cuda, get_default_memory_pool=lambda: pool)
    device.asarray = np.array
    copies = plan._copies.on(device)
    assert all(again is copy for again, copy in zip(plan._copies.on(device), copies, strict=True))
    assert all(copy is not index for copy, index in zip(copies, plan.indices, strict=True))
    assert all(own is index for own, index in zip(plan._copies.on(np), plan.indices, strict=True))


@given(
    data=st.data(), m=sizes(0, 9), n=sizes(0, 9), batches=st.sampled_from([(0, 0), (0, 3), (3, 0), (2, 2)]), seed=seeds
)
def test_sum_is_the_dense_sum_on_the_union(data, m, n, batches, seed):
    rng = np.random.default_rng(seed)
    a, b = (SparsityPattern(*data.draw(csr_patterns(st.just(m), st.just(n)))) for _ in range(2))
    plan = plan_addition(a, b)
    assert plan_addition(a, b) is plan
    SparsityPattern(plan.pattern.indptr, plan.pattern.indices, plan.pattern.shape)  # canonical
    np.testing.assert_array_equal(dense(plan.pattern) > 0, (dense(a) + dense(b)) > 0)
    values = [rng.standard_normal((p.nnz, k) if k else p.nnz) for p, k in zip((a, b), batches, strict=True)]
    got = plan(*values)
    assert got.shape == ((plan.pattern.nnz, max(batches)) if any(batches) else (plan.pattern.nnz,))
    for sample in range(max(*batches, 1)):
        x, y, z = (v[:, sample] if v.ndim == 2 else v for v in (*values, got))
        np.testing.assert_array_equal(dense(plan.pattern, z), dense(a, x) + dense(b, y))


def test_cancelled_entries_stay_and_identities_sum_to_a_diagonal():
    eye = SparsityPattern.identity(3)
    plan = plan_addition(eye, eye)
    assert plan.pattern.kind == "diagonal"
    np.testing.assert_array_equal(plan(np.ones(3), -np.ones(3)), np.zeros(3))


def test_operands_that_do_not_fit_are_refused():
    a, b = SparsityPattern.diagonal(3), SparsityPattern.dense(3, 3)
    with pytest.raises(ShapeError, match="sum differ"):
        plan_addition(a, SparsityPattern.dense(3, 2))
    plan = plan_addition(a, b)
    with pytest.raises(ShapeError, match="fit the parts"):
        plan(np.ones(3), np.ones(3))
    with pytest.raises(ShapeError, match="batch sizes"):
        plan(np.ones((3, 2)), np.ones((9, 4)))
    with pytest.raises(DTypeError):
        plan(np.ones(3), np.ones(9, np.float32))


@pytest.mark.parametrize("other", [None, [0, 1], np.ones((3, 3)), "p"])
def test_operands_that_are_no_patterns_are_refused(other):
    a = SparsityPattern.diagonal(3)
    with pytest.raises(PatternError, match="b is not a pattern"):
        plan_addition(a, other)
    with pytest.raises(PatternError, match=r"parts\[1\] is not a pattern"):
        plan_concatenation(a, other)
