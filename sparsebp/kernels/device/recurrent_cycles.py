"""Cycles that the recurrent backward takes on a GPU: rows a lane and numbers of chunks are chosen by them, here alone.

The launchers (`sparsebp.kernels.device.recurrent`) and the planner (`sparsebp.scan.planning.recurrent`) ask the same
functions. Figures are counted, not measured: from the machine code for compute capability 9.0, every instruction with
the latencies published for it and global loads answered by the L2 cache. A multiprocessor starts an instruction a cycle
on each of four schedulers and reads one word a lane and cycle from shared memory; a warp alone waits for its own
results. Which of the three a step waits for depends on how many warps share the multiprocessor.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import NamedTuple

from sparsebp.kernels.device.base import MAX_THREADS, WARP, ceil_div

SCHEDULERS = 4
"""Of a multiprocessor; each can start an instruction a cycle."""
WEIGHT_REGISTERS = 144
"""32-bit registers of a thread that may hold weights; of 255, the rest is for sums and values loaded ahead."""
_ALL_WEIGHT_REGISTERS = 176
"""The same with the weights of the input."""
_GROUP_AT_LEAST = 4
"""Lanes that share a chunk's matrix, unless it has fewer rows; so a warp has at most eight matrices."""
ROW_REGISTERS = {"rnn": 128, "gru": 80, "lstm": 66}
"""32-bit registers of a lane that may hold rows of a chunk's matrix: a GRU's step loads more beside them. Of an LSTM's
they are those of the columns of h: the columns of c take as many, and so does what the next ones wait in."""
_REDUCING, _RUNNING = 8, 16
"""Warps of a multiprocessor that its registers are enough for, in the first phase and in the others."""
_L2 = 350
"""Cycles until a value that is loaded a step ahead is there."""


class Gpu(NamedTuple):
    """What the choice depends on: multiprocessors, and cycles of a multiply-add in float64 over those in float32."""

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


class Phases(NamedTuple):
    """Cycles of the three phases of reduce-then-scan."""

    reduce: float
    combine: float
    apply: float


class _Step(NamedTuple):
    """Cycles and instructions of a step: some, and so many more a hidden unit."""

    cycles: float
    cycles_a_unit: float
    issued: float
    issued_a_unit: float


_RECURSION = {
    ("rnn", 4): _Step(57, 1.4, 17, 1.25),
    ("rnn", 8): _Step(65, 2.9, 17, 1.5),
    ("gru", 4): _Step(110, 3.8, 53, 3.6),
    ("gru", 8): _Step(130, 7.9, 53, 4.3),
    ("lstm", 4): _Step(115, 6.0, 67, 5.2),
    ("lstm", 8): _Step(389, 16.9, 122, 6.5),
}
"""The recursion with weights in registers: ``rnn_backward``, ``gru_backward``, ``lstm_backward``. At H = 20 84, 137,
190, 288 and 236 cycles; the last works out a tanh, which makes it 659 at H = 16 in float64."""
_COMBINE = {4: (72, 2.5), 8: (92, 4.0)}
"""A chunk of ``scan_combine``: cycles, and so many more a row, for every row of a lane. At 20 rows 118 and 185, at an
LSTM's 40 280."""
_REDUCE_WAITS = {"rnn": (100, 1.06), "gru": (120, 1.5), "lstm": (210, 1.24)}
"""A step of ``rnn_reduce``, ``gru_reduce`` and ``lstm_reduce`` by a warp alone: cycles, and cycles an instruction.
At H = 20 in float32 with 1, 2 and 5 rows a lane 660, 1200, 2660 and 1620, 2570, 5280 cycles; with 2 and 3 of an LSTM's
40 rows 3020 and 4380."""
_BEGIN = Phases(1500, 700, 800)
"""Cycles until the first step of a phase: the weights and the first values from memory."""


def in_registers(weights: int, hidden: int, itemsize: int, of_input: int = 0) -> bool:
    """Return whether a thread keeps its unit's `weights` in registers, and those `of_input` with them."""
    words = itemsize // 4
    held = weights * words <= WEIGHT_REGISTERS and (weights + of_input) * words <= _ALL_WEIGHT_REGISTERS
    return held and hidden <= 4 * WARP


def in_warps(layer: Layer) -> bool:
    """Return whether the first phase is the form in which a warp holds whole matrices."""
    return layer.hidden <= WARP and in_registers(layer.fold * layer.hidden, layer.hidden, layer.itemsize)


def map_values(layer: Layer) -> int:
    """Return the values that the affine map of a chunk and sample takes; see ``maps.cuh``."""
    side = layer.side
    if not in_warps(layer):
        return side * (side + 1)
    width = 16 // layer.itemsize
    pieces = ceil_div(side + 1, width)
    return side * (pieces + 1 - pieces % 2) * width


