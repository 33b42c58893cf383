"""Stacks of small dense blocks on the host: the materialised Jacobians of recurrent layers, batch last.

The rows of all products of a level are one range, split evenly; chains are split by chunk and lane block.
"""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.dense.blocks import matvec_of_block, shared_rows, tile
from sparsebp.kernels.host.dense.chain import reduce_matrices, reduce_vectors, run_chains
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import SERIAL, parts_for, span
from sparsebp.kernels.host.engine.team import parallel, team


class DenseKernels:
    """Host side of the dense part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """``out[out_index[s]] = a[a_index[s]] @ b[b_index[s]]`` for all s."""
        rows = len(a_index) * a.shape[1]
        parts = parts_for(rows * b.shape[2] * (a.shape[2] + 1) * out.shape[3])
        _matmul(team(parts), parts, a, a_index, b, b_index, out, out_index)

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
        steps, (_, m, k, _) = len(a_index), a.shape
        parts = min(parts_for(steps * m * (k + 1) * out.shape[2]), max(steps, 1))
        plus, plus_index = (out, out_index) if add is None else (add, add_index)
        _matvec(team(parts), parts, a, a_index, x, x_index, plus, plus_index, add is not None, out, out_index)

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Run ``v = a[s] @ v + add[s]; out[s] = v`` along every chunk."""
        (steps, n, _, _), batch = a.shape, out.shape[2]
        tasks = (len(chunk_ptr) - 1) * _lane_blocks(a.dtype, batch)
        plus = out if add is None else add
        run_chains(team(parts_for(steps * n * (n + 1) * batch)), tasks, a, chunk_ptr, x, plus, add is not None, out)

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce every chunk of affine maps to one matrix and one vector."""
        (steps, n, _, own), chunks = a.shape, len(chunk_ptr) - 1
        tasks = chunks * _lane_blocks(a.dtype, own)
        # every task has its own scratch: two columns of a lane block, or one shared matrix
        size = 2 * n * simd.VECTOR_BYTES // a.dtype.itemsize if own > 1 else n * n
        scratch = np.empty((tasks, size), a.dtype)
        reduce_matrices(team(parts_for(steps * n * n * (n + 1) * own)), tasks, a, chunk_ptr, out_matrix, scratch)
        if add is None or out_vector is None:
            return
        batch = add.shape[2]
        tasks = chunks * _lane_blocks(a.dtype, batch)
        scratch = np.empty((tasks, n * simd.VECTOR_BYTES // a.dtype.itemsize), a.dtype)
        reduce_vectors(team(parts_for(steps * n * (n + 1) * batch)), tasks, a, chunk_ptr, add, out_vector, scratch)


def _lane_blocks(dtype: np.dtype, batch: int) -> int:
    """Return how many vectors a batch fills."""
    return -(-batch * dtype.itemsize // simd.VECTOR_BYTES)


# The functions below are compiled: their arguments are arrays and flags.
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


@parallel(**SERIAL)
def _matmul(part, parts, a, a_index, b, b_index, out, out_index):
    """Some rows of the level, counted over all of its products."""
    _, m, n, batch = out.shape
    k, a_wide, b_wide = a.shape[2], a.shape[3] == batch and batch > 1, b.shape[3] == batch
    row, high = span(part, parts, len(a_index) * m)
    a_all, b_all, out_all = simd.pointer(a), simd.pointer(b), simd.pointer(out)
    a_at, b_at, out_at = simd.pointer(a_index), simd.pointer(b_index), simd.pointer(out_index)
    a_size = m * k * (batch if a_wide else 1)
    b_size = k * n * (batch if b_wide else 1)
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


@parallel(**SERIAL)
def _matvec(part, parts, a, a_index, x, x_index, add, add_index, has_add, out, out_index):
    _, m, batch = out.shape
    k, wide, zero = a.shape[2], a.shape[3] == batch, a.dtype.type(0)
    low, high = span(part, parts, len(a_index))
    a_at, x_at = simd.pointer(a_index), simd.pointer(x_index)
    add_at, out_at = simd.pointer(add_index), simd.pointer(out_index)
    for s in range(low, high):
        block = simd.advance(simd.pointer(a), a_at[s] * (m * k * a.shape[3]))
        vector = simd.advance(simd.pointer(x), x_at[s] * (k * batch))
        plus = simd.advance(simd.pointer(add), add_at[s] * (m * batch))
        target = simd.advance(simd.pointer(out), out_at[s] * (m * batch))
        for lane in range(0, batch, simd.lanes(block)):
            matvec_of_block(block, vector, batch, lane, plus, has_add, target, m, k, batch, lane, wide, zero)
