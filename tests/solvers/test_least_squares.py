"""`sb.least_squares` against `scipy.optimize.least_squares`: minima, results, terminations, refusals."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import aslinearoperator

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
        scale = np.maximum(scale / 2, (j**2).sum(axis=0))
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
    with pytest.raises(NonFiniteError, match="residuals at x0"):
        sb.least_squares(lambda x: 1e200 * x, np.full(2, 1e-10))


def test_badly_scaled_unknowns_and_single_precision():
    found = sb.least_squares(lambda x: np.concatenate([1e-160 * x[:1] - 1e-3, 1e9 * x[1:] - 1]), np.zeros(2), xtol=None)
    np.testing.assert_allclose(found.x, [1e157, 1e-9], rtol=1e-6)
    found = sb.least_squares(lambda x: 1e200 * x, np.full(2, 1e-100), xtol=None)  # squares of the derivatives overflow
    np.testing.assert_allclose(found.x, 0, atol=1e-107)
    single = sb.least_squares(rosenbrock, np.zeros(9, np.float32), ftol=1e-5, xtol=1e-5)
    assert single.x.dtype == single.jac.dtype == np.float32
    np.testing.assert_allclose(single.x, 1, atol=1e-2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", [{}, {"bounds": (-2.0, 0.6)}, {"x_scale": 1.0}, {"loss": "soft_l1"}], ids=str)
def test_units_of_the_unknowns_change_nothing(dtype, options):
    """However small or large: their squares would vanish or overflow."""
    far = (40 if "bounds" in options else 70) * (1 if dtype is np.float32 else 8)  # bounds: at the root of the least
    units = np.ldexp(np.ones(3, dtype), [far, 0, -far])

    def f(x):
        return np.concatenate([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]]) if len(x) == 3 else x

    def run(units):
        given = dict(options)
        if "bounds" in given:
            given["bounds"] = tuple(bound * units for bound in given["bounds"])
        if "x_scale" in given:
            given["x_scale"] = given["x_scale"] * units
        return sb.least_squares(lambda x: f(x / units), np.full(3, 0.5, dtype) * units, **given, gtol=None, xtol=None,
                                ftol=1e-6 if dtype is np.float32 else 1e-14)  # fmt: skip

    there, here = run(units), run(np.ones(3, dtype))
    if "bounds" in options:  # how near a step may come depends on the size of the gradient
        np.testing.assert_allclose(there.x / units, here.x, rtol=5e-3 if dtype is np.float32 else 1e-6)
        return
    np.testing.assert_array_equal(there.x / units, here.x)
    assert there.cost == here.cost and there.nfev == here.nfev > 3


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


def test_wrong_input_is_refused():
    x = np.ones(3)

    def refused(error, match, *args, **options):
        with pytest.raises(error, match=match):
            sb.least_squares(*args, **options)

    refused(OptionError, "f is not a function", None, x)
    refused(DTypeError, "x0 is not an array", lambda x: x, "ab")
    refused(DTypeError, "x0 is not an array", lambda x: x, None)
    refused(DTypeError, "float", lambda x: x, np.ones(3, complex))
    refused(DTypeError, "would round", lambda x: x, [2**60])
    refused(ShapeError, "x0", lambda x: x, np.ones((3, 1)))
    refused(ShapeError, "f returns", lambda x: x[:, None], x)
    refused(DTypeError, "f returns", lambda x: x.astype(np.float32), x)
    refused(DTypeError, "real and imaginary parts", lambda x: 1j * x, x)
    lengths = iter([3, 2])
    refused(ShapeError, "f returns", lambda x: np.ones(next(lengths)), x, lambda x: sp.eye_array(3, format="csr"))
    refused(ShapeError, "does not fit f", lambda x: x, x, lambda x: sp.csr_array((2, 3)))
    refused(PatternError, "pattern does not fit x", lambda x: x, x, sb.SparsityPattern.dense(3, 2))
    refused(ShapeError, "does not fit f", lambda x: x, x, sb.sparse_jacobian(lambda x: x[:2], x))
    patterns = iter([np.eye(3), np.eye(3)[::-1]])
    refused(PatternError, "another pattern", lambda x: x, x, lambda x: sp.csr_array(next(patterns)))
    refused(OptionError, "jac does not return a matrix", lambda x: x, x, lambda x: aslinearoperator(np.eye(3)))
    refused(DTypeError, "values of jac", lambda x: x, x, lambda x: sp.eye_array(3, dtype=np.float32, format="csr"))
    refused(OptionError, "jac is neither", lambda x: x, x, 5)
    refused(OptionError, "Unknown jac", lambda x: x, x, "4-point")
    refused(OptionError, "kwargs do not reach", lambda x, a: x, x, sb.sparse_jacobian(lambda x: x, x), kwargs={"a": 1})
    refused(TracingError, 'value.*jac="2-point"', lambda x: x if x[0] > 0 else -x, x)
    refused(PatternError, "pattern does not fit x0", lambda x: x, x, jac_sparsity=np.ones((3, 2)))
    refused(OptionError, "Unknown loss", lambda x: x, x, loss="hubr")
    refused(OptionError, "f_scale", lambda x: x, x, f_scale=0)
    refused(OptionError, "ftol", lambda x: x, x, ftol=-1)
    refused(OptionError, "xtol", lambda x: x, x, xtol=np.nan)
    refused(OptionError, "max_nfev", lambda x: x, x, max_nfev=0)
    refused(ShapeError, "weights", lambda x: x, x, weights=np.ones(2))
    refused(OptionError, "weights", lambda x: x, x, weights=-np.ones(3))
    refused(OptionError, "weights", lambda x: x, x, weights=np.full(3, np.nan))
    for name in ("x_scale", "diff_step"):
        for value in (0, -1.0, [1.0, 2.0], np.nan, "abc", [1, 2, np.inf]):
            refused(OptionError, f"{name} does not fit x0", lambda x: x, x, **{name: value})
    for name, value in {"method": "dogbox", "tr_solver": "cg", "tr_options": {"atol": 1}, "workers": 2, "verbose": 3,
                        "callback": 1, "kwargs": 1, "args": 1, "damping": 0, "max_nfev": 1.5}.items():  # fmt: skip
        refused(OptionError, name, lambda x: x, x, **{name: value})
    refused(OptionError, "tr_options.*atol, btol", lambda x: x, x, tr_solver="lsmr", tr_options={"regularize": True})
    refused(ShapeError, "loss", lambda x: x, x, loss=lambda z: z)
    refused(OptionError, "'lm' takes no bounds", lambda x: x, x, method="lm", bounds=(0, 2))
    refused(OptionError, "bounds leave no room.* in place 1", lambda x: x, x, bounds=([0, 1, 0], [2, 1, 2]))
    refused(OptionError, "bounds leave no room", lambda x: x, x, bounds=(0, np.nan))
    refused(OptionError, "x0 is outside the bounds.*in place 2.*Got 1", lambda x: x, x, bounds=([0, 0, 1.5], np.inf))
    for ends in ((), (1,), "none", 5, (np.zeros(2), np.ones(2))):
        refused(OptionError, "bounds do not fit x0", lambda x: x, x, bounds=ends)


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


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_infinite_bounds_in_every_form_are_none():
    expected = sb.least_squares(rosenbrock, np.zeros(4))
    for bounds in (scipy.optimize.Bounds(), (-np.inf, np.inf), ([-np.inf] * 4, np.inf)):
        np.testing.assert_array_equal(sb.least_squares(rosenbrock, np.zeros(4), bounds=bounds).x, expected.x)


bounded = {
    "linear": lambda a, b, c: lambda x: a @ x - b,
    "quadratic": lambda a, b, c: lambda x: a @ x + 0.5 * (c @ x) ** 2 - b,
    "exponential": lambda a, b, c: lambda x: np.exp(0.5 * (c @ x)) - 1 + a @ x - b,
}


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(bounded)), n=st.integers(1, 8), more=st.integers(0, 9), at_bound=st.booleans(),
    seed=seeds,
)  # fmt: skip
def test_bounded_problems_have_scipys_minimum(kind, n, more, at_bound, seed):
    """The cost of SciPy's trf or less, at a stationary point; every evaluation is strictly between the bounds."""
    rng = np.random.default_rng(seed)
    a, c = rng.standard_normal((2, n + more, n))
    b = rng.standard_normal(n + more) * rng.choice([0.3, 3])
    low = np.where(rng.random(n) < 0.3, -np.inf, rng.standard_normal(n))
    high = np.where(
        rng.random(n) < 0.3, np.inf, np.maximum(low, rng.standard_normal(n)) + 10.0 ** rng.uniform(-2, 1, n)
    )
    x0 = np.clip(0.1 * rng.standard_normal(n), low + 0.1 * np.minimum(high - low, 1), high)
    x0 = np.where(np.isfinite(low), low, x0) if at_bound else x0
    f, met = bounded[kind](a, b, c / n), []

    def watched(x):
        met.append(x.copy())
        return f(x)

    tight = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-10, "bounds": (low, high)}
    ours = sb.least_squares(watched, x0, "3-point", **tight)
    theirs = scipy.optimize.least_squares(f, x0, "3-point", **tight)
    assert ours.cost <= theirs.cost * (1 + 1e-6) + 1e-10 and ours.success
    assert all(((low < x) & (x < high)).all() for x in met)
    towards = np.where(ours.grad > 0, ours.x - low, high - ours.x)
    reach = np.where(np.isfinite(towards), towards, 1)
    np.testing.assert_allclose(ours.optimality, abs(ours.grad * reach).max(), atol=1e-12)
    assert ours.optimality < 1e-4 * max(1, abs(ours.grad).max())
    assert set(ours.active_mask) <= {-1, 0, 1} and (ours.grad[ours.active_mask == -1] > -1e-3).all()


