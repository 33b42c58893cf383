"""The cells of a schedule as a graph of numbers: what waits for what, by lane order, data and transfers."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from sparsebp.schedule.actions import Action, Cell, Lane, parts_of
from sparsebp.schedule.graph import StepGraph


class Send(NamedTuple):
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
        For cells that other workers wait for, what is sent.
    waits
        For every cell, how many `followers` and `sends` entries name it.
    """

    cells: tuple[Cell, ...]
    lanes: list[int]
    numbers: dict[Action, int]
    first: list[int]
    followers: list[list[int]]
    sends: dict[int, list[Send]]
    waits: list[int]

    def after(self, number: int) -> Iterator[int]:
        """Yield all cells of the step that wait for a cell."""
        yield from self.followers[number]
        for send in self.sends.get(number, ()):
            yield from send.readers

    def in_turn(self, ignored: Collection[tuple[int, int]] = ()) -> Iterator[int]:
        """Yield cells, each after all that it waits for: a cycle, and what waits for it, is never reached.

        Of the edges, pairs of cells, those in `ignored` are not waited for.
        """
        waits = list(self.waits)
        for _, reader in ignored:
            waits[reader] -= 1
        ready = deque(number for number, count in enumerate(waits) if count == 0)
        while ready:
            number = ready.popleft()
            yield number
            for reader in self.after(number):
                if ignored and (number, reader) in ignored:
                    continue
                waits[reader] -= 1
                if waits[reader] == 0:
                    ready.append(reader)


def cell_graph(step: StepGraph, schedule: Sequence[Lane], places: Mapping[Action, tuple[int, int]]) -> CellGraph:
    """Return the graph of the cells of some lanes; `places` has every action's lane and its place there."""
    cells = tuple(cell for lane in schedule for cell in lane.cells)
    lanes = [number for number, lane in enumerate(schedule) for _ in lane.cells]
    first = list(accumulate((len(lane.cells) for lane in schedule), initial=0))[:-1]
    numbers = {action: first[lane] + position for action, (lane, position) in places.items()}
    graph = CellGraph(cells, lanes, numbers, first, [[] for _ in cells], {}, [0] * len(cells))
    weights = _weights(step, graph) if step.first != "F" else [[]] * step.stages
    workers = [schedule[lane].worker for lane in lanes]
    sent: dict[Action, Send] = {}  # all readers are on one worker, as those of a stage are
    inputs, late = step.inputs, step.first != "F"
    for number, cell in enumerate(cells):
        worker = workers[number]
        local = {number - 1} if number > first[lanes[number]] else set()
        for part in parts_of(cell):
            for needed in inputs(part):
                source = numbers.get(needed, number)
                if workers[source] == worker:
                    local.add(source)
                    continue
                send = sent.get(needed)
                if send is None:
                    send = sent[needed] = Send(needed, worker, [])
                    graph.sends.setdefault(source, []).append(send)
                if not send.readers or send.readers[-1] != number:
                    send.readers.append(number)
                    graph.waits[number] += 1
            if late and part.kind == "F":
                local.update(weights[part.stage])
        local.discard(number)
        for source in local:
            graph.followers[source].append(number)
        graph.waits[number] += len(local)
    return graph


def carried(step: StepGraph, lanes: Sequence[Lane], cells: CellGraph) -> tuple[list[list[int]], list[int]]:
    """Return what waits for the step before when a schedule is repeated.

    Returns
    -------
    For every cell, those of the next step that wait for it; for every cell, for how many of the step before it waits.
    """
    weights = _weights(step, cells) if step.first == "F" else [[]] * step.stages
    followers: list[list[int]] = [[] for _ in cells.cells]
    waits = []
    for number, cell in enumerate(cells.cells):
        before = set()
        if number == cells.first[cells.lanes[number]]:  # the lane's last cell of the step before
            before.add(number + len(lanes[cells.lanes[number]].cells) - 1)
        for part in parts_of(cell):
            before.update(weights[part.stage] if part.kind == "F" else _last(cells, step.carried(part)))
        for source in before:
            followers[source].append(number)
        waits.append(len(before))
    return followers, waits


def _weights(step: StepGraph, graph: CellGraph) -> list[list[int]]:
    """Return, for every stage, after which cells its newest weights are there."""
    return [_last(graph, step.newest_weights(stage)) for stage in range(step.stages)]


def _last(graph: CellGraph, actions: Iterable[Action]) -> list[int]:
    """Return the last cell of each lane that does one of some actions: the others end before it."""
    last: dict[int, int] = {}
    for number in (graph.numbers[action] for action in actions if action in graph.numbers):
        last[graph.lanes[number]] = max(number, last.get(graph.lanes[number], 0))
    return list(last.values())
