"""The damped normal equations against dense ones: factors, long rows without n² entries, iterations, covariances."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp.core.errors import OptionError, PivotError
from sparsebp.solvers.normal_equations import Factored, Iterated, plan_normal_equations
from strategies import seeds

TIGHT = {"atol": 1e-14, "btol": 1e-14, "conlim": 0.0, "maxiter": 2000}


def banded(n, long, singular, seed, dtype=np.float64):
    """A chain with `long` full rows; `singular`: without them nothing says where it is."""
    rng = np.random.default_rng(seed)
    a = sp.diags_array([-np.ones(n), np.ones(n - 1)], offsets=[0, 1], shape=(n - singular, n))
    rows = rng.uniform(0.5, 1, (long, n)) * 10.0 ** rng.integers(-3, 4, (long, 1))
    whole = sp.vstack([a, sp.csr_array(rows)]).tocsr()[rng.permutation(n - singular + long)]
    whole.sort_indices()
    return sp.csr_array(whole.astype(dtype))


@settings(max_examples=30)
@given(n=st.sampled_from([1, 2, 61]), long=st.integers(0, 3), singular=st.booleans(), fix=st.booleans(),
       damped=st.sampled_from([0, 1e-8, 1e-2, 10]), iterated=st.booleans(), seed=seeds)  # fmt: skip
def test_steps_gradients_and_products(n, long, singular, fix, damped, iterated, seed):
    singular = singular and n > 1
    a, rng = banded(n, long, singular, seed), np.random.default_rng(seed)
    pattern = sb.SparsityPattern.from_scipy(a)
    f, d = rng.standard_normal(a.shape[0]), damped * rng.uniform(0.5, 1, n)
    if singular and not damped and not long:
        d = d + 0.1
    equations = Iterated(pattern, a.dtype, TIGHT) if iterated else Factored(pattern, np.float64)
    dense = a.toarray()
    for _ in range(2):  # memory is used again
        gradient, diagonal = equations.update(a.data, f)
        equations.damp(d)
    matrix = dense.T @ dense + np.diag(d)
    np.testing.assert_allclose(gradient, dense.T @ f, rtol=1e-10, atol=1e-10 * abs(gradient).max())
    np.testing.assert_allclose(diagonal, (dense**2).sum(axis=0), rtol=1e-12)
    room = 1e-13 * np.linalg.cond(matrix) + 1e-10
    best = np.linalg.lstsq(np.vstack([dense, np.diag(np.sqrt(d))]), -np.append(f, 0 * d))[0]
    np.testing.assert_allclose(equations.solve(), best, atol=room * abs(best).max())
    step = rng.standard_normal(n)
    np.testing.assert_allclose(equations.times(step), matrix @ step, atol=1e-10 * abs(matrix @ step).max())
    if fix:
        fixed = rng.random(n) < 0.4
        found, free = equations.solve_free(fixed, step), ~fixed
        expected = np.zeros(n)
        expected[free] = np.linalg.solve(matrix[free][:, free], (-gradient - matrix @ step)[free])
        np.testing.assert_allclose(found, expected, atol=room * (abs(expected).max(initial=0) + abs(step).max()))


@pytest.mark.parametrize("line", ["row", "column"])
def test_dense_rows_and_columns_fill_nothing(line):
    """A conserved sum, and a parameter that all residuals have: the plan is as long as the Jacobian."""
    n = 2001
    a = banded(n, 1, True, 0)
    pattern = sb.SparsityPattern.from_scipy(a if line == "row" else sp.csr_array(a.T))
    factor = plan_normal_equations(pattern).factor
    assert factor.pattern.nnz < 12 * n and factor.fill < 12 * n

    def f(x):
        chain = x[1:] - x[:-1] - 0.1 * np.sin(x[1:])
        return np.append(chain, np.sum(x) - 3) if line == "row" else np.append(chain - x[0], x)

    exact, iterated = (sb.least_squares(f, np.linspace(0, 1, n), tr_solver=way) for way in (None, "lsmr"))
    np.testing.assert_allclose(exact.cost, iterated.cost, rtol=1e-6, atol=1e-10)
    assert exact.success and iterated.success and exact.nfev < 30


def test_few_residuals_of_many_parameters():
    """Jᵀ J would have 9·10⁸ entries."""
    n = 30_000
    found = sb.least_squares(lambda x: np.stack([np.sum(x) - 1, np.sum(x * np.linspace(-1, 1, n))]), np.zeros(n))
    assert found.success and found.cost < 1e-12


@pytest.mark.parametrize("options", [{}, {"bounds": (-1, 0.5)}, {"loss": "soft_l1"}, {"x_scale": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lsmr_takes_the_exact_steps(options, dtype):
    def f(x):
        return np.concatenate([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]])

    x0 = np.full(30, 0.3, dtype)
    exact, iterated = (sb.least_squares(f, x0, tr_solver=way, max_nfev=5, **options) for way in ("exact", "lsmr"))
    assert iterated.x.dtype == dtype and iterated.nfev == exact.nfev
    np.testing.assert_allclose(iterated.x, exact.x, atol=2e-3 if dtype is np.float32 else 1e-6)


@pytest.mark.parametrize("sparse", [False, True])
def test_covariances_are_those_of_curve_fit(sparse):
    t = np.linspace(0, 4, 30)
    y, sigma = 2 * np.exp(-0.7 * t) + 0.5 + 0.02 * np.sin(50 * t), np.linspace(0.5, 2, 30)
    model = lambda t, a, b, c: a * np.exp(-b * t) + c  # noqa: E731
    f = lambda x: (model(t, *x) - y) / sigma  # noqa: E731
    ours = sb.least_squares(f, np.ones(3), None if sparse else "3-point", ftol=1e-15, xtol=1e-15, gtol=1e-15)
    theirs = scipy.optimize.least_squares(f, np.ones(3), "3-point", ftol=1e-15, xtol=1e-15, gtol=1e-15)
    for absolute in (False, True):
        expected = scipy.optimize.curve_fit(model, t, y, np.ones(3), sigma, absolute, ftol=1e-15, xtol=1e-15)[1]
        for found in (ours, theirs):
            covariance = sb.solvers.covariance(found, absolute_sigma=absolute)
            np.testing.assert_allclose(covariance, expected, rtol=1e-5)
            np.testing.assert_array_equal(covariance, covariance.T)
        few = sb.solvers.covariance(ours, [2, 0], absolute_sigma=absolute)
        np.testing.assert_allclose(few, expected[[2, 0]][:, [2, 0]], rtol=1e-5)


def test_covariances_of_many_parameters_with_a_conserved_sum():
    a = banded(300, 2, True, 3)
    a = sp.csr_array(sp.vstack([a, 0.3 * sp.eye_array(300)]))
    found = sb.least_squares(lambda x: a @ x - 1, np.zeros(300), lambda x: a)
    expected = np.linalg.inv((a.T @ a).toarray()) * 2 * found.cost / (a.shape[0] - 300)
    covariance = sb.solvers.covariance(found)
    np.testing.assert_allclose(covariance, expected, rtol=1e-7, atol=1e-9 * abs(expected).max())
    assert sb.solvers.covariance(found, np.zeros(0, int)).shape == (0, 0)


def test_covariances_that_do_not_exist_are_refused():
    found = sb.least_squares(lambda x: np.stack([x[0] + x[1] - 1, x[0] + x[1], 2 * x[0] + 2 * x[1]]), np.zeros(2))
    with pytest.raises(PivotError, match="not determined"):
        sb.solvers.covariance(found)
    found = sb.least_squares(lambda x: np.stack([x[0], 2 * x[0], 0 * x[1]]), np.zeros(2))
    with pytest.raises(PivotError, match="Parameter 1 is not determined"):
        sb.solvers.covariance(found)
    found = sb.least_squares(lambda x: x - 1, np.zeros(2))
    with pytest.raises(OptionError, match="variance of residuals is unknown"):
        sb.solvers.covariance(found)
    np.testing.assert_allclose(sb.solvers.covariance(found, absolute_sigma=True), np.eye(2))
    for which in ([2], [-1], [0.5], [[0]], "a"):
        with pytest.raises(OptionError, match="which has no such parameters"):
            sb.solvers.covariance(found, which, absolute_sigma=True)
    with pytest.raises(OptionError, match="found has no matrix jac"):
        sb.solvers.covariance(found.x)
