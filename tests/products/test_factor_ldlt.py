"""LDLᵀ factors of quasi-definite matrices, with signs and regularised pivots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from matrices import of_mask
from products.factor_gallery import Array, assert_as_small_as_superlu, backward_error, either_way, laplacian
from sparsebp import SparsityPattern, plan_factor
from sparsebp.core.errors import PatternError, PivotError, StaleError
from strategies import reals, seeds, sizes


def quasi_definite(rng: Any, n: int, density: float, dtype: Any = np.float64, batch: int = 1) -> tuple[Array, Array]:
    """Return random matrices (B, n, n) [[H, Aᵀ], [A, -G]] with rows and columns in any order, and their signs."""
    signs = np.where(rng.random(n) < 0.5, 1, -1)
    mask = rng.random((n, n)) < density
    matrices = rng.standard_normal((batch, n, n)) * (mask | mask.T)
    matrices = np.tril(matrices) + np.tril(matrices, -1).swapaxes(1, 2)
    same = np.equal.outer(signs, signs)
    total = np.abs(matrices * same).sum(axis=2) + 1
    matrices[:, np.arange(n), np.arange(n)] = signs * total
    return matrices.astype(dtype), signs


@settings(max_examples=200)
@given(n=sizes(0, 33), density=st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]), batch=st.sampled_from([1, 2, 8, 9, 17]),
       triangle=st.sampled_from(["both", "lower", "upper"]), signed=st.booleans(), trans=st.sampled_from("NTH"),
       dtype=reals, seed=seeds)  # fmt: skip
@either_way
def test_quasi_definite_matrices(n, density, batch, triangle, signed, trans, dtype, seed):
    """Of both triangles or of one; one by one bitwise equal; into the memory of others."""
    rng = np.random.default_rng(seed)
    matrices, signs = quasi_definite(rng, n, density, dtype, batch)
    mask = (matrices != 0).any(axis=0)
    pattern = of_mask({"both": mask, "lower": np.tril(mask), "upper": np.triu(mask)}[triangle])
    values = np.ascontiguousarray(matrices[:, pattern.row_of_entry, pattern.indices].T)
    plan = plan_factor(pattern, kind="ldlt", signs=signs if signed else None)
    assert plan.kind == "ldlt" and plan.whole == of_mask(mask)
    b = rng.standard_normal((n, batch)).astype(dtype)
    factors = plan(values)
    x = factors.solve(b, trans)
    refined = factors.refine(b, x, trans)
    assert not factors.shifts.any() and factors.shifts.shape == (n, batch)
    eps, other = float(np.finfo(dtype).eps), None
    for s in {0, batch // 2, batch - 1}:
        one = plan(np.ascontiguousarray(values[:, s]), out=other)
        np.testing.assert_array_equal(one.solve(np.ascontiguousarray(b[:, s]), trans), x[:, s])
        assert one.growth == factors.growth[s] and (other is None or one is other)
        other = one
        assert backward_error(matrices[s], x[:, s], b[:, s]) <= 4 * (n + 1) * eps * max(1.0, factors.growth[s])
        assert_as_small_as_superlu(matrices[s], refined[:, s], b[:, s])


@given(n=sizes(1, 25), density=st.sampled_from([0.1, 0.3]), batch=st.sampled_from([None, 3, 9]), dtype=reals,
       seed=seeds)  # fmt: skip
@either_way
def test_regularised_factors_are_those_of_a_matrix_with_another_diagonal(n, density, batch, dtype, seed):
    """Saddle points with zeros on the diagonal: what was added is told, and refinement solves with the others."""
    rng = np.random.default_rng(seed)
    count = 1 if batch is None else batch
    matrices, signs = quasi_definite(rng, n, density, dtype, count)
    zeros = rng.random(n) < 0.5
    matrices[:, np.flatnonzero(zeros), np.flatnonzero(zeros)] = 0
    mask = (matrices != 0).any(axis=0) | np.eye(n, dtype=bool)
    pattern = of_mask(np.triu(mask))
    values = np.ascontiguousarray(matrices[:, pattern.row_of_entry, pattern.indices].T)
    delta = float(np.finfo(dtype).eps) ** 0.5
    plan, b = plan_factor(pattern, kind="ldlt", signs=signs, regularize=delta), rng.standard_normal((n, count))
    b = b.astype(dtype)
    try:
        factors = plan(values if batch else values[:, 0].copy())
    except PivotError:
        return  # a row of zeros, or no digit would be right
    x, shifts = factors.solve(b), factors.shifts.reshape(n, count)
    assert (shifts * signs[:, None] >= 0).all()
    for s in range(count):
        moved = matrices[s].astype(np.float64) + np.diag(shifts[:, s].astype(np.float64))
        growth = max(1.0, float(factors.growth[s] if batch else factors.growth))
        assert backward_error(moved, x[:, s], b[:, s]) <= 8 * (n + 1) * np.finfo(dtype).eps * growth


def test_refinement_undoes_what_was_added():
    """A saddle point, whose zeros are pivots in the order of minimum degree."""
    grid, at = laplacian(5, 5) + sp.eye_array(25), np.eye(25)[::3]
    matrix = sp.csr_array(sp.block_array([[grid, at.T], [at, 0 * sp.eye_array(len(at))]]))
    signs, b = np.repeat([1, -1], (25, len(at))), np.arange(1.0, 26 + len(at))
    pattern = SparsityPattern.from_scipy(sp.csr_array(abs(matrix) + sp.eye_array(matrix.shape[0])))
    factors = plan_factor(pattern, kind="ldlt", signs=signs, regularize=1e-8)(matrix)
    assert np.count_nonzero(factors.shifts) and not factors.shifts[signs > 0].any()
    x = factors.refine(b, factors.solve(b), steps=4)
    assert_as_small_as_superlu(matrix.toarray(), x, b)


NOT_QUASI_DEFINITE: dict[str, tuple[Any, str]] = {
    "zero": (np.zeros((3, 3)), "row 0"),
    "a zero row": (np.diag([1.0, 0, 2]), "row 1"),
    "singular": (np.outer([1.0, 3, 7], [1.0, 3, 7]), r"singular.*row [012]"),
    "zero diagonal": (np.array([[0.0, 1], [1, 0]]), r"pivots on the diagonal.*a pivot of 0, first in row [01]"),
    "small diagonal": (np.array([[1e-17, 1.0], [1, 1e-17]]), r"pivots on the diagonal.*first in row [01]"),
    "NaN": (np.array([[1.0, np.nan], [np.nan, 1]]), "not finite.*row 0, column 1"),
    "infinite": (np.diag([1.0, np.inf]), "not finite.*row 1, column 1"),
}


@pytest.mark.parametrize("name", NOT_QUASI_DEFINITE)
def test_matrices_without_ldlt_factors_are_refused(name):
    """Alone and in a batch of good ones, and the memory of a call that failed is not solved with."""
    matrix, message = NOT_QUASI_DEFINITE[name]
    plan, values = plan_factor(SparsityPattern.dense(*matrix.shape), kind="ldlt"), matrix.ravel().copy()
    good = (np.eye(len(matrix)) * 9 + 1).ravel()
    factors = plan(good)
    with pytest.raises(PivotError, match=message):
        plan(values, out=factors)
    with pytest.raises(StaleError):
        factors.solve(np.ones(len(matrix)))
    np.testing.assert_allclose(plan(good, out=factors).solve(np.ones(len(matrix))), 1 / (9 + len(matrix)))
    with pytest.raises(PivotError, match=message) as caught:
        plan(np.stack([good, good, values, good], axis=1))
    assert caught.value.samples == (2,)


def test_pivots_of_another_sign_are_refused():
    matrix = sp.csr_array(sp.diags_array([1.0, -2.0, 3.0]))
    plan_factor(matrix, kind="ldlt", signs=[1, -1, 0])(matrix)
    with pytest.raises(PivotError, match="a pivot of 0 or of the other sign, first in row 1"):
        plan_factor(matrix, kind="ldlt", signs=[1, 1, 1])(matrix)
    factors = plan_factor(matrix, kind="ldlt", signs=[1, 1, 1], regularize=0.25)(matrix)
    np.testing.assert_array_equal(factors.shifts, [0, 2.5, 0])


def test_ldlt_factors_want_a_symmetric_matrix():
    matrix = sp.csr_array(laplacian(3, 3) - 3 * sp.eye_array(9))
    for wrong in (sp.tril(matrix), matrix + sp.csr_array(([0.1], ([0], [1])), shape=(9, 9))):
        with pytest.raises(PivotError, match=r"not symmetric.* in row 0, column 1, .* across"):
            plan_factor(matrix, kind="ldlt")(wrong)
    with pytest.raises(PatternError, match="outside the pattern"):
        plan_factor(sp.csr_array(sp.tril(matrix)), kind="ldlt")(matrix)
