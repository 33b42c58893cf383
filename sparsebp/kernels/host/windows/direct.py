"""Convolutions without padding and with stride 1 on the last axis: products of matrices, and no columns.

A BLAS packs both of its operands at every call, which a plane of few elements, or few channels, does not pay. Here only
the windows are packed, straight from the input, in panels of three vectors, each of a row of windows of any sample: a
panel stays in the first or second cache while all rows of the weights go past, and a tile of four rows is computed in
registers and written to the output at once. Every number is one chain of fused multiply-adds along channels and taps,
wherever its vector lies.
"""

from __future__ import annotations

from functools import lru_cache
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
    fma,
    lanes,
    load,
    load_up_to,
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.team import parallel, team_for

_VECTORS = 3
_MOST_BYTES = 1 << 18
"""Of a panel: half of a second cache."""
_LEAST_PARTS, _LEAST_ROWS = 8, 32
"""Parts that are wanted, and rows of one: the panels of few elements are packed for several parts."""

Axes = tuple[int, ...]


def fits(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, x: Array, y: Array) -> bool:
    """Whether `convolve` maps x to y: every window lies in the input, and a panel in a cache."""
    sizes = zip(weight.shape[2:], stride, dilation, x.shape[2:], y.shape[2:], strict=True)
    inside = all((k - 1) * d + (o - 1) * s < n for k, s, d, n, o in sizes)
    small = prod(weight.shape[1:]) * _VECTORS * VECTOR_BYTES <= _MOST_BYTES
    return groups == 1 and stride[2] == 1 and before == (0, 0, 0) and inside and small


