"""LU, Cholesky and LDLᵀ factors of matrices on one pattern, on the host: their values, and solves with them.

The numeric phase is Gaussian elimination row by row, in an order that is given. Rows that have nearly the same columns
are neighbours, and up to four of them make a *panel*: a dense block that stands on one list of columns, those of L, the
panel's own, and those of U. Row i of L and U then takes one multiple of a panel of U for each panel of L in it:

    for every panel Q of L in the rows of P:   L[P, Q] = A[P, Q] U[Q, Q]⁻¹;   A[P, :] -= L[P, Q] U[Q, :]

Of a symmetric matrix U alone is kept. Of a positive definite one A = Uᵀ U, and L[P, Q] is U[Q, P]ᵀ; of another one
A = Uᵀ D⁻¹ U, D is U's diagonal, and L[P, Q] is U[Q, P]ᵀ D⁻¹.

Small symmetric matrices with short rows are eliminated column by column of U instead, in the same places: there a panel
of one row costs less, and larger ones gain little.

Nothing is searched: columns that P and Q share are found by number. Each entry of a panel holds a vector of samples, or
one number where there is one matrix; the functions are written once for both, `like` is a value of the type meant. Both
do the same operations in the same order.

Values of panel P are those of its columns, one after the other, each with the panel's rows side by side. Its own
columns hold L below the diagonal (whose ones are not stored), U above, and the reciprocals of the pivots on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.check import Array
from sparsebp.kernels.host.engine import real_or_complex as number
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL, span
from sparsebp.kernels.host.engine.threads import atomic_add, atomic_store, in_parts, team_for, wait_for

PANEL = 4
"""Rows of a panel at most."""
LINE = 64
"""Bytes of an entry that holds samples: a cache line, whatever the machine's vectors. Half of it costs as many index
operations, and takes up to twice as long for each sample."""
GROUP = 4
"""Panels that are eliminated together at most: they fit into the second cache with a batch."""
SHARED = 5_000
"""Multiply-adds of a task on average, at least, from which threads share one matrix."""
SHORT = 25
"""Multiply-adds for each value of U, at most, of symmetric matrices that are eliminated column by column: up to 1.8
times as fast as panels for 2, and as fast for 25."""
SMALL = 600_000
"""Multiply-adds of such a matrix at most: larger ones are shared by threads."""
CHUNK = 32
"""Columns of a panel of U that are read for all rows of another at a time: they fit into the first cache."""
NORM, ROW, COLUMN, PIVOT = range(0, 4 * PANEL, PANEL)
SEEN = 4 * PANEL
"""What is watched of each row of a panel: the sum of its magnitudes; the largest term of L @ U, itself and over the
largest entry of the matrix in that column; the largest term of the pivot, or the sum of all with D⁻¹."""


class Panels(NamedTuple):
    """Where the entries of L and U are. Rows and columns are numbered in the order of elimination.

    Attributes
    ----------
    first
        First row of every panel, and the number of rows, (panels + 1,) int32.
    column_ptr, columns
        The columns of every panel, ascending, (panels + 1,) int64 and int32.
    own
        How many of them are those of L, (panels,) int32; the panel's own follow.
    base
        The panel's first value, and the number of values, (panels + 1,) int64.
    left_ptr, left, back
        Every panel of L in a panel, ascending, and which of its columns is the first one that is not before this panel:
        (panels + 1,) int64, and int32.
    entry_ptr, source, target, column
        For every row, its entries: their numbers in the matrix and among the values, and their columns. (n + 1,) and
        (nnz,) int64, (nnz,) int32. A number q of an entry of a Hermitian matrix on the other side of the diagonal is
        given as -1 - q.
    rows, order
        The matrix's row and column behind every one here, (n,) int32.
    signs
        Of symmetric matrices that are not positive definite, what sign each pivot should have, (n,) int8: 1, -1, or 0
        for any. Of others (0,).
    tasks
        The first panel of every task, and the number of panels, (tasks + 1,) int64. Threads share one matrix by tasks:
        subtrees of little work, and groups of the panels above them.
    half
        Whether the matrices are symmetric, and U alone is kept. Then `own` is 0, and `entry_ptr`, `source`, `target`
        and `column` are those of entries on the diagonal and above.
    definite
        Whether they are positive definite too: A = Uᵀ U, else A = Uᵀ D⁻¹ U.
    """

    first: Any
    column_ptr: Any
    columns: Any
    own: Any
    base: Any
    left_ptr: Any
    left: Any
    back: Any
    entry_ptr: Any
    source: Any
    target: Any
    column: Any
    rows: Any
    order: Any
    signs: Any
    tasks: Any
    half: bool
    definite: bool


_COUNTS = Panels._fields.index("half")
"""Where `table_of` has the first number behind the addresses."""
_NO_WORDS = np.zeros(1, np.int64)


def table_of(panels: Panels) -> Array:
    """Return the addresses of a structure's arrays, the numbers of panels, rows and tasks, and both flags, as int64.

    Numba takes a quarter of a microsecond for every array that it is passed: more than a small matrix needs. The arrays
    have to be kept.
    """
    *arrays, half, definite = panels
    numbers = (
        *(array.ctypes.data for array in arrays),
        len(panels.own),
        len(panels.rows),
        len(panels.tasks) - 1,
        half,
        definite,
    )
    return np.array(numbers, np.int64)


def width(batch: int, dtype: Any) -> int:
    """Return how many samples an entry of the factors holds."""
    return 1 if batch == 1 else LINE // np.dtype(dtype).itemsize


def by_sample(blocked: Array) -> Array:
    """Return (blocks, size, lanes) of the kernels as (blocks, size, lanes) of samples: of complex ones a copy.

    An entry's complex numbers are kept as all real parts, then all imaginary ones.
    """
    if blocked.dtype.kind != "c" or blocked.shape[2] == 1:
        return blocked
    parts = blocked.view(np.finfo(blocked.dtype).dtype).reshape(*blocked.shape[:2], 2, blocked.shape[2])
    samples = np.empty_like(blocked)
    samples.real, samples.imag = parts[:, :, 0], parts[:, :, 1]
    return samples


def side_by_side(samples: Array) -> Array:
    """Return what `by_sample` was given, C-contiguous."""
    samples = np.ascontiguousarray(samples)
    if samples.dtype.kind != "c" or samples.shape[2] == 1:
        return samples
    parts = np.stack([samples.real, samples.imag], axis=2)
    return parts.reshape(*samples.shape[:2], -1).view(samples.dtype)


def factorise(
    table: Array, work: int, values: Array, blocked: Array, data: Array, growth: Array, loss: Array, shifts: Array,
    least: float,
) -> None:  # fmt: skip
    """Compute L and U.

    Parameters
    ----------
    table, work
        The structure, from `table_of`, and the multiply-adds for one sample.
    values
        (nnz, B), float32, float64, complex64 or complex128; `growth`, `loss` and `shifts` are real.
    blocked
        Written: the same, (blocks, nnz, `width`), with zeros behind the last sample. Read line by line, where lines of
        `values` are as far apart as the batch is wide.
    data
        Written: the values of L and U, (blocks, values, `width`).
    growth, loss
        Written, (B,): the largest term of L @ U over the 1-norm of the matrix's row, or over the largest entry of its
        column, if that is less; and the largest term of a pivot over the pivot. NaN or infinite where L or U are not
        finite. Of D⁻¹ factors the sum of a pivot's terms, over the 1-norm of its row and over the pivot.
    shifts, least
        Of D⁻¹ factors. Written, (blocks, n, `width`): what was added to each pivot, so that it has its sign and is at
        least `least` times the 1-norm of its row.
    """
    blocks, size, lanes = data.shape
    arrays = (values.reshape(-1), blocked.reshape(-1), data.reshape(-1))
    by_columns = bool(table[_COUNTS + 3]) and work <= min(SHORT * size, SMALL)
    arguments = table, by_columns, *arrays, size, growth, loss, shifts.reshape(-1), growth.dtype.type(least)
    if lanes > 1:
        _factorise(team_for(blocks, work * blocks * lanes), blocks, *arguments)
        return
    panels, tasks = table[_COUNTS], table[_COUNTS + 2]
    parts = threads.count() if work > SHARED * tasks and not by_columns else 1
    words = np.zeros(1 + panels, np.int64) if parts > 1 else _NO_WORDS
    _factorise_one(team_for(parts, work), parts, words, *arguments)


def solve(table: Array, data: Array, b: Array, x: Array, transposed: bool) -> None:
    """Solve A x = b or Aᵀ x = b; `data` as from `factorise`, b and x (n, B), or (n, K) for factors of one matrix.

    Factors of symmetric or Hermitian matrices solve A x = b in either case.
    """
    lanes = width(b.shape[1], b.dtype)
    blocks = -(-b.shape[1] // lanes)
    shared = data.shape[2] == 1
    arguments = (data.reshape(-1), data.shape[1], shared, b.reshape(-1), x.reshape(-1), b.shape[1], transposed)
    _solve(team_for(blocks, data.shape[1] * blocks * lanes), blocks, table, *arguments)


# The functions below are compiled: their arguments are index arrays, pointers, tuples of them, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@simd.device
def _pointers(table):
    """Return `Panels` of pointers from `table_of`, the number of panels, and of rows."""
    at = simd.pointer(table)
    panels = Panels(
        simd.address(at[0], np.int32(0)),
        simd.address(at[1], np.int64(0)),
        simd.address(at[2], np.int32(0)),
        simd.address(at[3], np.int32(0)),
        simd.address(at[4], np.int64(0)),
        simd.address(at[5], np.int64(0)),
        simd.address(at[6], np.int32(0)),
        simd.address(at[7], np.int32(0)),
        simd.address(at[8], np.int64(0)),
        simd.address(at[9], np.int64(0)),
        simd.address(at[10], np.int64(0)),
        simd.address(at[11], np.int32(0)),
        simd.address(at[12], np.int32(0)),
        simd.address(at[13], np.int32(0)),
        simd.address(at[14], np.int8(0)),
        simd.address(at[15], np.int64(0)),
        at[_COUNTS + 3] != 0,
        at[_COUNTS + 4] != 0,
    )
    return panels, at[_COUNTS], at[_COUNTS + 1]


# ---- L and U ---------------------------------------------------------------------------------------------------------


@numba.njit(**SERIAL)
def _factorise(team, blocks, *args):
    in_parts(_take_part, team, blocks, args)
    in_parts(_factorise_part, team, blocks, args)


@numba.njit(**INNER_SERIAL)
def _take_part(part, table, by_columns, values, blocked, data, size, growth, loss, shifts, least):
    """Write a part of the matrices' entries, for all blocks: values are read in the order of memory."""
    batch, given, block = len(growth), simd.pointer(values), simd.pointer(blocked)
    lanes, nnz = LINE // values.itemsize, len(values) // batch
    none, blocks = number.zeros_of(given, LINE), (batch + lanes - 1) // lanes
    begin, end = span(part, blocks, nnz)
    for q in range(begin, end):
        for b in range(blocks):
            value = number.samples(given, q * batch + b * lanes, batch - b * lanes, none)
            number.set_entry(block, b * nnz + q, value)


