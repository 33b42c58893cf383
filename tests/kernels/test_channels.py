"""Kernels over channels on every backend, against NumPy in double precision."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import kernels
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.core.threads import get_threads, most_threads, serial_kernels, set_threads
from strategies import normal, reals, seeds, sizes, tolerance


@given(batch=sizes(1, 3), channels=sizes(1, 4), size=sizes(1, 40), dtype=reals, seed=seeds)
def test_channels(backend, batch, channels, size, dtype, seed):
    rng, k = np.random.default_rng(seed), backend.kernels
    x, gy = normal(rng, (batch, channels, size), dtype), normal(rng, (batch, channels, size), dtype)
    mean, a, b, c = (normal(rng, channels, dtype) for _ in range(4))
    wide = [v.astype(np.float64)[:, None] for v in (mean, a, b, c)]
    x64, gy64, axes = x.astype(np.float64), gy.astype(np.float64), (0, 2)
    one, other, out = backend.empty(channels, dtype), backend.empty(channels, dtype), backend.empty(x.shape, dtype)
    on = {id(v): backend.array(v) for v in (x, gy, mean, a, b, c)}
    close = tolerance(dtype)

    k.channel_moments(on[id(x)], one, other)
    np.testing.assert_allclose(backend.numpy(one), x64.mean(axes), **close)
    np.testing.assert_allclose(backend.numpy(other), x64.var(axes), **close)
    k.channel_products(on[id(gy)], on[id(x)], on[id(mean)], one, other)
    np.testing.assert_allclose(backend.numpy(one), gy64.sum(axes), **close)
    np.testing.assert_allclose(backend.numpy(other), (gy64 * (x64 - wide[0])).sum(axes), **close)
    k.channel_scale(on[id(x)], on[id(mean)], on[id(a)], on[id(b)], out)
    np.testing.assert_allclose(backend.numpy(out), (x64 - wide[0]) * wide[1] + wide[2], **close)
    k.channel_centre(on[id(gy)], on[id(x)], on[id(mean)], on[id(a)], on[id(b)], on[id(c)], out)
    want = (gy64 - wide[1] - (x64 - wide[0]) * wide[2]) * wide[3]
    np.testing.assert_allclose(backend.numpy(out), want, **close)


@given(channels=sizes(0, 300), weighted=st.booleans(), dtype=reals, seed=seeds)
def test_numbers_of_channels(backend, channels, weighted, dtype, seed):
    """On the host they are bit for bit NumPy's: runs from before and after go the same way."""
    rng, k = np.random.default_rng(seed), backend.kernels
    mean, var, weight, old_mean, old_var = (np.abs(normal(rng, channels, dtype)) for _ in range(5))
    momentum, correction, eps, count = 0.1, 7 / 6, 1e-5, 7
    on = [backend.array(v) for v in (mean, var, weight, old_mean, old_var)]
    made = [backend.empty(channels, dtype) for _ in range(4)]
    k.channel_track(on[0], on[1], momentum, correction, on[3], on[4])
    k.channel_factors(on[1], eps, on[2] if weighted else None, made[0], made[1])
    k.channel_slopes(on[0], on[1], on[2], count, made[2], made[3])
    scale = 1 / np.sqrt(var + eps)
    new_var = var * correction
    want = [
        old_mean * (1 - momentum) + momentum * mean, old_var * (1 - momentum) + momentum * new_var,
        scale, scale * weight if weighted else scale, mean / count, var * weight * weight / count,
    ]  # fmt: skip
    for found, expected in zip([on[3], on[4], *made], want, strict=True):
        assert expected.dtype == dtype
        if backend.name == "host":
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(backend.numpy(found), expected, **tolerance(dtype))


def test_moments_of_values_far_from_zero():
    """The variance is that of the differences from the mean: no digits are lost to the mean's square."""
    x = (1e4 + np.random.default_rng(0).standard_normal((16, 2, 1024))).astype(np.float32)
    mean, var = np.empty(2, np.float32), np.empty(2, np.float32)
    kernels.get(np).channel_moments(x, mean, var)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(var, x.astype(np.float64).var((0, 2)), rtol=1e-4)


def test_wrong_arguments_are_refused(backend):
    x, mean = backend.array(np.ones((2, 3, 4))), backend.array(np.ones(3))
    with pytest.raises(ShapeError, match="var"):
        backend.kernels.channel_moments(x, mean, backend.array(np.ones(2)))
    with pytest.raises(DTypeError, match="factor"):
        backend.kernels.channel_scale(x, mean, backend.array(np.ones(3, np.float32)), mean, x)
    with pytest.raises(ShapeError, match="x has"):
        backend.kernels.channel_products(x, backend.array(np.ones((2, 3, 5))), mean, mean, mean)


def test_the_same_for_any_number_of_threads():
    rng, k, before, found = np.random.default_rng(0), kernels.get(np), get_threads(), []
    x, gy = normal(rng, (9, 37, 999), np.float32), normal(rng, (9, 37, 999), np.float32)

    def run():
        found.append([np.empty(37, np.float32) for _ in range(4)] + [np.empty_like(x), np.empty_like(x)])
        mean, var, sums, products, y, gx = found[-1]
        k.channel_moments(x, mean, var)
        k.channel_products(gy, x, mean, sums, products)
        k.channel_scale(x, mean, var, sums, y)
        k.channel_centre(gy, x, mean, sums, products, var, gx)

    try:
        for threads in {1, most_threads()}:
            set_threads(threads)
            run()
    finally:
        set_threads(before)
    with serial_kernels():
        run()
    for results in found[1:]:
        for ours, theirs in zip(found[0], results, strict=True):
            np.testing.assert_array_equal(ours, theirs)
