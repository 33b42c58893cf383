"""The memory account of a simulated schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from sparsebp.schedule.actions import Action, trusted
from sparsebp.schedule.simulation.engine import Run

USES = ("saved", "output_gradients", "weight_gradients", "weights")
_SAVED, _OUTPUT_GRADIENTS, _WEIGHT_GRADIENTS, _WEIGHTS = range(len(USES))


@dataclass(frozen=True)
class MemoryCurve:
    """What one worker keeps in memory over time.

    Attributes
    ----------
    worker
        Its number.
    times
        When the amount changes, from 0. What holds for no time at all is left out.
    saved
        Activations kept for the backward, from each of `times` until the next: from the start of F until I and W have
        ended; of a recomputed stage only its input (the output of the stage before; nothing for stage 0, whose input is
        the data) until the first of I and W starts.
    output_gradients
        Gradients with respect to the outputs of the worker's stages: from the start of the I that makes them (from
        their arrival, if another worker makes them; from the first use, if the loss does) until I and W have used them.
    weight_gradients
        From the start of the first W until the end of U; until the end where the step has no U.
    weights
        All versions that are still to be read. One a stage, except for ``weights="stashed"``.
    """

    worker: int
    times: tuple[float, ...]
    saved: tuple[float, ...]
    output_gradients: tuple[float, ...]
    weight_gradients: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def bytes(self) -> tuple[float, ...]:
        """The sum of all uses."""
        return tuple(map(sum, zip(self.saved, self.output_gradients, self.weight_gradients, self.weights, strict=True)))

    @property
    def peak(self) -> float:
        """The most that is kept at any time."""
        return max(self.bytes)


_Change: TypeAlias = tuple[float, int, float]  # when, which of `USES`, how much more


def memory_curves(run: Run) -> tuple[MemoryCurve, ...]:
    """Return the memory account of every worker."""
    graph = run.schedule.graph
    arrivals = {(transfer.source, transfer.step): transfer.end for transfer in run.transfers()}
    changes: list[list[_Change]] = [[] for _ in range(run.schedule.workers)]
    for stage in range(graph.stages):
        account = _StageAccount(run, stage, arrivals)
        own = changes[run.schedule.allocation[stage]]
        own += account.activations()
        own += account.output_gradients()
        if graph.weighted(stage):
            own += account.weight_gradients()
            own += account.weights()
    return tuple(_curve(worker, found) for worker, found in enumerate(changes))


def _curve(worker: int, changes: list[_Change]) -> MemoryCurve:
    """Add changes up."""
    now = [0.0] * len(USES)
    times, values = [0.0], [tuple(now)]
    for time, use, amount in sorted(changes, key=itemgetter(0)):
        now[use] += amount
        if time != times[-1]:
            times.append(time)
            values.append(())
        values[-1] = tuple(now)
    return MemoryCurve(worker, tuple(times), *zip(*values, strict=True))


class _StageAccount:
    """What one stage allocates and frees."""

    def __init__(self, run: Run, stage: int, arrivals: dict[tuple[Action, int], float]) -> None:
        self._run, self._stage, self._arrivals = run, stage, arrivals
        self._schedule, self._graph = run.schedule, run.schedule.graph
        self._bytes = run.costs.bytes_of(stage)
        found = run.schedule.cells.numbers
        everything = range(self._graph.microbatches)
        self._forwards = [found[trusted(stage, "F", m)] for m in everything]
        self._backwards = [found.get(trusted(stage, "I", m)) for m in everything]
        self._weight_gradients = [found.get(trusted(stage, "W", m)) for m in everything]
        self._users = [[number for number in pair if number is not None]
                       for pair in zip(self._backwards, self._weight_gradients, strict=True)]  # fmt: skip

    def activations(self) -> Iterator[_Change]:
        """Yield changes of what forwards keep."""
        run, carried = self._run, self._graph.first == "I"
        saved = kept = self._bytes.saved
        if self._stage in self._schedule.recomputed:
            kept = run.costs.bytes_of(self._stage - 1).output if self._stage > 0 else 0
        for forward, users in zip(self._forwards, self._users, strict=True):
            if not users:
                continue
            for step in range(-1 if carried else 0, run.steps):  # -1: kept by the forwards before the first step
                yield (0.0 if step < 0 else run.begin[step * run.count + forward]), _SAVED, kept
                if step + carried < run.steps:
                    begin, end = self._span(users, step + carried)
                    if saved != kept:
                        yield begin, _SAVED, saved - kept
                    yield end, _SAVED, -saved

    def output_gradients(self) -> Iterator[_Change]:
        """Yield changes of the gradients with respect to the stage's output."""
        run, source, amount = self._run, self._stage + 1, self._bytes.output
        loss = source == self._graph.stages
        for m, users in enumerate(self._users):
            if not users:
                continue
            maker = trusted(source, "I", m)
            for step in range(run.steps):
                begin, end = self._span(users, step)
                if not loss:
                    made = self._arrivals.get((maker, step))
                    begin = run.begin[step * run.count + run.schedule.cells.numbers[maker]] if made is None else made
                yield begin, _OUTPUT_GRADIENTS, amount
                yield end, _OUTPUT_GRADIENTS, -amount

    def weight_gradients(self) -> Iterator[_Change]:
        """Yield changes of the gradients with respect to the stage's weights."""
        run, amount, found = self._run, self._bytes.weights, self._schedule.cells.numbers
        makers = [number for number in self._weight_gradients if number is not None]
        groups: list[tuple[list[int], int | None]] = [(makers, found.get(trusted(self._stage, "U")))]
        if self._graph.updates == "microbatch":
            groups = [([maker], found[trusted(self._stage, "U", m)]) for m, maker in enumerate(makers)]
        later = self._graph.first == "U"  # the next step applies them
        for group, update in groups:
            if update is None:  # they stay, and the next step adds to them
                yield self._span(group, 0)[0], _WEIGHT_GRADIENTS, amount
                continue
            for step in range(-1 if later else 0, run.steps):
                yield (0.0 if step < 0 else self._span(group, step)[0]), _WEIGHT_GRADIENTS, amount
                if step + later < run.steps:
                    yield run.end[(step + later) * run.count + update], _WEIGHT_GRADIENTS, -amount

    def weights(self) -> Iterator[_Change]:
        """Yield changes of the versions of the stage's weights."""
        run, amount = self._run, self._bytes.weights
        yield 0.0, _WEIGHTS, amount
        if self._graph.weights != "stashed":
            return
        made = run.updates[self._stage]
        needed = [*made, math.inf]  # until when each version is: replaced, and no longer read
        for step in range(run.steps):
            for forward, backward in zip(self._forwards, self._backwards, strict=True):
                version = run.version_of(forward, step, "F") or 0
                last = forward if backward is None else backward
                needed[version] = max(needed[version], run.end[step * run.count + last])
        for begin, end in zip(made, needed, strict=False):
            yield begin, _WEIGHTS, amount
            yield end, _WEIGHTS, -amount

    def _span(self, numbers: list[int], step: int) -> tuple[float, float]:
        """Return when the first of some cells begins and the last ends."""
        base, begin, end = step * self._run.count, self._run.begin, self._run.end
        return min([begin[base + number] for number in numbers]), max([end[base + number] for number in numbers])
