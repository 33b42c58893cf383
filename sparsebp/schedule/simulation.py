"""Simulating a schedule: events, transfers, contention, memory, staleness; and how far a simulation was off."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from sparsebp.core.check import check_integer, shown
from sparsebp.core.errors import OptionError
from sparsebp.core.locks import cached_property
from sparsebp.schedule.costs import Costs, Route, carry
from sparsebp.schedule.schedule import (
    KINDS,
    Action,
    Cell,
    Kind,
    Overlap,
    Schedule,
    Send,
    StepGraph,
    actions_of,
    parts_of,
    trusted,
    validate,
)

# Streams of one worker: recomputed activations, and mutual slowdown.


class Recomputation:
    """Who recomputes the activations of a recomputed stage: the first of its I and W; the other waits for it."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.of: dict[int, tuple[int, int]] = {}  # cells that may have to recompute, and their stage and micro-batch
        self._durations: dict[tuple[int, int], float] = {}
        self._state: dict[tuple[int, int, int], int] = {}  # the cell that is at it, or -1 when it is done
        self._waiting: dict[tuple[int, int, int], list[int]] = {}
        for number, cell in enumerate(schedule.cells.cells if schedule.recomputed else ()):
            for part in parts_of(cell):
                if part.kind in "IW" and part.stage in schedule.recomputed and part.microbatch is not None:
                    key = part.stage, part.microbatch
                    self.of[number] = key
                    self._durations[key] = costs.duration(Action(part.stage, "F", part.microbatch))

    def needed(self, number: int, step: int) -> float | None:
        """Return how long a cell that starts now recomputes first, None if another is recomputing."""
        key = self.of.get(number)
        if key is None:
            return 0.0
        state = self._state.setdefault((*key, step), number if self._durations[key] > 0 else -1)
        return 0.0 if state == -1 else self._durations[key] if state == number else None

    def wait(self, number: int, step: int, entry: int) -> int:
        """Let a cell wait, and return the one that it waits for."""
        key = (*self.of[number], step)
        self._waiting.setdefault(key, []).append(entry)
        return self._state[key]

    def running(self, number: int, step: int) -> bool:
        """Whether a cell has been recomputing until now."""
        return number in self.of and self._state[*self.of[number], step] == number

    def finish(self, number: int, step: int) -> list[int]:
        """Record that a cell has recomputed, and return the cells that waited for it."""
        key = (*self.of[number], step)
        self._state[key] = -1
        return self._waiting.pop(key, [])


class Sharing:
    """The streams of one worker that slow each other down (processor sharing)."""

    def __init__(self) -> None:
        self._slowdown: dict[int, float] = {}
        self._left: dict[int, float] = {}
        self._until: dict[int, float] = {}
        self._since = 0.0

    def add(self, entry: int, duration: float, slowdown: float, now: float, heap: list[tuple[float, int]]) -> None:
        """Start a cell, and delay the others."""
        self._progress(now)
        self._left[entry], self._slowdown[entry] = duration, slowdown
        self._expect(now, heap)

    def remove(self, entry: int, now: float, heap: list[tuple[float, int]]) -> bool:
        """End a cell, and speed the others up; False if its end has moved."""
        if self._until.get(entry) != now:
            return False
        self._progress(now)
        del self._left[entry], self._until[entry], self._slowdown[entry]
        self._expect(now, heap)
        return True

    def _factor(self, entry: int) -> float:
        return 1 + (len(self._left) - 1) * (self._slowdown[entry] - 1)

    def _progress(self, now: float) -> None:
        passed, self._since = now - self._since, now
        for entry in self._left:
            self._left[entry] = max(0.0, self._left[entry] - passed / self._factor(entry))

    def _expect(self, now: float, heap: list[tuple[float, int]]) -> None:
        for entry, left in self._left.items():
            until = now + left * self._factor(entry)
            if until != self._until.get(entry):
                self._until[entry] = until
                heappush(heap, (until, entry))


def sharing_of(schedule: Schedule, costs: Costs) -> dict[int, Sharing]:
    """Return the shared device of each lane, by the lane's number; nothing where lanes do not slow each other down."""
    if costs.slowdown == 1:
        return {}
    lanes: dict[int, list[int]] = {}
    for number, lane in enumerate(schedule.lanes):
        if lane.stream != "link":
            lanes.setdefault(lane.worker, []).append(number)
    return {number: sharing for numbers in lanes.values() if len(numbers) > 1
            for sharing in [Sharing()] for number in numbers}  # fmt: skip


