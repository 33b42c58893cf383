"""The optimizers; the updates themselves are kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from sparsebp import backend
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.optim.checks import check_fraction
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

    Raises
    ------
    OptionError
        A value is out of range, or nesterov comes without momentum or with dampening.
    """

    rule = "sgd"
    least: ClassVar = {"dampening": -math.inf}

    def __init__(
        self, params: Params, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        })  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise OptionError(
                "Nesterov momentum needs a momentum and no dampening", expected="momentum > 0 and dampening = 0",
                got=f"momentum = {group['momentum']}, dampening = {group['dampening']}",
                remedy="Change them, or pass nesterov=False",
            )  # fmt: skip


class Adam(Optimizer):
    """torch.optim.Adam's update, in place (Kingma & Ba 2015), with AMSGrad (Reddi et al. 2018) if asked for.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, betas, eps, weight_decay, amsgrad, maximize
        As in torch.optim.Adam; the decay is added to the gradient.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adam"
    decoupled = False

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize,
        })  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        betas = group["betas"]
        if not isinstance(betas, tuple) or len(betas) != 2:
            raise OptionError("Invalid betas", expected="two numbers in [0, 1)", got=repr(betas),
                              remedy="Pass (0.9, 0.999), say")  # fmt: skip
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            check_fraction(name, beta)

    def _options(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], self.decoupled, group["maximize"])


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW` (Loshchilov & Hutter 2019)."""

    decoupled = True

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


class Adagrad(Optimizer):
    """torch.optim.Adagrad's update, in place (Duchi, Hazan & Singer 2011).

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

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adadelta"
    most: ClassVar = {"rho": 1.0}

    def __init__(
        self, params: Params, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0,
        *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize})


class RMSprop(Optimizer):
    """torch.optim.RMSprop's update, in place (Hinton 2012): plain, with momentum, or centered (Graves 2013).

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
