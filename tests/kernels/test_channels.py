"""Kernels over channels on every backend, against NumPy in double precision."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import kernels
from sparsebp.core.errors import OptionError, ShapeError
from strategies import normal, reals, seeds, sizes, tolerance


@given(
    batch=sizes(1, 3), channels=sizes(1, 4), size=sizes(1, 40), weighted=st.booleans(), shifted=st.booleans(),
    dtype=reals, seed=seeds,
)  # fmt: skip
def test_channels(backend, batch, channels, size, weighted, shifted, dtype, seed):
    rng, k = np.random.default_rng(seed), backend.kernels
    x, gy = normal(rng, (batch, channels, size), dtype), normal(rng, (batch, channels, size), dtype)
    mean, a, b, c = (normal(rng, channels, dtype) for _ in range(4))
    x64, gy64, axes = x.astype(np.float64), gy.astype(np.float64), (0, 2)
    shift, wide_a, wide_b, wide_c = (v.astype(np.float64)[:, None] for v in (mean, a, b, c))
    one, other, third, out = (backend.empty(shape, dtype) for shape in (channels, channels, channels, x.shape))
    on = {id(v): backend.array(v) for v in (x, gy, mean, a, b, c)}
    close = tolerance(dtype)

    weight, bias = on[id(a)] if weighted else None, on[id(b)] if shifted else None
    k.channel_normalise(on[id(x)], weight, bias, 0.1, one, other, third, out)
    np.testing.assert_allclose(backend.numpy(one), x64.mean(axes), **close)
    np.testing.assert_allclose(backend.numpy(other), x64.var(axes), **close)
    np.testing.assert_allclose(backend.numpy(third), 1 / np.sqrt(x64.var(axes) + 0.1), **close)
    want = (x64 - x64.mean(axes, keepdims=True)) / np.sqrt(x64.var(axes, keepdims=True) + 0.1)
    want = want * (wide_a if weighted else 1) + (wide_b if shifted else 0)
    np.testing.assert_allclose(backend.numpy(out), want, **close)
    k.channel_scale(on[id(x)], on[id(mean)], on[id(a)], on[id(b)], out)
    np.testing.assert_allclose(backend.numpy(out), (x64 - shift) * wide_a + wide_b, **close)
    k.channel_scale(on[id(x)], None, weight, bias, out)
    np.testing.assert_allclose(
        backend.numpy(out), x64 * (wide_a if weighted else 1) + (wide_b if shifted else 0), **close
    )

    sums, products = gy64.sum(axes), (gy64 * (x64 - shift)).sum(axes)
    k.channel_back(on[id(gy)], on[id(x)], on[id(mean)], on[id(c)], weight, one, other, out)
    np.testing.assert_allclose(backend.numpy(one), sums, **close)
    np.testing.assert_allclose(backend.numpy(other), products, **close)
    slope = (products * c.astype(np.float64) ** 2 / (batch * size))[:, None]
    want = (gy64 - sums[:, None] / (batch * size) - (x64 - shift) * slope) * wide_c * (wide_a if weighted else 1)
    np.testing.assert_allclose(backend.numpy(out), want, **close)
    apart = backend.empty(channels, dtype), backend.empty(channels, dtype)
    k.channel_products(on[id(gy)], on[id(x)], on[id(mean)], *apart)
    for found, same in zip(apart, (one, other), strict=True):
        np.testing.assert_array_equal(backend.numpy(found), backend.numpy(same))


@given(batch=sizes(1, 3), channels=sizes(1, 4), size=sizes(1, 70), top=st.sampled_from([1.0, np.inf]), dtype=reals,
       seed=seeds)  # fmt: skip
def test_channels_that_are_cut_off(backend, batch, channels, size, top, dtype, seed):
    """Bit for bit as with `clamp` behind and `clamp_grad` in front, NaN, infinities and both limits included."""
    rng, k, shape = np.random.default_rng(seed), backend.kernels, (batch, channels, size)
    (x, gy), (weight, bias) = ([backend.array(normal(rng, s, dtype)) for _ in range(2)] for s in (shape, (channels,)))
    numbers = [[backend.empty(channels, dtype) for _ in range(5)] for _ in range(2)]
    arrays = [[backend.empty(shape, dtype) for _ in range(2)] for _ in range(2)]
    (whole, y), (masked, gx) = arrays[0], [backend.empty(shape, dtype) for _ in range(2)]
    k.channel_normalise(x, weight, bias, 1e-5, *numbers[0][:3], whole)
    k.clamp(whole.reshape(-1), 0.0, top, y.reshape(-1))
    k.channel_normalise(x, weight, bias, 1e-5, *numbers[1][:3], arrays[1][0], (0.0, top))
    np.testing.assert_array_equal(backend.numpy(arrays[1][0]), backend.numpy(y))
    k.channel_scale(x, None, None, bias, whole)
    k.clamp(whole.reshape(-1), 0.0, top, whole.reshape(-1))
    k.channel_scale(x, None, None, bias, x_too := backend.array(backend.numpy(x)), (0.0, top))
    np.testing.assert_array_equal(backend.numpy(x_too), backend.numpy(whole))

    values = backend.numpy(y).copy()
    places = rng.random(shape) < 0.2
    values[places] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], places.sum())
    y, limits = backend.array(values), (0.0, np.nextafter(dtype.type(top), dtype.type(0)) if top == 1 else top)
    k.clamp_grad(gy.reshape(-1), y.reshape(-1), *limits, masked.reshape(-1))
    mean, scale = numbers[0][0], numbers[0][2]
    k.channel_back(masked, x, mean, scale, weight, *numbers[0][3:], gx)
    k.channel_products(gy, x, mean, *numbers[1][3:], y, limits)
    k.channel_back(gy, x, mean, scale, weight, *numbers[1][3:], arrays[1][1], True, y, limits)
    again, other = [backend.empty(channels, dtype) for _ in range(2)], backend.empty(shape, dtype)
    k.channel_back(gy, x, mean, scale, weight, *again, other, False, y, limits)
    for found in (arrays[1][1], other):
        np.testing.assert_array_equal(backend.numpy(found), backend.numpy(gx))
    for found in (numbers[1][3:], again):
        for one, same in zip(found, numbers[0][3:], strict=True):
            np.testing.assert_array_equal(backend.numpy(one), backend.numpy(same))


@given(channels=sizes(0, 300), weighted=st.booleans(), dtype=reals, seed=seeds)
def test_numbers_of_channels(backend, channels, weighted, dtype, seed):
    """On the host they are bit for bit NumPy's: runs from before and after go the same way."""
    rng, k = np.random.default_rng(seed), backend.kernels
    mean, var, weight, old_mean, old_var = (np.abs(normal(rng, channels, dtype)) for _ in range(5))
    momentum, correction, eps = 0.1, 7 / 6, 1e-5
    on = [backend.array(v) for v in (mean, var, weight, old_mean, old_var)]
    made = [backend.empty(channels, dtype) for _ in range(2)]
    k.channel_track(on[0], on[1], momentum, correction, on[3], on[4])
    k.channel_factors(on[1], eps, on[2] if weighted else None, made[0], made[1])
    scale = 1 / np.sqrt(var + eps)
    new_var = var * correction
    want = [
        old_mean * (1 - momentum) + momentum * mean, old_var * (1 - momentum) + momentum * new_var,
        scale, scale * weight if weighted else scale,
    ]  # fmt: skip
    for found, expected in zip([on[3], on[4], *made], want, strict=True):
        assert expected.dtype == dtype
        if backend.name == "host":
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(backend.numpy(found), expected, **tolerance(dtype))


