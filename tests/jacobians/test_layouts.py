"""vjp and jvp in the layers' own shapes, against the layers' input gradients and torch.func, and dense Jacobians."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import networks as net
import sparsebp as sb
from sparsebp import SparsityPattern, TransposedJacobian, jacobian_t, nn
from sparsebp.core.errors import DTypeError, MemoryLimitError, OptionError, PatternError, ShapeError
from sparsebp.jacobians import dense_jacobian_t
from strategies import seeds
from torch_twins import recurrent_twin

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def strided(array):
    """The same numbers in other strides: every axis backward, then every second element of a larger array."""
    wide = np.full((*array.shape[::-1], 2), np.nan)
    wide[..., 0] = array.T
    return wide[..., 0].T


def check(layer, function, x, rng):
    """vjp is the layer's input_grad and torch's vjp; jvp is torch's jvp."""
    y, saved = layer.forward(x)
    once = SimpleNamespace(
        forward=lambda _: (y, saved),
        jacobian_t=layer.jacobian_t,
        gradients=layer.gradients,
        batch_axes=layer.batch_axes,
    )
    j = jacobian_t(once, x)  # of that forward: dropout draws anew in each
    g, v = strided(rng.standard_normal(y.shape)), strided(rng.standard_normal(x.shape))
    pulled, pushed = j.vjp(g), j.jvp(v)
    assert pulled.shape == x.shape and pulled.flags.c_contiguous
    assert pushed.shape == y.shape and pushed.flags.c_contiguous
    np.testing.assert_allclose(pulled, layer.input_grad(g, saved), **CLOSE)
    with torch.backends.mkldnn.flags(enabled=False):
        out, back = torch.func.vjp(function, torch.from_numpy(x))
        np.testing.assert_allclose(out.detach().numpy(), y, **CLOSE)
        np.testing.assert_allclose(pulled, back(torch.from_numpy(g.copy()))[0].detach().numpy(), **CLOSE)
    # <g, J v> = <Jᵀ g, v> says the same of jvp where torch has no forward mode
    np.testing.assert_allclose((g * pushed).sum(), (pulled * v).sum(), rtol=1e-8, atol=1e-9)
    return j, v, pushed


@given(network=net.networks(), seed=seeds)
@settings(max_examples=30)
def test_chains_of_all_operators(network, seed):
    chain, x = network
    rng = np.random.default_rng(seed)
    j, v, pushed = check(chain.layer, chain.twin, x, rng)
    _, tangent = torch.func.jvp(chain.twin, (torch.from_numpy(x),), (torch.from_numpy(v.copy()),))
    np.testing.assert_allclose(pushed, tangent.detach().numpy(), **CLOSE)
    flat = rng.standard_normal((len(x), j.shape[1]))
    np.testing.assert_array_equal(j.vjp(flat), j.vjp(flat.reshape(pushed.shape)))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("steps", "batch"), [(1, 3), (4, 1), (5, 3), (3, 3)])
def test_recurrent_layers_keep_their_layout(kind, batch_first, steps, batch):
    rng = np.random.default_rng(0)
    layer = kind(2, 3, batch_first=batch_first, bidirectional=True, dtype=np.float64, rng=rng)
    twin = recurrent_twin(layer)
    x = rng.standard_normal((batch, steps, 2) if batch_first else (steps, batch, 2))
    j, v, pushed = check(layer, lambda t: twin(t)[0], x, rng)
    flat = rng.standard_normal((batch, steps * 6))
    shaped = flat.reshape(batch, steps, 6)
    np.testing.assert_array_equal(j.vjp(flat), j.vjp(shaped if batch_first else shaped.swapaxes(0, 1)))
    moved = 1e-6
    difference = (layer(x + moved * v) - layer(x - moved * v)) / (2 * moved)
    np.testing.assert_allclose(pushed, difference, rtol=1e-6, atol=1e-8)
    head = nn.Linear(6, 4, dtype=np.float64, rng=rng)
    model = nn.SequenceClassifier(layer, head)
    weight, bias = (torch.from_numpy(head.params[name]) for name in ("weight", "bias"))
    check(model, lambda t: torch.cat(list(twin(t)[1]), dim=1) @ weight.T + bias, x, rng)


def test_a_chain_whose_layers_disagree_about_the_batch_axis_is_refused():
    steps = batch = 3  # sizes that would fit each other
    model = nn.Sequential(nn.GRU(2, 2, rng=0), nn.Tanh())
    with pytest.raises(OptionError, match="batch_first=True"):
        jacobian_t(model, np.ones((steps, batch, 2), np.float32))
    first = nn.Sequential(nn.GRU(2, 2, batch_first=True, rng=0), nn.Tanh())
    j = jacobian_t(first, np.ones((batch, steps, 2), np.float32))
    assert j.vjp(np.ones((3, 3, 2), np.float32)).shape == (3, 3, 2)
    only = nn.Sequential(nn.GRU(2, 2, rng=0), nn.GRU(2, 1, rng=0))
    assert jacobian_t(only, np.ones((4, 3, 2), np.float32)).vjp(np.ones((4, 3, 1), np.float32)).shape == (4, 3, 2)


