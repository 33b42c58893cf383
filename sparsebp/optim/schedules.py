"""Learning-rate schedules by a formula of the step; names and arguments as in torch.optim.lr_scheduler."""

from __future__ import annotations

import abc
import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from sparsebp.core.arguments import (
    check_choice,
    check_default,
    check_flag,
    check_integer,
    check_number,
    check_sequence,
    shown,
)
from sparsebp.core.errors import OptionError
from sparsebp.optim.lr_scheduler import LRScheduler, check_optimizer, per_group
from sparsebp.optim.optimizer import Optimizer


class _GeometricLR(LRScheduler):
    """The base of those that multiply by `gamma`: at which steps is the subclass's."""

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
    """Multiply by `gamma` at each of the steps `milestones`; a step that is there twice counts twice."""

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


class ConstantLR(LRScheduler):
    """Multiply by `factor` until step `total_iters`, which divides by it again."""

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5) -> None:
        if not 0 < check_number("factor", factor) <= 1:
            raise OptionError("Invalid factor", expected="0 < factor <= 1", got=factor, remedy="Pass another")
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
    """Go from the base rate to 0 in `total_iters` steps, as the power `power` of what is left of them; then stay."""

    chains, reads_model = True, False

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0) -> None:
        self.total_iters, self.power = check_integer("total_iters", total_iters, 1), check_number("power", power, 0.0)
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return ``base (1 - step / total_iters)^power``, with no step behind the last."""
        return base * self._left(step) ** self.power

    def lr_after(self, step: int, base: float, lr: float) -> float:
        """Return `lr` times what the power changes by."""
        if step == 0 or step > self.total_iters:
            return lr
        return lr * (self._left(step) / self._left(step - 1)) ** self.power

    def _left(self, step: int) -> float:
        return 1 - min(step, self.total_iters) / self.total_iters


class LambdaLR(LRScheduler):
    """Multiply the base rates by a function of the step.

    Parameters
    ----------
    optimizer
        Its groups' rates are set.
    lr_lambda
        Takes the number of steps and returns the factor, 0 or more; or a list with a function for each group. No
        function is part of the state: build the schedule with the same ones before a state is loaded.

    Raises
    ------
    OptionError
        It cannot be called, there are more or fewer of them than groups, or what one returns is no such number.
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
                              got=shown(lr_lambda), remedy="Pass a function for each group")  # fmt: skip
        super().__init__(optimizer)

    def lr_at(self, step: int, base: float) -> float:
        """Return the rate of the first group."""
        return self._of_group(0, step, base)

    def _of_group(self, number: int, step: int, base: float) -> float:
        return base * check_number("What lr_lambda returns", self.lr_lambdas[number](step), 0.0)

    def _advance(self, step: int) -> None:
        for number, (group, base) in enumerate(zip(self.optimizer.param_groups, self.base_lrs, strict=True)):
            group["lr"] = self._of_group(number, step, base)
        self._note()


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

    As torch.optim.lr_scheduler.OneCycleLR without cycled momentum (Smith & Topin 2018). The groups' own rates do not
    matter, nor what else changes them; steps behind the last keep the last rate.

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
        Only False; the others keep the places that PyTorch has them at, and mean nothing then.
    div_factor, final_div_factor
        See above.
    three_phase
        Whether it falls to the start in as many steps as it rose, and only then further.

    Raises
    ------
    OptionError
        A value is out of range, or the number of steps is missing.
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
                              got=f"epochs={shown(epochs)}, steps_per_epoch={shown(steps_per_epoch)}",
                              remedy="Pass total_steps")  # fmt: skip
        if total_steps is None:
            counts = [check_integer(name, n, 1) for name, n in
                      (("epochs", epochs), ("steps_per_epoch", steps_per_epoch))]  # fmt: skip
            total_steps = math.prod(counts)
        self.total_steps = check_integer("total_steps", total_steps, 1)
        check_choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
        self._between = _cosine if anneal_strategy == "cos" else _line
        self.max_lrs = per_group("max_lr", max_lr, check_optimizer(optimizer))
        self.div_factor, self.final_div_factor = (
            _positive("div_factor", div_factor),
            _positive("final_div_factor", final_div_factor),
        )
        peak = pct_start * total_steps
        between = [2 * peak - 2] if check_flag("three_phase", three_phase) else []
        self.ends = [peak - 1, *between, total_steps - 1]
        super().__init__(optimizer)
        self.base_lrs = [rate / self.div_factor for rate in self.max_lrs]
        for group, base in zip(optimizer.param_groups, self.base_lrs, strict=True):
            group["initial_lr"] = base
        self._advance(0)

    def lr_at(self, step: int, base: float) -> float:
        """Return the rate of a group that starts at `base`; steps behind the last keep the last rate."""
        step, rates = min(step, self.total_steps - 1), [base, base * self.div_factor, base]
        rates = [*rates[: len(self.ends)], base / self.final_div_factor]
        phase = next(i for i, end in enumerate(self.ends) if step <= end or i == len(self.ends) - 1)
        first, last = 0.0 if phase == 0 else self.ends[phase - 1], self.ends[phase]
        done = (step - first) / (last - first) if last > first else 1.0
        return self._between(rates[phase], rates[phase + 1], done)


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def _line(start: float, end: float, done: float) -> float:
    return start + (end - start) * done


def _positive(name: str, value: float) -> float:
    if check_number(name, value, 0.0) == 0:
        raise OptionError(f"{name} is zero", expected="more than 0", got=value, remedy=f"Pass another {name}")
    return float(value)
