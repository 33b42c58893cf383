"""The gradient at the weights of convolutions with few output channels and no padding: these in the lanes of a vector.

The gradient at the output of a sample is turned, so that the channels at one place stand side by side. Every weight's
numbers for all of them are then one vector of sums, and every element of the input is read as often as a window meets
it: there are neither columns nor packed matrices, which thin products do not pay. Samples have sums of their own first.
"""

from __future__ import annotations

from math import prod

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_APART, INNER_JIT, JIT, span
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    clear,
    fma,
    lanes,
    load,
    pointer,
    store,
    zeros,
)
from sparsebp.kernels.host.engine.team import parallel, team_for
from sparsebp.kernels.host.windows.abreast import contiguous, turn_in
from sparsebp.kernels.host.windows.direct import places_of

Axes = tuple[int, ...]

_TILE = 12
"""Weights whose sums stay in registers."""
_PARTS = 4
_MOST_BYTES = 1 << 17
"""Of a sample of either array: they are read once for every tile."""


def fits(weight: Array, before: Axes, groups: int, x: Array, y: Array) -> bool:
    """Whether the output channels fill most of one vector, there is no padding, and a sample stays in a cache."""
    step, rows, taps = VECTOR_BYTES // x.itemsize, len(weight), prod(weight.shape[2:])
    filled = step in (8, 16) and 3 * step <= 4 * rows <= 4 * step
    small = max(x[:1].nbytes, y[:1].nbytes * step // max(rows, 1)) <= _MOST_BYTES
    return filled and small and groups == 1 and taps > 1 and before == (0, 0, 0)


def correlate(y: Array, x: Array, stride: Axes, dilation: Axes, out: Array) -> None:
    """Write the gradient at the weights (rows, channels, *kernel), all on three axes."""
    batch, rows, outputs, step = len(x), len(out), prod(y.shape[2:]), VECTOR_BYTES // x.itemsize
    starts, steps, width = places_of(x.shape[1], x.shape[2:], out.shape[2:], stride, dilation, y.shape[2:])
    along = np.arange(width) * stride[2]
    windows, tiles = (starts[:, None] + along).reshape(-1), -(-len(steps) // _TILE)
    behind = np.concatenate([steps, np.full(tiles * _TILE - len(steps), steps[-1])])
    sums = np.empty((len(behind), step), x.dtype)
    parts = min(_PARTS, tiles)
    args = y.reshape(batch, rows, outputs), x.reshape(batch, -1), windows, behind, contiguous(outputs, step), sums
    _correlate(team_for(parts, y.size * len(steps) // 8), parts, *args)
    out.reshape(rows, -1)[...] = sums[: len(steps), :rows].T


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _correlate(part, parts, y, x, windows, steps, rows, sums):
    """Run a part of the tiles."""
    low, high = span(part, parts, len(steps) // 12)
    step = lanes(pointer(x))
    turned, room = np.empty((len(rows) + 1) * step, x.dtype), np.empty((step + 1) * step, x.dtype)
    _correlate_tiles(low * 12, high * 12, y, x, windows, steps, rows, turned, room, sums)


@numba.njit(**INNER_JIT)
def _correlate_tiles(low, high, y, x, windows, steps, rows, turned, room, sums):
    batch, channels, outputs = y.shape
    step, slopes, place = sums.shape[1], aligned_pointer(turned), aligned_pointer(room)
    clear(advance(pointer(sums), low * step), (high - low) * step)
    for sample in range(batch):
        source = advance(pointer(y), sample * channels * outputs)
        turn_in(source, outputs, channels, outputs, pointer(rows), place, slopes)
        image = advance(pointer(x), sample * x.shape[1])
        for at in range(low, high, 12):
            target = advance(pointer(sums), at * step)
            _add_tile(slopes, image, pointer(windows), outputs, advance(pointer(steps), at), target)


@numba.njit(**INNER_APART)
def _add_tile(y, x, windows, n, steps, sums):
    """Add to 12 vectors the products of `n` vectors with the numbers that each of 12 weights meets."""
    count = lanes(y)
    p0, p1, p2, p3, p4, p5 = steps[0], steps[1], steps[2], steps[3], steps[4], steps[5]
    p6, p7, p8, p9, p10, p11 = steps[6], steps[7], steps[8], steps[9], steps[10], steps[11]
    a = b = c = d = e = f = g = h = i = j = k = m = zeros(y)
    for window in range(n):
        v, met = load(y, window * count), advance(x, windows[window])
        a, b, c = fma(broadcast(met, p0), v, a), fma(broadcast(met, p1), v, b), fma(broadcast(met, p2), v, c)
        d, e, f = fma(broadcast(met, p3), v, d), fma(broadcast(met, p4), v, e), fma(broadcast(met, p5), v, f)
        g, h, i = fma(broadcast(met, p6), v, g), fma(broadcast(met, p7), v, h), fma(broadcast(met, p8), v, i)
        j, k, m = fma(broadcast(met, p9), v, j), fma(broadcast(met, p10), v, k), fma(broadcast(met, p11), v, m)
    store(sums, 0, load(sums, 0) + a)
    store(sums, count, load(sums, count) + b)
    store(sums, 2 * count, load(sums, 2 * count) + c)
    store(sums, 3 * count, load(sums, 3 * count) + d)
    store(sums, 4 * count, load(sums, 4 * count) + e)
    store(sums, 5 * count, load(sums, 5 * count) + f)
    store(sums, 6 * count, load(sums, 6 * count) + g)
    store(sums, 7 * count, load(sums, 7 * count) + h)
    store(sums, 8 * count, load(sums, 8 * count) + i)
    store(sums, 9 * count, load(sums, 9 * count) + j)
    store(sums, 10 * count, load(sums, 10 * count) + k)
    store(sums, 11 * count, load(sums, 11 * count) + m)
