"""Parameters in groups, each with its options and buffers, and the kernel launches that update them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend import masks
from sparsebp.core.arguments import check_flag, check_number
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array, ProductFactors, UpdateRule
from sparsebp.kernels.api.optimizers import UPDATE_BUFFERS, UPDATE_OPTIONS
from sparsebp.optim.checks import check_parameter, check_run

Params = Mapping[str, Array] | Sequence[Mapping[str, Any]]
"""Parameters by name, or groups: mappings with ``"params"`` (parameters by name) and options of their own."""

_FLAGS = {"amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov"}


class ParameterGroups:
    """What an optimizer knows of its parameters; `Optimizer` states its arguments, attributes and errors."""

    rule: ClassVar[UpdateRule]
    """The kernel's rule."""

    least: ClassVar[Mapping[str, float]] = {}
    most: ClassVar[Mapping[str, float]] = {}
    """Bounds of the options that are numbers, where they are not any from 0 on."""

    def __init__(self, params: Params, defaults: Mapping[str, Any], **run: Any) -> None:
        check_run(type(self).__name__, run, defaults)
        self._numbers = [
            (name, self.least.get(name, 0.0), self.most.get(name, math.inf))
            for name in defaults if name not in (*_FLAGS, "betas")
        ]  # fmt: skip
        self._flags = [name for name in defaults if name in _FLAGS]
        self.param_groups = [_group(group, defaults) for group in _listed(params)]
        self.params: dict[str, Array] = {}
        self.buffers: dict[str, dict[str, Array]] = {}
        for group in self.param_groups:
            self._check(group)
            self._adopt(group)
        if not self.params:
            raise OptionError("There is nothing to optimize", expected="at least one parameter", got="none",
                              remedy="Pass model.parameters()")  # fmt: skip
        if len({id(array) for array in self.params.values()}) < len(self.params):
            raise OptionError("An array comes twice", expected="every parameter once", got="one array by two names",
                              remedy="Leave all names but one out: a shared parameter has one gradient")  # fmt: skip
        self._group_buffers = [self._buffers_of(group) for group in self.param_groups]
        self._arrays = list(self.params.values())
        self._columns = self._columns_of(self.buffers)
        self._names = list(self.params)
        self._kinds = [(backend.namespace(array), array.dtype) for array in self._arrays]
        self._uniform = len(set(self._kinds)) == 1
        self._rows = {name: row for row, name in enumerate(self.params)}
        self._group_of = np.repeat(np.arange(len(self.param_groups)), [len(g["params"]) for g in self.param_groups])
        self._steps = np.zeros(len(self.params), np.int64)
        self._seen: list[tuple[Any, ...]] = []
        self._expanded = np.empty(0)

    def _columns_of(self, buffers: Mapping[str, Mapping[str, Array]]) -> list[list[Any]]:
        return [[buffers.get(buffer, {}).get(name) for name in self.params] for buffer in UPDATE_BUFFERS[self.rule]]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kinds"}  # modules cannot be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kinds = [(backend.namespace(array), array.dtype) for array in self._arrays]

    # ---- options and steps -----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate of the first group; setting it sets that of all."""
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

    def _options_now(self) -> np.ndarray:
        """Return the options as they are now, a row for each parameter; checked if they have changed."""
        values = [tuple(group.values()) for group in self.param_groups]
        try:
            changed = values != self._seen
        except ValueError:  # an array in place of a number, which `_check` refuses
            changed = True
        if changed:
            for group, buffers in zip(self.param_groups, self._group_buffers, strict=True):
                self._check(group)
                if self._buffers_of(group) != buffers:
                    raise OptionError(
                        "An option cannot be switched on or off after the optimizer has been built", expected=buffers,
                        got=self._buffers_of(group), remedy="Build a new optimizer",
                    )  # fmt: skip
            options = np.array([self._options(group) for group in self.param_groups], np.float64)
            self._expanded, self._seen = options[self._group_of], values
        return self._expanded

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
        """Update the parameters of these rows, rising and of one dtype and namespace, in one call.

        grads: one for each of the rows. options: one row for each of all parameters. steps: the numbers of their last
        updates on the device, which are counted on there; None counts on the host's.
        """
        first, end = rows[0], rows[-1] + 1
        if len(rows) == end - first:  # one or all, mostly: views, no copies
            at: Any = slice(first, end)
            params, columns = self._arrays[at], [column[at] for column in self._columns]
        else:
            at = list(rows)
            params, *columns = ([column[row] for row in rows] for column in (self._arrays, *self._columns))
        xp = self._kinds[first][0]
        k = kernels.get(xp)
        if steps is None:
            count = self._steps[at] + 1
            k.optimizer_update(self.rule, params, grads, columns, options[at], count)
            self._steps[at] = count
        else:
            at = at if isinstance(at, slice) else backend.constant(xp, np.array(at))
            count = steps[at]
            count += 1
            if not isinstance(at, slice):  # a copy
                steps[at] = count
            k.optimizer_update(self.rule, params, grads, columns, options[at], count)
        if masks.some():  # an old momentum, or its decay, moves pruned weights too
            for param in params:
                masks.clear(param)

    def _takes_product(self, name: str, factors: ProductFactors) -> bool:
        param, (a, b) = self.params.get(name), factors
        if param is None or not backend.is_host(backend.namespace(param, a, b)) or param.dtype != a.dtype:
            return False
        return param.shape == (a.shape[0], b.shape[1]) and kernels.on_host().worth_update_by_product(a, b)

    def _run_product(self, name: str, factors: ProductFactors, options: Array) -> float:
        """Update one parameter by the gradient that is the product of `factors`; return the sum of its squares."""
        row = self._rows[name]
        at = slice(row, row + 1)
        buffers, count = [column[row] for column in self._columns], self._steps[at] + 1
        squares: float = kernels.on_host().update_by_product(
            self.rule, self._arrays[row], *factors, buffers, options[at], count
        )
        self._steps[at] = count
        return squares

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return which buffers the parameters of `group` have; all of the rule's, unless options say otherwise."""
        return UPDATE_BUFFERS[self.rule]

    def _new_buffer(self, name: str, param: Array, group: Mapping[str, Any]) -> Array:
        """Return the buffer called `name` as it is before the first update."""
        return backend.namespace(param).zeros_like(param)

    def _adopt(self, group: Mapping[str, Any]) -> None:
        for name, param in group["params"].items():
            if name in self.params:
                raise OptionError(f"The parameter {name} is in two groups", expected="every parameter once", got=name,
                                  remedy="Leave it out of one of them")  # fmt: skip
            check_parameter(name, param)
            self.params[name] = param
            for buffer in self._buffers_of(group):
                self.buffers.setdefault(buffer, {})[name] = self._new_buffer(buffer, param, group)


