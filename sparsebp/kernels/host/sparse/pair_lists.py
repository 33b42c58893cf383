"""Structure of `Pairs` on the host: how many products every entry of C has, which, and in which order they are met."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.team import in_parts
from sparsebp.kernels.host.sparse.structure import own_scratch, place_columns

MOST_PRODUCTS = 1024
"""Products of one tile, unless one entry has more: words, and what they name, stay in the innermost cache."""
WRITTEN_OUT = 8
"""Entries with up to so many products are counted a tile."""

# The functions below are compiled: their arguments are index arrays, sizes and flags. `cuts`: rows where parts begin.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def count_pairs(team, parts, *args):
    """Write how many products every entry of C has to `counts` (nnz,) uint16. `places`: scratch, (parts, columns)."""
    in_parts(_count_pairs, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _count_pairs(part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, cuts, places, counts):
    a_ptr, a_columns, b_ptr = simd.pointer(a_indptr), simd.pointer(a_indices), simd.pointer(b_indptr)
    b_columns, c_ptr, place = simd.pointer(b_indices), simd.pointer(c_indptr), own_scratch(places, part)
    for r in range(cuts[part], cuts[part + 1]):
        place_columns(c_indptr, c_indices, r, place)
        of_row = simd.advance(simd.pointer(counts), c_ptr[r])
        for i in range(c_ptr[r + 1] - c_ptr[r]):
            of_row[i] = 0
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            for q in range(b_ptr[m], b_ptr[m + 1]):
                of_row[place[b_columns[q]]] += 1


@numba.njit(**SERIAL)
def cut_tiles(a_indptr, c_indptr, pair_ptr, most_of_a, tiles, first):
    """Cut C into tiles of whole rows, or of a piece of a long row.

    Writes the first entry of C, that of A and the first word of every tile to `tiles` (most, 11), and `first` (m,) as
    `write_words` takes it; returns how many tiles there are.
    """
    count, begin = 0, 0
    rows = len(c_indptr) - 1
    while begin < rows:
        c, p = c_indptr[begin], np.int64(pair_ptr[c_indptr[begin]])
        end = begin + 1
        while (
            end < rows
            and np.int64(pair_ptr[c_indptr[end + 1]]) - p <= MOST_PRODUCTS
            and a_indptr[end + 1] - a_indptr[begin] <= most_of_a
        ):
            end += 1
        for r in range(begin, end):
            first[r] = a_indptr[begin]
        last = c_indptr[end]
        while c < last:
            tiles[count, 0], tiles[count, 1], tiles[count, 2] = c, a_indptr[begin], pair_ptr[c]
            count += 1
            p, c = np.int64(pair_ptr[c]), c + 1
            while c < last and np.int64(pair_ptr[c + 1]) - p <= MOST_PRODUCTS:  # so there are not too many entries
                c += 1
        begin = end
    tiles[count, 0], tiles[count, 1], tiles[count, 2] = c_indptr[rows], a_indptr[rows], pair_ptr[c_indptr[rows]]
    return count


@numba.njit(**SERIAL)
def order_lists(team, parts, *args):
    """Order every tile's lists by their lengths, which are given, (nnz,).

    Writes the order and the starts (nnz,) within a tile, the starts of all lists `begins` (nnz,) uint32, and how many
    have 1, 2, … words to ``tiles[:, 3:]``.
    """
    in_parts(_order_lists, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _order_lists(part, lengths, tiles, tile_cuts, order, starts, begins):
    before, words = np.empty(1 << 16, np.int64), np.empty(1 << 16, np.int64)
    for t in range(tile_cuts[part], tile_cuts[part + 1]):
        begin, end, first = tiles[t, 0], tiles[t + 1, 0], tiles[t, 2]
        longest = 0
        for c in range(begin, end):
            longest = max(longest, int(lengths[c]))
        for n in range(longest + 1):
            before[n] = 0
        for c in range(begin, end):
            before[lengths[c]] += 1
        lists, size = 0, 0
        for n in range(1, longest + 1):
            count = before[n]
            if n <= WRITTEN_OUT:
                tiles[t, 2 + n] = count
            before[n], words[n] = lists, size
            lists += count
            size += count * n
        for c in range(begin, end):
            n = int(lengths[c])
            order[begin + before[n]] = c - begin
            starts[c] = words[n]
            begins[c] = first + words[n]
            before[n] += 1
            words[n] += n


@numba.njit(**SERIAL)
def write_words(team, parts, *args):
    """Write the words of all products, (n_products,).

    `first`: the entry of A from which those of every row of C are counted, (m,); `ends`: where the list of every entry
    of C begins, (nnz,) uint32, overwritten by where it ends.
    """
    in_parts(_write_words, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _write_words(
    part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, cuts, places, first, shift, ends, words
):
    a_ptr, a_columns, b_ptr = simd.pointer(a_indptr), simd.pointer(a_indices), simd.pointer(b_indptr)
    b_columns, c_ptr, place = simd.pointer(b_indices), simd.pointer(c_indptr), own_scratch(places, part)
    written = simd.pointer(words)
    for r in range(cuts[part], cuts[part + 1]):
        place_columns(c_indptr, c_indices, r, place)
        of_row = simd.advance(simd.pointer(ends), c_ptr[r])
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m, low = a_columns[k], np.uint64(k - first[r])
            for q in range(b_ptr[m], b_ptr[m + 1]):
                i = place[b_columns[q]]
                at = np.uint64(of_row[i])
                of_row[i] += 1
                written[at] = low | (np.uint64(q) << np.uint64(shift))
