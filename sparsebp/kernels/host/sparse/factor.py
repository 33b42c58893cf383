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
from sparsebp.kernels.host.engine.threads import atomic_add, atomic_store, in_parts, team_for, wait_for
from sparsebp.kernels.host.sparse.factor_columns import (
    eliminate_columns,
    factorise_columns,
    signed_inverse,
    underflow,
    underflow_bound,
)
from sparsebp.kernels.host.sparse.panels import COUNTS, GROUP, LINE, PANEL, pointers

SHARED = 5_000
"""Multiply-adds of a task on average, at least, from which threads share one matrix."""
CHUNK = 32
"""Columns of a panel of U that are read for all rows of another at a time: they fit into the first cache."""
NORM, ROW, COLUMN, PIVOT = range(0, 4 * PANEL, PANEL)
SEEN = 4 * PANEL
"""What is watched of each row of a panel: the sum of its magnitudes; the largest term of L @ U, itself and over the
largest entry of the matrix in that column; the largest term of the pivot, or the sum of all with D⁻¹."""

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
        words = np.zeros(1 + panels, np.int64) if parts > 1 else _NO_WORDS
        _factorise_one(team_for(parts, work), parts, words, *arguments)


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
    peaks, watched = np.empty(3 * n * lanes, found.dtype), np.empty(GROUP * SEEN * lanes, found.dtype)
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
        _scale(at, n, a, peak, bounds, zeros, ones)
        by_row, by_column, lost, poison = _eliminate(at, n, np.int64(0), count, a, lu, where, bounds, 0, zeros, ones,
                                                     False)  # fmt: skip
    grown, rest = (ones if at.definite else by_row) if at.half else simd.minimum(by_row, by_column), part * lanes
    simd.store_n(simd.pointer(found), rest, grown + poison, batch - rest)
    simd.store_n(simd.pointer(found), batch + rest, lost + poison, batch - rest)
    simd.keep_alive(slots)
    simd.keep_alive(following)
    simd.keep_alive(peaks)
    simd.keep_alive(watched)
    simd.keep_alive(multiples)


@numba.njit(**SERIAL)
def _factorise_one(team, parts, words, table, values, blocked, data, found, shifts, least):
    """Factorise one matrix, on several threads; `words`: the next task, and of each panel whether it is done."""
    at, _, n = pointers(table)
    a, zero, one = simd.pointer(blocked), data.dtype.type(0), found.dtype.type(1)
    peaks, seen = np.empty(3 * n, found.dtype), np.zeros((parts, 4), found.dtype)
    simd.copy(a, simd.pointer(values), values.size)
    bounds = simd.pointer(shifts), found.dtype.type(least), underflow_bound(found)
    _scale(at, n, a, simd.pointer(peaks), bounds, zero, one)
    in_parts(_factorise_tasks, team, parts, (table, parts, words, blocked, data, peaks, shifts, bounds[1], seen))
    by_row = by_column = lost = poison = found.dtype.type(0)
    for part in range(parts):
        by_row, by_column = max(by_row, seen[part, 0]), max(by_column, seen[part, 1])
        lost, poison = max(lost, seen[part, 2]), poison + seen[part, 3]
    found[0, 0] = ((one if at.definite else by_row) if at.half else min(by_row, by_column)) + poison
    found[1, 0] = lost + poison
    simd.keep_alive(peaks)


@numba.njit(**INNER_SERIAL)
def _factorise_tasks(part, table, parts, words, blocked, data, peaks, shifts, least, found):
    """Take tasks until there is none. They begin in order, so what a task waits for has begun before it."""
    (at, count, n), whole = pointers(table), simd.pointer(table)
    slots, following = np.empty(GROUP * n, np.int32), np.empty(GROUP, np.int64)
    watched, multiples = np.empty(GROUP * SEEN, found.dtype), np.empty(2 * PANEL * PANEL, data.dtype)
    room = simd.pointer(peaks), simd.pointer(watched), simd.pointer(multiples)
    where = simd.pointer(following), simd.pointer(slots), *room
    bounds = simd.pointer(shifts), least, underflow_bound(found)
    a, lu, next_task = simd.pointer(blocked), simd.pointer(data), words.ctypes.data
    tasks, ready = (whole[COUNTS + 2], next_task + 8) if parts > 1 else (1, 0)
    zero, one, task = data.dtype.type(0), found.dtype.type(1), 0
    while True:
        task = atomic_add(next_task, 1) if parts > 1 else task
        if task >= tasks:
            break
        begin, end = (at.tasks[task], at.tasks[task + 1]) if parts > 1 else (np.int64(0), count)
        by_row, by_column, lost, poison = _eliminate(at, n, begin, end, a, lu, where, bounds, ready, zero, one, True)
        found[part, 0], found[part, 1] = max(found[part, 0], by_row), max(found[part, 1], by_column)
        found[part, 2], found[part, 3] = max(found[part, 2], lost), found[part, 3] + poison
        task += 1
    simd.keep_alive(slots)
    simd.keep_alive(following)
    simd.keep_alive(watched)
    simd.keep_alive(multiples)


