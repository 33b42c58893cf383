"""Launchers of the CSR kernels (``cuda/csr.cu``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import BLOCK, WARP, Launcher, ceil_div, step, thread_block, types
from sparsebp.kernels.operands import RowShapes

_WARP_A_ROW = (WARP, BLOCK // WARP)


class CsrKernels(Launcher):
    """Device side of the kernels on one sparse matrix: a thread a row or entry and sample, or a warp a row for one."""

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
        grid = ceil_div(rows, _WARP_A_ROW[1])
        self._launch("csr.cu", name, types(data, indptr), grid, _WARP_A_ROW, (*arrays, np.int64(rows)))

    def _batched(self, name: str, data: Array, index: Array, count: int, batch: int, *args: Any) -> None:
        """Launch a thread a row or entry (there are `count`) and sample."""
        block = thread_block(batch)
        grid = ceil_div(count, block[1]) if batch else 0
        self._launch("csr.cu", name, types(data, index), grid, block, (*args, np.int64(count), np.int32(batch)))
