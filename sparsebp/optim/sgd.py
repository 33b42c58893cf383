"""Stochastic gradient descent with momentum, as torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp import backend, kernels
from sparsebp.errors import OptionError
from sparsebp.optim.optimizer import Optimizer, Params, check_non_negative
from sparsebp.types import Array


class SGD(Optimizer):
    """torch.optim.SGD's update, in place.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, momentum, dampening, weight_decay, nesterov, maximize
        As in torch.optim.SGD.

    Raises
    ------
    OptionError
        A value is out of range, or nesterov comes without momentum or with dampening.
    """

    buffer_names = ("momentum_buffer",)

    def __init__(
        self, params: Params, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        })  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        check_non_negative(group, "lr", "momentum", "weight_decay")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise OptionError(
                "Nesterov momentum needs a momentum and no dampening", expected="momentum > 0 and dampening = 0",
                got=f"momentum = {group['momentum']}, dampening = {group['dampening']}",
                remedy="Change them, or pass nesterov=False",
            )  # fmt: skip

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.buffer_names if group["momentum"] else ()

    def _options(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return tuple(float(group[name]) for name in names)

    def _update(self, param: Array, grad: Array, buffers: list[Any], options: list[float], step: int) -> None:
        lr, momentum, dampening, weight_decay, nesterov, maximize = options
        kernels.get(backend.namespace(param)).sgd_update(
            param, -grad if maximize else grad, buffers[0], lr, momentum, dampening, weight_decay, bool(nesterov),
            step == 1,
        )  # fmt: skip
