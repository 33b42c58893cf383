"""Recurrent cells: what differs between RNN, GRU and LSTM, weights, lengths, and what a run keeps for its way back.

`CellMath` is what a cell implements; layers and the classes of cells (`sparsebp.nn.recurrent`) know nothing else about
it. A cell's state is one array or several, which it names: h, which is the output too, comes first.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.backend import empty
from sparsebp.core.check import Array
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.threads import one_blas_thread_for
from sparsebp.kernels.dense import matmul
from sparsebp.kernels.operands import WeightSums
from sparsebp.kernels.spec import Kernels
from sparsebp.nn import layer
from sparsebp.nn.gradients import Gradients
from sparsebp.patterns import SparsityPattern, hidden_pattern, lstm_pattern

# Sequences of different lengths in one batch, padded at the end: masks, and time reversal sample by sample.


class Lengths:
    """The valid lengths of a batch, on the device of its data."""

    # values: (B,) int64.
    # valid: (T, B, 1) bool: true before a sample's end.
    # samples: `arange(B)`.
    # reversed: (T, B): for each step the step that takes its place when every sample is reversed within its length.

    def __init__(self, values: np.ndarray, steps: int, xp: ModuleType) -> None:
        self.values = xp.asarray(values)
        self.samples = xp.arange(values.size)
        time = xp.arange(steps)[:, None]
        self.valid = (time < self.values)[:, :, None]
        self.reversed = xp.where(time < self.values, self.values - 1 - time, time)

    def mask(self, array: Array) -> Array:
        """Return a copy of `array` (T, B, n) with zeros (also for NaN) behind every sample's end."""
        return backend.namespace(array).where(self.valid, array, array.dtype.type(0))

    def fill(self, array: Array, value: float) -> None:
        """Write `value` into `array` (T, B, n) behind every sample's end."""
        backend.namespace(array).copyto(array, array.dtype.type(value), where=~self.valid)

    def reverse(self, array: Array) -> Array:
        """Return `array` (T, B, n) with every sample's valid steps in reverse order; its own inverse."""
        return array[self.reversed, self.samples]


def parse_lengths(lengths: Any, steps: int, batch: int, xp: ModuleType) -> Lengths | None:
    """Check `lengths` against an input of shape (steps, batch, …)."""
    # Returns Lengths or None: None if no length was given or all are full.
    if lengths is None:
        return None
    try:
        values = backend.to_host(lengths) if hasattr(lengths, "__cuda_array_interface__") else np.asarray(lengths)
    except ValueError:  # a ragged list
        values = np.asarray(None)
    if values.dtype.kind not in "iu":
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=values.dtype)
    if values.shape != (batch,):
        raise ShapeError("lengths has the wrong shape", expected=(batch,), got=values.shape)
    if values.min() < 1 or values.max() > steps:
        raise OptionError("lengths is out of range", expected=f"1 to {steps} (the number of steps of x)",
                          got=f"{values.min()} to {values.max()}",
                          remedy="Leave empty sequences out, and pad x to the longest one")  # fmt: skip
    if values.min() == steps:
        return None
    return Lengths(values.astype(np.int64), steps, xp)


def reverse_time(array: Array, lengths: Lengths | None) -> Array:
    """Return `array` (T, B, n) reversed in time, C-contiguous; with `lengths`, each sample within its own length."""
    if lengths is not None:
        return lengths.reverse(array)
    return backend.namespace(array).ascontiguousarray(array[::-1])


# Products over all steps of a run at once, and how the threads share them.

FEW_FEATURES = 8
"""Inputs up to this size carry the bias as one more feature; measured: beyond, the copy costs more than it saves."""

LONG = 100_000_000
"""FLOP from which a product is worth being cut into parts: about a millisecond of one core."""


def short_products(xp: ModuleType, work: int) -> contextlib.AbstractContextManager[None]:
    """Return `one_blas_thread_for` so many multiply-adds; a GPU's products leave the host's BLAS alone."""
    return one_blas_thread_for(work) if backend.is_host(xp) else contextlib.nullcontext()


