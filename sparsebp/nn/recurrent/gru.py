"""GRU (BPPSA Eq. 10), gates in torch's order r, z, n; its hidden Jacobian is Eq. 11."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from sparsebp import backend
from sparsebp.backend.memory import empty
from sparsebp.core.types import Array, Seed
from sparsebp.kernels.api import Kernels
from sparsebp.kernels.operands import WeightSums
from sparsebp.nn.recurrent.cell_math import CellMath
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.lone import takes_lone
from sparsebp.nn.recurrent.recurrent import Recurrent, RecurrentOptions
from sparsebp.nn.recurrent.recurrent_cell import RecurrentCell
from sparsebp.nn.recurrent.tape import GivenState, State, Tape, Weights, split


class GRUMath(CellMath):
    """The specifics of the GRU: ga (T, B, 4H) holds the gradients at N, R, Z and M, in the order n, r, z, m.

    M = W_hn h + b_hn has a gradient of its own, so the first three quarters belong to the input weights and the last
    three to the hidden weights, and neither product copies.
    """

    name = kind = "gru"
    gates = 3
    columns = 4

    def input_bias(self, weights: Weights) -> Array | None:
        """Return b_ih, plus b_hh for r and z; the n part of b_hh is inside M."""
        if weights.bias_ih is None:
            return None
        hidden = weights.weight_hh.shape[1]
        bias = weights.bias_ih.copy()
        bias[: 2 * hidden] += weights.bias_hh[: 2 * hidden]  # type: ignore[index]  # both biases are there, or none
        return bias

    def run(self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None) -> None:
        """Run the recurrence, keeping every gate."""
        xp = backend.namespace(x)
        hidden = weights.weight_hh.shape[1]
        b_hn = xp.zeros(hidden, dtype=x.dtype) if weights.bias_hh is None else weights.bias_hh[2 * hidden :]
        if tape.gates is None:
            tape.gates = empty(xp, (*x.shape[:2], 4 * hidden), x.dtype)
        k.gru_forward(x, weights.weight_hh, b_hn, tape.h0, tape.h, tape.gates, *projection)

    def run_back(
        self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int, ga: Array | None,
        initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga, `initial` and `sums`."""
        k.gru_backward(tape.h, tape.h0, tape.gates, w_hh, gy, last[0], ga, initial[0], chunks, sums)

    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write Eq. 11 for every step. Reversed, the states before each step stand in for the states after the last."""
        steps, batch, hidden = tape.h.shape
        out = out.reshape(steps, hidden, hidden, batch)
        if not reverse:
            k.gru_jacobians(tape.h, tape.h0, tape.gates, w_hh, out)
            return
        xp = backend.namespace(tape.h)
        states = xp.zeros_like(tape.states[0])  # only states before a step are read: the last entry is unused
        states[:-1] = tape.h_prev[::-1]
        k.gru_jacobians(states[1:], states[0], xp.ascontiguousarray(tape.gates[::-1]), w_hh, out)  # type: ignore[index]

    def run_maps(self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Reduce chunks of the run."""
        k.gru_maps(tape.h, tape.h0, tape.gates, w_hh, gy, maps)

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


@takes_lone(2, 1)
class GRU(Recurrent):
    """A recurrent layer with torch.nn.GRU's arguments, parameters and layouts; see `Recurrent` for all of them.

    Parameters
    ----------
    input_size, hidden_size
        Features of the input and of the hidden state.
    num_layers
        Layers stacked on one another.
    bias, batch_first, dropout, bidirectional
        As `Recurrent`.
    **options
        As `Recurrent`: backward, up_levels, chunks, workers, memory_limit, device, dtype, rng.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, **options: Unpack[RecurrentOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            GRUMath(), input_size, hidden_size, num_layers, bias=bias, batch_first=batch_first, dropout=dropout,
            bidirectional=bidirectional, **options,
        )  # fmt: skip


@takes_lone(1, 0)
class GRUCell(RecurrentCell):
    """One step of a GRU, as `torch.nn.GRUCell`; see `RecurrentCell`."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = np.float32, *,
        rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__(GRUMath(), input_size, hidden_size, bias, device=device, dtype=dtype, rng=rng)