@pytest.mark.parametrize("start", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (200, 60)])
def test_linear_problems_with_many_active_bounds(shape, start):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(shape), 5 * rng.standard_normal(shape[0])
    best = scipy.optimize.lsq_linear(a, b, (0, 0.1), tol=1e-12)
    found = sb.least_squares(lambda x: a @ x - b, np.full(shape[1], start), lambda x: a, bounds=(0, 0.1))
    assert found.nfev < 30
    np.testing.assert_allclose(found.cost, best.cost, rtol=1e-7)
    strict = abs(best.x - 0.05) > 0.05 - 1e-9
    np.testing.assert_array_equal(found.active_mask[strict], np.sign(best.x - 0.05)[strict])


@pytest.mark.parametrize("n", [50, 400])
def test_deconvolution_with_most_unknowns_at_their_bound(n):
    """Badly conditioned normal equations, whose steps leave the bounds nearly everywhere."""
    rng = np.random.default_rng(0)
    blur = sp.diags_array([0.25, 0.5, 0.25], offsets=[-1, 0, 1], shape=(n, n)).tocsr()
    blur = (blur @ blur @ blur).tocsr()
    y = blur @ np.maximum(0, 3 * np.sin(np.linspace(0, 20, n))) + 0.05 * rng.standard_normal(n)
    best = scipy.optimize.nnls(blur.toarray(), y)[1] ** 2 / 2
    for start in (0.0, 1.0):
        found = sb.least_squares(lambda x: blur @ x - y, np.full(n, start), lambda x: blur, bounds=(0, np.inf))
        assert found.nfev < 40
        np.testing.assert_allclose(found.cost, best, rtol=1e-5)


