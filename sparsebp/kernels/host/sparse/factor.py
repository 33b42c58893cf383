"""The values of LU, Cholesky and LDLᵀ factors, on the host.

The numeric phase is Gaussian elimination row by row, in an order that is given, by panels: see
`sparsebp.kernels.host.sparse.panels`. A panel takes one multiple of another for each panel of L in it:

    for every panel Q of L in the rows of P:   L[P, Q] = A[P, Q] U[Q, Q]⁻¹;   A[P, :] -= L[P, Q] U[Q, :]

Of a symmetric matrix U alone is kept. Of a positive definite one A = Uᵀ U, and L[P, Q] is U[Q, P]ᵀ; of another one
A = Uᵀ D⁻¹ U, D is U's diagonal, and L[P, Q] is U[Q, P]ᵀ D⁻¹. That goes column by column of U where panels are single
rows, `sparsebp.kernels.host.sparse.factor_columns`. Nothing is searched: columns that P and Q share have numbers.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.check import Array
from sparsebp.kernels.host.engine import real_or_complex as number
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL, span
from sparsebp.kernels.host.engine.threads import in_parts, team_for
from sparsebp.kernels.host.sparse.factor_columns import eliminate_columns, factorise_columns, underflow_bound
from sparsebp.kernels.host.sparse.factor_one import factorise_one
from sparsebp.kernels.host.sparse.factor_panels import SEEN, begin_panel, finish_panel, no_quads, scale, take_multiple
from sparsebp.kernels.host.sparse.panels import COUNTS, GROUP, LINE, PANEL, pointers

SHARED = 5_000
"""Multiply-adds of a task on average, at least, from which threads share one matrix."""

_NO_WORDS = np.zeros(1, np.int64)


def factorise(
    table: Array, work: int, values: Array, blocked: Array, data: Array, found: Array, shifts: Array, least: float
) -> None:
    """Compute L and U.

    Parameters
    ----------
    table, work
        The structure, from `table_of`, and the multiply-adds for one sample.
    values
        (nnz, B), float32, float64, complex64 or complex128; `found` and `shifts` are real.
    blocked
        Written: the same, (blocks, nnz, `width`), with zeros behind the last sample. Read line by line, where lines of
        `values` are as far apart as the batch is wide.
    data
        Written: the values of L and U, (blocks, values, `width`).
    found
        Written, (2, B): growth, the largest term of L @ U over the 1-norm of the matrix's row, or over the largest
        entry of its column, if that is less; and loss, the largest term of a pivot over the pivot. NaN or infinite
        where L or U are not finite, or numbers that are flushed to zero would change a row's or column's last digit.
        Of D⁻¹ factors the sum of a pivot's terms, over the 1-norm of its row and over the pivot.
    shifts, least
        Of D⁻¹ factors. Written, (blocks, n, `width`): what was added to each pivot, so that it has its sign and is at
        least `least` times the 1-norm of its row.
    """
    blocks, _, lanes = data.shape
    panels, rows, tasks, half, _ = table[COUNTS:].tolist()
    by_columns = bool(half) and panels == rows
    arguments = table, values, blocked, data, found, shifts, least
    if lanes > 1:
        _factorise(team_for(blocks, work * blocks * lanes), blocks, by_columns, *arguments)
    elif by_columns:
        factorise_columns(*arguments)
    else:
        parts = threads.count() if work > SHARED * tasks else 1
        words = np.zeros(panels + tasks, np.int64) if parts > 1 else _NO_WORDS
        factorise_one(team_for(parts, work), parts, words, *arguments)


# The functions below are compiled: their arguments are index arrays, pointers, tuples of them, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _factorise(team, blocks, *args):
    in_parts(_take_part, team, blocks, args)
    in_parts(_factorise_part, team, blocks, args)


@numba.njit(**INNER_SERIAL)
def _take_part(part, by_columns, table, values, blocked, data, found, shifts, least):
    """Write a part of the matrices' entries, for all blocks: values are read in the order of memory."""
    (nnz, batch), given, block = values.shape, simd.pointer(values), simd.pointer(blocked)
    lanes = LINE // values.itemsize
    none, blocks = number.zeros_of(given, LINE), (batch + lanes - 1) // lanes
    begin, end = span(part, blocks, nnz)
    for q in range(begin, end):
        for b in range(blocks):
            value = number.samples(given, q * batch + b * lanes, batch - b * lanes, none)
            number.set_entry(block, b * nnz + q, value)