@simd.device
def _eliminate(at, n, begin, count, values, data, where, bounds, ready, zero, one, single):
    """Factorise panels begin … count - 1 of the matrices of one block.

    Return growth by row and by column, loss, and NaN where these may miss something. A panel of U is read once for all
    rows of a group, while it is in the cache. A maximum passes over NaN, so a sum of what would be zeros otherwise
    keeps what is not finite. `bounds`: shifts, the least pivot, `underflow_bound`. `ready`: the address of words that
    say which panels are done; 0 on one thread.
    """
    following, slots, peak, watched, multiples = where
    none = number.absolute(zero)
    by_row = by_column = loss = poison = none
    p = begin
    while p < count:
        end = p + 1
        while end < count and end - p < GROUP and at.first[end + 1] - at.first[p] == (end + 1 - p) * PANEL:
            end += 1
        for i in range(p, end):
            following[i - p] = at.left_ptr[i]
            _begin(at, i, values, data, simd.advance(slots, (i - p) * n), peak, watched, SEEN * (i - p), zero)
        done = p
        while done < end:
            k = np.int64(count)
            for i in range(done, end):
                if following[i - p] < at.left_ptr[i + 1]:
                    k = min(k, np.int64(at.left[following[i - p]]))
            if k >= done:  # the next panel has all its terms
                if at.half and at.definite:
                    lost, sick = _finish_half(at, done, data, watched, SEEN * (done - p), bounds, zero, one)
                elif at.half:
                    row, lost, sick = _finish_signed(at, done, data, watched, SEEN * (done - p), bounds, zero, one)
                    by_row = simd.maximum(row, by_row)
                else:
                    row, column, lost, sick = _finish(at, n, done, data, peak, watched, SEEN * (done - p), bounds, zero,
                                                      one)  # fmt: skip
                    by_row, by_column = simd.maximum(row, by_row), simd.maximum(column, by_column)
                loss, poison = simd.maximum(lost, loss), poison + sick
                if ready != 0:
                    atomic_store(ready + 8 * done, 1)
                done += 1
                continue
            if ready != 0 and k < p:
                wait_for(ready + 8 * k)
            waiting = np.int64(-1)  # a panel of four rows: two of one matrix take their multiples together
            for i in range(done, end):
                q = following[i - p]
                if q < at.left_ptr[i + 1] and at.left[q] == k:
                    slot, four = simd.advance(slots, (i - p) * n), np.int64(0 if waiting < 0 else PANEL * PANEL)
                    room = peak, watched, SEEN * (i - p), multiples
                    whole, low, high = _multiples(at, i, k, np.int64(at.back[q]), data, slot, room, four, zero)
                    following[i - p] = q + 1
                    if whole:
                        continue
                    if not single or at.first[i + 1] - at.first[i] != 4:
                        _subtract_panel(at, i, k, q, data, slot, multiples, low, high, zero, single)
                    elif waiting < 0:
                        waiting = np.int64(i)
                    else:
                        slot_of = simd.advance(slots, (waiting - p) * n)
                        _subtract_pair(at, waiting, i, k, following[waiting - p] - 1, q, data, slot_of, slot, multiples)
                        waiting = np.int64(-1)
            if waiting >= 0:
                q, slot = following[waiting - p] - 1, simd.advance(slots, (waiting - p) * n)
                _subtract_panel(at, waiting, k, q, data, slot, multiples, 0, 4, zero, single)
        p = end
    return by_row, by_column, loss, poison


