"""Max pooling on the host and its gradient.

The maxima of a row of windows are first taken down every column of the input, in vectors, and then over the columns of
each window.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import (
    advance,
    clear,
    filled,
    keep_alive,
    lanes,
    load,
    load_n,
    pointer,
    select_winner,
    store,
)
from sparsebp.kernels.host.engine.threads import parallel, team

_TAP, _PLACE = 4, 6
"""About as many multiply-adds take as long as comparing a tap, and as writing an element or reading a window."""


class MaxPoolKernels:
    """Host side of max pooling in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def max_pool(
        self, x: Array, rows: Array, columns: Array, kernel: tuple[int, ...], dilation: tuple[int, ...], y: Array,
        winner: Array,
    ) -> None:  # fmt: skip
        """The maximum of every window and its place."""
        parts = min(parts_for(_TAP * y.size * kernel[0] * kernel[1]), max(len(x), 1))
        _max_pool(team(parts), parts, x, rows, columns, kernel, dilation, y, winner)

    def max_pool_grad(
        self, gy: Array, winner: Array, rows: Array, columns: Array, kernel: tuple[int, ...],
        dilation: tuple[int, ...], out: Array,
    ) -> None:  # fmt: skip
        """Every window's gradient goes to its maximum, in the order of the windows."""
        parts = min(parts_for(_PLACE * (out.size + 2 * gy.size)), max(len(gy), 1))
        _max_pool_grad(team(parts), parts, gy, winner, rows, columns, kernel, dilation, out)


# The functions below are compiled: their arguments are arrays, pointers, tuples of sizes and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _max_pool(part, parts, x, rows, columns, kernel, dilation, y, winner):
    planes, height, width = x.shape
    _, out_h, out_w = y.shape
    low, high = span(part, parts, planes)
    step = lanes(pointer(x))
    room = np.empty(2 * (width + step), x.dtype)
    best, places = pointer(room), advance(pointer(room), width + step)
    for plane in range(low, high):
        for oh in range(out_h):
            start, first, last = rows[oh]
            line = advance(pointer(x), (plane * height + start + first * dilation[0]) * width)
            _down(line, width, dilation[0] * width, first, last, kernel[1], best, places)
            at = (plane * out_h + oh) * out_w
            _across(best, places, columns, dilation[1], advance(pointer(y), at), advance(pointer(winner), at))
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _down(x, width, apart, first, last, columns, best, places):
    """Write the maximum of each column over some taps, and its place in a window; the first wins, of NaN the last."""
    step = lanes(x)
    for at in range(0, width, step):
        n = width - at
        top = load(x, at) if n >= step else load_n(x, at, n)
        place = filled(x, first * columns)
        for tap in range(first + 1, last):
            here = (tap - first) * apart + at
            value = load(x, here) if n >= step else load_n(x, here, n)
            place = select_winner(value, top, filled(x, tap * columns), place)
            top = select_winner(value, top, value, top)
        store(best, at, top)
        store(places, at, place)


@numba.njit(**INNER_JIT)
def _across(best, places, columns, dilation, top, winner):
    """Write the maximum of each window, and its place: the first of all maxima, the last of all NaN."""
    for o in range(len(columns)):
        start, first, last = columns[o, 0], columns[o, 1], columns[o, 2]
        value, place = best[start + first * dilation], np.int32(places[start + first * dilation]) + np.int32(first)
        for tap in range(first + 1, last):
            other, there = best[start + tap * dilation], np.int32(places[start + tap * dilation]) + np.int32(tap)
            nan = other != other
            above = (other > value) | ((other == value) & (there < place))
            better = above | (nan & ((value == value) | (there > place)))
            value, place = other if better else value, there if better else place
        top[o], winner[o] = value, place


@parallel(**SERIAL)
def _max_pool_grad(part, parts, gy, winner, rows, columns, kernel, dilation, out):
    planes, height, width = out.shape
    _, out_h, out_w = gy.shape
    low, high = span(part, parts, planes)
    taps = kernel[0] * kernel[1]
    ways = np.empty(taps, np.int64)  # from a window's start to each of its places
    for place in range(taps):
        ways[place] = place // kernel[1] * dilation[0] * width + place % kernel[1] * dilation[1]
    for plane in range(low, high):
        target = advance(pointer(out), plane * height * width)
        clear(target, height * width)
        for oh in range(out_h):
            at, corner = (plane * out_h + oh) * out_w, rows[oh, 0] * width
            gradient, place = advance(pointer(gy), at), advance(pointer(winner), at)
            for o in range(out_w):
                won = np.uint64(place[o])
                if won < taps:
                    to = corner + columns[o, 0] + ways[won]
                    if to >= 0 and to < height * width:
                        target[to] += gradient[o]
