"""Gradients of products on fixed patterns, on every backend, against dense ones restricted to the operand's pattern."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import needs_numba
from matrices import dense
from sparsebp import SparsityPattern, kernels
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.products import plan_product
from strategies import csr_patterns, normal, reals, seeds, sizes, tolerance


def entries(pattern, matrices):
    return matrices[:, pattern.row_of_entry, pattern.indices].T


@given(draw=st.data(), batch=sizes(0, 18), shared=st.sampled_from(["", "a", "b", "c", "abc"]), dtype=reals, seed=seeds)
@settings(max_examples=25)
def test_gradients_agree_with_dense_ones(backend, draw, batch, shared, dtype, seed):
    needs_numba("products are planned with it, on the host")
    inner = draw.draw(sizes(0, 9))
    a = SparsityPattern(*draw.draw(csr_patterns(columns=st.just(inner))))
    b = SparsityPattern(*draw.draw(csr_patterns(rows=st.just(inner))))
    plan, rng = plan_product(a, b), np.random.default_rng(seed)
    parts = {name: (p, normal(rng, (p.nnz,) if name in shared else (p.nnz, batch), dtype))
             for name, p in (("a", a), ("b", b), ("c", plan.pattern))}  # fmt: skip
    for name, others in (("a", "cb"), ("b", "ac")):
        many = 1 if all(other in shared for other in others) else batch
        left, right = (dense(*parts[other], many) for other in others)
        expected = left @ right.swapaxes(1, 2) if name == "a" else left.swapaxes(1, 2) @ right
        values = [backend.array(parts[other][1]) for other in others]
        with pytest.MonkeyPatch.context() as patch:
            own = backend.kernels
            patch.setattr(kernels, "get", lambda xp, own=own: own)
            found = backend.numpy(getattr(plan.gradients, f"at_{name}")(*values))
        assert found.dtype == dtype and found.ndim == (1 if all(other in shared for other in others) else 2)
        np.testing.assert_allclose(
            found.reshape(len(found), many), entries(parts[name][0], expected), **tolerance(dtype)
        )


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
