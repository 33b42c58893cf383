"""Out-of-order back-propagation that finds its schedule while it trains: the first steps are measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsebp import threads
from sparsebp.schedule import Costs, Schedule, Simulation, simulate, write_costs, write_csv
from sparsebp.schedule.builders import conventional, out_of_order
from sparsebp.train.actions import Batch, Step, Watch
from sparsebp.train.executor import Executor
from sparsebp.train.profile import SideBySide, TimedExecutor, measured_costs
from sparsebp.train.stages import Stages

SCHEDULE_NAME = "schedule.csv"
COSTS_NAME = "costs.json"
MEASURED = 5
"""Steps measured by themselves, and as many side by side; one before each is not."""
MEMORY_CAP = 1.1
"""Peak of memory as a multiple of the conventional order's (Oh et al. 2022, §8.2)."""
_REPEATED = 3  # simulated steps: of one alone, what the streams overlap at its ends is not seen


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule, and what it was found by.

    Attributes
    ----------
    schedule
        Of two streams.
    costs
        As measured: durations of every action by itself, bytes of every stage, slowdown side by side.
    memory_cap
        The bound for `memory`.
    """

    schedule: Schedule
    costs: Costs
    memory_cap: float

    @cached_property
    def conventional(self) -> Simulation:
        """The conventional order of the same step on one stream, simulated."""
        graph = self.schedule.graph
        return simulate(conventional(stages=graph.stages, unweighted=graph.unweighted, fusion="backward"), self.costs)

    @property
    def memory(self) -> float:
        """The simulated peak of memory, as a multiple of the conventional order's."""
        return simulate(self.schedule, self.costs).peak / self.conventional.peak

    @property
    def speedup(self) -> float:
        """The conventional order's simulated time of a step over this one's."""
        return _REPEATED * self.conventional.makespan / simulate(self.schedule, self.costs, steps=_REPEATED).makespan

    def describe(self) -> str:
        """Return a line: name, simulated speed-up, memory and its cap."""
        return (
            f"{self.schedule.name}: simulated {self.speedup:.2f}× the conventional order on one stream, with "
            f"{self.memory:.2f} × its memory (cap {self.memory_cap:g}); slowdown side by side {self.costs.slowdown:.2f}"
        )

    def save(self, folder: Path) -> None:
        """Write ``schedule.csv`` (for ``schedule=``) and ``costs.json`` (for ``sparsebp schedule --costs``)."""
        write_csv(self.schedule, folder / SCHEDULE_NAME)
        write_costs(self.costs, self.schedule, folder / COSTS_NAME)


class OutOfOrderExecutor:
    """Trains in the conventional order, measures it, finds a schedule, and goes on with that.

    Offers what `Executor` does. The first steps run on one stream, each stage's actions measured; then on two, to
    measure how they slow each other down; then Algorithm 1 is told, and its schedule is kept. All of that changes no
    result: every order computes the same. Batches of another size than the first one are run and not measured.

    Parameters
    ----------
    model, loss, optimizer, watch
        As `Executor` takes them.
    memory_cap
        Bound for the simulated peak of memory, as a multiple of the conventional order's.
    steps
        How many are measured, on one stream and then on two.
    graph
        As `Executor` takes it, for the steps that are not measured.

    Attributes
    ----------
    found
        The schedule, once there is one.
    costs
        The measured ones, as far as they are known.
    uncaptured
        As `Executor` has it.

    Raises
    ------
    OptionError
        The model does not go on two streams.
    """

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, *, watch: Watch | None = None, memory_cap: float = MEMORY_CAP,
        steps: int = MEASURED, graph: bool = False,
    ) -> None:  # fmt: skip
        self.stages = Stages(model)
        self.found: FoundSchedule | None = None
        self.costs: Costs | None = None
        self._parts, self._watch = (model, loss, optimizer), watch
        self._cap, self._wanted, self._graph = memory_cap, steps, graph
        self._samples: int | None = None
        self._ran = 0
        self._size: dict[str, Any] = {"stages": len(self.stages), "unweighted": self.stages.unweighted}
        # Refuses now what the steps to come would.
        self.uncaptured = Executor(model, loss, optimizer, out_of_order(**self._size), graph=graph).uncaptured
        self._executor: Executor = self._timed(conventional(**self._size, fusion="backward"))

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `Executor.step`."""
        executor = self._executor
        if not isinstance(executor, TimedExecutor):
            return executor.step(batches, tag)
        with self._one_core():
            done = executor.step(batches, tag)
        samples = sum(len(target) for _, target in batches)
        if self._samples is None:
            self._samples = samples
        odd = samples != self._samples
        if odd or self._ran == 0:  # another size, or warming up
            done += executor.flush()
            executor.spans()
        self._ran += not odd
        if self._ran > self._wanted:
            done += executor.flush()
            executor.close()
            self._next(executor)
        return done

    def _next(self, executor: TimedExecutor) -> None:
        self._ran = 0
        if self.costs is None:
            self.costs = measured_costs(executor.spans(), executor.bytes)
            self._executor = self._timed(self._order(self.costs))
            return
        beside = SideBySide.of(executor.spans(), executor.schedule, self.costs)
        self.costs = replace(self.costs, slowdown=beside.slowdown())
        schedule = self._order(self.costs, profile=beside.regions(self.costs))
        self.found = FoundSchedule(schedule, self.costs, self._cap)
        self._executor = Executor(*self._parts, schedule, watch=self._watch, graph=self._graph)

    def _order(self, costs: Costs, **options: Any) -> Schedule:
        return out_of_order(**self._size, costs=costs, memory_cap=self._cap, k=None, **options)

    def _timed(self, schedule: Schedule) -> TimedExecutor:
        return TimedExecutor(*self._parts, schedule, watch=self._watch)

    @contextlib.contextmanager
    def _one_core(self) -> Iterator[None]:
        """Run what is measured by itself on one core, as each of two streams does (which sees to that itself)."""
        if self.costs is not None:
            yield
            return
        with threads.one_blas_thread(), threads.serial_kernels():
            yield

    @property
    def schedule(self) -> Schedule:
        """The schedule of the steps by now."""
        return self._executor.schedule

    @property
    def pending(self) -> bool:
        """Whether parameters are still to be updated."""
        return self._executor.pending

    def flush(self) -> list[Step]:
        """Do what the last step has left over; see `Executor.flush`."""
        return self._executor.flush()

    def close(self) -> None:
        """End the threads; see `Executor.close`."""
        self._executor.close()
