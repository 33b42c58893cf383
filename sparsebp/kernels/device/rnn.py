"""Launchers of the recurrences: forms of the kernels, chunks, and rows a lane; then linear ones and selective scans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.check import Array, Nonlinearity
from sparsebp.core.cublas import matmul
from sparsebp.core.errors import OptionError
from sparsebp.kernels.checks import CANDIDATES, CHUNK, MOST_INPUTS, parts_of, room_for, room_for_sums
from sparsebp.kernels.device.launch import BLOCK, MAX_THREADS, WARP, Defines, Launcher, c_types, ceil_div, thread_block
from sparsebp.kernels.operands import WeightSums

# Rows of a chunk's matrix that a lane holds, chosen by the cycles of a step of the reduction.
#
# Figures are counted, not measured: from the machine code for compute capability 9.0, every instruction with the
# latencies published for it and global loads answered by the L2 cache. A multiprocessor starts an instruction a cycle
# on each of four schedulers and reads one word a lane and cycle from shared memory; a warp alone waits for its own
# results. Which of the three a step waits for depends on how many warps share the multiprocessor.

SCHEDULERS = 4
"""Of a multiprocessor; each can start an instruction a cycle."""
WEIGHT_REGISTERS = 144
"""32-bit registers of a thread that may hold weights; of 255, the rest is for sums and values loaded ahead."""
_ALL_WEIGHT_REGISTERS = 176
"""The same with the weights of the input."""
_SHARING_THREADS = 256
"""Threads of a block that can have so many registers."""
_SPLITS = (1, 2, 4)
"""Lanes that may share a unit."""
_GROUP_AT_LEAST = 4
"""Lanes that share a chunk's matrix, unless it has fewer rows; so a warp has at most eight matrices."""
ROW_REGISTERS = {"rnn": 128, "gru": 80, "lstm": 66}
"""32-bit registers of a lane that may hold rows of a chunk's matrix: a GRU's step loads more besides. For an LSTM
they hold the columns of h: the columns of c take as many, and so do the buffers of the next ones."""
_REDUCING = 8
"""Warps of a multiprocessor that its registers are enough for in the first phase."""
_L2 = 350
"""Cycles until a value that is loaded a step ahead is there."""


class Gpu(NamedTuple):
    """Figures of a device: multiprocessors, and the cost of a multiply-add in float64 over float32."""

    multiprocessors: int
    double: float = 2.0


class Layer(NamedTuple):
    """Sizes of one run over time."""

    cell: str
    batch: int
    hidden: int
    itemsize: int

    @property
    def fold(self) -> int:
        """Vectors that the transposed weights multiply at a step."""
        return {"rnn": 1, "gru": 3, "lstm": 4}[self.cell]

    @property
    def side(self) -> int:
        """Values of a sample's state, rows of a chunk's matrix: an LSTM's state is h and c."""
        return self.hidden * (2 if self.cell == "lstm" else 1)

    @property
    def words(self) -> int:
        """Words of a value."""
        return self.itemsize // 4


_REDUCE_WAITS = {"rnn": (100, 1.06), "gru": (120, 1.5), "lstm": (210, 1.24)}
"""A step of ``rnn_reduce``, ``gru_reduce`` and ``lstm_reduce`` by a warp alone: cycles, and cycles an instruction.
At H = 20 in float32 with 1, 2 and 5 rows a lane 660, 1200, 2660 and 1620, 2570, 5280 cycles; with 2 and 3 of an LSTM's
40 rows 3020 and 4380."""


class Share(NamedTuple):
    """What a lane has of the weights of a unit that `split` lanes share: 16-byte pieces, and how many in registers."""

    split: int
    pieces: int
    kept: int


