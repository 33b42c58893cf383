"""The optimizers: options, buffers and, for weight prediction, the next step of each; kernels do the updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError
from sparsebp.kernels.checks import UPDATE_OPTIONS
from sparsebp.kernels.operands import momenta
from sparsebp.optim.optimizer import Optimizer, Params, State, check_fraction


class _WithBetas(Optimizer):
    """Base of the optimizers with the option ``betas``."""

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

    Arguments as in torch.optim.Adam; weight decay is added to the gradient, `params` and `run` as in `Optimizer`.
    """

    rule = "adam"

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, _chosen(locals()), **run)

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def next_step(self, state: State) -> tuple[float, Any]:
        """``lr / (1 - β₁ᵗ)`` and ``m / (√(v / (1 - β₂ᵗ)) + ε)``."""
        beta1, beta2 = state.group["betas"]
        squares = state.buffers["max_exp_avg_sq" if state.group["amsgrad"] else "exp_avg_sq"]
        root = backend.namespace(squares).sqrt(squares)
        root *= 1 / math.sqrt(1 - beta2**state.updates)
        root += state.group["eps"]
        return state.group["lr"] / (1 - beta1**state.updates), state.buffers["exp_avg"] / root


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

    Arguments as in torch.optim.NAdam, `params` and `run` as in `Optimizer`.

    Notes
    -----
    The product of the momenta of all steps is worked out from the number of steps, so no buffer holds it. Where
    ``betas`` or ``momentum_decay`` change during training, all steps count as made with the present ones, as in the
    bias corrections of every Adam; torch's product keeps the former ones of the steps before.
    """

    rule = "nadam"

    def __init__(
        self, params: Params, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False, *,
        maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, _chosen(locals()), **run)

    def reads_gradient(self, group: Mapping[str, Any]) -> bool:
        """Return True: Nesterov momentum."""
        return True

    def next_step(self, state: State) -> tuple[float, Any]:
        """The momenta of the gradient's own update."""
        (beta1, beta2), squares = state.group["betas"], state.buffers["exp_avg_sq"]
        now, then, product = momenta(beta1, state.group["momentum_decay"], state.updates)
        root = backend.namespace(squares).sqrt(squares * (1 / (1 - beta2**state.updates))) + state.group["eps"]
        moved = state.grad * ((1 - now) / (1 - product)) + state.buffers["exp_avg"] * (then / (1 - product * then))
        return state.group["lr"], moved / root


class RAdam(_WithBetas):
    """torch.optim.RAdam's update, in place: Adam with a rectified step (Liu et al. 2020, Algorithm 2).

    While the variance of the gradient is uncertain, the step is plain momentum.

    Arguments as in torch.optim.RAdam, `params` and `run` as in `Optimizer`.
    """

    rule = "radam"

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, decoupled_weight_decay: bool = False, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, _chosen(locals()), **run)

    def next_step(self, state: State) -> tuple[float, Any]:
        """Plain momentum while the variance is uncertain, else the rectified step."""
        (beta1, beta2), squares, mean = state.group["betas"], state.buffers["exp_avg_sq"], state.buffers["exp_avg"]
        rate, left = state.group["lr"] / (1 - beta1**state.updates), beta2**state.updates
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * state.updates * left / (1 - left)
        if length <= 5:
            return rate, mean
        rate *= math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length) * (1 - left))
        return rate, mean / (backend.namespace(squares).sqrt(squares) + state.group["eps"])


class Adamax(_WithBetas):
    """torch.optim.Adamax's update, in place: Adam with a running maximum of |g| (Kingma & Ba 2015, Algorithm 2).

    Arguments as in torch.optim.Adamax, `params` and `run` as in `Optimizer`.
    """

    rule = "adamax"

    def __init__(
        self, params: Params, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, _chosen(locals()), **run)

    def next_step(self, state: State) -> tuple[float, Any]:
        """``lr / (1 - β₁ᵗ)`` and ``m / u``."""
        rate = state.group["lr"] / (1 - state.group["betas"][0] ** state.updates)
        return rate, state.buffers["exp_avg"] / state.buffers["exp_inf"]


