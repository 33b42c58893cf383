"""Stacks of small dense blocks on the host: the materialised Jacobians of recurrent layers, batch last.

With a batch, one vector holds as many samples as fit, and a tile of 4 rows x 2 columns of the result stays in
registers. Shared blocks have their columns side by side instead, so there a vector holds columns. In a tile that
reaches over the edge the last row or column is computed several times, alike, which spares every special case.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels import checks
from sparsebp.kernels.host import simd
from sparsebp.kernels.host.lanes import put, take
from sparsebp.kernels.host.parts import GRAIN, PARALLEL, SERIAL, parts_for, share
from sparsebp.types import Array


class DenseKernels:
    """Host side of the dense part of `sparsebp.kernels.protocol.Kernels`; shapes and dtypes are stated there."""

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """``out[out_index[s]] = a[a_index[s]] @ b[b_index[s]]`` for all s."""
        batch = checks.check_dense_matmul(a, a_index, b, b_index, out, out_index)
        m, k, n = a.shape[1], a.shape[2], b.shape[2]
        arguments = (
            a.reshape(-1),
            a_index,
            b.reshape(-1),
            b_index,
            out.reshape(-1),
            out_index,
            m,
            k,
            n,
            batch,
            a.shape[3] == batch and batch > 1,
            b.shape[3] == batch,
        )
        rows = len(a_index) * m
        parts = parts_for(rows * n * (k + 1) * batch)
        if parts == 1:
            _matmul(*arguments, 0, rows)
        else:
            _matmul_parallel(*arguments, rows, parts)

    def dense_matvec(
        self,
        a: Array,
        a_index: Array,
        x: Array,
        x_index: Array,
        add: Array | None,
        add_index: Array | None,
        out: Array,
        out_index: Array,
    ) -> None:
        """``out[out_index[s]] = a[a_index[s]] @ x[x_index[s]] + add[add_index[s]]`` for all s."""
        batch = checks.check_dense_matvec(a, a_index, x, x_index, add, add_index, out, out_index)
        m, k = a.shape[1], a.shape[2]
        arguments = (
            a.reshape(-1),
            a_index,
            x.reshape(-1),
            x_index,
            (out if add is None else add).reshape(-1),
            out_index if add_index is None else add_index,
            add is not None,
            out.reshape(-1),
            out_index,
            m,
            k,
            batch,
            a.shape[3] == batch,
        )
        steps = len(a_index)
        parts = min(parts_for(steps * m * (k + 1) * batch), max(steps, 1))
        if parts == 1:
            _matvec(*arguments, 0, steps)
        else:
            _matvec_parallel(*arguments, steps, parts)

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Run ``v = a[s] @ v + add[s]; out[s] = v`` along every chunk."""
        batch = checks.check_dense_chain(a, chunk_ptr, x, add, out)
        steps, n = a.shape[0], a.shape[1]
        arguments = (
            a.reshape(-1),
            chunk_ptr,
            x.reshape(-1),
            (out if add is None else add).reshape(-1),
            add is not None,
            out.reshape(-1),
            n,
            batch,
            a.shape[3] == batch,
        )
        tasks = (len(chunk_ptr) - 1) * _lane_blocks(a.dtype, batch)
        if tasks <= 1 or steps * n * (n + 1) * batch < GRAIN:
            _chain(*arguments, 0, tasks)
        else:
            _chain_parallel(*arguments, tasks)

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce every chunk of affine maps to one matrix and one vector."""
        batch = checks.check_dense_reduce(a, chunk_ptr, add, out_matrix, out_vector)
        steps, n, own = a.shape[0], a.shape[1], a.shape[3]
        chunks = len(chunk_ptr) - 1
        blocks = _lane_blocks(a.dtype, own)
        arguments = (a.reshape(-1), chunk_ptr, out_matrix.reshape(-1), n, own)
        # every task has its own scratch: two columns of a lane block, or one shared matrix
        size = 2 * n * simd.VECTOR_BYTES // a.dtype.itemsize if own > 1 else n * n
        scratch = np.empty((chunks * blocks, size), a.dtype)
        if chunks * blocks <= 1 or steps * n * n * (n + 1) * own < GRAIN:
            _reduce(*arguments, scratch, 0, chunks * blocks)
        else:
            _reduce_parallel(*arguments, scratch, chunks * blocks)
        if add is None or out_vector is None:
            return
        blocks = _lane_blocks(a.dtype, batch)
        vectors = (a.reshape(-1), chunk_ptr, add.reshape(-1), out_vector.reshape(-1), n, batch, own == batch)
        scratch = np.empty((chunks * blocks, n * simd.VECTOR_BYTES // a.dtype.itemsize), a.dtype)
        if chunks * blocks <= 1 or steps * n * (n + 1) * batch < GRAIN:
            _reduce_vector(*vectors, scratch, 0, chunks * blocks)
        else:
            _reduce_vector_parallel(*vectors, scratch, chunks * blocks)


def _lane_blocks(dtype: np.dtype, batch: int) -> int:
    """Return how many vectors a batch fills."""
    return -(-batch * dtype.itemsize // simd.VECTOR_BYTES)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@simd.device
def _tile(a, b, b_columns, b_first, b_batch, b_lane, b_wide, out, i, rows, j, k, n, batch, lane):
    """4 rows (i ...) x 2 columns (j ...) of ``out = a @ b`` for one lane block of per-sample `a`.

    The columns of `b` that belong to j ... begin at `b_first` of its `b_columns`; it may be scratch with a batch of its
    own.
    """
    left = batch - lane
    second = min(1, n - 1 - j)
    i1, i2, i3, j1 = min(i + 1, rows - 1), min(i + 2, rows - 1), min(i + 3, rows - 1), j + second
    c00 = c01 = c10 = c11 = c20 = c21 = c30 = c31 = simd.zeros(a)
    for l in range(k):
        at = l * b_columns + b_first
        b0, b1 = (
            take(b, at, b_batch, b_lane, left, b_wide, False),
            take(b, at + second, b_batch, b_lane, left, b_wide, False),
        )
        a0, a1 = take(a, i * k + l, batch, lane, left, True, False), take(a, i1 * k + l, batch, lane, left, True, False)
        a2, a3 = (
            take(a, i2 * k + l, batch, lane, left, True, False),
            take(a, i3 * k + l, batch, lane, left, True, False),
        )
        c00, c01 = simd.fma(a0, b0, c00), simd.fma(a0, b1, c01)
        c10, c11 = simd.fma(a1, b0, c10), simd.fma(a1, b1, c11)
        c20, c21 = simd.fma(a2, b0, c20), simd.fma(a2, b1, c21)
        c30, c31 = simd.fma(a3, b0, c30), simd.fma(a3, b1, c31)
    _put_pair(out, i * n + j, i * n + j1, batch, lane, left, c00, c01)
    _put_pair(out, i1 * n + j, i1 * n + j1, batch, lane, left, c10, c11)
    _put_pair(out, i2 * n + j, i2 * n + j1, batch, lane, left, c20, c21)
    _put_pair(out, i3 * n + j, i3 * n + j1, batch, lane, left, c30, c31)


@simd.device
def _put_pair(out, entry, other, batch, lane, left, value, other_value):
    put(out, entry, batch, lane, left, False, value)
    put(out, other, batch, lane, left, False, other_value)


@simd.device
def _shared_rows(a, b, out, first, last, k, width):
    """Rows first ... last of ``out = a @ b`` for a shared `a`; rows of `b` and `out` are `width` numbers side by side."""
    step = simd.lanes(a)
    for i in range(first, last, 4):
        i1, i2, i3 = min(i + 1, last - 1), min(i + 2, last - 1), min(i + 3, last - 1)
        for w in range(0, width, step):
            left = width - w
            zero = simd.zeros(a)
            c0, c1, c2, c3 = zero, zero, zero, zero
            for l in range(k):
                right = simd.load_n(b, l * width + w, left)
                c0 = simd.fma(simd.broadcast(a, i * k + l), right, c0)
                c1 = simd.fma(simd.broadcast(a, i1 * k + l), right, c1)
                c2 = simd.fma(simd.broadcast(a, i2 * k + l), right, c2)
                c3 = simd.fma(simd.broadcast(a, i3 * k + l), right, c3)
            simd.store_n(out, i * width + w, c0, left)
            simd.store_n(out, i1 * width + w, c1, left)
            simd.store_n(out, i2 * width + w, c2, left)
            simd.store_n(out, i3 * width + w, c3, left)


@simd.device
def _wide_rows(a, b, out, first, last, k, n, batch, b_wide):
    for lane in range(0, batch, simd.lanes(a)):
        for i in range(first, last, 4):
            for j in range(0, n, 2):
                _tile(a, b, n, j, batch, lane, b_wide, out, i, last, j, k, n, batch, lane)


@numba.njit(**SERIAL)
def _matmul(a, a_index, b, b_index, out, out_index, m, k, n, batch, a_wide, b_wide, low, high):
    """Rows low ... high of the level, counted over all of its products."""
    a_all, b_all, out_all = simd.pointer(a), simd.pointer(b), simd.pointer(out)
    a_at, b_at, out_at = simd.pointer(a_index), simd.pointer(b_index), simd.pointer(out_index)
    a_size = m * k * (batch if a_wide else 1)
    b_size = k * n * (batch if b_wide else 1)
    row = low
    while row < high:
        s = row // m
        first = row - s * m
        last = min(m, first + high - row)
        left, right = simd.advance(a_all, a_at[s] * a_size), simd.advance(b_all, b_at[s] * b_size)
        target = simd.advance(out_all, out_at[s] * (m * n * batch))
        if not a_wide:
            _shared_rows(left, right, target, first, last, k, n * batch)
        elif b_wide:
            _wide_rows(left, right, target, first, last, k, n, batch, True)
        else:
            _wide_rows(left, right, target, first, last, k, n, batch, False)
        row += last - first


@numba.njit(**PARALLEL)
def _matmul_parallel(a, a_index, b, b_index, out, out_index, m, k, n, batch, a_wide, b_wide, rows, parts):
    for part in numba.prange(parts):
        low, high = share(part, parts, rows), share(part + 1, parts, rows)
        _matmul(a, a_index, b, b_index, out, out_index, m, k, n, batch, a_wide, b_wide, low, high)


@simd.device
def _lanes_matvec(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, wide):
    """``out = a @ x + add`` for one lane block; `x` may be scratch that holds `x_batch` samples an entry."""
    left = batch - lane
    for i in range(0, m, 4):
        i1, i2, i3 = min(i + 1, m - 1), min(i + 2, m - 1), min(i + 3, m - 1)
        c0 = c1 = c2 = c3 = simd.zeros(a)
        if has_add:
            c0, c1 = take(add, i, batch, lane, left, True, False), take(add, i1, batch, lane, left, True, False)
            c2, c3 = take(add, i2, batch, lane, left, True, False), take(add, i3, batch, lane, left, True, False)
        for j in range(k):
            value = take(x, j, x_batch, x_lane, left, True, False)
            c0 = simd.fma(take(a, i * k + j, batch, lane, left, wide, False), value, c0)
            c1 = simd.fma(take(a, i1 * k + j, batch, lane, left, wide, False), value, c1)
            c2 = simd.fma(take(a, i2 * k + j, batch, lane, left, wide, False), value, c2)
            c3 = simd.fma(take(a, i3 * k + j, batch, lane, left, wide, False), value, c3)
        put(out, i, batch, lane, left, False, c0)
        put(out, i1, batch, lane, left, False, c1)
        put(out, i2, batch, lane, left, False, c2)
        put(out, i3, batch, lane, left, False, c3)


@simd.device
def _single_matvec(a, x, add, has_add, out, m, k, zero):
    """``out = a @ x + add`` for a batch of one: four rows at a time, so that four sums run side by side."""
    for i in range(0, m, 4):
        i1, i2, i3 = min(i + 1, m - 1), min(i + 2, m - 1), min(i + 3, m - 1)
        c0 = c1 = c2 = c3 = zero
        if has_add:
            c0, c1, c2, c3 = add[i], add[i1], add[i2], add[i3]
        for j in range(k):
            value = x[j]
            c0 += a[i * k + j] * value
            c1 += a[i1 * k + j] * value
            c2 += a[i2 * k + j] * value
            c3 += a[i3 * k + j] * value
        out[i], out[i1], out[i2], out[i3] = c0, c1, c2, c3


@simd.device
def _matvec_of_block(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, wide, zero):
    """``out = a @ x + add`` for the lane block that begins at `lane`; a batch of one is a block of its own kind."""
    if batch == 1:
        _single_matvec(a, x, add, has_add, out, m, k, zero)
    elif wide:
        _lanes_matvec(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, True)
    else:
        _lanes_matvec(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, False)


@numba.njit(**SERIAL)
def _matvec(a, a_index, x, x_index, add, add_index, has_add, out, out_index, m, k, batch, wide, low, high):
    a_all, x_all, add_all, out_all = simd.pointer(a), simd.pointer(x), simd.pointer(add), simd.pointer(out)
    a_size = m * k * (batch if wide else 1)
    zero = a.dtype.type(0)
    for s in range(np.uint64(low), np.uint64(high)):
        block, vector = simd.advance(a_all, a_index[s] * a_size), simd.advance(x_all, x_index[s] * (k * batch))
        plus, target = (
            simd.advance(add_all, add_index[s] * (m * batch)),
            simd.advance(out_all, out_index[s] * (m * batch)),
        )
        for lane in range(0, batch, simd.lanes(a_all)):
            _matvec_of_block(block, vector, batch, lane, plus, has_add, target, m, k, batch, lane, wide, zero)


@numba.njit(**PARALLEL)
def _matvec_parallel(a, a_index, x, x_index, add, add_index, has_add, out, out_index, m, k, batch, wide, steps, parts):
    for part in numba.prange(parts):
        low, high = share(part, parts, steps), share(part + 1, parts, steps)
        _matvec(a, a_index, x, x_index, add, add_index, has_add, out, out_index, m, k, batch, wide, low, high)


@numba.njit(**SERIAL)
def _chain(a, chunk_ptr, x, add, has_add, out, n, batch, wide, low, high):
    """Tasks low ... high; a task is one lane block of one chunk."""
    a_all, x_all, add_all, out_all = simd.pointer(a), simd.pointer(x), simd.pointer(add), simd.pointer(out)
    ptr = simd.pointer(chunk_ptr)
    a_size = n * n * (batch if wide else 1)
    width = simd.lanes(a_all)
    blocks = (batch + width - 1) // width
    zero = a.dtype.type(0)
    for task in range(low, high):
        chunk = task // blocks
        lane = (task - chunk * blocks) * width
        vector = simd.advance(x_all, chunk * n * batch)
        for s in range(ptr[chunk], ptr[chunk + 1]):
            block = simd.advance(a_all, s * a_size)
            plus, target = simd.advance(add_all, s * n * batch), simd.advance(out_all, s * n * batch)
            _matvec_of_block(block, vector, batch, lane, plus, has_add, target, n, n, batch, lane, wide, zero)
            vector = target


@numba.njit(**PARALLEL)
def _chain_parallel(a, chunk_ptr, x, add, has_add, out, n, batch, wide, tasks):
    for task in numba.prange(tasks):
        _chain(a, chunk_ptr, x, add, has_add, out, n, batch, wide, task, task + 1)


@numba.njit(**SERIAL)
def _reduce(a, chunk_ptr, out, n, batch, scratch, low, high):
    """Products of the chunks' matrices; a task is one lane block of one chunk, with one row of `scratch`."""
    a_all, out_all, ptr = simd.pointer(a), simd.pointer(out), simd.pointer(chunk_ptr)
    width = simd.lanes(a_all)
    blocks = (batch + width - 1) // width
    size = n * n * batch
    for task in range(low, high):
        chunk = task // blocks
        lane = (task - chunk * blocks) * width
        left = batch - lane
        product, spare = (
            simd.advance(out_all, chunk * size),
            simd.advance(simd.pointer(scratch), task * scratch.shape[1]),
        )
        first, last = ptr[chunk], ptr[chunk + 1]
        for i in range(n * n):
            if first < last:
                value = take(a_all, first * n * n + i, batch, lane, left, True, False)
            else:  # an empty chunk is the identity
                value = simd.zeros(a_all) + a.dtype.type(1 if i % (n + 1) == 0 else 0)
            put(product, i, batch, lane, left, False, value)
        for s in range(first + 1, last):
            block = simd.advance(a_all, s * size)
            if batch == 1:
                for i in range(n * n):
                    spare[i] = product[i]
                _shared_rows(block, spare, product, 0, n, n, n)
            else:
                _multiply_in_place(block, product, spare, n, batch, lane)


