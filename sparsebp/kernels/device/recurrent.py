"""Launchers of the recurrences (``cuda/rnn*.cu``, ``cuda/gru*.cu``, ``cuda/scan.cu``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array, Nonlinearity
from sparsebp.kernels.api.recurrent import MOST_INPUTS, room_for, room_for_sums
from sparsebp.kernels.device.base import MAX_THREADS, WARP, Defines, Launcher, ceil_div, real_define, thread_block
from sparsebp.kernels.device.recurrent_cycles import Gpu, Layer, in_registers, in_warps, map_values, rows_a_lane
from sparsebp.kernels.device.recurrent_maps import write_maps
from sparsebp.kernels.operands import WeightSums
from sparsebp.kernels.weight_sums import multiply_sums

_INPUT_STEPS = 16
"""Steps of the input that forward keeps in shared memory at most: two rounds, see ``cuda/forward.cuh``."""
SUM_REGISTERS = 132
"""32-bit registers of a thread that may hold weights and the sums of their gradients."""
_SUM_BLOCK = 8, 64
"""Entries and rows of threads of a block of ``sum_weights``, as ENTRIES and ROWS in weight_sums.cu."""


@dataclass(frozen=True)
class UnitForm:
    """How a sequential kernel runs: defines, threads, bytes of shared memory; `streamed` wants weights by unit."""

    defines: Defines
    threads: int
    shared: int
    streamed: bool


@dataclass(frozen=True)
class _Cell:
    """What the launches of RNN and GRU differ in: files and kernels begin with `name`; columns are those of ga."""

    name: Literal["rnn", "gru"]
    gates: int
    columns: int
    defines: Defines


_GRU = _Cell("gru", 3, 4, {})
_RNN: dict[Nonlinearity, _Cell] = {"tanh": _Cell("rnn", 1, 1, {"RELU": 0}), "relu": _Cell("rnn", 1, 1, {"RELU": 1})}


class RecurrentKernels(Launcher):
    """Device side of `sparsebp.kernels.api.RecurrentKernels`; shapes and dtypes are stated there."""

    PROJECTED_INPUTS = MOST_INPUTS
    SUM_REGISTERS = SUM_REGISTERS

    def rnn_forward(
        self,
        x: Array,
        w_hh: Array,
        h0: Array,
        nonlinearity: Nonlinearity,
        h: Array,
        w_ih: Array | None,
        b_ih: Array | None,
        b_hh: Array | None,
    ) -> None:
        """A block a sample."""
        self._forward(_RNN[nonlinearity], (x, w_ih, b_ih, b_hh), w_hh, h0, h)

    def rnn_backward(
        self,
        h: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        nonlinearity: Nonlinearity,
        gz: Array | None,
        gh0: Array,
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """A block a sample and chunk."""
        self._back_propagate(_RNN[nonlinearity], (h,), w_hh, gy, grad_h_n, gz, gh0, chunks, sums)

    def rnn_maps(self, h: Array, w_hh: Array, gy: Array | None, nonlinearity: Nonlinearity, maps: Array) -> None:
        """From stored Jacobians, see `write_maps`."""

        def jacobians(begin: int, end: int, out: Array) -> None:
            self.rnn_jacobians(self.xp.ascontiguousarray(h[begin:end][::-1]), w_hh, nonlinearity, out)

        write_maps(self, h.shape, jacobians, gy, maps)

    def rnn_jacobians(self, h: Array, w_hh: Array, nonlinearity: Nonlinearity, out: Array) -> None:
        """A block a step and unit."""
        self._jacobians(_RNN[nonlinearity], h, w_hh, out)

    def gru_forward(
        self,
        x: Array,
        w_hh: Array,
        b_hn: Array,
        h0: Array,
        h: Array,
        gates: Array,
        w_ih: Array | None,
        b_ih: Array | None,
        b_hh: Array | None,
    ) -> None:
        """A block a sample."""
        self._forward(_GRU, (x, w_ih, b_ih, b_hh), w_hh, h0, h, b_hn, gates)

    def gru_backward(
        self,
        h: Array,
        h0: Array,
        gates: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        ga: Array | None,
        gh0: Array,
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """A block a sample and chunk."""
        self._back_propagate(_GRU, (h, h0, gates), w_hh, gy, grad_h_n, ga, gh0, chunks, sums)

    def gru_maps(self, h: Array, h0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """From stored Jacobians, see `write_maps`."""

        def jacobians(begin: int, end: int, out: Array) -> None:
            states = self.xp.empty((end - begin + 1, *h0.shape), dtype=h.dtype)  # before each step; the last is unused
            states[:-2] = h[begin : end - 1][::-1]
            states[-2:] = h[begin - 1] if begin else h0
            saved = self.xp.ascontiguousarray(gates[begin:end][::-1])
            self.gru_jacobians(states[1:], states[0], saved, w_hh, out)

        write_maps(self, h.shape, jacobians, gy, maps)

    def gru_jacobians(self, h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """A block a step and unit."""
        self._jacobians(_GRU, h, h0, gates, w_hh, out)

    # ---- the same for both cells ---------------------------------------------------------------------------------

    def _forward(
        self, cell: _Cell, inputs: tuple[Array | None, ...], w_hh: Array, h0: Array, h: Array, *of_gru: Array
    ) -> None:
        """Launch a kernel of ``cuda/*_forward.cu``; `inputs` are x, w_ih (or None), b_ih and b_hh."""
        steps, batch, hidden = h.shape
        features = 0 if inputs[1] is None else inputs[1].shape[1]
        inputs_held = room_for(features) if features else 0
        form = self._unit_form(h, 1, cell.gates, _INPUT_STEPS * MOST_INPUTS if features else 0, inputs_held)
        defines, block = form.defines | cell.defines, (form.threads,)
        if features:
            defines |= {"INPUTS": MOST_INPUTS if form.streamed else inputs_held}
        weights = self.xp.ascontiguousarray(w_hh.T) if form.streamed else w_hh
        b_hn, gates = of_gru[:1], of_gru[1:]
        sizes = (np.int64(steps), np.int32(batch), np.int32(hidden))
        args = (*inputs, np.int32(features), weights, *b_hn, h0, h, *gates, *sizes)
        name = f"{cell.name}_forward"
        self._launch(f"{name}.cu", name, defines, batch, block, args, form.shared)

    def _jacobians(self, cell: _Cell, h: Array, *others: Array) -> None:
        steps, batch, hidden = h.shape
        args = (h, *others, np.int32(batch), np.int32(hidden))
        defines, grid = real_define(h) | {"HIDDEN": 1} | cell.defines, steps * hidden if batch else 0
        self._launch(f"{cell.name}.cu", f"{cell.name}_jacobians", defines, grid, thread_block(batch), args)

    def _back_propagate(
        self,
        cell: _Cell,
        saved: tuple[Array, ...],
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        written: Array | None,
        gh0: Array,
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """Run the recursion, or reduce-then-scan: reduce the chunks, combine their maps, run each with its vector.

        The last chunk knows its incoming gradient and is run in the first phase; the first one's map is not needed.
        """
        steps, batch, hidden = saved[0].shape
        form = self._unit_form(gh0, cell.gates, 1)
        room = features = 0
        if sums is not None:
            features, itemsize = sums.x.shape[2], gh0.dtype.itemsize
            room = room_for_sums(self.SUM_REGISTERS, cell.gates, hidden, features, itemsize)
        to_sum: tuple[Any, ...] = (None, None, None, np.int32(0))
        if sums is not None and room:
            beside = 2 * (form.threads + _padded(room, itemsize)) * itemsize
            form = replace(form, defines=form.defines | {"INPUTS": room}, shared=form.shared + beside)
            values = cell.gates * (hidden + room) + cell.columns
            parts = self.xp.empty((chunks * batch, values, hidden), gh0.dtype)
            to_sum = (sums.x, sums.before, parts, np.int32(features))
        elif written is None:
            written = self.xp.empty((steps, batch, cell.columns * hidden), gh0.dtype)
        sizes, count = (np.int64(steps), np.int32(batch), np.int32(hidden)), np.int64(chunks)

        def run_chunks(first: int, end: int, carry: Array | None, carry_out: Array) -> None:
            """Run chunks with the gradients `carry` (one a chunk) from later steps; see ``rnn_backward`` in rnn.cu."""
            args = (*saved, w_hh, gy, carry, written, carry_out, *to_sum, *sizes, np.int64(first), count)
            defines, block = form.defines | cell.defines, (form.threads,)
            name = f"{cell.name}_backward"
            self._launch(f"{cell.name}.cu", name, defines, (end - first) * batch, block, args, form.shared)

        if chunks == 1 or batch == 0:
            run_chunks(0, chunks, grad_h_n, gh0)
        else:
            carry = self.xp.empty((chunks - 1, batch, hidden), gh0.dtype)
            layer = Layer(cell.name, batch, hidden, gh0.dtype.itemsize)
            if in_warps(layer):
                maps = self.xp.empty((chunks - 2, batch, map_values(layer)), gh0.dtype)
                args = (*saved, w_hh, gy, maps, grad_h_n, written, carry[-1], *to_sum, *sizes, count)
                self._reduce_in_warps(cell, layer, args, chunks, form)
                self._combine_chunks((maps,), carry, 8 * WARP, {"HIDDEN": hidden})
            else:
                run_chunks(chunks - 1, chunks, grad_h_n, carry[-1])
                matrices = self.xp.empty((chunks - 2, batch, hidden, hidden), gh0.dtype)
                vectors = None if gy is None else self.xp.empty((chunks - 2, batch, hidden), gh0.dtype)
                args = (*saved, self.xp.ascontiguousarray(w_hh.T), gy, matrices, vectors, *sizes, count)
                self._reduce_in_blocks(cell, args, batch, hidden, chunks)
                threads = ceil_div(hidden, WARP) * WARP
                self._combine_chunks((matrices, vectors), carry, threads, {}, 2 * hidden * carry.dtype.itemsize)
            run_chunks(0, chunks - 1, carry, gh0)
        if sums is not None and room:
            self._sum_parts(cell, to_sum[2], room, sums)
        elif sums is not None:
            multiply_sums(written, sums)

    def _sum_parts(self, cell: _Cell, parts: Array, room: int, sums: WeightSums) -> None:
        """Sum over the parts (count, values, H) that the chunks left; see ``sum_weights`` in weight_sums.cu."""
        count, values, hidden = parts.shape
        entries, rows = _SUM_BLOCK
        sizes = (hidden, sums.x.shape[2], room, cell.gates, cell.columns)
        args = (parts, *sums[2:], np.int64(count), *map(np.int32, sizes))
        grid = ceil_div(values * hidden, entries)
        self._launch("weight_sums.cu", "sum_weights", real_define(parts), grid, (entries, rows), args)

    def _unit_form(self, array: Array, fold: int, outputs: int, beside: int = 0, inputs: int = 0) -> UnitForm:
        """Return the form for a step that makes `outputs` results a unit from `fold` * H values of state.

        `beside` are values that lie in shared memory besides, at its beginning; `inputs` those of a step that a unit
        has weights for too.

        Raises
        ------
        OptionError
            The hidden size exceeds the threads of a block.
        """
        hidden, itemsize = array.shape[-1], array.dtype.itemsize
        defines = real_define(array)
        weights = fold * outputs * hidden
        threads = ceil_div(hidden, WARP) * WARP
        state = (2 * fold * threads + beside) * itemsize
        if threads > MAX_THREADS:
            raise OptionError(
                "The hidden size is too large for the device kernels",
                expected=f"at most {MAX_THREADS}",
                got=hidden,
                remedy="Use a smaller hidden size or the host kernels",
            )
        if in_registers(weights, hidden, itemsize, outputs * inputs):
            return UnitForm(defines | {"HIDDEN": hidden}, threads, state, False)
        staged = _padded(weights * hidden, itemsize) * itemsize + state
        fits = staged <= self.shared_limit
        return UnitForm(defines | {"STAGED": int(fits)}, threads, staged if fits else state, True)

    def _reduce_in_warps(self, cell: _Cell, layer: Layer, args: tuple[Any, ...], chunks: int, form: UnitForm) -> None:
        """Launch the first phase where a warp holds whole matrices; see ``rnn_reduce`` in rnn.cu.

        `form` is that of the warps of the last chunk.
        """
        _, batch, hidden, itemsize = layer
        rows = self._rows_a_lane(layer, chunks - 2)
        groups = ceil_div(batch, WARP // ceil_div(hidden, rows))
        grid, shared = batch + (chunks - 2) * groups, max(form.shared, _warp_bytes(cell, hidden, rows, itemsize))
        self._reduce(cell, form.defines | {"ROWS": rows}, grid, WARP, (*args, np.int32(groups)), shared)

    def _rows_a_lane(self, layer: Layer, maps: int) -> int:
        return rows_a_lane(layer, maps, Gpu(self.multiprocessors, self.double_cost))

    def _reduce_in_blocks(self, cell: _Cell, args: tuple[Any, ...], batch: int, hidden: int, chunks: int) -> None:
        """Launch the first phase for any hidden size; see ``rnn_reduce`` in rnn.cu."""
        warps, rows, shared = self._block_rows(cell, hidden, args[0].dtype.itemsize)
        groups = ceil_div(hidden, warps * rows)
        grid = (chunks - 2) * batch * groups
        self._reduce(cell, {"ROWS": rows}, grid, warps * WARP, (*args, np.int32(groups)), shared)

    def _reduce(self, cell: _Cell, form: Defines, grid: int, threads: int, args: tuple[Any, ...], shared: int) -> None:
        defines = real_define(args[0]) | cell.defines | form
        self._launch(f"{cell.name}.cu", f"{cell.name}_reduce", defines, grid, (threads,), args, shared)

    def _combine_chunks(
        self, maps: tuple[Array | None, ...], carry: Array, threads: int, form: Defines, shared: int = 0
    ) -> None:
        """Launch the second phase: fill `carry` (chunks - 1, B, H) downwards from its last entry."""
        waiting, batch, hidden = carry.shape
        args = (*maps, carry, np.int32(batch), np.int32(hidden), np.int64(waiting + 1))
        grid = batch if waiting > 1 else 0
        self._launch("scan.cu", "scan_combine", real_define(carry) | form, grid, (threads,), args, shared)

    def _block_rows(self, cell: _Cell, hidden: int, itemsize: int) -> tuple[int, int, int]:
        """Return warps a block, rows a warp and bytes of shared memory for the reduction at any hidden size."""
        factors = 2 if cell.name == "rnn" else 5  # coefficients and the incoming gradient
        for warps, rows in ((8, 4), (8, 2), (8, 1), (4, 1), (2, 1), (1, 1)):
            shared = (2 * warps * rows * _padded(hidden, itemsize) + factors * hidden) * itemsize
            if shared <= self.shared_limit:
                break
        return warps, rows, shared


def _padded(count: int, itemsize: int) -> int:
    width = 16 // itemsize
    return ceil_div(count, width) * width


def _warp_bytes(cell: _Cell, hidden: int, rows: int, itemsize: int) -> int:
    """Return the shared memory of the warp form of a reduction, laid out as in ``rnn.cu`` and ``gru.cu``."""
    matrices = WARP // ceil_div(hidden, rows)
    values = ceil_div(matrices * hidden, WARP) * WARP  # of all samples at one step, whole warps
    square, exchange = hidden * _padded(hidden, itemsize), rows * hidden * WARP
    if cell.name == "rnn":
        return (square + 2 * values + exchange) * itemsize
    width = 16 // itemsize
    jacobian = square + (0 if square // width % 2 else width)
    return (matrices * jacobian + exchange + 11 * values + 3 * hidden * hidden) * itemsize
