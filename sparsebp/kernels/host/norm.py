"""Normalisation of rows on the host, forward and back: a row stays in its core's cache between its passes.

Rows are (C, N) numbers, with a weight for each of the C. Where N is 1 loops run along the weights, else along the N.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.simd import advance, fma, keep_alive, lanes, load, pointer, store, zeros
from sparsebp.kernels.host.engine.threads import parallel, team
from sparsebp.kernels.host.pointwise import _both, _scale_plane, _squares, _sum, _total

_MOVED = 6  # a number from memory, and another one back, take about as long as this many multiply-adds
_FAR = (2.0**90, 2.0**700)  # by which float32's and float64's smallest numbers, or largest, get far from the end
_FLUSH = 1024  # numbers that a lane adds up before double precision takes over


class NormKernels:
    """Host side of these kernels in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def row_normalise(
        self, x: Array, weight: Array | None, bias: Array | None, eps: float, centre: bool, mean: Array, scale: Array,
        out: Array,
    ) -> None:  # fmt: skip
        """Statistics of every row, and the row normalised by them; parts are of rows."""
        parts = min(parts_for(3 * _MOVED * x.size), max(len(x), 1))
        weight = np.ones(x.shape[1], x.dtype) if weight is None else weight
        bias = np.zeros(len(weight), x.dtype) if bias is None else bias
        _normalise(team(parts), parts, x, weight, bias, x.dtype.type(eps), centre, mean, scale, out)

    def row_back(
        self, gy: Array, x: Array, weight: Array | None, centre: bool, mean: Array, scale: Array, out: Array
    ) -> None:
        """Two sums over every row, then the gradient; parts are of rows."""
        parts = min(parts_for(3 * _MOVED * x.size), max(len(x), 1))
        weight = np.ones(x.shape[1], x.dtype) if weight is None else weight
        _back(team(parts), parts, gy, x, weight, centre, mean, scale, out)

    def row_products(self, gy: Array, x: Array, mean: Array, scale: Array, sums: Array, products: Array) -> None:
        """Two sums for every weight; parts are of weights."""
        parts = min(parts_for(2 * _MOVED * x.size), max(len(sums) // 16, 1))
        _products(team(parts), parts, gy, x, mean, scale, sums, products)


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_JIT)
def _affine_row(x, mean, scale, weight, bias, size, out):
    """Write ``(x - mean) * scale * weight + bias``."""
    step = lanes(x)
    whole = size // step * step
    for i in range(0, whole, step):
        store(out, i, fma((load(x, i) - mean) * scale, load(weight, i), load(bias, i)))
    for i in range(whole, size):
        out[i] = (x[i] - mean) * scale * weight[i] + bias[i]


@numba.njit(**INNER_APART)
def _weighted_sums(gy, x, weight, mean, size, room):
    """Return the sum of ``gy * weight``, and of its products with the differences from the mean."""
    step, total, product = lanes(x), 0.0, 0.0
    for begin in range(0, size, _FLUSH):
        n = min(size - begin, _FLUSH)
        left, right, factor, whole = advance(gy, begin), advance(x, begin), advance(weight, begin), n // step * step
        a = b = zeros(x)
        for i in range(0, whole, step):
            v = load(left, i) * load(factor, i)
            a, b = a + v, fma(v, load(right, i) - mean, b)
        total += _total(a, room)
        product += _total(b, room)
        for i in range(whole, n):
            value = left[i] * factor[i]
            total += np.float64(value)
            product += np.float64(value * (right[i] - mean))
    return total, product


@numba.njit(**INNER_APART)
def _scale_from(factor, x, mean, eps, size):
    """Return ``1 / sqrt(var + eps)`` of differences times `factor`, whose squares are in the range of their dtype."""
    total = 0.0
    for i in range(size):
        value = (x[i] - mean) * factor
        total += np.float64(value * value)
    return factor / np.sqrt(total / size + np.float64(eps * factor * factor))


@numba.njit(**INNER_JIT)
def _gradient_row(gy, x, weight, mean, scale, offset, slope, size, out):
    """Write ``gy * weight * scale - offset - (x - mean) * scale * slope``."""
    step = lanes(x)
    whole = size // step * step
    for i in range(0, whole, step):
        value = fma((mean - load(x, i)) * scale, slope, load(gy, i) * load(weight, i) * scale - offset)
        store(out, i, value)
    for i in range(whole, size):
        out[i] = gy[i] * weight[i] * scale - offset - (x[i] - mean) * scale * slope


@numba.njit(**INNER_JIT)
def _gradient_plane(gy, x, mean, scale, factor, offset, slope, size, out):
    """Write ``gy * factor - offset - (x - mean) * scale * slope``."""
    step = lanes(x)
    whole = size // step * step
    for i in range(0, whole, step):
        store(out, i, fma((mean - load(x, i)) * scale, slope, load(gy, i) * factor - offset))
    for i in range(whole, size):
        out[i] = gy[i] * factor - offset - (x[i] - mean) * scale * slope


@parallel(**JIT)
def _normalise(part, parts, x, weight, bias, eps, centre, mean, scale, out):
    """Run a part of the rows."""
    rows, channels, size = x.shape
    first, last = span(part, parts, rows)
    room, count = np.empty(lanes(pointer(x)), x.dtype), channels * size
    zero, one = x.dtype.type(0), x.dtype.type(1)
    low, high = x.dtype.type(-np.inf), x.dtype.type(np.inf)
    least = np.finfo(x.dtype).tiny / np.finfo(x.dtype).eps  # of less, squares that are flushed are a part
    far = x.dtype.type(_FAR[x.itemsize // 8])
    for r in range(first, last):
        source, target, own = (
            advance(pointer(x), r * count),
            advance(pointer(out), r * count),
            r * channels % len(weight),
        )
        mean[r] = zero
        if centre:
            origin = source[0] if np.isfinite(source[0]) else zero
            mean[r] = origin + _sum(source, origin, 0, 1, count, pointer(room)) / np.float64(count)
        m = mean[r]
        var = x.dtype.type(_squares(source, m, 0, 1, count, pointer(room)) / np.float64(count))
        found = one / np.sqrt(var + eps)
        if var + eps < least or np.isinf(var):
            found = x.dtype.type(_scale_from(far if var < one else one / far, source, m, eps, count))
        scale[r] = found
        if size == 1:
            _affine_row(source, m, found, advance(pointer(weight), own), advance(pointer(bias), own), count, target)
            continue
        for c in range(channels):
            _scale_plane(source, m, found * weight[own + c], bias[own + c], low, high, size, target)
            source, target = advance(source, size), advance(target, size)
    keep_alive(room)


@parallel(**JIT)
def _back(part, parts, gy, x, weight, centre, mean, scale, out):
    """Run a part of the rows."""
    rows, channels, size = x.shape
    first, last = span(part, parts, rows)
    room, count, zero = np.empty(lanes(pointer(x)), x.dtype), channels * size, x.dtype.type(0)
    for r in range(first, last):
        left, right, target = (
            advance(pointer(gy), r * count),
            advance(pointer(x), r * count),
            advance(pointer(out), r * count),
        )
        own, m, found = r * channels % len(weight), mean[r], scale[r]
        total, product = 0.0, 0.0
        if size == 1:
            total, product = _weighted_sums(left, right, advance(pointer(weight), own), m, count, pointer(room))
        else:
            for c in range(channels):
                sums = _both(advance(left, c * size), advance(right, c * size), left, zero, zero, False, m, zero, 0,
                                 1, size, pointer(room))  # fmt: skip
                total += sums[0] * np.float64(weight[own + c])
                product += sums[1] * np.float64(weight[own + c])
        offset = x.dtype.type(total / count) * found if centre else zero
        slope = x.dtype.type(product / count) * found * found
        if size == 1:
            _gradient_row(left, right, advance(pointer(weight), own), m, found, offset, slope, count, target)
            continue
        for c in range(channels):
            _gradient_plane(left, right, m, found, found * weight[own + c], offset, slope, size, target)
            left, right, target = advance(left, size), advance(right, size), advance(target, size)
    keep_alive(room)


@parallel(**JIT)
def _products(part, parts, gy, x, mean, scale, sums, products):
    """Run a part of the weights: those whose number is that of a row's channel, modulo all of them."""
    rows, channels, size = x.shape
    first, last = span(part, parts, len(sums))
    groups, room, zero = len(sums) // channels, np.empty(lanes(pointer(x)), x.dtype), x.dtype.type(0)
    step = lanes(pointer(x))
    w = first
    while w < last:
        group, channel = w // channels, w % channels
        if size == 1 and channel + step <= channels and w + step <= last:  # a vector of weights, row by row
            for i in range(step):
                sums[w + i] = products[w + i] = zero
            wide, wide_products = np.zeros(step), np.zeros(step)
            a = b = zeros(pointer(x))
            met = 0
            for r in range(group, rows, groups):
                v = load(pointer(gy), r * channels + channel)
                a, b = a + v, fma(v, (load(pointer(x), r * channels + channel) - mean[r]) * scale[r], b)
                met += 1
                if met == 64 or r + groups >= rows:
                    store(pointer(room), 0, a)
                    for i in range(step):
                        wide[i] += np.float64(room[i])
                    store(pointer(room), 0, b)
                    for i in range(step):
                        wide_products[i] += np.float64(room[i])
                    a = b = zeros(pointer(x))
                    met = 0
            for i in range(step):
                sums[w + i], products[w + i] = wide[i], wide_products[i]
            w += step
            continue
        total, product = 0.0, 0.0
        for r in range(group, rows, groups):
            at = (r * channels + channel) * size
            left, right = advance(pointer(gy), at), advance(pointer(x), at)
            found = _both(left, right, left, zero, zero, False, mean[r], zero, 0, 1, size, pointer(room))
            total += found[0]
            product += found[1] * np.float64(scale[r])
        sums[w], products[w] = total, product
        w += 1
    keep_alive(room)
