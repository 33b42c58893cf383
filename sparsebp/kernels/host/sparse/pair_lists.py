"""Structure of `Pairs` on the host: how many products every entry of C has, which, and in which order they are met."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.team import in_parts

MOST_PRODUCTS = 1024
"""Products of one tile, unless one entry has more: words, and what they name, stay in the innermost cache."""
WRITTEN_OUT = 8
"""Entries with up to so many products are counted a tile."""

# The functions below are compiled: their arguments are index arrays, sizes and flags. `cuts`: rows where parts begin.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def cut_tiles(a_indptr, c_indptr, product_ptr, terms, most_of_a, tiles, rows):
    """Cut C into tiles of whole rows, or of a piece of a long row, whose entries have `terms` products, (nnz,).

    Writes the first entry of C, that of A and the first word of every tile to `tiles` (most, 11), and its first row to
    `rows` (most,); returns how many tiles there are, with one behind the last.
    """
    count, begin, m = 0, 0, len(c_indptr) - 1
    while begin < m:
        end = begin + 1
        while (
            end < m
            and product_ptr[end + 1] - product_ptr[begin] <= MOST_PRODUCTS
            and a_indptr[end + 1] - a_indptr[begin] <= most_of_a
        ):
            end += 1
        c, p, last = np.int64(c_indptr[begin]), product_ptr[begin], np.int64(c_indptr[end])
        while c < last:
            tiles[count, 0], tiles[count, 1], tiles[count, 2], rows[count] = c, a_indptr[begin], p, begin
            count += 1
            if product_ptr[end] - product_ptr[begin] <= MOST_PRODUCTS:
                c = last
            else:
                products, c = np.int64(terms[c]), c + 1
                while c < last and products + terms[c] <= MOST_PRODUCTS:  # so there are not too many entries
                    products += terms[c]
                    c += 1
                p += products
        begin = end
    tiles[count, 0], tiles[count, 1], tiles[count, 2], rows[count] = c_indptr[m], a_indptr[m], product_ptr[m], m
    return count + 1


@numba.njit(**SERIAL)
def write_lists(team, parts, *args):
    """Write the lists of every tile, ordered by their lengths, which are given, (nnz,) uint16.

    Writes the order and the starts (nnz,) uint16 within a tile, how many have 1, 2, … words to ``tiles[:, 3:]``, and
    the words (n_products,). `cuts`: tiles where parts begin. `sizes`: the number of columns, and the most products of
    an entry.
    """
    in_parts(_write_lists, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _write_lists(
    part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, lengths, tiles, rows, cuts, sizes, shift,
    order, starts, words,
):  # fmt: skip
    a_ptr, a_columns, b_ptr = simd.pointer(a_indptr), simd.pointer(a_indices), simd.pointer(b_indptr)
    b_columns, c_ptr, c_columns = simd.pointer(b_indices), simd.pointer(c_indptr), simd.pointer(c_indices)
    written, bits = simd.pointer(words), np.uint64(shift)
    place, before = np.empty(sizes[0], np.uint32), np.empty(sizes[1] + 1, np.int64)
    next_word = simd.pointer(place)
    t, end = cuts[part], cuts[part + 1]
    while 0 < t < end and rows[t] == rows[t - 1]:  # the row belongs to the part where it begins
        t += 1
    while t < end:
        after = t + 1
        while rows[after] == rows[t] and after < len(tiles) - 1:  # pieces of one row
            after += 1
        for s in range(t, after):
            _order_lists(lengths, tiles, s, before, order, starts)
        for r in range(rows[t], rows[after]):
            for s in range(t, after):
                word, begin = tiles[s, 2], np.int64(c_ptr[r])
                for c in range(max(begin, tiles[s, 0]), min(np.int64(c_ptr[r + 1]), tiles[s + 1, 0])):
                    next_word[c_columns[c]] = word + starts[c]
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m, low = a_columns[k], np.uint64(k - tiles[t, 1])
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    j = b_columns[q]
                    at = np.int64(next_word[j])
                    next_word[j] = at + 1
                    written[at] = low | (np.uint64(q) << bits)
        t = after
    simd.keep_alive(place)


@simd.device
def _order_lists(lengths, tiles, t, before, order, starts):
    """Order the lists of one tile. `before`: scratch, lists (low half) and words (high) before those of length n."""
    begin, end = tiles[t, 0], tiles[t + 1, 0]
    n_of, nth, start = (
        simd.advance(simd.pointer(lengths), begin),
        simd.advance(simd.pointer(order), begin),
        simd.advance(simd.pointer(starts), begin),
    )
    count, longest = simd.pointer(before), np.int64(0)
    for c in range(end - begin):
        longest = np.int64(max(longest, np.int64(n_of[c])))
    for length in range(longest + 1):
        count[length] = 0
    for c in range(end - begin):
        count[n_of[c]] += 1
    total = np.int64(0)
    for length in range(1, longest + 1):
        lists = count[length]
        if length <= WRITTEN_OUT:
            tiles[t, 2 + length] = lists
        count[length] = total
        total += lists + ((lists * length) << 32)
    for c in range(end - begin):
        n = np.int64(n_of[c])
        now = count[n]
        count[n] = now + 1 + (n << 32)
        nth[now & 0xFFFFFFFF] = c
        start[c] = now >> 32
