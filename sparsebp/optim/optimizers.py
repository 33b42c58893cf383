"""The optimizers but for Adam and its relatives; the updates themselves are kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from sparsebp import backend
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.optim.groups import Params
from sparsebp.optim.optimizer import Optimizer


class SGD(Optimizer):
    """torch.optim.SGD's update, in place: stochastic gradient descent with momentum.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, momentum, dampening, weight_decay, nesterov, maximize
        As in torch.optim.SGD.
    run
        ``foreach``, ``fused``, ``capturable``, ``differentiable``; see `Optimizer`.

    Raises
    ------
    OptionError
        A value is out of range, or nesterov comes without momentum or with dampening.
    """

    rule = "sgd"
    least: ClassVar = {"dampening": -math.inf}

    def __init__(
        self, params: Params, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }, **run)  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise OptionError(
                "Nesterov momentum needs a momentum and no dampening", expected="momentum > 0 and dampening = 0",
                got=f"momentum = {group['momentum']}, dampening = {group['dampening']}",
                remedy="Change them, or pass nesterov=False",
            )  # fmt: skip

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()


class Adagrad(Optimizer):
    """torch.optim.Adagrad's update, in place (Duchi, Hazan & Singer 2011).

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize
        As in torch.optim.Adagrad.
    run
        ``foreach``, ``fused``, ``capturable``, ``differentiable``; see `Optimizer`.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adagrad"

    def __init__(
        self, params: Params, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "eps": eps, "maximize": maximize,
        }, **run)  # fmt: skip

    def _new_buffer(self, name: str, param: Array, group: Mapping[str, Any]) -> Array:
        return backend.namespace(param).full_like(param, group["initial_accumulator_value"])


class Adadelta(Optimizer):
    """torch.optim.Adadelta's update, in place (Zeiler 2012).

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, rho, eps, weight_decay, maximize
        As in torch.optim.Adadelta.
    run
        ``foreach``, ``fused``, ``capturable``, ``differentiable``; see `Optimizer`.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adadelta"
    most: ClassVar = {"rho": 1.0}

    def __init__(
        self, params: Params, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0,
        *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
        }, **run)  # fmt: skip


class RMSprop(Optimizer):
    """torch.optim.RMSprop's update, in place (Hinton 2012): plain, with momentum, or centered (Graves 2013).

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, alpha, eps, weight_decay, momentum, centered, maximize
        As in torch.optim.RMSprop.
    run
        ``foreach``, ``fused``, ``capturable``, ``differentiable``; see `Optimizer`.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "rmsprop"

    def __init__(
        self, params: Params, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
            "centered": centered, "maximize": maximize,
        }, **run)  # fmt: skip

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))
