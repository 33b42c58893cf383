"""Steps of elimination by panels, for one matrix or for samples side by side: how a panel begins, takes multiples of
others, and ends.
"""

from __future__ import annotations

import numpy as np

from sparsebp.kernels.host.engine import real_or_complex as number
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.sparse.factor_columns import signed_inverse, underflow
from sparsebp.kernels.host.sparse.factor_tiles import STRIPE, from_lane, lane, no_quad, put_in_stripe, quad_of_stripe

CHUNK = 32
"""Columns of a panel of U that are read for all rows of another at a time: they fit into the first cache."""
NORM, ROW, COLUMN, PIVOT, LARGEST, RELATIVE = range(0, 6 * STRIPE, STRIPE)
SEEN = 6 * STRIPE
"""What is watched of each row of a group: the sum of its magnitudes; the largest term of L @ U, itself and over the
largest entry of the matrix in that column; the largest term of the pivot, or the sum of all with D⁻¹; the largest entry
of U, itself and over that of the column."""

# The functions below are compiled: their arguments are index arrays, pointers, tuples of them, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@simd.device
def scale(at, n, values, peak, bounds, zero, one):
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
        largest = simd.maximum(number.entry(peak, c, none), bound)
        number.set_entry(peak, c, one / largest + (none + bound) / (largest - bound))  # nothing, or infinity


@simd.device
def begin_panel(at, p, values, data, slot, peak, watched, seen, zero):
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
def take_multiple(at, p, k, q, data, slot, room, zero):
    """Subtract panel p's multiple of panel k's rows of U; q: the number of k among the panels of L."""
    peak, watched, seen, multiples = room
    row, begin, lu, own, back = (
        np.int64(at.first[p]),
        at.column_ptr[k],
        at.base[k],
        np.int64(at.own[k]),
        np.int64(at.back[q]),
    )
    r, n, size = np.int64(at.first[p + 1]) - row, np.int64(at.first[k + 1] - at.first[k]), at.column_ptr[k + 1] - begin
    if at.half and n == 1 and _one_row(at, row, r, begin, back, size):
        _subtract_row(at, row, begin, back, size, data, at.base[p], lu, slot, watched, seen, zero)
        return
    if at.half:
        low, high = _mirror(at, row, r, begin, back, size, data, lu, n, multiples, watched, seen, zero)
        source, left, skip = multiples, np.int64(0), back
    else:
        low, high, source, left, skip = (
            np.int64(0),
            r,
            data,
            at.base[p] + np.int64(slot[np.int64(at.first[k])]),
            own + n,
        )
        _divide(data, left, r, lu + own * n, n, zero)
        _watch(at, row, r, k, begin, back, size, data, left, lu, n, peak, watched, seen, zero)
    columns, count = simd.advance(at.columns, begin + skip), size - skip
    _subtract(source, left, data, at.base[p], r, lu + skip * n, n, columns, count, slot, low, high, zero)


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
def finish_panel(at, n, p, data, peak, watched, seen, room, bounds, zero, one, four, quads):
    """Eliminate within a panel whose multiples have been taken; return growth by row and by column, loss, and NaN where
    these may miss some. `four`: whether it has four rows, of one matrix; `quads`: `finish_quads`, or `no_quads` of
    several ones; `room`: twelve numbers.
    """
    none = number.absolute(zero)
    by_row = by_column = none
    if at.half and at.definite:
        loss, sick = _finish_half(at, p, data, watched, seen, room, bounds, zero, one, four, quads)
    elif at.half:
        by_row, loss, sick = _finish_signed(at, p, data, watched, seen, room, bounds, zero, one, four, quads)
    else:
        by_row, by_column, loss, sick = _finish(
            at, n, p, data, peak, watched, seen, room, bounds, zero, one, four, quads
        )
    return by_row, by_column, loss, sick


