"""Pictures of a simulated schedule: a Gantt chart, text for a terminal, a trace for Chrome, a summary."""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from sparsebp.core.errors import OptionError, needing
from sparsebp.core.files import write_atomically
from sparsebp.schedule.schedule import KINDS, Action, Kind, Lane, Schedule, actions_of
from sparsebp.schedule.simulation import USES, Event, MemoryCurve, Simulation, Transfer

# Labels in boxes, on rows, and above.


def numbers(schedule: Schedule, action: Action) -> tuple[str, ...]:
    """Return the numbers that tell `action` from others of its kind and worker: micro-batch, stage, or both."""
    if action.microbatch is None or schedule.graph.microbatches == 1:
        return (str(action.stage),)
    if schedule.workers == schedule.graph.stages:
        return (str(action.microbatch),)
    return str(action.microbatch), str(action.stage)


def meaning(schedule: Schedule) -> str:
    """Return the meaning of the numbers."""
    if schedule.graph.microbatches == 1:
        return "stage"
    return "micro-batch" if schedule.workers == schedule.graph.stages else "micro-batch over stage"


def row(schedule: Schedule, lane: Lane) -> str:
    """Return the name of a row: the worker, and the stream if it is not the only one."""
    alone = sum(other.worker == lane.worker for other in schedule.lanes) == 1
    return f"worker {lane.worker}" if alone and lane.stream == "main" else f"worker {lane.worker} {lane.stream}"


def title(simulation: Simulation) -> str:
    """Return name, makespan and bubble."""
    name = simulation.schedule.name
    return f"{name}: " * bool(name) + f"makespan {simulation.makespan:.4g}, bubble {simulation.bubble:.1%}"


COLOURS: dict[Kind, str] = {
    "F": "#56b4e9",
    "I": "#e69f00",
    "W": "#009e73",
    "B": "#d55e00",
    "S": "#f0e442",
    "U": "#cc79a7",
}
"""Okabe and Ito's, which colour-blind readers tell apart; black text is legible on all of them."""

_HEIGHT = 0.8
_BETWEEN_WORKERS = 0.25
_MOST_NUMBERS = 4000
_SMALLEST_FONT, _LARGEST_FONT = 4.5, 8.0
_SHORT: dict[Kind, str] = {"B": "B both", "S": "S synchronisation", "U": "U update"}


class _Box(NamedTuple):
    action: Action
    start: float
    duration: float
    top: float
    height: float