def test_bounds_keep_functions_where_they_are_defined():
    found = sb.least_squares(lambda x: np.log(x) + 800 * x - 3, np.array([0.0]), bounds=(0, np.inf))
    np.testing.assert_allclose(np.log(found.x) + 800 * found.x, 3)
    near = sb.least_squares(lambda x: x + 1, np.ones(2, np.float32), bounds=(0, 3))
    assert near.x.dtype == np.float32 and (near.x > 0).all() and (near.x < 1e-3).all()
    narrow = sb.least_squares(lambda x: x - 5, np.array([1.0]), bounds=(1, np.nextafter(1, 2)))
    assert 1 <= narrow.x[0] <= np.nextafter(1, 2)


# ---- SciPy's other arguments -----------------------------------------------------------------------------------------


def flat_curve(x, t, y, offset=0.0):
    return x[0] + x[1] * np.exp(x[2] * t) - y + offset


T = np.linspace(0, 10, 15)
Y = 0.5 + 2 * np.exp(-T) + 0.1 * np.random.default_rng(5).standard_normal(15)


def broyden(x):
    f = (3 - x) * x + 1
    f[1:] -= x[:-1]
    f[:-1] -= 2 * x[1:]
    return f


def two(x):
    return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def decay(x):
    """Not to be traced: it calls a solver."""
    from scipy.integrate import odeint

    return odeint(lambda y, t: -x[0] * y, x[1], T[:6]).ravel() - 2 * np.exp(-1.3 * T[:6])


