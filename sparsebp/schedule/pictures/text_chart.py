"""The picture of a simulated schedule for a terminal."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from itertools import pairwise

from sparsebp.schedule.actions import actions_of
from sparsebp.schedule.pictures.labels import meaning, numbers, row, title
from sparsebp.schedule.simulation.memory import MemoryCurve
from sparsebp.schedule.simulation.simulate import Event, Simulation

_BUBBLE, _FILL = "·", "─"
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_LETTERS = 6
_MOST_PARTS = 12


def text_chart(simulation: Simulation, width: int | None = None, *, memory: bool = True) -> str:
    """Draw a simulation with letters: one row a worker and stream, and below the memory of every worker.

    Parameters
    ----------
    simulation
        Of any schedule. An action is its letter and number (of the micro-batch, else of the stage, or both), ``F3``,
        drawn out to its duration (``B3──``). ``X`` is a forward and a backward at once. What does not fit with its
        numbers is drawn in parts, one below the other. Where that takes more than twelve, actions have fewer numbers,
        or their letter alone; what is narrower than a letter is hidden by what follows.
    width
        Letters a line. Default: the terminal's.
    memory
        Whether to draw the memory.

    Returns
    -------
    Lines without a newline at the end.
    """
    schedule = simulation.schedule
    labels = [row(schedule, lane) for lane in schedule.lanes]
    width = shutil.get_terminal_size().columns if width is None else width
    margin = 2 + max(map(len, labels))
    curves = simulation.memory if memory else ()
    peaks = [f" {curve.peak:.4g}" for curve in curves]
    room = max(8, width - margin - max(map(len, peaks), default=0))
    letters = _letters(simulation, room)
    columns = max(1, round(letters * simulation.makespan))
    rows = [[_BUBBLE] * columns for _ in schedule.lanes]
    broken = [0] * (columns + 1)  # what a cut before each column would break: a box, or worse, what is written in it
    for event in simulation.events:
        start, stop = round(event.start * letters), round(event.end * letters)
        text = _text(simulation, event, stop - start)
        rows[event.lane][start:stop] = text.ljust(stop - start, _FILL)
        for column in range(start + 1, stop):
            broken[column] += 1 if column >= start + len(text) else len(rows)
    blocks = [_blocks(simulation, curve, letters, columns) for curve in curves]
    lines = textwrap.wrap(title(simulation), width)
    cuts = _cuts(broken, room)
    for start, stop in pairwise(cuts):
        lines += [""] * (start > 0)
        lines += [f"{label:{margin}}{''.join(cells[start:stop])}" for label, cells in zip(labels, rows, strict=True)]
        lines.append(" " * margin + _axis(letters, start, stop, room))
        for curve, text, peak in zip(curves, blocks, peaks, strict=True):
            lines.append(f"{f'memory {curve.worker}':{margin}}{text[start:stop]}{peak if stop == columns else ''}")
    legend = f"number: {meaning(schedule).replace(' over ', '/')}; {_BUBBLE} bubble"
    overlaps = any(len(actions_of(event.cell)) > 1 for event in simulation.events)
    lines += textwrap.wrap(legend + "; X forward and backward at once" * overlaps, width)
    return "\n".join(line.rstrip() for line in lines)


def _letters(simulation: Simulation, room: int) -> float:
    """Return how many letters a unit of time is: a whole number for the shortest action where that fits."""
    events = [event for event in simulation.events if event.end > event.start]
    if not events or simulation.makespan == 0:
        return 1.0
    shortest = min(event.end - event.start for event in events)
    regular = all(abs(time / shortest - round(time / shortest)) < 1e-9 for e in events for time in (e.start, e.end))
    wanted: set[float] = set()
    for event in events:
        for text in _texts(simulation, event)[:-1]:
            duration = event.end - event.start
            if regular:
                wanted.add(math.ceil(len(text) / duration * shortest - 1e-9) / shortest)
            else:
                wanted.add((len(text) + 1) / duration)  # begun within a letter, it has one less
    whole = (count / shortest for count in range(_MOST_LETTERS, 0, -1))
    one_part = next((n for n in whole if n * simulation.makespan <= room), room / simulation.makespan)
    if one_part >= max(wanted):
        return one_part
    return max([one_part, *(n for n in wanted if n * simulation.makespan <= _MOST_PARTS * room / 2)])


def _texts(simulation: Simulation, event: Event) -> tuple[str, ...]:
    """Return what may stand in a box: with all numbers, with the first of them, a letter."""
    actions = actions_of(event.cell)
    each = [numbers(simulation.schedule, action) for action in actions]
    whole, first = ("|".join(f"{action.kind}{text}" for action, text in zip(actions, texts, strict=True))
                    for texts in (["/".join(n) for n in each], [n[0] for n in each]))  # fmt: skip
    return whole, first, "X" if len(actions) > 1 else str(actions[0].kind)


def _text(simulation: Simulation, event: Event, width: int) -> str:
    *texts, letter = _texts(simulation, event)
    return next((text for text in texts if len(text) <= width), letter[:width])


def _cuts(broken: Sequence[int], room: int) -> list[int]:
    """Return where the parts begin and end: as late as possible among the cuts of the later half that break least."""
    columns, cuts = len(broken) - 1, [0]
    while columns - cuts[-1] > room:
        cuts.append(min(range(cuts[-1] + room, cuts[-1] + room // 2, -1), key=broken.__getitem__))
    return [*cuts, columns]


def _axis(letters: float, start: int, stop: int, room: int) -> str:
    """Return the times of a part, every ten letters or so."""
    text = ""
    spacing = next(m * 10.0**e for e in range(-9, 99) for m in (1, 2, 5) if m * 10.0**e * letters >= 10)
    tick = math.ceil(start / letters / spacing - 1e-9)
    while (place := round(tick * spacing * letters) - start) < stop - start:
        if place + len(number := f"{tick * spacing:.6g}") <= room:
            text = text.ljust(place) + number + " "
        tick += 1
    return text


def _blocks(simulation: Simulation, curve: MemoryCurve, letters: float, columns: int) -> str:
    """Return the most that a worker keeps during each letter, the highest block being the highest peak of all."""
    highest = max(curve.peak for curve in simulation.memory) or 1.0
    cells = [0.0] * columns
    ends = [*curve.times[1:], simulation.makespan]
    for start, end, bytes_ in zip(curve.times, ends, curve.bytes, strict=True):
        first = min(math.floor(start * letters + 1e-9), columns - 1)
        last = min(max(first + 1, math.ceil(end * letters - 1e-9)), columns)
        cells[first:last] = [max(cell, bytes_) for cell in cells[first:last]]
    return "".join(_LEVELS[math.ceil(cell / highest * (len(_LEVELS) - 1))] for cell in cells)
