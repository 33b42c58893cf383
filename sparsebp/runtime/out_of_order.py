"""Out-of-order back-propagation that finds its schedule while it trains: the first steps are measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from statistics import fmean
from typing import Any

from sparsebp import backend
from sparsebp.core import threads
from sparsebp.runtime.candidates import FoundSchedule, candidates
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.measure import TimedExecutor, alone_schedule, costs_alone, costs_beside
from sparsebp.runtime.stages import Stages, trained_parameters
from sparsebp.runtime.step import Batch, Step, Watch
from sparsebp.schedule import Costs, Schedule
from sparsebp.schedule.builders import two_stream_list

MEASURED = 5
"""Steps measured by themselves, and as many side by side; one before each is not."""
ROUNDS = 3
"""How often every candidate is measured, in turn."""
HOPELESS = 1.25
"""Candidates that take so much longer than the fastest are not measured again, but for the conventional schedule: one
round of it in which the machine paused would let another one seem faster beyond the spread."""
MEMORY_RATIO = 1.1
"""Peak of memory as a multiple of the conventional schedule's (Oh et al. 2022, §8.2)."""
_Search = Generator[tuple[Executor, int], list[float], None]


class OutOfOrderExecutor:
    """Trains, measures while it does, finds the fastest schedule of a step, and goes on with that.

    Offers what `Executor` does. The first steps run on one stream, each action measured; then on two, to measure how
    they slow each other down. With these costs schedules are built, see `candidates`, then steps run by each of them in
    turn; the fastest by the clock is kept, the conventional one unless another is faster beyond the spread of their
    rounds. All of that changes no result: every one computes the same. Batches of another size than the first one are
    run and not measured.

    Parameters
    ----------
    model, loss, optimizer, watch
        As `Executor` takes them.
    memory_ratio
        Bound for the simulated peak of memory, as a multiple of the conventional schedule's.
    steps
        How many are measured, on one stream and then on two, and in all of each candidate.
    graph
        As `Executor` takes it, for the steps whose actions are not measured.
    clock
        Returns seconds.

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
        self, model: Any, loss: Any, optimizer: Any, *, watch: Watch | None = None, memory_ratio: float = MEMORY_RATIO,
        steps: int = MEASURED, graph: bool | None = False, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.stages = Stages(model, trained_parameters(model, optimizer))
        self.found: FoundSchedule | None = None
        self.costs: Costs | None = None
        self._parts, self._watch = (model, loss, optimizer), watch
        self._ratio, self._wanted, self._graph, self._clock = memory_ratio, steps, graph, clock
        self._samples: int | None = None
        self._on_host = backend.is_host(backend.namespace(next(iter(model.parameters().values()))))
        self._size: dict[str, Any] = {"stages": len(self.stages), "unweighted": self.stages.unweighted}
        # Refuses now what the steps to come would.
        self.uncaptured = self._plain(two_stream_list(**self._size)).uncaptured
        self._search = self._searching()
        self._begin(next(self._search))

    def _searching(self) -> _Search:
        """Yield who runs the next steps, and how many of them count; be sent their seconds."""
        alone = self._timed(alone_schedule(self.stages))
        yield alone, self._wanted
        self.costs = costs_alone(alone)
        beside = self._timed(two_stream_list(**self._size, costs=self.costs))
        yield beside, self._wanted
        self.costs = costs_beside(beside, self.costs)
        trials = candidates(self._size, self.costs, self._ratio)
        for _ in range(ROUNDS):
            fastest = min(trial.seconds for trial in trials)
            for number, trial in enumerate(trials):
                if number > 0 and trial.seconds > HOPELESS * fastest:  # the first is what others have to beat
                    continue
                seconds = yield self._plain(trial.schedule), -(-self._wanted // ROUNDS)
                trials[number] = trial.measured(fmean(seconds))
        self.found = FoundSchedule(tuple(trials), self.costs, self._ratio)
        yield self._plain(self.found.schedule), 0

    def _begin(self, what: tuple[Executor, int]) -> None:
        self._executor, self._counted = what
        self._seconds: list[float] = []
        self._warm = 1 if self.uncaptured else 3  # until a graph is captured

    def own(self, indices: Any) -> Any:
        """Return which samples of a micro-batch are computed here: all of them."""
        return indices

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `Executor.step`."""
        if self.found is not None:
            return self._executor.step(batches, tag)
        samples = sum(len(batch[1]) for batch in batches)
        self._samples = samples if self._samples is None else self._samples
        counts = samples == self._samples
        done = [] if counts else self.flush()  # a step of another size has nothing of it within others
        if isinstance(self._executor, TimedExecutor):
            self._executor.counts = counts and self._warm == 0
        begin = self._clock()
        # What is measured by itself runs on one core, as each of two streams does (which sees to that itself).
        with threads.one_core() if self.costs is None and self._on_host else contextlib.nullcontext():
            done += self._executor.step(batches, tag)
        if not counts:
            return done + self._executor.flush()
        if self._warm > 0:
            self._warm -= 1
            return done
        self._seconds.append(self._clock() - begin)
        if len(self._seconds) == self._counted:
            done += self._executor.flush()
            self._executor.close()
            self._begin(self._search.send(self._seconds))
        return done

    def _timed(self, schedule: Schedule) -> TimedExecutor:
        return TimedExecutor(*self._parts, schedule, watch=self._watch)

    def _plain(self, schedule: Schedule) -> Executor:
        return Executor(*self._parts, schedule, watch=self._watch, graph=self._graph)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the steps by now."""
        return self._executor.schedule

    @property
    def pending(self) -> bool:
        """Whether parameters are still to be updated."""
        return self._executor.pending

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Do what the last step has left over; see `Executor.flush`."""
        begin = self._clock()
        done = self._executor.flush(wait=wait)
        if self._seconds:  # it is part of the last step: a caller may want the model after each
            self._seconds[-1] += self._clock() - begin
        return done

    def close(self) -> None:
        """End the threads; see `Executor.close`."""
        self._executor.close()