@simd.device
def _finish(at, n, p, data, peak, watched, seen, room, bounds, zero, one, four, quads):
    """Eliminate within a panel; return its growth by row and by column, its loss, and NaN where these may miss one."""
    row, own = np.int64(at.first[p]), np.int64(at.own[p])
    r, size = np.int64(at.first[p + 1]) - row, at.column_ptr[p + 1] - at.column_ptr[p] - own
    square, columns = at.base[p] + own * r, simd.advance(at.columns, at.column_ptr[p] + own)
    none, last = number.absolute(zero), r if four else size
    by_row = by_column = loss = sick = none
    for i in range(r):
        for k in range(i):
            left = number.entry(data, square + k * r + i, zero)
            left = number.times(left, number.entry(data, square + k * r + k, zero))
            number.set_entry(data, square + k * r + i, left)
            other = number.absolute(number.entry(data, square + i * r + k, zero))
            _raise(watched, seen + PIVOT + i, number.absolute(left) * other, none)
            for c in range(k + 1, last):
                x, u = number.entry(data, square + c * r + i, zero), number.entry(data, square + c * r + k, zero)
                number.set_entry(data, square + c * r + i, number.fma(zero - left, u, x))
        largest = relative = none
        for c in range(i, last):
            value = number.absolute(number.entry(data, square + c * r + i, zero))
            largest = simd.maximum(value, largest)
            relative = simd.maximum(value * number.entry(peak, 2 * n + columns[c], none), relative)
        number.set_entry(watched, seen + LARGEST + i, largest)
        number.set_entry(watched, seen + RELATIVE + i, relative)
        inverse = number.inverse(number.entry(data, square + i * r + i, zero))
        number.set_entry(data, square + i * r + i, inverse)
    if four:
        quads(at, data, square, size, columns, simd.advance(peak, 2 * n), watched, seen, room, zero)
    for i in range(r):
        largest, relative = (
            number.entry(watched, seen + LARGEST + i, none),
            number.entry(watched, seen + RELATIVE + i, none),
        )
        number.set_entry(peak, 2 * (row + i), largest)
        number.set_entry(peak, 2 * (row + i) + 1, relative)
        largest = simd.maximum(largest, number.entry(watched, seen + ROW + i, none))
        relative = simd.maximum(relative, number.entry(watched, seen + COLUMN + i, none))
        for k in range(i):
            term = number.absolute(number.entry(data, square + k * r + i, zero))
            largest = simd.maximum(term * number.entry(peak, 2 * (row + k), none), largest)
            relative = simd.maximum(term * number.entry(peak, 2 * (row + k) + 1, none), relative)
        norm, inverse = number.entry(watched, seen + NORM + i, none), number.entry(data, square + i * r + i, zero)
        by_row, by_column = simd.maximum(largest / norm, by_row), simd.maximum(relative, by_column)
        loss = simd.maximum(number.entry(watched, seen + PIVOT + i, none) * number.absolute(inverse), loss)
        sick = number.fma(number.entry(peak, 2 * n + row + i, none), none, sick) + underflow(norm, bounds, none)
        sick = number.fma(number.absolute(inverse), none, sick)
        sick = sick + none / number.absolute(inverse)  # of a pivot too large for a reciprocal
    return by_row, by_column, loss, sick


@simd.device
def _finish_half(at, p, data, watched, seen, room, bounds, zero, one, four, quads):
    """Eliminate within a panel of a symmetric matrix; return its loss, and NaN where it may miss one.

    All terms of a pivot are squares, so none is larger than the matrix's entry there.
    """
    row, square, none = np.int64(at.first[p]), at.base[p], number.absolute(zero)
    loss = sick = none
    r, size = np.int64(at.first[p + 1]) - row, at.column_ptr[p + 1] - at.column_ptr[p]
    for c in range(r if four else size):
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
    if four:
        quads(at, data, square, size, at.columns, watched, watched, seen, room, zero)
    return loss, sick


@simd.device
def _finish_signed(at, p, data, watched, seen, room, bounds, zero, one, four, quads):
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
            for c in range(i, r if four else size):
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
    if four:
        quads(at, data, square, size, at.columns, watched, watched, seen, room, zero)
    return growth, loss, sick


@simd.device
def no_quads(at, data, square, size, columns, scale, watched, seen, room, zero):
    """Stand in where values are no numbers."""


@simd.device
def finish_quads(at, data, square, size, columns, scale, watched, seen, room, zero):
    """Eliminate within four rows of one matrix behind the square of their own columns, which is done."""
    none = no_quad(data)
    if at.half:
        for k in range(3):
            for i in range(k + 1, 4):
                left = number.conjugate(number.entry(data, square + 4 * i + k, zero), True)
                left = left if at.definite else number.times(left, number.entry(data, square + 5 * k, zero))
                put_in_stripe(room, k, i, 4, zero - left)
        a, b, c = quad_of_stripe(room, 0, 0, 4), quad_of_stripe(room, 1, 0, 4), quad_of_stripe(room, 2, 0, 4)
    else:
        a, b = none - number.load_four(data, square), none - number.load_four(data, square + 4)
        c = none - number.load_four(data, square + 8)
    if at.definite:
        i, j = number.entry(data, square, zero), number.entry(data, square + 5, zero)
        k, m = number.entry(data, square + 10, zero), number.entry(data, square + 15, zero)
        for q in range(4, size):
            x = number.load_four(data, square + 4 * q)
            x = from_lane(number.times(x, i), x, 1)
            x = from_lane(x, number.fma(a, lane(x, 0), x), 1)
            x = from_lane(x, from_lane(number.times(x, j), x, 2), 1)
            x = from_lane(x, number.fma(b, lane(x, 1), x), 2)
            x = from_lane(x, from_lane(number.times(x, k), x, 3), 2)
            x = from_lane(x, number.fma(c, lane(x, 2), x), 3)
            number.store(data, square + 4 * q, from_lane(x, number.times(x, m), 3))
        return
    largest, relative = number.load_four(watched, seen + LARGEST), number.load_four(watched, seen + RELATIVE)
    for q in range(4, size):
        x = number.load_four(data, square + 4 * q)
        x = from_lane(x, number.fma(a, lane(x, 0), x), 1)
        x = from_lane(x, number.fma(b, lane(x, 1), x), 2)
        x = from_lane(x, number.fma(c, lane(x, 2), x), 3)
        number.store(data, square + 4 * q, x)
        if not at.half:
            value = number.absolute(x)
            largest = simd.maximum(value, largest)
            relative = simd.maximum(value * scale[columns[q]], relative)
    number.store(watched, seen + LARGEST, largest)
    number.store(watched, seen + RELATIVE, relative)


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
def _subtract(source, left, data, base, r, right, n, columns, count, slot, first, end, zero):
    """``A[P, c] -= L[P, Q] U[Q, c]`` for all columns c of U in Q, in order of Q's rows; two rows of P at a time.

    L[P, Q] has entries in rows from `first` to before `end`.
    """
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
