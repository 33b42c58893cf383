"""LU, Cholesky and LDLᵀ factors on a kept pattern: against SciPy's SuperLU, matrix by matrix."""

from __future__ import annotations

import concurrent.futures
import functools
import pickle
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import structural_rank
from scipy.sparse.linalg import LinearOperator, cg, eigsh, gmres, splu

from matrices import dense, of_mask
from sparsebp import SparsityPattern, kernels, plan_factor
from sparsebp.core.errors import (
    DeviceError,
    DTypeError,
    LayoutError,
    OptionError,
    PatternError,
    PivotError,
    ShapeError,
    StaleError,
)
from sparsebp.products import elimination, ordering
from strategies import reals, seeds, sizes
from thread_counts import assert_same_for_any_number_of_threads

Array = np.ndarray


def backward_error(matrix: Any, x: Array, b: Array) -> float:
    """Return how far the residual is from zero: ``|b - A x| / (|A| |x| + |b|)`` in the maximum norm, in double."""
    a, x, b = (np.asarray(v, np.result_type(v, np.float64)) for v in (matrix, x, b))
    if not len(a):
        return 0.0
    scale = np.abs(a).sum(axis=1).max() * np.abs(x).max() + np.abs(b).max()
    return float(np.abs(b - a @ x).max() / scale) if scale else 0.0


def assert_as_small_as_superlu(matrix: Array, x: Array, b: Array) -> None:
    """The residual is at most ten times SuperLU's, in the dtype of x."""
    eps = float(np.finfo(x.dtype).eps)
    theirs = splu(sp.csc_array(matrix.astype(x.dtype))).solve(b) if len(matrix) else b
    assert backward_error(matrix, x, b) <= 10 * max(backward_error(matrix, theirs, b), eps)


def pattern_of(matrix: Any) -> tuple[SparsityPattern, Array]:
    """Return the pattern and the values of a matrix; stored zeros are entries."""
    matrix = sp.csr_array(matrix)
    matrix.sum_duplicates()
    return SparsityPattern.from_scipy(matrix), np.ascontiguousarray(matrix.data, np.float64)


def mirrored(pattern: SparsityPattern, values: Array) -> Array:
    """Return values with those below the diagonal equal to those above, on a symmetric pattern."""
    below = (pattern.row_of_entry > pattern.indices).reshape(-1, *[1] * (values.ndim - 1))
    return np.where(below, values[pattern.transpose_permutation], values)


def either_way(test: Callable[..., None]) -> Callable[..., None]:
    """Lay out a test's symmetric matrices in single rows, or in panels, where the size chooses."""

    @functools.wraps(test)
    def run(**drawn: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elimination, "SHORT", drawn["seed"] % 2 * 1000)
            test(**drawn)

    return run


