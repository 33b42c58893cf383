"""Learning-rate schedules: the base, several on one optimizer, and the one that follows a metric; as in torch.optim."""

from __future__ import annotations

import abc
import bisect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from sparsebp.core.check import check_choice, check_flag, check_integer, check_number, check_sequence, shown
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.reprs import call_text
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

    def __repr__(self) -> str:
        """Show the constructor's call without the optimizer, the steps so far and the current rates."""
        rates = ", ".join(f"{group['lr']:.3g}" for group in self.optimizer.param_groups)
        return f"<{call_text(self, ['optimizer'])} after {self.steps} steps, lr {rates}>"

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
        check_state(self, state, ("groups", "rates", "kinds", "stepped"))
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


def with_parts(scheduler: Any) -> Iterator[Any]:
    """Yield a schedule, unless it is None, and the schedules that it consists of."""
    if scheduler is not None:
        yield scheduler
    for part in getattr(scheduler, "schedulers", ()):
        yield from with_parts(part)


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
        There are none, one comes twice, they have several optimizers, or one does not chain (`OneCycleLR`, `CyclicLR`,
        `LambdaLR`, `CosineAnnealingWarmRestarts`, `SequentialLR`) and is not the first, or is before a
        `ReduceLROnPlateau`.
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
        unchained = [type(s).__name__ for s in self.schedulers[1:] if not getattr(s, "chains", True)]
        if unchained:
            raise OptionError("A schedule would overwrite the rate of those before it",
                              expected="schedules that chain",
                              got=f"{', '.join(unchained)} behind {type(self.schedulers[0]).__name__}",
                              remedy="Put it first, or use one schedule after the other with SequentialLR")  # fmt: skip
        reduces = any(getattr(s, "needs_metric", False) for s in self.schedulers)
        if reduces and not getattr(self.schedulers[0], "chains", True):
            raise OptionError("A schedule would undo the reductions of ReduceLROnPlateau with its next step",
                              expected="schedules that chain", got=type(self.schedulers[0]).__name__,
                              remedy="Use one schedule after the other with SequentialLR")  # fmt: skip
        self.optimizer = optimizers[0] if optimizers else None
        self.needs_metric = all(getattr(s, "needs_metric", False) for s in self.schedulers)
        self.takes_metric = any(takes_metric(s) for s in self.schedulers)
        self.reads_model = any(reads_model(s) for s in self.schedulers)
        self._stepped = False  # since the last metric

    def __repr__(self) -> str:
        """Show the constructor's call."""
        return call_text(self, ["optimizer"])

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
        """Return the states of all, in JSON types, their classes, and whether the last step was without a metric."""
        states = [scheduler.state_dict() for scheduler in self.schedulers]
        return {"schedulers": states, "kinds": kinds_of(self.schedulers), "stepped": self._stepped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        FileFormatError
            It is the state of something else.
        """
        check_state(self, state, ("kinds", "stepped"))
        stepped = in_state(check_flag, "stepped", state.get("stepped", False))
        for scheduler, part in zip(self.schedulers, states_of(self.schedulers, state), strict=True):
            scheduler.load_state_dict(part)
        self._stepped = stepped


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
        """Return ``base_lrs``, ``steps``, and the entries of `ChainedScheduler.state_dict`."""
        states = [scheduler.state_dict() for scheduler in self.schedulers]
        own = {"schedulers": states, "kinds": kinds_of(self.schedulers), "stepped": self._stepped}
        return super().state_dict() | own

    def _restore(self, state: Mapping[str, Any]) -> list[float]:
        check_state(self, state, ("groups", "rates", "kinds", "stepped"))
        stepped = in_state(check_flag, "stepped", state.get("stepped", False))
        for scheduler, part in zip(self.schedulers, states_of(self.schedulers, state), strict=True):
            scheduler._restore(part)
        rates = super()._restore(state)
        self._stepped = stepped
        return rates


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

    def __repr__(self) -> str:
        """Show the constructor's call without the optimizer, and the current rates."""
        rates = ", ".join(f"{rate:.3g}" for rate in rates_of(self.optimizer))
        return f"<{call_text(self, ['optimizer'], {'min_lr': self._min_lr})}, lr {rates}>"

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
