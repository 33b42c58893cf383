"""The host's convolutions where they have ways of their own: depthwise, few windows, mapped tiles, few weights.

Against PyTorch in double precision. On every backend, against loops over windows: test_windows.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsebp import kernels
from sparsebp.kernels.host.conv import depthwise, direct, winograd
from sparsebp.kernels.host.engine.simd import VECTOR_BYTES
from strategies import normal, reals, seeds, sizes, tolerance
from thread_counts import assert_same_for_any_number_of_threads

Size = tuple[int, int]
ONES = (1, 1, 1)


def by_kernels(weight, x, gy, stride: int = 1, padding: Size = (0, 0), dilation: int = 1, groups: int = 1):
    """Return the output (B, O, 1, Oh, Ow), and the gradients at input and weights where `gy` arrives."""
    k, options = kernels.get(np), ((1, stride, stride), (0, *padding), (1, dilation, dilation), groups)
    y, gx, gw = (np.empty_like(array) for array in (gy, x, weight))
    k.convolve(weight, x, *options, y)
    k.convolve_t(weight, gy, *options, gx)
    k.correlate(gy, x, *options, gw)
    return y, gx, gw


def by_torch(weight, x, gy, stride: int = 1, padding: Size = (0, 0), dilation: int = 1, groups: int = 1, more: int = 0):
    """Return the same by PyTorch, in double precision; with `more` padding behind the image than before it."""
    w, data = (torch.from_numpy(a[:, :, 0]).double().requires_grad_() for a in (weight, x))
    padded = torch.nn.functional.pad(data, (0, more, 0, more))
    y = torch.nn.functional.conv2d(padded, w, None, stride, padding, dilation, groups)
    y.backward(torch.from_numpy(gy[:, :, 0]).double())
    return tuple(a.detach().numpy()[:, :, None] for a in (y, data.grad, w.grad))


def gradient_at_weights(shape: tuple[int, ...], x, gy, **options):
    """Return the last of the three, by the kernels, for weights (O, C, Kh, Kw)."""
    return by_kernels(np.zeros((*shape[:2], 1, *shape[2:]), x.dtype), x, gy, **options)[2]


# ---- depthwise -------------------------------------------------------------------------------------------------------


@given(
    batch=sizes(1, 3), channels=sizes(1, 40), height=sizes(1, 9), width=sizes(1, 20), kernel=sizes(1, 4),
    stride=sizes(1, 3), padding=sizes(0, 3), dilation=sizes(1, 2), dtype=reals, seed=seeds,
)  # fmt: skip
def test_depthwise(batch, channels, height, width, kernel, stride, padding, dilation, dtype, seed):
    padding, reach = min(padding, kernel - 1), (kernel - 1) * dilation + 1
    size = [max(n, reach - 2 * padding) for n in (height, width)]
    outputs = [(n + 2 * padding - reach) // stride + 1 for n in size]
    rng = np.random.default_rng(seed)
    x, weight = normal(rng, (batch, channels, 1, *size), dtype), normal(rng, (channels, 1, 1, kernel, kernel), dtype)
    arrays = weight, x, normal(rng, (batch, channels, 1, *outputs), dtype)
    options = stride, (padding, padding), dilation, channels
    for found, wanted in zip(by_kernels(*arrays, *options), by_torch(*arrays, *options), strict=True):
        np.testing.assert_allclose(found, wanted, **tolerance(dtype))


@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize("width", [4, 8, 33])
def test_a_number_that_is_not_finite_stays_with_the_taps_that_meet_it(special, width):
    rng = np.random.default_rng(0)
    x, y = (normal(rng, (3, 20, 1, width, width), np.float32) for _ in range(2))
    x[1, 17, 0, 0, 0] = special
    found = gradient_at_weights((20, 1, 3, 3), x, y, padding=(1, 1), groups=20)
    finite = np.ones((20, 1, 1, 3, 3), bool)
    finite[17, ..., :2, :2] = False
    np.testing.assert_array_equal(np.isfinite(found), finite)


@pytest.mark.parametrize("special", [np.inf, np.nan])
def test_what_lies_beside_a_row_of_windows_does_not_reach_the_weights_gradient(special):
    """One channel a group, two rows."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 3, 1, 9, 11)), rng.standard_normal((2, 6, 1, 7, 9))
    spoiled = x.copy()
    spoiled[1, 1, 0, 4, 0] = special  # at the beginning of a row: windows meet it with their first column
    plain, found = (gradient_at_weights((6, 1, 3, 3), given_x, y, groups=3) for given_x in (x, spoiled))
    met = np.zeros(found.shape, bool)
    met[2:4, 0, 0, :, 0] = True
    np.testing.assert_array_equal(np.isfinite(found), ~met)
    np.testing.assert_allclose(found[~met], plain[~met], rtol=1e-10)