# ---- random matrices -------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    n=sizes(0, 33), density=st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]), batch=st.sampled_from([1, 2, 3, 8, 9, 17]),
    way=st.sampled_from(["general", "dominant", "cholesky"]), block=st.sampled_from([1, 1, 2, 3, 9]),
    transposed=st.booleans(), dtype=reals, seed=seeds,
)  # fmt: skip
@either_way
def test_random_matrices(n, density, batch, way, block, transposed, dtype, seed):
    """Dominant diagonals without values, general matrices with them; samples that differ; one by one bitwise equal.

    Entries may be dense blocks, whose rows are numbered at random.
    """
    rng, dominant = np.random.default_rng(seed), way != "general"
    n -= n % block
    mask = np.kron(rng.random((n // block,) * 2) < density, np.ones((block, block), bool))
    shuffled = rng.permutation(n)
    mask = mask[np.ix_(shuffled, shuffled)]
    mask |= mask.T & (way == "cholesky")
    mask[np.arange(n), np.arange(n) if dominant else rng.permutation(n)] = True
    pattern = of_mask(mask)
    representative = rng.standard_normal(pattern.nnz)
    values = (representative[:, None] * (1 + 0.1 * rng.random((pattern.nnz, batch)))).astype(dtype)
    if dominant:
        values[pattern.row_of_entry == pattern.indices] += 4 * n
    if way == "cholesky":
        values = mirrored(pattern, values)
        plan = plan_factor(pattern, kind="cholesky")
        assert plan.fill <= plan_factor(pattern).fill
    else:
        plan = plan_factor(pattern, None if dominant else np.ascontiguousarray(values[:, 0]))
    b = rng.standard_normal((n, batch)).astype(dtype)
    matrices = dense(pattern, values, batch).swapaxes(1, 2) if transposed else dense(pattern, values, batch)
    try:
        factors = plan(values)
    except PivotError as error:  # these pivots are not those of the other samples
        assert error.samples and 0 not in error.samples
        assert not dominant
        return
    x = factors.solve(b, transposed=transposed)
    refined = factors.refine(b, x, transposed=transposed)
    assert x.dtype == refined.dtype == dtype and x.shape == refined.shape == (n, batch)
    eps = float(np.finfo(dtype).eps)
    for s in {0, batch // 2, batch - 1}:
        one = plan(np.ascontiguousarray(values[:, s]))
        np.testing.assert_array_equal(one.solve(np.ascontiguousarray(b[:, s]), transposed=transposed), x[:, s])
        assert one.growth == factors.growth[s]
        error = backward_error(matrices[s], x[:, s], b[:, s])
        assert error <= 4 * (n + 1) * eps * max(1.0, factors.growth[s])
        if s == 0 or dominant:  # its own pivots
            assert_as_small_as_superlu(matrices[s], x[:, s], b[:, s])
            assert_as_small_as_superlu(matrices[s], refined[:, s], b[:, s])


kinds = st.sampled_from(["lu", "cholesky", "ldlt"])


def complex_matrices(rng: Any, n: int, density: float, kind: str, batch: int, dtype: Any) -> Array:
    """Return dominant matrices (B, n, n), Hermitian ones with pivots of either sign but for LU factors."""
    mask = rng.random((n, n)) < density
    matrices = rng.standard_normal((batch, n, n)) + 1j * rng.standard_normal((batch, n, n))
    if kind == "lu":
        matrices *= mask
        diagonal = np.full(n, 2 + 3j)
    else:
        matrices *= mask | mask.T
        matrices = matrices + matrices.conj().swapaxes(1, 2)
        diagonal = np.ones(n) if kind == "cholesky" else rng.choice([-1.0, 1.0], n)
    matrices[:, np.arange(n), np.arange(n)] = diagonal * (8 * n + rng.random((batch, n)))
    return matrices.astype(dtype)


@settings(max_examples=200)
@given(n=sizes(0, 33), density=st.sampled_from([0.0, 0.1, 0.3, 1.0]), batch=st.sampled_from([None, 1, 3, 8, 9, 17]),
       kind=kinds, trans=st.sampled_from("NTH"), triangle=st.sampled_from(["both", "lower", "upper"]),
       dtype=st.sampled_from([np.complex64, np.complex128]), seed=seeds)  # fmt: skip
@either_way
def test_complex_matrices(n, density, batch, kind, trans, triangle, dtype, seed):
    """With A, Aᵀ and Aᴴ, one right-hand side for each matrix of a batch, or nine of one matrix."""
    rng = np.random.default_rng(seed)
    matrices = complex_matrices(rng, n, density, kind, batch or 1, dtype)
    mask = (matrices != 0).any(axis=0)
    if kind == "ldlt":
        mask = {"both": mask, "lower": np.tril(mask), "upper": np.triu(mask)}[triangle]
    pattern = of_mask(mask)
    values = np.ascontiguousarray(matrices[:, pattern.row_of_entry, pattern.indices].T)
    factors = plan_factor(pattern, kind=kind)(values if batch else values[:, 0].copy())
    np.testing.assert_array_equal(factors.values.reshape(values.shape), values)
    b = (rng.standard_normal((n, batch or 9)) + 1j * rng.standard_normal((n, batch or 9))).astype(dtype)
    x = factors.solve(b, trans)
    refined = factors.refine(b, x, trans)
    assert x.dtype == refined.dtype == dtype and factors.growth.dtype == x.real.dtype
    for s in range(b.shape[1]):
        matrix = matrices[s if batch else 0].astype(complex)
        matrix = {"N": matrix, "T": matrix.T, "H": matrix.conj().T}[trans]
        for found in (x, refined):
            assert backward_error(matrix, found[:, s], b[:, s]) <= 4 * (n + 1) * np.finfo(dtype).eps
        if batch:
            one = plan_factor(pattern, kind=kind)(np.ascontiguousarray(values[:, s]))
            np.testing.assert_array_equal(one.solve(np.ascontiguousarray(b[:, s]), trans), x[:, s])


@pytest.mark.parametrize(
    "name", ["Helmholtz", "network with sources", "rows and columns permuted", "sparse 2", "dense"]
)
def test_complex_values_choose_pivots(name):
    """As partial pivoting does for them, and residuals like SuperLU's."""
    matrix = sp.csr_array(GALLERY[name]()).astype(complex)
    matrix.data *= np.exp(1j * np.random.default_rng(0).random(matrix.nnz))
    b = np.arange(1.0, 1 + matrix.shape[0]) * (1 + 2j)
    factors = plan_factor(matrix)(matrix)
    assert_as_small_as_superlu(matrix.toarray(), factors.solve(b), b)
    assert_as_small_as_superlu(matrix.toarray().conj().T, factors.solve(b, "H"), b)


def test_matrices_that_are_not_hermitian_are_refused():
    pattern, good = SparsityPattern.dense(2, 2), np.array([4, 1 + 1j, 1 - 1j, 5])
    for kind in ("cholesky", "ldlt"):
        plan = plan_factor(pattern, kind=kind)
        x = plan(sp.csr_array(good.reshape(2, 2))).solve(good[:2])
        np.testing.assert_allclose(good.reshape(2, 2) @ x, good[:2])
        with pytest.raises(PivotError, match=r"not Hermitian.* in row 0, column 1"):
            plan(sp.csr_array(np.array([[4, 1 + 1j], [1 + 1j, 5]])))
        with pytest.raises(PivotError, match=r"not Hermitian.*\(5\+1j\) in row 1, in sample 1") as caught:
            plan(np.stack([good, good + np.array([0, 0, 0, 1j])], axis=1))
        assert caught.value.samples == (1,)
    with pytest.raises(PivotError, match=r"not positive definite.*first in row 1"):
        plan_factor(pattern, kind="cholesky")(np.array([1, 2j, -2j, 1]))
    for wrong, message in ((np.array([1, 1j, 1j, -1]), "singular"), (np.array([1, np.nan * 1j, 0, 1]), "not finite")):
        with pytest.raises(PivotError, match=message):
            plan_factor(pattern)(wrong)
    with pytest.raises(PivotError, match=r"row 1"):
        plan_factor(pattern)(np.stack([good, np.array([1, 1, 0, 0j])], axis=1))


@given(n=sizes(1, 20), columns=st.sampled_from([0, 1, 2, 9, 16]), kind=kinds, transposed=st.booleans(), dtype=reals,
       seed=seeds)  # fmt: skip
@either_way
def test_many_right_hand_sides_of_one_matrix(n, columns, kind, transposed, dtype, seed):
    """Each column as if it were alone; refinement too."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((n, n)) < 0.3) | np.eye(n, dtype=bool)
    pattern = of_mask(mask | mask.T)
    values = mirrored(pattern, rng.random(pattern.nnz).astype(dtype))
    values[pattern.row_of_entry == pattern.indices] += n
    factors = plan_factor(pattern, kind=kind)(values)
    b = rng.standard_normal((n, columns)).astype(dtype)
    x = factors.solve(b, transposed=transposed)
    refined = factors.refine(b, x, steps=2, transposed=transposed)
    assert x.shape == refined.shape == b.shape
    for k in range(columns):
        one = np.ascontiguousarray(b[:, k])
        np.testing.assert_array_equal(factors.solve(one, transposed=transposed), x[:, k])
        np.testing.assert_array_equal(
            factors.refine(one, np.ascontiguousarray(x[:, k]), steps=2, transposed=transposed), refined[:, k]
        )


def test_one_right_hand_side_for_a_batch():
    pattern, values = pattern_of(laplacian(5, 5))
    batch = np.ascontiguousarray(values[:, None] * np.array([1.0, 2.0, 3.0]))
    factors, b = plan_factor(pattern)(batch), np.arange(25.0)
    x = factors.solve(b)
    np.testing.assert_array_equal(x, factors.solve(np.repeat(b[:, None], 3, axis=1)))
    np.testing.assert_allclose(x[:, 0], 2 * x[:, 1])
    np.testing.assert_array_equal(factors.refine(b, x), factors.refine(np.repeat(b[:, None], 3, axis=1), x))


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


# ---- a gallery -------------------------------------------------------------------------------------------------------


def line(n: int) -> sp.csr_array:
    return sp.csr_array(sp.diags_array([2.0, -1.0, -1.0], offsets=[0, 1, -1], shape=(n, n)))


def laplacian(*shape: int) -> sp.csr_array:
    """Finite differences of the Laplacian on a grid, Dirichlet boundary."""
    total = sp.csr_array((1, 1))
    for n in shape:
        total = sp.kron(total, sp.eye_array(n)) + sp.kron(sp.eye_array(total.shape[0]), line(n))
    return sp.csr_array(total)


def convection(n: int, speed: float) -> sp.csr_array:
    """Convection-diffusion on a square, upwind."""
    wind = sp.diags_array([1.0, -1.0], offsets=[0, -1], shape=(n, n))
    return sp.csr_array(laplacian(n, n) + speed * sp.kron(wind, sp.eye_array(n)))


def band(n: int, below: int, above: int) -> sp.csr_array:
    rng = np.random.default_rng(n)
    offsets = range(-below, above + 1)
    return sp.csr_array(sp.diags_array([rng.random(n - abs(k)) + (k == 0) for k in offsets], offsets=[*offsets]))


def arrow(n: int, backwards: bool = False) -> sp.csr_array:
    matrix = np.eye(n) * n
    matrix[0], matrix[:, 0] = 1, 1
    matrix[0, 0] = n
    return sp.csr_array(matrix[::-1, ::-1] if backwards else matrix)


def circuit(n: int, sources: int = 0) -> sp.csr_array:
    """Conductances of a random network, with voltage sources in further rows whose diagonal is zero."""
    rng = np.random.default_rng(n)
    ends = np.concatenate([[(i, rng.integers(i)) for i in range(1, n)], rng.integers(n, size=(n // 3, 2))])
    conductance = 10.0 ** rng.uniform(-6, 2, len(ends))
    matrix = sp.coo_array((-conductance, ends.T), shape=(n, n)).tocsr()
    matrix = matrix + matrix.T
    matrix = matrix - sp.diags_array(matrix.sum(axis=1) - 1e-6)
    chosen = rng.choice(n, sources, replace=False)
    at = sp.coo_array((np.ones(sources), (np.arange(sources), chosen)), shape=(sources, n))
    return sp.csr_array(sp.block_array([[matrix, at.T], [at, None]]) if sources else matrix)


def permuted(matrix: sp.csr_array, rows: bool = True) -> sp.csr_array:
    rng = np.random.default_rng(0)
    matrix = sp.csr_array(matrix)[rng.permutation(matrix.shape[0])]
    return sp.csr_array(matrix if rows else matrix[:, rng.permutation(matrix.shape[0])])


def hilbert(n: int) -> sp.csr_array:
    return sp.csr_array(1 / (1 + np.add.outer(np.arange(n), np.arange(n))))


def kahan(n: int) -> sp.csr_array:
    """The matrix for which partial pivoting grows as 2ⁿ⁻¹."""
    matrix = np.eye(n) - np.tril(np.ones((n, n)), -1)
    matrix[:, -1] = 1
    return sp.csr_array(matrix)


def random(n: int, density: float, seed: int = 0) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    return sp.csr_array(sp.random_array((n, n), density=density, rng=rng) + sp.eye_array(n).tocsr()[rng.permutation(n)])


GALLERY: dict[str, Callable[[], Any]] = {
    "one": lambda: [[3.0]],
    "tiny": lambda: [[1e-200]],
    "diagonal": lambda: sp.diags_array(np.arange(1.0, 14)),
    "identity backwards": lambda: np.eye(7)[::-1],
    "cyclic shift": lambda: np.roll(np.eye(11), 3, axis=1),
    "line": lambda: line(31),
    "line of 1000": lambda: line(1000),
    "square": lambda: laplacian(13, 13),
    "rectangle": lambda: laplacian(31, 7),
    "square of 40": lambda: laplacian(40, 40),
    "cube": lambda: laplacian(7, 7, 7),
    "cube of 11": lambda: laplacian(11, 11, 11),
    "slow wind": lambda: convection(12, 0.1),
    "strong wind": lambda: convection(12, 1e4),
    "biharmonic": lambda: laplacian(9, 9) @ laplacian(9, 9),
    "Helmholtz": lambda: laplacian(12, 12) - 2.3 * sp.eye_array(144),
    "band 1, 1": lambda: band(97, 1, 1),
    "band 2, 5": lambda: band(60, 2, 5),
    "band 7, 0": lambda: band(53, 7, 0),
    "band 0, 3": lambda: band(53, 0, 3),
    "arrow": lambda: arrow(40),
    "arrow backwards": lambda: arrow(40, backwards=True),
    "network": lambda: circuit(200),
    "network with sources": lambda: circuit(100, sources=9),
    "rows permuted": lambda: permuted(laplacian(9, 9)),
    "rows and columns permuted": lambda: permuted(band(50, 3, 1), rows=False),
    "saddle point": lambda: sp.block_array([[laplacian(5, 5), np.eye(25)[:, ::3]], [np.eye(25)[::3], None]]),
    "zero diagonal": lambda: np.ones((6, 6)) - np.eye(6),
    "small pivot": lambda: [[1e-20, 1.0], [1.0, 1.0]],
    "Hilbert 6": lambda: hilbert(6),
    "Hilbert 9": lambda: hilbert(9),
    "scaled rows": lambda: sp.diags_array(10.0 ** np.arange(-20, 20, 1.6)) @ laplacian(5, 5),
    "scaled columns": lambda: laplacian(5, 5) @ sp.diags_array(10.0 ** np.arange(-20, 20, 1.6)),
    "Kahan 20": lambda: kahan(20),
    "sparse 1": lambda: random(70, 0.02),
    "sparse 2": lambda: random(101, 0.05, seed=1),
    "dense": lambda: np.random.default_rng(0).standard_normal((61, 61)),
    "one dense row": lambda: sp.vstack([np.ones((1, 50)), sp.eye_array(50).tocsr()[1:]]),
    "stored zeros": lambda: sp.csr_array((np.array([2.0, 0, 0, 5]), [0, 1, 0, 1], [0, 2, 4]), shape=(2, 2)),
    "blocks": lambda: sp.kron(sp.eye_array(6), np.random.default_rng(3).standard_normal((5, 5))),
    "definite blocks": lambda: sp.kron(laplacian(5, 4), np.ones((3, 3)) + np.eye(3)),
    "disconnected": lambda: sp.block_diag([laplacian(4, 3), np.eye(3), arrow(7), line(11), [[5.0]]]),
    "definite": lambda: np.ones((61, 61)) + np.diag(np.arange(1.0, 62)),
}
DEFINITE = ("one", "tiny", "diagonal", "line", "line of 1000", "square", "rectangle", "square of 40", "cube",
            "cube of 11", "biharmonic", "arrow", "arrow backwards", "network", "Hilbert 6", "definite blocks",
            "disconnected", "definite")  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "lu") for name in GALLERY] + [(name, kind) for kind in ("cholesky", "ldlt") for name in DEFINITE],
)
def test_gallery(name, kind, transposed):
    pattern, values = pattern_of(GALLERY[name]())
    factors = plan_factor(pattern, values if kind == "lu" else None, kind=kind)(values)
    matrix = dense(pattern, values).T if transposed else dense(pattern, values)
    b = np.random.default_rng(1).standard_normal(len(matrix))
    x = factors.solve(b, transposed=transposed)
    assert_as_small_as_superlu(matrix, x, b)
    assert_as_small_as_superlu(matrix, factors.refine(b, x, transposed=transposed), b)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "lu") for name in ("line of 1000", "square of 40", "cube of 11", "saddle point", "sparse 2", "dense")]
    + [(name, "cholesky") for name in ("square of 40", "cube of 11", "definite blocks", "definite")]
    + [(name, "ldlt") for name in ("square of 40", "cube of 11", "definite blocks", "definite")],
)
def test_batches_of_larger_matrices(name, kind):
    """As one by one, in both dtypes: panels of every size and groups of them."""
    pattern, values = pattern_of(GALLERY[name]())
    plan, rng = plan_factor(pattern, values if kind == "lu" else None, kind=kind), np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        batch = (values[:, None] * (1 + 1e-3 * rng.random((pattern.nnz, 19)))).astype(dtype)
        batch = mirrored(pattern, batch) if kind != "lu" else batch
        b = rng.standard_normal((pattern.shape[0], 19)).astype(dtype)
        factors = plan(batch)
        x = factors.solve(b)
        np.testing.assert_array_equal(factors.values, batch)
        for s in (0, 7, 18):
            one = plan(np.ascontiguousarray(batch[:, s])).solve(np.ascontiguousarray(b[:, s]))
            np.testing.assert_array_equal(x[:, s], one)
            assert backward_error(dense(pattern, batch[:, s]), one, b[:, s]) < 100 * np.finfo(dtype).eps


@settings(max_examples=200)
@given(n=sizes(1, 12), kind=kinds, batch=st.sampled_from([None, 1, 3, 9, 17]), of_a=st.floats(-1, 1),
       of_b=st.floats(-1, 1), trans=st.sampled_from("NTH"), seed=seeds,
       dtype=st.sampled_from([np.float32, np.float64, np.complex64, np.complex128]))  # fmt: skip
@either_way
def test_powers_of_two_change_no_digit(n, kind, batch, of_a, of_b, trans, seed, dtype):
    """Of factors, solutions and refined ones, up to the ends of the dtype, where matrices are refused."""
    rng, numbers = np.random.default_rng(seed), np.finfo(dtype)
    matrices, columns = complex_matrices(rng, n, 0.3, kind, batch or 1, np.complex128), batch or 3
    matrices = (matrices if numbers.dtype != dtype else matrices.real + np.eye(n) * 4 * n).astype(dtype)
    pattern = of_mask((matrices != 0).any(axis=0))
    values = np.ascontiguousarray(matrices[:, pattern.row_of_entry, pattern.indices].T)
    b = rng.standard_normal((n, columns)).astype(dtype) * dtype(1 if numbers.dtype == dtype else 1 + 2j)
    plan, solver = plan_factor(pattern, kind=kind), kernels.on_host().factor_solve
    room = numbers.maxexp - 12
    k, m = round(of_a * room / 2) * 2, round(of_b * room)  # Cholesky factors have the root
    m = m if abs(m - k) < room else k

    def sized(a: Array, exponent: int) -> Array:
        return solver.scaled(a, np.full(a.shape[1], exponent))

    def factors(values: Array) -> Any:
        return plan(values if batch else values[:, 0].copy())

    good = factors(values)
    try:
        found = factors(sized(values, k))
    except PivotError as error:
        assert "near an end of" in str(error)
        assert k > numbers.maxexp - 20 or k < numbers.minexp + numbers.nmant
        return
    x, expected = found.solve(sized(b, m), trans), good.solve(b, trans)
    tiny = numbers.tiny * 2.0**-numbers.nmant if abs(x).max() < numbers.tiny / numbers.eps else numbers.tiny
    assert (abs(x - sized(expected, m - k)) <= tiny).all()
    refined = sized(found.refine(sized(b, m), x, trans), k - m)
    for s in range(columns):
        matrix = {"N": lambda a: a, "T": lambda a: a.T, "H": lambda a: a.conj().T}[trans](matrices[s if batch else 0])
        assert backward_error(matrix, refined[:, s], b[:, s]) <= 4 * (n + 1) * numbers.eps
    np.testing.assert_array_equal(found.growth, good.growth)


# ---- matrices that are refused ---------------------------------------------------------------------------------------

SINGULAR: dict[str, Callable[[], Any]] = {
    "zero": lambda: np.zeros((3, 3)) * sp.eye_array(3),
    "no entries": lambda: sp.csr_array((4, 4)),
    "a zero row": lambda: [[1.0, 2.0], [0.0, 0.0]],
    "a zero column": lambda: [[1.0, 0.0], [2.0, 0.0]],
    "structurally": lambda: [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
    "equal rows": lambda: [[1.0, 2.0, 3.0], [4.0, 5.0, 7.0], [1.0, 2.0, 3.0]],
    "Neumann": lambda: laplacian(8, 8) - sp.diags_array(laplacian(8, 8).sum(axis=1)),
    "rank one": lambda: np.outer([1.0, 3.0, 7.0], [0.1, 0.3, 0.7]),
    "NaN": lambda: [[1.0, np.nan], [0.0, 1.0]],
    "infinite": lambda: [[1.0, 0.0], [np.inf, 1.0]],
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_values_are_refused(name):
    """By the plan, or by its call."""
    pattern, values = pattern_of(SINGULAR[name]())
    with pytest.raises(PivotError) as caught:
        plan_factor(pattern, values)(values)
    assert caught.value.samples == ()


NAMED = {
    "zero": "row 0",
    "no entries": "row 0",
    "a zero row": "row 1",
    "a zero column": "column 1",
    "structurally": "row [12]",
    "equal rows": "row [02], a combination",
    "Neumann": r"row \d+, a combination",
    "rank one": "row [012], a combination",
    "NaN": "nan.*, first in row 0, column 1",
    "infinite": "inf.*, first in row 1, column 0",
}


@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("way", ["pattern", "matrix", "batch"])
def test_messages_name_a_row_of_singular_values(name, way):
    """At planning, and at a call of a plan that was made for others."""
    matrix = sp.csr_array(SINGULAR[name]())
    with pytest.raises(PivotError, match=NAMED[name]) as caught:
        if way == "matrix":
            plan_factor(matrix)(matrix)
        else:
            pattern, values = pattern_of(matrix + sp.csr_array(np.zeros(matrix.shape)))
            pattern = SparsityPattern.dense(*matrix.shape)
            plan, values = plan_factor(pattern), pattern.values_of(matrix)
            good = plan.pattern.values_of(sp.csr_array(np.eye(len(plan.rows))))
            plan(np.stack([good, values, good], axis=1) if way == "batch" else values)
    assert "nan times" not in str(caught.value)
    assert caught.value.samples == ((1,) if way == "batch" else ())


def test_a_row_that_depends_on_others_is_found_among_many():
    matrix = sp.lil_array(laplacian(15, 15) + 0.1 * sp.eye_array(225))
    matrix[17] = matrix[40] + 2 * matrix[100]
    plan = plan_factor(sp.csr_array(matrix + 0.01 * sp.eye_array(225)))
    with pytest.raises(PivotError, match=r"singular to working precision.*row (17|40|100), a combination"):
        plan(matrix)


@given(n=sizes(1, 40), per_row=st.sampled_from([1.5, 2.5, 4.0]), symmetric=st.booleans(), seed=seeds)
@settings(max_examples=60)
def test_structures_without_a_pivot_for_each_row_are_named(n, per_row, symmetric, seed):
    """SuperLU may crash on them. The rank is SciPy's; the row that is named is one too many."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n, n)) < per_row / n
    mask |= mask.T & symmetric
    mask[np.arange(n), rng.integers(n, size=n)] = True  # no row is empty, no column
    mask[rng.integers(n, size=n), np.arange(n)] = True
    matrix = sp.csr_array(rng.standard_normal((n, n)) * mask)
    if structural_rank(matrix) == n:
        try:
            plan_factor(matrix)(matrix)
        except PivotError as error:
            assert "no column left" not in str(error)
        return
    with pytest.raises(PivotError, match=r"no column left for the pivot of row \d+") as caught:
        plan_factor(matrix)
    row = int(re.search(r"row (\d+)", str(caught.value))[1])
    assert structural_rank(matrix[np.arange(n) != row]) == structural_rank(matrix)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, bool])
def test_integers_are_right_hand_sides_and_matrices(dtype):
    """As SciPy takes them: LinearOperator asks its function for a result of int8 zeros."""
    matrix = sp.csr_array(np.array([[4, 1, 0], [1, 3, 1], [0, 1, 2]]))
    factors = plan_factor(matrix)(matrix)
    assert factors.dtype == np.float64
    b = np.array([1, 0, 1], dtype)
    np.testing.assert_array_equal(factors.solve(b), factors.solve(b.astype(float)))
    single = plan_factor(matrix)(matrix.astype(np.float32))
    assert single.solve(b).dtype == np.float32
    if dtype == np.int64:
        for refuses, most in ((single, 2**24), (factors, 2**53)):
            refuses.solve(np.full(3, most))
            with pytest.raises(DTypeError, match="would round"):
                refuses.solve(np.array([0, 0, most + 1]))


def test_factors_precondition_scipys_solvers():
    matrix = laplacian(9, 9)
    factors = plan_factor(matrix, kind="cholesky")(matrix)
    inverse = LinearOperator(matrix.shape, factors.solve, lambda b: factors.solve(b, transposed=True))
    assert inverse.dtype == np.float64
    b = np.arange(81.0)
    for solver in (cg, gmres):
        _, code = solver(matrix + 0.01 * sp.eye_array(81), b, M=inverse, maxiter=5)
        assert code == 0
    np.testing.assert_allclose(inverse @ matrix.toarray(), np.eye(81), atol=1e-12)
    np.testing.assert_allclose(inverse.T @ (matrix @ b), b, atol=1e-12)
    np.testing.assert_allclose(abs(eigsh(matrix, k=3, sigma=0, OPinv=inverse)[0]), eigsh(matrix, k=3, sigma=0)[0])


def test_sparse_right_hand_sides_are_dense_ones():
    matrix = sp.csr_array(laplacian(4, 3))
    factors, b = plan_factor(matrix)(matrix), np.eye(12)[:, ::3]
    for kind in (sp.csr_array, sp.csc_array, sp.coo_matrix):
        x = factors.solve(kind(b))
        assert type(x) is np.ndarray
        np.testing.assert_array_equal(x, factors.solve(np.ascontiguousarray(b)))
    np.testing.assert_array_equal(factors.solve(np.asfortranarray(b)), factors.solve(np.ascontiguousarray(b)))


def test_cholesky_factors_of_matrices_want_both_triangles():
    """An array of values is read above the diagonal alone; a triangle of zeros in a matrix would go unseen."""
    matrix = sp.csr_array(laplacian(3, 3))
    plan = plan_factor(matrix, kind="cholesky")
    noisy = matrix.copy()
    noisy.data *= 1 + 1e-14 * np.random.default_rng(0).standard_normal(noisy.nnz)
    np.testing.assert_allclose(plan(noisy).solve(np.ones(9)), plan(matrix).solve(np.ones(9)))
    for wrong in (sp.tril(matrix), sp.triu(matrix), matrix + sp.csr_array(([0.1], ([0], [1])), shape=(9, 9))):
        with pytest.raises(PivotError, match=r"not symmetric.* in row 0, column 1, .* across"):
            plan(wrong)


@given(n=sizes(1, 12), seed=seeds)
def test_matrices_in_any_order(n, seed):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, n)) * (rng.random((n, n)) < 0.4) + n * np.eye(n)[rng.permutation(n)]
    b = rng.standard_normal(n)
    coo, order = sp.coo_array(matrix), rng.permutation(np.count_nonzero(matrix))
    mixed = sp.coo_array((coo.data[order], (coo.row[order], coo.col[order])), coo.shape)
    plan = plan_factor(mixed)
    fewer = mixed.tocsr()
    fewer.data[:: 2 * n] *= 1 + 1e-3
    for given_matrix in (mixed, sp.csc_array(matrix), sp.lil_array(matrix)):
        np.testing.assert_array_equal(plan(given_matrix).values, plan.pattern.values_of(sp.csr_array(matrix)))
        assert backward_error(matrix, plan(given_matrix).solve(b), b) < 1e-13
    assert backward_error(fewer.toarray(), plan_factor(mixed, fewer)(fewer).solve(b), b) < 1e-13


