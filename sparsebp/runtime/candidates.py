"""The orders of a step that an out-of-order search tries, and what it knows of each."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsebp.core.errors import MemoryLimitError
from sparsebp.schedule import Costs, Schedule, simulate, write_costs, write_csv
from sparsebp.schedule.builders import conventional, out_of_order, two_stream_list

SCHEDULE_NAME = "schedule.csv"
COSTS_NAME = "costs.json"
REPEATED = 3
"""Simulated steps: of one alone, what the streams overlap at its ends is not seen."""
_REGIONS = (4, 8, 16)


@dataclass(frozen=True)
class Trial:
    """An order of a step, and how long a step of it takes.

    Attributes
    ----------
    name
        What it is called in a table: ``"conventional"``, ``"fused"``, ``"two"``, ``"joint"``, ``"list"``, see
        `all_orders`.
    schedule
        The order.
    memory
        Its simulated peak of memory, as a multiple of the conventional order's.
    seconds
        Measured: the mean of the steps of the best round.
    """

    name: str
    schedule: Schedule
    memory: float
    seconds: float = math.inf


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule, and what it was found by.

    Attributes
    ----------
    trials
        What was measured; the conventional order, as ``schedule="conventional"`` runs it, is the first.
    costs
        As measured: durations of every action by itself, bytes of every stage, slowdowns side by side.
    memory_ratio
        The bound for `memory`.
    """

    trials: tuple[Trial, ...]
    costs: Costs
    memory_ratio: float

    @cached_property
    def kept(self) -> Trial:
        """The fastest one below the memory ratio; of equals the first."""
        allowed = (trial for trial in self.trials if trial.memory <= self.memory_ratio)
        return min(allowed, key=lambda trial: trial.seconds)

    @property
    def schedule(self) -> Schedule:
        """The schedule of `kept`."""
        return self.kept.schedule

    @property
    def memory(self) -> float:
        """The simulated peak of memory, as a multiple of the conventional order's."""
        return self.kept.memory

    @property
    def speedup(self) -> float:
        """The conventional order's measured time of a step over this one's: 1 if it is kept itself."""
        return self.trials[0].seconds / self.kept.seconds

    def describe(self) -> str:
        """Return a line: name, measured speed-up, memory and its bound, and what else was measured."""
        others = ", ".join(
            f"{trial.name} {self.trials[0].seconds / trial.seconds:.2f}×"
            for trial in self.trials[1:]
            if trial is not self.kept
        )
        return (
            f"{self.schedule.name}: measured {self.speedup:.2f}× the conventional order, with {self.memory:.2f} × its "
            f"memory (at most {self.memory_ratio:g}); others: {others}"
        )

    def save(self, folder: Path) -> None:
        """Write ``schedule.csv`` (for ``schedule=``) and ``costs.json`` (for ``sparsebp schedule --costs``)."""
        write_csv(self.schedule, folder / SCHEDULE_NAME)
        write_costs(self.costs, self.schedule, folder / COSTS_NAME)


def candidates(size: dict[str, Any], costs: Costs, memory_ratio: float) -> list[Trial]:
    """Return the orders to be measured: the conventional one, and of `all_orders` what stays below the memory ratio.

    Parameters
    ----------
    size
        Number of stages, and those without parameters, as builders take them.
    costs
        Measured ones.
    memory_ratio
        Bound for the simulated peak of memory, as a multiple of the conventional order's.

    Raises
    ------
    MemoryLimitError
        None is below the ratio; the message names the least that one is.
    """
    orders = all_orders(size, costs, memory_ratio)
    most = simulate(orders["conventional"], costs).peak
    trials = [Trial(name, order, _share(simulate(order, costs).peak, most)) for name, order in orders.items()]
    least = min(trial.memory for trial in trials)
    if least > memory_ratio:
        raise MemoryLimitError("No order of a step stays below the memory ratio", got=memory_ratio,
                               expected=f"memory_ratio={least:.4g} or more", remedy="Raise the ratio")  # fmt: skip
    return trials[:1] + [trial for trial in trials[1:] if trial.memory <= memory_ratio]


def _share(peak: float, most: float) -> float:
    return peak / most if most > 0 else math.inf if peak > 0 else 1.0


def all_orders(size: dict[str, Any], costs: Costs, memory_ratio: float = math.inf) -> dict[str, Schedule]:
    """Return orders of a step by name; parameters as those of `candidates`.

    On one stream, whose libraries use all cores: ``"conventional"``, updates at the end, and ``"fused"``, each right
    after its gradient. On two streams, fused as well: ``"two"``, not reordered; ``"joint"``, that of Algorithm 1, for
    the number of regions and the k that simulate best, unless all are above the ratio; ``"list"``, by list scheduling.
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
        with contextlib.suppress(MemoryLimitError):  # of this order: there are others
            found.append(out_of_order(**size, costs=costs, memory_ratio=memory_ratio, k=None, regions=regions))
    return min(found, key=lambda order: steady(order, costs), default=None)


def steady(order: Schedule, costs: Costs, steps: int = REPEATED) -> float:
    """Return the simulated time of a step among others."""
    return simulate(order, costs, steps=steps).makespan / steps
