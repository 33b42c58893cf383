"""The gradient at the weights of 1×1 convolutions, and of unpadded ones with few output channels, in more digits."""

import numpy as np
import pytest
import torch

from sparsebp import kernels
from strategies import normal

_OPTIONS = ((1, 1, 1), (0, 0, 0), (1, 1, 1), 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [(4, 4), (8, 8), (7, 9), (2, 40), (16, 16), (24, 24)])
@pytest.mark.parametrize("batch, rows, channels", [(1, 1, 1), (3, 5, 7), (9, 34, 8), (11, 8, 33), (2, 4, 64)])
def test_the_gradient_at_pointwise_weights(dtype, size, batch, rows, channels):
    rng = np.random.default_rng(0)
    y, x = (normal(rng, (batch, n, 1, *size), np.dtype(dtype)) for n in (rows, channels))
    out = np.empty((rows, channels, 1, 1, 1), dtype)
    kernels.get(np).correlate(y, x, *_OPTIONS, out)
    flat = [a.astype(np.longdouble).reshape(batch, a.shape[1], -1) for a in (y, x)]
    want, terms = np.einsum("brn,bcn->rc", *flat), np.einsum("brn,bcn->rc", *map(np.abs, flat))
    assert (np.abs(out.reshape(rows, channels) - want) <= 4 * np.finfo(dtype).eps * terms).all()


@pytest.mark.parametrize("rows, channels", [(40, 6), (6, 40)])
def test_a_number_that_is_not_finite_stays_with_its_channel(rows, channels):
    rng = np.random.default_rng(0)
    y, x = (normal(rng, (3, n, 1, 8, 8), np.float32) for n in (rows, channels))
    x[2, channels - 1, 0, 7, 7] = np.inf
    out = np.empty((rows, channels, 1, 1, 1), np.float32)
    kernels.get(np).correlate(y, x, *_OPTIONS, out)
    np.testing.assert_array_equal(np.isfinite(out[:, :, 0, 0, 0]).all(0), np.arange(channels) < channels - 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [5, 6, 8, 11, 12, 16, 17])
@pytest.mark.parametrize(
    "batch, channels, size, kernel, stride, dilation",
    [(3, 6, (14, 14), (5, 5), 1, 1), (2, 3, (9, 11), (3, 2), 2, 1), (1, 1, (7, 8), (2, 3), 1, 2)],
)
def test_the_gradient_at_weights_of_few_output_channels(dtype, rows, batch, channels, size, kernel, stride, dilation):
    rng = np.random.default_rng(0)
    x = normal(rng, (batch, channels, *size), np.dtype(dtype))
    options = stride, 0, dilation
    reach = [(n - (k - 1) * dilation - 1) // stride + 1 for n, k in zip(size, kernel, strict=True)]
    gy = normal(rng, (batch, rows, *reach), np.dtype(dtype))
    want, terms = (_gradient(kernel, *map(torch.from_numpy, pair), options)
                   for pair in ((gy, x), (np.abs(gy), np.abs(x))))  # fmt: skip
    out = np.empty((rows, channels, 1, *kernel), dtype)
    options = (1, stride, stride), (0, 0, 0), (1, dilation, dilation), 1
    kernels.get(np).correlate(gy[:, :, None], x[:, :, None], *options, out)
    assert (np.abs(out[:, :, 0] - want) <= 8 * np.finfo(dtype).eps * terms).all()


def _gradient(kernel, gy, x, options):
    weight = torch.zeros((gy.shape[1], x.shape[1], *kernel), dtype=torch.float64, requires_grad=True)
    torch.nn.functional.conv2d(x.double(), weight, None, *options).backward(gy.double())
    return weight.grad.numpy()


def test_sums_over_many_samples_keep_their_digits():
    """Each sample has a sum of its own: 20 000 equal terms are added up to a few roundings."""
    x, y = np.full((200, 1, 1, 12, 12), 0.1, np.float32), np.full((200, 16, 1, 10, 10), 0.7, np.float32)
    out = np.empty((16, 1, 1, 3, 3), np.float32)
    kernels.get(np).correlate(y, x, (1, 1, 1), (0, 0, 0), (1, 1, 1), 1, out)
    np.testing.assert_allclose(out, 20_000 * np.float64(x.flat[0]) * np.float64(y.flat[0]), rtol=1e-5)
