"""Products with selections, matrices of at most one entry a row, on the host.

A selection on the left picks rows of B and scales them: the entries of a row of C lie side by side as they do in B, so
whole vectors are moved and nothing is indexed. A selection on the right (max-pooling, say) sends every entry of A to
one place in its row of C: one position an entry of A, and no loop over rows of B.
"""

from __future__ import annotations

import numba

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for, row_at, share
from sparsebp.kernels.host.engine.samples import put, take
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.kernels.host.sparse.csr import scale_entries


class SelectionKernels:
    """Host side of `spgemm_select_rows` and `spgemm_select_columns` of `sparsebp.kernels.api.Kernels`."""

    def spgemm_select_rows(
        self, a_indptr: Array, a_indices: Array, a_data: Array, b_indptr: Array, b_data: Array, c_indptr: Array,
        out: Array,
    ) -> None:  # fmt: skip
        """Row r of C is row ``a_indices[k]`` of B times the one value of A in that row."""
        batch = out.shape[-1]
        arguments = (
            a_indptr,
            a_indices,
            a_data.reshape(-1),
            b_indptr,
            b_data.reshape(-1),
            c_indptr,
            out.reshape(-1),
            batch,
            a_data.shape[1] == batch,
            b_data.shape[1] == batch,
        )
        parts = parts_for(out.size)
        _select_rows_parallel(team(parts), parts, *arguments, len(out), parts)

    def spgemm_select_columns(
        self, product_ptr: Array, a_index: Array | None, a_data: Array, b_index: Array, b_data: Array,
        c_indptr: Array, positions: Array, row_cuts: Array, out: Array,
    ) -> None:  # fmt: skip
        """Add product p of row r to ``out[c_indptr[r] + positions[p]]``; `out` is overwritten."""
        batch = out.shape[-1]
        arguments = (
            product_ptr,
            b_index if a_index is None else a_index,
            a_index is not None,
            a_data.reshape(-1),
            b_index,
            b_data.reshape(-1),
            c_indptr,
            positions,
            out.reshape(-1),
            batch,
            a_data.shape[1] == batch,
            b_data.shape[1] == batch,
        )
        parts = parts_for((positions.size + out.shape[0]) * batch, vectors=batch > 1)
        _select_columns_parallel(team(parts), len(row_cuts) - 1, *arguments, row_cuts)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _select_rows(a_indptr, a_indices, a, b_indptr, b, c_indptr, out, batch, a_wide, b_wide, low, high):
    a_ptr, a_columns, b_ptr, c_ptr = (
        simd.pointer(a_indptr),
        simd.pointer(a_indices),
        simd.pointer(b_indptr),
        simd.pointer(c_indptr),
    )
    left, right, result = simd.pointer(a), simd.pointer(b), simd.pointer(out)
    for r in range(low, high):
        k = a_ptr[r]
        if k == a_ptr[r + 1]:
            continue
        begin = b_ptr[a_columns[k]]
        length = b_ptr[a_columns[k] + 1] - begin
        scale_entries(left, k, right, begin, result, c_ptr[r], length, batch, a_wide, b_wide)


@numba.njit(**INNER_SERIAL)
def _select_rows_part(part, a_indptr, a_indices, a, b_indptr, b, c_indptr, out, batch, a_wide, b_wide, nnz, parts):
    low, high = row_at(c_indptr, share(part, parts, nnz)), row_at(c_indptr, share(part + 1, parts, nnz))
    _select_rows(a_indptr, a_indices, a, b_indptr, b, c_indptr, out, batch, a_wide, b_wide, low, high)


@numba.njit(**SERIAL)
def _select_rows_parallel(team, parts, *args):
    in_parts(_select_rows_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _select_columns(
    product_ptr, a_index, a_indexed, a, b_index, b, c_indptr, positions, out, batch, a_wide, b_wide, low, high
):
    args = (
        simd.pointer(product_ptr),
        simd.pointer(a_index),
        a_indexed,
        simd.pointer(a),
        simd.pointer(b_index),
        simd.pointer(b),
        simd.pointer(c_indptr),
        simd.pointer(positions),
        simd.pointer(out),
    )
    if batch == 1:
        _columns_of_one(*args, low, high)
    elif a_wide and b_wide:
        _columns(*args, batch, True, True, low, high)
    elif a_wide:
        _columns(*args, batch, True, False, low, high)
    else:
        _columns(*args, batch, False, True, low, high)


@simd.device
def _columns_of_one(product_ptr, a_at, a_indexed, a, b_at, b, c_ptr, positions, out, low, high):
    for r in range(low, high):
        base = c_ptr[r]
        row = simd.advance(out, base)
        for i in range(c_ptr[r + 1] - base):
            row[i] = 0
        if a_indexed:
            for p in range(product_ptr[r], product_ptr[r + 1]):
                row[positions[p]] += a[a_at[p]] * b[b_at[p]]
        else:
            for p in range(product_ptr[r], product_ptr[r + 1]):
                row[positions[p]] += a[p] * b[b_at[p]]


@simd.device
def _columns(product_ptr, a_at, a_indexed, a, b_at, b, c_ptr, positions, out, batch, a_wide, b_wide, low, high):
    width = simd.lanes(out)
    zero = simd.zeros(out)
    for r in range(low, high):
        base = c_ptr[r]
        for i in range(base * batch, c_ptr[r + 1] * batch, width):
            simd.store_up_to(out, i, zero, c_ptr[r + 1] * batch - i)
        for p in range(product_ptr[r], product_ptr[r + 1]):
            k = a_at[p] if a_indexed else p
            q, c = b_at[p], base + positions[p]
            lane = 0
            while lane + width <= batch:
                _add(a, k, b, q, out, c, batch, lane, width, a_wide, b_wide, True)
                lane += width
            if lane < batch:
                _add(a, k, b, q, out, c, batch, lane, batch - lane, a_wide, b_wide, False)


@simd.device
def _add(a, k, b, q, out, c, batch, lane, n, a_wide, b_wide, full):
    left, right = take(a, k, batch, lane, n, a_wide, full), take(b, q, batch, lane, n, b_wide, full)
    put(out, c, batch, lane, n, full, simd.fma(left, right, take(out, c, batch, lane, n, True, full)))


@numba.njit(**INNER_SERIAL)
def _select_columns_part(
    part, product_ptr, a_index, a_indexed, a, b_index, b, c_indptr, positions, out, batch, a_wide, b_wide, row_cuts
):
    low, high = row_cuts[part], row_cuts[part + 1]
    _select_columns(
        product_ptr, a_index, a_indexed, a, b_index, b, c_indptr, positions, out, batch, a_wide, b_wide, low, high
    )


@numba.njit(**SERIAL)
def _select_columns_parallel(team, parts, *args):
    in_parts(_select_columns_part, team, parts, args)
