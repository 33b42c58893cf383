"""Convolutions whose windows are the elements of the input, one by one: products of matrices, and no columns.

A BLAS packs both of its operands at every call, which a plane of few elements, or few channels, does not pay. Here only
the input is packed, in panels of three vectors, which may be of different samples: one panel stays in the first or
second cache while all rows of the weights go past, and a tile of four rows is computed in registers and written to the
output at once. Every number is one chain of fused multiply-adds along the channels, wherever its vector lies.
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


def fits(weight: Array, stride: Axes, before: Axes, groups: int, x: Array, y: Array) -> bool:
    """Whether `convolve` maps x to y."""
    taps, same = prod(weight.shape[2:]), stride == (1, 1, 1) and before == (0, 0, 0) and x.shape[2:] == y.shape[2:]
    return taps == 1 and same and groups == 1 and x.shape[1] * _VECTORS * VECTOR_BYTES <= _MOST_BYTES


def convolve(weight: Array, x: Array, out: Array) -> None:
    """Write ``out[b] = weight @ x[b]`` for weights (out_channels, channels, 1, 1, 1)."""
    rows, batch, channels = len(weight), len(x), x.shape[1]
    vectors = batch * -(-prod(x.shape[2:]) // (VECTOR_BYTES // x.itemsize))
    panels = -(-vectors // _VECTORS)
    splits = max(1, min(-(-_LEAST_PARTS // panels), rows // _LEAST_ROWS))
    parts = panels * splits
    args = weight.reshape(rows, channels), x.reshape(batch, channels, -1), splits, out.reshape(batch, rows, -1)
    _convolve(team_for(parts, out.size * channels // 8), parts, *args)


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _convolve(part, parts, weight, x, splits, out):
    """Run a part: of a panel, one of `splits` parts of the rows."""
    room = np.empty((x.shape[1] + 1) * 3 * lanes(pointer(x)), x.dtype)
    _convolve_panel(part // splits, part % splits, splits, weight, x, room, out)


@numba.njit(**INNER_JIT)
def _convolve_panel(number, split, splits, weight, x, room, out):
    batch, channels, size = x.shape
    rows, step = len(weight), lanes(pointer(x))
    low, high = span(split, splits, rows)
    each, first = (size + step - 1) // step, number * 3
    panel, origin, target = aligned_pointer(room), pointer(x), pointer(out)
    a, b, c = first, first + 1, first + 2
    p, q, r = a % each * step, b % each * step, c % each * step
    i, j, k = min(size - p, step), min(size - q, step), min(size - r, step)
    if b >= batch * each:
        b, q, j = a, p, 0
    if c >= batch * each:
        c, r, k = a, p, 0
    a, b, c = a // each, b // each, c // each
    _pack(
        advance(origin, a * channels * size + p), i, advance(origin, b * channels * size + q), j,
        advance(origin, c * channels * size + r), k, size, channels, panel,
    )  # fmt: skip
    _multiply(
        advance(pointer(weight), low * channels), high - low, channels, panel,
        advance(target, (a * rows + low) * size + p), i, advance(target, (b * rows + low) * size + q), j,
        advance(target, (c * rows + low) * size + r), k, size,
    )  # fmt: skip


@numba.njit(**INNER_APART)
def _pack(a, i, b, j, c, k, apart, depth, panel):
    """Write three columns of vectors, with so many numbers each, side by side."""
    step = lanes(panel)
    if min(i, j, k) == step:
        for _ in range(depth):
            store(panel, 0, load(a, 0))
            store(panel, step, load(b, 0))
            store(panel, 2 * step, load(c, 0))
            a, b, c, panel = advance(a, apart), advance(b, apart), advance(c, apart), advance(panel, 3 * step)
        return
    for at in range(depth):
        place = at * apart
        store(panel, 3 * at * step, load_up_to(a, place, i))
        store(panel, (3 * at + 1) * step, load_up_to(b, place, j))
        store(panel, (3 * at + 2) * step, load_up_to(c, place, k))


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
