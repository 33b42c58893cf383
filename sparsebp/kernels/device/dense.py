"""Dense products on a device: by cuBLAS, and of stacks of small blocks or few rows by kernels (``cuda/dense.cu``)."""

from __future__ import annotations

import numpy as np

from sparsebp.core.backend import namespace
from sparsebp.core.check import Array
from sparsebp.core.cublas import matmul
from sparsebp.kernels.device.launch import BLOCK, WARP_A_ROW, Launcher, c_types, ceil_div, step, thread_block

_TILE = 4  # as TILE in dense.cu
_MATMUL_BLOCK = 128
_FEW = 128
"""Rows, inputs and outputs up to which a linear layer has kernels of its own."""

# As in `sparsebp.kernels.host.dense.products`, by cuBLAS.
matmul_batches = matmul


def column_sums(rows: Array) -> Array:
    """Return the sums over the first axis of a matrix."""
    return rows.sum(axis=0)


def row_of_ones(rows: Array) -> Array:
    """Return a matrix (1, number of rows) of ones."""
    return namespace(rows).ones((1, len(rows)), rows.dtype)


class DenseKernels(Launcher):
    """Device side of the dense part of `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def affine(self, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        """A thread an entry; of many rows cuBLAS's product, to which the bias is added."""
        if self._few("affine", len(x) * len(weight), x, weight, bias, out, shape=(*x.shape, len(weight))):
            return
        matmul(x, weight.T, out)
        if bias is not None:
            self.add_bias(out, bias)

    def affine_grad(self, gy: Array, x: Array, weight: Array, bias: Array | None) -> None:
        """The same: a thread an entry, or a product and sums."""
        if self._few("affine_grad", weight.size + len(weight), gy, x, weight, bias, shape=(*x.shape, len(weight))):
            return
        matmul(gy.T, x, weight)
        if bias is not None:
            gy.sum(axis=0, out=bias)

    def add_bias(self, out: Array, bias: Array) -> None:
        """A warp a row."""
        rows, columns = out.shape
        args = (out, bias, np.int64(rows), np.int32(columns))
        self._launch("dense.cu", "add_bias", c_types(REAL=out), ceil_div(rows, WARP_A_ROW[1]), WARP_A_ROW, args)

    def _few(self, name: str, count: int, *arrays: Array | None, shape: tuple[int, ...]) -> bool:
        """Launch a kernel of a linear layer, a thread for each of `count` entries, unless its `shape` is large."""
        if max(shape) > _FEW:
            return False
        args = (*arrays, *map(np.int32, shape))
        self._launch("dense.cu", name, c_types(REAL=arrays[0]), ceil_div(count, BLOCK), (BLOCK,), args)
        return True

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """A level of products; a thread a tile of entries and sample."""
        batch = out.shape[-1]
        (_, m, k, _), n = a.shape, b.shape[2]
        tiles = len(a_index) * ceil_div(m, _TILE) * ceil_div(n, _TILE)
        args = (a, a_index, step(a, batch), b, b_index, step(b, batch), out, out_index)
        sizes = (tiles, m, k, n, batch)
        self._launch_entries("dense.cu", "dense_matmul", c_types(REAL=a), args, *sizes, threads=_MATMUL_BLOCK)

    def dense_matvec(
        self, a: Array, a_index: Array, x: Array, x_index: Array, add: Array | None, add_index: Array | None,
        out: Array, out_index: Array,
    ) -> None:  # fmt: skip
        """A level of matrix-vector products; one thread per entry and sample, or for one sample one warp per entry."""
        batch, (_, m, k, _) = out.shape[-1], a.shape
        defines, rows = c_types(REAL=a), len(a_index) * m
        vectors = (x, x_index, add, add_index, out, out_index)
        if batch == 1:
            grid, sizes = ceil_div(rows, WARP_A_ROW[1]), (np.int64(rows), np.int32(m), np.int32(k))
            self._launch("dense.cu", "dense_matvec_single", defines, grid, WARP_A_ROW, (a, a_index, *vectors, *sizes))
        else:
            args = (a, a_index, step(a, batch), *vectors)
            self._launch_entries("dense.cu", "dense_matvec", defines, args, rows, m, k, batch)

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Independent chains of matrix-vector products; a block a chunk and tile of samples."""
        self._chain(a, chunk_ptr, x, add, out, None, out.shape[-1])

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce each chunk of affine maps to one; a block a chunk, tile of columns and tile of samples."""
        n, own = a.shape[1], a.shape[3]
        block, shared = self._vectors(n, own, a.dtype.itemsize, _TILE)
        tiles = ceil_div(own, block[0])
        grid = (len(chunk_ptr) - 1) * ceil_div(n, _TILE) * tiles
        args = (a, step(a, own), chunk_ptr, out_matrix, np.int32(n), np.int32(own), np.int32(tiles))
        self._launch("dense.cu", "dense_reduce", c_types(REAL=a), grid, block, args, shared)
        if add is not None:
            self._chain(a, chunk_ptr, None, add, None, out_vector, add.shape[2])

    def _chain(
        self, a: Array, chunk_ptr: Array, start: Array | None, add: Array | None, every_step: Array | None,
        last: Array | None, batch: int,
    ) -> None:  # fmt: skip
        n = a.shape[1]
        block, shared = self._vectors(n, batch, a.dtype.itemsize, 1)
        tiles = ceil_div(batch, block[0])
        grid, sizes = (len(chunk_ptr) - 1) * tiles if n else 0, map(np.int32, (n, batch, tiles))
        args = (a, step(a, batch), chunk_ptr, start, add, every_step, last, *sizes)
        self._launch("dense.cu", "dense_chain", c_types(REAL=a), grid, block, args, shared)

    def _vectors(self, n: int, batch: int, itemsize: int, columns: int) -> tuple[tuple[int, int], int]:
        """Return the block and the bytes for two copies of `columns` vectors of a tile of samples.

        Eight float32 samples are one sector of memory; the tile shrinks where the vectors would not fit.
        """
        tile = min(8, thread_block(batch)[0])
        while tile > 1 and 2 * n * columns * tile * itemsize > self.loader.max_shared_memory:
            tile //= 2
        rows = min(BLOCK // tile, max(1, 1 << max(n - 1, 0).bit_length()))
        return (tile, rows), 2 * n * columns * tile * itemsize
