"""Adadelta (Zeiler 2012), as torch.optim.Adadelta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.core.arguments import check_number
from sparsebp.optim.checks import check_flags, check_non_negative
from sparsebp.optim.groups import Params
from sparsebp.optim.optimizer import Optimizer


class Adadelta(Optimizer):
    """torch.optim.Adadelta's update, in place.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, rho, eps, weight_decay, maximize
        As in torch.optim.Adadelta.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adadelta"

    def __init__(
        self, params: Params, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0,
        *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize})

    def _check(self, group: Mapping[str, Any]) -> None:
        check_non_negative(group, "lr", "eps", "weight_decay")
        check_number("rho", group["rho"], 0.0, 1.0)
        check_flags(group, "maximize")