def _listed(params: Params) -> Sequence[Mapping[str, Any]]:
    if isinstance(params, Mapping):
        return [{"params": params}]
    groups = list(params) if isinstance(params, Iterable) and not isinstance(params, str) else [params]
    for group in groups:
        if not isinstance(group, Mapping):
            raise OptionError(
                "The parameters have no names", expected="arrays by name, or a list of groups of them",
                got=type(group).__name__ if params is group else f"{type(params).__name__} of {type(group).__name__}",
                remedy="Pass model.parameters(), or a part of it",
            )  # fmt: skip
    return groups


def _group(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with all its options."""
    unknown = sorted(given.keys() - defaults.keys() - {"params"})
    if unknown or "params" not in given:
        raise OptionError(
            "A parameter group is not understood", expected=f"params, and any of {', '.join(defaults)}",
            got=", ".join(map(str, given)) or "an empty group", remedy="Use the names of the optimizer's arguments",
        )  # fmt: skip
    if not isinstance(given["params"], Mapping):
        raise OptionError(
            "A group's params are not a mapping", expected="arrays by name", got=type(given["params"]).__name__,
            remedy="Pass model.parameters(), or a part of it",
        )  # fmt: skip
    chosen = {key: given.get(key, value) for key, value in defaults.items()}
    return {"params": dict(given["params"])} | {
        key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()
    }
