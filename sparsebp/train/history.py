"""The history of a run: one value per step and one record per epoch, and pictures of it."""

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
WEIGHTS = ("loss_weight", "accuracy_weight")
_OF_RECORDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float,), "float | None": (float, type(None))}


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """One epoch: its number from 1 and its means. Accuracies are None for a task without classes.

    Means are over all that counts in the loss; accuracies leave out what it ignores.
    """

    epoch: int
    step: int  # steps done when it ended
    train_loss: float  # each sample's, before the step that used it
    train_accuracy: float | None
    validation_loss: float | None  # after the epoch; None without a validation set
    validation_accuracy: float | None
    seconds: float  # of the training steps, without validation and checkpoints
    # The trainer's metrics of the validation set.
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold; metrics are ``validation_<name>``."""
        fields = {name: getattr(self, name) for name in _KINDS_OF_RECORD}
        return fields | {f"{VALIDATION}{name}": value for name, value in self.metrics.items()}

    @classmethod
    def from_json(cls, record: Any) -> EpochRecord:
        """Build the record from what `to_json` returned; `FileFormatError` for anything else."""
        kinds = _KINDS_OF_RECORD
        fits = isinstance(record, dict) and kinds.keys() <= record.keys()
        more = [name for name in record if name not in kinds] if fits else []
        if not fits or not all(isinstance(name, str) and name.startswith(VALIDATION) for name in more) or any(
            isinstance(v, bool) or not isinstance(v, kinds.get(name, (float,))) for name, v in record.items()
        ):  # fmt: skip
            raise FileFormatError("This is no record of an epoch", expected=", ".join(kinds), got=shown(record))
        metrics = {name.removeprefix(VALIDATION): record[name] for name in more}
        return cls(**{name: record[name] for name in kinds}, metrics=metrics)


VALIDATION = "validation_"
_KINDS_OF_RECORD = {
    field.name: _OF_RECORDS[str(field.type)] for field in dataclasses.fields(EpochRecord) if field.name != "metrics"
}


class Evaluation(tuple[float, "float | None"]):
    """Loss and accuracy of a data set, in this order; accuracy is None for a task without classes.

    Attributes
    ----------
    metrics
        The trainer's further numbers, by name.
    """

    metrics: Mapping[str, float]

    def __new__(cls, loss: float, accuracy: float | None, metrics: Mapping[str, float]) -> Evaluation:
        """Make the tuple."""
        self = super().__new__(cls, (loss, accuracy))
        self.metrics = metrics
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the arguments that make it again."""
        return (*self, self.metrics)

    def __repr__(self) -> str:
        """Show all numbers."""
        more = "".join(f", {name}={value!r}" for name, value in self.metrics.items())
        return f"Evaluation(loss={self.loss!r}, accuracy={self.accuracy!r}{more})"

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self[0]

    @property
    def accuracy(self) -> float | None:
        """The share of positions that are right."""
        return self[1]


