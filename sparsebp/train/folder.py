"""The folder of a run, locked by one run at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sparsebp.core.errors import FileFormatError, OutputError
from sparsebp.core.files import LOCK_NAME, check_regular, hold_folder, output_error, prepare_folder, remove_temporaries
from sparsebp.train.checkpoint import load_checkpoint
from sparsebp.train.state import BEST_NAME, FILE_NAME


@contextlib.contextmanager
def run_folder(
    folder: Path | None, *, resume: bool = False, overwrite: bool = False, writes: bool = True
) -> Iterator[None]:
    """Create a run's folder if need be, and lock it meanwhile; an evaluation, which does not write, only reads it.

    A run that starts anew gets no folder of an earlier run, unless it is to `overwrite` that.
    """
    if folder is None:
        yield
        return
    if resume and not any(os.path.lexists(folder / name) for name in (FILE_NAME, LOCK_NAME)):
        raise FileFormatError(f"There is no run to resume in the folder {folder}",
                              expected=f"{FILE_NAME} of an earlier run",
                              got="no such file" if os.path.isdir(folder) else "no such folder",
                              remedy="Name the folder of the run, or start a new one without resume")  # fmt: skip
    if not writes:
        yield
        return
    prepare_folder(folder)
    with hold_folder(folder):
        for name in (FILE_NAME, BEST_NAME):  # now, not at the first checkpoint after an epoch's work
            try:
                check_regular(folder / name)
            except OSError as error:
                raise output_error(folder / name, error) from error
        if not (resume or overwrite):
            check_unused(folder)
        for name in (FILE_NAME, BEST_NAME):
            remove_temporaries(folder / name)
        yield


@contextlib.contextmanager
def held_if_run(folder: Path) -> Iterator[None]:
    """Lock a folder meanwhile if runs have ever written there; no other folder gets a lock file."""
    with hold_folder(folder) if os.path.lexists(folder / LOCK_NAME) else contextlib.nullcontext():
        yield


def check_unused(folder: Path) -> None:
    """Refuse a folder in which a run has been trained; one that was killed before its first step leaves nothing."""
    found = FILE_NAME if os.path.lexists(folder / FILE_NAME) else BEST_NAME
    if not os.path.lexists(folder / found):
        return
    said = found
    if found == FILE_NAME:
        try:
            steps = len(load_checkpoint(folder).tensors.get("history.loss", ()))
        except FileFormatError:
            said = f"{found}, which cannot be read"
        else:
            if steps == 0:
                return
            said = f"{found}, after {steps} {'step' if steps == 1 else 'steps'} of training"
    raise OutputError(f"{folder} holds an earlier run", expected="a folder without one", got=said,
                      remedy="Go on with it by resume=True (--resume), name another folder (--out), or replace it by "
                      "overwrite=True (--overwrite)")  # fmt: skip
