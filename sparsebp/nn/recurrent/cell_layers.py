"""RNNCell, GRUCell and LSTMCell: one step of a recurrent layer, differentiated by its state too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, Nonlinearity, Seed, check_flag, check_generator, check_integer
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.shortcuts import forward_of
from sparsebp.nn.gradients import NamedGradients, Shared
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.parameters import parameter_dtype
from sparsebp.nn.recurrent import runs
from sparsebp.nn.recurrent.cells import CellMath, GRUMath, LSTMMath, RNNMath
from sparsebp.nn.recurrent.saved import GivenState, SavedRun, Weights, pair
from sparsebp.nn.recurrent.stream import Stream
from sparsebp.nn.unbatched import takes_unbatched


class RecurrentCell(Layer):
    """One step, ``h' = cell(x, h)``; torch.nn's ``weight_ih``, ``weight_hh``, ``bias_ih``, ``bias_hh``."""

    # device: None or `"cpu"`: layers are built on the host, and moved by `to`.
    # dtype: float32 or float64.
    # rng: Generator or seed of the initial values.

    replayable = True
    optional = "bias_ih", "bias_hh"
    cell: CellMath
    """The cell's equations, given by the subclass."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = np.float32, *,
        rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        input_size = check_integer("input_size", input_size, 1)
        hidden_size = check_integer("hidden_size", hidden_size, 1)
        bias = check_flag("bias", bias)
        self.input_size, self.hidden_size = input_size, hidden_size
        real = parameter_dtype(dtype, device)
        weights = self.cell.initial_weights(input_size, hidden_size, bias, real, check_generator("rng", rng))
        self.params.update(weights.named())

    def forward(self, x: Array, h: Array | None = None) -> tuple[Array, SavedRun]:
        """Return the next state (B, hidden_size) for x (B, input_size) and h (B, hidden_size) or None for zeros."""
        return self._forward(x, None if h is None else (h,))

    def stream(self, batch: int | None = None, state: Any = None) -> Stream:
        """Return a `Stream`, as `Recurrent.stream` does: steps that allocate nothing; its state has no layers' axis."""
        return Stream(self, None, batch, state)

    def step(self, x: Array, state: Stream) -> Array:
        """Take a state of `stream` one step on: ``state.step(x)``, see there."""
        return state.step(x)

    def _forward(self, x: Array, state: GivenState | None) -> tuple[Array, SavedRun]:
        """Run one step from the state, an array for each name of the cell's."""
        weights = Weights.of(self.params)
        xp = check_input(x, dtype=weights.weight_ih.dtype, shape=(None, self.input_size), like=weights.weight_ih)
        if x.shape[0] == 0:
            raise ShapeError(
                "The batch is empty", expected="at least one sample", got=x.shape, remedy="Skip empty batches"
            )
        shape = (x.shape[0], self.hidden_size)
        for name, array in zip(self.cell.states, state or (), strict=False):
            if array is not None:
                check_input(array, name=name, dtype=weights.weight_ih.dtype, shape=shape, like=weights.weight_ih)
        given = xp.ascontiguousarray(x)[None]
        saved = runs.forward(kernels.get(xp).unchecked, self.cell, given, weights, state)
        return saved.h[0], saved

    def gradients(self, gy: Array | None, saved: SavedRun) -> NamedGradients:
        """Return the gradients at x (B, input_size), at h (B, hidden_size), and at the parameters."""
        return self._gradients(gy, saved, {"gy": gy})

    def _gradients(self, gy: Array | None, saved: SavedRun, last: dict[str, Array | None]) -> NamedGradients:
        """Return the gradients from `last`, the gradients at the state's arrays by name."""
        weights, xp = Weights.of(self.params), backend.namespace(saved.h)
        if all(array is None for array in last.values()):
            raise OptionError("No gradient was given", expected=" or ".join(last), got="None",
                              remedy="Pass the gradient of the loss with respect to the next state")  # fmt: skip
        arriving = [self._checked(name, array, saved) for name, array in last.items()]
        k, cell = kernels.get(xp).unchecked, self.cell
        step = Shared(lambda: runs.backward(k, cell, saved, weights, None, arriving), xp)
        return NamedGradients(
            self, gy, saved, lambda: runs.input_grad(cell, step(), weights)[0],
            lambda: runs.weight_grad(k, cell, step(), saved, weights).named(),
            names=("hidden", "cell")[: len(self.cell.states)], more=lambda: step().initial,
        )  # fmt: skip

    def _checked(self, name: str, grad: Array | None, saved: SavedRun) -> Array | None:
        """Return the gradient at an array of the state, C-contiguous."""
        if grad is None:
            return None
        if name == "gy":
            return check_gy(grad, saved.h[0].shape, saved.h.dtype, saved.h).ascontiguousarray(grad)
        xp = check_input(grad, name=name, dtype=saved.h.dtype, shape=saved.h[0].shape, like=saved.h)
        return xp.ascontiguousarray(grad)

    def hidden_jacobian_t(self, saved: SavedRun) -> Any:
        """Return the transposed Jacobian of the new state with respect to the old one, per sample (BPPSA Eq. 11)."""
        # It is (H, H); of an LSTM, whose state is (h, c), (2H, 2H).
        from sparsebp.jacobians import hidden_elements
        from sparsebp.nn.recurrent.jacobian import state_jacobians

        k = kernels.get(backend.namespace(saved.h)).unchecked
        return hidden_elements(*state_jacobians(k, self.cell, saved, Weights.of(self.params)))[0]


@takes_unbatched(1, 0)
class RNNCell(RecurrentCell):
    """One step of an RNN, as `torch.nn.RNNCell`; see `RecurrentCell`."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: Nonlinearity = "tanh",
        device: Any = None, dtype: Any = np.float32, *, rng: Seed = None,
    ) -> None:  # fmt: skip
        self.cell = RNNMath(nonlinearity)
        super().__init__(input_size, hidden_size, bias, device, dtype, rng=rng)


@takes_unbatched(1, 0)
class GRUCell(RecurrentCell):
    """One step of a GRU, as `torch.nn.GRUCell`; see `RecurrentCell`."""

    cell = GRUMath()


@takes_unbatched(1, 0)
class LSTMCell(RecurrentCell):
    """One step of an LSTM, as `torch.nn.LSTMCell`; see `RecurrentCell`.

    ``forward`` returns the next h as the output and keeps the next c, ``saved.c[0]``; a call returns both, as in torch.
    """

    cell = LSTMMath()

    def __call__(self, x: Array, hx: Sequence[Array] | None = None, **options: Any) -> tuple[Array, Array]:
        """Return the next h and c, (B, hidden_size) each."""
        h, saved = forward_of(self, x, hx=hx, **options)
        return h, saved.c[0]

    def forward(self, x: Array, hx: Sequence[Array] | None = None) -> tuple[Array, SavedRun]:
        """Return the next h (B, hidden_size) for x (B, input_size) and the pair (h, c) or None for zeros."""
        return self._forward(x, pair("hx", hx))

    def gradients(self, gy: Array | None, saved: SavedRun, grad_c: Array | None = None) -> NamedGradients:
        """Return the gradients from `gy` at the next h and `grad_c` at the next c; either may be None, but not both.

        ``input``, ``hidden`` and ``cell`` are the gradients at x, h and c, ``weights`` those of the parameters.
        """
        return self._gradients(gy, saved, {"gy": gy, "grad_c": grad_c})
