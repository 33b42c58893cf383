"""Products of nearly full sparse matrices on the host: written out with their zeros, dense ones are multiplied.

A multiply-add of these takes a twentieth of one that looks up where it belongs, so this pays long before all entries
are there. Sums run in the same order, and a zero changes none: results are those of `spgemm_accumulate`, bit by bit.
But a zero times an infinity or a NaN would be a NaN where the product of sparse matrices has nothing to add: values
that are not all finite are summed entry by entry.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.backend.memory import empty
from sparsebp.core.types import Array
from sparsebp.kernels.host.dense.dense import DenseKernels
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.kernels.host.sparse.accumulate import AccumulateKernels
from sparsebp.kernels.operands import Columns, Rows

_ONE = np.zeros(1, np.int64)
"""The number of the only matrix of a stack."""


class FilledKernels(AccumulateKernels, DenseKernels):
    """Host side of `spgemm_filled`."""

    def spgemm_filled(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """Values of C = A @ B by a product of dense matrices; those of a batch through dense rows of sums.

        With a batch a place is looked up once for a vector of samples, and nothing is left to gain.
        """
        if out.shape[1] > 1:
            self.spgemm_accumulate(rows, columns, a_data, b_data, out)
            return
        m, k, n = len(rows.a_indptr) - 1, len(rows.b_indptr) - 1, columns.n
        left, right = empty(np, (1, m, k, 1), out.dtype), empty(np, (1, k, n, 1), out.dtype)
        finite = _fill(rows.a_indptr, rows.a_indices, a_data, left)
        if not (finite and _fill(rows.b_indptr, columns.b_indices, b_data, right)):
            self.spgemm_accumulate(rows, columns, a_data, b_data, out)
            return
        full = len(out) == m * n
        result = out.reshape(1, m, n, 1) if full else empty(np, (1, m, n, 1), out.dtype)
        self.dense_matmul(left, _ONE, right, _ONE, result, _ONE)
        if not full:
            parts = parts_for(len(out))
            _read(team(parts), parts, rows.c_indptr, columns.c_indices, result, out.reshape(-1), parts)


def _fill(indptr: Array, indices: Array, data: Array, matrix: Array) -> bool:
    """Write the values on a pattern to a dense matrix (1, m, n, 1); say whether all are finite."""
    parts = parts_for(matrix.size)
    strange = np.zeros(parts, np.int64)
    _write(team(parts), parts, indptr, indices, data.reshape(-1), matrix, strange, parts)
    return not strange.any()


# The functions below are compiled: their arguments are index arrays, values (nnz,), dense matrices, sizes.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _write(team, parts, *args):
    in_parts(_write_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _write_part(part, indptr, indices, data, matrix, strange, parts):
    ptr, columns, values, (count, width) = (
        simd.pointer(indptr),
        simd.pointer(indices),
        simd.pointer(data),
        matrix.shape[1:3],
    )
    low, high = span(part, parts, count)
    whole, found = simd.pointer(matrix), False
    for r in range(low, high):
        row = simd.advance(whole, r * width)
        simd.clear(row, width)
        for e in range(ptr[r], ptr[r + 1]):
            value = values[e]
            row[columns[e]] = value
            found |= value - value != 0
    strange[part] = found


@numba.njit(**SERIAL)
def _read(team, parts, *args):
    in_parts(_read_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _read_part(part, indptr, indices, matrix, out, parts):
    ptr, columns, values, (count, width) = (
        simd.pointer(indptr),
        simd.pointer(indices),
        simd.pointer(out),
        matrix.shape[1:3],
    )
    low, high = span(part, parts, count)
    whole = simd.pointer(matrix)
    for r in range(low, high):
        row = simd.advance(whole, r * width)
        for e in range(ptr[r], ptr[r + 1]):
            values[e] = row[columns[e]]
