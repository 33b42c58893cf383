"""Sparse Jacobians and Hessians of functions of JAX, against JAX's dense ones."""

import copy
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from scipy.optimize import least_squares

import sparsebp as sb
from sparsebp.core.errors import (
    DTypeError,
    MissingDependencyError,
    NonFiniteError,
    OptionError,
    PatternError,
    ShapeError,
    TracingError,
)

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytestmark = pytest.mark.usefixtures("jax_compiles_quickly")
N = 7
RNG = np.random.default_rng(5)
DENSE = np.where(RNG.random((5, N)) < 0.4, RNG.standard_normal((5, N)), 0.0)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def compiled(derivative, f):
    """A derivative of JAX's, compiled once: operation by operation, each is compiled by itself."""
    return jax.jit(derivative(f))


def brusselator(x):
    u, v = x.reshape(2, 3, 4)
    lap = [sum(jnp.roll(w, s, a) for s in (1, -1) for a in (0, 1)) - 4 * w for w in (u, v)]
    reaction = u * u * v
    return jnp.stack([1 + reaction - 4.4 * u + lap[0], 3.4 * u - reaction + lap[1]]).ravel()


def neighbours(x):
    return jnp.pad(x[1:] ** 2, (0, 1)) * x + jnp.pad(x[:-1], (1, 0))


def scanned(x):
    return jax.lax.scan(lambda h, v: (jnp.tanh(h * v), h + v), x[0], x)[1]


FUNCTIONS = {
    "brusselator": (brusselator, 24),
    "stencil": (lambda x: jnp.pad(x[2:] * x[:-2] - jnp.exp(x[1:-1]), 1), N),
    "writes": (lambda x: x.at[1:-1].add(x[2:] * x[:-2]).at[0].set(x[-1] ** 2), N),
    "indices": (lambda x: x[jnp.array([3, 3, -1, 0])] * x[jnp.array([1, 2, 3, 4])], N),
    "where": (lambda x: jnp.where(x > 0.4, jnp.sqrt(jnp.abs(x)), x[::-1]), N),
    "matrix": (lambda x: jnp.tanh(jnp.asarray(DENSE, x.dtype) @ x), N),
    "reductions": (lambda x: jnp.stack([x[:3].sum(), jnp.prod(x[2:4]), jnp.max(x[4:]), x[:2].var()]), N),
    "list of scalars": (lambda x: [x[0] * x[1], 3.0, jnp.pi * jnp.exp(x[2])], N),
    "convolution": (lambda x: jnp.convolve(x, jnp.asarray([1.0, -2.0, 0.5], x.dtype)), N),
    "recurrence": (scanned, N),
    "loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * jnp.roll(y, 1), x), N),
    "condition": (lambda x: jax.lax.cond(x[0] > 0.5, lambda y: y**2, lambda y: y[::-1], x), N),
    "compiled": (jax.jit(lambda x: jnp.cumsum(x) * x[0]), N),
    "tall": (lambda x: jnp.outer(x[:1], x[1:]).ravel() + x[0], N),
    "wide": (lambda x: jnp.stack([jnp.sum(x * x), jnp.prod(x)]), 40),
    "constant": (lambda x: jnp.ones(2, x.dtype), N),
    "nothing": (lambda x: x[:0], N),
    "of nothing": (lambda x: jnp.ones(3, x.dtype), 0),
}


