"""Numeric phase of sparse products on a kept structure, on the host.

Gustavson's algorithm with the output position of every product known beforehand: no search, no accumulator array, no
allocation, and a fixed order of sums. Rows are split into the parts that the plan has fixed. With a batch, one vector
holds as many samples as fit; the positions of a row are read once per block of samples, the first time from memory,
then from the cache.
"""

from __future__ import annotations

import numba

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for
from sparsebp.kernels.host.engine.samples import Values, flat, pointers, put, take
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.kernels.host.sparse.csr import row_pointers
from sparsebp.kernels.operands import Places, Rows


class PositionKernels:
    """Host side of `spgemm_positions`."""

    def spgemm_positions(self, rows: Rows, places: Places, a_data: Array, b_data: Array, out: Array) -> None:
        """Add product p of row r to ``out[c_indptr[r] + positions[p]]``."""
        batch = out.shape[1]
        parts = parts_for((places.positions.size + out.shape[0]) * batch, vectors=batch > 1)
        arguments = (*rows, *places, *flat(a_data, b_data, out))
        _positions(team(parts), len(places.row_cuts) - 1, *arguments)


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _positions(team, parts, *args):
    in_parts(_part, team, parts, (Rows(*args[:4]), Places(*args[4:7]), Values(*args[7:])))


@numba.njit(**INNER_SERIAL)
def _part(part, arrays, places, values):
    rows, v = row_pointers(arrays), pointers(values)
    product_ptr, positions = simd.pointer(places.product_ptr), simd.pointer(places.positions)
    low, high = places.row_cuts[part], places.row_cuts[part + 1]
    if v.batch == 1:
        _rows_of_one(rows, product_ptr, positions, v, low, high)
    elif v.a_batched and v.b_batched:
        _rows(rows, product_ptr, positions, v, True, True, low, high)
    elif v.a_batched:
        _rows(rows, product_ptr, positions, v, True, False, low, high)
    else:
        _rows(rows, product_ptr, positions, v, False, True, low, high)


@simd.device
def _rows_of_one(rows, product_ptr, positions, v, low, high):
    a_indptr, a_indices, b_indptr, c_indptr = rows
    line = simd.lanes(v.out)  # about a cache line
    last = a_indptr[high] - 1
    for r in range(low, high):
        base, p = c_indptr[r], product_ptr[r]
        row = simd.advance(v.out, base)
        for i in range(c_indptr[r + 1] - base):
            row[i] = 0
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m, value = a_indices[k], v.a[k]
            begin = b_indptr[m]
            length = b_indptr[m + 1] - begin
            # rows of B are short and anywhere: the hardware cannot guess
            upcoming = b_indptr[a_indices[k + 1 if k < last else last]]
            simd.prefetch(v.b, upcoming)
            simd.prefetch(v.b, upcoming + line)
            right, at = simd.advance(v.b, begin), simd.advance(positions, p)
            whole = length - length % 4
            for q in range(0, whole, 4):  # loads first: nothing tells the compiler that `row` overlaps none of them
                i0, i1, i2, i3 = at[q], at[q + 1], at[q + 2], at[q + 3]
                r0, r1, r2, r3 = right[q], right[q + 1], right[q + 2], right[q + 3]
                row[i0] += value * r0
                row[i1] += value * r1
                row[i2] += value * r2
                row[i3] += value * r3
            for q in range(whole, length):
                row[at[q]] += value * right[q]
            p += length


@simd.device
def _rows(rows, product_ptr, positions, v, a_batched, b_batched, low, high):
    width = simd.lanes(v.out)
    for r in range(low, high):
        for s in range(0, v.batch, width):
            if v.batch - s >= width:
                _row(rows, product_ptr, positions, v, a_batched, b_batched, r, s, True)
            else:
                _row(rows, product_ptr, positions, v, a_batched, b_batched, r, s, False)


@simd.device
def _row(rows, product_ptr, positions, v, a_batched, b_batched, r, s, full):
    """One row of the product for one block of samples."""
    a_indptr, a_indices, b_indptr, c_indptr = rows
    a, b, out, batch = v.a, v.b, v.out, v.batch
    n, base, p = batch - s, c_indptr[r], product_ptr[r]
    zero = simd.zeros(out)
    for i in range(base, c_indptr[r + 1]):
        put(out, i, batch, s, n, full, zero)
    for k in range(a_indptr[r], a_indptr[r + 1]):
        m = a_indices[k]
        left = take(a, k, batch, s, n, a_batched, full)
        begin = b_indptr[m]
        length = b_indptr[m + 1] - begin
        for q in range(length):
            c = base + positions[p + q]
            right = take(b, begin + q, batch, s, n, b_batched, full)
            put(out, c, batch, s, n, full, simd.fma(left, right, take(out, c, batch, s, n, True, full)))
        p += length
