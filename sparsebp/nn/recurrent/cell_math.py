"""What differs between recurrent cells, stated once for cells and layers: the kernels, the gates and their gradients.

`nn.rnn`, `nn.gru` and `nn.lstm` implement `CellMath`; `nn.recurrent` and the cell classes know nothing else about a
cell. A cell's state is one array or several, which it names: h, which is the output too, comes first.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend.memory import empty
from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.kernels.operands import WeightSums
from sparsebp.nn import arrays
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.products import product, project, short_products, transposed_product
from sparsebp.nn.recurrent.tape import GivenState, RunGradients, State, SummedGradients, Tape, Weights, set_initial
from sparsebp.patterns import SparsityPattern, hidden_pattern


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
        """Run the recurrence over the projected input x (T, B, gH); fill the tape's states and gates.

        With `projection`, weight_ih and the biases, x is the input (T, B, I), and the kernel projects it.
        """

    @abc.abstractmethod
    def run_back(
        self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int, ga: Array | None,
        initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga, `initial` and `sums` by the recursion (one chunk), or by reduce-then-scan over so many chunks.

        `last` is the gradient that comes to the state after the last step.
        """

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
        """Change what the tape holds behind each sample's end so that nothing goes from there to an h.

        The Jacobians there are zero, but that what comes to another array of the last state goes through to the
        sample's end unchanged. No product over padded steps can then overflow, and 0 · inf cannot make a NaN.
        """

    # ---- the same for every cell, but for one that wraps another -----------------------------------------------------

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the pattern of one step's transposed Jacobian, n × n for a state of n values: by default dense."""
        return hidden_pattern(hidden)

    def widths(self, weights: Weights) -> tuple[int, ...]:
        """Return the number of values of each array of the state."""
        return (weights.weight_hh.shape[1],) * len(self.states)

    def forward(self, k: Kernels, x: Array, initial: GivenState | None, weights: Weights) -> Tape:
        """Project the input with one GEMM over all steps, and run the recurrence. x (T, B, I) C-contiguous.

        An input of few features is projected by the kernels where they are the faster at it. No `initial` state, or
        None for an array of it, stands for zeros.
        """
        return self.begin(k, x, weights)(initial)

    def infer(
        self, x: Array, initial: GivenState | None, weights: Weights, lengths: Lengths | None = None
    ) -> tuple[Array, State]:
        """Return h (T, B, H) and the last state, as `forward` has them, and keep nothing; x as there.

        An LSTM's c is kept where samples end at different steps.
        """
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
        """Say whether one look shows that the weights of a run on the host, and a `state` (B, hidden), belong to x.

        What else a caller gives the kernels it has made itself, so that these need not look at anything again. Where
        something does not fit, the kernels' own checks say what.
        """
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
        """Return the way back through the run as one affine map a sample: (B, n + 1, n), rows as in `affine.join`.

        It takes the gradient at the last state, its arrays side by side, to the one at the initial state, where gy
        (T, B, H), or None, arrives on the way. The chunks are reduced at the same time, and joined.
        """
        from sparsebp.scan import affine

        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        size = len(self.states) * hidden
        maps = xp.empty((min(chunks, steps), batch, size + 1, size), dtype=tape.h.dtype)
        self.run_maps(kernels.get(xp), tape, w_hh, gy, maps)
        return affine.join_all(maps[::-1])

    def jacobians(self, tape: Tape, w_hh: Array, reverse: bool = False) -> Array:
        """Return the steps' transposed Jacobians, values on `pattern` (T, nnz, B); from the last step if `reverse`."""
        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        out = empty(xp, (steps, self.pattern(hidden).nnz, batch), tape.h.dtype)
        self.run_jacobians(kernels.get(xp), tape, w_hh, reverse, out)
        return out

    def state_jacobians(self, tape: Tape, weights: Weights) -> tuple[Array, SparsityPattern]:
        """Return the transposed Jacobians of the state after each step with respect to the one before, and a pattern.

        The values are (T, nnz, B).
        """
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
        """Return (T, gH, n, B): transposed Jacobian of the state after a step with respect to ``W_ih x`` at it.

        Gate rows as in torch; the n columns are the state's arrays one after the other.
        """
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
    bound, rows = arrays.fan_in_bound(hidden_size), cell.gates * hidden_size

    def draw(*shape: int) -> Any:
        return arrays.uniform(rng, shape, bound, dtype)

    weight_ih, weight_hh = draw(rows, input_size), draw(rows, proj_size or hidden_size)
    bias_ih, bias_hh = (draw(rows), draw(rows)) if bias else (None, None)
    return Weights(weight_ih, weight_hh, bias_ih, bias_hh, draw(proj_size, hidden_size) if proj_size else None)
