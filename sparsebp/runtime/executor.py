"""Runs the training steps of a model on one device, in the order of a schedule: a given one, or the fastest found."""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsebp.core import backend, threads
from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.core.graphs import Reading
from sparsebp.core.locks import cached_property
from sparsebp.runtime.actions import (
    Actions,
    Batch,
    DeferredMetrics,
    Run,
    Stages,
    Step,
    Watch,
    check_complete,
    check_even,
    is_ours,
    trained_parameters,
)
from sparsebp.runtime.streams import (
    Graphs,
    Program,
    Task,
    Together,
    TwoStreams,
    check_fits,
    compile_program,
    fewer,
    without_frozen,
)
from sparsebp.schedule import Action, Costs, Schedule, StageBytes, StepGraph, simulate, write_costs, write_csv
from sparsebp.schedule.builders import conventional, out_of_order, two_stream_list
from sparsebp.schedule.costs import Durations, Slowdowns

# Metrics of a step on a device are read one step late, so the device never waits for the host: they are on their way to
# the host when the step's work has been given to the device, and are checked when the next step's has been given, too.
# By then parameters have had one more update.


class DeferredSteps:
    """The steps of an executor whose metrics have not been checked, in their order."""

    def __init__(self, xp: ModuleType, loss: Any, watch: Watch) -> None:
        self._xp, self._loss, self._watch = xp, loss, watch
        self._steps: deque[tuple[Step, Reading | None]] = deque()
        self._looked_at: list[Step] = []

    @property
    def waiting(self) -> bool:
        """Whether any steps are pending."""
        return bool(self._steps or self._looked_at)

    def exchange(self, steps: list[Step]) -> list[Step]:
        """Take steps whose work is all given to the device; return earlier ones, checked."""
        if not self.waiting and all(step.later is None for step in steps):
            return steps
        for step in steps:
            metrics = step.later and (step.later.packed(self._xp) if step.packed is None else step.packed)
            self._steps.append((step, None if metrics is None else Reading(metrics)))
        left = 0  # steps at the end whose numbers may still be computed
        while left < max(1, len(steps)) and left < len(self._steps) and self._steps[-1 - left][1] is not None:
            left += 1
        return self._look(len(self._steps) - left)

    def drain(self) -> list[Step]:
        """Return all steps, after waiting for their numbers."""
        return self._look(len(self._steps))

    def forget(self) -> None:
        """Drop all steps."""
        self._steps.clear()
        self._looked_at = []

    def _look(self, count: int) -> list[Step]:
        for _ in range(count):
            step, reading = self._steps[0]
            if reading is not None:
                numbers = reading()
                try:
                    self._look_at(step, numbers)
                except Exception:  # after an interrupt it is looked at again
                    self._steps.clear()
                    raise
            self._looked_at.append(self._steps.popleft()[0])
        known, self._looked_at = self._looked_at, []
        return known

    def _look_at(self, step: Step, numbers: np.ndarray) -> None:
        """Write the numbers of a step to their places, and raise errors about them."""
        step.later.unpack(numbers, step)  # type: ignore[union-attr]
        step.packed, step.update, step.flow = None, None, []
        for m, value in enumerate(step.values):
            if not math.isfinite(value):
                self._loss.forward(step.predictions[m], step.targets[m])  # tells whether the target is at fault
            self._watch.loss(step, m, value)
        wrong = {name: np.float64(square) for name, square in step.squares.items() if not math.isfinite(square)}
        if wrong:
            self._watch.gradients(step, wrong)


