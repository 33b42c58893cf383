"""CSR kernels on the host: sparse times vectors, scalings and gathers; values batch last.

With a batch, a vector register holds as many samples as fit, and the sums of a row stay in registers. A batch of one
has loops of its own, because there the entries are what lies side by side.
"""

from __future__ import annotations

import numba

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for, row_at, share
from sparsebp.kernels.host.engine.samples import put, take
from sparsebp.kernels.host.engine.team import in_parts, team


class CsrKernels:
    """Host side of the CSR part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def csr_matvec(
        self, indptr: Array, indices: Array, data: Array, x: Array, out: Array, add: Array | None = None
    ) -> None:
        """Batched SpMV, ``out = add + A @ x``; sums run in the order of the entries."""
        batch = out.shape[-1]
        arguments = (
            indptr,
            indices,
            data.reshape(-1),
            x.reshape(-1),
            (out if add is None else add).reshape(-1),
            add is not None,
            out.reshape(-1),
            batch,
            data.shape[1] == batch,
        )
        parts = parts_for((indices.size + out.shape[0]) * batch, vectors=batch > 1)
        _csr_matvec_parallel(team(parts), parts, *arguments, parts)

    def scale_rows(self, indptr: Array, data: Array, scale: Array, out: Array) -> None:
        """Diagonal times CSR: ``out[k] = scale[row(k)] * data[k]``."""
        batch = out.shape[-1]
        arguments = (
            indptr,
            scale.reshape(-1),
            data.reshape(-1),
            out.reshape(-1),
            batch,
            scale.shape[1] == batch,
            data.shape[1] == batch,
        )
        parts = parts_for(out.size)
        _scale_rows_parallel(team(parts), parts, *arguments, len(out), parts)

    def scale_columns(self, indices: Array, data: Array, scale: Array, out: Array) -> None:
        """CSR times diagonal: ``out[k] = data[k] * scale[indices[k]]``."""
        batch = out.shape[-1]
        self._multiply(data, None, scale, indices, out, batch)

    def gather(self, data: Array, index: Array, out: Array) -> None:
        """``out[k] = data[index[k]]``."""
        batch = out.shape[-1]
        arguments = (data.reshape(-1), index, out.reshape(-1), batch)
        parts = parts_for(out.size, vectors=batch > 1)
        _gather_parallel(team(parts), parts, *arguments, parts)

    def gather_multiply(self, a_data: Array, a_index: Array, b_data: Array, b_index: Array, out: Array) -> None:
        """One product per output entry: ``out[k] = a_data[a_index[k]] * b_data[b_index[k]]``."""
        batch = out.shape[-1]
        self._multiply(a_data, a_index, b_data, b_index, out, batch)

    def _multiply(self, a: Array, a_index: Array | None, b: Array, b_index: Array, out: Array, batch: int) -> None:
        """``out[k] = a[a_index[k]] * b[b_index[k]]``; without `a_index` entry k of `a` itself."""
        arguments = (
            a.reshape(-1),
            b_index if a_index is None else a_index,
            a_index is not None,
            b.reshape(-1),
            b_index,
            out.reshape(-1),
            batch,
            a.shape[1] == batch,
            b.shape[1] == batch,
        )
        parts = parts_for(out.size, vectors=batch > 1)
        _multiply_parallel(team(parts), parts, *arguments, parts)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _csr_matvec(indptr, indices, data, x, start, has_start, out, batch, wide, low, high):
    if batch == 1:
        row_ptr, columns = simd.pointer(indptr), simd.pointer(indices)
        values, vector, initial, result = simd.pointer(data), simd.pointer(x), simd.pointer(start), simd.pointer(out)
        for r in range(low, high):
            total = initial[r] if has_start else out.dtype.type(0)
            for k in range(row_ptr[r], row_ptr[r + 1]):
                total += values[k] * vector[columns[k]]
            result[r] = total
    elif wide:
        _csr_matvec_lanes(indptr, indices, data, x, start, has_start, out, batch, True, low, high)
    else:
        _csr_matvec_lanes(indptr, indices, data, x, start, has_start, out, batch, False, low, high)


@simd.device
def _csr_matvec_lanes(indptr, indices, data, x, start, has_start, out, batch, wide, low, high):
    row_ptr, columns = simd.pointer(indptr), simd.pointer(indices)
    values, vector, initial, result = simd.pointer(data), simd.pointer(x), simd.pointer(start), simd.pointer(out)
    width = simd.lanes(values)
    for r in range(low, high):
        begin, end = row_ptr[r], row_ptr[r + 1]
        lane = 0
        while lane + 4 * width <= batch:  # four vectors at a time: whole stretches of memory instead of strides
            s0 = s1 = s2 = s3 = simd.zeros(values)
            l1, l2, l3 = lane + width, lane + 2 * width, lane + 3 * width
            if has_start:
                s0, s1 = _whole(initial, r, batch, lane), _whole(initial, r, batch, l1)
                s2, s3 = _whole(initial, r, batch, l2), _whole(initial, r, batch, l3)
            for k in range(begin, end):
                m = columns[k]
                s0 = simd.fma(take(values, k, batch, lane, width, wide, True), _whole(vector, m, batch, lane), s0)
                s1 = simd.fma(take(values, k, batch, l1, width, wide, True), _whole(vector, m, batch, l1), s1)
                s2 = simd.fma(take(values, k, batch, l2, width, wide, True), _whole(vector, m, batch, l2), s2)
                s3 = simd.fma(take(values, k, batch, l3, width, wide, True), _whole(vector, m, batch, l3), s3)
            put(result, r, batch, lane, width, True, s0)
            put(result, r, batch, l1, width, True, s1)
            put(result, r, batch, l2, width, True, s2)
            put(result, r, batch, l3, width, True, s3)
            lane += 4 * width
        while lane + width <= batch:
            _csr_row(columns, values, vector, initial, has_start, result, batch, wide, r, begin, end, lane, True)
            lane += width
        if lane < batch:
            _csr_row(columns, values, vector, initial, has_start, result, batch, wide, r, begin, end, lane, False)


@simd.device
def _whole(values, entry, batch, lane):
    return take(values, entry, batch, lane, 0, True, True)


@simd.device
def _csr_row(columns, values, vector, initial, has_start, result, batch, wide, r, begin, end, lane, full):
    """One row of the matrix times the vectors of one lane block."""
    n = batch - lane
    total = take(initial, r, batch, lane, n, True, full) if has_start else simd.zeros(values)
    for k in range(begin, end):
        factor = take(vector, columns[k], batch, lane, n, True, full)
        total = simd.fma(take(values, k, batch, lane, n, wide, full), factor, total)
    put(result, r, batch, lane, n, full, total)


@numba.njit(**INNER_SERIAL)
def _csr_matvec_part(part, indptr, indices, data, x, start, has_start, out, batch, wide, parts):
    nnz, rows = len(indices), len(indptr) - 1
    # rows without entries are written too, so the first part begins at row 0 and the last ends at the last row
    low = row_at(indptr, share(part, parts, nnz)) if part > 0 else 0
    high = row_at(indptr, share(part + 1, parts, nnz)) if part + 1 < parts else rows
    _csr_matvec(indptr, indices, data, x, start, has_start, out, batch, wide, low, high)


@numba.njit(**SERIAL)
def _csr_matvec_parallel(team, parts, *args):
    in_parts(_csr_matvec_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _scale_rows(indptr, scale, data, out, batch, scale_wide, data_wide, low, high):
    row_ptr, factors, values, result = simd.pointer(indptr), simd.pointer(scale), simd.pointer(data), simd.pointer(out)
    for r in range(low, high):
        begin = row_ptr[r]
        scale_entries(factors, r, values, begin, result, begin, row_ptr[r + 1] - begin, batch, scale_wide, data_wide)


@simd.device
def scale_entries(factors, i, values, begin, out, base, length, batch, factor_wide, values_wide):
    """``out[base + q] = factors[i] * values[begin + q]`` for `length` entries, each operand shared or per sample."""
    if batch == 1 or (values_wide and not factor_wide):  # one factor for numbers that lie side by side
        width = simd.lanes(out)
        factor = simd.broadcast(factors, i)
        source, target = simd.advance(values, begin * batch), simd.advance(out, base * batch)
        for j in range(0, length * batch, width):
            n = length * batch - j
            if n >= width:
                simd.store(target, j, factor * simd.load(source, j))
            else:
                simd.store_n(target, j, factor * simd.load_n(source, j, n), n)
    else:
        for q in range(length):
            multiply_entry(factors, i, values, begin + q, out, base + q, batch, factor_wide, values_wide)


@numba.njit(**INNER_SERIAL)
def _scale_rows_part(part, indptr, scale, data, out, batch, scale_wide, data_wide, nnz, parts):
    low, high = row_at(indptr, share(part, parts, nnz)), row_at(indptr, share(part + 1, parts, nnz))
    _scale_rows(indptr, scale, data, out, batch, scale_wide, data_wide, low, high)


@numba.njit(**SERIAL)
def _scale_rows_parallel(team, parts, *args):
    in_parts(_scale_rows_part, team, parts, args)


@simd.device
def multiply_entry(a, i, b, j, out, k, batch, a_wide, b_wide):
    """``out[k] = a[i] * b[j]``, each of `a` and `b` shared or per sample."""
    width = simd.lanes(out)
    lane = 0
    while lane + width <= batch:
        put(out, k, batch, lane, width, True, _product(a, i, b, j, batch, lane, a_wide, b_wide, True))
        lane += width
    if lane < batch:
        put(out, k, batch, lane, batch - lane, False, _product(a, i, b, j, batch, lane, a_wide, b_wide, False))


@simd.device
def _product(a, i, b, j, batch, lane, a_wide, b_wide, full):
    n = batch - lane
    if a_wide and b_wide:
        return take(a, i, batch, lane, n, True, full) * take(b, j, batch, lane, n, True, full)
    if a_wide:
        return take(a, i, batch, lane, n, True, full) * take(b, j, batch, lane, n, False, full)
    return take(a, i, batch, lane, n, False, full) * take(b, j, batch, lane, n, True, full)


@numba.njit(**INNER_SERIAL)
def _multiply(a, a_index, a_indexed, b, b_index, out, batch, a_wide, b_wide, low, high):
    left, right, result = simd.pointer(a), simd.pointer(b), simd.pointer(out)
    left_at, right_at = simd.pointer(a_index), simd.pointer(b_index)
    width = simd.lanes(result)
    if batch == 1:
        whole = high - (high - low) % width
        for k in range(low, whole, width):
            factor = simd.load_at(left, left_at, k) if a_indexed else simd.load(left, k)
            simd.store(result, k, factor * simd.load_at(right, right_at, k))
        for k in range(whole, high):
            result[k] = left[left_at[k] if a_indexed else k] * right[right_at[k]]
    else:
        for k in range(low, high):
            i = left_at[k] if a_indexed else k
            multiply_entry(left, i, right, right_at[k], result, k, batch, a_wide, b_wide)


@numba.njit(**INNER_SERIAL)
def _multiply_part(part, a, a_index, a_indexed, b, b_index, out, batch, a_wide, b_wide, parts):
    n = len(b_index)
    low, high = share(part, parts, n), share(part + 1, parts, n)
    _multiply(a, a_index, a_indexed, b, b_index, out, batch, a_wide, b_wide, low, high)


@numba.njit(**SERIAL)
def _multiply_parallel(team, parts, *args):
    in_parts(_multiply_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _gather(data, index, out, batch, low, high):
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
        lane = 0
        while lane + width <= batch:
            put(result, k, batch, lane, width, True, take(values, entry, batch, lane, width, True, True))
            lane += width
        if lane < batch:
            n = batch - lane
            put(result, k, batch, lane, n, False, take(values, entry, batch, lane, n, True, False))


@numba.njit(**INNER_SERIAL)
def _gather_part(part, data, index, out, batch, parts):
    n = len(index)
    _gather(data, index, out, batch, share(part, parts, n), share(part + 1, parts, n))


@numba.njit(**SERIAL)
def _gather_parallel(team, parts, *args):
    in_parts(_gather_part, team, parts, args)