def product(a: Array, b: Array) -> Array:
    """Return what `_multiply` does, whatever a BLAS would do with threads of its own."""
    with short_products(backend.namespace(a), a.size * b.shape[1]):
        return _multiply(a, b)


def transposed_product(a: Array, b: Array) -> Array:
    """Return ``aᵀ @ b``, of two tall matrices."""
    if backend.is_host(backend.namespace(a)):  # with the narrow b on the left it is split better between threads
        return _multiply(b.T, a).T
    return backend.matmul(a.T, b)


def _multiply(a: Array, b: Array) -> Array:
    """Return ``a @ b``, as the BLAS has it, or in parts on all threads: which of the two, the shape says alone."""
    # On a GPU it is cuBLAS, which reads views and transposes as they lie.
    xp = backend.namespace(a)
    if 2.0 * a.size * b.shape[1] >= LONG or not backend.is_host(xp):
        return matmul(xp, a, b)
    out = empty(xp, (*a.shape[:-1], b.shape[1]), a.dtype)
    rows = math.prod(a.shape[:-1])
    xp.matmul(a.reshape(rows, a.shape[-1]), b, out=out.reshape(rows, b.shape[1]))
    return out


def project(x: Array, w: Array, bias: Array | None) -> Array:
    """Return ``x wᵀ + bias`` (T, B, rows of w)."""
    xp = backend.namespace(x)
    steps, batch, features = x.shape
    if features > FEW_FEATURES:
        gx = product(x, w.T)
        if bias is not None:
            gx += bias
        return gx
    # The bias becomes one more feature that is always 1: a pass less over gx, and no GEMM with an inner length of 1,
    # which OpenBLAS does eight times slower than one with 2.
    extended_x = xp.ones((steps, batch, features + 1), dtype=x.dtype)
    extended_x[..., :-1] = x
    extended_w = xp.zeros((w.shape[0], features + 1), dtype=x.dtype)
    extended_w[:, :-1] = w
    if bias is not None:
        extended_w[:, -1] = bias
    return product(extended_x, extended_w.T)


# What runs of a cell over time are made of: weights, what forward kept, and the gradients of the way back.

State = tuple[Array, ...]
"""One array (B, width) for each name of `CellMath.states`."""
GivenState = Sequence[Array | None]
"""The same; None stands for zeros."""


@dataclass
class Tape:
    """One run of a cell over time, in the order in which it was processed."""

    x: Array  # Inputs (T, B, input_size)
    # For each array of the state `(T + 1, B, H)`: the initial one, then that after every step. `h0`, `h` and `h_prev`
    # are views of the first, so the weight gradient reads the previous states without a copy.
    states: tuple[Array, ...]
    gates: Array | None = None  # `(T, B, 4H)` for a GRU (r, z, n, M) and an LSTM (i, f, g, o), None for an RNN
    # The run of the recursion itself, where the cell wraps another one; see `ProjectedLSTMMath`.
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
    """What `Recurrent.forward` keeps."""

    last: State  # The last state, its arrays one by one: h_n, and an LSTM's c_n
    # The `scan.cost.Choice` of the backward algorithm; its `reason` says why. None where nothing was kept.
    backward_choice: Any
    lengths: Lengths | None  # The lengths, or None
    tapes: list[Tape]  # The runs, one a layer and direction
    masks: list[Array | None]  # Dropout masks by layer: what its input was multiplied with, or None

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
    """The gradients that the way back through one run leaves."""

    # At what weights feed, see `CellMath`; at the initial state; and, where a projection's weights need it, at every h.

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