class Executor:
    """Forward, loss, gradients and updates of a model, in the order of a schedule.

    The results do not depend on the order, bitwise on a CPU, as long as every stage takes its micro-batches in turn.
    (Gradients of further micro-batches are added in the order of arrival; dropout draws and running statistics advance
    with the forwards.) An action's results are freed as soon as their last
    reader is done, gradients with their update.

    Parameters
    ----------
    model
        A layer; its `stages` are the schedule's.
    loss
        ``forward(prediction, target) -> (value, saved)`` with the mean over the batch, and ``input_grad(saved)``.
    optimizer
        ``begin() -> update`` with ``update.apply(grads)`` and ``update.remaining``; built on ``model.parameters()``, or
        on a part of them: stages that it does not train get no weight gradient, and stages before the first trained one
        get no gradient at all. ``params`` tells which parameters it trains (see `trained_parameters`); ``steps``, the
        number of updates by parameter name, shows whether an update was interrupted.
    schedule
        Of one worker, with one or two streams, and one update per step; W and U of stages that are not trained are left
        out. A step that begins with updates (``first="U"``) or with the backward (``first="I"``) leaves work for the
        next one, or for `flush`.
    clip_norm
        Largest Euclidean norm of all gradients together; None does not clip.
    watch
        Is told of losses, and of gradients that are not finite.
    graph
        Whether to capture steps into CUDA graphs, see `Trainer`; None: on a GPU.

    Raises
    ------
    OptionError
        The schedule is not for this model on one device, it updates before there is a norm to clip by, or the
        optimizer's parameters are not the model's.
    ScheduleError
        The schedule cannot run.

    Notes
    -----
    A step of several micro-batches has the mean over all of it: the mean of each micro-batch, and its gradient, are
    weighted by how much it counts (`sparsebp.nn.loss.Loss.count`; a loss without `count` counts samples). One in which
    nothing counts has weight 0.

    On a GPU (with a loss that has ``on_device``) the host checks a step only after giving the next one to the device:
    `step` returns it, or raises its error, one step late, or `flush` does. Parameters have had one more update then.
    """

    plain: ClassVar[str] = "conventional"
    """A schedule that runs any model, for messages."""

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, *, clip_norm: float | None = None,
        watch: Watch | None = None, graph: bool | None = False,
    ) -> None:  # fmt: skip
        self.stages = Stages(model, trained_parameters(model, optimizer))
        self.schedule = schedule = without_frozen(schedule, self.stages)
        check_fits(schedule, self.stages, self.plain)
        watch = watch or Watch()
        self._order = schedule
        self._actions = self._make_actions(loss, optimizer, clip_norm, watch)
        self._programs: dict[int, Program] = {}
        program = self._program(schedule.graph.microbatches)
        if clip_norm is not None and not program.gathered:
            raise OptionError("The norm of all gradients is not known before the first update",
                              expected="all W before the first U, as with fusion='none' or fusion='forward'",
                              got=f"clip_norm={clip_norm} and the schedule {schedule.name or 'given'!r}",
                              remedy="Use fusion='forward', or do not clip by the norm")  # fmt: skip
        xp = backend.namespace(next(iter(model.parameters().values())))
        self._two = TwoStreams(xp) if len(program.streams) > 1 else None
        on_device = not backend.is_host(xp)
        # Each matrix product of this package enters this; once for the whole step, it takes a sixth of the time.
        own = not on_device and self.stages.ours and all(map(is_ours, (loss, optimizer)))
        self._around = threads.one_blas_thread if own else contextlib.nullcontext
        self._graphs = Graphs(self._actions) if graph or (graph is None and on_device) else None
        self._defers_metrics = on_device and hasattr(loss, "on_device")
        self._given = DeferredSteps(xp, loss, watch)
        self._pending: tuple[Step, Program] | None = None
        self._late = schedule.graph.first == "I"
        self._doubtful = True  # whether all parameters have had as many updates

    def _make_actions(self, loss: Any, optimizer: Any, clip_norm: float | None, watch: Watch) -> Actions:
        return Actions(self.stages, loss, optimizer, clip_norm, watch)

    @property
    def pending(self) -> bool:
        """Whether updates, or checks of steps, are outstanding."""
        return self._pending is not None or self._given.waiting

    @property
    def uncaptured(self) -> tuple[str, ...]:
        """Why steps are not captured into CUDA graphs; empty if they are, or will be once warm."""
        return ("graph=False",) if self._graphs is None else self._graphs.uncaptured

    def own(self, indices: Any) -> Any:
        """Return the samples of a micro-batch that are computed here: all."""
        return indices

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step.

        Parameters
        ----------
        batches
            Input and target of every micro-batch; the last step of an epoch may have fewer than the schedule.
        tag
            Any value to keep in the `Step`.

        Returns
        -------
        list of Step
            The steps that are now complete and checked. Usually this is the current step. It is the previous one on a
            GPU, or if the schedule computes gradients during the next forward, and the one before that if both apply.

        Raises
        ------
        OptionError
            An update was interrupted before, by an error of the last step or before this executor was made. Some
            parameters are then one step ahead of others, and further steps would be wrong. Or the optimizer has more
            parameters than when this executor was made, or a stage or a trained parameter has been replaced.
        Exception
            Any error of an action. Unfinished work of the step before is still there for `flush`.
        """
        self.stages.check_current()
        done: list[Step] = []
        if self._doubtful:
            done = self.flush()
            check_even(self._actions.optimizer, self.stages.names)
        check_complete(self._actions.optimizer, self.stages)
        self._doubtful = True
        given = self._step(batches, tag)
        self._doubtful = False
        return done + self._given.exchange(given)

    def _step(self, batches: Sequence[Batch], tag: Any) -> list[Step]:
        program = self._program(len(batches))
        if self._graphs is not None and self._graphs.takes(batches):
            done = self._finish()
            captured = self._graphs.step(program, batches, tag)
            return done + (self._step(batches, tag) if captured is None else [captured])
        if self._pending is not None and self._pending[1] is not program:
            done = self._finish()
            return done + self._step(batches, tag)
        before = None if self._pending is None else self._pending[0]
        step = Step(batches, self.stages, tag)
        if self._defers_metrics:
            step.later = DeferredMetrics()
        if self._two is None or len(program.streams) == 1:  # of fewer micro-batches one stream may have nothing
            with self._around():
                self._run(program.streams[0], step, before)
        else:
            self._two.run(program, step, before)
            if program.gathered:
                self._actions.gather(step)
        if not program.lasting:
            return [step]
        self._pending = step, program
        if not self._late:
            return [step]
        return [] if before is None else [before]

    def _run(self, stream: Sequence[Task], step: Step, before: Step | None) -> None:
        for task in stream:
            if not task.old:
                task.run(step)
            elif before is not None:
                task.run(before)

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Finish the last step; return it, and on a GPU the one before, if they were not returned yet.

        Parameters and optimizer state are then the same as without any schedule. Without `wait`, steps whose numbers
        have not arrived are not returned.
        """
        done = self._given.exchange(self._finish())
        return done + self._given.drain() if wait else done

    def _finish(self) -> list[Step]:
        """Finish the last step; return it if it has all of its gradients only now."""
        if self._pending is None:
            return []
        step, program = self._pending
        if step.aborted:  # its own error has been raised
            self._pending = None
            return []
        step.resumed = True
        if self._two is not None and len(program.streams) > 1:
            self._two.finish(program, step)
        elif self._late:
            for task in program.streams[0]:
                if task.old and not task.updates:
                    task.run(step)
        self._actions.finish(step, gathered=program.gathered)
        self._pending = None
        return [step] if self._late else []

    def close(self) -> None:
        """End threads, and drop graphs and their memory, and work not done by `flush`. A further `step` starts anew."""
        if self._two is not None:
            self._two.stop(None if self._pending is None else self._pending[0])
        self._pending = None
        self._given.forget()
        if self._graphs is not None:
            self._graphs.forget()

    def _program(self, count: int) -> Program:
        if count not in self._programs:
            whole = self._order
            schedule = whole if count == whole.graph.microbatches else fewer(whole, count)
            self._programs[count] = compile_program(schedule, self.stages, self._actions)
        return self._programs[count]


