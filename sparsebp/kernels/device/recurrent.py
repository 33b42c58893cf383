"""What the launchers of RNN and GRU share: which form of a kernel a hidden size gets, and the three launches of a scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp.errors import OptionError
from sparsebp.kernels.device.base import MAX_THREADS, WARP, Defines, Launcher, ceil_div, real_define
from sparsebp.types import Array

_WEIGHT_REGISTERS = 160
"""32-bit registers of a thread that may hold weights; of 255, the rest is for sums and values loaded ahead."""
_ROW_REGISTERS = 128
"""32-bit registers of a lane that may hold rows of a chunk's matrix."""


@dataclass(frozen=True)
class UnitForm:
    """How a sequential kernel runs: defines, threads a block, bytes of shared memory; `streamed` wants weights by unit."""

    defines: Defines
    threads: int
    shared: int
    streamed: bool


class RecurrentLauncher(Launcher):
    """Base of the RNN and GRU launchers."""

    def _unit_form(self, array: Array, fold: int, outputs: int) -> UnitForm:
        """Return the form for a step that makes `outputs` results a unit from `fold` * H values of state.

        Raises
        ------
        OptionError
            The hidden size exceeds the threads of a block.
        """
        hidden, itemsize = array.shape[-1], array.dtype.itemsize
        defines = real_define(array)
        weights = fold * outputs * hidden
        state = 2 * _padded(fold * hidden, itemsize) * itemsize
        threads = ceil_div(hidden, WARP) * WARP
        if threads > MAX_THREADS:
            raise OptionError(
                "The hidden size is too large for the device kernels",
                expected=f"at most {MAX_THREADS}",
                got=hidden,
                remedy="Use a smaller hidden size or the host kernels",
            )
        if weights * (itemsize // 4) <= _WEIGHT_REGISTERS and hidden <= 4 * WARP:
            return UnitForm(defines | {"HIDDEN": hidden}, threads, state, False)
        staged = _padded(weights * hidden, itemsize) * itemsize + state
        fits = staged <= self.shared_limit
        return UnitForm(defines | {"STAGED": int(fits)}, threads, staged if fits else state, True)

    def _reduce_chunks(
        self, cell: str, defines: Defines, arrays: tuple[Array | None, ...], w_hh: Array, gy: Array | None, chunks: int
    ) -> tuple[Array | None, Array | None]:
        """Launch the first phase for chunks 1 … chunks - 2 and return their maps; `arrays` start with h (T, B, H)."""
        steps, batch, hidden = arrays[0].shape  # type: ignore[union-attr]
        maps = chunks - 2
        if maps < 1:
            return None, None
        dtype = w_hh.dtype
        matrices = self.xp.empty((maps, batch, hidden, hidden), dtype)
        vectors = None if gy is None else self.xp.empty((maps, batch, hidden), dtype)
        if hidden <= WARP:
            rows = self._rows_a_lane(hidden, batch, maps, dtype.itemsize)
            groups = ceil_div(batch, WARP // ceil_div(hidden, rows))
            more: Defines = {"HIDDEN": hidden, "ROWS": rows}
            grid, threads, weights = maps * groups, WARP, w_hh
            shared = _warp_bytes(cell, hidden, rows, dtype.itemsize)
        else:
            warps, rows, shared = self._block_rows(cell, hidden, dtype.itemsize)
            groups = ceil_div(hidden, warps * rows)
            more = {"ROWS": rows}
            grid, threads, weights = maps * batch * groups, warps * WARP, self.xp.ascontiguousarray(w_hh.T)
        sizes = (np.int64(steps), np.int32(batch), np.int32(hidden), np.int64(chunks), np.int32(groups))
        args = (*arrays, weights, gy, matrices, vectors, *sizes)
        self._launch(f"{cell}_scan.cu", f"{cell}_reduce", defines | more, grid, (threads,), args, shared)
        return matrices, vectors

    def _combine_chunks(self, matrices: Array | None, vectors: Array | None, carry: Array) -> None:
        """Launch the second phase: fill `carry` (chunks - 1, B, H) downwards from its last entry."""
        if matrices is None:
            return
        maps, batch, hidden = len(matrices), *carry.shape[1:]
        defines = real_define(carry)
        threads, shared = WARP, 0
        if hidden <= WARP:
            defines |= {"HIDDEN": hidden}
        else:
            threads, shared = ceil_div(hidden, WARP) * WARP, 2 * hidden * carry.dtype.itemsize
        args = (matrices, vectors, carry, np.int32(batch), np.int32(hidden), np.int64(maps + 2))
        self._launch("scan.cu", "scan_combine", defines, batch, (threads,), args, shared)

    def _rows_a_lane(self, hidden: int, batch: int, maps: int, itemsize: int) -> int:
        """Return how many rows of a chunk's matrix a lane holds.

        More rows make more of every word loaded and leave fewer lanes idle; fewer rows make more warps. With less than
        four warps a multiprocessor in sight, the latter counts: the fewest rows are taken.
        """
        best, best_score = 1, 0.0
        for rows in range(1, min(hidden, 8) + 1):
            if rows * hidden * itemsize // 4 > _ROW_REGISTERS and rows > 1:
                break
            matrices = WARP // ceil_div(hidden, rows)
            warps = maps * ceil_div(batch, matrices)
            busy = min(1.0, warps / (4 * self.multiprocessors)) * min(batch, matrices) * hidden / (WARP * rows)
            score = busy * rows / (rows + 1)
            if score > best_score:
                best, best_score = rows, score
        return best

    def _block_rows(self, cell: str, hidden: int, itemsize: int) -> tuple[int, int, int]:
        """Return warps a block, rows a warp and bytes of shared memory for the reduction at any hidden size."""
        factors = 2 if cell == "rnn" else 5  # coefficients and the incoming gradient
        for warps, rows in ((8, 4), (8, 2), (8, 1), (4, 1), (2, 1), (1, 1)):
            shared = (2 * warps * rows * _padded(hidden, itemsize) + factors * hidden) * itemsize
            if shared <= self.shared_limit:
                break
        return warps, rows, shared


def _padded(count: int, itemsize: int) -> int:
    width = 16 // itemsize
    return ceil_div(count, width) * width


def _warp_bytes(cell: str, hidden: int, rows: int, itemsize: int) -> int:
    """Return the shared memory of the warp form of a reduction, laid out as in ``rnn_scan.cu`` and ``gru_scan.cu``."""
    matrices = WARP // ceil_div(hidden, rows)
    square, exchange = hidden * _padded(hidden, itemsize), rows * hidden * WARP
    if cell == "rnn":
        return (square + 2 * matrices * hidden + exchange) * itemsize
    width = 16 // itemsize
    jacobian = square + (0 if square // width % 2 else width)
    values = matrices * jacobian + exchange + 4 * matrices * hidden + _padded(matrices * hidden, itemsize)
    return (values + 3 * hidden * hidden) * itemsize


def sizes_of(h: Array, first_chunk: int, chunks: int) -> tuple[Any, ...]:
    """Return the size arguments of the backward kernels."""
    steps, batch, hidden = h.shape
    return np.int64(steps), np.int32(batch), np.int32(hidden), np.int64(first_chunk), np.int64(chunks)
