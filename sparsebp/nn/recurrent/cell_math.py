"""What differs between recurrent cells, stated once for cells and layers: the kernels, the gates and their gradients.

`nn.rnn` and `nn.gru` implement `CellMath`; `nn.recurrent` and the cell classes know nothing else about a cell.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend.memory import empty
from sparsebp.core.threads import one_blas_thread_for
from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.kernels.api.recurrent import room_for_sums
from sparsebp.kernels.matmul import matmul
from sparsebp.kernels.operands import WeightSums
from sparsebp.nn import arrays
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.recurrent.lengths import Lengths

FEW_FEATURES = 8
"""Inputs up to this size carry the bias as one more feature; measured: beyond, the copy costs more than it saves."""

SUMS_AT_MOST = 4
"""Memory that sums of weight gradients may take over that of the gradients at the gates, which they replace."""

LONG = 1_000_000_000
"""FLOP from which a product is worth being cut into parts: some 10 ms of one core."""


@dataclass
class Tape:
    """One run of a cell over time, in the order in which it was processed.

    Attributes
    ----------
    x
        Inputs (T, B, input_size).
    states
        ``(T + 1, B, H)``: the initial state, then every state. `h0`, `h` and `h_prev` are views, so the weight
        gradient reads the previous states without a copy.
    gates
        ``(T, B, 4H)`` for a GRU (r, z, n, M), None for an RNN.
    """

    x: Array
    states: Array
    gates: Array | None = None

    @property
    def h0(self) -> Array:
        """The initial state (B, H)."""
        return self.states[0]

    @property
    def h(self) -> Array:
        """The state after each step (T, B, H)."""
        return self.states[1:]

    @property
    def h_prev(self) -> Array:
        """The state before each step (T, B, H)."""
        return self.states[:-1]


class Weights(NamedTuple):
    """The parameters of one run, by torch.nn's names: (gH, I), (gH, H), and (gH,) each or None."""

    weight_ih: Array
    weight_hh: Array
    bias_ih: Array | None
    bias_hh: Array | None

    @classmethod
    def of(cls, params: dict[str, Array], suffix: str = "") -> Weights:
        """Take the parameters whose names end in `suffix`."""
        bias_ih, bias_hh = params.get("bias_ih" + suffix), params.get("bias_hh" + suffix)
        return cls(params["weight_ih" + suffix], params["weight_hh" + suffix], bias_ih, bias_hh)

    def named(self, suffix: str = "") -> dict[str, Array]:
        """Return the parameters under their names and `suffix`; a bias that is None is left out."""
        return {name + suffix: array for name, array in self._asdict().items() if array is not None}


class RunGradients(NamedTuple):
    """The gradients that the way back through one run leaves: at what weights feed, see `CellMath`, and at h0."""

    ga: Array
    gh0: Array


class SummedGradients(NamedTuple):
    """The gradients of a run whose way back summed those of the weights as it went, and kept no ga."""

    weights: Weights
    gh0: Array


class StateGradients(Gradients):
    """`Gradients` of a recurrent layer or cell, those with respect to the state before the first step among them."""

    __slots__ = ("_state",)

    def __init__(self, *args: Any, state: Callable[[], Array]) -> None:
        super().__init__(*args)
        self._state = state

    @property
    def h0(self) -> Array:
        """The gradient with respect to h0, of its shape; computed once."""
        return self._once("h0", self._state)


