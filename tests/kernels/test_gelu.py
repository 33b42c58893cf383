"""GELU and its gradient, on every backend, against torch in double precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import normal, reals, seeds, sizes, tolerance


@given(length=sizes(0, 600), scale=st.sampled_from([1.0, 6.0]), approximate=st.booleans(), dtype=reals, seed=seeds)
def test_gelu_and_its_gradient(backend, length, scale, approximate, dtype, seed):
    rng = np.random.default_rng(seed)
    x, gy = normal(rng, length, dtype, scale), normal(rng, length, dtype)
    tx = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    want = torch.nn.functional.gelu(tx, approximate="tanh" if approximate else "none")
    want.backward(torch.from_numpy(gy.astype(np.float64)))
    y, gx = backend.empty(length, dtype), backend.empty(length, dtype)
    backend.kernels.gelu(backend.array(x), approximate, y)
    backend.kernels.gelu_grad(backend.array(gy), backend.array(x), approximate, gx)
    np.testing.assert_allclose(backend.numpy(y), want.detach().numpy(), **tolerance(dtype))
    np.testing.assert_allclose(backend.numpy(gx), tx.grad.numpy(), **tolerance(dtype))


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_far_out(backend, dtype, approximate):
    """The slope is 0 or 1 there; ∞ times 0 is NaN, as in torch."""
    most = np.finfo(dtype).max
    x = np.array([-most, most, -100, 100, -np.inf, np.inf, np.nan], dtype)
    y, gx = backend.empty(7, dtype), backend.empty(7, dtype)
    backend.kernels.gelu(backend.array(x), approximate, y)
    backend.kernels.gelu_grad(backend.array(np.ones(7, dtype)), backend.array(x), approximate, gx)
    nan = math.nan
    np.testing.assert_array_equal(backend.numpy(y), np.array([0, most, 0, 100, nan, np.inf, nan], dtype))
    np.testing.assert_array_equal(backend.numpy(gx)[[0, 1, 2, 3, 6]], [0, 1, 0, 1, nan])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_small_probabilities_keep_their_digits(backend, dtype):
    """Far below 0, where 1 + erf has none left."""
    x = np.random.default_rng(0).uniform(-8, -3, 200).astype(dtype)
    y = backend.empty(200, dtype)
    backend.kernels.gelu(backend.array(x), False, y)
    want = [v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(float)]
    np.testing.assert_allclose(backend.numpy(y), want, rtol=150 * np.finfo(dtype).eps)