@cache
def lane_share(fold: int, outputs: int, hidden: int, itemsize: int, inputs: int = 0) -> Share:
    """Return the share for `outputs` results a unit from `fold` * H values of state and `inputs` of input.

    As few lanes as can keep all weights in registers: with four warps every scheduler is busy, and more lanes multiply
    no faster. Where none can, as many as there are threads for.
    """
    of_input = outputs * inputs * itemsize // 4
    for split in _SPLITS:
        if split > 1 and split * hidden > _SHARING_THREADS:
            break
        pieces = fold * outputs * ceil_div(ceil_div(hidden * itemsize, 16), split)
        share = Share(split, pieces, pieces)
        if 4 * pieces <= min(WEIGHT_REGISTERS, _ALL_WEIGHT_REGISTERS - of_input):
            return share
    room = WEIGHT_REGISTERS - of_input - 4 * (fold - 1)  # what waits to be written takes registers, too
    return share._replace(kept=room // (4 * outputs) * outputs)


def in_warps(layer: Layer) -> bool:
    """Return whether the first phase is the form in which a warp holds whole matrices."""
    share = lane_share(layer.fold, 1, layer.hidden, layer.itemsize)
    return layer.hidden <= WARP and share.split == 1 and share.kept == share.pieces


def map_values(layer: Layer) -> int:
    """Return the values that the affine map of a chunk and sample takes; see ``common.cuh``."""
    side = layer.side
    if not in_warps(layer):
        return side * (side + 1)
    width = 16 // layer.itemsize
    pieces = ceil_div(side + 1, width)
    return side * (pieces + 1 - pieces % 2) * width


def rows_a_lane(layer: Layer, maps: int, gpu: Gpu) -> int:
    """Return the rows of a chunk's matrix that a lane holds when `maps` maps a sample are reduced in warps."""
    return min(_rows(layer), key=lambda rows: _reduce_step(layer, rows, maps, gpu))


@cache
def _rows(layer: Layer) -> tuple[int, ...]:
    """Return the rows that a lane can hold: more make more of every word loaded, fewer are sooner done with a step."""
    least, most = ceil_div(layer.side, WARP), max(1, ceil_div(layer.side, _GROUP_AT_LEAST))
    fits = ROW_REGISTERS[layer.cell] // (layer.hidden * layer.words)
    return tuple(range(least, max(least, min(most, fits)) + 1))


@lru_cache(maxsize=4096)
def _reduce_step(layer: Layer, rows: int, maps: int, gpu: Gpu) -> float:
    """Return the cycles of a step of the first phase in warps, of all maps."""
    cell, batch, hidden, _ = layer
    words, pipe = layer.words, 1.0 if layer.itemsize == 4 else gpu.double
    matrices = WARP // ceil_div(layer.side, rows)
    stages = ceil_div(matrices * hidden, WARP)
    kept = 0
    if cell == "rnn":  # rows of W in registers, as in reduction.cuh
        kept = min(hidden, max(0, (176 - 2 * rows * hidden * words) // (hidden * words)))
    products = layer.side // hidden  # with the dense blocks of the Jacobian
    loaded = products * (hidden - kept) * hidden
    issued = products * pipe * (rows * hidden * hidden + 2 * rows * hidden) + loaded * words / 4 + 12 * stages + 30
    shared = words * (loaded + 2 * products * hidden + 4 * stages)
    if cell != "rnn":  # the Jacobians of all samples are put together first
        turns = ceil_div(hidden * hidden, WARP)
        issued += turns * (12 + 10 * matrices) + words * rows * hidden
        shared += turns * words * (3 + 5 * matrices)
    base, an_instruction = _REDUCE_WAITS[cell]
    alone = max(_L2, base + an_instruction * issued)

    def of(warps: int) -> float:
        return max(alone, ceil_div(warps, SCHEDULERS) * issued, warps * shared) if warps else 0.0

    warps = ceil_div(batch + maps * ceil_div(batch, matrices), gpu.multiprocessors)
    return warps // _REDUCING * of(_REDUCING) + of(warps % _REDUCING)


# How recurrences are launched, whatever the cell: forms of the kernels, chunks of time, sums of weight gradients.

_INPUT_STEPS = 16
"""Steps of the input that forward keeps in shared memory at most: two rounds, see ``cuda/forward.cuh``."""
SUM_REGISTERS = 132
"""32-bit registers of a thread that may hold weights and the sums of their gradients."""
_SUM_BLOCK = 8, 64
"""Entries and rows of threads of a block that sums, as ENTRIES and ROWS in weight_sums.cu."""
_ROWS_AT_ONCE, _PIECE = 2**16, 2**12
"""Rows of gradients up to which a block sums all of them, and of a piece where there are more."""


@dataclass(frozen=True)
class UnitForm:
    """How a sequential kernel runs: defines, threads, bytes of shared memory; `streamed` wants weights by unit."""

    defines: Defines
    threads: int
    shared: int
    streamed: bool


@dataclass(frozen=True)
class Cell:
    """The differences between the launches of the cells.

    Attributes
    ----------
    name
        Begins the names of files and kernels.
    gates, columns
        H rows of weights, and of ga, which the backward writes.
    states
        Arrays (B, H) that the state consists of.
    factors
        Values of a unit and step that a block's reduction keeps in addition to its rows.
    """

    name: str
    gates: int
    columns: int
    states: int
    factors: int
    defines: Defines


class Saved(NamedTuple):
    """The inputs of a backward: the forward's arrays, (T, B, H) first, the weights, and the gradient at every h."""

    arrays: tuple[Array, ...]
    w_hh: Array
    gy: Array | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, B and H."""
        steps, batch, hidden = self.arrays[0].shape
        return steps, batch, hidden

    @property
    def dtype(self) -> Any:
        """Of everything."""
        return self.w_hh.dtype


_RNN: dict[Nonlinearity, Cell] = {
    "tanh": Cell("rnn", 1, 1, states=1, factors=2, defines={"RELU": 0}),
    "relu": Cell("rnn", 1, 1, states=1, factors=2, defines={"RELU": 1}),
}
_GRU = Cell("gru", 3, 4, states=1, factors=5, defines={})
_LSTM = Cell("lstm", 4, 4, states=2, factors=7, defines={})


class RecurrentKernels(Launcher):
    """Device side of the recurrences in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there.

    Forward runs one block per sample, backward one per sample and chunk, Jacobians one per step and unit.

    Raises
    ------
    OptionError
        The hidden size exceeds the 1024 threads of a block, in a forward or a backward.
    """

    MOST_INPUTS = MOST_INPUTS

    def projected_inputs(self, gates: int, hidden: int, itemsize: int) -> int:
        """All that the kernels can."""
        return MOST_INPUTS

    def sums_for(self, gates: int, hidden: int, features: int, itemsize: int) -> tuple[int, int]:
        """Sums are a sample's, in registers."""
        return room_for_sums(SUM_REGISTERS, gates, hidden, features, itemsize), 1

    def rnn_forward(
        self, x: Array, w_hh: Array, h0: Array, nonlinearity: Nonlinearity, h: Array, w_ih: Array | None,
        b_ih: Array | None, b_hh: Array | None, fresh: bool,
    ) -> None:  # fmt: skip
        """See ``rnn_forward.cu``."""
        self._forward(_RNN[nonlinearity], (x, w_ih, b_ih, b_hh), w_hh, (h0,), fresh, h)

    def rnn_backward(
        self, h: Array, w_hh: Array, gy: Array | None, grad_h_n: Array | None, nonlinearity: Nonlinearity,
        gz: Array | None, gh0: Array, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """See ``rnn.cu``."""
        self._back_propagate(_RNN[nonlinearity], Saved((h,), w_hh, gy), (grad_h_n,), gz, (gh0,), chunks, sums)

    def rnn_maps(self, h: Array, w_hh: Array, gy: Array | None, nonlinearity: Nonlinearity, maps: Array) -> None:
        """The first phase of reduce-then-scan, of all chunks."""
        self._reduce_all(_RNN[nonlinearity], Saved((h,), w_hh, gy), maps)

    def rnn_jacobians(self, h: Array, w_hh: Array, nonlinearity: Nonlinearity, out: Array) -> None:
        """See ``rnn.cu``."""
        self._jacobians(_RNN[nonlinearity], (h,), w_hh, out)

    def gru_forward(
        self, x: Array, w_hh: Array, b_hn: Array, h0: Array, h: Array, gates: Array, w_ih: Array | None,
        b_ih: Array | None, b_hh: Array | None, fresh: bool,
    ) -> None:  # fmt: skip
        """See ``gru_forward.cu``."""
        self._forward(_GRU, (x, w_ih, b_ih, b_hh), w_hh, (b_hn, h0), fresh, h, gates)

    def gru_backward(
        self, h: Array, h0: Array, gates: Array, w_hh: Array, gy: Array | None, grad_h_n: Array | None,
        ga: Array | None, gh0: Array, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """See ``gru.cu``."""
        self._back_propagate(_GRU, Saved((h, h0, gates), w_hh, gy), (grad_h_n,), ga, (gh0,), chunks, sums)

    def gru_maps(self, h: Array, h0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """The first phase of reduce-then-scan, of all chunks."""
        self._reduce_all(_GRU, Saved((h, h0, gates), w_hh, gy), maps)

    def gru_jacobians(self, h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """See ``gru.cu``."""
        self._jacobians(_GRU, (h, h0, gates), w_hh, out)

    def lstm_forward(
        self, x: Array, w_hh: Array, h0: Array, c0: Array, h: Array, c: Array, gates: Array, w_ih: Array | None,
        b_ih: Array | None, b_hh: Array | None, fresh: bool,
    ) -> None:  # fmt: skip
        """See ``lstm_forward.cu``."""
        self._forward(_LSTM, (x, w_ih, b_ih, b_hh), w_hh, (h0, c0), fresh, h, c, gates)

    def lstm_backward(
        self, c: Array, c0: Array, gates: Array, w_hh: Array, gy: Array | None, grad_h_n: Array | None,
        grad_c_n: Array | None, ga: Array | None, gh0: Array, gc0: Array, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """See ``lstm.cu``."""
        last, initial = (grad_h_n, grad_c_n), (gh0, gc0)
        self._back_propagate(_LSTM, Saved((c, c0, gates), w_hh, gy), last, ga, initial, chunks, sums)

    def lstm_maps(self, c: Array, c0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """The first phase of reduce-then-scan, of all chunks."""
        self._reduce_all(_LSTM, Saved((c, c0, gates), w_hh, gy), maps)

    def lstm_jacobians(self, c: Array, c0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """See ``lstm.cu``."""
        self._jacobians(_LSTM, (c, c0, gates), w_hh, out)

    # ---- what every cell shares --------------------------------------------------------------------------------------

    def _forward(
        self, cell: Cell, inputs: tuple[Array | None, ...], w_hh: Array, initial: tuple[Array, ...], fresh: bool,
        *written: Array,
    ) -> None:  # fmt: skip
        """Launch a kernel of ``cuda/*_forward.cu``; `inputs` are x, w_ih (or None), b_ih and b_hh."""
        steps, batch, hidden = written[0].shape
        features = 0 if inputs[1] is None else inputs[1].shape[1]
        inputs_held = room_for(features) if features else 0
        form = self._unit_form(w_hh, 1, cell.gates, _INPUT_STEPS * MOST_INPUTS if features else 0, inputs_held)
        defines, block = form.defines | cell.defines, (form.threads,)
        if features:
            defines |= {"INPUTS": MOST_INPUTS if form.streamed else inputs_held}
        weights = self.xp.ascontiguousarray(w_hh.T) if form.streamed else w_hh
        sizes = (np.int64(steps), np.int32(batch), np.int32(hidden))
        args = (*inputs, np.int32(features), weights, *initial, np.int32(fresh), *written, *sizes)
        name = f"{cell.name}_forward"
        self._launch(f"{name}.cu", name, defines, batch, block, args, form.shared)

    def _jacobians(self, cell: Cell, saved: tuple[Array, ...], w_hh: Array, out: Array) -> None:
        steps, batch, hidden = saved[0].shape
        args = (*saved, w_hh, out, np.int32(batch), np.int32(hidden))
        defines, grid = c_types(REAL=out) | {"HIDDEN": 1} | cell.defines, steps * hidden if batch else 0
        self._launch(f"{cell.name}.cu", f"{cell.name}_jacobians", defines, grid, thread_block(batch), args)

    # ---- the way back ------------------------------------------------------------------------------------------------

    def _back_propagate(
        self, cell: Cell, saved: Saved, last: tuple[Array | None, ...], written: Array | None,
        initial: tuple[Array, ...], chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """Run the recursion, or reduce-then-scan: reduce the chunks, combine their maps, run each with its vector.

        `last` and `initial` are the gradients at the arrays of the last state, and of the one before the first step.
        The last chunk knows its incoming gradient and is run in the first phase; the first one's map is not needed.
        """
        steps, batch, hidden = saved.shape
        form, room, to_sum = self._summing(cell, saved, self._unit_form(saved.w_hh, cell.gates, 1), chunks, sums)
        if not room and written is None:
            written = self.xp.empty((steps, batch, cell.columns * hidden), saved.dtype)
        behind = (*to_sum, np.int64(steps), np.int32(batch), np.int32(hidden))
        incoming, outgoing = _apart(last, hidden), _apart(initial, hidden)

        def run_chunks(first: int, end: int, carry: tuple[Any, ...], carry_out: tuple[Any, ...]) -> None:
            """Run chunks with the gradients `carry` (one per chunk) from later steps: ``rnn_backward`` in rnn.cu."""
            args = (*saved.arrays, *saved[1:], *carry, written, *carry_out, *behind, np.int64(first), np.int64(chunks))
            defines, block = form.defines | cell.defines, (form.threads,)
            name = f"{cell.name}_backward"
            self._launch(f"{cell.name}.cu", name, defines, (end - first) * batch, block, args, form.shared)

        if chunks == 1 or batch == 0:
            run_chunks(0, chunks, incoming, outgoing)
        else:
            carry = self.xp.empty((chunks - 1, batch, cell.states * hidden), saved.dtype)
            passed = _packed(carry[-1], hidden)
            if in_warps(Layer(cell.name, batch, hidden, saved.dtype.itemsize)):
                run = (*incoming, written, *passed, *behind)
                maps: tuple[Array | None, ...] = (self._maps_of_warps(cell, saved, chunks, 1, form, run),)
            else:
                run_chunks(chunks - 1, chunks, incoming, passed)
                maps = self._maps_of_blocks(cell, saved, chunks, 1)
            self._combine_chunks(maps, carry)
            run_chunks(0, chunks - 1, _packed(carry, hidden), outgoing)
        if sums is not None and room:
            self._sum_parts(cell, to_sum[2], room, sums)
        elif sums is not None:
            self._multiply_sums(cell, written, sums)

    def _reduce_all(self, cell: Cell, saved: Saved, maps: Array) -> None:
        """Reduce all chunks to `maps` (C, B, n + 1, n), which takes as much scratch as these have values."""
        chunks, batch, _, side = maps.shape
        if batch == 0:
            return
        steps, _, hidden = saved.shape
        if in_warps(Layer(cell.name, batch, hidden, saved.dtype.itemsize)):
            none: tuple[None, ...] = (None,) * cell.states
            sizes = np.int64(steps), np.int32(batch), np.int32(hidden)
            run = (*_apart(none, hidden), None, *_apart(none, hidden), None, None, None, np.int32(0), *sizes)
            form = self._unit_form(saved.w_hh, cell.gates, 1)
            rows = self._maps_of_warps(cell, saved, chunks, 0, form, run).reshape(chunks, batch, side, -1)
            maps[:, :, :side] = rows[..., :side].transpose(0, 1, 3, 2)
            maps[:, :, side] = rows[..., side]
        else:
            matrices, vectors = self._maps_of_blocks(cell, saved, chunks, 0)
            maps[:, :, :side] = matrices
            maps[:, :, side] = 0 if vectors is None else vectors

    def _maps_of_warps(
        self, cell: Cell, saved: Saved, chunks: int, first: int, form: UnitForm, run: tuple[Any, ...]
    ) -> Array:
        """Launch the first phase where a warp holds whole matrices, see ``rnn_reduce`` in rnn.cu; return the maps.

        Of all chunks where `first` is 0. Where it is 1, of all but the first and the last; the last is run with the
        arguments `run`, in warps of the form `form`.
        """
        _, batch, hidden = saved.shape
        layer = Layer(cell.name, batch, hidden, saved.dtype.itemsize)
        count = chunks - 2 * first
        maps = self.xp.empty((count, batch, map_values(layer)), saved.dtype)
        rows = self._rows_a_lane(layer, count)
        groups = ceil_div(batch, WARP // ceil_div(layer.side, rows))
        shared = max(form.shared, _warp_bytes(cell, hidden, rows, layer.itemsize))
        args = (*saved.arrays, *saved[1:], maps, *run, np.int64(first), np.int64(chunks), np.int32(groups))
        self._reduce(cell, form.defines | {"ROWS": rows}, first * batch + count * groups, WARP, args, shared)
        return maps

    def _maps_of_blocks(self, cell: Cell, saved: Saved, chunks: int, first: int) -> tuple[Array, Array | None]:
        """Launch the first phase for any hidden size, see ``rnn_reduce``; return matrices and vectors of the maps."""
        (steps, batch, hidden), xp = saved.shape, self.xp
        side, count = cell.states * hidden, chunks - 2 * first
        matrices = xp.empty((count, batch, side, side), saved.dtype)
        vectors = None if saved.gy is None else xp.empty((count, batch, side), saved.dtype)
        warps, rows, shared = self._block_rows(cell, hidden, saved.dtype.itemsize)
        groups = ceil_div(side, warps * rows)
        sizes = np.int64(steps), np.int32(batch), np.int32(hidden), np.int64(first), np.int64(chunks), np.int32(groups)
        args = (*saved.arrays, xp.ascontiguousarray(saved.w_hh.T), saved.gy, matrices, vectors, *sizes)
        self._reduce(cell, {"ROWS": rows}, count * batch * groups, warps * WARP, args, shared)
        return matrices, vectors

    def _reduce(self, cell: Cell, form: Defines, grid: int, threads: int, args: tuple[Any, ...], shared: int) -> None:
        defines = c_types(REAL=args[0]) | cell.defines | form
        self._launch(f"{cell.name}.cu", f"{cell.name}_reduce", defines, grid, (threads,), args, shared)

    def _combine_chunks(self, maps: tuple[Array | None, ...], carry: Array) -> None:
        """Launch the second phase: fill `carry` (chunks - 1, B, n) downwards from its last entry."""
        waiting, batch, side = carry.shape
        args = (*maps, carry, np.int32(batch), np.int32(side), np.int64(waiting + 1))
        defines, threads, shared = c_types(REAL=carry) | {"HIDDEN": side}, 8 * WARP, 0
        if len(maps) == 2:  # matrices and vectors
            defines, threads = c_types(REAL=carry), min(ceil_div(side, WARP) * WARP, MAX_THREADS)
            shared = 2 * side * carry.dtype.itemsize
        self._launch("scan.cu", "scan_combine", defines, batch if waiting > 1 else 0, (threads,), args, shared)

    # ---- weight gradients --------------------------------------------------------------------------------------------

    def _summing(
        self, cell: Cell, saved: Saved, form: UnitForm, chunks: int, sums: WeightSums | None
    ) -> tuple[UnitForm, int, tuple[Any, ...]]:
        """Return the form of kernels that sum weight gradients, for how many inputs, and their arguments.

        Where nothing is summed, or there is no room, the form as it is, 0, and null pointers.
        """
        hidden, itemsize = saved.shape[2], saved.dtype.itemsize
        features = 0 if sums is None else sums.x.shape[2]
        room = room_for_sums(SUM_REGISTERS, cell.gates, hidden, features, itemsize) if features else 0
        if sums is None or not room:
            return form, 0, (None, None, None, np.int32(0))
        beside = 2 * (form.threads + _padded(room, itemsize)) * itemsize
        form = replace(form, defines=form.defines | {"INPUTS": room}, shared=form.shared + beside)
        values = cell.gates * (hidden + room) + cell.columns
        parts = self.xp.empty((chunks * saved.shape[1], values, hidden), saved.dtype)
        return form, room, (sums.x, sums.before, parts, np.int32(features))

    def _sum_parts(self, cell: Cell, parts: Array, room: int, sums: WeightSums) -> None:
        """Sum over the parts (count, values, H) that the chunks left; see ``sum_weights`` in weight_sums.cu."""
        count, values, hidden = parts.shape
        entries, rows = _SUM_BLOCK
        sizes = (hidden, sums.x.shape[2], room, cell.gates, cell.columns)
        args = (parts, *sums[2:], np.int64(count), *map(np.int32, sizes))
        grid = ceil_div(values * hidden, entries)
        self._launch("weight_sums.cu", "sum_weights", c_types(REAL=parts), grid, (entries, rows), args)

    def _multiply_sums(self, cell: Cell, ga: Any, sums: WeightSums) -> None:
        """Write `sums` from ga by products over all steps."""
        x, before, w_ih, w_hh, *biases = sums
        flat = ga.reshape(-1, ga.shape[-1])
        first = flat.shape[1] - len(w_hh)
        product = matmul(flat[:, : len(w_hh)].T, x.reshape(len(flat), x.shape[2]), None if first else w_ih)
        matmul(flat[:, first:].T, before.reshape(len(flat), before.shape[2]), w_hh)
        self.sum_gates(flat, first, *((product, w_ih) if first else (None, None)), *biases)

    def sum_gates(
        self, ga: Array, first: int, product: Array | None, w_ih: Array | None, b_ih: Array | None, b_hh: Array | None
    ) -> None:
        """One launch, or two where there are many rows: see ``weight_sums.cu``."""
        (count, columns), size = ga.shape, 0 if product is None else product.size
        entries, rows = _SUM_BLOCK
        defines, tiles = c_types(REAL=ga), 0 if b_ih is b_hh is None else ceil_div(columns, entries)
        if tiles and count > _ROWS_AT_ONCE:
            parts = self.xp.empty((ceil_div(count, _PIECE), columns), ga.dtype)
            into = (ga, parts, np.int64(count), np.int32(columns), np.int32(_PIECE))
            self._launch("weight_sums.cu", "sum_pieces", defines, tiles * len(parts), (entries, rows), into)
            ga, count = parts, len(parts)
        sizes = np.int64(count), np.int32(columns), np.int32(first), np.int64(size)
        args = (ga, product, w_ih, b_ih, b_hh, *sizes)
        grid = tiles + ceil_div(size, entries * rows)
        self._launch("weight_sums.cu", "sum_gates", defines, grid, (entries, rows), args)

    # ---- forms -------------------------------------------------------------------------------------------------------

    def _unit_form(self, w_hh: Array, fold: int, outputs: int, beside: int = 0, inputs: int = 0) -> UnitForm:
        """Return the form for a step that makes `outputs` results a unit from `fold` * H values of state.

        `beside` are further values in shared memory, at its beginning; `inputs` those of a step that a unit
        has weights for too.

        Raises
        ------
        OptionError
            The hidden size exceeds the threads of a block.
        """
        hidden, itemsize = w_hh.shape[-1], w_hh.dtype.itemsize
        defines = c_types(REAL=w_hh)
        if hidden <= _SHARING_THREADS:
            split, pieces, kept = lane_share(fold, outputs, hidden, itemsize, inputs)
            threads = ceil_div(hidden * split, WARP) * WARP
            shared = (2 * fold * threads // split + beside) * itemsize + 16 * (pieces - kept) * threads
            if shared <= self.loader.max_shared_memory:
                defines |= {"HIDDEN": hidden} | ({"SPLIT": split} if split > 1 else {})
                return UnitForm(defines | ({"KEPT": kept // outputs} if kept < pieces else {}), threads, shared, False)
        threads = ceil_div(hidden, WARP) * WARP
        if threads > MAX_THREADS:
            most = f"at most {MAX_THREADS}"
            raise OptionError("The hidden size is too large for the device kernels", expected=most, got=hidden)
        return UnitForm(defines, threads, (2 * fold * threads + beside) * itemsize, True)

    def _rows_a_lane(self, layer: Layer, maps: int) -> int:
        return rows_a_lane(layer, maps, Gpu(self.loader.multiprocessors, self.loader.double_cost))

    def _block_rows(self, cell: Cell, hidden: int, itemsize: int) -> tuple[int, int, int]:
        """Return warps a block, rows a warp and bytes of shared memory for the reduction at any hidden size."""
        for warps, rows in ((8, 4), (8, 2), (8, 1), (4, 1), (2, 1), (1, 1)):
            held = (1 + cell.states) * warps * rows * _padded(hidden, itemsize)
            shared = (held + cell.factors * hidden) * itemsize
            if shared <= self.loader.max_shared_memory:
                break
        return warps, rows, shared


def _apart(arrays: tuple[Array | None, ...], hidden: int) -> tuple[Any, ...]:
    """Return the arguments of a kernel for gradients at a state whose arrays lie apart, (B, H) each or None."""
    return arrays if len(arrays) == 1 else (*arrays, np.int32(hidden))


def _packed(gradients: Array, hidden: int) -> tuple[Any, ...]:
    """Return the same for gradients (…, n) in which the arrays of a state lie side by side."""
    side = gradients.shape[-1]
    if side == hidden:
        return (gradients,)
    flat = gradients.reshape(-1)
    return (*(flat[begin:] for begin in range(0, side, hidden)), np.int32(side))


def _padded(count: int, itemsize: int) -> int:
    width = 16 // itemsize
    return ceil_div(count, width) * width


def _warp_bytes(cell: Cell, hidden: int, rows: int, itemsize: int) -> int:
    """Return the shared memory of the warp form of a reduction, laid out as in the cell's source."""
    matrices = WARP // ceil_div(cell.states * hidden, rows)
    values = ceil_div(matrices * hidden, WARP) * WARP  # of all samples at one step, whole warps
    square, exchange = hidden * _padded(hidden, itemsize), rows * hidden * WARP
    if cell.name == "rnn":
        return (square + 2 * values + exchange) * itemsize
    width = 16 // itemsize
    apart = matrices * (square + (0 if square // width % 2 else width))
    if cell.name == "gru":
        return (apart + exchange + 11 * values + 3 * hidden * hidden) * itemsize
    return (apart + square + exchange + 16 * values + 3 * hidden * hidden) * itemsize


# Linear recurrences and selective scans (``cuda/recurrence.cu``, ``cuda/selective_scan.cu``).

_STATES, _SCANNING = 8, 128
"""States in a thread's registers, and threads of a block, as in the source."""


_LEAST_STEPS, _ENOUGH_CHAINS = 64, 2**16
"""Steps that a chunk has at least, and chains that keep a GPU's memory busy. The same on all devices."""


def linear_chunks(steps: int, chains: int) -> int:
    """Return into how many chunks of steps a linear recurrence is cut; 1: not.

    More than the root of 2 T of them would take longer to combine than they take to run. With fewer than four, reading
    twice costs what is won.
    """
    chunks = min(steps // _LEAST_STEPS, _ENOUGH_CHAINS // max(chains, 1), isqrt(2 * steps))
    return chunks if chunks >= 4 else 1


class LinearRecurrenceKernels(Launcher):
    """Device side of linear recurrences in `sparsebp.kernels.spec.Kernels`: a thread a unit of a sample, and chunk."""

    def linear_recurrence(
        self, a: Array, b: Array, h0: Array, lengths: Array | None, reset: Array | None, reverse: bool, h: Array
    ) -> None:
        """Every thread runs down the steps; those of chunks know the states before them."""
        a, b, h0, out = self._packed(a, b, h0, written=(h,))
        sizes, chunks, defines = self._sizes(a, out, reset, h, reverse)
        count = sizes[8] * chunks
        carries = self._carries("linear", (a, b), h0, lengths, h0, sizes, chunks, defines, back=False)
        self._chains("linear_recurrence", defines, count, (a, b, h0, lengths, out, carries, *sizes))
        _unpack(out, h)

    def linear_recurrence_grad(
        self, a: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, reset: Array | None, reverse: bool,
        ga: Array, gb: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """The same, from the last step to the first."""
        summed, numbers = len(ga) != len(h), h
        a, h, gh, h0, *out = self._packed(a, h, gh, h0, written=(ga, gb, gh0))
        to_a, to_b, to_h0 = out
        sizes, chunks, defines = self._sizes(a, h, reset, numbers, reverse)
        carries = self._carries("linear", (a, gh), None, lengths, h0, sizes, chunks, defines, back=True)
        of_a = self.xp.empty((chunks, *to_a.shape[1:]), to_a.dtype) if summed and chunks > 1 else to_a
        args = (a, h, gh, h0, lengths, of_a, to_b, to_h0, carries, *sizes, np.int32(summed))
        self._chains("linear_recurrence_grad", defines, sizes[8] * chunks, args)
        if of_a is not to_a:
            to_a[0] = of_a.sum(axis=0)
        for found, target in zip(out, (ga, gb, gh0), strict=True):
            _unpack(found, target)

    def _packed(self, *given: Array, written: tuple[Array, ...]) -> list[Array]:
        """Return C-contiguous arrays of reals, a complex number two of them, with the steps first: lanes are units."""
        arrays = [*map(self.xp.ascontiguousarray, given)]
        arrays += [each if each.flags.c_contiguous else self.xp.empty(each.shape, each.dtype) for each in written]
        return [each.view(np.dtype(f"f{each.itemsize // 2}")) if each.dtype.kind == "c" else each for each in arrays]

    def _sizes(
        self, a: Array, h: Array, reset: Array | None, numbers: Array, reverse: bool
    ) -> tuple[tuple[Any, ...], int, Defines]:
        """Return the numbers that all launches of a recurrence end with, the chunks, and the defines."""
        steps, batch, units = numbers.shape
        chunks, pairs = linear_chunks(steps, batch * units), int(numbers.dtype.kind == "c")
        of_a, of_reset = _neighbours(len(a), a.shape[1], a.shape[2] // (1 + pairs)), (0, 0, 0)
        if reset is not None:
            reset, of_reset = self.xp.ascontiguousarray(reset).view(np.uint8), _neighbours(*reset.shape)
        sizes = map(np.int64, (*of_a, *of_reset, steps, batch * units, units))
        return (reset, *sizes, np.int32(reverse), np.int64(chunks)), chunks, c_types(REAL=h) | {"PAIRS": pairs}

    def min_gru_forward(
        self, x: Array, h0: Array, lengths: Array | None, nonlinearity: str, reverse: bool, h: Array
    ) -> None:
        """As `linear_recurrence`; factors are made of x as it is read."""
        sizes, chunks, defines = self._gated_sizes(x, h, nonlinearity, reverse)
        carries = self._carries("min_gru", (x, None), h0, lengths, h0, sizes, chunks, defines, back=False)
        self._chains("min_gru_forward", defines, h0.size * chunks, (x, h0, lengths, h, carries, *sizes))

    def min_gru_backward(
        self, x: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, nonlinearity: str, reverse: bool,
        gx: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """The same, from the last step to the first."""
        sizes, chunks, defines = self._gated_sizes(x, h, nonlinearity, reverse)
        carries = self._carries("min_gru", (x, gh), None, lengths, h0, sizes, chunks, defines, back=True)
        args = (x, h, gh, h0, lengths, gx, gh0, carries, *sizes)
        self._chains("min_gru_backward", defines, h0.size * chunks, args)

    def _gated_sizes(
        self, x: Array, h: Array, nonlinearity: str, reverse: bool
    ) -> tuple[tuple[Any, ...], int, Defines]:  # fmt: skip
        """Return what `_sizes` does, of a minGRU."""
        steps, batch, units = h.shape
        chunks = linear_chunks(steps, batch * units)
        numbers = (*map(np.int64, (steps, batch * units, units)), np.int32(reverse), np.int64(chunks))
        numbers = (*numbers, np.int32(CANDIDATES.index(nonlinearity)), np.int32(parts_of(x, h)))
        return numbers, chunks, c_types(REAL=h) | {"PAIRS": 0}

    def _carries(
        self, kind: str, read: tuple[Array | None, ...], start: Array | None, lengths: Array | None, like: Array,
        sizes: tuple[Any, ...], chunks: int, defines: Defines, *, back: bool,
    ) -> Array | None:  # fmt: skip
        """Launch the first two phases; return the states between chunks, (chunks - 1, B, W)."""
        if chunks == 1:
            return None
        products, carries = self.xp.empty((2, chunks - 1, *like.shape), like.dtype)
        ends, count = (*sizes, np.int32(back)), like.size // (1 + int(defines["PAIRS"]))
        self._chains(f"{kind}_reduce", defines, count * (chunks - 1), (*read, lengths, products, carries, *ends))
        self._chains(f"{kind}_combine", defines, count, (*read, start, lengths, products, carries, *ends))
        return carries

    def _chains(self, name: str, defines: Defines, count: int, args: tuple[Any, ...]) -> None:
        self._launch("recurrence.cu", name, defines, ceil_div(int(count), BLOCK), (BLOCK,), args)


def _neighbours(steps: int, batch: int, units: int) -> tuple[int, int, int]:
    """Return how far neighbours lie apart in steps, samples and units; 0 along an axis of one, which all share."""
    return batch * units if steps > 1 else 0, units if batch > 1 else 0, int(units > 1)


def _unpack(found: Array, target: Array) -> None:
    """Write what a kernel left in an array of another layout."""
    if not target.flags.c_contiguous:
        target[...] = found.view(target.dtype)


class SelectiveScanKernels(Launcher):
    """Device side of the selective scan in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def selective_scan(
        self, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, h0: Array, reset: Array | None, y: Array,
        states: Array,
    ) -> None:  # fmt: skip
        """Some lanes a channel of a sample run down the steps, each with `_STATES` states."""
        self._scan("selective_scan", (x, dt, a, b, c, d, h0), reset, (y, states), x, len(a))

    def selective_scan_grad(
        self, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, gy: Array, gh: Array, states: Array,
        reset: Array | None, gx: Array, gdt: Array, ga: Array, gb: Array, gc: Array, gd: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """The same back; each warp leaves its sums at b and c, which are added up here."""
        _, batch, channels = x.shape
        threads = ceil_div(channels, _SCANNING // _lanes(len(a))) * _SCANNING
        of_b, of_c = (self.xp.empty((threads // WARP, *b.shape), b.dtype) for _ in range(2))
        befores = self.xp.empty((CHUNK, _STATES, batch * threads), x.dtype)
        given, written = (x, dt, a, b, c, d, gy, gh, states), (gx, gdt, ga, of_b, of_c, gd, gh0, befores)
        self._scan("selective_scan_grad", given, reset, written, x, len(a))
        gb[...], gc[...] = of_b.sum(axis=0), of_c.sum(axis=0)

    def _scan(
        self, name: str, given: tuple[Array, ...], reset: Array | None, written: tuple[Array, ...], x: Array, order: int
    ) -> None:
        steps, batch, channels = x.shape
        lanes = _lanes(order)
        blocks = ceil_div(channels, _SCANNING // lanes)
        flags = None if reset is None else reset.view(np.uint8)
        sizes = map(np.int64, (steps, batch, channels, order, blocks))
        args = (*given, flags, *written, *sizes, np.int32(lanes))
        self._launch("selective_scan.cu", name, c_types(REAL=x), batch * blocks, (_SCANNING,), args)


def _lanes(order: int) -> int:
    """Return how many lanes share the states of a channel; a power of two."""
    return 1 if order <= _STATES else 2 if order <= 2 * _STATES else 4
