"""Launchers of the kernels that make values of transposed Jacobians (``cuda/slopes.cu``, ``cuda/pool.cu``)."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import SLOPES, Array
from sparsebp.kernels.device.base import (
    BLOCK,
    WARP,
    Launcher,
    ceil_div,
    real_define,
    thread_block,
    types,
    winner_define,
)


class ValueKernels(Launcher):
    """Device side of the values part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def pointwise_slopes(self, kept: Array, function: str, out: Array) -> None:
        """Slopes from what a forward kept, turned to batch last; in tiles, or element by element for one sample."""
        batch = out.shape[-1]
        size, code = out.shape[0], np.int32(SLOPES.index(function))
        if batch == 1:
            args: tuple[object, ...] = (kept, code, out, np.int64(size))
            self._launch(
                "slopes.cu", "pointwise_slopes_single", real_define(out), ceil_div(size, BLOCK), (BLOCK,), args
            )
        else:
            tiles = ceil_div(size, WARP)
            args = (kept, code, out, np.int64(size), np.int64(batch), np.int64(tiles))
            grid, block = tiles * ceil_div(batch, WARP), (WARP, BLOCK // WARP)
            self._launch("slopes.cu", "pointwise_slopes", real_define(out), grid, block, args)

    def max_pool_values(self, winner: Array, window: Array, offset: Array, windows: int, taps: int, out: Array) -> None:
        """One where an entry's place in its window is the winner's, else zero."""
        batch = out.shape[-1]
        block, entries = thread_block(batch), out.shape[0]
        args = (
            winner, np.int64(winner.shape[1]), window, offset, np.int64(windows), np.int64(taps), out,
            np.int64(entries), np.int32(batch),
        )  # fmt: skip
        grid = ceil_div(entries, block[1]) if batch else 0
        defines = types(out, window) | winner_define(winner)
        self._launch("pool.cu", "max_pool_values", defines, grid, block, args)
