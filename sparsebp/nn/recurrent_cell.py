"""The base of RNNCell and GRUCell: one step of a recurrent layer, with the hidden state as the differentiated input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp import backend, kernels
from sparsebp.errors import OptionError, ShapeError
from sparsebp.nn import init
from sparsebp.nn.cell import CellMath, Tape, Weights, initial_weights, params_to_weights, weights_to_params
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.types import Array, Seed


@dataclass
class CellSaved:
    """A run of one step, and the gradients of the gy that was last asked for."""

    tape: Tape
    gy: Array | None = None
    ga: Array | None = None
    gh: Array | None = None


class RecurrentCell(Layer):
    """One step: ``h' = cell(x, h)``, with torch.nn's parameters ``weight_ih``, ``weight_hh``, ``bias_ih``, ``bias_hh``.

    Parameters
    ----------
    cell
        The cell's specifics (given by the subclass).
    input_size, hidden_size, bias
        As in torch.nn.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values.
    """

    def __init__(
        self, cell: CellMath, input_size: int, hidden_size: int, bias: bool = True, *, dtype: Any = np.float32,
        rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if size < 1:
                raise OptionError(f"Invalid {name}", expected="at least 1", got=size, remedy="Pass a positive integer")
        self.cell, self.input_size, self.hidden_size = cell, input_size, hidden_size
        real = backend.float_dtype(dtype)
        weights = initial_weights(cell, input_size, hidden_size, bias, real, init.generator(rng))
        self.params.update(weights_to_params(weights, ""))

    def forward(self, x: Array, h: Array | None = None) -> tuple[Array, CellSaved]:
        """Return the next state (B, hidden_size) for x (B, input_size) and h (B, hidden_size) or None for zeros.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            An argument does not fit, or the batch is empty.
        """
        weights = self._weights()
        xp = check_input(x, dtype=weights.w_ih.dtype, shape=(None, self.input_size), like=weights.w_ih)
        if x.shape[0] == 0:
            raise ShapeError("The batch is empty", expected="at least one sample", got=x.shape,
                             remedy="Skip empty batches")  # fmt: skip
        if h is not None:
            shape = (x.shape[0], self.hidden_size)
            check_input(h, name="h", dtype=weights.w_ih.dtype, shape=shape, like=weights.w_ih)
        tape = self.cell.forward(kernels.get(xp), xp.ascontiguousarray(x)[None], h, weights)
        return tape.h[0], CellSaved(tape)

    def input_grad(self, gy: Array, saved: CellSaved) -> Array:
        """I: the gradient at x (B, input_size)."""
        return self.cell.input_grad(self._backward(gy, saved)[0], self._weights())[0]

    def hidden_grad(self, gy: Array, saved: CellSaved) -> Array:
        """Return the gradient at h (B, hidden_size)."""
        return self._backward(gy, saved)[1]

    def weight_grad(self, gy: Array, saved: CellSaved) -> dict[str, Array]:
        """W: gradients of all parameters."""
        ga, _ = self._backward(gy, saved)
        return weights_to_params(self.cell.weight_grad(ga, saved.tape, self._weights()), "")

    def jacobian_t(self, saved: CellSaved) -> Any:
        """Return the transposed Jacobian of the new state with respect to **h**, (H, H) per sample (BPPSA Eq. 11)."""
        from sparsebp.nn.recurrent_jacobian import hidden_jacobians_t

        return hidden_jacobians_t(self.cell, saved.tape, self._weights())[0]

    def _backward(self, gy: Array, saved: CellSaved) -> tuple[Array, Array]:
        """Return (ga, gradient at h), computed once for the same gy object."""
        if saved.gy is not gy or saved.ga is None:
            tape, weights = saved.tape, self._weights()
            xp = check_gy(gy, tape.h[0].shape, tape.h.dtype, tape.h)
            saved.ga = xp.empty((1, gy.shape[0], self.cell.columns * self.hidden_size), dtype=gy.dtype)
            saved.gh = xp.empty(gy.shape, dtype=gy.dtype)
            last = xp.ascontiguousarray(gy)
            self.cell.backward(kernels.get(xp), tape, weights.w_hh, None, last, None, saved.ga, saved.gh)
            saved.gy = gy
        return saved.ga, saved.gh

    def _weights(self) -> Weights:
        return params_to_weights(self.params, "")
