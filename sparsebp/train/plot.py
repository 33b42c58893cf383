"""Pictures of a training run. Functions take and return a matplotlib ``Axes``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.errors import MissingDependencyError
from sparsebp.core.files import write_figure
from sparsebp.train.history import History


def plot_history(history: History, ax: Any = None, *, smooth: int = 20) -> Any:
    """Draw the loss of every step, its running mean, and accuracy after every epoch on a second scale.

    Parameters
    ----------
    history
        Of a run with at least one step.
    ax
        A matplotlib ``Axes``; None makes a figure of its own (outside of pyplot, so nothing has to be closed).
    smooth
        Steps of the running mean.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    ax = _new_axes() if ax is None else ax
    loss = np.asarray(history.loss)
    steps = np.arange(1, len(loss) + 1)
    ax.plot(steps, loss, color="tab:blue", alpha=0.3, linewidth=0.8, label="loss of each step")
    width = min(smooth, len(loss))
    if width > 1:
        mean = np.convolve(loss, np.full(width, 1 / width), mode="valid")
        ax.plot(steps[width - 1 :], mean, color="tab:blue", label=f"mean over {width} steps")
    ends = [record.step for record in history.epochs]
    if any(record.validation_loss is not None for record in history.epochs):
        ax.plot(ends, [r.validation_loss for r in history.epochs], "o--", color="tab:orange", label="test loss")
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    handles, labels = ax.get_legend_handles_labels()
    if any(record.validation_accuracy is not None for record in history.epochs):
        twin = ax.twinx()
        twin.plot(ends, [r.validation_accuracy for r in history.epochs], "s-", color="tab:green", label="test accuracy")
        twin.set_ylabel("accuracy")
        twin.set_ylim(0, 1)
        more, names = twin.get_legend_handles_labels()
        handles, labels = handles + more, labels + names
    ax.legend(handles, labels, loc="center right", fontsize="small")
    return ax


def save_loss_curve(history: History, path: str | os.PathLike[str], *, title: str = "Training") -> Path:
    """Write the picture of `plot_history` to `path` (PNG, SVG or PDF by its suffix) and return the path.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    OutputError
        The file cannot be written, or the suffix is of no format.
    """
    ax = plot_history(history)
    ax.set_title(title)
    return write_figure(ax.figure, path, dpi=150, bbox_inches="tight")


def _new_axes() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "Pictures need matplotlib, which is not installed",
            remedy="Install the extra `plot`: pip install 'sparsebp[plot]'",
        ) from error
    return Figure(figsize=(7, 4)).subplots()
