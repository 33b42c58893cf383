"""The base of learning-rate schedules: each in closed form, and as a factor on what else has changed the rate."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sparsebp.core.arguments import check_integer, check_number
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.optim.optimizer import Optimizer

T = TypeVar("T")


class LRScheduler(abc.ABC):
    """Changes every group's ``"lr"``: at once to the rate of step 0, and with every `step` to the next.

    A step is whatever the caller steps after, an update or an epoch. Each group's rate at construction is its base; it
    is noted as the group's ``"initial_lr"``, which schedules built later on the same optimizer take as theirs.

    Several schedules on one optimizer chain as those of torch.optim do: each goes on from the rate that it finds. As
    long as that is its own it is `lr_at`, free of accumulated rounding; else `lr_after`.

    Attributes
    ----------
    optimizer, base_lrs, steps
        Whose rates, the base of each of its groups, and the number of steps so far.

    Raises
    ------
    OptionError
        It is no optimizer, or a value is of another type or out of range.
    """

    needs_metric = False
    """Whether `step` takes what is observed, a loss: such a schedule is advanced after every epoch."""

    chains = False
    """Whether the rate that it finds matters; if not, it sets the rate, whatever else has changed it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = check_optimizer(optimizer)
        self.base_lrs = [float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.steps = 0
        self._advance(0)

    @abc.abstractmethod
    def lr_at(self, step: int, base: float) -> float:
        """Return the learning rate after `step` steps of a group with the base rate `base`, by this schedule alone."""

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return the learning rate after `step` steps where something else has changed it to `lr` since the last one.

        Unless overridden that is `lr_at`.
        """
        return self.lr_at(step, base)

    def step(self) -> None:
        """Go on by one step."""
        self.steps += 1
        self._advance(self.steps)

    def _advance(self, step: int) -> None:
        """Set every group's rate of `step`, from that of the step before."""
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            lr = group["lr"]
            alone = lr == (base if step == 0 else self.lr_at(step - 1, base))
            group["lr"] = self.lr_at(step, base) if alone else self.lr_after(step, base, lr)
        self._note()

    def _note(self) -> None:
        self._last_lr = rates_of(self.optimizer)

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group as this schedule has left it."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lrs``, ``steps`` and the optimizer's ``rates`` by now, in JSON types."""
        return {"base_lrs": list(self.base_lrs), "steps": self.steps, "rates": rates_of(self.optimizer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and the optimizer's rates.

        Raises
        ------
        FileFormatError
            Other names, another number of groups, or values that are none of a schedule.
        """
        for group, rate in zip(self.optimizer.param_groups, self._restore(state), strict=True):
            group["lr"] = rate
        self._note()

    def _restore(self, state: Mapping[str, Any]) -> list[float]:
        """Restore all but the optimizer's rates; return them."""
        if isinstance(state, Mapping):  # states of version 0.1 have no rates: those of the optimizer's state hold
            state = {"rates": self.state_dict()["rates"]} | dict(state)
        check_state(self, state)
        lists = {name: _numbers(name, state[name], len(self.base_lrs)) for name in ("base_lrs", "rates")}
        self.steps = in_state(check_integer, "steps", state["steps"], 0, 2**62)
        self.base_lrs = lists["base_lrs"]
        return lists["rates"]


def reads_model(thing: Any) -> bool:
    """Whether something that is run during training may look at the model's parameters or at the optimizer.

    Its class, or the object itself, says that it does not: ``reads_model = False``. A subclass says so anew, for what
    it overrides may look.
    """
    own = getattr(thing, "__dict__", {})
    return bool(own.get("reads_model", vars(type(thing)).get("reads_model", True)))


def check_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Raise `FileFormatError` unless `state` has the names of this schedule's state."""
    expected = scheduler.state_dict().keys()
    if not isinstance(state, Mapping) or state.keys() != expected:
        raise FileFormatError(
            f"The state does not fit {type(scheduler).__name__}", expected=", ".join(sorted(expected)),
            got=", ".join(sorted(map(str, state))) or "nothing" if isinstance(state, Mapping) else type(state).__name__,
            remedy="Pass what state_dict of such a schedule returned",
        )  # fmt: skip


def check_optimizer(optimizer: Any) -> Any:
    """Return what has ``param_groups``, the optimizer of a schedule; raise `OptionError` if it has none."""
    if not hasattr(optimizer, "param_groups"):
        raise OptionError("A schedule needs an optimizer", expected="an optimizer of sparsebp.optim",
                          got=type(optimizer).__name__, remedy="Build the optimizer first")  # fmt: skip
    return optimizer


def rates_of(optimizer: Optimizer) -> list[float]:
    """Return the rate of each of an optimizer's groups as it is now."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def per_group(name: str, value: float | Sequence[float], optimizer: Optimizer) -> list[float]:
    """Return one number for each group of the optimizer."""
    groups = len(optimizer.param_groups)
    many = isinstance(value, Iterable) and not isinstance(value, str)
    values = [check_number(name, v, 0.0) for v in (value if many else [value])]  # type: ignore[union-attr]
    values = values if many else values * groups
    if len(values) != groups:
        raise OptionError(f"{name} does not fit the groups", expected=f"one number, or {groups}", got=len(values),
                          remedy="Pass a number for each group")  # fmt: skip
    return values


def _numbers(name: str, values: Any, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise FileFormatError(
            "The state does not fit the optimizer's groups", expected=f"{count} {name}",
            got=len(values) if isinstance(values, list) else type(values).__name__,
            remedy="Use the groups that the state was made with",
        )  # fmt: skip
    return [in_state(check_number, name, value, 0.0) for value in values]


def in_state(check: Callable[..., T], name: str, value: Any, *bounds: float) -> T:
    """Return what `check` makes of an entry of a state; what it refuses is a `FileFormatError`."""
    try:
        return check(name, value, *bounds)
    except OptionError as error:
        raise FileFormatError(f"An entry of the state is wrong: {error.problem}", expected=error.expected,
                              got=error.got, remedy="Pass what state_dict returned") from error  # fmt: skip
