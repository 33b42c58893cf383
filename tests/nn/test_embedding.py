"""Embedding, positions and the mean over steps against torch.nn, and an Embedding as the first layer of a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
import torch_twins
from sparsebp import nn
from sparsebp.core.errors import OptionError
from strategies import reals, seeds, sizes, tolerance
from torch_twins import assert_gradients, loaded

CLOSE = {"rtol": 1e-11, "atol": 1e-13}
INTEGERS = (np.int64, np.int32, np.uint8, np.int8)


@given(
    rows=sizes(1, 17), width=sizes(0, 7), shape=st.lists(sizes(0, 5), max_size=3), integer=st.sampled_from(INTEGERS),
    padding=st.none() | st.integers(-17, 16), by_frequency=st.booleans(), dtype=reals, seed=seeds,
)  # fmt: skip
def test_embedding(rows, width, shape, integer, padding, by_frequency, dtype, seed):
    options = {"scale_grad_by_freq": by_frequency}
    rng = np.random.default_rng(seed)
    if padding is not None:
        padding = padding % (2 * rows) - rows  # counted from both ends
    layer = nn.Embedding(rows, width, padding, dtype=dtype, rng=rng, **options)
    twin = loaded(torch.nn.Embedding(rows, width, padding, **options), layer)
    assert layer.padding_idx == twin.padding_idx
    x = rng.integers(0, rows, shape).astype(integer)
    want = twin(torch.from_numpy(np.asarray(x)).long())
    gy = rng.standard_normal(want.shape).astype(dtype)
    want.backward(torch.from_numpy(gy))
    y, saved = layer.forward(x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, want.detach().numpy())
    x[...] = 0  # the caller's memory
    (grad,) = layer.weight_grad(gy, saved).values()
    assert grad.dtype == dtype
    np.testing.assert_array_equal(layer.weight_grad(gy, saved)["weight"], grad)
    np.testing.assert_allclose(grad, twin.weight.grad.numpy(), **tolerance(dtype))
    if padding is not None:
        assert not layer.params["weight"][padding].any() and not grad[padding].any()


def test_initial_values_of_positions():
    assert abs(nn.PositionalEmbedding(300, 40, rng=0).params["weight"].std() - 0.02) < 0.001


def test_there_is_no_gradient_at_integers():
    layer, x = nn.Embedding(5, 2, rng=0), np.array([[0, 4, 4]])
    y, back = layer.vjp(x)
    g = back(np.ones_like(y))
    assert g.weights["weight"][4].tolist() == [2, 2]
    for ask in (lambda: g.input, lambda: sb.jacobian_t(layer, x)):
        with pytest.raises(OptionError, match="no gradient at its input") as caught:
            ask()
        assert "first layer" in str(caught.value)
    model = nn.Sequential(layer, nn.MeanOverSteps(True), nn.Linear(2, 3, rng=0))
    y, back = model.vjp(x)
    assert list(back(np.ones_like(y)).weights) == ["0.weight", "2.weight", "2.bias"]
    with pytest.raises(OptionError, match="no gradient at its input"):
        back(np.ones_like(y)).input  # noqa: B018


@pytest.mark.parametrize("backward", ["bp", "auto", "linear"])
def test_a_model_on_words_learns(backward):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, (64, 5)).astype(np.int32)
    target = (x == 3).any(axis=1).astype(np.int64)
    layers = nn.Embedding(6, 4, rng=1), nn.PositionalEmbedding(5, 4, True, rng=2), nn.MeanOverSteps(True)
    model = nn.Sequential(*layers, nn.Linear(4, 8, rng=3), nn.Tanh(), nn.Linear(8, 2, rng=4), backward=backward)
    value_and_grad = sb.value_and_grad(model, nn.CrossEntropyLoss())
    adam = sb.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(60):
        value, grads = value_and_grad(x, target)
        adam.step(grads)
        losses.append(value)
    assert losses[-1] < 0.2 < losses[0]


class Positions(torch.nn.Module):
    """What `nn.PositionalEmbedding` does, in torch."""

    def __init__(self, layer):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(layer.state_dict()["weight"]))
        self.batch_first = layer.batch_first

    def forward(self, x):
        steps = x.shape[1 if self.batch_first else 0]
        return x + (self.weight[:steps] if self.batch_first else self.weight[:steps, None])


@given(steps=sizes(1, 7), more=sizes(0, 3), batch=sizes(0, 5), width=sizes(1, 7), batch_first=st.booleans(), seed=seeds)
def test_positions_and_mean(steps, more, batch, width, batch_first, seed):
    rng = np.random.default_rng(seed)
    positions = nn.PositionalEmbedding(steps + more, width, batch_first, dtype=np.float64, rng=rng)
    mean, twin, axis = nn.MeanOverSteps(batch_first), Positions(positions), 1 if batch_first else 0
    x = rng.standard_normal((batch, steps, width) if batch_first else (steps, batch, width))
    y = positions.forward(x)[0]
    assert_gradients(positions, twin, x, rng, CLOSE)
    assert_gradients(mean, lambda t: t.mean(dim=axis), y, rng, CLOSE, {})
    assert mean.gradients(mean.forward(y)[0], mean.forward(y)[1]).input.flags.writeable  # a copy of the view
    if batch:
        assert sb.jacobian_t(positions, x).pattern.kind == "identity"
        jacobian = sb.jacobian_t(mean, x)
        assert jacobian.shape == (steps * width, width) and jacobian.pattern.nnz == steps * width
        one = torch_twins.jacobian_t(lambda s: s.mean(dim=0), np.moveaxis(x, 1 - axis, 0)[0])
        np.testing.assert_allclose(jacobian.to_dense(0), one, **CLOSE)


@given(steps=sizes(1, 6), batch=sizes(1, 4), width=sizes(1, 4), batch_first=st.booleans(), seed=seeds)
def test_mean_of_padded_sequences(steps, batch, width, batch_first, seed):
    rng = np.random.default_rng(seed)
    mean, axis = nn.MeanOverSteps(batch_first), 1 if batch_first else 0
    lengths = rng.integers(1, steps + 1, batch)
    x = rng.standard_normal((batch, steps, width))
    for row, length in zip(x, lengths, strict=True):
        row[length:] = np.nan  # whatever stands there
    given = np.ascontiguousarray(np.moveaxis(x, 1, axis))
    y, saved = mean.forward(given, lengths)
    np.testing.assert_allclose(y, [row[:n].mean(axis=0) for row, n in zip(x, lengths, strict=True)], **CLOSE)
    gy = rng.standard_normal(y.shape)
    wanted = np.zeros_like(x)
    for row, g, length in zip(wanted, gy, lengths, strict=True):
        row[:length] = g / length
    np.testing.assert_allclose(mean.input_grad(gy, saved), np.moveaxis(wanted, 1, axis), **CLOSE)
    jacobian = mean.jacobian_t(saved)
    for number, g in enumerate(gy):
        found = (jacobian.to_dense(number if jacobian.data.ndim > 1 else 0) @ g).reshape(steps, width)
        np.testing.assert_allclose(found, wanted[number], **CLOSE)