@simd.device
def _scale(at, n, values, peak, bounds, zero, one):
    """Write what entries are compared with: of L and U by columns, with D⁻¹ the 1-norms of rows."""
    if not at.half:
        _scale_columns(at, n, values, peak, bounds[2], zero, one)
    elif not at.definite:
        _sum_rows(at, n, values, peak, zero)


@simd.device
def _sum_rows(at, n, values, peak, zero):
    """Write the 1-norms of a symmetric matrix's rows, which continue below the diagonal."""
    none = number.absolute(zero)
    for i in range(n):
        number.set_entry(peak, i, none)
    for i in range(n):
        for q in range(at.entry_ptr[i], at.entry_ptr[i + 1]):
            source, below = at.source[q], np.int64(at.column[q])
            value = number.absolute(number.entry(values, max(source, -1 - source), zero))
            number.set_entry(peak, i, number.entry(peak, i, none) + value)
            if below != i:
                number.set_entry(peak, below, number.entry(peak, below, none) + value)


@simd.device
def _scale_columns(at, n, values, peak, bound, zero, one):
    """Write the reciprocals of the columns' largest entries behind two numbers a row; infinity where they underflow."""
    none = number.absolute(zero)
    for c in range(2 * n, 3 * n):
        number.set_entry(peak, c, none)
    for q in range(at.entry_ptr[n]):
        value = number.absolute(number.entry(values, at.source[q], zero))
        _raise(peak, 2 * n + at.column[q], value, none)
    for c in range(2 * n, 3 * n):
        number.set_entry(peak, c, one / simd.maximum(number.entry(peak, c, none) - bound, none))


@simd.device
def _begin(at, p, values, data, slot, peak, watched, seen, zero):
    """Write the matrix's entries of one panel, and where its columns are."""
    row, base, begin, own = np.int64(at.first[p]), at.base[p], at.column_ptr[p], np.int64(at.own[p])
    r, size = np.int64(at.first[p + 1]) - row, at.column_ptr[p + 1] - begin
    signed, none = at.half and not at.definite, number.absolute(zero)
    for i in range(base, base + size * r):
        number.set_entry(data, i, zero)
    for i in range(r):
        norm = none
        for q in range(at.entry_ptr[row + i], at.entry_ptr[row + i + 1]):
            source = at.source[q]
            value = number.conjugate(number.entry(values, max(source, -1 - source), zero), source < 0)
            number.set_entry(data, at.target[q], value)
            norm = norm + number.absolute(value)  # unlike a maximum it keeps NaN
        diagonal = number.absolute(number.entry(data, base + (own + i) * r + i, zero))
        norm = number.entry(peak, row + i, none) if signed else norm
        number.set_entry(watched, seen + NORM + i, norm)
        number.set_entry(watched, seen + ROW + i, none)
        number.set_entry(watched, seen + COLUMN + i, none)
        number.set_entry(watched, seen + PIVOT + i, diagonal)
    for c in range(size):
        slot[at.columns[begin + c]] = c * r


@simd.device
def _multiples(at, p, k, back, data, slot, room, four, zero):
    """Find the part of L in panel p that belongs to panel k, in its place or, of a symmetric matrix, from `four` on.

    Return whether its multiple has been subtracted already, and the first row with one and that behind the last.
    """
    peak, watched, seen, multiples = room
    row, begin, lu, own = np.int64(at.first[p]), at.column_ptr[k], at.base[k], np.int64(at.own[k])
    r, n, size = np.int64(at.first[p + 1]) - row, np.int64(at.first[k + 1] - at.first[k]), at.column_ptr[k + 1] - begin
    low, high = np.int64(0), r
    if at.half and n == 1 and _one_row(at, row, r, begin, back, size):
        _subtract_row(at, row, begin, back, size, data, at.base[p], lu, slot, watched, seen, zero)
        return True, low, high
    if at.half:
        low, high = _mirror(
            at, row, r, begin, back, size, data, lu, n, simd.advance(multiples, four), watched, seen, zero
        )
    else:
        left = at.base[p] + np.int64(slot[np.int64(at.first[k])])
        _divide(data, left, r, lu + own * n, n, zero)
        _watch(at, row, r, k, begin, back, size, data, left, lu, n, peak, watched, seen, zero)
    return False, low, high


