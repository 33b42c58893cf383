"""Learning-rate schedules: each in closed form, and as a factor on what else has changed the rate, so that they chain.

And `ReduceLROnPlateau`, which follows a loss. Names and arguments as in torch.optim.lr_scheduler.
"""

from __future__ import annotations

import abc
import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from sparsebp.core.arguments import check_choice, check_integer, check_number, check_sequence
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.optim.checks import check_fraction
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
        self.steps = _in_state(check_integer, "steps", state["steps"], 0, 2**62)
        self.base_lrs = lists["base_lrs"]
        return lists["rates"]


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
        self.max_lrs = _per_group("max_lr", max_lr, check_optimizer(optimizer))
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

    Raises
    ------
    OptionError
        A value is out of range.
    """

    needs_metric, chains, reads_model = True, True, False

    def __init__(
        self, optimizer: Optimizer, mode: Literal["min", "max"] = "min", factor: float = 0.1, patience: int = 10,
        threshold: float = 1e-4, threshold_mode: Literal["rel", "abs"] = "rel", cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        check_fraction("factor", factor)
        check_choice("mode", mode, ("min", "max"))
        check_choice("threshold_mode", threshold_mode, ("rel", "abs"))
        self.optimizer, self.factor = check_optimizer(optimizer), float(factor)
        self.patience, self.cooldown = check_integer("patience", patience, 0), check_integer("cooldown", cooldown, 0)
        self.eps, self.threshold = check_number("eps", eps, 0.0), check_number("threshold", threshold, 0.0)
        self.mode, self.threshold_mode = mode, threshold_mode
        self.min_lrs = _per_group("min_lr", min_lr, optimizer)
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad, self.cooling = 0, 0

    def step(self, metric: float) -> None:
        """Take what has been observed, and reduce the rates if it is time.

        Raises
        ------
        OptionError
            It is no number. Infinity and NaN are: they improve nothing.
        """
        metric = metric if isinstance(metric, float) else check_number("metric", metric, finite=False)
        if self._is_better(metric):
            self.best, self.num_bad = metric, 0
        else:
            self.num_bad += 1
        if self.cooling > 0:
            self.cooling, self.num_bad = self.cooling - 1, 0
        if self.num_bad > self.patience:
            self._reduce()
            self.cooling, self.num_bad = self.cooldown, 0

    def _is_better(self, metric: float) -> bool:
        sign = 1.0 if self.mode == "min" else -1.0
        if self.threshold_mode == "rel":
            return sign * metric < sign * self.best * (1.0 - sign * self.threshold)
        return sign * metric < sign * self.best - self.threshold

    def _reduce(self) -> None:
        for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
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
            Other names, or values that are none of a schedule.
        """
        check_state(self, state)
        best = _in_state(partial(check_number, finite=False), "best", state["best"])
        counts = [_in_state(check_integer, name, state[name], 0, 2**62) for name in ("num_bad", "cooling")]
        self.best, (self.num_bad, self.cooling) = best, counts


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


def _per_group(name: str, value: float | Sequence[float], optimizer: Optimizer) -> list[float]:
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
    return [_in_state(check_number, name, value, 0.0) for value in values]


def _in_state(check: Callable[..., T], name: str, value: Any, *bounds: float) -> T:
    """Return what `check` makes of an entry of a state; what it refuses is a `FileFormatError`."""
    try:
        return check(name, value, *bounds)
    except OptionError as error:
        raise FileFormatError(f"An entry of the state is wrong: {error.problem}", expected=error.expected,
                              got=error.got, remedy="Pass what state_dict returned") from error  # fmt: skip
