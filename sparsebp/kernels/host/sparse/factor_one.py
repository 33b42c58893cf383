"""The values of the factors of one matrix, on any number of threads.

Panels of one supernode are eliminated in groups, in a dense work block. They take multiples of whole runs of the panels
before them, `sparsebp.kernels.host.sparse.factor_tiles`. Every number takes its products one by one in the order of
elimination, so results are those of a batch, whatever is taken together.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine import real_or_complex as number
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.threads import atomic_exchange, atomic_load, atomic_store, in_parts, wait_for
from sparsebp.kernels.host.sparse.factor_columns import underflow_bound
from sparsebp.kernels.host.sparse.factor_panels import (
    COLUMN,
    NORM,
    PIVOT,
    ROW,
    SEEN,
    begin_panel,
    finish_panel,
    finish_quads,
    no_quads,
    scale,
    take_multiple,
)
from sparsebp.kernels.host.sparse.factor_tiles import (
    FOUR,
    ONE,
    STRIPE,
    TWO,
    from_stripe,
    no_quad,
    put_in_stripe,
    quad_of_stripe,
    subtract_columns,
)
from sparsebp.kernels.host.sparse.panels import BLOCK, COUNTS, PANEL, pointers

DEEP = 16
"""Panels of a run at most: their multiples stay in the first cache."""
AHEAD = 64
"""Tasks at most that are looked through for one that can begin."""

# The functions below are compiled: their arguments are index arrays, pointers, tuples of them, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def factorise_one(team, parts, words, table, values, blocked, data, found, shifts, least):
    """Factorise one matrix, on several threads; `words`: of each panel whether it is done, of each task whether it has
    been taken.
    """
    at, _, n = pointers(table)
    a, zero, one = simd.pointer(blocked), data.dtype.type(0), found.dtype.type(1)
    peaks, seen = np.empty(3 * n, found.dtype), np.zeros((parts, 4), found.dtype)
    simd.copy(a, simd.pointer(values), values.size)
    bounds = simd.pointer(shifts), found.dtype.type(least), underflow_bound(found)
    scale(at, n, a, simd.pointer(peaks), bounds, zero, one)
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
    """Take tasks until there is none: the first that need not wait, or the first of all. Only that one may have to
    wait, and all before it have begun, so no threads wait for each other.
    """
    (at, count, n), whole = pointers(table), simd.pointer(table)
    widest = np.int64(0)
    for p in range(count):
        widest = max(widest, at.column_ptr[p + 1] - at.column_ptr[p])
    widest = min(n, BLOCK * widest)
    slots, columns, following = np.empty(n, np.int32), np.empty(widest, np.int32), np.empty(3 * BLOCK, np.int64)
    block, packed = np.empty((widest + 1) * STRIPE, data.dtype), np.empty(DEEP * PANEL * STRIPE, data.dtype)
    watched = np.empty(SEEN, found.dtype)
    room = simd.pointer(slots), simd.pointer(columns), simd.pointer(block)
    where = room, simd.pointer(following), simd.pointer(packed), simd.pointer(peaks), simd.pointer(watched)
    bounds = simd.pointer(shifts), least, underflow_bound(found)
    a, lu, ready = simd.pointer(blocked), simd.pointer(data), words.ctypes.data if parts > 1 else 0
    tasks, zero, one = whole[COUNTS + 2], data.dtype.type(0), found.dtype.type(1)
    low, begin, end = np.int64(0), np.int64(0), count
    while True:
        if parts > 1:
            low, task = _take(at, low, tasks, ready, ready + 8 * count)
            if task == tasks:
                break
            begin, end = at.tasks[task], at.tasks[task + 1]
        by_row, by_column, lost, poison = _eliminate(at, n, begin, end, a, lu, where, bounds, ready, zero, one)
        found[part, 0], found[part, 1] = max(found[part, 0], by_row), max(found[part, 1], by_column)
        found[part, 2], found[part, 3] = max(found[part, 2], lost), found[part, 3] + poison
        if parts == 1:
            break
    simd.keep_alive(slots)
    simd.keep_alive(columns)
    simd.keep_alive(following)
    simd.keep_alive(block)
    simd.keep_alive(packed)
    simd.keep_alive(watched)


@simd.device
def _take(at, low, tasks, ready, taken):
    """Return the first task that may not have been taken, and the one that the caller now has; `tasks` if none."""
    while True:
        while low < tasks and atomic_load(taken + 8 * low) != 0:
            low += 1
        task = low
        for other in range(low, min(low + AHEAD, tasks)):
            if atomic_load(taken + 8 * other) == 0 and _can_begin(at, at.tasks[other], at.tasks[other + 1], ready):
                task = other
                break
        if task == tasks or atomic_exchange(taken + 8 * task, 0, 1):
            return low, task


@simd.device
def _can_begin(at, begin, end, ready):
    """Return whether all panels before `begin` are done of which those from there to `end` take multiples."""
    for p in range(begin, end):
        first, last = at.left_ptr[p], at.left_ptr[p + 1] - 1
        if last >= first and at.left[first] < begin:
            for q in range(last, first - 1, -1):  # the last ones are done last
                if at.left[q] < begin and atomic_load(ready + 8 * np.int64(at.left[q])) == 0:
                    return False
    return True


@simd.device
def _eliminate(at, n, begin, count, values, data, where, bounds, ready, zero, one):
    """Factorise panels begin … count - 1; see `sparsebp.kernels.host.sparse.factor`. `ready`: the address of words that
    say which panels are done; 0 on one thread.
    """
    (slot, listed, work), following, left, peak, watched = where
    written, targets = simd.advance(following, BLOCK), simd.advance(following, 2 * BLOCK)
    none = number.absolute(zero)
    by_row = by_column = loss = poison = none
    p = begin
    while p < count:
        end = min(p + BLOCK, count, np.int64(at.after[p]))
        if at.first[p + 1] - at.first[p] < PANEL and (p == 0 or at.after[p - 1] == p):  # a small supernode
            begin_panel(at, p, values, data, slot, peak, watched, 0, zero)
            for q in range(at.left_ptr[p], at.left_ptr[p + 1]):
                k = np.int64(at.left[q])
                if ready != 0:
                    wait_for(ready + 8 * k)
                take_multiple(at, p, k, q, data, slot, (peak, watched, 0, left), zero)
            grown = finish_panel(at, n, p, data, peak, watched, 0, left, bounds, zero, one, False, no_quads)
            by_row, by_column = max(by_row, grown[0]), max(by_column, grown[1])
            loss, poison = max(loss, grown[2]), poison + grown[3]
            if ready != 0:
                atomic_store(ready + 8 * p, 1)
            p = end
            continue
        wide = np.int64(PANEL)
        while wide < PANEL * (end - p):
            wide *= 2
        room = slot, listed, work, wide, targets
        _gather(at, p, end, values, room, peak, watched, zero)
        for i in range(p, p + BLOCK):
            targets[i - p] = -1
            if i < end:
                following[i - p], written[i - p] = at.left_ptr[i], at.base[i]
        while True:
            k = p
            for i in range(p, end):
                if following[i - p] < at.left_ptr[i + 1]:
                    k = min(k, np.int64(at.left[following[i - p]]))
            if k == p:
                break
            if ready != 0:
                wait_for(ready + 8 * k)
            stop, last = k + 1, min(p, k + DEEP, np.int64(at.after[k]))
            while stop < last and (ready == 0 or atomic_load(ready + 8 * stop) != 0):
                stop += 1
            low, high = end, p
            for i in range(p, p + BLOCK):
                targets[i - p] = -1
                if i < end and following[i - p] < at.left_ptr[i + 1] and at.left[following[i - p]] == k:
                    following[i - p] += stop - k
                    low, high = min(low, np.int64(i)), i + 1
                    targets[i - p] = written[i - p]
                    written[i - p] += np.int64(at.first[stop] - at.first[k]) * np.int64(at.first[i + 1] - at.first[i])
            _take_run(at, p, k, stop, low, high, room, left, data, peak, watched, zero)
        for i in range(p, end):
            before = (i - p) & (p - i)  # so every panel takes the multiples of all before it, many at a time
            if before > 0:
                for j in range(i, min(i + before, end)):
                    targets[j - p] = written[j - p]
                    written[j - p] += before * PANEL * np.int64(at.first[j + 1] - at.first[j])
                _take_run(at, p, i - before, i, i, min(i + before, end), room, left, data, peak, watched, zero)
            _scatter(at, p, i, room, data)
            four, seen = at.first[i + 1] - at.first[i] == PANEL, PANEL * (i - p)
            grown = finish_panel(at, n, i, data, peak, watched, seen, left, bounds, zero, one, four, finish_quads)
            by_row, by_column = max(by_row, grown[0]), max(by_column, grown[1])
            loss, poison = max(loss, grown[2]), poison + grown[3]
            if ready != 0:
                atomic_store(ready + 8 * i, 1)
        p = end
    return by_row, by_column, loss, poison


@numba.njit(**INNER_SERIAL)
def _gather(at, p, end, values, room, peak, watched, zero):
    """Write the matrix's entries of a group of panels into the work block, and where its columns are."""
    slot, listed, work, wide, _ = room
    first, used, none = np.int64(at.first[p]), 0, number.absolute(zero)
    for c in range(at.column_ptr[p], at.column_ptr[p + 1]):
        listed[used] = column = at.columns[c]
        slot[column] = used
        used += 1
    for q in range(at.left_ptr[p + 1], 0 if at.half else at.left_ptr[end]):  # of L those that other panels have alone
        k = at.left[q]
        index = np.int64(slot[at.first[k]])
        if index < 0 or index >= used or listed[index] != at.first[k]:
            for column in range(at.first[k], at.first[k + 1]):
                slot[column], listed[used] = used, column
                used += 1
    simd.clear(work, used * wide)
    for i in range(first, np.int64(at.first[end])):
        norm, row = none, i - first
        diagonal = none
        for q in range(at.entry_ptr[i], at.entry_ptr[i + 1]):
            source, column = at.source[q], np.int64(at.column[q])
            value = number.conjugate(number.entry(values, max(source, -1 - source), zero), source < 0)
            put_in_stripe(work, np.int64(slot[column]), row, wide, value)
            norm = norm + number.absolute(value)  # unlike a maximum it keeps NaN
            diagonal = number.absolute(value) if column == i else diagonal
        watched[NORM + row] = peak[i] if at.half and not at.definite else norm
        watched[ROW + row], watched[COLUMN + row], watched[PIVOT + row] = none, none, diagonal


