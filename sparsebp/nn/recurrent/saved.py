"""A run of a cell over time: its state, weights, saved arrays and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError
from sparsebp.core.locks import cached_property
from sparsebp.nn.recurrent.lengths import Lengths, Segments

State = tuple[Array, ...]
"""One array (B, width) for each name of `CellMath.states`."""
GivenState = Sequence[Array | None]
"""The same; None stands for zeros."""
_LAST = itemgetter(-1)


class SavedRun:
    """One run of a cell over time, in the order in which it was processed."""

    # x: inputs (T, B, I).
    # states: for each array of the state (T + 1, B, H): the initial one, then that after every step. Views of them are
    # h0 (B, H) and h (T, B, H), of an LSTM c0 and c as well, and h_prev: no gradient copies states.
    # gates: (T, B, 4H) of a GRU (r, z, n, M) and an LSTM (i, f, g, o), None of an RNN.
    # segments: () if all samples have T steps. Else T and B are N, the rows of all segments, and 1: x (N, 1, I), states
    # (B + N, 1, H).
    # last: the state after each sample's last step.
    # inner: the run of the recursion itself, of an LSTM with a projection.

    last: State

    def __init__(
        self, x: Array, states: State, gates: Array | None = None, segments: Segments = (),
        inner: SavedRun | None = None,
    ) -> None:  # fmt: skip
        self.x, self.states, self.gates, self.segments, self.inner = x, states, gates, segments, inner
        h, c = states[0], states[-1]
        if segments:
            batch = segments[0].batch
            self.h0, self.h = h[:batch, 0], h[batch:]
            self.c0, self.c = (self.h0, self.h) if c is h else (c[:batch, 0], c[batch:])
        else:
            self.h0, self.h, self.last = h[0], h[1:], tuple(map(_LAST, states))
            self.h_prev = h[:-1]
            self.c0, self.c = (self.h0, self.h) if c is h else (c[0], c[1:])

    @cached_property
    def h_prev(self) -> Array:
        """The h before each step (T, B, H)."""
        before = host_pool.empty(backend.namespace(self.h), self.h.shape, self.h.dtype)
        for number, cut in enumerate(self.segments):
            second, end = cut.first + cut.batch, cut.first + cut.steps * cut.batch
            backend.copy(before[cut.first : second], self.states[0][self.before(number)])
            backend.copy(before[second:end], self.h[cut.first : end - cut.batch])
        return before

    def before(self, number: int) -> slice:
        """Return where the states before a segment's first step stand: in the last step of the segment before."""
        first, _, batch = self.segments[number]
        begin = first + self.segments[0].batch - self.segments[number - 1].batch if number else 0
        return slice(begin, begin + batch)

    def arrays(self) -> list[Array]:
        """Return inputs, states and gates."""
        return [self.x, *self.states, *(() if self.gates is None else (self.gates,))]


class SegmentRun(SavedRun):
    """A segment of a run, (steps, samples, …): views, without `states`, since more samples may have ended before it."""

    def __init__(self, run: SavedRun, number: int) -> None:
        cut, before = run.segments[number], run.before(number)
        self.x, self.gates = cut.of(run.x), None if run.gates is None else cut.of(run.gates)
        self.h0, self.h = run.states[0][before, 0], cut.of(run.h)
        self.c0, self.c = (self.h0, self.h) if run.c is run.h else (run.states[1][before, 0], cut.of(run.c))


class UnsavedRun(SavedRun):
    """A run that nobody goes back through: its initial state is where the caller has it."""

    def __init__(self, x: Array, start: State, states: State, gates: Array | None) -> None:
        self.x, self.gates, self.h0, self.c0, self.h, self.c = x, gates, start[0], start[-1], states[0], states[-1]


@dataclass
class RecurrentSaved:
    """Saved by `Recurrent.forward`."""

    last: State  # The last state, its arrays one by one: h_n, and an LSTM's c_n
    # The `scan.Choice` of the backward algorithm; its `reason` says why. None where nothing was kept.
    backward_choice: Any
    lengths: Lengths | None  # The lengths, or None
    runs: list[SavedRun]  # One per layer and direction
    masks: list[Array | None]  # Dropout mask of each layer's input, or None

    @property
    def h_n(self) -> Array:
        """Last hidden states (num_layers · directions, B, H); with lengths, each sample's last valid one."""
        return self.last[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, B, H), with the size of a direction's output for H."""
        run, (_, batch, hidden) = self.runs[0], self.h_n.shape
        return len(run.h if self.lengths is None else self.lengths.valid), batch, hidden


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


Need: TypeAlias = Literal["input", "weights", "initial"]


@dataclass(slots=True)
class RunGradients:
    """Gradients of one run: at the initial state, and the others as far as they were asked for."""

    initial: State
    ga: Array | None = None  # at the pre-activations, see `CellMath`
    weights: Weights | None = None  # summed by the kernel on its way, else they are products with ga
    summed: bool = False  # whether the kernel sums them
    x: Array | None = None  # of a cell whose kernel goes on to the input
    at_h: Array | None = None  # at every h, where a projection needs it

    def has(self, need: Need) -> bool:
        """Whether what is needed is here, or a product with what is."""
        if need == "weights":
            return self.weights is not None or not self.summed
        return need == "initial" or self.ga is not None or self.x is not None


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
