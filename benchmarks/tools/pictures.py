"""Pictures without any window system: figures, and the bars that most benchmarks draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparsebp.core.errors import MissingDependencyError
from sparsebp.core.files import write_figure


def figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 3.6) -> tuple[Any, Any]:
    """Return a Matplotlib figure and its axes, (rows, columns).

    Raises
    ------
    MissingDependencyError
        Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "Matplotlib is not installed, and the picture needs it",
            remedy="Install the extra: pip install 'sparsebp[plot]'",
        ) from error
    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing, drawing.subplots(rows, columns, squeeze=False)


def bar_chart(
    labels: Sequence[str], groups: Iterable[tuple[str, str, Sequence[float]]], xlabel: str, *, each: float
) -> tuple[Any, Any]:
    """Return a figure with bars from the left, and its axes.

    Parameters
    ----------
    labels
        Of the rows, the first at the top.
    groups
        The bars of every row, one of each group: the name for the legend, the colour, a value for each row.
    xlabel
        What the values are.
    each
        Inches that a row is high.
    """
    groups = list(groups)
    drawing, axes = figure(width=8.0, height=each * len(labels) + 1.4)
    ax = axes[0, 0]
    thick = 0.8 / max(len(groups), 1)
    for number, (name, colour, values) in enumerate(groups):
        places = [row + (number - (len(groups) - 1) / 2) * thick for row in range(len(labels))]
        ax.barh(places, values, thick * 0.95, color=colour, label=name)
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing, ax


def legend_below(drawing: Any, *entries: Any, columns: int = 2) -> None:
    """Put the legend below the axes, where no bar reaches: handles and names, or all that have a label."""
    drawing.legend(*entries, fontsize=8, loc="outside lower center", ncols=columns)


def save(drawing: Any, path: Path) -> Path:
    """Write a figure as PNG in one atomic step, without a date in it, and return the path."""
    return write_figure(drawing, path, dpi=144, metadata={"Software": None})