def gantt(simulation: Simulation, ax: Any = None, *, memory: bool = True) -> Any:
    """Draw a simulation: one row per worker and stream, one box per action, and below, every worker's memory.

    Boxes carry the number of the micro-batch, of the stage, or both, where they fit. The forward of an overlap is drawn
    over its backward; an action that takes no time is a thin line.

    Parameters
    ----------
    simulation
        Of any schedule.
    ax
        A matplotlib ``Axes``, then shared by rows and memory; None makes a figure.
    memory
        Whether to draw the memory. Matplotlib's constrained layout leaves no space for its axes: leave gaps between
        several pictures yourself, or pass False.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the rows.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    schedule = simulation.schedule
    tops = _tops(simulation)
    ax = _new_axes(simulation, memory) if ax is None else ax
    ax.set_xlim(0, simulation.makespan or 1)
    ax.set_ylim(max(tops) + _HEIGHT + 0.1, -0.1)
    ax.set_yticks([top + _HEIGHT / 2 for top in tops], [row(schedule, lane) for lane in schedule.lanes])
    ax.tick_params(axis="y", length=0)
    ax.set_title(title(simulation), loc="left", fontsize=10, pad=18)  # the legend is between it and the rows
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    below = _memory_axes(simulation, ax) if memory else None
    (ax if below is None else below).set_xlabel("time")
    boxes = list(_boxes(simulation, tops))
    _draw_boxes(ax, boxes)
    _draw_transfers(simulation, ax, tops)
    _write_numbers(simulation, ax, boxes)
    _legend(simulation, ax)
    return ax


def _tops(simulation: Simulation) -> list[float]:
    """Return where the row of every lane begins, from 0 at the top."""
    lanes = simulation.schedule.lanes
    several = len(lanes) > simulation.schedule.workers
    return [number + lane.worker * _BETWEEN_WORKERS * several for number, lane in enumerate(lanes)]


def _boxes(simulation: Simulation, tops: list[float]) -> Iterator[_Box]:
    for event in simulation.events:
        actions = actions_of(event.cell)
        height = _HEIGHT / len(actions)
        for number, action in enumerate(actions):
            top = tops[event.lane] + number * height
            yield _Box(action, event.start, event.end - event.start, top, height)


def _draw_boxes(ax: Any, boxes: list[_Box]) -> None:
    """Draw all boxes of a kind and a row as one collection: a picture may have thousands."""
    groups: dict[tuple[Kind, float, float], list[_Box]] = defaultdict(list)
    for box in boxes:
        groups[box.action.kind, box.top, box.height].append(box)
    for (kind, top, height), group in groups.items():
        spans = [(box.start, box.duration) for box in group if box.duration > 0]
        ax.broken_barh(spans, (top, height), facecolor=COLOURS[kind], edgecolor="white", linewidth=0.6, zorder=2)
        moments = [box.start for box in group if box.duration == 0]
        ax.vlines(moments, top, top + height, color=COLOURS[kind], linewidth=2, zorder=4)


def _draw_transfers(simulation: Simulation, ax: Any, tops: list[float]) -> None:
    """Draw a line from sender to receiver for every transfer that takes time, from its start to its arrival."""
    schedule = simulation.schedule
    main = {lane.worker: top for lane, top in reversed(list(zip(schedule.lanes, tops, strict=True)))}
    lines = []
    for transfer in simulation.transfers:
        if transfer.end == transfer.start:
            continue
        sender, receiver = tops[schedule.places[transfer.source][0]], main[transfer.receiver]
        down = receiver > sender
        lines.append([(transfer.start, sender + _HEIGHT * down), (transfer.end, receiver + _HEIGHT * (not down))])
    if lines:
        from matplotlib.collections import LineCollection

        ax.add_collection(LineCollection(lines, colors="0.35", linewidths=0.7, zorder=1, label="transfer"))


def _write_numbers(simulation: Simulation, ax: Any, boxes: list[_Box]) -> None:
    """Write numbers into the boxes where they fit, all in the size that the narrowest of them allows."""
    written = [(box, numbers(simulation.schedule, box.action)) for box in boxes if box.duration > 0]
    if len(written) > _MOST_NUMBERS:
        return
    points = 72 / ax.figure.dpi
    width, height = (span * points for span in ax.get_window_extent().size)
    per_unit = width / (ax.get_xlim()[1] - ax.get_xlim()[0])
    per_row = height / abs(ax.get_ylim()[1] - ax.get_ylim()[0])
    fitting = []
    for box, lines in written:
        if box.height < _HEIGHT:  # half of an overlap: too low for two lines
            lines = ("/".join(lines),)  # noqa: PLW2901
        letters = max(map(len, lines))
        size = min(0.85 * box.duration * per_unit / (0.62 * letters), 0.9 * box.height * per_row / (1.2 * len(lines)))
        if size >= _SMALLEST_FONT:
            fitting.append((box, lines, size))
    size = min([_LARGEST_FONT, *(size for _, _, size in fitting)])
    for box, lines, _ in fitting:
        ax.text(
            box.start + box.duration / 2, box.top + box.height / 2, "\n".join(lines), fontsize=size, ha="center",
            va="center_baseline" if len(lines) == 1 else "center", linespacing=1.0, clip_on=True, zorder=5,
        )  # fmt: skip


def _legend(simulation: Simulation, ax: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {action.kind for action in simulation.schedule}
    handles: list[Any] = [
        Patch(facecolor=COLOURS[kind], label=_SHORT.get(kind, f"{kind} {KINDS[kind]}"))
        for kind in KINDS
        if kind in kinds
    ]
    if any(transfer.end > transfer.start for transfer in simulation.transfers):
        handles.append(Line2D([], [], color="0.35", linewidth=0.7, label="transfer"))
    handles.append(Line2D([], [], linestyle="none", label=f"number: {meaning(simulation.schedule)}"))
    ax.legend(
        handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, fontsize=7,
        frameon=False, borderpad=0, handlelength=1.0, handletextpad=0.4, columnspacing=1.0,
    )  # fmt: skip


def _memory_axes(simulation: Simulation, ax: Any) -> Any:
    """Add axes below the rows, and draw every worker's memory."""
    from matplotlib import colormaps
    from matplotlib.ticker import EngFormatter
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    below = make_axes_locatable(ax).append_axes("bottom", size=0.9, pad=0.12, sharex=ax)
    ax.tick_params(axis="x", labelbottom=False)
    curves = simulation.memory
    colours = colormaps["viridis"]
    for curve in curves:
        times, bytes_ = [*curve.times, simulation.makespan], [*curve.bytes, curve.bytes[-1]]
        colour = colours(0.9 * curve.worker / max(1, len(curves) - 1))
        below.step(times, bytes_, where="post", linewidth=1.2, color=colour, label=f"worker {curve.worker}")
    below.set_ylim(0, 1.08 * max(curve.peak for curve in curves) or 1)
    below.yaxis.set_major_formatter(EngFormatter(sep=""))
    below.set_ylabel("memory")
    below.grid(alpha=0.3)
    for side in ("top", "right"):
        below.spines[side].set_visible(False)
    if 1 < len(curves) <= 8:
        below.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handlelength=1.0)
    return below


