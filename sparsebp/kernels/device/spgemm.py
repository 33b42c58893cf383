"""Launchers of the numeric phase of fixed-pattern products (``cuda/spgemm*.cu``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import (
    BLOCK,
    WARP,
    Defines,
    Launcher,
    ceil_div,
    position_define,
    real_define,
    step,
    thread_block,
    types,
    word_define,
)
from sparsebp.kernels.operands import Blocks, Columns, Pairs, Places, Rows, Runs, Terms

_ROW_BYTES = 12 * 1024
"""Shared memory for the sums of one row of C: sixteen such warps fit on a multiprocessor; longer rows use `out`."""


class SpgemmKernels(Launcher):
    """Device side of the products. The `row_cuts` of the operands are the host's share of the work."""

    def spgemm_positions(self, rows: Rows, places: Places, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch."""
        defines = types(a_data, rows.a_indptr) | position_define(places.positions)
        capacity = (np.int32(_ROW_BYTES // out.dtype.itemsize),)
        self._rows("spgemm.cu", "spgemm_positions", defines, WARP, (*rows, *places[:-1]), a_data, b_data, out, capacity)

    def spgemm_pairs(self, pairs: Pairs, a_data: Array, b_data: Array, out: Array) -> None:
        """A block a tile of C and tile of the batch; the order of the entries is for the host."""
        batch = out.shape[1]
        block = thread_block(batch, BLOCK)
        tiles = ceil_div(batch, block[0])
        values = (a_data, step(a_data, batch), b_data, step(b_data, batch), out)
        args = (pairs.words, pairs.starts, pairs.lengths, pairs.tiles, np.int32(pairs.shift), *values)
        defines = real_define(a_data) | word_define(pairs.words)
        grid = (len(pairs.tiles) - 1) * tiles
        self._launch("spgemm_pairs.cu", "spgemm_pairs", defines, grid, block, (*args, np.int32(batch), np.int32(tiles)))

    def spgemm_select_rows(self, rows: Rows, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch."""
        defines = types(a_data, rows.a_indptr)
        self._rows("spgemm_rows.cu", "spgemm_select_rows", defines, WARP, rows, a_data, b_data, out)

    def spgemm_select_columns(self, terms: Terms, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch."""
        defines = types(a_data, terms.product_ptr) | position_define(terms.positions)
        self._rows("spgemm.cu", "spgemm_select_columns", defines, WARP, terms[:-1], a_data, b_data, out)

    def spgemm_runs(self, rows: Rows, runs: Runs, a_data: Array, b_data: Array, out: Array) -> None:
        """A block a row of C and tile of the batch."""
        defines = types(a_data, rows.a_indptr) | position_define(runs.starts)
        self._rows("spgemm.cu", "spgemm_runs", defines, BLOCK, (*rows, *runs[:-1]), a_data, b_data, out)

    def spgemm_blocks(self, rows: Rows, blocks: Blocks, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch."""
        defines = types(a_data, rows.a_indptr) | position_define(blocks.positions)
        sizes = (np.int32(size) for size in (blocks.m, blocks.k, blocks.n))
        arrays = (*rows, blocks.product_ptr, blocks.positions, *sizes)
        self._rows("spgemm_blocks.cu", "spgemm_blocks", defines, WARP, arrays, a_data, b_data, out)

    def spgemm_accumulate(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """A warp a row of C and tile of the batch; places are searched in C's row."""
        arrays = (*rows, columns.b_indices, columns.c_indices)
        defines = types(a_data, rows.a_indptr)
        self._rows("spgemm_rows.cu", "spgemm_accumulate", defines, WARP, arrays, a_data, b_data, out)

    def spgemm_filled(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """The same: who looks at the values first, whether all are finite, would have to wait for the device."""
        self.spgemm_accumulate(rows, columns, a_data, b_data, out)

    def _rows(
        self,
        file: str,
        name: str,
        defines: Defines,
        threads: int,
        arrays: tuple[Any, ...],
        a_data: Array,
        b_data: Array,
        out: Array,
        capacity: tuple[np.int32, ...] = (),
    ) -> None:
        """Launch a block of `threads` a row of C and tile of the batch; the first of `arrays` has m + 1 entries.

        `capacity`: how many sums fit in the shared memory of a kernel that has some.
        """
        batch = out.shape[1]
        block = thread_block(batch, threads)
        tiles = ceil_div(batch, block[0])
        values = (a_data, step(a_data, batch), b_data, step(b_data, batch), out)
        args = (*arrays, *values, np.int32(batch), np.int32(tiles), *capacity)
        grid = (len(arrays[0]) - 1) * tiles
        self._launch(file, name, defines, grid, block, args, _ROW_BYTES if capacity else 0)
