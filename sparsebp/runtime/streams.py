"""A schedule on one device: its tasks, on one stream or two, and captured into a CUDA graph."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp.core import backend, graphs, threads
from sparsebp.core.errors import OptionError, SparseBPError, StaleError
from sparsebp.core.graphs import GraphRecorder
from sparsebp.core.shortcuts import shortcuts_of
from sparsebp.runtime.actions import Actions, Batch, DeferredMetrics, Stages, Step, StepFunction
from sparsebp.schedule import Action, Cell, Lane, Schedule, StepGraph, parts_of, validate

# Compiling a schedule: one list of functions per stream, and which task waits for which.


@dataclass(frozen=True)
class Task:
    """One action, or several updates in one."""

    run: StepFunction
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


JoinedTasks: TypeAlias = Callable[[Step, Sequence[Task]], bool]


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
    # weight_grads, updates: Run several W, or several U, that have `Task.joins`; the first returns whether it could.
    weight_grads: JoinedTasks
    updates: JoinedTasks


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
        (
            bool(schedule.recomputed) and (graph.updates == "microbatch" or stages.scans),
            "recomputes stages",
            "one update a step, and backward='bp'",
            f"updates={graph.updates!r}" + ", and a scan" * stages.scans,
            "Keep the activations",
        ),
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
        planned = [self._two_stream_tasks(lane) if len(lanes) > 1 else self._one_stream_tasks(lane) for lane in lanes]
        late = first == "I"
        lasting = late or any(entry.old for lane in lanes for entry in lane)
        streams = tuple(
            tuple(replace(task, signal=self.events.get(task.action)) if task.action else task for task in stream)
            for stream in planned
        )
        return Program(streams, len(self.events), lasting, late, self.gathered, self._weight_grads, self._updates)

    def _weight_grads(self, step: Step, tasks: Sequence[Task]) -> bool:
        return self.actions.weight_grads(step, [task.action.stage for task in tasks if task.action is not None])

    def _updates(self, step: Step, tasks: Sequence[Task]) -> bool:
        self.actions.apply_update(step, [name for task in tasks for name in task.names], gathered=self.gathered)
        return True

    def _turn(self, parts: list[Action], first: str) -> list[_Entry]:
        """Return the actions of a stream in the order of a step."""
        parts = [part for part in parts if part.kind != "I" or part.stage > self.stages.first]
        if first != "I" or all(part.kind != "F" for part in parts):
            return [_Entry(part, first == "U" and part.kind == "U") for part in parts]
        begin = next(i for i, part in enumerate(parts) if part.kind == "F")
        opening = [_Entry(part, part.kind != "F") for part in parts[begin:]]
        return opening + [_Entry(part, False) for part in parts[:begin]]

    def _one_stream_tasks(self, lane: list[_Entry]) -> list[Task]:
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

    def _two_stream_tasks(self, lane: list[_Entry]) -> list[Task]:
        """Return the tasks of one of two streams."""
        out: list[Task] = []
        for entry in lane:
            needs = [need for need in self._needs(entry.action) if need in self.stream_of]
            elsewhere = [need for need in needs if self.stream_of[need] != self.stream_of[entry.action]]
            # A forward waits for an update of the step before, everything else for its own step.
            before = entry.action.kind == "F"
            waits = tuple((self.events.setdefault(need, len(self.events)), before) for need in elsewhere)
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

    def _run(self, part: Action) -> StepFunction:
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


# Two streams are two threads: each runs its tasks in order, and waits for the other's. On a CPU, kernels and matrix
# products release the GIL, so both streams compute at the same time. Each thread computes on one core: one BLAS thread,
# and kernels without helpers, which would take the other's. On a GPU each thread gives its work to a device stream, the
# first one of the higher priority (Oh et al., EuroSys 2022, §4.1), and the streams wait for events as the threads do.

SHORTEST_POLL, LONGEST_POLL = 2e-5, 2e-4
"""Seconds between two checks whether the other stream is done with something."""


MOST_JOINED_BYTES, MOST_JOINED_TASKS = 1 << 21, 64
"""Gradients that are computed in one call, with their updates: of the size of a core's L2; and tasks."""