@simd.device
def _subtract_panel(at, p, k, q, data, slot, multiples, low, high, zero, single):
    """Subtract panel p's multiple of panel k's rows of U; q: the number of k among the panels of L."""
    begin, lu, own = at.column_ptr[k], at.base[k], np.int64(at.own[k])
    r, n = np.int64(at.first[p + 1] - at.first[p]), np.int64(at.first[k + 1] - at.first[k])
    if at.half:
        source, left, skip = multiples, np.int64(0), np.int64(at.back[q])
    else:
        source, left, skip = data, at.base[p] + np.int64(slot[np.int64(at.first[k])]), own + n
    columns, count = simd.advance(at.columns, begin + skip), at.column_ptr[k + 1] - begin - skip
    _subtract(source, left, data, at.base[p], r, lu + skip * n, n, columns, count, slot, low, high, zero, single)


@simd.device
def _subtract_pair(at, one, other, k, of_one, of_other, data, slot, slot_of, multiples):
    """Subtract the multiples of panel k's rows of U in two panels of four rows of one matrix; read U once for both."""
    begin, lu, own = at.column_ptr[k], at.base[k], np.int64(at.own[k])
    n, size = np.int64(at.first[k + 1] - at.first[k]), at.column_ptr[k + 1] - begin
    if at.half:
        source, left, left_of = multiples, np.int64(0), np.int64(PANEL * PANEL)
        skip, both = np.int64(at.back[of_one]), np.int64(at.back[of_other])
    else:
        column = np.int64(at.first[k])
        source, left, left_of = data, at.base[one] + np.int64(slot[column]), at.base[other] + np.int64(slot_of[column])
        skip = both = own + n
    if skip < both:
        columns = simd.advance(at.columns, begin + skip)
        _four(source, left, data, at.base[one], lu + skip * n, n, columns, both - skip, slot)
    columns = simd.advance(at.columns, begin + both)
    _eight(source, left, left_of, data, at.base[one], at.base[other], lu + both * n, n, columns, size - both, slot,
           slot_of)  # fmt: skip


@simd.device
def _one_row(at, row, r, begin, back, size):
    """Say whether a panel has an entry in the column of one of r rows, and no more."""
    return back + 1 == size or np.int64(at.columns[begin + back + 1]) >= row + r


@simd.device
def _subtract_row(at, row, begin, back, size, data, base, lu, slot, watched, seen, zero):
    """Subtract the multiple of a single row of U from the one row that takes one."""
    i, left = np.int64(at.columns[begin + back]) - row, number.entry(data, lu + back, zero)
    if at.definite:
        left = number.conjugate(left, True)
    else:
        value, none = left, number.absolute(zero)
        left = number.times(number.conjugate(value, True), number.entry(data, lu, zero))
        terms = number.entry(watched, seen + PIVOT + i, none)
        terms = number.fma(number.absolute(value), number.absolute(left), terms)
        number.set_entry(watched, seen + PIVOT + i, terms)
    columns = simd.advance(at.columns, begin + back)
    _add_row(zero - left, data, base + i, lu + back, 1, columns, size - back, slot, zero)


@simd.device
def _mirror(at, row, r, begin, back, size, data, lu, n, multiples, watched, seen, zero):
    """Write what L of a symmetric matrix has in r rows and the columns of a panel: U's entries, transposed.

    Return the first row with any, and the one behind the last.
    """
    low, high = r, 0
    for i in range(r * n):
        number.set_entry(multiples, i, zero)
    for c in range(back, size):
        i = np.int64(at.columns[begin + c]) - row
        if i >= r:
            break
        low, high = min(low, i), i + 1
        if at.definite:
            for j in range(n):
                value = number.conjugate(number.entry(data, lu + c * n + j, zero), True)
                number.set_entry(multiples, j * r + i, value)
        else:
            none = number.absolute(zero)
            terms = number.entry(watched, seen + PIVOT + i, none)
            for j in range(n):
                value = number.entry(data, lu + c * n + j, zero)
                left = number.times(number.conjugate(value, True), number.entry(data, lu + j * n + j, zero))
                terms = number.fma(number.absolute(value), number.absolute(left), terms)
                number.set_entry(multiples, j * r + i, left)
            number.set_entry(watched, seen + PIVOT + i, terms)
    return low, high


