"""What repeats in a pattern, on the host: dense blocks, and rows that are equal but for a shift."""

from __future__ import annotations

import numba
import numpy as np

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


# ---- rows that are equal but for a shift, and their runs: see `RowShapes` of `sparsebp.kernels.operands` ------------


@numba.njit(**SERIAL)
def find_row_shapes(indptr, indices, shape, first, examples):
    """Write the number of every row's shape to `shape` and its first column to `first`, (m,) each.

    Writes a row of each shape to `examples` (most,); returns how many shapes there are, `most` + 1 if more than that.
    """
    ptr, columns, count, last = simd.pointer(indptr), simd.pointer(indices), 0, 0
    for r in range(len(indptr) - 1):
        begin = np.int64(ptr[r])
        n = np.int64(ptr[r + 1]) - begin
        first[r] = columns[begin] if n > 0 else 0
        row, found = simd.advance(columns, begin), -1
        for i in range(count):
            s = last + i if last + i < count else last + i - count  # most probably the last one's
            other = np.int64(ptr[examples[s]])
            if np.int64(ptr[examples[s] + 1]) - other == n and _same(row, simd.advance(columns, other), n):
                found = s
                break
        if found < 0:
            if count == len(examples):
                return count + 1
            examples[count] = r
            found, count = count, count + 1
        shape[r] = last = found
    return count


@simd.device
def _same(a, b, n):
    """Return whether two rows of `n` columns are equal but for a shift."""
    if n == 0:
        return True
    shift = a[0] - b[0]
    for begin in range(0, n, 64):
        other = shift ^ shift
        for i in range(begin, min(begin + 64, n)):
            other |= (a[i] - b[i]) ^ shift
        if other != 0:
            return False
    return True


@numba.njit(**SERIAL)
def write_runs(indptr, indices, examples, run_ptr, whole, columns, ends):
    """Write the runs of the rows `examples` as `RowShapes` has them; returns how many there are.

    `columns`, `ends`: room for as many as these rows have entries.
    """
    u = np.int64(0)
    for s in range(len(examples)):
        begin, n = np.int64(indptr[examples[s]]), np.int64(indptr[examples[s] + 1]) - np.int64(indptr[examples[s]])
        run_ptr[s] = u
        for k in range(n):
            if k == 0 or indices[begin + k] != indices[begin + k - 1] + 1:
                columns[u] = indices[begin + k] - indices[begin]
                u += 1
            ends[u - 1] = k + 1
        whole[s], done = run_ptr[s], np.int64(0)
        width = indices[begin + n - 1] - indices[begin] + 1 if n > 0 else 0
        for v in range(run_ptr[s], u):
            fours = (np.int64(ends[v]) - done + 3) // 4 * 4
            if done + fours > n or columns[v] + fours > width:
                break
            whole[s], done = v + 1, np.int64(ends[v])
    run_ptr[len(examples)] = u
    return u


@numba.njit(**SERIAL)
def cross_pages(shape, first, run_ptr, columns, ends, page):
    """Say whether a page ends within any run, or a run of two rows of one shape lies in pages of different distance."""
    furthest = np.zeros(len(run_ptr) - 1, np.int64)  # where in its page a row of every shape begins at most
    for r in range(len(shape)):
        furthest[shape[r]] = max(furthest[shape[r]], np.int64(first[r]) % page)
    for s in range(len(run_ptr) - 1):
        begin = np.int64(0)
        for u in range(run_ptr[s], run_ptr[s + 1]):
            last = np.int64(columns[u]) % page + ends[u] - begin - 1
            if furthest[s] + last >= page:
                return True
            begin = np.int64(ends[u])
    return False
