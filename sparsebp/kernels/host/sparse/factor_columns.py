"""LDLᵀ and Cholesky factors column by column of U, of panels of one row.

Small matrices with short rows: there multiples of panels are less than the work of finding what they share.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine import real_or_complex as number
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import SERIAL
from sparsebp.kernels.host.sparse.panels import pointers

# The functions below are compiled: their arguments are index arrays, pointers, tuples of them, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def factorise_columns(table, values, blocked, data, found, shifts, least):
    """Factorise one matrix; arguments as those of `sparsebp.kernels.host.sparse.factor.factorise`."""
    at, _, n = pointers(table)
    norms, sums = np.empty(n, found.dtype), np.empty(n, data.dtype)
    a, bounds = simd.pointer(blocked), (simd.pointer(shifts), found.dtype.type(least), underflow_bound(found))
    simd.copy(a, simd.pointer(values), values.size)
    zero, one, room = data.dtype.type(0), found.dtype.type(1), (simd.pointer(norms), simd.pointer(sums))
    grown, lost, poison = eliminate_columns(at, n, a, simd.pointer(data), *room, bounds, zero, one)
    found[0, 0], found[1, 0] = (one if at.definite else grown) + poison, lost + poison
    simd.keep_alive(norms)
    simd.keep_alive(sums)


@simd.device
def eliminate_columns(at, n, values, data, norms, sums, bounds, zero, one):
    """Factorise symmetric matrices column by column of U; return growth, loss, and NaN where these may miss something.

    ``U[i, k] = A[i, k] - Σ_m L[i, m] U[m, k]`` for the rows i of column k: those before i have added their terms to
    ``sums[i]`` (T. Davis, "Algorithm 849: A concise sparse Cholesky factorization package", ACM Trans. Math. Softw. 31,
    2005).
    """
    shifts, least, _ = bounds
    none = number.absolute(zero)
    for i in range(at.base[n]):
        number.set_entry(data, i, zero)
    for i in range(n):
        number.set_entry(norms, i, none)
        number.set_entry(sums, i, zero)
    for i in range(n):
        norm = number.entry(norms, i, none)
        for q in range(at.entry_ptr[i], at.entry_ptr[i + 1]):
            source, column = at.source[q], np.int64(at.column[q])
            value = number.conjugate(number.entry(values, max(source, -1 - source), zero), source < 0)
            number.set_entry(data, at.target[q], value)
            norm = norm + number.absolute(value)
            if column != i:
                number.set_entry(norms, column, number.entry(norms, column, none) + number.absolute(value))
        number.set_entry(norms, i, norm)
    growth = loss = sick = none
    smallest = one
    for k in range(n):
        pivot = number.real_part(number.entry(data, at.base[k], zero))
        terms = diagonal = number.absolute(pivot)
        for q in range(at.left_ptr[k], at.left_ptr[k + 1]):
            row = np.int64(at.left[q])
            begin = at.base[row]
            place = begin + at.back[q]
            value = number.entry(data, place, zero) + number.entry(sums, row, zero)
            number.set_entry(sums, row, zero)
            left = number.times(value, number.entry(data, begin, zero))
            value = left if at.definite else value
            number.set_entry(data, place, value)
            terms = terms + number.absolute(value) * number.absolute(left)
            pivot = pivot - number.real_part(number.times(number.conjugate(value, True), left))
            _add_row(zero - left, data, begin + 1, place, simd.advance(at.columns, begin + 1), sums, zero)
        norm = number.entry(norms, k, none)
        if at.definite:
            inverse = one / simd.square_root(pivot)
            loss = simd.maximum(diagonal * inverse * inverse, loss)
            sick = number.fma(norm, none, sick) + underflow(diagonal, bounds, none)
        else:
            inverse, moved = signed_inverse(pivot, at.signs[k], norm * least, one)
            number.set_entry(shifts, k, moved)
            growth = simd.maximum(terms / norm, growth)
            loss = simd.maximum(terms * number.absolute(inverse), loss)
            smallest = simd.minimum(number.absolute(inverse), smallest)
            sick = sick + underflow(norm, bounds, none)
        number.set_entry(data, at.base[k], number.of_real(inverse, zero))
        sick = number.fma(pivot, none, number.fma(inverse, none, sick))
    return growth, loss, sick + none / smallest  # 0 of a pivot too large for a reciprocal


@simd.device
def _add_row(a, data, begin, end, columns, sums, zero):
    """Add a multiple of the complex conjugates of a row of U, whose columns differ, to sums."""
    q, count = np.int64(0), end - begin
    while q + 4 <= count:
        i, j, k, m = np.int64(columns[q]), np.int64(columns[q + 1]), np.int64(columns[q + 2]), np.int64(columns[q + 3])
        x = number.fma(_conjugate(data, begin + q, zero), a, number.entry(sums, i, zero))
        y = number.fma(_conjugate(data, begin + q + 1, zero), a, number.entry(sums, j, zero))
        v = number.fma(_conjugate(data, begin + q + 2, zero), a, number.entry(sums, k, zero))
        w = number.fma(_conjugate(data, begin + q + 3, zero), a, number.entry(sums, m, zero))
        number.set_entry(sums, i, x)
        number.set_entry(sums, j, y)
        number.set_entry(sums, k, v)
        number.set_entry(sums, m, w)
        q += 4
    while q < count:
        i = np.int64(columns[q])
        number.set_entry(sums, i, number.fma(_conjugate(data, begin + q, zero), a, number.entry(sums, i, zero)))
        q += 1


@simd.device
def _conjugate(data, place, zero):
    return number.conjugate(number.entry(data, place, zero), True)


@simd.device
def signed_inverse(pivot, sign, least, one):
    """Return the reciprocal of a pivot of its sign that is not smaller, and what was added to the pivot for that."""
    if sign > 0:
        enough = simd.maximum(pivot, least)
    elif sign < 0:
        enough = simd.minimum(pivot, (one - one) - least)
    else:
        enough = simd.copysign(simd.maximum(number.absolute(pivot), least), pivot)
    return one / enough, enough - pivot


@simd.device
def underflow_bound(found):
    """Return the smallest normal number over the machine precision, in the dtype of an array."""
    return found.dtype.type(2.0**-103 if found.itemsize == 4 else 2.0**-970)


@simd.device
def underflow(size, bounds, none):
    """Return 0, or NaN where a row of this size may lose digits to numbers that are flushed to zero, or is infinite."""
    return number.fma(size, none, none / simd.maximum(size - bounds[2], none))
