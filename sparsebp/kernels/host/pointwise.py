"""Kernels of one pass over memory on the host: cutting off, channels' statistics."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, JIT, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import (
    advance,
    device,
    fma,
    keep_alive,
    lanes,
    load,
    maximum,
    minimum,
    pointer,
    select_positive,
    store,
    where_within,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, split, team

# Kernels over the channels of arrays on the host, for batch normalisation.
#
# Bound by memory: each part has its channels, whose numbers stay in its core's cache from the sums that are taken
# first to the pass that needs them, so that an array is read from memory once in either direction. Sums are in the
# arrays' dtype and in several lanes over `_FLUSH` to `_FLUSH` + `_PIECE` numbers, and over those in double precision. A
# mean is found from the differences from one of the numbers: no digits are lost where all are far from zero, and that
# of equal numbers is that number.

Limits = tuple[float, float] | None

_FLUSH, _PIECE = 1024, 4096
_MOVED = 6  # a number from memory, and another one back, take about as long as this many multiply-adds


class ChannelKernels:
    """Host side of these kernels in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def channel_normalise(
        self, x: Array, weight: Array | None, bias: Array | None, eps: float, mean: Array, var: Array, scale: Array,
        out: Array, limits: Limits = None,
    ) -> None:  # fmt: skip
        """Statistics of every channel, and the channel normalised by them; parts are of channels."""
        parts, number = min(parts_for(2 * _MOVED * x.size), max(len(mean), 1)), x.dtype.type
        args = mean if weight is None else weight, mean if bias is None else bias, weight is not None, bias is not None
        _normalise(team(parts), parts, x, *args, number(eps), *_rounded(limits, number), mean, var, scale, out)

    def channel_back(
        self, gy: Array, x: Array, mean: Array, scale: Array, weight: Array | None, sums: Array, products: Array,
        out: Array, known: bool = False, y: Array | None = None, limits: Limits = None,
    ) -> None:  # fmt: skip
        """Two sums over every channel, unless they are known, then the gradient; parts of channels."""
        parts = min(parts_for(2 * _MOVED * x.size), max(len(mean), 1))
        args = scale if weight is None else weight, weight is not None
        _back(team(parts), parts, gy, x, *_mask(gy, y, limits), mean, scale, *args, known, sums, products, out)

    def channel_products(
        self, gy: Array, x: Array, mean: Array, sums: Array, products: Array, y: Array | None = None,
        limits: Limits = None,
    ) -> None:  # fmt: skip
        """Two sums over every channel in one pass; parts are of channels."""
        parts = min(parts_for(_MOVED * x.size), max(len(mean), 1))
        _products(team(parts), parts, gy, x, *_mask(gy, y, limits), mean, sums, products)

    def channel_scale(
        self, x: Array, mean: Array | None, factor: Array | None, offset: Array | None, out: Array,
        limits: Limits = None,
    ) -> None:  # fmt: skip
        """A linear map for every channel; parts are of planes."""
        planes = x.shape[0] * x.shape[1]
        parts = min(parts_for(_MOVED * x.size), max(planes, 1))
        neutral = (np.zeros, np.ones, np.zeros)  # for a term that is dropped: it changes no number
        terms = [make(x.shape[1], x.dtype) if term is None else term
                 for term, make in zip((mean, factor, offset), neutral, strict=True)]  # fmt: skip
        _scale(team(parts), parts, x, *terms, *_rounded(limits, x.dtype.type), out)

    def channel_slope(self, values: Array, x: Array, weight: Array, out: Array) -> None:
        """Values, times the channel's weight where x is not positive; parts are of planes."""
        planes = x.shape[0] * x.shape[1]
        parts = min(parts_for(_MOVED * x.size), max(planes, 1))
        _slope(team(parts), parts, values, x, weight, out)

    def channel_slope_grad(self, gy: Array, x: Array, out: Array) -> None:
        """A sum for every channel; parts are of channels."""
        parts = min(parts_for(_MOVED * x.size), max(len(out), 1))
        _slope_grad(team(parts), parts, gy, x, out)

    def channel_track(
        self, mean: Array, var: Array, momentum: float, correction: float, running_mean: Array, running_var: Array
    ) -> None:
        """Running statistics, one step on."""
        number = mean.dtype.type
        _track(mean, var, number(momentum), number(1 - momentum), number(correction), running_mean, running_var)

    def channel_factors(self, var: Array, eps: float, weight: Array | None, scale: Array, factor: Array) -> None:
        """Each channel's scale and factor."""
        _factors(var, var.dtype.type(eps), scale if weight is None else weight, weight is not None, scale, factor)