@simd.device
def _watch(at, row, r, k, begin, back, size, data, left, lu, n, peak, watched, seen, zero):
    first, none = np.int64(at.first[k]), number.absolute(zero)
    for i in range(r):
        largest, relative = number.entry(watched, seen + ROW + i, none), number.entry(watched, seen + COLUMN + i, none)
        for c in range(n):
            term = number.absolute(number.entry(data, left + c * r + i, zero))
            largest = simd.maximum(term * number.entry(peak, 2 * (first + c), none), largest)
            relative = simd.maximum(term * number.entry(peak, 2 * (first + c) + 1, none), relative)
        number.set_entry(watched, seen + ROW + i, largest)
        number.set_entry(watched, seen + COLUMN + i, relative)
    for c in range(back, size):
        of_row = np.int64(at.columns[begin + c]) - row
        if of_row >= r:
            break
        largest = number.entry(watched, seen + PIVOT + of_row, none)
        for j in range(n):
            term = number.entry(data, left + j * r + of_row, zero)
            term = number.times(term, number.entry(data, lu + c * n + j, zero))
            largest = simd.maximum(number.absolute(term), largest)
        number.set_entry(watched, seen + PIVOT + of_row, largest)


@simd.device
def _finish(at, n, p, data, peak, watched, seen, bounds, zero, one):
    """Eliminate within a panel; return its growth by row and by column, its loss, and NaN where these may miss one."""
    row, own = np.int64(at.first[p]), np.int64(at.own[p])
    r, size = np.int64(at.first[p + 1]) - row, at.column_ptr[p + 1] - at.column_ptr[p] - own
    square, columns = at.base[p] + own * r, simd.advance(at.columns, at.column_ptr[p] + own)
    none = number.absolute(zero)
    by_row = by_column = loss = sick = none
    for i in range(r):
        for k in range(i):
            left = number.entry(data, square + k * r + i, zero)
            left = number.times(left, number.entry(data, square + k * r + k, zero))
            number.set_entry(data, square + k * r + i, left)
            term = number.absolute(left)
            _raise(watched, seen + ROW + i, term * number.entry(peak, 2 * (row + k), none), none)
            _raise(watched, seen + COLUMN + i, term * number.entry(peak, 2 * (row + k) + 1, none), none)
            other = number.absolute(number.entry(data, square + i * r + k, zero))
            _raise(watched, seen + PIVOT + i, term * other, none)
            for c in range(k + 1, size):
                x, u = number.entry(data, square + c * r + i, zero), number.entry(data, square + c * r + k, zero)
                number.set_entry(data, square + c * r + i, number.fma(zero - left, u, x))
        largest = relative = none
        for c in range(i, size):
            value = number.absolute(number.entry(data, square + c * r + i, zero))
            largest = simd.maximum(value, largest)
            relative = simd.maximum(value * number.entry(peak, 2 * n + columns[c], none), relative)
        inverse = number.inverse(number.entry(data, square + i * r + i, zero))
        number.set_entry(data, square + i * r + i, inverse)
        number.set_entry(peak, 2 * (row + i), largest)
        number.set_entry(peak, 2 * (row + i) + 1, relative)
        norm = number.entry(watched, seen + NORM + i, none)
        largest = simd.maximum(largest, number.entry(watched, seen + ROW + i, none))
        relative = simd.maximum(relative, number.entry(watched, seen + COLUMN + i, none))
        by_row, by_column = simd.maximum(largest / norm, by_row), simd.maximum(relative, by_column)
        loss = simd.maximum(number.entry(watched, seen + PIVOT + i, none) * number.absolute(inverse), loss)
        sick = number.fma(number.entry(peak, 2 * n + row + i, none), none, sick) + underflow(norm, bounds, none)
        sick = number.fma(number.absolute(inverse), none, sick)
        sick = sick + none / number.absolute(inverse)  # of a pivot too large for a reciprocal
    return by_row, by_column, loss, sick


