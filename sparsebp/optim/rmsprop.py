"""RMSprop (Hinton 2012), plain, with momentum, or centered (Graves 2013), as torch.optim.RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.optim.checks import check_flags, check_non_negative
from sparsebp.optim.groups import Params
from sparsebp.optim.optimizer import Optimizer


class RMSprop(Optimizer):
    """torch.optim.RMSprop's update, in place.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, alpha, eps, weight_decay, momentum, centered, maximize
        As in torch.optim.RMSprop.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "rmsprop"

    def __init__(
        self, params: Params, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
            "centered": centered, "maximize": maximize,
        })  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        check_non_negative(group, "lr", "alpha", "eps", "weight_decay", "momentum")
        check_flags(group, "centered", "maximize")

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))
