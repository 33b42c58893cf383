"""A run of a cell over time: its state, weights, saved arrays and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError
from sparsebp.nn.recurrent.lengths import Lengths

State = tuple[Array, ...]
"""One array (B, width) for each name of `CellMath.states`."""
GivenState = Sequence[Array | None]
"""The same; None stands for zeros."""


class Tape:
    """One run of a cell over time, in the order in which it was processed."""

    # x: Inputs (T, B, input_size)
    # states: For each array of the state `(T + 1, B, H)`: the initial one, then that after every step. Views of the
    # first are `h0` (B, H), and `h` and `h_prev` (T, B, H), after and before each step: no gradient copies states.
    # gates: `(T, B, 4H)` for a GRU (r, z, n, M) and an LSTM (i, f, g, o), None for an RNN
    # core: The run of the recursion itself, where the cell wraps another one; see `ProjectedLSTMMath`.

    def __init__(
        self, x: Array, states: tuple[Array, ...], gates: Array | None = None, core: Tape | None = None
    ) -> None:
        self.x, self.states, self.gates, self.core = x, states, gates, core
        h = states[0]
        self.h0, self.h, self.h_prev = h[0], h[1:], h[:-1]

    def ends(self, lengths: Lengths | None) -> State:
        """Return the last state, or that after each sample's last valid step."""
        if lengths is None:
            return tuple(map(itemgetter(-1), self.states))
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
        """Return inputs, states and gates."""
        return [self.x, *self.states, *(() if self.gates is None else (self.gates,))]


@dataclass
class RecurrentSaved:
    """Saved by `Recurrent.forward`."""

    last: State  # The last state, its arrays one by one: h_n, and an LSTM's c_n
    # The `scan.Choice` of the backward algorithm; its `reason` says why. None where nothing was kept.
    backward_choice: Any
    lengths: Lengths | None  # The lengths, or None
    tapes: list[Tape]  # The runs, one per layer and direction
    masks: list[Array | None]  # Dropout mask of each layer's input, or None

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
        return cls(*map(params.get, weight_names(suffix)))

    def named(self, suffix: str = "") -> dict[str, Array]:
        """Return the parameters under their names and `suffix`, without those that are None."""
        return {name: array for name, array in zip(weight_names(suffix), self, strict=True) if array is not None}


@lru_cache(maxsize=64)  # asked for some times a step
def weight_names(suffix: str) -> tuple[str, ...]:
    """Return the names of a run's `Weights`."""
    return tuple(name + suffix for name in Weights._fields)


class RunGradients(NamedTuple):
    """Gradients of one run: ga (see `CellMath`), at the initial state, and at every h if a projection needs it."""

    ga: Array
    initial: State
    at_h: Array | None = None


class SummedGradients(NamedTuple):
    """Gradients of a run whose kernel summed those of the weights on its way; ga, or at_x, only if asked for."""

    weights: Weights
    initial: State
    ga: Array | None = None
    at_x: Array | None = None


def pair(name: str, hx: Any) -> GivenState | None:
    """Return (h0, c0) after checking that it is a pair."""
    if hx is None:
        return None
    if isinstance(hx, (tuple, list)) and len(hx) == 2:
        return tuple(hx)
    raise OptionError(
        f"{name} is not the state of an LSTM", expected="a pair of arrays (h0, c0)",
        got=f"{type(hx).__name__}" + (f" of {len(hx)}" if isinstance(hx, (tuple, list)) else "")
    )  # fmt: skip


def joined(arrays: GivenState) -> Array:
    """Return arrays side by side along the last axis; a single array unchanged."""
    return arrays[0] if len(arrays) == 1 else backend.namespace(arrays[0]).concatenate(arrays, axis=-1)


def split(array: Array, parts: int) -> tuple[Array, ...]:
    """Split the last axis into equal parts: views."""
    size = array.shape[-1] // parts
    return tuple(array[..., part * size : (part + 1) * size] for part in range(parts))


@lru_cache(maxsize=256)
def suffix(run: int, directions: int) -> str:
    """Return the end of a run's names of parameters."""
    layer, direction = divmod(run, directions)
    return f"_l{layer}" + ("_reverse" if direction else "")
