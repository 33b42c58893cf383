"""Learning-rate schedules in closed form: the rate is a function of the step, so a resumed run needs the step alone.

Names and arguments as in torch.optim.lr_scheduler. `ReduceLROnPlateau`, which follows a loss, is in a file of its own.
"""

from __future__ import annotations

import abc
import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparsebp.errors import FileFormatError, OptionError
from sparsebp.optim.optimizer import Optimizer


class LRScheduler(abc.ABC):
    """Sets every group's ``"lr"``: at once to the rate of step 0, and with every `step` to the next.

    A step is whatever the caller steps after, an update or an epoch. Each group's rate at construction is its base; it
    is noted as the group's ``"initial_lr"``, which schedules built later on the same optimizer take as theirs.
    """

    needs_metric = False
    """Whether `step` takes what is observed, a loss: such a schedule is advanced after every epoch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.base_lrs = [float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.steps = 0
        self._set()

    @abc.abstractmethod
    def lr_at(self, step: int, base: float) -> float:
        """Return the learning rate after `step` steps of a group with the base rate `base`."""

    def rates_at(self, step: int) -> list[float]:
        """Return the learning rate of every group after `step` steps."""
        return [self.lr_at(step, base) for base in self.base_lrs]

    def step(self) -> None:
        """Go on by one step."""
        self.steps += 1
        self._set()

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates_at(self.steps), strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lrs`` and ``steps``, in JSON types."""
        return {"base_lrs": list(self.base_lrs), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and the optimizer's rates.

        Raises
        ------
        FileFormatError
            Other names, or another number of groups.
        """
        check_state(self, state)
        self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if len(state["base_lrs"]) != len(self.base_lrs):
            raise FileFormatError(
                "The state does not fit the optimizer's groups", expected=f"{len(self.base_lrs)} base rates",
                got=len(state["base_lrs"]), remedy="Use the groups that the state was made with",
            )  # fmt: skip
        self.base_lrs, self.steps = [float(base) for base in state["base_lrs"]], int(state["steps"])
        self._set()


class StepLR(LRScheduler):
    """Multiply by `gamma` every `step_size` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        self.step_size, self.gamma = _at_least_one("step_size", step_size), gamma
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base · gamma^⌊step / step_size⌋``."""
        return base * self.gamma ** (step // self.step_size)


class MultiStepLR(LRScheduler):
    """Multiply by `gamma` at each of the steps `milestones`; a step that is there twice counts twice."""

    def __init__(self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base · gamma^n`` after n milestones."""
        return base * self.gamma ** bisect.bisect_right(self.milestones, step)


class ExponentialLR(LRScheduler):
    """Multiply by `gamma` every step."""

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base · gamma^step``."""
        return base * self.gamma**step


class LinearLR(LRScheduler):
    """Go from ``base · start_factor`` to ``base · end_factor`` in `total_iters` steps, then stay: a warm-up."""

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        if not (0 < start_factor <= 1 and 0 <= end_factor <= 1):
            raise OptionError("Invalid factors", expected="0 < start_factor <= 1 and 0 <= end_factor <= 1",
                              got=f"{start_factor} and {end_factor}", remedy="Pass others")  # fmt: skip
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = _at_least_one("total_iters", total_iters)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return the interpolated rate."""
        done = min(step, self.total_iters) / self.total_iters
        return base * (self.start_factor + (self.end_factor - self.start_factor) * done)


class CosineAnnealingLR(LRScheduler):
    """Follow half a cosine from the base rate to `eta_min` in `T_max` steps (Loshchilov & Hutter 2017, Eq. 5)."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        self.T_max, self.eta_min = _at_least_one("T_max", T_max), eta_min
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``eta_min + (base - eta_min) (1 + cos(π step / T_max)) / 2``."""
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * step / self.T_max)) / 2