SINGLE = ("indices", "list of scalars", "matrix", "recurrence", "constant", "of nothing")
"""In float32 too, in which nothing but values and their dtype is different."""


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in FUNCTIONS), *((name, "float32") for name in SINGLE)],
    indirect=["dtype"],
)  # fmt: skip
def test_values_are_those_of_jacfwd(name, dtype):
    pytest.importorskip("asdex")
    f, n = FUNCTIONS[name]
    jac = sb.sparse_jacobian(f, jnp.zeros(n, dtype))
    for seed in range(2):
        x = jnp.asarray(np.random.default_rng(seed).uniform(0.2, 0.9, n), dtype)
        dense = compiled(jax.jacfwd, lambda x: jnp.stack(found) if isinstance(found := f(x), list) else found)(x)
        matrix, values = jac(x, check=True), jac.values(x)
        assert matrix.dtype == dtype == values.dtype and isinstance(values, jax.Array)
        np.testing.assert_allclose(matrix.toarray(), dense, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(matrix.data, values)
        assert isinstance(jac.values(np.asarray(x)), np.ndarray)
        np.testing.assert_array_equal(jac.values(np.asarray(x)), values)


HESSIANS = {
    "rosenbrock": lambda x: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2),
    "surface": lambda x: jnp.sqrt(1 + jnp.diff(jnp.pad(x, 1)) ** 2).sum(),
    "arrow": lambda x: jnp.sum(x[1:] ** 2) * x[0],
    "recurrence": lambda x: scanned(x)[-1],
    "linear": lambda x: 3 * x.sum(),
    "constant": lambda x: jnp.asarray(2.0, x.dtype),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in HESSIANS), ("surface", "float32"), ("constant", "float32")],
    indirect=["dtype"],
)  # fmt: skip
def test_hessians(name, dtype):
    pytest.importorskip("asdex")
    g = HESSIANS[name]
    hess = sb.sparse_hessian(g, jnp.zeros(N, dtype))
    x = jnp.asarray(np.random.default_rng(1).uniform(0.2, 0.9, N), dtype)
    found = hess(x, check=True).toarray()
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found, compiled(jax.hessian, g)(x), rtol=2e-4, atol=2e-4)


def test_rows_are_coloured_where_that_is_cheaper():
    pytest.importorskip("asdex")
    assert sb.sparse_jacobian(FUNCTIONS["wide"][0], jnp.zeros(40)).mode == "reverse"

    def loop(x):  # has no reverse sweep
        return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * jnp.sum(x)), (0, x[:1]))[1]

    jac = sb.sparse_jacobian(loop, jnp.zeros(40))
    assert jac.mode == "forward"
    x = jnp.linspace(0.1, 0.2, 40)
    np.testing.assert_allclose(jac(x, check=True).toarray(), compiled(jax.jacfwd, loop)(x), rtol=1e-5)
    with pytest.raises(TracingError, match="Reverse-mode"):
        sb.sparse_hessian(lambda x: loop(x)[0], jnp.zeros(40))


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, grad: (3 * x * x * grad,))


def test_reverse_mode_alone():
    """Functions with a custom_vjp, and our own, which have both: also within compiled functions, and twice."""
    import sparsebp.jax as sj

    square = sb.SparsityPattern.dense(2, 2)
    product, factor = sb.plan_product(square, square), sb.plan_factor(square)
    functions = (
        (cube, sb.SparsityPattern.diagonal(4), lambda x: x**3),
        (lambda x: sj.product(product, x, x), sb.SparsityPattern.dense(4, 4),
         lambda x: (x.reshape(2, 2) @ x.reshape(2, 2)).ravel()),
        (lambda x: sj.solve(factor, x, jnp.ones(2)), sb.SparsityPattern.dense(2, 4),
         lambda x: jnp.linalg.solve(x.reshape(2, 2), jnp.ones(2))),
        (lambda x: sj.linear_recurrence(x.reshape(4, 1, 1), x.reshape(4, 1, 1)).ravel(), sb.SparsityPattern.dense(4, 4),
         lambda x: jax.lax.scan(lambda h, v: (v * h + v,) * 2, 0.0, x)[1]),
    )  # fmt: skip
    with jax.enable_x64(True):
        x = jnp.array([2.0, 0.5, 1.0, 4.0])
        for f, pattern, plain in functions:
            jac = sb.sparse_jacobian(f, x, pattern=pattern)
            assert f is not cube or jac.mode == "reverse"
            np.testing.assert_allclose(jac(x, check=True).toarray(), compiled(jax.jacfwd, plain)(x), atol=1e-12)
            np.testing.assert_allclose(jax.jit(jac.values)(x), jac.values(x), rtol=1e-12)
            hess = sb.sparse_hessian(lambda x, f=f: jnp.sum(f(x) ** 2), x, pattern=sb.SparsityPattern.dense(4, 4))
            expected = compiled(jax.hessian, lambda x, plain=plain: jnp.sum(plain(x) ** 2))(x)
            np.testing.assert_allclose(hess(x, check=True).toarray(), expected, atol=1e-10)
        diagonal = sb.sparse_jacobian(lambda x: cube(x) * x[0], x, pattern=sb.SparsityPattern.diagonal(4))
        with pytest.raises(PatternError, match=r"column|Column"):
            diagonal(x, check=True)


