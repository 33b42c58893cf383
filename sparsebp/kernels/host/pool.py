"""Max pooling on the host and its gradient: a window's taps are compared while its winner is in a register."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import advance, clear, pointer
from sparsebp.kernels.host.engine.threads import parallel, team

_TAP, _PLACE = 12, 6
"""About as many multiply-adds take as long as comparing a tap, and as writing an element or reading a window."""


class MaxPoolKernels:
    """Host side of max pooling in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def max_pool(
        self, x: Array, kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...],
        dilation: tuple[int, ...], y: Array, winner: Array,
    ) -> None:  # fmt: skip
        """The maximum of every window and its place."""
        parts = min(parts_for(_TAP * y.size * kernel[0] * kernel[1]), max(len(x), 1))
        if _in_pairs(kernel, stride, before, dilation, x, y):
            _max_of_pairs(team(parts), parts, x, y, winner)
        else:
            _max_pool(team(parts), parts, x, kernel, stride, before, dilation, y, winner)

    def max_pool_grad(
        self, gy: Array, winner: Array, kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...],
        dilation: tuple[int, ...], out: Array,
    ) -> None:  # fmt: skip
        """Every window's gradient goes to its maximum, in the order of the windows."""
        parts = min(parts_for(_PLACE * (out.size + 2 * gy.size)), max(len(gy), 1))
        if _in_pairs(kernel, stride, before, dilation, out, gy):
            _grad_of_pairs(team(parts), parts, gy, winner, out)
        else:
            _max_pool_grad(team(parts), parts, gy, winner, kernel, stride, before, dilation, out)


def _in_pairs(
    kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...], dilation: tuple[int, ...],
    x: Array, y: Array,
) -> bool:  # fmt: skip
    """Whether windows are 2 by 2, side by side, and inside the input: the common case, which has a loop in vectors."""
    options = kernel, stride, tuple(before), dilation
    inside = 2 * y.shape[1] <= x.shape[1] and 2 * y.shape[2] <= x.shape[2]
    return options == ((2, 2), (2, 2), (0, 0), (1, 1)) and inside


# The functions below are compiled: their arguments are arrays, tuples of sizes and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _taps(start, dilation, taps, length):
    """Return the first tap that lies in the input, and the one behind the last, of a window that begins at `start`."""
    low = max(0, -(start // dilation))
    return low, max(low, min(taps, (length - 1 - start) // dilation + 1))


@parallel(**SERIAL)
def _max_pool(part, parts, x, kernel, stride, before, dilation, y, winner):
    planes, height, width = x.shape
    _, out_h, out_w = y.shape
    low, high = span(part, parts, planes)
    for plane in range(low, high):
        for oh in range(out_h):
            h = oh * stride[0] - before[0]
            low_h, high_h = _taps(h, dilation[0], kernel[0], height)
            at = (plane * out_h + oh) * out_w
            top, place = advance(pointer(y), at), advance(pointer(winner), at)
            line = advance(pointer(x), (plane * height + h + low_h * dilation[0]) * width)
            for o in range(out_w):
                w = o * stride[1] - before[1]
                low_w, high_w = 0, kernel[1]
                if w < 0 or w + (kernel[1] - 1) * dilation[1] >= width:  # only there: divisions take as long as a tap
                    low_w, high_w = _taps(w, dilation[1], kernel[1], width)
                row = w
                best, won = line[row + low_w * dilation[1]], low_h * kernel[1] + low_w
                for kh in range(low_h, high_h):
                    for kw in range(low_w, high_w):
                        value = line[row + kw * dilation[1]]
                        better = value > best or np.isnan(value)  # so the last of several NaN, as in PyTorch
                        best = value if better else best
                        won = kh * kernel[1] + kw if better else won
                    row += dilation[0] * width
                top[o], place[o] = best, won


@parallel(**SERIAL)
def _max_pool_grad(part, parts, gy, winner, kernel, stride, before, dilation, out):
    planes, height, width = out.shape
    _, out_h, out_w = gy.shape
    low, high = span(part, parts, planes)
    for plane in range(low, high):
        target = advance(pointer(out), plane * height * width)
        clear(target, height * width)
        for oh in range(out_h):
            at = (plane * out_h + oh) * out_w
            gradient, place = advance(pointer(gy), at), advance(pointer(winner), at)
            for o in range(out_w):
                kh, kw = divmod(np.int64(place[o]), kernel[1])
                h = oh * stride[0] + kh * dilation[0] - before[0]
                w = o * stride[1] + kw * dilation[1] - before[1]
                if h >= 0 and h < height and w >= 0 and w < width:
                    target[h * width + w] += gradient[o]


@numba.njit(**INNER_SERIAL)
def _pairs(first, second, n, top, place):
    """Write a row's maxima and their places without branches, and say whether there was no NaN (nor ∞ - ∞)."""
    fine = True
    for o in range(n):
        a, b, c, d = first[2 * o], first[2 * o + 1], second[2 * o], second[2 * o + 1]
        upper, lower = b if b > a else a, d if d > c else c
        right, lower_right, down = np.int32(b > a), np.int32(d > c), np.int32(lower > upper)  # the first maximum
        top[o] = lower if lower > upper else upper
        place[o] = right + down * (2 + lower_right - right)
        fine &= not np.isnan((a + b) + (c + d))
    return fine


@numba.njit(**INNER_SERIAL)
def _pairs_with_nan(first, second, n, top, place):
    """The same for a row with NaN: of several the last, as in PyTorch."""
    for o in range(n):
        best, won = first[2 * o], 0
        for tap in range(1, 4):
            value = second[2 * o + tap - 2] if tap > 1 else first[2 * o + 1]
            if value > best or np.isnan(value):
                best, won = value, tap
        top[o], place[o] = best, won


@parallel(**SERIAL)
def _max_of_pairs(part, parts, x, y, winner):
    planes, height, width = x.shape
    _, out_h, out_w = y.shape
    low, high = span(part, parts, planes)
    for plane in range(low, high):
        for oh in range(out_h):
            first, at = advance(pointer(x), (plane * height + 2 * oh) * width), (plane * out_h + oh) * out_w
            second, top, place = advance(first, width), advance(pointer(y), at), advance(pointer(winner), at)
            if not _pairs(first, second, out_w, top, place):
                _pairs_with_nan(first, second, out_w, top, place)


@parallel(**SERIAL)
def _grad_of_pairs(part, parts, gy, winner, out):
    planes, height, width = out.shape
    _, out_h, out_w = gy.shape
    low, high = span(part, parts, planes)
    zero = out.dtype.type(0)
    for plane in range(low, high):
        for oh in range(out_h):
            at, first = (plane * out_h + oh) * out_w, advance(pointer(out), (plane * height + 2 * oh) * width)
            gradient, place, second = advance(pointer(gy), at), advance(pointer(winner), at), advance(first, width)
            for o in range(out_w):  # without branches, that nobody could predict
                won = np.int64(place[o]) & 3
                first[2 * o], first[2 * o + 1], second[2 * o], second[2 * o + 1] = zero, zero, zero, zero
                first[(won >> 1) * width + 2 * o + (won & 1)] = gradient[o]
            if 2 * out_w < width:
                rest = 2 * out_w
                clear(advance(first, rest), width - rest)
                clear(advance(second, rest), width - rest)
        if 2 * out_h < height:
            clear(advance(pointer(out), (plane * height + 2 * out_h) * width), (height - 2 * out_h) * width)
