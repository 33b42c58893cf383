"""Products whose right operand has long runs of neighbouring columns, on the host.

What a run of B's row adds to C is a run too, so one position stands for all of it, and vectors take the place of single
numbers. Rows of B with the same columns (the channels of a pixel, in a channels-last convolution) meet in one go: the
sums stay in registers while the entries of A that name those rows follow one another, in the order of Gustavson's
algorithm, so every sum has the order that it has there.
"""

from __future__ import annotations

import numba

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for
from sparsebp.kernels.host.engine.samples import Values, flat, pointers, put, take
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.kernels.host.sparse.csr import row_pointers, whole
from sparsebp.kernels.operands import Rows, Runs


class RunKernels:
    """Host side of `spgemm_runs`."""

    def spgemm_runs(self, rows: Rows, runs: Runs, a_data: Array, b_data: Array, out: Array) -> None:
        """Add every run of B's rows, scaled, to where it starts in its row of C."""
        products = len(rows.a_indices) * len(b_data) // max(len(rows.b_indptr) - 1, 1)  # on average
        parts = parts_for(products * out.shape[1])
        _runs(team(parts), len(runs.row_cuts) - 1, *rows, *runs, *flat(a_data, b_data, out))


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _runs(team, parts, *args):
    in_parts(_part, team, parts, (Rows(*args[:4]), Runs(*args[4:10]), Values(*args[10:])))


@numba.njit(**INNER_SERIAL)
def _part(part, arrays, runs, values):
    rows, v, low, high = row_pointers(arrays), pointers(values), runs.row_cuts[part], runs.row_cuts[part + 1]
    at = (
        simd.pointer(runs.b_shape),
        simd.pointer(runs.run_ptr),
        simd.pointer(runs.run_lengths),
        simd.pointer(runs.start_ptr),
        simd.pointer(runs.starts),
    )
    if v.batch == 1 or not v.a_batched:
        _rows(rows, at, v, False, True, low, high)
    elif v.b_batched:
        _rows(rows, at, v, True, True, low, high)
    else:
        _rows(rows, at, v, True, False, low, high)


@simd.device
def _rows(rows, runs, v, a_batched, b_batched, low, high):
    a_indptr, a_indices, _, c_indptr = rows
    b_shape, run_ptr, run_lengths, start_ptr, starts = runs
    out, batch = v.out, v.batch
    width = simd.lanes(out)
    zero = simd.zeros(out)
    for r in range(low, high):
        base, place = c_indptr[r], start_ptr[r]
        for i in range(base * batch, c_indptr[r + 1] * batch, width):
            simd.store_up_to(out, i, zero, c_indptr[r + 1] * batch - i)
        k, end = a_indptr[r], a_indptr[r + 1]
        while k < end:
            shape = b_shape[a_indices[k]]
            stop = k + 1
            while stop < end and b_shape[a_indices[stop]] == shape:
                stop += 1
            begin = 0
            for u in range(run_ptr[shape], run_ptr[shape + 1]):
                length, c = run_lengths[u], base + starts[place]
                if a_batched:
                    _add_entries(rows, v, k, stop, begin, c, length, b_batched)
                else:
                    _add_run(rows, v, k, stop, begin, simd.advance(out, c * batch), length * batch)
                place += 1
                begin += length
            k = stop


