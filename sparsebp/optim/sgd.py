"""Stochastic gradient descent with momentum, as torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.core.arguments import check_number
from sparsebp.core.errors import OptionError
from sparsebp.optim.checks import check_flags, check_non_negative
from sparsebp.optim.groups import Params
from sparsebp.optim.optimizer import Optimizer


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

    rule = "sgd"

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
        check_number("dampening", group["dampening"])
        check_flags(group, "nesterov", "maximize")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise OptionError(
                "Nesterov momentum needs a momentum and no dampening", expected="momentum > 0 and dampening = 0",
                got=f"momentum = {group['momentum']}, dampening = {group['dampening']}",
                remedy="Change them, or pass nesterov=False",
            )  # fmt: skip

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()
