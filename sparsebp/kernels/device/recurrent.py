"""What the launchers of RNN and GRU share: the form of a kernel for a hidden size, and the launches of a scan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.kernels.device.base import MAX_THREADS, WARP, Defines, Launcher, ceil_div, real_define

_WEIGHT_REGISTERS = 144
"""32-bit registers of a thread that may hold weights; of 255, the rest is for sums and values loaded ahead."""
_GROUP_AT_LEAST = 4
"""Lanes that share a chunk's matrix, unless it has fewer rows; so a warp has at most eight matrices."""
_ROW_REGISTERS = 128
"""32-bit registers of a lane that may hold rows of a chunk's matrix."""


@dataclass(frozen=True)
class UnitForm:
    """How a sequential kernel runs: defines, threads, bytes of shared memory; `streamed` wants weights by unit."""

    defines: Defines
    threads: int
    shared: int
    streamed: bool


class RunChunks(Protocol):
    """Runs chunks ``span`` = (first, end, of how many) with the gradients `carry` (one a chunk) from later steps."""

    def __call__(self, carry: Array | None, carry_out: Array, span: tuple[int, int, int]) -> None:
        """Write the gradients of these chunks' steps; the first chunk's own carry goes to `carry_out`."""


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
        threads = ceil_div(hidden, WARP) * WARP
        state = 2 * fold * threads * itemsize
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

    def _scan_backward(
        self,
        cell: str,
        defines: Defines,
        saved: tuple[Array, ...],
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        written: Array,
        gh0: Array,
        chunks: int,
        run_chunks: RunChunks,
        form: UnitForm,
    ) -> None:
        """Back-propagate by reduce-then-scan: reduce the chunks, combine their maps, run every chunk with its vector.

        The last chunk knows its incoming gradient and is run in the first phase; the first one's map is not needed.
        """
        batch, hidden = gh0.shape
        if chunks == 1 or batch == 0:
            run_chunks(grad_h_n, gh0, (0, 1, 1))
            return
        carry = self.xp.empty((chunks - 1, batch, hidden), gh0.dtype)
        matrices = self.xp.empty((chunks - 2, batch, hidden, hidden), gh0.dtype)
        vectors = None if gy is None else self.xp.empty((chunks - 2, batch, hidden), gh0.dtype)
        sizes = (np.int64(len(written)), np.int32(batch), np.int32(hidden), np.int64(chunks))
        if hidden <= WARP and not form.streamed:
            args = (*saved, w_hh, gy, matrices, vectors, grad_h_n, written, carry[-1], *sizes)
            self._reduce_in_warps(cell, defines, args, batch, hidden, chunks, form.shared)
        else:
            run_chunks(grad_h_n, carry[-1], (chunks - 1, chunks, chunks))
            args = (*saved, self.xp.ascontiguousarray(w_hh.T), gy, matrices, vectors, *sizes)
            self._reduce_in_blocks(cell, defines, args, batch, hidden, chunks)
        self._combine_chunks(matrices, vectors, carry)
        run_chunks(carry, gh0, (0, chunks - 1, chunks))

    def _reduce_in_warps(
        self, cell: str, defines: Defines, args: tuple[Any, ...], batch: int, hidden: int, chunks: int, last: int
    ) -> None:
        """Launch the first phase where a warp holds whole matrices; see the first kernel of ``rnn_scan.cu``.

        `last` is the shared memory in bytes that the warps of the last chunk need.
        """
        itemsize = args[0].dtype.itemsize
        rows = self._rows_a_lane(hidden, batch, chunks - 2, itemsize)
        groups = ceil_div(batch, WARP // ceil_div(hidden, rows))
        defines = defines | {"HIDDEN": hidden, "ROWS": rows}
        grid, shared = batch + (chunks - 2) * groups, max(last, _warp_bytes(cell, hidden, rows, itemsize))
        self._launch(f"{cell}_scan.cu", f"{cell}_reduce", defines, grid, (WARP,), (*args, np.int32(groups)), shared)

    def _reduce_in_blocks(
        self, cell: str, defines: Defines, args: tuple[Any, ...], batch: int, hidden: int, chunks: int
    ) -> None:
        """Launch the first phase for any hidden size; see the second kernel of ``rnn_scan.cu``."""
        warps, rows, shared = self._block_rows(cell, hidden, args[0].dtype.itemsize)
        groups = ceil_div(hidden, warps * rows)
        grid, block = (chunks - 2) * batch * groups, (warps * WARP,)
        args = (*args, np.int32(groups))
        self._launch(f"{cell}_scan.cu", f"{cell}_reduce", defines | {"ROWS": rows}, grid, block, args, shared)

    def _combine_chunks(self, matrices: Array, vectors: Array | None, carry: Array) -> None:
        """Launch the second phase: fill `carry` (chunks - 1, B, H) downwards from its last entry."""
        waiting, batch, hidden = carry.shape
        if waiting == 1:
            return
        defines = real_define(carry)
        threads, shared = WARP, 0
        if hidden <= WARP:
            defines |= {"HIDDEN": hidden}
        else:
            threads, shared = ceil_div(hidden, WARP) * WARP, 2 * hidden * carry.dtype.itemsize
        args = (matrices, vectors, carry, np.int32(batch), np.int32(hidden), np.int64(waiting + 1))
        self._launch("scan.cu", "scan_combine", defines, batch, (threads,), args, shared)

    def _rows_a_lane(self, hidden: int, batch: int, maps: int, itemsize: int) -> int:
        """Return how many rows of a chunk's matrix a lane holds: the choice with the shortest step.

        More rows make more multiply-adds of every word loaded and leave fewer lanes idle; fewer rows make more warps
        with less work each. A multiprocessor runs the multiply-adds of four warps at once, but loads one word a cycle.
        """
        best, shortest = 1, math.inf
        for rows in range(1, max(1, ceil_div(hidden, _GROUP_AT_LEAST)) + 1):
            if rows > 1 and rows * hidden * itemsize // 4 > _ROW_REGISTERS:
                break
            warps = maps * ceil_div(batch, WARP // ceil_div(hidden, rows))
            resident = max(1.0, warps / self.multiprocessors)
            time = max(math.ceil(resident / 4) * rows, resident)
            if time < shortest:
                best, shortest = rows, time
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
