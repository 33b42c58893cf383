"""Argument checks of the training kernels: loss and optimizer updates."""

from __future__ import annotations

from sparsebp.errors import OptionError, ShapeError
from sparsebp.kernels.checks.common import INT64, exact, rank, real
from sparsebp.types import Array


def check_softmax_cross_entropy(logits: Array, target: Array, losses: Array, grad: Array) -> None:
    """Check the arguments of `Kernels.softmax_cross_entropy`."""
    dtype = real("logits", logits)
    n, classes = rank("logits", logits, 2)
    exact("logits", logits, dtype, (n, classes))
    exact("target", target, INT64, (n,))
    exact("losses", losses, dtype, (n,))
    exact("grad", grad, dtype, (n, classes))


def check_sgd_update(param: Array, grad: Array, buffer: Array | None, momentum: float) -> None:
    """Check the arguments of `Kernels.sgd_update`.

    Raises
    ------
    ShapeError
        An array differs from `param` in shape, or `buffer` is given without momentum or missing with it.
    """
    dtype = real("param", param)
    exact("param", param, dtype, param.shape)
    exact("grad", grad, dtype, param.shape)
    if (buffer is None) != (momentum == 0):
        raise ShapeError(
            "buffer and momentum do not go together",
            expected="buffer None exactly when momentum is 0",
            got=f"momentum {momentum} and buffer {'None' if buffer is None else 'given'}",
            remedy="Pass a buffer shaped like param when momentum is not 0",
        )
    if buffer is not None:
        exact("buffer", buffer, dtype, param.shape)


def check_adam_update(param: Array, grad: Array, m: Array, v: Array, step: int) -> None:
    """Check the arguments of `Kernels.adam_update`.

    Raises
    ------
    OptionError
        `step` is below 1: the bias correction divides by ``1 - beta**step``.
    """
    dtype = real("param", param)
    for name, array in (("param", param), ("grad", grad), ("m", m), ("v", v)):
        exact(name, array, dtype, param.shape)
    if step < 1:
        raise OptionError("Adam's step number is too small", expected="1 or more", got=step, remedy="Count from 1")
