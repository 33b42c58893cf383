"""Patterns that are Kronecker products of small ones, channels and axes; each entry carries an index beside.

The index, of a convolution's weight or of a place in a pooling window, is the sum of what the factors' entries add.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import numpy as np

from sparsebp.patterns.validate import index_dtype
from sparsebp.patterns.windows import Windows


class Factor(NamedTuple):
    """A CSR pattern of the Kronecker product, and what each entry adds to the index."""

    indptr: np.ndarray
    columns: np.ndarray
    n_columns: int
    offset: np.ndarray

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    def transposed(self) -> Factor:
        """Return the transposed pattern with the entries' offsets."""
        order = np.argsort(self.columns, kind="stable")
        rows = np.repeat(np.arange(self.n_rows), np.diff(self.indptr))
        indptr = np.concatenate(([0], np.cumsum(np.bincount(self.columns, minlength=self.n_columns))))
        return Factor(indptr, rows[order], self.n_rows, self.offset[order])


def window_factors(sizes: tuple[int, ...], windows: Windows) -> list[Factor]:
    """Return the pattern of every axis: input i is in window o where ``i + before == o * stride + tap * dilation``."""
    factors = []
    for axis, (size, count) in enumerate(zip(sizes, windows.output_size(sizes), strict=True)):
        taps = np.arange(windows.kernel[axis])[::-1]  # the last tap belongs to the first output
        start = np.arange(size)[:, None] + windows.before[axis] - taps * windows.dilation[axis]
        output, rest = np.divmod(start, windows.stride[axis])
        met = (rest == 0) & (output >= 0) & (output < count)
        indptr = np.concatenate(([0], np.cumsum(met.sum(axis=1))))
        offset = np.broadcast_to(taps, met.shape)[met] * prod(windows.kernel[axis + 1 :])
        factors.append(Factor(indptr, output[met], count, offset))
    return factors


def kron(factors: Sequence[Factor], offset_type: np.dtype | type[np.integer]) -> Factor:
    """Return the Kronecker product, the columns as narrow as a pattern's; offsets of entries that meet are added."""
    shape = (prod(f.n_rows for f in factors), prod(f.n_columns for f in factors))
    column_type = index_dtype(prod(len(f.columns) for f in factors), shape)
    # From the last factor on: then what is repeated are the longest runs.
    return reduce(lambda right, left: _product(left, right, column_type, np.dtype(offset_type)), reversed(factors))


def _product(left: Factor, right: Factor, column_type: np.dtype, offset_type: np.dtype) -> Factor:
    """Row (r, s) of the product is, for every entry of row r of `left`, one run: row s of `right`, moved."""
    left_lengths, right_lengths = np.diff(left.indptr), np.diff(right.indptr)
    rows, n_right = len(left_lengths) * len(right_lengths), len(right_lengths)
    indptr = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum((left_lengths[:, None] * right_lengths).reshape(-1), out=indptr[1:])
    # the runs in order: which entry of left, which row of right
    runs_of_row = np.repeat(left_lengths, n_right)
    run_row = np.repeat(np.arange(rows), runs_of_row)
    first_run = np.cumsum(runs_of_row) - runs_of_row
    left_row, right_row = np.divmod(run_row, max(n_right, 1))
    entry = left.indptr[left_row] + np.arange(len(run_row)) - first_run[run_row]
    length = right_lengths[right_row]
    start = right.indptr[right_row] - (np.cumsum(length) - length)
    source_type = index_dtype(int(indptr[-1]), (0, 0))
    source = np.arange(indptr[-1], dtype=source_type)
    source += np.repeat(start.astype(source_type), length)
    columns = right.columns.astype(column_type)[source]
    columns += np.repeat((left.columns[entry] * right.n_columns).astype(column_type), length)
    offset = right.offset.astype(offset_type)[source]
    offset += np.repeat(left.offset[entry].astype(offset_type), length)
    return Factor(indptr, columns, left.n_columns * right.n_columns, offset)