# Out-of-order back-propagation: measure candidate schedules while training, keep one if it is clearly faster.

SCHEDULE_NAME = "schedule.csv"
COSTS_NAME = "costs.json"
REPEATED = 3
"""Simulated steps: one alone does not show how streams overlap at its ends."""
_REGIONS = (4, 8, 16)


@dataclass(frozen=True)
class Trial:
    """A schedule of a step, and how long one of its steps takes."""

    name: str  # in tables, see `all_schedules`
    schedule: Schedule
    memory: float  # simulated peak, as a multiple of the conventional schedule's
    # seconds, slowest: Measured: the mean of the steps of the best round, and of the worst.
    seconds: float = math.inf
    slowest: float = 0.0

    def measured(self, seconds: float) -> Trial:
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

    trials: tuple[Trial, ...]
    costs: Costs
    memory_ratio: float

    @cached_property
    def fastest(self) -> Trial:
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


def candidates(size: dict[str, Any], costs: Costs, memory_ratio: float) -> list[Trial]:
    """Return the schedules to measure: the conventional one, and all of `all_schedules` below the ratio."""
    found = all_schedules(size, costs, memory_ratio)
    peaks = {name: simulate(schedule, costs).peak for name, schedule in found.items()}
    trials = [Trial(name, found[name], _share(peak, peaks["conventional"])) for name, peak in peaks.items()]
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


FIRST = Action(0, "F", 0)
"""The first action of a step."""
MOST = 16.0
"""The largest slowdown that is believed."""


