"""Sparse Jacobians and Hessians of plain functions: patterns, values, colours, refusals, and SciPy's solvers."""

import copy
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from scipy import special
from scipy.integrate import solve_ivp
from scipy.optimize import least_squares, minimize, root

import sparsebp as sb
from sparsebp.core.errors import (
    DTypeError,
    MemoryLimitError,
    NonFiniteError,
    OptionError,
    PatternError,
    ShapeError,
    TracingError,
)
from sparsebp.patterns import color_columns, color_symmetric
from sparsebp.patterns.pattern import star_sources
from strategies import csr_patterns

N = 7  # of most functions: prime
RNG = np.random.default_rng(3)
DENSE = np.where(RNG.random((5, N)) < 0.4, RNG.standard_normal((5, N)), 0.0)
SPARSE = sp.csr_array(DENSE)
MASK = np.array([True, False, True, True, False, False, True])
SCALES = np.array([0.0, 2.0, -1.0, 0.0, 3.0, 0.5, 1.0])


def brusselator(x):
    """2-D Brusselator on a periodic 3 x 4 grid."""
    u, v = x.reshape(2, 3, 4)
    lap = [np.roll(w, 1, 0) + np.roll(w, -1, 0) + np.roll(w, 1, 1) + np.roll(w, -1, 1) - 4 * w for w in (u, v)]
    reaction = u * u * v
    return np.stack([1 + reaction - 4.4 * u + lap[0], 3.4 * u - reaction + lap[1]]).ravel()


def minimal_surface(x):
    """Mean curvature of a 5 x 4 grid, boundary fixed at 0."""
    z = np.pad(x.reshape(5, 4), 1)
    dx, dy = np.diff(z, axis=0)[:, 1:-1], np.diff(z, axis=1)[1:-1]
    fx, fy = dx / np.sqrt(1 + dx**2), dy / np.sqrt(1 + dy**2)
    return (np.diff(fx, axis=0) + np.diff(fy, axis=1)).ravel()


def writes_to_x(x):
    x[1:] *= x[:-1].copy()
    x[0] = 3.0
    x += x[::-1].copy()
    return np.sin(x)


def burgers(x):
    du = np.zeros_like(x)
    du[1:-1] = 0.1 * (x[2:] - 2 * x[1:-1] + x[:-2]) - x[1:-1] * (x[2:] - x[:-2]) / 2
    du[0] += x[0] * x[1]
    du[-1] -= x[-1] ** 3
    return du


def augmented(x):
    y = 2 * x
    y[1:4] *= x[3]
    y += x[::-1]
    y[[0, 5]] = np.sin(y[[5, 0]])
    return y


def views(x):
    grid = np.zeros_like(x, shape=(2, 3))
    grid[0, :] = x[:3]
    grid[1, ::2] = x[5:] * x[0]
    return grid.T.ravel() + grid.flatten()[::-1]


def assembled(x, ufunc):
    """As finite elements are assembled."""
    y = np.zeros_like(x)
    ufunc.at(y, [[0, 2], [2, 3]], x[1:3] * x[:2, None])
    return y


def multiplied_at(x):
    y = 1 * x
    np.multiply.at(y, [0, 3], x[1])
    np.negative.at(y, slice(2, 3))
    return y


