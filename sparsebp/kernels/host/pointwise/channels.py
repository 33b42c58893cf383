"""Channels' statistics, and maps with a few numbers a channel, on the host: what batch normalisation is made of.

Bound by memory: every kernel reads its arrays once, but for the moments, whose second pass finds a channel in the
cache. Sums over a plane are in the arrays' dtype and in several lanes, sums over planes in double precision.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_SUMS, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import advance, pointer
from sparsebp.kernels.host.engine.team import parallel, team


class ChannelKernels:
    """Host side of the kernels over channels in `sparsebp.kernels.api.Kernels`; shapes are stated there."""

    def channel_moments(self, x: Array, mean: Array, var: Array) -> None:
        """Mean and variance of every channel; parts are of channels."""
        parts = min(parts_for(2 * x.size), max(len(mean), 1))
        _moments(team(parts), parts, x, mean, var)

    def channel_scale(self, x: Array, mean: Array, factor: Array, offset: Array, out: Array) -> None:
        """A linear map for every channel; parts are of planes."""
        planes = x.shape[0] * x.shape[1]
        parts = min(parts_for(x.size), max(planes, 1))
        _scale(team(parts), parts, x, mean, factor, offset, out)

    def channel_products(self, gy: Array, x: Array, mean: Array, sums: Array, products: Array) -> None:
        """Two sums over every channel in one pass; parts are of channels."""
        parts = min(parts_for(2 * x.size), max(len(mean), 1))
        _products(team(parts), parts, gy, x, mean, sums, products)

    def channel_centre(
        self, gy: Array, x: Array, mean: Array, offset: Array, slope: Array, factor: Array, out: Array
    ) -> None:
        """What the statistics take off a gradient; parts are of planes."""
        planes = x.shape[0] * x.shape[1]
        parts = min(parts_for(2 * x.size), max(planes, 1))
        _centre(team(parts), parts, gy, x, mean, offset, slope, factor, out)


# The functions below are compiled: their arguments are arrays and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SUMS)
def _sum(x, n, total):
    """Add `n` numbers to a zero."""
    for i in range(n):
        total += x[i]
    return total


@numba.njit(**INNER_SUMS)
def _squares(x, mean, n, total):
    for i in range(n):
        value = x[i] - mean
        total += value * value
    return total


@numba.njit(**INNER_SUMS)
def _both(gy, x, mean, n, total):
    product = total
    for i in range(n):
        value = gy[i]
        total += value
        product += value * (x[i] - mean)
    return total, product


@parallel(**SERIAL)
def _moments(part, parts, x, mean, var):
    batch, channels, size = x.shape
    low, high = span(part, parts, channels)
    zero, count, means, variances = x.dtype.type(0), np.float64(batch * size), pointer(mean), pointer(var)
    for c in range(low, high):
        total = 0.0
        for b in range(batch):
            total += np.float64(_sum(advance(pointer(x), (b * channels + c) * size), size, zero))
        means[c] = total / count
        total = 0.0
        for b in range(batch):
            total += np.float64(_squares(advance(pointer(x), (b * channels + c) * size), means[c], size, zero))
        variances[c] = total / count


@parallel(**SERIAL)
def _scale(part, parts, x, mean, factor, offset, out):
    batch, channels, size = x.shape
    low, high = span(part, parts, batch * channels)
    for plane in range(low, high):
        c = plane % channels
        m, f, o = pointer(mean)[c], pointer(factor)[c], pointer(offset)[c]
        source, target = advance(pointer(x), plane * size), advance(pointer(out), plane * size)
        for i in range(size):
            target[i] = (source[i] - m) * f + o


@parallel(**SERIAL)
def _products(part, parts, gy, x, mean, sums, products):
    batch, channels, size = x.shape
    low, high = span(part, parts, channels)
    zero = x.dtype.type(0)
    for c in range(low, high):
        total, product = 0.0, 0.0
        for b in range(batch):
            at = (b * channels + c) * size
            one, other = _both(advance(pointer(gy), at), advance(pointer(x), at), pointer(mean)[c], size, zero)
            total += np.float64(one)
            product += np.float64(other)
        pointer(sums)[c], pointer(products)[c] = total, product


@parallel(**SERIAL)
def _centre(part, parts, gy, x, mean, offset, slope, factor, out):
    batch, channels, size = x.shape
    low, high = span(part, parts, batch * channels)
    for plane in range(low, high):
        c = plane % channels
        m, o, s, f = pointer(mean)[c], pointer(offset)[c], pointer(slope)[c], pointer(factor)[c]
        gradient, source = advance(pointer(gy), plane * size), advance(pointer(x), plane * size)
        target = advance(pointer(out), plane * size)
        for i in range(size):
            target[i] = (gradient[i] - o - (source[i] - m) * s) * f
