"""Normalisations, activations with weights, borders and axes against torch.nn: F, I, W, state, and Jacobians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import OptionError
from strategies import seeds, sizes
from torch_twins import assert_like_torch

F8 = {"dtype": np.float64}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@st.composite
def cases(draw):
    """A layer, its twin, and the shape of an input."""
    kind = draw(st.sampled_from(list(KINDS)))
    batch, channels, spatial = draw(sizes(1, 3)), draw(sizes(1, 4)), draw(st.lists(sizes(1, 3), max_size=2))
    return KINDS[kind](draw, batch, channels, spatial)


def _prelu(draw, batch, channels, spatial):
    options = draw(st.sampled_from([1, channels])), draw(st.sampled_from([0.25, -0.5, 0.0]))
    return nn.PReLU(*options, **F8), torch.nn.PReLU(*options), (batch, channels, *spatial)


def _group_norm(draw, batch, groups, spatial):
    channels = groups * draw(sizes(1, 3))
    options = {"eps": draw(st.sampled_from([1e-3, 0.5])), "affine": draw(st.booleans()), "bias": draw(st.booleans())}
    known = options if "bias" in torch.nn.GroupNorm.__init__.__annotations__ else {**options, "bias": True}
    ours = nn.GroupNorm(groups, channels, **known, **F8)
    twin = torch.nn.GroupNorm(
        groups, channels, **(known if known is options else {k: known[k] for k in ("eps", "affine")})
    )
    return ours, twin, (batch, channels, *spatial, 2)  # torch refuses one value alone


def _rms_norm(draw, batch, channels, spatial):
    shape = draw(st.sampled_from([(channels,), (channels, 2), (2, channels)]))
    options = draw(st.sampled_from([None, 1e-3])), draw(st.booleans())
    return nn.RMSNorm(shape, *options, **F8), torch.nn.RMSNorm(shape, *options), (batch, *spatial, *shape)


def _batch_norm(draw, batch, channels, spatial):
    options = 1e-3, draw(st.sampled_from([0.1, None])), draw(st.booleans()), draw(st.booleans())
    shape = (batch + 1, channels, *spatial[:1])
    ours, twin = nn.BatchNorm1d(channels, *options, **F8), torch.nn.BatchNorm1d(channels, *options)
    training = draw(st.booleans())
    return ours.train(training), twin.train(training), shape


def _softmax(draw, batch, channels, spatial):
    shape, name = (batch, channels, *spatial), draw(st.sampled_from(["Softmax", "LogSoftmax"]))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return getattr(nn, name)(dim), getattr(torch.nn, name)(dim), shape


def _linear(draw, batch, features, middle):
    arguments = features, draw(sizes(1, 7)), draw(st.booleans())
    return nn.Linear(*arguments, **F8), torch.nn.Linear(*arguments), (batch, *middle, features)


def _layer_norm(draw, batch, features, middle):
    arguments = draw(st.sampled_from([(features,), (2, features)])), 1e-3, draw(st.booleans()), draw(st.booleans())
    return nn.LayerNorm(*arguments, **F8), torch.nn.LayerNorm(*arguments), (batch, *middle, *arguments[0])


def _unflatten(draw, batch, channels, spatial):
    lengths = (channels, *spatial)
    given = draw(st.sampled_from([lengths, (-1, *spatial)]))
    dim = draw(st.sampled_from([1, -2]))
    return nn.Unflatten(dim, given), torch.nn.Unflatten(dim, given), (batch, int(np.prod(lengths)), 3)


def _zero_pad(draw, batch, channels, spatial):
    padding = draw(st.one_of(st.integers(0, 2), st.tuples(*[st.integers(-1, 2)] * 4)))
    size = [2 + draw(sizes(1, 3)) for _ in range(2)]
    return nn.ZeroPad2d(padding), torch.nn.ZeroPad2d(padding), (batch, channels, *size)


KINDS = {
    "PReLU": _prelu, "GroupNorm": _group_norm, "RMSNorm": _rms_norm, "BatchNorm1d": _batch_norm,
    "Softmax": _softmax, "Unflatten": _unflatten, "ZeroPad2d": _zero_pad, "Linear": _linear, "LayerNorm": _layer_norm,
}  # fmt: skip


@given(case=cases(), seed=seeds)
@settings(max_examples=60)
def test_they_are_torchs(case, seed):
    layer, twin, shape = case
    rng = np.random.default_rng(seed)
    twin = twin.double()
    with torch.no_grad():
        for param in twin.parameters():
            param.uniform_(-1, 1)
    layer.load_state_dict({name: value.numpy() for name, value in twin.state_dict().items()})
    assert list(layer.state_dict()) == list(twin.state_dict())
    x = rng.standard_normal(shape)
    if assert_like_torch(layer, twin, x, rng, CLOSE) is None:
        with pytest.raises(OptionError, match=r"couples? the samples"):
            layer.jacobian_t(layer.forward(x)[1])


def test_the_structure_of_their_jacobians():
    def pattern(layer, shape):
        return layer.jacobian_t(layer.forward(np.ones(shape))[1]).pattern

    assert pattern(nn.ZeroPad2d(1), (2, 3, 4, 5)).kind == "selection"
    assert pattern(nn.ZeroPad2d(-1), (2, 3, 4, 5)).nnz == 3 * 2 * 3
    assert pattern(nn.Unflatten(1, (1, -1)), (2, 6)).kind == "identity"
    assert pattern(nn.PReLU(3, **F8), (2, 3, 4)).kind == "diagonal"
    assert pattern(nn.GroupNorm(2, 6, **F8), (2, 6, 4)).nnz == 2 * 12**2
    assert pattern(nn.RMSNorm(4, **F8), (2, 6, 4)).nnz == 6 * 4**2
    assert pattern(nn.LogSoftmax(1), (2, 6, 4)).nnz == pattern(nn.Softmax(-2), (2, 6, 4)).nnz == 4 * 6**2
    assert pattern(nn.Residual(nn.Tanh()), (2, 3)).kind == "diagonal"
    assert pattern(nn.BatchNorm1d(6, **F8).eval(), (2, 6, 4)).kind == "diagonal"


@given(p=st.sampled_from([0.0, 0.4, 1.0]), shape=st.lists(sizes(1, 4), min_size=3, max_size=4), seed=seeds)
def test_whole_channels_are_dropped(p, shape, seed):
    layer, x = nn.Dropout2d(p, rng=seed), np.random.default_rng(seed).standard_normal(shape)
    y, saved = layer.forward(x)
    factor = np.divide(y, x).reshape(*shape[:2], -1)
    assert np.allclose(factor, factor[..., :1])
    assert np.all(np.isclose(factor, 0) | np.isclose(factor, 1 / (1 - p) if p < 1 else 0))
    gy = np.ones_like(x)
    np.testing.assert_allclose(layer.input_grad(gy, saved) * x, y)
    for b in range(shape[0]):
        np.testing.assert_allclose(np.diag(layer.jacobian_t(saved).to_dense(b)), factor[b].reshape(-1))
    assert layer.eval().forward(x)[0] is x


def test_channels_are_dropped_as_often_as_asked_for():
    y = nn.Dropout2d(0.3, rng=0)(np.ones((50, 40, 2, 2)))
    assert abs((y[:, :, 0, 0] == 0).mean() - 0.3) < 0.05