def _mask(gy: Array, y: Array | None, limits: Limits) -> tuple[Array, Any, Any, bool]:
    """Return the mask of a clamped gradient, its limits, and whether there is a mask."""
    return gy if y is None else y, *_rounded(limits, gy.dtype.type), y is not None


def _rounded(limits: Limits, number: Any) -> tuple[Any, Any]:
    """Return limits in a dtype; one beyond its range is infinite, and limits nothing."""
    if limits is None:
        return number(-math.inf), number(math.inf)
    with np.errstate(over="ignore"):
        return number(limits[0]), number(limits[1])


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_JIT)
def _total(vector, room):
    """Return the sum of a vector's lanes in double precision, by way of memory for one vector."""
    store(room, 0, vector)
    total = 0.0
    for lane in range(lanes(room)):
        total += np.float64(room[lane])
    return total


@numba.njit(**INNER_APART)
def _sum(x, origin, apart, batch, size, room):
    """Return the sum of the differences from `origin` of `batch` planes of `size` numbers, `apart` from each other."""
    step, total, met = lanes(x), 0.0, 0
    a = b = c = d = zeros(x)
    for begin in range(0, size, _PIECE):
        n = min(size - begin, _PIECE)
        fours, whole = n // (4 * step) * 4 * step, n // step * step
        for sample in range(batch):
            plane = advance(x, sample * apart + begin)
            for i in range(0, fours, 4 * step):
                a, b = a + (load(plane, i) - origin), b + (load(plane, i + step) - origin)
                c, d = c + (load(plane, i + 2 * step) - origin), d + (load(plane, i + 3 * step) - origin)
            for i in range(fours, whole, step):
                a = a + (load(plane, i) - origin)
            for i in range(whole, n):
                total += np.float64(plane[i] - origin)
            met += n
            if met >= _FLUSH or sample == batch - 1:
                total += _total((a + b) + (c + d), room)
                a = b = c = d = zeros(x)
                met = 0
    return total


@numba.njit(**INNER_APART)
def _squares(x, mean, apart, batch, size, room):
    """Return the sum of the squares of the differences from the mean."""
    step, total, met = lanes(x), 0.0, 0
    a = b = zeros(x)
    for begin in range(0, size, _PIECE):
        n = min(size - begin, _PIECE)
        twos, whole = n // (2 * step) * 2 * step, n // step * step
        for sample in range(batch):
            plane = advance(x, sample * apart + begin)
            for i in range(0, twos, 2 * step):
                v, w = load(plane, i) - mean, load(plane, i + step) - mean
                a, b = fma(v, v, a), fma(w, w, b)
            for i in range(twos, whole, step):
                v = load(plane, i) - mean
                a = fma(v, v, a)
            for i in range(whole, n):
                value = plane[i] - mean
                total += np.float64(value * value)
            met += n
            if met >= _FLUSH or sample == batch - 1:
                total += _total(a + b, room)
                a = b = zeros(x)
                met = 0
    return total


@device
def _counted(gy, y, i, low, high, masked):
    """Return a vector of gradients, with zeros where y is outside the limits; a NaN is not."""
    return where_within(load(y, i), low, high, load(gy, i)) if masked else load(gy, i)


@numba.njit(**INNER_APART)
def _both(gy, x, y, low, high, masked, mean, zero, apart, batch, size, room):
    """Return the sum of the masked gy, and of its products with the differences from the mean."""
    step, total, product, met = lanes(x), 0.0, 0.0, 0
    a = b = c = d = zeros(x)
    for begin in range(0, size, _PIECE):
        n = min(size - begin, _PIECE)
        twos, whole = n // (2 * step) * 2 * step, n // step * step
        for sample in range(batch):
            at = sample * apart + begin
            left, right, mask = advance(gy, at), advance(x, at), advance(y, at)
            for i in range(0, twos, 2 * step):
                v, w = _counted(left, mask, i, low, high, masked), _counted(left, mask, i + step, low, high, masked)
                a, b = a + v, b + w
                c, d = fma(v, load(right, i) - mean, c), fma(w, load(right, i + step) - mean, d)
            for i in range(twos, whole, step):
                v = _counted(left, mask, i, low, high, masked)
                a, c = a + v, fma(v, load(right, i) - mean, c)
            for i in range(whole, n):
                value = zero if masked and ((mask[i] <= low) | (mask[i] > high)) else left[i]
                total += np.float64(value)
                product += np.float64(value * (right[i] - mean))
            met += n
            if met >= _FLUSH or sample == batch - 1:
                total += _total(a + b, room)
                product += _total(c + d, room)
                a = b = c = d = zeros(x)
                met = 0
    return total, product


