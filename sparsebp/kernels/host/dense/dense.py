"""Stacks of small dense blocks on the host: the materialised Jacobians of recurrent layers, batch last.

The rows of all products of a level are one range, split evenly; chains are split by chunk and lane block.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.dense.blocks import matvec_of_block, shared_rows, tile
from sparsebp.kernels.host.dense.chain import (
    chain_parallel,
    reduce_matrices_parallel,
    reduce_vectors_parallel,
)
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for, share
from sparsebp.kernels.host.engine.team import in_parts, team


class DenseKernels:
    """Host side of the dense part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """``out[out_index[s]] = a[a_index[s]] @ b[b_index[s]]`` for all s."""
        batch = out.shape[-1]
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
        _matmul_parallel(team(parts), parts, *arguments, rows, parts)

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
        batch = out.shape[-1]
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
        _matvec_parallel(team(parts), parts, *arguments, steps, parts)

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Run ``v = a[s] @ v + add[s]; out[s] = v`` along every chunk."""
        batch = out.shape[-1]
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
        chain_parallel(team(parts_for(steps * n * (n + 1) * batch)), tasks, *arguments)

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce every chunk of affine maps to one matrix and one vector."""
        steps, n, own = a.shape[0], a.shape[1], a.shape[3]
        chunks = len(chunk_ptr) - 1
        blocks = _lane_blocks(a.dtype, own)
        arguments = (a.reshape(-1), chunk_ptr, out_matrix.reshape(-1), n, own)
        # every task has its own scratch: two columns of a lane block, or one shared matrix
        size = 2 * n * simd.VECTOR_BYTES // a.dtype.itemsize if own > 1 else n * n
        scratch = np.empty((chunks * blocks, size), a.dtype)
        reduce_matrices_parallel(team(parts_for(steps * n * n * (n + 1) * own)), chunks * blocks, *arguments, scratch)
        if add is None or out_vector is None:
            return
        batch = add.shape[2]
        blocks = _lane_blocks(a.dtype, batch)
        vectors = (a.reshape(-1), chunk_ptr, add.reshape(-1), out_vector.reshape(-1), n, batch, own == batch)
        scratch = np.empty((chunks * blocks, n * simd.VECTOR_BYTES // a.dtype.itemsize), a.dtype)
        reduce_vectors_parallel(team(parts_for(steps * n * (n + 1) * batch)), chunks * blocks, *vectors, scratch)


def _lane_blocks(dtype: np.dtype, batch: int) -> int:
    """Return how many vectors a batch fills."""
    return -(-batch * dtype.itemsize // simd.VECTOR_BYTES)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@simd.device
def _wide_rows(a, b, out, first, last, k, n, batch, b_wide):
    """Rows first ... last of ``out = a @ b`` for a per-sample `a`."""
    width = simd.lanes(a)
    whole = batch - batch % width
    for lane in range(0, whole, width):
        for i in range(first, last, 4):
            for j in range(0, n, 2):
                tile(a, b, n, j, batch, lane, b_wide, out, i, last, j, k, n, batch, lane, True)
    if whole < batch:
        for i in range(first, last, 4):
            for j in range(0, n, 2):
                tile(a, b, n, j, batch, whole, b_wide, out, i, last, j, k, n, batch, whole, False)


@numba.njit(**INNER_SERIAL)
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
            shared_rows(left, right, target, first, last, k, n * batch)
        elif b_wide:
            _wide_rows(left, right, target, first, last, k, n, batch, True)
        else:
            _wide_rows(left, right, target, first, last, k, n, batch, False)
        row += last - first


@numba.njit(**INNER_SERIAL)
def _matmul_part(part, a, a_index, b, b_index, out, out_index, m, k, n, batch, a_wide, b_wide, rows, parts):
    low, high = share(part, parts, rows), share(part + 1, parts, rows)
    _matmul(a, a_index, b, b_index, out, out_index, m, k, n, batch, a_wide, b_wide, low, high)


@numba.njit(**SERIAL)
def _matmul_parallel(team, parts, *args):
    in_parts(_matmul_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
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
            matvec_of_block(block, vector, batch, lane, plus, has_add, target, m, k, batch, lane, wide, zero)


@numba.njit(**INNER_SERIAL)
def _matvec_part(
    part, a, a_index, x, x_index, add, add_index, has_add, out, out_index, m, k, batch, wide, steps, parts
):
    low, high = share(part, parts, steps), share(part + 1, parts, steps)
    _matvec(a, a_index, x, x_index, add, add_index, has_add, out, out_index, m, k, batch, wide, low, high)


@numba.njit(**SERIAL)
def _matvec_parallel(team, parts, *args):
    in_parts(_matvec_part, team, parts, args)