def squared_on_host(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda v: np.asarray(v) ** 2, shape, x, vmap_method="expand_dims")


def test_callbacks_need_a_derivative():
    x, diagonal = jnp.linspace(0.1, 0.4, 4), sb.SparsityPattern.diagonal(4)
    for options in ({}, {"pattern": diagonal}):
        with pytest.raises(TracingError, match=r"custom_jvp or jax\.custom_vjp"):
            sb.sparse_jacobian(squared_on_host, x, **options)(x)
        with pytest.raises(TracingError, match="custom_vjp"):
            sb.sparse_hessian(lambda x: squared_on_host(x).sum(), x, **options)(x)
    with_rule = jax.custom_jvp(squared_on_host)
    with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), 2 * primals[0] * tangents[0]))
    np.testing.assert_allclose(sb.sparse_jacobian(with_rule, x, pattern=diagonal)(x).toarray(), np.diag(2 * x))


def test_a_constant_of_one_call_is_none_of_the_next():
    """asdex took the mask of the first `where` for the condition of the second."""
    pytest.importorskip("asdex")
    mask, x = np.arange(N) % 3 > 0, jnp.linspace(0.1, 0.9, N)

    def f(x):
        y = jnp.where(mask, x, x[::-1] ** 2)
        return jnp.where(y > 0.3, jnp.sqrt(y), y[::-1])

    np.testing.assert_allclose(sb.sparse_jacobian(f, x)(x, check=True).toarray(), compiled(jax.jacfwd, f)(x), rtol=1e-6)


def test_traces_that_differ_are_refused():
    x, key, rng, count = jnp.linspace(0.1, 0.4, 4), jax.random.key(0), np.random.default_rng(0), iter(range(99))
    diagonal = sb.SparsityPattern.diagonal(4)
    for f in (lambda x: x * rng.random(), lambda x: x * rng.random(4), lambda x: x + next(count)):
        with pytest.raises(TracingError, match="random"):
            sb.sparse_jacobian(f, x, pattern=diagonal)(x)
    found = sb.sparse_jacobian(lambda x: x * jax.random.normal(key, (4,)), x, pattern=diagonal)(x)
    np.testing.assert_allclose(found.toarray(), np.diag(jax.random.normal(key, (4,))), rtol=1e-6)
    for f in (lambda x: None, lambda x: {"a": "x"}, lambda x: x.astype(jnp.float16)):
        with pytest.raises(DTypeError):
            sb.sparse_jacobian(f, x, pattern=diagonal)


def test_results_do_not_depend_on_blocks(monkeypatch):
    pattern = sb.SparsityPattern.from_scipy(sb.sparse_jacobian(
        lambda x: np.pad(x[2:] * x[:-2] - np.exp(x[1:-1]), 1), np.zeros(N))(np.ones(N)))  # fmt: skip
    f, x = FUNCTIONS["stencil"][0], jnp.linspace(0.1, 0.7, N)
    whole = sb.sparse_jacobian(f, x, pattern=pattern).values(x)
    for step in (1, 2):
        monkeypatch.setattr("sparsebp.jacobians.jax_functions.JaxFunction.block_bytes", 8 * N * step)
        np.testing.assert_array_equal(sb.sparse_jacobian(f, x, pattern=pattern).values(x), whole)


