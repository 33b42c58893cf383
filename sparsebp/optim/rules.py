"""The optimizers: Adam and its relatives, SGD, Adagrad, Adadelta, RMSprop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError
from sparsebp.kernels.spec import UPDATE_OPTIONS
from sparsebp.optim.optimizer import Optimizer, Params, check_fraction


class _WithBetas(Optimizer):
    """The base of those with the option ``betas``."""

    decoupled = False
    """Whether weight decay shrinks the parameters, where no option says so."""

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        betas = group["betas"]
        if not isinstance(betas, tuple) or len(betas) != 2:
            raise OptionError("Invalid betas", expected="two numbers in [0, 1)", got=repr(betas))
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            check_fraction(name, beta)

    def _options(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        values = {**group, "beta1": beta1, "beta2": beta2, "decoupled": decoupled}
        return tuple(values[name] for name in UPDATE_OPTIONS[self.rule])


class Adam(_WithBetas):
    """torch.optim.Adam's update, in place (Kingma & Ba 2015), with AMSGrad (Reddi et al. 2018) if asked for.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, betas, eps, weight_decay, amsgrad, maximize
        As in torch.optim.Adam; the decay is added to the gradient.
    run
        ``foreach``, ``fused``, ``capturable``, ``differentiable``; see `Optimizer`.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adam"

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize,
        }, **run)  # fmt: skip

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW` (Loshchilov & Hutter 2019)."""

    decoupled = True

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **run)


class NAdam(_WithBetas):
    """torch.optim.NAdam's update, in place: Adam with Nesterov momentum (Dozat 2016).

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize
        As in torch.optim.NAdam.
    run
        ``foreach``, ``fused``, ``capturable``, ``differentiable``; see `Optimizer`.

    Raises
    ------
    OptionError
        A value is out of range.

    Notes
    -----
    The product of the momenta of all steps is worked out from the number of steps, so no buffer holds it. Where
    ``betas`` or ``momentum_decay`` are changed on the way, all steps count as made with the present ones, as in the
    bias corrections of every Adam; torch's product keeps the former ones of the steps before.
    """

    rule = "nadam"

    def __init__(
        self, params: Params, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False, *,
        maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize,
        }, **run)  # fmt: skip


class RAdam(_WithBetas):
    """torch.optim.RAdam's update, in place: Adam with a rectified step (Liu et al. 2020, Algorithm 2).

    While the variance of the gradient is not known well enough the step is that of plain momentum.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, betas, eps, weight_decay, decoupled_weight_decay, maximize
        As in torch.optim.RAdam.
    run
        ``foreach``, ``fused``, ``capturable``, ``differentiable``; see `Optimizer`.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "radam"

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, decoupled_weight_decay: bool = False, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize,
        }, **run)  # fmt: skip


class Adamax(_WithBetas):
    """torch.optim.Adamax's update, in place: Adam with a running maximum of |g| (Kingma & Ba 2015, Algorithm 2).

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, betas, eps, weight_decay, maximize
        As in torch.optim.Adamax.
    run
        ``foreach``, ``fused``, ``capturable``, ``differentiable``; see `Optimizer`.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adamax"

    def __init__(
        self, params: Params, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
        }, **run)  # fmt: skip


# The optimizers but for Adam and its relatives; the updates themselves are kernels.


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
            raise OptionError("Nesterov momentum needs a momentum and no dampening",
                              expected="momentum > 0 and dampening = 0",
                              got=f"momentum = {group['momentum']}, dampening = {group['dampening']}")  # fmt: skip

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
