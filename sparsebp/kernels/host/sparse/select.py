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
from sparsebp.kernels.host.engine.samples import Values, flat, pointers, put, take
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.kernels.host.sparse.csr import row_pointers, scale_entries
from sparsebp.kernels.operands import Rows, Terms


class SelectionKernels:
    """Host side of `spgemm_select_rows` and `spgemm_select_columns`."""

    def spgemm_select_rows(self, rows: Rows, a_data: Array, b_data: Array, out: Array) -> None:
        """Row r of C is row ``a_indices[k]`` of B times the one value of A in that row."""
        parts = parts_for(out.size)
        _select_rows(team(parts), parts, *rows, *flat(a_data, b_data, out), len(out), parts)

    def spgemm_select_columns(self, terms: Terms, a_data: Array, b_data: Array, out: Array) -> None:
        """Add product p of row r to ``out[c_indptr[r] + positions[p]]``."""
        batch, indexed = out.shape[1], terms.a_index is not None
        given = terms if indexed else terms._replace(a_index=terms.b_index)
        parts = parts_for((terms.positions.size + out.shape[0]) * batch, vectors=batch > 1)
        arguments = (*given, *flat(a_data, b_data, out), indexed)
        _select_columns(team(parts), len(terms.row_cuts) - 1, *arguments)


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _select_rows(team, parts, *args):
    in_parts(_select_rows_part, team, parts, (Rows(*args[:4]), Values(*args[4:10]), args[10], args[11]))


@numba.njit(**INNER_SERIAL)
def _select_rows_part(part, rows, values, nnz, parts):
    low, high = row_at(rows.c_indptr, share(part, parts, nnz)), row_at(rows.c_indptr, share(part + 1, parts, nnz))
    a_indptr, a_indices, b_indptr, c_indptr = row_pointers(rows)
    v = pointers(values)
    for r in range(low, high):
        k = a_indptr[r]
        if k == a_indptr[r + 1]:
            continue
        begin = b_indptr[a_indices[k]]
        length = b_indptr[a_indices[k] + 1] - begin
        scale_entries(v, k, begin, c_indptr[r], length)


@numba.njit(**SERIAL)
def _select_columns(team, parts, *args):
    in_parts(_select_columns_part, team, parts, (Terms(*args[:6]), Values(*args[6:12]), args[12]))


@numba.njit(**INNER_SERIAL)
def _select_columns_part(part, terms, values, indexed):
    v, low, high = pointers(values), terms.row_cuts[part], terms.row_cuts[part + 1]
    at = (
        simd.pointer(terms.product_ptr),
        simd.pointer(terms.a_index),
        simd.pointer(terms.b_index),
        simd.pointer(terms.c_indptr),
        simd.pointer(terms.positions),
    )
    if v.batch == 1:
        _columns_of_one(at, indexed, v, low, high)
    elif v.a_batched and v.b_batched:
        _columns(at, indexed, v, True, True, low, high)
    elif v.a_batched:
        _columns(at, indexed, v, True, False, low, high)
    else:
        _columns(at, indexed, v, False, True, low, high)


@simd.device
def _columns_of_one(terms, indexed, v, low, high):
    product_ptr, a_index, b_index, c_indptr, positions = terms
    a, b = v.a, v.b
    for r in range(low, high):
        base = c_indptr[r]
        row = simd.advance(v.out, base)
        for i in range(c_indptr[r + 1] - base):
            row[i] = 0
        if indexed:
            for p in range(product_ptr[r], product_ptr[r + 1]):
                row[positions[p]] += a[a_index[p]] * b[b_index[p]]
        else:
            for p in range(product_ptr[r], product_ptr[r + 1]):
                row[positions[p]] += a[p] * b[b_index[p]]


@simd.device
def _columns(terms, indexed, v, a_batched, b_batched, low, high):
    product_ptr, a_index, b_index, c_indptr, positions = terms
    out, batch = v.out, v.batch
    width = simd.lanes(out)
    zero = simd.zeros(out)
    for r in range(low, high):
        base = c_indptr[r]
        for i in range(base * batch, c_indptr[r + 1] * batch, width):
            simd.store_up_to(out, i, zero, c_indptr[r + 1] * batch - i)
        for p in range(product_ptr[r], product_ptr[r + 1]):
            k = a_index[p] if indexed else p
            q, c = b_index[p], base + positions[p]
            s = 0
            while s + width <= batch:
                _add(v, k, q, c, s, a_batched, b_batched, True)
                s += width
            if s < batch:
                _add(v, k, q, c, s, a_batched, b_batched, False)


@simd.device
def _add(v, k, q, c, s, a_batched, b_batched, full):
    batch, n = v.batch, v.batch - s
    left, right = take(v.a, k, batch, s, n, a_batched, full), take(v.b, q, batch, s, n, b_batched, full)
    put(v.out, c, batch, s, n, full, simd.fma(left, right, take(v.out, c, batch, s, n, True, full)))
