"""Recurrent cells: the equations of RNN, GRU and LSTM.

Layers see a `CellMath` only. The state is one or more named arrays; h, which is
also the output, comes first.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.backend import empty
from sparsebp.core.check import Array, Nonlinearity, check_choice
from sparsebp.kernels.operands import WeightSums
from sparsebp.kernels.spec import Kernels
from sparsebp.nn import layer
from sparsebp.nn.dense import product, project, short_products, transposed_product
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.saved import GivenState, RunGradients, State, SummedGradients, Tape, Weights, split
from sparsebp.patterns import SparsityPattern, hidden_pattern, lstm_pattern


class CellMath(abc.ABC):
    """The equations of a cell. ``ga`` is the gradient at the pre-activations, ``(T, B, columns · H)``."""

    name: Literal["rnn", "gru", "lstm", "mingru", "minlstm"]
    gates: int
    """Rows of the weights, in multiples of the hidden size."""
    columns: int
    """Columns of ga, in multiples of the hidden size."""
    kept: int
    """Columns of the gates that a run keeps, in multiples of the hidden size."""
    diagonal = False
    """Whether a step's Jacobian is diagonal: the way back is then as cheap as the recursion."""
    states: ClassVar[tuple[str, ...]] = ("h",)
    """Names of the arrays that the state consists of."""
    kind: str | None = None
    """Name of the cell in the host's inference kernels; None if they lack it."""
    options: tuple[Any, ...] = ()
    """Arguments of the kernels other than arrays."""

    @abc.abstractmethod
    def run(
        self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence over x (T, B, gH), or with w_ih (T, B, I); fill the tape's states and gates."""
        # `projection` are w_ih, or None for a product with it, and the biases. `fresh`: from zeros, also written.

    @abc.abstractmethod
    def kept_arrays(self, tape: Tape) -> tuple[Array | None, ...]:
        """Return the arrays of a run that the backward and the map kernels read."""

    @abc.abstractmethod
    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write the values that `jacobians` returns."""

    @abc.abstractmethod
    def gate_gradients(self, tape: Tape, grads: State, ga: Array) -> None:
        """Write ga from the full gradients at every state, (T, B, H) each: no recurrence, all steps at once."""

    @abc.abstractmethod
    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Change the tape past each sample's end so that no gradient flows from there to an h."""
        # The Jacobians there become zero, except that a gradient at the last c passes unchanged to the sample's end. So
        # no product over padded steps overflows, and 0 · inf makes no NaN.

    def resume(self, k: Kernels, tape: Tape, h0: Array) -> None:
        """Change the state before a run's first step: of a cell whose Jacobian is diagonal."""
        raise NotImplementedError

    def resume_back(self, tape: Tape, gy: Array | None, last: Array, run: RunGradients) -> RunGradients:
        """Change the gradient at the state after a run's last step: of a cell whose Jacobian is diagonal."""
        raise NotImplementedError

    # ---- the same for every cell, but for one that wraps another -----------------------------------------------------

    def initial_weights(
        self, input_size: int, hidden_size: int, bias: bool, dtype: np.dtype, rng: np.random.Generator,
        proj_size: int = 0,
    ) -> Weights:  # fmt: skip
        """Draw parameters as torch.nn does: all of them from U(-1/√H, 1/√H)."""
        bound, rows = layer.fan_in_bound(hidden_size), self.gates * hidden_size

        def draw(*shape: int) -> Any:
            return layer.uniform(rng, shape, bound, dtype)

        weight_ih, weight_hh = draw(rows, input_size), draw(rows, proj_size or hidden_size)
        bias_ih, bias_hh = (draw(rows), draw(rows)) if bias else (None, None)
        return Weights(weight_ih, weight_hh, bias_ih, bias_hh, draw(proj_size, hidden_size) if proj_size else None)

    def run_back(
        self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int, ga: Array | None,
        initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga, `initial` and `sums` by the recursion (one chunk), or by reduce-then-scan over several."""
        # `last` is the gradient at the state after the last step.
        back = getattr(k, f"{self.name}_backward")
        back(*self.kept_arrays(tape), w_hh, gy, *last, *self.options, ga, *initial, chunks, sums)

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the pattern of one step's transposed Jacobian, n × n for a state of n values: by default dense."""
        return hidden_pattern(hidden)

    def infer(
        self, x: Array, initial: GivenState | None, weights: Weights, lengths: Lengths | None = None
    ) -> tuple[Array, State]:
        """Return h (T, B, H) and the last state, as a run from `begin` has them, and keep nothing; x as there."""
        # An LSTM's c is kept where samples end at different steps.
        xp, (steps, batch, _) = backend.namespace(x), x.shape
        if self.kind is None or not backend.is_host(xp) or (lengths is not None and len(self.states) > 1):
            k = kernels.get(xp)
            tape = self.finish(k, weights, *self.begin(k, x, weights), initial)
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
        """Say whether x, the weights and a `state` (B, hidden) on the host need no check by the kernels."""
        if type(x) is not np.ndarray or x.dtype not in backend.FLOAT_DTYPES or hidden == 0:
            return False
        rows = self.gates * hidden
        of_state = [(len(state[0]), hidden)] * len(state) if state else ()
        shapes = (rows, x.shape[-1]), (rows, hidden), (rows,), (rows,), *of_state
        for array, shape in zip((*weights[:4], *state), shapes, strict=True):
            if array is not None and not (
                type(array) is np.ndarray and array.shape == shape and array.dtype == x.dtype
                and array.flags.c_contiguous
            ):  # fmt: skip
                return False
        return True

    def begin(self, k: Kernels, x: Array, weights: Weights) -> tuple[Tape, tuple[Any, ...]]:
        """Project x (T, B, I), C-contiguous; return a tape, and what `finish` takes with it."""
        # One GEMM over all steps, or by the kernels where they are faster, with few features.
        return self.blank(x, weights), self.inputs(k, x, weights)

    def finish(
        self, k: Kernels, weights: Weights, tape: Tape, inputs: tuple[Any, ...], initial: GivenState | None
    ) -> Tape:
        """Run the recurrence from an initial state; None for it, or for an array of it, stands for zeros."""
        given = () if initial is None or all(array is None for array in initial) else initial
        for states, first in zip(tape.states, given, strict=False):
            states[0] = 0 if first is None else first
        self.run(k, inputs[0], weights, tape, *inputs[1:], fresh=not given)
        return tape

    def blank(self, x: Array, weights: Weights) -> Tape:
        """Return a tape with room for the states of a run over x."""
        xp, (steps, batch, _), hidden = backend.namespace(x), x.shape, len(weights.weight_ih) // self.gates
        states = tuple(empty(xp, (len(self.states), steps + 1, batch, hidden), x.dtype))
        return Tape(x, states, empty(xp, (steps, batch, self.kept * hidden), x.dtype) if self.kept else None)

    def inputs(self, k: Kernels, x: Array, weights: Weights) -> tuple[Any, ...]:
        """Return the arguments of `run` for x (T, B, I): its product, or x with the weights, and the biases."""
        biases = weights.bias_ih, weights.bias_hh
        if x.shape[2] > k.projected_inputs(self.gates, weights.weight_hh.shape[1], x.dtype.itemsize):
            return product(x, weights.weight_ih.T), None, *biases
        return x, weights.weight_ih, *biases

    def empty_gradients(self, tape: Tape) -> RunGradients:
        """Return arrays for the gradients of a run."""
        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        ga = empty(xp, (steps, batch, self.columns * hidden), tape.h.dtype)
        return RunGradients(ga, tuple(xp.empty((batch, hidden), dtype=tape.h.dtype) for _ in self.states))

    def unprojected(self, tape: Tape, weights: Weights) -> tuple[CellMath, Tape, Array]:
        """Return the recursion itself, its run and its weights w_hh: for a cell that wraps another, that one's."""
        return self, tape, weights.weight_hh

    def with_projection(
        self, tape: Tape, weights: Weights, gy: Array | None, last: GivenState,
        back: Callable[[CellMath, Tape, Array, Array | None, GivenState], RunGradients],
    ) -> RunGradients:  # fmt: skip
        """Take gradients back through a projection, and with `back` through the recursion."""
        return back(self, tape, weights.weight_hh, gy, last)

    def backward(
        self, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int = 1
    ) -> RunGradients:  # fmt: skip
        """Return the gradients from gy (T, B, H) and `last` (B, H), C-contiguous; each may be None."""
        grads = self.empty_gradients(tape)
        k = kernels.get(backend.namespace(tape.h))
        self.run_back(k, tape, w_hh, gy, last, chunks, grads.ga, grads.initial)
        return grads

    def sums_inside(self, k: Kernels, tape: Tape, chunks: int) -> bool:
        """Whether the kernels sum the weight gradients of this run on the way back, see `summed_backward`."""
        x = tape.x
        return k.sums_inside(self.gates, self.columns, tape.h.shape, x.shape[2], x.dtype.itemsize, chunks)

    def summed_backward(
        self, k: Any, tape: Tape, weights: Weights, gy: Array | None, last: GivenState, chunks: int = 1, *,
        keep: bool = False,
    ) -> SummedGradients:  # fmt: skip
        """Return the gradients at the weights and the initial state, as `backward` does; `keep` stores ga as well."""
        h0 = tape.h0
        xp = backend.namespace(h0)
        grads = Weights(*[None if a is None else xp.empty(a.shape, a.dtype) for a in weights])
        ga = self.empty_gradients(tape).ga if keep else None
        initial = tuple(map(xp.empty, [h0.shape] * len(self.states), [h0.dtype] * len(self.states)))
        sums = WeightSums(tape.x, tape.h_prev, *grads[:4])
        self.run_back(k, tape, weights.weight_hh, gy, last, chunks, ga, initial, sums)
        return SummedGradients(grads, initial, ga)

    def reduced(self, tape: Tape, w_hh: Array, gy: Array | None, chunks: int = 1) -> Array:
        """Return the way back through the run as one affine map per sample: (B, n + 1, n), rows as in `affine.join`."""
        # It takes the gradient at the last state, its arrays side by side, to the one at the initial state, where gy
        # (T, B, H), or None, arrives on the way. The chunks are reduced at the same time, and joined.
        from sparsebp.scan import algorithms

        xp = backend.namespace(tape.h)
        steps, batch, hidden = tape.h.shape
        size = len(self.states) * hidden
        maps = xp.empty((min(chunks, steps), batch, size + 1, size), dtype=tape.h.dtype)
        getattr(kernels.get(xp), f"{self.name}_maps")(*self.kept_arrays(tape), w_hh, gy, *self.options, maps)
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
        """Bring gate rows from torch's order to the one of `input_part`."""
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
        """Return the gradients of the weights: two GEMMs over all steps, and the sums of all steps for the biases."""
        xp = backend.namespace(ga)
        rows = ga.shape[0] * ga.shape[1]
        flat = ga.reshape(rows, ga.shape[2])
        b_ih, b_hh = (None if bias is None else xp.empty(bias.shape, ga.dtype) for bias in weights[2:4])
        with short_products(xp, max(flat.size, rows * weights.weight_ih.size, rows * weights.weight_hh.size)):
            w_ih, w_hh = (
                xp.ascontiguousarray(transposed_product(part, array.reshape(rows, array.shape[2])))
                for part, array in ((self.input_part(flat), tape.x), (self.hidden_part(flat), tape.h_prev))
            )
            first = flat.shape[1] - len(w_hh)
            by_column, w_ih = (w_ih, xp.empty(w_ih.shape, ga.dtype)) if first else (None, w_ih)
            kernels.get(xp).unchecked.sum_gates(flat, first, by_column, w_ih if first else None, b_ih, b_hh)
        return Weights(w_ih, w_hh, b_ih, b_hh)


# The equations of the three cells.


class RNNMath(CellMath):
    """``h' = f(W_ih x + b_ih + W_hh h + b_hh)``, f tanh or relu (BPPSA Eq. 9); ga (T, B, H) is the gradient at f's
    x."""

    name = "rnn"
    gates, columns, kept = 1, 1, 0

    def __init__(self, nonlinearity: Nonlinearity) -> None:
        self.nonlinearity: Nonlinearity = check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
        self.kind, self.options = self.nonlinearity, (self.nonlinearity,)

    def run(
        self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence."""
        k.rnn_forward(x, weights.weight_hh, tape.h0, self.nonlinearity, tape.h, *projection, fresh)

    def kept_arrays(self, tape: Tape) -> tuple[Array | None, ...]:
        """Return h."""
        return (tape.h,)

    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write ``w_hhᵀ · diag(f'(h[t]))``; an element depends on its own step only, so order is free."""
        h = backend.namespace(tape.h).ascontiguousarray(tape.h[::-1]) if reverse else tape.h
        steps, batch, hidden = h.shape
        k.rnn_jacobians(h, w_hh, self.nonlinearity, out.reshape(steps, hidden, hidden, batch))

    def gate_gradients(self, tape: Tape, grads: State, ga: Array) -> None:
        """``ga = grad_h · f'(h)``."""
        h = tape.h
        slope = 1 - h * h if self.nonlinearity == "tanh" else (~(h <= 0)).astype(h.dtype)  # 1 at a NaN, as in PyTorch
        backend.namespace(ga).multiply(grads[0], slope, out=ga)

    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Put the states where the slope is 0."""
        lengths.fill(tape.h, 1 if self.nonlinearity == "tanh" else 0)


class GRUMath(CellMath):
    """A GRU, gates in torch's order r, z, n (BPPSA Eq. 10; its hidden Jacobian is Eq. 11).

    ``r = σ(W_ir x + b_ir + W_hr h + b_hr)``, z alike, ``n = tanh(W_in x + b_in + r * M)`` with ``M = W_hn h + b_hn``;
    ``h' = (1 - z) * n + z * h``. ga (T, B, 4H) holds the gradients at the arguments of n, r and z, and at M: its first
    three quarters belong to the input weights, its last three to the hidden weights, so neither product copies.
    """

    name = kind = "gru"
    gates, columns, kept = 3, 4, 4

    def run(
        self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence, keeping every gate."""
        hidden = weights.weight_hh.shape[1]
        if weights.bias_hh is None:
            b_hn = backend.namespace(x).zeros(hidden, dtype=x.dtype)
        else:
            b_hn = weights.bias_hh[2 * hidden :]
        k.gru_forward(x, weights.weight_hh, b_hn, tape.h0, tape.h, tape.gates, *projection, fresh)

    def kept_arrays(self, tape: Tape) -> tuple[Array | None, ...]:
        """Return h, h0 and the gates."""
        return tape.h, tape.h0, tape.gates

    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write Eq. 11 for every step. Reversed, step t comes at T-1-t; only the state before each step is read."""
        steps, batch, hidden = tape.h.shape
        out = out.reshape(steps, hidden, hidden, batch)
        if not reverse:
            k.gru_jacobians(tape.h, tape.h0, tape.gates, w_hh, out)
            return
        xp = backend.namespace(tape.h)
        states = xp.zeros_like(tape.states[0])  # only states before a step are read: the last entry is unused
        states[:-1] = tape.h_prev[::-1]
        k.gru_jacobians(states[1:], states[0], xp.ascontiguousarray(tape.gates[::-1]), w_hh, out)  # type: ignore[index]

    def gate_gradients(self, tape: Tape, grads: State, ga: Array) -> None:
        """Write the four gradients, in the notation of Eq. 11: j2 = r(1-r), j6 = 1-n², j7 = 1-z, j9 = z(1-z)."""
        (grad_h,) = grads
        r, z, n, m = split(tape.gates, 4)
        d_n, d_r, d_z, d_m = split(ga, 4)
        d_n[...] = grad_h * (1 - z) * (1 - n * n)
        d_m[...] = d_n * r
        d_r[...] = d_n * m * (r * (1 - r))
        d_z[...] = grad_h * (tape.h_prev - n) * (z * (1 - z))

    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Set r = z = M = 0 and n = 1: every term of Eq. 11 vanishes."""
        for gate, value in zip(split(tape.gates, 4), (0, 0, 1, 0), strict=True):
            lengths.fill(gate, value)


class LSTMMath(CellMath):
    """An LSTM, gates in torch's order i, f, g, o and the state (h, c); ga (T, B, 4H) is the gradient at their inputs.

    ``i = σ(W_ii x + b_ii + W_hi h + b_hi)``, f and o alike, g with tanh; ``c' = f * c + i * g`` and
    ``h' = o * tanh(c')`` (Hochreiter & Schmidhuber, "Long Short-Term Memory", 1997; Gers et al., "Learning to forget",
    2000). The Jacobian of a step has two dense and two diagonal blocks.
    """

    name = "lstm"
    kind: str | None = "lstm"
    gates = columns = kept = 4
    states = ("h", "c")

    def run(
        self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence, keeping every gate."""
        k.lstm_forward(x, weights.weight_hh, tape.h0, tape.c0, tape.h, tape.c, tape.gates, *projection, fresh)

    def kept_arrays(self, tape: Tape) -> tuple[Array | None, ...]:
        """Return c, c0 and the gates."""
        return tape.c, tape.c0, tape.gates

    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write every step's four blocks. A step reads c before and after it, so the order is turned afterwards."""
        k.lstm_jacobians(tape.c, tape.c0, tape.gates, w_hh, out)
        for t in range(len(out) // 2 if reverse else 0):  # in place: they may be most of the memory
            first = out[t].copy()
            out[t] = out[-1 - t]
            out[-1 - t] = first

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the pattern whose blocks from c are diagonal."""
        return lstm_pattern(hidden)

    def gate_gradients(self, tape: Tape, grads: State, ga: Array) -> None:
        """Write the four gradients; the gradient at h goes through o, and through tanh(c) to c."""
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
    """An LSTM with proj_size, ``h = W_hr m`` with ``m = o * tanh(c)``, around an LSTM without one, `core`.

    Since ``W_hh h = (W_hh W_hr) m``, the recursion is that of an LSTM with the state (m, c) and the weights ``W_hh
    W_hr``, so every kernel and scan works on it. h0 is not a projection of an m: its part is added to the projected
    input, and m begins with zero. All h, and the gradients at them, are then one product over all steps.
    """

    core = LSTMMath()
    kind = None

    def begin(self, k: Kernels, x: Array, weights: Weights) -> tuple[Tape, tuple[Any, ...]]:
        """Project the input."""
        folded = weights._replace(weight_hh=_folded(weights), weight_hr=None)
        return self.core.blank(x, folded), (folded, project(x, weights.weight_ih, None))

    def finish(
        self, k: Kernels, weights: Weights, tape: Tape, inputs: tuple[Any, ...], initial: GivenState | None
    ) -> Tape:
        """Run the recursion, and project its states."""
        (h0, c0), (folded, gx), x = initial or (None, None), inputs, tape.x
        if h0 is not None:
            gx[0] += product(h0, weights.weight_hh.T)
        core = self.core.finish(k, folded, tape, (gx, None, *folded[2:4]), (None, c0))
        h = empty(backend.namespace(x), (len(x) + 1, *x.shape[1:2], weights.weight_hh.shape[1]), x.dtype)
        h[0] = 0 if h0 is None else h0
        h[1:] = product(core.h, _projection(weights).T)
        return Tape(x, (h, core.states[1]), core=core)

    def unprojected(self, tape: Tape, weights: Weights) -> tuple[CellMath, Tape, Array]:
        """Return the LSTM without a projection."""
        return self.core, _core(tape), _folded(weights)

    def with_projection(
        self, tape: Tape, weights: Weights, gy: Array | None, last: GivenState,
        back: Callable[[CellMath, Tape, Array, Array | None, GivenState], RunGradients],
    ) -> RunGradients:  # fmt: skip
        """Take the gradient at h to m and back through the recursion; then compute it at every h."""
        w_hr = _projection(weights)
        at_m = None if gy is None else product(gy, w_hr)
        last_m = None if last[0] is None else product(last[0], w_hr)
        found = back(*self.unprojected(tape, weights), at_m, (last_m, *last[1:]))
        at_h = empty(backend.namespace(tape.h), tape.states[0].shape, tape.h.dtype)  # entry t feeds step t
        at_h[:-1] = product(found.ga, weights.weight_hh)
        at_h[-1] = 0 if last[0] is None else last[0]
        if gy is not None:
            at_h[1:] += gy
        return RunGradients(found.ga, (at_h[0].copy(), *found.initial[1:]), at_h[1:])

    def sums_inside(self, k: Kernels, tape: Tape, chunks: int) -> bool:
        """Return False: the weights' gradients need ga."""
        return False

    def weight_grad(self, ga: Array, tape: Tape, weights: Weights, at_h: Array | None = None) -> Weights:
        """Return the weight gradients with the projection's: one more GEMM."""
        grads = super().weight_grad(ga, tape, weights)
        m = _core(tape).h
        rows = m.shape[0] * m.shape[1]
        at = at_h.reshape(rows, at_h.shape[2])  # type: ignore[union-attr]  # `with_projection` leaves it
        with short_products(backend.namespace(ga), at.size * m.shape[2]):
            w_hr = transposed_product(at, m.reshape(rows, m.shape[2]))
        return grads._replace(weight_hr=backend.namespace(ga).ascontiguousarray(w_hr))

    def state_jacobians(self, tape: Tape, weights: Weights) -> tuple[Array, SparsityPattern]:
        """Return the Jacobians of (h, c), dense: the projection mixes the units."""
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