INDEFINITE: dict[str, Callable[[], Any]] = {
    "indefinite": lambda: [[1.0, 2.0], [2.0, 1.0]],
    "negative": lambda: -laplacian(3, 5),
    "semidefinite": lambda: laplacian(8, 8) - sp.diags_array(laplacian(8, 8).sum(axis=1)),
    "rank one": lambda: np.outer([1.0, 3.0, 7.0], [1.0, 3.0, 7.0]),
    "zero": lambda: sp.csr_array((np.zeros(3), np.arange(3), np.arange(4)), shape=(3, 3)),
    "almost zero": lambda: [[1.0, 1.0], [1.0, 1 + 1e-16]],
    "NaN": lambda: [[1.0, np.nan], [np.nan, 1.0]],
    "infinite": lambda: [[np.inf, 0.0], [0.0, 1.0]],
    "infinite pivot": lambda: [[1.0, 1e200], [1e200, 1.0]],
}


@pytest.mark.parametrize("name", INDEFINITE)
def test_values_that_are_not_positive_definite_are_refused(name):
    """Alone and in a batch of good ones."""
    pattern, values = pattern_of(INDEFINITE[name]())
    plan = plan_factor(pattern, kind="cholesky")
    with pytest.raises(PivotError, match=r"not positive definite to working precision.*first in row"):
        plan(values)
    good = np.where(pattern.row_of_entry == pattern.indices, 9.0, 1.0 / pattern.shape[0])
    batch = np.stack([good, good, values, good], axis=1)
    with pytest.raises(PivotError, match=r"1 of 4 matrices .* samples 2, first in row") as caught:
        plan(batch)
    assert caught.value.samples == (2,)


