"""Whether a schedule can come to its end, and every action reads the weights that it should."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import pairwise

from sparsebp.core.errors import ScheduleError
from sparsebp.schedule.actions import Action, Kind, actions_of, parts_of
from sparsebp.schedule.races import find_race
from sparsebp.schedule.schedule import Schedule


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run.

    That all actions are there, once each, and every worker has some, `Schedule` has made sure of. This checks the
    order: lanes and data needs together must have no cycle, and settle which version of the weights each action reads.

    Parameters
    ----------
    schedule
        The schedule.

    Raises
    ------
    ScheduleError
        Workers or streams wait for each other for ever (the message has the cycle), or an update overwrites weights
        that a backward has yet to read, or runs beside an action that reads them.
    """
    stuck = _stuck(schedule, frozenset())
    if not stuck:
        _check_races(schedule)
        return
    cycle = _cycle(schedule, stuck)
    hazards = _hazards(schedule)
    if not _stuck(schedule, hazards):  # nothing else is wrong: the order would run, with the wrong weights
        update, reader = next(pair for pair in pairwise(cycle) if (pair[1], pair[0]) in hazards)
        raise ScheduleError(
            "Weights are overwritten before they are read",
            expected=f"{_action(schedule, reader, 'I')} before {_action(schedule, update, 'U')}: it is the backward of "
            "a forward with the old weights",
            got=f"{_describe(schedule, update)} earlier than {_describe(schedule, reader)}",
            remedy="Move the update behind it, or keep old versions: weights='stashed'",
            actions=(_action(schedule, update, "U"), _action(schedule, reader, "I")),
        )  # fmt: skip
    waits = " waits for ".join(_describe(schedule, number) for number in cycle)
    raise ScheduleError("The schedule is deadlocked", expected="an order without a cycle", got=waits,
                        remedy="Reorder one of these lanes",
                        actions=(actions_of(schedule.cells.cells[number])[0] for number in cycle[:-1]))  # fmt: skip


def _check_races(schedule: Schedule) -> None:
    race = find_race(schedule)
    if race is not None:
        update, reader = (_describe(schedule, schedule.cells.numbers[action]) for action in race)
        raise ScheduleError(
            "Weights are updated while they may be read", expected="one of the two to wait for the other",
            got=f"{update} beside {reader}", remedy="Put both into one lane", actions=race,
        )  # fmt: skip


def _stuck(schedule: Schedule, ignored: Collection[tuple[int, int]]) -> set[int]:
    """Return the cells that are never reached, if the edges `ignored` are not waited for."""
    graph = schedule.cells
    waits = list(graph.waits)
    for _, reader in ignored:
        waits[reader] -= 1
    ready = deque(number for number, count in enumerate(waits) if count == 0)
    done = 0
    while ready:
        number = ready.popleft()
        done += 1
        for reader in graph.after(number):
            if ignored and (number, reader) in ignored:
                continue
            waits[reader] -= 1
            if waits[reader] == 0:
                ready.append(reader)
    return {number for number, count in enumerate(waits) if count > 0} if done < len(waits) else set()


def _cycle(schedule: Schedule, stuck: Collection[int]) -> list[int]:
    """Return cells each of which waits for the next; the last is the first again."""
    source = {reader: number for number in sorted(stuck) for reader in schedule.cells.after(number) if reader in stuck}
    path, seen = [min(stuck)], {min(stuck): 0}
    while True:
        number = source[path[-1]]
        path.append(number)
        if number in seen:
            return path[seen[number] :]
        seen[number] = len(path) - 1


def _hazards(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the edges (backward, update) that only keep the update from overwriting what the backward reads."""
    graph, cells = schedule.graph, schedule.cells
    if graph.updates != "step" or graph.first == "U":
        return set()
    edges = set()
    for stage in filter(graph.weighted, range(graph.stages)):
        update = cells.numbers[Action(stage, "U")]
        for m in range(graph.microbatches):
            reader, gradient = cells.numbers.get(Action(stage, "I", m)), cells.numbers[Action(stage, "W", m)]
            follows = reader == update - 1 and cells.lanes[reader] == cells.lanes[update]
            if reader is not None and reader != gradient and not follows:
                edges.add((reader, update))
    return edges


def _action(schedule: Schedule, number: int, kind: Kind) -> Action:
    """Return the part of a cell that is of one kind."""
    cell = schedule.cells.cells[number]
    return next(part for part in parts_of(cell) if part.kind == kind)


def _describe(schedule: Schedule, number: int) -> str:
    lane = schedule.cells.lanes[number]
    position = number - schedule.cells.first[lane] + 1
    ending = "th" if position % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(position % 10, "th")
    return f"{schedule.cells.cells[number]} ({schedule.lanes[lane]}, {position}{ending})"
