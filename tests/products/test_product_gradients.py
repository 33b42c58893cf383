"""Gradients of products on fixed patterns, on every backend, against dense ones restricted to the operand's pattern."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import needs_numba
from matrices import dense
from sparsebp import SparsityPattern, kernels
from sparsebp.core.errors import DTypeError, MemoryLimitError, OptionError, PatternError, ShapeError
from sparsebp.products import plan_product, strategies
from strategies import csr_patterns, normal, reals, seeds, sizes, tolerance


def entries(pattern, matrices):
    return matrices[:, pattern.row_of_entry, pattern.indices].T


@given(draw=st.data(), batch=sizes(0, 18), shared=st.sampled_from(["", "a", "b", "c", "abc"]), masked=st.booleans(),
       dtype=reals, seed=seeds)  # fmt: skip
@settings(max_examples=40)
def test_gradients_agree_with_dense_ones(backend, draw, batch, shared, masked, dtype, seed):
    """And so do the entries of a masked product."""
    needs_numba("products are planned with it, on the host")
    inner = draw.draw(sizes(0, 9))
    a = SparsityPattern(*draw.draw(csr_patterns(columns=st.just(inner))))
    b = SparsityPattern(*draw.draw(csr_patterns(rows=st.just(inner))))
    mask = SparsityPattern(*draw.draw(csr_patterns(st.just(a.shape[0]), st.just(b.shape[1])))) if masked else None
    plan, rng = plan_product(a, b, mask=mask), np.random.default_rng(seed)
    assert plan.pattern == mask or not masked
    parts = {name: (p, normal(rng, (p.nnz,) if name in shared else (p.nnz, batch), dtype))
             for name, p in (("a", a), ("b", b), ("c", plan.pattern))}  # fmt: skip
    for name, others in (("a", "cb"), ("b", "ac"), *([("c", "ab")] * masked)):
        many = 1 if all(other in shared for other in others) else batch
        left, right = (dense(*parts[other], many) for other in others)
        left, right = left.swapaxes(1, 2) if name == "b" else left, right.swapaxes(1, 2) if name == "a" else right
        expected = left @ right
        values = [backend.array(parts[other][1]) for other in others]
        with pytest.MonkeyPatch.context() as patch:
            own = backend.kernels
            patch.setattr(kernels, "get", lambda xp, own=own: own)
            found = backend.numpy((plan if name == "c" else getattr(plan.gradients, f"at_{name}"))(*values))
        assert found.dtype == dtype and found.ndim == (1 if all(other in shared for other in others) else 2)
        np.testing.assert_allclose(
            found.reshape(len(found), many), entries(parts[name][0], expected), **tolerance(dtype)
        )


@given(draw=st.data(), batch=sizes(0, 3), seed=seeds)
@settings(max_examples=10)
def test_masked_products_of_complex_values(draw, batch, seed):
    a, rng = SparsityPattern(*draw.draw(csr_patterns())), np.random.default_rng(seed)
    mask = SparsityPattern(*draw.draw(csr_patterns(st.just(a.shape[0]), st.just(a.shape[0]))))
    plan = plan_product(a, a.T, mask=mask)
    values = [normal(rng, (a.nnz, batch), np.float64) + 1j * normal(rng, (a.nnz, batch), np.float64) for _ in range(2)]
    found, copy = plan(*values), pickle.loads(pickle.dumps(plan))
    left, right = (
        dense(p, v.real, batch) + 1j * dense(p, v.imag, batch) for p, v in zip((a, a.T), values, strict=True)
    )
    expected = left @ right
    np.testing.assert_allclose(found, entries(mask, expected), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(copy(*values), found)
    bytes_of_lists = sum(array.nbytes for array in plan.arrays.values())
    assert plan.index_bytes == bytes_of_lists and plan_product(a, a.T, mask=mask) is plan
    with pytest.raises(MemoryLimitError):
        plan_product(a, a.T, mask=mask, memory_limit=0)


@pytest.mark.parametrize("landing", [0.0, 1.0])
def test_a_mask_has_columns_that_b_lacks(landing, monkeypatch):
    """Only columns of B with entries are numbered where there are few."""
    monkeypatch.setattr(strategies, "LANDING", landing)
    a = SparsityPattern([0, 2, 3], [0, 1, 1], (2, 2))
    b = SparsityPattern([0, 2, 4], [5, 2**29, 7, 2**29], (2, 2**30))
    mask = SparsityPattern([0, 3, 5], [6, 7, 2**29, 4, 7], b.shape)
    plan = plan_product(a, b, mask=mask)
    a_data, b_data = np.array([1.0, 2, 3]), np.array([1.0, 10, 100, 1000])
    np.testing.assert_array_equal(plan(a_data, b_data), [0, 200, 2010, 0, 300])
    gc = np.array([1.0, 2, 3, 4, 5])
    np.testing.assert_array_equal(plan.gradients.at_a(gc, b_data), [30, 3200, 500])
    np.testing.assert_array_equal(plan.gradients.at_b(a_data, gc), [0, 3, 19, 6])


def test_a_mask_has_the_products_shape():
    square = SparsityPattern.dense(2, 2)
    for error, mask in ((ShapeError, SparsityPattern.dense(2, 3)), (PatternError, np.ones((2, 2)))):
        with pytest.raises(error):
            plan_product(square, square, mask=mask)


def test_wrong_values_are_refused():
    pattern = SparsityPattern([0, 2, 3], [0, 1, 1], (2, 2))
    gradients, ones = plan_product(pattern, pattern).gradients, np.ones((3, 2))
    for error, left, right in (
        (ShapeError, ones[:2], ones), (ShapeError, ones, np.ones((3, 3))), (ShapeError, ones[None], ones),
        (DTypeError, ones, ones.astype(np.float32)), (DTypeError, ones.astype(int), ones),
    ):  # fmt: skip
        for method in (gradients.at_a, gradients.at_b):
            with pytest.raises(error):
                method(left, right)
    with pytest.raises(OptionError, match=r"SparsityPattern\.diagonal"):
        _ = plan_product(SparsityPattern.identity(2), pattern).gradients
