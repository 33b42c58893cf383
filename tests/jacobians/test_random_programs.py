"""Random programs of NumPy and JAX: their sparse Jacobians and Hessians against differences and dense derivatives."""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp.core.errors import TracingError
from sparsebp.jacobians.tape import UnrecordedError, loops
from sparsebp.jacobians.tracing import gradient
from sparsebp.patterns import color_both

MATRIX = np.array([[0.0, 1.2, 0, -0.4], [0.7, 0, 0, 0], [0, -1.1, 0.3, 0]])


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def written(y, v, q):
    """In place, which JAX has not."""
    if not isinstance(v, np.ndarray) and not hasattr(v, "carried"):
        return y * 2
    y = 1 * y
    y[: len(v)] += v[: len(y)]
    y[q % len(y)] *= v[0]
    y[-1] = 0.5 * y[0]
    return y


# Each takes the array module, two earlier vectors a and b, a number r and a whole number q.
STEPS = (
    lambda xp, a, b, r, q: xp.sin(a) + 1.1,
    lambda xp, a, b, r, q: xp.exp(xp.tanh(a)) * r,
    lambda xp, a, b, r, q: a[: len(b)] * b[: len(a)] - r,
    lambda xp, a, b, r, q: a[: len(b)] / (1.3 + b[: len(a)] ** 2),
    lambda xp, a, b, r, q: xp.sqrt(1.5 + a * a) ** 3 * 0.1,
    lambda xp, a, b, r, q: xp.arctan2(a, 1.2 + a * a) + xp.hypot(a, 1.1),
    lambda xp, a, b, r, q: xp.abs(a) ** 1.5 * 0.2 + xp.log1p(a * a),
    lambda xp, a, b, r, q: a[::-1] + q % 3,
    lambda xp, a, b, r, q: a[np.array([q, q + 1, -q, 3]) % len(a)],
    lambda xp, a, b, r, q: xp.roll(a, q % 5 - 2) * a,
    lambda xp, a, b, r, q: a.reshape(divisors(len(a))[q % len(divisors(len(a)))], -1).T.ravel(),
    lambda xp, a, b, r, q: xp.where(np.arange(len(a)) % 3 > q % 2, a, a[::-1] ** 2),
    lambda xp, a, b, r, q: xp.where(a > r, xp.cos(a), 0.2 * a),
    lambda xp, a, b, r, q: xp.where(a > r, xp.sqrt(xp.where(a > r, a - r, 1.0)), a[::-1]),
    lambda xp, a, b, r, q: xp.maximum(a, r) - xp.minimum(a[::-1], -r) + xp.clip(a, -0.4, 0.9),
    lambda xp, a, b, r, q: xp.max(a[:4]) * b + xp.mean(a),
    lambda xp, a, b, r, q: xp.cumsum(0.3 * a),
    lambda xp, a, b, r, q: xp.prod(a[:3]) + b,
    lambda xp, a, b, r, q: MATRIX[:, : len(a)] @ a[:4],
    lambda xp, a, b, r, q: (xp.outer(a[:3], b[:2]) + r).sum(axis=q % 2),
    lambda xp, a, b, r, q: xp.einsum("i,j->ji", a[:3], b[:2]).ravel(),
    lambda xp, a, b, r, q: xp.concatenate([a[:3], np.array([r, 1.0]), b[:4] * 0.5]),
    lambda xp, a, b, r, q: xp.stack([a, a[::-1] * r], axis=q % 2).ravel(),
    lambda xp, a, b, r, q: xp.pad(a, (q % 3, 1), mode=("constant", "edge", "wrap")[q % 3]),
    lambda xp, a, b, r, q: xp.tile(a[:2], 2) * np.array([0.0, 1.0, r, 0.0])[: 2 * len(a[:2])],
    lambda xp, a, b, r, q: xp.diff(xp.concatenate([a, b])),
    lambda xp, a, b, r, q: xp.bincount(np.arange(len(a)) % (1 + q % 3), weights=a * a, minlength=4),
    lambda xp, a, b, r, q: xp.cross(xp.resize(a, (3,)), xp.resize(b, (3,))) + r,
    lambda xp, a, b, r, q: xp.linalg.det(xp.resize(a, (2, 2)) + r)[None] * b,
    lambda xp, a, b, r, q: xp.linalg.solve(MATRIX[:, :3] + 4 * np.eye(3), xp.resize(a, (3,))) * r,
    lambda xp, a, b, r, q: xp.linalg.norm(a + 2, 3) * b - xp.mean(b, where=np.arange(len(b)) % 2 == 0),
    lambda xp, a, b, r, q: xp.polyval(np.array([r, 1.0, 0.5]), a),
    lambda xp, a, b, r, q: xp.abs(xp.resize(a, (3,)) * xp.exp(1j * xp.resize(b, (3,))) + 2 + r * 1j),
    lambda xp, a, b, r, q: xp.real(xp.conj(xp.resize(a, (3,)) + 1j) * (xp.resize(b, (3,)) * 1j) ** 2),
    lambda xp, a, b, r, q: written(a, b, q),
)


def program(xp, steps):
    def f(x):
        found = [x]
        for kind, i, j, r, q in steps:
            found.append(STEPS[kind](xp, found[i % len(found)], found[j % len(found)], r, q)[:40])
        return xp.concatenate([(0.5 + 0.1 * k) * v for k, v in enumerate(found[-3:])])

    return f


