"""The folder of a run: held by one run at a time, and never taken for another one's by a slip of the keyboard."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import (
    LOCK_NAME,
    check_regular,
    hold_folder,
    keep_copy,
    output_error,
    prepare_folder,
    remove_temporaries,
)
from sparsebp.train.checkpoint import FILE_NAME, PREVIOUS_NAME


@contextlib.contextmanager
def run_folder(folder: Path | None, *, resume: bool) -> Iterator[None]:
    """Create the folder of a run if need be and hold it meanwhile; None is no folder.

    Raises
    ------
    FileFormatError
        `resume`, and no run has ever begun there: a run that was killed before its first checkpoint has left its lock
        file, and begins anew; a folder by another name is not created.
    OutputError
        Another run holds the folder, it cannot be written, or a folder or a link has the name of a checkpoint.
    """
    if folder is None:
        yield
        return
    if resume and not any(os.path.lexists(folder / name) for name in (FILE_NAME, LOCK_NAME)):
        raise FileFormatError(
            f"There is no run to resume in the folder {folder}", expected=f"{FILE_NAME} of an earlier run",
            got="no such file" if os.path.isdir(folder) else "no such folder",
            remedy="Name the folder of the run, or start a new one without resume",
        )  # fmt: skip
    prepare_folder(folder)
    with hold_folder(folder):
        for name in (FILE_NAME, PREVIOUS_NAME):  # said now, and not by the first checkpoint after an epoch's work
            try:
                check_regular(folder / name)
            except OSError as error:
                raise output_error(folder / name, error) from error
        remove_temporaries(folder / FILE_NAME)
        yield


@contextlib.contextmanager
def held_if_run(folder: Path) -> Iterator[None]:
    """Hold a folder meanwhile if runs have ever written there; any other is left without a lock file.

    Raises
    ------
    OutputError
        A run holds the folder.
    """
    with hold_folder(folder) if os.path.lexists(folder / LOCK_NAME) else contextlib.nullcontext():
        yield


def set_aside(folder: Path) -> None:
    """Let the checkpoint of an earlier run, if there is one, have the name `PREVIOUS_NAME` as well.

    Its own name stays until the new run's first checkpoint takes it: at any moment the folder holds a checkpoint.

    Raises
    ------
    OutputError
        The folder cannot be written, or something else than a regular file has one of the names.
    """
    if os.path.lexists(folder / FILE_NAME):
        keep_copy(folder / FILE_NAME, PREVIOUS_NAME)
