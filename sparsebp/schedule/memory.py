"""The memory account of a simulated schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from sparsebp.schedule.actions import Action

if TYPE_CHECKING:
    from sparsebp.schedule.simulate import Event, Simulation

Use: TypeAlias = Literal["saved", "output_gradients", "weight_gradients", "weights"]
USES: tuple[Use, ...] = ("saved", "output_gradients", "weight_gradients", "weights")


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


class _Change(NamedTuple):
    time: float
    worker: int
    use: Use
    amount: float


def memory_curves(simulation: Simulation) -> tuple[MemoryCurve, ...]:
    """Return the memory account of every worker."""
    graph = simulation.schedule.graph
    changes: list[_Change] = []
    for stage in range(graph.stages):
        account = _StageAccount(simulation, stage)
        changes += account.activations()
        changes += account.output_gradients()
        if graph.weighted(stage):
            changes += account.weight_gradients()
            changes += account.weights()
    changes.sort(key=lambda change: change.time)
    of_worker: list[list[_Change]] = [[] for _ in range(simulation.schedule.workers)]
    for change in changes:
        of_worker[change.worker].append(change)
    return tuple(_curve(worker, found) for worker, found in enumerate(of_worker))


def _curve(worker: int, changes: list[_Change]) -> MemoryCurve:
    """Add changes up."""
    now = dict.fromkeys(USES, 0.0)
    times, values = [0.0], [tuple(now.values())]
    for change in changes:
        now[change.use] += change.amount
        if change.time != times[-1]:
            times.append(change.time)
            values.append(())
        values[-1] = tuple(now.values())
    return MemoryCurve(worker, tuple(times), *zip(*values, strict=True))


class _StageAccount:
    """What one stage allocates and frees."""

    def __init__(self, simulation: Simulation, stage: int) -> None:
        self._simulation, self._stage = simulation, stage
        self._schedule, self._graph = simulation.schedule, simulation.schedule.graph
        self._worker = self._schedule.allocation[stage]
        self._bytes = simulation.costs.bytes_of(stage)

    def activations(self) -> Iterator[_Change]:
        """Yield changes of what forwards keep."""
        steps, carried = self._simulation.steps, self._graph.first == "I"
        saved = kept = self._bytes.saved
        if self._stage in self._schedule.recomputed:
            kept = self._simulation.costs.bytes_of(self._stage - 1).output if self._stage > 0 else 0
        for m in range(self._graph.microbatches):
            for step in range(-1 if carried else 0, steps):  # -1: kept by the forwards before the first step
                users = self._gradients(m, step + carried)
                if not users and not (carried and step + 1 == steps and self._gradients(m, step)):
                    continue
                begin = 0.0 if step < 0 else self._event("F", m, step).start
                yield _Change(begin, self._worker, "saved", kept)
                if users:
                    yield _Change(min(user.start for user in users), self._worker, "saved", saved - kept)
                    yield _Change(max(user.end for user in users), self._worker, "saved", -saved)

    def output_gradients(self) -> Iterator[_Change]:
        """Yield changes of the gradients with respect to the stage's output."""
        source = self._stage + 1
        arrivals = {}
        if source < self._graph.stages and self._schedule.allocation[source] != self._worker:
            arrivals = self._simulation.arrivals
        for step in range(self._simulation.steps):
            for m in range(self._graph.microbatches):
                users = self._gradients(m, step)
                if not users:
                    continue
                if source == self._graph.stages:
                    begin = min(user.start for user in users)
                else:
                    maker = Action(source, "I", m)
                    begin = arrivals[maker, step] if arrivals else self._simulation.event(maker, step).start
                yield _Change(begin, self._worker, "output_gradients", self._bytes.output)
                yield _Change(max(user.end for user in users), self._worker, "output_gradients", -self._bytes.output)

    def weight_gradients(self) -> Iterator[_Change]:
        """Yield changes of the gradients with respect to the stage's weights."""
        everything = range(self._graph.microbatches)
        groups = [[m] for m in everything] if self._graph.updates == "microbatch" else [list(everything)]
        later = self._graph.first == "U"  # the next step applies them
        last = self._simulation.steps
        for step in range(-1 if later else 0, last):
            for group in groups:
                begin = 0.0 if step < 0 else min(self._event("W", m, step).start for m in group)
                yield _Change(begin, self._worker, "weight_gradients", self._bytes.weights)
                if self._graph.updates != "none" and step + later < last:
                    own = group[0] if self._graph.updates == "microbatch" else None
                    end = self._event("U", own, step + later).end
                    yield _Change(end, self._worker, "weight_gradients", -self._bytes.weights)
            if self._graph.updates == "none":
                return  # they stay, and the next step adds to them

    def weights(self) -> Iterator[_Change]:
        """Yield changes of the versions of the stage's weights."""
        yield _Change(0.0, self._worker, "weights", self._bytes.weights)
        if self._graph.weights != "stashed":
            return
        made = self._simulation.updates(self._stage)
        needed = list(made)  # until when each version but the newest is: replaced, and no longer read
        for step in range(self._simulation.steps):
            for m in range(self._graph.microbatches):
                for action in (Action(self._stage, "F", m), Action(self._stage, "I", m)):
                    if action in self._schedule:
                        version = self._simulation.version(action, step)
                        if version < len(needed):
                            needed[version] = max(needed[version], self._simulation.end(action, step))
        for begin, end in zip(made, needed, strict=True):
            yield _Change(begin, self._worker, "weights", self._bytes.weights)
            yield _Change(end, self._worker, "weights", -self._bytes.weights)

    def _gradients(self, m: int, step: int) -> list[Event]:
        """Return the events of I and W of a micro-batch, as far as there are any."""
        if not 0 <= step < self._simulation.steps:
            return []
        actions = (Action(self._stage, "I", m), Action(self._stage, "W", m))
        return [self._simulation.event(action, step) for action in actions if action in self._schedule]

    def _event(self, kind: Literal["F", "W", "U"], m: int | None, step: int) -> Event:
        return self._simulation.event(Action(self._stage, kind, m), step)
