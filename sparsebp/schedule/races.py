"""Updates beside readers of the same weights: which of the two comes first must not depend on the durations."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from sparsebp.schedule.actions import Action
from sparsebp.schedule.schedule import Schedule


def find_race(schedule: Schedule) -> tuple[Action, Action] | None:
    """Return an update and an action that may read the weights before, after or while they are updated.

    Only graphs with updates after every micro-batch leave that open; it is settled where both are in one lane, or where
    lanes and data make one wait for the other.

    Parameters
    ----------
    schedule
        A schedule without deadlocks.
    """
    graph, cells = schedule.graph, schedule.cells
    if graph.updates != "microbatch":
        return None
    clocks: list[list[int]] = []
    for stage in filter(graph.weighted, range(graph.stages)):
        readers: dict[int, dict[int, Action]] = {}  # lane -> cell -> action
        for action in (Action(stage, kind, m) for kind in ("F", "I") for m in range(graph.microbatches)):
            if action in cells.numbers and (action.kind == "F" or graph.weights == "latest"):
                readers.setdefault(cells.lanes[cells.numbers[action]], {})[cells.numbers[action]] = action
        for update in (Action(stage, "U", m) for m in range(graph.microbatches)):
            own = cells.lanes[cells.numbers[update]]
            for lane in readers.keys() - {own}:
                clocks = clocks or _clocks(schedule)
                later = sorted(readers[lane])
                later = later[bisect_left(later, cells.first[lane] + clocks[cells.numbers[update]][lane]) :]
                if later and clocks[later[0]][own] <= cells.numbers[update] - cells.first[own]:
                    return update, readers[lane][later[0]]
    return None


def _clocks(schedule: Schedule) -> list[list[int]]:
    """Return, for every cell, how many cells of each lane end before it starts, whatever the durations (vector clocks).

    Of its own lane, the cell itself is counted too.
    """
    cells = schedule.cells
    clocks = [[0] * len(schedule.lanes) for _ in cells.cells]
    waits = list(cells.waits)
    ready = deque(number for number, count in enumerate(waits) if count == 0)
    while ready:
        number = ready.popleft()
        lane, clock = cells.lanes[number], clocks[number]
        clock[lane] = number - cells.first[lane] + 1
        for reader in cells.after(number):
            clocks[reader] = [max(pair) for pair in zip(clocks[reader], clock, strict=True)]
            waits[reader] -= 1
            if waits[reader] == 0:
                ready.append(reader)
    return clocks
