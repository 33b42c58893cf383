"""Trees of arrays, several arguments, other data, products with vectors and batches: alike in all libraries."""

import numpy as np
import pytest

import sparsebp as sb
from sparsebp.core.errors import OptionError, ShapeError


@pytest.fixture(params=["numpy", "torch", "jax.numpy"])
def xp(request):
    module = pytest.importorskip(request.param)
    if request.param == "jax.numpy":
        pytest.importorskip("asdex")
        import jax

        with jax.enable_x64(True):
            yield module
    else:
        yield module


def array(xp, values):
    return getattr(xp, "from_numpy", xp.asarray)(np.array(values))


def f(state, weight, scale):
    """Of a dictionary, a number and a matrix."""
    u, v = state["u"], state["parts"][0]
    return {"b": [u[1:] * weight - u[:-1] ** 2, (v * scale).sum()[None]], "a": v * u[:2, None] * scale}, ("kept", 3)


def g(state, weight, scale):
    y = f(state, weight, scale)[0]
    return (y["a"] ** 2).sum() * weight + (y["b"][0] ** 3).sum(), "kept"


def given(xp, seed):
    rng = np.random.default_rng(seed)
    state = {"u": array(xp, rng.uniform(0.5, 1, 5)), "parts": (array(xp, rng.uniform(0.5, 1, (2, 3))),)}
    return state, 1.3, array(xp, rng.uniform(0.5, 1, (2, 3)))


def flat(state, scale):
    """In the order of the columns: the sorted keys, then the other argument."""
    return np.concatenate([np.ravel(state["parts"][0]), np.ravel(state["u"]), np.ravel(scale)])


def differences(h, state, weight, scale):
    """Central differences of a function of NumPy, whose results are raveled."""
    columns, x = [], flat(state, scale)
    for e in 1e-6 * np.eye(len(x)):
        ends = []
        for z in (x + e, x - e):
            ends.append(h({"parts": (z[:6].reshape(2, 3),), "u": z[6:11]}, weight, z[11:].reshape(2, 3)))
        columns.append((ends[0] - ends[1]) / 2e-6)
    return np.stack(columns, axis=-1)


def in_order(y):
    return np.concatenate([np.ravel(y["a"]), np.ravel(y["b"][0]), np.ravel(y["b"][1])])


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_jacobian(xp, chunk_size):
    jac = sb.sparse_jacobian(f, *given(xp, 0), argnums=(0, 2), has_aux=True, chunk_size=chunk_size)
    args = given(xp, 1)
    matrix, aux = jac(*args, check=True)
    assert aux == ("kept", 3)
    expected = differences(lambda *args: in_order(f(*args)[0]), *given(np, 1))
    np.testing.assert_allclose(matrix.toarray(), expected, atol=1e-8)
    (value, aux), matrix = jac.value_and_jacobian(*args)
    np.testing.assert_allclose(np.asarray(value["a"]), np.asarray(f(*args)[0]["a"]))
    blocks = jac.blocks(matrix)
    assert blocks["b"][0][0]["u"].shape == (4, 5) and blocks["a"][1].shape == (6, 6)
    np.testing.assert_allclose(blocks["b"][1][1].toarray(), expected[10:, 11:], atol=1e-8)
    state, _, scale = given(xp, 2)
    v, w = (state, scale), f(state, 1.0, scale)[0]
    along, back = jac.jvp(v, *args), jac.vjp(w, *args)
    np.testing.assert_allclose(in_order(along), expected @ flat(*v), rtol=1e-6)
    np.testing.assert_allclose(flat(*back), in_order(w) @ expected, rtol=1e-6)
    with pytest.raises(ShapeError, match="other arrays"):
        jac({"u": state["u"], "parts": state["parts"] * 2}, 1.0, scale)


def test_hessian(xp):
    args = given(xp, 1)
    hess = sb.sparse_hessian(g, *given(xp, 0), argnums=(0, 2), has_aux=True)
    (value, aux), matrix = hess.value_and_hessian(*args)
    assert aux == "kept" and np.shape(value) == ()
    gradients = lambda *args: differences(lambda *args: np.asarray(g(*args)[0])[None], *args)[0]  # noqa: E731
    np.testing.assert_allclose(matrix.toarray(), differences(gradients, *given(np, 1)), atol=2e-3)
    state, _, scale = given(xp, 2)
    found = hess.hvp((state, scale), *args)
    np.testing.assert_allclose(flat(*found), matrix @ flat(state, scale), rtol=1e-9)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_batch(xp, count):
    jac = sb.sparse_jacobian(lambda x, t: x["a"][1:] * x["a"][:-1] * t + x["b"], {
        "a": array(xp, np.ones(4)), "b": array(xp, np.ones(()))}, 2.0)  # fmt: skip
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.5, 1, (4, count)), rng.uniform(0.5, 1, count)
    for t in (2.0, 3.0):  # which is not a part of what is compiled
        found = jac.batch({"a": array(xp, a), "b": array(xp, b)}, t)
        assert tuple(found.shape) == (jac.pattern.nnz, count)
        for k in range(count):
            one = jac.values({"a": array(xp, a[:, k]), "b": array(xp, b[k])}, t)
            np.testing.assert_allclose(np.asarray(found)[:, k], np.asarray(one), rtol=1e-12)


@pytest.mark.parametrize("make", [sb.sparse_jacobian, sb.sparse_hessian])
def test_stored(xp, make, tmp_path, monkeypatch):
    """A plan is read where it is of the same function, at whatever arguments; another one takes its place."""
    path, x, shift = tmp_path / "plan.npz", array(xp, np.linspace(0.3, 0.9, 7)), array(xp, np.arange(7.0))

    def functions(offset):
        step = lambda x: x[1:] * x[:-1] ** 2 + x[offset]  # noqa: E731
        return step if make is sb.sparse_jacobian else lambda x: (step(x) ** 2).sum()

    of = lambda f, x: make(lambda x, shift: f(x + shift), x, shift, stored=path)  # noqa: E731
    first = of(functions(0), x)
    written = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(type(first._function), "pattern", None)
        again = of(functions(0), x * 2)
    assert again.pattern == first.pattern and again.colors == first.colors and path.read_bytes() == written
    np.testing.assert_array_equal(again(x, shift, check=True).toarray(), first(x, shift).toarray())
    other = of(functions(3), x)
    assert other.pattern == make(functions(3), x).pattern != first.pattern
    other(x, shift, check=True)
    assert of(functions(3), x).pattern == other.pattern
    path.write_bytes(written[:100])
    with pytest.raises(OptionError, match="does not hold a plan"):
        of(functions(0), x)


def test_compiled():
    jac, old = (sb.sparse_jacobian(f, *given(np, 0), argnums=(0, 2), has_aux=True, compiled=c) for c in (True, False))
    args, (state, _, scale) = given(np, 1), given(np, 2)
    for _ in range(2):
        np.testing.assert_allclose(jac(*args)[0].toarray(), old(*args)[0].toarray(), rtol=1e-12)
    assert ": compiled" in jac.describe()
    np.testing.assert_allclose(in_order(jac.jvp((state, scale), *args)), in_order(old.jvp((state, scale), *args)))
