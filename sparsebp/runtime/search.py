"""Out-of-order back-propagation: measure candidate schedules while training, and keep the fastest."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sparsebp.core import backend, threads
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.locks import cached_property
from sparsebp.runtime.actions import Batch, Observer, Stages, Step, trained_parameters
from sparsebp.runtime.executor import Executor, PlainExecutor
from sparsebp.runtime.measure import TimedExecutor, concurrent_costs, isolated_costs, isolated_schedule
from sparsebp.schedule import Costs, Schedule, simulate, write_costs, write_csv
from sparsebp.schedule.builders import conventional, out_of_order, two_stream_list

# Out-of-order back-propagation: measure candidate schedules while training, keep one if it is clearly faster.

SCHEDULE_NAME = "schedule.csv"
COSTS_NAME = "costs.json"
REPEATED = 3
"""Simulated steps: a single one does not show how streams overlap at its ends."""
_REGIONS = (4, 8, 16)


@dataclass(frozen=True)
class ScheduleTrial:
    """A schedule of a step, and how long one of its steps takes."""

    name: str  # in tables, see `all_schedules`
    schedule: Schedule
    memory: float  # simulated peak, as a multiple of the conventional schedule's
    # seconds, slowest: Measured: the mean of the steps of the best round, and of the worst.
    seconds: float = math.inf
    slowest: float = 0.0

    def measured(self, seconds: float) -> ScheduleTrial:
        """Return the trial with one more round of `seconds` a step."""
        return replace(self, seconds=min(self.seconds, seconds), slowest=max(self.slowest, seconds))


@dataclass(frozen=True)
class FoundSchedule:
    """The schedule that a search found, and its measurements.

    Attributes
    ----------
    trials
        The measured schedules; the conventional one, as ``schedule="conventional"`` runs it, is the first.
    costs
        As measured: durations of every action by itself, bytes of every stage, mutual slowdowns.
    memory_ratio
        The bound for `memory`.
    """

    trials: tuple[ScheduleTrial, ...]
    costs: Costs
    memory_ratio: float

    @cached_property
    def fastest(self) -> ScheduleTrial:
        """The fastest trial below the memory ratio; the first of equals.

        The conventional one stays unless another's worst round is faster than its best: between near equals, noise
        would decide.
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
        """The conventional schedule's measured step time over this one's: 1 if that is kept."""
        return self.trials[0].seconds / self.fastest.seconds

    def describe(self) -> str:
        """Return a line: name, measured speed-up, memory and its bound, and the other trials."""
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


def candidates(size: dict[str, Any], costs: Costs, memory_ratio: float) -> list[ScheduleTrial]:
    """Return the schedules to measure: the conventional one, and all of `all_schedules` below the ratio."""
    found = all_schedules(size, costs, memory_ratio)
    peaks = {name: simulate(schedule, costs).peak for name, schedule in found.items()}
    trials = [ScheduleTrial(name, found[name], _share(peak, peaks["conventional"])) for name, peak in peaks.items()]
    least = min(trial.memory for trial in trials)
    if least > memory_ratio:
        raise MemoryLimitError("No schedule of a step stays below the memory ratio", got=memory_ratio,
                               expected=f"memory_ratio={least:.4g} or more")  # fmt: skip
    return trials[:1] + [trial for trial in trials[1:] if trial.memory <= memory_ratio]


def _share(peak: float, most: float) -> float:
    return peak / most if most > 0 else math.inf if peak > 0 else 1.0


def all_schedules(size: dict[str, Any], costs: Costs, memory_ratio: float = math.inf) -> dict[str, Schedule]:
    """Return schedules of a step by name."""
    # On one stream, whose libraries use all cores: `"conventional"`, updates at the end, and `"fused"`, each right
    # after its gradient. On two streams, fused as well: `"two"`, not reordered; `"joint"`, from Algorithm 1, for the
    # number of regions and the k that simulate best, unless all exceed the ratio; `"list"`, by list scheduling.
    # size: Number of stages, and those without parameters, as builders take them.
    joint: list[Schedule] = []
    for regions in sorted({min(regions, size["stages"]) for regions in _REGIONS}):
        with contextlib.suppress(MemoryLimitError):  # there are other schedules
            joint.append(out_of_order(**size, costs=costs, memory_ratio=memory_ratio, k=None, regions=regions))
    return {
        "conventional": conventional(**size),
        "fused": conventional(**size, fusion="backward"),
        "two": conventional(**size, streams=2, fusion="backward"),
        **({"joint": min(joint, key=lambda schedule: steady(schedule, costs))} if joint else {}),
        "list": two_stream_list(**size, costs=costs),
    }


def steady(schedule: Schedule, costs: Costs, steps: int = REPEATED) -> float:
    """Return the simulated time of a step in a sequence of steps."""
    return simulate(schedule, costs, steps=steps).makespan / steps


# Finding the schedule during training: the first steps are measured.

MEASURED = 5
"""Steps measured on one stream, and as many on two; one before each is not."""
ROUNDS = 3
"""How often every candidate is measured, in turn."""
WORTH_REMEASURING = 1.25
"""Candidates this much slower than the fastest are not measured again, except the conventional schedule: a pause of the
machine in its only round would make another one seem faster."""
MEMORY_RATIO = 1.1
"""Peak of memory as a multiple of the conventional schedule's (Oh et al. 2022, §8.2)."""
_Search = Generator[tuple[PlainExecutor, int], list[float], None]


