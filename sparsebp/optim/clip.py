"""Clipping by value and by the global norm, each in one pass over all gradients; the check that they are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.arguments import check_number
from sparsebp.core.errors import NonFiniteError
from sparsebp.core.types import Array
from sparsebp.optim.checks import check_is_array, check_named


def global_norm(grads: Mapping[str, Array]) -> float:
    """Return the Euclidean norm of all gradients together, accumulated in float64."""
    return total_norm(squared_norms(grads).values())


def squared_norms(grads: Mapping[str, Array]) -> dict[str, float]:
    """Return the sum of squares of each gradient, accumulated in float64; it does not depend on the others.

    One pass over all gradients. The order of the additions depends on an array's size alone: with any number of threads
    the bits are the same.
    """
    check_named("The gradients", grads)
    squares = dict.fromkeys(grads, 0.0)
    for names, sums in square_sums(grads):
        squares.update(zip(names, backend.to_host(sums).tolist(), strict=True))  # synchronize!
    return squares


def square_sums(grads: Mapping[str, Array]) -> Iterator[tuple[list[str], Array]]:
    """Yield what `squared_norms` returns, as float64 arrays beside the gradients, with the names they are of."""
    for xp, names in _kinds(grads):
        sums = xp.empty(len(names), np.float64)
        kernels.get(xp).square_sums([grads[name] for name in names], sums)
        yield names, sums


def total_norm(squares: Iterable[float]) -> float:
    """Return the norm of all gradients together from each one's sum of squares, added in that order."""
    total = 0.0
    for square in squares:  # not sum(): it compensates from Python 3.12 on
        total += square
    return math.sqrt(total)


def check_finite(grads: Mapping[str, Array]) -> None:
    """Raise if a gradient is not finite.

    Raises
    ------
    NonFiniteError
        The message names the parameters concerned.
    """
    check_named("The gradients", grads)
    spaces = {name: check_is_array(f"The gradient of {name}", grad) for name, grad in grads.items()}
    bad = [name for name, xp in spaces.items() if not bool(xp.isfinite(grads[name]).all())]
    if bad:
        raise NonFiniteError(
            "A gradient is not finite", expected="finite numbers", got=f"NaN or infinity in {', '.join(bad)}",
            remedy="Lower the learning rate, or clip with clip_grad_norm from the start",
        )  # fmt: skip


def clip_grad_norm(grads: Mapping[str, Array], max_norm: float, *, norm: float | None = None) -> float:
    """Scale the gradients in place so that their global norm is at most `max_norm`; return the norm before.

    The rule is that of ``torch.nn.utils.clip_grad_norm_``: the factor is ``max_norm / (norm + 1e-6)``, at most 1.
    `norm` is their norm where it is known already.

    Raises
    ------
    NonFiniteError
        A gradient is not finite; nothing was scaled.
    OptionError
        `max_norm` is negative or not finite, or the gradients have no names.
    DeviceError
        A gradient is no array.
    """
    max_norm = check_number("max_norm", max_norm, 0.0)
    norm = global_norm(grads) if norm is None else norm
    if not math.isfinite(norm):
        check_finite(grads)
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        for xp, names in _kinds(grads):
            kernels.get(xp).scale_arrays([grads[name] for name in names], factor)
    return norm


def clip_on_device(grads: Mapping[str, Array], max_norm: float, sums: Iterable[Array]) -> None:
    """Scale the gradients in place as `clip_grad_norm` does, without a number that the host reads.

    Nothing is scaled where the norm is not finite.

    Parameters
    ----------
    grads
        Gradients by name, on one device.
    max_norm
        The largest norm.
    sums
        Their sums of squares, as `square_sums` yields them.
    """
    first, *others = (part.sum() for part in sums)
    total = sum(others, first)
    for xp, names in _kinds(grads):
        factor = max_norm / (xp.sqrt(total) + 1e-6)
        factor = xp.where(xp.isfinite(total) & (factor < 1), factor, 1.0)
        kernels.get(xp).scale_arrays([grads[name] for name in names], factor)


def clip_grad_value(grads: Mapping[str, Array], clip_value: float) -> None:
    """Bring every number of the gradients into [-clip_value, clip_value], in place; NaN stays NaN.

    Raises
    ------
    OptionError
        `clip_value` is negative or not finite, or the gradients have no names.
    DeviceError
        A gradient is no array.
    """
    clip_value = check_number("clip_value", clip_value, 0.0)
    for xp, names in _kinds(grads):
        kernels.get(xp).clamp_arrays([grads[name] for name in names], clip_value)


def _kinds(grads: Mapping[str, Array]) -> Iterator[tuple[ModuleType, list[str]]]:
    """Yield the names of the gradients of each namespace and dtype: nearly always there is one."""
    kinds: dict[tuple[ModuleType, Any], list[str]] = {}
    check_named("The gradients", grads)
    for name, grad in grads.items():
        kinds.setdefault((check_is_array(f"The gradient of {name}", grad), grad.dtype), []).append(name)
    for (xp, _), names in kinds.items():
        yield xp, names