class Transfer(NamedTuple):
    """Data that went from one worker to another.

    Attributes
    ----------
    source
        The action that made them.
    sender, receiver
        Workers.
    start, end
        When the link began to send, when the data arrived.
    step
        The repetition of the schedule.
    """

    source: Action
    sender: int
    receiver: int
    start: float
    end: float
    step: int


_NONE: tuple[int | None, ...] = (None,)


class Run:
    """One simulated run; cell `number` of step `step` is entry ``step * len(cells) + number`` of every list."""

    # All that ends at a moment is recorded before anything starts at it, both in the order of the cells' numbers, so
    # that equal input gives equal output. Lookups that are the same for all repetitions of a cell come before the loop:
    # a million actions are to take seconds.
    # begin, end: Times of the cells.
    # cause: What a cell waited for last: an entry, ``-1 - number`` of a transfer, or None if it waited for nothing.
    # versions: The weights that each action of a cell reads: how many updates its stage has had. None if it reads none.
    # updates: For every stage the ends of its updates.
    # own_update: The version that the update of (stage, micro-batch, step) made; micro-batch None: of all together.
    # sends, sources, held_by, left, arrived: Of every transfer, in sending order: its data, the entry that made it,
    # what occupied its path before (as in `cause`), when the network began with it, when it arrived.

    def __init__(self, schedule: Schedule, costs: Costs, steps: int) -> None:
        self.schedule, self.costs, self.steps = schedule, costs, steps
        graph = schedule.cells
        self.count = len(graph.cells)
        total = self.count * steps
        self.begin, self.end = [0.0] * total, [0.0] * total
        self.cause: list[int | None] = [None] * total
        self.versions: list[tuple[int | None, ...]] = [_NONE] * total
        self.updates: list[list[float]] = [[] for _ in range(schedule.graph.stages)]
        self.own_update: dict[tuple[int, int | None, int], int] = {}
        self.sends: list[Send] = []
        self.sources: list[int] = []
        self.held_by: list[int | None] = []
        self.left: list[float] = []
        self.arrived: list[float] = []

        self._waits = [*graph.waits]
        self._carried: list[list[int]] = []
        if steps > 1:
            self._carried, before = schedule.carried
            self._waits += [own + more for own, more in zip(graph.waits, before, strict=True)] * (steps - 1)
        self._durations = costs.durations_of(graph.cells, schedule.graph)
        self._forward_version: dict[tuple[int, int, int], int] = {}
        self._workers = [schedule.lanes[lane].worker for lane in graph.lanes]
        self._sizes = [costs.bytes_of(stage).output for stage in range(len(self.updates))]
        self._routes: dict[tuple[int, int], Route] = {}
        self._held: dict[Any, tuple[float, int | None]] = {}  # until when a side is occupied, and by what
        self._shares: dict[int, dict[Any, float]] = {}
        self._holding: dict[int, float] = {}  # cells that occupy the network themselves, and for how long
        self._holds: set[int] = set()  # their entries that have their sides
        self._heap: list[tuple[float, int]] = []
        self._recompute = Recomputation(schedule, costs)
        self._sharing = sharing_of(schedule, costs)
        self._slowdowns = [
            max(costs.slowdown_of(action) for action in actions_of(cell)) if self._sharing else 1.0
            for cell in (graph.cells if self._sharing else ())
        ]
        self._current: list[tuple[int | None, ...]] = [(0,)] * len(self.updates)
        self._reads = [_NOTHING] * self.count
        self._special = [False] * self.count
        self._blocked: dict[int, tuple[int, int]] = {}  # cells that wait for what another sends; 1 if in the next step
        self._unfinished = [self.count] * steps if costs.barrier is not None and steps > 1 else []
        self._look_up()
        self._add_waits()
        self._loop()

    def _look_up(self) -> None:
        """Find each cell's stage whose weights it reads, and the cells that need more than to begin and to end."""
        graph, cells, costs = self.schedule.graph, self.schedule.cells, self.costs
        stashed = graph.weights == "stashed"
        lanes = [bool(self._sharing) and lane in self._sharing for lane in range(len(self.schedule.lanes))]
        shares = [self.costs.link.shares(lane.worker) for lane in self.schedule.lanes]
        for number, cell in enumerate(cells.cells):
            lane = cells.lanes[number]
            special = lanes[lane]
            if isinstance(cell, Overlap):
                special = True
            else:
                stage, kind, _ = cell
                if kind in "FIB" and stage not in graph.unweighted:
                    special = special or stashed
                    self._reads[number] = stage
                if kind == "S" and shares[lane]:
                    self._holding[number] = self._durations[number]
            if costs.has_collectives and shares[lane] and (calls := sum(map(costs.collective, actions_of(cell)))):
                self._holding[number] = calls
            if number in self._holding:
                self._shares[number] = shares[lane]
                special = True
            self._special[number] = special or number in self._recompute.of

    def _add_waits(self) -> None:
        """Let cells wait for blocking sends of the cell before them, and for the barrier between steps."""
        cells, waits = self.schedule.cells, self._waits
        for number, sends in cells.sends.items() if self.costs.blocking_sends else ():
            last = number + 1 == self.count or cells.lanes[number + 1] != cells.lanes[number]
            follower, later = (cells.first[cells.lanes[number]], 1) if last else (number + 1, 0)
            self._blocked[number] = follower, later
            for step in range(later, self.steps):
                waits[step * self.count + follower] += len(sends)
        self._sources = [number for number, count in enumerate(cells.waits) if not count] if self._unfinished else []
        for step in range(1, self.steps if self._unfinished else 0):
            for number in self._sources:
                waits[step * self.count + number] += 1

    def _loop(self) -> None:
        """Run until nothing is left to happen."""
        heap, total, count, last_step = self._heap, len(self.begin), self.count, self.steps - 1
        begin, end, cause, versions, waits = self.begin, self.end, self.cause, self.versions, self._waits
        special, durations, reads, current = self._special, self._durations, self._reads, self._current
        followers, carried, sends = self.schedule.cells.followers, self._carried, self.schedule.cells.sends
        updates = {n for n, cell in enumerate(self.schedule.cells.cells) if isinstance(cell, Action) and cell[1] == "U"}
        ready = [entry for entry, count_ in enumerate(waits) if count_ == 0]
        now = 0.0
        while True:
            ready.sort()
            for entry in ready:
                number = entry % count
                if special[number]:
                    self._start(entry, now)
                    continue
                begin[entry] = now
                if reads[number] != _NOTHING:
                    versions[entry] = current[reads[number]]
                heappush(heap, (now + durations[number], entry))
            if not heap:
                return
            now = heap[0][0]
            if not math.isfinite(now):  # NaN has no order
                raise OptionError("The step takes longer than numbers go", expected="finite times", got=now)
            ready = []
            while heap and heap[0][0] == now:
                entry = heappop(heap)[1]
                if entry >= total:
                    self._arrive(entry - total, ready)
                    continue
                if entry < 0:  # a cell whose path, or barrier, is free
                    ready.append(-1 - entry)
                    continue
                number = entry % count
                if special[number] and not self._has_ended(entry, now, ready):
                    continue
                end[entry] = now
                step = entry // count
                if number in updates:
                    self._update(number, step, now)
                base = entry - number
                for reader in followers[number]:
                    reader += base  # noqa: PLW2901
                    waits[reader] -= 1
                    if not waits[reader]:
                        cause[reader] = entry
                        ready.append(reader)
                if step < last_step:
                    self._release(carried[number], step + 1, entry, ready)
                    if self._unfinished:
                        self._finish(step, entry, now)
                if number in sends:
                    for send in sends[number]:
                        self._send(send, entry, now, ready)

    def _finish(self, step: int, entry: int, now: float) -> None:
        """Count a cell that has ended; after the step's last one the barrier opens."""
        self._unfinished[step] -= 1
        if not self._unfinished[step]:
            free: list[int] = []
            self._release(self._sources, step + 1, entry, free)
            for begun in free:
                heappush(self._heap, (now + (self.costs.barrier or 0.0), -1 - begun))

    def _start(self, entry: int, now: float) -> None:
        """Begin a cell that is not an action alone on its worker."""
        step, number = divmod(entry, self.count)
        if number in self._shares and entry not in self._holds:
            free, holder = self._hold(number, entry, now)
            self._holds.add(entry)
            if free > now:
                self.cause[entry] = holder
                heappush(self._heap, (free, -1 - entry))
                return
        extra = self._recompute.needed(number, step)
        if extra is None:  # another stream recomputes the activations
            self.cause[entry] = step * self.count + self._recompute.wait(number, step, entry)
            return
        self.begin[entry] = now
        cell = self.schedule.cells.cells[number]
        self.versions[entry] = tuple(self._version(action, step) for action in actions_of(cell))
        self._work(entry, extra if extra > 0 else self._durations[number], now)

    def _work(self, entry: int, duration: float, now: float) -> None:
        """Let a cell work for as long as it would take by itself."""
        sharing = self._sharing.get(self.schedule.cells.lanes[entry % self.count])
        if sharing is None:
            heappush(self._heap, (now + duration, entry))
        else:
            sharing.add(entry, duration, self._slowdowns[entry % self.count], now, self._heap)

    def _has_ended(self, entry: int, now: float, ready: list[int]) -> bool:
        """Whether a cell has come to its end: that may have moved, or only its recomputation is over."""
        step, number = divmod(entry, self.count)
        sharing = self._sharing.get(self.schedule.cells.lanes[number])
        if sharing is not None and not sharing.remove(entry, now, self._heap):
            return False
        if self._recompute.running(number, step):
            ready += self._recompute.finish(number, step)
            self._work(entry, self._durations[number], now)
            return False
        return True

    def _update(self, number: int, step: int, now: float) -> None:
        stage, _, microbatch = self.schedule.cells.cells[number]  # type: ignore[misc]  # an action
        self.updates[stage].append(now)
        version = len(self.updates[stage])
        self._current[stage] = (version,)
        self.own_update[stage, microbatch, step] = version

    def _release(self, readers: list[int], step: int, cause: int, ready: list[int]) -> None:
        """Tell cells that one of their dependencies is ready."""
        waits, base = self._waits, step * self.count
        for reader in readers:
            waits[base + reader] -= 1
            if waits[base + reader] == 0:
                self.cause[base + reader] = cause
                ready.append(base + reader)

    def _send(self, send: Send, entry: int, now: float, ready: list[int]) -> None:
        pair = self._workers[entry % self.count], send.receiver
        route = self._routes.get(pair)
        if route is None:
            route = self._routes[pair] = self.costs.link.route(*pair)
        transfer, size = len(self.sends), self._sizes[send.source.stage - (send.source.kind == "I")]
        begin, end, held_by = carry(route, size, now, self._held, -1 - transfer)
        self.sends.append(send)
        self.sources.append(entry)
        self.held_by.append(held_by)
        self.left.append(begin)
        self.arrived.append(end)
        if end > now:
            heappush(self._heap, (end, len(self.begin) + transfer))
        else:
            self._arrive(transfer, ready)

    def _hold(self, number: int, entry: int, now: float) -> tuple[float, int | None]:
        """Let a cell occupy its sides of the network as soon as they are free; return when, and what occupies them."""
        shares, held = self._shares[number], self._held
        free, holder = max((held[key] for key in shares if key in held), key=itemgetter(0), default=(now, None))
        begin = max(free, now)
        for key, share in shares.items():
            held[key] = begin + share * self._holding[number], entry
        return begin, holder

    def _arrive(self, transfer: int, ready: list[int]) -> None:
        step, number = divmod(self.sources[transfer], self.count)
        self._release(self.sends[transfer].readers, step, -1 - transfer, ready)
        if number in self._blocked:
            follower, later = self._blocked[number]
            if step + later < self.steps:
                self._release([follower], step + later, -1 - transfer, ready)

    def transfers(self) -> Iterator[Transfer]:
        """Yield all transfers in the order of their sending."""
        for send, entry, begin, end in zip(self.sends, self.sources, self.left, self.arrived, strict=True):
            step, number = divmod(entry, self.count)
            yield Transfer(send.source, self._workers[number], send.receiver, begin, end, step)

    def cause_of(self, entry: int) -> int | None:
        """Return the entry that a cell waited for last, past its transfer and what occupied the network."""
        cause = self.cause[entry]
        while cause is not None and cause < 0:
            before = self.held_by[-1 - cause]
            cause = self.sources[-1 - cause] if before is None else before
        return cause

    def version_of(self, number: int, step: int, kind: Kind) -> int | None:
        """Return the version of the weights that a cell's forward or backward read."""
        read = zip(
            actions_of(self.schedule.cells.cells[number]), self.versions[step * self.count + number], strict=True
        )
        return next((version for action, version in read if (action.kind == "F") == (kind == "F")), None)

    def _version(self, action: Action, step: int) -> int | None:
        """Return the version of the weights that an action starting now reads, None if it reads none."""
        stage = action.stage
        if action.kind not in "FIB" or stage in self.schedule.graph.unweighted:
            return None
        if self.schedule.graph.weights != "stashed" or action.microbatch is None:
            return len(self.updates[stage])
        key = stage, action.microbatch, step
        if action.kind == "F":
            self._forward_version[key] = len(self.updates[stage])
        return self._forward_version[key]


