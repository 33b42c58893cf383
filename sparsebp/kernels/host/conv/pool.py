"""Max pooling on the host and its gradient.

The maxima of a line of windows are first taken down every column of the input, and then, for a vector of lines side by
side, over the columns of each window. Places are then numbers of the input's type. Windows with more columns than the
cache has room for, or with more places than float32 holds, are searched tap by tap.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.conv.band import ROWS, WIDEST, turn_in, turn_out
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import (
    advance,
    clear,
    copy,
    filled,
    keep_alive,
    lanes,
    load,
    load_up_to,
    pointer,
    select_winner,
    store,
)
from sparsebp.kernels.host.engine.threads import parallel, team

_TAP, _PLACE = 4, 6
"""About as many multiply-adds take as long as comparing a tap, and as writing an element or reading a window."""
_EXACT = 2**24
"""Whole numbers that float32 holds."""


class MaxPoolKernels:
    """Host side of max pooling in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def max_pool(
        self, x: Array, rows: Array, columns: Array, kernel: tuple[int, ...], dilation: tuple[int, ...], y: Array,
        winner: Array,
    ) -> None:  # fmt: skip
        """The maximum of every window and its place."""
        if y.size == 0:
            return
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
    low, high = span(part, parts, planes * out_h)
    step, chunks = lanes(pointer(x)), max(out_w // ROWS, 1)
    reads, wide = np.empty((chunks, 2), np.int64), 0
    for chunk in range(chunks):
        begin, end = span(chunk, chunks, out_w)
        first, last = columns[begin, 0] + columns[begin, 1] * dilation[1], np.int64(0)
        for o in range(begin, end):
            first = min(first, columns[o, 0] + columns[o, 1] * dilation[1])
            last = max(last, columns[o, 0] + (columns[o, 2] - 1) * dilation[1] + 1)
        reads[chunk, 0], reads[chunk, 1] = first, last
        wide = max(wide, last - first + step)
    size, held = wide * step, 2 * ROWS * step
    by_taps = wide > WIDEST or kernel[0] * kernel[1] > _EXACT
    room = np.zeros(0 if by_taps else 4 * (size + held), x.dtype)
    best, top = pointer(room), advance(pointer(room), 4 * size)
    places, values, ways = advance(best, size), advance(best, 2 * size), advance(best, 3 * size)
    won, tops, wons = advance(top, held), advance(top, 2 * held), advance(top, 3 * held)
    if by_taps:
        for line in range(low, high):
            plane, oh = divmod(line, out_h)
            here, top = advance(pointer(x), plane * height * width), advance(pointer(y), line * out_w)
            _line(here, width, rows, oh, columns, kernel, dilation, top, advance(pointer(winner), line * out_w))
    else:
        for line in range(low, high, step):
            n = min(step, high - line)
            for chunk in range(chunks):
                begin, end = span(chunk, chunks, out_w)
                count, at, read = end - begin, reads[chunk, 0], reads[chunk, 1] - reads[chunk, 0]
                for i in range(n):
                    plane, oh = divmod(line + i, out_h)
                    start, first, last = rows[oh, 0], rows[oh, 1], rows[oh, 2]
                    here = advance(pointer(x), (plane * height + start + first * dilation[0]) * width + at)
                    apart, to = dilation[0] * width, i * wide
                    _down(here, read, apart, first, last, kernel[1], advance(best, to), advance(places, to))
                turn_in(best, step, wide, read, values)
                turn_in(places, step, wide, read, ways)
                _across(values, ways, columns, begin, end, at, dilation[1], top, won)
                turn_out(top, step, count, count, tops)
                turn_out(won, step, count, count, wons)
                for i in range(n):
                    to, source = (line + i) * out_w + begin, advance(wons, i * count)
                    copy(advance(pointer(y), to), advance(tops, i * count), count)
                    target = advance(pointer(winner), to)
                    for o in range(count):
                        target[o] = np.int32(source[o])
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _line(x, width, rows, oh, columns, kernel, dilation, top, winner):
    """Write the maximum of each window of a line, and its place."""
    top_row, bottom = rows[oh, 1], rows[oh, 2]
    for o in range(len(columns)):
        start, first, last = columns[o, 0], columns[o, 1], columns[o, 2]
        here = advance(x, (rows[oh, 0] + top_row * dilation[0]) * width + start)
        value, place = here[first * dilation[1]], top_row * kernel[1] + first
        for down in range(top_row, bottom):
            for across in range(first, last):
                other = here[across * dilation[1]]
                if other > value or np.isnan(other):
                    value, place = other, down * kernel[1] + across
            here = advance(here, dilation[0] * width)
        top[o], winner[o] = value, place


@numba.njit(**INNER_JIT)
def _down(x, width, apart, first, last, columns, best, places):
    """Write the maximum of each column over some taps, and its place in a window."""
    step = lanes(x)
    for at in range(0, width, step):
        n = width - at
        top, place = load_up_to(x, at, n), filled(x, first * columns)
        for tap in range(first + 1, last):
            value, here = load_up_to(x, (tap - first) * apart + at, n), filled(x, tap * columns)
            top, place = (
                select_winner(value, here, top, place, value, top),
                select_winner(value, here, top, place, here, place),
            )
        store(best, at, top)
        store(places, at, place)


@numba.njit(**INNER_JIT)
def _across(best, places, columns, begin, end, start, dilation, top, winner):
    """Write the maximum of each window of a vector of lines, and its place; `start` is the first column in memory."""
    step = lanes(best)
    for o in range(begin, end):
        first, last = columns[o, 1], columns[o, 2]
        at = (columns[o, 0] + first * dilation - start) * step
        value, place = load(best, at), load(places, at) + filled(places, first)
        for tap in range(first + 1, last):
            at += dilation * step
            other, there = load(best, at), load(places, at) + filled(places, tap)
            value, place = (
                select_winner(other, there, value, place, other, value),
                select_winner(other, there, value, place, there, place),
            )
        store(top, (o - begin) * step, value)
        store(winner, (o - begin) * step, place)


@parallel(**SERIAL)
def _max_pool_grad(part, parts, gy, winner, rows, columns, kernel, dilation, out):
    planes, height, width = out.shape
    _, out_h, out_w = gy.shape
    low, high = span(part, parts, planes)
    taps = kernel[0] * kernel[1]
    ways = np.empty((taps, 2), np.int64)  # from a window's start to each of its places
    for place in range(taps):
        ways[place, 0], ways[place, 1] = place // kernel[1] * dilation[0], place % kernel[1] * dilation[1]
    for plane in range(low, high):
        target = advance(pointer(out), plane * height * width)
        clear(target, height * width)
        for oh in range(out_h):
            at, start = (plane * out_h + oh) * out_w, rows[oh, 0]
            gradient, place = advance(pointer(gy), at), advance(pointer(winner), at)
            for o in range(out_w):
                won = np.uint64(place[o])
                if won < taps:
                    h, w = start + ways[won, 0], columns[o, 0] + ways[won, 1]
                    if h >= 0 and h < height and w >= 0 and w < width:
                        target[h * width + w] += gradient[o]
