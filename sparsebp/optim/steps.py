"""The step that each rule makes of the state that its last update has left: formulae, in place on a copy.

They are those of `kernels`' updates without what an update does to the buffers. A test compares them with real updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sparsebp import backend
from sparsebp.core.types import Array, UpdateRule
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
    return rule in ("adagrad", "adadelta") or (rule == "rmsprop" and not group["momentum"])


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
    if needs and grad is not None:
        grad = -grad if group["maximize"] else grad
        grad = grad + weights * group["weight_decay"] if group["weight_decay"] else grad
    buffers = {key: arrays[name] for key, arrays in optimizer.buffers.items() if name in arrays}
    state = State(grad, group, buffers, count)
    rate, step = _STEPS[optimizer.rule](state)
    out -= step * (s * rate)
    if getattr(optimizer, "decoupled", False) and group["weight_decay"]:
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
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop,
}
