"""Learning-rate schedules: each in closed form, and as a factor on what else has changed the rate, so that they chain.

Names and arguments as in torch.optim.lr_scheduler. `ReduceLROnPlateau`, which follows a loss, is in a file of its own.
"""

from __future__ import annotations

import abc
import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sparsebp.core.arguments import check_integer, check_number, check_sequence
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

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lrs``, ``steps`` and the optimizer's ``rates`` by now, in JSON types."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return {"base_lrs": list(self.base_lrs), "steps": self.steps, "rates": rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and the optimizer's rates.

        Raises
        ------
        FileFormatError
            Other names, another number of groups, or values that are none of a schedule.
        """
        for group, rate in zip(self.optimizer.param_groups, self._restore(state), strict=True):
            group["lr"] = rate

    def _restore(self, state: Mapping[str, Any]) -> list[float]:
        """Restore all but the optimizer's rates; return them."""
        if isinstance(state, Mapping):  # states of version 0.1 have no rates: those of the optimizer's state hold
            state = {"rates": self.state_dict()["rates"]} | dict(state)
        check_state(self, state)
        lists = {name: _numbers(name, state[name], len(self.base_lrs)) for name in ("base_lrs", "rates")}
        self.steps = in_state(check_integer, "steps", state["steps"], 0, 2**62)
        self.base_lrs = lists["base_lrs"]
        return lists["rates"]


class StepLR(LRScheduler):
    """Multiply by `gamma` every `step_size` steps."""

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        self.step_size, self.gamma = check_integer("step_size", step_size, 1), check_number("gamma", gamma, 0.0)
        super().__init__(optimizer)

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return `lr`, or ``lr · gamma`` where a stretch of `step_size` steps ends."""
        return lr * self.gamma if step > 0 and step % self.step_size == 0 else lr

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base · gamma^⌊step / step_size⌋``."""
        return base * self.gamma ** (step // self.step_size)


class MultiStepLR(LRScheduler):
    """Multiply by `gamma` at each of the steps `milestones`; a step that is there twice counts twice."""

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1) -> None:
        given = check_sequence("milestones", milestones, "integers")
        self.milestones = sorted(check_integer("a milestone", milestone, 0) for milestone in given)
        self.gamma = check_number("gamma", gamma, 0.0)
        super().__init__(optimizer)

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return ``lr · gamma^n`` for a step that is n times among the milestones."""
        return lr * self.gamma ** self.milestones.count(step)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base · gamma^n`` after n milestones."""
        return base * self.gamma ** bisect.bisect_right(self.milestones, step)


class ExponentialLR(LRScheduler):
    """Multiply by `gamma` every step."""

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        self.gamma = check_number("gamma", gamma, 0.0)
        super().__init__(optimizer)

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return ``lr · gamma``."""
        return lr * self.gamma if step > 0 else lr

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base · gamma^step``."""
        return base * self.gamma**step


class LinearLR(LRScheduler):
    """Go from ``base · start_factor`` to ``base · end_factor`` in `total_iters` steps, then stay: a warm-up."""

    chains, reads_model = True, False

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        start_factor, end_factor = check_number("start_factor", start_factor), check_number("end_factor", end_factor)
        if not (0 < start_factor <= 1 and 0 <= end_factor <= 1):
            raise OptionError("Invalid factors", expected="0 < start_factor <= 1 and 0 <= end_factor <= 1",
                              got=f"{start_factor} and {end_factor}", remedy="Pass others")  # fmt: skip
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = check_integer("total_iters", total_iters, 1)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return the interpolated rate."""
        return base * self._factor(step)

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return `lr` times what the interpolated factor changes by."""
        before = self._factor(step - 1) if step > 0 else 1.0
        return lr * (self._factor(step) / before) if step <= self.total_iters else lr

    def _factor(self, step: int) -> float:
        done = min(step, self.total_iters) / self.total_iters
        return self.start_factor + (self.end_factor - self.start_factor) * done


class CosineAnnealingLR(LRScheduler):
    """Follow half a cosine from the base rate to `eta_min` in `T_max` steps (Loshchilov & Hutter 2017, Eq. 5)."""

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        self.T_max, self.eta_min = check_integer("T_max", T_max, 1), check_number("eta_min", eta_min, 0.0)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``eta_min + (base - eta_min) (1 + cos(π step / T_max)) / 2``."""
        return self.eta_min + (base - self.eta_min) * self._height(step) / 2

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return the rate whose distance from `eta_min` changes as that of the cosine; at its foot it rises anew."""
        if step == 0:
            return lr
        if (step - 1) % (2 * self.T_max) == self.T_max:
            return lr + (base - self.eta_min) * (1 - math.cos(math.pi / self.T_max)) / 2
        return self.eta_min + (lr - self.eta_min) * self._height(step) / self._height(step - 1)

    def _height(self, step: int) -> float:
        return 1 + math.cos(math.pi * step / self.T_max)