@simd.device
def _finish_half(at, p, data, watched, seen, bounds, zero, one):
    """Eliminate within a panel of a symmetric matrix; return its loss, and NaN where it may miss one.

    All terms of a pivot are squares, so none is larger than the matrix's entry there.
    """
    row, square, none = np.int64(at.first[p]), at.base[p], number.absolute(zero)
    loss = sick = none
    r, size = np.int64(at.first[p + 1]) - row, at.column_ptr[p + 1] - at.column_ptr[p]
    for c in range(size):
        for i in range(min(np.int64(c + 1), r)):
            x = number.entry(data, square + c * r + i, zero)
            for k in range(i):
                u = number.entry(data, square + c * r + k, zero)
                left = number.conjugate(number.entry(data, square + i * r + k, zero), True)
                x = number.fma(zero - left, u, x)
            if i == c:
                inverse = one / simd.square_root(number.real_part(x))
                diagonal = number.entry(watched, seen + PIVOT + i, none)
                loss = simd.maximum(diagonal * inverse * inverse, loss)
                sick = number.fma(number.entry(watched, seen + NORM + i, none), none, number.fma(inverse, none, sick))
                sick = sick + underflow(diagonal, bounds, none)
                number.set_entry(data, square + c * r + i, number.of_real(inverse, zero))
            else:
                by_pivot = number.times(x, number.entry(data, square + i * r + i, zero))
                number.set_entry(data, square + c * r + i, by_pivot)
    return loss, sick


@simd.device
def _finish_signed(at, p, data, watched, seen, bounds, zero, one):
    """Eliminate within a panel of a symmetric matrix whose pivots have signs; return its growth, its loss, and NaN
    where these may miss one.

    With G = |U|ᵀ |D⁻¹| |U|, terms of an entry (i, j) are at most √(G[i, i] G[j, j]): those of pivots bound all others.
    """
    row, square, none = np.int64(at.first[p]), at.base[p], number.absolute(zero)
    growth = loss = sick = none
    r, size = np.int64(at.first[p + 1]) - row, at.column_ptr[p + 1] - at.column_ptr[p]
    shifts, least, _ = bounds
    for i in range(r):
        terms, norm = number.entry(watched, seen + PIVOT + i, none), number.entry(watched, seen + NORM + i, none)
        for k in range(i):
            value = number.entry(data, square + i * r + k, zero)
            left = number.times(number.conjugate(value, True), number.entry(data, square + k * r + k, zero))
            terms = number.fma(number.absolute(value), number.absolute(left), terms)
            for c in range(i, size):
                x, u = number.entry(data, square + c * r + i, zero), number.entry(data, square + c * r + k, zero)
                number.set_entry(data, square + c * r + i, number.fma(zero - left, u, x))
        pivot = number.real_part(number.entry(data, square + i * r + i, zero))
        inverse, moved = signed_inverse(pivot, at.signs[row + i], norm * least, one)
        number.set_entry(shifts, row + i, moved)
        number.set_entry(data, square + i * r + i, number.of_real(inverse, zero))
        growth = simd.maximum(terms / norm, growth)
        loss = simd.maximum(terms * number.absolute(inverse), loss)
        sick = number.fma(pivot, none, number.fma(inverse, none, sick)) + underflow(norm, bounds, none)
        sick = sick + none / number.absolute(inverse)  # of a pivot too large for a reciprocal
    return growth, loss, sick


@simd.device
def _raise(watched, i, value, none):
    number.set_entry(watched, i, simd.maximum(value, number.entry(watched, i, none)))


@simd.device
def _divide(data, left, r, square, n, zero):
    """``X = X U⁻¹`` for r rows and n columns of L; `square`: the panel's own columns."""
    for c in range(n):
        inverse = number.entry(data, square + c * n + c, zero)
        for i in range(r):
            x = number.entry(data, left + c * r + i, zero)
            for k in range(c):
                x = number.fma(zero - number.entry(data, left + k * r + i, zero),
                             number.entry(data, square + c * n + k, zero), x)  # fmt: skip
            number.set_entry(data, left + c * r + i, number.times(x, inverse))