class SGD(Optimizer):
    """torch.optim.SGD's update, in place: stochastic gradient descent with momentum.

    Arguments as in torch.optim.SGD, `params` and `run` as in `Optimizer`.

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
        super().__init__(params, _chosen(locals()), **run)

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise OptionError("Nesterov momentum needs a momentum and no dampening",
                              expected="momentum > 0 and dampening = 0",
                              got=f"momentum = {group['momentum']}, dampening = {group['dampening']}")  # fmt: skip

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def reads_gradient(self, group: Mapping[str, Any]) -> bool:
        """Whether there is no momentum, or Nesterov's."""
        return not group["momentum"] or bool(group["nesterov"])

    def next_step(self, state: State) -> tuple[float, Any]:
        """``lr`` and g, the buffer b, or with Nesterov momentum g + μ b."""
        group = state.group
        if not group["momentum"]:
            return group["lr"], state.grad
        buffer = state.buffers["momentum_buffer"]
        return group["lr"], state.grad + buffer * group["momentum"] if group["nesterov"] else buffer


class Adagrad(Optimizer):
    """torch.optim.Adagrad's update, in place (Duchi, Hazan & Singer 2011).

    Arguments as in torch.optim.Adagrad, `params` and `run` as in `Optimizer`.
    """

    rule = "adagrad"

    def __init__(
        self, params: Params, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, _chosen(locals()), **run)

    def _new_buffer(self, name: str, param: Array, group: Mapping[str, Any]) -> Array:
        return backend.namespace(param).full_like(param, group["initial_accumulator_value"])

    def reads_gradient(self, group: Mapping[str, Any]) -> bool:
        """Return True."""
        return True

    def next_step(self, state: State) -> tuple[float, Any]:
        """``lr / (1 + (t - 1) lr_decay)`` and ``g / (√sum + ε)``."""
        total, group = state.buffers["sum"], state.group
        rate = group["lr"] / (1 + (state.updates - 1) * group["lr_decay"])
        return rate, state.grad / (backend.namespace(total).sqrt(total) + group["eps"])


class Adadelta(Optimizer):
    """torch.optim.Adadelta's update, in place (Zeiler 2012).

    Arguments as in torch.optim.Adadelta, `params` and `run` as in `Optimizer`.
    """

    rule = "adadelta"
    most: ClassVar = {"rho": 1.0}

    def __init__(
        self, params: Params, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0,
        *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, _chosen(locals()), **run)

    def reads_gradient(self, group: Mapping[str, Any]) -> bool:
        """Return True."""
        return True

    def next_step(self, state: State) -> tuple[float, Any]:
        """``g √(d + ε) / √(v + ε)``; the mean of squared steps d already holds the last update's own step."""
        squares, steps, eps = state.buffers["square_avg"], state.buffers["acc_delta"], state.group["eps"]
        xp = backend.namespace(squares)
        return state.group["lr"], state.grad * (xp.sqrt(steps + eps) / xp.sqrt(squares + eps))


class RMSprop(Optimizer):
    """torch.optim.RMSprop's update, in place (Hinton 2012): plain, with momentum, or centered (Graves 2013).

    Arguments as in torch.optim.RMSprop, `params` and `run` as in `Optimizer`.
    """

    rule = "rmsprop"

    def __init__(
        self, params: Params, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False, **run: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(params, _chosen(locals()), **run)

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def reads_gradient(self, group: Mapping[str, Any]) -> bool:
        """Whether there is no momentum."""
        return not group["momentum"]

    def next_step(self, state: State) -> tuple[float, Any]:
        """``g / (√v + ε)``, v centered if asked for, or the momentum buffer."""
        group = state.group
        if group["momentum"]:
            return group["lr"], state.buffers["momentum_buffer"]
        squares = state.buffers["square_avg"]
        xp = backend.namespace(squares)
        variance = squares - state.buffers["grad_avg"] ** 2 if group["centered"] else squares
        return group["lr"], state.grad / (xp.sqrt(variance) + group["eps"])


def _chosen(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, in their order, among the arguments of an optimizer: its ``locals()``."""
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "run", "__class__")}