_NOTHING = -1
"""In place of a stage whose weights are read."""


# The memory account of a simulated schedule.

USES = ("saved", "output_gradients", "weight_gradients", "weights", "inputs", "optimizer")
_SAVED, _OUTPUT_GRADIENTS, _WEIGHT_GRADIENTS, _WEIGHTS, _INPUTS, _OPTIMIZER = range(len(USES))


@dataclass(frozen=True)
class MemoryCurve:
    """One worker's memory over time.

    Attributes
    ----------
    worker
        Its number.
    times
        When the amount changes, from 0. Amounts that hold for no time are left out.
    saved
        Activations kept for the backward, from each of `times` until the next: from the start of F until I and W have
        ended (the part that W does not read until I has, see `StageBytes`); of a recomputed stage only its input (the
        output of the stage before; nothing for stage 0, whose input is the data) until the first of I and W starts.
    output_gradients
        Gradients with respect to the outputs of the worker's stages: from the start of the I that makes them (from
        their arrival, if another worker makes them; from the first use, if the loss does) until I and W have used them.
    weight_gradients
        From the start of the first W until the end of U; until the end where the step has no U.
    weights
        All versions that are still to be read. One per stage, except for ``weights="stashed"``.
    inputs
        Outputs of the stage before that wait for their forward: from their arrival, or from the end of the forward that
        makes them on the same worker, until the forward starts and counts them as saved. Without a backward until it
        ends. The input of stage 0 is the data, and not counted.
    optimizer
        State of the optimizer, all the time where the step has a backward.
    """

    worker: int
    times: tuple[float, ...]
    saved: tuple[float, ...]
    output_gradients: tuple[float, ...]
    weight_gradients: tuple[float, ...]
    weights: tuple[float, ...]
    inputs: tuple[float, ...]
    optimizer: tuple[float, ...]

    @property
    def bytes(self) -> tuple[float, ...]:
        """The sum of all uses."""
        return tuple(map(sum, zip(*(getattr(self, use) for use in USES), strict=True)))

    @property
    def peak(self) -> float:
        """The most that is kept at any time."""
        return max(self.bytes)


