"""Learning-rate schedules; names and arguments as in torch.optim.lr_scheduler."""

from __future__ import annotations

import abc
import bisect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from sparsebp.core.check import (
    check_choice,
    check_default,
    check_flag,
    check_integer,
    check_number,
    check_positive,
    check_sequence,
    shown,
)
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.optim.optimizer import Optimizer, check_fraction

# The base: each schedule in closed form, and as a factor on a rate that something else has changed.

T = TypeVar("T")


class LRScheduler(abc.ABC):
    """Changes every group's ``"lr"``: at once to the rate of step 0, and with every `step` to the next.

    A step is an update or an epoch, as the caller likes. Each group's rate at construction is its base, stored as the
    group's ``"initial_lr"`` and shared by schedules built later on the same optimizer.

    Several schedules on one optimizer chain as in torch.optim: each continues from the current rate, with `lr_at` (free
    of accumulated rounding) while that is its own, else with `lr_after`. A group that `Optimizer.add_param_group` adds
    later has its rate at the next step for its base, and goes on from there.

    Attributes
    ----------
    optimizer, base_lrs, steps
        The optimizer, the base rates of its groups, and the number of steps so far.
    """

    needs_metric = False
    """Whether every step takes a metric, as a loss; such a schedule advances after every epoch."""

    takes_metric = False
    """Whether `step` takes a metric, but also goes without."""

    chains = False
    """Whether the current rate matters; if not, the schedule overwrites changes by others."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = check_optimizer(optimizer)
        self.base_lrs: list[float] = []
        self.steps = 0
        self._advance(0)

    def _groups(self) -> Iterable[tuple[dict[str, Any], float]]:
        """Pair the optimizer's groups, those that are new as well, with their base rates."""
        count = len(self.base_lrs)
        for number, group in enumerate(added_groups(self.optimizer, count), count):
            self.base_lrs.append(self._base_of(number, group))
        return zip(self.optimizer.param_groups, self.base_lrs, strict=True)

    def _base_of(self, number: int, group: dict[str, Any]) -> float:
        """Return the base rate of a group that is new."""
        return float(group.setdefault("initial_lr", group["lr"]))

    @abc.abstractmethod
    def lr_at(self, step: int, base: float) -> float:
        """Return the learning rate after `step` steps of a group with the base rate `base`, by this schedule alone."""

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return the rate after `step` steps if something else has changed it to `lr` since the last one."""
        return self.lr_at(step, base)

    def step(self) -> None:
        """Advance by one step."""
        self._advance(self.steps + 1)
        self.steps += 1

    def _advance(self, step: int) -> None:
        """Set every group's rate of `step`, from the rate of the step before."""
        for group, base in self._groups():
            lr = group["lr"]
            alone = lr == (base if step == 0 else self.lr_at(step - 1, base))
            group["lr"] = self.lr_at(step, base) if alone else self.lr_after(step, base, lr)
        self._note()

    def _follow(self, metric: float) -> None:  # noqa: B027 - see the docstring
        """Take a metric that is not a step; most schedules have no use for it."""

    def _note(self) -> None:
        self._last_lr = rates_of(self.optimizer)

    def get_last_lr(self) -> list[float]:
        """Return each group's rate as this schedule last set it."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lrs``, ``steps`` and the optimizer's ``rates`` by now, in JSON types.

        If there are several groups, ``groups`` are the names of their parameters.
        """
        bases = [base for _, base in self._groups()]
        state = {"base_lrs": bases, "steps": self.steps, "rates": rates_of(self.optimizer)}
        return state | ({"groups": names_of(self.optimizer)} if len(bases) > 1 else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and the optimizer's rates.

        Rates belong to the names of parameters, as options do in `Optimizer.load_state_dict`.

        Raises
        ------
        FileFormatError
            The names or the values do not fit, or parameters that are in one group here had different rates.
        """
        self._groups()  # refuses before anything is restored
        for group, rate in zip(self.optimizer.param_groups, self._restore(state), strict=True):
            group["lr"] = rate
        self._note()

    def _restore(self, state: Mapping[str, Any]) -> list[float]:
        """Restore all but the optimizer's rates; return them."""
        check_state(self, state, ("groups", "rates", "kinds"))
        names, lists = state.get("groups"), dict[str, list[float]]()
        said = names if isinstance(names, list) else state["base_lrs"]
        count = len(said) if isinstance(said, list) else 1
        for name in ("base_lrs", "rates"):
            if name in state:  # states of version 0.1 have no rates: keep the optimizer's
                lists[name] = [in_state(check_number, name, rate, 0.0) for rate in
                               _items(name, state[name], count, "Pass what state_dict returned")]  # fmt: skip
        steps = in_state(check_integer, "steps", state["steps"], 0, 2**62)
        found = of_groups(self.optimizer, names, list(zip(*lists.values(), strict=True)))
        self.steps, self.base_lrs = steps, [values[0] for values in found]
        return [values[1] for values in found] if "rates" in lists else rates_of(self.optimizer)


def reads_model(thing: Any) -> bool:
    """Whether a callback or schedule may read the model's parameters or the optimizer."""
    # `reads_model = False` on its class or the object itself says no. A subclass has to repeat it: its overrides may
    # read.
    own = getattr(thing, "__dict__", {})
    return bool(own.get("reads_model", vars(type(thing)).get("reads_model", True)))


def check_monitor(monitor: Any) -> str:
    """Return a name if it is one of the numbers of a training's epochs."""
    if not isinstance(monitor, str) or not re.fullmatch(r"train_(loss|accuracy)|validation_\w+", monitor):
        raise OptionError("Not a number of a training's epochs", expected="train_loss, train_accuracy, validation_loss,"
                          " validation_accuracy or validation_<metric>", got=shown(monitor))  # fmt: skip
    return monitor


def usual_mode(monitor: str) -> Literal["min", "max"] | None:
    """Return what is better of a loss or an accuracy; None of another metric."""
    known: dict[str, Literal["min", "max"]] = {"loss": "min", "accuracy": "max"}
    return known.get(monitor.partition("_")[2])


class EpochLoss(float):
    """The loss of an epoch, which schedules follow, and with it all numbers of the epoch by name."""

    numbers: Mapping[str, float | None]

    def __new__(cls, numbers: Mapping[str, Any]) -> EpochLoss:
        """Take the validation loss, or else the training loss."""
        validation = numbers["validation_loss"]
        self = super().__new__(cls, numbers["train_loss"] if validation is None else validation)
        self.numbers = numbers
        return self

    def number(self, monitor: str | None) -> float:
        """Return one of the numbers, the loss for None."""
        value = float(self) if monitor is None else self.numbers.get(monitor)
        if value is None:
            raise OptionError(f"There is no {monitor}", expected="a number", got=None,
                              remedy="Monitor a loss: accuracies are of classes")  # fmt: skip
        return value


def takes_metric(scheduler: Any) -> bool:
    """Whether ``scheduler.step`` takes a metric."""
    return bool(getattr(scheduler, "takes_metric", False) or getattr(scheduler, "needs_metric", False))


def check_state(scheduler: Any, state: Mapping[str, Any], optional: Iterable[str] = ()) -> None:
    """Raise `FileFormatError` unless `state` has the names of this schedule's state."""
    expected = scheduler.state_dict().keys() - optional
    if not isinstance(state, Mapping) or state.keys() - optional != expected:
        raise FileFormatError(
            f"The state does not fit {type(scheduler).__name__}", expected=", ".join(sorted(expected)),
            got=", ".join(sorted(map(str, state))) or "nothing" if isinstance(state, Mapping) else type(state).__name__,
            remedy="Pass what state_dict of such a schedule returned"
        )  # fmt: skip


def check_optimizer(optimizer: Any) -> Any:
    """Return the optimizer of a schedule; raise `OptionError` if it has no ``param_groups``."""
    if not hasattr(optimizer, "param_groups"):
        raise OptionError("A schedule needs an optimizer", expected="an optimizer of sparsebp.optim",
                          got=type(optimizer).__name__)  # fmt: skip
    return optimizer


def rates_of(optimizer: Optimizer) -> list[float]:
    """Return the current rate of each of an optimizer's groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def names_of(optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each of an optimizer's groups."""
    return [list(group.get("params", ())) for group in optimizer.param_groups]


def added_groups(optimizer: Optimizer, count: int) -> list[dict[str, Any]]:
    """Return the optimizer's groups after the first `count`, which `add_param_group` has added."""
    groups = optimizer.param_groups
    if len(groups) < count or len(groups) != len(getattr(optimizer, "_group_names", groups)):
        raise OptionError("The optimizer's groups are not those that the schedule was built with",
                          expected=f"{count} groups, or more by add_param_group", got=len(groups),
                          remedy="Build a new optimizer, and the schedule on it")  # fmt: skip
    return groups[count:]


def of_groups(optimizer: Optimizer, names: Any, values: Sequence[T]) -> list[T]:
    """Return for each of the optimizer's groups the value that its parameters' groups have in a state."""
    # names: Of the parameters of each of the state's groups; None if it has one, or is of version 0.2.0.
    own = names_of(optimizer)
    if names is None:
        if len(set(values)) != 1:
            raise FileFormatError("The state does not say which parameters each of its groups had",
                                  expected='"groups"', got=f"{len(values)} groups with different rates, in the format "
                                  "of version 0.2.0", remedy="Add the names to the state: "
                                  'state["groups"] = [["encoder.weight", ...], ...]')  # fmt: skip
        return [values[0]] * len(own)
    place = {name: number for number, some in enumerate(names) for name in (some if isinstance(some, list) else [])}
    if place.keys() != {name for some in own for name in some}:
        raise FileFormatError("The state is of other parameters", expected=", ".join(n for some in own for n in some),
                              got=", ".join(map(str, place)) or "none",
                              remedy="Use the parameters that the state was made with")  # fmt: skip
    found = []
    for number, some in enumerate(own):
        held = {values[place[name]] for name in some} or {values[min(number, len(values) - 1)]}
        if len(held) > 1:
            raise FileFormatError("Parameters that are in one group had different rates in the state",
                                  expected=f"one for {', '.join(some)}", got=held,
                                  remedy="Build the groups that the state was made with")  # fmt: skip
        found.append(held.pop())
    return found


def extended(name: str, values: list[T], groups: int, given: Any) -> list[T]:
    """Return a schedule's values for `groups` groups: one `given` for all is that of groups added since as well."""
    if len(values) < groups and isinstance(given, Iterable):
        raise OptionError(f"{name} has no value for a group that has been added", expected=f"one for all groups, or "
                          f"{groups}", got=len(values), remedy="Build the schedule after add_param_group")  # fmt: skip
    return values + values[-1:] * (groups - len(values))


def per_group(name: str, value: float | Sequence[float], optimizer: Optimizer) -> list[float]:
    """Return one number for each group of the optimizer."""
    groups = len(optimizer.param_groups)
    many = isinstance(value, Iterable) and not isinstance(value, str)
    values = [check_number(name, v, 0.0) for v in (value if many else [value])]  # type: ignore[union-attr]
    values = values if many else values * groups
    if len(values) != groups:
        raise OptionError(f"{name} does not fit the groups", expected=f"one number, or {groups}", got=len(values))
    return values


def _items(name: str, values: Any, count: int, remedy: str) -> list[Any]:
    """Return an entry of a state that is a list of so many."""
    if not isinstance(values, list) or len(values) != count:
        raise FileFormatError("The state is of something else", expected=f"{count} {name}",
                              got=len(values) if isinstance(values, list) else type(values).__name__,
                              remedy=remedy)  # fmt: skip
    return values


def in_state(check: Callable[..., T], name: str, value: Any, *bounds: float) -> T:
    """Return ``check(name, value, *bounds)`` for an entry of a state; failures are a `FileFormatError`."""
    try:
        return check(name, value, *bounds)
    except OptionError as error:
        raise FileFormatError(f"An entry of the state is wrong: {error.problem}", expected=error.expected,
                              got=error.got, remedy="Pass what state_dict returned") from error  # fmt: skip


# Several learning-rate schedules on one optimizer, at the same time or one after the other, as in torch.optim.


def kinds_of(schedulers: Iterable[Any]) -> list[str]:
    """Return the classes of schedules, which are saved with their states."""
    return [type(scheduler).__name__ for scheduler in schedulers]


def states_of(schedulers: Sequence[Any], state: Mapping[str, Any]) -> list[Any]:
    """Return the state of each of some schedules from the state of all."""
    parts = _items("schedules", state["schedulers"], len(schedulers), "Use the schedules that the state was made with")
    if state.get("kinds", own := kinds_of(schedulers)) != own:
        raise FileFormatError("The state is of other schedules, or of these in another order", expected=", ".join(own),
                              got=state["kinds"], remedy="Use the schedules that the state was made with")  # fmt: skip
    return parts


class ChainedScheduler:
    """Advances schedules one after the other; each continues from the rate of those before it.

    Parameters
    ----------
    schedulers
        Schedules of one optimizer, as they were built. `ReduceLROnPlateau` may be among them.
    optimizer
        The optimizer, for a check; None: the first schedule's.

    Raises
    ------
    OptionError
        There are none, one comes twice, they have several optimizers, or one that is not the first does not chain: as
        `OneCycleLR`, `LambdaLR`, `CosineAnnealingWarmRestarts` and `SequentialLR` do.
    """

    def __init__(self, schedulers: Sequence[Any], optimizer: Optimizer | None = None) -> None:
        self.schedulers = check_sequence("schedulers", schedulers, "schedules")
        for scheduler in self.schedulers:
            if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
                raise OptionError("Not a schedule", expected="step, state_dict and load_state_dict",
                                  got=type(scheduler).__name__)  # fmt: skip
        if len({id(scheduler) for scheduler in self.schedulers}) != max(len(self.schedulers), 1):
            raise OptionError("The schedules to chain are none, or one comes twice", expected="one or more schedules",
                              got=f"{len(self.schedulers)}")  # fmt: skip
        optimizers = [] if optimizer is None else [check_optimizer(optimizer)]
        optimizers += [scheduler.optimizer for scheduler in self.schedulers if hasattr(scheduler, "optimizer")]
        if any(other is not optimizers[0] for other in optimizers):
            raise OptionError("The schedules are of several optimizers", expected="one optimizer",
                              got=f"{len({id(o) for o in optimizers})}")  # fmt: skip
        lone = [type(s).__name__ for s in self.schedulers[1:] if not getattr(s, "chains", True)]
        if lone:
            raise OptionError("A schedule would overwrite the rate of those before it",
                              expected="schedules that chain",
                              got=f"{', '.join(lone)} behind {type(self.schedulers[0]).__name__}",
                              remedy="Put it first, or use one schedule after the other with SequentialLR")  # fmt: skip
        self.optimizer = optimizers[0] if optimizers else None
        self.needs_metric = all(getattr(s, "needs_metric", False) for s in self.schedulers)
        self.takes_metric = any(takes_metric(s) for s in self.schedulers)
        self.reads_model = any(reads_model(s) for s in self.schedulers)
        self._stepped = False  # since the last metric

    def step(self, metric: float | None = None) -> None:
        """Advance by one step.

        Schedules that follow a metric take it, and advance only with one. The others advance with every step; a metric
        that comes after steps without one (those of an epoch) is not a step of theirs.
        """
        for scheduler in self.schedulers:
            if takes_metric(scheduler) and metric is not None:
                scheduler.step(metric)
            elif not getattr(scheduler, "needs_metric", False) and not (metric is not None and self._stepped):
                scheduler.step()
        self._stepped = metric is None

    def get_last_lr(self) -> list[float]:
        """Return the rate of each of the optimizer's groups as the last schedule has left it."""
        rates: list[float] = self.schedulers[-1].get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all, in JSON types, and their classes."""
        states = [scheduler.state_dict() for scheduler in self.schedulers]
        return {"schedulers": states, "kinds": kinds_of(self.schedulers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        FileFormatError
            It is the state of something else.
        """
        check_state(self, state, ("kinds",))
        for scheduler, part in zip(self.schedulers, states_of(self.schedulers, state), strict=True):
            scheduler.load_state_dict(part)


class SequentialLR(LRScheduler):
    """One schedule after the other: number i starts at ``milestones[i - 1]``, with its own step 0.

    Each begins with its own rate of step 0. `ReduceLROnPlateau` has none: it goes on from the rate that the schedule
    before it reaches at the milestone. A sequence may be part of another; in torch.optim the inner one is then a step
    ahead.

    Parameters
    ----------
    optimizer
        The optimizer of all `schedulers`.
    schedulers
        Two or more of this module's schedules, but no `ChainedScheduler`. Do not step them yourself.
    milestones
        The steps at which the next takes over, rising; one fewer than schedules.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int]) -> None:
        schedulers = check_sequence("schedulers", schedulers, "schedules")
        milestones = [check_integer("a milestone", m, 1) for m in check_sequence("milestones", milestones, "integers")]
        if not schedulers or len(milestones) != len(schedulers) - 1:
            raise OptionError("Schedules and milestones do not go together",
                              expected="one milestone fewer than schedules",
                              got=f"{len(schedulers)} schedules, {len(milestones)} milestones")  # fmt: skip
        if any(not isinstance(s, LRScheduler | ReduceLROnPlateau) or s.optimizer is not optimizer for s in schedulers):
            raise OptionError("A schedule cannot be part of a sequence", expected="schedules of this optimizer",
                              got=", ".join(type(s).__name__ for s in schedulers))  # fmt: skip
        if any(late <= early for early, late in zip([0, *milestones], milestones, strict=False)):
            raise OptionError("Milestones do not rise", expected="rising steps from 1 on", got=list(milestones))
        self.schedulers, self.milestones = schedulers, milestones
        if type(self) is SequentialLR:
            self.reads_model = any(reads_model(scheduler) for scheduler in schedulers)
        self.takes_metric = any(takes_metric(scheduler) for scheduler in schedulers)
        self._stepped = False  # since the last metric
        super().__init__(optimizer)

    def step(self, metric: float | None = None) -> None:
        """Advance by one step.

        A current schedule that follows a metric takes it before. A metric that comes after steps without one (those of
        an epoch) is not a step.
        """
        if metric is not None:
            self._follow(metric)
        if metric is None or not self._stepped:
            super().step()
        self._stepped = metric is None

    def _follow(self, metric: float) -> None:
        self._current(self.steps)[0]._follow(metric)
        self._note()

    def lr_at(self, step: int, base: float) -> float:
        """Return the rate of the current schedule for a group with this base rate.

        Raises
        ------
        OptionError
            It is `ReduceLROnPlateau`, whose rate depends on metrics.
        """
        scheduler, own = self._current(step)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise OptionError("The rate at this step depends on metrics", expected="a step of another schedule",
                              got=f"step {step}, of ReduceLROnPlateau")  # fmt: skip
        return float(scheduler.lr_at(own, base))

    def _current(self, step: int) -> tuple[Any, int]:
        """Return the current schedule, and its own step."""
        current = bisect.bisect_right(self.milestones, step)
        return self.schedulers[current], step - (self.milestones[current - 1] if current else 0)

    def _advance(self, step: int) -> None:
        scheduler, own = self._current(step)
        if own == 0 and step and isinstance(scheduler, ReduceLROnPlateau):
            scheduler, own = self._current(step - 1)  # to the end of the one before
            own += 1
        elif own == 0:  # discard rates set when the parts were built, or by the schedule before
            for group, base in self._groups() if step == 0 else scheduler._groups():
                group["lr"] = base if step else group["initial_lr"]  # OneCycleLR has set it to its start
        scheduler._advance(own)
        self._groups()
        self._note()

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lrs``, ``steps`` and the states and classes of the parts."""
        states = [scheduler.state_dict() for scheduler in self.schedulers]
        return super().state_dict() | {"schedulers": states, "kinds": kinds_of(self.schedulers)}

    def _restore(self, state: Mapping[str, Any]) -> list[float]:
        check_state(self, state, ("groups", "rates", "kinds"))
        for scheduler, part in zip(self.schedulers, states_of(self.schedulers, state), strict=True):
            scheduler._restore(part)
        return super()._restore(state)


# The learning-rate schedule that follows a loss, as torch.optim.lr_scheduler.ReduceLROnPlateau.


class ReduceLROnPlateau:
    """Multiply the rates by `factor` when a metric has not improved for more than `patience` steps.

    Parameters
    ----------
    optimizer
        Its groups' rates are reduced.
    mode
        ``"min"``: less is better, as of a loss; ``"max"``: more, as of an accuracy.
    factor, patience, threshold, threshold_mode, cooldown, min_lr, eps
        As in torch.optim; `min_lr` is one rate, or one for each group.
    monitor
        What `sparsebp.train.Trainer` steps it with after every epoch, as `EarlyStopping` has it: ``"validation_loss"``,
        ``"train_accuracy"``, ``"validation_<metric>"``, … None: the validation loss, else the training loss; with
        ``mode="max"`` the trainer refuses it.

    Raises
    ------
    OptionError
        An argument is out of range, or more of a monitored loss, or less of an accuracy, would be better.
    """

    needs_metric, takes_metric, chains, reads_model = True, True, True, False

    def __init__(
        self, optimizer: Optimizer, mode: Literal["min", "max"] = "min", factor: float = 0.1, patience: int = 10,
        threshold: float = 1e-4, threshold_mode: Literal["rel", "abs"] = "rel", cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0, eps: float = 1e-8, *, monitor: str | None = None,
    ) -> None:  # fmt: skip
        check_fraction("factor", factor)
        check_choice("mode", mode, ("min", "max"))
        self.monitor = None if monitor is None else check_monitor(monitor)
        usual = None if monitor is None else usual_mode(monitor)
        if usual not in (None, mode):
            raise OptionError(f"The mode does not fit {monitor}", expected=f"mode={usual!r}", got=repr(mode))
        check_choice("threshold_mode", threshold_mode, ("rel", "abs"))
        self.optimizer, self.factor = check_optimizer(optimizer), float(factor)
        self.patience, self.cooldown = check_integer("patience", patience, 0), check_integer("cooldown", cooldown, 0)
        self.eps, self.threshold = check_number("eps", eps, 0.0), check_number("threshold", threshold, 0.0)
        self.mode, self.threshold_mode = mode, threshold_mode
        self.min_lrs, self._min_lr = per_group("min_lr", min_lr, optimizer), min_lr
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad, self.cooling = 0, 0
        self._last_lr = rates_of(optimizer)

    def step(self, metric: float) -> None:
        """Take a metric, and reduce the rates if it is time.

        Raises
        ------
        OptionError
            It is not a number. Infinity and NaN are allowed; they do not count as an improvement.
        """
        metric = metric if isinstance(metric, float) else check_number("metric", metric, finite=False)
        if isinstance(metric, EpochLoss):
            metric = metric.number(self.monitor)
        if self._is_better(metric):
            self.best, self.num_bad = metric, 0
        else:
            self.num_bad += 1
        if self.cooling > 0:
            self.cooling, self.num_bad = self.cooling - 1, 0
        if self.num_bad > self.patience:
            self._reduce()
            self.cooling, self.num_bad = self.cooldown, 0
        self._last_lr = rates_of(self.optimizer)

    _follow = step

    def _advance(self, step: int) -> None:
        """Leave the rates as they are: steps do not count."""

    def get_last_lr(self) -> list[float]:
        """Return each group's rate as this schedule last set it."""
        return list(self._last_lr)

    def _is_better(self, metric: float) -> bool:
        sign = 1.0 if self.mode == "min" else -1.0
        if self.threshold_mode == "rel":
            return sign * metric < sign * self.best * (1.0 - sign * self.threshold)
        return sign * metric < sign * self.best - self.threshold

    def _reduce(self) -> None:
        groups = self.optimizer.param_groups
        added_groups(self.optimizer, len(self.min_lrs))
        self.min_lrs = extended("min_lr", self.min_lrs, len(groups), self._min_lr)
        for group, least in zip(groups, self.min_lrs, strict=True):
            reduced = max(group["lr"] * self.factor, least)
            if group["lr"] - reduced > self.eps:
                group["lr"] = reduced

    def state_dict(self) -> dict[str, Any]:
        """Return ``best``, ``num_bad`` and ``cooling``; the rates themselves are part of the optimizer's state."""
        return {"best": self.best, "num_bad": self.num_bad, "cooling": self.cooling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        FileFormatError
            The names or values do not fit.
        """
        self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        check_state(self, state)
        best = in_state(partial(check_number, finite=False), "best", state["best"])
        counts = [in_state(check_integer, name, state[name], 0, 2**62) for name in ("num_bad", "cooling")]
        self.best, (self.num_bad, self.cooling) = best, counts
        self._last_lr = rates_of(self.optimizer)


class _GeometricLR(LRScheduler):
    """Base of schedules that multiply by `gamma` at certain steps."""

    chains = True
    gamma: float

    @abc.abstractmethod
    def _count(self, step: int) -> int:
        """Return how many times the rate has been multiplied after `step` steps."""

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base · gamma^n`` after n multiplications."""
        return base * self.gamma ** self._count(step)

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return ``lr · gamma^n`` where this step multiplies n times."""
        return lr * self.gamma ** (self._count(step) - (self._count(step - 1) if step > 0 else 0))


class StepLR(_GeometricLR):
    """Multiply by `gamma` every `step_size` steps."""

    reads_model = False

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        self.step_size, self.gamma = check_integer("step_size", step_size, 1), check_number("gamma", gamma, 0.0)
        super().__init__(optimizer)

    def _count(self, step: int) -> int:
        return step // self.step_size


class MultiStepLR(_GeometricLR):
    """Multiply by `gamma` at each of the steps `milestones`; a step listed twice counts twice."""

    reads_model = False

    def __init__(self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1) -> None:
        given = check_sequence("milestones", milestones, "integers")
        self.milestones = sorted(check_integer("a milestone", milestone, 0) for milestone in given)
        self.gamma = check_number("gamma", gamma, 0.0)
        super().__init__(optimizer)

    def _count(self, step: int) -> int:
        return bisect.bisect_right(self.milestones, step)


class ExponentialLR(_GeometricLR):
    """Multiply by `gamma` every step."""

    reads_model = False

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        self.gamma = check_number("gamma", gamma, 0.0)
        super().__init__(optimizer)

    def _count(self, step: int) -> int:
        return step


class LinearLR(LRScheduler):
    """Go from ``base · start_factor`` to ``base · end_factor`` in `total_iters` steps, then stay: a warm-up."""

    chains, reads_model = True, False

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        start_factor, end_factor = check_number("start_factor", start_factor), check_number("end_factor", end_factor)
        if not (0 < start_factor <= 1 and 0 <= end_factor <= 1):
            raise OptionError("Invalid factors", expected="0 < start_factor <= 1 and 0 <= end_factor <= 1",
                              got=f"{start_factor} and {end_factor}")  # fmt: skip
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = check_integer("total_iters", total_iters, 1)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return the interpolated rate."""
        return base * self._factor(step)

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return `lr` times the change of the interpolated factor."""
        before = self._factor(step - 1) if step > 0 else 1.0
        return lr * (self._factor(step) / before) if step <= self.total_iters else lr

    def _factor(self, step: int) -> float:
        done = min(step, self.total_iters) / self.total_iters
        return self.start_factor + (self.end_factor - self.start_factor) * done


class ConstantLR(LRScheduler):
    """Multiply by `factor` until step `total_iters`, which divides by it again."""

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5) -> None:
        if not 0 < check_number("factor", factor) <= 1:
            raise OptionError("Invalid factor", expected="0 < factor <= 1", got=factor)
        self.factor, self.total_iters = float(factor), check_integer("total_iters", total_iters, 1)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base · factor``, or `base` from step `total_iters` on."""
        return base * self.factor if step < self.total_iters else base

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return `lr` multiplied at the first step, divided at the last, and as it is at all others."""
        if step == 0:
            return lr * self.factor
        return lr / self.factor if step == self.total_iters else lr


class PolynomialLR(LRScheduler):
    """Go from the base rate to 0 in `total_iters` steps, as the power `power` of the steps left; then stay."""

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0) -> None:
        self.total_iters, self.power = check_integer("total_iters", total_iters, 1), check_number("power", power, 0.0)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base (1 - step / total_iters)^power``, with no step after the last."""
        return base * self._left(step) ** self.power

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return `lr` times the change of the power."""
        if step == 0 or step > self.total_iters:
            return lr
        return lr * (self._left(step) / self._left(step - 1)) ** self.power

    def _left(self, step: int) -> float:
        return 1 - min(step, self.total_iters) / self.total_iters


class _ByGroupLR(LRScheduler):
    """Base of schedules with options for each group, which set rates regardless of others."""

    @abc.abstractmethod
    def _of_group(self, number: int, step: int, base: float) -> float:
        """Return the rate of a group after `step` steps."""

    def lr_at(self, step: int, base: float) -> float:
        """Return the rate of the first group."""
        return self._of_group(0, step, base)

    def _advance(self, step: int) -> None:
        for number, (group, base) in enumerate(self._groups()):
            group["lr"] = self._of_group(number, step, base)
        self._note()


class LambdaLR(_ByGroupLR):
    """Multiply the base rates by a function of the step.

    Parameters
    ----------
    optimizer
        Its groups' rates are set.
    lr_lambda
        Takes the number of steps and returns the factor, 0 or more; or a list with a function for each group. Functions
        are not part of the state: build the schedule with the same ones before loading it.

    Raises
    ------
    OptionError
        It is not callable, there are more or fewer than groups, or one does not return a number of at least 0.
    """

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]]
    ) -> None:
        groups = len(check_optimizer(optimizer).param_groups)
        given: Any = lr_lambda
        self.lr_lambdas: list[Callable[[int], float]] = (
            list(given) if isinstance(given, list | tuple) else [given] * groups
        )
        if len(self.lr_lambdas) != groups or not all(map(callable, self.lr_lambdas)):
            raise OptionError("lr_lambda does not fit the groups", expected=f"a function, or a list of {groups}",
                              got=shown(lr_lambda))  # fmt: skip
        self._given = given
        super().__init__(optimizer)

    def _base_of(self, number: int, group: dict[str, Any]) -> float:
        self.lr_lambdas = extended("lr_lambda", self.lr_lambdas, number + 1, self._given)
        return super()._base_of(number, group)

    def _of_group(self, number: int, step: int, base: float) -> float:
        return base * check_number("The result of lr_lambda", self.lr_lambdas[number](step), 0.0)


class CosineAnnealingLR(LRScheduler):
    """Follow half a cosine from the base rate to `eta_min` in `T_max` steps (Loshchilov & Hutter 2017, Eq. 5).

    Then it rises again. Chained with others, it takes their changes for factors of its own rate from there on; while it
    falls, as torch.optim, for factors of the distance from `eta_min`. torch.optim's does so while it rises as well:
    the rate of others below `eta_min` becomes negative there.
    """

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        self.T_max, self.eta_min = check_integer("T_max", T_max, 1), check_number("eta_min", eta_min, 0.0)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``eta_min + (base - eta_min) (1 + cos(π step / T_max)) / 2``."""
        return self.eta_min + (base - self.eta_min) * self._height(step) / 2

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return the rate whose distance from `eta_min` falls like the cosine, or that rises like `lr_at`."""
        if step == 0:
            return lr
        if (step - 1) % (2 * self.T_max) >= self.T_max:
            before, now = self.lr_at(step - 1, base), self.lr_at(step, base)
            return lr * (now / before) if before > 0 else lr + now
        return self.eta_min + (lr - self.eta_min) * self._height(step) / self._height(step - 1)

    def _height(self, step: int) -> float:
        return 1 + math.cos(math.pi * step / self.T_max)


class CosineAnnealingWarmRestarts(LRScheduler):
    """Follow half a cosine from the base rate to `eta_min` again and again (Loshchilov & Hutter 2017, Eq. 5).

    The first takes `T_0` steps, each of the others `T_mult` times as many as the one before.
    """

    reads_model = False

    def __init__(self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> None:
        self.T_0, self.T_mult = check_integer("T_0", T_0, 1), check_integer("T_mult", T_mult, 1)
        self.eta_min = check_number("eta_min", eta_min, 0.0)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``eta_min + (base - eta_min) (1 + cos(π t / T)) / 2`` at step t of the T since the last restart."""
        length, step = self.T_0, step % self.T_0 if self.T_mult == 1 else step
        while step >= length:
            step, length = step - length, length * self.T_mult
        return _cosine(base, self.eta_min, step / length)


class OneCycleLR(LRScheduler):
    """Rise from ``max_lr / div_factor`` to `max_lr`, then fall to the start divided by `final_div_factor`.

    As torch.optim.lr_scheduler.OneCycleLR without cycled momentum (Smith & Topin 2018). The groups' own rates and
    changes by others have no effect; steps after the last keep the last rate.

    Parameters
    ----------
    optimizer
        Its groups' rates are set.
    max_lr
        One rate, or one for each group.
    total_steps
        Steps of the cycle; None: ``epochs · steps_per_epoch``.
    epochs, steps_per_epoch
        Used where `total_steps` is None.
    pct_start
        Share of the steps in which the rate rises.
    anneal_strategy
        ``"cos"`` or ``"linear"``.
    cycle_momentum, base_momentum, max_momentum
        Only False; the other two are there for PyTorch's argument order.
    div_factor, final_div_factor
        See above.
    three_phase
        Whether the rate falls to the start in as many steps as it rose before it falls further.
    """

    reads_model = False

    def __init__(
        self, optimizer: Optimizer, max_lr: float | Sequence[float], total_steps: int | None = None,
        epochs: int | None = None, steps_per_epoch: int | None = None, pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos", cycle_momentum: bool = False,
        base_momentum: float | Sequence[float] = 0.85, max_momentum: float | Sequence[float] = 0.95,
        div_factor: float = 25.0, final_div_factor: float = 1e4, three_phase: bool = False,
    ) -> None:  # fmt: skip
        check_default("cycle_momentum", cycle_momentum, False)
        pct_start = check_number("pct_start", pct_start, 0.0, 1.0)
        if total_steps is None and (epochs is None or steps_per_epoch is None):
            raise OptionError("The number of steps is missing", expected="total_steps, or epochs and steps_per_epoch",
                              got=f"epochs={shown(epochs)}, steps_per_epoch={shown(steps_per_epoch)}")  # fmt: skip
        if total_steps is None:
            counts = [check_integer(name, n, 1) for name, n in
                      (("epochs", epochs), ("steps_per_epoch", steps_per_epoch))]  # fmt: skip
            total_steps = math.prod(counts)
        self.total_steps = check_integer("total_steps", total_steps, 1)
        check_choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
        self._between = _cosine if anneal_strategy == "cos" else _line
        self.max_lrs, self._max_lr = per_group("max_lr", max_lr, check_optimizer(optimizer)), max_lr
        self.div_factor = check_positive("div_factor", div_factor)
        self.final_div_factor = check_positive("final_div_factor", final_div_factor)
        peak = pct_start * total_steps
        between = [2 * peak - 2] if check_flag("three_phase", three_phase) else []
        self.ends = [peak - 1, *between, total_steps - 1]
        super().__init__(optimizer)

    def _base_of(self, number: int, group: dict[str, Any]) -> float:
        self.max_lrs = extended("max_lr", self.max_lrs, number + 1, self._max_lr)
        group["initial_lr"] = base = self.max_lrs[number] / self.div_factor
        return base

    def lr_at(self, step: int, base: float) -> float:
        """Return the rate of a group that starts at `base`; steps after the last keep the last rate."""
        step, rates = min(step, self.total_steps - 1), [base, base * self.div_factor, base]
        rates = [*rates[: len(self.ends)], base / self.final_div_factor]
        phase = next(i for i, end in enumerate(self.ends) if step <= end or i == len(self.ends) - 1)
        first, last = 0.0 if phase == 0 else self.ends[phase - 1], self.ends[phase]
        done = (step - first) / (last - first) if last > first else 1.0
        return self._between(rates[phase], rates[phase + 1], done)


class CyclicLR(_ByGroupLR):
    """Rise from `base_lr` to `max_lr` and fall back, again and again (Smith 2017), as torch.optim's.

    The groups' own rates and changes by others have no effect.

    Parameters
    ----------
    optimizer
        Its groups' rates are set, and their momentum or first beta.
    base_lr, max_lr
        One rate, or one for each group.
    step_size_up, step_size_down
        Steps of the rise and of the fall; None: as many as of the rise.
    mode
        What scales the height of a cycle: ``"triangular"``, nothing; ``"triangular2"``, 1/2 to the number of cycles
        before it; ``"exp_range"``, `gamma` to the number of steps.
    gamma
        See `mode`.
    scale_fn, scale_mode
        A function in place of `mode`: of the number of the cycle, from 1 on, for ``"cycle"``, or of the step for
        ``"iterations"``. It is not part of the state.
    cycle_momentum
        Whether momentum falls from `max_momentum` to `base_momentum` while the rate rises, and rises while it falls.
        The optimizer must have one: in contrast to PyTorch's, SGD and RMSprop cannot have it switched on.
    base_momentum, max_momentum
        One number, or one for each group.
    """

    def __init__(
        self, optimizer: Optimizer, base_lr: float | Sequence[float], max_lr: float | Sequence[float],
        step_size_up: int = 2000, step_size_down: int | None = None,
        mode: Literal["triangular", "triangular2", "exp_range"] = "triangular", gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None, scale_mode: Literal["cycle", "iterations"] = "cycle",
        cycle_momentum: bool = True, base_momentum: float | Sequence[float] = 0.8,
        max_momentum: float | Sequence[float] = 0.9,
    ) -> None:  # fmt: skip
        self.step_size_up = check_integer("step_size_up", step_size_up, 1)
        self.step_size_down = self.step_size_up if step_size_down is None else check_integer(
            "step_size_down", step_size_down, 1)  # fmt: skip
        self.mode = check_choice("mode", mode, ("triangular", "triangular2", "exp_range"))
        self.gamma = check_number("gamma", gamma, 0.0)
        check_choice("scale_mode", scale_mode, ("cycle", "iterations"))
        if scale_fn is not None and not callable(scale_fn):
            raise OptionError("scale_fn is not a function", expected="a function of a number", got=shown(scale_fn))
        self.scale_fn, self.reads_model = scale_fn, scale_fn is not None
        self.scale_mode = scale_mode if scale_fn is not None else "iterations" if mode == "exp_range" else "cycle"
        self.cycle_momentum = check_flag("cycle_momentum", cycle_momentum)
        check_optimizer(optimizer)
        self._given = {"base_lr": base_lr, "max_lr": max_lr}
        if cycle_momentum:
            self._given |= {"base_momentum": base_momentum, "max_momentum": max_momentum}
        self._ends = {name: per_group(name, value, optimizer) for name, value in self._given.items()}
        for group in optimizer.param_groups if cycle_momentum else ():
            if "betas" not in group and not group.get("momentum"):
                raise OptionError("There is no momentum to cycle", expected="an optimizer with betas, or with a "
                                  "momentum above 0", got=f"{type(optimizer).__name__} without",
                                  remedy="Build it with momentum=0.9, or pass cycle_momentum=False")  # fmt: skip
        super().__init__(optimizer)

    def _base_of(self, number: int, group: dict[str, Any]) -> float:
        for name, values in self._ends.items():
            self._ends[name] = extended(name, values, number + 1, self._given[name])
        base = self._ends["base_lr"][number]
        group.setdefault("initial_lr", base)  # as in torch.optim, that of an earlier schedule stays
        return base

    def _of_group(self, number: int, step: int, base: float) -> float:
        return base + (self._ends["max_lr"][number] - base) * self._height(step)

    def _height(self, step: int) -> float:
        """Return how far up the cycle is, from 0 to its scale."""
        length = self.step_size_up + self.step_size_down
        cycle, share = math.floor(1 + step / length), self.step_size_up / length
        x = 1 + step / length - cycle
        at = cycle if self.scale_mode == "cycle" else step
        if self.scale_fn is not None:
            scale = check_number("The result of scale_fn", self.scale_fn(at), 0.0)
        else:
            base, power = {"triangular": (1, 0), "triangular2": (0.5, at - 1), "exp_range": (self.gamma, at)}[self.mode]
            scale = base**power
        return (x / share if x <= share else (x - 1) / (share - 1)) * scale

    def _advance(self, step: int) -> None:
        super()._advance(step)
        for number, group in enumerate(self.optimizer.param_groups if self.cycle_momentum else ()):
            least, most = (self._ends[name][number] for name in ("base_momentum", "max_momentum"))
            momentum = most - (most - least) * self._height(step)
            group.update({"betas": (momentum, *group["betas"][1:])} if "betas" in group else {"momentum": momentum})


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def _line(start: float, end: float, done: float) -> float:
    return start + (end - start) * done
