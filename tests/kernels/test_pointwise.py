"""Clamping, GELU and the loss on every backend, against NumPy and PyTorch in double precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from strategies import normal, reals, seeds, sizes, tolerance


@given(length=sizes(0, 600), limits=st.sampled_from([(-0.5, 0.25), (0.0, np.inf)]), dtype=reals, seed=seeds)
def test_clamp_and_its_gradient(backend, length, limits, dtype, seed):
    rng = np.random.default_rng(seed)
    x, gy = normal(rng, length, dtype), normal(rng, length, dtype)
    x[rng.random(length) < 0.2] = rng.choice([np.nan, np.inf, -np.inf, *limits])
    y, gx = backend.empty(length, dtype), backend.empty(length, dtype)
    backend.kernels.clamp(backend.array(x), *limits, y)
    with np.errstate(invalid="ignore"):
        want = np.clip(x, *map(np.dtype(dtype).type, limits))
    np.testing.assert_array_equal(backend.numpy(y), want)
    backend.kernels.clamp_grad(backend.array(gy), y, *limits, gx)
    np.testing.assert_array_equal(backend.numpy(gx), np.where((want <= limits[0]) | (want > limits[1]), 0, gy))


def test_limits_that_are_not_in_order_are_refused(backend):
    x = backend.array(np.ones(3))
    for low, high in ((1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)):
        with pytest.raises(OptionError, match="limits"):
            backend.kernels.clamp(x, low, high, x)
        with pytest.raises(OptionError, match="limits"):
            backend.kernels.clamp_grad(x, x, low, high, x)
    with pytest.raises(ShapeError, match="y has"):
        backend.kernels.clamp_grad(x, backend.array(np.ones(4)), 0.0, 1.0, x)


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
def test_gelu_far_out(backend, dtype, approximate):
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
def test_small_probabilities_of_gelu_keep_their_digits(backend, dtype):
    """Far below 0, where 1 + erf has none left."""
    x = np.random.default_rng(0).uniform(-8, -3, 200).astype(dtype)
    y = backend.empty(200, dtype)
    backend.kernels.gelu(backend.array(x), False, y)
    want = [v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(float)]
    np.testing.assert_allclose(backend.numpy(y), want, rtol=150 * np.finfo(dtype).eps)


def double(array):
    return torch.tensor(array.astype(np.float64))


@given(n=sizes(0, 33), classes=sizes(1, 33), scale=st.sampled_from([1.0, 30.0]), dtype=reals, seed=seeds)
def test_softmax_cross_entropy(backend, n, classes, scale, dtype, seed):
    rng = np.random.default_rng(seed)
    logits, target = normal(rng, (n, classes), dtype, scale), rng.integers(0, classes, n)
    losses, grad = backend.empty(n, dtype), backend.empty((n, classes), dtype)
    backend.kernels.softmax_cross_entropy(backend.array(logits), backend.array(target), losses, grad)
    x = double(logits).requires_grad_()
    expected = torch.nn.functional.cross_entropy(x, torch.tensor(target), reduction="none")
    expected.sum().backward()
    np.testing.assert_allclose(backend.numpy(losses), expected.detach(), **tolerance(dtype, 10))
    np.testing.assert_allclose(backend.numpy(grad), x.grad, **tolerance(dtype, 10))


@pytest.mark.parametrize("shape", [(1, 1), (16, 10), (128, 3), (129, 3), (5, 900)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mean_of_losses_and_its_gradient(backend, shape, dtype):
    """Of few rows and of many; one whose class is not there makes it NaN."""
    rng = np.random.default_rng(0)
    logits, target = normal(rng, shape, dtype), rng.integers(0, shape[1], shape[0])
    alone, together = ([backend.empty(shape[0], dtype), backend.empty(shape, dtype)] for _ in range(2))
    mean, given = backend.empty((), np.float64), (backend.array(logits), backend.array(target))
    backend.kernels.softmax_cross_entropy(*given, *alone)
    backend.kernels.softmax_cross_entropy(*given, *together, mean)
    losses, grad = map(backend.numpy, alone)
    np.testing.assert_array_equal(backend.numpy(together[0]), losses)
    np.testing.assert_array_equal(backend.numpy(together[1]), grad * dtype(1 / shape[0]))
    np.testing.assert_allclose(backend.numpy(mean), losses.mean(dtype=np.float64), rtol=1e-14)
    target[-1] = shape[1]
    backend.kernels.softmax_cross_entropy(given[0], backend.array(target), *together, mean)
    assert np.isnan(backend.numpy(mean))
    for wrong, error in ((backend.empty(1, np.float64), ShapeError), (backend.empty((), np.float32), DTypeError)):
        with pytest.raises(error, match="mean"):
            backend.kernels.softmax_cross_entropy(*given, *together, wrong)
    none = backend.empty((0, 3), dtype), backend.array(np.zeros(0, np.int64)), backend.empty(0, dtype)
    with pytest.raises(ShapeError, match="nothing to take the mean of"):
        backend.kernels.softmax_cross_entropy(*none, backend.empty((0, 3), dtype), mean)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gives_a_loss_that_is_not_finite(backend, value):
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = value
    losses, grad = backend.empty(3, np.float32), backend.empty((3, 4), np.float32)
    backend.kernels.softmax_cross_entropy(backend.array(logits), backend.array([0, 1, 2]), losses, grad)
    np.testing.assert_array_equal(np.isfinite(backend.numpy(losses)), [True, False, True])
    assert np.isfinite(backend.numpy(grad)[[0, 2]]).all()
