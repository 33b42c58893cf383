"""Learning-rate schedules that are functions of the step; names and arguments as in torch.optim.lr_scheduler."""

from __future__ import annotations

import abc
import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

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
from sparsebp.core.errors import OptionError
from sparsebp.optim.lr_schedules import LRScheduler, check_optimizer, extended, per_group
from sparsebp.optim.optimizer import Optimizer


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
        self.anneal_strategy = check_choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
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

    min_lrs: list[float]
    max_lrs: list[float]
    base_momentums: list[float]
    max_momentums: list[float]

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
        self._given = {
            "min_lrs": ("base_lr", base_lr), "max_lrs": ("max_lr", max_lr),
            "base_momentums": ("base_momentum", base_momentum), "max_momentums": ("max_momentum", max_momentum),
        }  # fmt: skip
        for attribute, (name, value) in self._given.items():
            setattr(self, attribute, per_group(name, value, optimizer))
        for group in optimizer.param_groups if cycle_momentum else ():
            if "betas" not in group and not group.get("momentum"):
                raise OptionError("There is no momentum to cycle", expected="an optimizer with betas, or with a "
                                  "momentum above 0", got=f"{type(optimizer).__name__} without",
                                  remedy="Build it with momentum=0.9, or pass cycle_momentum=False")  # fmt: skip
        super().__init__(optimizer)

    def _base_of(self, number: int, group: dict[str, Any]) -> float:
        for attribute, (name, value) in self._given.items():
            setattr(self, attribute, extended(name, getattr(self, attribute), number + 1, value))
        group.setdefault("initial_lr", self.min_lrs[number])  # as in torch.optim, that of an earlier schedule stays
        return self.min_lrs[number]

    def _of_group(self, number: int, step: int, base: float) -> float:
        return base + (self.max_lrs[number] - base) * self._height(step)

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
            least, most = self.base_momentums[number], self.max_momentums[number]
            momentum = most - (most - least) * self._height(step)
            group.update({"betas": (momentum, *group["betas"][1:])} if "betas" in group else {"momentum": momentum})


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def _line(start: float, end: float, done: float) -> float:
    return start + (end - start) * done
