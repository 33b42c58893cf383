"""A banded matrix along an axis on the host: averages and interpolation are products along one axis after another.

A row's entries lie side by side. Vectors hold neighbouring positions behind the axis. Behind the last axis there are
none: some vectors of lines are transposed into scratch, a range of columns at a time, and the results are transposed
back. Where a row reads more columns than the cache has room for, lines are multiplied one by one.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.shuffles import turn
from sparsebp.kernels.host.engine.simd import (
    advance,
    device,
    filled,
    fma,
    keep_alive,
    lanes,
    load,
    load_up_to,
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, team

ROWS = 32
"""At least so many rows are computed from lines that are turned into scratch, which then fits the cache."""
WIDEST = 4096
"""Columns that scratch has room for."""
_VECTORS = 4
"""Vectors of lines that are computed together."""
_MOVED = 4
"""About as many multiply-adds take as long as reading and writing an element."""


class BandKernels:
    """Host side of banded products in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def band_product(self, x: Array, first: Array, indptr: Array, data: Array, out: Array) -> None:
        """Every plane times the matrix; parts are of planes, or of lines."""
        planes, _, behind = out.shape
        parts = min(parts_for(_MOVED * (x.size + out.size) + planes * behind * len(data)), max(planes, 1))
        _band_product(team(parts), parts, x, first, indptr, data, out)


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _band_product(part, parts, x, first, indptr, data, out):
    planes, length, behind = x.shape
    rows = len(first)
    low, high = span(part, parts, planes)
    source, target = advance(pointer(x), low * length * behind), advance(pointer(out), low * rows * behind)
    band = pointer(first), pointer(indptr), pointer(data)
    most, chunks = _VECTORS * lanes(source), max(rows // ROWS, 1) if behind == 1 else 0
    reads, widest = np.empty((chunks, 2), np.int64), 0
    for chunk in range(chunks):
        begin, end = span(chunk, chunks, rows)
        reads[chunk, 0], reads[chunk, 1] = _columns(band, begin, end)
        widest = max(widest, reads[chunk, 1] - reads[chunk, 0])
    turned = behind == 1 and widest <= WIDEST
    room = np.empty((widest + lanes(source) + 2 * ROWS) * most if turned else 0, x.dtype)
    inside, results = pointer(room), advance(pointer(room), (widest + lanes(source)) * most)
    if behind != 1:
        for plane in range(high - low):
            here = advance(target, plane * rows * behind)
            _plane(advance(source, plane * length * behind), band, 0, rows, 0, behind, here)
    elif not turned:
        for line in range(high - low):
            _line(advance(source, line * length), band, rows, advance(target, line * rows))
    else:
        for line in range(0, high - low, most):
            n, here, there = min(most, high - low - line), advance(source, line * length), advance(target, line * rows)
            for chunk in range(chunks):
                begin, end = span(chunk, chunks, rows)
                start, stop = reads[chunk, 0], reads[chunk, 1]
                turn_in(advance(here, start), n, length, stop - start, inside)
                _plane(inside, band, begin, end, start, n, results)
                turn_out(results, n, end - begin, rows, advance(there, begin))
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _columns(band, begin, end):
    """Return the first column that rows read, and the one behind the last."""
    first, indptr, _ = band
    low, high = np.int64(-1), np.int64(0)
    for row in range(begin, end):
        entries = indptr[row + 1] - indptr[row]
        if entries:
            low = first[row] if low < 0 else min(low, first[row])
            high = max(high, first[row] + entries)
    return max(low, 0), high


@device
def _combined(x, behind, weights, entries, n):
    """Return the sum of the first `n` numbers of rows `behind` apart, times their weights."""
    if entries == 0:
        return zeros(x)
    total = load_up_to(x, 0, n) * filled(x, weights[0])  # no zero is added: -0 stays
    for k in range(1, entries):
        total = fma(load_up_to(x, k * behind, n), weights[k], total)
    return total


@numba.njit(**INNER_JIT)
def _plane(x, band, low, high, start, behind, out):
    """Write rows of the product with x, whose first row is number `start`."""
    first, indptr, data = band
    step = lanes(x)
    whole = behind // step * step
    for row in range(low, high):
        begin, target = indptr[row], advance(out, (row - low) * behind)
        source, weights = advance(x, (first[row] - start) * behind), advance(data, begin)
        entries = indptr[row + 1] - begin
        if entries == 1:
            first_weight = filled(x, weights[0])
            for at in range(0, whole, step):
                store(target, at, load(source, at) * first_weight)
        elif entries == 2:
            first_weight, second = filled(x, weights[0]), filled(x, weights[1])
            for at in range(0, whole, step):
                store(target, at, fma(load(source, behind + at), second, load(source, at) * first_weight))
        else:
            for at in range(0, whole, step):
                store(target, at, _combined(advance(source, at), behind, weights, entries, step))
        if whole < behind:
            rest = behind - whole
            store_up_to(target, whole, _combined(advance(source, whole), behind, weights, entries, rest), rest)


@numba.njit(**INNER_JIT)
def _line(x, band, rows, out):
    """Write the product of a line."""
    first, indptr, data = band
    for row in range(rows):
        begin, end = indptr[row], indptr[row + 1]
        if begin == end:
            out[row] = 0
            continue
        source = advance(x, first[row] - begin)
        total = source[begin] * data[begin]
        for k in range(begin + 1, end):
            total = fma(source[k], data[k], total)
        out[row] = total


@numba.njit(**INNER_JIT)
def turn_in(x, n, apart, columns, out):
    """Write the first columns of `n` lines, side by side."""
    step = lanes(x)
    whole = n // step * step
    for line in range(0, whole, step):
        for at in range(0, columns, step):
            here, rows = advance(x, line * apart + at), advance(out, at * n + line)
            store(rows, (step - 1) * n, turn(here, apart, columns - at, rows, n, 4 * n))
    for line in range(whole, n):
        for column in range(columns):
            out[column * n + line] = x[line * apart + column]


@numba.njit(**INNER_JIT)
def turn_out(x, n, rows, apart, out):
    """Write rows of `n` lines that lie side by side, line by line."""
    step = lanes(x)
    whole = n // step * step if rows >= step else 0
    for line in range(0, whole, step):
        for at in range(0, rows, step):
            row = min(at, rows - step)  # the last square may meet the one before: the same numbers once more
            target = advance(out, line * apart + row)
            store(target, (step - 1) * apart, turn(advance(x, row * n + line), n, step, target, apart, 4 * apart))
    for line in range(whole, n):
        for row in range(rows):
            out[line * apart + row] = x[row * n + line]
