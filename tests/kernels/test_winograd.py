"""Convolutions of 3 by 3 with many channels: sums of mapped tiles, against PyTorch in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsebp import kernels
from sparsebp.kernels.host import winograd

STRIDE = DILATION = (1, 1, 1)


def maps(weight, x, gy, pad):
    """Return the output, and the gradients at input and weights, by the kernels."""
    k = kernels.get(np)
    y, gx, gw = np.empty_like(gy), np.empty_like(x), np.empty_like(weight)
    options = STRIDE, (0, *pad), DILATION, 1
    k.convolve(weight, x, *options, y)
    k.convolve_t(weight, gy, *options, gx)
    k.correlate(gy, x, *options, gw)
    return y, gx, gw


def reference(weight, x, gy, pad):
    """Return the same by PyTorch, in double precision."""
    w, data = (torch.from_numpy(a[:, :, 0]).double().requires_grad_() for a in (weight, x))
    y = torch.nn.functional.conv2d(data, w, padding=pad)
    y.backward(torch.from_numpy(gy[:, :, 0]).double())
    return tuple(a.detach().numpy()[:, :, None] for a in (y, data.grad, w.grad))


def arrays(seed, dtype, batch, channels, rows, size, pad):
    """Return weights, inputs and gradients at the outputs."""
    rng = np.random.default_rng(seed)
    outputs = [n + 2 * p - 2 for n, p in zip(size, pad, strict=True)]
    shapes = (rows, channels, 1, 3, 3), (batch, channels, 1, *size), (batch, rows, 1, *outputs)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@settings(max_examples=20)
@given(
    batch=st.integers(1, 9), channels=st.integers(32, 50), rows=st.integers(32, 50),
    size=st.tuples(st.integers(1, 17), st.integers(1, 17)), pad=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    dtype=st.sampled_from([np.float32, np.float64]), seed=st.integers(0, 99),
)  # fmt: skip
@example(batch=33, channels=33, rows=47, size=(2, 2), pad=(1, 1), dtype=np.float32, seed=0)
@example(batch=5, channels=32, rows=32, size=(16, 14), pad=(0, 0), dtype=np.float64, seed=0)  # two blocks
@example(batch=3, channels=37, rows=41, size=(9, 11), pad=(1, 0), dtype=np.float32, seed=0)
def test_convolutions_and_their_gradients(batch, channels, rows, size, pad, dtype, seed):
    given_arrays = arrays(seed, dtype, batch, channels, rows, size, pad)
    tolerance = 2e-5 if dtype == np.float32 else 1e-13
    for found, wanted in zip(maps(*given_arrays, pad), reference(*given_arrays, pad), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * max(1.0, abs(wanted).max()))


def test_what_is_mapped():
    many = (1, 3, 3), STRIDE, DILATION, 1, (64, 64), (1, 8, 8), 8
    assert winograd.fits(*many)
    for place, other in [(0, (1, 3, 1)), (1, (1, 2, 2)), (2, (1, 2, 2)), (3, 2), (4, (3, 64)), (5, (1, 3, 3)), (6, 1)]:
        assert not winograd.fits(*many[:place], other, *many[place + 1 :])


@pytest.mark.parametrize("special", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_number_that_is_not_finite_stays_in_its_windows(special, where):
    """3e38 is, but the sum with its neighbours is not."""
    given_arrays = [a * np.float32(0.02) for a in arrays(0, np.float32, 2, 32, 32, (8, 8), (1, 1))]
    given_arrays[where].flat[[0, 1, 77, 78]] = special
    with np.errstate(all="ignore"):
        wanted = [a.astype(np.float32) for a in reference(*given_arrays, (1, 1))]
        for found, direct in zip(maps(*given_arrays, (1, 1)), wanted, strict=True):
            fine = np.isfinite(direct)
            assert np.isfinite(found[fine]).all()
            np.testing.assert_allclose(found[fine], direct[fine], rtol=2e-2, atol=1e-4)
