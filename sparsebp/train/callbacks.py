"""Callbacks of the trainer: a progress bar for terminals, JSON lines for machines. Quiet is to pass neither."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any, TextIO

from sparsebp.core.arguments import shown
from sparsebp.core.errors import MissingDependencyError, OptionError
from sparsebp.core.files import json_line
from sparsebp.optim.lr_scheduler import reads_model
from sparsebp.train.history import EpochRecord, History


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What is known when training starts: epochs of the whole run, steps per epoch, the first step's number.

    On a GPU, unless ``Trainer(graph=False)``, and with ``graph=True`` anywhere, `graph` says whether steps are captured
    into CUDA graphs, and if not, why.
    """

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
            raise MissingDependencyError(
                "The progress bar needs rich, which is not installed",
                remedy="Install the extra `cli`: pip install 'sparsebp[cli]'",
            ) from error
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
                remedy='Pass a file that is open for writing: JsonLines(open("log.jsonl", "a"))',
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
