"""The picture of a simulated schedule: what every stream does when, transfers, and what the workers keep in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from sparsebp.core.errors import MissingDependencyError
from sparsebp.schedule.actions import KINDS, Action, Kind, actions_of
from sparsebp.schedule.pictures.labels import meaning, numbers, row, title
from sparsebp.schedule.simulation.simulate import Simulation

COLOURS: dict[Kind, str] = {
    "F": "#56b4e9",
    "I": "#e69f00",
    "W": "#009e73",
    "B": "#d55e00",
    "S": "#f0e442",
    "U": "#cc79a7",
}
"""Those of Okabe and Ito, which colour-blind readers tell apart; black text is legible on all of them."""

_HEIGHT = 0.8
_BETWEEN_WORKERS = 0.25
_MOST_NUMBERS = 4000
_SMALLEST_FONT, _LARGEST_FONT = 4.5, 8.0


class _Box(NamedTuple):
    action: Action
    start: float
    duration: float
    top: float
    height: float


def gantt(simulation: Simulation, ax: Any = None, *, memory: bool = True) -> Any:
    """Draw a simulation: one row a worker and stream, a box an action, and below the memory of every worker.

    Parameters
    ----------
    simulation
        Of any schedule. Boxes carry the number of the micro-batch, of the stage, or both, as far as there is room. The
        forward of an overlap is drawn over its backward; what takes no time is a thin line.
    ax
        A matplotlib ``Axes``, which is then shared by rows and memory; None makes a figure of its own.
    memory
        Whether to draw the memory. Matplotlib's constrained layout leaves no room for its axes: leave gaps between
        several pictures yourself, or pass False.

    Returns
    -------
    matplotlib.axes.Axes
        That of the rows.

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
    """Draw a line from sender to receiver for what takes time: from when the link starts until the data are there."""
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
    """Write numbers into the boxes that have room for them, all in the size that the narrowest of them allows."""
    written = [(box, numbers(simulation.schedule, box.action)) for box in boxes if box.duration > 0]
    if len(written) > _MOST_NUMBERS:
        return
    points = 72 / ax.figure.dpi
    width, height = (span * points for span in ax.get_window_extent().size)
    per_unit = width / (ax.get_xlim()[1] - ax.get_xlim()[0])
    per_row = height / abs(ax.get_ylim()[1] - ax.get_ylim()[0])
    fitting = []
    for box, lines in written:
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


_SHORT: dict[Kind, str] = {"B": "B both", "S": "S synchronisation", "U": "U update"}


def _memory_axes(simulation: Simulation, ax: Any) -> Any:
    """Add axes below those of the rows, and draw what every worker keeps."""
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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "matplotlib is not installed, and drawing a schedule needs it",
            remedy="Install the extra: pip install 'sparsebp[plot]'",
        ) from error
    lanes = simulation.schedule.lanes
    height = 0.9 + 0.4 * len(lanes) + 1.2 * memory
    width = min(max(10.0, 0.16 * simulation.steps * max(len(lane.cells) for lane in lanes)), 24.0)
    return Figure(figsize=(width, height)).add_axes((1 / width, 0.5 / height, 1 - 1.8 / width, 1 - 0.9 / height))
