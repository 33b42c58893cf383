"""Solves with factors: substitution with L, U and their transposes, for one matrix or a batch."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine import real_or_complex as number
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.threads import in_parts, team_for
from sparsebp.kernels.host.sparse.factor_columns import underflow_bound
from sparsebp.kernels.host.sparse.panels import LINE, PANEL, pointers, width


def solve(table: Array, data: Array, b: Array, x: Array, transposed: bool) -> None:
    """Solve A x = b or Aᵀ x = b; `data` as from `factorise`, b and x (n, B), or (n, K) for factors of one matrix.

    Factors of symmetric or Hermitian matrices solve A x = b in either case.
    """
    small = np.empty(b.shape[1], b.real.dtype)
    lanes = width(len(small), b.dtype)
    blocks = -(-len(small) // lanes)
    team = team_for(blocks, data.shape[1] * blocks * lanes)
    _solve(team, blocks, table, data, b, x, small, transposed)
    bound = underflow_bound.py_func(small)
    if (small[0] if len(small) == 1 else small.min()) >= bound:
        return
    lost = ~(small >= bound) & b.any(axis=0)
    if lost.any():  # solve for multiples by powers of two: by the largest number of b, then by that of x
        y, scale = np.empty_like(x), -exponents(b)
        _solve(team, blocks, table, data, scaled(b, scale), y, small, transposed)
        scale += np.clip(-exponents(y), 0, np.finfo(b.dtype).maxexp * 3 // 4)
        _solve(team, blocks, table, data, scaled(b, scale), y, small, transposed)
        x[:, lost] = scaled(y, -scale)[:, lost]


def exponents(a: Array) -> Array:
    """Return the exponent of two of each column's largest number, 0 where that is 0 or not finite."""
    largest = abs(_reals(a)).max(axis=(0, 2))
    return np.where(np.isfinite(largest), np.frexp(largest)[1], 0)


def scaled(a: Array, exponents: Array) -> Array:
    """Return columns times powers of two."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.ldexp(_reals(a), exponents[:, None]).view(a.dtype)[:, :, 0]


def _reals(a: Array) -> Array:
    return a[:, :, None].view(a.real.dtype)


# The functions below are compiled: their arguments are index arrays, pointers, tuples of them, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _solve(team, blocks, *args):
    in_parts(_solve_part, team, blocks, args)


@numba.njit(**INNER_SERIAL)
def _solve_part(part, table, data, b, x, small, transposed):
    (at, count, n), lu, batch = pointers(table), simd.pointer(data), len(small)
    given, result, lanes = simd.pointer(b), simd.pointer(x), LINE // data.itemsize
    room, s = np.empty((n + PANEL) * lanes, b.dtype), part * lanes
    y, zero, none = simd.pointer(room), b.dtype.type(0), number.zeros_of(lu, LINE)
    if batch == 1:
        size = _substitute(at, count, n, lu, zero, given, result, batch, 0, y, zero, transposed)
        small[0] = size
    elif data.shape[2] == 1:
        sizes = _substitute(at, count, n, lu, zero, given, result, batch, s, y, none, transposed)
        simd.store_n(simd.pointer(small), s, sizes, batch - s)
    else:
        lu = simd.advance(lu, s * data.shape[1])
        sizes = _substitute(at, count, n, lu, none, given, result, batch, s, y, none, transposed)
        simd.store_n(simd.pointer(small), s, sizes, batch - s)
    simd.keep_alive(room)


@simd.device
def _substitute(at, count, n, data, like, b, x, batch, s, y, zero, transposed):
    """Forward, then backward, for one block of right-hand sides; return the largest number of b, or of x if that is
    less. `like`: the factors' entries, `zero`: those of y.
    """
    into, out = (at.order, at.rows) if transposed else (at.rows, at.order)
    of_b = of_x = number.absolute(zero)
    for i in range(n):
        value = number.samples(b, np.int64(into[i]) * batch + s, batch - s, zero)
        of_b = simd.maximum(number.absolute(value), of_b)
        number.set_entry(y, i, value)
    if at.half and count == n:
        _substitute_rows(at, n, data, like, y, zero)
    else:
        _substitute_panels(at, count, n, data, like, y, zero, transposed)
    for i in range(n):
        value = number.entry(y, i, zero)
        of_x = simd.maximum(number.absolute(value), of_x)
        number.set_samples(x, np.int64(out[i]) * batch + s, value, batch - s)
    return simd.minimum(of_b, of_x)


@simd.device
def _substitute_rows(at, n, data, like, y, zero):
    """The same as by panels, of a symmetric matrix's panels of one row."""
    for i in range(n):
        begin = at.base[i]
        value = number.times(number.entry(y, i, zero), number.entry(data, begin, like))
        number.set_entry(y, i, value)
        for q in range(begin + 1, at.base[i + 1]):
            column, multiple = at.columns[q], number.conjugate(number.entry(data, q, like), True)
            number.set_entry(y, column, number.fma(multiple, zero - value, number.entry(y, column, zero)))
    for i in range(n - 1, -1, -1):
        begin, before = at.base[i], number.entry(y, i, zero)
        value = before if at.definite else zero
        for q in range(at.base[i + 1] - 1, begin, -1):
            value = number.fma(number.entry(data, q, like), zero - number.entry(y, at.columns[q], zero), value)
        inverse = number.entry(data, begin, like)
        value = number.times(value, inverse) if at.definite else number.fma(value, inverse, before)
        number.set_entry(y, i, value)


