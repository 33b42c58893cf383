"""Launchers of the numeric phase of fixed-pattern products (``cuda/spgemm.cu``, ``cuda/spgemm_rows.cu``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import BLOCK, WARP, Defines, Launcher, ceil_div, lanes, position_define, step, types

_ROW_BYTES = 12 * 1024
"""Shared memory for the sums of one row of C: sixteen such warps fit on a multiprocessor; longer rows use `out`."""


class SpgemmKernels(Launcher):
    """Device side of the products of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def spgemm_numeric(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_data: Array,
        c_indptr: Array,
        product_ptr: Array,
        positions: Array,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """Values of C = A @ B; a warp a row of C and tile of the batch. `row_cuts` is the host's share of the work."""
        batch = out.shape[-1]
        rows, block = len(a_indptr) - 1, lanes(batch, WARP)
        tiles = ceil_div(batch, block[0])
        self._launch(
            "spgemm.cu",
            "spgemm_numeric",
            types(a_data, a_indptr) | position_define(positions),
            rows * tiles,
            block,
            (
                a_indptr,
                a_indices,
                a_data,
                step(a_data, batch),
                b_indptr,
                b_data,
                step(b_data, batch),
                c_indptr,
                product_ptr,
                positions,
                out,
                np.int32(batch),
                np.int32(tiles),
                np.int32(_ROW_BYTES // out.dtype.itemsize),
            ),
            _ROW_BYTES,
        )

    def spgemm_select_rows(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_data: Array,
        c_indptr: Array,
        out: Array,
    ) -> None:
        """Rows of B, picked and scaled; a warp a row of C and tile of the batch."""
        batch = out.shape[-1]
        args = (a_indptr, a_indices, a_data, step(a_data, batch), b_indptr, b_data, step(b_data, batch), c_indptr, out)
        self._rows(
            "spgemm_rows.cu", "spgemm_select_rows", types(a_data, a_indptr), WARP, len(a_indptr) - 1, batch, args
        )

    def spgemm_select_columns(
        self,
        product_ptr: Array,
        a_index: Array | None,
        a_data: Array,
        b_index: Array,
        b_data: Array,
        c_indptr: Array,
        positions: Array,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """One product at most an entry of A; a warp a row of C and tile. `row_cuts` is the host's share of the work."""
        batch = out.shape[-1]
        args = (
            product_ptr,
            a_index,
            a_data,
            step(a_data, batch),
            b_index,
            b_data,
            step(b_data, batch),
            c_indptr,
            positions,
            out,
        )
        defines = types(a_data, product_ptr) | position_define(positions)
        self._rows("spgemm.cu", "spgemm_select_columns", defines, WARP, len(product_ptr) - 1, batch, args)

    def spgemm_runs(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_data: Array,
        b_shape: Array,
        run_ptr: Array,
        run_lengths: Array,
        c_indptr: Array,
        start_ptr: Array,
        starts: Array,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """Runs of neighbouring columns; a block a row of C and tile. `row_cuts` is the host's share of the work."""
        batch = out.shape[-1]
        args = (
            a_indptr,
            a_indices,
            a_data,
            step(a_data, batch),
            b_indptr,
            b_data,
            step(b_data, batch),
            b_shape,
            run_ptr,
            run_lengths,
            c_indptr,
            start_ptr,
            starts,
            out,
        )
        defines = types(a_data, a_indptr) | position_define(starts)
        self._rows("spgemm.cu", "spgemm_runs", defines, BLOCK, len(a_indptr) - 1, batch, args)

    def spgemm_accumulate(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_indices: Array,
        b_data: Array,
        c_indptr: Array,
        c_indices: Array,
        columns: int,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """Nothing kept per product: places are searched in C's row; `columns` and `row_cuts` are the host's."""
        batch = out.shape[-1]
        args = (
            a_indptr,
            a_indices,
            a_data,
            step(a_data, batch),
            b_indptr,
            b_indices,
            b_data,
            step(b_data, batch),
            c_indptr,
            c_indices,
            out,
        )
        self._rows("spgemm_rows.cu", "spgemm_accumulate", types(a_data, a_indptr), WARP, len(a_indptr) - 1, batch, args)

    def _rows(
        self, file: str, name: str, defines: Defines, threads: int, rows: int, batch: int, args: tuple[Any, ...]
    ) -> None:
        """Launch a block of `threads` a row of C and tile of the batch; `batch` and the number of tiles come last."""
        block = lanes(batch, threads)
        tiles = ceil_div(batch, block[0])
        self._launch(file, name, defines, rows * tiles, block, (*args, np.int32(batch), np.int32(tiles)))