def test_other_arguments():
    pytest.importorskip("asdex")

    def f(t, x, scale, count):
        return t * scale * x[:count] ** 2 + x[0]

    x = jnp.arange(1.0, 6)
    jac = sb.sparse_jacobian(f, 0.0, jnp.zeros(5), jnp.zeros(3), 3, argnums=1)
    for t, scale in ((2.0, np.ones(3, np.float32)), (3, jnp.full(3, 0.5))):
        expected = compiled(jax.jacfwd, lambda x, t=t, scale=scale: f(t, x, scale, 3))(x)
        np.testing.assert_allclose(jac(t, x, scale, 3, check=True).toarray(), expected)
    with pytest.raises(OptionError, match="constant"):
        jac(2.0, x, jnp.ones(3), 2)
    by_hand = sb.sparse_jacobian(f, 0.0, x, jnp.ones(3), 3, argnums=1, pattern=jac.pattern)
    np.testing.assert_array_equal(by_hand.values(2.0, x, jnp.ones(3), 3), jac.values(2.0, x, jnp.ones(3), 3))
    with pytest.raises(OptionError, match="constant"):  # it is compiled in
        by_hand(2.0, x, jnp.ones(3), 2)


@pytest.mark.parametrize("step", [1, 9])
def test_within_transforms_and_pickled(step, monkeypatch):
    """Values are NaN there if a derivative outside of the pattern is not zero; blocks of colours are joined."""
    monkeypatch.setattr("sparsebp.jacobians.jax_functions.JaxFunction.block_bytes", 8 * 4 * step)
    x, xs = jnp.linspace(0.1, 0.7, 4), jnp.linspace(0.1, 0.9, 8).reshape(2, 4)
    band = sb.SparsityPattern.from_scipy(scipy.sparse.csr_array(np.tri(4, k=1) - np.tri(4, k=-2)))
    jac = sb.sparse_jacobian(neighbours, x, pattern=band)
    values = jac.values(x)
    for again in (jac, pickle.loads(pickle.dumps(jac)), copy.deepcopy(jac)):
        np.testing.assert_allclose(jax.jit(again.values)(x), values, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jac.values)(xs), jac.batch(xs.T).T, rtol=1e-6)
    total = jax.grad(lambda x: jac.values(x).sum())(x)
    np.testing.assert_allclose(total, compiled(jax.grad, lambda x: jax.jacfwd(neighbours)(x).sum())(x), rtol=1e-5)
    lacks_a_row = scipy.sparse.csr_array(band.to_scipy(np.ones(band.nnz)).toarray() * [[1], [1], [1], [0]])
    wrong = sb.sparse_jacobian(neighbours, x, pattern=sb.SparsityPattern.from_scipy(lacks_a_row))
    assert np.isnan(jax.jit(wrong.values)(x)).any()
    for transformed in (lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f)), jax.grad):
        assert np.isnan(transformed(lambda x: wrong.values(x).sum())(x)).any()
    with pytest.raises(PatternError, match="outside the pattern"):
        wrong.values(x)


def test_check_compiles_anew():
    pytest.importorskip("asdex")
    weight = np.array([[1.0, 0.0], [0.0, 0.0]], np.float32)
    jac = sb.sparse_jacobian(lambda x: jnp.asarray(weight) @ x + x, jnp.zeros(2))
    jac(jnp.ones(2))
    weight[0, 1] = 3
    if jac.pattern.nnz < 4:
        with pytest.raises(PatternError):
            jac(jnp.ones(2), check=True)
    else:
        np.testing.assert_array_equal(jac(jnp.ones(2), check=True).toarray(), [[2, 3], [0, 1]])


def test_refusals():
    x = jnp.ones(4)
    diagonal = sb.SparsityPattern.diagonal(4)
    for f, error, match in (
        (lambda x: x if x[0] > 0 else -x, TracingError, "lax.cond"),
        (lambda x: x[x > 0], TracingError, "JAX cannot trace"),
        (lambda x: x.sum(), ShapeError, "ravel"),
        (lambda x: x * 1j, DTypeError, "real"),
        (lambda x: x[:3], ShapeError, "length"),
    ):
        with pytest.raises(error, match=match):
            sb.sparse_jacobian(f, x, pattern=diagonal)(x)
    jac = sb.sparse_jacobian(lambda x: x**2, x, pattern=diagonal)
    for other, error in ((jnp.ones(5), ShapeError), (jnp.arange(4), DTypeError), (np.ones(4), DTypeError)):
        with pytest.raises(error):
            jac(other)
    for f in (jnp.tanh, lambda x: x.at[0].set(1)):
        with pytest.raises(TracingError, match="as an array of JAX"):
            sb.sparse_jacobian(f, np.ones(4))
    with pytest.raises(PatternError, match="misses"):
        sb.sparse_jacobian(lambda x: x * x[0], x, pattern=diagonal)(x, check=True)


