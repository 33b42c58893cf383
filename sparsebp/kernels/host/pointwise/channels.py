"""Channels' statistics, and maps with a few numbers a channel, on the host: what batch normalisation is made of.

Bound by memory: every kernel reads its arrays once, but for the moments, whose second pass finds a channel in the
cache. Sums over a plane are in the arrays' dtype and in several lanes, sums over planes in double precision.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, INNER_SUMS, SERIAL, parts_for, share
from sparsebp.kernels.host.engine.team import in_parts, team


class ChannelKernels:
    """Host side of the kernels over channels in `sparsebp.kernels.api.Kernels`; shapes are stated there."""

    def channel_moments(self, x: Array, mean: Array, var: Array) -> None:
        """Mean and variance of every channel; parts are of channels."""
        parts = min(parts_for(2 * x.size), max(len(mean), 1))
        _moments_parallel(team(parts), parts, x, mean, var, parts)

    def channel_scale(self, x: Array, mean: Array, factor: Array, offset: Array, out: Array) -> None:
        """A linear map for every channel; parts are of planes."""
        planes = x.shape[0] * x.shape[1]
        parts = min(parts_for(x.size), max(planes, 1))
        _scale_parallel(team(parts), parts, x, mean, factor, offset, out, parts)

    def channel_products(self, gy: Array, x: Array, mean: Array, sums: Array, products: Array) -> None:
        """Two sums over every channel in one pass; parts are of channels."""
        parts = min(parts_for(2 * x.size), max(len(mean), 1))
        _products_parallel(team(parts), parts, gy, x, mean, sums, products, parts)

    def channel_centre(
        self, gy: Array, x: Array, mean: Array, offset: Array, slope: Array, factor: Array, out: Array
    ) -> None:
        """What the statistics take off a gradient; parts are of planes."""
        planes = x.shape[0] * x.shape[1]
        parts = min(parts_for(2 * x.size), max(planes, 1))
        _centre_parallel(team(parts), parts, gy, x, mean, offset, slope, factor, out, parts)


# The functions below are compiled: their arguments are arrays and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SUMS)
def _sum(x, low, high):
    total = x.dtype.type(0)
    for i in range(low, high):
        total += x[np.uint64(i)]
    return total


@numba.njit(**INNER_SUMS)
def _squares(x, mean, low, high):
    total = x.dtype.type(0)
    for i in range(low, high):
        value = x[np.uint64(i)] - mean
        total += value * value
    return total


@numba.njit(**INNER_SUMS)
def _both(gy, x, mean, low, high):
    total, product = gy.dtype.type(0), gy.dtype.type(0)
    for i in range(low, high):
        value = gy[np.uint64(i)]
        total += value
        product += value * (x[np.uint64(i)] - mean)
    return total, product


@numba.njit(**INNER_SERIAL)
def _moments(x, mean, var, low, high):
    batch, channels, size = x.shape
    flat, count = x.reshape(x.size), np.float64(batch * size)
    for c in range(low, high):
        total = 0.0
        for b in range(batch):
            at = (b * channels + c) * size
            total += np.float64(_sum(flat, at, at + size))
        mean[c] = total / count
        total = 0.0
        for b in range(batch):
            at = (b * channels + c) * size
            total += np.float64(_squares(flat, mean[c], at, at + size))
        var[c] = total / count


@numba.njit(**INNER_SERIAL)
def _moments_part(part, x, mean, var, parts):
    n = len(mean)
    _moments(x, mean, var, share(part, parts, n), share(part + 1, parts, n))


@numba.njit(**SERIAL)
def _moments_parallel(team, parts, *args):
    in_parts(_moments_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _scale(x, mean, factor, offset, out, low, high):
    channels, size = x.shape[1:]
    flat, flat_out = x.reshape(x.size), out.reshape(out.size)
    for plane in range(low, high):
        c = plane % channels
        m, f, o = mean[c], factor[c], offset[c]
        for i in range(plane * size, (plane + 1) * size):
            flat_out[np.uint64(i)] = (flat[np.uint64(i)] - m) * f + o


@numba.njit(**INNER_SERIAL)
def _scale_part(part, x, mean, factor, offset, out, parts):
    planes = x.shape[0] * x.shape[1]
    _scale(x, mean, factor, offset, out, share(part, parts, planes), share(part + 1, parts, planes))


@numba.njit(**SERIAL)
def _scale_parallel(team, parts, *args):
    in_parts(_scale_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _products(gy, x, mean, sums, products, low, high):
    batch, channels, size = x.shape
    flat, flat_gy = x.reshape(x.size), gy.reshape(gy.size)
    for c in range(low, high):
        total, product = 0.0, 0.0
        for b in range(batch):
            at = (b * channels + c) * size
            one, other = _both(flat_gy, flat, mean[c], at, at + size)
            total += np.float64(one)
            product += np.float64(other)
        sums[c], products[c] = total, product


@numba.njit(**INNER_SERIAL)
def _products_part(part, gy, x, mean, sums, products, parts):
    n = len(mean)
    _products(gy, x, mean, sums, products, share(part, parts, n), share(part + 1, parts, n))


@numba.njit(**SERIAL)
def _products_parallel(team, parts, *args):
    in_parts(_products_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _centre(gy, x, mean, offset, slope, factor, out, low, high):
    channels, size = x.shape[1:]
    flat, flat_gy, flat_out = x.reshape(x.size), gy.reshape(gy.size), out.reshape(out.size)
    for plane in range(low, high):
        c = plane % channels
        m, o, s, f = mean[c], offset[c], slope[c], factor[c]
        for i in range(plane * size, (plane + 1) * size):
            flat_out[np.uint64(i)] = (flat_gy[np.uint64(i)] - o - (flat[np.uint64(i)] - m) * s) * f


@numba.njit(**INNER_SERIAL)
def _centre_part(part, gy, x, mean, offset, slope, factor, out, parts):
    planes = x.shape[0] * x.shape[1]
    low, high = share(part, parts, planes), share(part + 1, parts, planes)
    _centre(gy, x, mean, offset, slope, factor, out, low, high)


@numba.njit(**SERIAL)
def _centre_parallel(team, parts, *args):
    in_parts(_centre_part, team, parts, args)
