"""Union of two sparse structures on the host: rows are merged, as both are sorted."""

from __future__ import annotations

import numba

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.team import in_parts

# The functions below are compiled: their arguments are index arrays.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def count_union(team, parts, *args):
    """Write the number of entries of every row of A + B to `counts` (m,)."""
    in_parts(_count, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _count(part, a_indptr, a_indices, b_indptr, b_indices, cuts, counts):
    a_columns, b_columns = simd.pointer(a_indices), simd.pointer(b_indices)
    for r in range(cuts[part], cuts[part + 1]):
        i, j = a_indptr[r], b_indptr[r]
        a_end, b_end = a_indptr[r + 1], b_indptr[r + 1]
        total = (a_end - i) + (b_end - j)
        while i < a_end and j < b_end:
            left, right = a_columns[i], b_columns[j]
            total -= left == right
            i += left <= right
            j += right <= left
        counts[r] = total


@numba.njit(**SERIAL)
def write_union(team, parts, *args):
    """Write the columns of A + B and the places of the entries of A and B among them (nnz_c,), (nnz_a,), (nnz_b,)."""
    in_parts(_write, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _write(part, a_indptr, a_indices, b_indptr, b_indices, cuts, c_indptr, c_indices, a_index, b_index):
    a_columns, b_columns, c_columns = simd.pointer(a_indices), simd.pointer(b_indices), simd.pointer(c_indices)
    a_place, b_place = simd.pointer(a_index), simd.pointer(b_index)
    for r in range(cuts[part], cuts[part + 1]):
        i, j, at = a_indptr[r], b_indptr[r], c_indptr[r]
        a_end, b_end = a_indptr[r + 1], b_indptr[r + 1]
        while i < a_end and j < b_end:
            left, right = a_columns[i], b_columns[j]
            c_columns[at] = min(left, right)
            if left <= right:
                a_place[i] = at
                i += 1
            if right <= left:
                b_place[j] = at
                j += 1
            at += 1
        while i < a_end:
            c_columns[at], a_place[i] = a_columns[i], at
            i, at = i + 1, at + 1
        while j < b_end:
            c_columns[at], b_place[j] = b_columns[j], at
            j, at = j + 1, at + 1
