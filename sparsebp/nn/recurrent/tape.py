"""What runs of a cell over time are made of: weights, what forward kept, and the gradients of the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.recurrent.lengths import Lengths

State = tuple[Array, ...]
"""One array (B, width) for each name of `CellMath.states`."""
GivenState = Sequence[Array | None]
"""The same; None stands for zeros."""


@dataclass
class Tape:
    """One run of a cell over time, in the order in which it was processed.

    Attributes
    ----------
    x
        Inputs (T, B, input_size).
    states
        For each array of the state ``(T + 1, B, H)``: the initial one, then that after every step. `h0`, `h` and
        `h_prev` are views of the first, so the weight gradient reads the previous states without a copy.
    gates
        ``(T, B, 4H)`` for a GRU (r, z, n, M) and an LSTM (i, f, g, o), None for an RNN.
    core
        The run of the recursion itself, where the cell wraps another one; see `ProjectedLSTMMath`.
    """

    x: Array
    states: tuple[Array, ...]
    gates: Array | None = None
    core: Tape | None = None

    @property
    def h0(self) -> Array:
        """The initial h (B, H)."""
        return self.states[0][0]

    @property
    def h(self) -> Array:
        """h after each step (T, B, H)."""
        return self.states[0][1:]

    @property
    def h_prev(self) -> Array:
        """h before each step (T, B, H)."""
        return self.states[0][:-1]

    def ends(self, lengths: Lengths | None) -> State:
        """Return the last state, or that after each sample's last valid step."""
        if lengths is None:
            return tuple(states[-1] for states in self.states)
        return tuple(states[lengths.values, lengths.samples] for states in self.states)

    @property
    def c0(self) -> Array:
        """An LSTM's initial c (B, H)."""
        return self.states[1][0]

    @property
    def c(self) -> Array:
        """An LSTM's c after each step (T, B, H)."""
        return self.states[1][1:]

    def arrays(self) -> list[Array]:
        """Return what is held: inputs, states and gates."""
        return [self.x, *self.states, *(() if self.gates is None else (self.gates,))]

    @property
    def last(self) -> State:
        """The state after the last step."""
        return tuple(array[-1] for array in self.states)


@dataclass
class RecurrentSaved:
    """What `Recurrent.forward` keeps.

    Attributes
    ----------
    last
        The last state, its arrays one by one: h_n, and an LSTM's c_n.
    backward_choice
        The `scan.cost.Choice` of the backward algorithm; its ``reason`` says why. None where nothing was kept.
    lengths
        The lengths, or None.
    tapes
        The runs, one a layer and direction.
    masks
        Dropout masks by layer: what its input was multiplied with, or None.
    """

    last: State
    backward_choice: Any
    lengths: Lengths | None
    tapes: list[Tape]
    masks: list[Array | None]

    @property
    def h_n(self) -> Array:
        """Last hidden states (num_layers · directions, B, H); with lengths, each sample's last valid one."""
        return self.last[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, B, H), with the size of a direction's output for H."""
        steps, batch, hidden = self.tapes[0].h.shape
        return steps, batch, hidden


class Weights(NamedTuple):
    """The parameters of one run, by torch.nn's names: (gH, I), (gH, H), (gH,) each or None; (P, H) of a projection."""

    weight_ih: Array
    weight_hh: Array
    bias_ih: Array | None
    bias_hh: Array | None
    weight_hr: Array | None = None

    @classmethod
    def of(cls, params: dict[str, Array], suffix: str = "") -> Weights:
        """Take the parameters whose names end in `suffix`."""
        w_ih, w_hh, b_ih, b_hh, w_hr = _names(suffix)
        return cls(params[w_ih], params[w_hh], params.get(b_ih), params.get(b_hh), params.get(w_hr))

    def named(self, suffix: str = "") -> dict[str, Array]:
        """Return the parameters under their names and `suffix`; what is None is left out."""
        return {name: array for name, array in zip(_names(suffix), self, strict=True) if array is not None}


@lru_cache(maxsize=64)  # asked for some times a step
def _names(suffix: str) -> tuple[str, ...]:
    return tuple(name + suffix for name in Weights._fields)


class RunGradients(NamedTuple):
    """The gradients that the way back through one run leaves.

    At what weights feed, see `CellMath`; at the initial state; and, where a projection's weights need it, at every h.
    """

    ga: Array
    initial: State
    at_h: Array | None = None

    @property
    def gh0(self) -> Array:
        """The gradient at the initial h."""
        return self.initial[0]


class SummedGradients(NamedTuple):
    """The gradients of a run whose way back summed those of the weights as it went; ga only where it was asked for."""

    weights: Weights
    initial: State
    ga: Array | None = None


class StateGradients(Gradients):
    """`Gradients` of a recurrent layer or cell, those with respect to the state before the first step among them."""

    __slots__ = ("_state",)

    def __init__(self, *args: Any, state: Callable[[], State]) -> None:
        super().__init__(*args)
        self._state = state

    @property
    def h0(self) -> Array:
        """The gradient with respect to h0, of its shape; computed once."""
        return self._initial[0]

    @property
    def _initial(self) -> State:
        return self._once("state", self._state)


def set_initial(tape: Tape, initial: GivenState | None) -> None:
    """Write the state before the first step into the tape."""
    for array, first in zip(tape.states, initial or (None,) * len(tape.states), strict=True):
        array[0] = 0 if first is None else first


def joined(arrays: GivenState) -> Array:
    """Return arrays side by side along the last axis; a single one as it is."""
    return arrays[0] if len(arrays) == 1 else backend.namespace(arrays[0]).concatenate(arrays, axis=-1)


def split(array: Array, parts: int) -> tuple[Array, ...]:
    """Return the last axis in so many equal parts: views."""
    size = array.shape[-1] // parts
    return tuple(array[..., part * size : (part + 1) * size] for part in range(parts))
