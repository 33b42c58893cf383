"""A schedule: for every worker and stream, what to do in which order. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sparsebp.core.errors import ScheduleError
from sparsebp.core.locks import cached_property
from sparsebp.schedule.actions import Action, Cell, Lane, actions_of, parts_of
from sparsebp.schedule.cells import CellGraph, carried, cell_graph
from sparsebp.schedule.graph import StepGraph


@dataclass(frozen=True)
class Schedule:
    """An order of the actions of a step on workers and their streams.

    A lane starts its next cell when the one before has ended and everything that it needs is there. That alone is the
    order: there are no times in a schedule, `simulate` finds them.

    Attributes
    ----------
    graph
        What is to be done.
    lanes
        Who does it, one lane a stream, sorted by worker.
    name
        Of the technique, for tables and pictures.
    recomputed
        Stages that keep only their input, and compute the rest again when their first gradient is asked for (Chen et
        al., "Training deep nets with sublinear memory cost", 2016).
    places
        Number of the lane and position in it of every action; I and W are found within a B.

    Raises
    ------
    ScheduleError
        An action is missing, doubled or foreign; a worker has nothing to do, or a stage runs on several workers.
    """

    graph: StepGraph
    lanes: tuple[Lane, ...]
    name: str = ""
    recomputed: frozenset[int] = frozenset()
    places: dict[Action, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", tuple(sorted(self.lanes, key=lambda lane: lane.worker)))
        object.__setattr__(self, "places", _places(self.graph, self.lanes))
        _check_workers(self)

    @classmethod
    def of(cls, graph: StepGraph, workers: Sequence[Mapping[str, Iterable[Cell]] | Iterable[Cell]], name: str = "",
           recomputed: Iterable[int] = ()) -> Schedule:  # fmt: skip
        """Return a schedule from one entry a worker: cells of its main stream, or cells by the stream's name."""
        lanes = []
        for number, entry in enumerate(workers):
            streams = entry if isinstance(entry, Mapping) else {"main": entry}
            lanes += [Lane(number, stream, tuple(cells)) for stream, cells in streams.items()]
        return cls(graph, tuple(lanes), name, frozenset(recomputed))

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.lanes[-1].worker + 1

    @cached_property
    def allocation(self) -> tuple[int, ...]:
        """The worker of every stage: that of its forwards."""
        return tuple(self.lanes[self.places[Action(stage, "F", 0)][0]].worker for stage in range(self.graph.stages))

    @cached_property
    def cells(self) -> CellGraph:
        """The cells as a graph of numbers, for algorithms that visit all of them."""
        return cell_graph(self.graph, self.lanes, self.places)

    @cached_property
    def carried(self) -> tuple[list[list[int]], list[int]]:
        """Which cells of the next step wait for each cell when the schedule is repeated; for how many each waits."""
        return carried(self.graph, self.lanes, self.cells)

    def __iter__(self) -> Iterator[Action]:
        """Iterate over all actions, lane after lane."""
        return (action for lane in self.lanes for cell in lane.cells for action in actions_of(cell))

    def __contains__(self, action: Action) -> bool:
        """Whether the action is there, by itself or as part of a B."""
        return action in self.places


def _places(graph: StepGraph, lanes: Sequence[Lane]) -> dict[Action, tuple[int, int]]:
    required = set(graph.required())
    known = required.union(graph.optional())
    where: dict[Action, tuple[int, int]] = {}
    for number, lane in enumerate(lanes):
        for position, cell in enumerate(lane.cells):
            if cell in known and cell not in where:  # the most: neither B nor overlap, and nothing wrong
                where[cell] = number, position
                continue
            for action in actions_of(cell):
                parts = [part for part in parts_of(action) if part in known]
                if not parts:
                    raise ScheduleError(
                        "A schedule has an action that its step has not", got=f"{action} on {lane}",
                        expected=f"an action of {graph}",
                        remedy="Remove it, or describe the step with another StepGraph", actions=[action],
                    )  # fmt: skip
                for part in parts:
                    if part in where:
                        raise ScheduleError("An action is scheduled twice", expected="every action once",
                                            got=f"{part} on {lanes[where[part][0]]} and on {lane}",
                                            remedy="Remove one of them", actions=[part])  # fmt: skip
                    where[part] = number, position
    missing = sorted(required - where.keys())
    if missing:
        listed = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        forward = Action(missing[0].stage, "F", missing[0].microbatch or 0)  # says where its lane is
        raise ScheduleError("Actions are missing", expected=f"all {len(required)} actions of the step",
                            got=f"none of {listed}", remedy="Add them to a lane", actions=[forward])  # fmt: skip
    return where


def _check_workers(schedule: Schedule) -> None:
    busy = {lane.worker for lane in schedule.lanes if lane.cells}
    idle = sorted(set(range(schedule.lanes[-1].worker + 1 if schedule.lanes else 1)) - busy)
    if idle:
        raise ScheduleError("A worker has nothing to do", expected="at least one action a worker", got=f"worker {idle}",
                            remedy="Use fewer workers, or give it a stage")  # fmt: skip
    names = [(lane.worker, lane.stream) for lane in schedule.lanes]
    if len(set(names)) < len(names):
        raise ScheduleError("A stream is there twice", expected="one lane a stream", got=names, remedy="Join them")
    workers, homes = [lane.worker for lane in schedule.lanes], schedule.allocation
    for action, (number, _) in schedule.places.items():
        worker, home = workers[number], homes[action[0]]
        if worker != home:
            raise ScheduleError(
                "A stage runs on several workers", expected=f"all actions of stage {action.stage} on worker {home}",
                got=f"{action} on worker {worker}", remedy="Move it: a stage's weights live on one worker",
                actions=[action],
            )  # fmt: skip
