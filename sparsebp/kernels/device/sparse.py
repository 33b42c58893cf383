"""Launchers of sparse kernels: products on a fixed pattern, CSR, values of transposed Jacobians."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.check import SLOPES, Array
from sparsebp.kernels.device.launch import BLOCK, WARP, WARP_A_ROW, Launcher, c_types, ceil_div, step, thread_block
from sparsebp.kernels.operands import Blocks, Columns, Pairs, Places, Rows, RowShapes, Runs, Terms

# Launchers of the CSR kernels (``cuda/csr.cu``).


class CsrKernels(Launcher):
    """Device side of the kernels on one sparse matrix.

    They run one thread per row or entry and sample, or for one sample one warp per row.
    """

    def csr_matvec(
        self, indptr: Array, indices: Array, data: Array, x: Array, out: Array, add: Array | None = None
    ) -> None:
        """Batched SpMV."""
        batch = out.shape[1]
        if batch == 1:
            self._of_one("csr_matvec_single", indptr, data, indptr, indices, data, x, add, out)
        else:
            arrays = (indptr, indices, data, step(data, batch), x, add, out)
            self._batched("csr_matvec", data, indptr, len(indptr) - 1, batch, *arrays)

    def scale_rows(self, indptr: Array, data: Array, scale: Array, out: Array) -> None:
        """Diagonal times CSR on the same pattern."""
        batch = out.shape[1]
        if batch == 1:
            self._of_one("scale_rows_single", indptr, data, indptr, data, scale, out)
        else:
            arrays = (indptr, data, step(data, batch), scale, step(scale, batch), out)
            self._batched("scale_rows", data, indptr, len(indptr) - 1, batch, *arrays)

    def scale_columns(self, indices: Array, data: Array, scale: Array, out: Array) -> None:
        """CSR times diagonal on the same pattern."""
        batch = out.shape[1]
        arrays = (indices, data, step(data, batch), scale, step(scale, batch), out)
        self._batched("scale_columns", data, indices, len(indices), batch, *arrays)

    def scale_runs(self, indices: Array, shapes: RowShapes, data: Array, scale: Array, out: Array) -> None:
        """As `scale_columns`: neighbouring threads read neighbouring columns anyway."""
        self.scale_columns(indices, data, scale, out)

    def gather(self, data: Array, index: Array, out: Array) -> None:
        """``out[k] = data[index[k]]``."""
        self._batched("gather", data, index, len(index), out.shape[1], data, index, out)

    def gather_multiply(self, a_data: Array, a_index: Array, b_data: Array, b_index: Array, out: Array) -> None:
        """``out[k] = a_data[a_index[k]] * b_data[b_index[k]]``."""
        batch = out.shape[1]
        arrays = (a_data, step(a_data, batch), a_index, b_data, step(b_data, batch), b_index, out)
        self._batched("gather_multiply", a_data, a_index, len(a_index), batch, *arrays)

    def _of_one(self, name: str, indptr: Array, data: Array, *arrays: Array | None) -> None:
        """Launch a warp a row, for one sample."""
        rows = len(indptr) - 1
        grid = ceil_div(rows, WARP_A_ROW[1])
        self._launch("csr.cu", name, c_types(REAL=data, INDEX=indptr), grid, WARP_A_ROW, (*arrays, np.int64(rows)))

    def _batched(self, name: str, data: Array, index: Array, count: int, batch: int, *args: Any) -> None:
        """Launch one thread per row or entry (there are `count`) and sample."""
        self._launch_entries("csr.cu", name, c_types(REAL=data, INDEX=index), args, count, batch)


_ROWS_A_BLOCK = 4
"""Rows of C that a block has, where each has a warp: a multiprocessor holds 64 warps, and 32 blocks."""
_ROW_BYTES = 12 * 1024
"""Most shared memory for the sums of a row of C: sixteen such warps fit on a multiprocessor. Longer rows use `out`."""


class SpgemmKernels(Launcher):
    """Device side of the products. The `row_cuts` of the operands are the host's share of the work."""

    def spgemm_positions(self, rows: Rows, places: Places, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch."""
        # Room for rows of twice the mean length: short rows, of one sample most of all, leave room for more warps.
        mean = ceil_div(out.shape[0], max(len(places.product_ptr) - 1, 1))
        capacity = min(_ROW_BYTES // out.dtype.itemsize, 2 * mean * thread_block(out.shape[1])[0])
        self._rows("spgemm_positions", WARP, (*rows, *places[:-1]), a_data, b_data, out, places.positions, capacity)

    def spgemm_pairs(self, pairs: Pairs, a_data: Array, b_data: Array, out: Array) -> None:
        """A block a tile of C and tile of the batch; the order of the entries is for the host."""
        batch = out.shape[1]
        block = thread_block(batch, BLOCK)
        tiles = ceil_div(batch, block[0])
        values = (a_data, step(a_data, batch), b_data, step(b_data, batch), out)
        args = (pairs.words, pairs.starts, pairs.lengths, pairs.tiles, np.int32(pairs.shift), *values)
        defines = c_types(REAL=a_data, WORD=pairs.words)
        grid = (len(pairs.tiles) - 1) * tiles
        self._launch("spgemm_pairs.cu", "spgemm_pairs", defines, grid, block, (*args, np.int32(batch), np.int32(tiles)))

    def spgemm_select_rows(self, rows: Rows, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch."""
        self._rows("spgemm_select_rows", WARP, rows, a_data, b_data, out)

    def spgemm_select_columns(self, terms: Terms, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch."""
        self._rows("spgemm_select_columns", WARP, terms[:-1], a_data, b_data, out, terms.positions)

    def spgemm_runs(self, rows: Rows, runs: Runs, a_data: Array, b_data: Array, out: Array) -> None:
        """A block a row of C and tile of the batch."""
        self._rows("spgemm_runs", BLOCK, (*rows, *runs[:-1]), a_data, b_data, out, runs.starts)

    def spgemm_blocks(self, rows: Rows, blocks: Blocks, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch."""
        sizes = (np.int32(size) for size in (blocks.m, blocks.k, blocks.n))
        arrays = (*rows, blocks.product_ptr, blocks.positions, *sizes)
        self._rows("spgemm_blocks", WARP, arrays, a_data, b_data, out, blocks.positions)

    def spgemm_accumulate(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch; places are searched in C's row."""
        arrays = (*rows, columns.b_indices, columns.c_indices)
        self._rows("spgemm_accumulate", WARP, arrays, a_data, b_data, out)

    def spgemm_filled(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """As `spgemm_accumulate`: checking first whether all values are finite would mean waiting for the device."""
        self.spgemm_accumulate(rows, columns, a_data, b_data, out)

    def _rows(
        self, name: str, threads: int, arrays: tuple[Any, ...], a_data: Array, b_data: Array, out: Array,
        positions: Array | None = None, capacity: int | None = None,
    ) -> None:  # fmt: skip
        """Launch so many threads, a warp or a block, for each row of C and tile of the batch.

        The first of `arrays` has m + 1 entries. Kernels with stored `positions` are in ``spgemm.cu``, the others in
        ``spgemm_rows.cu``. `capacity`: how many sums of a row fit in the shared memory of a kernel that has some.
        """
        file, defines = "spgemm_rows.cu", c_types(REAL=a_data, INDEX=arrays[0])
        if positions is not None:
            file, defines = "spgemm.cu", defines | c_types(POSITION=positions)
        batch, rows = out.shape[1], len(arrays[0]) - 1
        block: tuple[int, ...] = thread_block(batch, threads)
        tiles, shared = ceil_div(batch, block[0]), 0
        values = (a_data, step(a_data, batch), b_data, step(b_data, batch), out)
        args = (*arrays, *values, np.int32(batch), np.int32(tiles))
        blocks = rows
        if threads == WARP:
            block, blocks, args = (*block, _ROWS_A_BLOCK), ceil_div(rows, _ROWS_A_BLOCK), (*args, np.int64(rows))
        if capacity is not None:
            args, shared = (*args, np.int32(capacity)), capacity * _ROWS_A_BLOCK * out.dtype.itemsize
        self._launch(file, name, defines, blocks * tiles, block, args, shared)


# Launchers of the kernels that make values of transposed Jacobians (``cuda/pointwise.cu``, ``cuda/windows.cu``).


class ValueKernels(Launcher):
    """Device side of the values part of `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def pointwise_slopes(self, kept: Array, function: str, out: Array) -> None:
        """Slopes, transposed to batch last; in tiles, or element by element for one sample."""
        size, batch = out.shape
        defines, code = c_types(REAL=out), np.int32(SLOPES.index(function))
        if batch == 1:
            args: tuple[Any, ...] = (kept, code, out, np.int64(size))
            self._launch("pointwise.cu", "pointwise_slopes_single", defines, ceil_div(size, BLOCK), (BLOCK,), args)
        else:
            tiles = ceil_div(size, WARP)
            args = (kept, code, out, np.int64(size), np.int64(batch), np.int64(tiles))
            self._launch("pointwise.cu", "pointwise_slopes", defines, tiles * ceil_div(batch, WARP), WARP_A_ROW, args)

    def max_pool_values(self, winner: Array, window: Array, offset: Array, windows: int, taps: int, out: Array) -> None:
        """One where an entry's place in its window is the winner's, else zero."""
        args = (winner, np.int64(winner.shape[1]), window, offset, np.int64(windows), np.int64(taps), out)
        defines = c_types(REAL=out, INDEX=window, WINNER=winner)
        self._launch_entries("windows.cu", "max_pool_values", defines, args, *out.shape)