@pytest.mark.parametrize("shape", [(16, 2, 1024), (5, 3, 1), (90, 2, 49), (3, 1, 2731)])
def test_moments_of_values_far_from_zero(backend, shape):
    """The variance is that of the differences from the mean: no digits are lost to the mean's square."""
    x = (1e4 + np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    mean, var, scale, sums, products = (backend.empty(shape[1], np.float32) for _ in range(5))
    on, out = backend.array(x), backend.empty(shape, np.float32)
    backend.kernels.channel_normalise(on, None, None, 1e-5, mean, var, scale, out)
    x64 = x.astype(np.float64)
    np.testing.assert_allclose(backend.numpy(mean), x64.mean((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(backend.numpy(var), x64.var((0, 2)), rtol=3e-3)  # a mean in float32 is 1e-3 away
    backend.kernels.channel_products(on, on, mean, sums, products)
    terms = x64 * (x64 - backend.numpy(mean).astype(np.float64)[:, None])
    np.testing.assert_allclose(backend.numpy(products), terms.sum((0, 2)), rtol=1e-6, atol=1e-6 * abs(terms).sum())
    np.testing.assert_allclose(backend.numpy(sums), x64.sum((0, 2)), rtol=1e-6)


@pytest.mark.parametrize("shape", [(8, 2, 16), (1, 2, 300_000)])
def test_a_channel_of_equal_numbers(shape):
    """Its mean is that number, and its variance 0, however many there are and however far from zero."""
    x = np.full(shape, 10000.123, np.float32)
    (mean, var, scale), out = (np.empty(2, np.float32) for _ in range(3)), np.empty_like(x)
    kernels.get(np).channel_normalise(x, None, None, 1e-5, mean, var, scale, out)
    np.testing.assert_array_equal(mean, x[0, :, 0])
    np.testing.assert_array_equal(var, 0)
    np.testing.assert_array_equal(out, 0)


def test_long_planes_are_summed_in_pieces():
    """Sums of 300 000 numbers in single precision, all of about the same size, are right to a few of its digits."""
    rng, k = np.random.default_rng(0), kernels.get(np)
    x = (np.sign(rng.standard_normal((1, 1, 300_000))) * 0.3 + 1).astype(np.float32)
    gy = (rng.random(x.shape) + 3).astype(np.float32)
    mean, var, scale, sums, products = (np.empty(1, np.float32) for _ in range(5))
    k.channel_normalise(x, None, None, 1e-5, mean, var, scale, np.empty_like(x))
    k.channel_products(gy, x, np.zeros(1, np.float32), sums, products)
    x64, gy64 = x.astype(np.float64), gy.astype(np.float64)
    for found, want in ((mean, x64.mean()), (var, x64.var()), (sums, gy64.sum()), (products, (gy64 * x64).sum())):
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_an_infinite_number_has_an_infinite_mean():
    x = np.zeros((1, 2, 40), np.float32)
    x[0, 0, 0] = x[0, 1, 9] = np.inf
    mean, var, scale = (np.empty(2, np.float32) for _ in range(3))
    kernels.get(np).channel_normalise(x, None, None, 1e-5, mean, var, scale, np.empty_like(x))
    np.testing.assert_array_equal(mean, np.inf)
    np.testing.assert_array_equal(var, np.nan)


def test_wrong_arguments_are_refused(backend):
    x, mean = backend.array(np.ones((2, 3, 4))), backend.array(np.ones(3))
    with pytest.raises(OptionError, match="limits alone"):
        backend.kernels.channel_products(x, x, mean, mean, mean, None, (0.0, 1.0))
    with pytest.raises(OptionError, match="wrong order"):
        backend.kernels.channel_normalise(x, None, None, 1e-5, mean, mean, mean, x, (1.0, 0.0))
    with pytest.raises(OptionError, match="wrong order"):
        backend.kernels.channel_scale(x, None, None, None, x, (1.0, 0.0))


@given(
    samples=sizes(0, 3), groups=sizes(1, 3), channels=sizes(1, 19), size=st.sampled_from([1, 1, 2, 17]),
    centre=st.booleans(), weighted=st.booleans(), dtype=reals, seed=seeds,
)  # fmt: skip
def test_rows(backend, samples, groups, channels, size, centre, weighted, dtype, seed):
    """Forward against NumPy, and back against PyTorch's autograd of the same formula."""
    rng, k, rows = np.random.default_rng(seed), backend.kernels, samples * groups
    x, gy = (normal(rng, (rows, channels, size), dtype) for _ in range(2))
    w, b = (normal(rng, groups * channels, dtype) for _ in range(2))
    tx, tw, tb = (torch.tensor(v.astype(np.float64), requires_grad=True) for v in (x, w, b))
    middle = tx.mean((1, 2), keepdim=True) if centre else torch.zeros(rows, 1, 1)
    root = 1 / torch.sqrt(((tx - middle) ** 2).mean((1, 2), keepdim=True) + 0.1)
    unit = ((tx - middle) * root).reshape(samples, groups * channels, size)
    want = (unit * tw[:, None] + tb[:, None] if weighted else unit).reshape(tx.shape)
    at_x, *at_weights = torch.autograd.grad(want, [tx, tw, tb], torch.tensor(gy.astype(np.float64)), allow_unused=True)
    mean, scale, y, gx = (backend.empty(shape, dtype) for shape in (rows, rows, x.shape, x.shape))
    on_x, on_gy, on_w, on_b = map(backend.array, (x, gy, w, b))
    weight, bias = (on_w, on_b) if weighted else (None, None)
    k.row_normalise(on_x, weight, bias, 0.1, centre, mean, scale, y)
    k.row_back(on_gy, on_x, weight, centre, mean, scale, gx)
    sums, products = backend.empty(len(w), dtype), backend.empty(len(w), dtype)
    k.row_products(on_gy, on_x, mean, scale, sums, products)
    found = [mean, scale, y, gx]
    wanted = [middle.reshape(-1), root.reshape(-1), want, at_x]
    if weighted:
        found, wanted = [*found, products, sums], [*wanted, *at_weights]
    for got, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(backend.numpy(got), other.detach().numpy(), **tolerance(dtype, 10))


@pytest.mark.parametrize("power", [-100, -66, 63, 100])
@given(size=st.sampled_from([1, 17]), centre=st.booleans(), dtype=reals, seed=seeds)
def test_rows_whose_squares_leave_the_range(backend, power, size, centre, dtype, seed):
    """Without an eps, rows times a power of two have the same output, and the gradient divided by it."""
    rng, k, real = np.random.default_rng(seed), backend.kernels, dtype.type
    times = real(2) ** real(power * (1 if dtype == np.float32 else 8))
    x, gy = (normal(rng, (3, 5, size), dtype) for _ in range(2))
    w, found = backend.array(normal(rng, 5, dtype)), []
    for factor in (real(1), times):
        mean, scale, y, gx = (backend.empty(shape, dtype) for shape in (3, 3, x.shape, x.shape))
        sums, products = backend.empty(5, dtype), backend.empty(5, dtype)
        on_x, on_gy = backend.array(x * factor), backend.array(gy)
        k.row_normalise(on_x, w, w, 0.0, centre, mean, scale, y)
        k.row_back(on_gy, on_x, w, centre, mean, scale, gx)
        k.row_products(on_gy, on_x, mean, scale, sums, products)
        arrays = (backend.numpy(array) for array in (mean, scale, y, gx, products))
        found.append([array * f for array, f in zip(arrays, (1 / factor, factor, 1, factor, 1), strict=True)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, **tolerance(dtype, 10))


def test_rows_refuse_weights_that_do_not_fit(backend):
    x, one, two = (backend.array(np.ones(shape)) for shape in ((2, 3, 1), 2, 4))
    with pytest.raises(ShapeError, match="weights do not fit"):
        backend.kernels.row_normalise(x, two, None, 0.1, True, one, one, x)