class CellMath(abc.ABC):
    """The specifics of a cell. ``ga`` is the gradient at everything that a weight feeds, ``(T, B, columns · H)``."""

    name: Literal["rnn", "gru", "lstm"]
    gates: int
    """Rows of the weights, in multiples of the hidden size."""
    columns: int
    """Columns of ga, in multiples of the hidden size."""
    states: ClassVar[tuple[str, ...]] = ("h",)
    """Names of the arrays that the state consists of."""
    kind: str | None = None
    """What the host's kernels without a way back call the cell; None: they do not know it."""

    @abc.abstractmethod
    def input_bias(self, weights: Weights) -> Array | None:
        """Return the bias that belongs into the input projection (gH,), or None."""

    @abc.abstractmethod
    def run(self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None) -> None:
        """Run the recurrence over the projected input x (T, B, gH); fill the tape's states and gates."""
        # With `projection`, weight_ih and the biases, x is the input (T, B, I), and the kernel projects it.

    @abc.abstractmethod
    def run_back(
        self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int, ga: Array | None,
        initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga, `initial` and `sums` by the recursion (one chunk), or by reduce-then-scan over so many chunks."""
        # `last` is the gradient that comes to the state after the last step.

    @abc.abstractmethod
    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write what `jacobians` returns."""

    @abc.abstractmethod
    def run_maps(self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Reduce chunks of the run to affine maps (C, B, n + 1, n) of the state's n values; see the kernels."""

    @abc.abstractmethod
    def gate_gradients(self, tape: Tape, grads: State, ga: Array) -> None:
        """Write ga from the full gradients at every state, (T, B, H) each: no recurrence, all steps at once."""

    @abc.abstractmethod
    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Change what the tape holds behind each sample's end so that nothing goes from there to an h."""
        # The Jacobians there are zero, but that what comes to another array of the last state goes through to the
        # sample's end unchanged. No product over padded steps can then overflow, and 0 · inf cannot make a NaN.

    # ---- the same for every cell, but for one that wraps another -----------------------------------------------------

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the pattern of one step's transposed Jacobian, n × n for a state of n values: by default dense."""
        return hidden_pattern(hidden)

    def widths(self, weights: Weights) -> tuple[int, ...]:
        """Return the number of values of each array of the state."""
        return (weights.weight_hh.shape[1],) * len(self.states)

    def forward(self, k: Kernels, x: Array, initial: GivenState | None, weights: Weights) -> Tape:
        """Project the input with one GEMM over all steps, and run the recurrence. x (T, B, I) C-contiguous."""
        # An input of few features is projected by the kernels where they are the faster at it. No `initial` state, or
        # None for an array of it, stands for zeros.
        return self.begin(k, x, weights)(initial)

    def infer(
        self, x: Array, initial: GivenState | None, weights: Weights, lengths: Lengths | None = None
    ) -> tuple[Array, State]:
        """Return h (T, B, H) and the last state, as `forward` has them, and keep nothing; x as there."""
        # An LSTM's c is kept where samples end at different steps.
        xp, (steps, batch, _) = backend.namespace(x), x.shape
        if self.kind is None or not backend.is_host(xp) or (lengths is not None and len(self.states) > 1):
            tape = self.forward(kernels.get(xp), x, initial, weights)
            return tape.h, tape.ends(lengths)
        shape = batch, weights.weight_hh.shape[1]
        start = tuple(
            xp.zeros(shape, x.dtype) if array is None else xp.ascontiguousarray(array)
            for array in initial or (None,) * len(self.states)
        )
        h, ends = empty(xp, (steps, *shape), x.dtype), tuple(xp.empty(shape, x.dtype) for _ in start[1:])
        kernels.on_host().infer(self.kind, x, *weights[:4], start, h, *ends)
        return h, (h[-1] if lengths is None else h[lengths.values - 1, lengths.samples], *ends)

    def fits(self, x: Array, weights: Weights, hidden: int, state: State = ()) -> bool:
        """Say whether one look shows that the weights of a run on the host, and a `state` (B, hidden), belong to x."""
        # What else a caller gives the kernels it has made itself, so that these need not look at anything again. Where
        # something does not fit, the kernels' own checks say what.
        if not (backend.is_host(backend.namespace(x)) and x.dtype in backend.FLOAT_DTYPES and hidden > 0):
            return False
        rows, of_state = self.gates * hidden, [(len(part), hidden) for part in state[:1]] * len(state)
        shapes = (rows, x.shape[-1]), (rows, hidden), (rows,), (rows,), *of_state
        return all(
            array is None
            or (type(array) is np.ndarray and array.shape == shape and array.dtype == x.dtype
                and array.flags.c_contiguous)
            for array, shape in zip((*weights[:4], *state), shapes, strict=True)
        )  # fmt: skip

    def kernels_for(self, x: Array, weights: Weights, hidden: int) -> Any:
        """Return the kernels; without their checks where the weights are known to fit."""
        k = kernels.get(backend.namespace(x))
        return k.unchecked if self.fits(x, weights, hidden) else k

    def begin(self, k: Kernels, x: Array, weights: Weights) -> Callable[[GivenState | None], Tape]:
        """Do what of `forward` needs no initial state, and return what does the rest with it."""
        tape, inputs = self.blank(x, weights), self.inputs(k, x, weights)

        def finish(initial: GivenState | None) -> Tape:
            set_initial(tape, initial)
            self.run(k, inputs[0], weights, tape, *inputs[1:])
            return tape

        return finish

    def blank(self, x: Array, weights: Weights) -> Tape:
        """Return a tape with room for the states of a run over x."""
        xp, (steps, batch, _) = backend.namespace(x), x.shape
        return Tape(x, tuple(empty(xp, (steps + 1, batch, width), x.dtype) for width in self.widths(weights)))

    def inputs(self, k: Kernels, x: Array, weights: Weights) -> tuple[Array | None, ...]:
        """Return what `run` takes for x (T, B, I): its projection, or x and what the kernels project it with."""
        if x.shape[2] > k.projected_inputs(self.gates, weights.weight_hh.shape[1], x.dtype.itemsize):
            return project(x, weights.weight_ih, self.input_bias(weights)), None, None, None
        return x, weights.weight_ih, weights.bias_ih, weights.bias_hh

    def empty_gradients(self, tape: Tape) -> RunGradients:
        """Return arrays for the gradients of a run."""
        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        ga = empty(xp, (steps, batch, self.columns * hidden), tape.h.dtype)
        return RunGradients(ga, tuple(xp.empty((batch, hidden), dtype=tape.h.dtype) for _ in self.states))

    def core_of(self, tape: Tape, weights: Weights) -> tuple[CellMath, Tape, Array]:
        """Return the recursion itself, its run and its weights w_hh: for a cell that wraps another, that one's."""
        return self, tape, weights.weight_hh

    def around(
        self, tape: Tape, weights: Weights, gy: Array | None, last: GivenState,
        back: Callable[[CellMath, Tape, Array, Array | None, GivenState], RunGradients],
    ) -> RunGradients:  # fmt: skip
        """Take gradients back through what is around the recursion, and with `back` through the recursion itself."""
        return back(self, tape, weights.weight_hh, gy, last)

    def backward(
        self, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int = 1
    ) -> RunGradients:  # fmt: skip
        """Return the gradients from gy (T, B, H) and `last` (B, H), C-contiguous; each may be None."""
        grads = self.empty_gradients(tape)
        k = kernels.get(backend.namespace(tape.h))
        self.run_back(k, tape, w_hh, gy, last, chunks, grads.ga, grads.initial)
        return grads

    def sums_inside(self, tape: Tape, chunks: int) -> bool:
        """Whether the kernels sum the weight gradients of this run on the way back, see `summed_backward`."""
        k = kernels.get(backend.namespace(tape.h))
        features, itemsize = tape.x.shape[2], tape.h.dtype.itemsize
        return k.sums_inside(self.gates, self.columns, tape.h.shape, features, itemsize, chunks)

    def summed_backward(
        self, tape: Tape, weights: Weights, gy: Array | None, last: GivenState, chunks: int = 1, *, keep: bool = False
    ) -> SummedGradients:
        """Return the gradients at the weights and the initial state, as `backward` does; ga is stored to `keep` it."""
        xp = backend.namespace(tape.h)
        grads = Weights(*(None if a is None else xp.empty(a.shape, dtype=a.dtype) for a in weights))
        ga, initial = (
            self.empty_gradients(tape)[:2] if keep else (None, tuple(xp.empty_like(tape.h0) for _ in self.states))
        )
        found = SummedGradients(grads, initial, ga)
        sums = WeightSums(tape.x, tape.h_prev, *grads[:4])
        k = self.kernels_for(tape.x, weights, tape.h.shape[2])
        self.run_back(k, tape, weights.weight_hh, gy, last, chunks, ga, initial, sums)
        return found

    def reduced(self, tape: Tape, w_hh: Array, gy: Array | None, chunks: int = 1) -> Array:
        """Return the way back through the run as one affine map a sample: (B, n + 1, n), rows as in `affine.join`."""
        # It takes the gradient at the last state, its arrays side by side, to the one at the initial state, where gy
        # (T, B, H), or None, arrives on the way. The chunks are reduced at the same time, and joined.
        from sparsebp.scan import algorithms

        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        size = len(self.states) * hidden
        maps = xp.empty((min(chunks, steps), batch, size + 1, size), dtype=tape.h.dtype)
        self.run_maps(kernels.get(xp), tape, w_hh, gy, maps)
        return algorithms.join_all(maps[::-1])

    def jacobians(self, tape: Tape, w_hh: Array, reverse: bool = False) -> Array:
        """Return the steps' transposed Jacobians, values on `pattern` (T, nnz, B); from the last step if `reverse`."""
        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        out = empty(xp, (steps, self.pattern(hidden).nnz, batch), tape.h.dtype)
        self.run_jacobians(kernels.get(xp), tape, w_hh, reverse, out)
        return out

    def state_jacobians(self, tape: Tape, weights: Weights) -> tuple[Array, SparsityPattern]:
        """Return the transposed Jacobians of the state after each step with respect to the last one, and a pattern."""
        # The values are (T, nnz, B).
        return self.jacobians(tape, weights.weight_hh), self.pattern(tape.h.shape[2])

    def input_part(self, ga: Array) -> Array:
        """Return the columns of ga that belong to ``W_ih x``, the first ones: a view."""
        return ga[..., : self.gates * (ga.shape[-1] // self.columns)]

    def hidden_part(self, ga: Array) -> Array:
        """Return the columns of ga that belong to ``W_hh h``, the last ones, in torch's gate order: a view."""
        return ga[..., (self.columns - self.gates) * (ga.shape[-1] // self.columns) :]

    def to_torch_order(self, rows: Array) -> Array:
        """Bring gate rows from the order of `input_part` to torch's: the gate that only x feeds from first to last."""
        return self._rolled(rows, -1)

    def from_torch_order(self, rows: Array) -> Array:
        """Bring gate rows from torch's order to that of `input_part`."""
        return self._rolled(rows, 1)

    def _rolled(self, rows: Array, gates: int) -> Array:
        if self.columns == self.gates:
            return rows
        xp, by = backend.namespace(rows), gates * (rows.shape[0] // self.gates)
        if backend.is_host(xp):
            return xp.concatenate((rows[-by:], rows[:-by]))  # as `roll`, without its cost
        return xp.roll(rows, by, axis=0)  # in one launch, the parts in two

    def input_factors(self, tape: Tape) -> Array:
        """Return (T, gH, n, B): transposed Jacobian of the state after a step with respect to ``W_ih x`` at it."""
        # Gate rows as in torch; the n columns are the state's arrays one after the other.
        xp = backend.namespace(tape.h)
        ga, hidden, parts = self.empty_gradients(tape).ga, tape.h.shape[2], []
        eye = xp.tile(xp.eye(hidden, dtype=tape.h.dtype), (self.gates, 1))
        for of in range(len(self.states)):
            grads = tuple((xp.ones_like if of == other else xp.zeros_like)(tape.h) for other in range(len(self.states)))
            self.gate_gradients(tape, grads, ga)
            rows = self.to_torch_order(xp.moveaxis(self.input_part(ga), 2, 0))  # (gH, T, B)
            parts.append(eye[None, :, :, None] * xp.moveaxis(rows, 0, 1)[:, :, None])
        return parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=2)

    def input_grad(self, ga: Array, weights: Weights) -> Array:
        """Return the gradient at x (T, B, I): one GEMM."""
        return product(self.input_part(ga), self.from_torch_order(weights.weight_ih))

    def weight_grad(self, ga: Array, tape: Tape, weights: Weights, at_h: Array | None = None) -> Weights:
        """Return the gradients of the weights: two GEMMs over all steps, and one GEMV for both biases."""
        xp = backend.namespace(ga)
        rows = ga.shape[0] * ga.shape[1]
        flat = ga.reshape(rows, ga.shape[2])
        b_ih = b_hh = None
        with short_products(xp, max(flat.size, rows * weights.weight_ih.size, rows * weights.weight_hh.size)):
            w_ih = transposed_product(self.input_part(flat), tape.x.reshape(rows, tape.x.shape[2]))
            w_hh = transposed_product(self.hidden_part(flat), tape.h_prev.reshape(rows, tape.h.shape[2]))
            if weights.bias_ih is not None:
                # A GEMV: four times faster than flat.sum(axis=0).
                sums = backend.matmul(xp.ones(rows, dtype=flat.dtype), flat)
        if weights.bias_ih is not None:
            b_ih = self.to_torch_order(self.input_part(sums))
            b_hh = self.hidden_part(sums).copy()  # where both are the same sum, in an array of its own
        return Weights(xp.ascontiguousarray(self.to_torch_order(w_ih)), xp.ascontiguousarray(w_hh), b_ih, b_hh)


def initial_weights(
    cell: CellMath, input_size: int, hidden_size: int, bias: bool, dtype: np.dtype, rng: np.random.Generator,
    proj_size: int = 0,
) -> Weights:  # fmt: skip
    """Draw parameters as torch.nn does: all of them from U(-1/√H, 1/√H)."""
    bound, rows = layer.fan_in_bound(hidden_size), cell.gates * hidden_size

    def draw(*shape: int) -> Any:
        return layer.uniform(rng, shape, bound, dtype)

    weight_ih, weight_hh = draw(rows, input_size), draw(rows, proj_size or hidden_size)
    bias_ih, bias_hh = (draw(rows), draw(rows)) if bias else (None, None)
    return Weights(weight_ih, weight_hh, bias_ih, bias_hh, draw(proj_size, hidden_size) if proj_size else None)


# The specifics of the LSTM's cell: gates in torch's order i, f, g, o, the state (h, c); and of one with a projection.
#
# ``c' = f * c + i * g`` and ``h' = o * tanh(c')`` (Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Gers et
# al., "Learning to forget", 2000). The Jacobian of a step has two dense and two diagonal blocks.
#
# A projection, ``h = W_hr m`` with ``m = o * tanh(c)``, goes around an LSTM without one: the pre-activations ``W_hh h =
# (W_hh W_hr) m`` follow from m, so the recursion itself is that of an LSTM with the state (m, c) and the weights ``W_hh
# W_hr``, and every kernel and every scan is there. The first step is fed by h0, which is no projection of anything: its
# part goes into the projected input, and m begins with zero. h, and what comes to it from y, is then one product over
# all steps.


class LSTMMath(CellMath):
    """The specifics of the LSTM: ga (T, B, 4H) is the gradient at the pre-activations, in the order i, f, g, o."""

    name = "lstm"
    kind: str | None = "lstm"
    gates = 4
    columns = 4
    states = ("h", "c")

    def input_bias(self, weights: Weights) -> Array | None:
        """Return b_ih + b_hh."""
        return None if weights.bias_ih is None else weights.bias_ih + weights.bias_hh

    def run(self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None) -> None:
        """Run the recurrence, keeping every gate."""
        if tape.gates is None:
            tape.gates = empty(backend.namespace(x), (*x.shape[:2], len(weights.weight_hh)), x.dtype)
        k.lstm_forward(x, weights.weight_hh, tape.h0, tape.c0, tape.h, tape.c, tape.gates, *projection)

    def run_back(
        self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int, ga: Array | None,
        initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga, `initial` and `sums`."""
        (at_h, at_c), (gh0, gc0) = last, initial
        k.lstm_backward(tape.c, tape.c0, tape.gates, w_hh, gy, at_h, at_c, ga, gh0, gc0, chunks, sums)

    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write every step's four blocks. A step reads c before and after it, so the order is turned afterwards."""
        k.lstm_jacobians(tape.c, tape.c0, tape.gates, w_hh, out)
        for t in range(len(out) // 2 if reverse else 0):  # in place: they may be most of the memory
            first = out[t].copy()
            out[t] = out[-1 - t]
            out[-1 - t] = first

    def run_maps(self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Reduce chunks of the run."""
        k.lstm_maps(tape.c, tape.c0, tape.gates, w_hh, gy, maps)

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the one whose blocks from c are diagonal."""
        return lstm_pattern(hidden)

    def gate_gradients(self, tape: Tape, grads: State, ga: Array) -> None:
        """Write the four gradients: what comes to h goes through o, and through tanh(c) to what comes to c."""
        at_h, at_c = grads
        i, f, g, o = split(tape.gates, 4)
        d_i, d_f, d_g, d_o = split(ga, 4)
        seen = backend.namespace(ga).tanh(tape.c)
        through = at_c + at_h * o * (1 - seen * seen)
        d_i[...] = through * g * (i * (1 - i))
        d_f[...] = through * tape.states[1][:-1] * (f * (1 - f))
        d_g[...] = through * i * (1 - g * g)
        d_o[...] = at_h * seen * (o * (1 - o))

    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Set i = g = o = 0, f = 1 and c = 0: all blocks vanish but the one from c to c, which becomes the identity."""
        lengths.fill(tape.c, 0)
        for gate, value in zip(split(tape.gates, 4), (0, 1, 0, 0), strict=True):
            lengths.fill(gate, value)


class ProjectedLSTMMath(LSTMMath):
    """The specifics of an LSTM with proj_size: ``tape.core`` is the run of its recursion."""

    core = LSTMMath()
    kind = None

    def widths(self, weights: Weights) -> tuple[int, ...]:
        """Return the sizes of h and c."""
        return weights.weight_hh.shape[1], len(weights.weight_hh) // self.gates

    def begin(self, k: Kernels, x: Array, weights: Weights) -> Callable[[GivenState | None], Tape]:
        """Project the input; then run the recursion, and project its states."""
        folded = weights._replace(weight_hh=_folded(weights), weight_hr=None)
        core, gx = self.core.blank(x, folded), project(x, weights.weight_ih, self.input_bias(weights))

        def finish(initial: GivenState | None) -> Tape:
            h0, c0 = initial or (None, None)
            set_initial(core, (None, c0))
            if h0 is not None:
                gx[0] += product(h0, weights.weight_hh.T)
            self.core.run(k, gx, folded, core)
            h = empty(backend.namespace(x), (len(x) + 1, *x.shape[1:2], weights.weight_hh.shape[1]), x.dtype)
            h[0] = 0 if h0 is None else h0
            h[1:] = product(core.h, _projection(weights).T)
            return Tape(x, (h, core.states[1]), core=core)

        return finish

    def core_of(self, tape: Tape, weights: Weights) -> tuple[CellMath, Tape, Array]:
        """Return the LSTM without a projection."""
        return self.core, _core(tape), _folded(weights)

    def around(
        self, tape: Tape, weights: Weights, gy: Array | None, last: GivenState,
        back: Callable[[CellMath, Tape, Array, Array | None, GivenState], RunGradients],
    ) -> RunGradients:  # fmt: skip
        """Take what comes to h to m, and back through the recursion; then find what comes to every h."""
        w_hr = _projection(weights)
        at_m = None if gy is None else product(gy, w_hr)
        last_m = None if last[0] is None else product(last[0], w_hr)
        found = back(*self.core_of(tape, weights), at_m, (last_m, *last[1:]))
        at_h = empty(backend.namespace(tape.h), tape.states[0].shape, tape.h.dtype)  # from behind: what a step feeds
        at_h[:-1] = product(found.ga, weights.weight_hh)
        at_h[-1] = 0 if last[0] is None else last[0]
        if gy is not None:
            at_h[1:] += gy
        return RunGradients(found.ga, (at_h[0].copy(), *found.initial[1:]), at_h[1:])

    def sums_inside(self, tape: Tape, chunks: int) -> bool:
        """Return False: the weights' gradients need ga."""
        return False

    def weight_grad(self, ga: Array, tape: Tape, weights: Weights, at_h: Array | None = None) -> Weights:
        """Return those of the projection too: one GEMM more."""
        grads = super().weight_grad(ga, tape, weights)
        m = _core(tape).h
        rows = m.shape[0] * m.shape[1]
        at = at_h.reshape(rows, at_h.shape[2])  # type: ignore[union-attr]  # `around` leaves it
        with short_products(backend.namespace(ga), at.size * m.shape[2]):
            w_hr = transposed_product(at, m.reshape(rows, m.shape[2]))
        return grads._replace(weight_hr=backend.namespace(ga).ascontiguousarray(w_hr))

    def state_jacobians(self, tape: Tape, weights: Weights) -> tuple[Array, SparsityPattern]:
        """Return those of (h, c), dense: the projection mixes what the recursion keeps apart."""
        core, xp, w_hr = _core(tape), backend.namespace(tape.h), _projection(weights)
        steps, batch, hidden = core.h.shape
        size = len(w_hr) + hidden
        states = xp.empty((steps, size, 2 * hidden, batch), dtype=core.h.dtype)  # columns: m and c after the step
        states[:, : len(w_hr)] = xp.einsum("gp,tgnb->tpnb", weights.weight_hh, self.core.input_factors(core))
        values, pattern = self.core.state_jacobians(core, weights._replace(weight_hh=_folded(weights)))
        below = pattern.nnz - 2 * hidden  # where the rows of c begin, of two entries each
        states[:, len(w_hr) :] = 0
        for part in range(2):
            rows = xp.arange(hidden)
            states[:, len(w_hr) + rows, part * hidden + rows] = values[:, below + part :: 2]
        out = xp.empty((steps, size, size, batch), dtype=core.h.dtype)
        out[:, :, : len(w_hr)] = xp.einsum("trmb,pm->trpb", states[:, :, :hidden], w_hr)
        out[:, :, len(w_hr) :] = states[:, :, hidden:]
        return out.reshape(steps, size * size, batch), hidden_pattern(size)

    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Close the recursion, whose c this run shares."""
        self.core.close(_core(tape), lengths)


def _projection(weights: Weights) -> Array:
    """Return W_hr (P, H)."""
    return weights.weight_hr


def _folded(weights: Weights) -> Array:
    """Return ``W_hh W_hr`` (4H, H)."""
    return product(weights.weight_hh, _projection(weights))


def _core(tape: Tape) -> Tape:
    return tape.core  # type: ignore[return-value]  # a run of this cell has one