def phasors(x):
    return x[: len(x) // 2] * np.exp(1j * x[len(x) // 2 :])


def parts(z):
    return np.concatenate([z.real, np.imag(z)])


STACK = np.array([[[3.0, 1], [0, 2]], [[4, 0], [1, 3]]])
ADMITTANCE = sp.csr_array(np.array([[2 - 3j, -1j, 0], [-1j, 1 + 1j, 0.5], [0, 0.5, 1 - 2j]]))


# name: (function, length of x, the exact pattern or None where a superset will do). The pattern's rows, as text.
DIAGONAL = object()
FUNCTIONS = {
    "assembly": (lambda x: assembled(x, np.add) - 2 * assembled(x, np.subtract), N, True),
    "writes at": (multiplied_at, N, True),
    "bins": (lambda x: np.bincount([0, 2, 2, 5], weights=x[:4] * x[1:5]) + np.bincount([5], x[:1], 6), N, True),
    "segments": (lambda x: np.add.reduceat(np.outer(x, x[:2]), [0, 4, 2, 3], axis=0).ravel(), N, True),
    "segments of products": (lambda x: np.multiply.reduceat(x, [0, 2, 3]), N, True),
    "differences": (lambda x: np.diff(x.reshape(-1, 1), 2, 0, prepend=1.0, append=[x[:1] ** 2]).ravel(), N, True),
    "cross": (lambda x: np.cross(x[:6].reshape(2, 3), [x[5], x[6], 2.0]).ravel(), N, True),
    "numbers for NaN": (lambda x: np.nan_to_num(np.where(x > 0.4, np.inf, x) / x[0], posinf=3), N, False),
    "polynomials": (lambda x: np.polyval([1.0, 0.0, 2.0], x) + np.polyval(x[:3], 0.7), N, True),
    "determinants": (lambda x: np.linalg.det(x[:4].reshape(2, 2) * np.arange(1, 4)[:, None, None]), N, True),
    "determinant": (lambda x: np.linalg.det(np.append(x, [2.0, 1.5]).reshape(3, 3))[None], N, True),
    "large determinant": (lambda x: np.linalg.det(np.outer(x[:4], x[3:]) + np.diag(x[:4] + 4))[None], N, False),
    "solves": (lambda x: np.linalg.solve(STACK + x[:1], np.stack([x[:2], x[2:4]])[..., None]).ravel(), N, False),
    "norms of orders": (lambda x: np.linalg.norm(x[:, None] + x[:2], 3, axis=0) + np.linalg.norm(x[2:], 1), N, False),
    "sums where": (
        lambda x: np.append(x[None].mean(1, where=MASK), np.sum(x, where=MASK)) * np.prod(x[:3], where=MASK[:3]),
        N, False),
    "where in a ufunc": (lambda x: np.divide(x[0], x, out=np.copy(x), where=MASK), N, False),
    "power flow": (lambda x: parts(phasors(x) * np.conj(ADMITTANCE @ phasors(x))), N - 1, False),
    "flows": (lambda x: np.abs(phasors(x) ** 2) + np.angle(1 + phasors(x)[::-1] * 1j) + abs(x[:3]), N - 1, False),
    "currents": (lambda x: np.linalg.norm(ADMITTANCE @ phasors(x))[None] * (phasors(x).conj() / 2j).real, N - 1, False),
    "filters": (lambda x: np.fft.irfft(np.fft.rfft(x**2, 9) ** 2, 6) + np.fft.fft(x[:6]).imag, N, False),
    "brusselator": (brusselator, 24, True),
    "minimal surface": (minimal_surface, 20, True),
    "burgers": (burgers, N, True),
    "rosenbrock chain": (lambda x: np.concatenate([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]]), N, True),
    "broyden tridiagonal": (lambda x: (3 - 2 * x) * x - np.pad(x, 1)[:-2] - 2 * np.pad(x, 1)[2:] + 1, N, True),
    "augmented": (augmented, N, True),
    "views": (views, N, True),
    "steps": (lambda x: x[::2][::-1] * x[-1], N, True),
    "negative": (lambda x: x[-2:-6:-1] + x[-1], N, True),
    "fancy": (lambda x: x[[3, 3, -1, 0]] * x[np.array([[1, 2, 3, 4]])][0], N, True),
    "mask": (lambda x: np.exp(x[MASK]), N, True),
    "axes of indices": (lambda x: x[:6].reshape(1, 2, 3)[:, [0, 1], :][0, 1][None, ..., [2, 0]].ravel(), N, True),
    "separated indices": (lambda x: x.reshape(2, 2, 3)[[0, 1], :, [2, 0]].ravel() ** 2, 12, True),
    "concatenate": (lambda x: np.concatenate([x[:2] ** 2, np.ones(3), x[-1:]]), N, True),
    "stacks": (
        lambda x: np.vstack([np.hstack([x[:2], x[2:3]]), np.column_stack([x[3:4], x[4:5],
        x[5:6]])]).T.ravel(), N, True),
    "block": (lambda x: np.block([[x[:2], 0.0], [x[2:5]]]).ravel(), N, True),
    "roll": (lambda x: np.roll(x, 2) * np.flip(x), N, True),
    "diff": (lambda x: np.diff(x, n=2), N, True),
    "cumsum": (np.cumsum, N, True),
    "cumsum of axes": (lambda x: np.cumsum(x.reshape(2, 3), axis=1).ravel(), 6, True),
    "cumprod": (np.cumprod, N, True),
    "pads": (lambda x: np.concatenate([np.pad(x, (1, 2), mode=m) for m in ("edge", "wrap", "reflect", "constant")])
             + np.pad(x, (20, 13), constant_values=3.0), N, True),
    "where": (lambda x: np.where(MASK, x, x[0] ** 2), N, True),
    "where of values": (lambda x: np.where(x > 0.1, np.sqrt(np.abs(x)), x[::-1]), N, True),
    "clip": (lambda x: np.clip(x, -0.5, 0.5) + x.clip(0.1, None), N, True),
    "maximum": (lambda x: np.maximum(x[1:], x[:-1]) - np.minimum(x[1:], 0.3), N, True),
    "einsum": (lambda x: np.einsum("ij,jk->ik", x[:6].reshape(2, 3), x[:3].reshape(3, 1)).ravel(), N, True),
    "einsum with repeats": (lambda x: np.einsum("iij,j->i", x.reshape(2, 2, 2), x[:2]), 8, True),
    "einsum, implicit": (lambda x: np.einsum("...i,ij", x.reshape(2, 3), DENSE[:3, :4]).ravel(), 6, True),
    "einsum that broadcasts": (
        lambda x: np.einsum("ij,jk,ij->ik", x[:2, None], DENSE[:3, :2], x[None, :3]).ravel(), N, False),
    "einsum of three": (lambda x: np.einsum("i,ij,j->i", x[:5], DENSE, x[:7]), 7, False),
    "tensordot": (lambda x: np.tensordot(x.reshape(2, 3), x.reshape(3, 2), axes=1).ravel(), 6, True),
    "matmul": (lambda x: (x[:4].reshape(2, 2) @ x[3:].reshape(2, 2)).ravel(), N, True),
    "matmul in batches": (lambda x: (x.reshape(3, 1, 2, 2) @ x[:4].reshape(2, 2)).ravel(), 12, True),
    "dense matrix": (lambda x: np.tanh(DENSE @ x), N, True),
    "sparse matrix": (lambda x: SPARSE @ (SPARSE.T @ np.sin(SPARSE @ x)), N, True),
    "sparse matrix of columns": (lambda x: (SPARSE @ np.stack([x, x**2], axis=1)).ravel(), N, True),
    "sparse matrix from the right": (lambda x: x[:5] @ SPARSE, N, True),
    "sparse dot": (lambda x: SPARSE.dot(x) + (x.reshape(1, 7) @ SPARSE.T)[0], N, True),
    "outer": (lambda x: np.outer(x[:2], x[2:5]).ravel() + np.multiply.outer(x[:3], x[5:]).ravel(), N, True),
    "kron": (lambda x: np.kron(x[:2], x[2:5]), N, True),
    "inner, dot, vdot": (
        lambda x: np.stack([np.inner(x[:3], x[1:4]), np.dot(x[:2], [1.0, 2.0]), np.vdot(x, x)]), N, True),
    "convolve": (
        lambda x: np.concatenate([np.convolve(x, [1.0, -2.0, 0.5], m) for m in ("full", "same", "valid")]), N, False),
    "sums over axes": (
        lambda x: np.concatenate([x.reshape(2, 2, 3).sum((0, 2)), x.reshape(3, 4).sum(1, keepdims=True)[:,
        0]]), 12, True),
    "prod": (lambda x: np.prod(x.reshape(2, 3), axis=0), 6, True),
    "max and min": (lambda x: np.concatenate([x.reshape(2, 3).max(axis=0), x.reshape(2, 3).min(axis=1)]), 6, False),
    "mean, var, std": (lambda x: np.stack([x[:3].mean(), x[2:5].var(), np.std(x[3:], ddof=1)]), N, True),
    "norms": (lambda x: np.stack([np.linalg.norm(x[:3]), np.linalg.norm(x[3:], 1)]), N, True),
    "trapezoid": (lambda x: np.trapezoid(x.reshape(2, 3), dx=0.5), 6, True),
    "gradient": (lambda x: np.gradient(x**2, 0.5), N, True),
    "transposes": (
        lambda x: np.moveaxis(x.reshape(1, 2, 3), 0, 2).swapaxes(0, 1).transpose(2, 1,
        0).ravel() * SCALES[:6], 6, True),
    "zeros of constants": (lambda x: SCALES * x, N, True),
    "broadcasting": (lambda x: (x[:2, None] * x[None, 2:5] + x[5]).ravel(), N, True),
    "list of scalars": (lambda x: [x[0] * x[1], 3.0, math.pi * np.exp(x[2])], N, True),
    "array of scalars": (lambda x: np.array([x[0] ** 2 + x[1], x[1] * x[2]]) * np.array([2.0, 3.0]), N, True),
    "lists of constants": (lambda x: x[:3] * [1.0, 0, 3] / (2, 3, 4) + range(3) * x[:3] ** [2, 3, 1], N, True),
    "unpacking": (lambda x: np.stack([a * b for a, b in zip(x, list(x)[1:], strict=False)]), N, True),
    "reductions of ufuncs": (
        lambda x: np.stack([np.add.reduce(x[:3]), np.multiply.reduce(x[2:4]), np.maximum.reduce(x)]), N, False),
    "sort": (lambda x: np.sort(x[:4]), N, False),
    "spectrum": (
        lambda x: np.fft.irfft(np.fft.rfft(x[:6]) * np.array([1, 2, 3j, 1])) + np.fft.fft(x[:6]).real, N, False),
    "interp": (lambda x: np.interp(x, [-1.0, 0.0, 0.7, 2.0], [0.0, 1.0, 5.0, 4.0]), N, True),
    "select, tile, repeat": (
        lambda x: np.select([x > 0, MASK], [x, x[0]], 2.0) + np.tile(x[:1], N) + np.repeat(x[1:3], [3, 4]), N, True),
    "triangles": (
        lambda x: (np.tril(x.reshape(3, 3)) + np.diag(x[:3]) + np.triu(x.reshape(3, 3), 1).T).ravel(), 9, True),
    "trace, take, append": (lambda x: np.append(np.take(x, [2, 1]), np.trace(x[:4].reshape(2, 2))), N, True),
    "solve": (lambda x: np.linalg.solve(np.eye(3) * 3 + 1.0, x[:3]) * x[3:6], N, True),
    "solve with x": (
        lambda x: np.linalg.solve(np.eye(2) * 5 + x[:4].reshape(2, 2), x[4:8].reshape(2, 2)).ravel(), 8, True),
    "inverse": (lambda x: np.linalg.inv(x[:4].reshape(2, 2) + 4 * np.eye(2)).ravel(), N, True),
    "copies": (lambda x: copy.deepcopy(x) * copy.copy(x[::-1]) + x.astype(int) + x.cumsum(dtype=int), N, True),
    "constant": (lambda x: np.array([1.0, 2.0]), N, True),
    "products of bools": (lambda x: x * (np.cumprod(x > 0) - np.prod(x > 0, axis=()) + 2), N, True),
    "writes to x": (writes_to_x, N, True),
    "arcs of complex numbers": (
        lambda x: np.arccosh(np.sign(x) * (2 + 1j) * (1 + np.sign(x) * x)).real + np.arctanh(x + 2j).imag, N, True),
    "steps of values": (lambda x: np.floor(x) + np.sign(x) * 3 + (x > 0.2), N, True),
    "norm of a broadcast": (lambda x: x / np.sqrt(np.sum(x * x)), N, True),
}  # fmt: skip
UFUNCS = [
    "absolute", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "cbrt", "cos", "cosh", "deg2rad", "exp",
    "exp2", "expm1", "fabs", "log", "log10", "log1p", "log2", "negative", "positive", "rad2deg", "reciprocal",
    "sin", "sinh", "sqrt", "square", "tan", "tanh",
]  # fmt: skip
PAIRS = [
    "add", "arctan2", "copysign", "divide", "float_power", "fmax", "fmin", "fmod", "heaviside", "hypot",
    "logaddexp", "logaddexp2", "maximum", "minimum", "multiply", "power", "remainder", "subtract",
]  # fmt: skip
SPECIAL = ["erf", "erfc", "expit", "gamma", "gammaln", "log_expit", "logit", "ndtr"]