def test_the_first_pivot_that_is_not_positive_is_named():
    pattern, values = pattern_of(sp.block_diag([laplacian(3, 3), [[1.0, 3.0], [3.0, 2.0]], np.eye(2)]))
    with pytest.raises(PivotError, match=r"first in row (9|10)"):
        plan_factor(pattern, kind="cholesky")(values)


def test_values_above_the_diagonal_are_those_that_cholesky_reads():
    pattern, values = pattern_of(laplacian(5, 4))
    plan, b = plan_factor(pattern, kind="cholesky"), np.ones(20)
    factors, other = plan(values), np.where(pattern.row_of_entry > pattern.indices, np.nan, values)
    x, found = factors.solve(b), plan(other)
    np.testing.assert_array_equal(found.solve(b), x)
    np.testing.assert_array_equal(found.refine(b, x), factors.refine(b, x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bad_samples_are_named_and_spare_the_others(dtype):
    """Zero pivots, NaN anywhere, overflow: those samples and no others."""
    pattern, values = pattern_of(laplacian(6, 6))
    batch, plan = np.repeat(values[:, None], 21, axis=1).astype(dtype), plan_factor(pattern)
    good = plan(batch)
    batch[:, 3] = 0
    batch[0, 8], batch[-1, 9], batch[1, 20] = np.nan, np.nan, np.nan
    batch[:, 11] *= np.finfo(dtype).max
    with pytest.raises(PivotError, match="5 of 21 matrices cannot be factorised") as caught:
        plan(batch)
    assert caught.value.samples == (3, 8, 9, 11, 20)
    assert "3, 8, 9, 11, 20" in str(caught.value)
    kept = [s for s in range(21) if s not in caught.value.samples]
    b = np.ones((36, 21), dtype)
    fewer = plan(np.ascontiguousarray(batch[:, kept])).solve(b[:, : len(kept)].copy())
    np.testing.assert_array_equal(fewer, good.solve(b)[:, kept])


def test_nan_above_the_diagonal_is_refused():
    """No pivot depends on it."""
    pattern = of_mask(np.triu(np.ones((5, 5))))
    plan = plan_factor(pattern)
    for at in range(pattern.nnz):
        values = np.ones((pattern.nnz, 9))
        values[at, 4] = np.nan
        with pytest.raises(PivotError) as caught:
            plan(values)
        assert caught.value.samples == (4,)
        with pytest.raises(PivotError):
            plan(np.ascontiguousarray(values[:, 4]))


@given(exponent=st.integers(1, 300), dtype=reals)
def test_other_pivots_are_refused_before_digits_are_lost(exponent, dtype):
    """[[p, 1], [1, 1]] with p on the diagonal: right while p is not too small, refused then, and well planned anew."""
    pivot = dtype.type(10.0**-exponent)
    pattern, values = SparsityPattern.dense(2, 2), np.array([pivot, 1, 1, 1], dtype)
    eps, b = float(np.finfo(dtype).eps), np.array([1, 2], dtype)
    matrix = values.reshape(2, 2)
    try:
        factors = plan_factor(pattern)(values)
    except PivotError as error:
        assert pivot < 2 * eps**0.5
        assert "Plan again with these values" in str(error) or not pivot
        x = plan_factor(pattern, values)(values).solve(b)
        assert backward_error(matrix, x, b) <= 4 * eps
    else:
        assert backward_error(matrix, factors.solve(b), b) <= 4 * eps**0.5
        assert backward_error(matrix, factors.refine(b, factors.solve(b), steps=3), b) <= 4 * eps


def test_a_plan_with_values_takes_their_pivots():
    """And a batch with other values is refused by name."""
    small, large = np.array([1e-12, 1.0, 1.0, 1e-12]), np.array([1.0, 0.5, 0.5, 1.0])
    pattern, batch = SparsityPattern.dense(2, 2), np.stack([small, large, small], axis=1)
    plan = plan_factor(pattern, large)
    assert plan(large).growth < 3
    with pytest.raises(PivotError, match=r"2 of 3 matrices .* samples 0, 2\..*values\[:, 0\]") as caught:
        plan(batch)
    assert caught.value.samples == (0, 2)
    assert plan_factor(pattern, small)(small).growth < 3


# ---- the same whatever came before -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 5, 64])
@pytest.mark.parametrize(("name", "kind"), [("cube of 11", "cholesky"), ("cube of 11", "lu")])
def test_any_number_of_threads(name, kind, batch):
    pattern, values = pattern_of(GALLERY[name]())
    if batch:
        values = values[:, None] * (1 + 0.01 * np.random.default_rng(0).random((pattern.nnz, batch)))
    plan, b = plan_factor(pattern, kind=kind), np.ones((pattern.shape[0], *values.shape[1:]))

    def run() -> list[Array]:
        factors = plan(values)
        x = factors.solve(b)
        return [x, factors.solve(b, transposed=True), factors.refine(b, x), np.asarray(factors.growth)]

    assert_same_for_any_number_of_threads(run)


@pytest.mark.parametrize("kind", ["lu", "cholesky", "ldlt"])
def test_threads_share_a_plan(kind):
    """Each with its own factors, whose memory it uses again, of one matrix or a batch; values change meanwhile."""
    pattern, values = pattern_of(GALLERY["cube"]())
    plan, b = plan_factor(pattern, kind=kind), np.ones((pattern.shape[0], 9))
    expected = [plan(scale * values).solve(b[:, 0].copy()) for scale in range(1, 5)]

    def work(number: int) -> None:
        batch = number % 2 == 1
        mine = np.repeat(values[:, None], 9, axis=1) if batch else values.copy()
        right, factors = b if batch else b[:, 0].copy(), None
        for _ in range(10):
            for k in range(4):
                mine[:] = (k + 1) * (values[:, None] if batch else values)
                factors = plan(mine, out=factors)
                mine[:] = np.nan
                x = factors.solve(right)
                np.testing.assert_array_equal(x[:, 4] if batch else x, expected[k])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_plans_of_equal_input_are_equal():
    pattern, values = pattern_of(GALLERY["network with sources"]())
    plans = [plan_factor(pattern, values) for _ in range(2)]
    for first, second in zip(plans[0].panels, plans[1].panels, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_plan_can_be_copied():
    """Its copy computes the same, and its arrays are read-only too."""
    pattern, values = pattern_of(GALLERY["saddle point"]())
    plan, b = plan_factor(pattern, values), np.ones(pattern.shape[0])
    copy = pickle.loads(pickle.dumps(plan))
    np.testing.assert_array_equal(copy(values).solve(b), plan(values).solve(b))
    assert not any(array.flags.writeable for array in copy.panels[:-2])


def eliminated(mask: Array) -> Array:
    """Return where L + U has entries."""
    filled = mask.copy()
    for k in range(len(mask)):
        filled[k + 1 :, k + 1 :] |= np.outer(filled[k + 1 :, k], filled[k, k + 1 :])
    return filled


@given(n=sizes(0, 33), density=st.sampled_from([0.05, 0.1, 0.2, 0.4]), block=st.sampled_from([1, 1, 3, 5]),
       symmetric=st.booleans(), half=st.booleans(), seed=seeds)  # fmt: skip
@either_way
def test_structure(n, density, block, symmetric, half, seed):
    """Against elimination of a matrix of booleans: U is exact, L fills up panels, and every panel has what it reads."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n, n)) < density
    mask = (mask | mask.T if symmetric or half else mask) | np.eye(n, dtype=bool)
    mask, n = np.kron(mask, np.ones((block, block), bool)), n * block
    equal: list[int] = []  # rows that are made equal to the next one

    def noted(nodes: Any, widths: Array) -> Array:
        found = pairs(nodes, widths)
        equal.extend((np.cumsum(widths) - widths)[found])
        return found

    pairs = elimination._pairs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "_pairs", noted)
        patch.setattr(elimination, "FEW", 1000)
        plan = plan_factor(of_mask(mask), kind="cholesky" if half else "lu")
    filled, at = mask[np.ix_(plan.rows, plan.columns)], plan.panels
    for i in equal:
        filled[i : i + 2] = filled[i : i + 2].any(axis=0)
        filled[:, i : i + 2] = filled[:, i : i + 2].any(axis=1, keepdims=True)
    filled = eliminated(filled)
    columns = [set(at.columns[at.column_ptr[p] : at.column_ptr[p + 1]].tolist()) for p in range(len(at.own))]
    for p, own in enumerate(at.own):
        rows, lefts = range(at.first[p], at.first[p + 1]), at.left[at.left_ptr[p] : at.left_ptr[p + 1]]
        assert 1 <= len(rows) <= 4
        kept = at.columns[at.column_ptr[p] : at.column_ptr[p + 1]]
        assert sorted(columns[p]) == kept.tolist() and [*kept[own : own + len(rows)]] == [*rows]
        for row in rows:
            assert {*np.flatnonzero(filled[row, rows[0] if half else 0 :]) + (rows[0] if half else 0)} <= columns[p]
            assert {*np.flatnonzero(filled[row, rows[-1] + 1 :]) + rows[-1] + 1} == {*kept[own + len(rows) :]}
        whole = [c for q in lefts for c in range(at.first[q], at.first[q + 1])]
        assert [*kept[:own]] == ([] if half else whole)
        for q in lefts:
            assert {c for c in columns[q] if c >= (rows[0] if half else at.first[q + 1])} <= columns[p]
        assert {*np.flatnonzero(filled[rows[0] : rows[-1] + 1, : rows[0]].any(axis=0))} <= {*whole}
    assert [at.tasks[0], at.tasks[-1]] == [0, len(at.own)] and (np.diff(at.tasks) > 0).all()
    assert plan.fill == at.base[-1] == sum(len(c) * r for c, r in zip(columns, np.diff(at.first), strict=True))


@given(n=sizes(0, 40), density=st.sampled_from([0.0, 0.02, 0.05, 0.1, 0.3]), seed=seeds)
def test_supernodes_of_a_tree_are_those_of_all_entries(n, density, seed):
    """A symmetric pattern has the same supernodes, found from its elimination tree or row by row."""
    mask = np.random.default_rng(seed).random((n, n)) < density
    pattern = of_mask(mask | mask.T | np.eye(n, dtype=bool))
    order, _ = ordering.order_diagonal(pattern, None, symmetric=True)
    place, heads = np.argsort(order).astype(np.int32), np.arange(n + 1)
    tree, rows = (elimination._supernodes(pattern, order, place, heads, symmetric) for symmetric in (True, False))
    for name, one, other in zip(tree._fields, tree, rows, strict=True):
        np.testing.assert_array_equal(one, other, name)


@pytest.mark.parametrize("given_values", [False, True])
@pytest.mark.parametrize("order", ["natural", "minimum_degree", "nested_dissection", "permutation"])
@pytest.mark.parametrize("name", ["grid", "unsymmetric", "saddle point", "empty", "one"])
def test_orders_that_are_asked_for(name, order, given_values):
    """Every order gives solutions as accurate as SuperLU's; one without fill is kept as it is."""
    if order == "nested_dissection":
        pytest.importorskip("pymetis")
    rng = np.random.default_rng(0)
    matrix = {
        "grid": lambda: laplacian(9, 7), "empty": lambda: sp.csr_array((0, 0)), "one": lambda: sp.csr_array([[3.0]]),
        "unsymmetric": lambda: sp.random_array((40, 40), density=0.1, rng=rng) + 9 * sp.eye_array(40),
        "saddle point": lambda: sp.block_array([[sp.eye_array(20), np.ones((20, 3)) * rng.random((20, 3))],
                                                [rng.random((3, 20)), None]]),
    }[name]()  # fmt: skip
    if name == "saddle point" and not given_values:
        return
    pattern, values = pattern_of(matrix)
    n = pattern.shape[0]
    wanted = rng.permutation(n) if order == "permutation" else order
    plan = plan_factor(pattern, values if given_values else None, order=wanted)
    b = rng.standard_normal(n)
    assert_as_small_as_superlu(dense(pattern, values), plan(values).solve(b), b)
    if name == "grid" and order in ("natural", "permutation"):
        assert plan.fill > plan_factor(pattern).fill


def test_pivots_on_the_diagonal_where_they_are_good():
    """An arrow pattern fills up if its head goes first, which partial pivoting would have here."""
    n = 50
    matrix = sp.lil_array((n, n))
    matrix.setdiag(1.0)
    matrix[n - 1], matrix[:, n - 1] = 0.5, 1.5
    matrix[n - 1, n - 1] = 99.0
    pattern, values = pattern_of(matrix)
    plan = plan_factor(pattern, values)
    assert plan.fill < 4 * n and list(plan.rows) == list(plan.columns)
    values[pattern.row_of_entry == pattern.indices] = 1e-6
    plan = plan_factor(pattern, values)
    assert list(plan.rows) != list(plan.columns)
    assert plan(values).growth < 100  # 1e6 on the diagonal


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [1, 2, 3], np.arange(3.0), "METIS", 3])
def test_what_is_no_order_is_refused(order):
    with pytest.raises(OptionError, match="order"):
        plan_factor(SparsityPattern.dense(3, 3), order=order)


def test_factors_own_their_values():
    """Values may be overwritten, read-only or of an earlier shape; solving changes neither b nor x."""
    pattern, values = pattern_of(laplacian(7, 5))
    plan, b, before = plan_factor(pattern), np.ones(35), values.copy()
    values.flags.writeable = b.flags.writeable = False
    factors = plan(values)
    plan(np.ones((pattern.nnz, 3)) * (1 + 99 * (pattern.row_of_entry == pattern.indices))[:, None])
    x = factors.solve(b)
    x.flags.writeable = False
    refined = factors.refine(b, x)
    values.flags.writeable = True
    values[:] = np.nan
    np.testing.assert_array_equal(factors.refine(b, x), refined)
    np.testing.assert_array_equal(factors.values, before)
    np.testing.assert_array_equal(plan(before).solve(b), x)
    assert not plan.rows.flags.writeable and not plan.columns.flags.writeable


def test_orders_and_sizes():
    """Rows and columns are permutations, and L + U of a line has no entry that the line has not."""
    pattern, values = pattern_of(line(50))
    for plan in (plan_factor(pattern), plan_factor(pattern, values)):
        assert sorted(plan.rows) == sorted(plan.columns) == [*range(50)]
        assert pattern.nnz <= plan.fill <= pattern.nnz + 4
        assert plan.flops > 0
        assert "148" in repr(plan) and "one matrix" in repr(plan(values))


@pytest.mark.parametrize("kind", ["lu", "cholesky", "ldlt"])
@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("batch", [None, 0, 1, 2])
def test_empty(n, batch, kind):
    shape = () if batch is None else (batch,)
    plan = plan_factor(SparsityPattern.diagonal(n), kind=kind)
    assert plan.kind == kind
    factors = plan(2 * np.ones((n, *shape)))
    b = np.ones((n, *shape))
    x = factors.solve(b)
    np.testing.assert_allclose(x, b / 2, rtol=1e-15)
    np.testing.assert_allclose(factors.refine(b, x), x, rtol=1e-15)
    assert factors.growth.shape == shape


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_plans():
    square = SparsityPattern.dense(3, 3)
    for error, pattern, values in [
        (PatternError, np.eye(3), None), (ShapeError, SparsityPattern.dense(3, 4), None),
        (PatternError, of_mask([[1, 1], [1, 0]]), None), (ShapeError, square, np.ones(8)),
        (ShapeError, square, np.ones((9, 1))), (DTypeError, square, np.ones(9, int)),
        (LayoutError, square, np.ones(18)[::2]), (DTypeError, square, [1.0] * 9),
    ]:  # fmt: skip
        with pytest.raises(error):
            plan_factor(pattern, values)
    for error, pattern, values, kind in [
        (OptionError, square, None, "Cholesky"), (OptionError, square, np.ones(9), "cholesky"),
        (PatternError, of_mask([[1, 1], [0, 1]]), None, "cholesky"),
        (PatternError, of_mask(np.kron([[1, 1], [0, 1]], np.ones((3, 3)))), None, "cholesky"),
        (PatternError, of_mask([[1, 1], [1, 0]]), None, "cholesky"),
        (OptionError, square, np.ones(9), "ldlt"), (PatternError, of_mask([[1, 1], [1, 0]]), None, "ldlt"),
        (PatternError, of_mask([[1, 1, 0], [0, 1, 0], [0, 1, 1]]), None, "ldlt"),
    ]:  # fmt: skip
        with pytest.raises(error):
            plan_factor(pattern, values, kind=kind)
    for error, options in [
        (OptionError, {"signs": [1, 1, 1]}), (OptionError, {"regularize": 1e-8, "kind": "cholesky"}),
        (ShapeError, {"signs": [1, 1], "kind": "ldlt"}), (OptionError, {"signs": [1, 2, 1], "kind": "ldlt"}),
        (OptionError, {"regularize": -1.0, "kind": "ldlt"}), (OptionError, {"regularize": "1", "kind": "ldlt"}),
    ]:  # fmt: skip
        with pytest.raises(error):
            plan_factor(square, **options)


def test_wrong_arguments():
    plan = plan_factor(SparsityPattern.dense(3, 3))
    values = (np.ones((3, 3)) + 9 * np.eye(3)).ravel()
    one, batch = plan(values), plan(np.repeat(values[:, None], 2, axis=1))
    for error, call in [
        (ShapeError, lambda: plan(np.ones(8))), (ShapeError, lambda: plan(np.ones((9, 2, 1)))),
        (DTypeError, lambda: plan(np.ones(9, np.float16))), (LayoutError, lambda: plan(np.ones(18)[::2])),
        (DTypeError, lambda: plan([1.0] * 9)),
        (ShapeError, lambda: one.solve(np.ones(4))), (ShapeError, lambda: one.solve(np.ones((3, 1, 1)))),
        (DTypeError, lambda: one.solve(np.ones(3, np.float32))), (LayoutError, lambda: one.solve(np.ones(6)[::2])),
        (DTypeError, lambda: one.solve([1.0] * 3)), (ShapeError, lambda: batch.solve(np.ones((3, 3)))),
        (ShapeError, lambda: one.refine(np.ones(3), np.ones((3, 1)))),
        (DTypeError, lambda: one.refine(np.ones(3), np.ones(3, np.float32))),
        (ShapeError, lambda: batch.refine(np.ones(3), np.ones(3))),
        (OptionError, lambda: one.refine(np.ones(3), np.ones(3), steps=0)),
        (OptionError, lambda: one.solve(np.ones(3), transposed=1)), (OptionError, lambda: one.solve(np.ones(3), "C")),
        (OptionError, lambda: plan(values, out=batch)), (OptionError, lambda: plan(values, out=1)),
        (OptionError, lambda: plan(values.astype(np.float32), out=one)),
        (OptionError, lambda: plan_factor(plan.pattern)(values, out=one)),
    ]:  # fmt: skip
        with pytest.raises(error):
            call()


def test_arrays_on_a_device_are_refused(monkeypatch):
    class Device:
        dtype, shape, ndim = np.dtype(float), (9,), 1

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Device, __name__="cupy"))
    plan = plan_factor(SparsityPattern.dense(3, 3))
    factors = plan((np.ones((3, 3)) + np.eye(3)).ravel())
    for call in (lambda: plan_factor(plan.pattern, Device()), lambda: plan(Device()), lambda: factors.solve(Device())):
        with pytest.raises(DeviceError, match="is on a device, and factors are computed on the host"):
            call()


def test_rows_of_very_different_sizes_are_ordered_for_their_pivots():
    """The order of minimum degree, with pivots near the diagonal, loses all digits of this matrix."""
    matrix = sp.csr_array([[1e11, -2e11, -1e11], [10, 20, -10], [0, 0, 2e-25]])
    pattern = SparsityPattern.from_scipy(matrix)
    factors = plan_factor(pattern, matrix.data)(matrix.data)
    np.testing.assert_allclose(factors.solve(matrix @ [1.0, 2, 3]), [1, 2, 3], rtol=1e-12)