class SearchingExecutor(Executor):
    """Measures the first steps, and goes on with the executor that it has found to be the fastest."""

    inner: Executor
    """Runs the next step."""

    def go_on_with(self, inner: Executor) -> None:
        """Let `inner` run the next steps."""
        self.inner, self.schedule = inner, inner.schedule

    @property
    def uncaptured(self) -> tuple[str, ...]:
        """Why steps are not captured into CUDA graphs by now."""
        return self.inner.uncaptured

    @property
    def pending(self) -> bool:
        """Whether `flush` has anything to do."""
        return self.inner.pending

    def own(self, indices: Any) -> Any:
        """Return the samples of a micro-batch that are computed here."""
        return self.inner.own(indices)

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Finish the last step; see `Executor.flush`."""
        return self.inner.flush(wait=wait)

    def gather_state(self, *, everywhere: bool = False) -> None:
        """Gather what ranks keep apart; see `Executor.gather_state`."""
        self.inner.gather_state(everywhere=everywhere)

    def close(self) -> None:
        """End threads; see `Executor.close`."""
        self.inner.close()


class OutOfOrderExecutor(SearchingExecutor):
    """Trains, measures meanwhile, finds the fastest schedule of a step, and goes on with that.

    The first steps run on one stream, and each action is timed. The next steps run on
    two streams, to measure how much they slow each other down. With these costs schedules are built, see `candidates`,
    and each runs some steps in turn; the fastest by the clock is kept, the conventional one unless another is faster
    beyond the spread of their rounds. The results are the same with every schedule. Batches of another size than the
    first one are not measured.

    Parameters
    ----------
    model, loss, optimizer, observer
        As for `PlainExecutor`.
    memory_ratio
        Bound for the simulated peak of memory, as a multiple of the conventional schedule's.
    steps
        How many to measure, on one stream and then on two, and in all of each candidate.
    graph
        As for `PlainExecutor`, for the steps whose actions are not measured.
    clock
        Returns seconds.

    Attributes
    ----------
    found
        The schedule, once it is known.
    costs
        The measured ones, as far as they are known.

    Raises
    ------
    OptionError
        The model cannot run on two streams.
    """

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, *, observer: Observer | None = None,
        memory_ratio: float = MEMORY_RATIO, steps: int = MEASURED, graph: bool | None = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.stages = Stages(model, trained_parameters(model, optimizer))
        self.found: FoundSchedule | None = None
        self.costs: Costs | None = None
        self._parts, self._observer = (model, loss, optimizer), observer
        self._ratio, self._wanted, self._graph, self._clock = memory_ratio, steps, graph, clock
        self._samples: int | None = None
        self._on_host = backend.is_host(backend.namespace(next(iter(model.parameters().values()))))
        self._size: dict[str, Any] = {"stages": len(self.stages), "unweighted": self.stages.unweighted}
        # Refuses now what later steps would refuse.
        self._uncaptured = self._plain(two_stream_list(**self._size)).uncaptured
        self._search = self._searching()
        self._begin(next(self._search))

    @property
    def uncaptured(self) -> tuple[str, ...]:
        """As for `PlainExecutor`: of the steps whose actions are not measured."""
        return self._uncaptured

    def _searching(self) -> _Search:
        """Yield the executor of the next steps, and how many of them count; receive their seconds."""
        isolated = self._timed(isolated_schedule(self.stages))
        yield isolated, self._wanted
        self.costs = isolated_costs(isolated)
        concurrent = self._timed(two_stream_list(**self._size, costs=self.costs))
        yield concurrent, self._wanted
        self.costs = concurrent_costs(concurrent, self.costs)
        trials = candidates(self._size, self.costs, self._ratio)
        for _ in range(ROUNDS):
            fastest = min(trial.seconds for trial in trials)
            for number, trial in enumerate(trials):
                if number > 0 and trial.seconds > WORTH_REMEASURING * fastest:  # the first is the reference
                    continue
                seconds = yield self._plain(trial.schedule), -(-self._wanted // ROUNDS)
                trials[number] = trial.measured(fmean(seconds))
        self.found = FoundSchedule(tuple(trials), self.costs, self._ratio)
        yield self._plain(self.found.schedule), 0

    def _begin(self, what: tuple[PlainExecutor, int]) -> None:
        inner, self._counted = what
        self.go_on_with(inner)
        self._seconds: list[float] = []
        self._warm = 1 if self._uncaptured else 3  # until a graph is captured

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `PlainExecutor.step`."""
        if self.found is not None:
            return self.inner.step(batches, tag)
        samples = sum(len(batch[1]) for batch in batches)
        self._samples = samples if self._samples is None else self._samples
        counts = samples == self._samples
        done = [] if counts else self.flush()  # a step of another size must not overlap others
        if isinstance(self.inner, TimedExecutor):
            self.inner.counts = counts and self._warm == 0
        begin = self._clock()
        # Actions are measured on one core, as on each of two streams (which set that themselves).
        with threads.one_core() if self.costs is None and self._on_host else contextlib.nullcontext():
            done += self.inner.step(batches, tag)
        if not counts:
            return done + self.inner.flush()
        if self._warm > 0:
            self._warm -= 1
            return done
        self._seconds.append(self._clock() - begin)
        if len(self._seconds) == self._counted:
            done += self.inner.flush()
            self.inner.close()
            self._begin(self._search.send(self._seconds))
        return done

    def _timed(self, schedule: Schedule) -> TimedExecutor:
        return TimedExecutor(*self._parts, schedule, observer=self._observer)

    def _plain(self, schedule: Schedule) -> PlainExecutor:
        return PlainExecutor(*self._parts, schedule, observer=self._observer, graph=self._graph)

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Finish the last step; see `PlainExecutor.flush`."""
        begin = self._clock()
        done = self.inner.flush(wait=wait)
        if self._seconds:  # part of the last step: a caller may want the model after each
            self._seconds[-1] += self._clock() - begin
        return done
