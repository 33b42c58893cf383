"""Points where slopes are infinite or unknown: 0 · ∞ is 0 where nothing moves, and both modes agree, NaN included."""

import numpy as np
import pytest

import sparsebp as sb
from sparsebp.core.errors import OptionError, TracingError
from sparsebp.jacobians.tracing import gradient

MATRIX = np.array([[1.0, 0.0], [0.0, 2.0]])
MASK = np.array([0.0, 1.0])
NORM, ROOT, INF, NAN = np.linalg.norm, np.sqrt, np.inf, np.nan


def written(x):
    y = np.zeros_like(x)
    y[:] = ROOT(x)
    y[0] = 1.0
    return y


# name: (function of two numbers, its Jacobian at (0, 1)). NaN: 0 · ∞, where a zero stands behind an infinite slope.
CASES = {
    "norm": (lambda x: NORM(x - [0, 1])[None], [[0, 0]]),
    "root of a sum": (lambda x: ROOT(np.sum(np.square(x * MASK - MASK)))[None], [[0, 0]]),
    "norm and more": (lambda x: np.stack([NORM(x[:1]) + x[1], x.sum()]), [[0, 1], [1, 1]]),
    "norms": (lambda x: NORM(np.stack([x, x * x]), axis=0), [[0, 0], [0, 3 / ROOT(2)]]),
    "times a norm": (lambda x: x * NORM(x[:1]), [[0, 0], [0, 0]]),
    "normed": (lambda x: x[1:] + x[:1] / NORM(x[:1]), [[INF, 1]]),
    "root of a norm": (lambda x: ROOT(NORM(x[:1]))[None], [[0, 0]]),
    "standard deviation": (lambda x: np.std(np.stack([x[0], x[0]]))[None], [[0, 0]]),
    "root": (ROOT, [[INF, 0], [0, 0.5]]),
    "what is not indexed": (lambda x: ROOT(x)[1:], [[0, 0.5]]),
    "what is overwritten": (written, [[0, 0], [0, 0.5]]),
    "a zero factor": (lambda x: MASK * ROOT(x), [[0, 0], [0, 0.5]]),
    "a sum with zero weights": (lambda x: np.sum(MASK * ROOT(x))[None], [[0, 0.5]]),
    "a product with zero weights": (lambda x: (ROOT(x) @ MASK)[None], [[0, 0.5]]),
    "a matrix": (lambda x: MATRIX @ ROOT(x), [[INF, 0], [0, 1]]),
    "a sum of a matrix": (lambda x: np.sum(MATRIX @ ROOT(x))[None], [[INF, 1]]),
    "a solve": (lambda x: np.linalg.solve(MATRIX, ROOT(x)), [[INF, 0], [0, 0.25]]),
    "a root squared": (lambda x: ROOT(x) ** 2, [[NAN, 0], [0, 1]]),
    "x log x": (lambda x: x * np.log(x), [[NAN, 0], [0, 1]]),
    "a norm of roots": (lambda x: NORM(ROOT(x))[None], [[NAN, 0.5]]),
    "not taken": (lambda x: np.where(x > 0, np.log(x), 0.0), [[0, 0], [0, 1]]),
    "none of x log x": (lambda x: np.sum(np.where(x > 0, x * np.log(x), 0.0))[None], [[0, 1]]),
    "the greater": (lambda x: np.maximum(ROOT(x), 0.5), [[0, 0], [0, 0.5]]),
    "clipped below the root": (lambda x: ROOT(np.clip(x - 1, 0.0, None)), [[0, 0], [0, INF]]),
    "powers": (lambda x: np.concatenate([x**1.5, x**0.5, x**0]), [[0, 0], [0, 1.5], [INF, 0], [0, 0.5], *[[0, 0]] * 2]),
    "arcs": (lambda x: np.arccos(np.cos(x[:1])), [[0, 0]]),
    "cube root of a cube": (lambda x: np.cbrt(x**3), [[0, 0], [0, 1]]),
    "root of a square": (lambda x: ROOT(x**2), [[0, 0], [0, 1]]),
    "far exponential": (lambda x: np.exp(-1 / np.abs(x)), [[0, 0], [0, np.exp(-1)]]),
    "hypot of nothing": (lambda x: np.hypot(x[:1], 0.0) + x[1:], [[NAN, 1]]),
    "divided by zero": (lambda x: x[1:] / x[:1], [[-INF, INF]]),
    "by a zero": (lambda x: x / 0, [[INF, 0], [0, INF]]),
    "roots that cancel": (lambda x: np.sum(ROOT(np.stack([x[0], 2 * x[0], x[1]])) * [1, -1, 1])[None], [[NAN, 0.5]]),
    "infinite bounds": (lambda x: np.minimum(x, INF) + np.maximum(x, -INF), [[2, 0], [0, 2]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_both_modes_give(name):
    f, expected = CASES[name]
    x, expected = np.array([0.0, 1.0]), np.array(expected)
    with np.errstate(all="raise"):  # derivatives warn of nothing
        jac = sb.sparse_jacobian(f, np.array([0.3, 0.6]))
        there = jac.pattern.to_scipy().toarray() > 0
        assert not expected[~there].any()
        np.testing.assert_allclose(jac(x).toarray(), np.where(there, expected, 0), atol=1e-12)
        both = jac._function.forward((x,), np.eye(2)).T, jac._function.reverse((x,), np.eye(len(expected)))
        for found in both:
            np.testing.assert_allclose(found[there], expected[there], atol=1e-12)
        for row, v in enumerate(expected):
            found = gradient(lambda x, row=row: f(x)[row])(x)
            np.testing.assert_allclose(found, v, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_tape_leaves_singular_points_to_the_interpreter(loops_in_python, name):
    f, _ = CASES[name]
    x = np.array([0.0, 1.0])
    for make, g in ((sb.sparse_jacobian, f), (sb.sparse_hessian, lambda x: np.sum(f(x) ** 2))):
        old = make(g, np.ones(2), compiled=False)
        try:
            new = make(g, np.ones(2), compiled=True)
        except (TracingError, OptionError):
            continue
        for point in (np.array([0.3, 0.7]), x, np.array([np.nan, 1.0]), np.array([np.inf, 1.0])):
            np.testing.assert_allclose(new.values(point), old.values(point), rtol=1e-12, atol=1e-14)


def test_least_squares_from_a_norm_of_zero():
    """The rows of norms are reverse sweeps, and do not move from 0; the others do."""
    goal = np.array([1.0, 2.0, 3.0, 0.5])

    def f(x):
        return np.stack([0.1 * NORM(x), *(NORM(x - k * goal) for k in (1, 2))])

    jac = sb.sparse_jacobian(f, np.zeros(4))
    found = jac(np.zeros(4), check=True).toarray()
    np.testing.assert_allclose(found, [0 * goal, -goal / NORM(goal), -goal / NORM(goal)])
    assert sb.least_squares(lambda x: np.append(f(x), x - goal), np.zeros(4)).cost < 8


def test_hessians_stay_finite_elsewhere():
    """Where a norm has no second derivative, only its own entries are without a number."""
    x = np.array([0.0, 0.0, 1.0, 4.0])
    with np.errstate(all="ignore"):
        hess = sb.sparse_hessian(lambda x: NORM(x[:2]) + np.sum(x[2:] ** 3) + np.sum(ROOT(x)[3:]), np.ones(4))
        found = hess(x).toarray()
    assert not np.isfinite(np.diag(found)[:2]).any()
    np.testing.assert_allclose(found[2:, 2:], [[6, 0], [0, 24 - 1 / 32]])
    assert hess.pattern.nnz == 6


@pytest.mark.parametrize("name", ["fmax", "fmin"])
def test_the_number_next_to_nan_moves(name):
    torch = pytest.importorskip("torch")
    a, b = np.array([NAN, 1.0, 2.0, NAN, -3.0]), np.array([1.0, NAN, 3.0, NAN, -4.0])
    of, x = getattr(np, name), np.concatenate([a, b])
    found = sb.sparse_jacobian(lambda x: of(x[:5], x[5:]), np.ones(10))(x).toarray()
    expected = torch.func.jacrev(lambda x: getattr(torch, name)(x[:5], x[5:]))(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(found, expected)
    back = sb.sparse_jacobian(lambda x: of(x[:5], x[5:]), np.ones(10))._function.reverse((x,), np.eye(5))
    np.testing.assert_array_equal(back, expected)