def _new_axes(simulation: Simulation, memory: bool) -> Any:
    """Return axes of a new figure, as wide as the cells of the longest row need."""
    with needing("plot", "Drawing a schedule needs matplotlib"):
        from matplotlib.figure import Figure
    lanes = simulation.schedule.lanes
    height = 0.9 + 0.4 * len(lanes) + 1.2 * memory
    width = min(max(10.0, 0.16 * simulation.steps * max(len(lane.cells) for lane in lanes)), 24.0)
    return Figure(figsize=(width, height)).add_axes((1 / width, 0.5 / height, 1 - 1.8 / width, 1 - 0.9 / height))


# A simulation in numbers, as JSON can hold them.


def summary(simulation: Simulation) -> dict[str, Any]:
    """Return the results of a simulation.

    Returns
    -------
    ``name``, ``workers``, ``stages``, ``microbatches``, ``steps``; ``makespan``, ``bubble``, ``span_bubble``,
    ``critical_path`` (cells), ``peak_memory`` (the largest of all workers); ``per_worker`` (stages, busy share of every
    stream, peak memory);
    ``per_stage``: the largest staleness and version difference of any forward and any backward, see
    `Simulation.staleness` and `Simulation.version_difference`; an empty list with at most one update per step, when all
    are 0.
    """
    schedule, graph = simulation.schedule, simulation.schedule.graph
    peaks = [curve.peak for curve in simulation.memory]
    updated = range(graph.stages if graph.updates == "microbatch" else 0)
    homes = [schedule.workers_of(stage) for stage in range(graph.stages)]
    return {
        "name": schedule.name,
        "workers": schedule.workers,
        "stages": graph.stages,
        "microbatches": graph.microbatches,
        "steps": simulation.steps,
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "span_bubble": simulation.span_bubble,
        "peak_memory": max(peaks),
        "critical_path": [str(event.cell) for event in simulation.critical_path],
        "per_worker": [
            {
                "worker": worker,
                "stages": [stage for stage in range(graph.stages) if worker in homes[stage]],
                "busy": _busy(simulation, worker),
                "peak_memory": peak,
            }
            for worker, peak in enumerate(peaks)
        ],
        "per_stage": [_stage(simulation, stage) for stage in filter(graph.weighted, updated)],
    }  # fmt: skip


