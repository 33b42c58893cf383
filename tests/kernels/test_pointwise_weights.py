"""The gradient at the weights of 1×1 convolutions, against NumPy in more digits."""

import numpy as np
import pytest

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
