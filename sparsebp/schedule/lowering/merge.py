"""One order of all cells of a schedule: what each rank runs one after the other, whatever streams it has."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from sparsebp.schedule.actions import Action, Cell, actions_of
from sparsebp.schedule.schedule import Schedule

_TIMES = {"F": 1, "I": 1, "W": 1, "B": 2, "S": 1, "U": 0}


class Turns(NamedTuple):
    """An order of the cells of a schedule in which each comes after all that it waits for.

    Attributes
    ----------
    order
        Numbers of the cells.
    begin
        When each cell begins, by its number; never less than that of the cell before it in `order`.
    """

    order: list[int]
    begin: list[int]


def merge(schedule: Schedule) -> Turns:
    """Return the order in which the cells begin if F, I, W and S take one unit of time, B two, U none.

    Transfers take no time, and the streams of a worker do not slow each other down. Of cells that begin together S goes
    first, then the lower worker and the earlier lane. So a worker of one stream keeps its order, those of several are
    interleaved as they would run side by side. A sum begins as soon as what it adds is there and the sum before it in
    its lane has begun, not ended; what reads it takes it to come one unit after the sum before it.

    Parameters
    ----------
    schedule
        A valid one.
    """
    graph = schedule.cells
    waits = list(graph.waits)
    begin, end = [0] * len(waits), [0] * len(waits)
    sums = [_is_sum(cell) for cell in graph.cells]
    ready = [(0, not sums[number], number) for number, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    ends_before = list(end)  # when the last of what a sum waits for has ended: also the sum before it
    order = []
    while ready:
        _, _, number = heapq.heappop(ready)
        order.append(number)
        start = max(begin[number], ends_before[number]) if sums[number] else begin[number]
        end[number] = start + sum(_TIMES[action.kind] for action in actions_of(graph.cells[number]))
        for reader in graph.after(number):
            begun_is_enough = sums[number] and sums[reader]
            begin[reader] = max(begin[reader], begin[number] if begun_is_enough else end[number])
            ends_before[reader] = max(ends_before[reader], end[number])
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, (begin[reader], not sums[reader], reader))
    return Turns(order, begin)


def _is_sum(cell: Cell) -> bool:
    return isinstance(cell, Action) and cell.kind == "S"
