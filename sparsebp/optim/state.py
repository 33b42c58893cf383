"""What an optimizer puts into its flat state, and how it takes it back after checking that it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_integer, check_number
from sparsebp.core.errors import DTypeError, FileFormatError, ShapeError
from sparsebp.optim.checks import check_named
from sparsebp.optim.groups import ParameterGroups

VERSION = 1
_MARK = ".version"
_NOT_KEPT = {"params", "initial_lr"}  # the base rate is a schedule's, and part of its state


def pack_state(optimizer: ParameterGroups) -> dict[str, Any]:
    """See `Optimizer.state_dict`."""
    state: dict[str, Any] = {type(optimizer).__name__ + _MARK: VERSION}
    for number, group in enumerate(optimizer.param_groups):
        state |= {f"group{number}.{key}": value for key, value in _flat(group).items()}
    state |= {f"step.{name}": count for name, count in optimizer.steps.items()}
    for buffer, arrays in optimizer.buffers.items():
        state |= {f"{buffer}.{name}": array.copy() for name, array in arrays.items()}
    return state


def load_state(optimizer: ParameterGroups, state: Mapping[str, Any]) -> None:
    """See `Optimizer.load_state_dict`."""
    check_named("The state's entries", state)
    _check_kind(type(optimizer).__name__ + _MARK, state)
    targets = {f"{b}.{name}": array for b, arrays in optimizer.buffers.items() for name, array in arrays.items()}
    options = [{f"group{i}.{key}" for key in _flat(group)} for i, group in enumerate(optimizer.param_groups)]
    expected = {type(optimizer).__name__ + _MARK, *(f"step.{name}" for name in optimizer.params), *targets}
    expected = expected.union(*options)
    if state.keys() != expected:
        raise FileFormatError(
            f"The state does not fit this {type(optimizer).__name__}", expected=", ".join(sorted(expected)),
            got=f"missing {sorted(expected - state.keys())}, unexpected {sorted(map(str, state.keys() - expected))}",
            remedy="Use the options and the model that the state was made with",
        )  # fmt: skip
    for name, target in targets.items():
        value = state[name]
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise DTypeError(f"{name} is no array", expected=f"{target.dtype}, shape {target.shape}",
                             got=type(value).__name__, remedy="Pass what state_dict returned")  # fmt: skip
        if tuple(value.shape) != target.shape:
            raise ShapeError(f"{name} has the wrong shape", expected=target.shape, got=tuple(value.shape),
                             remedy="Use the model that the state was made with")  # fmt: skip
        if value.dtype != target.dtype:
            raise DTypeError(f"{name} has the wrong dtype", expected=target.dtype, got=value.dtype,
                             remedy="Use the dtype that the state was made with")  # fmt: skip
    restored = [_restored(state, f"group{i}.", group) for i, group in enumerate(optimizer.param_groups)]
    for group in restored:
        optimizer._check(group)
    steps = [check_integer(f"step.{name}", state[f"step.{name}"], 0, 2**62) for name in optimizer.params]

    for group, values in zip(optimizer.param_groups, restored, strict=True):
        group.update(values)
    optimizer._steps[:] = steps
    for name, target in targets.items():
        target[...] = backend.as_namespace(state[name], backend.namespace(target))


def _check_kind(mark: str, state: Mapping[str, Any]) -> None:
    if state.get(mark) == VERSION:
        return
    kinds = sorted(name for name in state if name.endswith(_MARK) and "." not in name.removesuffix(_MARK))
    raise FileFormatError(
        "The state is that of another optimizer, or of another version of this one", expected=f"{mark} = {VERSION}",
        got=", ".join(f"{name} = {state[name]}" for name in kinds) or "a state without such a name",
        remedy="Use the optimizer that the state was made with",
    )  # fmt: skip


def _flat(group: Mapping[str, Any]) -> dict[str, float | bool]:
    """Return the options of a group as numbers: a pair becomes two."""
    flat: dict[str, float | bool] = {}
    for key, value in group.items():
        if key in _NOT_KEPT:
            continue
        if isinstance(value, tuple):
            flat |= {f"{key}.{i}": float(v) for i, v in enumerate(value)}
        else:
            flat[key] = value if isinstance(value, bool) else float(value)
    return flat


def _restored(state: Mapping[str, Any], prefix: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `group` with the values that `state` has for them."""
    restored: dict[str, Any] = dict(group)
    for key, value in group.items():
        if key in _NOT_KEPT:
            continue
        if isinstance(value, tuple):
            names = [f"{prefix}{key}.{i}" for i in range(len(value))]
            restored[key] = tuple(check_number(name, state[name]) for name in names)
        else:
            check = check_flag if isinstance(value, bool) else check_number
            restored[key] = check(prefix + key, state[prefix + key])
    return restored