class CellMath(abc.ABC):
    """The specifics of a cell. ``ga`` is the gradient at everything that a weight feeds, ``(T, B, columns · H)``."""

    name: Literal["rnn", "gru"]
    gates: int
    """Rows of the weights, in multiples of the hidden size."""
    columns: int
    """Columns of ga, in multiples of the hidden size."""

    @abc.abstractmethod
    def input_bias(self, weights: Weights) -> Array | None:
        """Return the bias that belongs into the input projection (gH,), or None."""

    @abc.abstractmethod
    def run(self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None) -> None:
        """Run the recurrence over the projected input x (T, B, gH); fill ``tape.h`` and set ``tape.gates``.

        With `projection`, weight_ih and the biases, x is the input (T, B, I), and the kernel projects it.
        """

    @abc.abstractmethod
    def run_back(
        self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, grad_h_n: Array | None, chunks: int,
        ga: Array | None, gh0: Array, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga, gh0 and `sums` by the recursion (one chunk), or by reduce-then-scan over so many chunks."""

    @abc.abstractmethod
    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write what `jacobians` returns."""

    @abc.abstractmethod
    def run_maps(self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Reduce chunks of the run to affine maps (C, B, H + 1, H), see `RecurrentKernels.rnn_maps`."""

    @abc.abstractmethod
    def gate_gradients(self, tape: Tape, grad_h: Array, ga: Array) -> None:
        """Write ga from the full gradient at every state, grad_h (T, B, H): no recurrence, all steps at once."""

    @abc.abstractmethod
    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Change what the tape holds behind each sample's end so that the Jacobians there are exactly zero.

        No product over padded steps can then overflow, and 0 · inf cannot make a NaN.
        """

    # ---- the same for every cell ---------------------------------------------------------------------------------

    def forward(self, k: Kernels, x: Array, h0: Array | None, weights: Weights) -> Tape:
        """Project the input with one GEMM over all steps, and run the recurrence. x (T, B, I) C-contiguous.

        An input of few features is projected by the kernels where they are the faster at it.
        """
        return self.begin(k, x, weights)(h0)

    def begin(self, k: Kernels, x: Array, weights: Weights) -> Callable[[Array | None], Tape]:
        """Do what of `forward` needs no h0, and return what does the rest with it."""
        xp = backend.namespace(x)
        steps, batch, _ = x.shape
        tape = Tape(x, empty(xp, (steps + 1, batch, weights.weight_hh.shape[1]), x.dtype))
        inputs = self.inputs(k, x, weights)

        def finish(h0: Array | None) -> Tape:
            tape.states[0] = 0 if h0 is None else h0
            self.run(k, inputs[0], weights, tape, *inputs[1:])
            return tape

        return finish

    def inputs(self, k: Kernels, x: Array, weights: Weights) -> tuple[Array | None, ...]:
        """Return what `run` takes for x (T, B, I): its projection, or x and what the kernels project it with."""
        if x.shape[2] > k.projected_inputs:
            return (_project(x, weights.weight_ih, self.input_bias(weights)),)
        return x, weights.weight_ih, weights.bias_ih, weights.bias_hh

    def empty_gradients(self, tape: Tape) -> RunGradients:
        """Return arrays for the gradients of a run."""
        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        ga = empty(xp, (steps, batch, self.columns * hidden), tape.h.dtype)
        return RunGradients(ga, xp.empty((batch, hidden), dtype=tape.h.dtype))

    def backward(
        self, tape: Tape, w_hh: Array, gy: Array | None, grad_h_n: Array | None, chunks: int = 1
    ) -> RunGradients:
        """Return the gradients from gy (T, B, H) and grad_h_n (B, H), both C-contiguous; either may be None."""
        grads = self.empty_gradients(tape)
        self.run_back(kernels.get(backend.namespace(tape.h)), tape, w_hh, gy, grad_h_n, chunks, *grads)
        return grads

    def sums_inside(self, tape: Tape, chunks: int) -> bool:
        """Whether the kernels sum the weight gradients of this run on the way back, see `summed_backward`.

        Every chunk leaves its sums: where they would take much more memory than ga, products are better.
        """
        registers = kernels.get(backend.namespace(tape.h)).sum_registers
        steps, _, hidden = tape.h.shape
        room = room_for_sums(registers, self.gates, hidden, tape.x.shape[2], tape.h.dtype.itemsize)
        return (
            room > 0 and chunks * (self.gates * (hidden + room) + self.columns) <= SUMS_AT_MOST * steps * self.columns
        )

    def summed_backward(
        self, tape: Tape, weights: Weights, gy: Array | None, grad_h_n: Array | None, chunks: int = 1
    ) -> SummedGradients:
        """Return the gradients at the weights and h0 from gy and grad_h_n as `backward` takes them; no ga is stored."""
        xp = backend.namespace(tape.h)
        grads = Weights(*(None if a is None else xp.empty(a.shape, dtype=a.dtype) for a in weights))
        found = SummedGradients(grads, xp.empty_like(tape.h0))
        sums = WeightSums(tape.x, tape.h_prev, *grads)
        self.run_back(kernels.get(xp), tape, weights.weight_hh, gy, grad_h_n, chunks, None, found.gh0, sums)
        return found

    def reduced(self, tape: Tape, w_hh: Array, gy: Array | None, chunks: int = 1) -> Array:
        """Return the way back through the run as one affine map a sample: (B, H + 1, H), rows as in `affine.join`.

        It takes the gradient at the last state to the one at h0, where gy (T, B, H), or None, arrives on the way. The
        chunks are reduced at the same time, and joined.
        """
        from sparsebp.scan import affine

        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        maps = xp.empty((min(chunks, steps), batch, hidden + 1, hidden), dtype=tape.h.dtype)
        self.run_maps(kernels.get(xp), tape, w_hh, gy, maps)
        return affine.join_all(maps[::-1])

    def jacobians(self, tape: Tape, w_hh: Array, reverse: bool = False) -> Array:
        """Return the transposed hidden Jacobians (T, H, H, B), from the last step to the first if `reverse`."""
        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        out = empty(xp, (steps, hidden, hidden, batch), tape.h.dtype)
        self.run_jacobians(kernels.get(xp), tape, w_hh, reverse, out)
        return out

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
        return backend.namespace(rows).roll(rows, gates * (rows.shape[0] // self.gates), axis=0)

    def input_factors(self, tape: Tape) -> Array:
        """Return (T, gH, H, B): transposed Jacobian of h[t] with respect to ``W_ih x[t]``, gate rows as in torch."""
        xp = backend.namespace(tape.h)
        ga = self.empty_gradients(tape).ga
        self.gate_gradients(tape, xp.ones_like(tape.h), ga)
        hidden = tape.h.shape[2]
        rows = self.to_torch_order(xp.moveaxis(self.input_part(ga), 2, 0))  # (gH, T, B)
        eye = xp.tile(xp.eye(hidden, dtype=rows.dtype), (self.gates, 1))
        return eye[None, :, :, None] * xp.moveaxis(rows, 0, 1)[:, :, None]

    def input_grad(self, ga: Array, weights: Weights) -> Array:
        """Return the gradient at x (T, B, I): one GEMM."""
        return _product(self.input_part(ga), self.from_torch_order(weights.weight_ih))

    def weight_grad(self, ga: Array, tape: Tape, weights: Weights) -> Weights:
        """Return the gradients of the weights: two GEMMs over all steps, and one GEMV for both biases."""
        xp = backend.namespace(ga)
        rows = ga.shape[0] * ga.shape[1]
        flat = ga.reshape(rows, ga.shape[2])
        b_ih = b_hh = None
        with _short_products(xp, max(flat.size, rows * weights.weight_ih.size, rows * weights.weight_hh.size)):
            w_ih = _transposed_product(self.input_part(flat), tape.x.reshape(rows, tape.x.shape[2]))
            w_hh = _transposed_product(self.hidden_part(flat), tape.h_prev.reshape(rows, tape.h.shape[2]))
            if weights.bias_ih is not None:
                # A GEMV: four times faster than flat.sum(axis=0).
                sums = backend.matmul(xp.ones(rows, dtype=flat.dtype), flat)
        if weights.bias_ih is not None:
            b_ih = self.to_torch_order(self.input_part(sums))
            b_hh = self.hidden_part(sums).copy()  # an RNN's is the same sum, in an array of its own
        return Weights(xp.ascontiguousarray(self.to_torch_order(w_ih)), xp.ascontiguousarray(w_hh), b_ih, b_hh)


def _short_products(xp: ModuleType, work: int) -> contextlib.AbstractContextManager[None]:
    """Return `one_blas_thread_for` so many multiply-adds; a GPU's products leave the host's BLAS alone."""
    return one_blas_thread_for(work) if backend.is_host(xp) else contextlib.nullcontext()


def _product(a: Array, b: Array) -> Array:
    """Return what `_multiply` does, whatever a BLAS would do with threads of its own."""
    with _short_products(backend.namespace(a), a.size * b.shape[1]):
        return _multiply(a, b)


def _transposed_product(a: Array, b: Array) -> Array:
    """Return ``aᵀ @ b``, of two tall matrices."""
    if backend.is_host(backend.namespace(a)):  # with the narrow b on the left it is split better between threads
        return _multiply(b.T, a).T
    return backend.matmul(a.T, b)


def _multiply(a: Array, b: Array) -> Array:
    """Return ``a @ b``, as the BLAS has it, or in parts on all threads: which of the two, the shape says alone.

    On a GPU it is cuBLAS, which reads views and transposes as they lie.
    """
    xp = backend.namespace(a)
    if 2.0 * a.size * b.shape[1] >= LONG or not backend.is_host(xp):
        return matmul(xp, a, b)
    out = empty(xp, (*a.shape[:-1], b.shape[1]), a.dtype)
    rows = math.prod(a.shape[:-1])
    xp.matmul(a.reshape(rows, a.shape[-1]), b, out=out.reshape(rows, b.shape[1]))
    return out


def _project(x: Array, w: Array, bias: Array | None) -> Array:
    """Return ``x wᵀ + bias`` (T, B, rows of w)."""
    xp = backend.namespace(x)
    steps, batch, features = x.shape
    if features > FEW_FEATURES:
        gx = _product(x, w.T)
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
    return _product(extended_x, extended_w.T)


def initial_weights(
    cell: CellMath, input_size: int, hidden_size: int, bias: bool, dtype: np.dtype, rng: np.random.Generator
) -> Weights:
    """Draw parameters as torch.nn does: all of them from U(-1/√H, 1/√H)."""
    bound, rows = arrays.fan_in_bound(hidden_size), cell.gates * hidden_size

    def draw(*shape: int) -> Any:
        return arrays.uniform(rng, shape, bound, dtype)

    weights = draw(rows, input_size), draw(rows, hidden_size)
    return Weights(*weights, *((draw(rows), draw(rows)) if bias else (None, None)))