def test_planes_narrower_than_a_vector_go_abreast_where_vectors_are_long():
    """The rule that decides: few channels, and planes that would leave the second cache, do not."""
    windows = (1, 3, 3), ONES, (0, 1, 1), ONES, (1, 8, 8), (1, 8, 8)
    assert depthwise.fits(np.empty((32, 1, 1, 3, 3), np.float32), windows) == (VECTOR_BYTES >= 32)
    assert not depthwise.fits(np.empty((2, 1, 1, 3, 3), np.float32), windows)
    large = *windows[:4], (1, 200, 200), (1, 200, 200)
    assert not depthwise.fits(np.empty((32, 1, 1, 3, 3), np.float32), large)


def test_parts_that_share_an_input_channel():
    """Enough work for more parts than there are input channels, each with five outputs: cuts lie between these."""
    rng = np.random.default_rng(0)
    y, x = (normal(rng, (40, n, 1, 16, 20), np.float32) for n in (15, 3))
    weight = np.zeros((15, 1, 1, 3, 3), np.float32)
    want, terms = (by_torch(weight, *pair, padding=(1, 1), groups=3)[2] for pair in ((x, y), (np.abs(x), np.abs(y))))
    found = gradient_at_weights((15, 1, 3, 3), x, y, padding=(1, 1), groups=3)
    assert (np.abs(found - want) <= 16 * np.finfo(np.float32).eps * terms).all()


# ---- some dozen channels: windows read in padded planes --------------------------------------------------------------


