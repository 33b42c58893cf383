"""The weights that asynchronous schedules read: older ones that are kept (stashed), the newest, or predicted ones.

The optimizer updates one set of weights in place, the masters. What else an action reads is written into their place
while it runs, and the masters come back afterwards, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from sparsebp.core.types import Array
from sparsebp.optim import Predictor
from sparsebp.schedule import Action, Costs, Overlap, Schedule, Simulation, simulate


class Distance(NamedTuple):
    """How far the weights that an action read, and the newest ones by then, were from those that they stood for.

    Attributes
    ----------
    action
        A forward or backward of a micro-batch of the step.
    ahead
        The number of updates between the version that it read, or predicted from, and W_true.
    predicted, stale
        Root mean squares over the stage's weights: of Ŵ − W_true, and of W_stale − W_true.
    """

    action: Action
    ahead: int
    predicted: float
    stale: float


Note: TypeAlias = Callable[[Distance], None]


class Versions:
    """The versions of the weights of some stages, in the steps of an asynchronous schedule.

    Parameters
    ----------
    names
        For every stage the names of its parameters that are trained.
    live
        Those parameters, as the optimizer updates them.
    stashed
        Whether a backward reads the version that its forward read, or the newest one.
    predictor
        Whose weights F and I read, as its ``kinds`` say; None: those of the schedule.
    note
        Is told how far weights were from those that they stood for, as soon as these are there. That takes a copy of
        what each action reads until then.

    Attributes
    ----------
    reads
        For every forward and backward of the last step, how often its stage had been updated in the step when what it
        read, or what that was predicted from, was there.
    """

    def __init__(
        self, names: Mapping[int, Sequence[str]], live: Mapping[str, Array], *, stashed: bool,
        predictor: Predictor | None, note: Note | None,
    ) -> None:  # fmt: skip
        self._names, self._live, self._stashed = {k: tuple(some) for k, some in names.items() if some}, live, stashed
        self._predictor, self._note = predictor, note
        self.begin({})

    def ahead(self, schedule: Schedule) -> dict[Action, int]:
        """Return how many updates ahead the weights are that each F and I stands for, read off the simulated schedule.

        Until its micro-batch's round trip is over, see `Simulation.version_difference`, or as the predictor's
        ``horizon`` says. Nothing, if nobody asks for it.
        """
        if self._predictor is None and self._note is None:
            return {}
        found = simulate(schedule, units(schedule))
        of = Simulation.version_difference
        if self._predictor is not None and self._predictor.horizon == "update":
            of = Simulation.staleness
        return {
            action: of(found, action) for stage in self._names for m in range(schedule.graph.microbatches)
            for action in (Action(stage, "F", m), Action(stage, "I", m)) if action in schedule
        }  # fmt: skip

    def begin(self, ahead: Mapping[Action, int]) -> None:
        """Begin a step: no update has been made, nothing is kept."""
        self._ahead = ahead
        self.reads: dict[Action, int] = {}
        self._count = dict.fromkeys(self._names, 0)
        self._stash: dict[tuple[int, int], dict[str, Array]] = {}
        self._open: defaultdict[tuple[int, int], set[int | None]] = defaultdict(
            set
        )  # (stage, version) -> micro-batches
        self._waiting: defaultdict[tuple[int, int], list[tuple[Action, int, dict[str, Array], dict[str, Array]]]]
        self._waiting = defaultdict(list)

    @contextlib.contextmanager
    def reading(self, stage: int, kind: str, m: int) -> Iterator[None]:
        """Let an action, F, I, W or B, read the weights that it should; W by itself those that an I would read then."""
        if stage not in self._names:
            yield
            return
        action, newest = Action(stage, "F" if kind == "F" else "I", m), self._count[stage]
        version, weights = newest, None
        if self._stashed and action.kind == "F":
            self._open[stage, version].add(m)
        elif self._stashed:
            version = self.reads[Action(stage, "F", m)]
            weights = self._stash.get((stage, version))
        if kind != "W":  # by itself it is told of nothing
            self.reads[action] = version
        if self._predictor is not None and action.kind in self._predictor.kinds:
            s = self._ahead.get(action, 0)
            if s > 0:
                weights = self._predictor.predict(self._names[stage], s)
        if kind != "W" and self._note is not None and action in self._ahead:
            self._expect(action, version, weights)
        if weights is None:
            yield
        else:
            with self._swapped(weights):
                yield

    def release(self, stage: int, m: int) -> None:
        """The backward of a micro-batch is over: its version is kept no longer, unless another one needs it."""
        if self._stashed and stage in self._names:
            key = stage, self.reads[Action(stage, "F", m)]
            self._open[key].discard(m)
            if not self._open[key]:
                self._stash.pop(key, None)

    def updating(self, stage: int) -> None:
        """Keep what an update is about to overwrite, if a backward is still to read it."""
        key = stage, self._count[stage]
        if self._open[key]:
            self._stash[key] = {name: self._live[name].copy() for name in self._names[stage]}

    def updated(self, stage: int, grads: Mapping[str, Array]) -> None:
        """An update has been made, of these gradients."""
        if self._predictor is not None:
            self._predictor.observe(grads, grads)
        self._count[stage] += 1
        for action, ahead, read, stale in self._waiting.pop((stage, self._count[stage]), ()):
            self._measure(action, ahead, read, stale)

    @contextlib.contextmanager
    def _swapped(self, weights: Mapping[str, Array]) -> Iterator[None]:
        masters = {name: self._live[name].copy() for name in weights}
        try:
            for name, values in weights.items():
                self._live[name][...] = values
            yield
        finally:
            for name, values in masters.items():
                self._live[name][...] = values

    def _expect(self, action: Action, version: int, weights: Mapping[str, Array] | None) -> None:
        ahead, stage = self._ahead[action], action.stage
        stale = {name: self._live[name].copy() for name in self._names[stage]}
        read = stale if weights is None else dict(weights)
        if version + ahead <= self._count[stage]:
            self._measure(action, ahead, read, stale)
        else:
            self._waiting[stage, version + ahead].append((action, ahead, read, stale))

    def _measure(self, action: Action, ahead: int, read: Mapping[str, Array], stale: Mapping[str, Array]) -> None:
        if self._note is not None:
            self._note(Distance(action, ahead, self._rms(read), self._rms(stale)))

    def _rms(self, weights: Mapping[str, Array]) -> float:
        """Return the root mean square of the difference to the masters."""
        total = 0.0
        for name, array in weights.items():
            difference = array - self._live[name]
            total += float((difference * difference).sum(dtype=np.float64))  # synchronize!
        return math.sqrt(total / max(1, sum(array.size for array in weights.values())))


def units(schedule: Schedule) -> Costs:
    """Return costs by which the time unit of every worker is as long: a forward and a backward of all of its stages.

    A worker that overlaps them has the whole unit for each; one that runs them in sequence, half of it.
    """
    overlaps = {lane.worker for lane in schedule.lanes if any(isinstance(cell, Overlap) for cell in lane.cells)}
    home = schedule.allocation

    def duration(action: Action) -> float:
        if action.kind in "US":
            return 0.0
        worker = home[action.stage]
        share = 1 / home.count(worker) if worker in overlaps else 0.5 / home.count(worker)
        apart = action.kind in "IW" and Action(action.stage, "W" if action.kind == "I" else "I", action.microbatch)
        return share / 2 if apart and apart in schedule else share

    return Costs(duration)