_Change: TypeAlias = tuple[float, int, float]  # when, which of `USES`, difference


def memory_curves(run: Run) -> tuple[MemoryCurve, ...]:
    """Return the memory account of every worker."""
    graph = run.schedule.graph
    arrivals = {(transfer.source, transfer.step): transfer.end for transfer in run.transfers()}
    changes: list[list[_Change]] = [[] for _ in range(run.schedule.workers)]
    for stage in range(graph.stages):
        for worker in run.schedule.workers_of(stage):
            account, own = _StageAccount(run, stage, worker, arrivals), changes[worker]
            own += account.inputs()
            own += account.activations()
            own += account.output_gradients()
            if graph.weighted(stage):
                own += account.weight_gradients() if graph.backward else ()
                own += account.weights()
    return tuple(_curve(worker, found) for worker, found in enumerate(changes))


def _curve(worker: int, changes: list[_Change]) -> MemoryCurve:
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
    """Allocations of one stage on one worker."""

    def __init__(self, run: Run, stage: int, worker: int, arrivals: dict[tuple[Action, int], float]) -> None:
        self._run, self._stage, self._arrivals = run, stage, arrivals
        self._schedule, self._graph = run.schedule, run.schedule.graph
        self._bytes = run.costs.bytes_of(stage)
        found = run.schedule.cells.numbers
        own: Sequence[int] = range(self._graph.microbatches)
        if stage in run.schedule.replicated:
            own = [m for m in own if run.schedule.worker_of(stage, m) == worker]
        self._microbatches = own
        self._forwards = [found[trusted(stage, "F", m)] for m in own]
        self._backwards = [found.get(trusted(stage, "I", m)) for m in own]
        self._weight_gradients = [found.get(trusted(stage, "W", m)) for m in own]
        self._users = [[number for number in pair if number is not None]
                       for pair in zip(self._backwards, self._weight_gradients, strict=True)]  # fmt: skip

    def inputs(self) -> Iterator[_Change]:
        """Yield changes of the inputs that wait for their forwards."""
        if not self._stage:
            return
        run, amount = self._run, self._run.costs.bytes_of(self._stage - 1).output
        for m, forward, users in zip(self._microbatches, self._forwards, self._users, strict=True):
            maker = trusted(self._stage - 1, "F", m)
            source = run.schedule.cells.numbers[maker]
            for step in range(run.steps):
                base = step * run.count
                made = self._arrivals.get((maker, step))
                begin, end = run.end[base + source] if made is None else made, run.begin[base + forward]
                if not users:
                    end = run.end[base + forward]
                if begin < end:
                    yield begin, _INPUTS, amount
                    yield end, _INPUTS, -amount

    def activations(self) -> Iterator[_Change]:
        """Yield changes of the saved activations."""
        run, carried = self._run, self._graph.first == "I"
        saved = kept = self._bytes.saved
        freed = self._bytes.freed_by_input_gradient
        if self._stage in self._schedule.recomputed:
            kept = run.costs.bytes_of(self._stage - 1).output if self._stage > 0 else 0
        for forward, backward, users in zip(self._forwards, self._backwards, self._users, strict=True):
            if not users:
                continue
            for step in range(-1 if carried else 0, run.steps):  # -1: kept by the forwards before the first step
                yield (0.0 if step < 0 else run.begin[step * run.count + forward]), _SAVED, kept
                if step + carried < run.steps:
                    begin, end = self._span(users, step + carried)
                    if saved != kept:
                        yield begin, _SAVED, saved - kept
                    if freed and backward is not None:
                        yield run.end[(step + carried) * run.count + backward], _SAVED, -freed
                        yield end, _SAVED, freed - saved
                    else:
                        yield end, _SAVED, -saved

    def output_gradients(self) -> Iterator[_Change]:
        """Yield changes of the gradients with respect to the stage's output."""
        run, source, amount = self._run, self._stage + 1, self._bytes.output
        loss = source == self._graph.stages
        for m, users in zip(self._microbatches, self._users, strict=True):
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
        run, amount, found = self._run, self._bytes.weight_gradients, self._schedule.cells.numbers
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
        yield 0.0, _OPTIMIZER, self._bytes.optimizer if self._graph.backward else 0
        if self._graph.weights != "stashed":
            return
        made = run.updates[self._stage]
        needed = [*made, math.inf]  # until when each version is kept: replaced, and no longer read
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