def case_of(seed, dtype, batch, channels, rows, size, kernel, stride, padding, dilation):
    """Return weights, inputs and gradients at the outputs, and options of a convolution with a window at least."""
    reach = (kernel - 1) * dilation + 1
    size = [max(n, reach - 2 * p) for n, p in zip(size, padding, strict=True)]
    outputs = [(n + 2 * p - reach) // stride + 1 for n, p in zip(size, padding, strict=True)]
    shapes = (rows, channels, 1, kernel, kernel), (batch, channels, 1, *size), (batch, rows, 1, *outputs)
    rng = np.random.default_rng(seed)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return tuple(normal(rng, shape, dtype) for shape in shapes), options


@settings(max_examples=60)
@given(
    batch=sizes(1, 9), channels=sizes(2, 19), rows=sizes(2, 19), size=st.tuples(sizes(1, 23), sizes(1, 35)),
    kernel=sizes(1, 5), stride=sizes(1, 3), padding=st.tuples(sizes(0, 4), sizes(0, 4)), dilation=sizes(1, 2),
    dtype=reals, seed=seeds,
)  # fmt: skip
@example(batch=2, channels=3, rows=5, size=(21, 131), kernel=5, stride=2, padding=(2, 2), dilation=1, dtype=np.float32,
         seed=0)  # fmt: skip
@example(batch=9, channels=16, rows=17, size=(13, 11), kernel=2, stride=2, padding=(0, 0), dilation=1, dtype=np.float32,
         seed=0)  # fmt: skip
@example(batch=7, channels=37, rows=41, size=(9, 7), kernel=3, stride=1, padding=(1, 1), dilation=1, dtype=np.float64,
         seed=0)  # fmt: skip
def test_padded_planes(batch, channels, rows, size, kernel, stride, padding, dilation, dtype, seed):
    arrays, options = case_of(seed, dtype, batch, channels, rows, size, kernel, stride, padding, dilation)
    references = zip(*(by_torch(*given, **options) for given in (arrays, map(np.abs, arrays))), strict=True)
    for found, (wanted, scale) in zip(by_kernels(*arrays, **options), references, strict=True):
        assert (np.abs(found - wanted) <= 16 * np.finfo(dtype).eps * scale).all()


def test_what_is_read_in_padded_planes():
    """Few weights of a number, and planes that a cache holds; not 1×1 with stride 1, and one group."""
    weight, windows = np.empty((16, 16, 1, 3, 3), np.float32), ((1, 3, 3), ONES, (0, 1, 1), ONES, (1, 9, 9), (1, 9, 9))
    assert direct.fits(weight, windows, 1) and direct.transpose_fits(weight.shape, windows, 1, 4)
    large, single = (1, 300, 300), ((1, 1, 1), ONES, (0, 0, 0), *windows[3:])
    for other, given_windows, groups in [
        (weight, windows, 2), (np.empty((16, 99, 1, 3, 3), np.float32), windows, 1),
        (weight[..., :1, :1], single, 1), (weight, (*windows[:4], large, large), 1), (weight[:, :1], windows, 1),
    ]:  # fmt: skip
        assert not direct.fits(other, given_windows, groups)


@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_number_that_is_not_finite_stays_in_its_windows_of_padded_planes(special, stride, where):
    """Zeros around the gradient, and behind rows of seven windows, must not meet it where PyTorch has none."""
    arrays, options = case_of(0, np.float32, 5, 6, 7, (13, 15 // (3 - stride)), 3, stride, (1, 1), 1)
    arrays[where].flat[[0, 1, 77]] = special
    with np.errstate(all="ignore"):
        for found, wanted in zip(by_kernels(*arrays, **options), by_torch(*arrays, **options), strict=True):
            np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_padded_planes_for_any_number_of_threads(batch, stride):
    arrays, options = case_of(0, np.float32, batch, 16, 22, (31, 30), 3, stride, (1, 1), 1)
    assert_same_for_any_number_of_threads(lambda: by_kernels(*arrays, **options))


# ---- few windows: samples side by side ------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    batch=sizes(1, 17), channels=sizes(8, 21), rows=sizes(8, 40), size=st.tuples(sizes(1, 6), sizes(1, 6)),
    kernel=sizes(1, 4), pad=st.tuples(sizes(0, 4), sizes(0, 4)), more=sizes(0, 3), dilation=sizes(1, 2), dtype=reals,
    seed=seeds,
)  # fmt: skip
@example(batch=8, channels=70, rows=41, size=(2, 2), kernel=3, pad=(1, 1), more=0, dilation=1, dtype=np.float32, seed=0)
@example(batch=16, channels=9, rows=8, size=(1, 1), kernel=3, pad=(1, 1), more=0, dilation=1, dtype=np.float32, seed=0)
@example(batch=8, channels=9, rows=300, size=(4, 4), kernel=3, pad=(0, 0), more=4, dilation=1, dtype=np.float64, seed=0)
def test_few_windows(batch, channels, rows, size, kernel, pad, more, dilation, dtype, seed):
    reach = (kernel - 1) * dilation
    size = [max(n, reach + 1 - 2 * p) for n, p in zip(size, pad, strict=True)]
    rng, outputs = np.random.default_rng(seed), [n + 2 * p + more - reach for n, p in zip(size, pad, strict=True)]
    x, weight = normal(rng, (batch, channels, 1, *size), dtype), normal(rng, (rows, channels, 1, kernel, kernel), dtype)
    arrays = weight, x, normal(rng, (batch, rows, 1, *outputs), dtype)
    options = {"padding": pad, "dilation": dilation}
    references = zip(*(by_torch(*given, **options, more=more) for given in (arrays, map(np.abs, arrays))), strict=True)
    for found, (wanted, scale) in zip(by_kernels(*arrays, **options), references, strict=True):
        assert (np.abs(found - wanted) <= 16 * np.finfo(dtype).eps * scale).all()


def test_weights_that_meet_zeros_alone_are_not_left_out():
    """On an image of one element a padded 3×3 kernel has eight of them: an infinite one makes NaN, as in PyTorch."""
    weight, x = np.ones((8, 8, 1, 3, 3), np.float32), np.ones((16, 8, 1, 1, 1), np.float32)
    y = np.empty_like(x)
    weight[3, 2, 0, 0, 1] = np.inf
    with np.errstate(invalid="ignore"):
        kernels.get(np).convolve(weight, x, ONES, (0, 1, 1), ONES, 1, y)
    np.testing.assert_array_equal(np.isnan(y).all(0).reshape(8), np.arange(8) == 3)


# ---- 3 by 3 with many channels: sums of mapped tiles -----------------------------------------------------------------


def arrays_of(seed, dtype, batch, channels, rows, size, pad):
    """Return weights, inputs and gradients at the outputs."""
    rng = np.random.default_rng(seed)
    outputs = [n + 2 * p - 2 for n, p in zip(size, pad, strict=True)]
    shapes = (rows, channels, 1, 3, 3), (batch, channels, 1, *size), (batch, rows, 1, *outputs)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@settings(max_examples=20)
@given(
    batch=st.integers(1, 9), channels=st.integers(48, 66), rows=st.integers(48, 66),
    size=st.tuples(st.integers(1, 17), st.integers(1, 17)), pad=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    dtype=st.sampled_from([np.float32, np.float64]), seed=st.integers(0, 99),
)  # fmt: skip
@example(batch=33, channels=49, rows=63, size=(2, 2), pad=(1, 1), dtype=np.float32, seed=0)
@example(batch=5, channels=48, rows=48, size=(16, 14), pad=(0, 0), dtype=np.float64, seed=0)  # two blocks
@example(batch=3, channels=53, rows=57, size=(9, 11), pad=(1, 0), dtype=np.float32, seed=0)
def test_mapped_tiles(batch, channels, rows, size, pad, dtype, seed):
    arrays = arrays_of(seed, dtype, batch, channels, rows, size, pad)
    limit = 2e-5 if dtype == np.float32 else 1e-13
    for found, wanted in zip(by_kernels(*arrays, padding=pad), by_torch(*arrays, padding=pad), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=limit * max(1.0, abs(wanted).max()))


def test_what_is_mapped():
    many = (1, 3, 3), ONES, ONES, 1, (64, 64), (1, 8, 8), 8
    assert winograd.fits(*many)
    for place, other in [(0, (1, 3, 1)), (1, (1, 2, 2)), (2, (1, 2, 2)), (3, 2), (4, (32, 64)), (5, (1, 3, 3)), (6, 1)]:
        assert not winograd.fits(*many[:place], other, *many[place + 1 :])


@pytest.mark.parametrize("special", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("batch", [2, 5])
def test_a_number_that_is_not_finite_stays_in_its_windows(special, where, batch):
    """3e38 is, but the sum with its neighbours is not. Few windows, and mapped tiles."""
    arrays = [a * np.float32(0.02) for a in arrays_of(0, np.float32, batch, 48, 48, (8, 8), (1, 1))]
    arrays[where].flat[[0, 1, 77, 78]] = special
    with np.errstate(all="ignore"):
        wanted = [a.astype(np.float32) for a in by_torch(*arrays, padding=(1, 1))]
        for found, direct in zip(by_kernels(*arrays, padding=(1, 1)), wanted, strict=True):
            fine = np.isfinite(direct)
            assert np.isfinite(found[fine]).all()
            np.testing.assert_allclose(found[fine], direct[fine], rtol=2e-2, atol=1e-4)


# ---- gradients at the weights of 1×1 convolutions, and of unpadded ones with few output channels ---------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [(4, 4), (8, 8), (7, 9), (2, 40), (16, 16), (24, 24)])
@pytest.mark.parametrize("batch, rows, channels", [(1, 1, 1), (3, 5, 7), (9, 34, 8), (11, 8, 33), (2, 4, 64)])
def test_the_gradient_at_pointwise_weights(dtype, size, batch, rows, channels):
    rng = np.random.default_rng(0)
    y, x = (normal(rng, (batch, n, 1, *size), np.dtype(dtype)) for n in (rows, channels))
    found = gradient_at_weights((rows, channels, 1, 1), x, y).reshape(rows, channels)
    flat = [a.astype(np.longdouble).reshape(batch, a.shape[1], -1) for a in (y, x)]
    want, terms = np.einsum("brn,bcn->rc", *flat), np.einsum("brn,bcn->rc", *map(np.abs, flat))
    assert (np.abs(found - want) <= 4 * np.finfo(dtype).eps * terms).all()


@pytest.mark.parametrize("rows, channels", [(40, 6), (6, 40)])
def test_a_number_that_is_not_finite_stays_with_its_channel(rows, channels):
    rng = np.random.default_rng(0)
    y, x = (normal(rng, (3, n, 1, 8, 8), np.float32) for n in (rows, channels))
    x[2, channels - 1, 0, 7, 7] = np.inf
    found = gradient_at_weights((rows, channels, 1, 1), x, y)
    np.testing.assert_array_equal(np.isfinite(found[:, :, 0, 0, 0]).all(0), np.arange(channels) < channels - 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [5, 6, 8, 11, 12, 16, 17])
@pytest.mark.parametrize(
    "batch, channels, size, kernel, stride, dilation",
    [(3, 6, (14, 14), (5, 5), 1, 1), (2, 3, (9, 11), (3, 2), 2, 1), (1, 1, (7, 8), (2, 3), 1, 2)],
)
def test_the_gradient_at_weights_of_few_output_channels(dtype, rows, batch, channels, size, kernel, stride, dilation):
    rng = np.random.default_rng(0)
    x, weight = normal(rng, (batch, channels, 1, *size), np.dtype(dtype)), np.zeros((rows, channels, 1, *kernel), dtype)
    reach = [(n - (k - 1) * dilation - 1) // stride + 1 for n, k in zip(size, kernel, strict=True)]
    gy, options = normal(rng, (batch, rows, 1, *reach), np.dtype(dtype)), (stride, (0, 0), dilation)
    want, terms = (by_torch(weight, *pair, *options)[2] for pair in ((x, gy), (np.abs(x), np.abs(gy))))
    assert (np.abs(by_kernels(weight, x, gy, *options)[2] - want) <= 8 * np.finfo(dtype).eps * terms).all()


def test_sums_over_many_samples_keep_their_digits():
    """Each sample has a sum of its own: 20 000 equal terms are added up to a few roundings."""
    x, y = np.full((200, 1, 1, 12, 12), 0.1, np.float32), np.full((200, 16, 1, 10, 10), 0.7, np.float32)
    wanted = 20_000 * np.float64(x.flat[0]) * np.float64(y.flat[0])
    np.testing.assert_allclose(gradient_at_weights((16, 1, 3, 3), x, y), wanted, rtol=1e-5)


# ---- threads ---------------------------------------------------------------------------------------------------------

MAPS = [(3, 64, 1, 9), (64, 64, 1, 9), (64, 64, 1, 1), (64, 64, 64, 9), (96, 64, 1, 9), (200, 200, 200, 40),
        (1, 6, 1, 80)]  # fmt: skip
POINTWISE, FEW_ROWS = (70, 150, 1, 9, 16, 1, 0), (6, 16, 1, 64, 14, 5, 0)


@pytest.mark.parametrize(
    "channels, rows, groups, batch, size, kernel, pad",
    [*((*one, width, 3, 1) for one in MAPS for width in (4, 8, 16)), POINTWISE, FEW_ROWS],
)
def test_the_same_for_any_number_of_threads(channels, rows, groups, batch, size, kernel, pad):
    """Plain convolutions, mapped tiles and depthwise ones; then two that have their own gradients at the weights."""
    rng, reach = np.random.default_rng(0), size + 2 * pad - kernel + 1
    x = normal(rng, (batch, channels, 1, size, size), np.float32)
    y = normal(rng, (batch, rows, 1, reach, reach), np.float32)
    weight = normal(rng, (rows, channels // groups, 1, kernel, kernel), np.float32)
    assert_same_for_any_number_of_threads(lambda: by_kernels(weight, x, y, padding=(pad, pad), groups=groups))