class History:
    """The values of every step and the record of every epoch.

    Attributes
    ----------
    loss, accuracy, grad_norm, lr, seconds
        Lists of floats, one entry per step: the batch's mean loss and accuracy (NaN for a task without classes), the
        gradient's norm before clipping, the learning rate, and the step's wall-clock seconds.
    samples
        List of ints: the batch size of every step.
    loss_weight, accuracy_weight
        Lists of floats: how much the loss of every step counts in its epoch's mean (``loss.count(target)``, else the
        samples), and of how many positions the accuracy is; 0 for a task without classes.
    epochs
        List of `EpochRecord`.
    earlier_steps
        Steps that the trainer had taken before, in earlier calls of `fit`; they are not in this history.
    """

    def __init__(self) -> None:
        self.earlier_steps = 0
        self.loss: list[float] = []
        self.accuracy: list[float] = []
        self.grad_norm: list[float] = []
        self.lr: list[float] = []
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self.loss_weight: list[float] = []
        self.accuracy_weight: list[float] = []
        self.epochs: list[EpochRecord] = []

    def __repr__(self) -> str:
        """Show a table of the epochs: all, or the first and the last five."""
        head = f"History: {len(self.epochs)} epochs, {self.steps} steps"
        if not self.epochs:
            return head
        columns = [name for name in _KINDS_OF_RECORD if getattr(self.epochs[-1], name) is not None]
        rows = [[name.replace("validation", "val") for name in columns]]
        for record in self.epochs:
            values = (getattr(record, name) for name in columns)
            rows.append([f"{value:.4g}" if isinstance(value, float) else str(value) for value in values])
        if len(self.epochs) > 10:
            rows[6:-5] = [["…"] * len(columns)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([head, *lines])

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return len(self.loss)

    def add_step(
        self, *, loss: float, accuracy: float, grad_norm: float, lr: float, seconds: float, samples: int,
        loss_weight: float | None = None, accuracy_weight: float | None = None,
    ) -> None:  # fmt: skip
        """Append one step; its weights are its samples if not given."""
        for name, value in zip(STEP_FIELDS, (loss, accuracy, grad_norm, lr, seconds), strict=True):
            getattr(self, name).append(float(value))
        self.samples.append(int(samples))
        self.loss_weight.append(float(samples if loss_weight is None else loss_weight))
        self.accuracy_weight.append(float(samples if accuracy_weight is None else accuracy_weight))

    def end_epoch(self, steps: int, validation: tuple[float, float | None] | None) -> EpochRecord:
        """Append and return the record of the next epoch, which took the last `steps` steps."""
        last = slice(self.steps - steps, self.steps)
        accuracy = _mean(self.accuracy[last], self.accuracy_weight[last])
        record = EpochRecord(
            len(self.epochs) + 1, self.steps, _mean(self.loss[last], self.loss_weight[last]),
            None if math.isnan(accuracy) else accuracy, None if validation is None else validation[0],
            None if validation is None else validation[1], float(np.sum(self.seconds[last])),
            getattr(validation, "metrics", {}),
        )  # fmt: skip
        self.epochs.append(record)
        return record

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the steps' values as float64 arrays (steps,), and ``samples`` as int64."""
        arrays = {name: np.asarray(getattr(self, name), np.float64) for name in (*STEP_FIELDS, *WEIGHTS)}
        return arrays | {"samples": np.asarray(self.samples, np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], epochs: list[dict[str, Any]]) -> History:
        """Build the history from `to_arrays` and the records' `to_json`; `FileFormatError` for anything else."""
        kinds = dict.fromkeys((*STEP_FIELDS, *WEIGHTS), np.float64) | {"samples": np.int64}
        if arrays.keys().isdisjoint(WEIGHTS) and "samples" in arrays:  # of a version that knew samples only
            arrays = {**arrays, **dict.fromkeys(WEIGHTS, arrays["samples"].astype(np.float64))}
        forms = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        steps = max((array.size for array in arrays.values()), default=0)
        wanted = {name: ((steps,), np.dtype(kind)) for name, kind in kinds.items()}
        if forms != wanted:
            raise FileFormatError("This is no history of steps", expected=wanted, got=forms)
        history = cls()
        for name in kinds:
            setattr(history, name, arrays[name].tolist())
        for number, record in enumerate(epochs, 1):  # up to version 0.2, they were numbered from 0
            history.epochs.append(dataclasses.replace(EpochRecord.from_json(record), epoch=number))
        return history


def _mean(values: list[float], weights: list[float]) -> float:
    """Return the weighted mean of the values that have a weight; NaN if none has."""
    counts = np.asarray(weights) != 0
    if not counts.any():
        return math.nan
    return float(np.average(np.asarray(values)[counts], weights=np.asarray(weights)[counts]))


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
    """Write the picture of `plot_history` to `path` (PNG, SVG or PDF by its suffix), which it replaces; return it."""
    ax = plot_history(history)
    ax.set_title(title)
    return write_figure(ax.figure, path, dpi=150, bbox_inches="tight")
