"""Patterns that are Kronecker products of small ones, channels and axes; each entry carries the index of its weight."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from sparsebp.patterns.validate import index_dtype
from sparsebp.patterns.windows import Windows


class Factor(NamedTuple):
    """A CSR pattern of the Kronecker product, and what each entry adds to the index of its weight; all int64."""

    indptr: np.ndarray
    columns: np.ndarray
    n_columns: int
    offset: np.ndarray

    def transposed(self) -> Factor:
        """Return the transposed pattern with the entries' offsets."""
        order = np.argsort(self.columns, kind="stable")
        rows = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        indptr = np.concatenate(([0], np.cumsum(np.bincount(self.columns, minlength=self.n_columns))))
        return Factor(indptr, rows[order], len(self.indptr) - 1, self.offset[order])


def axis_factor(sizes: tuple[int, ...], windows: Windows, axis: int) -> Factor:
    """Input position i meets output o through tap t where ``i + before == o * stride + t * dilation``."""
    n, n_out, kernel = sizes[axis], windows.output_size(sizes)[axis], windows.kernel[axis]
    taps = np.arange(kernel)[::-1]  # the last tap belongs to the first output
    start = np.arange(n)[:, None] + windows.padding[axis][0] - taps * windows.dilation[axis]
    output, rest = np.divmod(start, windows.stride[axis])
    met = (rest == 0) & (output >= 0) & (output < n_out)
    indptr = np.concatenate(([0], np.cumsum(met.sum(axis=1))))
    offset = np.broadcast_to(taps, met.shape)[met] * prod(windows.kernel[axis + 1 :])
    return Factor(indptr, output[met], n_out, offset)


def kron(left: Factor, right: Factor, column_type: np.dtype, weight_type: np.dtype) -> Factor:
    """Return the Kronecker product; the offsets of the entries that meet are added.

    Row (r, s) is, for every entry of row r of `left`, one run: row s of `right`, moved.
    """
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
    offset = right.offset.astype(weight_type)[source]
    offset += np.repeat(left.offset[entry].astype(weight_type), length)
    return Factor(indptr, columns, left.n_columns * right.n_columns, offset)
