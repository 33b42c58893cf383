"""What a schedule takes: times, waiting, staleness of the weights, memory, without running it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import OptionError
from sparsebp.core.locks import cached_property
from sparsebp.schedule.actions import KINDS, Action, Cell, parts_of
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Schedule
from sparsebp.schedule.simulation.engine import Run, Transfer
from sparsebp.schedule.simulation.memory import MemoryCurve, memory_curves
from sparsebp.schedule.validate import validate


class Event(NamedTuple):
    """A cell that ran.

    Attributes
    ----------
    cell
        What.
    lane
        The number of its lane in ``schedule.lanes``.
    start, end
        Times. Recomputation of activations is included.
    versions
        For every action of the cell, which version of its stage's weights it read: how often they had been updated
        since the beginning. None for actions that read no weights (W, S, U, and all of a stage without).
    step
        Of which repetition of the schedule.
    """

    cell: Cell
    lane: int
    start: float
    end: float
    versions: tuple[int | None, ...]
    step: int


MOST_STEPS = 10**6
"""Steps of one simulation at most; a schedule repeats itself long before."""


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found.

    Attributes
    ----------
    schedule, costs, steps
        What was simulated.
    """

    schedule: Schedule
    costs: Costs
    steps: int
    _run: Run = field(repr=False, compare=False)

    @cached_property
    def _entries(self) -> list[Event]:
        run, cells, lanes, count = self._run, self.schedule.cells.cells, self.schedule.cells.lanes, self._run.count
        return [
            Event(cells[i % count], lanes[i % count], run.begin[i], run.end[i], run.versions[i], i // count)
            for i in range(len(run.begin))
        ]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All cells, sorted by start."""
        return tuple(sorted(self._entries, key=lambda event: event.start))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All data sent between workers, sorted by start."""
        return tuple(sorted(self._run.transfers(), key=lambda transfer: transfer.start))

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last."""
        return max(self._run.end)

    @cached_property
    def bubble(self) -> float:
        """The share of the time in which workers are idle: of their main streams, from 0 to 1."""
        main: dict[int, int] = {}
        for number, lane in enumerate(self.schedule.lanes):
            if lane.stream == "main" or lane.worker not in main:
                main[lane.worker] = number
        counted, run = set(main.values()), self._run
        lanes = [number in counted for number in self.schedule.cells.lanes] * self.steps
        busy = sum(end - begin for begin, end, own in zip(run.begin, run.end, lanes, strict=True) if own)
        return max(0.0, 1 - busy / (len(counted) * self.makespan)) if self.makespan > 0 else 0.0

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """Events that each waited for the one before (its data, its lane, or the link it sent on), the last ends last.

        To make the step shorter, one of these must become shorter or a transfer between them faster.
        """
        run = self._run
        entry: int | None = max(range(len(run.end)), key=lambda i: run.end[i])
        path = []
        while entry is not None:
            path.append(self._entries[entry])
            entry = run.cause_of(entry)
        return tuple(reversed(path))

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """What every worker keeps in memory over time."""
        return memory_curves(self._run)

    @cached_property
    def peak(self) -> float:
        """The most memory that any worker uses at any time."""
        return max(curve.peak for curve in self.memory)

    def event(self, action: Action, step: int = 0) -> Event:
        """Return when an action ran (I and W within B: when B did).

        Raises
        ------
        OptionError
            The action or step was not simulated.
        """
        if action.kind == "B":
            action = next((part for part in parts_of(action) if part in self.schedule), action)
        number = self.schedule.cells.numbers.get(action)
        if number is None or not 0 <= step < self.steps:
            raise OptionError(
                "This was not simulated", expected=f"an action of the schedule, step 0 to {self.steps - 1}",
                got=f"{action}, step {step}", remedy="Simulate more steps, or ask for another action",
            )  # fmt: skip
        return self._entries[step * self._run.count + number]

    def start(self, action: Action, step: int = 0) -> float:
        """Return when an action started."""
        return self.event(action, step).start

    def end(self, action: Action, step: int = 0) -> float:
        """Return when an action ended."""
        return self.event(action, step).end

    def version(self, action: Action, step: int = 0) -> int:
        """Return the version of its stage's weights that a forward or backward read.

        Raises
        ------
        OptionError
            The action reads no weights, or was not simulated.
        """
        self.event(action, step)
        if action.kind in "FIB":
            part = Action(action.stage, "F" if action.kind == "F" else "I", action.microbatch)
            number = self.schedule.cells.numbers.get(part)
            version = None if number is None else self._run.version_of(number, step, part.kind)
            if version is not None:
                return version
        raise OptionError(f"{action} reads no weights", expected="F, I or B of a stage with weights", got=str(action),
                          remedy="Ask for another action")  # fmt: skip

    def staleness(self, action: Action, step: int = 0) -> int:
        """Return how many updates of its stage lie between what an action read and the update from its own gradient.

        0 if the gradient is applied to the very weights that it was computed with; negative if an I reads weights that
        have got it already (``weights="latest"``, and the update before I).
        """
        version = self.version(action, step)
        if self.schedule.graph.updates != "microbatch":
            return 0
        return self._run.own_update[action.stage, action.microbatch, step] - 1 - version

    def version_difference(self, action: Action, step: int = 0) -> int:
        """Return how many updates its stage gets from what an action reads until its micro-batch's round trip is over.

        The round trip is over when the backward reaches stage 0 (Chen et al., "Efficient and robust parallel DNN
        training through model parallelism", 2018, §3.3): so many updates ahead are weights to be predicted.

        Raises
        ------
        OptionError
            The round trip ends in a later step than those simulated.
        """
        version = self.version(action, step)
        over = Action(0, "I", action.microbatch)
        over = over if over in self.schedule else Action(0, "W", action.microbatch)
        later = step + (self.schedule.graph.first == "I" and action.kind == "F")
        time = self.start(over, later)
        return bisect_right(self._run.updates[action.stage], time) - version


def simulate(schedule: Schedule, costs: Costs | None = None, *, steps: int = 1) -> Simulation:
    """Find out when everything in a schedule happens.

    Every lane runs its cells in order; a cell starts when the one before it has ended and its data are there. Data for
    another worker travel over `Costs.link`.

    Parameters
    ----------
    schedule
        What to run. It is validated first.
    costs
        What it costs; F, I and W take 1, the rest nothing, if left out.
    steps
        How often the schedule is repeated. Step follows step without a pause: where data and lanes allow, the next one
        starts before the last has ended.

    Returns
    -------
    The result. Two calls with equal arguments give equal results.

    Raises
    ------
    ScheduleError
        The schedule cannot run.
    OptionError
        A duration is missing or negative; the costs are of another number of stages; there are no steps; or times
        overflow.
    """
    steps = check_integer("steps", steps, 1, MOST_STEPS)
    if costs is not None and not isinstance(costs, Costs):
        raise OptionError("costs are none", expected="Costs, or None", got=type(costs).__name__, remedy="Pass Costs(…)")
    validate(schedule)
    costs = Costs() if costs is None else costs
    stages = schedule.graph.stages
    if isinstance(costs.stages, tuple) and len(costs.stages) != stages:
        raise OptionError("The bytes are those of another model", expected=f"StageBytes of {stages} stages",
                          got=len(costs.stages), remedy="Pass one a stage, or one for all")  # fmt: skip
    return Simulation(schedule, costs, steps, Run(schedule, costs, steps))


def depth(graph: StepGraph, costs: Costs | None = None) -> float:
    """Return the length of the longest chain of actions that need each other: no schedule takes less.

    Parameters
    ----------
    graph
        The step.
    costs
        Durations; all actions, S and U too, take 1 if left out. Transfers are free.
    """
    costs = Costs(dict.fromkeys(KINDS, 1.0)) if costs is None else Costs(costs.durations)
    unlimited = Schedule.of(graph, [{str(action): [action] for action in graph.required()}])
    return max(Run(unlimited, costs, 1).end)
