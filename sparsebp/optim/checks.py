"""Checks of what optimizers, schedules and clipping are given: arrays by name, shares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_number
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, OptionError


def check_named(what: str, arrays: Any) -> None:
    """Raise `OptionError` unless `arrays` is a mapping."""
    if not isinstance(arrays, Mapping):
        raise OptionError(f"{what} are not a mapping", expected="arrays by name", got=type(arrays).__name__,
                          remedy="Pass a dict with the names of the parameters")  # fmt: skip


def check_is_array(what: str, array: Any) -> ModuleType:
    """Return the module of an array, NumPy or CuPy; raise `DeviceError` if it is something else."""
    if type(array) is np.ndarray:  # as nearly always
        return np
    if array is not None:
        with contextlib.suppress(DeviceError):
            return backend.namespace(array)
    raise DeviceError(f"{what} is not an array", expected="a NumPy or CuPy array", got=type(array).__name__,
                      remedy="Convert it with numpy.asarray(...)")  # fmt: skip


def check_parameter(name: Any, param: Any) -> None:
    """Raise an error that names it unless this is a parameter that can be updated in place."""
    if not isinstance(name, str):
        raise OptionError("The name of a parameter is not a text", expected="str", got=repr(name),
                          remedy="Pass model.parameters(), or a part of it")  # fmt: skip
    check_is_array(f"The parameter {name}", param)
    if param.dtype not in backend.FLOAT_DTYPES:
        raise DTypeError(f"The parameter {name} has the wrong dtype", expected="float32 or float64", got=param.dtype,
                         remedy="Convert the model with .to(dtype=...) first")  # fmt: skip
    if not getattr(param.flags, "writeable", True):
        raise LayoutError(f"The parameter {name} is read-only", expected="an array that can be updated in place",
                          got="writeable=False", remedy="Give the model a copy of it, or leave it out")  # fmt: skip
    backend.check_array(name, param)


def check_fraction(name: str, value: float) -> None:
    """Raise `OptionError` unless ``0 <= value < 1``."""
    if not 0 <= check_number(name, value) < 1:
        raise OptionError(f"Invalid {name}", expected="a number in [0, 1)", got=value, remedy=f"Pass another {name}")


def check_run(kind: str, run: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise `OptionError` unless `run` holds what torch.optim's optimizers take besides an update's `options`.

    None of it changes an update; ``differentiable=True`` would, and is refused.
    """
    unknown = sorted(run.keys() - _RUN.keys())
    if unknown:
        raise OptionError(f"{kind} does not know an argument", expected=f"any of {', '.join(options)}",
                          got=", ".join(unknown), remedy="Leave it out")  # fmt: skip
    for name, value in run.items():
        if value is not None or not _RUN[name]:
            check_flag(name, value)
    if run.get("fused") and run.get("foreach"):
        raise OptionError("fused and foreach exclude each other", expected="one of them", got="both",
                          remedy="Leave both out: every update is fused")  # fmt: skip
    if run.get("differentiable"):
        raise OptionError("An update cannot be differentiated", expected="differentiable=False", got=True,
                          remedy="Leave it out: parameters are updated in place")  # fmt: skip


_RUN = {"foreach": True, "fused": True, "capturable": False, "differentiable": False}
"""Whether the argument may be None."""
