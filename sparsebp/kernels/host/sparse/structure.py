"""Structure of sparse products on the host: how many entries, which columns, where every product lands.

Gustavson's algorithm (F. Gustavson, "Two fast algorithms for sparse matrices", ACM TOMS 4, 1978) without values. Every
row of C is the union of rows of B; nothing is sorted where that can be had otherwise: columns are marked in a set of
bytes, and the set is read in order. What is written does not depend on how rows are split into parts.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.bits import count, lowest, take_64
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.team import in_parts

SPARSE = 256
"""Columns per entry of a row above which its few columns are sorted, rather than looked for between first and last."""

# The functions below are compiled: their arguments are index arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _count_products_part(part, a_indptr, a_indices, b_indptr, cuts, counts):
    _products(a_indptr, a_indices, b_indptr, cuts[part], cuts[part + 1], counts)


@numba.njit(**SERIAL)
def count_products(team, parts, *args):
    """Write the number of products of every row of C to `counts` (m,)."""
    in_parts(_count_products_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _products(a_indptr, a_indices, b_indptr, low, high, counts):
    a_ptr, a_columns, b_ptr = simd.pointer(a_indptr), simd.pointer(a_indices), simd.pointer(b_indptr)
    for r in range(low, high):
        total = 0
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            total += b_ptr[m + 1] - b_ptr[m]
        counts[r] = total


@numba.njit(**INNER_SERIAL)
def _count_entries_part(part, a_indptr, a_indices, b_indptr, b_indices, cuts, stamps, counts):
    _count(a_indptr, a_indices, b_indptr, b_indices, cuts[part], cuts[part + 1], stamps[part], counts)


@numba.njit(**SERIAL)
def count_entries(team, parts, *args):
    """Write the number of entries of every row of C to `counts` (m,). `stamps`: zeros, uint16 (parts, columns)."""
    in_parts(_count_entries_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _count(a_indptr, a_indices, b_indptr, b_indices, low, high, stamps, counts):
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns, stamp_of = simd.pointer(b_indptr), simd.pointer(b_indices), simd.pointer(stamps)
    stamp = np.uint16(0)
    for r in range(low, high):
        stamp = np.uint16(stamp + 1)
        if stamp == 0:  # all stamps are used up
            stamps[:] = 0
            stamp = np.uint16(1)
        count = 0
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            for q in range(b_ptr[m], b_ptr[m + 1]):
                j = b_columns[q]
                count += stamp_of[j] != stamp
                stamp_of[j] = stamp
        counts[r] = count


@numba.njit(**INNER_SERIAL)
def _write_columns_part(part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, cuts, marks):
    low, high = cuts[part], cuts[part + 1]
    _columns(a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, low, high, marks[part])


@numba.njit(**SERIAL)
def write_columns(team, parts, *args):
    """Write the sorted columns of every row of C to `c_indices` (nnz,). `marks`: zeros, uint8 (parts, columns + 64)."""
    in_parts(_write_columns_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _columns(a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, low, high, marks):
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns, marked = simd.pointer(b_indptr), simd.pointer(b_indices), simd.pointer(marks)
    c_columns = simd.pointer(c_indices)
    for r in range(low, high):
        begin, end = c_indptr[r], c_indptr[r + 1]
        if begin == end:
            continue
        first, last = len(marks), 0
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            left, right = b_ptr[m], b_ptr[m + 1]
            if left < right:
                first, last = min(first, b_columns[left]), max(last, b_columns[right - 1])
        at = begin
        if last - first < SPARSE * (end - begin):
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m = a_columns[k]
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    marked[b_columns[q]] = 1
            for base in range(first, last + 1, 64):
                at = _list(take_64(marked, base), base, c_columns, at, end)
        else:
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m = a_columns[k]
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    j = b_columns[q]
                    if not marked[j]:
                        marked[j] = 1
                        c_columns[at] = j
                        at += 1
            _sort(c_columns, begin, end)
            for i in range(begin, end):
                marked[c_columns[i]] = 0


@numba.njit(**INNER_SERIAL)
def _sort(values, begin, end):
    """Sort numbers in place (Shell's method; Numba's own sort takes longer to compile than all the rest here)."""
    gap = end - begin
    while gap > 1:
        gap = 1 if gap < 5 else (5 * gap - 1) // 11
        for i in range(begin + gap, end):
            value, at = values[i], i
            while at >= begin + gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value


@simd.device
def _list(found, base, columns, at, end):
    """Write ``base + i`` for every bit i of `found` from ``columns[at]`` on; return where the next one goes."""
    n = count(found)
    if at + 64 > end:  # what is written too much below would reach into the next row, maybe another part's
        for i in range(n):
            columns[at + i] = base + lowest(found)
            found &= found - np.uint64(1)
    else:
        for i in range(0, n, 8):  # eight at a time, known or not: a branch for each would often be guessed wrong
            for u in range(8):
                columns[at + i + u] = base + lowest(found)
                found &= found - np.uint64(1)
    return at + n


@numba.njit(**INNER_SERIAL)
def _write_positions_part(
    part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, product_ptr, cuts, places, positions
):
    low, high = cuts[part], cuts[part + 1]
    _positions(
        a_indptr,
        a_indices,
        b_indptr,
        b_indices,
        c_indptr,
        c_indices,
        product_ptr,
        low,
        high,
        places[part],
        positions,
    )


@numba.njit(**SERIAL)
def write_positions(team, parts, *args):
    """Write where in its row of C every product lands, in Gustavson's order, to `positions` (n_products,).

    `places`: scratch of the type of `positions`, (parts, columns).
    """
    in_parts(_write_positions_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _positions(
    a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, product_ptr, low, high, places, positions
):
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns, place = simd.pointer(b_indptr), simd.pointer(b_indices), simd.pointer(places)
    for r in range(low, high):
        begin = c_indptr[r]
        columns = simd.advance(simd.pointer(c_indices), begin)
        for i in range(c_indptr[r + 1] - begin):
            place[columns[i]] = i
        p = product_ptr[r]
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            left = b_ptr[m]
            length = b_ptr[m + 1] - left
            row, out = simd.advance(b_columns, left), simd.advance(simd.pointer(positions), p)
            for q in range(length):
                out[q] = place[row[q]]
            p += length


@numba.njit(**INNER_SERIAL)
def _write_pairs_part(
    part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, cuts, places, a_index, b_index
):
    low, high = cuts[part], cuts[part + 1]
    _pairs(a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, low, high, places[part], a_index, b_index)


@numba.njit(**SERIAL)
def write_pairs(team, parts, *args):
    """Write which entries of A and B the one product of every entry of C multiplies, to two arrays (nnz,).

    `places`: scratch of int64, (parts, columns).
    """
    in_parts(_write_pairs_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _pairs(a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, low, high, places, a_index, b_index):
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns, place = simd.pointer(b_indptr), simd.pointer(b_indices), simd.pointer(places)
    for r in range(low, high):
        for i in range(c_indptr[r], c_indptr[r + 1]):
            place[c_indices[i]] = i
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            for q in range(b_ptr[m], b_ptr[m + 1]):
                i = place[b_columns[q]]
                a_index[i] = k
                b_index[i] = q
