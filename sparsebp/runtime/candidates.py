"""The schedules of a step that an out-of-order search tries, and what it knows of each."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.locks import cached_property
from sparsebp.schedule import Costs, Schedule, simulate, write_costs, write_csv
from sparsebp.schedule.builders import conventional, out_of_order, two_stream_list

SCHEDULE_NAME = "schedule.csv"
COSTS_NAME = "costs.json"
REPEATED = 3
"""Simulated steps: of one alone, what the streams overlap at its ends is not seen."""
_REGIONS = (4, 8, 16)


@dataclass(frozen=True)
class Trial:
    """A schedule of a step, and how long a step of it takes.

    Attributes
    ----------
    name
        What it is called in a table, see `all_schedules`.
    schedule
        The schedule.
    memory
        Its simulated peak of memory, as a multiple of the conventional schedule's.
    seconds, slowest
        Measured: the mean of the steps of the best round, and of the worst.
    """

    name: str
    schedule: Schedule
    memory: float
    seconds: float = math.inf
    slowest: float = 0.0

    def measured(self, seconds: float) -> Trial:
        """Return the trial with one round more, of so many seconds a step."""
        return replace(self, seconds=min(self.seconds, seconds), slowest=max(self.slowest, seconds))


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule, and what it was found by.

    Attributes
    ----------
    trials
        What was measured; the conventional schedule, as ``schedule="conventional"`` runs it, is the first.
    costs
        As measured: durations of every action by itself, bytes of every stage, slowdowns side by side.
    memory_ratio
        The bound for `memory`.
    """

    trials: tuple[Trial, ...]
    costs: Costs
    memory_ratio: float

    @cached_property
    def fastest(self) -> Trial:
        """The one that is kept: the fastest below the memory ratio, of equals the first.

        The conventional one stays unless another's worst round is faster than its best: of near equals, noise would
        choose.
        """
        allowed = [trial for trial in self.trials if trial.memory <= self.memory_ratio]
        usual = self.trials[0]
        if usual in allowed:
            allowed = [usual, *(trial for trial in allowed if trial.slowest < usual.seconds)]
        return min(allowed, key=lambda trial: trial.seconds)

    @property
    def schedule(self) -> Schedule:
        """The schedule of `fastest`."""
        return self.fastest.schedule

    @property
    def memory(self) -> float:
        """The simulated peak of memory, as a multiple of the conventional schedule's."""
        return self.fastest.memory

    @property
    def speedup(self) -> float:
        """The conventional schedule's measured time of a step over this one's: 1 if that is kept."""
        return self.trials[0].seconds / self.fastest.seconds

    def describe(self) -> str:
        """Return a line: name, measured speed-up, memory and its bound, and what else was measured."""
        others = ", ".join(
            f"{trial.name} {self.trials[0].seconds / trial.seconds:.2f}×"
            for trial in self.trials[1:]
            if trial is not self.fastest
        )
        return (
            f"{self.schedule.name}: measured {self.speedup:.2f}× the conventional schedule, with {self.memory:.2f} × "
            f"its memory (at most {self.memory_ratio:g}); others: {others}"
        )

    def save(self, folder: Path) -> None:
        """Write ``schedule.csv`` (for ``schedule=``) and ``costs.json`` (for ``sparsebp schedule --costs``)."""
        write_csv(self.schedule, folder / SCHEDULE_NAME)
        write_costs(self.costs, self.schedule, folder / COSTS_NAME)


def candidates(size: dict[str, Any], costs: Costs, memory_ratio: float) -> list[Trial]:
    """Return what is to be measured: the conventional schedule, and of `all_schedules` what stays below the ratio.

    Raises
    ------
    MemoryLimitError
        None is below the ratio; the message names the least that one is.
    """
    found = all_schedules(size, costs, memory_ratio)
    peaks = {name: simulate(schedule, costs).peak for name, schedule in found.items()}
    trials = [Trial(name, found[name], _share(peak, peaks["conventional"])) for name, peak in peaks.items()]
    least = min(trial.memory for trial in trials)
    if least > memory_ratio:
        raise MemoryLimitError("No schedule of a step stays below the memory ratio", got=memory_ratio,
                               expected=f"memory_ratio={least:.4g} or more", remedy="Raise the ratio")  # fmt: skip
    return trials[:1] + [trial for trial in trials[1:] if trial.memory <= memory_ratio]


def _share(peak: float, most: float) -> float:
    return peak / most if most > 0 else math.inf if peak > 0 else 1.0


def all_schedules(size: dict[str, Any], costs: Costs, memory_ratio: float = math.inf) -> dict[str, Schedule]:
    """Return schedules of a step by name.

    On one stream, whose libraries use all cores: ``"conventional"``, updates at the end, and ``"fused"``, each right
    after its gradient. On two streams, fused as well: ``"two"``, not reordered; ``"joint"``, that of Algorithm 1, for
    the number of regions and the k that simulate best, unless all are above the ratio; ``"list"``, by list scheduling.

    Parameters
    ----------
    size
        Number of stages, and those without parameters, as builders take them.
    costs
        Measured ones.
    memory_ratio
        Bound for the simulated peak of memory, as a multiple of the conventional schedule's.
    """
    joint = _joint(size, costs, memory_ratio)
    return {
        "conventional": conventional(**size),
        "fused": conventional(**size, fusion="backward"),
        "two": conventional(**size, streams=2, fusion="backward"),
        **({} if joint is None else {"joint": joint}),
        "list": two_stream_list(**size, costs=costs),
    }


def _joint(size: dict[str, Any], costs: Costs, memory_ratio: float) -> Schedule | None:
    """Return the schedule of Algorithm 1 that simulates best, if one stays below the ratio."""
    found: list[Schedule] = []
    for regions in sorted({min(regions, size["stages"]) for regions in _REGIONS}):
        with contextlib.suppress(MemoryLimitError):  # of this schedule: there are others
            found.append(out_of_order(**size, costs=costs, memory_ratio=memory_ratio, k=None, regions=regions))
    return min(found, key=lambda schedule: steady(schedule, costs), default=None)


def steady(schedule: Schedule, costs: Costs, steps: int = REPEATED) -> float:
    """Return the simulated time of a step among others."""
    return simulate(schedule, costs, steps=steps).makespan / steps