def convolve(weight: Array, x: Array, stride: Axes, dilation: Axes, out: Array) -> None:
    """Write the sums of every window's products: weights (out_channels, channels, *kernel), all on three axes."""
    rows, batch = len(weight), len(x)
    starts, steps, width = places_of(x.shape[1], x.shape[2:], weight.shape[2:], stride, dilation, out.shape[2:])
    panels = -(-batch * len(starts) * -(-width // (VECTOR_BYTES // x.itemsize)) // _VECTORS)
    splits = max(1, min(-(-_LEAST_PARTS // panels), rows // _LEAST_ROWS))
    parts = panels * splits
    args = weight.reshape(rows, -1), x.reshape(batch, -1), starts, steps, width, splits, out.reshape(batch, rows, -1)
    _convolve(team_for(parts, out.size * len(steps) // 8), parts, *args)


@lru_cache(maxsize=256)
def places_of(
    channels: int, inputs: Axes, kernel: Axes, stride: Axes, dilation: Axes, outputs: Axes
) -> tuple[Array, Array, int]:
    """Return where rows of windows begin in a sample, how far behind each channel and tap lies, and a row's length."""
    if inputs == outputs:  # one row, whatever the axes
        return np.zeros(1, np.int64), np.arange(channels) * prod(inputs), prod(outputs)
    apart = np.array([inputs[1] * inputs[2], inputs[2], 1])[:, None]
    starts = (np.indices((*outputs[:2], 1)).reshape(3, -1) * np.array(stride)[:, None] * apart).sum(0)
    taps = (np.indices(kernel).reshape(3, -1) * np.array(dilation)[:, None] * apart).sum(0)
    return starts, (np.arange(channels)[:, None] * prod(inputs) + taps).reshape(-1), outputs[2]


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _convolve(part, parts, weight, x, starts, steps, width, splits, out):
    """Run a part: of a panel, one of `splits` parts of the rows."""
    room = np.empty((len(steps) + 1) * 3 * lanes(pointer(x)), x.dtype)
    _convolve_panel(part // splits, part % splits, splits, weight, x, starts, steps, width, room, out)


@numba.njit(**INNER_JIT)
def _place(vector, width, step, x, starts, out):
    """Return where a vector's windows begin, where it goes, and how many they are: none behind the last one."""
    each = (width + step - 1) // step
    there = min(vector, len(x) * len(starts) * each - 1)
    row, at = there // each, there % each * step
    sample, line = row // len(starts), row % len(starts)
    source = sample * x.shape[1] + starts[line] + at
    target = sample * out.shape[1] * out.shape[2] + line * width + at
    return source, target, min(width - at, step) if there == vector else 0


@numba.njit(**INNER_JIT)
def _convolve_panel(number, split, splits, weight, x, starts, steps, width, room, out):
    rows, depth, size, step = len(weight), len(steps), out.shape[2], lanes(pointer(x))
    low, high = span(split, splits, rows)
    panel, origin, target = aligned_pointer(room), pointer(x), advance(pointer(out), low * size)
    p, a, i = _place(number * 3, width, step, x, starts, out)
    q, b, j = _place(number * 3 + 1, width, step, x, starts, out)
    r, c, k = _place(number * 3 + 2, width, step, x, starts, out)
    _pack(advance(origin, p), i, advance(origin, q), j, advance(origin, r), k, pointer(steps), depth, panel)
    _multiply(
        advance(pointer(weight), low * depth), high - low, depth, panel, advance(target, a), i, advance(target, b), j,
        advance(target, c), k, size,
    )  # fmt: skip


@numba.njit(**INNER_APART)
def _pack(a, i, b, j, c, k, steps, depth, panel):
    """Write three columns of vectors, with so many numbers each, side by side."""
    step = lanes(panel)
    if min(i, j, k) == step:
        for at in range(depth):
            place = steps[at]
            store(panel, 0, load(a, place))
            store(panel, step, load(b, place))
            store(panel, 2 * step, load(c, place))
            panel = advance(panel, 3 * step)
        return
    for at in range(depth):
        place = steps[at]
        store(panel, 0, load_up_to(a, place, i))
        store(panel, step, load_up_to(b, place, j))
        store(panel, 2 * step, load_up_to(c, place, k))
        panel = advance(panel, 3 * step)


@numba.njit(**INNER_APART)
def _multiply(weight, rows, depth, panel, a, i, b, j, c, k, apart):
    """Write the products of the rows with the panel to three columns of vectors, with so many numbers each."""
    step, row = lanes(panel), 0
    while row + 4 <= rows:
        w0 = advance(weight, row * depth)
        w1, w2, w3 = advance(w0, depth), advance(w0, 2 * depth), advance(w0, 3 * depth)
        a0 = b0 = c0 = a1 = b1 = c1 = a2 = b2 = c2 = a3 = b3 = c3 = zeros(panel)
        for at in range(depth):
            place = 3 * step * at
            x, y, z = load(panel, place), load(panel, place + step), load(panel, place + 2 * step)
            w = broadcast(w0, at)
            a0, b0, c0 = fma(w, x, a0), fma(w, y, b0), fma(w, z, c0)
            w = broadcast(w1, at)
            a1, b1, c1 = fma(w, x, a1), fma(w, y, b1), fma(w, z, c1)
            w = broadcast(w2, at)
            a2, b2, c2 = fma(w, x, a2), fma(w, y, b2), fma(w, z, c2)
            w = broadcast(w3, at)
            a3, b3, c3 = fma(w, x, a3), fma(w, y, b3), fma(w, z, c3)
        place = row * apart
        _store_row(a, i, b, j, c, k, place, a0, b0, c0)
        _store_row(a, i, b, j, c, k, place + apart, a1, b1, c1)
        _store_row(a, i, b, j, c, k, place + 2 * apart, a2, b2, c2)
        _store_row(a, i, b, j, c, k, place + 3 * apart, a3, b3, c3)
        row += 4
    while row < rows:
        w0 = advance(weight, row * depth)
        a0 = b0 = c0 = zeros(panel)
        for at in range(depth):
            w, place = broadcast(w0, at), 3 * step * at
            a0, b0 = fma(w, load(panel, place), a0), fma(w, load(panel, place + step), b0)
            c0 = fma(w, load(panel, place + 2 * step), c0)
        _store_row(a, i, b, j, c, k, row * apart, a0, b0, c0)
        row += 1


@numba.njit(**INNER_JIT)
def _store_row(a, i, b, j, c, k, place, x, y, z):
    """Store three vectors, with so many numbers each."""
    store_up_to(a, place, x, i)
    store_up_to(b, place, y, j)
    store_up_to(c, place, z, k)