@simd.device
def _add_run(rows, v, k, stop, begin, target, length):
    """``target[j] += sum over entries of a[entry] * row of B [begin + j]``; `a` is shared, or of one sample."""
    a, b, a_indices, b_indptr = v.a, v.b, rows.a_indices, rows.b_indptr
    width = simd.lanes(target)
    j = 0
    while j + 8 * width <= length:
        j1, j2, j3 = j + width, j + 2 * width, j + 3 * width
        j4, j5, j6, j7 = j + 4 * width, j + 5 * width, j + 6 * width, j + 7 * width
        s0, s1, s2, s3 = simd.load(target, j), simd.load(target, j1), simd.load(target, j2), simd.load(target, j3)
        s4, s5, s6, s7 = simd.load(target, j4), simd.load(target, j5), simd.load(target, j6), simd.load(target, j7)
        for e in range(k, stop):
            factor, row = simd.broadcast(a, e), simd.advance(b, (b_indptr[a_indices[e]] + begin) * v.batch)
            s0 = simd.fma(factor, simd.load(row, j), s0)
            s1 = simd.fma(factor, simd.load(row, j1), s1)
            s2 = simd.fma(factor, simd.load(row, j2), s2)
            s3 = simd.fma(factor, simd.load(row, j3), s3)
            s4 = simd.fma(factor, simd.load(row, j4), s4)
            s5 = simd.fma(factor, simd.load(row, j5), s5)
            s6 = simd.fma(factor, simd.load(row, j6), s6)
            s7 = simd.fma(factor, simd.load(row, j7), s7)
        simd.store(target, j, s0)
        simd.store(target, j1, s1)
        simd.store(target, j2, s2)
        simd.store(target, j3, s3)
        simd.store(target, j4, s4)
        simd.store(target, j5, s5)
        simd.store(target, j6, s6)
        simd.store(target, j7, s7)
        j += 8 * width
    while j + 2 * width <= length:
        j1 = j + width
        s0, s1 = simd.load(target, j), simd.load(target, j1)
        for e in range(k, stop):
            factor, row = simd.broadcast(a, e), simd.advance(b, (b_indptr[a_indices[e]] + begin) * v.batch)
            s0 = simd.fma(factor, simd.load(row, j), s0)
            s1 = simd.fma(factor, simd.load(row, j1), s1)
        simd.store(target, j, s0)
        simd.store(target, j1, s1)
        j += 2 * width
    while j + width <= length:
        s0 = simd.load(target, j)
        for e in range(k, stop):
            row = simd.advance(b, (b_indptr[a_indices[e]] + begin) * v.batch)
            s0 = simd.fma(simd.broadcast(a, e), simd.load(row, j), s0)
        simd.store(target, j, s0)
        j += width
    if j < length:
        n = length - j
        s0 = simd.load_n(target, j, n)
        for e in range(k, stop):
            row = simd.advance(b, (b_indptr[a_indices[e]] + begin) * v.batch)
            s0 = simd.fma(simd.broadcast(a, e), simd.load_n(row, j, n), s0)
        simd.store_n(target, j, s0, n)


@simd.device
def _add_entries(rows, v, k, stop, begin, c, length, b_batched):
    """The same for values of A per sample: entry by entry of the run, a block of samples at a time."""
    a, b, out, batch, a_indices, b_indptr = v.a, v.b, v.out, v.batch, rows.a_indices, rows.b_indptr
    width = simd.lanes(out)
    s = 0
    while s + width <= batch:
        q = 0
        while q + 4 <= length:
            s0, s1 = whole(out, c + q, batch, s), whole(out, c + q + 1, batch, s)
            s2, s3 = whole(out, c + q + 2, batch, s), whole(out, c + q + 3, batch, s)
            for e in range(k, stop):
                factor, at = whole(a, e, batch, s), b_indptr[a_indices[e]] + begin + q
                s0 = simd.fma(factor, take(b, at, batch, s, width, b_batched, True), s0)
                s1 = simd.fma(factor, take(b, at + 1, batch, s, width, b_batched, True), s1)
                s2 = simd.fma(factor, take(b, at + 2, batch, s, width, b_batched, True), s2)
                s3 = simd.fma(factor, take(b, at + 3, batch, s, width, b_batched, True), s3)
            put(out, c + q, batch, s, width, True, s0)
            put(out, c + q + 1, batch, s, width, True, s1)
            put(out, c + q + 2, batch, s, width, True, s2)
            put(out, c + q + 3, batch, s, width, True, s3)
            q += 4
        while q < length:
            _add_entry(rows, v, k, stop, begin + q, c + q, s, b_batched, True)
            q += 1
        s += width
    if s < batch:
        for q in range(length):
            _add_entry(rows, v, k, stop, begin + q, c + q, s, b_batched, False)


@simd.device
def _add_entry(rows, v, k, stop, offset, c, s, b_batched, full):
    batch, n = v.batch, v.batch - s
    total = take(v.out, c, batch, s, n, True, full)
    for e in range(k, stop):
        right = take(v.b, rows.b_indptr[rows.a_indices[e]] + offset, batch, s, n, b_batched, full)
        total = simd.fma(take(v.a, e, batch, s, n, True, full), right, total)
    put(v.out, c, batch, s, n, full, total)
