"""RNN: h[t] = f(W_ih x[t] + b_ih + W_hh h[t-1] + b_hh), f = tanh or relu (BPPSA Eq. 9)."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_choice
from sparsebp.core.types import Array, Nonlinearity, Seed
from sparsebp.kernels.api import Kernels
from sparsebp.kernels.operands import WeightSums
from sparsebp.nn.recurrent.cell_math import CellMath
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.lone import takes_lone
from sparsebp.nn.recurrent.recurrent import Recurrent, RecurrentOptions
from sparsebp.nn.recurrent.recurrent_cell import RecurrentCell
from sparsebp.nn.recurrent.tape import GivenState, State, Tape, Weights


class RNNMath(CellMath):
    """The specifics of the RNN: ga is the gradient at the pre-activation, (T, B, H)."""

    name = "rnn"
    gates = 1
    columns = 1

    def __init__(self, nonlinearity: Nonlinearity) -> None:
        self.nonlinearity: Nonlinearity = check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
        self.kind = self.nonlinearity

    def input_bias(self, weights: Weights) -> Array | None:
        """Return b_ih + b_hh."""
        return None if weights.bias_ih is None else weights.bias_ih + weights.bias_hh

    def run(self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None) -> None:
        """Run the recurrence."""
        k.rnn_forward(x, weights.weight_hh, tape.h0, self.nonlinearity, tape.h, *projection)

    def run_back(
        self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int, ga: Array | None,
        initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga, `initial` and `sums`."""
        k.rnn_backward(tape.h, w_hh, gy, last[0], self.nonlinearity, ga, initial[0], chunks, sums)

    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write ``w_hhᵀ · diag(f'(h[t]))``; an element depends on its own step only, so order is free."""
        h = backend.namespace(tape.h).ascontiguousarray(tape.h[::-1]) if reverse else tape.h
        steps, batch, hidden = h.shape
        k.rnn_jacobians(h, w_hh, self.nonlinearity, out.reshape(steps, hidden, hidden, batch))

    def run_maps(self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Reduce chunks of the run."""
        k.rnn_maps(tape.h, w_hh, gy, self.nonlinearity, maps)

    def gate_gradients(self, tape: Tape, grads: State, ga: Array) -> None:
        """``ga = grad_h · f'(h)``."""
        h = tape.h
        slope = 1 - h * h if self.nonlinearity == "tanh" else (~(h <= 0)).astype(h.dtype)  # 1 at a NaN, as in PyTorch
        backend.namespace(ga).multiply(grads[0], slope, out=ga)

    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Put the states where the slope is 0."""
        lengths.fill(tape.h, 1 if self.nonlinearity == "tanh" else 0)


@takes_lone(2, 1)
class RNN(Recurrent):
    """A recurrent layer with torch.nn.RNN's arguments, parameters and layouts; see `Recurrent` for all of them.

    Parameters
    ----------
    input_size, hidden_size
        Features of the input and of the hidden state.
    num_layers
        Layers stacked on one another.
    nonlinearity
        ``"tanh"`` or ``"relu"``.
    bias, batch_first, dropout, bidirectional
        As `Recurrent`.
    **options
        As `Recurrent`: backward, up_levels, chunks, workers, memory_limit, device, dtype, rng.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Nonlinearity = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        self.nonlinearity: Nonlinearity = nonlinearity
        super().__init__(
            RNNMath(nonlinearity), input_size, hidden_size, num_layers, bias=bias, batch_first=batch_first,
            dropout=dropout, bidirectional=bidirectional, **options,
        )  # fmt: skip


@takes_lone(1, 0)
class RNNCell(RecurrentCell):
    """One step of an RNN, as `torch.nn.RNNCell`; see `RecurrentCell`."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: Nonlinearity = "tanh",
        device: Any = None, dtype: Any = np.float32, *, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__(RNNMath(nonlinearity), input_size, hidden_size, bias, device=device, dtype=dtype, rng=rng)
