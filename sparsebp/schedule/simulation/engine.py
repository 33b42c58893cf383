"""The discrete-event engine of `simulate`: when cells and transfers begin and end, and what they waited for last."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from sparsebp.schedule.actions import Action, Kind, Overlap, actions_of, parts_of
from sparsebp.schedule.cells import Send
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.schedule import Schedule


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


class Sent(NamedTuple):
    """Where a transfer comes from: what is sent, the entry that made it, the transfer that held the link before."""

    send: Send
    entry: int
    held_by: int | None


class Run:
    """One simulated run; cell `number` of step `step` is entry ``step * len(cells) + number`` of every list.

    Everything that ends at a moment is noted before anything starts at it, and both in the order of the cells' numbers,
    so that equal input gives equal output.

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
    transfers, sent
        In the order of their sending.
    """

    def __init__(self, schedule: Schedule, costs: Costs, steps: int) -> None:
        self.schedule, self.costs, self.steps = schedule, costs, steps
        graph = schedule.cells
        self.count = len(graph.cells)
        total = self.count * steps
        self.begin, self.end = [0.0] * total, [0.0] * total
        self.cause: list[int | None] = [None] * total
        self.versions: list[tuple[int | None, ...]] = [(None,)] * total
        self.updates: list[list[float]] = [[] for _ in range(schedule.graph.stages)]
        self.own_update: dict[tuple[int, int | None, int], int] = {}
        self.transfers: list[Transfer] = []
        self.sent: list[Sent] = []

        self._waits = [*graph.waits]
        self._carried: list[list[int]] = []
        if steps > 1:
            self._carried, before = schedule.carried
            self._waits += [own + more for own, more in zip(graph.waits, before, strict=True)] * (steps - 1)
        self._durations = [
            costs.together(cell, schedule.graph) if isinstance(cell, Overlap) else costs.duration(cell)
            for cell in graph.cells
        ]
        self._forward_version: dict[tuple[int, int, int], int] = {}
        self._workers = [schedule.lanes[lane].worker for lane in graph.lanes]
        self._sending = [costs.bytes_of(stage).output / costs.link.bandwidth for stage in range(len(self.updates))]
        self._link_free: dict[tuple[int, int], tuple[float, int]] = {}
        self._heap: list[tuple[float, int]] = []
        self._recompute = _Recomputation(schedule, costs)
        self._sharing = _sharing_of(schedule, costs)
        self._slowdowns = [
            max(costs.slowdown_of(action) for action in actions_of(cell)) if self._sharing else 1.0
            for cell in graph.cells
        ]
        self._loop()

    def _loop(self) -> None:
        """Run until nothing is left to happen."""
        heap, total = self._heap, len(self.begin)
        ready = [entry for entry, waits in enumerate(self._waits) if waits == 0]
        now = 0.0
        while True:
            for entry in sorted(ready):
                self._start(entry, now)
            if not heap:
                return
            now = heap[0][0]
            ready = []
            while heap and heap[0][0] == now:
                _, entry = heappop(heap)
                if entry >= total:
                    self._arrive(entry - total, ready)
                else:
                    self._finish(entry, now, ready)

    def _start(self, entry: int, now: float) -> None:
        step, number = divmod(entry, self.count)
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

    def _finish(self, entry: int, now: float, ready: list[int]) -> None:
        step, number = divmod(entry, self.count)
        graph = self.schedule.cells
        sharing = self._sharing.get(graph.lanes[number])
        if sharing is not None and not sharing.remove(entry, now, self._heap):
            return
        if self._recompute.running(number, step):
            ready += self._recompute.finish(number, step)
            self._work(entry, self._durations[number], now)
            return
        self.end[entry] = now
        cell = graph.cells[number]
        if isinstance(cell, Action) and cell.kind == "U":
            self.updates[cell.stage].append(now)
            self.own_update[cell.stage, cell.microbatch, step] = len(self.updates[cell.stage])
        self._release(graph.followers[number], step, entry, ready)
        if step + 1 < self.steps:
            self._release(self._carried[number], step + 1, entry, ready)
        for send in graph.sends.get(number, ()):
            self._send(send, entry, now, ready)

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
        free, last = self._link_free.get(pair, (now, -1))
        begin = max(now, free)
        until = begin + self._sending[send.boundary]
        end = until + self.costs.link.latency
        transfer = len(self.sent)
        self._link_free[pair] = until, transfer
        self.transfers.append(Transfer(send.source, *pair, begin, end, entry // self.count))
        self.sent.append(Sent(send, entry, last if begin > now else None))
        if end > now:
            heappush(self._heap, (end, len(self.begin) + transfer))
        else:
            self._arrive(transfer, ready)

    def _arrive(self, transfer: int, ready: list[int]) -> None:
        send, entry, _ = self.sent[transfer]
        self._release(send.readers, entry // self.count, -1 - transfer, ready)

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


class _Recomputation:
    """Who computes the activations of a recomputed stage again: the first of its I and W; the other waits for it."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._of: dict[int, tuple[int, int]] = {}
        self._durations: dict[tuple[int, int], float] = {}
        self._state: dict[tuple[int, int, int], int] = {}  # the cell that is at it, or -1 when it is done
        self._waiting: dict[tuple[int, int, int], list[int]] = {}
        for number, cell in enumerate(schedule.cells.cells if schedule.recomputed else ()):
            for part in parts_of(cell):
                if part.kind in "IW" and part.stage in schedule.recomputed and part.microbatch is not None:
                    key = part.stage, part.microbatch
                    self._of[number] = key
                    self._durations[key] = costs.duration(Action(part.stage, "F", part.microbatch))

    def needed(self, number: int, step: int) -> float | None:
        """Return for how long a cell that starts now recomputes first, or None if another is at it."""
        key = self._of.get(number)
        if key is None:
            return 0.0
        state = self._state.setdefault((*key, step), number if self._durations[key] > 0 else -1)
        return 0.0 if state == -1 else self._durations[key] if state == number else None

    def wait(self, number: int, step: int, entry: int) -> int:
        """Let a cell wait, and return for which."""
        key = (*self._of[number], step)
        self._waiting.setdefault(key, []).append(entry)
        return self._state[key]

    def running(self, number: int, step: int) -> bool:
        """Whether a cell has been recomputing until now."""
        return number in self._of and self._state[*self._of[number], step] == number

    def finish(self, number: int, step: int) -> list[int]:
        """Note that a cell has recomputed, and return who has waited for it."""
        key = (*self._of[number], step)
        self._state[key] = -1
        return self._waiting.pop(key, [])


class _Sharing:
    """The streams of one worker that slow each other down (processor sharing)."""

    def __init__(self) -> None:
        self._slowdown: dict[int, float] = {}
        self._left: dict[int, float] = {}
        self._until: dict[int, float] = {}
        self._since = 0.0

    def add(self, entry: int, duration: float, slowdown: float, now: float, heap: list[tuple[float, int]]) -> None:
        """Start a cell, and put off the others."""
        self._progress(now)
        self._left[entry], self._slowdown[entry] = duration, slowdown
        self._expect(now, heap)

    def remove(self, entry: int, now: float, heap: list[tuple[float, int]]) -> bool:
        """End a cell, and hasten the others; False if its end has been moved."""
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


def _sharing_of(schedule: Schedule, costs: Costs) -> dict[int, _Sharing]:
    """Return what the lanes share, by the lane's number; nothing where they do not disturb each other."""
    if costs.slowdown == 1:
        return {}
    lanes: dict[int, list[int]] = {}
    for number, lane in enumerate(schedule.lanes):
        if lane.stream != "link":
            lanes.setdefault(lane.worker, []).append(number)
    return {number: sharing for numbers in lanes.values() if len(numbers) > 1
            for sharing in [_Sharing()] for number in numbers}  # fmt: skip
