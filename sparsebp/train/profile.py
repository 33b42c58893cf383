"""What the actions of a model cost on this machine, measured while it trains: durations, bytes, and side by side."""

from __future__ import annotations

import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice, takewhile
from statistics import median
from typing import Any, NamedTuple

from sparsebp import backend
from sparsebp.schedule import Action, Costs, Schedule, StageBytes
from sparsebp.schedule.builders.regions import Region, RegionProfile
from sparsebp.schedule.cost_file import Durations
from sparsebp.train.actions import Batch, Run, Step, Watch
from sparsebp.train.executor import Executor
from sparsebp.train.program import Program, Task

MOST = 4.0
"""The largest slowdown that is taken for one: what is measured beyond it is a pause of the machine."""


class Span(NamedTuple):
    """An action, when it began and when it ended, in seconds."""

    action: Action
    start: float
    end: float


class TimedExecutor(Executor):
    """An `Executor` that notes when every action ran, and the bytes of every stage."""

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, *, watch: Watch | None = None
    ) -> None:
        self._marks: list[tuple[Action, Any, Any]] = []
        self._bytes: dict[int, StageBytes] = {}
        self._xp = backend.namespace(next(iter(model.parameters().values())))
        self._known = {_buffer(array)[0] for array in model.parameters().values()}
        self._begin: Any = None
        super().__init__(model, loss, optimizer, schedule, watch=watch)

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `Executor.step`."""
        if self._begin is None:
            self._begin = self._stamp()
            self._known.update(_buffer(array)[0] for batch in batches for array in batch)
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
            lanes = tuple(tuple(self._timed(task) for task in lane) for lane in program.lanes)
            self._programs[count] = replace(program, lanes=lanes)
        return self._programs[count]

    def _timed(self, task: Task) -> Task:
        action, inner = task.action, task.run
        if action is None:
            return task

        def run(step: Step) -> None:
            start = self._stamp()
            inner(step)
            self._marks.append((action, start, self._stamp()))
            if action.kind == "F" and action.stage not in self._bytes:
                self._bytes[action.stage] = self._bytes_of(action, step)

        timed: Run = run
        return replace(task, run=timed)

    def _bytes_of(self, action: Action, step: Step) -> StageBytes:
        number, m = action.stage, action.microbatch or 0
        output = step.predictions[m] if step.flow[m] is None else step.flow[m]
        # What two stages keep counts for the first: it is the last to be done with it.
        found = dict(_arrays([step.for_input[m][number], step.for_weights[m][number]]))
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


def measured_costs(spans: Iterable[Span], stages: tuple[StageBytes, ...]) -> Costs:
    """Return the median of every action's durations, of steps on one stream."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        found[f"{span.action.stage}{span.action.kind}"].append(span.end - span.start)
    skipped = {f"{number}{kind}": 0.0 for number in range(len(stages)) for kind in "IWU"}  # what no stage needs
    return Costs(Durations(skipped | {key: median(values) for key, values in found.items()}), stages)


@dataclass(frozen=True)
class SideBySide:
    """How much slower actions run while the other stream is busy.

    Attributes
    ----------
    lasted, overlapped
        Seconds that each action took beside the other stream, and for how many of them that was busy, over all steps.
    alone
        Seconds that it would have taken by itself.
    """

    lasted: Mapping[Action, float]
    overlapped: Mapping[Action, float]
    alone: Mapping[Action, float]

    @classmethod
    def of(cls, spans: Iterable[Span], schedule: Schedule, costs: Costs) -> SideBySide:
        """Return what the steps of a schedule of two streams say, beside the costs of one stream."""
        lasted, overlapped, alone = (defaultdict[Action, float](float) for _ in range(3))
        lanes: list[list[Span]] = [[], []]
        for span in sorted(spans, key=lambda span: span.start):
            lanes[schedule.place(span.action)[0]].append(span)
        for own, other in (lanes, lanes[::-1]):
            ends = [span.end for span in other]
            for span in own:
                lasted[span.action] += span.end - span.start
                overlapped[span.action] += _overlap(span, other, bisect(ends, span.start))
                alone[span.action] += costs.duration(span.action)
        return cls(lasted, overlapped, alone)

    def slowdown(self, actions: Iterable[Action] | None = None) -> float:
        """Return it for `actions` together, or all; what ran beside nothing takes that of all.

        Of D seconds, O of them beside others, an action did what takes A alone: ``A = D - O + O / slowdown``.
        """
        chosen = self.lasted.keys() if actions is None else [a for a in actions if a in self.lasted]
        overlap = sum(self.overlapped[a] for a in chosen)
        if overlap <= 0:
            return 1.0 if actions is None else self.slowdown()
        done = overlap - sum(self.lasted[a] - self.alone[a] for a in chosen)
        return min(MOST, max(1.0, overlap / done)) if done > 0 else MOST

    def regions(self, costs: Costs) -> RegionProfile:
        """Return what Algorithm 1 asks for: two streams get ``1/s + 1/s'`` times as much done as one does."""
        plain = RegionProfile.from_costs(costs)
        of_region: dict[Region, float] = {}
        of_stage: dict[int, float] = {}

        def main(region: Region) -> float:
            if region not in of_region:
                of_region[region] = self.slowdown(region.actions())
            return of_region[region]

        def sub(stage: int) -> float:
            if stage not in of_stage:
                of_stage[stage] = self.slowdown([Action(stage, "W", 0), Action(stage, "U")])
            return of_stage[stage]

        return RegionProfile(
            plain.main, lambda stage, region: plain.sub(stage, region) * sub(stage),
            lambda stage, region: 1 / main(region) + 1 / sub(stage),
        )  # fmt: skip


def _overlap(span: Span, others: Sequence[Span], first: int) -> float:
    """Return for how long one of `others` runs during `span`; from number `first` on they end after it has begun."""
    there = takewhile(lambda other: other.start < span.end, islice(others, first, None))
    return sum(min(span.end, other.end) - max(span.start, other.start) for other in there)
