"""The number of threads of Numba's kernels and of the BLAS behind NumPy, set together while the process runs.

Numba has a call for it. The BLAS libraries of wheels (OpenBLAS) and of conda (OpenBLAS, MKL, BLIS) export one, which is
called through ctypes in those that are loaded; the environment variables cover a library that is loaded later, and
Apple's Accelerate, which knows no other way.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparsebp.errors import OptionError

_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# Part of the file name, and the functions that set and get. A suffix marks builds with 64-bit integers; names that end
# in "_" or "_64_" are for Fortran and take a pointer, so they are left out.
_SUFFIXES = ("", "64_", "_64")
_FUNCTIONS = (
    ("openblas", "scipy_openblas_set_num_threads", "scipy_openblas_get_num_threads"),
    ("blas", "openblas_set_num_threads", "openblas_get_num_threads"),
    ("mkl_rt", "MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
    ("blis", "bli_thread_set_num_threads", "bli_thread_get_num_threads"),
)


def set_threads(threads: int) -> dict[str, int]:
    """Let Numba's kernels and NumPy's BLAS use `threads` threads from now on; return `thread_counts`.

    Results of the kernels do not depend on it; a BLAS may round differently for another number of threads. Where other
    programs keep the cores busy, one thread is often the fastest: OpenBLAS's threads burn their time waiting.

    Raises
    ------
    OptionError
        `threads` is less than 1 or more than Numba may start (``NUMBA_NUM_THREADS``, by default the cores).
    """
    import numba

    most = int(vars(numba.config)["NUMBA_NUM_THREADS"])
    if not 1 <= threads <= most:
        raise OptionError(
            "The number of threads cannot be had",
            expected=f"1 to {most}",
            got=threads,
            remedy="Set the environment variable NUMBA_NUM_THREADS before starting to raise the upper end",
        )
    for variable in _VARIABLES:
        os.environ[variable] = str(threads)
    numba.set_num_threads(threads)
    for _, set_count, _ in _loaded_blas():
        set_count(threads)
    return thread_counts()


def thread_counts() -> dict[str, int]:
    """Return the threads that Numba and each loaded BLAS library use, by name (``"numba"``, the library's file)."""
    import numba

    counts = {"numba": int(numba.get_num_threads())}
    for path, _, get_count in _loaded_blas():
        counts[path.name] = int(get_count())
    return counts


def _loaded_blas() -> Iterator[tuple[Path, Callable[[int], object], Callable[[], int]]]:
    """Yield path, setter and getter of every BLAS library in this process that has them."""
    for path in _candidates():
        for part, set_name, get_name in _FUNCTIONS:
            if part not in path.name:
                continue
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue  # a file of that name that is no library for this process
            set_count, get_count = _function(library, set_name), _function(library, get_name)
            if set_count is not None and get_count is not None:
                get_count.restype = ctypes.c_int
                yield path, set_count, get_count
                break


def _candidates() -> list[Path]:
    """Return the files that may be BLAS libraries: the loaded ones on Linux, those inside NumPy's wheel elsewhere."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        files = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "/" in line}
        return sorted(Path(f) for f in files if any(part in Path(f).name for part, _, _ in _FUNCTIONS))
    import numpy as np

    package = Path(np.__file__).parent
    folders = (package / ".dylibs", package.parent / "numpy.libs")
    return sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir())


def _function(library: ctypes.CDLL, name: str) -> Any:
    for suffix in _SUFFIXES:
        found = getattr(library, name + suffix, None)
        if found is not None:
            return found
    return None
