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

# What a training run has seen: one value a step, one record an epoch.

STEP_FIELDS = ("loss", "accuracy", "grad_norm", "lr", "seconds")
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float,), "float | None": (float, type(None))}


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """One epoch.

    Attributes
    ----------
    epoch, step
        Epoch number from 0, and the number of steps done when it ended.
    train_loss, train_accuracy
        Means over the epoch's samples, each taken before the step that used it; accuracy is None for a task without
        classes.
    validation_loss, validation_accuracy
        Means over the validation set after the epoch, None without one.
    seconds
        Wall-clock time of the epoch's training steps; validation and checkpoints are not in it.
    """

    epoch: int
    step: int
    train_loss: float
    train_accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> EpochRecord:
        """Build the record back from `to_json`.

        Raises
        ------
        FileFormatError
            It is not what that returns.
        """
        kinds = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(cls)}
        fits = isinstance(record, dict) and record.keys() == kinds.keys()
        if not fits or any(isinstance(v, bool) or not isinstance(v, kinds[name]) for name, v in record.items()):
            raise FileFormatError("This is no record of an epoch", expected=", ".join(kinds), got=shown(record),
                                  remedy="Pass what to_json returned")  # fmt: skip
        return cls(**record)


class History:
    """The values of every step and the record of every epoch.

    Attributes
    ----------
    loss, accuracy, grad_norm, lr, seconds
        Lists of floats, one entry a step: the batch's mean loss, the share of its samples that were classified right
        (NaN for a task without classes), the gradient's norm before clipping, the learning rate, and the step's
        wall-clock time in seconds.
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
            epoch=epoch,
            step=self.steps,
            train_loss=float(np.average(self.loss[last], weights=weights)),
            train_accuracy=None if math.isnan(accuracy) else accuracy,
            validation_loss=None if validation is None else validation[0],
            validation_accuracy=None if validation is None else validation[1],
            seconds=float(np.sum(self.seconds[last])),
        )
        self.epochs.append(record)
        return record

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the steps' values as float64 arrays (steps,), and ``samples`` as int64."""
        arrays = {name: np.asarray(getattr(self, name), np.float64) for name in STEP_FIELDS}
        return arrays | {"samples": np.asarray(self.samples, np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], epochs: list[dict[str, Any]]) -> History:
        """Build the history back from `to_arrays` and the records' `EpochRecord.to_json`.

        Raises
        ------
        FileFormatError
            They are not what those return.
        """
        kinds = dict.fromkeys(STEP_FIELDS, np.float64) | {"samples": np.int64}
        forms = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        steps = max((array.size for array in arrays.values()), default=0)
        wanted = {name: ((steps,), np.dtype(kind)) for name, kind in kinds.items()}
        if forms != wanted:
            raise FileFormatError("This is no history of steps", expected=wanted, got=forms,
                                  remedy="Pass what to_arrays returned")  # fmt: skip
        history = cls()
        for name in kinds:
            setattr(history, name, arrays[name].tolist())
        history.epochs = [EpochRecord.from_json(record) for record in epochs]
        return history


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What is known when training starts: epochs of the whole run, steps per epoch, the first step's number."""

    # On a GPU, unless `Trainer(graph=False)`, and with `graph=True` anywhere, `graph` says whether steps are captured
    # into CUDA graphs, and if not, why.

    epochs: int
    steps_per_epoch: int
    first_step: int
    resumed: bool
    graph: str | None = None


class Callback:
    """Base: every event does nothing. Override those of interest.

    Attributes
    ----------
    reads_model
        Whether it looks at the model or the optimizer when it is told of an event. With updates that are put off
        (``Trainer(fusion="forward")``) they are then done before; a callback that does not look leaves them where they
        are. A subclass of one that does not look says so anew: what it overrides may look.
    """

    reads_model = True

    def sees_model(self, event: str) -> bool:
        """Whether it looks at the model at this event: it must have something to do then."""
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
        """Training is over, in whichever way; release what is held."""


class ProgressBar(Callback):
    """A bar with epoch, loss, accuracy and the time left, drawn by rich, on a terminal only.

    What `RunInfo.graph` says is printed anywhere.

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
        if info.graph is not None:  # also in a pipe: what was asked for may not be done
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
    """One JSON object a line: ``start``, one ``epoch`` each, ``end``. Values that are not finite become null.

    Parameters
    ----------
    stream
        A stream of text, such as ``sys.stdout`` or a file that is open for writing; it stays open.

    Raises
    ------
    OptionError
        It is something else: the name of a file, say.
    """

    reads_model = False

    def __init__(self, stream: TextIO) -> None:
        writes = all(callable(getattr(stream, name, None)) for name in ("write", "flush"))
        if not writes or isinstance(stream, type):
            raise OptionError(
                "Not a stream", expected="a stream of text, with write and flush", got=shown(stream),
                remedy='Pass a file that is open for writing: JsonLines(open("log.jsonl", "a"))'
            )  # fmt: skip
        if isinstance(stream, io.RawIOBase | io.BufferedIOBase):
            raise OptionError("The stream takes bytes", expected="a stream of text", got=type(stream).__name__,
                              remedy='Open the file for text: open("log.jsonl", "a")')  # fmt: skip
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
    """Return an epoch's numbers as a line of text; as several, broken between two numbers, if it has more letters."""
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
        raise MissingDependencyError("Pictures need matplotlib, which is not installed", remedy="Install the extra "
                                     "`plot`: pip install 'sparsebp[plot]'") from error  # fmt: skip
    return Figure(figsize=(7, 4)).subplots()
