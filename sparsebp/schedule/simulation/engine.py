"""The discrete-event engine of `simulate`: when cells and transfers begin and end, and what they waited for last."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import isfinite
from operator import itemgetter
from typing import Any, NamedTuple

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action, Kind, Overlap, actions_of
from sparsebp.schedule.cells import Send
from sparsebp.schedule.costs import Costs, Route
from sparsebp.schedule.schedule import Schedule
from sparsebp.schedule.simulation.streams import Recomputation, sharing_of


class Transfer(NamedTuple):
    """Data that went from one worker to another.

    Attributes
    ----------
    source
        The action that made them.
    sender, receiver
        Numbers of the workers.
    start, end
        When the link began to send, when they were there.
    step
        Of which repetition of the schedule.
    """

    source: Action
    sender: int
    receiver: int
    start: float
    end: float
    step: int


_NONE: tuple[int | None, ...] = (None,)


class Run:
    """One simulated run; cell `number` of step `step` is entry ``step * len(cells) + number`` of every list.

    Everything that ends at a moment is noted before anything starts at it, and both in the order of the cells' numbers,
    so that equal input gives equal output. What is the same for all repetitions of a cell is looked up before the loop:
    a million actions are to take seconds.

    Attributes
    ----------
    begin, end
        Times of the cells.
    cause
        What a cell waited for last: an entry, ``-1 - number`` of a transfer, or None if it waited for nothing.
    versions
        The weights that each action of a cell reads: how many updates its stage has had. None if it reads none.
    updates
        For every stage the ends of its updates.
    own_update
        The version that the update of (stage, micro-batch, step) made; micro-batch None if it takes all together.
    sends, sources, held_by, left, arrived
        Of every transfer, in the order of their sending: what is sent, the entry that made it, what held its way before
        (as in `cause`), when the network began with it, when it was there.
    """

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
        self._ways: dict[tuple[int, int], _Way] = {}
        self._held: dict[Any, tuple[float, int | None]] = {}  # until when a side is, and by what
        self._shares: dict[int, dict[Any, float]] = {}
        self._holds: set[int] = set()  # entries of S that have their sides
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
        self._look_up()
        self._loop()

    def _look_up(self) -> None:
        """Note which stage's weights every cell reads, and which cells need more than to begin and to end."""
        graph, cells = self.schedule.graph, self.schedule.cells
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
                    self._shares[number] = shares[lane]
                    special = True
            self._special[number] = special or self._recompute.concerns(number)

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
            if not isfinite(now):  # of times that are no numbers none is the next
                raise OptionError(
                    "The step takes longer than numbers go", expected="costs whose times add up",
                    got=f"a time of {now}", remedy="Look at the largest duration, slowdown and latency",
                )  # fmt: skip
            ready = []
            while heap and heap[0][0] == now:
                entry = heappop(heap)[1]
                if entry >= total:
                    self._arrive(entry - total, ready)
                    continue
                if entry < 0:  # an S, whose way is free
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
                if number in sends:
                    for send in sends[number]:
                        self._send(send, entry, now, ready)

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
        if extra is None:  # another stream computes the activations again
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
        """Say whether a cell has come to its end: that may have been moved, or only its recomputation is over."""
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
        """Tell cells that one of the things they wait for is there."""
        waits, base = self._waits, step * self.count
        for reader in readers:
            waits[base + reader] -= 1
            if waits[base + reader] == 0:
                self.cause[base + reader] = cause
                ready.append(base + reader)

    def _send(self, send: Send, entry: int, now: float, ready: list[int]) -> None:
        pair = self._workers[entry % self.count], send.receiver
        way = self._ways.get(pair)
        if way is None:
            way = self._ways[pair] = _Way(self.costs.link.route(*pair), self._sizes)
        held, transfer = self._held, len(self.sends)
        begin, held_by = now, None
        for key in way.keys:
            if key in held and held[key][0] > begin:
                begin, held_by = held[key]
        passed, lasts = begin, way.lasts[send.boundary]
        for at, key in enumerate(way.keys):
            until = begin + lasts[at]
            held[key] = until, -1 - transfer
            passed = max(passed, until)
        end = passed + way.latency
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
        """Let an S have its sides of the network as soon as they are free; return when that is, and what has them."""
        shares, held = self._shares[number], self._held
        free, holder = max((held[key] for key in shares if key in held), key=itemgetter(0), default=(now, None))
        begin = max(free, now)
        for key, share in shares.items():
            held[key] = begin + share * self._durations[number], entry
        return begin, holder

    def _arrive(self, transfer: int, ready: list[int]) -> None:
        step = self.sources[transfer] // self.count
        self._release(self.sends[transfer].readers, step, -1 - transfer, ready)

    def transfers(self) -> Iterator[Transfer]:
        """Yield all transfers in the order of their sending."""
        for send, entry, begin, end in zip(self.sends, self.sources, self.left, self.arrived, strict=True):
            step, number = divmod(entry, self.count)
            yield Transfer(send.source, self._workers[number], send.receiver, begin, end, step)

    def cause_of(self, entry: int) -> int | None:
        """Return the entry that a cell waited for last, if need be by way of what it sent and what held the network."""
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
        """Return the version of the weights that an action reads which starts now, None if it reads none."""
        stage = action.stage
        if action.kind not in "FIB" or stage in self.schedule.graph.unweighted:
            return None
        if self.schedule.graph.weights != "stashed" or action.microbatch is None:
            return len(self.updates[stage])
        if action.kind == "F":
            self._forward_version[stage, action.microbatch, step] = len(self.updates[stage])
        return self._forward_version[stage, action.microbatch, step]


_NOTHING = -1
"""In place of a stage whose weights are read."""


class _Way:
    """A route between two workers: its sides, and for how long the output of every stage occupies each."""

    def __init__(self, route: Route, sizes: list[float]) -> None:
        self.keys = [side.key for side in route.sides]
        self.lasts = [[size / side.bandwidth for side in route.sides] for size in sizes]
        self.latency = route.latency
