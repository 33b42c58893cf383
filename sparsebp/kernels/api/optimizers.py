"""Argument checks of the optimizers' kernels, which take sequences of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import LayoutError, OptionError, ShapeError
from sparsebp.core.types import Array, UpdateRule
from sparsebp.kernels.api.checks import INT64, exact, real, written
from sparsebp.kernels.protocol import OPTIONAL_BUFFERS, UPDATE_BUFFERS, UPDATE_OPTIONS

FLOAT64 = np.dtype(np.float64)


def check_optimizer_update(
    rule: UpdateRule,
    params: Sequence[Array],
    grads: Sequence[Array],
    buffers: Sequence[Sequence[Array | None]],
    options: Array,
    steps: Array,
) -> None:
    """Check the arguments of `Kernels.optimizer_update`."""
    check_update_options(rule, len(params), buffers, options, steps)
    required = {f"{name}[{i}]": a for name, of in (("params", params), ("grads", grads)) for i, a in enumerate(of)}
    backend.namespace(*(array for arrays in buffers for array in arrays if array is not None), **required)
    _check_length("grads", grads, len(params))
    for name, arrays in zip(UPDATE_BUFFERS[rule], buffers, strict=True):
        _check_length(name, arrays, len(params))
    check_arrays(params, "params")
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
    """Check what of the arguments of `Kernels.optimizer_update` is quickly looked at.

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


def check_square_sums(arrays: Sequence[Array], out: Array) -> None:
    """Check the arguments of `Kernels.square_sums`."""
    written("out", out, FLOAT64, (len(arrays),))
    check_arrays(arrays)


def check_written_arrays(arrays: Sequence[Array]) -> None:
    """Check the arguments of `Kernels.scale_arrays` and `Kernels.clamp_arrays`."""
    check_arrays(arrays)
    for i, array in enumerate(arrays):
        backend.check_array(f"arrays[{i}]", array, written=True)


def check_arrays(arrays: Sequence[Array], name: str = "arrays") -> None:
    """Check that all are C-contiguous arrays of one real dtype."""
    for i, array in enumerate(arrays):
        _check_is_array(f"{name}[{i}]", array)
        if i == 0:
            real(f"{name}[0]", array)
        exact(f"{name}[{i}]", array, arrays[0].dtype, array.shape)


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