@simd.device
def _subtract(source, left, data, base, r, right, n, columns, count, slot, first, end, zero, single):
    """``A[P, c] -= L[P, Q] U[Q, c]`` for all columns c of U in Q, in order of Q's rows; two rows of P at a time.

    L[P, Q] has entries in rows from `first` to before `end`.

    Four rows of one matrix make a vector.
    """
    if single and r == 4:
        _four(source, left, data, base, right, n, columns, count, slot)
        return
    for low in range(0, count, CHUNK):
        few, some = min(CHUNK, count - low), simd.advance(columns, low)
        i = first
        while i < end:
            two, k = i + 2 <= end, 0
            while k < n:
                at, l, u = base + i, left + k * r + i, right + low * n + k
                if k + 4 <= n:
                    if two:
                        _two_by_four(source, data, at, r, l, u, n, some, few, slot, zero)
                    else:
                        _one_by_four(source, data, at, r, l, u, n, some, few, slot, zero)
                    k += 4
                elif k + 2 <= n:
                    if two:
                        _two_by_two(source, data, at, r, l, u, n, some, few, slot, zero)
                    else:
                        _one_by_two(source, data, at, r, l, u, n, some, few, slot, zero)
                    k += 2
                else:
                    if two:
                        _two_by_one(source, data, at, l, u, n, some, few, slot, zero)
                    else:
                        _one_by_one(source, data, at, l, u, n, some, few, slot, zero)
                    k += 1
            i += 2


@simd.device
def _four(source, left, data, base, right, n, columns, count, slot):
    """Four rows of one matrix and n rows of U, 1 to 4; those that are missing have the first one's vector, unused."""
    a = 0.0 - number.load_four(source, left)
    b = 0.0 - number.load_four(source, left + 4 * min(1, n - 1))
    c = 0.0 - number.load_four(source, left + 4 * min(2, n - 1))
    d = 0.0 - number.load_four(source, left + 4 * min(3, n - 1))
    if n == 4:
        for i in range(count):
            at, u = base + slot[columns[i]], right + 4 * i
            x = number.fma(b, data[u + 1], number.fma(a, data[u], number.load_four(data, at)))
            number.store(data, at, number.fma(d, data[u + 3], number.fma(c, data[u + 2], x)))
    elif n == 3:
        for i in range(count):
            at, u = base + slot[columns[i]], right + 3 * i
            x = number.fma(b, data[u + 1], number.fma(a, data[u], number.load_four(data, at)))
            number.store(data, at, number.fma(c, data[u + 2], x))
    elif n == 2:
        for i in range(count):
            at, u = base + slot[columns[i]], right + 2 * i
            number.store(data, at, number.fma(b, data[u + 1], number.fma(a, data[u], number.load_four(data, at))))
    else:
        for i in range(count):
            at = base + slot[columns[i]]
            number.store(data, at, number.fma(a, data[right + i], number.load_four(data, at)))


@simd.device
def _eight(source, left, left_of, data, base, base_of, right, n, columns, count, slot, slot_of):
    """`_four` for two panels, whose vectors meet each of U's numbers while it is in a register."""
    a, a_of = 0.0 - number.load_four(source, left), 0.0 - number.load_four(source, left_of)
    second, third, fourth = 4 * min(1, n - 1), 4 * min(2, n - 1), 4 * min(3, n - 1)
    b, b_of = 0.0 - number.load_four(source, left + second), 0.0 - number.load_four(source, left_of + second)
    c, c_of = 0.0 - number.load_four(source, left + third), 0.0 - number.load_four(source, left_of + third)
    d, d_of = 0.0 - number.load_four(source, left + fourth), 0.0 - number.load_four(source, left_of + fourth)
    for i in range(count):
        at, at_of, u = base + slot[columns[i]], base_of + slot_of[columns[i]], right + n * i
        x, y = (
            number.fma(a, data[u], number.load_four(data, at)),
            number.fma(a_of, data[u], number.load_four(data, at_of)),
        )
        if n == 4:
            x, y = number.fma(b, data[u + 1], x), number.fma(b_of, data[u + 1], y)
            x, y = number.fma(c, data[u + 2], x), number.fma(c_of, data[u + 2], y)
            x, y = number.fma(d, data[u + 3], x), number.fma(d_of, data[u + 3], y)
        elif n > 1:
            x, y = number.fma(b, data[u + 1], x), number.fma(b_of, data[u + 1], y)
            if n > 2:
                x, y = number.fma(c, data[u + 2], x), number.fma(c_of, data[u + 2], y)
        number.store(data, at, x)
        number.store(data, at_of, y)


