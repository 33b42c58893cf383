"""Symbolic phase of sparse products, in Numba: the pattern of C = A @ B and where every product lands in it.

Gustavson's algorithm (F. Gustavson, "Two fast algorithms for sparse matrices", ACM TOMS 4, 1978) on structure alone:
once to count the entries of every row of C, once to write them sorted, and once to write each product's position.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.parts import PARALLEL, SERIAL

# The functions below are compiled: their arguments are index arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


def row_cuts(work: np.ndarray, parts: int) -> np.ndarray:
    """Split rows into at most `parts` parts of about equal work.

    Parameters
    ----------
    work
        Running sum of the rows' work, shape (n_rows + 1,), from 0.
    parts
        How many parts to aim at.

    Returns
    -------
    numpy.ndarray
        Row numbers where parts begin, and the number of rows last; int64, strictly increasing (or 0, 0 for no rows).
    """
    rows = len(work) - 1
    inner = np.searchsorted(work, work[-1] * np.arange(1, parts) // parts)
    cuts = np.unique(np.concatenate(([0], inner, [rows])).clip(0, rows))
    return cuts.astype(np.int64) if rows else np.zeros(2, np.int64)


@numba.njit(**SERIAL)
def _count(a_indptr, a_indices, b_indptr, b_indices, columns, low, high, counts):
    seen = np.full(columns, -1, np.int64)  # the last row of C in which a column was met
    for r in range(low, high):
        count = 0
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m = a_indices[k]
            for q in range(b_indptr[m], b_indptr[m + 1]):
                j = b_indices[q]
                if seen[j] != r:
                    seen[j] = r
                    count += 1
        counts[r] = count


@numba.njit(**PARALLEL)
def count_entries(a_indptr, a_indices, b_indptr, b_indices, columns, cuts, counts):
    """Write the number of entries of every row of C to `counts` (m,)."""
    for part in numba.prange(len(cuts) - 1):
        _count(a_indptr, a_indices, b_indptr, b_indices, columns, cuts[part], cuts[part + 1], counts)


@numba.njit(**SERIAL)
def _structure(a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, columns, low, high):
    seen = np.full(columns, -1, np.int64)
    for r in range(low, high):
        begin, end = c_indptr[r], c_indptr[r + 1]
        at = begin
        first, last = columns, -1
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m = a_indices[k]
            for q in range(b_indptr[m], b_indptr[m + 1]):
                j = b_indices[q]
                if seen[j] != r:
                    seen[j] = r
                    c_indices[at] = j
                    at += 1
                    first, last = min(first, j), max(last, j)
        if last - first < 16 * (end - begin):  # the marks between the first and the last column are cheaper than a sort
            at = begin
            for j in range(first, last + 1):
                if seen[j] == r:
                    c_indices[at] = j
                    at += 1
        else:
            c_indices[begin:end].sort()


@numba.njit(**PARALLEL)
def write_structure(a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, columns, cuts):
    """Write the sorted columns of every row of C to `c_indices` (nnz_c,)."""
    for part in numba.prange(len(cuts) - 1):
        low, high = cuts[part], cuts[part + 1]
        _structure(a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, columns, low, high)


@numba.njit(**SERIAL)
def _positions(
    a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, product_ptr, columns, low, high, positions
):
    place = np.empty(columns, np.int64)
    for r in range(low, high):
        begin = c_indptr[r]
        for i in range(begin, c_indptr[r + 1]):
            place[c_indices[i]] = i - begin
        p = product_ptr[r]
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m = a_indices[k]
            for q in range(b_indptr[m], b_indptr[m + 1]):
                positions[p] = place[b_indices[q]]
                p += 1


@numba.njit(**PARALLEL)
def write_positions(
    a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, product_ptr, columns, cuts, positions
):
    """Write where in its row of C every product lands, in Gustavson's order, to `positions` (n_products,)."""
    for part in numba.prange(len(cuts) - 1):
        low, high = cuts[part], cuts[part + 1]
        _positions(
            a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, product_ptr, columns, low, high, positions
        )


@numba.njit(**SERIAL)
def write_pairs(a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, columns, a_index, b_index):
    """Write which entries of A and B the one product of every entry of C multiplies, to two arrays (nnz_c,)."""
    place = np.empty(columns, np.int64)
    for r in range(len(a_indptr) - 1):
        for i in range(c_indptr[r], c_indptr[r + 1]):
            place[c_indices[i]] = i
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m = a_indices[k]
            for q in range(b_indptr[m], b_indptr[m + 1]):
                i = place[b_indices[q]]
                a_index[i] = k
                b_index[i] = q
