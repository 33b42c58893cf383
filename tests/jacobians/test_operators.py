"""Transposed Jacobians of operators against PyTorch's dense autograd in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import SparsityPattern, jacobian_t, nn
from sparsebp.core.errors import DeviceError, OptionError, ShapeError
from sparsebp.jacobians import (
    gru_hidden_jacobians,
    hidden_elements,
    linear_jacobian_t,
    pointwise_jacobian_t,
    rnn_hidden_jacobians,
)
from strategies import normal, seeds, sizes

POINTWISE = {"ReLU": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid}


def autograd_t(function, x):
    """The transposed Jacobian of `function` at one sample, by PyTorch, flattened on both sides."""
    jacobian = torch.autograd.functional.jacobian(function, torch.tensor(x))
    return jacobian.reshape(-1, x.size).numpy().T


@given(name=st.sampled_from(sorted(POINTWISE)), batch=sizes(1, 5), shape=st.lists(sizes(1, 5), max_size=2), seed=seeds)
def test_pointwise_layers(name, batch, shape, seed):
    x = normal(np.random.default_rng(seed), (batch, *shape), np.float64)
    j = jacobian_t(getattr(nn, name)(), x)
    assert j.pattern == SparsityPattern.diagonal(x[0].size)
    for b in range(batch):
        np.testing.assert_allclose(j.to_dense(b), autograd_t(POINTWISE[name], x[b]), rtol=1e-12, atol=1e-14)


@given(n_in=sizes(1, 7), n_out=sizes(1, 7), batch=sizes(1, 5), positions=sizes(1, 4), seed=seeds)
def test_linear_layers(n_in, n_out, batch, positions, seed):
    rng = np.random.default_rng(seed)
    layer = nn.Linear(n_in, n_out, dtype=np.float64, rng=rng)
    weight = torch.tensor(layer.params["weight"])
    x = normal(rng, (batch, n_in) if positions == 1 else (batch, positions, n_in), np.float64)
    j = jacobian_t(layer, x)
    built = linear_jacobian_t(layer.params["weight"], positions)
    assert j.pattern == built.pattern and j.batch is None
    np.testing.assert_array_equal(j.data, built.data)
    np.testing.assert_allclose(j.to_dense(), autograd_t(lambda v: v @ weight.T, x[0]), rtol=1e-12, atol=1e-14)


def test_models_chain():
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Linear(5, 7, dtype=np.float64, rng=rng), nn.Tanh(), nn.Linear(7, 3, dtype=np.float64, rng=rng)
    )
    x = normal(rng, (4, 5), np.float64)
    j = jacobian_t(model, x)
    assert (j.shape, j.batch) == ((5, 3), 4)
    first, last = (torch.tensor(model.state_dict()[name]) for name in ("0.weight", "2.weight"))
    bias = torch.tensor(model.state_dict()["0.bias"])
    for b in range(4):
        expected = autograd_t(lambda v: torch.tanh(v @ first.T + bias) @ last.T, x[b])
        np.testing.assert_allclose(j.to_dense(b), expected, rtol=1e-12, atol=1e-14)
    g = normal(rng, (3, 4), np.float64)
    y, saved = model.forward(x)
    assert y.shape == (4, 3)
    np.testing.assert_allclose((j @ g).T, model.input_grad(np.ascontiguousarray(g.T), saved), rtol=1e-12, atol=1e-14)


@given(steps=sizes(1, 4), batch=sizes(1, 3), size=sizes(1, 5), kind=st.sampled_from(["tanh", "relu"]), seed=seeds)
def test_rnn_elements(steps, batch, size, kind, seed):
    rng = np.random.default_rng(seed)
    w, gx = normal(rng, (size, size), np.float64), normal(rng, (steps, batch, size), np.float64)
    function = torch.tanh if kind == "tanh" else torch.relu
    h, before = np.empty_like(gx), normal(rng, (batch, size), np.float64)
    elements = []
    for t in range(steps):
        step = lambda v, t=t: function(torch.tensor(gx[t]) + v @ torch.tensor(w).T)  # noqa: E731
        h[t] = step(torch.tensor(before)).numpy()
        jacobian = torch.autograd.functional.jacobian(step, torch.tensor(before)).numpy()
        elements.append([jacobian[b, :, b].T for b in range(batch)])
        before = h[t]
    built = hidden_elements(rnn_hidden_jacobians(h, w, kind))
    for t in range(steps):
        assert built[t].pattern == SparsityPattern.dense(size, size)
        for b in range(batch):
            np.testing.assert_allclose(built[t].to_dense(b), elements[t][b], rtol=1e-10, atol=1e-12)


@given(batch=sizes(1, 3), size=sizes(1, 5), seed=seeds)
def test_gru_elements(batch, size, seed):
    """BPPSA Eq. 11 against autograd through Eq. 10."""
    rng = np.random.default_rng(seed)
    w, b_hn = normal(rng, (3 * size, size), np.float64), normal(rng, (size,), np.float64)
    gx, h0 = normal(rng, (1, batch, 3 * size), np.float64), normal(rng, (batch, size), np.float64)
    w_r, w_z, w_n = torch.tensor(w).reshape(3, size, size)
    x_r, x_z, x_n = torch.tensor(gx[0]).reshape(batch, 3, size).unbind(1)

    def gates(v):
        m = v @ w_n.T + torch.tensor(b_hn)
        r, z = torch.sigmoid(x_r + v @ w_r.T), torch.sigmoid(x_z + v @ w_z.T)
        return r, z, torch.tanh(x_n + r * m), m

    def step(v):
        _, z, n, _ = gates(v)
        return (1 - z) * n + z * v

    previous = torch.tensor(h0)
    saved = torch.cat(gates(previous), dim=1).numpy()[None]
    jacobian = torch.autograd.functional.jacobian(step, previous).numpy()
    (built,) = hidden_elements(gru_hidden_jacobians(step(previous).numpy()[None], h0, saved, w))
    for b in range(batch):
        np.testing.assert_allclose(built.to_dense(b), jacobian[b, :, b].T, rtol=1e-10, atol=1e-12)


def test_refusals():
    with pytest.raises(OptionError, match="forward and one of jacobian_t"):
        jacobian_t(object(), np.ones((1, 2)))
    with pytest.raises(DeviceError, match="not an array"):
        jacobian_t(nn.ReLU(), [[1.0]])
    with pytest.raises(ShapeError, match="batch axis"):
        pointwise_jacobian_t(np.float64(1))
    with pytest.raises(ShapeError, match="matrix"):
        linear_jacobian_t(np.ones(3))
