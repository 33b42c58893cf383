"""What streams of one worker do to each other: who computes activations again, and how much all are slowed down."""

from __future__ import annotations

from heapq import heappush

from sparsebp.schedule.actions import Action, parts_of
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.schedule import Schedule


class Recomputation:
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

    def concerns(self, number: int) -> bool:
        """Whether a cell is one of those that may have to recompute."""
        return number in self._of

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


class Sharing:
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


def sharing_of(schedule: Schedule, costs: Costs) -> dict[int, Sharing]:
    """Return what the lanes share, by the lane's number; nothing where they do not disturb each other."""
    if costs.slowdown == 1:
        return {}
    lanes: dict[int, list[int]] = {}
    for number, lane in enumerate(schedule.lanes):
        if lane.stream != "link":
            lanes.setdefault(lane.worker, []).append(number)
    return {number: sharing for numbers in lanes.values() if len(numbers) > 1
            for sharing in [Sharing()] for number in numbers}  # fmt: skip
