"""Products that keep nothing per product, on the host: a dense row collects the sums (Gustavson's algorithm).

For products too many to index, and where C has far fewer entries than there are products: then the columns of B, read
again and again, stay in the cache, while an index of every product would come from memory.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for
from sparsebp.kernels.host.engine.samples import put, take
from sparsebp.kernels.host.engine.team import in_parts, team


class AccumulateKernels:
    """Host side of `spgemm_accumulate` of `sparsebp.kernels.api.Kernels`."""

    def spgemm_accumulate(
        self, a_indptr: Array, a_indices: Array, a_data: Array, b_indptr: Array, b_indices: Array, b_data: Array,
        c_indptr: Array, c_indices: Array, columns: int, row_cuts: Array, out: Array,
    ) -> None:  # fmt: skip
        """Values of C = A @ B through a dense row of `columns` sums, one a part of the rows."""
        batch = out.shape[-1]
        arguments = (
            a_indptr,
            a_indices,
            a_data.reshape(-1),
            b_indptr,
            b_indices,
            b_data.reshape(-1),
            c_indptr,
            c_indices,
            columns,
            out.reshape(-1),
            batch,
            a_data.shape[1] == batch,
            b_data.shape[1] == batch,
        )
        work = len(a_indices) * len(b_data) // max(len(b_indptr) - 1, 1) + len(out)  # products, on average
        parts = parts_for(work * batch, vectors=batch > 1)
        _accumulate_parallel(team(parts), len(row_cuts) - 1, *arguments, row_cuts)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _accumulate(
    a_indptr, a_indices, a, b_indptr, b_indices, b, c_indptr, c_indices, columns, out, batch, a_wide, b_wide, low, high
):
    sums = np.empty(columns * (1 if batch == 1 else _lanes(out)) + _lanes(out), out.dtype)
    _with_sums(
        a_indptr, a_indices, a, b_indptr, b_indices, b, c_indptr, c_indices, sums, out, batch, a_wide, b_wide, low, high
    )


@numba.njit(**INNER_SERIAL)
def _lanes(out):
    return simd.lanes(simd.pointer(out))


@numba.njit(**INNER_SERIAL)
def _with_sums(
    a_indptr, a_indices, a, b_indptr, b_indices, b, c_indptr, c_indices, sums, out, batch, a_wide, b_wide, low, high
):
    args = (
        simd.pointer(a_indptr),
        simd.pointer(a_indices),
        simd.pointer(a),
        simd.pointer(b_indptr),
        simd.pointer(b_indices),
        simd.pointer(b),
        simd.pointer(c_indptr),
        simd.pointer(c_indices),
    )
    if batch == 1:
        _rows_of_one(*args, simd.pointer(sums), simd.pointer(out), low, high)
        return
    row, result = simd.aligned_pointer(sums), simd.pointer(out)
    if a_wide and b_wide:
        _rows(*args, row, result, batch, True, True, low, high)
    elif a_wide:
        _rows(*args, row, result, batch, True, False, low, high)
    else:
        _rows(*args, row, result, batch, False, True, low, high)


@simd.device
def _rows_of_one(a_ptr, a_indices, a, b_ptr, b_indices, b, c_ptr, c_indices, row, out, low, high):
    width = simd.lanes(out)
    for r in range(low, high):
        begin, end = c_ptr[r], c_ptr[r + 1]
        for i in range(begin, end):
            row[c_indices[i]] = 0
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m, value = a_indices[k], a[k]
            first = b_ptr[m]
            length = b_ptr[m + 1] - first
            right, at = simd.advance(b, first), simd.advance(b_indices, first)
            whole = length - length % 4
            for q in range(0, whole, 4):
                j0, j1, j2, j3 = at[q], at[q + 1], at[q + 2], at[q + 3]
                r0, r1, r2, r3 = right[q], right[q + 1], right[q + 2], right[q + 3]
                row[j0] += value * r0
                row[j1] += value * r1
                row[j2] += value * r2
                row[j3] += value * r3
            for q in range(whole, length):
                row[at[q]] += value * right[q]
        whole = end - (end - begin) % width
        for i in range(begin, whole, width):
            simd.store(out, i, simd.load_at(row, c_indices, i))
        for i in range(whole, end):
            out[i] = row[c_indices[i]]


@simd.device
def _rows(a_ptr, a_indices, a, b_ptr, b_indices, b, c_ptr, c_indices, row, out, batch, a_wide, b_wide, low, high):
    width = simd.lanes(out)
    for r in range(low, high):
        lane = 0
        while lane + width <= batch:
            _row(a_ptr, a_indices, a, b_ptr, b_indices, b, c_ptr, c_indices, row, out, batch, a_wide, b_wide, r, lane,
                 width, True)  # fmt: skip
            lane += width
        if lane < batch:
            _row(a_ptr, a_indices, a, b_ptr, b_indices, b, c_ptr, c_indices, row, out, batch, a_wide, b_wide, r, lane,
                 batch - lane, False)  # fmt: skip


@simd.device
def _row(a_ptr, a_indices, a, b_ptr, b_indices, b, c_ptr, c_indices, row, out, batch, a_wide, b_wide, r, lane, n, full):
    """One row of C for one lane block; a column has a whole vector of sums."""
    width = simd.lanes(out)
    zero = simd.zeros(out)
    for i in range(c_ptr[r], c_ptr[r + 1]):
        simd.store(row, c_indices[i] * width, zero)
    for k in range(a_ptr[r], a_ptr[r + 1]):
        m = a_indices[k]
        left = take(a, k, batch, lane, n, a_wide, full)
        for q in range(b_ptr[m], b_ptr[m + 1]):
            j = b_indices[q] * width
            simd.store(row, j, simd.fma(left, take(b, q, batch, lane, n, b_wide, full), simd.load(row, j)))
    for i in range(c_ptr[r], c_ptr[r + 1]):
        put(out, i, batch, lane, n, full, simd.load(row, c_indices[i] * width))


@numba.njit(**INNER_SERIAL)
def _accumulate_part(
    part, a_indptr, a_indices, a, b_indptr, b_indices, b, c_indptr, c_indices, columns, out, batch, a_wide, b_wide,
    row_cuts,
):  # fmt: skip
    low, high = row_cuts[part], row_cuts[part + 1]
    _accumulate(
        a_indptr, a_indices, a, b_indptr, b_indices, b, c_indptr, c_indices, columns, out, batch, a_wide, b_wide,
        low, high,
    )  # fmt: skip


@numba.njit(**SERIAL)
def _accumulate_parallel(team, parts, *args):
    in_parts(_accumulate_part, team, parts, args)