def _busy(simulation: Simulation, worker: int) -> dict[str, float]:
    lanes = {i: lane.stream for i, lane in enumerate(simulation.schedule.lanes) if lane.worker == worker}
    shares = dict.fromkeys(lanes.values(), 0.0)
    for event in simulation.events:
        if event.lane in lanes and simulation.makespan > 0:
            shares[lanes[event.lane]] += (event.end - event.start) / simulation.makespan
    return shares


def _stage(simulation: Simulation, stage: int) -> dict[str, Any]:
    kinds: dict[str, Kind] = {"forward": "F", "backward": "B"}
    entry: dict[str, Any] = {"stage": stage, "staleness": {}, "version_difference": {}}
    for name, kind in kinds.items():
        actions = [Action(stage, kind, m) for m in range(simulation.schedule.graph.microbatches)]
        for measure in ("staleness", "version_difference"):
            try:
                entry[measure][name] = max(getattr(simulation, measure)(action) for action in actions)
            except OptionError:  # a backward that is W alone reads no weights
                continue
    return entry


# A picture for a terminal.

_BUBBLE, _FILL = "·", "─"
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_LETTERS = 6
_MOST_PARTS = 12
_LEAST_TIME = 1e-290
"""Shorter steps, and those as much longer than 1, have no axis in floating point."""


def text_chart(simulation: Simulation, width: int | None = None, *, memory: bool = True) -> str:
    """Draw a simulation with letters: one row per worker and stream, and below, every worker's memory.

    An action is its letter and number (of the micro-batch, else of the stage, or both), ``F3``, drawn out to its
    duration (``B3──``). ``X`` is a forward and a backward at once. A chart too wide for the line is cut into parts, one
    below the other. If more than twelve parts would be needed, actions show fewer numbers or only their letter. An
    action narrower than a letter is hidden by the next one.

    Parameters
    ----------
    simulation
        Of any schedule.
    width
        Characters per line. Default: the terminal's.
    memory
        Whether to draw the memory.

    Returns
    -------
    Lines without a newline at the end.

    Raises
    ------
    OptionError
        The step is shorter than 1e-290, or longer than 1e290.
    """
    schedule = simulation.schedule
    if simulation.makespan and not _LEAST_TIME <= simulation.makespan <= 1 / _LEAST_TIME:
        expected = f"{_LEAST_TIME:g} to {1 / _LEAST_TIME:g}"
        raise OptionError("The step is too short or too long to draw", expected=expected, got=simulation.makespan,
                          remedy="Give costs in another unit")  # fmt: skip
    labels = [row(schedule, lane) for lane in schedule.lanes]
    width = shutil.get_terminal_size().columns if width is None else width
    margin = 2 + max(map(len, labels))
    curves = simulation.memory if memory else ()
    peaks = [f" {curve.peak:.4g}" for curve in curves]
    room = max(8, width - margin - max(map(len, peaks), default=0))
    letters = _letters(simulation, room)
    columns = max(1, round(letters * simulation.makespan))
    rows = [[_BUBBLE] * columns for _ in schedule.lanes]
    broken = [0] * (columns + 1)  # the damage of a cut before each column: it breaks a box, or worse, its text
    for event in simulation.events:
        start, stop = round(event.start * letters), round(event.end * letters)
        *texts, letter = _texts(simulation, event)
        text = next((text for text in texts if len(text) <= stop - start), letter[: stop - start])
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
    """Return how many letters represent a unit of time: a whole number for the shortest action where that fits."""
    events = [event for event in simulation.events if event.end > event.start]
    if not events or simulation.makespan == 0:
        return 1.0
    shortest = min(event.end - event.start for event in events)
    times = [time / shortest for event in events for time in (event.start, event.end)]
    regular = all(math.isfinite(time) and abs(time - round(time)) < 1e-9 for time in times)
    wanted: set[float] = set()
    for event in events:
        for text in _texts(simulation, event)[:-1]:
            duration = event.end - event.start
            if regular:
                wanted.add(math.ceil(len(text) / duration * shortest - 1e-9) / shortest)
            else:
                wanted.add((len(text) + 1) / duration)  # a box that begins within a letter has one less
    whole = (count / shortest for count in range(_MOST_LETTERS, 0, -1))
    one_part = next((n for n in whole if n * simulation.makespan <= room), room / simulation.makespan)
    if one_part >= max(wanted):
        return one_part
    return max([one_part, *(n for n in wanted if n * simulation.makespan <= _MOST_PARTS * room / 2)])