def test_check_names_an_entry_that_is_nan():
    x, diagonal = jnp.array([0.0, 1.0]), sb.SparsityPattern.diagonal(2)
    jac = sb.sparse_jacobian(lambda x: x.at[:].set(jnp.sqrt(x) ** 2), x, pattern=diagonal)
    with pytest.raises(NonFiniteError, match="row 0, column 0"):
        jac(x, check=True)
    hess = sb.sparse_hessian(lambda x: jnp.sum(x.at[:].multiply(jnp.sqrt(x) * jnp.sqrt(x))), x, pattern=diagonal)
    with pytest.raises(NonFiniteError, match="row 0, column 0"):
        hess(x, check=True)


def test_operations_that_asdex_does_not_know_need_a_pattern():
    pytest.importorskip("asdex")
    x = jnp.linspace(0.1, 0.5, 4)
    with pytest.raises(TracingError, match="pattern="):
        sb.sparse_jacobian(lambda x: jax.scipy.special.gammaincc(2.0, x), x)
    with pytest.raises(TracingError, match="scalar"):
        sb.sparse_hessian(lambda x: x, x)


def test_without_asdex(monkeypatch):
    monkeypatch.setitem(sys.modules, "asdex", None)
    x, f = jnp.linspace(0.1, 0.5, 4), lambda x: jax.scipy.special.gammaincc(2.0, x)
    with pytest.raises(MissingDependencyError, match="pattern="):
        sb.sparse_jacobian(f, x)
    jac = sb.sparse_jacobian(f, x, pattern=sb.SparsityPattern.diagonal(4))
    np.testing.assert_allclose(jac(x, check=True).toarray(), compiled(jax.jacfwd, f)(x), rtol=1e-5)


def test_batches_and_least_squares():
    pytest.importorskip("asdex")
    f = FUNCTIONS["stencil"][0]
    with jax.enable_x64(True):
        jac = sb.sparse_jacobian(f, jnp.zeros(N))
        xs = jnp.asarray(RNG.uniform(0.2, 0.9, (N, 3)))
        found = jac.batch(xs)
        assert isinstance(found, jax.Array) and jac.batch(xs[:, :0]).shape == (jac.pattern.nnz, 0)
        np.testing.assert_array_equal(found, np.stack([jac.values(xs[:, b]) for b in range(3)], axis=1))
        rosen = sb.sparse_jacobian(lambda x: jnp.concatenate([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]]), jnp.zeros(N))
        fit = least_squares(lambda x: np.asarray(rosen._function.f(x)), np.full(N, -0.5), jac=rosen)
        np.testing.assert_allclose(fit.x, 1, atol=1e-6)


def test_whatever_a_program_has_fixed_may_not_change():
    """Values of sparse matrices, shapes, and what objects hold are compiled into functions of JAX."""
    x = jnp.arange(1.0, 4.0)
    pattern = sb.SparsityPattern.dense(3, 3)
    matrix, other, index = scipy.sparse.csr_array(np.eye(3)), SimpleNamespace(k=2), np.array([2])

    class Holder:
        k = 2

    def first(arg):
        return float(arg.data[0]) if hasattr(arg, "indptr") else float(getattr(arg, "k", np.sum(arg)))

    for arg in (matrix, other, index, [Holder()], {"a": Holder()}):
        inner = arg[0] if isinstance(arg, list) else arg["a"] if isinstance(arg, dict) else arg
        jac = sb.sparse_jacobian(lambda x, a, inner=inner: first(inner) * x, x, arg, pattern=pattern)
        jac(x, arg)
        jac(x, arg)
        if inner is matrix:
            matrix.data *= 5
        elif inner is not index:
            inner.k = 5
        with pytest.raises(OptionError, match="has changed"):
            jac(x, np.array([2, 2]) if inner is index else arg)