class OneCycleLR(LRScheduler):
    """Rise by a cosine from ``max_lr / div_factor`` to `max_lr`, then fall to the start divided by `final_div_factor`.

    As torch.optim.lr_scheduler.OneCycleLR with cosine annealing and ``cycle_momentum=False`` (Smith & Topin 2018).
    `max_lr` is one rate, or one for each group; the groups' own rates do not matter, nor what else changes them.
    """

    reads_model = False

    def __init__(
        self, optimizer: Optimizer, max_lr: float | Sequence[float], total_steps: int, pct_start: float = 0.3,
        div_factor: float = 25.0, final_div_factor: float = 1e4,
    ) -> None:  # fmt: skip
        pct_start = check_number("pct_start", pct_start, 0.0, 1.0)
        self.total_steps = check_integer("total_steps", total_steps, 1)
        self.max_lrs = per_group("max_lr", max_lr, check_optimizer(optimizer))
        self.div_factor, self.final_div_factor = (
            _positive("div_factor", div_factor),
            _positive("final_div_factor", final_div_factor),
        )
        self.peak = pct_start * total_steps - 1
        super().__init__(optimizer)
        self.base_lrs = [rate / self.div_factor for rate in self.max_lrs]
        for group, base in zip(optimizer.param_groups, self.base_lrs, strict=True):
            group["initial_lr"] = base
        self._advance(0)

    def lr_at(self, step: int, base: float) -> float:
        """Return the rate of a group that starts at `base`; steps behind the last keep the last rate."""
        step, largest = min(step, self.total_steps - 1), base * self.div_factor
        if step <= self.peak:
            return _cosine(base, largest, step / self.peak if self.peak > 0 else 1.0)
        done = (step - self.peak) / (self.total_steps - 1 - self.peak)
        return _cosine(largest, base / self.final_div_factor, done)


class SequentialLR(LRScheduler):
    """One schedule after the other: number i goes on from ``milestones[i - 1]``, counting its own steps from 0 there.

    Each begins with its own rate of step 0, whatever has changed the rate before.

    Parameters
    ----------
    optimizer
        The optimizer of all `schedulers`.
    schedulers
        Two or more of this module's schedules. Do not step them yourself.
    milestones
        The steps at which the next takes over, rising; one fewer than schedules.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int]) -> None:
        schedulers = check_sequence("schedulers", schedulers, "schedules")
        milestones = [check_integer("a milestone", m, 1) for m in check_sequence("milestones", milestones, "integers")]
        if not schedulers or len(milestones) != len(schedulers) - 1:
            raise OptionError(
                "Schedules and milestones do not go together", expected="one milestone fewer than schedules",
                got=f"{len(schedulers)} schedules, {len(milestones)} milestones", remedy="Pass n and n - 1",
            )  # fmt: skip
        if any(not isinstance(s, LRScheduler) or s.optimizer is not optimizer for s in schedulers):
            raise OptionError(
                "A schedule cannot be part of a sequence", expected="schedules of this optimizer that go by steps",
                got=", ".join(type(s).__name__ for s in schedulers), remedy="Build all on one optimizer",
            )  # fmt: skip
        if any(late <= early for early, late in zip([0, *milestones], milestones, strict=False)):
            raise OptionError("Milestones do not rise", expected="rising steps from 1 on", got=list(milestones),
                              remedy="Sort them")  # fmt: skip
        self.schedulers, self.milestones = schedulers, milestones
        if type(self) is SequentialLR:
            self.reads_model = any(reads_model(scheduler) for scheduler in schedulers)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return what the schedule in force gives a group with this base rate."""
        scheduler, own = self._current(step)
        return scheduler.lr_at(own, base)

    def _current(self, step: int) -> tuple[LRScheduler, int]:
        """Return the schedule in force, and its own step."""
        current = bisect.bisect_right(self.milestones, step)
        return self.schedulers[current], step - (self.milestones[current - 1] if current else 0)

    def _advance(self, step: int) -> None:
        scheduler, own = self._current(step)
        if own == 0:  # whatever the parts have made of the rates as they were built, or those in force before
            for group, base in zip(self.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = base
        scheduler._advance(own)

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lrs``, ``steps`` and the states of the parts."""
        return super().state_dict() | {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def _restore(self, state: Mapping[str, Any]) -> list[float]:
        parts = state.get("schedulers", []) if isinstance(state, Mapping) else []
        if not isinstance(parts, list) or len(parts) != len(self.schedulers):
            raise FileFormatError("The state does not fit the sequence", expected=f"{len(self.schedulers)} schedules",
                                  got=len(parts) if isinstance(parts, list) else type(parts).__name__,
                                  remedy="Build the sequence that the state was made with")  # fmt: skip
        for scheduler, part in zip(self.schedulers, parts, strict=True):
            scheduler._restore(part)
        return super()._restore(state)


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


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def _positive(name: str, value: float) -> float:
    if check_number(name, value, 0.0) == 0:
        raise OptionError(f"{name} is zero", expected="more than 0", got=value, remedy=f"Pass another {name}")
    return float(value)


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