@simd.device
def _substitute_panels(at, count, n, data, like, y, zero, transposed):
    for p in range(count):
        if transposed or at.half:
            _upper(at, p, data, like, y, n, zero, True)
        else:
            _lower(at, p, data, like, y, zero, False)
    for p in range(count - 1, -1, -1):
        if transposed and not at.half:
            _lower(at, p, data, like, y, zero, True)
        else:
            _upper(at, p, data, like, y, n, zero, False)


@simd.device
def _lower(at, p, data, like, y, zero, transposed):
    """The rows of one panel of L, or its columns of Lᵀ."""
    row, base, own = np.int64(at.first[p]), at.base[p], np.int64(at.own[p])
    r, columns = np.int64(at.first[p + 1]) - row, simd.advance(at.columns, at.column_ptr[p])
    square = base + own * r
    if transposed:
        for i in range(r - 1, 0, -1):
            value = zero - number.entry(y, row + i, zero)
            for k in range(i):
                left = number.entry(data, square + k * r + i, like)
                number.set_entry(y, row + k, number.fma(left, value, number.entry(y, row + k, zero)))
        _scatter(data, base, r, columns, own, like, y, row, False, zero)
    else:
        _collect(data, base, r, columns, 0, own, 1, like, y, row, zero)
        for i in range(1, r):
            value = number.entry(y, row + i, zero)
            for k in range(i):
                left = number.entry(data, square + k * r + i, like)
                value = number.fma(left, zero - number.entry(y, row + k, zero), value)
            number.set_entry(y, row + i, value)


@simd.device
def _upper(at, p, data, like, y, n, zero, transposed):
    """The rows of one panel of U, or its columns of Uᵀ; of D⁻¹ factors the rows of D⁻¹ U. `y` has room behind n."""
    r = np.int64(at.first[p + 1] - at.first[p])
    if r == 1:  # without loops over rows
        _upper_rows(at, p, 1, data, like, y, n, zero, transposed)
    else:
        _upper_rows(at, p, r, data, like, y, n, zero, transposed)


@simd.device
def _upper_rows(at, p, r, data, like, y, n, zero, transposed):
    row, base, own = np.int64(at.first[p]), at.base[p], np.int64(at.own[p])
    begin = at.column_ptr[p] + own
    square, tail = base + own * r, base + (own + r) * r
    columns, count = simd.advance(at.columns, begin + r), at.column_ptr[p + 1] - begin - r
    if transposed:
        for i in range(r):
            value = number.entry(y, row + i, zero)
            for k in range(i):
                right = number.conjugate(number.entry(data, square + i * r + k, like), at.half)
                value = number.fma(right, zero - number.entry(y, row + k, zero), value)
            number.set_entry(y, row + i, number.times(value, number.entry(data, square + i * r + i, like)))
        _scatter(data, tail, r, columns, count, like, y, row, at.half, zero)
    else:
        signed = at.half and not at.definite
        into = n if signed else row
        for i in range(r if signed else 0):
            number.set_entry(y, n + i, zero)
        _collect(data, tail, r, columns, count - 1, -1, -1, like, y, into, zero)
        for i in range(r - 1, -1, -1):
            value = number.entry(y, into + i, zero)
            for k in range(i + 1, r):
                right = number.entry(data, square + k * r + i, like)
                value = number.fma(right, zero - number.entry(y, row + k, zero), value)
            inverse = number.entry(data, square + i * r + i, like)
            before = number.entry(y, row + i, zero)
            number.set_entry(y, row + i, number.fma(value, inverse, before) if signed else number.times(value, inverse))


@simd.device
def _collect(data, base, r, columns, first, end, step, like, y, row, zero):
    """``y[row + i] -= Σ_c data[c, i] y[columns[c]]`` for the r rows of a panel; the last c is that found last."""
    i = 0
    while i + 2 <= r:
        t0, t1 = number.entry(y, row + i, zero), number.entry(y, row + i + 1, zero)
        for c in range(first, end, step):
            value = zero - number.entry(y, columns[c], zero)
            t0 = number.fma(number.entry(data, base + c * r + i, like), value, t0)
            t1 = number.fma(number.entry(data, base + c * r + i + 1, like), value, t1)
        number.set_entry(y, row + i, t0)
        number.set_entry(y, row + i + 1, t1)
        i += 2
    if i < r:
        t = number.entry(y, row + i, zero)
        for c in range(first, end, step):
            t = number.fma(number.entry(data, base + c * r + i, like), zero - number.entry(y, columns[c], zero), t)
        number.set_entry(y, row + i, t)


@simd.device
def _scatter(data, base, r, columns, count, like, y, row, conjugated, zero):
    """``y[columns[c]] -= Σ_i data[c, i] y[row + i]``, or with the complex conjugates of the data."""
    for c in range(count):
        value = number.entry(y, columns[c], zero)
        for i in range(r):
            multiple = number.conjugate(number.entry(data, base + c * r + i, like), conjugated)
            value = number.fma(multiple, zero - number.entry(y, row + i, zero), value)
        number.set_entry(y, columns[c], value)
