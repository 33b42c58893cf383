"""Optimizers' updates and the clipping of gradients: sequences of arrays, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import LayoutError, OptionError, ShapeError
from sparsebp.core.types import Array, UpdateRule
from sparsebp.kernels.api.checks import INT64, Family, exact, real_dtype, written

FLOAT64 = np.dtype(np.float64)

UPDATE_OPTIONS: dict[UpdateRule, tuple[str, ...]] = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"),
    "nadam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize", "momentum_decay"),
    "radam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"),
    "adamax": ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay", "maximize"),
    "adadelta": ("lr", "rho", "eps", "weight_decay", "maximize"),
    "rmsprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "maximize"),
}
"""The columns of an optimizer's options. ``decoupled``: the decay shrinks the parameter (AdamW)."""
UPDATE_BUFFERS: dict[UpdateRule, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "adamax": ("exp_avg", "exp_inf"),
    "adagrad": ("sum",),
    "adadelta": ("square_avg", "acc_delta"),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
}
"""The buffers of each parameter."""
OPTIONAL_BUFFERS = ("momentum_buffer", "max_exp_avg_sq", "grad_avg")
"""In their place None stands for a parameter without momentum, AMSGrad, or a second moment that is centered."""


class OptimizerKernels(Family):
    """Kernels on sequences of arrays, all of one real dtype and of any shapes: one pass over memory for all of them.

    A number's result does not depend on what else is in the call. Implementations are told how to `check` all arrays,
    too: they call it before they touch any that do not look right at once.
    """

    def optimizer_update(
        self,
        rule: UpdateRule,
        params: Sequence[Array],
        grads: Sequence[Array],
        buffers: Sequence[Sequence[Array | None]],
        options: Array,
        steps: Array,
    ) -> None:
        """The update of torch.optim's optimizer of that name, in place on params and buffers.

        grads: one like each parameter. buffers: one sequence for each name in ``UPDATE_BUFFERS[rule]``, with an array
        like each parameter (None: see ``OPTIONAL_BUFFERS``). options
        (n, len(UPDATE_OPTIONS[rule])) float64: a row for each parameter, flags as 0 or 1. steps (n,) int64: the number
        of this update of each parameter, from 1. Both on the host; or on the device, read when the kernel runs.

        No array may be there twice. What depends on the step alone (bias corrections) is worked out in float64.
        """
        check_update_options(rule, len(params), buffers, options, steps)

        def check() -> None:
            check_update(rule, params, grads, buffers, options, steps)

        self._run.optimizer_update(rule, params, grads, buffers, options, steps, check)

    def scale_arrays(self, arrays: Sequence[Array], factor: float | Array) -> None:
        """Multiply all arrays by one number, in place.

        factor: a number, or an array () of float64 beside the arrays, which is read when the kernel runs.
        """
        if hasattr(factor, "shape") and not isinstance(factor, np.generic):
            exact("factor", factor, FLOAT64, ())
        self._run.scale_arrays(arrays, factor, lambda: _check_written(arrays))

    def clamp_arrays(self, arrays: Sequence[Array], limit: float) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays NaN."""
        self._run.clamp_arrays(arrays, limit, lambda: _check_written(arrays))

    def square_sums(self, arrays: Sequence[Array], out: Array) -> None:
        """Sum of the squares of each array, accumulated in float64, in an order that depends on its size alone.

        out (n,) float64, written; it belongs to the namespace of the arrays.
        """
        written("out", out, FLOAT64, (len(arrays),))
        self._run.square_sums(arrays, out, lambda: _check_arrays(arrays))


def check_update(
    rule: UpdateRule,
    params: Sequence[Array],
    grads: Sequence[Array],
    buffers: Sequence[Sequence[Array | None]],
    options: Array,
    steps: Array,
) -> None:
    """Check the arguments of `optimizer_update`."""
    check_update_options(rule, len(params), buffers, options, steps)
    named = {f"{name}[{i}]": a for name, of in (("params", params), ("grads", grads)) for i, a in enumerate(of)}
    kept = zip(UPDATE_BUFFERS[rule], buffers, strict=True)
    _check_together(named | {f"{name}[{i}]": a for name, of in kept for i, a in enumerate(of) if a is not None})
    _check_length("grads", grads, len(params))
    for name, arrays in zip(UPDATE_BUFFERS[rule], buffers, strict=True):
        _check_length(name, arrays, len(params))
    _check_arrays(params, "params")
    for i, param in enumerate(params):
        backend.check_array(f"params[{i}]", param, written=True)
        _like(f"grads[{i}]", grads[i], param)
        for name, arrays in zip(UPDATE_BUFFERS[rule], buffers, strict=True):
            if arrays[i] is not None or name not in OPTIONAL_BUFFERS:
                _like(f"{name}[{i}]", arrays[i], param)
                backend.check_array(f"{name}[{i}]", arrays[i], written=True)


def check_update_options(
    rule: UpdateRule, count: int, buffers: Sequence[Sequence[Array | None]], options: Array, steps: Array
) -> None:
    """Check what of the arguments of `optimizer_update` is quickly looked at.

    Raises
    ------
    OptionError
        The rule is unknown.
    ShapeError
        The rule has another number of buffers.
    """
    if rule not in UPDATE_OPTIONS:
        raise OptionError(
            "Unknown update rule", expected=" or ".join(UPDATE_OPTIONS), got=rule, remedy="Pass one of them"
        )
    _check_length(f"The buffers of {rule}", buffers, len(UPDATE_BUFFERS[rule]))
    exact("options", options, FLOAT64, (count, len(UPDATE_OPTIONS[rule])))
    exact("steps", steps, INT64, (count,))


def _check_written(arrays: Sequence[Array]) -> None:
    """Check what `_check_arrays` does, and that all may be written."""
    _check_arrays(arrays)
    for i, array in enumerate(arrays):
        backend.check_array(f"arrays[{i}]", array, written=True)


def _check_arrays(arrays: Sequence[Array], name: str = "arrays") -> None:
    """Check that all are C-contiguous arrays of one real dtype and one namespace."""
    _check_together({f"{name}[{i}]": array for i, array in enumerate(arrays)})
    for i, array in enumerate(arrays):
        if i == 0:
            real_dtype(f"{name}[0]", array)
        exact(f"{name}[{i}]", array, arrays[0].dtype, array.shape)


def _check_together(arrays: dict[str, Array]) -> None:
    """Check that all are arrays of one namespace: each by itself first, since a NumPy scalar is on the host anyhow."""
    for name, array in arrays.items():
        _check_is_array(name, array)
    backend.namespace(**arrays)


def _like(name: str, array: Array, param: Array) -> None:
    _check_is_array(name, array)
    exact(name, array, param.dtype, param.shape)


def _check_is_array(name: str, array: Array) -> None:
    backend.namespace(**{name: array})
    if isinstance(array, np.generic):  # without memory of its own that a kernel could read
        raise LayoutError(f"{name} is not an array", expected="an array", got=type(array).__name__,
                          remedy="Pass an array; numpy.asarray(...) makes one of a scalar")  # fmt: skip


def _check_length(name: str, items: Sequence[object], count: int) -> None:
    if len(items) != count:
        raise ShapeError(f"{name} has the wrong length", expected=count, got=len(items), remedy="Pass one for each")
