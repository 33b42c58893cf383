"""The picture of a simulated schedule for a terminal."""

from __future__ import annotations

import math
import shutil

from sparsebp.schedule.actions import actions_of
from sparsebp.schedule.labels import meaning, numbers, row, title
from sparsebp.schedule.memory import MemoryCurve
from sparsebp.schedule.simulate import Event, Simulation

_BUBBLE, _FILL = "·", "─"
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_LETTERS = 6


def text_chart(simulation: Simulation, width: int | None = None, *, memory: bool = True) -> str:
    """Draw a simulation with letters: one row a worker and stream, and below the memory of every worker.

    Parameters
    ----------
    simulation
        Of any schedule. An action is its letter and number (of the micro-batch, else of the stage, or both), ``F3``,
        drawn out to its duration (``B3──``). Where there is no room for the number, the letter stands alone; what is
        narrower than a letter is hidden by what follows. ``X`` is a forward and a backward at once.
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
    peaks = [f" {curve.peak:.4g}" for curve in simulation.memory] if memory else []
    letters = _letters(simulation, max(8, width - margin - max(map(len, peaks), default=0)))
    columns = max(1, round(letters * simulation.makespan))
    rows = [[_BUBBLE] * columns for _ in schedule.lanes]
    for event in simulation.events:
        start, stop = round(event.start * letters), round(event.end * letters)
        rows[event.lane][start:stop] = _box(simulation, event, stop - start)
    lines = [title(simulation)]
    lines += [f"{label:{margin}}{''.join(cells)}" for label, cells in zip(labels, rows, strict=True)]
    lines.append(" " * margin + _axis(letters, columns))
    for curve, peak in zip(simulation.memory, peaks, strict=False):
        lines.append(f"{f'memory {curve.worker}':{margin}}{_blocks(simulation, curve, letters, columns)}{peak}")
    legend = f"number: {meaning(schedule).replace(' over ', '/')}; {_BUBBLE} bubble"
    overlaps = any(len(actions_of(event.cell)) > 1 for event in simulation.events)
    lines.append(legend + "; X forward and backward at once" * overlaps)
    return "\n".join(line.rstrip() for line in lines)


def _letters(simulation: Simulation, room: int) -> float:
    """Return how many letters a unit of time is: a whole number for the shortest action where that fits."""
    shortest = min((event.end - event.start for event in simulation.events if event.end > event.start), default=0.0)
    if shortest == 0 or simulation.makespan == 0:
        return 1.0
    for count in range(_MOST_LETTERS, 0, -1):
        if count / shortest * simulation.makespan <= room:
            return count / shortest
    return room / simulation.makespan


def _box(simulation: Simulation, event: Event, width: int) -> str:
    actions = actions_of(event.cell)
    told = [numbers(simulation.schedule, action) for action in actions]
    candidates = ["|".join(f"{action.kind}{text}" for action, text in zip(actions, texts, strict=True))
                  for texts in (["/".join(n) for n in told], [n[0] for n in told])]  # fmt: skip
    letter = "X" if len(actions) > 1 else str(actions[0].kind)
    text = next((text for text in candidates if len(text) <= width), letter)
    return text[:width].ljust(width, _FILL)


def _axis(letters: float, columns: int) -> str:
    """Return the times, every ten letters or so."""
    text = ""
    step = next(m * 10.0**e for e in range(-9, 99) for m in (1, 2, 5) if m * 10.0**e * letters >= 10)
    tick = 0
    while round(tick * step * letters) < columns:
        text = text.ljust(round(tick * step * letters)) + f"{tick * step:.6g} "
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
