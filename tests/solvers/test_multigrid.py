"""`sb.multigrid` against pyamg's own hierarchies of the same operators."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.sparse.linalg import cg

import sparsebp as sb
from sparsebp.core.errors import DTypeError, NonFiniteError, OptionError, PatternError, ShapeError

pyamg = pytest.importorskip("pyamg")
JACOBI = ("jacobi", {"omega": 4 / 3, "iterations": 2})
ROUGH, SYMMETRIC = ("chebyshev", {"degree": 2}), ("gauss_seidel", {"sweep": "symmetric"})


def poisson(shape, dtype=np.float64):
    matrix = sp.csr_array(pyamg.gallery.poisson(shape, format="csr").astype(dtype))
    matrix.sum_duplicates()
    return matrix


def varied(matrix, seed=0):
    """Symmetric positive definite values on the same pattern."""
    scale = sp.diags_array(np.exp(0.2 * np.random.default_rng(seed).standard_normal(matrix.shape[0])))
    found = sp.csr_array(scale @ matrix @ scale).astype(matrix.dtype)
    found.sum_duplicates()
    return found


def by_pyamg(ml, matrix, pre, post, coarse="pinv"):
    """Return pyamg's solver with the same P and R and another matrix, with SciPy's products."""
    levels = []
    for level in ml.levels:
        new = pyamg.multilevel.MultilevelSolver.Level()
        new.A = matrix.copy()  # without the radii that pyamg has kept on it
        if hasattr(level, "P"):
            new.P, new.R = level.P.tocsr(), level.R.tocsr()
            matrix = sp.csr_array(new.R @ matrix @ new.P)
        levels.append(new)
    solver = pyamg.multilevel.MultilevelSolver(levels, coarse_solver=coarse)
    pyamg.relaxation.smoothing.change_smoothers(solver, pre, post)
    return solver


CASES = {
    "aggregation": (pyamg.smoothed_aggregation_solver, {}, SYMMETRIC, SYMMETRIC, {}),
    "classical": (pyamg.ruge_stuben_solver, {}, SYMMETRIC, SYMMETRIC, {}),
    "jacobi": (pyamg.ruge_stuben_solver, {"presmoother": JACOBI, "postsmoother": JACOBI}, JACOBI, JACOBI, None),
    "chebyshev": (
        pyamg.smoothed_aggregation_solver, {"presmoother": ROUGH, "postsmoother": JACOBI}, ROUGH, JACOBI, None
    ),
    "coarse": (
        pyamg.smoothed_aggregation_solver, {"coarse_solver": "splu", "max_coarse": 40}, SYMMETRIC, SYMMETRIC, {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_cycle_is_pyamgs(name):
    """On the old values, and after two updates; the hierarchy that was given is left alone."""
    make, options, pre, post, given = CASES[name]
    dtype = np.float32 if make is pyamg.ruge_stuben_solver else np.float64
    matrix = poisson((23, 17), dtype)
    ml = make(matrix, **options)
    before = [level.A.toarray() for level in ml.levels]
    given = {"presmoother": pre, "postsmoother": post} if given is None else given
    mg = sb.multigrid.from_pyamg(ml, **given)
    b = np.random.default_rng(1).standard_normal(matrix.shape[0]).astype(dtype)
    for new in (matrix, varied(matrix, 1), varied(matrix, 2)):
        values = new.data.copy()
        mg.update(values)
        values[:] = np.nan
        np.random.seed(0)  # noqa: NPY002  # pyamg estimates spectral radii from random vectors
        reference = by_pyamg(ml, new, pre, post, options.get("coarse_solver", "pinv"))
        for ours, theirs in zip(mg.matrices, reference.levels, strict=True):
            np.testing.assert_allclose(ours.toarray(), theirs.A.toarray(), atol=1e-5 if dtype == np.float32 else 1e-12)
        np.random.seed(0)  # noqa: NPY002
        mg.update(new.data)
        got, expected = (solver.solve(b, maxiter=2, tol=1e-30) for solver in (mg, reference))
        tolerance = 1e-4 if dtype == np.float32 else 1e-9
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * abs(expected).max())
    for level, values in zip(ml.levels, before, strict=True):
        np.testing.assert_array_equal(level.A.toarray(), values)


def test_a_preconditioner_follows_updates():
    matrix = poisson((40, 40))
    mg = sb.multigrid.from_pyamg(pyamg.smoothed_aggregation_solver(matrix))
    preconditioner, b = mg.aspreconditioner(), np.ones(1600)
    cells = np.exp(np.random.default_rng(0).standard_normal(1600))
    new = sp.csr_array(sp.diags_array(cells) @ matrix @ sp.diags_array(cells))
    new.sum_duplicates()
    for current, same in ((matrix, True), (new, False)):
        mg.update(current.data)
        x, info = cg(current, b, M=preconditioner, rtol=1e-10)
        assert info == 0
        np.testing.assert_allclose(current @ x, b, atol=1e-6)
        if same:
            np.testing.assert_allclose(mg.solve(b, tol=1e-12, accel="cg"), x, rtol=1e-6)
    np.testing.assert_array_equal(mg.aspreconditioner() @ b, preconditioner @ b)


def test_blocks_become_csr_and_need_their_smoother():
    matrix, near = pyamg.gallery.linear_elasticity((12, 12), format="bsr")
    ml = pyamg.smoothed_aggregation_solver(matrix, B=near)
    with pytest.raises(OptionError, match="level 0 depends on the matrix"):
        sb.multigrid.from_pyamg(ml)
    mg = sb.multigrid.from_pyamg(ml, presmoother=SYMMETRIC, postsmoother=SYMMETRIC)
    b = np.random.default_rng(0).standard_normal(matrix.shape[0])
    mg.update(2 * mg.matrices[0].tocsc())
    np.testing.assert_allclose(2 * matrix @ mg.solve(b, tol=1e-10, accel="cg"), b, atol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_hierarchies_of_one_level(n):
    matrix = sp.csr_array(np.eye(n) * 4)
    level = pyamg.multilevel.MultilevelSolver.Level()
    level.A = matrix
    mg = sb.multigrid.from_pyamg(pyamg.multilevel.MultilevelSolver([level]))
    mg.update(2 * matrix.data)
    if n:
        np.testing.assert_allclose(mg.solve(np.ones(n)), 1 / 8)


def test_wrong_input_is_refused():
    matrix = poisson((9, 9))
    mg = sb.multigrid.from_pyamg(pyamg.ruge_stuben_solver(matrix))
    for error, values in (
        (ShapeError, np.ones(3)), (DTypeError, matrix.data.astype(np.float32)),
        (NonFiniteError, np.where(matrix.data < 0, np.nan, 1)), (PatternError, sp.csr_array(np.ones((81, 81)))),
    ):  # fmt: skip
        with pytest.raises(error):
            mg.update(values)
    np.testing.assert_array_equal(mg.matrices[0].data, matrix.data)
    with pytest.raises(NonFiniteError, match="nan, first in row 0, column 1"):
        mg.update(np.where(matrix.data < 0, np.nan, 1))
    with pytest.raises(DTypeError, match="P float64"):
        sb.multigrid.from_pyamg(pyamg.smoothed_aggregation_solver(poisson((9, 9), np.float32)))
    with pytest.raises(OptionError, match="not a hierarchy"):
        sb.multigrid.from_pyamg(matrix)
    with pytest.raises(OptionError, match="without the other"):
        sb.multigrid.from_pyamg(pyamg.ruge_stuben_solver(matrix), presmoother="jacobi")
    jacobi = pyamg.ruge_stuben_solver(matrix, presmoother="jacobi")
    with pytest.raises(OptionError, match="Got jacobi"):
        sb.multigrid.from_pyamg(jacobi)
    other = pyamg.ruge_stuben_solver(matrix)
    other.levels[1].A = other.levels[1].A * 1.01
    with pytest.raises(OptionError, match="level 1 is not the product"):
        sb.multigrid.from_pyamg(other)
    unsorted = pyamg.ruge_stuben_solver(matrix)
    unsorted.levels[0].A = sp.csr_array((np.ones(2), np.array([1, 0]), np.array([0, 2, 2])), (2, 2))
    with pytest.raises(PatternError, match="unsorted"):
        sb.multigrid.from_pyamg(unsorted)
