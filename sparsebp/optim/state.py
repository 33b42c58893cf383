"""The state of an optimizer: a flat dict by the names of parameters, and PyTorch's, by their order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsebp.core import backend
from sparsebp.core.absent import held, is_absent, refuse
from sparsebp.core.check import Array, check_flag, check_integer, check_number, check_sequence
from sparsebp.core.errors import DTypeError, FileFormatError, OptionError, ShapeError, needing
from sparsebp.kernels.operands import momenta

# Options belong to parameters: a state says which ones each of its groups had.

VERSION = 2
_READ = (1, 2)  # version 1, of 0.2.0, does not name the parameters of a group
_MARK = ".version"
_NOT_IN_STATE = ("params", "initial_lr")  # part of a schedule's state
_OF_GROUP = re.compile(r"group(\d+)\.(.+)")


def live(optimizer: Any) -> dict[str, Any]:
    """Return the state, see `Optimizer.state_dict`, with the buffers themselves."""
    state: dict[str, Any] = {type(optimizer).__name__ + _MARK: VERSION}
    for number, group in enumerate(optimizer.param_groups):
        state[f"group{number}.params"] = list(group["params"])
        state |= {f"group{number}.{key}": value for key, value in _flat(group).items()}
    state |= {f"step.{name}": count for name, count in optimizer.steps.items()}
    joined = zip(optimizer.params, optimizer._joined.tolist(), strict=True)
    state |= {f"joined.{name}": count for name, count in joined if count}
    for buffer, arrays in optimizer.buffers.items():
        state |= {f"{buffer}.{name}": array for name, array in arrays.items()}
    return state


def load(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Restore what `live` returned, see `Optimizer.load_state_dict`."""
    mark = type(optimizer).__name__ + _MARK
    _check_kind(mark, state)
    params, of_group = optimizer.params, {key for key in state if isinstance(key, str) and _OF_GROUP.fullmatch(key)}
    targets = {f"{b}.{name}": array for b, arrays in optimizer.buffers.items() for name, array in arrays.items()}
    _check_names(
        type(optimizer).__name__,
        state.keys() - of_group,
        {mark, *(f"step.{name}" for name in params), *targets},
        {f"joined.{name}" for name in params},
    )
    for name, target in targets.items():
        check_like(name, state[name], target)
        if is_absent(target) != is_absent(state[name]):
            refuse("loaded the state of")
    groups = _restored(optimizer, {key: state[key] for key in state if key in of_group}, named=state[mark] > 1)
    for group in groups:
        optimizer._check(group)
    steps = [check_integer(f"step.{name}", state[f"step.{name}"], 0, 2**62) for name in params]
    joined = [check_integer(f"joined.{name}", state.get(f"joined.{name}", 0), 0, 2**62) for name in params]

    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)
    optimizer._steps[:], optimizer._joined[:] = steps, joined
    for name, target in held(targets).items():
        target[...] = backend.as_namespace(state[name], backend.namespace(target))


def _check_kind(mark: str, state: Mapping[str, Any]) -> None:
    if state.get(mark) in _READ:
        return
    kinds = sorted(name for name in map(str, state) if name.endswith(_MARK) and "." not in name.removesuffix(_MARK))
    raise FileFormatError(
        "The state belongs to another optimizer, or to another version of this one", expected=f"{mark} = {VERSION}",
        got=", ".join(f"{name} = {state[name]}" for name in kinds) or "a state without such a name",
        remedy="Use the optimizer that the state was made with"
    )  # fmt: skip


def _check_names(
    kind: str, given: Iterable[Any], expected: Iterable[str], optional: Iterable[str] = ()
) -> None:  # fmt: skip
    missing = sorted(set(expected).difference(given))
    unexpected = sorted(map(str, set(given).difference(expected, optional)))
    if missing or unexpected:
        raise FileFormatError(f"The state does not fit this {kind}", expected=", ".join(sorted(expected)),
                              got=f"missing {missing}, unexpected {unexpected}",
                              remedy="Use the options and the model that the state was made with, and "
                              "add_param_group where it did")  # fmt: skip


