"""The base class of optimizers: parameter groups, buffers, updates applied whole or in pieces; clipping."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs, masks, parts
from sparsebp.core.absent import Absent, held, is_absent, refuse
from sparsebp.core.check import Array, ProductFactors, check_flag, check_number
from sparsebp.core.errors import DTypeError, LayoutError, NonFiniteError, OptionError, SparseBPError
from sparsebp.core.locks import forkable_lock
from sparsebp.core.reprs import call_text
from sparsebp.kernels.checks import UPDATE_BUFFERS, UPDATE_OPTIONS, check_update
from sparsebp.optim import state as states

# Checks of arguments: arrays by name, fractions.


def check_named(what: str, arrays: Any) -> None:
    """Raise `OptionError` unless `arrays` is a mapping."""
    if type(arrays) is not dict and not isinstance(arrays, Mapping):  # asking an abstract class takes longer
        raise OptionError(f"{what} are not a mapping", expected="arrays by name", got=type(arrays).__name__)


def check_is_array(what: str, array: Any) -> ModuleType:
    """Return the module of an array, NumPy or CuPy; raise `DTypeError` for anything else."""
    if type(array) is np.ndarray:  # nearly always
        return np
    if array is not None:
        with contextlib.suppress(DTypeError):
            return backend.namespace(array)
    raise DTypeError(f"{what} is not an array", expected="a NumPy or CuPy array", got=type(array).__name__,
                      remedy=backend.array_remedy(array))  # fmt: skip


def check_parameter(name: Any, param: Any) -> None:
    """Raise an error that names the parameter unless it can be updated in place."""
    if not isinstance(name, str):
        raise OptionError("The name of a parameter is not a text", expected="str", got=repr(name),
                          remedy="Pass model.parameters(), or a part of it")  # fmt: skip
    check_is_array(f"The parameter {name}", param)
    if param.dtype not in backend.FLOAT_DTYPES:
        raise DTypeError(f"The parameter {name} has the wrong dtype", expected="float32 or float64", got=param.dtype,
                         remedy="Convert the model with .to(dtype=...) first")  # fmt: skip
    if is_absent(param):
        return
    if not getattr(param.flags, "writeable", True):
        raise LayoutError(f"The parameter {name} is read-only", expected="an array that can be updated in place",
                          got="writeable=False", remedy="Give the model a copy of it, or leave it out")  # fmt: skip
    backend.check_array(name, param)


def check_fraction(name: str, value: float) -> None:
    """Raise `OptionError` unless ``0 <= value < 1``."""
    if not 0 <= check_number(name, value) < 1:
        raise OptionError(f"Invalid {name}", expected="a number in [0, 1)", got=value)


def check_run(kind: str, run: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise `OptionError` unless `run` holds the other arguments of torch.optim's optimizers."""
    # None of them changes an update; `differentiable=True` would, and is refused.
    unknown = sorted(run.keys() - _RUN.keys())
    if unknown:
        raise OptionError(f"{kind} does not know an argument", expected=f"any of {', '.join(options)}",
                          got=", ".join(unknown))  # fmt: skip
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


# Clipping by value and by the global norm, each in one pass over all gradients; the check that they are finite.


def global_norm(grads: Mapping[str, Array]) -> float:
    """Return the Euclidean norm of all gradients together, accumulated in float64."""
    return total_norm(squared_norms(grads).values())


def squared_norms(grads: Mapping[str, Array]) -> dict[str, float]:
    """Return the sum of squares of each gradient, accumulated in float64."""
    # The order of the additions depends on an array's size alone: results are bitwise equal for any number of threads.
    check_named("The gradients", grads)
    squares = dict.fromkeys(grads, 0.0)
    for names, sums in square_sums(grads):
        squares.update(zip(names, backend.to_host(sums).tolist(), strict=True))  # synchronize!
    return squares


def square_sums(grads: Mapping[str, Array]) -> Iterator[tuple[list[str], Array]]:
    """Yield the values of `squared_norms` as float64 arrays on the gradients' device, each with its names."""
    for xp, names in _kinds(grads):
        sums = xp.empty(len(names), np.float64)
        kernels.get(xp).square_sums([grads[name] for name in names], sums)
        yield names, sums


def total_norm(squares: Iterable[float]) -> float:
    """Return the norm of all gradients from their sums of squares, added in that order."""
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
        raise NonFiniteError("A gradient is not finite", expected="finite numbers",
                             got=f"NaN or infinity in {', '.join(bad)}",
                             remedy="Lower the learning rate, or clip with clip_grad_norm from the start")  # fmt: skip


