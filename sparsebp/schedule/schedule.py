"""A schedule: each stream's actions in order, and whether it can run to its end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sparsebp.core.check import check_sequence, shown
from sparsebp.core.errors import OptionError, ScheduleError
from sparsebp.core.locks import cached_property
from sparsebp.schedule.actions import (
    Action,
    Cell,
    CellGraph,
    Kind,
    Lane,
    Overlap,
    StepGraph,
    actions_of,
    carried,
    cell_graph,
    parts_of,
    trusted,
)


@dataclass(frozen=True)
class Schedule:
    """An order of the actions of a step on workers and their streams.

    A lane starts its next cell when the one before has ended and its data are ready. A schedule defines only this order
    and contains no times; `simulate` computes them.

    Attributes
    ----------
    graph
        The actions and their needs.
    lanes
        One lane per stream, sorted by worker.
    name
        Of the technique, for tables and pictures.
    recomputed
        Stages that keep only their input, and compute the rest again when their first gradient is asked for (Chen et
        al., "Training deep nets with sublinear memory cost", 2016).
    replicated
        Stages with weights on several workers. Each of those runs all actions of some micro-batches (in DualPipe those
        that enter at one end of the pipeline). Sums of their gradients over these workers, and updates from the sums,
        follow at the end of the step and are not in the schedule.
    places
        Number of the lane and position in it of every action; I and W are found within a B.

    Raises
    ------
    OptionError
        A cell is not an `Action` or an `Overlap`.
    ScheduleError
        An action is missing, doubled or foreign; a worker has nothing to do; a stage, or a micro-batch of a replicated
        stage, runs on several workers; or a replicated stage has S or U, or is in a step that begins with backwards.
    """

    graph: StepGraph
    lanes: tuple[Lane, ...]
    name: str = ""
    recomputed: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    places: dict[Action, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lanes = check_sequence("lanes", self.lanes, "lanes")
        for lane in lanes:
            if not isinstance(lane, Lane) or not isinstance(lane.cells, (tuple, list)):
                raise OptionError("A lane is not one", expected="a Lane of a tuple of actions", got=shown(lane),
                                  remedy="Use Schedule.of, which makes the lanes")  # fmt: skip
        object.__setattr__(self, "lanes", tuple(sorted(lanes, key=lambda lane: lane.worker)))
        object.__setattr__(self, "places", _places(self.graph, self.lanes))
        _check_workers(self)

    @classmethod
    def of(cls, graph: StepGraph, workers: Sequence[Mapping[str, Iterable[Cell]] | Iterable[Cell]], name: str = "",
           recomputed: Iterable[int] = (), replicated: Iterable[int] = ()) -> Schedule:  # fmt: skip
        """Return a schedule from one entry per worker: cells of its main stream, or cells by the stream's name."""
        lanes = []
        for number, entry in enumerate(check_sequence("workers", workers, "lists of actions")):
            streams = entry if isinstance(entry, Mapping) else {"main": entry}
            for stream, cells in streams.items():
                cells = check_sequence(f"The lane {stream!r} of worker {number}", cells, "actions")  # noqa: PLW2901
                lanes.append(Lane(number, stream, tuple(cells)))
        return cls(graph, tuple(lanes), name, frozenset(recomputed), frozenset(replicated))

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.lanes[-1].worker + 1

    @cached_property
    def allocation(self) -> tuple[int, ...]:
        """The worker of every stage, where its forwards run; of a replicated one, where its first micro-batch does."""
        return tuple(self.worker_of(stage, 0) for stage in range(self.graph.stages))

    def worker_of(self, stage: int, microbatch: int) -> int:
        """Return the worker that runs a stage for a micro-batch."""
        return self.lanes[self.places[trusted(stage, "F", microbatch)][0]].worker

    def workers_of(self, stage: int) -> tuple[int, ...]:
        """Return the workers that have the weights of a stage, in the order of their first micro-batches of it."""
        if stage not in self.replicated:
            return (self.allocation[stage],)
        return tuple(dict.fromkeys(self.worker_of(stage, m) for m in range(self.graph.microbatches)))

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
        """Whether the schedule has the action, by itself or as part of a B."""
        return action in self.places