@numba.njit(**INNER_SERIAL)
def _scatter(at, p, i, room, data):
    """Write what one panel of a group has of U, and in its own columns, from the work block to its place."""
    slot, _, work, wide, _ = room
    row, rows, own = np.int64(at.first[i] - at.first[p]), np.int64(at.first[i + 1] - at.first[i]), np.int64(at.own[i])
    base, index = at.base[i] + rows * own, np.int64(slot[at.first[i]])
    for c in range(at.column_ptr[i + 1] - at.column_ptr[i] - own):
        if rows == PANEL:
            number.store(data, base + PANEL * c, quad_of_stripe(work, index + c, row, wide))
        else:
            for r in range(rows):
                data[base + rows * c + r] = from_stripe(work, index + c, row + r, wide)


@numba.njit(**INNER_SERIAL)
def _take_run(at, p, k, stop, low, high, room, left, data, peak, watched, zero):
    """Subtract the multiples of the panels k … stop - 1, of one supernode, in the panels low … high - 1 of a group."""
    begin, rows, first = at.column_ptr[stop - 1], np.int64(at.first[stop] - at.first[stop - 1]), np.int64(at.first[p])
    columns, size = simd.advance(at.columns, begin), at.column_ptr[stop] - begin
    skip = np.int64(at.own[stop - 1]) + rows
    whole, rest = (stop - k, np.int64(0)) if rows == PANEL else (stop - k - 1, rows)
    some, wide = high - low, room[3]
    if some > 2:  # others have zeros
        low, some = (min(low, p + wide // PANEL - 4), 4) if some <= 4 else (p, wide // PANEL)
    source, row = (simd.advance(at.base, k + 1), whole, rest), PANEL * (low - p)
    if at.half:
        skip = _mirror(
            at, k, stop, columns, size, first, row, np.int64(at.first[high]), data, watched, left, wide, zero
        )
    else:
        _divide(at, p, k, stop, row, some, room, left, data, peak, watched, zero)
        _watch(at, k, stop, columns, size, first, row, np.int64(at.first[high]), left, wide, data, watched, zero)
    _subtract(simd.advance(columns, skip), size - skip, row, some, room, left, data, source, size - skip)


@simd.device
def _subtract(columns, count, row, some, room, left, data, source, behind):
    """Subtract from some columns in one, two, four or all panels of the group."""
    slot, _, work, wide, _ = room
    if some == 1:
        subtract_columns(work, slot, columns, count, row, 0, wide, ONE, left, data, source, behind)
    elif some == 2:
        subtract_columns(work, slot, columns, count, row, 0, wide, TWO, left, data, source, behind)
    else:
        subtract_columns(work, slot, columns, count, row, (some - 4) * PANEL, wide, FOUR, left, data, source, behind)


@simd.device
def _divide(at, p, k, stop, row, some, room, left, data, peak, watched, zero):
    """``X = X U⁻¹`` for the parts of L that belong to the panels k … stop - 1: write them to their places, and pack
    their negatives.
    """
    slot, _, work, wide, targets = room
    ends, none = simd.advance(at.base, k + 1), no_quad(work)
    for q in range(k, stop):
        first, own = np.int64(at.first[q]), np.int64(at.own[q])
        rows, begin, depth = np.int64(at.first[q + 1]) - first, at.column_ptr[q] + own, PANEL * (q - k)
        square, index = at.base[q] + own * rows, np.int64(slot[first])
        if q > k:
            behind, source = at.column_ptr[q + 1] - begin, (ends, q - k, np.int64(0))
            _subtract(simd.advance(at.columns, begin), rows, row, some, room, left, data, source, behind)
        for i in range(row, row + PANEL * some, PANEL):
            largest, relative = number.load_four(watched, ROW + i), number.load_four(watched, COLUMN + i)
            if rows == PANEL:
                _divide_four(work, index, data, square, left, depth, i, wide, none, zero)
            else:
                for c in range(rows):
                    value = quad_of_stripe(work, index + c, i, wide)
                    for j in range(c):
                        multiple = quad_of_stripe(left, depth + j, i, wide)
                        value = number.fma(multiple, number.entry(data, square + c * rows + j, zero), value)
                    value = number.times(value, number.entry(data, square + c * rows + c, zero))
                    put_in_stripe(left, depth + c, i, wide, none - value)
            for c in range(rows):
                value = none - quad_of_stripe(left, depth + c, i, wide)
                term, target = number.absolute(value), targets[i // PANEL]
                largest = simd.maximum(term * peak[2 * (first + c)], largest)
                relative = simd.maximum(term * peak[2 * (first + c) + 1], relative)
                some_rows = np.int64(at.first[p + i // PANEL + 1] - at.first[p + i // PANEL]) if target >= 0 else 0
                if some_rows == PANEL:
                    number.store(data, target + PANEL * (depth + c), value)
                for r in range(some_rows % PANEL):
                    data[target + some_rows * (depth + c) + r] = zero - from_stripe(left, depth + c, i + r, wide)
            number.store(watched, ROW + i, largest)
            number.store(watched, COLUMN + i, relative)


@simd.device
def _divide_four(work, index, data, square, left, depth, i, wide, none, zero):
    """The same for four rows and columns, but for the places."""
    x, y = quad_of_stripe(work, index, i, wide), quad_of_stripe(work, index + 1, i, wide)
    z, w = quad_of_stripe(work, index + 2, i, wide), quad_of_stripe(work, index + 3, i, wide)
    a = none - number.times(x, number.entry(data, square, zero))
    y = number.fma(a, number.entry(data, square + 4, zero), y)
    z = number.fma(a, number.entry(data, square + 8, zero), z)
    w = number.fma(a, number.entry(data, square + 12, zero), w)
    b = none - number.times(y, number.entry(data, square + 5, zero))
    z = number.fma(b, number.entry(data, square + 9, zero), z)
    w = number.fma(b, number.entry(data, square + 13, zero), w)
    c = none - number.times(z, number.entry(data, square + 10, zero))
    w = number.fma(c, number.entry(data, square + 14, zero), w)
    put_in_stripe(left, depth, i, wide, a)
    put_in_stripe(left, depth + 1, i, wide, b)
    put_in_stripe(left, depth + 2, i, wide, c)
    put_in_stripe(left, depth + 3, i, wide, none - number.times(w, number.entry(data, square + 15, zero)))


@simd.device
def _watch(at, k, stop, columns, size, first, row, end, left, wide, data, watched, zero):
    """Find the largest terms of the pivots of rows first + row … end - 1."""
    for c in range(_behind(columns, size, first + row), size):
        i = np.int64(columns[c])
        if i >= end:
            break
        largest = watched[PIVOT + i - first]
        for q in range(k, stop):
            rows, depth = np.int64(at.first[q + 1] - at.first[q]), PANEL * (q - k)
            right = at.base[q + 1] - (size - c) * rows
            for j in range(rows):
                term = number.times(from_stripe(left, depth + j, i - first, wide), number.entry(data, right + j, zero))
                largest = simd.maximum(number.absolute(term), largest)
        watched[PIVOT + i - first] = largest


@simd.device
def _mirror(at, k, stop, columns, size, first, row, end, data, watched, left, wide, zero):
    """Pack the negatives of what L of a symmetric matrix has in rows: U's entries, transposed. Return the first column
    that is not before them.
    """
    skip = _behind(columns, size, first + row)
    simd.clear(left, (at.first[stop] - at.first[k]) * wide)
    for c in range(skip, size):
        i = np.int64(columns[c])
        if i >= end:
            break
        terms = watched[PIVOT + i - first]
        for q in range(k, stop):
            rows, depth = np.int64(at.first[q + 1] - at.first[q]), PANEL * (q - k)
            right = at.base[q + 1] - (size - c) * rows
            for j in range(rows):
                value = number.entry(data, right + j, zero)
                multiple = number.conjugate(value, True)
                if not at.definite:
                    multiple = number.times(multiple, number.entry(data, at.base[q] + j * rows + j, zero))
                    terms = number.fma(number.absolute(value), number.absolute(multiple), terms)
                put_in_stripe(left, depth + j, i - first, wide, zero - multiple)
        watched[PIVOT + i - first] = terms
    return skip


@simd.device
def _behind(columns, size, row):
    """Return the number of the first column that is not before a row."""
    low, high = np.int64(0), np.int64(size)
    while low < high:
        middle = (low + high) // 2
        if columns[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low