class Span(NamedTuple):
    """An action, when it began and when it ended, in seconds."""

    action: Action
    start: float
    end: float


class TimedExecutor(Executor):
    """An `Executor` that records when every action ran, and the bytes of every stage, while `counts` is set."""

    def __init__(self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, **options: Any) -> None:
        self._marks: list[tuple[Action, Any, Any]] = []
        self._bytes: dict[int, StageBytes] = {}
        self._xp = backend.namespace(next(iter(model.parameters().values())))
        self._known = {_buffer(array)[0] for array in model.parameters().values()}
        self._begin: Any = None
        self._stepped: Any = None
        self.counts = True
        super().__init__(model, loss, optimizer, schedule, **options)

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `Executor.step`."""
        self._stepped = self._stamp()
        if self._begin is None:
            self._begin = self._stepped
            self._known.update(_buffer(array)[0] for batch in batches for array in batch[:2])
        return super().step(batches, tag)

    def spans(self) -> list[Span]:
        """Return when the actions ran since the last call. Call `flush` first."""
        marks, self._marks = self._marks, []
        return [Span(action, self._seconds(start), self._seconds(end)) for action, start, end in marks]

    @property
    def bytes(self) -> tuple[StageBytes, ...]:
        """The bytes of every stage, for batches as the first one."""
        return tuple(self._bytes[number] for number in range(len(self.stages)))

    def _program(self, count: int) -> Program:
        if count not in self._programs:
            program = super()._program(count)
            streams = tuple(tuple(map(self._timed, stream)) for stream in program.streams)
            weigh, use = self._timed_together(program.weigh), self._timed_together(program.use)
            self._programs[count] = replace(program, streams=streams, weigh=weigh, use=use)
        return self._programs[count]

    def _timed_together(self, inner: Together) -> Together:
        """Return a function that records each of several actions, in equal parts of the time."""

        def run(step: Step, tasks: Sequence[Task]) -> bool:
            start = self._stamp()
            done = inner(step, tasks)
            part = (self._stamp() - start) / len(tasks)
            if done and self.counts:
                actions = [task.action for task in tasks if task.action is not None]
                self._marks += [(action, start + i * part, start + (i + 1) * part) for i, action in enumerate(actions)]
            return done

        return run

    def _timed(self, task: Task) -> Task:
        action, inner = task.action, task.run
        if action is None:
            return task

        def run(step: Step) -> None:
            start = self._stepped if action == FIRST else self._stamp()  # preparing a step is part of it
            inner(step)
            if self.counts:
                self._marks.append((action, start, self._stamp()))
            if action.kind == "F" and action.stage not in self._bytes:
                self._bytes[action.stage] = self._bytes_of(action, step)

        timed: Run = run
        return replace(task, run=timed)

    def _bytes_of(self, action: Action, step: Step) -> StageBytes:
        number, m = action.stage, action.microbatch or 0
        output = step.predictions[m] if step.flow[m] is None else step.flow[m]
        gradients = step.for_weights[m][number] or step.for_input[m][number]  # only the last stage has some by now
        # Arrays that two stages keep count for the first: it is the last to be done with them.
        found = dict(_arrays(step.saved[m][number] if gradients is None else gradients.saved))
        saved = sum(size for key, size in found.items() if key not in self._known)
        self._known.update(found)
        parameters = self.stages[number].layer.parameters().values()
        return StageBytes(output.nbytes, saved, sum(array.nbytes for array in parameters))

    def _stamp(self) -> Any:
        if backend.is_host(self._xp):
            return time.perf_counter()
        event = self._xp.cuda.Event()
        event.record()
        return event

    def _seconds(self, stamp: Any) -> float:
        if backend.is_host(self._xp):
            return float(stamp - self._begin)
        stamp.synchronize()  # synchronize!
        return 1e-3 * float(self._xp.cuda.get_elapsed_time(self._begin, stamp))


def _arrays(value: Any) -> Iterable[tuple[int, int]]:
    """Yield identity and bytes of the buffers that `value` holds."""
    if hasattr(value, "nbytes") and hasattr(value, "base"):
        yield _buffer(value)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _arrays(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _arrays(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _arrays(getattr(value, field.name, None))


def _buffer(array: Any) -> tuple[int, int]:
    while hasattr(array.base, "nbytes"):
        array = array.base
    return id(array), int(array.nbytes)


def alone_schedule(stages: Stages) -> Schedule:
    """Return the schedule that measures costs of single actions: one stream, every I before its W."""
    # Of a stage of several layers the first of I and W computes the inner gradients, which the other one needs as well.
    # On two streams all else waits for I; so they are counted there. Each update comes one weight gradient late, so
    # that it is not fused with its own, as it is not on two streams.
    graph = StepGraph(len(stages), unweighted=stages.unweighted, updates="step")
    actions = [Action(stage, "F", 0) for stage in range(len(stages))]
    late: list[Action] = []
    for stage in reversed(range(len(stages))):
        actions += [Action(stage, "I", 0)] * (stage > 0)
        if graph.weighted(stage):
            actions += [Action(stage, "W", 0), *late]
            late = [Action(stage, "U")]
    return Schedule.of(graph, [{"main": actions + late}], "conventional, I before W")


def with_handing(spans: Iterable[Span], schedule: Schedule, joined: Container[int] = ()) -> list[Span]:
    """Return spans that begin when their actions could have begun: the delay of starting is part of the work."""
    # An action could begin when the one before it in its stream, and all that it needs of the other stream, had ended.
    # The caller's work between steps is not part of the first forward. Stages `joined` are of several layers: their W
    # does nothing before their I has computed the inner gradients.
    ended: dict[Action, float] = {}
    last: dict[int, float] = {}
    out: list[Span] = []
    for span in sorted(spans, key=lambda span: span.end):
        action, start, end = span
        lane, own = schedule.places[action][0], Action(action.stage, "I", 0)
        if action.kind == "W" and action.stage in joined and start < ended.get(own, start):
            span = span._replace(start=ended[own])  # noqa: PLW2901
        elif lane in last:
            able = max(ended.get(need, 0.0) for need in (action, *_needs(schedule, action)))
            able = max(start, able) if action == FIRST else min(start, max(last[lane], able))
            span = span._replace(start=able)  # noqa: PLW2901
        ended[action] = last[lane] = end
        out.append(span)
    return sorted(out, key=lambda span: span.start)


def _needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    yield from schedule.graph.predecessors(action)
    yield from schedule.graph.carried(action)


def costs_alone(executor: TimedExecutor) -> Costs:
    """Return how long every action takes by itself, from steps in the order of `alone_schedule` since the last call."""
    return measured_costs(with_handing(executor.spans(), executor.schedule), executor.bytes)


def costs_beside(executor: TimedExecutor, alone: Costs) -> Costs:
    """Return `alone` with how actions slow each other down, from steps on two streams since the last call."""
    stages, schedule = executor.stages.all, executor.schedule
    joined = {number for number, stage in enumerate(stages) if getattr(stage.layer, "children", None)}
    spans = with_handing(executor.spans(), schedule, joined)
    return replace(alone, slowdown=measured_slowdowns(spans, schedule, alone))


def measured_costs(spans: Iterable[Span], stages: tuple[StageBytes, ...]) -> Costs:
    """Return the median of every action's durations, of steps on one stream."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        found[_key(span.action)].append(span.end - span.start)
    skipped = {f"{number}{kind}": 0.0 for number in range(len(stages)) for kind in "IWU"}  # missing actions
    return Costs(Durations(skipped | {key: median(values) for key, values in found.items()}), stages)