def _places(graph: StepGraph, lanes: Sequence[Lane]) -> dict[Action, tuple[int, int]]:
    required = set(graph.required())
    known = required.union(graph.optional())
    where: dict[Action, tuple[int, int]] = {}
    for number, lane in enumerate(lanes):
        for position, cell in enumerate(lane.cells):
            if isinstance(cell, Action) and cell in known and cell not in where:  # neither B nor overlap: most cells
                where[cell] = number, position
                continue
            if not isinstance(cell, (Action, Overlap)):
                raise OptionError("A cell is not an action", expected="an Action, or an Overlap of two",
                                  got=shown(cell), remedy="Make one of a text by parse('2I0')")  # fmt: skip
            for action in actions_of(cell):
                parts = [part for part in parts_of(action) if part in known]
                if not parts:
                    raise ScheduleError("A schedule has an action that its step has not", actions=[action],
                                        expected=f"an action of {graph}", got=f"{action} on {lane}")  # fmt: skip
                for part in parts:
                    if part in where:
                        got = f"{part} on {lanes[where[part][0]]} and on {lane}"
                        raise ScheduleError("An action is scheduled twice", expected="once", got=got, actions=[part])
                    where[part] = number, position
    missing = sorted(required - where.keys())
    if missing:
        listed = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        forward = Action(missing[0].stage, "F", missing[0].microbatch or 0)  # says where its lane is
        expected = f"all {len(required)} actions of the step"
        raise ScheduleError("Actions are missing", expected=expected, got=f"none of {listed}", actions=[forward])
    return where


def _check_workers(schedule: Schedule) -> None:
    busy = {lane.worker for lane in schedule.lanes if lane.cells}
    idle = sorted(set(range(schedule.lanes[-1].worker + 1 if schedule.lanes else 1)) - busy)
    if idle:
        raise ScheduleError("A worker has nothing to do", expected="at least one action a worker", got=f"worker {idle}",
                            remedy="Use fewer workers, or give it a stage")  # fmt: skip
    names = [(lane.worker, lane.stream) for lane in schedule.lanes]
    if len(set(names)) < len(names):
        raise ScheduleError("A stream is there twice", expected="one lane a stream", got=names)
    if schedule.replicated and schedule.graph.first != "F":  # the sums of the step before come before its forwards
        raise ScheduleError("A step with replicated stages begins with the forwards", expected='first="F"',
                            got=repr(schedule.graph.first))  # fmt: skip
    workers, owners = [lane.worker for lane in schedule.lanes], schedule.allocation
    for action, (number, _) in schedule.places.items():
        worker, owner = workers[number], owners[action[0]]
        if action[0] in schedule.replicated:
            if action.microbatch is None:
                expected = "its sums and updates after the step"
                raise ScheduleError("A replicated stage has S or U", expected=expected, got=action, actions=[action],
                                    remedy="Leave them out")  # fmt: skip
            owner = schedule.worker_of(action.stage, action.microbatch)
        if worker != owner:
            expected, got = f"stage {action.stage} on worker {owner}", f"{action} on worker {worker}"
            raise ScheduleError("A stage runs on several workers", expected=expected, got=got, actions=[action],
                                remedy="Move it: only replicated stages are on several workers")  # fmt: skip


