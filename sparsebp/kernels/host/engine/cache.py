"""Keeps Numba's cache on disk honest.

A cached function is compiled again when the file that it stands in changes, but not when a file changes whose functions
it inlines, or whose tuples it takes apart (`simd`, `functions`, `sparsebp.kernels.operands`, …). After an update of the
sources, old machine code would run unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from numba import config
from numba.core.caching import _CacheLocator
from numba.misc.appdirs import AppDirs


def drop_stale(sources: Path, *others: Path) -> int:
    """Delete every index of functions below these folders that is older than the newest source below the first.

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
    below = {source.parent for folder in (sources, *others) for source in folder.rglob("*.py")}
    dropped = 0
    for index in (index for folder in below for cache in caches(folder) for index in cache.glob("*.nbi")):
        try:
            if index.stat().st_mtime_ns < newest:
                index.unlink()
                dropped += 1
        except OSError:  # another process was faster, or a read-only installation
            continue
    return dropped


def caches(folder: Path) -> Iterator[Path]:
    """Yield where Numba may keep the functions of a folder: beside it, for the user, or where the environment says."""
    name = _CacheLocator.get_suitable_cache_subpath(str(folder / "any.py"))
    yield folder / "__pycache__"
    yield Path(AppDirs(appname="numba", appauthor=False).user_cache_dir) / name
    if config.CACHE_DIR:  # type: ignore[attr-defined]
        yield Path(config.CACHE_DIR) / name  # type: ignore[attr-defined]
