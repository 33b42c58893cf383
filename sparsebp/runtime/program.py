"""Compiling a schedule for an executor: one list of functions per stream, and which task waits for which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias

from sparsebp.core.errors import OptionError
from sparsebp.runtime.actions import Actions, Run, Stages, Step
from sparsebp.schedule import Action, Cell, Lane, Schedule, StepGraph, parts_of, validate


@dataclass(frozen=True)
class Task:
    """One action, or several updates in one."""

    run: Run
    action: Action | None = None  # of several actions the first; None for the check of all gradients
    old: bool = False  # whether it finishes the step before: an update, or a gradient, left for the next forward
    # Actions of another stream to wait for: `(number of the event, whether it is of the step before)`.
    waits: tuple[tuple[int, bool], ...] = ()
    signal: int | None = None  # the event that others wait for, or None
    names: tuple[str, ...] = ()  # the parameters that an update takes
    # Bytes of its gradients if it may be joined with its neighbours in one call; None: it runs by itself. Two streams
    # wait for each other at every call, which matters for small tasks.
    joins: int | None = None

    @property
    def updates(self) -> bool:
        """Whether it is an update."""
        return self.action is not None and self.action.kind == "U"


Together: TypeAlias = Callable[[Step, Sequence[Task]], bool]


@dataclass(frozen=True)
class Program:
    """The tasks of a step."""

    streams: tuple[tuple[Task, ...], ...]  # the first has the forwards
    events: int  # their number
    lasting: bool  # whether something is left over for the next step
    late: bool  # whether that includes gradients, not only updates
    # Whether all gradients are complete before the first of them is used. On one stream, a task checks them; on two,
    # the executor does after the step.
    gathered: bool
    # weigh, use: Run several W, or several U, that have `Task.joins`; `weigh` returns whether it could.
    weigh: Together
    use: Together


def check_fits(schedule: Schedule, stages: Stages, plain: str = "conventional") -> None:
    """Refuse a schedule that does not fit this model on one device; `plain` names one that any model can run."""
    graph = schedule.graph
    lanes = [parts_in(lane) for lane in schedule.lanes if lane.cells]
    weights = [{part.stage for part in lane if part.kind == "W"} for lane in lanes]
    forwards = sum(any(part.kind == "F" for part in lane) for lane in lanes)
    check_of_model(
        schedule, stages,
        (schedule.workers > 1, "is of several workers", "1, this device", schedule.workers,
         "Build it for one worker, or give the trainer a transport= between as many ranks"),
        (graph.updates != "step", "does not update once a step", "updates='step'", graph.updates, "Place the U"),
        (graph.synchronised, "synchronises gradients of one device", "no S", "S", "Leave the S out"),
        (len(lanes) > 2, "has too many streams", "1 or 2", len(lanes), "Join some"),
        (forwards > 1, "has forwards on both streams", "one that has all F", "two", "Move the F to one"),
        (sum(map(len, weights)) > len(set().union(*weights)), "has W of one stage on both streams",
         "one for each stage: gradients of micro-batches are added in a fixed order", "two", "Move the W to one"),
    )  # fmt: skip
    validate(schedule)
    if len(lanes) > 1 and stages.scans:
        raise OptionError("A scan computes all input gradients at once: nothing can overlap it",
                          expected="backward='bp', or a schedule of one stream", got=f"{len(lanes)} streams",
                          remedy="Call model.set_backward('bp')")  # fmt: skip
    if (len(lanes) > 1 or graph.first == "I") and stages.shared():
        raise OptionError("Parameters that several stages share need the gradients of all of them",
                          expected="a schedule of one stream that begins with F or U", got=", ".join(stages.shared()),
                          remedy=f"Use schedule={plain!r}")  # fmt: skip


def check_of_model(schedule: Schedule, stages: Stages, *rows: tuple[bool, str, object, object, str]) -> None:
    """Refuse a schedule that does not fit this model, or that is wrong by one of `rows`."""
    # Each row: whether it is wrong, what the schedule does, what was expected, what came, and a remedy.
    graph = schedule.graph
    wanted = {"stages": len(stages), "unweighted": sorted(stages.unweighted)}
    got = {"stages": graph.stages, "unweighted": sorted(graph.unweighted)}
    for wrong, what, expected, found, remedy in (
        (
            wanted != got,
            "is not of this model",
            wanted,
            got,
            "Build it for model.stages(); unweighted= are the stages without parameters",
        ),
        *rows,
        (bool(schedule.recomputed), "recomputes stages", "none", sorted(schedule.recomputed), "Keep the activations"),
    ):
        if wrong:
            raise OptionError(f"The schedule {what}", expected=str(expected), got=str(found), remedy=remedy)


def fewer(schedule: Schedule, count: int) -> Schedule:
    """Return `schedule` for the first `count` of its micro-batches."""
    graph = replace(schedule.graph, microbatches=count)
    return _part_of(schedule, graph, lambda part: (part.microbatch or 0) < count)


def without_frozen(schedule: Schedule, stages: Stages) -> Schedule:
    """Return `schedule` without W, S and U of the stages whose parameters are not trained, if it has any."""
    idle = stages.frozen - schedule.graph.unweighted
    if not idle:
        return schedule
    graph = replace(schedule.graph, unweighted=schedule.graph.unweighted | idle)
    return _part_of(schedule, graph, lambda part: part.kind not in "WSU" or part.stage not in idle)


def _part_of(schedule: Schedule, graph: StepGraph, keeps: Callable[[Action], bool]) -> Schedule:
    def left(cell: Cell) -> Iterable[Cell]:
        parts = [part for part in parts_of(cell) if keeps(part)]
        return [cell] if len(parts) == len(parts_of(cell)) else parts

    lanes = (
        replace(lane, cells=tuple(chain.from_iterable(left(cell) for cell in lane.cells))) for lane in schedule.lanes
    )
    return replace(schedule, graph=graph, lanes=tuple(lane for lane in lanes if lane.cells))


def compile_program(schedule: Schedule, stages: Stages, actions: Actions) -> Program:
    """Compile a schedule that `check_fits` has passed."""
    # A step begins with the forwards. If the schedule begins with the backward, actions before the forwards come after
    # them, and actions among the forwards belong to the step before.
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
        lanes = [self._turn(parts_in(lane), first) for lane in self.schedule.lanes if lane.cells]
        lanes.sort(key=lambda lane: not any(entry.action.kind == "F" for entry in lane))
        updates = _in_time([entry for lane in lanes for entry in lane if entry.action.kind == "U"])
        # The gradient of a shared parameter is complete after the last of its stages, and the first one needs it.
        self.names = self.stages.updated_at([e.action.stage for e in updates], last=first != "U")
        self.stream_of = {entry.action: number for number, lane in enumerate(lanes) for entry in lane}
        self.gathered = first == "U" or (len(lanes) == 1 and _gathers(lanes[0]))
        planned = [self._beside(lane) if len(lanes) > 1 else self._alone(lane) for lane in lanes]
        late = first == "I"
        lasting = late or any(entry.old for lane in lanes for entry in lane)
        streams = tuple(
            tuple(replace(task, signal=self.events.get(task.action)) if task.action else task for task in stream)
            for stream in planned
        )
        return Program(streams, len(self.events), lasting, late, self.gathered, self._weigh, self._use)

    def _weigh(self, step: Step, tasks: Sequence[Task]) -> bool:
        return self.actions.weight_grads(step, [task.action.stage for task in tasks if task.action is not None])

    def _use(self, step: Step, tasks: Sequence[Task]) -> bool:
        self.actions.use(step, [name for task in tasks for name in task.names], gathered=self.gathered)
        return True

    def _turn(self, parts: list[Action], first: str) -> list[_Entry]:
        """Return the actions of a stream in the order of a step."""
        parts = [part for part in parts if part.kind != "I" or part.stage > self.stages.first]
        if first != "I" or all(part.kind != "F" for part in parts):
            return [_Entry(part, first == "U" and part.kind == "U") for part in parts]
        begin = next(i for i, part in enumerate(parts) if part.kind == "F")
        opening = [_Entry(part, part.kind != "F") for part in parts[begin:]]
        return opening + [_Entry(part, False) for part in parts[:begin]]

    def _alone(self, lane: list[_Entry]) -> list[Task]:
        """Return the tasks of a single stream: scans in place of I, neighbouring updates in one."""
        out: list[Task] = []
        scans = {e.action.microbatch: e for e in reversed(_in_time(lane)) if e.action.kind == "I"}
        ended = [entry for entry in _in_time(lane) if entry.action.kind == "W"][-1]
        lane, joined = self._joined(lane)
        for (update, old), group in groupby(lane, lambda entry: (entry.action.kind == "U", entry.old)):
            entries = list(group)
            if update:
                names = [name for entry in entries for name in self.names.get(entry.action.stage, ())]
                if names:  # none where a shared parameter has its update elsewhere
                    out.append(Task(self.actions.update(names, gathered=self.gathered), entries[0].action, old))
                continue
            for entry in entries:
                if entry.action.kind == "I" and self.stages.scans:
                    if scans[entry.action.microbatch] is entry:
                        out.append(Task(self.actions.scan(entry.action.microbatch or 0), entry.action, old))
                    continue
                run = self._run(entry.action)
                if entry.action in joined:
                    m, names = entry.action.microbatch or 0, self.names[entry.action.stage]
                    run = self.actions.weight_grad_and_update(entry.action.stage, m, names)
                out.append(Task(run, entry.action, old))
                if entry is ended and self.gathered:
                    out.append(Task(self.actions.gather, None, old))
        return out

    def _joined(self, lane: list[_Entry]) -> tuple[list[_Entry], set[Action]]:
        """Find every W whose U comes next, or after its own I, which then goes first; drop those U."""
        # Only with one micro-batch, and without shared parameters.
        out, joined = list(lane), set[Action]()
        if self.gathered or self.schedule.graph.microbatches > 1 or self.stages.shared():
            return out, joined
        place = {entry.action: number for number, entry in enumerate(lane) if not entry.old}
        for update in [entry for entry in lane if entry.action.kind == "U" and not entry.old]:
            weight = Action(update.action.stage, "W", 0)
            between = lane[place.get(weight, 0) + 1 : place[update.action]]
            if weight in place and all(entry.action == Action(weight.stage, "I", 0) for entry in between):
                at = out.index(lane[place[weight]])
                out[at : at + len(between) + 2] = [*between, lane[place[weight]]]
                joined.add(weight)
        return out, joined

    def _beside(self, lane: list[_Entry]) -> list[Task]:
        """Return the tasks of one of two streams."""
        out: list[Task] = []
        for entry in lane:
            needs = [need for need in self._needs(entry.action) if need in self.stream_of]
            beside = [need for need in needs if self.stream_of[need] != self.stream_of[entry.action]]
            # A forward waits for an update of the step before, everything else for its own step.
            before = entry.action.kind == "F"
            waits = tuple((self.events.setdefault(need, len(self.events)), before) for need in beside)
            names = tuple(self.names[entry.action.stage]) if entry.action.kind == "U" else ()
            task = Task(self._run(entry.action), entry.action, entry.old, waits, names=names)
            out.append(replace(task, joins=self._joins(entry)))
        return out

    def _joins(self, entry: _Entry) -> int | None:
        """Return the task's `joins`: 0 for updates, all bytes for a weight gradient of one product per parameter."""
        stage = entry.action.stage
        if entry.old or self.schedule.graph.microbatches > 1 or not self.actions.are_products(stage):
            return None
        if entry.action.kind == "U":
            return None if self.gathered else 0
        parameters = self.stages[stage].layer.parameters().values()
        return sum(array.nbytes for array in parameters) if entry.action.kind == "W" else None

    def _needs(self, part: Action) -> Iterator[Action]:
        """Yield the needs of an action; of the last stage's gradients, if a step ends with the loss, its forward."""
        graph = self.schedule.graph
        yield from graph.predecessors(part)
        if graph.first == "I" and part.kind in "IW" and part.stage == graph.stages - 1:
            yield Action(part.stage, "F", part.microbatch)

    def _run(self, part: Action) -> Run:
        number, m = part.stage, part.microbatch or 0
        if part.kind == "F":
            return self.actions.forward(number, m, self.schedule.graph.microbatches)
        if part.kind == "U":
            return self.actions.update(self.names[number], gathered=self.gathered)
        return (self.actions.input_grad if part.kind == "I" else self.actions.weight_grad)(number, m)


def _in_time(lane: list[_Entry]) -> list[_Entry]:
    """Return a stream in the order of a batch's own actions: leftovers come last."""
    return sorted(lane, key=lambda entry: entry.old)


def _gathers(lane: list[_Entry]) -> bool:
    """Whether a step has all its gradients before its first update."""
    kinds = [entry.action.kind for entry in _in_time(lane) if entry.action.kind in "WU"]
    return "W" not in kinds[kinds.index("U") :]


def parts_in(lane: Lane) -> list[Action]:
    """Return the actions of a lane, a B and an overlap as their parts."""
    return [part for cell in lane.cells for part in parts_of(cell)]
