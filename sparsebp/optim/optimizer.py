"""The base of optimizers: what users call. Groups, buffers and launches are in `sparsebp.optim.groups`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_integer, check_number
from sparsebp.core.errors import DTypeError, FileFormatError, OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.optim.checks import check_named
from sparsebp.optim.groups import ParameterGroups
from sparsebp.optim.update import DeviceUpdate, Update, launch

VERSION = 1
_MARK = ".version"
_NOT_IN_STATE = {"params", "initial_lr"}  # the base rate is a schedule's, and part of its state


class Optimizer(ParameterGroups):
    """Updates parameters in place, all in one pass over memory and one call; on a GPU that is a launch for a few dozen.

    Parameters
    ----------
    params
        ``model.parameters()``: live C-contiguous arrays by name. Or a list of groups as in torch.optim,
        ``[{"params": {name: array}, "lr": 0.1}, …]``: what a group leaves out has the value given to the optimizer.
        Move the model to its device first.
    defaults
        The options of every group, with the values they have unless the group says otherwise.
    run
        What torch.optim asks of how an update runs. ``foreach``, ``fused`` and ``capturable`` are taken and change
        nothing: every update is fused and can be captured. ``differentiable=True`` is refused.

    Attributes
    ----------
    param_groups : list of dict
        Each group's ``"params"`` and options. Options may be set at any time; an update takes them as they are when
        it begins.

    Raises
    ------
    OptionError
        There are no parameters or they have no names, a name or an array comes twice, an option is unknown, of another
        type or out of range.
    DeviceError, DTypeError, LayoutError
        A parameter is no array, not of float32 or float64, not C-contiguous, or read-only.
    """

    # ---- updates ---------------------------------------------------------------------------------------------------

    def step(self, grads: Mapping[str, Array]) -> None:
        """Update every parameter from its gradient.

        Parameters
        ----------
        grads
            Gradients with exactly the keys, shapes, dtypes and namespace of the parameters.

        Raises
        ------
        OptionError
            Keys are missing or unexpected.
        ShapeError, DTypeError, LayoutError, DeviceError
            A gradient does not fit, or is no array. Nothing has been updated then.
        """
        check_named("The gradients", grads)
        if grads.keys() != self.params.keys():
            missing = sorted(self.params.keys() - grads.keys())
            unexpected = sorted(map(str, grads.keys() - self.params.keys()))
            raise OptionError(
                "The gradients do not belong to the parameters", expected=", ".join(self.params),
                got=f"missing {missing}, unexpected {unexpected}",
                remedy="Pass what weight_grad of the same model returned",
            )  # fmt: skip
        launch(self, grads, self._options_now())

    def begin(self) -> Update:
        """Open one update with the options as they are now: what is set later belongs to later updates.

        Raises
        ------
        OptionError
            An option has been set to a value out of range, or one that needs other buffers (momentum, say) was
            switched on or off.
        """
        return Update(self, self._options_now())

    def begin_on_device(self) -> DeviceUpdate:
        """Open one update that a captured CUDA graph can replay; see there.

        Raises
        ------
        OptionError
            As `begin`.
        """
        return DeviceUpdate(self, self._options_now())

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a flat dict of numbers and arrays, which a safetensors file with a header can hold.

        ``"Adam.version"`` (the class's name) says whose it is; ``"group0.lr"`` and so on are the options,
        ``"step.<parameter>"`` the number of updates, ``"<buffer>.<parameter>"`` a copy of each buffer.
        """
        state: dict[str, Any] = {type(self).__name__ + _MARK: VERSION}
        for number, group in enumerate(self.param_groups):
            state |= {f"group{number}.{key}": value for key, value in _flat(group).items()}
        state |= {f"step.{name}": count for name, count in self.steps.items()}
        for buffer, arrays in self.buffers.items():
            state |= {f"{buffer}.{name}": array.copy() for name, array in arrays.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, options included; nothing is written unless everything fits.

        Raises
        ------
        FileFormatError
            It is the state of another optimizer, or names are missing or unexpected.
        OptionError
            An option or a number of updates is out of range.
        ShapeError, DTypeError
            A buffer does not fit its parameter.
        """
        check_named("The state's entries", state)
        _check_kind(type(self).__name__ + _MARK, state)
        targets = {f"{b}.{name}": array for b, arrays in self.buffers.items() for name, array in arrays.items()}
        options = [{f"group{i}.{key}" for key in _flat(group)} for i, group in enumerate(self.param_groups)]
        expected = {type(self).__name__ + _MARK, *(f"step.{name}" for name in self.params), *targets}
        expected = expected.union(*options)
        if state.keys() != expected:
            missing, unexpected = sorted(expected - state.keys()), sorted(map(str, state.keys() - expected))
            raise FileFormatError(
                f"The state does not fit this {type(self).__name__}", expected=", ".join(sorted(expected)),
                got=f"missing {missing}, unexpected {unexpected}",
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
        restored = [_restored(state, f"group{i}.", group) for i, group in enumerate(self.param_groups)]
        for group in restored:
            self._check(group)
        steps = [check_integer(f"step.{name}", state[f"step.{name}"], 0, 2**62) for name in self.params]

        for group, values in zip(self.param_groups, restored, strict=True):
            group.update(values)
        self._steps[:] = steps
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
        if key in _NOT_IN_STATE:
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
        if key in _NOT_IN_STATE:
            continue
        if isinstance(value, tuple):
            names = [f"{prefix}{key}.{i}" for i in range(len(value))]
            restored[key] = tuple(check_number(name, state[name]) for name in names)
        else:
            check = check_flag if isinstance(value, bool) else check_number
            restored[key] = check(prefix + key, state[prefix + key])
    return restored