def measured_slowdowns(spans: Iterable[Span], schedule: Schedule, costs: Costs) -> Slowdowns:
    """Return how much slower every action of a schedule of two streams runs while the other stream is busy."""
    # An action that takes D seconds, O of them overlapped, and A alone satisfies `A = D - O + O / slowdown`. A short
    # overlap says little, so each action is taken to have done a quarter more, slowed down like all of them together.
    lanes: list[list[Span]] = [[], []]
    for span in sorted(spans, key=lambda span: span.start):
        lanes[schedule.places[span.action][0]].append(span)
    measured: dict[Action, list[tuple[float, float]]] = defaultdict(list)
    for own, other in (lanes, lanes[::-1]):
        ends = [span.end for span in other]
        for span in own:
            measured[span.action].append((span.end - span.start, _overlap(span, other, bisect(ends, span.start))))
    # Medians ignore pauses of the machine.
    known = {
        action: (median(t for t, _ in times), median(beside for _, beside in times), costs.duration(action))
        for action, times in measured.items()
    }
    lasted, beside, by_itself = (sum(times) for times in zip(*known.values(), strict=True))
    every = _slowdown(lasted, beside, by_itself)
    entries = {_key(action): _slowdown(*times, every) for action, times in known.items()}
    return Slowdowns(dict.fromkeys("FIWU", every) | entries)