@numba.njit(**INNER_JIT)
def _scale_plane(x, mean, factor, offset, low, high, size, out):
    """Write ``(x - mean) * factor + offset`` between the limits.

    It is rounded once at the end in whole vectors, and twice behind them; a NaN stays.
    """
    step = lanes(x)
    whole = size // step * step
    for i in range(0, whole, step):
        store(out, i, minimum(high, maximum(low, fma(load(x, i) - mean, factor, offset))))
    for i in range(whole, size):
        value = (x[i] - mean) * factor + offset
        value = low if value < low else value
        out[i] = high if value > high else value


@numba.njit(**INNER_JIT)
def _centre_plane(gy, x, y, low, high, masked, mean, zero, offset, slope, factor, size, out):
    """Write ``(gy - offset - (x - mean) * slope) * factor``, with the masked gy."""
    step = lanes(x)
    whole = size // step * step
    for i in range(0, whole, step):
        value = _counted(gy, y, i, low, high, masked)
        store(out, i, fma(mean - load(x, i), slope, value - offset) * factor)
    for i in range(whole, size):
        value = zero if masked and ((y[i] <= low) | (y[i] > high)) else gy[i]
        out[i] = ((value - offset) - (x[i] - mean) * slope) * factor


@parallel(**JIT)
def _normalise(part, parts, x, weight, bias, weighted, shifted, eps, low, high, mean, var, scale, out):
    """Run a part of the channels."""
    first, last = span(part, parts, x.shape[1])
    room = np.empty(lanes(pointer(x)), x.dtype)
    batch, channels, size = x.shape
    one, zero, count, apart = x.dtype.type(1), x.dtype.type(0), np.float64(batch * size), channels * size
    for c in range(first, last):
        source, target = advance(pointer(x), c * size), advance(pointer(out), c * size)
        origin = source[0] if np.isfinite(source[0]) else zero
        mean[c] = origin + _sum(source, origin, apart, batch, size, pointer(room)) / count
        var[c] = _squares(source, mean[c], apart, batch, size, pointer(room)) / count
        found = one / np.sqrt(var[c] + eps)
        scale[c] = found
        m, factor, offset = mean[c], found * weight[c] if weighted else found, bias[c] if shifted else zero
        for _ in range(batch):
            _scale_plane(source, m, factor, offset, low, high, size, target)
            source, target = advance(source, apart), advance(target, apart)
    keep_alive(room)


@parallel(**JIT)
def _back(part, parts, gy, x, y, low, high, masked, mean, scale, weight, weighted, known, sums, products, out):
    """Run a part of the channels."""
    first, last = span(part, parts, x.shape[1])
    room = np.empty(lanes(pointer(x)), x.dtype)
    batch, channels, size = x.shape
    count, zero, apart = x.dtype.type(batch * size), x.dtype.type(0), channels * size
    for c in range(first, last):
        left, right, mask, target = (
            advance(pointer(gy), c * size),
            advance(pointer(x), c * size),
            advance(pointer(y), c * size),
            advance(pointer(out), c * size),
        )
        m, found = mean[c], scale[c]
        if not known:
            sums[c], products[c] = _both(
                left, right, mask, low, high, masked, m, zero, apart, batch, size, pointer(room)
            )
        offset, slope = sums[c] / count, products[c] * found * found / count
        factor = found * weight[c] if weighted else found
        for _ in range(batch):
            _centre_plane(left, right, mask, low, high, masked, m, zero, offset, slope, factor, size, target)
            left, right, target = advance(left, apart), advance(right, apart), advance(target, apart)
            mask = advance(mask, apart)
    keep_alive(room)


@parallel(**JIT)
def _products(part, parts, gy, x, y, low, high, masked, mean, sums, products):
    """Run a part of the channels."""
    first, last = span(part, parts, x.shape[1])
    room = np.empty(lanes(pointer(x)), x.dtype)
    batch, channels, size = x.shape
    zero, apart = x.dtype.type(0), channels * size
    for c in range(first, last):
        left, right, mask = advance(pointer(gy), c * size), advance(pointer(x), c * size), advance(pointer(y), c * size)
        sums[c], products[c] = _both(
            left, right, mask, low, high, masked, mean[c], zero, apart, batch, size, pointer(room)
        )
    keep_alive(room)