def branching(x):
    return np.array([x[0] - 1 if x[0] > 0 else x[0] - 2, 2 * x[1]])


def jacobian_of_two(x):
    return np.array([[-20 * x[0], 10], [-1, 0]])


def of_complex_numbers(x):
    z = x[0] + 1j * x[1] - (0.5 + 0.5j)
    return np.array([z.real, z.imag])


def softened(z):
    return np.array([2 * (np.sqrt(1 + z) - 1), (1 + z) ** -0.5, -0.5 * (1 + z) ** -1.5])


BAND = sp.diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(500, 500)).astype(int).tolil()
SCIPYS = {
    "Rosenbrock, integers": (two, np.array([2, 2]), {}),
    "Rosenbrock, bounds": (two, [2, 2], {"bounds": ([-np.inf, 1.5], np.inf), "jac": jacobian_of_two}),
    "Bounds": (two, [0.2, 0.2], {"bounds": scipy.optimize.Bounds([-1, -1], [0.5, 0.5])}),
    "Broyden, sparsity": (broyden, -np.ones(500), {"jac_sparsity": BAND}),
    "Broyden, bounds": (
        broyden,
        -np.ones(100),
        {"bounds": (np.linspace(-2, -1, 100), np.linspace(-0.7, 0.5, 100)), "jac_sparsity": BAND[:100, :100]},
    ),
    "Rosenbrock, at a bound": (two, [-2, 1], {"bounds": ([-2, -1], [0.9, 3]), "jac": jacobian_of_two}),
    "Rosenbrock, both active": (two, [2, 2], {"bounds": ([1.5, -np.inf], [3, 2.0]), "jac": jacobian_of_two}),
    "Rosenbrock, a start at two bounds": (two, [-0.5, -3], {"bounds": ([-0.5, -3], [0.5, 3]), "x_scale": "jac"}),
    "curve, args": (flat_curve, np.array([1.0, 1.0, -0.5]), {"args": (T, Y)}),
    "curve, list of args": (flat_curve, (1, 1, -0.5), {"args": [T, Y]}),
    "curve, kwargs": (flat_curve, [1, 1, -0.5], {"kwargs": {"t": T, "y": Y, "offset": 0.1}}),
    "curve, own loss": (flat_curve, [1, 1, -0.5], {"args": (T, Y), "f_scale": 0.1, "loss": softened}),
    "complex": (of_complex_numbers, (0.1, 0.1), {"jac": "2-point", "bounds": ([0, 0], [1, 1])}),
    "a number": (lambda x: x**2 - 2, 1.5, {}),
    "a number returned": (lambda x: (x[0] - 3) ** 2, [1.0], {"gtol": 1e-12}),
    "a list returned": (lambda x: [x[0] - 3, 2 * x[1] - 1], [1, 1], {}),
    "scales": (two, [-1.2, 1], {"x_scale": [1.0, 0.5]}),
    "one scale": (two, [-1.2, 1], {"x_scale": 10}),
    "jac scale, lm": (two, [-1.2, 1], {"x_scale": "jac", "method": "lm"}),
    "2-point": (two, [-1.2, 1], {"jac": "2-point"}),
    "3-point": (two, [-1.2, 1], {"jac": "3-point", "bounds": (-2, [0.9, 3])}),
    "cs": (two, [-1.2, 1], {"jac": "cs"}),
    "diff_step": (two, [-1.2, 1], {"diff_step": [1e-6, 1e-7]}),
    "an ODE": (decay, [1.0, 1.0], {"jac": "2-point", "bounds": (0, [5, 5])}),
    "branches": (branching, [3.0, 1.0], {"jac": "3-point"}),
    "exact": (two, [-1.2, 1], {"tr_solver": "exact", "tr_options": {}, "workers": 1}),
}