@given(batch=st.sampled_from([0, 1, 2, 5]), seed=seeds)
@settings(max_examples=10)
def test_shared_values_serve_any_batch(batch, seed):
    rng = np.random.default_rng(seed)
    layer = nn.Conv2d(2, 3, 3, dtype=np.float64, rng=rng)
    j = jacobian_t(layer, rng.standard_normal((1, 2, 5, 4)))
    assert (j.batch, j.input_shape, j.output_shape) == (None, (2, 5, 4), (3, 3, 2))
    g, v = rng.standard_normal((batch, 3, 3, 2)), rng.standard_normal((batch, 2, 5, 4))
    dense = j.to_dense()
    np.testing.assert_allclose(j.vjp(g), (g.reshape(batch, 18) @ dense.T).reshape(v.shape), **CLOSE)
    np.testing.assert_allclose(j.jvp(v), (v.reshape(batch, 40) @ dense).reshape(g.shape), **CLOSE)


def test_without_shapes_samples_are_flat_and_products_keep_the_outer_ones():
    pattern = SparsityPattern([0, 2, 2, 5], [0, 3, 1, 2, 3], (3, 4))
    j = TransposedJacobian(pattern, np.arange(5.0), output_shape=(2, 2))
    assert (j.input_shape, j.output_shape, j.T.input_shape, j.T.output_shape) == ((3,), (2, 2), (2, 2), (3,))
    g = np.arange(8.0).reshape(2, 2, 2)
    np.testing.assert_array_equal(j.vjp(g), g.reshape(2, 4) @ j.to_dense().T)
    product = j @ TransposedJacobian(SparsityPattern.dense(4, 6), np.ones(24), output_shape=(3, 2))
    assert (product.input_shape, product.output_shape) == ((3,), (3, 2))


@pytest.mark.parametrize(
    ("g", "error", "message"),
    [
        (np.ones((4, 2, 3)), ShapeError, r"g does not fit.*Expected \(5, 2, 3\) or \(5, 6\)\. Got \(4, 2, 3\)"),
        (np.ones((5, 3, 2)), ShapeError, r"Got \(5, 3, 2\)"),
        (np.ones((5, 5)), ShapeError, "does not fit the Jacobian"),
        (np.ones(6), ShapeError, "does not fit the Jacobian"),
        (np.ones(()), ShapeError, "does not fit the Jacobian"),
        (np.ones((5, 6, 1, 1)), ShapeError, "does not fit the Jacobian"),
        (np.ones((5, 2, 3), np.float32), DTypeError, "float64"),
        ([[1.0] * 6] * 5, DTypeError, "not an array"),
    ],
)
def test_wrong_gradients_and_directions_are_refused(g, error, message):
    j = TransposedJacobian(SparsityPattern.dense(6, 6), np.ones((36, 5)), input_shape=(2, 3), output_shape=(2, 3))
    with pytest.raises(error, match=message):
        j.vjp(g)
    with pytest.raises(error, match=message.replace("g does", "v does")):
        j.jvp(g)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"input_shape": (2, 2)}, ShapeError),
        ({"input_shape": (-2, -3)}, ShapeError),
        ({"input_shape": 6}, ShapeError),
        ({"output_shape": (2.0, 3.0)}, ShapeError),
        ({"batch_axes": (2, 0)}, OptionError),
        ({"batch_axes": (0, -1)}, OptionError),
        ({"batch_axes": None}, OptionError),
        ({"batch_axes": (0,)}, OptionError),
    ],
)
def test_wrong_layouts_are_refused(options, error):
    with pytest.raises(error, match=r"Expected .* Got "):
        TransposedJacobian(SparsityPattern.dense(6, 6), np.ones(36), **options)


def test_what_is_no_pattern_is_refused():
    with pytest.raises(PatternError, match="SparsityPattern"):
        TransposedJacobian(None, np.ones(3))


# ---- without a Jacobian of its own ---------------------------------------------------------------------------------


class Squares:
    """y = x W with the sum of squares of x beside it, for samples of shape (2, 3) and outputs of shape (2,)."""

    weight = np.random.default_rng(3).standard_normal((6, 2))

    def forward(self, x):
        flat = x.reshape(len(x), 6)
        return flat @ self.weight + (flat**2).sum(axis=1)[:, None], x

    def input_grad(self, gy, saved):
        flat = saved.reshape(len(saved), 6)
        return (gy @ self.weight.T + 2 * flat * gy.sum(axis=1)[:, None]).reshape(saved.shape)


class WithGradients(Squares):
    input_grad = None
    jacobian_t = None

    def gradients(self, gy, saved):
        return SimpleNamespace(input=Squares.input_grad(self, gy, saved))