@parallel(**JIT)
def _scale(part, parts, x, mean, factor, offset, least, most, out):
    """Run a part of the planes."""
    batch, channels, size = x.shape
    low, high = span(part, parts, batch * channels)
    for plane in range(low, high):
        c = plane % channels
        source, target = advance(pointer(x), plane * size), advance(pointer(out), plane * size)
        _scale_plane(source, mean[c], factor[c], offset[c], least, most, size, target)


@parallel(**JIT)
def _slope(part, parts, values, x, weight, out):
    """Run a part of the planes."""
    batch, channels, size = x.shape
    low, high = span(part, parts, batch * channels)
    step = lanes(pointer(x))
    whole = size // step * step
    for plane in range(low, high):
        w = weight[plane % channels]
        given, source = advance(pointer(values), plane * size), advance(pointer(x), plane * size)
        target = advance(pointer(out), plane * size)
        for i in range(0, whole, step):
            v = load(given, i)
            store(target, i, select_positive(load(source, i), v, v * w))
        for i in range(whole, size):
            target[i] = given[i] if source[i] > 0 else given[i] * w


@parallel(**JIT)
def _slope_grad(part, parts, gy, x, out):
    """Run a part of the channels."""
    batch, channels, size = x.shape
    first, last = span(part, parts, channels)
    step, room = lanes(pointer(x)), np.empty(lanes(pointer(x)), x.dtype)
    whole = size // step * step
    for c in range(first, last):
        total = 0.0
        for sample in range(batch):
            at = (sample * channels + c) * size
            left, right = advance(pointer(gy), at), advance(pointer(x), at)
            for begin in range(0, whole, _FLUSH):
                a = zeros(right)
                for i in range(begin, min(begin + _FLUSH, whole), step):
                    v = load(right, i)
                    a = a + select_positive(v, 0.0, load(left, i) * v)
                total += _total(a, pointer(room))
            for i in range(whole, size):
                if not right[i] > 0:
                    total += np.float64(left[i] * right[i])
        out[c] = total
    keep_alive(room)


# Without fused multiply-adds, as NumPy computes it: results of training runs depend on these numbers.
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


class PointwiseKernels:
    """Host side of these kernels in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """Every element between the limits."""
        _clamp(*split(_MOVED * x.size), x, x.dtype.type(low), x.dtype.type(high), out)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """The gradient where y lies above the lower limit and not above the upper one, or is NaN."""
        _clamp_grad(*split(_MOVED * y.size), gy, y, y.dtype.type(low), y.dtype.type(high), out)


def add_between(rows: Array, bias: Array, low: float, high: float) -> None:
    """Add `bias` to every row, in place, and clamp the result to the limits; a NaN stays a NaN.

    Parameters
    ----------
    rows
        (R, n), real, C-contiguous.
    bias
        (n,), of that dtype.
    low, high
        The limits; `high` may be infinite.
    """
    _add_between(*split(_MOVED * rows.size), rows, bias, rows.dtype.type(low), rows.dtype.type(high))


# The functions below are compiled: their arguments are arrays and bounds.


@parallel(**SERIAL)
def _clamp(part, parts, x, low, high, out):
    start, stop = span(part, parts, len(x))
    source, target = pointer(x), pointer(out)
    for i in range(start, stop):
        value = source[i]
        value = low if value < low else value  # a NaN stays
        target[i] = high if value > high else value


@parallel(**SERIAL)
def _add_between(part, parts, rows, bias, low, high):
    start, stop = span(part, parts, len(rows))
    for row in range(start, stop):
        target, added = advance(pointer(rows), row * len(bias)), pointer(bias)
        for i in range(len(bias)):
            value = target[i] + added[i]
            value = low if value < low else value  # a NaN stays
            target[i] = high if value > high else value


@parallel(**SERIAL)
def _clamp_grad(part, parts, gy, y, low, high, out):
    start, stop = span(part, parts, len(y))
    gradients, values, target = pointer(gy), pointer(y), pointer(out)
    zero = gy.dtype.type(0)
    for i in range(start, stop):
        value, gradient = values[i], gradients[i]
        target[i] = gradient if (not value <= low) & (not value > high) else zero  # a NaN lets it through