@pytest.mark.parametrize("name", SCIPYS)
def test_public_examples_have_scipys_result(name):
    """SciPy's docstring and common uses, with another import: the same minimum, in fields of the same meaning."""
    f, x0, options = SCIPYS[name]
    ours, theirs = (module.least_squares(f, x0, **options) for module in (sb, scipy.optimize))
    assert ours.success and set(theirs) <= set(ours)
    np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.cost, theirs.cost, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(ours.fun, theirs.fun, atol=1e-4)
    np.testing.assert_array_equal(ours.active_mask, theirs.active_mask)
    assert sp.issparse(ours.jac) == (sp.issparse(theirs.jac) or ("jac" not in options and "diff_step" not in options))
    if "loss" not in options:  # which weighs the rows of jac
        np.testing.assert_allclose(ours.grad, ours.jac.T @ ours.fun, atol=1e-10)


def rotate(points, rotations):
    theta = np.linalg.norm(rotations, axis=1)[:, np.newaxis]
    with np.errstate(invalid="ignore"):
        v = np.nan_to_num(rotations / theta)
    dot = np.sum(points * v, axis=1)[:, np.newaxis]
    return np.cos(theta) * points + np.sin(theta) * np.cross(v, points) + dot * (1 - np.cos(theta)) * v


def project(points, cameras):
    seen = rotate(points, cameras[:, :3])
    seen += cameras[:, 3:6]
    seen = -seen[:, :2] / seen[:, 2, np.newaxis]
    square = np.sum(seen**2, axis=1)
    seen *= ((1 + cameras[:, 7] * square + cameras[:, 8] * square**2) * cameras[:, 6])[:, np.newaxis]
    return seen


def test_scipys_cookbook_of_bundle_adjustment(capsys):
    """The steps of https://scipy-cookbook.readthedocs.io/items/bundle_adjustment.html, with made-up observations."""
    rng, cameras, points = np.random.default_rng(0), 4, 30
    camera, point = np.repeat(np.arange(cameras), points), np.tile(np.arange(points), cameras)
    view = np.column_stack([0.1 * rng.standard_normal((cameras, 5)), -5 + 0.1 * rng.standard_normal(cameras),
                            np.full((cameras, 3), [500, -0.01, 0.001])])  # fmt: skip
    places = rng.uniform(-1, 1, (points, 3))
    seen = project(places[point], view[camera]) + 0.3 * rng.standard_normal((len(camera), 2))
    x0 = np.concatenate([(view * (1 + 0.01 * rng.standard_normal(view.shape))).ravel(), places.ravel() + 0.02])
    sparsity, i = sp.lil_matrix((2 * len(camera), len(x0)), dtype=int), np.arange(len(camera))
    for s in range(9):
        sparsity[2 * i, camera * 9 + s] = sparsity[2 * i + 1, camera * 9 + s] = 1
    for s in range(3):
        sparsity[2 * i, cameras * 9 + point * 3 + s] = sparsity[2 * i + 1, cameras * 9 + point * 3 + s] = 1

    def fun(params, n_cameras, n_points, camera_indices, point_indices, points_2d):
        camera_params = params[: n_cameras * 9].reshape((n_cameras, 9))
        points_3d = params[n_cameras * 9 :].reshape((n_points, 3))
        return (project(points_3d[point_indices], camera_params[camera_indices]) - points_2d).ravel()

    ours, theirs = (
        module.least_squares(fun, x0, jac_sparsity=sparsity, verbose=2, x_scale="jac", ftol=1e-4, method="trf",
                             args=(cameras, points, camera, point, seen))
        for module in (sb, scipy.optimize)
    )  # fmt: skip
    assert ours.success and sp.issparse(ours.jac)
    np.testing.assert_allclose(ours.cost, theirs.cost, rtol=1e-3)
    lines = capsys.readouterr().out.splitlines()
    header = [number for number, line in enumerate(lines) if "Iteration" in line]
    assert len(header) == 2 and lines[header[0]] == lines[header[1]]
    assert lines[1] == lines[header[1] + 1]  # at x0 both say the same


def test_verbose_says_how_it_ended(capsys):
    found = sb.least_squares(two, [-1.2, 1.0], verbose=1)
    expected = (f"{found.message}\nFunction evaluations {found.nfev}, initial cost 1.2100e+01, "
                f"final cost {found.cost:.4e}, first-order optimality {found.optimality:.2e}.\n")  # fmt: skip
    assert capsys.readouterr().out == expected
    sb.least_squares(two, [-1.2, 1.0])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("way", ["result", "x", "StopIteration"])