class _Aborted(Exception):
    """The other stream has failed."""


class TwoStreams:
    """Runs programs of two streams: the first on the calling thread, the second on another one."""

    def __init__(self, xp: ModuleType = np) -> None:
        self._xp = xp
        self._streams = graphs.streams(xp, 2)
        self._device = backend.device_number(xp)  # of the streams
        self._jobs: queue.SimpleQueue[tuple[Program, Step, Step | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._alone = contextlib.ExitStack()
        self._inside = False
        self._error: BaseException | None = None

    def run(self, program: Program, step: Step, before: Step | None) -> None:
        """Run a step; of a `late` program, the second stream may still work on it until `finish`."""
        self._check_thread(before)
        self._start()
        step.events = [False] * (program.events + 1)  # the last one: the second stream is done
        step.marks = [None] * len(step.events)
        if not backend.is_host(self._xp):
            step.held = []
        self._jobs.put((program, step, before))
        try:
            with self._streams[0]:
                self._run(program, program.streams[0], step, before)
                if not program.late:
                    self._wait(step, -1, step)
                    step.held = None
                elif before is not None:
                    before.held = None  # all of its updates have been waited for
            if not program.late:
                self._leave()
        except BaseException as error:
            raise self._abort(step, error, before) from None

    def finish(self, program: Program, step: Step) -> None:
        """Compute the gradients that a step has left over on either stream."""
        self._check_thread(step)
        try:
            with self._streams[0]:
                left = [task for task in program.streams[0] if task.old and not task.updates]
                self._run(program, left, step, step)
                self._wait(step, -1, step)
                step.held = None
            self._leave()
        except BaseException as error:
            raise self._abort(step, error) from None

    def stop(self, left: Step | None = None) -> None:
        """End the second thread, dropping what the first one has left of the step `left`."""
        if left is not None:
            _release(left)
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._leave()

    def _check_thread(self, step: Step | None) -> None:
        """Refuse to wait for a second thread that a fork has left behind in the parent."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread, self._jobs = None, queue.SimpleQueue()
        if step is not None and not step.events[-1]:
            raise StaleError("The process has forked while the second stream was at work on a step",
                             expected="the parent's thread", got="a child process without it",
                             remedy="Fork before the first step, or behind finish()")  # fmt: skip

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(weakref.ref(self), self._jobs, backend.on_device(self._xp, self._device)),
                name="sparsebp second stream", daemon=True,
            )  # fmt: skip
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        if not self._inside and backend.is_host(self._xp):
            self._alone.enter_context(threads.one_blas_thread())
            self._alone.enter_context(threads.serial_kernels())
            self._inside = True

    def _leave(self) -> None:
        """Let kernels and products of the calling thread use all threads again."""
        self._alone.close()
        self._inside = False

    def second(self, program: Program, step: Step, before: Step | None) -> None:
        """Run the second stream's part of a step; errors are kept for the first stream."""
        try:
            with self._streams[1]:
                self._run(program, program.streams[1], step, before)
                step.marks[-1] = graphs.record(self._xp)
        except _Aborted:
            pass
        except BaseException as error:
            self._error = self._error or error
            _release(step)
        step.events[-1] = True

    def _run(self, program: Program, tasks: Sequence[Task], step: Step, before: Step | None) -> None:
        at = 0
        while at < len(tasks):
            task, count = tasks[at], 1
            if task.joins is not None and backend.is_host(self._xp):
                count = self._able(tasks, at, step)
            if count > 1 and not step.aborted:
                self._run_jointly(program, tasks[at : at + count], step)
            elif not task.old:
                count = 1
                self._do(task, step, before, step)
            elif before is not None:
                self._do(task, before, before, step)
            at += count

    def _able(self, tasks: Sequence[Task], at: int, step: Step) -> int:
        """Return how many tasks from `at` on can run in one call by now; 1 if it is not several weight gradients."""
        weights = made = count = 0
        for task in islice(tasks, at, at + MOST_JOINED_TASKS):
            if task.joins is None or not all(step.events[event] for event, _ in task.waits):
                break
            made += task.joins
            if weights and made > MOST_JOINED_BYTES:
                break
            count += 1
            weights += not task.updates
        return count if weights > 1 else 1

    def _run_jointly(self, program: Program, tasks: Sequence[Task], step: Step) -> None:
        """Do tasks that can all run by now: weight gradients first, which no update of another stage changes."""
        updates = [task for task in tasks if task.updates]
        if not program.weight_grads(step, [task for task in tasks if not task.updates]):
            for task in tasks:
                task.run(step)
        elif updates:
            program.updates(step, updates)
        for task in tasks:
            if task.signal is not None:
                step.events[task.signal] = True

    def _do(self, task: Task, step: Step, before: Step | None, current: Step) -> None:
        """Do a task of `step`, which is `current` or the one before; the other stream says by `current` if it fails."""
        for event, of_before in task.waits:
            if not of_before:
                self._wait(step, event, current)
            elif before is not None:
                self._wait(before, event, current)
        if step.aborted or current.aborted:
            raise _Aborted
        task.run(step)
        if task.signal is not None:
            step.marks[task.signal] = graphs.record(self._xp)
            step.events[task.signal] = True

    def _wait(self, step: Step, event: int, current: Step) -> None:
        _await(step, event, current)
        if step.aborted or current.aborted:
            raise _Aborted
        graphs.wait(self._xp, step.marks[event])

    def _abort(self, step: Step, error: BaseException, before: Step | None = None) -> BaseException:
        """Let the second stream end `step`; return what to raise."""
        # The second stream may still be at work on the step before, and wait for the first one: `finish` goes on with
        # that, and `step` ends after it.
        _release(step)
        if before is None or before.aborted or before.events[-1]:
            _await(step, -1)
            self._leave()
        first, self._error = self._error, None
        return error if first is None or not isinstance(error, _Aborted) else first


def _work(
    streams: weakref.ref[TwoStreams], jobs: queue.SimpleQueue[Any], device: contextlib.AbstractContextManager[Any]
) -> None:
    """The second thread. While it waits, it does not keep its `TwoStreams` alive, and it ends when that is deleted."""
    with device, threads.serial_kernels(), np.errstate(over="ignore", invalid="ignore"):
        while (job := jobs.get()) is not None and (alive := streams()) is not None:
            alive.second(*job)
            del job, alive


def _release(step: Step) -> None:
    """Wake threads that wait for `step`; they find it aborted."""
    step.aborted = True
    step.events[:-1] = [True] * (len(step.events) - 1)


def _await(step: Step, event: int, current: Step | None = None) -> None:
    """Wait until something is done, or `current` is given up, by polling at growing intervals."""
    # Waking a sleeping thread takes a system call and, on a virtual machine, an interrupt of another core: some 100 us
    # several times a small action, spent by the thread that goes on. Here that thread only sets a flag.
    pause = SHORTEST_POLL
    while not step.events[event] and not (current is not None and event != -1 and current.aborted):
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL)


# Steps captured into CUDA graphs and replayed: the host gives the device one graph in place of every kernel. Launches
# cost the host more than small kernels cost the device, so nets of many small layers would wait for Python (Oh et al.,
# EuroSys 2022, §4.2).

UNCAPTURED_STEPS = 1
"""Steps of one shape, in a row, that run uncaptured; so does a last, smaller batch of an epoch."""
MOST_GRAPHS = 8
"""Shapes that are captured: each graph holds a step's memory."""
_NUMBERS = (bool, int, float, str, np.generic)
"""Types of a layer's attributes that are compared by value; tuples are compared by identity."""
LENGTHS = "batches with lengths or a carried state: the host looks at them"


@dataclass
class _Recorded:
    """A shape of batches: its recorder, and the arrays that its graph reads and writes."""

    recorder: GraphRecorder
    model: list[Any]
    inputs: list[Batch]
    step: Step | None = None


class Graphs:
    """The captured steps of an executor, one for each shape of batches."""

    # The first step of a shape, or the first ones if another shape comes between, runs uncaptured; the next one on the
    # captured streams, to compile kernels and set up libraries; then the step is captured, and replayed from there on.
    # A captured step leaves nothing over for the next one.
    # obstacles: Why steps cannot be captured, each with its layer; empty if they can.

    def __init__(self, actions: Actions) -> None:
        self._actions, self._stages = actions, actions.stages
        self._xp = backend.namespace(next(iter(actions.stages.model.parameters().values())))
        self._recorded: dict[Any, _Recorded] = {}
        self._last: tuple[Any, int] = (None, 0)
        self._at = ""
        self._had_lengths = False
        self._changes = 0  # of the model, since a step was captured
        self.obstacles = tuple(self._obstacles())

    @property
    def uncaptured(self) -> tuple[str, ...]:
        """The obstacles, and why some batches so far were not captured."""
        return (*self.obstacles, LENGTHS) if self._had_lengths else self.obstacles

    def _obstacles(self) -> Iterator[str]:
        model = self._stages.model
        if backend.is_host(self._xp):
            yield "the model is on the host"
        for name, layer in model.modules() if hasattr(model, "modules") else [("", model)]:
            ask = getattr(layer, "capture_obstacle", None)
            # A layer of layers may override what it inherits these answers with.
            inherited = (each for each in ("replayable", "capture_obstacle") if getattr(layer, "children", None))
            if ask is None or not all(each in shortcuts_of(layer) for each in inherited):
                why: str | None = "does not say whether it can be captured"
            else:
                why = ask()
            if why is not None:
                yield f"{name or 'the model'} ({type(layer).__name__}) {why}"
        if self._stages.scans:
            yield "a scan in place of back-propagation is planned on the host"
        if not hasattr(self._actions.loss, "on_device"):
            yield f"{type(self._actions.loss).__name__} has no on_device, so the host reads the loss as it goes"
        if not hasattr(self._actions.optimizer, "begin_on_device"):
            yield f"{type(self._actions.optimizer).__name__} has no begin_on_device, so its numbers come from the host"

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Whether the next step, of these batches, is for `step`; it must be asked for every step."""
        if any(len(batch) > 2 for batch in batches):
            self._had_lengths = True
            return False
        if self.obstacles:
            return False
        key = _shapes(batches)
        before, count = self._last
        self._last = key, count + 1 if key == before else 1
        return key in self._recorded or (self._last[1] > UNCAPTURED_STEPS and len(self._recorded) < MOST_GRAPHS)

    def step(self, program: Program, batches: Sequence[Batch], tag: Any) -> Step | None:
        """Run a step on the captured streams, or replay it; None, with a warning, if it cannot be captured."""
        key, model = _shapes(batches), self._state()
        found = self._recorded.get(key)
        try:
            if found is None or not _same(found.model, model):
                self.obstacles = tuple(self._obstacles())  # a layer's numbers and mode may have changed since
                if self.obstacles:
                    self._recorded.clear()
                    return None
                self._changes += found is not None
                if self._changes > MOST_GRAPHS:
                    self._recorded.clear()
                    self.obstacles = ("the model's arrays, or numbers of its layers, change from step to step",)
                    return None
                recorder = GraphRecorder(self._xp, len(program.streams))
                found = self._recorded[key] = _Recorded(recorder, model, [(x.copy(), t.copy()) for x, t in batches])
            elif found.step is None:
                self._capture(program, found)
                self._changes = 0
        except (SparseBPError, RuntimeError, MemoryError) as error:  # CuPy's and CUDA's are RuntimeErrors
            self._give_up(error)
            return None
        step, recorded = self._new(batches, tag), found.step
        if recorded is not None:
            for (x, t), (new_x, new_t) in zip(found.inputs, batches, strict=True):
                x[...], t[...] = new_x, new_t
            recorded.update.write()
            found.recorder.replay()
            step.later, step.packed, step.predictions = recorded.later, recorded.packed, recorded.predictions
            step.shares, step.counted, step.sums = recorded.shares, recorded.counted, recorded.sums
            step.targets = [
                target if valid is None else valid.rows("target", target)
                for target, valid in zip(step.targets, recorded.valid, strict=True)
            ]
            return step
        step.update = self._actions.optimizer.begin_on_device()
        step.update.write()
        try:
            with found.recorder.running():
                self._run(program, step, found.recorder)
        except BaseException:
            step.update.take_back()
            raise
        return step

    def forget(self) -> None:
        """Give up all graphs, and the memory that they hold."""
        self._recorded.clear()

    def _new(self, batches: Sequence[Batch], tag: Any) -> Step:
        step = Step(batches, self._stages, tag)
        step.later = DeferredMetrics()
        return step

    def _capture(self, program: Program, found: _Recorded) -> None:
        step = self._new(found.inputs, None)
        step.update = self._actions.optimizer.begin_on_device()
        with found.recorder.capturing():
            self._run(program, step, found.recorder)
        found.step = step

    def _give_up(self, error: Exception) -> None:
        where = f" at {self._at}" if self._at else ""
        why = f"{type(error).__name__}{where}: {error}"
        self.obstacles = (why,)
        self._recorded.clear()
        warnings.warn(f"Steps are not captured into a CUDA graph: {why}", RuntimeWarning, stacklevel=2)

    # ---- one step, from one thread -----------------------------------------------------------------------------------

    def _run(self, program: Program, step: Step, recorder: GraphRecorder) -> None:
        """Run all of a step, its leftovers included, and pack its numbers."""
        xp, streams = self._xp, recorder.streams
        step.marks = [None] * program.events
        step.held = [] if len(streams) > 1 else None
        self._join(streams[:1], streams[1:])
        for number, task in in_turn(program):
            self._at = "" if task.action is None else f"stage {self._stages[task.action.stage].name or 0!r}"
            with streams[number]:
                for event, before in task.waits:
                    if not before:
                        graphs.wait(xp, step.marks[event])
                task.run(step)
                if task.signal is not None:
                    step.marks[task.signal] = graphs.record(xp)
        self._at = "the update"
        self._join(streams[1:], streams[:1])
        with streams[0]:
            if program.gathered and len(streams) > 1:
                self._actions.gather(step)
            self._actions.finish(step, gathered=program.gathered)
            step.packed = step.later.packed(xp)  # type: ignore[union-attr]
        step.held = None
        self._at = ""

    def _join(self, ended: Sequence[Any], begun: Sequence[Any]) -> None:
        for stream in ended:
            with stream:
                mark = graphs.record(self._xp)
            for other in begun:
                with other:
                    graphs.wait(self._xp, mark)

    def _state(self) -> list[Any]:
        """Return everything that a graph depends on: the model's arrays, and the numbers and flags of its layers."""
        model = self._stages.model
        if not hasattr(model, "modules"):
            return list(model.parameters().values())
        found: list[Any] = []
        for _, layer in model.modules():
            found += layer.params.values()
            found += layer.buffers.values()
            found += [value for value in vars(layer).values() if isinstance(value, _NUMBERS) or type(value) is tuple]
        return found


def in_turn(program: Program) -> Iterator[tuple[int, Task]]:
    """Yield a step's tasks with the number of their stream, each after those that it waits for."""
    # Leftovers for the next step come at their stream's end, except updates.
    streams = [
        deque([*(t for t in stream if not t.old), *(t for t in stream if t.old and not t.updates)])
        for stream in program.streams
    ]
    done: set[int] = set()
    while any(streams):
        for number, stream in enumerate(streams):
            while stream and all(before or event in done for event, before in stream[0].waits):
                task = stream.popleft()
                yield number, task
                if task.signal is not None:
                    done.add(task.signal)


def _shapes(batches: Sequence[Batch]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, t.shape, t.dtype) for x, t in batches)


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether arrays are identical, and numbers equal."""
    return len(one) == len(other) and all(
        a is b or (isinstance(a, _NUMBERS) and type(a) is type(b) and a == b) for a, b in zip(one, other, strict=True)
    )
