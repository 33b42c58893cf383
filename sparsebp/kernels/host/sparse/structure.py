"""Structure of sparse products on the host: how many entries, which columns, where every product or run lands.

Gustavson's algorithm (F. Gustavson, "Two fast algorithms for sparse matrices", ACM TOMS 4, 1978) without values. Every
row of C is the union of rows of B; nothing is sorted where that can be had otherwise: columns are marked in a set of
bytes, and the set is read in order. What is written does not depend on how rows are split into parts.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.bits import count, look_64, lowest, take_64
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.team import in_parts

NEAR = 128
"""Columns a product of a row up to which its columns are looked for, 64 at a time, between the first and the last one;
beyond, only in those groups of 64 that were met."""
FAR = 1 << 15
"""The same above which they are sorted."""
SLACK = 128
"""Entries behind the last one of a part that `find_rows` may write to."""

# The functions below are compiled: their arguments are index arrays, sizes and flags. `cuts`: rows where parts begin.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def count_entries(team, parts, *args):
    """Write the number of entries of every row of C to `counts` (m,). `stamps`: zeros, uint16 (parts, columns)."""
    in_parts(_count_entries, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _count_entries(part, a_indptr, a_indices, b_indptr, b_indices, cuts, stamps, counts):
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns, written = simd.pointer(b_indptr), simd.pointer(b_indices), simd.pointer(counts)
    stamp_of = own_scratch(stamps, part)
    stamp = np.uint16(0)
    for r in range(cuts[part], cuts[part + 1]):
        stamp = np.uint16(stamp + 1)
        if stamp == 0:  # all stamps are used up
            for j in range(stamps.shape[1]):
                stamp_of[j] = 0
            stamp = np.uint16(1)
        total = 0
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            for q in range(b_ptr[m], b_ptr[m + 1]):
                j = b_columns[q]
                total += stamp_of[j] != stamp
                stamp_of[j] = stamp
        written[r] = total


@simd.device
def own_scratch(scratch, part):
    """Return the part's own row of scratch."""
    return simd.advance(simd.pointer(scratch), part * scratch.shape[1])


