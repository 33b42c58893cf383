"""Launchers of the kernels on stacks of small dense blocks (``cuda/dense.cu``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.backend import matmul, namespace
from sparsebp.core.check import Array
from sparsebp.kernels.device.launch import BLOCK, WARP, Launcher, c_types, ceil_div, step, thread_block

_TILE = 4  # as TILE in dense.cu
_MATMUL_BLOCK = 128

# As in `sparsebp.kernels.host.dense`, by cuBLAS.
matmul_batches = matmul


def column_sums(rows: Array) -> Array:
    """Return the sums over the first axis of a matrix."""
    return rows.sum(axis=0)


def row_of_ones(rows: Array) -> Array:
    """Return a matrix (1, number of rows) of ones."""
    return namespace(rows).ones((1, len(rows)), rows.dtype)


class DenseKernels(Launcher):
    """Device side of the dense part of `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """A level of products; a thread a tile of entries and sample."""
        batch = out.shape[-1]
        (_, m, k, _), n = a.shape, b.shape[2]
        block = thread_block(batch, _MATMUL_BLOCK)
        tiles = len(a_index) * ceil_div(m, _TILE) * ceil_div(n, _TILE)
        self._launch(
            "dense.cu",
            "dense_matmul",
            c_types(REAL=a),
            ceil_div(tiles, block[1]) if batch else 0,
            block,
            (
                a,
                a_index,
                step(a, batch),
                b,
                b_index,
                step(b, batch),
                out,
                out_index,
                np.int64(tiles),
                np.int32(m),
                np.int32(k),
                np.int32(n),
                np.int32(batch),
            ),
        )

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
        """A level of matrix-vector products; one thread per entry and sample, or for one sample one warp per entry."""
        batch = out.shape[-1]
        _, m, k, _ = a.shape
        rows = len(a_index) * m
        sizes = (np.int64(rows), np.int32(m), np.int32(k))
        vectors = (x, x_index, add, add_index, out, out_index)
        args: tuple[Any, ...]
        name, block, args = (
            "dense_matvec",
            thread_block(batch),
            (a, a_index, step(a, batch), *vectors, *sizes, np.int32(batch)),
        )
        if batch == 1:
            name, block, args = "dense_matvec_single", (WARP, BLOCK // WARP), (a, a_index, *vectors, *sizes)
        self._launch("dense.cu", name, c_types(REAL=a), ceil_div(rows, block[1]) if batch else 0, block, args)

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Independent chains of matrix-vector products; a block a chunk and tile of samples."""
        batch = out.shape[-1]
        self._chain(a, chunk_ptr, x, add, out, None, batch)

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce each chunk of affine maps to one; a block a chunk, tile of columns and tile of samples."""
        n, own = a.shape[1], a.shape[3]
        chunks = len(chunk_ptr) - 1
        block, shared = self._vectors(n, own, a.dtype.itemsize, _TILE)
        tiles = ceil_div(own, block[0])
        self._launch(
            "dense.cu",
            "dense_reduce",
            c_types(REAL=a),
            chunks * ceil_div(n, _TILE) * tiles,
            block,
            (a, step(a, own), chunk_ptr, out_matrix, np.int32(n), np.int32(own), np.int32(tiles)),
            shared,
        )
        if add is not None:
            self._chain(a, chunk_ptr, None, add, None, out_vector, add.shape[2])

    def _chain(
        self,
        a: Array,
        chunk_ptr: Array,
        start: Array | None,
        add: Array | None,
        every_step: Array | None,
        last: Array | None,
        batch: int,
    ) -> None:
        n = a.shape[1]
        block, shared = self._vectors(n, batch, a.dtype.itemsize, 1)
        tiles = ceil_div(batch, block[0])
        self._launch(
            "dense.cu",
            "dense_chain",
            c_types(REAL=a),
            (len(chunk_ptr) - 1) * tiles if n else 0,
            block,
            (a, step(a, batch), chunk_ptr, start, add, every_step, last, np.int32(n), np.int32(batch), np.int32(tiles)),
            shared,
        )

    def _vectors(self, n: int, batch: int, itemsize: int, columns: int) -> tuple[tuple[int, int], int]:
        """Return the block and the bytes for two copies of `columns` vectors of a tile of samples.

        Eight float32 samples are one sector of memory; the tile shrinks where the vectors would not fit.
        """
        tile = min(8, thread_block(batch)[0])
        while tile > 1 and 2 * n * columns * tile * itemsize > self.loader.max_shared_memory:
            tile //= 2
        rows = min(BLOCK // tile, max(1, 1 << max(n - 1, 0).bit_length()))
        return (tile, rows), 2 * n * columns * tile * itemsize
