"""Small dense blocks in a pattern, on the host: of which size they are, and which entries consist of them."""

from __future__ import annotations

import numba

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import SERIAL

# The functions below are compiled: their arguments are index arrays and sizes.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def find_blocks(indptr, indices, rows, columns):
    """Return the largest (m, n) such that the matrix consists of dense and of empty blocks of that size, in a grid.

    Rows change their columns only where a multiple of m begins; runs of columns begin and end at multiples of n.
    """
    ptr, at = simd.pointer(indptr), simd.pointer(indices)
    m, n = rows, columns
    for r in range(rows):
        begin, end = ptr[r], ptr[r + 1]
        if r % m:
            before = ptr[r - 1]
            same = end - begin == begin - before
            for i in range(end - begin if same else 0):
                if at[begin + i] != at[before + i]:
                    same = False
                    break
            if same:  # and so its runs
                continue
            m = _divisor(m, r)
        if n > 1:
            last = -1
            for q in range(begin, end):
                if at[q] != last:
                    n = _divisor(_divisor(n, last if last > 0 else 0), at[q])
                    if n == 1:
                        break
                last = at[q] + 1
            n = _divisor(n, last if last > 0 else 0)
        if m == 1 and n == 1:
            break
    return m, n


@simd.device
def _divisor(a, b):
    """Return the greatest common divisor; 0 has all."""
    while b:
        a, b = b, a % b
    return a


@numba.njit(**SERIAL)
def write_blocks(block_ptr, block_columns, m, n, indptr, indices):
    """Write the pattern of a matrix of dense blocks, whose own pattern is given: (rows + 1,) and (nnz,)."""
    source, columns = simd.pointer(block_columns), simd.pointer(indices)
    at = 0
    indptr[0] = 0
    for g in range(len(block_ptr) - 1):
        for r in range(m):
            for q in range(block_ptr[g], block_ptr[g + 1]):
                first = source[q] * n
                for j in range(n):
                    columns[at] = first + j
                    at += 1
            indptr[g * m + r + 1] = at
