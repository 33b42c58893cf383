"""Depthwise convolutions, with many and few channels, against PyTorch in double precision."""

import numpy as np
import pytest
import torch
from hypothesis import given

from sparsebp import kernels
from sparsebp.kernels.host import depthwise
from sparsebp.kernels.host.engine.simd import VECTOR_BYTES
from strategies import normal, reals, seeds, sizes, tolerance


@given(
    batch=sizes(1, 3), channels=sizes(1, 40), height=sizes(1, 9), width=sizes(1, 20), kernel=sizes(1, 4),
    stride=sizes(1, 3), padding=sizes(0, 3), dilation=sizes(1, 2), dtype=reals, seed=seeds,
)  # fmt: skip
def test_depthwise(batch, channels, height, width, kernel, stride, padding, dilation, dtype, seed):
    padding, reach = min(padding, kernel - 1), (kernel - 1) * dilation + 1
    height, width = max(height, reach - 2 * padding), max(width, reach - 2 * padding)
    rng, k = np.random.default_rng(seed), kernels.get(np)
    x, weight = normal(rng, (batch, channels, height, width), dtype), normal(rng, (channels, 1, kernel, kernel), dtype)
    tx, tw = (torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, weight))
    want = torch.nn.functional.conv2d(tx, tw, None, stride, padding, dilation, channels)
    gy = normal(rng, tuple(want.shape), dtype)
    want.backward(torch.from_numpy(gy.astype(np.float64)))
    options = (1, stride, stride), (0, padding, padding), (1, dilation, dilation), channels
    y, gx, gw = (np.empty_like(a)[:, :, None] for a in (gy, x, weight))
    k.convolve(weight[:, :, None], x[:, :, None], *options, y)
    k.convolve_t(weight[:, :, None], gy[:, :, None], *options, gx)
    k.correlate(gy[:, :, None], x[:, :, None], *options, gw)
    for found, expected in ((y, want.detach()), (gx, tx.grad), (gw, tw.grad)):
        np.testing.assert_allclose(found[:, :, 0], expected.numpy(), **tolerance(dtype))


@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize("width", [4, 8, 33])
def test_a_number_that_is_not_finite_stays_with_the_taps_that_meet_it(special, width):
    rng, options = np.random.default_rng(0), ((1, 1, 1), (0, 1, 1), (1, 1, 1), 20)
    x, y = (normal(rng, (3, 20, 1, width, width), np.float32) for _ in range(2))
    x[1, 17, 0, 0, 0] = special
    out = np.empty((20, 1, 1, 3, 3), np.float32)
    kernels.get(np).correlate(y, x, *options, out)
    finite = np.ones((20, 3, 3), bool)
    finite[17, :2, :2] = False
    np.testing.assert_array_equal(np.isfinite(out[:, 0, 0]), finite)


def test_planes_narrower_than_a_vector_go_abreast_where_vectors_are_long():
    """The rule that decides: few channels, and planes that would leave the second cache, do not."""
    windows = (1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), (1, 8, 8), (1, 8, 8)
    long = VECTOR_BYTES >= 32
    assert depthwise.fits(np.empty((32, 1, 1, 3, 3), np.float32), windows) == long
    assert not depthwise.fits(np.empty((2, 1, 1, 3, 3), np.float32), windows)
    large = *windows[:4], (1, 200, 200), (1, 200, 200)
    assert not depthwise.fits(np.empty((32, 1, 1, 3, 3), np.float32), large)