class OneCycleLR(LRScheduler):
    """Rise by a cosine from ``max_lr / div_factor`` to `max_lr`, then fall to the start divided by `final_div_factor`.

    As torch.optim.lr_scheduler.OneCycleLR with cosine annealing and ``cycle_momentum=False`` (Smith & Topin 2018).
    `max_lr` is one rate, or one for each group; the groups' own rates do not matter.
    """

    def __init__(
        self, optimizer: Optimizer, max_lr: float | Sequence[float], total_steps: int, pct_start: float = 0.3,
        div_factor: float = 25.0, final_div_factor: float = 1e4,
    ) -> None:  # fmt: skip
        if not 0 <= pct_start <= 1:
            raise OptionError("Invalid pct_start", expected="0 <= pct_start <= 1", got=pct_start,
                              remedy="Pass the fraction of steps that rise")  # fmt: skip
        self.total_steps = _at_least_one("total_steps", total_steps)
        self.max_lrs = per_group("max_lr", max_lr, optimizer)
        self.div_factor, self.final_div_factor = div_factor, final_div_factor
        self.peak = pct_start * total_steps - 1
        super().__init__(optimizer)
        self.base_lrs = [rate / div_factor for rate in self.max_lrs]
        for group, base in zip(optimizer.param_groups, self.base_lrs, strict=True):
            group["initial_lr"] = base
        self._set()

    def lr_at(self, step: int, base: float) -> float:
        """Return the rate of a group that starts at `base`; steps behind the last keep the last rate."""
        step, largest = min(step, self.total_steps - 1), base * self.div_factor
        if step <= self.peak:
            return _cosine(base, largest, step / self.peak if self.peak > 0 else 1.0)
        done = (step - self.peak) / (self.total_steps - 1 - self.peak)
        return _cosine(largest, base / self.final_div_factor, done)


class SequentialLR(LRScheduler):
    """One schedule after the other: number i goes on from ``milestones[i - 1]``, counting its own steps from 0 there.

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
        if not schedulers or len(milestones) != len(schedulers) - 1:
            raise OptionError(
                "Schedules and milestones do not go together", expected="one milestone fewer than schedules",
                got=f"{len(schedulers)} schedules, {len(milestones)} milestones", remedy="Pass n and n - 1",
            )  # fmt: skip
        if any(s.optimizer is not optimizer or s.needs_metric for s in schedulers):
            raise OptionError(
                "A schedule cannot be part of a sequence", expected="schedules of this optimizer that go by steps",
                got=", ".join(type(s).__name__ for s in schedulers), remedy="Build all on one optimizer",
            )  # fmt: skip
        if any(late <= early for early, late in zip([0, *milestones], milestones, strict=False)):
            raise OptionError("Milestones do not rise", expected="rising steps from 1 on", got=list(milestones),
                              remedy="Sort them")  # fmt: skip
        self.schedulers, self.milestones = list(schedulers), list(milestones)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return what the schedule in force gives a group with this base rate."""
        current = bisect.bisect_right(self.milestones, step)
        return self.schedulers[current].lr_at(step - (self.milestones[current - 1] if current else 0), base)

    def rates_at(self, step: int) -> list[float]:
        """Return the rates that the schedule in force gives, from its own base rates."""
        current = bisect.bisect_right(self.milestones, step)
        return self.schedulers[current].rates_at(step - (self.milestones[current - 1] if current else 0))

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lrs``, ``steps`` and the states of the parts."""
        return super().state_dict() | {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def _restore(self, state: Mapping[str, Any]) -> None:
        for scheduler, part in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(part)
        super()._restore(state)


def check_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Raise `FileFormatError` unless `state` has the names of this schedule's state."""
    expected = scheduler.state_dict().keys()
    if state.keys() != expected:
        raise FileFormatError(
            f"The state does not fit {type(scheduler).__name__}", expected=", ".join(sorted(expected)),
            got=", ".join(sorted(state)) or "nothing", remedy="Pass what state_dict of such a schedule returned",
        )  # fmt: skip


def per_group(name: str, value: float | Sequence[float], optimizer: Optimizer) -> list[float]:
    """Return one number for each group of the optimizer."""
    groups = len(optimizer.param_groups)
    values = [float(value)] * groups if isinstance(value, float | int) else [float(v) for v in value]
    if len(values) != groups:
        raise OptionError(f"{name} does not fit the groups", expected=f"one number, or {groups}", got=len(values),
                          remedy="Pass a number for each group")  # fmt: skip
    return values


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise OptionError(f"Invalid {name}", expected="at least 1", got=value, remedy="Pass a positive integer")
    return value