def recursion(layer: Layer, steps: int, gpu: Gpu) -> float:
    """Return the cycles of the sequential kernel."""
    return _BEGIN.apply + steps * _step(layer, layer.batch, gpu)


def chunked(layer: Layer, steps: int, chunks: int, gpu: Gpu) -> Phases:
    """Return the cycles of reduce-then-scan with at least three chunks."""
    length, maps = ceil_div(steps, chunks), chunks - 2
    last = _BEGIN.apply + length * _step(layer, layer.batch, gpu)
    if in_warps(layer):
        rows = rows_a_lane(layer, maps, gpu)
        reduce = _begun(_BEGIN.reduce + length * _reduce_step(layer, rows, maps, gpu), last)
        base, a_unit = _COMBINE[layer.itemsize]
        a_chunk = base + a_unit * layer.side * ceil_div(layer.side, WARP)
    else:
        reduce = last + _BEGIN.reduce + length * _block_step(layer, maps, gpu)
        a_chunk = (
            40.0 * layer.side * ceil_div(layer.side, MAX_THREADS)
        )  # a column of the map in batches of eight loads, each as long as L2 takes
    combine = _BEGIN.combine + maps * a_chunk * ceil_div(layer.batch, 4 * gpu.multiprocessors)
    return Phases(reduce, combine, _BEGIN.apply + length * _step(layer, (chunks - 1) * layer.batch, gpu))


def _begun(reduce: float, last: float) -> float:
    """Return the time of the first phase: the last chunk's recursion runs beside the maps, in warps of its own."""
    return max(reduce, last)


def chunk_counts(layer: Layer, steps: int, gpu: Gpu) -> list[int]:
    """Return the numbers of chunks worth a look, three at least: each the smallest with its length of chunks.

    They grow by a tenth, up to as many as find room at the same time, and those which just fill the multiprocessors are
    among them.
    """
    if steps < 3:
        return [steps]
    most = min(steps, 3 + _REDUCING * gpu.multiprocessors)
    tried = {3, most}
    count = 3.0
    while count < most:
        tried.add(int(count))
        count *= 1.1
    if in_warps(layer):
        for rows in _rows(layer):
            groups = ceil_div(layer.batch, WARP // ceil_div(layer.side, rows))
            for warps in (1, 2, 3, SCHEDULERS, _REDUCING):
                tried.add(2 + (warps * gpu.multiprocessors - layer.batch) // groups)
    lengths = {ceil_div(steps, c) for c in tried if 3 <= c <= most}
    return sorted({max(3, ceil_div(steps, length)) for length in lengths})


def rows_a_lane(layer: Layer, maps: int, gpu: Gpu) -> int:
    """Return how many rows of a chunk's matrix a lane holds, where so many maps a sample are reduced in warps."""
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


def _block_step(layer: Layer, maps: int, gpu: Gpu) -> float:
    """Return the cycles of a step of the first phase in blocks of eight warps with four rows each, of all maps."""
    _, batch, hidden, _ = layer
    terms, words, pipe = layer.fold, layer.words, 1.0 if layer.itemsize == 4 else gpu.double
    columns, warps, rows = ceil_div(hidden, WARP), 8, 4
    blocks = ceil_div(maps * batch * ceil_div(layer.side, warps * rows), gpu.multiprocessors)
    shared = warps * columns * hidden * (rows + terms) * words
    issued = warps / SCHEDULERS * columns * hidden * terms * (rows * pipe + 1 + rows / 4 * words)
    alone = 2 * _L2 + columns * hidden / 4 * 60
    return max(ceil_div(blocks, 4) * alone, blocks * shared, blocks * issued)


def _step(layer: Layer, vectors: int, gpu: Gpu) -> float:
    """Return the cycles of a step of the recursion, of so many vectors at once: a block each."""
    cell, _, hidden, itemsize = layer
    fold, words, pipe = layer.fold, layer.words, 1.0 if itemsize == 4 else gpu.double
    warps = ceil_div(min(hidden, MAX_THREADS), WARP)
    if in_registers(fold * hidden, hidden, itemsize):
        step = _RECURSION[cell, itemsize]
        alone = step.cycles + step.cycles_a_unit * hidden
        issued = max(step.issued + step.issued_a_unit * hidden, pipe * fold * hidden)
        shared = float(fold * hidden * words * warps)
    else:  # weights from shared memory, one multiply-add after the other; or from L2, at half of its rate
        alone, issued = 60 + 8.0 * fold * hidden, (2 + pipe) * fold * hidden
        shared = 2.0 * fold * hidden * words * warps
        if fold * hidden * hidden * itemsize > 200 * 1024:
            shared *= 2
    blocks = ceil_div(vectors, gpu.multiprocessors)
    waves = math.ceil(blocks * warps / max(_RUNNING, warps))
    return max(waves * alone, ceil_div(blocks * warps, SCHEDULERS) * issued, blocks * shared)
