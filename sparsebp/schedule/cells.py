"""The cells of a schedule as a graph of numbers: what waits for what, by lane order, data and transfers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp.schedule.actions import Action, Cell, actions_of, parts_of

if TYPE_CHECKING:
    from sparsebp.schedule.schedule import Schedule


@dataclass(frozen=True)
class Send:
    """Data that one worker sends to another.

    Attributes
    ----------
    source
        The action that makes it: F sends its output, I the gradient with respect to its input.
    receiver
        The other worker.
    readers
        The numbers of the cells that wait for it.
    """

    source: Action
    receiver: int
    readers: list[int]

    @property
    def boundary(self) -> int:
        """The stage whose output, or whose output's gradient, is sent."""
        return self.source.stage if self.source.kind == "F" else self.source.stage - 1


@dataclass(frozen=True)
class CellGraph:
    """All cells of a schedule, numbered lane after lane.

    Attributes
    ----------
    cells
        The cells.
    lanes
        The number of the lane of every cell.
    numbers
        The cell of every action; I and W are found within a B.
    first
        The number of the first cell of every lane.
    followers
        For every cell, those on the same worker that wait for it: the next in its lane, and the readers of its results.
    sends
        For every cell, what other workers wait for.
    waits
        For every cell, how many `followers` and `sends` entries name it.
    carried
        For every cell, those of the *next* step that wait for it when the schedule is repeated.
    carried_waits
        For every cell, how many `carried` entries name it.
    """

    cells: tuple[Cell, ...]
    lanes: list[int]
    numbers: dict[Action, int]
    first: list[int]
    followers: list[list[int]]
    sends: list[list[Send]]
    waits: list[int]
    carried: list[list[int]]
    carried_waits: list[int]

    def after(self, number: int) -> Iterator[int]:
        """Yield all cells of the step that wait for a cell."""
        yield from self.followers[number]
        for send in self.sends[number]:
            yield from send.readers


def cell_graph(schedule: Schedule) -> CellGraph:
    """Return the graph of the cells of `schedule`."""
    cells = tuple(cell for lane in schedule.lanes for cell in lane.cells)
    lanes = [number for number, lane in enumerate(schedule.lanes) for _ in lane.cells]
    first = [0]
    for lane in schedule.lanes:
        first.append(first[-1] + len(lane.cells))
    numbers = {action: first[lane] + position for action, (lane, position) in schedule.places.items()}
    empty = [0] * len(cells)
    graph = CellGraph(cells, lanes, numbers, first[:-1], [[] for _ in cells], [[] for _ in cells], empty,
                      [[] for _ in cells], [*empty])  # fmt: skip
    workers = [lane.worker for lane in schedule.lanes]

    def last_of(actions: Iterable[Action]) -> set[int]:
        """Return the last cell of each lane that does one of some actions: the others end before it."""
        last: dict[int, int] = {}
        for number in (numbers[action] for action in actions if action in numbers):
            last[lanes[number]] = max(number, last.get(lanes[number], 0))
        return set(last.values())

    weights = [last_of(schedule.graph.newest_weights(stage)) for stage in range(schedule.graph.stages)]
    in_step = schedule.graph.first != "F"
    sent: dict[tuple[Action, int], Send] = {}
    for number, cell in enumerate(cells):
        worker, start = workers[lanes[number]], first[lanes[number]]
        local: set[int] = set()
        before: set[int] = set()
        for part in (part for action in actions_of(cell) for part in parts_of(action)):
            for needed in schedule.graph.inputs(part):
                source = numbers.get(needed, number)
                if workers[lanes[source]] == worker:
                    local.add(source)
                    continue
                send = sent.get((needed, worker))
                if send is None:
                    send = sent[needed, worker] = Send(needed, worker, [])
                    graph.sends[source].append(send)
                if not send.readers or send.readers[-1] != number:
                    send.readers.append(number)
                    graph.waits[number] += 1
            if part.kind == "F":
                (local if in_step else before).update(weights[part.stage])
            elif in_step:
                before |= last_of(schedule.graph.carried(part))
        if number > start:
            local.add(number - 1)
        else:  # the lane's last cell of the step before
            before.add(first[lanes[number] + 1] - 1)
        local.discard(number)
        for source in sorted(local):
            graph.followers[source].append(number)
        for source in sorted(before):
            graph.carried[source].append(number)
        graph.waits[number] += len(local)
        graph.carried_waits[number] = len(before)
    return graph