def _texts(simulation: Simulation, event: Event) -> tuple[str, ...]:
    """Return the possible texts of a box: with all numbers, with the first of them, a letter."""
    actions = actions_of(event.cell)
    each = [numbers(simulation.schedule, action) for action in actions]
    whole, first = ("|".join(f"{action.kind}{text}" for action, text in zip(actions, texts, strict=True))
                    for texts in (["/".join(n) for n in each], [n[0] for n in each]))  # fmt: skip
    return whole, first, "X" if len(actions) > 1 else str(actions[0].kind)


def _cuts(broken: Sequence[int], room: int) -> list[int]:
    """Return where the parts begin and end: as late as possible among the cuts of the later half that break least."""
    columns, cuts = len(broken) - 1, [0]
    while columns - cuts[-1] > room:
        cuts.append(min(range(cuts[-1] + room, cuts[-1] + room // 2, -1), key=broken.__getitem__))
    return [*cuts, columns]


def _axis(letters: float, start: int, stop: int, room: int) -> str:
    """Return the times of a part, every ten letters or so."""
    text = ""
    least = math.floor(1 - math.log10(letters))
    spacing = next(m * 10.0**e for e in (least, least + 1, least + 2) for m in (1, 2, 5) if m * 10.0**e * letters >= 10)
    tick = math.ceil(start / letters / spacing - 1e-9)
    while (place := round(tick * spacing * letters) - start) < stop - start:
        if place + len(number := f"{tick * spacing:.6g}") <= room:
            text = text.ljust(place) + number + " "
        tick += 1
    return text


def _blocks(simulation: Simulation, curve: MemoryCurve, letters: float, columns: int) -> str:
    """Return a worker's peak memory during each letter as blocks, the highest being the highest peak of all."""
    highest = max(curve.peak for curve in simulation.memory) or 1.0
    cells = [0.0] * columns
    ends = [*curve.times[1:], simulation.makespan]
    for start, end, bytes_ in zip(curve.times, ends, curve.bytes, strict=True):
        first = min(math.floor(start * letters + 1e-9), columns - 1)
        last = min(max(first + 1, math.ceil(end * letters - 1e-9)), columns)
        cells[first:last] = [max(cell, bytes_) for cell in cells[first:last]]
    return "".join(_LEVELS[math.ceil(cell / highest * (len(_LEVELS) - 1))] for cell in cells)


# A simulated schedule in the format of Chrome's traces: open it in https://ui.perfetto.dev or chrome://tracing.


def chrome_trace(simulation: Simulation, *, unit: float = 1e6) -> dict[str, Any]:
    """Return a simulation as the dict of a trace: a process per worker, a thread per stream, counters for the memory.

    `unit` is the number of microseconds in a unit of the simulation's time: 1e6 if that is the second. Transfers are
    spans of a track of their sender, and arrows from maker to reader. ``json.dump`` takes the result.

    Raises
    ------
    OptionError
        `unit` is not positive, or not finite.

    Notes
    -----
    The Trace Event Format's phases: X (complete events), M (names), C (counters), b and e (spans that may overlap),
    s and f (arrows).
    """
    if not (unit > 0 and math.isfinite(unit * max(1.0, simulation.makespan))):
        raise OptionError("unit is out of range", expected="a finite number of microseconds, more than 0", got=unit)
    events = [*_names(simulation), *_actions(simulation, unit), *_transfers(simulation, unit),
              *_memory(simulation, unit)]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": simulation.schedule.name}}


def write_trace(simulation: Simulation, path: str | os.PathLike[str], *, unit: float = 1e6) -> None:
    """Write `chrome_trace` to a JSON file, under a temporary name first, or raise `OutputError`."""
    write_atomically(path, json.dumps(chrome_trace(simulation, unit=unit), allow_nan=False).encode())


def _names(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for number, lane in enumerate(simulation.schedule.lanes):
        process = {"ph": "M", "name": "process_name", "pid": lane.worker, "args": {"name": f"worker {lane.worker}"}}
        thread = {"ph": "M", "name": "thread_name", "pid": lane.worker, "tid": number, "args": {"name": lane.stream}}
        yield from (process, thread)


def _actions(simulation: Simulation, unit: float) -> Iterator[dict[str, Any]]:
    for event in simulation.events:
        kinds = [action.kind for action in actions_of(event.cell)]
        details: dict[str, Any] = {"step": event.step}
        versions = [version for version in event.versions if version is not None]
        if versions:
            details["weight version"] = versions[0] if len(versions) == 1 else versions
        yield {
            "ph": "X", "name": str(event.cell), "cat": ", ".join(KINDS[kind] for kind in kinds),
            "pid": simulation.schedule.lanes[event.lane].worker, "tid": event.lane,
            "ts": event.start * unit, "dur": (event.end - event.start) * unit, "args": details,
        }  # fmt: skip


def _transfers(simulation: Simulation, unit: float) -> Iterator[dict[str, Any]]:
    """Yield every transfer as a span of the sender's track for its receiver, and as an arrow from maker to reader."""
    schedule = simulation.schedule
    for number, transfer in enumerate(simulation.transfers):
        span = {"name": f"to worker {transfer.receiver}", "cat": "transfer", "id": number, "pid": transfer.sender}
        yield {**span, "ph": "b", "ts": transfer.start * unit, "args": {"of": str(transfer.source)}}
        yield {**span, "ph": "e", "ts": transfer.end * unit}
        maker = simulation.event(transfer.source, transfer.step)
        reader = _reader(simulation, transfer)
        for phase, event, part in (("s", maker, 0.99), ("f", reader, 0.01)):
            lane = schedule.lanes[event.lane]
            yield {"ph": phase, "name": str(transfer.source), "cat": "data", "id": number, "pid": lane.worker,
                   "tid": event.lane, "ts": (event.start + part * (event.end - event.start)) * unit,
                   **({"bp": "e"} if phase == "f" else {})}  # fmt: skip


def _reader(simulation: Simulation, transfer: Transfer) -> Event:
    """Return the first event that uses a transfer's data."""
    source = transfer.source
    wanted: tuple[tuple[int, Kind], ...] = ((source.stage + 1, "F"),)
    if source.kind != "F":
        wanted = (source.stage - 1, "I"), (source.stage - 1, "W")
    actions = [Action(stage, kind, source.microbatch) for stage, kind in wanted]
    events = [simulation.event(action, transfer.step) for action in actions if action in simulation.schedule]
    return min(events, key=lambda event: event.start)


def _memory(simulation: Simulation, unit: float) -> Iterator[dict[str, Any]]:
    for curve in simulation.memory:
        for number, time in enumerate(curve.times):
            uses = {use.replace("_", " "): getattr(curve, use)[number] for use in USES}
            yield {"ph": "C", "name": "memory", "pid": curve.worker, "ts": time * unit, "args": uses}
