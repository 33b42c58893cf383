"""Random calls of NumPy in functions: their sparse Jacobians are right or refused, in both modes, with Hessians.

Each case is made from its number. ``FUZZ_CASES=100000 pytest tests/jacobians/test_fuzz.py`` runs as many.
"""

import os
import traceback
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from scipy import special

import sparsebp as sb
from sparsebp.core.errors import SparseBPError, TracingError
from sparsebp.jacobians.tape import UnrecordedError, environment
from sparsebp.jacobians.tracing import gradient

CASES = int(os.environ.get("FUZZ_CASES", "400"))
CHUNK = 200

OF_ONE = [
    "absolute", "arccos", "arcsin", "arcsinh", "arctan", "arctanh", "cbrt", "ceil", "conjugate", "cos", "cosh",
    "deg2rad", "exp", "exp2", "expm1", "fabs", "floor", "isnan", "log", "log10", "log1p", "log2", "logical_not",
    "negative", "positive", "rad2deg", "radians", "reciprocal", "rint", "sign", "signbit", "sin", "sinh", "sqrt",
    "square", "tan", "tanh", "trunc",
]  # fmt: skip
OF_TWO = [
    "add", "arctan2", "copysign", "divide", "equal", "float_power", "floor_divide", "fmax", "fmin", "fmod",
    "greater_equal", "heaviside", "hypot", "less", "logaddexp", "logaddexp2", "maximum", "minimum", "multiply",
    "not_equal", "power", "remainder", "subtract",
]  # fmt: skip
OF_SPECIAL = [
    "erf", "erfc", "expit", "gammaln", "log_expit", "logit", "ndtr", "xlogy",
]  # fmt: skip
REDUCTIONS = [
    "all", "amax", "amin", "argmax", "max", "mean", "min", "prod", "ptp", "std", "sum", "var",
]  # fmt: skip
UNLISTED = [
    "average", "cross", "median", "nan_to_num", "nansum", "partition", "polyval", "sinc", "unique", "vectorize",
]  # fmt: skip


