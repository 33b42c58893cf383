"""Keeps Numba's cache on disk honest.

A cached function is compiled again when the file that it stands in changes, but not when a file changes whose functions
it inlines (`simd`, `functions`, `recurrent`, …). After an update of the sources, old machine code would run unnoticed.
"""

from __future__ import annotations

from pathlib import Path


def drop_stale(sources: Path, *others: Path) -> int:
    """Delete every index below these folders that is older than the newest source below the first.

    Numba then compiles those functions anew at their next call. An index that cannot be deleted belongs to somebody
    who may write there, and stays.

    Parameters
    ----------
    sources
        Folder of the functions that others inline.
    others
        Folders of more functions that do.

    Returns
    -------
    int
        How many indices were deleted.
    """
    newest = max(source.stat().st_mtime_ns for source in sources.rglob("*.py"))
    dropped = 0
    for index in (index for folder in (sources, *others) for index in folder.rglob("__pycache__/*.nbi")):
        try:
            if index.stat().st_mtime_ns < newest:
                index.unlink()
                dropped += 1
        except (FileNotFoundError, PermissionError):  # another process was faster, or a read-only installation
            continue
    return dropped
