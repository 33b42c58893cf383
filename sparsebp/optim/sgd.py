"""Stochastic gradient descent with momentum, as torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping

from sparsebp import backend, kernels
from sparsebp.errors import OptionError
from sparsebp.optim.optimizer import Optimizer, non_negative
from sparsebp.types import Array


class SGD(Optimizer):
    """torch.optim.SGD's update, in place, one kernel a parameter.

    Parameters
    ----------
    params
        ``model.parameters()``.
    lr, momentum, dampening, weight_decay, nesterov
        As in torch.optim.SGD.

    Raises
    ------
    OptionError
        A value is out of range, or nesterov comes without momentum or with dampening.
    """

    def __init__(
        self, params: Mapping[str, Array], lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False,
    ) -> None:  # fmt: skip
        self.momentum = non_negative("momentum", momentum)
        self.dampening = float(dampening)
        self.weight_decay = non_negative("weight_decay", weight_decay)
        self.nesterov = nesterov
        if nesterov and (momentum == 0 or dampening != 0):
            raise OptionError(
                "Nesterov momentum needs a momentum and no dampening", expected="momentum > 0 and dampening = 0",
                got=f"momentum = {momentum}, dampening = {dampening}", remedy="Change them, or pass nesterov=False",
            )  # fmt: skip
        if momentum:
            self.buffer_names = ("momentum_buffer",)
        super().__init__(params, lr)

    def update(self, name: str, param: Array, grad: Array) -> None:
        """Update one parameter."""
        buffer = self.buffers["momentum_buffer"][name] if self.momentum else None
        kernels.get(backend.namespace(param)).sgd_update(
            param, grad, buffer, self.lr, self.momentum, self.dampening, self.weight_decay, self.nesterov,
            self.steps == 1,
        )  # fmt: skip
