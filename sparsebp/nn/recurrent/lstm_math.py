"""The specifics of the LSTM's cell: gates in torch's order i, f, g, o, the state (h, c); and of one with a projection.

``c' = f * c + i * g`` and ``h' = o * tanh(c')`` (Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Gers et
al., "Learning to forget", 2000). The Jacobian of a step has two dense and two diagonal blocks.

A projection, ``h = W_hr m`` with ``m = o * tanh(c)``, goes around an LSTM without one: the pre-activations
``W_hh h = (W_hh W_hr) m`` follow from m, so the recursion itself is that of an LSTM with the state (m, c) and the
weights ``W_hh W_hr``, and every kernel and every scan is there. The first step is fed by h0, which is no projection of
anything: its part goes into the projected input, and m begins with zero. h, and what comes to it from y, is then one
product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable

from sparsebp import backend
from sparsebp.backend.memory import empty
from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.kernels.operands import WeightSums
from sparsebp.nn.recurrent.cell_math import CellMath
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.products import product, project, short_products, transposed_product
from sparsebp.nn.recurrent.tape import GivenState, RunGradients, State, Tape, Weights, set_initial, split
from sparsebp.patterns import SparsityPattern, hidden_pattern, lstm_pattern


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
