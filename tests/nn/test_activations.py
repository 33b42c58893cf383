"""Pointwise activations and Softmax against torch.nn: values, gradients, Jacobians, edges."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import OptionError
from strategies import seeds, sizes
from torch_twins import assert_like_torch

CLOSE = {"rtol": 1e-11, "atol": 1e-13}
CONFIGURATIONS = [
    ("ReLU", {}),
    ("LeakyReLU", {}), ("LeakyReLU", {"negative_slope": -0.5}), ("LeakyReLU", {"negative_slope": 0.0}),
    ("ELU", {}), ("ELU", {"alpha": 2.5}), ("SELU", {}), ("GELU", {}), ("GELU", {"approximate": "tanh"}), ("SiLU", {}),
    ("Softplus", {}), ("Softplus", {"beta": 3.0, "threshold": 1.5}), ("Hardtanh", {}),
    ("Hardtanh", {"min_val": -0.3, "max_val": 2.0}),
    ("ReLU6", {}), ("Mish", {}), ("Tanh", {}), ("Sigmoid", {}), ("CELU", {}), ("CELU", {"alpha": 2.5}),
    ("CELU", {"alpha": -0.5}), ("Hardsigmoid", {}), ("Hardswish", {}), ("LogSigmoid", {}), ("Softsign", {}),
]  # fmt: skip
OF_VECTORS = ("ELU", "SELU", "CELU", "Hardtanh", "ReLU6", "Hardswish")


def pair(configuration):
    name, options = configuration
    return getattr(nn, name)(**options), getattr(torch.nn, name)(**options)


def torch_slope(twin, x):
    tx = torch.from_numpy(x).requires_grad_()
    y = twin(tx)
    y.backward(torch.ones_like(y))
    return y.detach().numpy(), tx.grad.numpy()


@given(
    configuration=st.sampled_from(CONFIGURATIONS), batch=sizes(1, 4), shape=st.lists(sizes(1, 4), max_size=2),
    seed=seeds,
)  # fmt: skip
def test_pointwise(configuration, batch, shape, seed):
    rng = np.random.default_rng(seed)
    x = 3 * rng.standard_normal((batch, 3, *shape))
    x[0, 0] = rng.choice([0, -1, 1, -0.3, 2])  # kinks
    close = {**CLOSE, "rtol": 1e-7} if configuration[0] == "Hardsigmoid" else CLOSE  # torch's 1/6 is a float32's
    assert assert_like_torch(*pair(configuration), x, rng, close).pattern.kind == "diagonal"


def test_the_slope_of_a_hard_sigmoid_is_a_sixth():
    slopes = nn.Hardsigmoid().slope(np.array([-3.0, -2.9, 0.0, 2.9, 3.0]))
    np.testing.assert_array_equal(slopes, [0, 1 / 6, 1 / 6, 1 / 6, 0])


@pytest.mark.parametrize("name", ["Hardsigmoid", "Hardswish"])
def test_an_infinite_gradient_stays_before_a_slope_of_0(name):
    layer, twin = pair((name, {}))
    x = np.array([-4.0, -3.0, 1.0, 3.0, 4.0])
    want, back = twin(tx := torch.from_numpy(x).requires_grad_()), np.full(5, np.inf)
    want.backward(torch.from_numpy(back))
    np.testing.assert_array_equal(layer.input_grad(back, layer.forward(x)[1]), tx.grad.numpy())


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_edges_are_torchs_and_silent(configuration, dtype):
    layer, twin = pair(configuration)
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e4, -1e4, 30, -30, 1, -1], dtype)[None]
    want, slope = torch_slope(twin, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, saved = layer.forward(x)
        got = layer.input_grad(np.ones_like(x), saved)
    assert y.dtype == got.dtype == layer.jacobian_t(saved).dtype == dtype
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-12)
    # torch's slopes of these at NaN depend on whether its vector code or the loop for the rest computes them
    first = 1 if configuration[0] in OF_VECTORS else 3 if configuration[0] == "Softsign" else 0  # there NaN, here 0
    np.testing.assert_allclose(got[:, first:], slope[:, first:], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["ReLU", "ReLU6", "Hardtanh", "LeakyReLU"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_nan_lets_the_gradient_through_as_in_torch(name, dtype):
    """Of one element, which torch's vector code does not touch; here every element of any array is computed so."""
    layer, twin = pair((name, {}))
    _, slope = torch_slope(twin, np.full((1, 1), np.nan, dtype))
    for shape in ((1, 1), (1, 67), (3, 67)):  # whole vectors and a rest; of one sample and of several
        y, saved = layer.forward(np.full(shape, np.nan, dtype))
        assert np.isnan(y).all()
        want = np.full(shape, slope[0, 0])
        np.testing.assert_array_equal(layer.input_grad(np.ones(shape, dtype), saved), want)
        np.testing.assert_array_equal(layer.slope(saved), want)
        np.testing.assert_array_equal(np.diag(layer.jacobian_t(saved).to_dense(len(y) - 1)), want[0])


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_elements_overflow_nowhere(configuration, dtype):
    layer, twin = pair(configuration)
    x = np.array([[-0.9, 0.9]], dtype) * np.finfo(dtype).max
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, saved = layer.forward(x)
        got = layer.input_grad(np.ones_like(x), saved)
    far = np.array([[-1e16, 1e16]])
    want = twin(torch.from_numpy(x).double()).numpy()  # in float32, torch's GELU overflows here
    if configuration[0] == "Hardswish":
        want[0, 1] = x[0, 1]  # torch's overflows in float64 as well
    np.testing.assert_allclose(y, want.astype(dtype), rtol=1e-6)
    np.testing.assert_allclose(got, torch_slope(twin, far)[1], rtol=1e-6, atol=1e-30)


def test_softplus_does_not_overflow_below_a_high_threshold():
    layer = nn.Softplus(threshold=1e6)
    y, saved = layer.forward(np.array([[1000.0, -1000.0]]))
    np.testing.assert_array_equal(y, [[1000.0, 0.0]])
    np.testing.assert_array_equal(layer.slope(saved), [[1.0, 0.0]])


def test_softmax_edges():
    inf, nan = np.inf, np.nan
    x = np.array([[1e300, -1e300, 0], [-inf, 0, 0], [-inf, -inf, -inf], [inf, 0, 0], [nan, 0, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = nn.Softmax()(x)
    np.testing.assert_array_equal(y, torch.softmax(torch.from_numpy(x), -1).numpy())
    assert nn.Softmax(1)(x).shape == x.shape
    with pytest.raises(OptionError, match="no such axis"):
        nn.Softmax(dim=2).forward(x)
