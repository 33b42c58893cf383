"""What Ctrl-C, or SIGTERM, leaves to be said: where the command was, and which command goes on from there."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sparsebp.distributed.transports.processes.launcher import launching

if TYPE_CHECKING:
    from sparsebp.recipes.recipe import Run


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


class Position:
    """Knows how far training is, and which step the last checkpoint is of, on any rank.

    Parameters
    ----------
    resumed
        Whether a run goes on.
    """

    def __init__(self, *, resumed: bool) -> None:
        self._resumed = resumed
        self._runs: list[Run] = []

    def follow(self, run: Run) -> None:
        """Look at `run` from here on: the training, and then the retraining."""
        self._runs.append(run)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Turn Ctrl-C inside the ``with`` block into what there is to say of it."""
        try:
            yield
        except KeyboardInterrupt as error:
            raise self.interrupted() from error

    def interrupted(self) -> Interrupted:
        """Return what to say of an interruption now."""
        begun = [run for run in self._runs if run.trainer.saved is not None]
        if not begun:
            checkpoint = "the checkpoint is as it was" if self._resumed else "no checkpoint was written yet"
            return Interrupted(f"before the first step; {checkpoint}", resume=self._resumed)
        run, name = begun[-1], "retraining" if len(begun) > 1 else "training"
        done, total = run.trainer.history.steps, run.steps
        where = f"at step {done + 1} of {total}" if done < total else f"after all {total} steps"
        return Interrupted(f"{where} of {name}; the last checkpoint is of step {run.trainer.saved}", resume=True)