@numba.njit(**INNER_SERIAL)
def _factorise_part(part, by_columns, table, values, blocked, data, found, shifts, least):
    at, count, n = pointers(table)
    (nnz, batch), size, lanes = values.shape, data.shape[1], LINE // data.itemsize
    slots, following = np.empty(GROUP * n, np.int32), np.empty(GROUP, np.int64)
    peaks, watched = np.empty(3 * n * lanes, found.dtype), np.empty(SEEN * lanes, found.dtype)
    multiples = np.empty((n if by_columns else PANEL * PANEL) * lanes, data.dtype)
    peak, seen, multiple = simd.pointer(peaks), simd.pointer(watched), simd.pointer(multiples)
    where = simd.pointer(following), simd.pointer(slots), peak, seen, multiple
    a = simd.advance(simd.pointer(blocked), part * nnz * lanes)
    lu = simd.advance(simd.pointer(data), part * size * lanes)
    bounds = simd.advance(simd.pointer(shifts), part * n * lanes), found.dtype.type(least), underflow_bound(found)
    zeros = number.zeros_of(lu, LINE)
    ones = number.absolute(zeros) + found.dtype.type(1)
    if by_columns:
        by_row, lost, poison = eliminate_columns(at, n, a, lu, peak, multiple, bounds, zeros, ones)
        by_column = by_row
    else:
        scale(at, n, a, peak, bounds, zeros, ones)
        by_row, by_column, lost, poison = _eliminate(at, n, count, a, lu, where, bounds, zeros, ones)
    grown, rest = (ones if at.definite else by_row) if at.half else simd.minimum(by_row, by_column), part * lanes
    simd.store_n(simd.pointer(found), rest, grown + poison, batch - rest)
    simd.store_n(simd.pointer(found), batch + rest, lost + poison, batch - rest)
    simd.keep_alive(slots)
    simd.keep_alive(following)
    simd.keep_alive(peaks)
    simd.keep_alive(watched)
    simd.keep_alive(multiples)


@simd.device
def _eliminate(at, n, count, values, data, where, bounds, zero, one):
    """Factorise the matrices of one block; return growth by row and by column, loss, and NaN where these may miss some.

    A panel of U is read once for all rows of a group, while it is in the cache. A maximum passes over NaN, so a sum of
    what would be zeros otherwise keeps what is not finite. `bounds`: shifts, the least pivot, `underflow_bound`.
    """
    following, slots, peak, watched, multiples = where
    none = number.absolute(zero)
    by_row = by_column = loss = poison = none
    p = np.int64(0)
    while p < count:
        end = p + 1
        while end < count and end - p < GROUP and at.first[end + 1] - at.first[p] == (end + 1 - p) * PANEL:
            end += 1
        for i in range(p, end):
            following[i - p] = at.left_ptr[i]
            begin_panel(at, i, values, data, simd.advance(slots, (i - p) * n), peak, watched, PANEL * (i - p), zero)
        done = p
        while done < end:
            k = np.int64(count)
            for i in range(done, end):
                if following[i - p] < at.left_ptr[i + 1]:
                    k = min(k, np.int64(at.left[following[i - p]]))
            if k >= done:  # the next panel has all its terms
                seen = PANEL * (done - p)
                found = finish_panel(
                    at, n, done, data, peak, watched, seen, multiples, bounds, zero, one, False, no_quads
                )
                by_row, by_column = simd.maximum(found[0], by_row), simd.maximum(found[1], by_column)
                loss, poison = simd.maximum(found[2], loss), poison + found[3]
                done += 1
                continue
            for i in range(done, end):
                q = following[i - p]
                if q < at.left_ptr[i + 1] and at.left[q] == k:
                    slot, room = simd.advance(slots, (i - p) * n), (peak, watched, PANEL * (i - p), multiples)
                    take_multiple(at, i, k, q, data, slot, room, zero)
                    following[i - p] = q + 1
        p = end
    return by_row, by_column, loss, poison