@simd.device
def _multiply_in_place(a, product, spare, n, batch, lane):
    """``product = a @ product`` for one lane block, two columns at a time: a new column needs only its old self."""
    width = simd.lanes(a)
    left = batch - lane
    for j in range(0, n, 2):
        j1 = min(j + 1, n - 1)
        for l in range(n):
            simd.store(spare, 2 * l * width, take(product, l * n + j, batch, lane, left, True, False))
            simd.store(spare, (2 * l + 1) * width, take(product, l * n + j1, batch, lane, left, True, False))
        for i in range(0, n, 4):
            _tile(a, spare, 2, 0, width, 0, True, product, i, n, j, n, n, batch, lane)


@numba.njit(**PARALLEL)
def _reduce_parallel(a, chunk_ptr, out, n, batch, scratch, tasks):
    for task in numba.prange(tasks):
        _reduce(a, chunk_ptr, out, n, batch, scratch, task, task + 1)


@numba.njit(**SERIAL)
def _reduce_vector(a, chunk_ptr, add, out, n, batch, wide, scratch, low, high):
    """Vectors of the chunks' affine maps; a task is one lane block of one chunk, with one row of `scratch`."""
    a_all, add_all, out_all, ptr = simd.pointer(a), simd.pointer(add), simd.pointer(out), simd.pointer(chunk_ptr)
    width = simd.lanes(a_all)
    blocks = (batch + width - 1) // width
    a_size = n * n * (batch if wide else 1)
    zero = a.dtype.type(0)
    spare_batch = 1 if batch == 1 else width
    for task in range(low, high):
        chunk = task // blocks
        lane = (task - chunk * blocks) * width
        left = batch - lane
        vector, spare = (
            simd.advance(out_all, chunk * n * batch),
            simd.advance(simd.pointer(scratch), task * scratch.shape[1]),
        )
        first, last = ptr[chunk], ptr[chunk + 1]
        for i in range(n):
            value = simd.zeros(a_all)
            if first < last:
                value = take(add_all, first * n + i, batch, lane, left, True, False)
            put(vector, i, batch, lane, left, False, value)
        for s in range(first + 1, last):
            for i in range(n):
                put(spare, i, spare_batch, 0, left, False, take(vector, i, batch, lane, left, True, False))
            block, plus = simd.advance(a_all, s * a_size), simd.advance(add_all, s * n * batch)
            _matvec_of_block(block, spare, spare_batch, 0, plus, True, vector, n, n, batch, lane, wide, zero)


@numba.njit(**PARALLEL)
def _reduce_vector_parallel(a, chunk_ptr, add, out, n, batch, wide, scratch, tasks):
    for task in numba.prange(tasks):
        _reduce_vector(a, chunk_ptr, add, out, n, batch, wide, scratch, task, task + 1)