@pytest.mark.parametrize("make", [Squares, WithGradients])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_layers_without_a_jacobian_get_a_dense_one(make, batch):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, 2, 3))
    j = jacobian_t(make(), x)
    assert (j.shape, j.batch, j.pattern.kind, j.input_shape, j.output_shape) == ((6, 2), batch, "dense", (2, 3), (2,))
    g, v = rng.standard_normal((batch, 2)), rng.standard_normal((batch, 2, 3))
    np.testing.assert_allclose(j.vjp(g), Squares().input_grad(g, x), **CLOSE)
    flat = x.reshape(batch, 6)
    expected = v.reshape(batch, 6) @ Squares.weight + 2 * (flat * v.reshape(batch, 6)).sum(axis=1)[:, None]
    np.testing.assert_allclose(j.jvp(v), expected, **CLOSE)


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_dense_default_agrees_with_the_layers_own_jacobian(batch_first):
    rng = np.random.default_rng(0)
    layer = nn.GRU(2, 3, batch_first=batch_first, dtype=np.float64, rng=rng)
    x = rng.standard_normal((4, 4, 2))
    own = jacobian_t(layer, x)
    bare = SimpleNamespace(forward=layer.forward, input_grad=layer.input_grad, batch_axes=layer.batch_axes)
    dense = jacobian_t(bare, x)
    assert dense.pattern.kind == "dense" and dense.batch_axes == own.batch_axes
    for sample in range(4):
        np.testing.assert_allclose(dense.to_dense(sample), own.to_dense(sample), **CLOSE)


def test_the_dense_default_counts_its_memory_first():
    def never(gy):
        raise AssertionError("nothing may run")

    like = np.ones(0, np.float32)
    with pytest.raises(MemoryLimitError, match=r"at most 2147483648 bytes.*70000 x 70000"):
        dense_jacobian_t(never, (70, 1000), (70000,), 1, like)
    need = 6 * (3 * 4 + 4) + 4 * 3
    with pytest.raises(MemoryLimitError, match=f"Got {need} bytes"):
        dense_jacobian_t(never, (3,), (2,), 3, like, memory_limit=need - 1)
    j = dense_jacobian_t(lambda gy: np.ones((3, 3), np.float32), (3,), (2,), 3, like, memory_limit=need)
    assert j.data.nbytes + j.pattern.indices.nbytes + j.pattern.indptr.nbytes <= need + 4


def test_an_input_gradient_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"Expected \(3, 2\)\. Got \(2, 3\)"):
        dense_jacobian_t(lambda gy: np.ones((2, 3)), (2,), (2,), 3, np.ones(0))


# ---- refusals of sb.jacobian_t -------------------------------------------------------------------------------------


def test_a_missing_batch_axis_is_named():
    mlp = nn.Sequential(nn.Linear(3, 3, rng=0), nn.Tanh(), nn.Linear(3, 2, rng=0))
    x = np.ones((4, 3), np.float32)
    assert jacobian_t(mlp, x).shape == (3, 2)
    with pytest.raises(ShapeError, match=r"x has no batch axis.*x\[None\]"):
        jacobian_t(mlp, x[0])
    with pytest.raises(ShapeError, match="no batch axis"):
        jacobian_t(nn.Tanh(), np.ones(()))
    for layer in (nn.Linear(3, 3, rng=0), nn.LayerNorm(3), nn.Softmax()):
        with pytest.raises(ShapeError):
            jacobian_t(layer, x[0])
    with pytest.raises(ShapeError, match="no batch axis"):
        jacobian_t(SimpleNamespace(forward=nn.Tanh().forward, input_grad=nn.Tanh().input_grad), x[0])


def test_layers_that_are_none_are_refused():
    with pytest.raises(OptionError, match="forward and one of jacobian_t, input_grad, gradients"):
        jacobian_t(SimpleNamespace(forward=lambda x: (x, None)), np.ones((2, 2)))
    with pytest.raises(OptionError, match="forward"):
        jacobian_t(3, np.ones((2, 2)))


def test_a_jacobian_of_something_else_is_refused():
    wrong = SimpleNamespace(
        forward=lambda x: (x, x), jacobian_t=lambda x: TransposedJacobian(SparsityPattern.identity(3), np.ones(3))
    )
    with pytest.raises(ShapeError, match=r"does not fit x.*\(2, 2\)"):
        jacobian_t(wrong, np.ones((4, 2)))
    summed = SimpleNamespace(forward=lambda x: (x.sum(axis=0), x), input_grad=lambda g, x: np.ones_like(x) * g)
    with pytest.raises(ShapeError, match="no batch axis that the layer keeps"):
        jacobian_t(summed, np.ones((4, 2)))


def test_samples_that_depend_on_each_other_have_no_jacobian():
    layer = nn.BatchNorm2d(2)
    bare = SimpleNamespace(
        forward=layer.forward, input_grad=layer.input_grad, couples_samples=layer.couples_samples, jacobian_t=None
    )
    for one in (layer, bare):
        with pytest.raises(OptionError, match=r"input.grad"):
            sb.jacobian_t(one, np.random.default_rng(0).standard_normal((3, 2, 2, 2)).astype(np.float32))
