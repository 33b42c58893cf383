"""The step that each rule makes of the state that its last update has left: formulae, in place on a copy.

They are those of `kernels`' updates without what an update does to the buffers. A test compares them with real updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sparsebp import backend
from sparsebp.core.types import Array, UpdateRule
from sparsebp.kernels.momenta import momenta
from sparsebp.optim.optimizer import Optimizer


class State(NamedTuple):
    """What a step depends on.

    Attributes
    ----------
    grad
        The gradient in the direction of descent, weight decay included; None where the rule does not read one.
    group
        The options.
    buffers
        The parameter's own, by name.
    updates
        How many there have been, 1 or more.
    """

    grad: Any
    group: Mapping[str, Any]
    buffers: Mapping[str, Array]
    updates: int


def reads_gradient(rule: UpdateRule, group: Mapping[str, Any]) -> bool:
    """Return whether a rule's step cannot be told from its buffers alone."""
    if rule == "sgd":
        return not group["momentum"] or bool(group["nesterov"])
    return rule in ("nadam", "adagrad", "adadelta") or (rule == "rmsprop" and not group["momentum"])


def displace(
    optimizer: Optimizer, group: Mapping[str, Any], name: str, s: float, out: Array, grad: Array | None
) -> None:
    """Subtract s steps of the optimizer's rule from `out`, in place.

    Parameters
    ----------
    optimizer
        Of the parameter; before its first update nothing is subtracted.
    group, name
        The parameter, and its group's options.
    s
        How many steps.
    out
        Like the parameter.
    grad
        The gradient that the rule is to read, if it reads one; None: there has been none, nothing is subtracted then.
    """
    needs, count = reads_gradient(optimizer.rule, group), int(optimizer._steps[optimizer._rows[name]])
    if count == 0 or (needs and grad is None):
        return
    weights = optimizer.params[name]
    decoupled = group.get("decoupled_weight_decay", getattr(optimizer, "decoupled", False))
    if needs and grad is not None:
        grad = -grad if group["maximize"] else grad
        grad = grad + weights * group["weight_decay"] if group["weight_decay"] and not decoupled else grad
    buffers = {key: arrays[name] for key, arrays in optimizer.buffers.items() if name in arrays}
    state = State(grad, group, buffers, count)
    rate, step = _STEPS[optimizer.rule](state)
    out -= step * (s * rate)
    if decoupled and group["weight_decay"]:
        out -= weights * (s * group["lr"] * group["weight_decay"])


def _sgd(state: State) -> tuple[float, Any]:
    group = state.group
    if not group["momentum"]:
        return group["lr"], state.grad
    buffer = state.buffers["momentum_buffer"]
    return group["lr"], state.grad + buffer * group["momentum"] if group["nesterov"] else buffer


def _adam(state: State) -> tuple[float, Any]:
    beta1, beta2 = state.group["betas"]
    squares = state.buffers["max_exp_avg_sq" if state.group["amsgrad"] else "exp_avg_sq"]
    root = backend.namespace(squares).sqrt(squares)
    root *= 1 / math.sqrt(1 - beta2**state.updates)
    root += state.group["eps"]
    return state.group["lr"] / (1 - beta1**state.updates), state.buffers["exp_avg"] / root


def _nadam(state: State) -> tuple[float, Any]:
    (beta1, beta2), squares = state.group["betas"], state.buffers["exp_avg_sq"]
    now, then, product = momenta(beta1, state.group["momentum_decay"], state.updates)
    root = backend.namespace(squares).sqrt(squares * (1 / (1 - beta2**state.updates))) + state.group["eps"]
    moved = state.grad * ((1 - now) / (1 - product)) + state.buffers["exp_avg"] * (then / (1 - product * then))
    return state.group["lr"], moved / root


def _radam(state: State) -> tuple[float, Any]:
    (beta1, beta2), squares, mean = state.group["betas"], state.buffers["exp_avg_sq"], state.buffers["exp_avg"]
    rate, left = state.group["lr"] / (1 - beta1**state.updates), beta2**state.updates
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * state.updates * left / (1 - left)
    if length <= 5:
        return rate, mean
    rate *= math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length) * (1 - left))
    return rate, mean / (backend.namespace(squares).sqrt(squares) + state.group["eps"])


def _adamax(state: State) -> tuple[float, Any]:
    rate = state.group["lr"] / (1 - state.group["betas"][0] ** state.updates)
    return rate, state.buffers["exp_avg"] / state.buffers["exp_inf"]


def _adagrad(state: State) -> tuple[float, Any]:
    total, group = state.buffers["sum"], state.group
    rate = group["lr"] / (1 + (state.updates - 1) * group["lr_decay"])
    return rate, state.grad / (backend.namespace(total).sqrt(total) + group["eps"])


def _adadelta(state: State) -> tuple[float, Any]:
    """The mean of the squared steps is the one that the last update has left, which has its own step in it."""
    squares, steps, eps = state.buffers["square_avg"], state.buffers["acc_delta"], state.group["eps"]
    xp = backend.namespace(squares)
    return state.group["lr"], state.grad * (xp.sqrt(steps + eps) / xp.sqrt(squares + eps))


def _rmsprop(state: State) -> tuple[float, Any]:
    group = state.group
    if group["momentum"]:
        return group["lr"], state.buffers["momentum_buffer"]
    squares = state.buffers["square_avg"]
    xp = backend.namespace(squares)
    variance = squares - state.buffers["grad_avg"] ** 2 if group["centered"] else squares
    return group["lr"], state.grad / (xp.sqrt(variance) + group["eps"])


_STEPS: dict[UpdateRule, Callable[[State], tuple[float, Any]]] = {
    "sgd": _sgd,
    "adam": _adam,
    "nadam": _nadam,
    "radam": _radam,
    "adamax": _adamax,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop,
}
