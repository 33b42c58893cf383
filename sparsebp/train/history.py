"""The history of a run, one value a step and one record an epoch, and its pictures."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.check import shown
from sparsebp.core.errors import FileFormatError, needing
from sparsebp.core.files import write_figure

STEP_FIELDS = ("loss", "accuracy", "grad_norm", "lr", "seconds")
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float,), "float | None": (float, type(None))}


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """One epoch: its number from 0 and its means. Accuracies are None for a task without classes."""

    epoch: int
    step: int  # steps done when it ended
    train_loss: float  # each sample's, before the step that used it
    train_accuracy: float | None
    validation_loss: float | None  # after the epoch; None without a validation set
    validation_accuracy: float | None
    seconds: float  # of the training steps, without validation and checkpoints

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> EpochRecord:
        """Build the record from what `to_json` returned; `FileFormatError` for anything else."""
        kinds = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(cls)}
        fits = isinstance(record, dict) and record.keys() == kinds.keys()
        if not fits or any(isinstance(v, bool) or not isinstance(v, kinds[name]) for name, v in record.items()):
            raise FileFormatError("This is no record of an epoch", expected=", ".join(kinds), got=shown(record))
        return cls(**record)


class History:
    """The values of every step and the record of every epoch.

    Attributes
    ----------
    loss, accuracy, grad_norm, lr, seconds
        Lists of floats, one entry per step: the batch's mean loss and accuracy (NaN for a task without classes), the
        gradient's norm before clipping, the learning rate, and the step's wall-clock seconds.
    samples
        List of ints: the batch size of every step.
    epochs
        List of `EpochRecord`.
    """

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.accuracy: list[float] = []
        self.grad_norm: list[float] = []
        self.lr: list[float] = []
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self.epochs: list[EpochRecord] = []

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return len(self.loss)

    def add_step(
        self, *, loss: float, accuracy: float, grad_norm: float, lr: float, seconds: float, samples: int
    ) -> None:
        """Append one step."""
        for name, value in zip(STEP_FIELDS, (loss, accuracy, grad_norm, lr, seconds), strict=True):
            getattr(self, name).append(float(value))
        self.samples.append(int(samples))

    def end_epoch(self, epoch: int, steps: int, validation: tuple[float, float | None] | None) -> EpochRecord:
        """Append and return the record of an epoch that took the last `steps` steps."""
        last = slice(self.steps - steps, self.steps)
        weights = np.asarray(self.samples[last], np.float64)
        accuracy = float(np.average(self.accuracy[last], weights=weights))
        record = EpochRecord(
            epoch, self.steps, float(np.average(self.loss[last], weights=weights)),
            None if math.isnan(accuracy) else accuracy, None if validation is None else validation[0],
            None if validation is None else validation[1], float(np.sum(self.seconds[last])),
        )  # fmt: skip
        self.epochs.append(record)
        return record

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the steps' values as float64 arrays (steps,), and ``samples`` as int64."""
        arrays = {name: np.asarray(getattr(self, name), np.float64) for name in STEP_FIELDS}
        return arrays | {"samples": np.asarray(self.samples, np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], epochs: list[dict[str, Any]]) -> History:
        """Build the history from `to_arrays` and the records' `to_json`; `FileFormatError` for anything else."""
        kinds = dict.fromkeys(STEP_FIELDS, np.float64) | {"samples": np.int64}
        forms = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        steps = max((array.size for array in arrays.values()), default=0)
        wanted = {name: ((steps,), np.dtype(kind)) for name, kind in kinds.items()}
        if forms != wanted:
            raise FileFormatError("This is no history of steps", expected=wanted, got=forms)
        history = cls()
        for name in kinds:
            setattr(history, name, arrays[name].tolist())
        history.epochs = [EpochRecord.from_json(record) for record in epochs]
        return history


# Pictures of a training run. Functions take and return a matplotlib ``Axes``.


def plot_history(history: History, ax: Any = None, *, smooth: int = 20) -> Any:
    """Draw the loss of every step, its running mean, and accuracy after every epoch on a second scale.

    Parameters
    ----------
    history
        Of a run with at least one step.
    ax
        A matplotlib ``Axes``; None makes a figure (outside of pyplot, so nothing has to be closed).
    smooth
        Steps of the running mean.

    Returns
    -------
    matplotlib.axes.Axes
    """
    if ax is None:
        with needing("plot", "Pictures need matplotlib, which is not installed"):
            from matplotlib.figure import Figure
        ax = Figure(figsize=(7, 4)).subplots()
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
    ax.set(xlabel="step", ylabel="loss")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    handles, labels = ax.get_legend_handles_labels()
    if any(record.validation_accuracy is not None for record in history.epochs):
        twin = ax.twinx()
        twin.plot(ends, [r.validation_accuracy for r in history.epochs], "s-", color="tab:green", label="test accuracy")
        twin.set(ylabel="accuracy", ylim=(0, 1))
        more, names = twin.get_legend_handles_labels()
        handles, labels = handles + more, labels + names
    ax.legend(handles, labels, loc="center right", fontsize="small")
    return ax


def save_loss_curve(history: History, path: str | os.PathLike[str], *, title: str = "Training") -> Path:
    """Write the picture of `plot_history` to `path` (PNG, SVG or PDF by its suffix) and return the path."""
    ax = plot_history(history)
    ax.set_title(title)
    return write_figure(ax.figure, path, dpi=150, bbox_inches="tight")
