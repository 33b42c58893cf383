"""A schedule turned into what an executor runs: one list of functions a stream, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from sparsebp.errors import OptionError
from sparsebp.schedule import Action, Schedule, actions_of, parts_of, validate
from sparsebp.train.actions import Actions, Run
from sparsebp.train.stages import Stages


@dataclass(frozen=True)
class Task:
    """One action, or several updates in one.

    Attributes
    ----------
    run
        What to do.
    old
        Whether it is done for the step before: an update, or a gradient, left over for the next forward.
    waits
        What must have come to its end on another stream: ``(number of the event, whether it is the step before's)``.
    signal
        The event that others wait for, or None.
    updates
        Whether it is an update.
    """

    run: Run
    old: bool = False
    waits: tuple[tuple[int, bool], ...] = ()
    signal: int | None = None
    updates: bool = False


@dataclass(frozen=True)
class Program:
    """What a step runs.

    Attributes
    ----------
    lanes
        The tasks of every stream; the first has the forwards.
    events
        How many events there are.
    lasting
        Whether something is left over for the next step.
    late
        Whether gradients are among that, not updates alone.
    gathered
        Whether all gradients are there before the first of them is used.
    """

    lanes: tuple[tuple[Task, ...], ...]
    events: int
    lasting: bool
    late: bool
    gathered: bool


def check_fits(schedule: Schedule, stages: Stages, microbatches: int) -> None:
    """Refuse a schedule that is not one of this model on one device.

    Raises
    ------
    OptionError
        It is for other stages or micro-batches, for several workers, or asks for what this executor does not do.
    ScheduleError
        It cannot run.
    """
    graph = schedule.graph
    wanted = {"stages": len(stages), "microbatches": microbatches, "unweighted": sorted(stages.unweighted)}
    got = {"stages": graph.stages, "microbatches": graph.microbatches, "unweighted": sorted(graph.unweighted)}
    lanes = [_parts(lane.cells) for lane in schedule.lanes if lane.cells]
    weights = [{part.stage for part in lane if part.kind == "W"} for lane in lanes]
    forwards = sum(any(part.kind == "F" for part in lane) for lane in lanes)
    for wrong, what, expected, found, remedy in (
        (wanted != got, "is not of this model", wanted, got, "Build it for model.stages() and these micro-batches"),
        (schedule.workers > 1, "is of several workers", "1, this device", schedule.workers, "Build it for one worker"),
        (graph.updates != "step", "does not update once a step", "updates='step'", graph.updates, "Place one U a stage"),
        (graph.synchronised, "synchronises gradients of one device", "no S", "S", "Leave the S out"),
        (bool(schedule.recomputed), "recomputes stages", "none", sorted(schedule.recomputed), "Keep what is saved"),
        (len(lanes) > 2, "has too many streams", "1 or 2", len(lanes), "Join some"),
        (forwards > 1, "has forwards on both streams", "one that has all F", "two", "Move the F to one"),
        (sum(map(len, weights)) > len(set().union(*weights)), "has W of one stage on both streams",
         "one for each stage: gradients of micro-batches are added in a fixed order", "two", "Move the W to one"),
    ):  # fmt: skip
        if wrong:
            raise OptionError(f"The schedule {what}", expected=str(expected), got=str(found), remedy=remedy)
    validate(schedule)
    if len(lanes) > 1 and stages.scans:
        raise OptionError("A scan computes all input gradients at once: nothing runs beside it",
                          expected="backward='bp', or a schedule of one stream", got=f"{len(lanes)} streams",
                          remedy="Call model.set_backward('bp')")  # fmt: skip
    if (len(lanes) > 1 or graph.first == "I") and stages.shared():
        raise OptionError("Parameters that several stages share need the gradients of all of them",
                          expected="a schedule of one stream that begins with F or U", got=", ".join(stages.shared()),
                          remedy="Use schedule='conventional'")  # fmt: skip


def fewer(schedule: Schedule, count: int) -> Schedule:
    """Return `schedule` for the first `count` of its micro-batches."""
    graph = replace(schedule.graph, microbatches=count)
    lanes = tuple(
        replace(lane, cells=tuple(part for part in _parts(lane.cells) if (part.microbatch or 0) < count))
        for lane in schedule.lanes
    )
    return replace(schedule, graph=graph, lanes=tuple(lane for lane in lanes if lane.cells))


def compile_program(schedule: Schedule, stages: Stages, actions: Actions) -> Program:
    """Turn a schedule that `check_fits` into a program.

    A step begins with the forwards. What the schedule has before them, if its step begins with the backward, comes
    behind them; what it has among them belongs to the step before.
    """
    return _Compiler(schedule, stages, actions).program()


class _Entry(NamedTuple):
    """An action, and whether a step does it for the step before."""

    action: Action
    old: bool


class _Compiler:
    def __init__(self, schedule: Schedule, stages: Stages, actions: Actions) -> None:
        self.schedule, self.stages, self.actions = schedule, stages, actions
        self.events: dict[Action, int] = {}

    def program(self) -> Program:
        first = self.schedule.graph.first
        lanes = [self._turn(_parts(lane.cells), first) for lane in self.schedule.lanes if lane.cells]
        lanes.sort(key=lambda lane: not any(entry.action.kind == "F" for entry in lane))
        # In the order in which a step's own actions run: what is left over for the next step comes last.
        updates = sorted((e for lane in lanes for e in lane if e.action.kind == "U"), key=lambda e: e.old)
        # The gradient of a shared parameter is complete after the last of its stages, and the first one needs it.
        self.names = self.stages.updated_at([e.action.stage for e in updates], last=first != "U")
        self.home = {entry.action: number for number, lane in enumerate(lanes) for entry in lane}
        gathered = len(lanes) == 1 and _gathers(lanes[0])
        planned = [self._one_stream(lanes[0], gathered)] if len(lanes) == 1 else list(map(self._beside, lanes))
        late = first == "I"
        lasting = late or any(entry.old for lane in lanes for entry in lane)
        tasks = tuple(
            tuple(replace(task, signal=self.events.get(action)) if action else task for task, action in lane)
            for lane in planned
        )
        return Program(tasks, len(self.events), lasting, late, gathered)

    def _turn(self, parts: list[Action], first: str) -> list[_Entry]:
        """Return the actions of a stream in the order of a step."""
        parts = [part for part in parts if self._computed(part)]
        if first != "I" or all(part.kind != "F" for part in parts):
            return [_Entry(part, first == "U" and part.kind == "U") for part in parts]
        begin = next(i for i, part in enumerate(parts) if part.kind == "F")
        opening = [_Entry(part, part.kind != "F") for part in parts[begin:]]
        return opening + [_Entry(part, False) for part in parts[:begin]]

    def _computed(self, part: Action) -> bool:
        return part.kind != "I" or part.stage > self.stages.first

    def _one_stream(self, lane: list[_Entry], gathered: bool) -> list[tuple[Task, Action | None]]:
        """Return the tasks of the only stream: scans in place of I, updates side by side in one."""
        out: list[tuple[Task, Action | None]] = []
        scanned: set[int | None] = set()
        ended = max(lane, key=lambda entry: (entry.action.kind == "W", entry.old, lane.index(entry)))
        for (update, old), group in groupby(lane, lambda entry: (entry.action.kind == "U", entry.old)):
            entries = list(group)
            if update:
                names = [name for entry in entries for name in self.names.get(entry.action.stage, ())]
                if names:  # none where a shared parameter has its update elsewhere
                    out.append((Task(self.actions.update(names, gathered=gathered), old, updates=True), None))
                continue
            for entry in entries:
                if entry.action.kind == "I" and self.stages.scans:
                    if entry.action.microbatch not in scanned:
                        scanned.add(entry.action.microbatch)
                        out.append((Task(self.actions.scan(entry.action.microbatch or 0), old), None))
                    continue
                out.append((Task(self._run(entry.action), old), None))
                if entry is ended and gathered:
                    out.append((Task(self.actions.gather, old), None))
        return out

    def _beside(self, lane: list[_Entry]) -> list[tuple[Task, Action | None]]:
        """Return the tasks of one of two streams."""
        out: list[tuple[Task, Action | None]] = []
        for entry in lane:
            graph = self.schedule.graph
            needs = [
                need for need in graph.predecessors(entry.action) if self.home.get(need, 0) != self.home[entry.action]
            ]
            # A forward waits for an update of the step before, everything else for its own step.
            before = entry.action.kind == "F"
            waits = tuple(
                (self.events.setdefault(need, len(self.events)), before) for need in needs if need in self.home
            )
            task = Task(self._run(entry.action), entry.old, waits, updates=entry.action.kind == "U")
            out.append((task, entry.action))
        return out

    def _run(self, part: Action) -> Run:
        number, m = part.stage, part.microbatch or 0
        if part.kind == "F":
            return self.actions.forward(number, m, self.schedule.graph.microbatches)
        if part.kind == "U":
            return self.actions.update(self.names[number], gathered=False)
        return (self.actions.input_grad if part.kind == "I" else self.actions.weight_grad)(number, m)


def _gathers(lane: list[_Entry]) -> bool:
    """Whether a step has all its gradients before its first update."""
    kinds = [e.action.kind for e in sorted(lane, key=lambda e: e.old) if e.action.kind in "WU"]
    return "W" not in kinds[kinds.index("U") :]


def _parts(cells: Iterable[object]) -> list[Action]:
    return [part for cell in cells for action in actions_of(cell) for part in parts_of(action)]  # type: ignore[arg-type]