def clip_grad_norm(grads: Mapping[str, Array], max_norm: float, *, norm: float | None = None) -> float:
    """Scale the gradients in place so that their global norm is at most `max_norm`; return the norm before.

    As ``torch.nn.utils.clip_grad_norm_``: the factor is ``max_norm / (norm + 1e-6)``, at most 1. `norm` is their norm
    if it is known.

    Raises
    ------
    NonFiniteError
        A gradient is not finite; nothing was scaled.
    OptionError
        `max_norm` is negative or not finite, or the gradients have no names.
    DTypeError
        A gradient is not an array.
    """
    max_norm = check_number("max_norm", max_norm, 0.0)
    total = global_norm(grads) if norm is None else norm
    factor = max_norm / (total + 1e-6)
    if not math.isfinite(total):
        check_finite(grads)
    if math.isinf(total) and norm is None:  # squares overflow from 1e154 on, so in units of the largest number
        largest = max(float(abs(grad).max()) for grad in grads.values() if grad.size)
        relative = global_norm({name: grad / largest for name, grad in grads.items()})
        total, factor = largest * relative, max_norm / largest / relative
    if factor < 1:
        for xp, names in _kinds(grads):
            kernels.get(xp).scale_arrays([grads[name] for name in names], factor)
    return total


def clip_on_device(grads: Mapping[str, Array], max_norm: float, sums: Iterable[Array]) -> None:
    """Scale the gradients in place as `clip_grad_norm`, without a read by the host; not if the norm is not finite."""
    # sums: from `square_sums`.
    first, *others = sums
    squares = backend.namespace(first).concatenate((first, *others)) if others else first
    for xp, names in _kinds(grads):
        kernels.get(xp).clip_arrays([grads[name] for name in names], squares, max_norm)


def clip_grad_value(grads: Mapping[str, Array], clip_value: float) -> None:
    """Bring every number of the gradients into [-clip_value, clip_value], in place; NaN stays NaN.

    Raises
    ------
    OptionError
        `clip_value` is negative or not finite, or the gradients have no names.
    DTypeError
        A gradient is not an array.
    """
    clip_value = check_number("clip_value", clip_value, 0.0)
    for xp, names in _kinds(grads):
        kernels.get(xp).clamp_arrays([grads[name] for name in names], clip_value)


def _kinds(grads: Mapping[str, Array]) -> Iterator[tuple[ModuleType, list[str]]]:
    """Yield the names of the gradients of each namespace and dtype, nearly always one."""
    kinds: dict[tuple[ModuleType, Any], list[str]] = {}
    check_named("The gradients", grads)
    for name, grad in grads.items():
        kinds.setdefault((check_is_array(f"The gradient of {name}", grad), grad.dtype), []).append(name)
    for (xp, _), names in kinds.items():
        yield xp, names


# Parameters in groups, each with its options and buffers, and the kernel launches that update them.

Params = Mapping[str, Array] | Sequence[Mapping[str, Any]]
"""Parameters by name, or groups: mappings with ``"params"`` (parameters by name) and their options."""

_FLAGS = {"amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov"}


