"""Launcher of the numeric phase of fixed-pattern products (``cuda/spgemm.cu``)."""

from __future__ import annotations

import numpy as np

from sparsebp.kernels import checks
from sparsebp.kernels.device.base import WARP, Launcher, ceil_div, lanes, position_define, step, types
from sparsebp.types import Array

_ROW_BYTES = 12 * 1024
"""Shared memory for the sums of one row of C: sixteen such warps fit on a multiprocessor; longer rows use `out`."""


class SpgemmKernels(Launcher):
    """Device side of `sparsebp.kernels.protocol.Kernels.spgemm_numeric`."""

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
        batch = checks.check_spgemm_numeric(
            a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, product_ptr, positions, row_cuts, out
        )
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