# The results of a simulation: times, waiting, staleness of the weights, memory.


class Event(NamedTuple):
    """A cell that ran.

    Attributes
    ----------
    cell
        One action, or an overlap of two.
    lane
        The number of its lane in ``schedule.lanes``.
    start, end
        Times. Recomputation of activations is included.
    versions
        For every action of the cell, the version of its stage's weights that it read: the number of updates since the
        beginning. None for actions that read no weights (W, S, U, and all of a stage without).
    step
        The repetition of the schedule.
    """

    cell: Cell
    lane: int
    start: float
    end: float
    versions: tuple[int | None, ...]
    step: int


MOST_STEPS = 10**6
"""Steps of one simulation at most; a schedule repeats itself long before."""


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate`; `schedule`, `costs` and `steps` are its arguments."""

    schedule: Schedule
    costs: Costs
    steps: int
    _run: Run = field(repr=False, compare=False)

    @cached_property
    def _entries(self) -> list[Event]:
        run, cells, lanes, count = self._run, self.schedule.cells.cells, self.schedule.cells.lanes, self._run.count
        return [
            Event(cells[i % count], lanes[i % count], run.begin[i], run.end[i], run.versions[i], i // count)
            for i in range(len(run.begin))
        ]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All cells, sorted by start."""
        return tuple(sorted(self._entries, key=lambda event: event.start))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All data sent between workers, sorted by start."""
        return tuple(sorted(self._run.transfers(), key=lambda transfer: transfer.start))

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last."""
        return max(self._run.end)

    @cached_property
    def bubble(self) -> float:
        """The share of the time in which workers are idle: of their main streams, from 0 to 1."""
        busy = [time for time, _ in self._spans]
        return max(0.0, 1 - sum(busy) / (len(busy) * self.makespan)) if self.makespan > 0 else 0.0

    @cached_property
    def span_bubble(self) -> float:
        """The idle share of the longest span, from a worker's first action to its last: the bubble rate of the papers.

        Qi et al., "Zero bubble pipeline parallelism", 2023, §5.3, divide by it: a worker that starts later also ends
        later, so the next step can follow without a gap. Of main streams, from 0 to 1.
        """
        busy, span = max(self._spans, key=itemgetter(1))
        return max(0.0, 1 - busy / span) if span > 0 else 0.0

    @cached_property
    def _spans(self) -> list[tuple[float, float]]:
        """How long every worker's main stream is busy, and the time from its first action to its last."""
        main: dict[int, int] = {}
        for number, lane in enumerate(self.schedule.lanes):
            if lane.stream == "main" or lane.worker not in main:
                main[lane.worker] = number
        run, last = self._run, (self.steps - 1) * self._run.count
        spans = []
        for number in main.values():
            first = self.schedule.cells.first[number]
            own = range(first, first + len(self.schedule.lanes[number].cells))
            busy = sum(run.end[step * run.count + cell] - run.begin[step * run.count + cell]
                       for step in range(self.steps) for cell in own)  # fmt: skip
            spans.append((busy, run.end[last + own[-1]] - run.begin[own[0]] if own else 0.0))
        return spans

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """A chain of events, each of which waited for the one before it (its data, its lane or its link), to the last.

        To make the step shorter, one of these must become shorter or a transfer between them faster.
        """
        run = self._run
        entry: int | None = max(range(len(run.end)), key=lambda i: run.end[i])
        path = []
        while entry is not None:
            path.append(self._entries[entry])
            entry = run.cause_of(entry)
        return tuple(reversed(path))

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """Every worker's memory over time."""
        return memory_curves(self._run)

    @cached_property
    def peak(self) -> float:
        """The most memory that any worker uses at any time."""
        return max(curve.peak for curve in self.memory)

    def event(self, action: Action, step: int = 0) -> Event:
        """Return the event of an action (of I and W within B: the B's).

        Raises
        ------
        OptionError
            The action or step was not simulated.
        """
        if action.kind == "B":
            action = next((part for part in parts_of(action) if part in self.schedule), action)
        number = self.schedule.cells.numbers.get(action)
        if number is None or not 0 <= step < self.steps:
            got, expected = f"{action}, step {step}", f"an action of the schedule, step 0 to {self.steps - 1}"
            raise OptionError("This was not simulated", expected=expected, got=got,
                              remedy="Simulate more steps, or ask for another action")  # fmt: skip
        return self._entries[step * self._run.count + number]

    def start(self, action: Action, step: int = 0) -> float:
        """Return when an action started."""
        return self.event(action, step).start

    def end(self, action: Action, step: int = 0) -> float:
        """Return when an action ended."""
        return self.event(action, step).end

    def version(self, action: Action, step: int = 0) -> int:
        """Return the version of its stage's weights that a forward or backward read.

        Raises
        ------
        OptionError
            The action reads no weights, or was not simulated.
        """
        self.event(action, step)
        if action.kind in "FIB":
            part = Action(action.stage, "F" if action.kind == "F" else "I", action.microbatch)
            number = self.schedule.cells.numbers.get(part)
            version = None if number is None else self._run.version_of(number, step, part.kind)
            if version is not None:
                return version
        raise OptionError(f"{action} reads no weights", expected="F, I or B of a stage with weights", got=str(action))

    def staleness(self, action: Action, step: int = 0) -> int:
        """Return the number of updates of its stage between the weights that an action read and its gradient's update.

        0 if the gradient is applied to the very weights that it was computed with; negative if an I reads weights that
        include it already (``weights="latest"``, and the update before I).
        """
        version = self.version(action, step)
        if self.schedule.graph.updates != "microbatch":
            return 0
        return self._run.own_update[action.stage, action.microbatch, step] - 1 - version

    def version_difference(self, action: Action, step: int = 0) -> int:
        """Return the number of updates of its stage from the weights that an action reads until its round trip is over.

        The round trip is over when the micro-batch's backward reaches stage 0 (Chen et al., "Efficient and robust
        parallel DNN training through model parallelism", 2018, §3.3): the weights to predict are that far ahead.

        Raises
        ------
        OptionError
            The round trip ends in a step after the simulated ones.
        """
        version = self.version(action, step)
        over = Action(0, "I", action.microbatch)
        over = over if over in self.schedule else Action(0, "W", action.microbatch)
        later = step + (self.schedule.graph.first == "I" and action.kind == "F")
        time = self.start(over, later)
        return bisect_right(self._run.updates[action.stage], time) - version


def simulate(schedule: Schedule, costs: Costs | None = None, *, steps: int = 1) -> Simulation:
    """Find out when everything in a schedule happens.

    Every lane runs its cells in order; a cell starts when the one before it has ended and its data are ready. Data for
    another worker travel over `Costs.link`. Equal arguments give equal results.

    Parameters
    ----------
    schedule
        The schedule, which is validated first.
    costs
        By default F, I and W take 1, the rest nothing.
    steps
        How often the schedule is repeated. Step follows step without a pause: where data and lanes allow, the next one
        starts before the last has ended.

    Raises
    ------
    ScheduleError
        The schedule cannot run.
    OptionError
        A duration is missing or negative; the costs are of another number of stages, or name one that the schedule does
        not have; there are no steps; or times overflow.
    """
    steps = check_integer("steps", steps, 1, MOST_STEPS)
    if costs is not None and not isinstance(costs, Costs):
        raise OptionError("costs have the wrong type", expected="Costs, or None", got=type(costs).__name__)
    validate(schedule)
    costs = Costs() if costs is None else costs
    costs.check(schedule.graph)
    return Simulation(schedule, costs, steps, Run(schedule, costs, steps))


def depth(graph: StepGraph, costs: Costs | None = None) -> float:
    """Return the length of the longest chain of actions that need each other: no schedule is shorter.

    All actions, S and U too, take 1 without `costs`. Transfers are free.
    """
    costs = Costs(dict.fromkeys(KINDS, 1.0)) if costs is None else Costs(costs.durations)
    unlimited = Schedule.of(graph, [{str(action): [action] for action in graph.required()}])
    return max(Run(unlimited, costs, 1).end)


# Comparing a simulated step with a measured one.


@dataclass(frozen=True)
class Errors:
    """Errors of a simulation against a measured step.

    Attributes
    ----------
    makespan
        Relative error of the length of the step: simulated / measured - 1.
    starts
        For every action, its delay in the simulation, as a share of the measured length. Both begin with their first
        action.
    durations
        For every action, simulated / measured - 1 of its duration; infinite where only the measured duration is 0, 0
        where both are.
    """

    makespan: float
    starts: Mapping[Action, float]
    durations: Mapping[Action, float]

    @property
    def mean_start(self) -> float:
        """The mean of the sizes of the errors of starts."""
        return sum(map(abs, self.starts.values())) / len(self.starts)


def compare(simulation: Simulation, spans: Iterable[tuple[Action, float, float]]) -> Errors:
    """Compare a simulated step with the measured one.

    Parameters
    ----------
    simulation
        Of one step, with costs in seconds.
    spans
        The same actions as measured: action, start, end, in seconds of one clock for all workers (`Span` of
        `sparsebp.runtime.executor`, say), in any order.

    Raises
    ------
    OptionError
        The simulation has several steps, an action is missing, foreign or there twice, a time is not finite, an action
        ends before it starts, or all of them took no time.
    """
    if simulation.steps != 1:
        raise OptionError("The simulation has several steps", expected="steps=1", got=simulation.steps)
    measured = _checked(simulation, spans)
    simulated = {action: (event.start, event.end) for event in simulation.events for action in actions_of(event.cell)}
    begin, end = min(start for start, _ in measured.values()), max(end for _, end in measured.values())
    first, length = min(start for start, _ in simulated.values()), end - begin
    if length <= 0:
        raise OptionError("The measured step took no time", expected="a longer one", got=length)
    starts = {action: ((simulated[action][0] - first) - (start - begin)) / length
              for action, (start, _) in measured.items()}  # fmt: skip
    durations = {}
    for action, (start, end) in measured.items():
        lasted, took = simulated[action][1] - simulated[action][0], end - start
        durations[action] = lasted / took - 1 if took else 0.0 if lasted == 0 else math.inf
    return Errors((simulation.makespan - first) / length - 1, starts, durations)


def _checked(simulation: Simulation, spans: Iterable[tuple[Action, float, float]]) -> dict[Action, tuple[float, float]]:
    wanted = set(simulation.schedule)
    measured: dict[Action, tuple[float, float]] = {}
    for action, start, end in spans:
        if action in measured or action not in wanted:
            raise OptionError("The measured step is another one", expected="every action of the schedule, once",
                              got=f"{action}{' twice' if action in measured else ''}")  # fmt: skip
        if not (math.isfinite(start) and math.isfinite(end) and start <= end):
            got = f"{shown(start)} to {shown(end)}"
            raise OptionError(f"The times of {action} cannot be", expected="a start, and an end no earlier", got=got)
        measured[action] = float(start), float(end)
    if len(measured) < len(wanted):
        raise OptionError("The measured step is another one", expected=f"the {len(wanted)} actions of the schedule",
                          got=f"{len(measured)}, without {min(wanted - measured.keys(), key=str)}")  # fmt: skip
    return measured