def differences(f, x, step=1e-6):
    """The dense Jacobian by central differences, column by column."""
    columns = []
    for j in range(len(x)):
        e = np.zeros(len(x))
        e[j] = step
        columns.append((np.asarray(f(x + e), float) - np.asarray(f(x - e), float)) / (2 * step))
    return np.stack(columns, axis=1) if columns else np.zeros((len(np.asarray(f(x))), 0))


def holds(f, n, exact, seed=0):
    """Values against differences at two points; the pattern against their nonzeros."""
    rng = np.random.default_rng(seed)
    jac = sb.sparse_jacobian(f, np.zeros(n))
    seen = np.zeros(jac.pattern.shape, bool)
    for _ in range(4):
        x = rng.uniform(0.15, 0.85, n) * rng.choice([-1.0, 1.0], n)
        x.flags.writeable = False
        kept = x.copy()
        matrix = jac(x, check=True)
        assert isinstance(matrix, sp.csr_array) and matrix.dtype == np.float64
        np.testing.assert_array_equal(x, kept)
        expected = differences(f, x)
        np.testing.assert_allclose(matrix.toarray(), expected, rtol=2e-6, atol=2e-7)
        seen |= abs(expected) > 1e-7
    allowed = jac.pattern.to_scipy().toarray() > 0
    assert not (seen & ~allowed).any()
    if exact:
        np.testing.assert_array_equal(allowed, seen)
    return jac


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_patterns(name):
    f, n, exact = FUNCTIONS[name]
    holds(f, n, exact)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reverse_mode_agrees(name):
    """Rows by reverse sweeps, for functions that a tape can record: products with vectors are the forward's."""
    f, n, _ = FUNCTIONS[name]
    jac = sb.sparse_jacobian(f, np.zeros(n))
    x = np.random.default_rng(1).uniform(0.2, 0.8, n)
    rows = np.random.default_rng(2).standard_normal((3, jac.pattern.shape[0]))
    np.testing.assert_allclose(jac._function.reverse((x,), rows), rows @ jac(x).toarray(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", UFUNCS)
def test_elementwise_functions(name):
    ufunc = getattr(np, name)
    shift = 2.0 if name == "arccosh" else 0.0
    jac = holds(lambda x: ufunc(np.abs(x) + shift), 3, True)
    assert jac.colors == 1


@pytest.mark.parametrize("name", PAIRS)
def test_functions_of_two(name):
    ufunc = getattr(np, name)
    zero = ("floor_divide", "heaviside", "copysign")
    holds(lambda x: ufunc(np.abs(x[:3]) + 0.1, 2 * x[2:] ** 2 + 0.05), 5, name not in zero)
    holds(lambda x: np.concatenate([ufunc(x + 1.0, 0.75), ufunc(1.7, x + 1.0)]), 3, False)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions(name):
    ufunc = getattr(special, name)
    holds(lambda x: ufunc(np.abs(x)), 3, True)


def test_powers_at_zero():
    jac = sb.sparse_jacobian(
        lambda x: np.concatenate([x**2, x**1, x**0, x ** np.array([0, 1, 2]), x**2.0]), np.zeros(3)
    )
    expected = np.concatenate([np.zeros(3), np.ones(3), np.zeros(3), [0, 1, 0], np.zeros(3)])
    np.testing.assert_array_equal(jac(np.zeros(3)).sum(axis=1), expected)


def test_an_infinite_slope_stays_in_its_entry():
    jac = sb.sparse_jacobian(lambda x: np.sqrt(x[:2]) + x[1:], np.ones(3))
    np.testing.assert_array_equal(jac(np.array([0.0, 4.0, 1.0])).toarray(), [[np.inf, 1, 0], [0, 0.25, 1]])
    jac = sb.sparse_jacobian(lambda x: np.where(x > 0, np.log(np.where(x > 0, x, 1)), 0.0), np.ones(2))
    np.testing.assert_array_equal(jac(np.array([0.0, 2.0])).toarray(), [[0, 0], [0, 0.5]])


BRANCHES = {  # a branch that is not taken has no derivative at 0; the second derivatives of the sum at 0 and 2
    "log": (lambda x: np.where(x > 0, np.log(x), 0.0), [0, -0.25]),
    "sqrt": (lambda x: np.where(x > 0, np.sqrt(x), x * x), [2, -0.25 / 2**1.5]),
    "power": (lambda x: np.where(x > 0, x**1.5, 0.0), [0, 0.75 / 2**0.5]),
    "reciprocal": (lambda x: np.where(x > 0, 3 / x, x**3), [0, 6 / 8]),
    "nested": (lambda x: np.where(x > 0, np.exp(np.sqrt(x) * np.log(x)), 1 + x), [0, None]),
    "arctan2": (lambda x: np.where(x > 0, np.arctan2(x, 0 * x), x**4), [0, 0]),
    "moved": (lambda x: np.where(x > 0, np.roll(np.log(x)[::-1], 1), 0.0), [0, -0.25]),
    "reshaped": (lambda x: np.where((x > 0)[:, None], np.sqrt(x).reshape(2, 1), 0.0).ravel(), [0, -0.25 / 2**1.5]),
    "select": (lambda x: np.select([x > 1, x > 0.5], [np.log(x), 1 / x], x**2), [2, -0.25]),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_that_is_not_taken_adds_nothing(name):
    f, expected = BRANCHES[name]
    x = np.array([0.0, 2.0])
    with np.errstate(all="ignore"):
        hess = sb.sparse_hessian(lambda x: np.sum(f(x)), np.ones(2))
        found = hess(x, check=True).toarray()
        jac = sb.sparse_jacobian(f, np.ones(2))(x, check=True).toarray()
    hess = sb.sparse_hessian(lambda x: np.sum(np.sqrt(x) ** 2), np.ones(2))(x).toarray()
    assert np.isnan(hess[0, 0])  # its limit is 0, which no rule for branches may hide
    assert np.isfinite(jac).all() and not found[0, 1] and found[0, 0] == expected[0]
    assert expected[1] is None or abs(found[1, 1] - expected[1]) < 1e-14


def test_check_names_an_entry_that_is_nan_where_the_function_is_finite():
    jac = sb.sparse_jacobian(lambda x: np.arctan2(x[1:], x[:-1]), np.ones(4))
    x = np.array([1.0, 0.0, 0.0, 2.0])
    assert np.isnan(jac(x).data).sum() == 2
    with pytest.raises(NonFiniteError, match=r"row 1, column 1 .* 2 such entries"):
        jac(x, check=True)
    hess = sb.sparse_hessian(lambda x: np.sum(np.hypot(x[1:], x[:-1])), np.ones(4))
    with pytest.raises(NonFiniteError, match="row 1"):
        hess(x, check=True)
    hess(np.ones(4), check=True)


HESSIANS = {
    "losses": (lambda x: np.sum(np.abs(phasors(x) * np.conj(ADMITTANCE @ phasors(x))) ** 2), N - 1, False),
    "spectra": (lambda x: np.sum(abs(np.fft.fft(x * x)) ** 2) + np.fft.irfft(np.fft.rfft(x)[:3] ** 2, 5)[1], N, False),
    "volumes": (lambda x: np.linalg.slogdet(np.outer(x, x) + 4 * np.eye(N))[1], N, False),
    "assembly": (lambda x: np.sum(assembled(x, np.add) ** 2), N, True),
    "rosenbrock": (lambda x: np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2), N, True),
    "surface": (lambda x: np.sqrt(1 + np.diff(np.pad(x, 1)) ** 2).sum(), N, True),
    "products": (lambda x: np.prod(x[:3]) + x[3] * np.exp(x[4]) + x[5], N, True),
    "quadratic": (lambda x: (SPARSE @ x) @ np.ones(5) + 0.5 * np.sum((SPARSE @ x) ** 2), N, True),
    "matrices": (lambda x: np.trace(x[:4].reshape(2, 2) @ x[3:].reshape(2, 2)), N, True),
    "entropy": (lambda x: np.sum(special.xlogy(x * x, x * x)), N, True),
    "moves": (lambda x: (np.roll(x, 2) * np.cumsum(x) * np.flip(x[..., ::-1])).mean(), N, False),
    "extremes": (lambda x: np.max(x[:3]) ** 2 + np.maximum(x[3:], 0.0).sum() ** 2 + np.linalg.norm(x[:2]), N, False),
    "where": (lambda x: np.where(x > 0, x**3, np.sin(x)).sum(), N, True),
    "solve": (lambda x: x[:3] @ np.linalg.solve(np.eye(3) * 4 + np.outer(x[:3], x[3:6]), x[4:]), N, False),
    "writes": (lambda x: burgers(x) @ burgers(x), N, False),
    "writes to x": (lambda x: np.sum(writes_to_x(x)), N, False),
    "einsum": (lambda x: np.einsum("ij,jk,ki->", x[:4].reshape(2, 2), x[3:].reshape(2, 2), np.ones((2, 2))), N, False),
    "linear": (lambda x: 3 * x.sum(), N, True),
    "constant": (lambda x: 2.0, N, True),
}  # fmt: skip


@pytest.mark.parametrize("name", HESSIANS)
def test_hessians(name):
    g, n, exact = HESSIANS[name]
    hess = sb.sparse_hessian(g, np.zeros(n))
    from sparsebp.jacobians.tracing import gradient

    seen = np.zeros((n, n), bool)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x = rng.uniform(0.2, 0.8, n) * rng.choice([-1.0, 1.0], n)
        slopes = differences(lambda x: np.atleast_1d(g(x)), x)[0]
        np.testing.assert_allclose(gradient(g)(x), slopes, rtol=1e-6, atol=1e-7)
        found = hess(x, check=True).toarray()
        np.testing.assert_array_equal(found, found.T)
        expected = differences(gradient(g), x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        seen |= abs(expected) > 1e-6
    allowed = hess.pattern.to_scipy().toarray() > 0
    assert not (seen & ~allowed).any()
    if exact:
        np.testing.assert_array_equal(allowed, seen)


INTERPRETED = {  # what has no local form
    "large determinant", "solves", "power flow", "flows", "currents", "filters", "losses", "spectra", "volumes",
    "max and min", "sort", "spectrum", "solve", "solve with x", "inverse", "interp", "arcs of complex numbers",
    "copies", "products of bools", "reductions of ufuncs", "extremes",
}  # fmt: skip


@pytest.mark.parametrize("name", [*FUNCTIONS, *HESSIANS])
def test_compiled_values(loops_in_python, name):
    """The tape gives the interpreter's values, and says where there is none."""
    of = [(sb.sparse_jacobian, FUNCTIONS), (sb.sparse_hessian, HESSIANS)]
    for make, (f, n, _) in ((make, functions[name]) for make, functions in of if name in functions):
        old, rng = make(f, np.zeros(n), compiled=False), np.random.default_rng(0)
        if not old.pattern.nnz:
            assert "no entries" in make(f, np.zeros(n), compiled=True).describe()
            continue
        if name in INTERPRETED:
            with pytest.raises((TracingError, OptionError), match="compiled"):
                make(f, np.zeros(n), compiled=True)
            continue
        new = make(f, np.zeros(n), compiled=True)
        for _ in range(3):
            x = rng.uniform(0.2, 0.8, n) * rng.choice([-1.0, 1.0], n)
            found = new._tape._records[x.dtype].tape.values((x,))
            np.testing.assert_allclose(found, old.values(x), rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(new.values(x), old.values(x), rtol=1e-12, atol=1e-14)


REFUSED = {
    "if": (lambda x: x if x[0] > 0 else -x, "numpy.where"),
    "float": (lambda x: np.ones(3) * float(x[0]), "number"),
    "math": (lambda x: [math.sin(x[0])], "numpy.sin"),
    "item": (lambda x: [x[0].item()], "number"),
    "asarray": (lambda x: np.asarray(x) * 2, "asarray"),
    "into a plain array": (lambda x: put(np.zeros(3), slice(0, 2), x[:2]), "zeros_like"),
    "into a plain element": (lambda x: put(np.zeros(3), 0, x[0]), "number"),
    "at, with repeats": (lambda x: np.multiply.at(x, [0, 0], 2.0), "multiply.at"),
    "add.at into a plain array": (lambda x: np.add.at(np.zeros(3), [0, 1], x[:2]), "add.at"),
    "vectorize": (np.vectorize(lambda a: a * 2), "asarray"),
    "frompyfunc": (np.frompyfunc(lambda a: a, 1, 1), "ufunc"),
    "index by values": (lambda x: x[np.argsort(x)], "depends on x"),
    "mask by values": (lambda x: x[x > 0], "where"),
    "eig": (lambda x: np.linalg.eigvals(x[:4].reshape(2, 2)), "linalg.eigvals"),
    "unknown function": (lambda x: np.percentile(x, 50), "percentile"),
    "unknown option": (lambda x: np.max(x, where=MASK, initial=0)[None], "where="),
    "where= without a result": (lambda x: np.sin(x, where=MASK), "out="),
    "cross in a plane": (lambda x: np.cross(x[:2], x[2:4]), "cross"),
    "unknown attribute": (lambda x: x.byteswap(), "byteswap"),
    "range": (lambda x: list(range(x[0])), "number"),
    "out": (lambda x: np.add(x, 1, out=np.zeros(N)), "out="),
    "integers as indices": (lambda x: x[x.astype(int)], "depends on x"),
    "odd reflection": (lambda x: np.pad(x, 1, mode="reflect", reflect_type="odd"), "reflect_type"),
    "ramp": (lambda x: np.pad(x, 1, mode="linear_ramp"), "mode"),
    "spectral norm": (lambda x: np.linalg.norm(x[:4].reshape(2, 2), 2, axis=(0, 1))[None], "norm"),
    "complex to real": (lambda x: (x * 1j).astype(float), "complex"),
    "kept from another trace": (lambda x: x if isinstance(x, np.ndarray) else x + 0 * KEPT.setdefault("x", x), "kept"),
    "sparse times elementwise": (SPARSE.multiply, "array"),
    "loop until": (lambda x: loop(x) + 0, "where"),
    "a view written to": (lambda x: write_view(x) + 0, "view"),
    "a view of what was written to": (lambda x: stale_view(x) + 0, "view"),
    "in place through a view": (lambda x: through_view(x) + 0, "view"),
    "interp at points of x": (lambda x: np.interp([0.1], x[:2], [0.0, 1.0]), "points"),
    "a diagonal of axes of two lengths": (lambda x: np.einsum("ii->i", x[:6].reshape(2, 3)), "repeated label"),
    "objects that do not move": (lambda x: (x.sum() // 1).astype(object), "object"),
    "signs of complex numbers": (lambda x: np.sign(x * 1j).real, "complex"),
    "a diagonal matrix of x": (lambda x: sp.diags_array(x) @ x, r"diags_array .* x \* y"),
    "factors of a matrix": (lambda x: sp.linalg.splu(sp.eye_array(N, format="csc")).solve(x), "listed"),
    "a rounded scalar": (lambda x: round(x[0]) * x, "listed"),
}  # fmt: skip


def put(array, key, item):
    array[key] = item
    return array


def loop(x):
    while np.sum(x) > 1:
        x = x / 2
    return x


def write_view(x):
    y = 1 * x
    y[1:3][0] = 5.0
    return y


def stale_view(x):
    y = 1 * x
    part = y[1:3]
    y[1] = 7.0
    return part


def through_view(x):
    y = 1 * x
    part = y[1:3]
    part += 1
    return y


KEPT = {}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name):
    f, message = REFUSED[name]
    with pytest.raises(TracingError, match=message):
        sb.sparse_jacobian(f, np.linspace(0.1, 0.7, N))


def test_bad_arguments():
    def f(x):
        return x[1:] * x[:-1]

    for x, error in ((np.arange(3), DTypeError), (np.zeros(3, complex), DTypeError), ([1.0, 2.0], DTypeError),
                     (1.0, DTypeError), ((np.zeros(3), np.zeros(3, np.float32)), DTypeError), ({}, ShapeError),
                     (np.zeros(3, np.float16), DTypeError)):  # fmt: skip
        with pytest.raises(error):
            sb.sparse_jacobian(f, x)
    jac = sb.sparse_jacobian(f, np.zeros(4))
    for x, error in ((np.zeros(5), ShapeError), (np.zeros((4, 1)), ShapeError), (np.arange(4), DTypeError)):
        with pytest.raises(error):
            jac(x)
    with pytest.raises(OptionError):
        jac(np.zeros(4), 3.0)
    with pytest.raises(OptionError):
        jac(np.zeros(4), check=1)
    with pytest.raises(OptionError):
        sb.sparse_jacobian(3, np.zeros(4))
    with pytest.raises(OptionError):
        sb.sparse_jacobian(f)
    with pytest.raises(OptionError):
        sb.sparse_jacobian(f, np.zeros(4), argnums=1)
    with pytest.raises(ShapeError, match="ravel"):
        sb.sparse_jacobian(lambda x: x.sum(), np.zeros(4))
    for argnums in ((), (0, 0), (0, 2), 1.0):
        with pytest.raises(OptionError):
            sb.sparse_jacobian(lambda x, y: x * y, np.zeros(4), np.zeros(4), argnums=argnums)
    with pytest.raises(OptionError, match="has_aux"):
        sb.sparse_jacobian(f, np.zeros(4), has_aux=True)
    with pytest.raises(OptionError):
        sb.sparse_jacobian(f, np.zeros(4), chunk_size=0)
    with pytest.raises(DTypeError, match="real"):
        sb.sparse_jacobian(lambda x: x * 1j, np.zeros(4))
    with pytest.raises(TracingError, match="scalar"):
        sb.sparse_hessian(f, np.zeros(4))
    with pytest.raises(PatternError, match="columns"):
        sb.sparse_jacobian(f, np.zeros(4), pattern=sb.SparsityPattern.dense(3, 5))
    with pytest.raises(PatternError, match="symmetric"):
        sb.sparse_hessian(lambda x: x.sum(), np.zeros(2), pattern=sb.SparsityPattern([0, 2, 2], [0, 1], (2, 2)))
    lengths = [3]
    jac = sb.sparse_jacobian(lambda x: x[: lengths[0]] ** 2, np.zeros(4))
    jac(np.ones(4))
    lengths[0] = 2
    with pytest.raises(ShapeError, match="length"):
        jac(np.ones(4))
    with pytest.raises(MemoryLimitError):
        sb.sparse_jacobian(lambda x: x - x.mean(), np.zeros(20_011))


def test_masks_are_not_dropped():
    masked = np.ma.masked_array(np.ones(N), MASK)
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(np.eye(N))
    for call in (
        lambda: sb.sparse_jacobian(lambda x: x**2, masked), lambda: sb.sparse_hessian(lambda x: x.sum(), masked),
        lambda: sb.sparse_jacobian(lambda x, a: a * x, np.ones(N), masked),
        lambda: sb.sparse_jacobian(np.sin, np.ones(N))(masked),
        lambda: sb.sparse_jacobian(np.sin, np.ones(N)).batch(np.ma.masked_array(np.ones((N, 2)), False)),
    ):  # fmt: skip
        with pytest.raises(DTypeError, match="filled"):
            call()
    for f in (
        lambda x: x * masked, lambda x: masked - x, lambda x: np.ma.masked_array(x, MASK), lambda x: masked,
        lambda x: np.where(MASK, x, masked), lambda x: np.concatenate([x, masked]),
        lambda x: np.interp(x, masked, masked), lambda x: x[np.ma.masked_array([1, 2], [0, 1])],
        lambda x: put(np.zeros_like(x), slice(None), masked) + x, lambda x: x @ matrix,
    ):  # fmt: skip
        with pytest.raises((DTypeError, TracingError)):
            sb.sparse_jacobian(f, np.ones(N))


def test_the_functions_own_errors_stay():
    def f(x):
        raise LookupError("no such table")

    with pytest.raises(LookupError, match="no such table"):
        sb.sparse_jacobian(f, np.ones(3))
    with pytest.raises(ValueError, match="broadcast"):
        sb.sparse_jacobian(lambda x: x + np.ones(4), np.ones(3))


@pytest.mark.parametrize("f", [
    lambda x: x, lambda x: np.broadcast_to(x[0], (3,)), lambda x: np.diagonal(np.outer(x, x)), lambda x: np.ones(3),
])  # fmt: skip
def test_read_only_arrays_go_in_and_writeable_ones_come_out(f):
    x = np.broadcast_to(0.5, (3,))
    jac, hess = sb.sparse_jacobian(f, x), sb.sparse_hessian(lambda x: np.sum(f(x) ** 2), x)
    batch = jac.batch(np.broadcast_to(0.5, (3, 2)))
    assert all(a.flags.writeable for a in (jac.values(x), jac(x).data, jac(x).indices, batch, hess(x).data))


def test_a_pattern_by_hand_allows_branches_and_must_hold():
    def f(x):
        return x * x[0] if x[0] > 0 else -x

    arrow = sp.csr_array(np.eye(3) + np.array([[0, 0, 0], [1, 0, 0], [1, 0, 0]]))
    jac = sb.sparse_jacobian(f, np.zeros(3), pattern=sb.SparsityPattern.from_scipy(arrow))
    for x in (np.array([1.0, 2.0, 3.0]), np.array([-1.0, 2.0, 3.0])):
        np.testing.assert_allclose(jac(x, check=True).toarray(), differences(f, x), atol=1e-8)
    jac = sb.sparse_jacobian(f, np.zeros(3), pattern=sb.SparsityPattern.diagonal(3))
    with pytest.raises(PatternError, match="misses"):
        jac(np.array([1.0, 2.0, 3.0]), check=True)


def test_a_constant_that_changed_is_noticed():
    weight = np.array([[1.0, 0.0], [0.0, 0.0]])
    jac = sb.sparse_jacobian(lambda x: weight @ x, np.zeros(2))
    assert jac.pattern.nnz == 1
    weight[1, 1] = 3
    with pytest.raises(PatternError, match="changed"):
        jac(np.ones(2))


def test_nan_stays_in_its_rows():
    jac = sb.sparse_jacobian(lambda x: x[1:] * x[:-1], np.full(4, np.nan))
    assert jac.pattern.nnz == 6
    found = jac(np.array([np.nan, 1.0, 2.0, 3.0]), check=True)
    np.testing.assert_array_equal(found.toarray(), [[1, np.nan, 0, 0], [0, 2, 1, 0], [0, 0, 3, 2]])


@given(
    n=st.sampled_from([0, 1, 2, 3, 5, 13, 31]), dtype=st.sampled_from([np.float32, np.float64]),
    name=st.sampled_from(["stencil", "outer", "sum", "none", "rows"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_sizes_and_dtypes(n, dtype, name, seed):
    f = {
        "stencil": lambda x: np.pad(x, 1)[2:] * x - np.pad(x, 1)[:-2] ** 2,
        "outer": lambda x: np.outer(x, x[:2]).ravel(),
        "sum": lambda x: np.sum(x * x)[None],
        "none": lambda x: x[:0],
        "rows": lambda x: np.concatenate([x, [1.0, 2.0]]).astype(x.dtype),
    }[name]
    x = np.random.default_rng(seed).uniform(0.2, 1, n)
    jac = sb.sparse_jacobian(f, x.astype(dtype))
    found = jac(x.astype(dtype), check=True)
    assert found.dtype == dtype and found.shape == (len(f(x)), n) == jac.pattern.shape
    np.testing.assert_allclose(found.toarray(), differences(f, x), rtol=1e-4, atol=1e-5)
    xs = np.stack([x, 2 * x], axis=1).astype(dtype)
    np.testing.assert_array_equal(jac.batch(xs), np.stack([jac.values(xs[:, 0]), jac.values(xs[:, 1])], axis=1))
    assert jac.batch(xs[:, :0]).shape == (jac.pattern.nnz, 0)
    hess = sb.sparse_hessian(lambda x: np.sum(f(x) ** 2), x)
    assert hess(x, check=True).shape == (n, n)


@given(parts=csr_patterns(), seed=st.integers(0, 9))
def test_colors_of_columns(parts, seed):
    pattern = sb.SparsityPattern(*parts)
    colors = color_columns(pattern)
    assert colors.shape == (pattern.shape[1],) and colors.min(initial=0) >= 0
    for row in range(pattern.shape[0]):
        mine = colors[pattern.indices[pattern.indptr[row] : pattern.indptr[row + 1]]]
        assert len(set(mine)) == len(mine)
    assert colors.max(initial=-1) + 1 >= np.diff(pattern.indptr).max(initial=0)


@given(n=st.integers(0, 24), density=st.floats(0, 0.6), diagonal=st.booleans(), seed=st.integers(0, 999))
def test_star_colors(n, density, diagonal, seed):
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.random((n, n)) < density, 1)
    dense = upper | upper.T | (np.eye(n, dtype=bool) if diagonal else np.diag(rng.random(n) < 0.5))
    pattern = sb.SparsityPattern.from_scipy(sp.csr_array(dense))
    colors = color_symmetric(pattern)
    off = dense & ~np.eye(n, dtype=bool)
    for a in range(n):  # no path of four vertices has two colours only, and no edge one
        for b in np.flatnonzero(off[a]):
            assert colors[a] != colors[b]
            for c in np.flatnonzero(off[b]):
                if c != a and colors[c] == colors[a]:
                    assert not any(d not in (a, b) and colors[d] == colors[b] for d in np.flatnonzero(off[c]))
    values = rng.standard_normal((n, n)) * dense
    values += values.T
    product = values @ np.eye(colors.max(initial=-1) + 1)[colors]
    rows, of = star_sources(pattern, colors)
    np.testing.assert_allclose(product[rows, of], values[pattern.row_of_entry, pattern.indices], atol=1e-12)


def test_few_colors():
    """A band needs as many as its width, a 5-point grid 5 or 6, an arrow's Hessian 2, two dense rows 2 in reverse."""
    assert sb.sparse_jacobian(burgers, np.zeros(101)).colors == 3
    assert sb.sparse_jacobian(minimal_surface, np.zeros(20)).colors <= 6
    arrow = sb.sparse_hessian(lambda x: np.sum(x[1:] ** 2) * x[0], np.zeros(50))
    assert arrow.colors == 2
    jac = sb.sparse_jacobian(lambda x: np.stack([np.sum(x**2), np.prod(x)]), np.zeros(50))
    assert (jac.mode, jac.colors) == ("reverse", 2)
    x = np.random.default_rng(0).uniform(0.9, 1.1, 50)
    np.testing.assert_allclose(jac(x, check=True).toarray(), np.stack([2 * x, np.prod(x) / x]))
    jac = sb.sparse_jacobian(lambda x: np.fft.rfft(x).real[:2], np.zeros(50))  # also through complex numbers
    assert (jac.mode, jac.colors) == ("reverse", 2)
    np.testing.assert_allclose(jac(x, check=True).toarray(), np.fft.rfft(np.eye(50)).real[:, :2].T, atol=1e-14)


def test_results_do_not_depend_on_blocks(monkeypatch):
    x = np.random.default_rng(0).standard_normal(24)
    jac = sb.sparse_jacobian(brusselator, x)
    whole, hess = jac.values(x), sb.sparse_hessian(lambda x: np.sum(brusselator(x) ** 2), x).values(x)
    for step in (1, 2, 3):
        monkeypatch.setattr("sparsebp.jacobians.numpy_functions.NumpyFunction.block_bytes", 8 * 24 * step)
        np.testing.assert_array_equal(sb.sparse_jacobian(brusselator, x).values(x), whole)
        np.testing.assert_array_equal(sb.sparse_hessian(lambda x: np.sum(brusselator(x) ** 2), x).values(x), hess)
    first, second = jac(x), jac(2 * x)
    np.testing.assert_array_equal(first.data, whole)
    assert not np.shares_memory(first.data, second.data)


def test_memory_that_is_used_again_is_nobodys(monkeypatch):
    """Tangents large enough for the pool: results of earlier calls, of other threads and after errors stay right."""
    monkeypatch.setattr("sparsebp.jacobians.tangents.SMALL", 1)
    rng, n, small = np.random.default_rng(0), 211, np.arange(3.0)
    fails = []

    def f(x):
        if fails:
            raise ArithmeticError
        y = np.pad(x, 1)
        z = y[2:] * y[:-2] - np.sqrt(np.abs(x)) / (1 + x * x)
        z[1:] += np.where(x[1:] > 0.5, x[1:] ** 3, z[1:] * x[:-1])
        return np.concatenate([z[::-1] + x, (x[:3] * small + x[3:6]).T])

    pattern = sb.sparse_jacobian(f, np.ones(n)).pattern
    jac = sb.sparse_jacobian(f, np.ones(n), pattern=pattern)
    xs = rng.uniform(0.1, 1, (n, 24))
    monkeypatch.setattr("sparsebp.jacobians.numpy_functions.NumpyFunction.block_bytes", 8 * n * 2)
    few = sb.sparse_jacobian(f, np.ones(n), pattern=pattern)
    first = jac.values(xs[:, 0])
    kept = first.copy()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda b: (few if b % 2 else jac).values(xs[:, b].copy()), range(24)))
    fails.append(1)
    with pytest.raises(ArithmeticError):
        jac.values(xs[:, 0])
    fails.clear()
    np.testing.assert_array_equal(first, kept)
    for b in range(24):
        np.testing.assert_array_equal(found[b], sb.sparse_jacobian(f, xs[:, b], pattern=pattern).values(xs[:, b]))
    dense = jac(xs[:, 5]).toarray()
    np.testing.assert_allclose(dense, differences(f, xs[:, 5]), atol=1e-7)
    hess = sb.sparse_hessian(lambda x: np.sum(f(x) ** 2), xs[:, 0])
    assert np.array_equal(hess.values(xs[:, 1]), hess.values(xs[:, 1]))


def test_other_arguments_are_not_constants():
    """Zeros of an argument at the trace are not zeros of the pattern, in products, masks and Hessians."""

    def f(x, matrix, scale, count):
        return np.tanh(matrix @ x)[:count] * scale + matrix[:count] @ x

    args = (np.zeros((5, N)), 0.0, 3)
    jac = sb.sparse_jacobian(f, np.ones(N), *args)
    assert jac.pattern.nnz == 3 * N
    x, matrix = RNG.standard_normal(N), RNG.standard_normal((5, N))
    np.testing.assert_allclose(
        jac(x, matrix, 2.0, 3, check=True).toarray(), differences(lambda x: f(x, matrix, 2.0, 3), x), atol=1e-7
    )

    def g(x, matrix):
        return np.sum((matrix @ x) ** 2)

    hess = sb.sparse_hessian(g, np.ones(N), args[0])
    np.testing.assert_allclose(hess(x, matrix, check=True).toarray(), 2 * matrix.T @ matrix, atol=1e-12)


def test_with_scipy_least_squares_and_root():
    jac = sb.sparse_jacobian(FUNCTIONS["rosenbrock chain"][0], np.zeros(N))
    found = least_squares(FUNCTIONS["rosenbrock chain"][0], np.full(N, -0.5), jac=jac)
    np.testing.assert_allclose(found.x, 1, atol=1e-6)
    data = np.linspace(0, 1, N)
    fit = sb.sparse_jacobian(lambda x, data, power: x**power - data, np.ones(N), data, 3.0)
    np.testing.assert_allclose(
        least_squares(fit._function.f, np.ones(N), jac=fit, args=(data, 3.0)).x ** 3, data, atol=1e-5
    )
    f = FUNCTIONS["broyden tridiagonal"][0]
    dense = sb.sparse_jacobian(f, np.zeros(N))
    found = root(f, -np.ones(N), jac=lambda x: dense(x).toarray())
    assert found.success and np.abs(f(found.x)).max() < 1e-8


def test_with_scipy_solve_ivp_and_minimize():
    def rhs(t, y):
        return burgers(y) + np.sin(t) * y

    y0 = np.sin(np.linspace(0, 3, N))
    jac = sb.sparse_jacobian(rhs, 0.0, y0, argnums=1)
    plain = solve_ivp(rhs, (0, 2), y0, method="BDF", rtol=1e-8, atol=1e-9)
    found = solve_ivp(rhs, (0, 2), y0, method="BDF", jac=jac, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found.y[:, -1], plain.y[:, -1], rtol=1e-5, atol=1e-6)
    with pytest.raises(TracingError, match="where"):
        sb.sparse_jacobian(lambda t, y: y if t > 1 else -y, 0.0, y0, argnums=1)

    from sparsebp.jacobians.tracing import gradient

    def g(x):
        return np.sum((x - 1) ** 4 + (x - 1) ** 2) + np.sum(np.diff(x) ** 2 * x[1:] ** 2)

    hess = sb.sparse_hessian(g, np.zeros(N))
    product, dense = (lambda x, p: hess(x) @ p), (lambda x: hess(x).toarray())
    for options, methods in (({"hess": hess}, ["trust-constr"]), ({"hess": dense}, ["dogleg", "trust-exact"]),
                           ({"hessp": product}, ["Newton-CG", "trust-ncg", "trust-krylov"])):  # fmt: skip
        for method in methods:
            found = minimize(g, np.full(N, 0.5), method=method, jac=gradient(g), **options)
            np.testing.assert_allclose(found.x, 1, atol=1e-4)


def test_the_reference_lists_what_can_be_followed():
    from sparsebp.jacobians import numpy_rules, tracing  # noqa: F401  (registers)

    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "function-jacobians.md"
    sections = dict(re.findall(r"^### (.*)\n\n((?:`.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    listed = {title: set(re.findall(r"`([\w.]+)`", names)) for title, names in sections.items()}
    assert listed["Ufuncs"] == set(tracing.SLOPES)
    assert listed["Ufuncs of scipy.special"] == set(tracing.SPECIAL)
    assert listed["Functions"] == set(tracing.FUNCTIONS) | set(tracing.MOVERS)
    pytest.importorskip("torch")
    from sparsebp.jacobians.torch_functions import COUPLED, MOVES, RULES

    assert listed["ATen operations"] == {*RULES, *MOVES, *COUPLED}


# Functions that a trace may mistake for others.


def _running_sum(x):
    s, found = 0.0, []
    for v in x:
        s += v**2  # another scalar: what was appended stays
        found.append(s)
    return np.array(found)


def _two_names(x):
    s = x.sum()
    t = s
    s *= 2
    return x * t + s


def _equal_elements(x):
    found = [x[0] * 0] * 3
    for i in range(3):
        found[i] += x[i] ** 2
    return np.array(found)


def _object_array(x):
    v = np.array([x[0] * 1] * 2)
    v[0] += x[1]
    return v


def _functions_of_objects(x):
    v = np.array([x[0] * x[1], x[2] ** 2 + 1])
    return np.hypot(np.sin(v), 2.0) + np.sqrt(v[1]) * np.arctan2(v, v[::-1])


@pytest.mark.parametrize("f", [_running_sum, _two_names, _equal_elements, _object_array, _functions_of_objects])
def test_scalars_are_not_changed_in_place(f):
    x = np.array([1.0, 2.5, -3])
    jac = sb.sparse_jacobian(f, np.zeros(3))
    expected = np.stack([(f(x + h) - f(x - h)) / 2e-6 for h in 1e-6 * np.eye(3)], axis=1)
    np.testing.assert_allclose(jac(x, check=True).toarray(), expected, atol=1e-7)


def _reused(change, use):
    """A sum over three steps, each of which writes to an array that the reverse sweep reads later."""

    def g(x):
        w, s = np.ones((3, 3)), 0
        for k in range(3):
            change(w, k)
            s = s + use(w, x)
        return s

    return g


REUSED = {
    "factor": lambda w, x: (w[0] * x**2).sum(),
    "exponent": lambda w, x: (x ** (1 + w[0])).sum(),
    "bound": lambda w, x: (np.maximum(x, w[0] - 0.5) ** 3).sum(),
    "mask": lambda w, x: np.where(w[0] > 1.5, x**2, x**3).sum(),
    "matrix": lambda w, x: x @ w @ x,
    "einsum": lambda w, x: np.einsum("i,ij,j->", x, w, x),
}


@pytest.mark.parametrize("use", list(REUSED.values()), ids=list(REUSED))
def test_a_reverse_sweep_keeps_what_the_function_overwrites(use):
    def fill(w, k):
        w[:] = k

    def replaced(x):
        return sum(use(np.full((3, 3), float(k)), x) for k in range(3))

    x, g = np.array([0.7, 1.2, 2.0]), _reused(fill, use)
    expected = sb.sparse_hessian(replaced, np.ones(3))(x).toarray()
    np.testing.assert_allclose(sb.sparse_hessian(g, np.ones(3))(x).toarray(), expected, rtol=1e-12)


@pytest.mark.parametrize("f", [
    lambda x: np.stack([v * v if isinstance(v, float) else v for v in x]),
    lambda x: x**2 if isinstance(x, np.ndarray) else 0 * x,
    lambda x: x**2 if isinstance(x, np.ndarray) else x[:2],
])  # fmt: skip
def test_a_function_that_tests_types_is_refused(f):
    with pytest.raises(TracingError, match="another one"):
        sb.sparse_jacobian(f, np.zeros(3))(np.arange(1.0, 4))


def test_a_refusal_cannot_be_caught_by_the_function():
    def f(x):
        try:
            return np.array([math.sin(v) for v in x])
        except Exception:
            return np.zeros(len(x))

    with pytest.raises(TracingError, match="Python number"):
        sb.sparse_jacobian(f, np.zeros(3))


@pytest.mark.parametrize("f", [
    lambda x: x.reshape(2, 2).T.ravel(order="K"), lambda x: np.reshape(x.reshape(2, 2).T, 4, order="A"),
    lambda x: x.astype(object).astype(float) ** 2,
])  # fmt: skip
def test_orders_of_memory_and_objects_are_refused(f):
    with pytest.raises(TracingError, match=r"memory|object"):
        sb.sparse_jacobian(f, np.ones(4))


@pytest.mark.parametrize(("before", "after"), [
    (0, 1), ([0, 1, 2], [2, 1, 0]), ({"k": 0}, {"k": 1}), (np.arange(3), np.arange(3)[::-1].copy()),
])  # fmt: skip
def test_constants_among_the_arguments_may_not_change(before, after):
    def f(x, k):
        k = k["k"] if isinstance(k, dict) else k
        return np.roll(x, k) ** 2 if isinstance(k, int) else x[k] ** 2

    jac, x = sb.sparse_jacobian(f, np.zeros(3), before), np.arange(1.0, 4)
    jac(x, copy.deepcopy(before))
    with pytest.raises(OptionError, match="a constant of the pattern, has changed"):
        jac(x, after)
