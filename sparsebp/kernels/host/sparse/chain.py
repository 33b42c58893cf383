"""A chain of sparse matrices times vectors in one compiled call, however many there are and of whatever kinds.

What runs is a table, a row a step, which names its arrays by number; a second array says where they lie. So the table
is made once, and a call fills in addresses. Large steps are split among threads, the others run on the calling one.

A vector alone has kernels of its own. Row by row, a sum of ten products waits for itself, and the end of every row is
mispredicted. So four rows of about the same length run side by side, see `sparsebp.patterns.SparsityPattern.fours`.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, INNER_SUMS, SERIAL, parts_of, row_at, share
from sparsebp.kernels.host.engine.samples import Values, put, take
from sparsebp.kernels.host.engine.team import ALONE, in_parts, team
from sparsebp.kernels.host.sparse.csr import csr_rows

IDENTITY, DIAGONAL, DENSE, FOURS, ROWS = range(5)
"""Kinds of steps. All but `IDENTITY` and `ROWS` are for a batch of one."""
FIELDS = KIND, N_ROWS, N_COLUMNS, COUNT, INDEX, INDICES, WIDE, PARTS, DATA, X, OUT, ADD = range(12)
"""Columns of a table. `COUNT`: of entries. `INDEX` and `INDICES`: addresses of int32 arrays, of row pointers or fours,
and of columns. `WIDE`: whether values are per sample. `DATA` … `ADD`: numbers of arrays."""
_AHEAD, _PER_LINE = 1024, 16
"""Entries that are asked for before they are read, and how many a line of the cache holds."""
LINE, SPARE = 64, 16
"""Bytes of a line of the cache, and the numbers in it at most."""


def parts_of_step(kind: int, entries: int, rows: int, batch: int) -> int:
    """Return what belongs into the column `PARTS`."""
    return parts_of((entries + rows) * batch, vectors=kind in (ROWS, DIAGONAL, DENSE))


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
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _lay_out(whole, ends, size, places):
    start = simd.number(simd.pointer(whole))
    first = (start + LINE - 1) // LINE * LINE
    for i in range(len(places)):
        places[i] = first + ends[i] * size
    return first - start


@numba.njit(**SERIAL)
def _run_chain(team, table, places, batch, zero):
    for step in range(len(table)):
        parts = table[step, PARTS]
        in_parts(_run_part, team if parts > 1 else ALONE, parts, (parts, table, step, places, batch, zero))


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
