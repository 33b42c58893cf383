"""`sb.least_squares` against `scipy.optimize.least_squares`: minima, results, terminations, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp.core.errors import DTypeError, NonFiniteError, OptionError, PatternError, ShapeError, TracingError
from strategies import seeds
from thread_counts import assert_same_for_any_number_of_threads

LOSSES = ("linear", "soft_l1", "huber", "cauchy", "arctan")


def rosenbrock(x):
    return np.concatenate([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]])


def curve(t, y):
    """Residuals of y = a exp(-b t) + c."""
    return lambda x: x[0] * np.exp(np.minimum(-x[1] * t, 99)) + x[2] - y


def outliers():
    rng = np.random.default_rng(0)
    t = np.linspace(0, 5, 60)
    y = 2 * np.exp(-0.7 * t) + 0.5 + 0.02 * rng.standard_normal(60)
    y[::11] += 3
    return curve(t, y), np.array([1.0, 1.0, 0.0])


@settings(max_examples=60)
@given(
    m=st.integers(0, 12), n=st.integers(0, 7), rank=st.integers(1, 7), zero_rows=st.booleans(), weighted=st.booleans(),
    seed=seeds,
)  # fmt: skip
def test_linear_problems(m, n, rank, zero_rows, weighted, seed):
    """The cost is that of a dense solution, whatever the rank; zero rows, empty columns, no rows, no columns."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, min(rank, n))) @ rng.standard_normal((min(rank, n), n))
    a[:, ::3] *= rng.random() < 0.7  # unknowns that nothing depends on
    if zero_rows:
        a[::2] = 0
    a = np.array(a * (rng.random((m, n)) < 0.8))
    b, w = rng.standard_normal(m), rng.integers(0, 4, m).astype(float) if weighted else np.ones(m)
    x0 = rng.standard_normal(n)
    tight = {"ftol": 1e-15, "xtol": 1e-12, "gtol": 1e-12}
    found = sb.least_squares(
        lambda x: a @ x - b, x0, lambda x: sp.csr_array(a), weights=w if weighted else None, **tight
    )
    root = np.sqrt(w)
    best = np.linalg.lstsq(root[:, None] * a, root * b)[0] if m and n else np.zeros(n)
    cost = 0.5 * np.sum((root * (a @ best - b)) ** 2)
    assert found.success and found.x.shape == (n,)
    np.testing.assert_allclose(found.cost, cost, rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(found.fun, a @ found.x - b)
    np.testing.assert_allclose(found.grad, a.T @ (w * found.fun), atol=1e-12)
    np.testing.assert_allclose((found.jac.T @ found.jac).toarray(), a.T @ (w[:, None] * a), atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("weighted", [False, True])
def test_robust_losses_have_scipys_minimum_and_result(loss, weighted):
    f, x0 = outliers()
    w = np.linspace(0, 2, 60) if weighted else np.ones(60)
    ours = sb.least_squares(f, x0, loss=loss, f_scale=0.1, weights=w if weighted else None, xtol=None, ftol=1e-14)
    theirs = scipy.optimize.least_squares(
        lambda x: np.sqrt(w) * f(x), ours.x, loss=loss, f_scale=0.1, ftol=1e-15, xtol=1e-15, gtol=1e-15
    )
    np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-5)
    np.testing.assert_allclose(ours.cost, theirs.cost, rtol=1e-9)
    at_ours = scipy.optimize.least_squares(lambda x: np.sqrt(w) * f(x), ours.x, loss=loss, f_scale=0.1, max_nfev=1)
    np.testing.assert_allclose(ours.grad, at_ours.grad, atol=1e-6)
    z = w * ours.fun**2 / 0.01
    slope = np.maximum(1, z) ** -0.5 if loss == "huber" else {
        "linear": z**0, "soft_l1": (1 + z) ** -0.5, "cauchy": 1 / (1 + z), "arctan": 1 / (1 + z**2)}[loss]  # fmt: skip
    j = sb.sparse_jacobian(f, x0)(ours.x).toarray()
    np.testing.assert_allclose((ours.jac.T @ ours.jac).toarray(), j.T @ ((w * slope)[:, None] * j), rtol=1e-10)
    np.testing.assert_array_equal(ours.fun, f(ours.x))
    assert ours.optimality == abs(ours.grad).max()
    if loss == "linear" and not weighted:
        assert abs(ours.x[2] - 0.5) > 0.05  # outliers pull


@pytest.mark.parametrize("n", [2, 3, 100])
@pytest.mark.parametrize("way", ["traced", "pattern", "function", "jacobian"])
def test_every_way_to_give_the_jacobian(n, way):
    x0 = np.linspace(-1, 1, n)
    x0.flags.writeable = False
    traced = sb.sparse_jacobian(rosenbrock, x0)
    jac = {"traced": None, "pattern": traced.pattern, "function": lambda x: traced(x).tocoo(), "jacobian": traced}[way]
    found = sb.least_squares(rosenbrock, x0, jac)
    assert found.success
    np.testing.assert_allclose(found.x, 1, atol=1e-6)
    assert found.njev <= found.nfev
    calls = {"f": 0, "jac": 0}

    def counted(name, f):
        def call(x):
            calls[name] += 1
            return f(x)

        return call

    again = sb.least_squares(counted("f", rosenbrock), x0, counted("jac", traced))
    assert (calls["f"], calls["jac"]) == (again.nfev, again.njev)
    np.testing.assert_array_equal(again.x, found.x)


def test_a_step_is_levenberg_marquardts():
    """The first one from a dense solution of the damped equations, and the gain ratio's new damping in the second."""
    f, x = (lambda x: np.array([x[0] ** 2 + x[1] - 3, x[0] * x[1] - 1, x[1] - 0.5])), np.array([2.0, 1.0])
    damping, scale = 1e-3, np.zeros(2)
    for evaluations in (2, 3):
        j = np.array([[2 * x[0], 1], [x[1], x[0]], [0, 1]])
        scale = np.maximum(scale, (j**2).sum(axis=0))
        step = -np.linalg.solve(j.T @ j + damping * np.diag(scale), j.T @ f(x))
        gain = 0.5 * (f(x) @ f(x) - f(x + step) @ f(x + step))
        ratio = gain / (0.5 * step @ (damping * scale * step - j.T @ f(x)))
        assert ratio > 0
        x, damping = x + step, damping * max(1 / 3, 1 - (2 * ratio - 1) ** 3)
        pattern = sb.SparsityPattern([0, 2, 4, 5], [0, 1, 0, 1, 1], (3, 2))
        found = sb.least_squares(lambda x: np.stack(f(x)), np.array([2.0, 1.0]), pattern, max_nfev=evaluations)
        np.testing.assert_allclose(found.x, x, rtol=1e-12)
        assert (found.status, found.success, found.nfev) == (0, False, evaluations)


def test_terminations():
    x0 = np.full(5, 1.5)
    off = {"ftol": None, "xtol": None, "gtol": None}
    expected = {"gtol": 1, "ftol": 2, "xtol": 3}
    for name, status in expected.items():
        found = sb.least_squares(lambda x: np.concatenate([x - 1, x**2 - 2]), x0, **{**off, name: 1e-6})
        assert found.status == status and name in found.message
    both = sb.least_squares(lambda x: np.concatenate([x - 1, x**2 - 2]), x0, ftol=0.1, xtol=0.05, gtol=None)
    assert both.status == 4
    assert sb.least_squares(lambda x: np.concatenate([x - 1, x**2 - 2]), x0, **off).status == 3  # x cannot move
    at_minimum = sb.least_squares(lambda x: x - 1, np.ones(3))
    assert (at_minimum.status, at_minimum.nfev, at_minimum.cost) == (1, 1, 0)


def test_steps_into_nan_are_shortened_and_others_reported():
    found = sb.least_squares(lambda x: np.log(x) + 3, np.array([10.0]))  # the first step leads below zero
    np.testing.assert_allclose(found.x, np.exp(-3))
    with pytest.raises(NonFiniteError, match="residuals at x0"):
        sb.least_squares(np.sqrt, -np.ones(2))
    with pytest.raises(NonFiniteError, match="derivatives"):
        sb.least_squares(lambda x: x, np.ones(2), lambda x: sp.csr_array(np.diag([1, np.nan])))
    with pytest.raises(NonFiniteError, match="derivatives"):
        sb.least_squares(lambda x: 1e200 * x, np.full(2, 1e-100))


def test_badly_scaled_unknowns_and_single_precision():
    found = sb.least_squares(lambda x: np.concatenate([1e-160 * x[:1] - 1e-3, 1e9 * x[1:] - 1]), np.zeros(2), xtol=None)
    np.testing.assert_allclose(found.x, [1e157, 1e-9], rtol=1e-6)
    single = sb.least_squares(rosenbrock, np.zeros(9, np.float32), ftol=1e-5, xtol=1e-5)
    assert single.x.dtype == single.jac.dtype == np.float32
    np.testing.assert_allclose(single.x, 1, atol=1e-2)


def test_f_may_reuse_its_result_and_write_to_its_argument():
    x0, result = np.zeros(8), np.empty(14)
    expected = sb.least_squares(rosenbrock, x0)

    def f(x):
        result[:] = rosenbrock(x)
        x[:] = np.nan
        return result

    jac = sb.sparse_jacobian(rosenbrock, x0)
    found = sb.least_squares(f, x0, jac=jac)
    for name in ("x", "fun", "grad"):
        np.testing.assert_array_equal(found[name], expected[name])
    np.testing.assert_array_equal(x0, 0)


def test_arguments_are_passed_on_and_threads_change_nothing():
    def f(x, scale):
        return np.concatenate([scale * (x[1:] - x[:-1] ** 2), 1 - x[:-1]])

    x0 = np.random.default_rng(0).uniform(-1, 1, 30_000)
    assert_same_for_any_number_of_threads(lambda: [sb.least_squares(f, x0, args=(10.0,), max_nfev=4).x])


@pytest.mark.parametrize(
    "ends",
    [(0, np.inf), (np.zeros(3), np.full(3, np.inf)), (-np.inf, [0, 1, np.inf]), scipy.optimize.Bounds(0, 1), "none"],
)
def test_bounds_are_refused(ends):
    with pytest.raises(OptionError, match="bounds are not supported"):
        sb.least_squares(lambda x: x, np.ones(3), bounds=ends)
    assert sb.least_squares(lambda x: x, np.ones(3), bounds=(-np.inf, np.inf)).success


def test_wrong_input_is_refused():
    x = np.ones(3)

    def refused(error, match, *args, **options):
        with pytest.raises(error, match=match):
            sb.least_squares(*args, **options)

    refused(OptionError, "f is not a function", None, x)
    refused(DTypeError, "x0 is not an array", lambda x: x, [1.0])
    refused(DTypeError, "float", lambda x: x, np.ones(3, int))
    refused(ShapeError, "x0", lambda x: x, np.ones((3, 1)))
    refused(ShapeError, "f returns", lambda x: x[:, None], x)
    refused(DTypeError, "f returns", lambda x: x.astype(np.float32), x)
    lengths = iter([3, 2])
    refused(ShapeError, "f returns", lambda x: np.ones(next(lengths)), x, lambda x: sp.eye_array(3, format="csr"))
    refused(ShapeError, "does not fit f", lambda x: x, x, lambda x: sp.csr_array((2, 3)))
    refused(PatternError, "pattern does not fit x", lambda x: x, x, sb.SparsityPattern.dense(3, 2))
    refused(ShapeError, "does not fit f", lambda x: x, x, sb.sparse_jacobian(lambda x: x[:2], x))
    patterns = iter([np.eye(3), np.eye(3)[::-1]])
    refused(PatternError, "another pattern", lambda x: x, x, lambda x: sp.csr_array(next(patterns)))
    refused(OptionError, "sparse matrix", lambda x: x, x, lambda x: np.eye(3))
    refused(DTypeError, "values of jac", lambda x: x, x, lambda x: sp.eye_array(3, dtype=np.float32, format="csr"))
    refused(OptionError, "jac is neither", lambda x: x, x, "2-point")
    refused(TracingError, "value", lambda x: x if x[0] > 0 else -x, x)
    refused(OptionError, "Unknown loss", lambda x: x, x, loss="hubr")
    refused(OptionError, "f_scale", lambda x: x, x, f_scale=0)
    refused(OptionError, "ftol", lambda x: x, x, ftol=-1)
    refused(OptionError, "xtol", lambda x: x, x, xtol=np.nan)
    refused(OptionError, "max_nfev", lambda x: x, x, max_nfev=0)
    refused(ShapeError, "weights", lambda x: x, x, weights=np.ones(2))
    refused(OptionError, "weights", lambda x: x, x, weights=-np.ones(3))
    refused(OptionError, "weights", lambda x: x, x, weights=np.full(3, np.nan))


def test_an_identity_as_pattern_has_values():
    found = sb.least_squares(lambda x: 3 * x - 6, np.zeros(4), sb.SparsityPattern.identity(4))
    np.testing.assert_allclose(found.x, 2)


def test_points_are_eliminated_before_cameras():
    """The order of the factors is that of the Schur complement: each point comes before all cameras that it meets."""
    rng = np.random.default_rng(0)
    cameras, points = 6, 40
    camera, point = np.repeat(np.arange(cameras), points), np.tile(np.arange(points), cameras)
    target = rng.standard_normal((len(camera), 3))

    def f(x):
        c, p = x[: 4 * cameras].reshape(cameras, 4)[camera], x[4 * cameras :].reshape(points, 3)[point]
        return (p * c[:, 3:] + c[:, :3] - target).ravel()

    jac = sb.sparse_jacobian(f, np.zeros(4 * cameras + 3 * points))
    normal = sb.plan_product(jac.pattern.T, jac.pattern).pattern
    place = np.argsort(sb.plan_factor(normal, kind="cholesky").columns)
    rows, columns = normal.row_of_entry, normal.indices
    met = (rows >= 4 * cameras) & (columns < 4 * cameras)
    assert met.any() and (place[rows[met]] < place[columns[met]]).all()


@pytest.mark.parametrize("options", [{}, {"ftol": None, "xtol": None, "gtol": None}])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_that_all_fail_end_the_fit_where_it_is(options, dtype):
    found = sb.least_squares(lambda x: np.where(x > 0, dtype(np.nan), x - 1), np.zeros(3, dtype), **options)
    assert found.status == 3 and (found.x == 0).all() and found.cost == 1.5


def test_a_jacobian_that_its_function_writes_again_is_copied():
    shared = sp.csr_array(np.eye(3))

    def f(x):
        shared.data[:] = 1 / (1 + x * x)
        return np.arctan(x)

    found = sb.least_squares(f, np.full(3, 3.0), lambda x: shared, max_nfev=3)
    np.testing.assert_allclose(found.jac.T @ found.fun, found.grad, rtol=1e-12)


def test_infinite_bounds_in_every_form_are_none():
    for bounds in (scipy.optimize.Bounds(), (-np.inf, np.inf), ([-np.inf] * 2, np.inf)):
        assert sb.least_squares(lambda x: x - 1, np.zeros(2), bounds=bounds).success
    for bounds in ((), (np.inf, -np.inf), scipy.optimize.Bounds(0, 1), 5):
        with pytest.raises(OptionError, match="bounds"):
            sb.least_squares(lambda x: x - 1, np.zeros(2), bounds=bounds)
