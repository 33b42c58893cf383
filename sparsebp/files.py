"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import os
from pathlib import Path

from sparsebp.errors import OutputError


def prepare_folder(folder: str | os.PathLike[str]) -> Path:
    """Create `folder` if need be, and make sure that a file can be written there.

    Raises
    ------
    OutputError
        It cannot.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".sparsebp-probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise output_error(folder, error) from error
    return folder


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` by way of a temporary name in the same folder.

    Raises
    ------
    OutputError
        The folder does not exist or cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # on the disk before the name changes: a power cut must not leave an empty file
        os.replace(temporary, path)
    except OSError as error:
        raise output_error(path, error) from error


def output_error(path: Path, error: OSError) -> OutputError:
    """Return the error that says why `path` cannot be written."""
    return OutputError(
        f"{path} cannot be written",
        expected="a folder with write permission and free space",
        got=error.strerror or str(error),
        remedy="Choose another output folder",
    )
