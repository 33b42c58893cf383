"""Sparse products entry by entry of C, on the host: every entry is summed in a register from the list of its products.

For C with many products an entry and for short rows of B: nothing is added to memory, no loop is as short as a row of
B, and one word tells both entries that a product multiplies. A branch that is guessed wrong costs as much as ten
products, so without a batch a tile's entries are visited in the order of how many products they have, as their lists
stand: loops then hardly change their length. With a batch they are visited as they lie in C, and so is most of B.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for
from sparsebp.kernels.host.engine.samples import Values, flat, pointers, put, take
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.kernels.operands import Pairs


class PairKernels:
    """Host side of `spgemm_pairs`."""

    def spgemm_pairs(self, pairs: Pairs, a_data: Array, b_data: Array, out: Array) -> None:
        """Sum every entry of C from its pairs."""
        batch = out.shape[1]
        parts = parts_for((pairs.words.size + out.shape[0]) * batch, vectors=batch > 1)
        _pairs(team(parts), len(pairs.tile_cuts) - 1, *pairs, *flat(a_data, b_data, out))


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _pairs(team, parts, *args):
    in_parts(_part, team, parts, (Pairs(*args[:7]), Values(*args[7:])))


@numba.njit(**INNER_SERIAL)
def _part(part, pairs, values):
    v, words, shift, tiles = (
        pointers(values),
        simd.pointer(pairs.words),
        np.uint64(pairs.shift),
        simd.pointer(pairs.tiles),
    )
    order, starts, lengths = simd.pointer(pairs.order), simd.pointer(pairs.starts), simd.pointer(pairs.lengths)
    width, a_step = pairs.tiles.shape[1], v.batch if v.a_batched else 1
    line, last = 64 // pairs.words.itemsize, len(pairs.tiles) - 1
    for t in range(pairs.tile_cuts[part], pairs.tile_cuts[part + 1]):
        tile = simd.advance(tiles, t * width)
        begin, entries = tile[0], tile[width] - tile[0]
        a, out = simd.advance(v.a, tile[1] * a_step), simd.advance(v.out, begin * v.batch)
        here = Values(a, v.b, out, v.batch, v.a_batched, v.b_batched)
        own, n = simd.advance(words, tile[2]), simd.advance(lengths, begin)
        if v.batch == 1:
            _tile_of_one(own, simd.advance(order, begin), n, simd.advance(tile, 3), shift, here, entries)
            continue
        at = simd.advance(starts, begin)
        _fetch(words, tile[width + 2], tile[2 * width + 2] if t + 1 < last else tile[width + 2], line)
        if v.a_batched and v.b_batched:
            _tile(own, at, n, shift, here, entries, True, True)
        elif v.a_batched:
            _tile(own, at, n, shift, here, entries, True, False)
        else:
            _tile(own, at, n, shift, here, entries, False, True)


@simd.device
def _fetch(words, begin, end, line):
    """Ask for the words of the next tile, which are then not met in the order in which they stand."""
    for p in range(begin, end, line):
        simd.prefetch(words, p)


@simd.device
def _term(words, p, shift, mask, a, b):
    """Return product p."""
    word = np.uint64(words[p])
    return a[word & mask] * b[word >> shift]


@simd.device
def _tile_of_one(p, order, lengths, counts, shift, v, entries):
    """One tile: entries with 1 to 4 products, with 5 to 8, and with more, summed in two and four lanes."""
    mask = (np.uint64(1) << shift) - np.uint64(1)
    a, b, out, e = v.a, v.b, v.out, 0
    for _ in range(counts[0]):
        out[order[e]] = _term(p, 0, shift, mask, a, b)
        p = simd.advance(p, 1)
        e += 1
    for _ in range(counts[1]):
        s = _term(p, 0, shift, mask, a, b)
        s += _term(p, 1, shift, mask, a, b)
        out[order[e]] = s
        p = simd.advance(p, 2)
        e += 1
    for _ in range(counts[2]):
        s = _term(p, 0, shift, mask, a, b)
        s += _term(p, 1, shift, mask, a, b)
        s += _term(p, 2, shift, mask, a, b)
        out[order[e]] = s
        p = simd.advance(p, 3)
        e += 1
    for _ in range(counts[3]):
        s = _term(p, 0, shift, mask, a, b)
        s += _term(p, 1, shift, mask, a, b)
        s += _term(p, 2, shift, mask, a, b)
        s += _term(p, 3, shift, mask, a, b)
        out[order[e]] = s
        p = simd.advance(p, 4)
        e += 1
    for more in range(4):
        for _ in range(counts[4 + more]):
            s = _term(p, 0, shift, mask, a, b)
            r = _term(p, 1, shift, mask, a, b)
            s += _term(p, 2, shift, mask, a, b)
            r += _term(p, 3, shift, mask, a, b)
            s += _term(p, 4, shift, mask, a, b)
            if more > 0:
                r += _term(p, 5, shift, mask, a, b)
            if more > 1:
                s += _term(p, 6, shift, mask, a, b)
            if more > 2:
                r += _term(p, 7, shift, mask, a, b)
            out[order[e]] = s + r
            p = simd.advance(p, 5 + more)
            e += 1
    while e < entries:
        c = order[e]
        n = np.int64(lengths[c])
        out[c] = _long_sum(p, n, shift, mask, a, b)
        p = simd.advance(p, n)
        e += 1


@simd.device
def _long_sum(p, n, shift, mask, a, b):
    """Return the sum of eight products or more in four lanes: one would wait for each addition."""
    s0 = _term(p, 0, shift, mask, a, b)
    s1 = _term(p, 1, shift, mask, a, b)
    s2 = _term(p, 2, shift, mask, a, b)
    s3 = _term(p, 3, shift, mask, a, b)
    whole = n - n % 4
    for t in range(4, whole, 4):
        s0 += _term(p, t, shift, mask, a, b)
        s1 += _term(p, t + 1, shift, mask, a, b)
        s2 += _term(p, t + 2, shift, mask, a, b)
        s3 += _term(p, t + 3, shift, mask, a, b)
    for t in range(whole, n):
        s0 += _term(p, t, shift, mask, a, b)
    return (s0 + s1) + (s2 + s3)


@simd.device
def _tile(words, starts, lengths, shift, v, entries, a_batched, b_batched):
    """One tile for all samples, two vectors at a time as long as they are whole."""
    width, s = simd.lanes(v.out), 0
    while s + 2 * width <= v.batch:
        _block(words, starts, lengths, shift, v, entries, a_batched, b_batched, s, True, True)
        s += 2 * width
    if s + width <= v.batch:
        _block(words, starts, lengths, shift, v, entries, a_batched, b_batched, s, True, False)
        s += width
    if s < v.batch:
        _block(words, starts, lengths, shift, v, entries, a_batched, b_batched, s, False, False)


@simd.device
def _block(words, starts, lengths, shift, v, entries, a_batched, b_batched, s, full, two):
    mask, width = (np.uint64(1) << shift) - np.uint64(1), simd.lanes(v.out)
    a, b, batch, n = v.a, v.b, v.batch, v.batch - s
    further = s + width
    for c in range(entries):
        p, one, other = simd.advance(words, starts[c]), simd.zeros(v.out), simd.zeros(v.out)
        for t in range(lengths[c]):
            word = np.uint64(p[t])
            k, q = np.int64(word & mask), np.int64(word >> shift)
            one = simd.fma(take(a, k, batch, s, n, a_batched, full), take(b, q, batch, s, n, b_batched, full), one)
            if two:
                x = take(a, k, batch, further, n, a_batched, True)
                other = simd.fma(x, take(b, q, batch, further, n, b_batched, True), other)
        put(v.out, c, batch, s, n, full, one)
        if two:
            put(v.out, c, batch, further, n, True, other)
