"""Adagrad (Duchi, Hazan & Singer 2011), as torch.optim.Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.optim.checks import check_flags, check_non_negative
from sparsebp.optim.groups import Params
from sparsebp.optim.optimizer import Optimizer


class Adagrad(Optimizer):
    """torch.optim.Adagrad's update, in place.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize
        As in torch.optim.Adagrad.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adagrad"

    def __init__(
        self, params: Params, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "eps": eps, "maximize": maximize,
        })  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        check_non_negative(group, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
        check_flags(group, "maximize")

    def _new_buffer(self, name: str, param: Array, group: Mapping[str, Any]) -> Array:
        return backend.namespace(param).full_like(param, group["initial_accumulator_value"])
