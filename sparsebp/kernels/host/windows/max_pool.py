"""Max pooling on the host and its gradient: a window's taps are compared while its winner is in a register."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for, share
from sparsebp.kernels.host.engine.team import in_parts, team


class MaxPoolKernels:
    """Host side of max pooling in `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def max_pool(
        self, x: Array, kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...],
        dilation: tuple[int, ...], y: Array, winner: Array,
    ) -> None:  # fmt: skip
        """The maximum of every window and its place."""
        parts = min(parts_for(y.size * kernel[0] * kernel[1]), max(len(x), 1))
        _max_pool_parallel(team(parts), parts, x, kernel, stride, before, dilation, y, winner, parts)

    def max_pool_grad(
        self, gy: Array, winner: Array, kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...],
        dilation: tuple[int, ...], out: Array,
    ) -> None:  # fmt: skip
        """Every window's gradient goes to its maximum, in the order of the windows."""
        parts = min(parts_for(out.size + 2 * gy.size), max(len(gy), 1))
        _max_pool_grad_parallel(team(parts), parts, gy, winner, kernel, stride, before, dilation, out, parts)


# The functions below are compiled: their arguments are arrays, tuples of sizes and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _taps(start, dilation, taps, length):
    """Return the first tap that lies in the input, and the one behind the last, of a window that begins at `start`."""
    low = max(0, -(start // dilation))
    return low, max(low, min(taps, (length - 1 - start) // dilation + 1))


@numba.njit(**INNER_SERIAL)
def _max_pool(x, kernel, stride, before, dilation, y, winner, low, high):
    height, width = x.shape[1:]
    out_h, out_w = y.shape[1:]
    flat = x.reshape(x.size)
    for plane in range(low, high):
        for oh in range(out_h):
            h = oh * stride[0] - before[0]
            low_h, high_h = _taps(h, dilation[0], kernel[0], height)
            top, place = y[plane, oh], winner[plane, oh]
            for o in range(out_w):
                w = o * stride[1] - before[1]
                low_w, high_w = _taps(w, dilation[1], kernel[1], width)
                row = (plane * height + h + low_h * dilation[0]) * width + w
                best, won = flat[np.uint64(row + low_w * dilation[1])], low_h * kernel[1] + low_w
                for kh in range(low_h, high_h):
                    for kw in range(low_w, high_w):
                        value = flat[np.uint64(row + kw * dilation[1])]
                        better = value > best or np.isnan(value)  # so the last of several NaN, as in PyTorch
                        best = value if better else best
                        won = kh * kernel[1] + kw if better else won
                    row += dilation[0] * width
                top[np.uint64(o)], place[np.uint64(o)] = best, won


@numba.njit(**INNER_SERIAL)
def _max_pool_part(part, x, kernel, stride, before, dilation, y, winner, parts):
    n = len(x)
    low, high = share(part, parts, n), share(part + 1, parts, n)
    _max_pool(x, kernel, stride, before, dilation, y, winner, low, high)


@numba.njit(**SERIAL)
def _max_pool_parallel(team, parts, *args):
    in_parts(_max_pool_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _max_pool_grad(gy, winner, kernel, stride, before, dilation, out, low, high):
    height, width = out.shape[1:]
    out_h, out_w = gy.shape[1:]
    for plane in range(low, high):
        out[plane] = 0
        for oh in range(out_h):
            for o in range(out_w):
                kh, kw = divmod(np.int64(winner[plane, oh, o]), kernel[1])
                h = oh * stride[0] + kh * dilation[0] - before[0]
                w = o * stride[1] + kw * dilation[1] - before[1]
                if h >= 0 and h < height and w >= 0 and w < width:
                    out[plane, np.uint64(h), np.uint64(w)] += gy[plane, oh, o]


@numba.njit(**INNER_SERIAL)
def _max_pool_grad_part(part, gy, winner, kernel, stride, before, dilation, out, parts):
    n = len(gy)
    low, high = share(part, parts, n), share(part + 1, parts, n)
    _max_pool_grad(gy, winner, kernel, stride, before, dilation, out, low, high)


@numba.njit(**SERIAL)
def _max_pool_grad_parallel(team, parts, *args):
    in_parts(_max_pool_grad_part, team, parts, args)
