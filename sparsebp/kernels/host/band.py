"""A banded matrix along an axis on the host: windows and interpolations, which are products along one axis after another.

A row's entries lie side by side. Behind the axis, vectors hold neighbouring positions. Along the last axis there are
none: four lines go side by side, so that the sums of a row do not wait for each other.
"""

from __future__ import annotations

import numba

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.simd import (
    advance,
    device,
    filled,
    fma,
    lanes,
    load,
    load_up_to,
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, team

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
    band = pointer(first), pointer(indptr), pointer(data), rows
    if behind > 1:
        for plane in range(high - low):
            _plane(advance(source, plane * length * behind), band, behind, advance(target, plane * rows * behind))
        return
    fours = (high - low) // 4 * 4
    for line in range(0, fours, 4):
        _four_lines(advance(source, line * length), length, band, advance(target, line * rows))
    for line in range(fours, high - low):
        _line(advance(source, line * length), band, advance(target, line * rows))


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
def _plane(x, band, behind, out):
    first, indptr, data, rows = band
    step = lanes(x)
    whole = behind // step * step
    for row in range(rows):
        begin, source, target = indptr[row], advance(x, first[row] * behind), advance(out, row * behind)
        entries, weights = indptr[row + 1] - begin, advance(data, begin)
        for at in range(0, whole, step):
            store(target, at, _combined(advance(source, at), behind, weights, entries, step))
        if whole < behind:
            rest = behind - whole
            store_up_to(target, whole, _combined(advance(source, whole), behind, weights, entries, rest), rest)


@numba.njit(**INNER_JIT)
def _four_lines(x, length, band, out):
    first, indptr, data, rows = band
    for row in range(rows):
        begin, end, start = indptr[row], indptr[row + 1], first[row] - indptr[row]
        p, q = advance(x, start), advance(x, start + length)
        r, s = advance(x, start + 2 * length), advance(x, start + 3 * length)
        if begin == end:
            out[row] = out[row + rows] = out[row + 2 * rows] = out[row + 3 * rows] = 0
            continue
        weight = data[begin]
        a, b, c, d = p[begin] * weight, q[begin] * weight, r[begin] * weight, s[begin] * weight
        for k in range(begin + 1, end):
            weight = data[k]
            a, b, c, d = fma(p[k], weight, a), fma(q[k], weight, b), fma(r[k], weight, c), fma(s[k], weight, d)
        out[row], out[row + rows], out[row + 2 * rows], out[row + 3 * rows] = a, b, c, d


@numba.njit(**INNER_JIT)
def _line(x, band, out):
    first, indptr, data, rows = band
    for row in range(rows):
        begin, end = indptr[row], indptr[row + 1]
        source = advance(x, first[row] - begin)
        if begin == end:
            out[row] = 0
            continue
        total = source[begin] * data[begin]
        for k in range(begin + 1, end):
            total = fma(source[k], data[k], total)
        out[row] = total
