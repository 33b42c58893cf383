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

IN_ONE_SUM = 8
"""Products up to which an entry's are added one after the other; of more, product t goes to lane t % 4, those that are
left over to the first. The same for a sample alone and for one of a batch: results depend on values only."""


class PairKernels:
    """Host side of `spgemm_pairs`."""

    def spgemm_pairs(self, pairs: Pairs, a_data: Array, b_data: Array, out: Array) -> None:
        """Sum every entry of C from its pairs."""
        batch = out.shape[1]
        parts = parts_for((pairs.words.size + out.shape[0]) * batch, vectors=batch > 1)
        _pairs(team(parts), len(pairs.tile_cuts) - 1, *pairs, *flat(a_data, b_data, out), out.dtype.type(0))


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _pairs(team, parts, *args):
    in_parts(_part, team, parts, (Pairs(*args[:7]), Values(*args[7:13]), args[13]))


@numba.njit(**INNER_SERIAL)
def _part(part, pairs, values, zero):
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
            _tile_of_one(own, simd.advance(order, begin), n, simd.advance(tile, 3), shift, here, entries, zero)
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
def _add(total, words, p, shift, mask, a, b):
    """Return `total` and product p."""
    word = np.uint64(words[p])
    return simd.fma(a[word & mask], b[word >> shift], total)


@simd.device
def _tile_of_one(p, order, lengths, counts, shift, v, entries, zero):
    """One tile: entries with up to `IN_ONE_SUM` products, written out, and those with more."""
    mask = (np.uint64(1) << shift) - np.uint64(1)
    a, b, out = v.a, v.b, v.out
    p, e = _lists_of(1, counts, p, order, 0, shift, mask, a, b, out, zero)
    p, e = _lists_of(2, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(3, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(4, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(5, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(6, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(7, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(8, counts, p, order, e, shift, mask, a, b, out, zero)
    while e < entries:
        c = order[e]
        n = np.int64(lengths[c])
        out[c] = _long_sum(p, n, shift, mask, a, b, zero)
        p = simd.advance(p, n)
        e += 1


@simd.device
def _lists_of(n, counts, p, order, e, shift, mask, a, b, out, zero):
    """Sum the lists of n words, a constant; return what comes next."""
    for _ in range(counts[n - 1]):
        s = _add(zero, p, 0, shift, mask, a, b)
        for q in range(1, n):  # written out, as n is known where this is called
            s = _add(s, p, q, shift, mask, a, b)
        out[order[e]] = s
        p = simd.advance(p, n)
        e += 1
    return p, e


@simd.device
def _long_sum(p, n, shift, mask, a, b, zero):
    """Return the sum of more products in four lanes: one would wait for each addition."""
    s0 = s1 = s2 = s3 = zero
    whole = n - n % 4
    for t in range(0, whole, 4):
        s0 = _add(s0, p, t, shift, mask, a, b)
        s1 = _add(s1, p, t + 1, shift, mask, a, b)
        s2 = _add(s2, p, t + 2, shift, mask, a, b)
        s3 = _add(s3, p, t + 3, shift, mask, a, b)
    for t in range(whole, n):
        s0 = _add(s0, p, t, shift, mask, a, b)
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
    """One or two vectors of samples, the products of every entry in the same lanes as without a batch."""
    zero, further, n = simd.zeros(v.out), s + simd.lanes(v.out), v.batch - s
    for c in range(entries):
        p, terms, one, other = simd.advance(words, starts[c]), np.int64(lengths[c]), zero, zero
        if terms <= IN_ONE_SUM:
            for t in range(terms):
                one = _add_samples(one, p, t, shift, v, a_batched, b_batched, s, full)
                if two:
                    other = _add_samples(other, p, t, shift, v, a_batched, b_batched, further, True)
        else:
            one = _long_sum_of_samples(p, terms, shift, v, a_batched, b_batched, s, full)
            if two:
                other = _long_sum_of_samples(p, terms, shift, v, a_batched, b_batched, further, True)
        put(v.out, c, v.batch, s, n, full, one)
        if two:
            put(v.out, c, v.batch, further, n, True, other)


@simd.device
def _long_sum_of_samples(p, terms, shift, v, a_batched, b_batched, s, full):
    s0 = s1 = s2 = s3 = simd.zeros(v.out)
    whole = terms - terms % 4
    for t in range(0, whole, 4):
        s0 = _add_samples(s0, p, t, shift, v, a_batched, b_batched, s, full)
        s1 = _add_samples(s1, p, t + 1, shift, v, a_batched, b_batched, s, full)
        s2 = _add_samples(s2, p, t + 2, shift, v, a_batched, b_batched, s, full)
        s3 = _add_samples(s3, p, t + 3, shift, v, a_batched, b_batched, s, full)
    for t in range(whole, terms):
        s0 = _add_samples(s0, p, t, shift, v, a_batched, b_batched, s, full)
    return (s0 + s1) + (s2 + s3)


@simd.device
def _add_samples(total, words, p, shift, v, a_batched, b_batched, s, full):
    """Return `total` and product p of the samples from s on."""
    mask, n, word = (np.uint64(1) << shift) - np.uint64(1), v.batch - s, np.uint64(words[p])
    left = take(v.a, np.int64(word & mask), v.batch, s, n, a_batched, full)
    return simd.fma(left, take(v.b, np.int64(word >> shift), v.batch, s, n, b_batched, full), total)
