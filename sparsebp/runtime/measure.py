"""How long the actions of a step take, by themselves and while another stream is busy."""

from __future__ import annotations

import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice, takewhile
from statistics import median
from typing import Any, NamedTuple

from sparsebp.core import backend
from sparsebp.runtime.actions import Batch, Stages, Step, StepFunction
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.streams import JoinedTasks, Program, Task
from sparsebp.schedule import Action, Costs, Schedule, StageBytes, StepGraph
from sparsebp.schedule.costs import Durations, Slowdowns

FIRST = Action(0, "F", 0)
"""The first action of a step."""
LARGEST_SLOWDOWN = 16.0
"""The largest slowdown that is believed."""


class Span(NamedTuple):
    """An action, when it began and when it ended, in seconds."""

    action: Action
    start: float
    end: float


class TimedExecutor(PlainExecutor):
    """An `PlainExecutor` that records when every action ran, and the bytes of every stage, while `counts` is set."""

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
        """Run one step; see `PlainExecutor.step`."""
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
            weight_grads, updates = self._timed_jointly(program.weight_grads), self._timed_jointly(program.updates)
            self._programs[count] = replace(program, streams=streams, weight_grads=weight_grads, updates=updates)
        return self._programs[count]

    def _timed_jointly(self, inner: JoinedTasks) -> JoinedTasks:
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

        timed: StepFunction = run
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


def isolated_schedule(stages: Stages) -> Schedule:
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


def with_dispatch_latency(spans: Iterable[Span], schedule: Schedule, joined: Container[int] = ()) -> list[Span]:
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


def isolated_costs(executor: TimedExecutor) -> Costs:
    """Return how long every action takes by itself: from steps of `isolated_schedule` since the last call."""
    return measured_costs(with_dispatch_latency(executor.spans(), executor.schedule), executor.bytes)


def concurrent_costs(executor: TimedExecutor, isolated: Costs) -> Costs:
    """Return `isolated` with how actions slow each other down, from steps on two streams since the last call."""
    stages, schedule = executor.stages.all, executor.schedule
    joined = {number for number, stage in enumerate(stages) if getattr(stage.layer, "children", None)}
    spans = with_dispatch_latency(executor.spans(), schedule, joined)
    return replace(isolated, slowdown=measured_slowdowns(spans, schedule, isolated))


def measured_costs(spans: Iterable[Span], stages: tuple[StageBytes, ...]) -> Costs:
    """Return the median of every action's durations, of steps on one stream."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        found[_key(span.action)].append(span.end - span.start)
    skipped = {f"{number}{kind}": 0.0 for number in range(len(stages)) for kind in "IWU"}  # missing actions
    return Costs(Durations(skipped | {key: median(values) for key, values in found.items()}), stages)


def measured_slowdowns(spans: Iterable[Span], schedule: Schedule, costs: Costs) -> Slowdowns:
    """Return how much slower every action of a schedule of two streams runs while the other stream is busy."""
    # An action that takes D seconds, O of them overlapped, and A by itself satisfies `A = D - O + O / slowdown`. A
    # short overlap says little, so each action is taken to have done a quarter more, slowed down like all of them
    # together.
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
        action: (median(t for t, _ in times), median(concurrent for _, concurrent in times), costs.duration(action))
        for action, times in measured.items()
    }
    lasted, concurrent, isolated = (sum(times) for times in zip(*known.values(), strict=True))
    every = _slowdown(lasted, concurrent, isolated)
    entries = {_key(action): _slowdown(*times, every) for action, times in known.items()}
    return Slowdowns(dict.fromkeys("FIWU", every) | entries)


def _slowdown(lasted: float, concurrent: float, isolated: float, every: float = 0.0) -> float:
    done = concurrent - (lasted - isolated)
    if every:
        concurrent, done = concurrent + every * isolated / 4, done + isolated / 4
    return (
        min(LARGEST_SLOWDOWN, max(1.0, concurrent / done)) if done > 0 else LARGEST_SLOWDOWN if concurrent > 0 else 1.0
    )


def _key(action: Action) -> str:
    return f"{action.stage}{action.kind}"


def _overlap(span: Span, others: Sequence[Span], first: int) -> float:
    """Return for how long one of `others` runs during `span`; from number `first` on they end after it has begun."""
    there = takewhile(lambda other: other.start < span.end, islice(others, first, None))
    return sum(min(span.end, other.end) - max(span.start, other.start) for other in there)
