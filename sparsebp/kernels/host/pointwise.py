"""Kernels of one pass over memory on the host: channels (what batch normalisation is made of), cutting off, the loss.

Bound by memory: every kernel reads its arrays once, but for the moments, whose second pass finds a channel in the
cache. Sums over a plane are in the arrays' dtype and in several lanes, sums over planes in double precision.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_SUMS, JIT, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import advance, pointer
from sparsebp.kernels.host.engine.team import parallel, team

_EXP_WEIGHT = 8  # an exponential costs about as much as this many multiply-adds


class PointwiseKernels:
    """Host side of these kernels in `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

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

    def channel_track(
        self, mean: Array, var: Array, momentum: float, correction: float, running_mean: Array, running_var: Array
    ) -> None:
        """Running statistics, one step on."""
        number = mean.dtype.type
        _track(mean, var, number(momentum), number(1 - momentum), number(correction), running_mean, running_var)

    def channel_factors(self, var: Array, eps: float, weight: Array | None, scale: Array, factor: Array) -> None:
        """What a channel is divided by, inverted, and what it is multiplied with."""
        _factors(var, var.dtype.type(eps), scale if weight is None else weight, weight is not None, scale, factor)

    def channel_slopes(
        self, sums: Array, products: Array, scale: Array, count: int, offset: Array, slope: Array
    ) -> None:
        """Two sums as what `channel_centre` takes."""
        _slopes(sums, products, scale, sums.dtype.type(count), offset, slope)

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """Every element between the limits."""
        parts = parts_for(x.size)
        _clamp(team(parts), parts, x, x.dtype.type(low), x.dtype.type(high), out)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """The gradient where y lies above the lower limit and not above the upper one."""
        parts = parts_for(y.size)
        _clamp_grad(team(parts), parts, gy, y, y.dtype.type(low), y.dtype.type(high), out)

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Loss and gradient of every row. A target outside [0, C) makes its row NaN instead of reading elsewhere."""
        parts = parts_for(logits.size * _EXP_WEIGHT)
        _softmax_cross_entropy(team(parts), parts, logits, target, losses, grad)


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


# Without fused multiply-adds, as NumPy would compute it: what a training run arrives at rests on these numbers.
@numba.njit(**JIT)
def _track(mean, var, momentum, keep, correction, running_mean, running_var):
    for c in range(len(mean)):
        running_mean[c] = running_mean[c] * keep + momentum * mean[c]
        running_var[c] = running_var[c] * keep + momentum * (var[c] * correction)


@numba.njit(**JIT)
def _factors(var, eps, weight, weighted, scale, factor):
    one = var.dtype.type(1)
    for c in range(len(var)):
        found = one / np.sqrt(var[c] + eps)
        scale[c] = found
        factor[c] = found * weight[c] if weighted else found


@numba.njit(**JIT)
def _slopes(sums, products, scale, count, offset, slope):
    for c in range(len(sums)):
        offset[c] = sums[c] / count
        slope[c] = products[c] * scale[c] * scale[c] / count


@parallel(**SERIAL)
def _clamp(part, parts, x, low, high, out):
    start, stop = span(part, parts, len(x))
    source, target = pointer(x), pointer(out)
    for i in range(start, stop):
        value = source[i]
        value = low if value < low else value  # a NaN stays
        target[i] = high if value > high else value


@parallel(**SERIAL)
def _clamp_grad(part, parts, gy, y, low, high, out):
    start, stop = span(part, parts, len(y))
    gradients, values, target = pointer(gy), pointer(y), pointer(out)
    zero = gy.dtype.type(0)
    for i in range(start, stop):
        value, gradient = values[i], gradients[i]
        target[i] = gradient if (value > low) & (value <= high) else zero


@parallel(**SERIAL)
def _softmax_cross_entropy(part, parts, logits, target, losses, grad):
    low, high = span(part, parts, len(logits))
    classes = logits.shape[1]
    zero, one, nan = logits.dtype.type(0), logits.dtype.type(1), logits.dtype.type(np.nan)
    labels, loss = pointer(target), pointer(losses)
    for r in range(low, high):
        row, slope = advance(pointer(logits), r * classes), advance(pointer(grad), r * classes)
        label = labels[r]
        if label < 0 or label >= classes:
            for c in range(classes):
                slope[c] = nan
            loss[r] = nan
            continue
        top = row[0]
        for c in range(classes):
            if not row[c] <= top:  # a NaN becomes the maximum, and so reaches the loss and the gradient
                top = row[c]
        total = zero
        for c in range(classes):
            slope[c] = np.exp(row[c] - top)
            total += slope[c]
        loss[r] = np.log(total) - (row[label] - top)
        for c in range(classes):
            slope[c] /= total
        slope[label] -= one