@simd.device
def _two_by_four(source, data, base, r, left, right, n, columns, count, slot, zero):
    a0, b0 = zero - number.entry(source, left, zero), zero - number.entry(source, left + 1, zero)
    a1, b1 = zero - number.entry(source, left + r, zero), zero - number.entry(source, left + r + 1, zero)
    a2, b2 = zero - number.entry(source, left + 2 * r, zero), zero - number.entry(source, left + 2 * r + 1, zero)
    a3, b3 = zero - number.entry(source, left + 3 * r, zero), zero - number.entry(source, left + 3 * r + 1, zero)
    for c in range(count):
        at, u = base + slot[columns[c]], right + n * c
        x, y, v = number.entry(data, at, zero), number.entry(data, at + 1, zero), number.entry(data, u, zero)
        x, y, v = number.fma(a0, v, x), number.fma(b0, v, y), number.entry(data, u + 1, zero)
        x, y, v = number.fma(a1, v, x), number.fma(b1, v, y), number.entry(data, u + 2, zero)
        x, y, v = number.fma(a2, v, x), number.fma(b2, v, y), number.entry(data, u + 3, zero)
        number.set_entry(data, at, number.fma(a3, v, x))
        number.set_entry(data, at + 1, number.fma(b3, v, y))


@simd.device
def _two_by_two(source, data, base, r, left, right, n, columns, count, slot, zero):
    a0, b0 = zero - number.entry(source, left, zero), zero - number.entry(source, left + 1, zero)
    a1, b1 = zero - number.entry(source, left + r, zero), zero - number.entry(source, left + r + 1, zero)
    for c in range(count):
        at, u = base + slot[columns[c]], right + n * c
        x, y, v = number.entry(data, at, zero), number.entry(data, at + 1, zero), number.entry(data, u, zero)
        x, y, v = number.fma(a0, v, x), number.fma(b0, v, y), number.entry(data, u + 1, zero)
        number.set_entry(data, at, number.fma(a1, v, x))
        number.set_entry(data, at + 1, number.fma(b1, v, y))


@simd.device
def _two_by_one(source, data, base, left, right, n, columns, count, slot, zero):
    a, b = zero - number.entry(source, left, zero), zero - number.entry(source, left + 1, zero)
    for c in range(count):
        at, v = base + slot[columns[c]], number.entry(data, right + n * c, zero)
        number.set_entry(data, at, number.fma(a, v, number.entry(data, at, zero)))
        number.set_entry(data, at + 1, number.fma(b, v, number.entry(data, at + 1, zero)))


@simd.device
def _one_by_four(source, data, base, r, left, right, n, columns, count, slot, zero):
    a0, a1 = zero - number.entry(source, left, zero), zero - number.entry(source, left + r, zero)
    a2, a3 = zero - number.entry(source, left + 2 * r, zero), zero - number.entry(source, left + 3 * r, zero)
    for c in range(count):
        at, u = base + slot[columns[c]], right + n * c
        x = number.fma(a0, number.entry(data, u, zero), number.entry(data, at, zero))
        x = number.fma(a1, number.entry(data, u + 1, zero), x)
        x = number.fma(a2, number.entry(data, u + 2, zero), x)
        number.set_entry(data, at, number.fma(a3, number.entry(data, u + 3, zero), x))


@simd.device
def _one_by_two(source, data, base, r, left, right, n, columns, count, slot, zero):
    a0, a1 = zero - number.entry(source, left, zero), zero - number.entry(source, left + r, zero)
    for c in range(count):
        at, u = base + slot[columns[c]], right + n * c
        x = number.fma(a0, number.entry(data, u, zero), number.entry(data, at, zero))
        number.set_entry(data, at, number.fma(a1, number.entry(data, u + 1, zero), x))


@simd.device
def _one_by_one(source, data, base, left, right, n, columns, count, slot, zero):
    _add_row(zero - number.entry(source, left, zero), data, base, right, n, columns, count, slot, zero)


@simd.device
def _add_row(a, data, base, right, n, columns, count, slot, zero):
    for c in range(count):
        at = base + slot[columns[c]]
        number.set_entry(data, at, number.fma(a, number.entry(data, right + n * c, zero), number.entry(data, at, zero)))