def check_like(name: str, value: Any, target: Array) -> None:
    """Raise an error unless an array of a state has the shape and dtype of the one that it is for."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise DTypeError(f"{name} is not an array", expected=f"{target.dtype}, shape {target.shape}",
                         got=type(value).__name__, remedy="Pass what state_dict returned")  # fmt: skip
    if tuple(value.shape) != target.shape:
        raise ShapeError(f"{name} has the wrong shape", expected=target.shape, got=tuple(value.shape),
                         remedy="Use the model that the state was made with")  # fmt: skip
    if value.dtype != target.dtype:
        raise DTypeError(f"{name} has the wrong dtype", expected=target.dtype, got=value.dtype,
                         remedy="Use the dtype that the state was made with")  # fmt: skip


def _flat(group: Mapping[str, Any]) -> dict[str, float | bool]:
    """Return the options of a group as numbers: a pair becomes two."""
    flat: dict[str, float | bool] = {}
    for key, value in group.items():
        if key in _NOT_IN_STATE:
            continue
        if isinstance(value, tuple):
            flat |= {f"{key}.{i}": float(v) for i, v in enumerate(value)}
        else:
            flat[key] = value if isinstance(value, bool) else float(value)
    return flat


def groups_added(optimizer: Any, state: Mapping[str, Any], params: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Return the groups of `params` that were added in the middle of a run and that `optimizer` does not have."""
    added = []
    for number, options in sorted(_groups_of(state).items()):
        names = options.pop("params", ())
        if names and optimizer.params.keys().isdisjoint(names) and all(state.get(f"joined.{name}") for name in names):
            group = {"params": {name: params[name] for name in names}} | optimizer.defaults
            added.append(_with_options(group, options, f"group{number}."))
    return added


