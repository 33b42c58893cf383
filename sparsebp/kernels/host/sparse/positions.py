"""Numeric phase of sparse products on a kept structure, on the host.

Gustavson's algorithm with the output position of every product known beforehand: no search, no accumulator array, no
allocation, and a fixed order of sums. Rows are split into the parts that the plan has fixed. With a batch, one vector
holds as many samples as fit; the positions of a row are read once per lane block, the first time from memory, then from
the cache.
"""

from __future__ import annotations

import numba

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for
from sparsebp.kernels.host.engine.samples import put, take
from sparsebp.kernels.host.engine.team import in_parts, team


class PositionKernels:
    """Host side of `spgemm_numeric` of `sparsebp.kernels.api.Kernels`."""

    def spgemm_numeric(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_data: Array,
        c_indptr: Array,
        product_ptr: Array,
        positions: Array,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """Add product p of row r to ``out[c_indptr[r] + positions[p]]``; `out` is overwritten."""
        batch = out.shape[-1]
        arguments = (
            a_indptr,
            a_indices,
            a_data.reshape(-1),
            b_indptr,
            b_data.reshape(-1),
            c_indptr,
            product_ptr,
            positions,
            out.reshape(-1),
            batch,
            a_data.shape[1] == batch,
            b_data.shape[1] == batch,
        )
        parts = parts_for((positions.size + out.shape[0]) * batch, vectors=batch > 1)
        _spgemm_parallel(team(parts), len(row_cuts) - 1, *arguments, row_cuts)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _spgemm(
    a_indptr, a_indices, a, b_indptr, b, c_indptr, product_ptr, positions, out, batch, a_wide, b_wide, low, high
):
    args = (
        simd.pointer(a_indptr),
        simd.pointer(a_indices),
        simd.pointer(a),
        simd.pointer(b_indptr),
        simd.pointer(b),
        simd.pointer(c_indptr),
        simd.pointer(product_ptr),
        simd.pointer(positions),
        simd.pointer(out),
    )
    if batch == 1:
        _rows_of_one(*args, low, high)
    elif a_wide and b_wide:
        _rows(*args, batch, True, True, low, high)
    elif a_wide:
        _rows(*args, batch, True, False, low, high)
    else:
        _rows(*args, batch, False, True, low, high)


@simd.device
def _rows_of_one(a_ptr, a_indices, a, b_ptr, b, c_ptr, product_ptr, positions, out, low, high):
    line = simd.lanes(out)  # about a cache line
    last = a_ptr[high] - 1
    for r in range(low, high):
        base, p = c_ptr[r], product_ptr[r]
        row = simd.advance(out, base)
        for i in range(c_ptr[r + 1] - base):
            row[i] = 0
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m, value = a_indices[k], a[k]
            begin = b_ptr[m]
            length = b_ptr[m + 1] - begin
            upcoming = b_ptr[a_indices[min(k + 1, last)]]  # rows of B are short and anywhere: the hardware cannot guess
            simd.prefetch(b, upcoming)
            simd.prefetch(b, upcoming + line)
            right, at = simd.advance(b, begin), simd.advance(positions, p)
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
def _rows(a_ptr, a_indices, a, b_ptr, b, c_ptr, product_ptr, positions, out, batch, a_wide, b_wide, low, high):
    width = simd.lanes(out)
    for r in range(low, high):
        for lane in range(0, batch, width):
            n = batch - lane
            if n >= width:
                _row(
                    a_ptr,
                    a_indices,
                    a,
                    b_ptr,
                    b,
                    c_ptr,
                    product_ptr,
                    positions,
                    out,
                    batch,
                    a_wide,
                    b_wide,
                    r,
                    lane,
                    n,
                    True,
                )
            else:
                _row(
                    a_ptr,
                    a_indices,
                    a,
                    b_ptr,
                    b,
                    c_ptr,
                    product_ptr,
                    positions,
                    out,
                    batch,
                    a_wide,
                    b_wide,
                    r,
                    lane,
                    n,
                    False,
                )


@simd.device
def _row(a_ptr, a_indices, a, b_ptr, b, c_ptr, product_ptr, positions, out, batch, a_wide, b_wide, r, lane, n, full):
    """One row of the product for one lane block."""
    base, p = c_ptr[r], product_ptr[r]
    zero = simd.zeros(out)
    for i in range(base, c_ptr[r + 1]):
        put(out, i, batch, lane, n, full, zero)
    for k in range(a_ptr[r], a_ptr[r + 1]):
        m = a_indices[k]
        left = take(a, k, batch, lane, n, a_wide, full)
        begin = b_ptr[m]
        length = b_ptr[m + 1] - begin
        for q in range(length):
            c = base + positions[p + q]
            right = take(b, begin + q, batch, lane, n, b_wide, full)
            put(out, c, batch, lane, n, full, simd.fma(left, right, take(out, c, batch, lane, n, True, full)))
        p += length


@numba.njit(**INNER_SERIAL)
def _spgemm_part(
    part, a_indptr, a_indices, a, b_indptr, b, c_indptr, product_ptr, positions, out, batch, a_wide, b_wide, row_cuts
):
    low, high = row_cuts[part], row_cuts[part + 1]
    _spgemm(
        a_indptr, a_indices, a, b_indptr, b, c_indptr, product_ptr, positions, out, batch, a_wide, b_wide, low, high
    )


@numba.njit(**SERIAL)
def _spgemm_parallel(team, parts, *args):
    in_parts(_spgemm_part, team, parts, args)
