"""Launchers of the CSR kernels (``cuda/csr.cu``)."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import BLOCK, WARP, Launcher, ceil_div, lanes, step, types

_WARP_A_ROW = (WARP, BLOCK // WARP)


class CsrKernels(Launcher):
    """Device side of the CSR part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def csr_matvec(
        self, indptr: Array, indices: Array, data: Array, x: Array, out: Array, add: Array | None = None
    ) -> None:
        """Batched SpMV; a thread a row and sample, or a warp a row for one sample."""
        batch = out.shape[-1]
        rows, defines = len(indptr) - 1, types(data, indptr)
        if batch == 1:
            args = (indptr, indices, data, x, add, out, np.int64(rows))
            grid = ceil_div(rows, _WARP_A_ROW[1])
            self._launch("csr.cu", "csr_matvec_single", defines, grid, _WARP_A_ROW, args)
        elif batch > 1:
            block = lanes(batch)
            self._launch(
                "csr.cu",
                "csr_matvec",
                defines,
                ceil_div(rows, block[1]),
                block,
                (indptr, indices, data, step(data, batch), x, add, out, np.int64(rows), np.int32(batch)),
            )

    def scale_rows(self, indptr: Array, data: Array, scale: Array, out: Array) -> None:
        """Diagonal times CSR on the same pattern."""
        batch = out.shape[-1]
        rows, defines = len(indptr) - 1, types(data, indptr)
        if batch == 1:
            grid = ceil_div(rows, _WARP_A_ROW[1])
            args = (indptr, data, scale, out, np.int64(rows))
            self._launch("csr.cu", "scale_rows_single", defines, grid, _WARP_A_ROW, args)
        elif batch > 1:
            block = lanes(batch)
            self._launch(
                "csr.cu",
                "scale_rows",
                defines,
                ceil_div(rows, block[1]),
                block,
                (indptr, data, step(data, batch), scale, step(scale, batch), out, np.int64(rows), np.int32(batch)),
            )

    def scale_columns(self, indices: Array, data: Array, scale: Array, out: Array) -> None:
        """CSR times diagonal on the same pattern."""
        batch = out.shape[-1]
        block, entries = lanes(batch), len(indices)
        self._launch(
            "csr.cu",
            "scale_columns",
            types(data, indices),
            ceil_div(entries, block[1]) if batch else 0,
            block,
            (indices, data, step(data, batch), scale, step(scale, batch), out, np.int64(entries), np.int32(batch)),
        )

    def gather(self, data: Array, index: Array, out: Array) -> None:
        """``out[k] = data[index[k]]``."""
        batch = out.shape[-1]
        block, entries = lanes(batch), len(index)
        self._launch(
            "csr.cu",
            "gather",
            types(data, index),
            ceil_div(entries, block[1]) if batch else 0,
            block,
            (data, index, out, np.int64(entries), np.int32(batch)),
        )

    def gather_multiply(self, a_data: Array, a_index: Array, b_data: Array, b_index: Array, out: Array) -> None:
        """``out[k] = a_data[a_index[k]] * b_data[b_index[k]]``."""
        batch = out.shape[-1]
        block, entries = lanes(batch), len(a_index)
        self._launch(
            "csr.cu",
            "gather_multiply",
            types(a_data, a_index),
            ceil_div(entries, block[1]) if batch else 0,
            block,
            (
                a_data,
                step(a_data, batch),
                a_index,
                b_data,
                step(b_data, batch),
                b_index,
                out,
                np.int64(entries),
                np.int32(batch),
            ),
        )