def _slowdown(lasted: float, beside: float, alone: float, every: float = 0.0) -> float:
    done = beside - (lasted - alone)
    if every:
        beside, done = beside + every * alone / 4, done + alone / 4
    return min(MOST, max(1.0, beside / done)) if done > 0 else MOST if beside > 0 else 1.0


def _key(action: Action) -> str:
    return f"{action.stage}{action.kind}"


def _overlap(span: Span, others: Sequence[Span], first: int) -> float:
    """Return for how long one of `others` runs during `span`; from number `first` on they end after it has begun."""
    there = takewhile(lambda other: other.start < span.end, islice(others, first, None))
    return sum(min(span.end, other.end) - max(span.start, other.start) for other in there)


# Finding the schedule during training: the first steps are measured.

MEASURED = 5
"""Steps measured on one stream, and as many on two; one before each is not."""
ROUNDS = 3
"""How often every candidate is measured, in turn."""
HOPELESS = 1.25
"""Candidates this much slower than the fastest are not measured again, except the conventional schedule: a pause of the
machine in its only round would make another one seem faster."""
MEMORY_RATIO = 1.1
"""Peak of memory as a multiple of the conventional schedule's (Oh et al. 2022, §8.2)."""
_Search = Generator[tuple[Executor, int], list[float], None]


class OutOfOrderExecutor:
    """Trains, measures meanwhile, finds the fastest schedule of a step, and goes on with that.

    Has the interface of `Executor`. The first steps run on one stream, and each action is timed. The next steps run on
    two streams, to measure how much they slow each other down. With these costs schedules are built, see `candidates`,
    and each runs some steps in turn; the fastest by the clock is kept, the conventional one unless another is faster
    beyond the spread of their rounds. The results are the same with every schedule. Batches of another size than the
    first one are not measured.

    Parameters
    ----------
    model, loss, optimizer, watch
        As for `Executor`.
    memory_ratio
        Bound for the simulated peak of memory, as a multiple of the conventional schedule's.
    steps
        How many to measure, on one stream and then on two, and in all of each candidate.
    graph
        As for `Executor`, for the steps whose actions are not measured.
    clock
        Returns seconds.

    Attributes
    ----------
    found
        The schedule, once it is known.
    costs
        The measured ones, as far as they are known.
    uncaptured
        As for `Executor`.

    Raises
    ------
    OptionError
        The model cannot run on two streams.
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
        # Refuses now what later steps would refuse.
        self.uncaptured = self._plain(two_stream_list(**self._size)).uncaptured
        self._search = self._searching()
        self._begin(next(self._search))

    def _searching(self) -> _Search:
        """Yield the executor of the next steps, and how many of them count; receive their seconds."""
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
                if number > 0 and trial.seconds > HOPELESS * fastest:  # the first is the reference
                    continue
                seconds = yield self._plain(trial.schedule), -(-self._wanted // ROUNDS)
                trials[number] = trial.measured(fmean(seconds))
        self.found = FoundSchedule(tuple(trials), self.costs, self._ratio)
        yield self._plain(self.found.schedule), 0

    def _begin(self, what: tuple[Executor, int]) -> None:
        self._executor, self._counted = what
        self._seconds: list[float] = []
        self._warm = 1 if self.uncaptured else 3  # until a graph is captured

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `Executor.step`."""
        if self.found is not None:
            return self._executor.step(batches, tag)
        samples = sum(len(batch[1]) for batch in batches)
        self._samples = samples if self._samples is None else self._samples
        counts = samples == self._samples
        done = [] if counts else self.flush()  # a step of another size must not overlap others
        if isinstance(self._executor, TimedExecutor):
            self._executor.counts = counts and self._warm == 0
        begin = self._clock()
        # Actions are measured on one core, as on each of two streams (which set that themselves).
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

    def __getattr__(self, name: str) -> Any:
        if name == "_executor":  # not known yet
            raise AttributeError(name)
        return getattr(self._executor, name)

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Finish the last step; see `Executor.flush`."""
        begin = self._clock()
        done = self._executor.flush(wait=wait)
        if self._seconds:  # part of the last step: a caller may want the model after each
            self._seconds[-1] += self._clock() - begin
        return done
