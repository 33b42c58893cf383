"""Banded matrices along an axis: averages and interpolation. On several axes, one follows the other."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.errors import MemoryLimitError
from sparsebp.patterns.builders import Resampling, adaptive_windows
from sparsebp.patterns.pattern import KEPT, DeviceCopies, frozen
from sparsebp.patterns.windows import PoolWindows


class Band(NamedTuple):
    """A matrix whose rows have their entries side by side."""

    first: np.ndarray  # The first entry's column in every row; int64
    indptr: np.ndarray  # Where every row begins in `data`; int64
    data: np.ndarray  # The entries, row by row

    @classmethod
    def of(cls, count: int, rows: np.ndarray, columns: np.ndarray, data: np.ndarray) -> Band:
        """Return the matrix of `count` rows with these entries, sorted by row and column."""
        indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=count))))
        first = np.zeros(count, np.int64)
        first[rows[::-1]] = columns[::-1]  # the first of a row is written last
        return cls(frozen(first), frozen(indptr), frozen(np.ascontiguousarray(data)))


def _both_ways(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray, data: np.ndarray) -> DeviceCopies:
    """Return the arrays of the matrix with these entries, sorted by row and column, and those of its transpose."""
    order = np.argsort(columns, kind="stable")
    transposed = Band.of(shape[1], columns[order], rows[order], data[order])
    return DeviceCopies(*Band.of(shape[0], rows, columns, data), *transposed)


def _averages(length: int, start: np.ndarray, end: np.ndarray, weight: Any, dtype: np.dtype) -> DeviceCopies:
    """Return the matrix of windows ``start <= i < end`` over an axis, each with its weight."""
    taps = end - start
    rows = np.repeat(np.arange(len(taps)), taps)
    columns = np.arange(len(rows)) + np.repeat(start - (np.cumsum(taps) - taps), taps)
    return _both_ways((len(taps), length), rows, columns, np.broadcast_to(weight, taps.shape)[rows].astype(dtype))


@lru_cache(maxsize=KEPT)
def sliding_averages(
    windows: PoolWindows, sizes: tuple[int, ...], dtype: np.dtype, count_include_pad: bool, divisor: int | None
) -> list[DeviceCopies]:
    """Return for each axis the matrix of averages over sliding windows, and its transpose; see `Band`.

    `count_include_pad` and `divisor` are those of `sparsebp.jacobians.avg_pool_jacobian_t`.
    """
    axes = []
    for a, (length, count) in enumerate(zip(sizes, windows.output_size(sizes), strict=True)):
        low = np.arange(count) * windows.stride[a] - windows.before[a]
        high = low + windows.kernel[a]
        start, end = np.maximum(low, 0), np.minimum(high, length)
        within = np.minimum(high, length + windows.before[a]) - low if count_include_pad else end - start
        weight = 1 / within if divisor is None else 1 / divisor if a == 0 else 1
        axes.append(_averages(length, start, end, weight, dtype))
    return axes


@lru_cache(maxsize=KEPT)
def adaptive_averages(sizes: tuple[int, ...], counts: tuple[int, ...], dtype: np.dtype) -> list[DeviceCopies]:
    """Return for each axis the matrix of adaptive averages, and its transpose; see `Band`."""
    axes = []
    for length, count in zip(sizes, counts, strict=True):
        start, end = adaptive_windows(length, count)
        axes.append(_averages(length, start, end, 1 / (end - start), dtype))
    return axes


@lru_cache(maxsize=KEPT)
def interpolations(axes: tuple[Resampling, ...], dtype: np.dtype) -> list[DeviceCopies]:
    """Return for each axis the matrix of interpolation, and its transpose; see `Band`. Weights of 0 are entries."""
    found = []
    try:
        for axis in axes:
            keys, values = axis.entries(dtype.type)
            rows, columns = np.divmod(keys, axis.inputs)
            found.append(_both_ways((axis.outputs, axis.inputs), rows, columns, values.astype(dtype)))
    except MemoryError as error:
        raise MemoryLimitError("The output does not fit in memory", expected="memory for the index of each element",
                               got=[axis.outputs for axis in axes]) from error  # fmt: skip
    return found
