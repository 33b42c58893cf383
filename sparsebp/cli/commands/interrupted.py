"""What Ctrl-C leaves to be said: where the command was, and which command goes on from there."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparsebp.distributed.transports.processes.launcher import launching
from sparsebp.train.callbacks import Callback, RunInfo
from sparsebp.train.history import History


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a command that knows where it was.

    Parameters
    ----------
    where
        ``"at step 38 of 400"``, say, and what there is of it.
    resume
        Whether there is a checkpoint to go on from; else the command begins again.
    """

    def __init__(self, where: str, *, resume: bool = False) -> None:
        super().__init__(where)
        self.where, self.resume = where, resume

    def describe(self, arguments: Sequence[str]) -> str:
        """Return the message, with the command to go on with; `arguments` are those of the command that was stopped."""
        left = _resumed(arguments) if self.resume else arguments
        command = shlex.join([*launching(), "sparsebp", *left])
        return f"Interrupted {self.where}. {'Go on from it' if self.resume else 'Begin again'}: {command}"


def _resumed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that resume a run: without ``--weights``, which the folder's checkpoint has replaced."""
    left: list[str] = []
    values = iter(arguments)
    for argument in values:
        if argument == "--weights":
            next(values, None)
        elif not argument.startswith("--weights=") and argument != "--resume":
            left.append(argument)
    return [*left, "--resume"]


class Position(Callback):
    """Notes how far training is, and which step the last checkpoint is of; `resumed`: whether a run goes on."""

    reads_model = False

    def __init__(self, *, resumed: bool) -> None:
        self._resumed = resumed
        self._history: History | None = None
        self._total: int | None = None
        self._saved: int | None = None
        self._done = self._fits = 0

    def on_start(self, info: RunInfo) -> None:
        """Take the place that this run begins at: that of a checkpoint."""
        self._history, self._done, self._total = None, info.first_step, info.epochs * info.steps_per_epoch
        self._saved = info.first_step
        self._fits += 1

    def on_step(self, history: History) -> None:
        """Take the place; its numbers are read when they are asked for, with the step that an end still completes."""
        self._history = history

    def on_checkpoint(self, path: Path) -> None:
        """Take the place of the checkpoint."""
        self._saved = self._steps()

    def _steps(self) -> int:
        return self._done if self._history is None else self._history.steps

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Turn Ctrl-C inside the ``with`` block into what there is to say of it."""
        try:
            yield
        except KeyboardInterrupt as error:
            raise self.interrupted() from error

    def interrupted(self) -> Interrupted:
        """Return what to say of an interruption now."""
        if self._saved is None:
            checkpoint = "the checkpoint is as it was" if self._resumed else "no checkpoint was written yet"
            return Interrupted(f"before the first step; {checkpoint}", resume=self._resumed)
        done, run = self._steps(), "retraining" if self._fits > 1 else "training"
        if self._total is None:
            where = "before the first step"
        else:
            where = f"at step {done + 1} of {self._total}" if done < self._total else f"after all {self._total} steps"
        return Interrupted(f"{where} of {run}; the last checkpoint is of step {self._saved}", resume=True)