class Optimizer:
    """Updates parameters in place, in one pass over memory and one call; on a GPU, one launch per few dozen arrays.

    Parameters
    ----------
    params
        ``model.parameters()``: live C-contiguous arrays by name. Or a list of groups as in torch.optim,
        ``[{"params": {name: array}, "lr": 0.1}, …]``, with the optimizer's values for options that a group leaves out.
        Move the model to its device first.
    defaults
        The options of every group and their default values.
    run
        ``foreach``, ``fused`` and ``capturable`` of torch.optim, without effect: every update is fused and can be
        captured. ``differentiable=True`` is refused.

    Attributes
    ----------
    param_groups : list of dict
        Each group's ``"params"`` and options. Options may be set at any time; an update uses their values when it
        begins. `add_param_group` adds a group.
    params : dict
        The parameters of all groups by name.

    Raises
    ------
    OptionError
        There are no parameters or they have no names, a name or an array comes twice, an option is unknown, of another
        type or out of range.
    DeviceError, DTypeError, LayoutError
        A parameter is not an array, not of float32 or float64, not C-contiguous, or read-only.
    """

    rule: ClassVar[Any] = None
    """The kernel's rule, an `UpdateRule`; None: `update` computes it in Python."""

    state_names: ClassVar[tuple[str, ...]] = ()
    """Without `rule`: names of the arrays that `update` keeps for each parameter."""

    least: ClassVar[Mapping[str, float]] = {}
    most: ClassVar[Mapping[str, float]] = {}
    """Bounds of options that are numbers, if not 0 and infinity."""

    def __init__(self, params: Params, defaults: Mapping[str, Any], **run: Any) -> None:
        check_run(type(self).__name__, run, defaults)
        self._check_update()
        self.defaults = dict(defaults)
        self._numbers = [
            (name, self.least.get(name, 0.0), self.most.get(name, math.inf))
            for name in defaults if name not in (*_FLAGS, "betas")
        ]  # fmt: skip
        self._flags = [name for name in defaults if name in _FLAGS]
        self.param_groups: list[dict[str, Any]] = []
        self.params: dict[str, Array] = {}
        self.buffers: dict[str, dict[str, Array]] = {}
        for group in _listed(params):
            self._adopt(group)
        if not self.params:
            raise OptionError("There is nothing to optimize", expected="at least one parameter", got="none",
                              remedy="Pass model.parameters()")  # fmt: skip
        self._steps = np.zeros(0, np.int64)
        self._joined = np.zeros(0, np.int64)  # how many updates there had been when the parameter's group was added
        self._index()

    def __repr__(self) -> str:
        """Show the constructor's call for each group of parameters, with the options as they are now."""
        texts = []
        for group in self.param_groups:
            count, size = len(group["params"]), sum(array.size for array in group["params"].values())
            head, _, options = call_text(self, ["params"], {"lr": None, **group}).partition("(")
            texts.append(f"{head}(<{count} parameters, {size:,} values>{options if options == ')' else f', {options}'}")
        return "\n".join(texts)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group of parameters, as torch.optim's optimizers: ``{"params": {name: array}, "lr": 0.1, …}``.

        Options that it leaves out have the optimizer's default values. The parameters begin with update 1, and with
        fresh buffers. Schedules built before go on with the new group from the rate that it has at their next step,
        and a `Trainer` trains it from its next step on.

        Raises
        ------
        OptionError, DeviceError, DTypeError, LayoutError
            As for the class; also if a name or an array is in a group already. Nothing has been added then.
        """
        self._options_now()  # the groups so far, checked
        self._adopt(param_group if isinstance(param_group, Mapping) else _listed([param_group])[0])
        self._index()

    def _fill(self, arrays: Mapping[int, Array], buffers: Mapping[str, Mapping[str, Array]] | None = None) -> None:
        """Put arrays in the place of parameters, by the identity of those, with given buffers or fresh ones."""
        for group in self.param_groups:
            for name, old in group["params"].items():
                if id(old) in arrays:
                    group["params"][name] = self.params[name] = new = arrays[id(old)]
                    for kind in self._buffers_of(group):
                        if buffers is not None:
                            self.buffers[kind][name] = buffers[kind][name]
                        else:
                            fresh = Absent.like(new) if is_absent(new) else self._new_buffer(kind, new, group)
                            self.buffers[kind][name] = fresh
        self._index()

    def _most_updates(self) -> int:
        """Return the number of updates that the parameters of this process have had, and those before they came."""
        here = np.array([not is_absent(array) for array in self._arrays])
        return int((self._steps + self._joined)[here].max(initial=0))

    def _count_absent(self, most: int) -> None:
        """Count the updates that other processes have made of the parameters that this one does not hold."""
        absent = np.array([is_absent(array) for array in self._arrays])
        self._steps[absent] = most - self._joined[absent]

    def _drop_groups(self, count: int) -> None:
        """Take `add_param_group` back for all groups after the first `count`."""
        for group in self.param_groups[count:]:
            for name in group["params"]:
                for arrays in (self.params, *self.buffers.values()):
                    arrays.pop(name, None)
        del self.param_groups[count:]
        self._steps, self._joined = self._steps[: len(self.params)], self._joined[: len(self.params)]
        self._index()

    def _index(self) -> None:
        """Lay out what an update reads, after groups have been added or dropped."""
        self._group_buffers = [self._buffers_of(group) for group in self.param_groups]
        self._group_names = [(list(group["params"]), set(self.defaults)) for group in self.param_groups]
        self._arrays = list(self.params.values())
        self._columns = self._columns_of(self.buffers)
        self._names = list(self.params)
        self._kinds = [(backend.namespace(array), array.dtype) for array in self._arrays]
        self._uniform = len(set(self._kinds)) == 1
        self._rows = {name: row for row, name in enumerate(self.params)}
        self._group_of = np.repeat(np.arange(len(self.param_groups)), [len(g["params"]) for g in self.param_groups])
        new = np.zeros(len(self.params) - len(self._steps), np.int64)
        self._joined = np.concatenate([self._joined, new + (self._steps + self._joined).max(initial=0)])
        self._steps = np.concatenate([self._steps, new])
        self._seen: list[tuple[Any, ...]] | None = None
        self._expanded: Any = np.empty(0)
        self._models, self._changes = parts.models_of(self._arrays), parts.changes

    def _check_update(self) -> None:
        kind = type(self)
        if self.rule is not None and kind.update is not Optimizer.update:
            raise OptionError(f"{kind.__name__}.update would not run: the class has the kernel of a built-in optimizer",
                              expected="rule = None in the class, and state_names", got=f"rule = {self.rule!r}",
                              remedy="Derive it from sparsebp.optim.Optimizer")  # fmt: skip
        if self.rule is None and "step" in self.state_names:
            raise OptionError('state_names has "step", which every state has', expected="other names",
                              got=self.state_names, remedy='Leave it out: state["step"] counts updates')  # fmt: skip

    def _columns_of(self, buffers: Mapping[str, Mapping[str, Array]]) -> list[list[Any]]:
        names = self.state_names if self.rule is None else UPDATE_BUFFERS[self.rule]
        return [[buffers.get(buffer, {}).get(name) for name in self.params] for buffer in names]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_kinds", "_models")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kinds = [(backend.namespace(array), array.dtype) for array in self._arrays]  # modules cannot be copied
        self._models, self._changes = parts.models_of(self._arrays), parts.changes

    # ---- options and steps -----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate of the first group; setting it sets all groups'."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        value = check_number("lr", value, 0.0)
        for group in self.param_groups:
            group["lr"] = value

    @property
    def steps(self) -> dict[str, int]:
        """How many times each parameter has been updated."""
        return dict(zip(self.params, self._steps.tolist(), strict=True))

    @property
    def last_update(self) -> dict[str, int]:
        """The number of the optimizer's update that each parameter had last: its `steps`, and those before it came."""
        return dict(zip(self.params, (self._steps + self._joined).tolist(), strict=True))

    def _options_now(self) -> Any:
        """Return the current options, a row for each parameter (for `update` a dict); checked if they have changed."""
        if self._changes != parts.changes:
            self._check_live()
        try:
            values = [tuple(group.values()) for group in self.param_groups]
            changed = values != self._seen
        except (AttributeError, TypeError, ValueError):  # no groups, or an array instead of a number: refused
            changed = True
        if changed:
            self._check_groups()
            for group, buffers in zip(self.param_groups, self._group_buffers, strict=True):
                self._check(group)
                if self._buffers_of(group) != buffers:
                    raise OptionError("An option cannot be switched on or off after the optimizer has been built",
                                      expected=buffers, got=self._buffers_of(group),
                                      remedy="Build a new optimizer")  # fmt: skip
            if self.rule is None:
                copies = [{key: group[key] for key in group if key != "params"} for group in self.param_groups]
                self._expanded = [copies[number] for number in self._group_of]
            else:
                options = np.array([self._options(group) for group in self.param_groups], np.float64)
                self._expanded = options[self._group_of]
            self._seen = values
        return self._expanded

    def _check_live(self) -> None:
        """Refuse to update parameters that are no longer those of the model that they were of."""
        now = parts.changes
        gone: set[int] = set()
        for ref, own in self._models:
            model = ref()
            gone |= own - parts.identities(model) if model is not None else set()
        if gone:
            names = [name for name, array in self.params.items() if id(array) in gone]
            raise OptionError("The optimizer holds parameters that are no longer in the model", expected="the arrays "
                              "that the model computes with", got=f"others as {', '.join(names[:8])}"
                              f"{' and more' if len(names) > 8 else ''}: a layer or an array has been replaced",
                              remedy="Build a new optimizer on model.parameters(); to keep a parameter, write into its "
                              "array: param[...] = values")  # fmt: skip
        self._changes = now

    def _check_groups(self) -> None:
        """Raise `OptionError` unless there are the groups of the beginning, in their order, with all their options."""
        groups = self.param_groups if isinstance(self.param_groups, (list, tuple)) else []
        given = [group if isinstance(group, Mapping) else {} for group in groups]
        held = [dict(found) if isinstance(found := group.get("params"), Mapping) else {} for group in given]
        own, got = [names for names, _ in self._group_names], [list(arrays) for arrays in held]
        if own != got or any(self.params[name] is not array for arrays in held for name, array in arrays.items()):
            raise OptionError("The parameter groups are not those that the optimizer was built with",
                              expected=f"{own}, with the same arrays", got=got,
                              remedy="Change options inside the groups, or build a new optimizer")  # fmt: skip
        for number, (group, (_, options)) in enumerate(zip(given, self._group_names, strict=True)):
            if missing := sorted(options - group.keys()):
                raise OptionError(f"param_groups[{number}] lacks an option", expected=", ".join(sorted(options)),
                                  got=f"no {', '.join(missing)}", remedy="Set it again")  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise `OptionError` if an option of `group` is out of range."""
        for name, least, most in self._numbers:
            check_number(name, group[name], least, most)
        for name in self._flags:
            check_flag(name, group[name])

    def _options(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the options of `group` as the kernel takes them."""
        return tuple(map(group.__getitem__, UPDATE_OPTIONS[self.rule]))

    def _run(self, rows: Sequence[int], grads: list[Array], options: Array, steps: Array | None) -> None:
        """Update the parameters of these rows, rising and of one dtype and namespace, in one call."""
        # grads: one for each of the rows. options: one row for each parameter. steps: the counts of updates on the
        # device; None: the host's.
        first, end = rows[0], rows[-1] + 1
        at: Any = slice(first, end)
        params, columns = self._arrays, self._columns
        if len(rows) < end - first:
            at = list(rows)
            params, *columns = ([column[row] for row in rows] for column in (params, *columns))
        elif len(rows) < len(params):
            params, columns = params[at], [column[at] for column in columns]
        xp = self._kinds[first][0]
        if steps is None:
            count = self._steps[at] + 1
        else:
            at = at if isinstance(at, slice) else graphs.constant(xp, np.array(at))
            count = steps[at]
            count += 1
            if not isinstance(at, slice):  # a copy
                steps[at] = count
        given = self.rule, params, grads, columns, options[at], count
        k: Any = kernels.get(xp)
        if k.unchecked is k:
            k.optimizer_update(*given)
        else:  # options and counts are right; the kernel calls the check if an array looks wrong
            k.unchecked.optimizer_update(*given, partial(check_update, *given))
        if steps is None:
            self._steps[at] = count
        if masks.owners:  # an old momentum or decay moves pruned weights too
            for param in params:
                masks.clear(param)

    def _update_rows(self, rows: Sequence[int], grads: Sequence[Array], options: Sequence[Mapping[str, Any]]) -> None:
        """Update the parameters of these rows by `update`; the gradients have been checked."""
        for row, grad in zip(rows, grads, strict=True):
            name, param = self._names[row], self._arrays[row]
            kept = {buffer: arrays[name] for buffer, arrays in self.buffers.items()}
            state = {**kept, "step": int(self._steps[row]) + 1}
            if self.update(param, grad, state, options[row]) is not None:
                raise OptionError(f"{type(self).__name__}.update returned a value, which would be lost",
                                  expected="None", got="a value", remedy="Change param in place")  # fmt: skip
            if len(state) > len(kept) + 1:
                new = ", ".join(str(name) for name in state if name not in kept and name != "step")
                raise OptionError(f"{type(self).__name__}.update put something into state that would be lost",
                                  expected=f"no more than step, {', '.join(kept)}", got=new,
                                  remedy="Add its name to state_names")  # fmt: skip
            for buffer, array in kept.items():
                if state[buffer] is not array:  # assigned anew
                    what = f"{buffer}, assigned by {type(self).__name__}.update,"
                    backend.check_array(what, state[buffer], dtype=array.dtype, shape=array.shape, contiguous=False)
                    array[...] = state[buffer]
            self._steps[row] += 1
            masks.clear(param)

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the buffers of `group`: by default all of the rule's."""
        return self.state_names if self.rule is None else UPDATE_BUFFERS[self.rule]

    def _new_buffer(self, name: str, param: Array, group: Mapping[str, Any]) -> Array:
        """Return the buffer called `name` before the first update."""
        return backend.namespace(param).zeros_like(param)

    def _adopt(self, given: Mapping[str, Any]) -> None:
        """Take a further group, with new buffers, unless something about it is wrong."""
        group = _group(given, self.defaults)
        self._check(group)
        buffers: dict[str, dict[str, Array]] = {kind: {} for kind in self.buffers}
        held = set(map(id, self.params.values()))
        for name, param in group["params"].items():
            if name in self.params:
                raise OptionError(f"The parameter {name} is in two groups", expected="every parameter once", got=name)
            check_parameter(name, param)
            if id(param) in held:
                raise OptionError("An array comes twice", expected="every parameter once",
                                  got=f"the array of {name} by another name as well", remedy="Leave all names but one "
                                  "out: a shared parameter has one gradient")  # fmt: skip
            held.add(id(param))
            for buffer in self._buffers_of(group):
                new = Absent.like(param) if is_absent(param) else self._new_buffer(buffer, param, group)
                buffers.setdefault(buffer, {})[name] = new
        self.param_groups.append(group)
        self.params |= group["params"]
        for kind, arrays in buffers.items():
            self.buffers.setdefault(kind, {}).update(arrays)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def step(self, grads: Mapping[str, Array]) -> None:
        """Update every parameter from its gradient.

        Parameters
        ----------
        grads
            A gradient for each of the optimizer's parameters, of its shape, dtype and namespace. Gradients of others
            are left out: an optimizer may be built on a part of a model's parameters.

        Raises
        ------
        OptionError
            A parameter has no gradient.
        ShapeError, DTypeError, LayoutError, DeviceError
            A gradient does not fit; nothing has been updated.
        """
        check_named("The gradients", grads)
        if grads.keys() != self.params.keys():
            if missing := sorted(self.params.keys() - grads.keys()):
                unexpected = sorted(map(str, grads.keys() - self.params.keys()))
                raise OptionError("The gradients do not belong to the parameters", expected=", ".join(self.params),
                                  got=f"missing {missing}, unexpected {unexpected}",
                                  remedy="Pass what weight_grad of the same model returned")  # fmt: skip
            grads = {name: grads[name] for name in self.params}
        launch(self, grads, self._options_now())

    def begin(self) -> Update:
        """Open one update with the current options; later changes apply to later updates.

        Raises
        ------
        OptionError
            An option has been set to a value out of range, or one that needs other buffers (momentum, say) was
            switched on or off.
        """
        return Update(self, self._options_now())

    def update(self, param: Array, grad: Array, state: dict[str, Any], group: Mapping[str, Any]) -> Any:
        """Update one parameter in place; for optimizers of your own, whose class names no kernel's `rule`.

        Parameters
        ----------
        param
            The parameter, to be written to: ``param -= …``.
        grad
            Its gradient, which must not be written to.
        state
            ``"step"``, the number of this update from 1 on, and an array for each of `state_names`, of the parameter's
            shape and zero at first: to be written to, or assigned anew.
        group
            The options of its group.

        Raises
        ------
        OptionError
            The class has no update.
        """
        raise OptionError(f"{type(self).__name__} has no update", expected="a method update(param, grad, state, group)",
                          got="none")  # fmt: skip

    def begin_on_device(self) -> DeviceUpdate:
        """Open one update that a captured CUDA graph can replay, see `DeviceUpdate`."""
        if self.rule is None:
            raise OptionError(f"{type(self).__name__}.update runs in Python and cannot be captured",
                              expected="an optimizer with a kernel", got=type(self).__name__)  # fmt: skip
        return DeviceUpdate(self, self._options_now())

    # ---- the rule, for prediction ----------------------------------------------------------------------------------

    def reads_gradient(self, group: Mapping[str, Any]) -> bool:
        """Whether the rule's next step reads a gradient in addition to the buffers."""
        return False

    def next_step(self, state: State) -> tuple[float, Any]:
        """Return (rate, step): the next update is about ``W -= rate * step`` (weight decay apart, if decoupled).

        The kernel's formula, without its changes to the buffers; tests compare it with real updates.
        """
        raise OptionError(f"{type(self).__name__} does not say its next step", expected="a method next_step(state)",
                          got="none", remedy="Define it, or predict by \"finite_difference\"")  # fmt: skip

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a flat dict of numbers, names and arrays, as for a safetensors file with a header.

        ``"Adam.version"`` names the class; ``"group0.params"`` and so on are the names of the parameters of each group,
        ``"group0.lr"`` its options; ``"step.<parameter>"`` is the number of updates, ``"<buffer>.<parameter>"`` a copy
        of each buffer; ``"joined.<parameter>"``, of a group that was added later, is the number of updates before.
        """
        state = states.live(self)
        if len(held(state)) < len(state):
            refuse("asked for its state")
        return {key: value.copy() if hasattr(value, "copy") else value for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, options included; nothing is written unless everything fits.

        Options belong to the names of parameters: a group takes those that its parameters had, whatever group that
        was. A state of PyTorch's optimizer is loaded by `load_torch_state_dict`.

        Raises
        ------
        FileFormatError
            It is the state of another optimizer, names are missing or unexpected, or parameters that are in one group
            here had different options. States of version 0.2.0 do not name the parameters of a group: if they have
            several, with different options, add the names to the state first, as ``state["group0.params"] = [...]``.
        OptionError
            An option or a number of updates is out of range.
        ShapeError, DTypeError
            A buffer does not fit its parameter.
        """
        check_named("The state's entries", state)
        states.load(self, states.from_torch(self, state) if states.is_torch(state) else state)

    def torch_state_dict(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the state as the PyTorch optimizer of the same name has it, for its ``load_state_dict``.

        Parameters
        ----------
        names
            The names of all parameters in the order in which PyTorch's optimizer has them; None: the order here, which
            is that of ``model.parameters()`` for a model of the same layers. Groups stay in their order.

        Returns
        -------
        dict
            ``"state"`` and ``"param_groups"``, with tensors that are copies, on the parameters' device.

        Raises
        ------
        OptionError
            PyTorch has no such optimizer, or the names are others.
        MissingDependencyError
            PyTorch is not installed.
        """
        return states.to_torch(self, names)

    def load_torch_state_dict(self, state: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
        """Restore the state of the PyTorch optimizer of the same name: ``torch_optimizer.state_dict()``.

        PyTorch numbers parameters in the order in which its optimizer was given them. They are found by the names in
        the state (of an optimizer built on ``named_parameters()``), by `names`, or else by their order: that of
        ``parameters()`` is the same for a model of the same layers. Shapes and dtypes are checked.

        Parameters
        ----------
        state
            With tensors, on the host or a GPU, or arrays.
        names
            The names of all parameters in the order in which PyTorch's optimizer has them, group after group.

        Raises
        ------
        FileFormatError
            It is the state of another optimizer, or the order does not say which parameter is which: groups differ, or
            some could be exchanged.
        OptionError, ShapeError, DTypeError
            As for `load_state_dict`.
        """
        states.load(self, states.from_torch(self, state, names))


def _listed(params: Params) -> Sequence[Mapping[str, Any]]:
    if isinstance(params, Mapping):
        return [{"params": params}]
    groups = list(params) if isinstance(params, Iterable) and not isinstance(params, str) else [params]
    for group in groups:
        if not isinstance(group, Mapping):
            raise OptionError("The parameters have no names", expected="arrays by name, or a list of groups of them",
                              got=type(group).__name__ if params is group else f"{type(params).__name__} of "
                              f"{type(group).__name__}", remedy="Pass model.parameters(), or a part of it")  # fmt: skip
    return groups


def _group(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with all its options."""
    unknown = sorted(given.keys() - defaults.keys() - {"params"})
    if unknown or "params" not in given:
        raise OptionError("A parameter group is not understood", expected=f"params, and any of {', '.join(defaults)}",
                          got=", ".join(map(str, given)) or "an empty group")  # fmt: skip
    if not isinstance(given["params"], Mapping):
        raise OptionError("A group's params are not a mapping", expected="arrays by name",
                          got=type(given["params"]).__name__,
                          remedy="Pass model.parameters(), or a part of it")  # fmt: skip
    chosen = {key: given.get(key, value) for key, value in defaults.items()}
    return {"params": dict(given["params"])} | {
        key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()
    }


# One update of all parameters, applied whole or in pieces, in any order.


class Update:
    """An update that has begun, from `Optimizer.begin`. Every parameter is updated at most once.

    Results are bitwise equal however names are grouped into calls. Threads may apply different names at the same time.
    """

    def __init__(self, optimizer: Optimizer, options: Array) -> None:
        self._optimizer = optimizer
        self._options = options
        self._steps: Array | None = None
        self._open = set(optimizer.params)
        self._lock = forkable_lock()

    @property
    def remaining(self) -> tuple[str, ...]:
        """Names of the parameters that have not been updated yet, in the optimizer's order."""
        return tuple(name for name in self._optimizer.params if name in self._open)

    def apply(self, grads: Mapping[str, Array]) -> None:
        """Update the parameters that `grads` names, and no others.

        Parameters
        ----------
        grads
            Gradients with the shapes, dtypes and namespace of their parameters.

        Raises
        ------
        OptionError
            A name is not the optimizer's, or has been applied before.
        ShapeError, DTypeError, LayoutError, DeviceError
            A gradient does not fit; nothing has been updated.
        """
        check_named("The gradients", grads)
        if not grads:
            return
        with self._lock:  # a name is taken first, so that no other thread can take it
            self._check_open(grads)
            self._open.difference_update(grads)
        try:
            launch(self._optimizer, grads, self._options, self._steps)
        except SparseBPError:
            with self._lock:
                self._open.update(grads)
            raise

    def takes_product(self, name: str, factors: ProductFactors) -> bool:
        """Whether `apply_product` takes this gradient: on the host, a large product of thin factors."""
        optimizer, (a, b) = self._optimizer, factors
        param = optimizer.params.get(name)
        if optimizer.rule is None or param is None or not backend.is_host(backend.namespace(param, a, b)):
            return False
        fits = param.dtype == a.dtype and param.shape == (a.shape[0], b.shape[1])
        return fits and kernels.on_host().worth_update_by_product(a, b)

    def apply_product(self, name: str, factors: ProductFactors) -> float:
        """Update one parameter by a gradient that is a matrix product, without storing the whole gradient.

        A few rows at a time are computed and applied while they are in the cache. The result is bitwise equal to
        `apply`'s, except that rows whose squares are not finite are left out.

        Parameters
        ----------
        name
            The parameter's name.
        factors
            Two matrices whose product is the gradient; `takes_product` returned True for them.

        Returns
        -------
        float
            The sum of the gradient's squares, as `squared_norms` returns it.

        Raises
        ------
        OptionError
            The name is not the optimizer's, or has been applied before.
        """
        with self._lock:
            self._check_open([name])
            self._open.remove(name)
        optimizer, row = self._optimizer, self._optimizer._rows[name]
        at = slice(row, row + 1)
        buffers, count = [column[row] for column in optimizer._columns], optimizer._steps[at] + 1
        squares: float = kernels.on_host().update_by_product(
            optimizer.rule, optimizer._arrays[row], *factors, buffers, self._options[at], count
        )
        optimizer._steps[at] = count
        return squares

    def _check_open(self, names: Iterable[str]) -> None:
        if self._open.issuperset(names):
            return
        wrong = [name for name in names if name not in self._open]
        known = [name for name in wrong if name in self._optimizer.params]
        raise OptionError("A parameter has been updated already" if known else "A gradient belongs to no parameter",
                          expected=", ".join(self.remaining) or "no more names", got=", ".join(known or wrong),
                          remedy="Apply each parameter's gradient once; begin() opens the next update")  # fmt: skip


class DeviceUpdate(Update):
    """An update that a CUDA graph can replay: its kernels read options and step counts on the device.

    `write` begins each replay; `apply` is called once, while the kernels are recorded.
    """

    def __init__(self, optimizer: Optimizer, options: np.ndarray) -> None:
        self._xp, self._written = optimizer._kinds[0][0], options
        super().__init__(optimizer, self._xp.array(options))
        self._steps: Array = self._xp.array(optimizer._steps)
        self._counted = optimizer._steps.copy()

    def write(self) -> None:
        """Count one more update of every parameter; send options and counts that have changed to the device."""
        optimizer = self._optimizer
        options = optimizer._options_now()
        if not np.array_equal(self._counted, optimizer._steps):  # changed by other updates or a loaded state
            self._steps[...] = self._xp.asarray(optimizer._steps)
        optimizer._steps += 1
        self._counted = optimizer._steps.copy()
        if options is not self._written:
            self._options[...] = self._xp.asarray(options)
            self._written = options

    def take_back(self) -> None:
        """After an aborted step, undo the count of `write` for parameters that have not been updated."""
        rows = [self._optimizer._rows[name] for name in self._open]
        self._optimizer._steps[rows] -= 1


def launch(optimizer: Optimizer, grads: Mapping[str, Array], options: Array, steps: Array | None = None) -> None:
    """Update the parameters that `grads` names; arguments as for `Optimizer._run`."""
    names, kinds = optimizer._names, optimizer._kinds
    whole = len(grads) == len(names)
    rows = range(len(names)) if whole else sorted(map(optimizer._rows.__getitem__, grads))
    chosen = names if whole else [names[row] for row in rows]
    if optimizer.rule is None:
        _check_arrays(optimizer, grads)
        optimizer._update_rows(rows, [grads[name] for name in chosen], options)
        return
    if not optimizer._uniform:
        _check_arrays(optimizer, grads)  # all of them before the first launch
        for kind in dict.fromkeys(kinds[row] for row in rows):
            part = [row for row in rows if kinds[row] == kind]
            optimizer._run(part, [grads[names[row]] for row in part], options, steps)
        return
    try:
        optimizer._run(rows, list(map(grads.__getitem__, chosen)), options, steps)
    except (SparseBPError, AttributeError, TypeError):
        _check_arrays(optimizer, grads)  # names the array that the kernel refused
        raise


def _check_arrays(optimizer: Optimizer, grads: Mapping[str, Array]) -> None:
    for name, grad in grads.items():
        param = optimizer.params[name]
        check_parameter(name, param)  # it may have become read-only
        check_is_array(f"The gradient of {name}", grad)
        backend.namespace(param, grad)
        backend.check_array(f"gradient of {name}", grad, dtype=param.dtype, shape=param.shape)


# Predicting weights: the step that a rule would take from the state after its last update.


class State(NamedTuple):
    """What a predicted step depends on."""

    grad: Any  # The gradient in the direction of descent, weight decay included; None where the rule reads none
    group: Mapping[str, Any]  # The options
    buffers: Mapping[str, Array]  # The parameter's, by name
    updates: int  # How many there have been, 1 or more


def displace(
    optimizer: Optimizer, group: Mapping[str, Any], name: str, s: float, out: Array, grad: Array | None
) -> None:
    """Subtract `s` steps of the optimizer's rule from `out`, in place; nothing before the first update.

    `grad` is the gradient for rules that read one; without it they subtract nothing.
    """
    needs, count = optimizer.reads_gradient(group), int(optimizer._steps[optimizer._rows[name]])
    if count == 0 or (needs and grad is None):
        return
    weights = optimizer.params[name]
    decoupled = group.get("decoupled_weight_decay", getattr(optimizer, "decoupled", False))
    if needs and grad is not None:
        grad = -grad if group["maximize"] else grad
        grad = grad + weights * group["weight_decay"] if group["weight_decay"] and not decoupled else grad
    buffers = {key: arrays[name] for key, arrays in optimizer.buffers.items() if name in arrays}
    rate, step = optimizer.next_step(State(grad, group, buffers, count))
    out -= step * (s * rate)
    if decoupled and group["weight_decay"]:
        out -= weights * (s * group["lr"] * group["weight_decay"])