def test_a_callback_sees_each_iteration_and_may_end_the_fit(way):
    met = []

    def by_result(intermediate_result):
        met.append((intermediate_result.nit, intermediate_result.nfev, intermediate_result.cost))
        intermediate_result.x[:] = np.nan  # a copy
        return len(met) == 3

    def by_x(x):
        met.append(x)
        if way == "StopIteration" and len(met) == 3:
            raise StopIteration
        return len(met) == 3 if way == "x" else None

    found = sb.least_squares(two, [-1.2, 1.0], callback=by_result if way == "result" else by_x)
    assert (found.status, found.success, len(met)) == (-2, False, 3) and "callback" in found.message
    if way == "result":
        assert [nit for nit, *_ in met] == [1, 2, 3] and met[-1][1:] == (found.nfev, found.cost)
    else:
        np.testing.assert_array_equal(met[-1], found.x)


def test_scales_of_unknowns_are_those_of_scaled_variables():
    """x_scale=s fits x as x_scale=1 fits x / s, step by step; "jac" is the same in every unit."""
    s, x0 = np.array([1.0, 100.0, 0.01]), np.array([0.5, 2.0, -1.0])

    def f(x):
        return np.concatenate([x[1:] - x[:-1] ** 2, 1 - x])

    for evaluations in (2, 3, 6):
        scaled = sb.least_squares(f, x0, x_scale=s, max_nfev=evaluations)
        plain = sb.least_squares(lambda z: f(s * z), x0 / s, x_scale=1.0, max_nfev=evaluations)
        np.testing.assert_allclose(scaled.x, s * plain.x, rtol=1e-6)
        units = [sb.least_squares(lambda z, u=u: f(u * z), x0 / u, max_nfev=evaluations).x * u for u in (1.0, s)]
        np.testing.assert_allclose(*units, rtol=1e-6)


