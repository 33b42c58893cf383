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
from sparsebp.kernels.host.engine.samples import Values, flat, pointers, put, take
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.kernels.host.sparse.csr import row_pointers
from sparsebp.kernels.operands import Columns, Rows


class AccumulateKernels:
    """Host side of `spgemm_accumulate`."""

    def spgemm_accumulate(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """Values of C = A @ B through a dense row of sums, one a part of the rows."""
        products = len(rows.a_indices) * len(b_data) // max(len(rows.b_indptr) - 1, 1)  # on average
        batch = out.shape[1]
        parts = parts_for((products + len(out)) * batch, vectors=batch > 1)
        _accumulate(team(parts), len(columns.row_cuts) - 1, *rows, *columns, *flat(a_data, b_data, out))


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _accumulate(team, parts, *args):
    in_parts(_part, team, parts, (Rows(*args[:4]), Columns(*args[4:8]), Values(*args[8:])))


@numba.njit(**INNER_SERIAL)
def _part(part, rows, columns, values):
    width = simd.lanes(simd.pointer(values.out))
    sums = np.empty(columns.n * (1 if values.batch == 1 else width) + width, values.out.dtype)
    _with_sums(part, rows, columns, values, sums)


@numba.njit(**INNER_SERIAL)
def _with_sums(part, arrays, columns, values, sums):
    rows, v, low, high = row_pointers(arrays), pointers(values), columns.row_cuts[part], columns.row_cuts[part + 1]
    b_indices, c_indices = simd.pointer(columns.b_indices), simd.pointer(columns.c_indices)
    if v.batch == 1:
        _rows_of_one(rows, b_indices, c_indices, simd.pointer(sums), v, low, high)
        return
    row = simd.aligned_pointer(sums)
    if v.a_batched and v.b_batched:
        _rows(rows, b_indices, c_indices, row, v, True, True, low, high)
    elif v.a_batched:
        _rows(rows, b_indices, c_indices, row, v, True, False, low, high)
    else:
        _rows(rows, b_indices, c_indices, row, v, False, True, low, high)


@simd.device
def _rows_of_one(rows, b_indices, c_indices, row, v, low, high):
    a_indptr, a_indices, b_indptr, c_indptr = rows
    width = simd.lanes(v.out)
    for r in range(low, high):
        begin, end = c_indptr[r], c_indptr[r + 1]
        for i in range(begin, end):
            row[c_indices[i]] = 0
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m, value = a_indices[k], v.a[k]
            first = b_indptr[m]
            length = b_indptr[m + 1] - first
            right, at = simd.advance(v.b, first), simd.advance(b_indices, first)
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
            simd.store(v.out, i, simd.load_at(row, c_indices, i))
        for i in range(whole, end):
            v.out[i] = row[c_indices[i]]


@simd.device
def _rows(rows, b_indices, c_indices, row, v, a_batched, b_batched, low, high):
    width = simd.lanes(v.out)
    for r in range(low, high):
        s = 0
        while s + width <= v.batch:
            _row(rows, b_indices, c_indices, row, v, a_batched, b_batched, r, s, True)
            s += width
        if s < v.batch:
            _row(rows, b_indices, c_indices, row, v, a_batched, b_batched, r, s, False)


@simd.device
def _row(rows, b_indices, c_indices, row, v, a_batched, b_batched, r, s, full):
    """One row of C for one block of samples; a column has a whole vector of sums."""
    a_indptr, a_indices, b_indptr, c_indptr = rows
    batch, n, width, zero = v.batch, v.batch - s, simd.lanes(v.out), simd.zeros(v.out)
    for i in range(c_indptr[r], c_indptr[r + 1]):
        simd.store(row, c_indices[i] * width, zero)
    for k in range(a_indptr[r], a_indptr[r + 1]):
        m = a_indices[k]
        left = take(v.a, k, batch, s, n, a_batched, full)
        for q in range(b_indptr[m], b_indptr[m + 1]):
            j = b_indices[q] * width
            simd.store(row, j, simd.fma(left, take(v.b, q, batch, s, n, b_batched, full), simd.load(row, j)))
    for i in range(c_indptr[r], c_indptr[r + 1]):
        put(v.out, i, batch, s, n, full, simd.load(row, c_indices[i] * width))
