"""Recurrent cells: the equations of RNN, GRU and LSTM.

A run of a cell over time is in `runs`. The state is one or more named arrays; h, which is also the output, comes first.
"""

from __future__ import annotations

import abc
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, Nonlinearity, check_choice
from sparsebp.core.host_pool import empty
from sparsebp.kernels.operands import WeightSums
from sparsebp.kernels.spec import Kernels
from sparsebp.nn import parameters
from sparsebp.nn.dense import product, short_products, transposed_product
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.saved import GivenState, RunGradients, SavedRun, State, Weights, split
from sparsebp.patterns import SparsityPattern, hidden_pattern, lstm_pattern


class CellMath(abc.ABC):
    """The equations of a cell. ``ga`` is the gradient at the pre-activations, ``(T, B, columns · H)``."""

    name: Literal["rnn", "gru", "lstm", "mingru", "minlstm"]
    gates: int
    """Rows of the weights, in multiples of the hidden size."""
    columns: int
    """Columns of ga, in multiples of the hidden size."""
    kept = 0
    """Columns of the gates that a run keeps, in multiples of the hidden size."""
    diagonal = False
    """Whether a step's Jacobian is diagonal: the way back is then as cheap as the recursion."""
    states: ClassVar[tuple[str, ...]] = ("h",)
    """Names of the arrays that the state consists of."""
    kind: str | None = None
    """Name of the cell in the host's inference kernels; None if they lack it."""

    @abc.abstractmethod
    def run(
        self, k: Kernels, x: Array, weights: Weights, saved: SavedRun, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence over x (T, B, gH), or with w_ih (T, B, I); fill the run's states and gates."""
        # `projection` are w_ih, or None for a product with it, and the biases. `fresh`: from zeros, also written.

    @abc.abstractmethod
    def run_back(
        self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, last: GivenState, chunks: int,
        ga: Array | None, initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga, `initial` and `sums` by the recursion (one chunk), or by reduce-then-scan over several."""
        # `last` is the gradient at the state after the last step.

    def run_maps(self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Write the affine maps (chunks, B, n + 1, n) of the way back through chunks of steps, see `reduced`."""
        raise NotImplementedError

    @abc.abstractmethod
    def run_jacobians(self, k: Kernels, saved: SavedRun, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write the steps' transposed Jacobians, values on `pattern` (T, nnz, B); from the last step if `reverse`."""

    @abc.abstractmethod
    def close(self, saved: SavedRun, lengths: Lengths) -> None:
        """Change the run past each sample's end so that no gradient flows from there to an h."""
        # The Jacobians there become zero, except that a gradient at the last c passes unchanged to the sample's end. So
        # no product over padded steps overflows, and 0 · inf makes no NaN.

    # ---- the same for every cell with dense weights W_hh -----------------------------------------------------------

    def initial_weights(
        self, input_size: int, hidden_size: int, bias: bool, dtype: np.dtype, rng: np.random.Generator,
        proj_size: int = 0,
    ) -> Weights:  # fmt: skip
        """Draw parameters as torch.nn does: all of them from U(-1/√H, 1/√H)."""
        bound, rows = parameters.fan_in_bound(hidden_size), self.gates * hidden_size

        def draw(*shape: int) -> Any:
            return parameters.uniform(rng, shape, bound, dtype)

        weight_ih, weight_hh = draw(rows, input_size), draw(rows, proj_size or hidden_size)
        bias_ih, bias_hh = (draw(rows), draw(rows)) if bias else (None, None)
        return Weights(weight_ih, weight_hh, bias_ih, bias_hh, draw(proj_size, hidden_size) if proj_size else None)

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the pattern of one step's transposed Jacobian, n × n for a state of n values: by default dense."""
        return hidden_pattern(hidden)

    def inputs(self, k: Kernels, x: Array, weights: Weights) -> tuple[Any, ...]:
        """Return the arguments of `run` for x (T, B, I): its product, or x with the weights, and the biases."""
        biases = weights.bias_ih, weights.bias_hh
        if x.shape[2] > k.projected_inputs(self.gates, weights.weight_hh.shape[1], x.dtype.itemsize):
            return product(x, weights.weight_ih.T), None, *biases
        return x, weights.weight_ih, *biases

    def sums_inside(self, xp: ModuleType, saved: SavedRun, chunks: int) -> bool:
        """Whether the kernels sum the weight gradients of this run on the way back, see `summed_back`."""
        shape, dtype = saved.x.shape, saved.x.dtype
        return kernels.get(xp).sums_inside(self.gates, self.columns, saved.h.shape, shape[2], dtype.itemsize, chunks)

    def summed_back(
        self, xp: ModuleType, k: Kernels, saved: SavedRun, weights: Weights, gy: Array | None, last: GivenState,
        chunks: int, keep: bool,
    ) -> RunGradients:  # fmt: skip
        """Return the gradients at the weights, summed on the way, and at the initial state; `keep`: ga as well."""
        h0, (w_ih, w_hh, b_ih, b_hh, _) = saved.h0, weights
        grads = Weights(
            xp.empty(w_ih.shape, w_ih.dtype), xp.empty(w_hh.shape, w_hh.dtype),
            None if b_ih is None else xp.empty(b_ih.shape, b_ih.dtype),
            None if b_hh is None else xp.empty(b_hh.shape, b_hh.dtype),
        )  # fmt: skip
        ga = empty(xp, (*saved.h.shape[:2], self.columns * h0.shape[1]), h0.dtype) if keep else None
        initial = tuple(map(xp.empty, [h0.shape] * len(self.states), [h0.dtype] * len(self.states)))
        sums = WeightSums(saved.x, saved.h_prev, *grads[:4])
        self.run_back(k, saved, weights.weight_hh, gy, last, chunks, ga, initial, sums)
        return RunGradients(initial, ga, grads, True)

    def reduced(self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, chunks: int = 1) -> Array:
        """Return the way back through the run as one affine map per sample: (B, n + 1, n), rows as in `affine.join`."""
        # It takes the gradient at the last state, its arrays side by side, to the one at the initial state, where gy
        # (T, B, H), or None, arrives on the way. The chunks are reduced at the same time, and joined.
        from sparsebp.scan import algorithms

        steps, batch, hidden = saved.h.shape
        size = len(self.states) * hidden
        shape = min(chunks, steps), batch, size + 1, size
        maps = backend.namespace(saved.h).empty(shape, dtype=saved.h.dtype)
        self.run_maps(k, saved, w_hh, gy, maps)
        return algorithms.join_all(maps[::-1])

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

    def input_grad(self, ga: Array, weights: Weights) -> Array:
        """Return the gradient at x (T, B, I): one GEMM."""
        return product(self.input_part(ga), self.from_torch_order(weights.weight_ih))

    def weight_grad(self, k: Kernels, ga: Array, saved: SavedRun, weights: Weights) -> Weights:
        """Return the gradients of the weights: two GEMMs over all steps, and the sums of all steps for the biases."""
        xp = backend.namespace(ga)
        rows = ga.shape[0] * ga.shape[1]
        flat = ga.reshape(rows, ga.shape[2])
        b_ih, b_hh = (None if bias is None else xp.empty(bias.shape, ga.dtype) for bias in weights[2:4])
        with short_products(xp, max(flat.size, rows * weights.weight_ih.size, rows * weights.weight_hh.size)):
            w_ih, w_hh = (
                xp.ascontiguousarray(transposed_product(part, array.reshape(rows, array.shape[2])))
                for part, array in ((self.input_part(flat), saved.x), (self.hidden_part(flat), saved.h_prev))
            )
            first = flat.shape[1] - len(w_hh)
            by_column, w_ih = (w_ih, xp.empty(w_ih.shape, ga.dtype)) if first else (None, w_ih)
            k.sum_gates(flat, first, by_column, w_ih if first else None, b_ih, b_hh)
        return Weights(w_ih, w_hh, b_ih, b_hh)


# The equations of the three cells.


class RNNMath(CellMath):
    """``h' = f(W_ih x + b_ih + W_hh h + b_hh)``, f tanh or relu (BPPSA Eq. 9); ga (T, B, H) is the gradient at f's
    x."""

    name = "rnn"
    gates = columns = 1

    def __init__(self, nonlinearity: Nonlinearity) -> None:
        self.nonlinearity: Nonlinearity = check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
        self.kind = self.nonlinearity

    def run(
        self, k: Kernels, x: Array, weights: Weights, saved: SavedRun, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence."""
        k.rnn_forward(x, weights.weight_hh, saved.h0, self.nonlinearity, saved.h, *projection, fresh)

    def run_back(
        self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, last: GivenState, chunks: int,
        ga: Array | None, initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """``ga = grad_h * f'(h)``."""
        k.rnn_backward(saved.h, w_hh, gy, last[0], self.nonlinearity, ga, initial[0], chunks, sums)

    def run_maps(self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Multiply the Jacobians of a chunk's steps."""
        k.rnn_maps(saved.h, w_hh, gy, self.nonlinearity, maps)

    def run_jacobians(self, k: Kernels, saved: SavedRun, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write ``w_hhᵀ · diag(f'(h[t]))``; an element depends on its own step only, so order is free."""
        h = backend.namespace(saved.h).ascontiguousarray(saved.h[::-1]) if reverse else saved.h
        steps, batch, hidden = h.shape
        k.rnn_jacobians(h, w_hh, self.nonlinearity, out.reshape(steps, hidden, hidden, batch))

    def close(self, saved: SavedRun, lengths: Lengths) -> None:
        """Put the states where the slope is 0."""
        lengths.fill(saved.h, 1 if self.nonlinearity == "tanh" else 0)


class GRUMath(CellMath):
    """A GRU, gates in torch's order r, z, n (BPPSA Eq. 10; its hidden Jacobian is Eq. 11).

    ``r = σ(W_ir x + b_ir + W_hr h + b_hr)``, z alike, ``n = tanh(W_in x + b_in + r * M)`` with ``M = W_hn h + b_hn``;
    ``h' = (1 - z) * n + z * h``. ga (T, B, 4H) holds the gradients at the arguments of n, r and z, and at M: its first
    three quarters belong to the input weights, its last three to the hidden weights, so neither product copies.
    """

    name = kind = "gru"
    gates, columns, kept = 3, 4, 4

    def run(
        self, k: Kernels, x: Array, weights: Weights, saved: SavedRun, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence, keeping every gate."""
        hidden = weights.weight_hh.shape[1]
        if weights.bias_hh is None:
            b_hn = backend.namespace(x).zeros(hidden, dtype=x.dtype)
        else:
            b_hn = weights.bias_hh[2 * hidden :]
        k.gru_forward(x, weights.weight_hh, b_hn, saved.h0, saved.h, saved.gates, *projection, fresh)

    def run_back(
        self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, last: GivenState, chunks: int,
        ga: Array | None, initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """With d_n, d_r, d_z and d_M the quarters of ga, in the notation of Eq. 11.

        ``d_n = grad_h * (1 - z) * (1 - n²)``, ``d_M = d_n * r``, ``d_r = d_n * M * r * (1 - r)``,
        ``d_z = grad_h * (h_prev - n) * z * (1 - z)``.
        """
        k.gru_backward(saved.h, saved.h0, saved.gates, w_hh, gy, last[0], ga, initial[0], chunks, sums)

    def run_maps(self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Multiply the Jacobians of a chunk's steps."""
        k.gru_maps(saved.h, saved.h0, saved.gates, w_hh, gy, maps)

    def run_jacobians(self, k: Kernels, saved: SavedRun, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write Eq. 11 for every step. Reversed, step t comes at T-1-t; only the state before each step is read."""
        steps, batch, hidden = saved.h.shape
        out = out.reshape(steps, hidden, hidden, batch)
        if not reverse:
            k.gru_jacobians(saved.h, saved.h0, saved.gates, w_hh, out)
            return
        xp = backend.namespace(saved.h)
        states = xp.zeros_like(saved.states[0])  # only states before a step are read: the last entry is unused
        states[:-1] = saved.h_prev[::-1]
        k.gru_jacobians(states[1:], states[0], xp.ascontiguousarray(saved.gates[::-1]), w_hh, out)  # type: ignore[index]

    def close(self, saved: SavedRun, lengths: Lengths) -> None:
        """Set r = z = M = 0 and n = 1: every term of Eq. 11 vanishes."""
        for gate, value in zip(split(saved.gates, 4), (0, 0, 1, 0), strict=True):
            lengths.fill(gate, value)


class LSTMMath(CellMath):
    """An LSTM, gates in torch's order i, f, g, o and the state (h, c); ga (T, B, 4H) is the gradient at their inputs.

    ``i = σ(W_ii x + b_ii + W_hi h + b_hi)``, f and o alike, g with tanh; ``c' = f * c + i * g`` and
    ``h' = o * tanh(c')`` (Hochreiter & Schmidhuber, "Long Short-Term Memory", 1997; Gers et al., "Learning to forget",
    2000). The Jacobian of a step has two dense and two diagonal blocks. For ``h' = W_hr (o * tanh(c'))`` see `runs`.
    """

    name = "lstm"
    kind = "lstm"
    gates = columns = kept = 4
    states = ("h", "c")

    def run(
        self, k: Kernels, x: Array, weights: Weights, saved: SavedRun, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence, keeping every gate."""
        k.lstm_forward(x, weights.weight_hh, saved.h0, saved.c0, saved.h, saved.c, saved.gates, *projection, fresh)

    def run_back(
        self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, last: GivenState, chunks: int,
        ga: Array | None, initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """The gradient at h goes through o, and to c: ``through = grad_c + grad_h * o * (1 - tanh²(c))``.

        ``d_i = through * g * i * (1 - i)``, ``d_f = through * c_prev * f * (1 - f)``, ``d_g = through * i * (1 - g²)``,
        ``d_o = grad_h * tanh(c) * o * (1 - o)``.
        """
        k.lstm_backward(saved.c, saved.c0, saved.gates, w_hh, gy, *last, ga, *initial, chunks, sums)

    def run_maps(self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Multiply the Jacobians of a chunk's steps."""
        k.lstm_maps(saved.c, saved.c0, saved.gates, w_hh, gy, maps)

    def run_jacobians(self, k: Kernels, saved: SavedRun, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write every step's four blocks. A step reads c before and after it, so the order is turned afterwards."""
        k.lstm_jacobians(saved.c, saved.c0, saved.gates, w_hh, out)
        for t in range(len(out) // 2 if reverse else 0):  # in place: they may be most of the memory
            first = out[t].copy()
            out[t] = out[-1 - t]
            out[-1 - t] = first

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the pattern whose blocks from c are diagonal."""
        return lstm_pattern(hidden)

    def close(self, saved: SavedRun, lengths: Lengths) -> None:
        """Set i = g = o = 0, f = 1 and c = 0: all blocks vanish but the one from c to c, which becomes the identity."""
        lengths.fill(saved.c, 0)
        for gate, value in zip(split(saved.gates, 4), (0, 1, 0, 0), strict=True):
            lengths.fill(gate, value)