def test_the_first_damping():
    """A pose graph that starts from its odometry needs little; a start far away takes shorter steps with more."""
    rng, n = np.random.default_rng(0), 200
    loops = rng.integers(0, n, (n // 4, 2))
    i, j = np.concatenate([np.stack([np.arange(n - 1), np.arange(1, n)], axis=1), loops[loops[:, 0] != loops[:, 1]]]).T
    turn = np.cumsum(0.3 * rng.standard_normal(n))
    true = np.column_stack([np.cumsum(np.cos(turn)), np.cumsum(np.sin(turn)), turn])

    def seen(x):
        p = x.reshape(n, 3)
        cos, sin, across, up = np.cos(p[i, 2]), np.sin(p[i, 2]), p[j, 0] - p[i, 0], p[j, 1] - p[i, 1]
        return np.concatenate([cos * across + sin * up, cos * up - sin * across, p[j, 2] - p[i, 2]])

    measured = seen(true.ravel()) + 0.02 * rng.standard_normal(3 * len(i))
    ahead, left, turned = measured.reshape(3, -1)[:, : n - 1]
    turn = np.cumsum(np.append(true[0, 2], turned))
    moves = (ahead + 1j * left) * np.exp(1j * turn[:-1])
    place = true[0, 0] + 1j * true[0, 1] + np.cumsum(np.append(0, moves))
    x0 = np.column_stack([place.real, place.imag, turn]).ravel()

    def f(x):
        return np.concatenate([(seen(x) - measured) / 0.02, 1e3 * (x[:3] - true[0])])

    near, usual = (sb.least_squares(f, x0, damping=damping) for damping in (1e-8, 1e-3))
    assert near.success and usual.success and 2 * near.nfev < usual.nfev
    np.testing.assert_allclose(near.cost, usual.cost, rtol=1e-6)
    starts = [sb.least_squares(lambda x: x**2 + x - 1, [5.0], damping=d, max_nfev=2).x[0] for d in (1e3, 1e-9)]
    np.testing.assert_allclose(starts, [5 - 11 * 29 / (121 * 1001), 5 - 29 / 11])


@pytest.mark.parametrize("scheme", ["2-point", "3-point", "cs"])
@pytest.mark.parametrize("way", ["dense", "sparsity"])
def test_differences_are_near_the_derivatives_and_within_bounds(scheme, way):
    rng = np.random.default_rng(1)
    x0 = np.array([0.0, 1.0, -2.0, 30.0, 1e-3, 0.5])
    low = x0 - np.array([0, 1e-9, np.inf, 1, 1e-12, 1])
    high = x0 + np.array([1, np.inf, 1e-9, 0, 1e-12, np.inf])
    a = rng.standard_normal((7, 6)) * (rng.random((7, 6)) < 0.5)
    met = []

    def f(x):
        met.append(x.real.copy())
        return np.sin(a @ x) + a @ x**2 / 50

    sparsity = sp.coo_array(a != 0) if way == "sparsity" else None
    found = sb.least_squares(f, x0, scheme, bounds=(low, high), jac_sparsity=sparsity, max_nfev=1)
    x = met[0]
    exact = np.cos(a @ x)[:, None] * a + a * x / 25
    jac = found.jac.toarray() if way == "sparsity" else found.jac
    tolerance = {"2-point": 1e-6, "3-point": 1e-8, "cs": 1e-14}[scheme]
    # between bounds 1e-12 apart a difference has few digits
    np.testing.assert_allclose(jac[:, [0, 1, 2, 3, 5]], exact[:, [0, 1, 2, 3, 5]], atol=tolerance * 10)
    np.testing.assert_allclose(jac[:, 4], exact[:, 4], atol=1e-14 if scheme == "cs" else 1e-2)
    assert all(((low <= y) & (y <= high)).all() for y in met)
    colors = sb.patterns.color_columns(sb.SparsityPattern.from_scipy(sp.csr_array(a != 0))).max() + 1
    count = (colors if way == "sparsity" else 6) * (2 if scheme == "3-point" else 1)
    assert len(met) == 1 + count and found.nfev == 1


def test_jacobians_of_every_kind_are_one():
    """Dense arrays, lists, unsorted and shrinking matrices, a superset as sparsity."""
    x0, n = np.linspace(-1, 1, 6), 6
    traced = sb.sparse_jacobian(rosenbrock, x0)

    def unsorted(x):
        matrix = traced(x).tocoo()
        order = np.random.default_rng(0).permutation(matrix.nnz)
        rows, columns, values = matrix.row[order], matrix.col[order], matrix.data[order] / 2
        return sp.coo_array((np.tile(values, 2), (np.tile(rows, 2), np.tile(columns, 2))), matrix.shape)

    def shrinking(x):
        matrix = traced(x)
        matrix.eliminate_zeros()  # at x0 there are none
        return matrix

    expected = sb.least_squares(rosenbrock, x0, traced)
    ways = [
        (lambda x: traced(x).toarray(), None),
        (lambda x: traced(x).toarray().tolist(), None),
        (unsorted, None),
        (shrinking, None),
        (shrinking, np.ones((10, n))),
        (lambda x: traced(x).toarray(), traced.pattern),
    ]
    for number, (jac, sparsity) in enumerate(ways):
        found = sb.least_squares(rosenbrock, x0, jac, jac_sparsity=sparsity)
        assert isinstance(found.jac, np.ndarray) == (number < 2)
        np.testing.assert_allclose(found.x, expected.x, rtol=1e-8)
        assert found.nfev == expected.nfev
    with pytest.raises(PatternError, match=r"another pattern.*row 0, column 1.*jac_sparsity="):
        grows = iter([np.eye(2), np.array([[1.0, 3.0], [0.0, 1.0]])])
        sb.least_squares(lambda x: x, np.ones(2), lambda x: sp.csr_array(next(grows)))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_nearly_full_jacobians(share):
    """Their normal equations are formed in another way, with the same result, also with empty columns."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((40, 12)) * (rng.random((40, 12)) < share)
    a[:, 5] = 0
    b = rng.standard_normal(40)
    found = sb.least_squares(lambda x: a @ x - b, np.ones(12), lambda x: sp.csr_array(a), bounds=(-0.1, 2))
    best = scipy.optimize.lsq_linear(a, b, (-0.1, 2), tol=1e-12)
    np.testing.assert_allclose(found.cost, best.cost, rtol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_large_residuals_do_not_warn(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sb.least_squares(lambda x: 1e120 * (x - 1), np.array([1 + 1e-30, 2.0]), loss=loss, max_nfev=3)
    assert np.isfinite(found.cost)
