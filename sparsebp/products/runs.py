"""Runs of neighbouring columns in the rows of a pattern, and where they land in a product, in Numba.

A run of a row of B is a run of every row of C = A @ B that the row takes part in: C has all columns of it, sorted. So
the place of its first column stands for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.patterns.sparsity import SparsityPattern


class Runs(NamedTuple):
    """The rows of a pattern as runs; rows with the same columns that follow one another share a shape.

    Attributes
    ----------
    shapes : numpy.ndarray
        Number of every row's shape, (n_rows,).
    run_ptr : numpy.ndarray
        Where every shape's runs begin, (n_shapes + 1,).
    lengths : numpy.ndarray
        Number of columns in every run, (n_runs,).
    """

    shapes: np.ndarray
    run_ptr: np.ndarray
    lengths: np.ndarray


def find_runs(pattern: SparsityPattern) -> Runs:
    """Return the runs of the rows of `pattern`, as arrays of its index type."""
    rows = pattern.shape[0]
    shapes = np.empty(rows, pattern.indptr.dtype)
    runs_of_row = np.empty(rows, np.int64)
    _shapes(pattern.indptr, pattern.indices, shapes, runs_of_row)
    first = np.flatnonzero(np.diff(shapes, prepend=-1)) if rows else np.empty(0, np.int64)
    run_ptr = np.concatenate(([0], np.cumsum(runs_of_row[first]))).astype(pattern.indptr.dtype)
    lengths = np.empty(int(run_ptr[-1]), pattern.indptr.dtype)
    _lengths(pattern.indptr, pattern.indices, first, lengths)
    return Runs(shapes, run_ptr, lengths)


def write_starts(
    a: SparsityPattern,
    b: SparsityPattern,
    found: Runs,
    c: SparsityPattern,
    start_ptr: np.ndarray,
    cuts: np.ndarray,
    starts: np.ndarray,
) -> None:
    """Write where in its row of C every run of every group of A's entries begins.

    Parameters
    ----------
    a, b, c
        Patterns of the operands and of the product.
    found
        Runs of `b`.
    start_ptr
        Where every row's starts begin, (m + 1,) int64, from `count_starts`.
    cuts
        Rows where the parts of the work begin, and the number of rows.
    starts
        Written, (n_starts,) uint16 or uint32.
    """
    patterns = (a.indptr, a.indices, b.indptr, b.indices)
    _starts_parallel(team(), len(cuts) - 1, *patterns, *found, c.indptr, c.indices, start_ptr, c.shape[1], cuts, starts)


# The functions below are compiled: their arguments are index arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _shapes(indptr, indices, shapes, runs_of_row):
    shape = -1
    for r in range(len(indptr) - 1):
        begin, end = indptr[r], indptr[r + 1]
        same = r > 0 and end - begin == begin - indptr[r - 1]
        runs = 0
        for q in range(begin, end):
            if q == begin or indices[q] != indices[q - 1] + 1:
                runs += 1
            same = same and indices[q] == indices[q - (end - begin)]
        if not same:
            shape += 1
        shapes[r] = shape
        runs_of_row[r] = runs


@numba.njit(**SERIAL)
def _lengths(indptr, indices, rows, lengths):
    u = -1
    for r in rows:
        for q in range(indptr[r], indptr[r + 1]):
            if q == indptr[r] or indices[q] != indices[q - 1] + 1:
                u += 1
                lengths[u] = 0
            lengths[u] += 1


@numba.njit(**SERIAL)
def count_starts(a_indptr, a_indices, shapes, run_ptr, counts):
    """Write how many starts every row of A has to `counts` (m,); return how many runs its products consist of."""
    pieces = 0
    for r in range(len(a_indptr) - 1):
        last, total = -1, 0
        for k in range(a_indptr[r], a_indptr[r + 1]):
            shape = shapes[a_indices[k]]
            runs = run_ptr[shape + 1] - run_ptr[shape]
            pieces += runs
            if shape != last:
                total += runs
                last = shape
        counts[r] = total
    return pieces


@numba.njit(**INNER_SERIAL)
def _starts(
    a_indptr, a_indices, b_indptr, b_indices, shapes, run_ptr, lengths, c_indptr, c_indices, start_ptr, columns, low,
    high, starts,
):  # fmt: skip
    place = np.empty(columns, np.int64)
    for r in range(low, high):
        begin = c_indptr[r]
        for i in range(begin, c_indptr[r + 1]):
            place[c_indices[i]] = i - begin
        last, s = -1, start_ptr[r]
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m = a_indices[k]
            shape = shapes[m]
            if shape == last:
                continue
            last, q = shape, b_indptr[m]
            for u in range(run_ptr[shape], run_ptr[shape + 1]):
                starts[s] = place[b_indices[q]]
                s += 1
                q += lengths[u]


@numba.njit(**INNER_SERIAL)
def _starts_part(
    part, a_indptr, a_indices, b_indptr, b_indices, shapes, run_ptr, lengths, c_indptr, c_indices, start_ptr, columns,
    cuts, starts,
):  # fmt: skip
    _starts(
        a_indptr, a_indices, b_indptr, b_indices, shapes, run_ptr, lengths, c_indptr, c_indices, start_ptr, columns,
        cuts[part], cuts[part + 1], starts,
    )  # fmt: skip


@numba.njit(**SERIAL)
def _starts_parallel(team, parts, *args):
    in_parts(_starts_part, team, parts, args)