# Whether a schedule can run to its end, and every action reads the right weights.


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run.

    `Schedule` has made sure that all actions are there, once each, and that every worker has some. This checks the
    order: lanes and data together must have no cycle, and settle which version of the weights each action reads.

    Raises
    ------
    ScheduleError
        Workers or streams wait for each other forever (the message has the cycle), or an update overwrites weights
        that a backward has yet to read, or runs at the same time as an action that reads them.
    """
    stuck = _stuck(schedule, frozenset())
    if not stuck:
        race = find_race(schedule)
        if race is None:
            return
        update, reader = (_describe(schedule, schedule.cells.numbers[action]) for action in race)
        raise ScheduleError("Weights are updated while they may be read",
                            expected="one of the two to wait for the other", got=f"{update} and {reader} at once",
                            remedy="Put both into one lane", actions=race)  # fmt: skip
    cycle = _cycle(schedule, stuck)
    hazards = _hazards(schedule)
    if not _stuck(schedule, hazards):  # nothing else is wrong: the order would run, with the wrong weights
        overwriting, late = next(pair for pair in pairwise(cycle) if (pair[1], pair[0]) in hazards)
        backward, written = _action(schedule, late, "I"), _action(schedule, overwriting, "U")
        raise ScheduleError("Weights are overwritten before they are read", actions=(written, backward),
                            expected=f"{backward} before {written}: its forward had the old weights",
                            got=f"{_describe(schedule, overwriting)} earlier than {_describe(schedule, late)}",
                            remedy="Move the update behind it, or keep old versions: weights='stashed'")  # fmt: skip
    waits = " waits for ".join(_describe(schedule, number) for number in cycle)
    actions = [actions_of(schedule.cells.cells[number])[0] for number in cycle[:-1]]
    raise ScheduleError("The schedule is deadlocked", expected="an order without a cycle", got=waits, actions=actions,
                        remedy="Reorder one of these lanes")  # fmt: skip


def _stuck(schedule: Schedule, ignored: Collection[tuple[int, int]]) -> set[int]:
    """Return the cells that are never reached, if the edges `ignored` are not waited for."""
    return set(range(len(schedule.cells.cells))).difference(schedule.cells.in_turn(ignored))


def _cycle(schedule: Schedule, stuck: Collection[int]) -> list[int]:
    """Return cells each of which waits for the next; the last is the first again."""
    source = {reader: number for number in sorted(stuck) for reader in schedule.cells.after(number) if reader in stuck}
    path, seen = [min(stuck)], {min(stuck): 0}
    while True:
        number = source[path[-1]]
        path.append(number)
        if number in seen:
            return path[seen[number] :]
        seen[number] = len(path) - 1


def _hazards(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the edges (backward, update) whose only reason is that the update overwrites the backward's weights."""
    graph, cells = schedule.graph, schedule.cells
    if graph.updates != "step" or graph.first == "U":
        return set()
    edges = set()
    for stage in filter(graph.weighted, range(graph.stages)):
        update = cells.numbers[Action(stage, "U")]
        for m in range(graph.microbatches):
            reader, gradient = cells.numbers.get(Action(stage, "I", m)), cells.numbers[Action(stage, "W", m)]
            follows = reader == update - 1 and cells.lanes[reader] == cells.lanes[update]
            if reader is not None and reader != gradient and not follows:
                edges.add((reader, update))
    return edges


def _action(schedule: Schedule, number: int, kind: Kind) -> Action:
    """Return the part of a cell that is of one kind."""
    cell = schedule.cells.cells[number]
    return next(part for part in parts_of(cell) if part.kind == kind)


def _describe(schedule: Schedule, number: int) -> str:
    lane = schedule.cells.lanes[number]
    position = number - schedule.cells.first[lane] + 1
    ending = "th" if position % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(position % 10, "th")
    return f"{schedule.cells.cells[number]} ({schedule.lanes[lane]}, {position}{ending})"


def find_race(schedule: Schedule) -> tuple[Action, Action] | None:
    """Return an update and an action that may read the weights before, after or while they are updated."""
    # Only graphs with updates after every micro-batch leave that open; it is settled where both are in one lane, or
    # where lanes and data make one wait for the other. The schedule must be free of deadlocks.
    graph, cells = schedule.graph, schedule.cells
    if graph.updates != "microbatch":
        return None
    clocks: list[list[int]] = []
    for stage in filter(graph.weighted, range(graph.stages)):
        readers: dict[int, dict[int, Action]] = {}  # lane -> cell -> action
        for action in (Action(stage, kind, m) for kind in ("F", "I") for m in range(graph.microbatches)):
            if action in cells.numbers and (action.kind == "F" or graph.weights == "latest"):
                readers.setdefault(cells.lanes[cells.numbers[action]], {})[cells.numbers[action]] = action
        for update in (Action(stage, "U", m) for m in range(graph.microbatches)):
            own = cells.lanes[cells.numbers[update]]
            for lane in readers.keys() - {own}:
                clocks = clocks or _clocks(schedule)
                later = sorted(readers[lane])
                later = later[bisect_left(later, cells.first[lane] + clocks[cells.numbers[update]][lane]) :]
                if later and clocks[later[0]][own] <= cells.numbers[update] - cells.first[own]:
                    return update, readers[lane][later[0]]
    return None


def _clocks(schedule: Schedule) -> list[list[int]]:
    """Return, for every cell, how many cells of each lane end before it starts, its own counted too (vector clocks)."""
    cells = schedule.cells
    clocks = [[0] * len(schedule.lanes) for _ in cells.cells]
    for number in cells.in_turn():
        lane, clock = cells.lanes[number], clocks[number]
        clock[lane] = number - cells.first[lane] + 1
        for reader in cells.after(number):
            clocks[reader] = [max(pair) for pair in zip(clocks[reader], clock, strict=True)]
    return clocks
