"""The base of RNNCell and GRUCell: one step of a recurrent layer, with the hidden state as the differentiated input."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core.arguments import check_flag, check_generator, check_integer
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array, Seed
from sparsebp.nn.arrays import parameter_dtype
from sparsebp.nn.gradients import Shared
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.recurrent.cell_math import CellMath, StateGradients, Tape, Weights, initial_weights


class CellGradients(StateGradients):
    """`Gradients` of a cell, those with respect to the state before the step among them."""

    __slots__ = ()
    hidden = StateGradients.h0  # (B, hidden_size), by the name that a cell's state has


class RecurrentCell(Layer):
    """One step: ``h' = cell(x, h)``, with torch.nn's parameters ``weight_ih``, ``weight_hh``, ``bias_ih``, ``bias_hh``.

    Parameters
    ----------
    cell
        The cell's specifics (given by the subclass).
    input_size, hidden_size, bias
        As in torch.nn.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values.
    """

    replayable = True

    def __init__(
        self, cell: CellMath, input_size: int, hidden_size: int, bias: bool = True, *, device: Any = None,
        dtype: Any = np.float32, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        input_size = check_integer("input_size", input_size, 1)
        hidden_size = check_integer("hidden_size", hidden_size, 1)
        bias = check_flag("bias", bias)
        self.cell, self.input_size, self.hidden_size = cell, input_size, hidden_size
        real = parameter_dtype(dtype, device)
        weights = initial_weights(cell, input_size, hidden_size, bias, real, check_generator("rng", rng))
        self.params.update(weights.named())

    def forward(self, x: Array, h: Array | None = None) -> tuple[Array, Tape]:
        """Return the next state (B, hidden_size) for x (B, input_size) and h (B, hidden_size) or None for zeros.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            An argument does not fit, or the batch is empty.
        """
        weights = Weights.of(self.params)
        xp = check_input(x, dtype=weights.weight_ih.dtype, shape=(None, self.input_size), like=weights.weight_ih)
        if x.shape[0] == 0:
            raise ShapeError("The batch is empty", expected="at least one sample", got=x.shape,
                             remedy="Skip empty batches")  # fmt: skip
        if h is not None:
            shape = (x.shape[0], self.hidden_size)
            check_input(h, name="h", dtype=weights.weight_ih.dtype, shape=shape, like=weights.weight_ih)
        tape = self.cell.forward(kernels.get(xp), xp.ascontiguousarray(x)[None], h, weights)
        return tape.h[0], tape

    def gradients(self, gy: Array, saved: Tape) -> CellGradients:
        """Return the gradients at x (B, input_size), at h (B, hidden_size), and at the parameters."""
        weights = Weights.of(self.params)
        xp = check_gy(gy, saved.h[0].shape, saved.h.dtype, saved.h)
        step = Shared(lambda: self.cell.backward(saved, weights.weight_hh, None, xp.ascontiguousarray(gy)), xp)
        return CellGradients(
            self, gy, saved, lambda: self.cell.input_grad(step().ga, weights)[0],
            lambda: self.cell.weight_grad(step().ga, saved, weights).named(), state=lambda: step().gh0,
        )  # fmt: skip

    def hidden_jacobian_t(self, saved: Tape) -> Any:
        """Return the transposed Jacobian of the new state with respect to **h**, (H, H) per sample (BPPSA Eq. 11)."""
        from sparsebp.nn.recurrent.jacobian import hidden_jacobians_t

        return hidden_jacobians_t(self.cell, saved, Weights.of(self.params))[0]
