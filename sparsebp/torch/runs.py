"""One run of a recurrent cell, a layer in one direction, over packed rows: arrays in, arrays out, no tensors.

The state of a cell is a tuple: (h,), of an LSTM (h, c). Before the first step and behind the last one it has a row a
sample (B, H), on the way a row a step and sample (N, H).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend.memory import empty
from sparsebp.core.types import Array
from sparsebp.nn.recurrent.back.backward import BackwardOptions, choose
from sparsebp.nn.recurrent.cell_math import CellMath
from sparsebp.nn.recurrent.gru import GRUMath
from sparsebp.nn.recurrent.lstm_math import LSTMMath
from sparsebp.nn.recurrent.rnn import RNNMath
from sparsebp.nn.recurrent.tape import State, Tape, Weights
from sparsebp.torch.packing import Stretch

CELLS: dict[str, CellMath] = {
    "rnn_tanh": RNNMath("tanh"), "rnn_relu": RNNMath("relu"), "gru": GRUMath(), "lstm": LSTMMath(),
}  # fmt: skip
KEPT = {"rnn_tanh": 0, "rnn_relu": 0, "gru": 4, "lstm": 4}
"""Columns of the gates that a forward keeps, in multiples of the hidden size."""

_AUTO = BackwardOptions()
LONG = 64
"""Steps from which one of several stretches may be worth being cut into chunks."""


class Forward(NamedTuple):
    """States and gates (N, columns) of all rows; each sample's last state."""

    states: State
    last: State
    gates: Array | None


class Backward(NamedTuple):
    """Gradients at x (N, I), at the state before the first step, and at the weights; None: not asked for."""

    x: Array | None
    start: State
    weights: Weights | None


class PackedTape(Tape):
    """A tape whose arrays are views of those that hold the rows of all stretches, the state before them elsewhere."""

    def __init__(self, x: Array, start: State, states: State, gates: Array | None, h_prev: Array = None) -> None:
        super().__init__(x, states, gates)
        self._start, self._h_prev = start, h_prev

    @property
    def h0(self) -> Array:
        """The state before the first step (B, H)."""
        return self._start[0]

    @property
    def h(self) -> Array:
        """The states (T, B, H)."""
        return self.states[0]

    @property
    def h_prev(self) -> Array:
        """The state before each step (T, B, H)."""
        return self._h_prev

    @property
    def c0(self) -> Array:
        """An LSTM's cells before the first step (B, H)."""
        return self._start[1]

    @property
    def c(self) -> Array:
        """An LSTM's cells (T, B, H)."""
        return self.states[1]


def forward(kind: str, x: Array, cuts: Sequence[Stretch], start: State, weights: Weights) -> Forward:
    """Run over x (N, I), whose rows are cut into stretches, in their order."""
    cell, xp, hidden = CELLS[kind], backend.namespace(x), weights.weight_hh.shape[1]
    k = kernels.get(xp)
    gates = empty(xp, (len(x), KEPT[kind] * hidden), x.dtype) if KEPT[kind] else None
    states = tuple(empty(xp, (len(x), hidden), x.dtype) for _ in start)
    done = Forward(states, tuple(xp.array(part) for part in start), gates)
    if not cuts:
        return done
    projected, *projection = cell.inputs(k, x[:, None], weights)
    inputs = xp.reshape(projected, (len(x), -1))
    if cell.fits(x, weights, hidden, start):
        k = k.unchecked
        if len(cuts) > 1 and (compiled := kernels.on_host().stretches).takes(hidden):
            compiled.forward(
                kind, cuts, inputs, weights.weight_hh, weights.bias_hh, projection, states, gates, done.last
            )
            return done
    for number, cut in enumerate(cuts):
        tape = _tape(x, cuts, number, start, states, gates)
        cell.run(k, _steps(inputs, cut), weights, tape, *projection)
        for part, rows in zip(done.last, states, strict=True):
            part[: cut.batch] = rows[cut.rows.stop - cut.batch : cut.rows.stop]
    return done


def infer(kind: str, x: Array, cuts: Sequence[Stretch], start: State, weights: Weights) -> tuple[Array, State]:
    """Return h (N, H) and each sample's last state, as `forward` does, and keep nothing; all on the host."""
    cell, last = CELLS[kind], tuple(part.copy() for part in start)
    if len(cuts) == 1:
        states, ends = cell.infer(_steps(x, cuts[0]), last, weights)
        return states.reshape(len(x), -1), tuple(end.copy() for end in ends)
    h = empty(np, (len(x), weights.weight_hh.shape[1]), x.dtype)
    for cut in cuts:
        states, ends = cell.infer(_steps(x, cut), [part[: cut.batch] for part in last], weights)
        _steps(h, cut)[...] = states
        for part, end in zip(last, ends, strict=True):
            part[: cut.batch] = end
    return h, last