@numba.njit(**INNER_SERIAL)
def _factorise_part(part, table, by_columns, values, blocked, data, size, growth, loss, shifts, least):
    at, count, n = _pointers(table)
    batch, lanes = len(growth), LINE // data.itemsize
    slots, following = np.empty(GROUP * n, np.int32), np.empty(GROUP, np.int64)
    peaks, watched = np.empty(3 * n * lanes, growth.dtype), np.empty(GROUP * SEEN * lanes, growth.dtype)
    multiples = np.empty((n if by_columns else PANEL * PANEL) * lanes, data.dtype)
    room = simd.pointer(peaks), simd.pointer(watched), simd.pointer(multiples)
    where = simd.pointer(following), simd.pointer(slots), *room
    a = simd.advance(simd.pointer(blocked), part * (len(values) // batch) * lanes)
    lu = simd.advance(simd.pointer(data), part * size * lanes)
    shift = simd.advance(simd.pointer(shifts), part * n * lanes), least
    zeros = number.zeros_of(lu, LINE)
    ones = number.absolute(zeros) + growth.dtype.type(1)
    if by_columns:
        by_row, lost, poison = _eliminate_columns(at, n, count, a, lu, where, shift, zeros, ones)
        by_column = by_row
    else:
        _scale(at, n, a, room[0], zeros, ones)
        by_row, by_column, lost, poison = _eliminate(at, n, np.int64(0), count, a, lu, where, shift, 0, zeros, ones,
                                                     False)  # fmt: skip
    grown = (ones if at.definite else by_row) if at.half else simd.minimum(by_row, by_column)
    simd.store_n(simd.pointer(growth), part * lanes, grown + poison, batch - part * lanes)
    simd.store_n(simd.pointer(loss), part * lanes, lost + poison, batch - part * lanes)
    simd.keep_alive(slots)
    simd.keep_alive(following)
    simd.keep_alive(peaks)
    simd.keep_alive(watched)
    simd.keep_alive(multiples)


@numba.njit(**SERIAL)
def _factorise_one(team, parts, words, table, by_columns, values, blocked, data, size, growth, loss, shifts, least):
    """Factorise one matrix, on several threads; `words`: the next task, and of each panel whether it is done."""
    at, _, n = _pointers(table)
    a, zero, one = simd.pointer(blocked), data.dtype.type(0), growth.dtype.type(1)
    peaks, found = np.empty(3 * n, growth.dtype), np.zeros((parts, 4), growth.dtype)
    simd.copy(a, simd.pointer(values), len(values))
    if not by_columns:
        _scale(at, n, a, simd.pointer(peaks), zero, one)
    in_parts(
        _factorise_tasks, team, parts, (table, by_columns, parts, words, blocked, data, peaks, shifts, least, found)
    )
    by_row = by_column = lost = poison = growth.dtype.type(0)
    for part in range(parts):
        by_row, by_column = max(by_row, found[part, 0]), max(by_column, found[part, 1])
        lost, poison = max(lost, found[part, 2]), poison + found[part, 3]
    growth[0] = ((one if at.definite else by_row) if at.half else min(by_row, by_column)) + poison
    loss[0] = lost + poison
    simd.keep_alive(peaks)


@numba.njit(**INNER_SERIAL)
def _factorise_tasks(part, table, by_columns, parts, words, blocked, data, peaks, shifts, least, found):
    """Take tasks until there is none. They begin in order, so what a task waits for has begun before it."""
    (at, count, n), whole = _pointers(table), simd.pointer(table)
    slots, following = np.empty(GROUP * n, np.int32), np.empty(GROUP, np.int64)
    watched = np.empty(GROUP * SEEN, found.dtype)
    multiples = np.empty(n if by_columns else 2 * PANEL * PANEL, data.dtype)
    room = simd.pointer(peaks), simd.pointer(watched), simd.pointer(multiples)
    where, shift = (simd.pointer(following), simd.pointer(slots), *room), (simd.pointer(shifts), least)
    a, lu, next_task = simd.pointer(blocked), simd.pointer(data), words.ctypes.data
    tasks, ready = (whole[_COUNTS + 2], next_task + 8) if parts > 1 else (1, 0)
    zero, one, task = data.dtype.type(0), found.dtype.type(1), 0
    if by_columns:
        found[0, 0], found[0, 2], found[0, 3] = _eliminate_columns(at, n, count, a, lu, where, shift, zero, one)
        task = tasks
    while True:
        task = atomic_add(next_task, 1) if parts > 1 else task
        if task >= tasks:
            break
        begin, end = (at.tasks[task], at.tasks[task + 1]) if parts > 1 else (np.int64(0), count)
        by_row, by_column, lost, poison = _eliminate(at, n, begin, end, a, lu, where, shift, ready, zero, one, True)
        found[part, 0], found[part, 1] = max(found[part, 0], by_row), max(found[part, 1], by_column)
        found[part, 2], found[part, 3] = max(found[part, 2], lost), found[part, 3] + poison
        task += 1
    simd.keep_alive(slots)
    simd.keep_alive(following)
    simd.keep_alive(watched)
    simd.keep_alive(multiples)


@simd.device
def _eliminate(at, n, begin, count, values, data, where, shift, ready, zero, one, single):
    """Factorise panels begin … count - 1 of the matrices of one block.

    Return growth by row and by column, loss, and NaN where these may miss something. A panel of U is read once for all
    rows of a group, while it is in the cache. A maximum passes over NaN, so a sum of what would be zeros otherwise
    keeps what is not finite. `ready`: the address of words that say which panels are done; 0 on one thread.
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
                    lost, sick = _finish_half(at, done, data, watched, SEEN * (done - p), zero, one)
                elif at.half:
                    row, lost, sick = _finish_signed(at, done, data, watched, SEEN * (done - p), shift, zero, one)
                    by_row = simd.maximum(row, by_row)
                else:
                    row, column, lost, sick = _finish(at, n, done, data, peak, watched, SEEN * (done - p), zero, one)
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
def _eliminate_columns(at, n, count, values, data, where, shift, zero, one):
    """Factorise symmetric matrices column by column of U; return growth, loss, and NaN where these may miss something.

    ``U[i, k] = A[i, k] - Σ_m L[i, m] U[m, k]`` for the rows i of column k: those before i have added their terms to
    ``sums[i]`` (T. Davis, "Algorithm 849: A concise sparse Cholesky factorization package", ACM Trans. Math. Softw. 31,
    2005).
    """
    _, following, norms, _, sums = where
    shifts, least = shift
    none = number.absolute(zero)
    for i in range(at.base[count]):
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
    for p in range(count):
        row = np.int64(at.first[p])
        r = np.int64(at.first[p + 1]) - row
        following[p] = r  # the next column of the panel
        for k in range(row, row + r):
            place = at.base[p] + (k - row) * (r + 1)
            pivot = number.real_part(number.entry(data, place, zero))
            terms = number.absolute(pivot)
            diagonal = terms
            for q in range(at.left_ptr[p], at.left_ptr[p + 1]):
                left = np.int64(at.left[q])
                c = np.int64(following[left])
                # behind a panel's last column the next one's begin, so there is always one to compare
                if r == 1 or np.int64(at.columns[at.column_ptr[left] + c]) == k:
                    following[left] = c + 1
                    rows = np.int64(at.first[left + 1] - at.first[left])
                    if rows == 1:  # without loops over rows
                        pivot, terms = _add_panel(at, left, 1, 1, c, data, sums, pivot, terms, zero)
                    else:
                        pivot, terms = _add_panel(at, left, rows, rows, c, data, sums, pivot, terms, zero)
            if k > row:
                pivot, terms = _add_panel(at, p, r, k - row, k - row, data, sums, pivot, terms, zero)
            norm = number.entry(norms, k, none)
            if at.definite:
                inverse = one / simd.square_root(pivot)
                loss = simd.maximum(diagonal * inverse * inverse, loss)
            else:
                inverse, moved = _signed_inverse(pivot, at.signs[k], norm * least, one)
                number.set_entry(shifts, k, moved)
                growth = simd.maximum(terms / norm, growth)
                loss = simd.maximum(terms * number.absolute(inverse), loss)
                smallest = simd.minimum(number.absolute(inverse), smallest)
            number.set_entry(data, place, number.of_real(inverse, zero))
            sick = sick + number.fma(norm, none, number.fma(pivot, none, inverse * none))
    return growth, loss, sick + none / smallest  # 0 of a pivot too large for a reciprocal


@simd.device
def _add_panel(at, p, r, n, c, data, sums, pivot, terms, zero):
    """Write the entries of n rows of panel p, of r, in its column c, and add their terms to that column's next rows;
    return the column's pivot, and the sum of the magnitudes of its terms.
    """
    row, base, begin = np.int64(at.first[p]), at.base[p], at.column_ptr[p]
    here = base + c * r
    for i in range(n):
        value = number.entry(data, here + i, zero) + number.entry(sums, row + i, zero)
        number.set_entry(sums, row + i, zero)
        for k in range(i):
            left = number.conjugate(number.entry(data, base + i * r + k, zero), True)
            other = number.entry(data, here + k, zero)
            if not at.definite:
                other = number.times(other, number.entry(data, base + k * r + k, zero))
            value = number.fma(zero - left, other, value)
        left = number.times(value, number.entry(data, base + i * r + i, zero))
        value = left if at.definite else value
        number.set_entry(data, here + i, value)
        term = number.absolute(value) * number.absolute(left)
        terms = terms + term
        pivot = pivot - number.real_part(number.times(number.conjugate(value, True), left))
    i = 0
    while i + 2 <= n:
        a, b = number.entry(data, here + i, zero), number.entry(data, here + i + 1, zero)
        if not at.definite:
            a = number.times(a, number.entry(data, base + i * r + i, zero))
            b = number.times(b, number.entry(data, base + (i + 1) * (r + 1), zero))
        a, b = zero - a, zero - b
        for q in range(r, c):
            j, u = np.int64(at.columns[begin + q]), base + q * r + i
            x = number.fma(number.conjugate(number.entry(data, u, zero), True), a, number.entry(sums, j, zero))
            x = number.fma(number.conjugate(number.entry(data, u + 1, zero), True), b, x)
            number.set_entry(sums, j, x)
        i += 2
    if i < n:
        a = number.entry(data, here + i, zero)
        if not at.definite:
            a = number.times(a, number.entry(data, base + i * r + i, zero))
        a = zero - a
        for q in range(r, c - 1, 2):  # the columns differ
            one, two, u = np.int64(at.columns[begin + q]), np.int64(at.columns[begin + q + 1]), base + q * r + i
            x, y = number.entry(sums, one, zero), number.entry(sums, two, zero)
            x = number.fma(number.conjugate(number.entry(data, u, zero), True), a, x)
            y = number.fma(number.conjugate(number.entry(data, u + r, zero), True), a, y)
            number.set_entry(sums, one, x)
            number.set_entry(sums, two, y)
        for q in range(max(r, c - (c - r) % 2), c):
            j = np.int64(at.columns[begin + q])
            u = number.conjugate(number.entry(data, base + q * r + i, zero), True)
            number.set_entry(sums, j, number.fma(u, a, number.entry(sums, j, zero)))
    return pivot, terms


@simd.device
def _scale(at, n, values, peak, zero, one):
    """Write what entries are compared with: of L and U by columns, with D⁻¹ the 1-norms of rows."""
    if not at.half:
        _scale_columns(at, n, values, peak, zero, one)
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
def _scale_columns(at, n, values, peak, zero, one):
    """Write the reciprocals of the columns' largest entries, behind two numbers a row."""
    none = number.absolute(zero)
    for c in range(2 * n, 3 * n):
        number.set_entry(peak, c, none)
    for q in range(at.entry_ptr[n]):
        value = number.absolute(number.entry(values, at.source[q], zero))
        _raise(peak, 2 * n + at.column[q], value, none)
    for c in range(2 * n, 3 * n):
        number.set_entry(peak, c, one / number.entry(peak, c, none))


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
def _finish(at, n, p, data, peak, watched, seen, zero, one):
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
        sick = number.fma(norm, none, number.fma(number.absolute(inverse), none, sick))
        sick = sick + none / number.absolute(inverse)  # of a pivot too large for a reciprocal
    return by_row, by_column, loss, sick


@simd.device
def _finish_half(at, p, data, watched, seen, zero, one):
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
                loss = simd.maximum(number.entry(watched, seen + PIVOT + i, none) * inverse * inverse, loss)
                sick = number.fma(number.entry(watched, seen + NORM + i, none), none, number.fma(inverse, none, sick))
                number.set_entry(data, square + c * r + i, number.of_real(inverse, zero))
            else:
                by_pivot = number.times(x, number.entry(data, square + i * r + i, zero))
                number.set_entry(data, square + c * r + i, by_pivot)
    return loss, sick


@simd.device
def _finish_signed(at, p, data, watched, seen, shift, zero, one):
    """Eliminate within a panel of a symmetric matrix whose pivots have signs; return its growth, its loss, and NaN
    where these may miss one.

    With G = |U|ᵀ |D⁻¹| |U|, terms of an entry (i, j) are at most √(G[i, i] G[j, j]): those of pivots bound all others.
    """
    row, square, none = np.int64(at.first[p]), at.base[p], number.absolute(zero)
    growth = loss = sick = none
    r, size = np.int64(at.first[p + 1]) - row, at.column_ptr[p + 1] - at.column_ptr[p]
    shifts, least = shift
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
        inverse, moved = _signed_inverse(pivot, at.signs[row + i], norm * least, one)
        number.set_entry(shifts, row + i, moved)
        number.set_entry(data, square + i * r + i, number.of_real(inverse, zero))
        growth = simd.maximum(terms / norm, growth)
        loss = simd.maximum(terms * number.absolute(inverse), loss)
        sick = number.fma(norm, none, number.fma(pivot, none, number.fma(inverse, none, sick)))
        sick = sick + none / number.absolute(inverse)  # of a pivot too large for a reciprocal
    return growth, loss, sick


@simd.device
def _signed_inverse(pivot, sign, least, one):
    """Return the reciprocal of a pivot of its sign that is not smaller, and what was added to the pivot for that."""
    if sign > 0:
        enough = simd.maximum(pivot, least)
    elif sign < 0:
        enough = simd.minimum(pivot, (one - one) - least)
    else:
        enough = simd.copysign(simd.maximum(number.absolute(pivot), least), pivot)
    return one / enough, enough - pivot


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


# ---- solves ----------------------------------------------------------------------------------------------------------


@numba.njit(**SERIAL)
def _solve(team, blocks, *args):
    in_parts(_solve_part, team, blocks, args)


@numba.njit(**INNER_SERIAL)
def _solve_part(part, table, data, size, shared, b, x, batch, transposed):
    (at, count, n), lu = _pointers(table), simd.pointer(data)
    given, result, lanes = simd.pointer(b), simd.pointer(x), LINE // data.itemsize
    room = np.empty((n + PANEL) * lanes, b.dtype)
    y, zero, none = simd.pointer(room), b.dtype.type(0), number.zeros_of(lu, LINE)
    if batch == 1:
        _substitute(at, count, n, lu, zero, given, result, batch, 0, y, zero, transposed)
    elif shared:
        _substitute(at, count, n, lu, zero, given, result, batch, part * lanes, y, none, transposed)
    else:
        lu = simd.advance(lu, part * size * lanes)
        _substitute(at, count, n, lu, none, given, result, batch, part * lanes, y, none, transposed)
    simd.keep_alive(room)


@simd.device
def _substitute(at, count, n, data, like, b, x, batch, s, y, zero, transposed):
    """Forward, then backward, for one block of right-hand sides. `like`: the factors' entries, `zero`: those of y."""
    into, out = (at.order, at.rows) if transposed else (at.rows, at.order)
    for i in range(n):
        number.set_entry(y, i, number.samples(b, np.int64(into[i]) * batch + s, batch - s, zero))
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
    for i in range(n):
        number.set_samples(x, np.int64(out[i]) * batch + s, number.entry(y, i, zero), batch - s)


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
        _collect(data, base, r, columns, own, like, y, row, zero)
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
        _collect(data, tail, r, columns, count, like, y, into, zero)
        for i in range(r - 1, -1, -1):
            value = number.entry(y, into + i, zero)
            for k in range(i + 1, r):
                right = number.entry(data, square + k * r + i, like)
                value = number.fma(right, zero - number.entry(y, row + k, zero), value)
            inverse = number.entry(data, square + i * r + i, like)
            before = number.entry(y, row + i, zero)
            number.set_entry(y, row + i, number.fma(value, inverse, before) if signed else number.times(value, inverse))


@simd.device
def _collect(data, base, r, columns, count, like, y, row, zero):
    """``y[row + i] -= Σ_c data[c, i] y[columns[c]]`` for the r rows of a panel."""
    i = 0
    while i + 2 <= r:
        t0, t1 = number.entry(y, row + i, zero), number.entry(y, row + i + 1, zero)
        for c in range(count):
            value = zero - number.entry(y, columns[c], zero)
            t0 = number.fma(number.entry(data, base + c * r + i, like), value, t0)
            t1 = number.fma(number.entry(data, base + c * r + i + 1, like), value, t1)
        number.set_entry(y, row + i, t0)
        number.set_entry(y, row + i + 1, t1)
        i += 2
    if i < r:
        t = number.entry(y, row + i, zero)
        for c in range(count):
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
