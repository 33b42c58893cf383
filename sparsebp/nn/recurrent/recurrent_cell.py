"""The base of RNNCell, GRUCell and LSTMCell: one step of a recurrent layer, differentiated by its state too."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.arguments import check_flag, check_generator, check_integer
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array, Seed
from sparsebp.nn.arrays import parameter_dtype
from sparsebp.nn.gradients import Shared
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.recurrent.cell_math import CellMath, initial_weights
from sparsebp.nn.recurrent.stream import Stream
from sparsebp.nn.recurrent.tape import GivenState, StateGradients, Tape, Weights


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
    gradients_class: ClassVar[type[CellGradients]] = CellGradients

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
        return self._forward(x, None if h is None else (h,))

    def stream(self, batch: int | None = None, state: Any = None) -> Stream:
        """Return a `Stream`, as `Recurrent.stream` does: steps that allocate nothing; its state has no layers' axis."""
        return Stream(self, None, batch, state)

    def step(self, x: Array, state: Stream) -> Array:
        """Take a state of `stream` one step on: ``state.step(x)``, see there."""
        return state.step(x)

    def _forward(self, x: Array, state: GivenState | None) -> tuple[Array, Tape]:
        """Run one step from the state, an array for each name of the cell's."""
        weights = Weights.of(self.params)
        xp = check_input(x, dtype=weights.weight_ih.dtype, shape=(None, self.input_size), like=weights.weight_ih)
        if x.shape[0] == 0:
            raise ShapeError("The batch is empty", expected="at least one sample", got=x.shape,
                             remedy="Skip empty batches")  # fmt: skip
        shape = (x.shape[0], self.hidden_size)
        for name, array in zip(self.cell.states, state or (), strict=False):
            if array is not None:
                check_input(array, name=name, dtype=weights.weight_ih.dtype, shape=shape, like=weights.weight_ih)
        tape = self.cell.forward(kernels.get(xp), xp.ascontiguousarray(x)[None], state, weights)
        return tape.h[0], tape

    def gradients(self, gy: Array | None, saved: Tape) -> CellGradients:
        """Return the gradients at x (B, input_size), at h (B, hidden_size), and at the parameters."""
        return self._gradients(gy, saved, {"gy": gy})

    def _gradients(self, gy: Array | None, saved: Tape, last: dict[str, Array | None]) -> Any:
        """Return the gradients from those at the state's arrays, by the names that messages have for them."""
        weights, xp = Weights.of(self.params), backend.namespace(saved.h)
        if all(array is None for array in last.values()):
            raise OptionError("No gradient was given", expected=" or ".join(last), got="None",
                              remedy="Pass the gradient of the loss with respect to the next state")  # fmt: skip
        arriving = [self._checked(name, array, saved) for name, array in last.items()]
        step = Shared(lambda: self.cell.backward(saved, weights.weight_hh, None, arriving), xp)
        return self.gradients_class(
            self, gy, saved, lambda: self.cell.input_grad(step().ga, weights)[0],
            lambda: self.cell.weight_grad(step().ga, saved, weights).named(), state=lambda: step().initial,
        )  # fmt: skip

    def _checked(self, name: str, grad: Array | None, saved: Tape) -> Array | None:
        """Return the gradient at an array of the state, C-contiguous."""
        if grad is None:
            return None
        if name == "gy":
            return check_gy(grad, saved.h[0].shape, saved.h.dtype, saved.h).ascontiguousarray(grad)
        xp = check_input(grad, name=name, dtype=saved.h.dtype, shape=saved.h[0].shape, like=saved.h)
        return xp.ascontiguousarray(grad)

    def hidden_jacobian_t(self, saved: Tape) -> Any:
        """Return the transposed Jacobian of the new state with respect to the old one, per sample (BPPSA Eq. 11).

        It is (H, H); of an LSTM, whose state is (h, c), (2H, 2H).
        """
        from sparsebp.nn.recurrent.back.jacobian import hidden_jacobians_t

        return hidden_jacobians_t(self.cell, saved, Weights.of(self.params))[0]
