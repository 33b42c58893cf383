"""An LSTM whose h is a projection, ``h = W_hr m`` with ``m = o * tanh(c)``, as an LSTM without one around which it is.

The pre-activations ``W_hh h = (W_hh W_hr) m`` follow from m, so the recursion itself is that of an LSTM with the state
(m, c) and the weights ``W_hh W_hr``: every kernel and every scan is there. The first step is fed by h0, which is no
projection of anything: its part goes into the projected input, and m begins with zero. h, and what comes to it from y,
is then one product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable

from sparsebp import backend
from sparsebp.backend.memory import empty
from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.nn.recurrent.cell_math import CellMath
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.lstm import LSTMMath
from sparsebp.nn.recurrent.products import product, project, transposed_product
from sparsebp.nn.recurrent.tape import GivenState, RunGradients, Tape, Weights, set_initial
from sparsebp.patterns import SparsityPattern, hidden_pattern


class ProjectedLSTMMath(LSTMMath):
    """The specifics of an LSTM with proj_size: ``tape.core`` is the run of its recursion."""

    core = LSTMMath()

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
                gx[0] += backend.matmul(h0, weights.weight_hh.T)
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
        last_m = None if last[0] is None else backend.matmul(last[0], w_hr)
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
        w_hr = transposed_product(at_h.reshape(rows, at_h.shape[2]), m.reshape(rows, m.shape[2]))  # type: ignore[union-attr]  # `around` leaves it
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
    return backend.matmul(weights.weight_hh, _projection(weights))


def _core(tape: Tape) -> Tape:
    return tape.core  # type: ignore[return-value]  # a run of this cell has one
