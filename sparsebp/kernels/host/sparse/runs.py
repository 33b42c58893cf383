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
from sparsebp.kernels.host.engine.samples import put, take
from sparsebp.kernels.host.engine.team import in_parts, team


class RunKernels:
    """Host side of `spgemm_runs` of `sparsebp.kernels.api.Kernels`."""

    def spgemm_runs(
        self, a_indptr: Array, a_indices: Array, a_data: Array, b_indptr: Array, b_data: Array, b_shape: Array,
        run_ptr: Array, run_lengths: Array, c_indptr: Array, start_ptr: Array, starts: Array, row_cuts: Array,
        out: Array,
    ) -> None:  # fmt: skip
        """Add every run of B's rows, scaled, to where it starts in its row of C; `out` is overwritten."""
        batch = out.shape[1]
        arguments = (
            a_indptr,
            a_indices,
            a_data.reshape(-1),
            b_indptr,
            b_data.reshape(-1),
            b_shape,
            run_ptr,
            run_lengths,
            c_indptr,
            start_ptr,
            starts,
            out.reshape(-1),
            batch,
            a_data.shape[1] == batch,
            b_data.shape[1] == batch,
        )
        parts = parts_for(len(a_indices) * len(b_data) // max(len(b_indptr) - 1, 1) * batch)
        _runs_parallel(team(parts), len(row_cuts) - 1, *arguments, row_cuts)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _runs(
    a_indptr, a_indices, a, b_indptr, b, b_shape, run_ptr, run_lengths, c_indptr, start_ptr, starts, out, batch, a_wide,
    b_wide, low, high,
):  # fmt: skip
    args = (
        simd.pointer(a_indptr),
        simd.pointer(a_indices),
        simd.pointer(a),
        simd.pointer(b_indptr),
        simd.pointer(b),
        simd.pointer(b_shape),
        simd.pointer(run_ptr),
        simd.pointer(run_lengths),
        simd.pointer(c_indptr),
        simd.pointer(start_ptr),
        simd.pointer(starts),
        simd.pointer(out),
        batch,
    )
    if batch == 1 or not a_wide:
        _rows(*args, False, True, low, high)
    elif b_wide:
        _rows(*args, True, True, low, high)
    else:
        _rows(*args, True, False, low, high)


@simd.device
def _rows(
    a_ptr, a_indices, a, b_ptr, b, b_shape, run_ptr, run_lengths, c_ptr, start_ptr, starts, out, batch, a_wide, b_wide,
    low, high,
):  # fmt: skip
    width = simd.lanes(out)
    zero = simd.zeros(out)
    for r in range(low, high):
        base, s = c_ptr[r], start_ptr[r]
        for i in range(base * batch, c_ptr[r + 1] * batch, width):
            simd.store_up_to(out, i, zero, c_ptr[r + 1] * batch - i)
        k, end = a_ptr[r], a_ptr[r + 1]
        while k < end:
            shape = b_shape[a_indices[k]]
            stop = k + 1
            while stop < end and b_shape[a_indices[stop]] == shape:
                stop += 1
            begin = 0
            for u in range(run_ptr[shape], run_ptr[shape + 1]):
                length = run_lengths[u]
                if a_wide:
                    _add_entries(
                        a_indices, a, b_ptr, b, k, stop, begin, out, base + starts[s], length, batch, b_wide
                    )  # fmt: skip
                else:
                    target = simd.advance(out, (base + starts[s]) * batch)
                    _add_run(a_indices, a, b_ptr, b, k, stop, begin, target, length * batch, batch)
                s += 1
                begin += length
            k = stop


@simd.device
def _add_run(a_indices, a, b_ptr, b, k, stop, begin, target, length, step):
    """``target[j] += sum over entries of a[entry] * row of B [begin + j]``; `step` numbers an entry of B."""
    width = simd.lanes(target)
    j = 0
    while j + 8 * width <= length:
        j1, j2, j3 = j + width, j + 2 * width, j + 3 * width
        j4, j5, j6, j7 = j + 4 * width, j + 5 * width, j + 6 * width, j + 7 * width
        s0, s1, s2, s3 = simd.load(target, j), simd.load(target, j1), simd.load(target, j2), simd.load(target, j3)
        s4, s5, s6, s7 = simd.load(target, j4), simd.load(target, j5), simd.load(target, j6), simd.load(target, j7)
        for e in range(k, stop):
            factor, row = simd.broadcast(a, e), simd.advance(b, (b_ptr[a_indices[e]] + begin) * step)
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
            factor, row = simd.broadcast(a, e), simd.advance(b, (b_ptr[a_indices[e]] + begin) * step)
            s0 = simd.fma(factor, simd.load(row, j), s0)
            s1 = simd.fma(factor, simd.load(row, j1), s1)
        simd.store(target, j, s0)
        simd.store(target, j1, s1)
        j += 2 * width
    while j + width <= length:
        s0 = simd.load(target, j)
        for e in range(k, stop):
            row = simd.advance(b, (b_ptr[a_indices[e]] + begin) * step)
            s0 = simd.fma(simd.broadcast(a, e), simd.load(row, j), s0)
        simd.store(target, j, s0)
        j += width
    if j < length:
        n = length - j
        s0 = simd.load_n(target, j, n)
        for e in range(k, stop):
            row = simd.advance(b, (b_ptr[a_indices[e]] + begin) * step)
            s0 = simd.fma(simd.broadcast(a, e), simd.load_n(row, j, n), s0)
        simd.store_n(target, j, s0, n)


@simd.device
def _add_entries(a_indices, a, b_ptr, b, k, stop, begin, out, c, length, batch, b_wide):
    """The same for values of A per sample: entry by entry of the run, a lane block of samples at a time."""
    width = simd.lanes(out)
    lane = 0
    while lane + width <= batch:
        q = 0
        while q + 4 <= length:
            s0, s1 = _of(out, c + q, batch, lane, width, True), _of(out, c + q + 1, batch, lane, width, True)
            s2, s3 = _of(out, c + q + 2, batch, lane, width, True), _of(out, c + q + 3, batch, lane, width, True)
            for e in range(k, stop):
                factor, at = _of(a, e, batch, lane, width, True), b_ptr[a_indices[e]] + begin + q
                s0 = simd.fma(factor, take(b, at, batch, lane, width, b_wide, True), s0)
                s1 = simd.fma(factor, take(b, at + 1, batch, lane, width, b_wide, True), s1)
                s2 = simd.fma(factor, take(b, at + 2, batch, lane, width, b_wide, True), s2)
                s3 = simd.fma(factor, take(b, at + 3, batch, lane, width, b_wide, True), s3)
            put(out, c + q, batch, lane, width, True, s0)
            put(out, c + q + 1, batch, lane, width, True, s1)
            put(out, c + q + 2, batch, lane, width, True, s2)
            put(out, c + q + 3, batch, lane, width, True, s3)
            q += 4
        while q < length:
            _add_entry(a_indices, a, b_ptr, b, k, stop, begin + q, out, c + q, batch, lane, width, b_wide, True)
            q += 1
        lane += width
    if lane < batch:
        for q in range(length):
            _add_entry(a_indices, a, b_ptr, b, k, stop, begin + q, out, c + q, batch, lane, batch - lane, b_wide, False)


@simd.device
def _of(values, entry, batch, lane, n, full):
    return take(values, entry, batch, lane, n, True, full)


@simd.device
def _add_entry(a_indices, a, b_ptr, b, k, stop, offset, out, c, batch, lane, n, b_wide, full):
    total = _of(out, c, batch, lane, n, full)
    for e in range(k, stop):
        right = take(b, b_ptr[a_indices[e]] + offset, batch, lane, n, b_wide, full)
        total = simd.fma(_of(a, e, batch, lane, n, full), right, total)
    put(out, c, batch, lane, n, full, total)


@numba.njit(**INNER_SERIAL)
def _runs_part(
    part, a_indptr, a_indices, a, b_indptr, b, b_shape, run_ptr, run_lengths, c_indptr, start_ptr, starts, out, batch,
    a_wide, b_wide, row_cuts,
):  # fmt: skip
    low, high = row_cuts[part], row_cuts[part + 1]
    _runs(
        a_indptr, a_indices, a, b_indptr, b, b_shape, run_ptr, run_lengths, c_indptr, start_ptr, starts, out, batch,
        a_wide, b_wide, low, high,
    )  # fmt: skip


@numba.njit(**SERIAL)
def _runs_parallel(team, parts, *args):
    in_parts(_runs_part, team, parts, args)
