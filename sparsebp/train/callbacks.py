"""Callbacks of the trainer, the history of a run, and its pictures."""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from sparsebp.core.check import shown
from sparsebp.core.errors import FileFormatError, MissingDependencyError, OptionError
from sparsebp.core.files import json_line, write_figure
from sparsebp.optim.lr_schedules import reads_model

# The history of a run: one value a step, one record an epoch.

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


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The facts of a run when it starts or goes on."""

    epochs: int  # of the whole run
    steps_per_epoch: int
    first_step: int  # its number
    resumed: bool
    graph: str | None = None  # whether steps are captured into CUDA graphs, and if not, why; None if not asked for


class Callback:
    """Base: every event does nothing. Override those of interest.

    Attributes
    ----------
    reads_model
        Whether it looks at the model or the optimizer: deferred updates (``Trainer(fusion="forward")``) are then done
        before its events. A subclass must set it to False again.
    """

    reads_model = True

    def sees_model(self, event: str) -> bool:
        """Whether it looks at the model at this event, which it must override."""
        name = f"on_{event}"
        return reads_model(self) and (name in vars(self) or getattr(type(self), name) is not getattr(Callback, name))

    def on_start(self, info: RunInfo) -> None:
        """Training is about to start or to go on."""

    def on_step(self, history: History) -> None:
        """A step is done; its values are the last ones of `history`."""

    def on_epoch(self, record: EpochRecord) -> None:
        """An epoch is done, validated and saved."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint has been written to `path`."""

    def on_end(self, history: History) -> None:
        """All epochs are done."""

    def on_close(self) -> None:
        """Training has ended or failed; release resources."""


class ProgressBar(Callback):
    """A bar with epoch, loss and the time left, drawn by rich, on a terminal only; `RunInfo.graph` is printed anywhere.

    Parameters
    ----------
    console
        A `rich.console.Console`; None writes to standard error.

    Raises
    ------
    MissingDependencyError
        rich is not installed.
    """

    reads_model = False

    def __init__(self, console: Any = None) -> None:
        try:
            from rich.console import Console
        except ImportError as error:
            raise MissingDependencyError("The progress bar needs rich, which is not installed", remedy="Install the "
                                         "extra `cli`: pip install 'sparsebp[cli]'") from error  # fmt: skip
        self.console = Console(stderr=True) if console is None else console
        self._progress: Any = None
        self._task: Any = None
        self._info = RunInfo(0, 0, 0, resumed=False)

    def on_start(self, info: RunInfo) -> None:
        """Draw the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._info = info
        if info.graph is not None:
            self.console.print(info.graph, highlight=False, markup=False)
        if not self.console.is_terminal:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self.console, refresh_per_second=4)
        total = info.epochs * info.steps_per_epoch
        self._task = self._progress.add_task("starting", total=total, completed=info.first_step)
        self._progress.start()

    def on_step(self, history: History) -> None:
        """Advance the bar."""
        if self._progress is None:
            return
        epoch = min(self._info.epochs, (history.steps - 1) // self._info.steps_per_epoch + 1)
        recent = history.loss[-20:]
        text = f"epoch {epoch}/{self._info.epochs}  loss {sum(recent) / len(recent):.4f}"
        self._progress.update(self._task, completed=history.steps, description=text)

    def on_epoch(self, record: EpochRecord) -> None:
        """Print the epoch's line above the bar."""
        if self._progress is not None:
            self.console.print(epoch_line(record, self.console.width), highlight=False, markup=False)

    def on_close(self) -> None:
        """Take the bar off."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class JsonLines(Callback):
    """One JSON object per line: ``start``, one ``epoch`` each, ``end``. Values that are not finite become null.

    Parameters
    ----------
    stream
        A stream of text, such as ``sys.stdout`` or a file open for writing, which stays open; else `OptionError`.
    """

    reads_model = False

    def __init__(self, stream: TextIO) -> None:
        writes = all(callable(getattr(stream, name, None)) for name in ("write", "flush"))
        if not writes or isinstance(stream, type | io.RawIOBase | io.BufferedIOBase):
            raise OptionError(
                "Not a stream of text", expected="a stream with write and flush", got=shown(stream),
                remedy='Pass a file that is open for writing text: JsonLines(open("log.jsonl", "a"))'
            )  # fmt: skip
        self.stream = stream

    def on_start(self, info: RunInfo) -> None:
        """Write the ``start`` line."""
        said = {key: value for key, value in dataclasses.asdict(info).items() if value is not None}
        self.write({"event": "start", **said})

    def on_epoch(self, record: EpochRecord) -> None:
        """Write the ``epoch`` line."""
        self.write({"event": "epoch", **record.to_json()})

    def on_end(self, history: History) -> None:
        """Write the ``end`` line."""
        self.write({"event": "end", "steps": history.steps, "seconds": sum(history.seconds)})

    def write(self, entry: dict[str, Any]) -> None:
        """Write one object as a line."""
        self.stream.write(json_line(entry) + "\n")
        self.stream.flush()


def epoch_line(record: EpochRecord, width: int = 80) -> str:
    """Return an epoch's numbers as text, in lines of at most `width` letters broken between two numbers."""
    start = f"epoch {record.epoch + 1:>3}"
    parts = [f"loss {record.train_loss:.4f}" + _test(record.validation_loss, 4)]
    if record.train_accuracy is not None:
        parts.append(f"accuracy {record.train_accuracy:.3f}" + _test(record.validation_accuracy, 3))
    lines = [start]
    for part in (*parts, f"{record.seconds:.1f} s"):
        if len(lines[-1]) + 2 + len(part) > width and lines[-1] != start:
            lines.append(" " * len(start))
        lines[-1] += f"  {part}"
    return "\n".join(lines)


def _test(value: float | None, digits: int) -> str:
    return "" if value is None else f" (test {value:.{digits}f})"


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
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependencyError("Pictures need matplotlib, which is not installed", remedy="Install the extra "
                                         "`plot`: pip install 'sparsebp[plot]'") from error  # fmt: skip
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
