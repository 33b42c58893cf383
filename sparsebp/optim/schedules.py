"""Learning-rate schedules in closed form: the rate is a function of the step, so a resumed run needs the step alone."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any

from sparsebp.errors import FileFormatError, OptionError
from sparsebp.optim.optimizer import Optimizer


class Schedule(abc.ABC):
    """Sets ``optimizer.lr``: at once to the rate of step 0, and with every `step` to the next.

    A step is whatever the caller steps after, an update or an epoch. The optimizer's rate at construction is the base.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.base_lr = optimizer.lr
        self.steps = 0
        optimizer.lr = self.lr_at(0)

    @abc.abstractmethod
    def lr_at(self, step: int) -> float:
        """Return the learning rate after `step` steps."""

    def step(self) -> None:
        """Go on by one step."""
        self.steps += 1
        self.optimizer.lr = self.lr_at(self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lr`` and ``steps``."""
        return {"base_lr": self.base_lr, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and the optimizer's rate.

        Raises
        ------
        FileFormatError
            Other names.
        """
        if state.keys() != {"base_lr", "steps"}:
            raise FileFormatError(
                "The state does not fit a schedule", expected="base_lr, steps", got=", ".join(sorted(state)),
                remedy="Pass what state_dict of a schedule returned",
            )  # fmt: skip
        self.base_lr, self.steps = float(state["base_lr"]), int(state["steps"])
        self.optimizer.lr = self.lr_at(self.steps)


class StepLR(Schedule):
    """Multiply by `gamma` every `step_size` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        self.step_size, self.gamma = _at_least_one("step_size", step_size), gamma
        super().__init__(optimizer)

    def lr_at(self, step: int) -> float:
        """Return ``base · gamma^⌊step / step_size⌋``."""
        return self.base_lr * self.gamma ** (step // self.step_size)


class ExponentialLR(Schedule):
    """Multiply by `gamma` every step."""

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(optimizer)

    def lr_at(self, step: int) -> float:
        """Return ``base · gamma^step``."""
        return self.base_lr * self.gamma**step


class LinearLR(Schedule):
    """Go from ``base · start_factor`` to ``base · end_factor`` in `total_iters` steps, then stay: a warm-up."""

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = _at_least_one("total_iters", total_iters)
        super().__init__(optimizer)

    def lr_at(self, step: int) -> float:
        """Return the interpolated rate."""
        done = min(step, self.total_iters) / self.total_iters
        return self.base_lr * (self.start_factor + (self.end_factor - self.start_factor) * done)


class CosineAnnealingLR(Schedule):
    """Follow half a cosine from the base rate to `eta_min` in `T_max` steps (Loshchilov & Hutter 2017, Eq. 5)."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        self.T_max, self.eta_min = _at_least_one("T_max", T_max), eta_min
        super().__init__(optimizer)

    def lr_at(self, step: int) -> float:
        """Return ``eta_min + (base - eta_min) (1 + cos(π step / T_max)) / 2``."""
        return self.eta_min + (self.base_lr - self.eta_min) * (1 + math.cos(math.pi * step / self.T_max)) / 2


class OneCycleLR(Schedule):
    """Rise by a cosine from ``max_lr / div_factor`` to `max_lr`, then fall to the start divided by `final_div_factor`.

    As torch.optim.lr_scheduler.OneCycleLR with cosine annealing and ``cycle_momentum=False`` (Smith & Topin 2018).
    The optimizer's own rate does not matter.
    """

    def __init__(
        self, optimizer: Optimizer, max_lr: float, total_steps: int, pct_start: float = 0.3, div_factor: float = 25.0,
        final_div_factor: float = 1e4,
    ) -> None:  # fmt: skip
        if not 0 <= pct_start <= 1:
            raise OptionError("Invalid pct_start", expected="0 <= pct_start <= 1", got=pct_start,
                              remedy="Pass the fraction of steps that rise")  # fmt: skip
        self.max_lr, self.total_steps = max_lr, _at_least_one("total_steps", total_steps)
        self.initial_lr = max_lr / div_factor
        self.final_lr = self.initial_lr / final_div_factor
        self.peak = pct_start * total_steps - 1
        super().__init__(optimizer)

    def lr_at(self, step: int) -> float:
        """Return the rate; steps behind the last keep the last rate."""
        step = min(step, self.total_steps - 1)
        if step <= self.peak:
            return _cosine(self.initial_lr, self.max_lr, step / self.peak if self.peak > 0 else 1.0)
        return _cosine(self.max_lr, self.final_lr, (step - self.peak) / (self.total_steps - 1 - self.peak))


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise OptionError(f"Invalid {name}", expected="at least 1", got=value, remedy="Pass a positive integer")
    return value
