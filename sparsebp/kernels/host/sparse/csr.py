"""CSR on the host: sparse times vectors, chains of them in one call, scalings, gathers, values of Jacobians.

With a batch, a vector register holds as many samples as fit, and the sums of a row stay in registers. A batch of one
has loops of its own, because there the entries are what lies side by side.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import SLOPES, Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import (
    INNER_SERIAL,
    INNER_SUMS,
    MAX_PARTS,
    SCALAR_GRAIN,
    SERIAL,
    VECTOR_GRAIN,
    WORTH,
    parts_for,
    row_at,
    share,
)
from sparsebp.kernels.host.engine.simd import Values, flat, pointers, put, take
from sparsebp.kernels.host.engine.threads import ALONE, end_part, in_parts, next_part, parallel, team, turns_of
from sparsebp.kernels.operands import PAGE, Rows, RowShapes


class CsrKernels:
    """Host side of the kernels on one sparse matrix."""

    def csr_matvec(
        self, indptr: Array, indices: Array, data: Array, x: Array, out: Array, add: Array | None = None
    ) -> None:
        """Batched SpMV, ``out = add + A @ x``; sums run in the order of the entries."""
        batch = out.shape[1]
        start = (out if add is None else add).reshape(-1)
        parts = parts_for((indices.size + out.shape[0]) * batch, vectors=batch > 1)
        arguments = (indptr, indices, *flat(data, x, out), start, add is not None, parts)
        _csr_matvec(team(parts), parts, *arguments)

    def scale_rows(self, indptr: Array, data: Array, scale: Array, out: Array) -> None:
        """Diagonal times CSR: ``out[k] = scale[row(k)] * data[k]``."""
        parts = parts_for(out.size)
        _scale_rows(team(parts), parts, indptr, *flat(scale, data, out), len(out), parts)

    def scale_columns(self, indices: Array, data: Array, scale: Array, out: Array) -> None:
        """CSR times diagonal: ``out[k] = data[k] * scale[indices[k]]``."""
        self._multiply(data, None, scale, indices, out)

    def scale_runs(self, indices: Array, shapes: RowShapes, data: Array, scale: Array, out: Array) -> None:
        """As `scale_columns`, and so it is done for a batch, whose samples fill vectors; else only values are read."""
        if out.shape[1] != 1:
            self.scale_columns(indices, data, scale, out)
            return
        parts, factors = parts_for(out.size), scale.reshape(-1)
        room = np.empty(len(factors) + len(factors) // PAGE * shapes.gap if shapes.gap else 0, factors.dtype)
        _scale_runs(team(parts), parts, *shapes, data.reshape(-1), factors, room, out.reshape(-1), parts)

    def gather(self, data: Array, index: Array, out: Array) -> None:
        """``out[k] = data[index[k]]``."""
        batch = out.shape[1]
        parts = parts_for(out.size, vectors=batch > 1)
        _gather(team(parts), parts, data.reshape(-1), index, out.reshape(-1), batch)

    def gather_multiply(self, a_data: Array, a_index: Array, b_data: Array, b_index: Array, out: Array) -> None:
        """One product per output entry: ``out[k] = a_data[a_index[k]] * b_data[b_index[k]]``."""
        self._multiply(a_data, a_index, b_data, b_index, out)

    def _multiply(self, a: Array, a_index: Array | None, b: Array, b_index: Array, out: Array) -> None:
        """``out[k] = a[a_index[k]] * b[b_index[k]]``; without `a_index` entry k of `a` itself."""
        parts = parts_for(out.size, vectors=out.shape[1] > 1)
        indexed = a_index is not None
        arguments = (a_index if indexed else b_index, b_index, *flat(a, b, out), indexed, parts)
        _multiply(team(parts), parts, *arguments)


# The functions below are compiled: their arguments are flat arrays or pointers, tuples of them, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@simd.device
def row_pointers(rows):
    """Return `Rows` of pointers in place of arrays."""
    a_indptr, a_indices = simd.pointer(rows.a_indptr), simd.pointer(rows.a_indices)
    return Rows(a_indptr, a_indices, simd.pointer(rows.b_indptr), simd.pointer(rows.c_indptr))


@simd.device
def whole(values, entry, batch, s):
    """Return the values of one entry per sample for a whole block."""
    return take(values, entry, batch, s, 0, True, True)


@numba.njit(**SERIAL)
def _csr_matvec(team, parts, *args):
    in_parts(_csr_matvec_part, team, parts, (args[0], args[1], Values(*args[2:8]), args[8], args[9], args[10]))


@numba.njit(**INNER_SERIAL)
def _csr_matvec_part(part, indptr, indices, values, start, has_start, parts):
    nnz, rows = len(indices), len(indptr) - 1
    # rows without entries are written too, so the first part begins at row 0 and the last ends at the last row
    low = row_at(indptr, share(part, parts, nnz)) if part > 0 else 0
    high = row_at(indptr, share(part + 1, parts, nnz)) if part + 1 < parts else rows
    row_ptr, columns, initial, v = simd.pointer(indptr), simd.pointer(indices), simd.pointer(start), pointers(values)
    if v.batch == 1:
        for r in range(low, high):
            total = initial[r] if has_start else start.dtype.type(0)
            for k in range(row_ptr[r], row_ptr[r + 1]):
                total += v.a[k] * v.b[columns[k]]
            v.out[r] = total
    elif v.a_batched:
        csr_rows(row_ptr, columns, v, initial, has_start, True, low, high)
    else:
        csr_rows(row_ptr, columns, v, initial, has_start, False, low, high)


@simd.device
def csr_rows(row_ptr, columns, v, initial, has_start, batched, low, high):
    """Rows low … high of ``out = initial + a @ b`` for a batch; `initial` counts if `has_start` says so."""
    values, vector, result, batch = v.a, v.b, v.out, v.batch
    width = simd.lanes(values)
    for r in range(low, high):
        begin, end = row_ptr[r], row_ptr[r + 1]
        s = 0
        while s + 4 * width <= batch:  # four vectors at a time: whole stretches of memory instead of strides
            t0 = t1 = t2 = t3 = simd.zeros(values)
            s1, s2, s3 = s + width, s + 2 * width, s + 3 * width
            if has_start:
                t0, t1 = whole(initial, r, batch, s), whole(initial, r, batch, s1)
                t2, t3 = whole(initial, r, batch, s2), whole(initial, r, batch, s3)
            for k in range(begin, end):
                m = columns[k]
                t0 = simd.fma(take(values, k, batch, s, width, batched, True), whole(vector, m, batch, s), t0)
                t1 = simd.fma(take(values, k, batch, s1, width, batched, True), whole(vector, m, batch, s1), t1)
                t2 = simd.fma(take(values, k, batch, s2, width, batched, True), whole(vector, m, batch, s2), t2)
                t3 = simd.fma(take(values, k, batch, s3, width, batched, True), whole(vector, m, batch, s3), t3)
            put(result, r, batch, s, width, True, t0)
            put(result, r, batch, s1, width, True, t1)
            put(result, r, batch, s2, width, True, t2)
            put(result, r, batch, s3, width, True, t3)
            s += 4 * width
        if s + 2 * width <= batch:  # the commonest rest is worth one pass over the columns as well
            t0 = t1 = simd.zeros(values)
            s1 = s + width
            if has_start:
                t0, t1 = whole(initial, r, batch, s), whole(initial, r, batch, s1)
            for k in range(begin, end):
                m = columns[k]
                t0 = simd.fma(take(values, k, batch, s, width, batched, True), whole(vector, m, batch, s), t0)
                t1 = simd.fma(take(values, k, batch, s1, width, batched, True), whole(vector, m, batch, s1), t1)
            put(result, r, batch, s, width, True, t0)
            put(result, r, batch, s1, width, True, t1)
            s += 2 * width
        if s + width <= batch:
            _csr_row(columns, v, initial, has_start, batched, r, begin, end, s, True)
            s += width
        if s < batch:
            _csr_row(columns, v, initial, has_start, batched, r, begin, end, s, False)


@simd.device
def _csr_row(columns, v, initial, has_start, batched, r, begin, end, s, full):
    """One row of the matrix times the vectors of one block of samples."""
    batch, n = v.batch, v.batch - s
    total = take(initial, r, batch, s, n, True, full) if has_start else simd.zeros(v.a)
    for k in range(begin, end):
        factor = take(v.b, columns[k], batch, s, n, True, full)
        total = simd.fma(take(v.a, k, batch, s, n, batched, full), factor, total)
    put(v.out, r, batch, s, n, full, total)


@numba.njit(**SERIAL)
def _scale_rows(team, parts, *args):
    in_parts(_scale_rows_part, team, parts, (args[0], Values(*args[1:7]), args[7], args[8]))


@numba.njit(**INNER_SERIAL)
def _scale_rows_part(part, indptr, values, nnz, parts):
    low, high = row_at(indptr, share(part, parts, nnz)), row_at(indptr, share(part + 1, parts, nnz))
    row_ptr, v = simd.pointer(indptr), pointers(values)
    for r in range(low, high):
        begin = row_ptr[r]
        scale_entries(v, r, begin, begin, row_ptr[r + 1] - begin)


@simd.device
def scale_entries(v, i, begin, base, length):
    """``out[base + q] = a[i] * b[begin + q]`` for `length` entries, each operand shared or per sample."""
    out, batch = v.out, v.batch
    if batch == 1 or (v.b_batched and not v.a_batched):  # one factor for numbers that lie side by side
        width = simd.lanes(out)
        factor = simd.broadcast(v.a, i)
        source, target = simd.advance(v.b, begin * batch), simd.advance(out, base * batch)
        for j in range(0, length * batch, width):
            n = length * batch - j
            if n >= width:
                simd.store(target, j, factor * simd.load(source, j))
            else:
                simd.store_n(target, j, factor * simd.load_n(source, j, n), n)
    else:
        for q in range(length):
            _multiply_entry(v, i, begin + q, base + q)


@simd.device
def _multiply_entry(v, i, j, k):
    """``out[k] = a[i] * b[j]``, each of `a` and `b` shared or per sample."""
    out, batch = v.out, v.batch
    width = simd.lanes(out)
    s = 0
    while s + width <= batch:
        put(out, k, batch, s, width, True, _product(v, i, j, s, True))
        s += width
    if s < batch:
        put(out, k, batch, s, batch - s, False, _product(v, i, j, s, False))


@simd.device
def _product(v, i, j, s, full):
    a, b, batch, n = v.a, v.b, v.batch, v.batch - s
    if v.a_batched and v.b_batched:
        return take(a, i, batch, s, n, True, full) * take(b, j, batch, s, n, True, full)
    if v.a_batched:
        return take(a, i, batch, s, n, True, full) * take(b, j, batch, s, n, False, full)
    return take(a, i, batch, s, n, False, full) * take(b, j, batch, s, n, True, full)


@numba.njit(**SERIAL)
def _scale_runs(team, parts, *args):
    shapes, (data, scale, room, out) = RowShapes(*args[:8]), args[8:12]
    if shapes.gap > 0:
        in_parts(_leave_gaps, team, parts, (scale, room, shapes.gap, parts))
        in_parts(_scale_runs_part, team, parts, (shapes, data, room, out, parts))
    else:
        in_parts(_scale_runs_part, team, parts, (shapes, data, scale, out, parts))


@numba.njit(**INNER_SERIAL)
def _leave_gaps(part, scale, room, gap, parts):
    """Copy page after page."""
    source, target, pages = simd.pointer(scale), simd.pointer(room), (len(scale) + PAGE - 1) // PAGE
    for page in range(share(part, parts, pages), share(part + 1, parts, pages)):
        begin = page * PAGE
        size = min(PAGE, len(scale) - begin)
        simd.copy(simd.advance(target, begin + page * gap), simd.advance(source, begin), size)


@numba.njit(**INNER_SERIAL)
def _scale_runs_part(part, shapes, data, scale, out, parts):
    """Go through each run four entries at a time; what is written beyond its end belongs to the row's next run.

    A gather of sixteen numbers from the cache takes 20 to 30 cycles on the machines that were measured.
    """
    low, high = row_at(shapes.indptr, share(part, parts, len(out))), len(shapes.shape)
    if part + 1 < parts:
        high = row_at(shapes.indptr, share(part + 1, parts, len(out)))
    row_ptr, shape_of, first = simd.pointer(shapes.indptr), simd.pointer(shapes.shape), simd.pointer(shapes.first)
    run_ptr, whole = simd.pointer(shapes.run_ptr), simd.pointer(shapes.whole)
    columns, ends = simd.pointer(shapes.run_columns), simd.pointer(shapes.run_ends)
    values, factors, result = simd.pointer(data), simd.pointer(scale), simd.pointer(out)
    for r in range(low, high):
        s, begin = shape_of[r], row_ptr[r]
        x, y, f = simd.advance(values, begin), simd.advance(result, begin), simd.advance(factors, first[r])
        k = np.int64(0)
        for u in range(run_ptr[s], whole[s]):
            ahead, end = np.int64(columns[u]) - k, np.int64(ends[u])
            simd.multiply_four(y, k, x, k, f, ahead + k)
            while k + 4 < end:
                k += 4
                simd.multiply_four(y, k, x, k, f, ahead + k)
            k = end
        for u in range(whole[s], run_ptr[s + 1]):
            ahead, end = np.int64(columns[u]) - k, np.int64(ends[u])
            while k < end:
                y[k] = x[k] * f[ahead + k]
                k += 1


@numba.njit(**SERIAL)
def _multiply(team, parts, *args):
    in_parts(_multiply_part, team, parts, (args[0], args[1], Values(*args[2:8]), args[8], args[9]))


@numba.njit(**INNER_SERIAL)
def _multiply_part(part, a_index, b_index, values, indexed, parts):
    low, high = share(part, parts, len(b_index)), share(part + 1, parts, len(b_index))
    left, right, v = simd.pointer(a_index), simd.pointer(b_index), pointers(values)
    width = simd.lanes(v.out)
    if v.batch == 1:
        whole = high - (high - low) % width
        for k in range(low, whole, width):
            factor = simd.load_at(v.a, left, k) if indexed else simd.load(v.a, k)
            simd.store(v.out, k, factor * simd.load_at(v.b, right, k))
        for k in range(whole, high):
            v.out[k] = v.a[left[k] if indexed else k] * v.b[right[k]]
    else:
        for k in range(low, high):
            _multiply_entry(v, left[k] if indexed else k, right[k], k)


@parallel(**SERIAL)
def _gather(part, parts, data, index, out, batch):
    low, high = share(part, parts, len(index)), share(part + 1, parts, len(index))
    values, entries, result = simd.pointer(data), simd.pointer(index), simd.pointer(out)
    width = simd.lanes(values)
    if batch == 1:
        whole = high - (high - low) % width
        for k in range(low, whole, width):
            simd.store(result, k, simd.load_at(values, entries, k))
        for k in range(whole, high):
            result[k] = values[entries[k]]
        return
    for k in range(low, high):
        entry = entries[k]
        s = 0
        while s + width <= batch:
            put(result, k, batch, s, width, True, take(values, entry, batch, s, width, True, True))
            s += width
        if s < batch:
            put(result, k, batch, s, batch - s, False, take(values, entry, batch, s, batch - s, True, False))


# A chain of sparse matrices times vectors in one compiled call, however many there are and of whatever kinds.
#
# What runs is a table, a row a step, which names its arrays by number; a second array says where they lie. So the table
# is made once, and a call fills in addresses. Large steps are split among threads, the others run on the calling one.
#
# Vectors without a batch have separate kernels. Row by row, a sum of ten products waits for itself, and the end of
# every row is mispredicted. So four rows of about the same length run side by side, see
# `sparsebp.patterns.SparsityPattern.fours`.

IDENTITY, DIAGONAL, DENSE, FOURS, ROWS = range(5)
"""Kinds of steps. All but `IDENTITY` and `ROWS` are for a batch of one."""
FIELDS = KIND, N_ROWS, N_COLUMNS, COUNT, INDEX, INDICES, WIDE, PARTS, DATA, X, OUT, ADD = range(12)
"""Columns of a table. `COUNT`: of entries. `INDEX` and `INDICES`: addresses of int32 arrays, of row pointers or fours,
and of columns. `WIDE`: whether values are per sample. `DATA` … `ADD`: numbers of arrays."""
_AHEAD, _PER_LINE = 1024, 16
"""Entries that are asked for before they are read, and how many a line of the cache holds."""
LINE, SPARE = 64, 16
"""Bytes of a line of the cache, and the numbers in it at most."""


STEP_WORTH = 6_000
"""Entries and rows from which a step of `FOURS` is split: some 4 microseconds. Other threads are awake since the step
before; a kernel that wakes them needs more, see `WORTH`. With a batch, cores exchange too much of the vectors."""
STEP_GRAIN = 1 << 11
"""Entries and rows that one part of it should at least hold."""


def parts_of_steps(table: Array, batch: int) -> Array:
    """Return the column `PARTS` of a table, from the others."""
    work, fours = (table[:, COUNT] + table[:, N_ROWS]) * batch, table[:, KIND] == FOURS
    operations = work * np.where(fours, VECTOR_GRAIN // SCALAR_GRAIN, 1)
    split = np.where(fours, (work >= STEP_WORTH) & (operations.sum() >= WORTH), operations >= WORTH)
    return np.where(split, np.minimum(work // np.where(fours, STEP_GRAIN, VECTOR_GRAIN), MAX_PARTS), 1)


def run_chain(table: Array, most_parts: int, places: Array, batch: int, dtype: np.dtype) -> None:
    """Run ``out = A @ x (+ add)`` for every row of a table, one after the other.

    Parameters
    ----------
    table
        (steps, 12) int64, see `FIELDS`.
    most_parts
        The largest number in its column `PARTS`.
    places
        int64: addresses of the arrays that the table numbers, values (nnz,) or (nnz, B), vectors (n, B), all
        C-contiguous and kept alive by the caller; 0 for no `ADD`.
    batch
        Number of samples of every vector.
    dtype
        float32 or float64, of all of them.
    """
    _run_chain(team(most_parts), table, places, batch, dtype.type(0))


def lay_out(whole: Array, ends: Array, batch: int, places: Array) -> int:
    """Write down where vectors lie that are parts of one array, from its first whole line of the cache on.

    Parameters
    ----------
    whole
        Their numbers and `SPARE` more, one axis.
    ends
        (n + 1,) int64: rows of the vectors up to each.
    batch
        Numbers in a row.
    places
        (n,) int64: their addresses, written.

    Returns
    -------
    int
        How many numbers before the first vector are left out.
    """
    skipped: int = _lay_out(whole, ends, batch * whole.itemsize, places)
    return skipped // whole.itemsize


# The functions below are compiled: their arguments are arrays, addresses, sizes and flags.


@numba.njit(**SERIAL)
def _lay_out(whole, ends, size, places):
    start = simd.number(simd.pointer(whole))
    first = (start + LINE - 1) // LINE * LINE
    for i in range(len(places)):
        places[i] = first + ends[i] * size
    return first - start


@numba.njit(**SERIAL)
def _run_chain(team, table, places, batch, zero):
    step = 0
    while step < len(table):
        parts, end = table[step, PARTS], step + 1
        if table[step, KIND] == FOURS and parts > 1:
            while end < len(table) and table[end, KIND] == FOURS and table[end, PARTS] > 1:
                parts, end = max(parts, table[end, PARTS]), end + 1
            _in_turns(team, parts, table, step, end, places, batch, zero)
        else:
            in_parts(_run_part, team if parts > 1 else ALONE, parts, (parts, table, step, places, batch, zero))
        step = end


@numba.njit(**INNER_SERIAL)
def _in_turns(team, parts, table, start, end, places, batch, zero):
    threads, words, first = turns_of(team, parts)
    args = (threads, first, table, start, end, places, batch, zero)
    in_parts(_run_turns, team, threads, args)
    simd.keep_alive(words)


@numba.njit(**INNER_SERIAL)
def _run_turns(me, threads, words, table, start, end, places, batch, zero):
    for step in range(start, end):
        parts, turn = min(threads, table[step, PARTS]), step - start
        part = next_part(words, me, parts, turn)
        while part >= 0:
            _run_part(part, parts, table, step, places, batch, zero)
            end_part(words, part, turn)
            part = next_part(words, me, parts, turn)


@numba.njit(**INNER_SERIAL)
def _run_part(part, parts, table, step, places, batch, zero):
    kind, rows, columns, count = table[step, KIND], table[step, N_ROWS], table[step, N_COLUMNS], table[step, COUNT]
    index, indices = simd.address(table[step, INDEX], np.int32(0)), simd.address(table[step, INDICES], np.int32(0))
    data, x = simd.address(places[table[step, DATA]], zero), simd.address(places[table[step, X]], zero)
    out, plus = simd.address(places[table[step, OUT]], zero), places[table[step, ADD]]
    add = simd.address(plus, zero)
    if kind == ROWS:
        pointers = numba.carray(index, (rows + 1,))
        low = row_at(pointers, share(part, parts, count)) if part > 0 else 0
        high = row_at(pointers, share(part + 1, parts, count)) if part + 1 < parts else rows
        v = Values(data, x, out, batch, table[step, WIDE] != 0, True)
        if v.a_batched:
            csr_rows(index, indices, v, add, plus != 0, True, low, high)
        else:
            csr_rows(index, indices, v, add, plus != 0, False, low, high)
    elif kind == FOURS:
        fours, after = (rows + 3) // 4, min(step + 1, len(table) - 1)
        following = simd.address(places[table[after, DATA]], zero)
        soon = count, following, simd.address(table[after, INDICES], np.int32(0))
        low, high = share(part, parts, fours), share(part + 1, parts, fours)
        _four_rows(index, indices, data, x, out, add, plus != 0, zero, low, high, fours, soon)
    else:
        low, high = share(part, parts, rows), share(part + 1, parts, rows)
        if kind == DENSE:
            _dense_rows(data, x, out, add, plus != 0, low, high, columns, zero)
        else:
            _scaled(data, x, out, add, plus != 0, low * batch, high * batch, kind == DIAGONAL)


@simd.device
def _four_rows(lines, columns, data, x, out, add, has_add, zero, low, high, fours, soon):
    """Four rows at a time: as many entries as all of them have side by side, then what the longer ones have left.

    Entries that are read soon are asked for, and at the end those with which the next step begins.
    """
    count, next_data, next_columns = soon
    each = count // max(fours, 1)
    ahead = low * each + min(count, _AHEAD)
    for four in range(low, high):
        for entry in range(ahead, ahead + each, _PER_LINE):
            if entry < count:
                simd.prefetch(data, entry)
                simd.prefetch(columns, entry)
            else:
                simd.prefetch(next_data, entry - count)
                simd.prefetch(next_columns, entry - count)
        ahead += each
        at = 12 * four
        n, b0, b1 = np.int64(lines[at]), np.int64(lines[at + 1]), np.int64(lines[at + 2])
        b2, b3, r0 = np.int64(lines[at + 3]), np.int64(lines[at + 4]), np.int64(lines[at + 5])
        r1, r2, r3 = np.int64(lines[at + 6]), np.int64(lines[at + 7]), np.int64(lines[at + 8])
        t0 = t1 = t2 = t3 = zero
        if has_add:
            t0, t1, t2, t3 = add[r0], add[r1], add[r2], add[r3]
        for k in range(n):
            t0 += data[b0 + k] * x[columns[b0 + k]]
            t1 += data[b1 + k] * x[columns[b1 + k]]
            t2 += data[b2 + k] * x[columns[b2 + k]]
            t3 += data[b3 + k] * x[columns[b3 + k]]
        if lines[at + 11] > n:  # they are sorted: the last one is the longest
            for k in range(b1 + n, b1 + lines[at + 9]):
                t1 += data[k] * x[columns[k]]
            for k in range(b2 + n, b2 + lines[at + 10]):
                t2 += data[k] * x[columns[k]]
            for k in range(b3 + n, b3 + lines[at + 11]):
                t3 += data[k] * x[columns[k]]
        out[r0], out[r1], out[r2], out[r3] = t0, t1, t2, t3


@numba.njit(**INNER_SUMS)
def _dense_rows(data, x, out, add, has_add, low, high, columns, zero):
    """Rows of a full matrix, each a sum in as many lanes as fit."""
    for r in range(low, high):
        row, total = simd.advance(data, r * columns), zero
        for k in range(columns):
            total += row[k] * x[k]
        out[r] = total + add[r] if has_add else total


@simd.device
def _scaled(data, x, out, add, has_add, low, high, scaled):
    """``out = data * x + add``, or ``x + add``."""
    width = simd.lanes(out)
    for i in range(low, high, width):
        left = high - i
        value = take(x, i, 1, 0, left, True, False)
        if scaled:
            value = take(data, i, 1, 0, left, True, False) * value
        if has_add:
            value = value + take(add, i, 1, 0, left, True, False)
        put(out, i, 1, 0, left, False, value)


# Values of transposed Jacobians on the host: saved arrays, batch first, become entries, batch last.

_GIVEN, _RELU, _TANH, _SIGMOID = range(len(SLOPES))


class ValueKernels:
    """Host side of the values part of `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def pointwise_slopes(self, kept: Array, function: str, out: Array) -> None:
        """Slopes from the array kept by the forward, transposed to batch last."""
        batch = out.shape[1]
        arguments = (kept.reshape(-1), SLOPES.index(function), out.reshape(-1), batch, out.shape[0])
        parts = parts_for(out.size)
        _slopes(team(parts), parts, *arguments)

    def max_pool_values(self, winner: Array, window: Array, offset: Array, windows: int, taps: int, out: Array) -> None:
        """One where an entry's place in its window is the winner's, else zero."""
        batch = out.shape[1]
        arguments = (winner.reshape(-1), winner.shape[1], window, offset, windows, taps, out.reshape(-1), batch)
        parts = parts_for(out.size)
        _winners(team(parts), parts, *arguments)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.


@parallel(**SERIAL)
def _slopes(part, parts, kept, function, out, batch, size):
    low, high, one = share(part, parts, size), share(part + 1, parts, size), out.dtype.type(1)
    if batch == 1:
        y, slope = kept[low:high], out[low:high]
        if function == _RELU:
            for i in range(len(y)):
                slope[i] = not y[i] <= 0  # 1 at a NaN
        elif function == _TANH:
            for i in range(len(y)):
                slope[i] = one - y[i] * y[i]
        elif function == _SIGMOID:
            for i in range(len(y)):
                slope[i] = y[i] * (one - y[i])
        else:
            for i in range(len(y)):
                slope[i] = y[i]
        return
    for i in range(low, high):
        slope = out[i * batch : (i + 1) * batch]
        if function == _RELU:
            for b in range(len(slope)):
                slope[b] = not kept[b * size + i] <= 0
        elif function == _TANH:
            for b in range(len(slope)):
                y = kept[b * size + i]
                slope[b] = one - y * y
        elif function == _SIGMOID:
            for b in range(len(slope)):
                y = kept[b * size + i]
                slope[b] = y * (one - y)
        else:
            for b in range(len(slope)):
                slope[b] = kept[b * size + i]


@parallel(**SERIAL)
def _winners(part, parts, winner, columns, window, offset, windows, taps, out, batch):
    low, high = share(part, parts, len(window)), share(part + 1, parts, len(window))
    one, zero = out.dtype.type(1), out.dtype.type(0)
    for line in range(low, high):
        first, place, start = window[line], offset[line], line * windows * taps
        if batch != 1:
            for entry in range(windows * taps):
                column, wanted = first + entry // taps, place + entry % taps
                for b in range(batch):
                    won = winner[np.uint64(b * columns + column)] == wanted
                    out[np.uint64((start + entry) * batch + b)] = one if won else zero
        elif taps == 1:
            for w in range(windows):
                out[np.uint64(start + w)] = one if np.int32(winner[np.uint64(first + w)]) == place else zero
        elif taps == 2:  # written out, so that the stores of both interleave in vectors
            for w in range(windows):
                tap = np.int32(winner[np.uint64(first + w)]) - place
                out[np.uint64(start + 2 * w)] = one if tap == 0 else zero
                out[np.uint64(start + 2 * w + 1)] = one if tap == 1 else zero
        else:
            for w in range(windows):
                tap = np.int32(winner[np.uint64(first + w)]) - place
                for t in range(taps):
                    out[np.uint64(start + w * taps + t)] = one if tap == t else zero