class Draw:
    """Random choices; each program is drawn once, and then called at several x."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def one(self, options):
        return options[int(self.rng.integers(len(options)))]

    def chance(self, p):
        return bool(self.rng.random() < p)

    def whole(self, low, high):
        return int(self.rng.integers(low, high))

    def shape(self, size):
        """A shape of so many elements."""
        shape = []
        while size > 1 and self.chance(0.7):
            shape.append(self.one([d for d in range(1, size + 1) if size % d == 0]))
            size //= shape[-1]
        shape += [size] if size != 1 or not shape or self.chance(0.5) else []
        return tuple(shape)

    def axis(self, ndim):
        options = [None, *range(-ndim, ndim)]
        options += [tuple(self.rng.permutation(ndim)[:2].tolist())] * (ndim > 1) + [()]
        return self.one(options)

    def constant(self, shape):
        """An array that broadcasts with a shape, of an awkward kind."""
        cut = shape[self.whole(0, len(shape) + 1) :]
        shape = tuple(1 if self.chance(0.3) else n for n in cut)
        a = np.round(self.rng.uniform(-1.5, 1.5, shape), 2)
        kind = self.whole(0, 9)
        if kind == 0:
            a = np.where(self.rng.random(shape) < 0.4, 0.0, a)
        elif kind == 1:
            a = np.rint(2 * a).astype(int)
        elif kind == 2:
            a = a > 0
        elif kind == 3:
            a = a.astype(np.float32)
        elif kind == 4:
            a = np.asfortranarray(a)
        elif kind == 5:
            a = np.broadcast_to(0.75, shape)
        elif kind == 6:
            return self.one([2, 0.5, -1.0, np.float64(1.5), np.float32(0.5), True, np.int8(2)])
        a = np.asarray(a)
        return a

    def key(self, shape):
        """An index of an array of this shape; rarely one that does not fit."""
        parts, left = [], list(shape)
        while left and self.chance(0.8):
            n, kind = left.pop(0), self.whole(0, 7)
            if kind == 0 and n:
                parts.append(self.one([self.whole(-n, n), np.int64(self.whole(-n, n))]))
            elif kind <= 2:
                bounds = [None, *range(-n - 1, n + 2)]
                parts.append(slice(self.one(bounds), self.one(bounds), self.one([None, 1, 2, -1, -2])))
            elif kind == 3 and n:
                parts.append(self.rng.integers(-n, n, self.whole(0, 4)))
            elif kind == 4:
                parts.append(self.rng.random(n) < 0.5)
            elif kind == 5 and Ellipsis not in [p for p in parts if not isinstance(p, np.ndarray)]:
                parts.append(...)
                break
            else:
                parts += [slice(None), None]
        return tuple(parts) if len(parts) != 1 else parts[0]


def elementwise(d, a):
    name = d.one(OF_ONE)
    f, shift = getattr(np, name), d.one([0.0, 0.0, 1.5])
    options = d.one([{}, {}, {}, {"dtype": float}, {"where": np.array(True)}, {"casting": "unsafe"}])
    return lambda a: f(a + shift if shift else a, **options)


def special_function(d, a):
    f = getattr(special, d.one(OF_SPECIAL))
    return lambda a: f(*[0.3 + 0.4 * np.tanh(a)] * f.nin)


def pair(d, a):
    f, c, order = getattr(np, d.one(OF_TWO)), d.constant(a.shape), d.whole(0, 4)
    into = d.chance(0.1)

    def run(a):
        operands = [(a, c), (c, a), (a, a), (np.abs(a) + 0.5, c)][order]
        return f(*operands, out=np.zeros_like(a)) if into else f(*operands)

    return run


def operators(d, a):
    c = d.constant(a.shape)
    return d.one([
        lambda a: a * c + 1, lambda a: c - a, lambda a: a / 3 - c, lambda a: -a + abs(a), lambda a: a**2,
        lambda a: 2.0**a, lambda a: (a > c) * a, lambda a: a @ a if a.ndim else a, lambda a: a // 2 + a,
        lambda a: a % 1.7, lambda a: +a, lambda a: ~(a > 0) * a, lambda a: (a > 0) & (a < c),
        lambda a: a ** np.array(3), lambda a: divmod(a, 2.0)[1],
    ])  # fmt: skip


def reduction(d, a):
    name, options = d.one(REDUCTIONS), {"axis": d.axis(np.ndim(a))}
    if d.chance(0.4):
        options["keepdims"] = d.chance(0.7)
    if name in ("var", "std") and d.chance(0.4):
        options["ddof"] = d.one([0, 1, 0.5])
    if name in ("sum", "prod", "mean") and d.chance(0.2):
        options["dtype"] = d.one([float, np.float32, None])
    if d.chance(0.05):
        options |= d.one([{"initial": 0.5}, {"where": np.array(True)}, {"out": None}])
    method = d.chance(0.4) and name not in ("ptp", "amax", "amin")
    if d.chance(0.15):
        ufunc, way = d.one([np.add, np.multiply, np.maximum, np.minimum]), d.one(["reduce", "accumulate", "outer"])
        return (lambda a: ufunc.outer(a, a)) if way == "outer" else getattr(ufunc, way)
    return lambda a: getattr(a, name)(**options) if method else getattr(np, name)(a, **options)


def along(d, a):
    ndim = max(np.ndim(a), 1)
    axis, n = d.one([None, *range(-ndim, ndim)]), d.whole(1, 3)
    first = axis or 0
    return d.one([
        lambda a: np.cumsum(a, axis=axis), lambda a: np.cumprod(a, axis=axis), lambda a: np.sort(a, axis=axis),
        lambda a: np.diff(a, n, axis=first), lambda a: np.gradient(a, 0.5, axis=first),
        lambda a: np.trapezoid(a, dx=0.5, axis=first),
    ])  # fmt: skip


def move(d, a):
    shape, ndim, size = np.shape(a), np.ndim(a), np.size(a)
    new, k, axis = d.shape(size), d.whole(-3, 4), d.whole(-ndim, ndim) if ndim else 0
    order = d.one(["C", "F"])
    axes = tuple(d.rng.permutation(ndim).tolist())
    width = d.one([1, (1, 2), (0, 1), 2])
    mode = d.one(["constant", "edge", "wrap", "reflect", "symmetric", "mean"])
    index = d.rng.integers(-max(size, 1), max(size, 1), d.whole(0, 5))
    return d.one([
        lambda a: np.reshape(a, new), lambda a: a.reshape(new, order=order), lambda a: a.reshape(-1), lambda a: a.T,
        lambda a: np.transpose(a, axes), lambda a: a.transpose(*axes), lambda a: np.ravel(a, order),
        lambda a: a.flatten(), np.squeeze, lambda a: np.expand_dims(a, axis), lambda a: np.swapaxes(a, 0, axis),
        lambda a: np.moveaxis(a, axis, 0), lambda a: np.rollaxis(a, axis), lambda a: np.flip(a, axis), np.flip,
        lambda a: np.roll(a, k), lambda a: np.roll(a, k, axis), lambda a: np.repeat(a, abs(k)),
        lambda a: np.tile(a, (2, 1)), lambda a: np.repeat(a, 2, axis=axis), lambda a: np.rot90(a, k),
        lambda a: np.take(a, index), lambda a: a.take(index, mode="wrap"), lambda a: np.diagonal(a, k),
        lambda a: np.diag(a, k), lambda a: np.tril(a, k), lambda a: np.triu(a, k), np.diagflat,
        lambda a: np.broadcast_to(a, (2, *shape)), lambda a: np.delete(a, index[:1]), lambda a: np.split(a, 2)[0],
        lambda a: np.array_split(a, 2)[-1], lambda a: np.resize(a, (2, 3)), lambda a: np.pad(a, width, mode=mode),
        lambda a: np.pad(a, 1, constant_values=2.0), np.copy, lambda a: a.copy(),
        lambda a: np.concatenate([a, a[::-1]]), lambda a: np.stack([a, 2 * a], axis=axis),
        lambda a: np.hstack([a, a]), lambda a: np.vstack([a, np.ones(shape)]), lambda a: np.dstack([a, a]),
        lambda a: np.column_stack([a, a]), lambda a: np.block([[a, a]]), lambda a: np.append(a, 1.5),
        lambda a: np.append(a, a, axis=0), lambda a: np.insert(a, 0, 2.0), np.atleast_2d, np.atleast_3d,
        lambda a: np.meshgrid(a, a)[0], lambda a: np.broadcast_arrays(a, np.ones((2, *shape)))[0],
        lambda a: np.compress([True], a, axis=0), lambda a: np.extract(np.ones(shape, bool), a),
        lambda a: np.unstack(a)[0], np.matrix_transpose,
        lambda a: np.take_along_axis(a, np.zeros((1,) * ndim, int), 0), lambda a: a.ravel("K"), np.fliplr,
    ])  # fmt: skip


def indexed(d, a):
    key = d.key(np.shape(a))
    return lambda a: a[key]


def written(d, a):
    key, c, way = d.key(np.shape(a)), d.one([0.5, 2, -1.0]), d.whole(0, 7)

    def run(a):
        b = (a * 1, np.zeros_like(a), np.copy(a), np.ones_like(a), np.full_like(a, 2), a + 0, np.empty_like(a) * 0)[way]
        if way % 2:
            b[key] = a[key] * c
        b[key] += c
        b[key] *= a[key]
        b += a
        b[key] = c
        return b

    return run


def contraction(d, a):
    shape, ndim = np.shape(a), np.ndim(a)
    letters = "ijklabcdefgh"[:ndim]
    sizes = dict(zip(letters, shape, strict=True)) | {"m": 2}
    other = "".join(c for c in "ijklabcdefghm" if c in sizes and d.chance(0.5))
    b = d.rng.uniform(-1, 1, [1 if d.chance(0.25) else sizes[c] for c in other])
    b = np.where(d.rng.random(b.shape) < 0.2, 0.0, b)
    out = "".join(d.rng.permutation([c for c in sizes if (c in letters or c in other) and d.chance(0.5)]))
    axes = d.one([1, 0, ndim])
    vector, square = d.rng.uniform(-1, 1, shape[-1:] or 1), d.rng.uniform(-1, 1, (shape[-1:] or (1,)) * 2)
    return d.one([
        lambda a: np.einsum(f"{letters},{other}->{out}", a, b),
        lambda a: np.einsum(f"{letters},{letters}->{out}", a, a), lambda a: np.einsum(f"{letters},{other}", a, b),
        lambda a: np.einsum(f"...,{other}->...{other}", a, b), lambda a: a @ square, lambda a: square @ a,
        lambda a: a @ vector, lambda a: np.dot(a, square), lambda a: a.dot(a.T), lambda a: np.tensordot(a, square, 1),
        lambda a: np.tensordot(a, a, axes), lambda a: np.inner(a, vector), lambda a: np.outer(a, vector),
        lambda a: np.kron(a, vector), lambda a: np.vdot(a, a), np.trace, lambda a: np.convolve(a, vector, "same"),
        lambda a: np.matmul(a, a.T), lambda a: np.einsum("ii->i", a), lambda a: np.einsum("ij->", a),
        np.linalg.norm, lambda a: np.linalg.norm(a, axis=-1), lambda a: np.linalg.norm(a, 1, axis=0),
        lambda a: np.linalg.solve(square + 4 * np.eye(len(square)), a),
        lambda a: np.linalg.inv(a + 5 * np.eye(len(a))), lambda a: sp.csr_array(square) @ a,
        lambda a: sp.coo_array(square).tocsc() @ a, lambda a: a @ sp.csr_array(square),
        lambda a: np.interp(a, [-1.0, 0.0, 1.0], [0.0, 2.0, 1.0]), lambda a: sp.csr_matrix(square) @ a,
    ])  # fmt: skip


def chosen(d, a):
    c, e = d.constant(np.shape(a)), d.constant(np.shape(a))
    mask = d.rng.random(np.shape(a)) < 0.5
    low = d.one([None, -0.5, 0.1])
    return d.one([
        lambda a: np.where(mask, a, c), lambda a: np.where(a > c, a, e), lambda a: np.where(c, a, a * a),
        lambda a: np.where(mask, c, a), lambda a: np.clip(a, low, 0.6), lambda a: a.clip(-0.4, c),
        lambda a: np.select([a > 0.5, mask], [a, 2 * a], 0.5), lambda a: np.where(a > 0, np.sqrt(a), a * a),
        lambda a: np.where(a > 0, np.log(a), 0.0), lambda a: np.maximum(a, 0.0), lambda a: np.where(mask, a, np.nan),
        lambda a: np.where(mask, 1 / a, a),
    ])  # fmt: skip


def converted(d, a):
    dtype = d.one([float, np.float32, np.float64, int, bool, complex, np.float16, object, "f8"])
    unlisted = getattr(np, d.one(UNLISTED))
    return d.one([
        lambda a: a.astype(dtype), lambda a: a.real, lambda a: a.imag + a, lambda a: np.round(a, 1) + a,
        lambda a: a.conj(), np.asarray, lambda a: np.array([v * v for v in np.ravel(a)]),
        lambda a: [2 * v for v in np.ravel(a)], lambda a: np.array([np.sum(a), np.max(a)]),
        lambda a: np.ravel(a).tolist(), lambda a: (a, a), lambda a: np.abs((a + 1j) ** 2),
        lambda a: np.fft.rfft(a).real, lambda a: np.real(np.fft.ifft(a)), lambda a: a.astype(dtype).astype(float),
        lambda a: a.sum().item(), unlisted, lambda a: np.ones(3), lambda a: 2.5, np.shape, lambda a: None,
    ])  # fmt: skip


STEPS = [elementwise, pair, operators, reduction, along, move, move, indexed, indexed, written, contraction, chosen,
         special_function]  # fmt: skip


def writes_to_its_argument(x):
    x *= 0.9
    x[1:] += 0.1 * x[:-1]
    x[:1] = x[:1] ** 2
    return x


def program(d, n):
    """A function of a vector of n, of one to three random steps, and what it returns in the end."""
    steps, x = [], d.rng.uniform(0.2, 0.9, n) * np.where(d.rng.random(n) < 0.5, -1, 1)
    first = d.shape(n)
    steps.append(lambda x: x.reshape(first))
    a = x.reshape(first)
    for _ in range(d.whole(1, 4)):
        step = d.one(STEPS)(d, a)
        steps.append(step)
        try:
            a = np.asarray(step(a))
        except Exception:  # it will raise in the program, too
            break
        if a.size > 60 or a.dtype == object:
            break
    if d.chance(0.12):
        steps.append(converted(d, a))
    elif not d.chance(0.05):
        steps.append(lambda a: np.ravel(a) if np.ndim(a) != 1 else a)
    if d.chance(0.1):
        steps.insert(0, writes_to_its_argument)

    def f(x):
        for step in steps:
            x = step(x)
        return x

    return f, x


LAYOUTS = (
    lambda x: x, lambda x: x, lambda x: np.repeat(x, 2)[::2], lambda x: x[::-1].copy()[::-1],
    lambda x: np.stack([x, x], 1)[:, 0], lambda x: np.frombuffer(x.tobytes(), x.dtype),
)  # fmt: skip


def differences(f, x):
    """Central differences in float64, or None where they are not exact enough."""
    found = []
    for step in (1e-6, 4e-6):
        columns = [
            (np.asarray(f(x + e), float) - np.asarray(f(x - e), float)) / (2 * step) for e in step * np.eye(len(x))
        ]
        found.append(np.stack(columns, axis=1) if columns else np.zeros((len(np.asarray(f(x))), 0)))
    return found[0] if np.isfinite(found).all() and np.allclose(*found, rtol=1e-4, atol=1e-5) else None


def is_inside(error):
    """Whether an error that is not ours was raised by our own code."""
    cause = error.__cause__ if isinstance(error, SparseBPError) else error
    if cause is None or (isinstance(error, SparseBPError) and not isinstance(error, TracingError)):
        return False
    frames = traceback.extract_tb(cause.__traceback__)
    return bool(frames) and "sparsebp/jacobians" in frames[-1].filename.replace(os.sep, "/")


def run_case(number):
    d = Draw(number)
    n = d.one([0, 1, 2, 3, 4, 4, 6, 6, 8])
    f, x = program(d, n)
    if kink := d.chance(0.1):
        x[d.rng.random(n) < 0.4] = d.one([0.0, 1.0, -1.0])
    x = d.one(LAYOUTS)(x)
    if d.chance(0.1):
        x = x.astype(np.float32)
    own = None
    try:
        y = np.asarray(f(np.array(x)))
    except Exception as error:
        own = error
    if own is None and y.size > 500:
        return "large"
    kept, of_trees = np.array(x), f
    if own is None and y.ndim > 1:  # rows are the elements of y
        y, f = y.ravel(), lambda x: np.ravel(of_trees(x))
    try:
        jac = sb.sparse_jacobian(of_trees, x)
        found = jac(x, check=own is None and bool(np.isfinite(y).all())).toarray()
    except SparseBPError as error:
        assert not is_inside(error), f"{error!r} hides {error.__cause__!r}"
        return "refused"
    except Exception as error:
        assert own is not None and type(error) is type(own), f"{error!r} for {own!r}"
        return "raises"
    if own is not None:  # at this x, or with shapes that a trace need not have
        return "raises"
    np.testing.assert_array_equal(x, kept)
    assert found.shape == (*y.shape, n)
    single = "float32" in (str(x.dtype), str(y.dtype)) or found.dtype == np.float32
    finite = np.isfinite(y)[:, None]  # elsewhere infinite slopes may cancel
    dense = np.where(finite, jac._function.forward((x,), np.eye(n)).T, np.nan)
    there = (jac.pattern.to_scipy().toarray() > 0) & finite
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if single else {"rtol": 1e-7, "atol": 1e-9}
    tolerance["atol"] *= np.abs(dense[np.isfinite(dense)]).max(initial=1)
    np.testing.assert_allclose(found[there], dense[there], **tolerance)
    try:
        back = np.where(finite, jac._function.reverse((x,), np.eye(len(y))), np.nan)
    except TracingError as error:
        assert not is_inside(error), f"{error!r} hides {error.__cause__!r}"
        return "forward"
    cancelled = (dense == 0) & np.isnan(back)  # tangents that add up to 0, before an infinite slope
    either = (np.isfinite(dense) & ~cancelled) | np.isfinite(back)
    np.testing.assert_allclose(back[either], dense[either], **tolerance)
    if single or kink or number % 3:
        return "right"
    expected = differences(f, np.array(x, float))
    if expected is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * (1 + abs(expected).max(initial=0)))

    def g(x):
        y = f(x)
        return np.sum(np.square(np.stack(y) if isinstance(y, (list, tuple)) and len(y) else y))

    try:
        hess = sb.sparse_hessian(g, x)(x).toarray()
    except SparseBPError as error:
        assert not is_inside(error), f"{error!r} hides {error.__cause__!r}"
        return "right"
    expected = differences(gradient(g), np.array(x, float))
    if expected is not None and np.isfinite(hess).all():
        np.testing.assert_allclose(hess, expected, rtol=1e-3, atol=2e-4 * (1 + abs(expected).max(initial=0)))
    return "right"


def outcomes(run, chunk):
    """Run the cases of a chunk, of which none may be wrong; return how many there are of each kind."""
    counts, wrong = {}, {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for number in range(chunk * CHUNK, min(CASES, (chunk + 1) * CHUNK)):
            try:
                kind = run(number)
            except Exception as error:
                kind, wrong[number] = "wrong", f"{type(error).__name__}: {str(error).strip()[:300]}"
            counts[kind] = counts.get(kind, 0) + 1
    assert not wrong, f"{counts}; by number of the case: {wrong}"
    return counts


@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_calls_are_right_or_refused(chunk):
    assert outcomes(run_case, chunk)["right"] > CHUNK // 4 or CASES < CHUNK


def run_compiled(number):
    """Compare a case's compiled tape with the interpreter, at points of which some are kinks, zeros and NaN."""
    d = Draw(number)
    n = d.one([1, 2, 3, 4, 4, 6, 6, 8])
    f, x = program(d, n)
    hessian = number % 2 == 0

    def g(x):
        y = f(x)
        return np.sum(np.square(np.stack(y) if isinstance(y, (list, tuple)) and len(y) else y))

    make, f = (sb.sparse_hessian, g) if hessian else (sb.sparse_jacobian, f)
    try:
        old = make(f, x, compiled=False)
        new = make(f, x, compiled=True) if old.pattern.nnz else None
    except UnrecordedError:
        return "interpreted"
    except Exception:
        return "refused"
    if new is None:
        return "empty"
    for point in (x, 1.1 * x, np.where(d.rng.random(n) < 0.3, d.one([0.0, 1.0, -1.0, np.nan, np.inf]), x)):
        expected, found = old.values(point), new._tape._records[x.dtype].tape.values((point,))
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=1e-4)
        if np.isfinite(found).all():
            np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9 * scale)
        np.testing.assert_allclose(new.values(point), expected, rtol=1e-7, atol=1e-9 * scale)
    return "compiled"


@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_compiled_calls_are_those_of_the_interpreter(loops_in_python, monkeypatch, chunk):
    monkeypatch.setattr(environment, "OPEN", environment.OPEN - {"getattr"})  # which draws functions here
    assert outcomes(run_compiled, chunk)["compiled"] > CHUNK // 6 or CASES < CHUNK
