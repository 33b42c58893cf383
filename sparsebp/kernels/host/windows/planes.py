"""The gradient at the weights of 1×1 convolutions: the inner products of the planes of two arrays.

Both arrays have the elements that a sum goes over side by side, so whole vectors are multiplied as they lie in memory:
a BLAS would pack them first, and several samples of small planes had to be gathered before. Tiles are of four by four
planes, over so many samples that what lies in the lanes is seldom added up. A part has planes of the larger array;
those of the smaller one pass by from the second cache.
"""

from __future__ import annotations

from math import prod

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_APART, INNER_JIT, JIT, span
from sparsebp.kernels.host.engine.shuffles import high_in_turn, low_in_turn
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    device,
    fma,
    lanes,
    load,
    pointer,
    store,
    zeros,
)
from sparsebp.kernels.host.engine.team import parallel, team_for

_TILE, _LANES = 4, 16
_TERMS = 512
"""Of each inner product, before its lanes are added up: four planes of them fill a quarter of a first cache."""
_PARTS = 8
_LEAST_SIZE = 64
"""Of a plane: smaller ones, far apart from sample to sample, share sets of the first cache, and are better packed."""


def fits(y: Array, x: Array) -> bool:
    """Whether planes are whole vectors of 16 numbers, and several: a tile stays in the 32 registers that such have."""
    size = prod(x.shape[2:])
    return VECTOR_BYTES // x.itemsize == _LANES and size >= _LEAST_SIZE and size % _LANES == 0


def correlate(y: Array, x: Array, out: Array) -> None:
    """Write ``out[r, c] = Σ y[b, r] · x[b, c]`` over samples and the elements of planes; out (rows, channels, …)."""
    batch, rows, channels = len(x), y.shape[1], x.shape[1]
    left, right = y.reshape(batch, rows, -1), x.reshape(batch, channels, -1)
    apart = channels, 1
    if rows < channels:
        left, right, apart = right, left, (1, channels)
    parts = min(_PARTS, -(-left.shape[1] // _TILE))
    _correlate(team_for(parts, y.size * channels // 8), parts, left, right, *apart, out.reshape(-1))


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _correlate(part, parts, left, right, down, across, out):
    """Run a part of the planes of `left`."""
    low, high = span(part, parts, (left.shape[1] + 3) // 4)
    room = np.empty(2 * lanes(pointer(left)), left.dtype)
    _correlate_planes(low * 4, min(high * 4, left.shape[1]), left, right, down, across, room, out)


@numba.njit(**INNER_JIT)
def _correlate_planes(low, high, left, right, down, across, room, out):
    batch, rows, size = left.shape
    columns, block, place = right.shape[1], max(1, _TERMS // size), aligned_pointer(room)
    for first in range(0, batch, block):
        samples = min(block, batch - first)
        for row in range(low, high, 4):
            a = advance(pointer(left), (first * rows + row) * size)
            for column in range(0, columns, 4):
                b = advance(pointer(right), (first * columns + column) * size)
                high_row, wide = min(high - row, 4), min(columns - column, 4)
                _multiply_tile(a, high_row, rows * size, b, wide, columns * size, samples, size, place)
                target = advance(pointer(out), row * down + column * across)
                _add_tile(place, high_row, wide, down, across, first == 0, target)


@device
def _halved(a, b):
    """Return a vector with sums of two lanes each of `a` and of `b` in turn."""
    return low_in_turn(a, b) + high_in_turn(a, b)


@numba.njit(**INNER_APART)
def _multiply_tile(a, rows, a_apart, b, columns, b_apart, samples, size, out):
    """Write the 16 inner products of four planes and four planes of so many samples; those missing are the last one's.

    In the end each vector is added to another one, half by half, until all lanes of 16 are one number each.
    """
    step = lanes(a)
    a1, a2, a3 = min(1, rows - 1) * size, min(2, rows - 1) * size, min(3, rows - 1) * size
    b1, b2, b3 = min(1, columns - 1) * size, min(2, columns - 1) * size, min(3, columns - 1) * size
    c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = zeros(a)
    d0 = d1 = d2 = d3 = d4 = d5 = d6 = d7 = zeros(a)
    for sample in range(samples):
        left, right = advance(a, sample * a_apart), advance(b, sample * b_apart)
        for i in range(0, size, step):
            w, x, y, z = load(right, i), load(right, b1 + i), load(right, b2 + i), load(right, b3 + i)
            v = load(left, i)
            c0, c1, c2, c3 = fma(v, w, c0), fma(v, x, c1), fma(v, y, c2), fma(v, z, c3)
            v = load(left, a1 + i)
            c4, c5, c6, c7 = fma(v, w, c4), fma(v, x, c5), fma(v, y, c6), fma(v, z, c7)
            v = load(left, a2 + i)
            d0, d1, d2, d3 = fma(v, w, d0), fma(v, x, d1), fma(v, y, d2), fma(v, z, d3)
            v = load(left, a3 + i)
            d4, d5, d6, d7 = fma(v, w, d4), fma(v, x, d5), fma(v, y, d6), fma(v, z, d7)
    c0, c1, c2, c3 = _halved(c0, d0), _halved(c1, d1), _halved(c2, d2), _halved(c3, d3)
    c4, c5, c6, c7 = _halved(c4, d4), _halved(c5, d5), _halved(c6, d6), _halved(c7, d7)
    c0, c1, c2, c3 = _halved(c0, c4), _halved(c1, c5), _halved(c2, c6), _halved(c3, c7)
    store(out, 0, _halved(_halved(c0, c2), _halved(c1, c3)))


@numba.njit(**INNER_APART)
def _add_tile(tile, rows, columns, down, across, fresh, out):
    """Write the numbers of a tile, or add them."""
    for row in range(rows):
        for column in range(columns):
            at = row * down + column * across
            out[at] = tile[4 * row + column] if fresh else out[at] + tile[4 * row + column]
