"""Callbacks of the trainer: progress, JSON lines, early stopping, checkpoints of the best epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from sparsebp.core.check import shown
from sparsebp.core.errors import MissingDependencyError, OptionError, needing
from sparsebp.core.files import json_line
from sparsebp.core.reprs import call_text
from sparsebp.optim import EMA
from sparsebp.optim.lr_schedules import reads_model
from sparsebp.train.history import EpochRecord, History


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The facts of a run when it starts or goes on."""

    epochs: int  # of the whole run
    steps_per_epoch: int | None  # None: not known before an epoch has ended
    first_step: int  # steps done before it
    resumed: bool
    graph: str | None = None  # whether steps are captured into CUDA graphs, and if not, why; None if not asked for
    earlier_steps: int | None = None  # of earlier calls of `fit`, which are not in the history; None if there are none


class Callback:
    """Base: every event does nothing. Override those of interest.

    Attributes
    ----------
    reads_model
        Whether it looks at the model or the optimizer: deferred updates (``Trainer(fusion="forward")``) are then done
        before its events. A subclass must set it to False again.
    """

    reads_model = True

    def __repr__(self) -> str:
        """Show the constructor's call."""
        return call_text(self)

    def set_trainer(self, trainer: Any) -> None:
        """`trainer` is about to call it in a `fit`; keep it to set ``trainer.should_stop``, say.

        An error raised here refuses the `fit`: on all ranks, and an earlier run's checkpoint stays in its place.
        """

    def sees_model(self, event: str) -> bool:
        """Whether it looks at the model at this event, which it must override."""
        name = f"on_{event}"
        return reads_model(self) and (name in vars(self) or getattr(type(self), name) is not getattr(Callback, name))

    def on_start(self, info: RunInfo) -> None:
        """Training is about to start or to go on."""

    def on_step(self, history: History) -> None:
        """A step is done; its values are the last ones of `history`."""

    def on_validation_start(self) -> None:
        """The model is about to be evaluated on the validation set."""

    def on_validation_end(self) -> None:
        """The validation set has been evaluated."""

    def on_epoch(self, record: EpochRecord) -> None:
        """An epoch is done and validated; the checkpoint that is written next holds what callbacks change here."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint has been written to `path`."""

    def on_end(self, history: History) -> None:
        """All epochs are done, or a callback has ended the training."""

    def on_close(self) -> None:
        """Training has ended or failed; release resources."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, texts and arrays by name, which become part of checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, before a resumed run goes on; not called if that was nothing."""


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
        with needing("cli", "The progress bar needs rich, which is not installed"):
            from rich.console import Console
        self.console = Console(stderr=True) if console is None else console
        self._progress: Any = None
        self._task: Any = None
        self._info = RunInfo(0, 0, 0, resumed=False)
        self._drawn = -math.inf  # when, in seconds

    def on_start(self, info: RunInfo) -> None:
        """Draw the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._info = info
        for line in (info.graph, earlier_line(info)):
            if line is not None:
                self.console.print(line, highlight=False, markup=False)
        if not self.console.is_terminal:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self.console, refresh_per_second=4)
        total = None if info.steps_per_epoch is None else info.epochs * info.steps_per_epoch
        self._task = self._progress.add_task("starting", total=total, completed=info.first_step)
        self._progress.start()

    def on_step(self, history: History) -> None:
        """Advance the bar, ten times a second at most."""
        now = time.perf_counter()
        if self._progress is None or now - self._drawn < 0.1:
            return
        self._drawn = now
        epoch = min(self._info.epochs, len(history.epochs) + 1)
        recent = history.loss[-20:]
        text = f"epoch {epoch}/{self._info.epochs}  loss {sum(recent) / len(recent):.4f}"
        self._progress.update(self._task, completed=history.steps, description=text)

    def on_epoch(self, record: EpochRecord) -> None:
        """Print the epoch's line above the bar, which ends the epoch."""
        if self._progress is not None:
            text = f"epoch {record.epoch}/{self._info.epochs}  loss {record.train_loss:.4f}"
            self._progress.update(self._task, completed=record.step, description=text)
            self.console.print(epoch_line(record, self.console.width), highlight=False, markup=False)

    def on_close(self) -> None:
        """Take the bar off."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _EpochLines(Callback):
    """One line per epoch on standard error, where a bar cannot be drawn."""

    reads_model = False

    def on_start(self, info: RunInfo) -> None:
        line = earlier_line(info)
        if line is not None:
            print(line, file=sys.stderr, flush=True)

    def on_epoch(self, record: EpochRecord) -> None:
        print(epoch_line(record, 200), file=sys.stderr, flush=True)


def progress_of(verbose: bool | None, callbacks: Sequence[Any]) -> tuple[Callback, ...]:
    """Return the callback that shows how far `fit` is, if one is to and none of `callbacks` does."""
    try:
        terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, one that only writes, or a closed one
        terminal = False
    if verbose is None:
        streams = [callback.stream for callback in callbacks if isinstance(callback, JsonLines)]
        verbose = (terminal or "ipykernel" in sys.modules) and not any(
            stream in (sys.stdout, sys.stderr) for stream in streams
        )
    if not verbose or any(isinstance(callback, ProgressBar) for callback in callbacks):
        return ()
    if terminal:
        with contextlib.suppress(MissingDependencyError):
            return (ProgressBar(),)
    return (_EpochLines(),)


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


def earlier_line(info: RunInfo) -> str | None:
    """Return a line that says what a history that starts anew stands on; None for a trainer's first run."""
    if info.earlier_steps is None or info.resumed:
        return None
    return f"The model goes on from {info.earlier_steps} earlier steps; epochs and history start anew"


