"""Launchers of the optimizers' updates and of clipping (``cuda/optimizers.cu``): one launch for all arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array, UpdateRule
from sparsebp.kernels.device.base import BLOCK, WARP, Launcher, ceil_div, real_define

Check = Callable[[], None]
_FILE = "optimizers.cu"
_CHUNK = 4096
"""Numbers that a block works on, as in the source."""


class OptimizerKernels(Launcher):
    """Optimizers' part of `sparsebp.kernels.api.Kernels` on a device; shapes and dtypes are stated there."""

    def optimizer_update(
        self,
        rule: UpdateRule,
        params: Sequence[Array],
        grads: Sequence[Array],
        buffers: Sequence[Sequence[Array | None]],
        options: Array,
        steps: Array,
        check: Check,
    ) -> None:
        """Update all parameters in place; a block a chunk of one of them."""
        check()
        if params:
            table, blocks = self._table((params, grads, *buffers), steps)
            args = (*table, _sent(self.xp, options), np.int64(len(params)))
            self._launch(_FILE, f"{rule}_update", real_define(params[0]), blocks, (BLOCK,), args)

    def scale_arrays(self, arrays: Sequence[Array], factor: float, check: Check) -> None:
        """Multiply all arrays by one number, in place."""
        self._in_place("scale_arrays", arrays, factor, check)

    def clamp_arrays(self, arrays: Sequence[Array], limit: float, check: Check) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays."""
        self._in_place("clamp_arrays", arrays, limit, check)

    def square_sums(self, arrays: Sequence[Array], out: Array, check: Check) -> None:
        """Sum of the squares of each array, in float64: of its chunks first, then of those."""
        check()
        if not arrays:
            return
        (addresses, layout), blocks = self._table((arrays,), np.zeros(len(arrays), np.int64))
        sums, n, define = self.xp.empty(blocks, np.float64), np.int64(len(arrays)), real_define(arrays[0])
        self._launch(_FILE, "chunk_squares", define, blocks, (BLOCK,), (addresses, layout, n, sums))
        grid = ceil_div(len(arrays), BLOCK // WARP)
        self._launch(_FILE, "sum_chunks", define, grid, (WARP, BLOCK // WARP), (layout, n, sums, out))

    def _in_place(self, kernel: str, arrays: Sequence[Array], value: float, check: Check) -> None:
        check()
        if arrays:
            table, blocks = self._table((arrays,), np.zeros(len(arrays), np.int64))
            args = (*table, np.int64(len(arrays)), arrays[0].dtype.type(value))
            self._launch(_FILE, kernel, real_define(arrays[0]), blocks, (BLOCK,), args)

    def _table(self, columns: Sequence[Sequence[Any]], steps: Array) -> tuple[tuple[Any, Any], int]:
        """Return the tables of addresses and of sizes, chunks and steps on the device, and the number of chunks."""
        arrays = [array for row in zip(*columns, strict=True) for array in row]
        self._check_device(tuple(arrays))
        sizes = np.array([array.size for array in columns[0]], np.int64)
        layout = np.zeros((len(sizes) + 1, 3), np.int64)
        layout[:-1, 0] = sizes
        np.cumsum(-(-sizes // _CHUNK), out=layout[1:, 1])
        sent = backend.device_of(steps) == "cpu"
        if sent:
            layout[:-1, 2] = steps
        table = backend.constant(self.xp, layout)
        if not sent:
            table[:-1, 2] = steps  # as they are when this runs, not as they are now
        return (self.loader.addresses(arrays), table), int(layout[-1, 1])


def _sent(xp: Any, array: Array) -> Array:
    return backend.constant(xp, array) if backend.device_of(array) == "cpu" else array