NUMBERS = st.floats(-1.25, 1.25, width=16, allow_subnormal=False)
PROGRAMS = st.lists(
    st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 99), st.integers(0, 99), NUMBERS, st.integers(0, 30)),
    min_size=1, max_size=8,
)  # fmt: skip


def differences(f, x, step):
    return np.stack([(f(x + e) - f(x - e)) / (2 * step) for e in step * np.eye(len(x))], axis=1)


def smooth(f, x):
    """Differences, or None at a kink or where they are not exact enough."""
    one, other = differences(f, x, 1e-6), differences(f, x, 4e-6)
    return one if np.allclose(one, other, rtol=1e-4, atol=1e-5) else None


@example(steps=[(19, 0, 0, 0.0, 0), (20, 0, 1, 0.0, 0), (25, 0, 32, 0.0, 0)], n=2, seed=0)  # derivatives that cancel
@given(steps=PROGRAMS, n=st.sampled_from([1, 2, 5, 7]), seed=st.integers(0, 999))
def test_numpy(steps, n, seed):
    rng = np.random.default_rng(seed)
    f, x = program(np, steps), rng.uniform(0.3, 1.1, n) * rng.choice([-1, 1], n)
    jac, expected = sb.sparse_jacobian(f, np.zeros(n)), smooth(f, x)
    found = jac(x).toarray()
    jac._sweeps = jac._sweeps_of(*color_both(jac.pattern))
    np.testing.assert_allclose(jac(x).toarray(), found, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(jac._function.reverse((x,), np.eye(len(found))), found, rtol=1e-9, atol=1e-9)
    if expected is not None:
        jac(x, check=True)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * (1 + abs(expected).max()))

    def g(x):
        return np.sum(f(x) ** 2)

    hess, expected = sb.sparse_hessian(g, np.zeros(n)), smooth(gradient(g), x)
    if expected is not None:
        found = hess(x, check=True).toarray()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * (1 + abs(expected).max()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(steps=PROGRAMS, n=st.sampled_from([1, 2, 5, 7, 11]), seed=st.integers(0, 999), kink=st.booleans(),
       dtype=st.sampled_from([np.float64, np.float32]))  # fmt: skip
def test_compiled_as_interpreted(loops_in_python, steps, n, seed, kink, dtype):
    """The tape gives what the interpreter does where it can record a program, at kinks as well, and in parts."""
    rng = np.random.default_rng(seed)
    loops.GRAIN = 4 if seed % 2 else 1 << 17
    f, x = program(np, steps), (rng.uniform(0.3, 1.1, n) * rng.choice([-1, 1], n)).astype(dtype)
    x[rng.random(n) < 0.3 * kink] = rng.choice([0.0, 1.0, -1.0])
    for make, g in ((sb.sparse_jacobian, f), (sb.sparse_hessian, lambda x: np.sum(f(x) ** 2))):
        old = make(g, np.zeros(n, dtype), compiled=False)
        if not old.pattern.nnz:
            continue
        try:
            new = make(g, np.zeros(n, dtype), compiled=True)
        except UnrecordedError:
            continue
        record, (v, w) = (
            new._tape._records[x.dtype],
            (rng.standard_normal(k).astype(dtype) for k in old.pattern.shape[::-1]),
        )
        results = [(record.run("values", (x,)), old.values(x))]
        xs = rng.uniform(-1, 1, (n, 8)).astype(dtype)
        results.append((record.tape.values((xs,)), np.stack([old.values(one) for one in xs.T.copy()], axis=1)))
        if make is sb.sparse_jacobian:
            results += [(record.run("value", (x,)), g(x)), (record.run("jvp", (x,), v), old.jvp(v, x)),
                        (record.run("vjp", (x,), w), old.vjp(w, x))]  # fmt: skip
        else:
            one = np.ones(1, dtype)
            results += [(record.run("value", (x,))[0], g(x)), (record.run("vjp", (x,), one), old.gradient(x)),
                        (record.run("hvp", (x,), w, one), old.hvp(w, x))]  # fmt: skip
        for found, expected in results:
            assert found.dtype == expected.dtype
            if np.isfinite(found).all():
                room = np.sqrt(np.finfo(dtype).eps) * (1 + abs(expected).max())
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2 * room)
        np.testing.assert_allclose(new.values(x), results[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("jax_compiles_quickly")
@pytest.mark.parametrize("seed", range(12))
def test_jax(seed):
    jax = pytest.importorskip("jax")
    pytest.importorskip("asdex")
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 2, 5, 7]))
    steps = [(int(rng.integers(len(STEPS))), *map(int, rng.integers(0, 99, 2)), float(rng.uniform(-1.3, 1.3)),
              int(rng.integers(30))) for _ in range(6)]  # fmt: skip
    with jax.enable_x64(True):
        f, x = program(jax.numpy, steps), jax.numpy.asarray(rng.uniform(0.3, 1.1, n) * rng.choice([-1, 1], n))
        try:
            jac = sb.sparse_jacobian(f, 0 * x)
        except TracingError:
            pytest.skip("asdex does not know an operation")
        np.testing.assert_allclose(jac(x, check=True).toarray(), jax.jit(jax.jacfwd(f))(x), rtol=1e-10, atol=1e-10)