def epoch_line(record: EpochRecord, width: int = 80) -> str:
    """Return an epoch's numbers as text, in lines of at most `width` letters broken between two numbers."""
    start = f"epoch {record.epoch:>3}"
    parts = [f"loss {record.train_loss:.4f}" + _test(record.validation_loss, 4)]
    if record.train_accuracy is not None:
        parts.append(f"accuracy {record.train_accuracy:.3f}" + _test(record.validation_accuracy, 3))
    parts += [name + _test(value, 4) for name, value in record.metrics.items()]
    lines = [start]
    for part in (*parts, f"{record.seconds:.1f} s"):
        if len(lines[-1]) + 2 + len(part) > width and lines[-1] != start:
            lines.append(" " * len(start))
        lines[-1] += f"  {part}"
    return "\n".join(lines)


def _test(value: float | None, digits: int) -> str:
    return "" if value is None else f" (test {value:.{digits}f})"


class WeightAveraging(Callback):
    """Averages the weights after every step, and lets the validation set be evaluated with the averages.

    Validation losses and accuracies, and whatever follows them, are those of the averages: `EarlyStopping` restores
    the best ones. The model is trained, and saved, with its own weights. Averages are part of checkpoints, as the
    arrays ``callbacks.WeightAveraging.averages``, and a resumed run goes on with them.

    Parameters
    ----------
    ema
        A `sparsebp.optim.EMA` of the trainer's model. ``with ema.averaged(): …`` evaluates the averages after `fit`,
        and ``ema.apply()`` makes them the model's weights.
    """

    def __init__(self, ema: EMA) -> None:
        if not isinstance(ema, EMA):
            raise OptionError("Not an average of weights", expected="a sparsebp.optim.EMA", got=shown(ema),
                              remedy="Build it: WeightAveraging(sb.optim.EMA(model, 0.999))")  # fmt: skip
        self.ema = ema
        self._validating = contextlib.ExitStack()

    def set_trainer(self, trainer: Any) -> None:
        """Refuse a trainer of another model."""
        if not self.ema.is_of(trainer.model):
            raise OptionError("The averages are of another model", expected="EMA(model) of the trainer's model",
                              got="other arrays", remedy="Build the EMA on the trainer's model")  # fmt: skip

    def on_step(self, history: History) -> None:
        """Take the weights into the averages."""
        self.ema.update()

    def on_validation_start(self) -> None:
        """Give the model its averages."""
        self._validating.enter_context(self.ema.averaged())

    def on_validation_end(self) -> None:
        """Give the model its own weights back."""
        self._validating.close()

    on_close = on_validation_end

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return self.ema.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages."""
        self.ema.load_state_dict(state)