def backward(
    kind: str, x: Array, cuts: Sequence[Stretch], start: State, weights: Weights, states: State, gates: Array | None,
    gy: Array | None, at_last: tuple[Array | None, ...], for_input: bool, for_weights: bool,
) -> Backward:  # fmt: skip
    """Take the gradients at the states h (N, H) and at the last state, any of them None, back through `forward`."""
    cell, xp, hidden = CELLS[kind], backend.namespace(x), weights.weight_hh.shape[1]
    if for_weights and not for_input and len(cuts) == 1:
        summed = _summed_backward(cell, x, cuts, start, weights, states, gates, gy, at_last)
        if summed is not None:
            return summed
    k, compiled = kernels.get(xp), None
    if (
        cell.fits(x, weights, hidden, start)
        and all(g is None or g.shape == part.shape for g, part in zip(at_last, start, strict=True))
        and _are_rows(x, hidden, *states, gy)
        and (not KEPT[kind] or _are_rows(x, KEPT[kind] * hidden, gates))
    ):
        k, compiled = k.unchecked, kernels.on_host().stretches
    ga = empty(xp, (len(x), cell.columns * hidden), x.dtype)
    arriving = tuple(
        xp.zeros_like(part) if g is None else xp.array(g) for g, part in zip(at_last, start, strict=True)
    )  # fmt: skip
    chunks = [_chunks(cell, cut, hidden, len(cuts), x.dtype, xp) for cut in cuts]
    if len(cuts) > 1 and max(chunks) == 1 and compiled is not None and compiled.takes(hidden):
        compiled.backward(kind, cuts, weights.weight_hh, start, states, gates, gy, ga, arriving)
    else:
        for number in reversed(range(len(cuts))):
            cut, tape = cuts[number], _tape(x, cuts, number, start, states, gates)
            here = tuple(part[: cut.batch] for part in arriving)
            out = tuple(xp.empty_like(part) for part in here)
            gy_here = None if gy is None else _steps(gy, cut)
            cell.run_back(k, tape, weights.weight_hh, gy_here, here, chunks[number], _steps(ga, cut), out)
            for part, found in zip(here, out, strict=True):
                part[...] = found
    ga = ga[:, None]
    at_input = cell.input_grad(ga, weights)[:, 0] if for_input else None
    at_weights = None
    if for_weights:
        before = empty(xp, states[0].shape, x.dtype)
        _write_before(cuts, start[0], states[0], before)
        whole = PackedTape(x[:, None], start, (states[0][:, None],), gates, before[:, None])
        at_weights = cell.weight_grad(ga, whole, weights)
    return Backward(at_input, arriving, at_weights)


def _summed_backward(
    cell: CellMath, x: Array, cuts: Sequence[Stretch], start: State, weights: Weights, states: State,
    gates: Array | None, gy: Array | None, at_last: tuple[Array | None, ...],
) -> Backward | None:  # fmt: skip
    """Return the gradients of one stretch whose kernel sums those of the weights as it goes; None if it has none."""
    tape = _tape(x, cuts, 0, start, states, gates)
    chunks = choose(_AUTO, cell, tape.h.shape, x.dtype, backend.namespace(x)).chunks
    if not cell.sums_inside(tape, chunks):
        return None
    before = empty(backend.namespace(x), states[0].shape, x.dtype)
    _write_before(cuts, start[0], states[0], before)
    whole = PackedTape(tape.x, start, tape.states, tape.gates, _steps(before, cuts[0]))
    gy_here = None if gy is None else _steps(gy, cuts[0])
    found = cell.summed_backward(whole, weights, gy_here, at_last, chunks)
    return Backward(None, found.initial, found.weights)


def _are_rows(x: Array, columns: int, *arrays: Array | None) -> bool:
    """Say whether arrays (N, columns) belong to the rows of x."""
    wanted = len(x), columns
    return all(array is None or (array.shape == wanted and array.dtype == x.dtype) for array in arrays)


def _tape(
    x: Array, cuts: Sequence[Stretch], number: int, start: State, states: State, gates: Array | None
) -> PackedTape:
    cut, before = cuts[number], tuple(_before(cuts, number, *both) for both in zip(start, states, strict=True))
    here = tuple([_steps(rows, cut) for rows in states])
    return PackedTape(_steps(x, cut), before, here, None if gates is None else _steps(gates, cut))


def _before(cuts: Sequence[Stretch], number: int, start: Array, states: Array) -> Array:
    """Return the states before the first step of a stretch: rows of `start`, or of the last step of the one before."""
    batch = cuts[number].batch
    if number == 0:
        return start[:batch]
    first = cuts[number].first - cuts[number - 1].batch
    return states[first : first + batch]


def _write_before(cuts: Sequence[Stretch], start: Array, states: Array, before: Array) -> None:
    """Write the state before each row's step (N, H)."""
    for number, cut in enumerate(cuts):
        second = cut.first + cut.batch
        before[cut.first : second] = _before(cuts, number, start, states)
        before[second : cut.rows.stop] = states[cut.first : cut.rows.stop - cut.batch]


def _chunks(cell: CellMath, cut: Stretch, hidden: int, stretches: int, dtype: np.dtype, xp: ModuleType) -> int:
    """Return in how many chunks a stretch goes back."""
    if stretches > 1 and cut.steps < LONG:
        return 1
    return int(choose(_AUTO, cell, (cut.steps, cut.batch, hidden), dtype, xp).chunks)


def _steps(rows: Array, cut: Stretch) -> Array:
    """Return the rows of a stretch as (steps, samples, features): a view."""
    first, steps, batch = cut
    return rows[first : first + steps * batch].reshape(steps, batch, rows.shape[1])