def _groups_of(entries: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the options of every group in a state, and the names of its parameters as ``"params"``."""
    groups: dict[int, dict[str, Any]] = {}
    for key, value in entries.items():
        if found := _OF_GROUP.fullmatch(key):
            groups.setdefault(int(found[1]), {})[found[2]] = value
    return groups


def _restored(optimizer: Any, entries: Mapping[str, Any], *, named: bool) -> list[dict[str, Any]]:
    """Return every group of `optimizer` with the options that its parameters have in a state's entries of groups."""
    saved = _groups_of(entries)
    names = {number: group.pop("params", None) for number, group in saved.items()}
    named = named or not saved or any(found is not None for found in names.values())
    place = _places(names, list(optimizer.params)) if named else {}
    restored = []
    for number, group in enumerate(optimizer.param_groups):
        own = dict.fromkeys([place[name] for name in group["params"]] or {number} & saved.keys()) if named else saved
        found = {at: _with_options(group, saved[at], f"group{at}.") for at in own}
        first = next(iter(found.values()), group)
        for key in first:
            if all(options[key] == first[key] for options in found.values()):
                continue
            if not named:
                raise FileFormatError(
                    "The state does not say which parameters each of its groups had", expected="group0.params, …",
                    got=f"{len(saved)} groups of different {key}, in the format of version 0.2.0",
                    remedy='Add the names to the state: state["group0.params"] = ["encoder.weight", ...] and so on'
                )  # fmt: skip
            told = [f"{options[key]} of {_few([n for n in names[at] if n in group['params']])}"
                    for at, options in found.items()]  # fmt: skip
            raise FileFormatError(f"Parameters that are in one group had different {key} in the state",
                                  expected=f"one {key} for {_few(list(group['params']))}", got="; ".join(told),
                                  remedy="Build the groups that the state was made with")  # fmt: skip
        restored.append(first)
    return restored


def _places(names: Mapping[int, Any], params: Sequence[str]) -> dict[str, int]:
    """Return the number of the group of every parameter in a state."""
    given = [
        (name, number) for number, found in names.items() for name in (found if isinstance(found, list) else [found])
    ]
    if sorted(names) != list(range(len(names))) or sorted(str(name) for name, _ in given) != sorted(params):
        raise FileFormatError("The groups of the state are not those of its parameters",
                              expected=f"group0.params and so on with {_few(params)}, each once",
                              got=_few([name for name, _ in given]) or "no groups",
                              remedy="Pass what state_dict returned")  # fmt: skip
    return dict(given)


def _with_options(group: Mapping[str, Any], saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return `group` with the options that a state has for it."""
    _check_names("optimizer", [prefix + key for key in saved], [prefix + key for key in _flat(group)])
    restored: dict[str, Any] = dict(group)
    for key, value in group.items():
        if key in _NOT_IN_STATE:
            continue
        if isinstance(value, tuple):
            restored[key] = tuple(check_number(f"{prefix}{key}.{i}", saved[f"{key}.{i}"]) for i in range(len(value)))
        else:
            check = check_flag if isinstance(value, bool) else check_number
            restored[key] = check(prefix + key, saved[key])
    return restored


def _few(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# PyTorch's form: {"state": {0: {"step": …, "exp_avg": …}, …}, "param_groups": [{"lr": …, "params": [0, …]}, …]}.

_LATER = ("maximize", "decoupled_weight_decay")  # not in states of early versions
_RUN = {"foreach", "fused", "capturable", "differentiable"}  # without effect here
_OF_SCHEDULES = {"initial_lr", "base_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
_MU_PRODUCT = 1e-4  # how far NAdam's product of momenta, float32 in PyTorch, may be from the one of its present options


def is_torch(state: Any) -> bool:
    """Whether a state has the form of PyTorch's."""
    return isinstance(state, Mapping) and state.keys() == {"state", "param_groups"}


def to_torch(optimizer: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the state in PyTorch's form, see `Optimizer.torch_state_dict`."""
    name = _torch_name(optimizer)
    order = list(optimizer.params) if names is None else _all_of(optimizer, names)
    with needing("torch", "PyTorch's state consists of tensors, and it is not installed"):
        import torch

        from sparsebp.interop.torch import to_torch as tensor_of
    defaults = getattr(torch.optim, name)([torch.zeros(1)]).defaults
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    steps = optimizer.steps
    for group in optimizer.param_groups:
        own = [name for name in order if name in group["params"]]
        first = sum(len(other["params"]) for other in groups)
        for number, param in enumerate(own, first):
            kept = {
                kind: tensor_of(arrays[param].copy()) for kind, arrays in optimizer.buffers.items() if param in arrays
            }
            if steps[param] == 0 and name != "Adagrad":  # PyTorch makes the others' with the first update
                continue
            if name == "NAdam":
                kept["mu_product"] = torch.tensor(_mu_product(group, steps[param]))
            state[number] = kept if name == "SGD" else {"step": torch.tensor(float(steps[param])), **kept}
        options = {key: value for key, value in group.items() if key not in _NOT_IN_STATE}
        groups.append(defaults | options | {"params": list(range(first, first + len(own)))})
    return {"state": {number: kept for number, kept in state.items() if kept}, "param_groups": groups}


def from_torch(optimizer: Any, state: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a state of PyTorch's form in ours, see `Optimizer.load_torch_state_dict`."""
    kind = _torch_name(optimizer)
    if not is_torch(state) or not isinstance(state["param_groups"], list):
        raise FileFormatError("This is not the state of a PyTorch optimizer", expected='"state" and "param_groups"',
                              got=_few(list(state)) if isinstance(state, Mapping) else type(state).__name__,
                              remedy="Pass optimizer.state_dict()")  # fmt: skip
    given, kept = state["param_groups"], state["state"]
    order = _all_of(optimizer, names) if names is not None else _named_by(optimizer, given)
    found: dict[str, Any] = {type(optimizer).__name__ + _MARK: VERSION}
    named = iter(order)
    for number, group in enumerate(given):
        mine = [next(named) for _ in group["params"]]
        options = _options_of(optimizer, group)
        found[f"group{number}.params"] = mine
        found |= {f"group{number}.{key}": value for key, value in _flat(options).items()}
        for at, name in zip(group["params"], mine, strict=True):
            param, own = optimizer.params[name], kept.get(at, {})
            buffers = optimizer._buffers_of(options)
            arrays = {
                key: value for key, value in own.items() if key not in ("step", "mu_product") and value is not None
            }
            if own and arrays.keys() != set(buffers):
                raise FileFormatError(f"The state is not of a PyTorch {kind}", expected=f"{_few(buffers) or 'nothing'} "
                                      f"for {name}", got=_few(list(arrays)) or "nothing",
                                      remedy="Use the optimizer that the state was made with")  # fmt: skip
            steps = int(own["step"]) if "step" in own else int(bool(arrays))  # SGD does not count
            if "mu_product" in own and not math.isclose(
                float(own["mu_product"]), expected := _mu_product(options, steps), rel_tol=_MU_PRODUCT
            ):
                raise FileFormatError("betas or momentum_decay of NAdam have changed during training",
                                      expected=f"mu_product {expected:.6g} of {name} after {steps} steps",
                                      got=float(own["mu_product"]))  # fmt: skip
            found[f"step.{name}"] = steps
            for key in buffers:
                array = _array(arrays[key]) if own else optimizer._new_buffer(key, param, options)
                found[f"{key}.{name}"] = array
    most = max((found[f"step.{name}"] for name in order), default=0)
    return found | {f"joined.{name}": most - found[f"step.{name}"] for name in order}


def _torch_name(optimizer: Any) -> str:
    """Return the name of PyTorch's optimizer with the same rule."""
    kinds: tuple[Any, ...] = type(optimizer).__mro__
    for kind in kinds:
        if kind.__module__ == f"{__package__}.rules" and kind.rule is not None:
            return str(kind.__name__)
    raise OptionError(f"PyTorch has no {type(optimizer).__name__}", expected="an optimizer of sparsebp.optim",
                      got=type(optimizer).__name__, remedy="Use state_dict and load_state_dict")  # fmt: skip


def _all_of(optimizer: Any, names: Any) -> list[str]:
    order: list[str] = check_sequence("names", names, "names of parameters")
    if sorted(map(str, order)) != sorted(optimizer.params):
        raise OptionError("names are not those of the optimizer's parameters", expected=_few(list(optimizer.params)),
                          got=_few(order))  # fmt: skip
    return order


def _named_by(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the parameters of PyTorch's groups: the state's own, or by their order."""
    counts, own = (
        [len(group["params"]) for group in groups],
        [list(group["params"]) for group in optimizer.param_groups],
    )
    if all("param_names" in group for group in groups):
        return _all_of(optimizer, [name for group in groups for name in group["param_names"]])
    shapes = [[optimizer.params[name].shape for name in names] for names in own]
    if counts != [len(names) for names in own] or any(shapes.count(one) > 1 for one in shapes):
        raise FileFormatError("The state does not say which parameter is which",
                              expected=f"names, or groups of {_few([len(names) for names in own])} parameters, of "
                              "different shapes", got=f"groups of {_few(counts)} parameters", remedy="Pass names=[...] "
                              "in the order of PyTorch's groups, or build PyTorch's optimizer on named_parameters()"
                              )  # fmt: skip
    return [name for names in own for name in names]


def _options_of(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of PyTorch's, in ours."""
    options: dict[str, Any] = {}
    for key, default in optimizer.defaults.items():
        value = group.get(key, default if key in _LATER else None)
        if value is None:
            break
        if isinstance(default, tuple):
            options[key] = tuple(map(float, value))
        else:
            options[key] = bool(value) if isinstance(default, bool) else float(value)
    decoupled = group.get("decoupled_weight_decay", getattr(optimizer, "decoupled", False))
    unknown = group.keys() - options.keys() - _RUN - _OF_SCHEDULES - {"params", "param_names", "decoupled_weight_decay"}
    differs = "decoupled_weight_decay" not in options and bool(decoupled) != getattr(optimizer, "decoupled", False)
    if len(options) < len(optimizer.defaults) or unknown or differs:
        raise FileFormatError(f"The state is not of a PyTorch {_torch_name(optimizer)}",
                              expected=f"the options {', '.join(optimizer.defaults)}", got=_few(list(group)) + (
                              f", with decoupled_weight_decay={decoupled}" if differs else ""),
                              remedy="Use the optimizer that the state was made with")  # fmt: skip
    return options


def _mu_product(group: Mapping[str, Any], steps: int) -> float:
    return momenta(group["betas"][0], group["momentum_decay"], steps)[2] if steps else 1.0


def _array(value: Any) -> Array:
    if not hasattr(value, "detach"):
        return value
    from sparsebp.interop.torch import from_torch as array_of

    return array_of(value)
