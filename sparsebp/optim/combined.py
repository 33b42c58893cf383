"""Several learning-rate schedules on one optimizer, at the same time or one after the other, as in torch.optim."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from sparsebp.core.arguments import check_integer, check_sequence
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.optim.lr_scheduler import LRScheduler, check_optimizer, check_state, reads_model
from sparsebp.optim.optimizer import Optimizer


class ChainedScheduler:
    """Advances schedules one after the other; each goes on from the rate that those before it have left.

    Parameters
    ----------
    schedulers
        Schedules of one optimizer, as they were built. `ReduceLROnPlateau` may be among them.
    optimizer
        The optimizer, to make sure of it; None: that of the first schedule.

    Raises
    ------
    OptionError
        There are none, one comes twice, they are of several optimizers, or one behind another sets the rate whatever
        that has made of it, as `OneCycleLR`, `LambdaLR`, `CosineAnnealingWarmRestarts` and `SequentialLR` do.
    """

    def __init__(self, schedulers: Sequence[Any], optimizer: Optimizer | None = None) -> None:
        self.schedulers = check_sequence("schedulers", schedulers, "schedules")
        for scheduler in self.schedulers:
            if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
                raise OptionError("Not a schedule", expected="step, state_dict and load_state_dict",
                                  got=type(scheduler).__name__, remedy="Pass schedules of sparsebp.optim")  # fmt: skip
        if len({id(scheduler) for scheduler in self.schedulers}) != max(len(self.schedulers), 1):
            raise OptionError("The schedules to chain are none, or one comes twice", expected="one or more schedules",
                              got=f"{len(self.schedulers)}", remedy="Pass each once")  # fmt: skip
        optimizers = [] if optimizer is None else [check_optimizer(optimizer)]
        optimizers += [scheduler.optimizer for scheduler in self.schedulers if hasattr(scheduler, "optimizer")]
        if any(other is not optimizers[0] for other in optimizers):
            raise OptionError("The schedules are of several optimizers", expected="one optimizer",
                              got=f"{len({id(o) for o in optimizers})}", remedy="Build all on one")  # fmt: skip
        lone = [type(s).__name__ for s in self.schedulers[1:] if not getattr(s, "chains", True)]
        if lone:
            raise OptionError(
                "A schedule would undo what those before it make of the rate", expected="schedules that chain",
                got=f"{', '.join(lone)} behind {type(self.schedulers[0]).__name__}",
                remedy="Put it first, or use one schedule after the other with SequentialLR",
            )  # fmt: skip
        self.optimizer = optimizers[0] if optimizers else None
        self.needs_metric = all(getattr(s, "needs_metric", False) for s in self.schedulers)
        self.reads_model = any(reads_model(s) for s in self.schedulers)

    def step(self, metric: float | None = None) -> None:
        """Advance the schedules that go by steps, or, with a metric, those that follow it."""
        for scheduler in self.schedulers:
            if getattr(scheduler, "needs_metric", False) != (metric is None):
                scheduler.step(*(() if metric is None else (metric,)))

    def get_last_lr(self) -> list[float]:
        """Return the rate of each of the optimizer's groups as the last schedule has left it."""
        rates: list[float] = self.schedulers[-1].get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all, in JSON types."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        FileFormatError
            It is the state of something else.
        """
        check_state(self, state)
        parts = _parts(state["schedulers"], self.schedulers, "chain", "Chain the schedules")
        for scheduler, part in zip(self.schedulers, parts, strict=True):
            scheduler.load_state_dict(part)


class SequentialLR(LRScheduler):
    """One schedule after the other: number i goes on from ``milestones[i - 1]``, counting its own steps from 0 there.

    Each begins with its own rate of step 0, whatever has changed the rate before. A sequence may be part of another; in
    torch.optim the inner one is a step ahead then.

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
                group["lr"] = base if step else group["initial_lr"]  # OneCycleLR has set it, to where it begins
        scheduler._advance(own)
        self._note()

    def state_dict(self) -> dict[str, Any]:
        """Return ``base_lrs``, ``steps`` and the states of the parts."""
        return super().state_dict() | {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def _restore(self, state: Mapping[str, Any]) -> list[float]:
        given = state.get("schedulers", []) if isinstance(state, Mapping) else []
        parts = _parts(given, self.schedulers, "sequence", "Build the sequence")
        for scheduler, part in zip(self.schedulers, parts, strict=True):
            scheduler._restore(part)
        return super()._restore(state)


def _parts(states: Any, schedulers: Sequence[Any], what: str, advice: str) -> list[Any]:
    """Return the states of the parts of a chain or sequence after checking that there is one for each."""
    if not isinstance(states, list) or len(states) != len(schedulers):
        raise FileFormatError(f"The state does not fit the {what}", expected=f"{len(schedulers)} schedules",
                              got=len(states) if isinstance(states, list) else type(states).__name__,
                              remedy=f"{advice} that the state was made with")  # fmt: skip
    return states