@numba.njit(**SERIAL)
def find_rows(team, parts, *args):
    """Write the sorted columns of the rows of C, those of a part one after the other from ``begins[part]`` on.

    `counts`: how many entries every row has, (m,) int64. `terms`: how many products every entry has, uint16, where the
    columns are, or empty. `marks`: zeros, (parts, columns + 64), of a type that holds these numbers. `groups`: zeros,
    uint8 (parts, columns / 64 + 65).
    """
    in_parts(_find_rows, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _find_rows(
    part, a_indptr, a_indices, b_indptr, b_indices, product_ptr, cuts, begins, marks, groups, counts, columns, terms
):
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns, found = simd.pointer(b_indptr), simd.pointer(b_indices), simd.pointer(columns)
    marked, grouped, of_row = own_scratch(marks, part), own_scratch(groups, part), simd.pointer(counts)
    times, counted = simd.pointer(terms), len(terms) > 0
    keep, at = -1 if counted else 0, begins[part]
    for r in range(cuts[part], cuts[part + 1]):
        begin, products = at, product_ptr[r + 1] - product_ptr[r]
        first, last = np.int64(marks.shape[1]), np.int64(-1)
        for k in range(a_ptr[r], a_ptr[r + 1]):
            left, right = b_ptr[a_columns[k]], b_ptr[a_columns[k] + 1]
            if left < right:
                first, last = min(first, np.int64(b_columns[left])), max(last, np.int64(b_columns[right - 1]))
        if last - first < NEAR * products:
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m = a_columns[k]
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    marked[b_columns[q]] = (marked[b_columns[q]] & keep) + 1
            for base in range(first & -64, last + 1, 64):
                at = _list(look_64(marked, base) if counted else take_64(marked, base), base, found, at)
        elif last - first < FAR * products:
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m = a_columns[k]
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    j = b_columns[q]
                    marked[j] = (marked[j] & keep) + 1
                    grouped[j >> 6] = 1
            for group in range(first >> 6, (last >> 6) + 1, 64):
                met = take_64(grouped, group)
                while met != 0:
                    base = (group + lowest(met)) << 6
                    met &= met - np.uint64(1)
                    at = _list(look_64(marked, base) if counted else take_64(marked, base), base, found, at)
        else:
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m = a_columns[k]
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    j = b_columns[q]
                    if marked[j] == 0:
                        found[at] = j
                        at += 1
                    marked[j] = (marked[j] & keep) + 1
            _sort(found, begin, at)
            for i in range(begin, at if not counted else begin):
                marked[found[i]] = 0
        for i in range(begin, at if counted else begin):
            times[i] = marked[found[i]]
            marked[found[i]] = 0
        of_row[r] = at - begin


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
def _list(found, base, columns, at):
    """Write ``base + i`` for every bit i of `found` from ``columns[at]`` on; return where the next one goes.

    Several at a time, known or not: a branch for each would often be guessed wrong.
    """
    n = count(found)
    for u in range(4):
        columns[at + u] = base + lowest(found)
        found &= found - np.uint64(1)
    for i in range(4, n, 8):
        for u in range(8):
            columns[at + i + u] = base + lowest(found)
            found &= found - np.uint64(1)
    return at + n


@numba.njit(**SERIAL)
def join_rows(team, parts, *args):
    """Copy what a part has written from ``begins[part]`` on to its place, ``ends[part]`` to ``ends[part + 1]``."""
    in_parts(_join_rows, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _join_rows(part, begins, ends, columns, terms, joined, joined_terms):
    begin, target, n = begins[part], ends[part], ends[part + 1] - ends[part]
    simd.copy(simd.advance(simd.pointer(joined), target), simd.advance(simd.pointer(columns), begin), n)
    if len(terms) > 0:
        simd.copy(simd.advance(simd.pointer(joined_terms), target), simd.advance(simd.pointer(terms), begin), n)


@numba.njit(**SERIAL)
def count_products(a_indptr, a_indices, b_indptr, columns, product_ptr, room):
    """Write how many products there are before every row of C, and how many entries at most, (m + 1,) int64 each."""
    a_ptr, a_columns, b_ptr = simd.pointer(a_indptr), simd.pointer(a_indices), simd.pointer(b_indptr)
    total, most = np.int64(0), np.int64(0)
    for r in range(len(a_indptr) - 1):
        product_ptr[r], room[r], before = total, most, total
        for k in range(a_ptr[r], a_ptr[r + 1]):
            total += b_ptr[a_columns[k] + 1] - b_ptr[a_columns[k]]
        most += min(total - before, columns)
    product_ptr[len(a_indptr) - 1], room[len(a_indptr) - 1] = total, most


@numba.njit(**SERIAL)
def write_positions(team, parts, *args):
    """Write where in its row of C every product lands, in Gustavson's order, to `positions` (n_products,).

    `places`: scratch of the type of `positions`, (parts, columns).
    """
    in_parts(_write_positions, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _write_positions(
    part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, product_ptr, cuts, places, positions
):
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns = simd.pointer(b_indptr), simd.pointer(b_indices)
    place, first_product = own_scratch(places, part), simd.pointer(product_ptr)
    for r in range(cuts[part], cuts[part + 1]):
        place_columns(c_indptr, c_indices, r, place)
        p = first_product[r]
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            left = b_ptr[m]
            length = b_ptr[m + 1] - left
            row, out = simd.advance(b_columns, left), simd.advance(simd.pointer(positions), p)
            for q in range(length):
                out[q] = place[row[q]]
            p += length


@simd.device
def place_columns(c_indptr, c_indices, r, place):
    """Note for every column of row r of C where in the row it stands."""
    c_ptr = simd.pointer(c_indptr)
    begin = c_ptr[r]
    columns = simd.advance(simd.pointer(c_indices), begin)
    for i in range(c_ptr[r + 1] - begin):
        place[columns[i]] = i


@numba.njit(**SERIAL)
def write_pairs(team, parts, *args):
    """Write which entries of A and B the one product of every entry of C multiplies, to two arrays (nnz,).

    `places`: scratch of int64, (parts, columns).
    """
    in_parts(_write_pairs, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _write_pairs(part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, cuts, places, a_index, b_index):
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns = simd.pointer(b_indptr), simd.pointer(b_indices)
    c_ptr, place, a_entry, b_entry = (
        simd.pointer(c_indptr),
        own_scratch(places, part),
        simd.pointer(a_index),
        simd.pointer(b_index),
    )
    for r in range(cuts[part], cuts[part + 1]):
        place_columns(c_indptr, c_indices, r, place)
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            for q in range(b_ptr[m], b_ptr[m + 1]):
                i = c_ptr[r] + place[b_columns[q]]
                a_entry[i] = k
                b_entry[i] = q


# ---- runs of neighbouring columns: see `Runs` of `sparsebp.kernels.operands` ----------------------------------------


@numba.njit(**SERIAL)
def find_shapes(indptr, indices, shapes, runs_of_row):
    """Write the number of every row's shape and how many runs it has, (n_rows,) each."""
    ptr, columns = simd.pointer(indptr), simd.pointer(indices)
    shape = -1
    for r in range(len(indptr) - 1):
        begin, end = ptr[r], ptr[r + 1]
        same = r > 0 and end - begin == begin - ptr[r - 1]
        runs = 0
        for q in range(begin, end):
            runs += q == begin or columns[q] != columns[q - 1] + 1
            same = same and columns[q] == columns[q - (end - begin)]
        shape += not same
        shapes[r] = shape
        runs_of_row[r] = runs


@numba.njit(**SERIAL)
def measure_runs(indptr, indices, rows, lengths):
    """Write the lengths of the runs of these rows, (n_runs,)."""
    u = -1
    for r in rows:
        for q in range(indptr[r], indptr[r + 1]):
            if q == indptr[r] or indices[q] != indices[q - 1] + 1:
                u += 1
                lengths[u] = 0
            lengths[u] += 1


@numba.njit(**SERIAL)
def count_starts(a_indptr, a_indices, shapes, run_ptr, counts):
    """Write how many starts every row of A has to `counts` (m,); return how many runs its products consist of."""
    pieces = 0
    for r in range(len(a_indptr) - 1):
        last, total = -1, 0
        for k in range(a_indptr[r], a_indptr[r + 1]):
            shape = shapes[a_indices[k]]
            runs = run_ptr[shape + 1] - run_ptr[shape]
            pieces += runs
            if shape != last:
                total += runs
                last = shape
        counts[r] = total
    return pieces


@numba.njit(**SERIAL)
def write_starts(team, parts, *args):
    """Write where in its row of C every run of every group of A's entries begins, to `starts` (n_starts,)."""
    in_parts(_write_starts, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _write_starts(
    part, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, shapes, run_ptr, lengths, start_ptr, columns,
    cuts, starts,
):  # fmt: skip
    place = np.empty(columns, np.int64)
    for r in range(cuts[part], cuts[part + 1]):
        begin = c_indptr[r]
        for i in range(begin, c_indptr[r + 1]):
            place[c_indices[i]] = i - begin
        last, at = -1, start_ptr[r]
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m = a_indices[k]
            shape = shapes[m]
            if shape == last:
                continue
            last, q = shape, b_indptr[m]
            for u in range(run_ptr[shape], run_ptr[shape + 1]):
                starts[at] = place[b_indices[q]]
                at += 1
                q += lengths[u]
