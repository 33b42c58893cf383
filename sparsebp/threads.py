"""Threads of Numba's kernels and of the BLAS behind NumPy: set together, and kept out of each other's way.

Each of the two has a pool of its own, and the threads of a pool that has just finished go on spinning for a while. A
BLAS thread that is woken then waits for its core: milliseconds, for a product that takes a tenth of one. Short products
between kernels therefore run on one BLAS thread (`short_products`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

from sparsebp.errors import OptionError

SHORT = 1_000_000_000
"""FLOP of products that count as short: some 10 ms of one core, several times what waking a BLAS thread can cost."""

_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def set_threads(threads: int) -> dict[str, int]:
    """Let Numba's kernels and NumPy's BLAS use `threads` threads from now on; return `thread_counts`.

    Results of the kernels do not depend on it; a BLAS may round differently for another number of threads.

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
    for variable in _VARIABLES:  # for a library that is loaded later
        os.environ[variable] = str(threads)
    numba.set_num_threads(threads)
    for library in _blas_libraries():
        library.set_num_threads(threads)
    return thread_counts()


def thread_counts() -> dict[str, int]:
    """Return the threads that Numba and each loaded BLAS library use, by name (``"numba"``, the library's file)."""
    import numba

    counts = {"numba": int(numba.get_num_threads())}
    for library in _blas_libraries():
        counts[os.path.basename(library.filepath)] = int(library.num_threads)
    return counts


def short_products(flops: float) -> contextlib.AbstractContextManager[None]:
    """Run NumPy's matrix products inside the ``with`` block on one thread, if they are short.

    Parameters
    ----------
    flops
        Floating-point operations of all products inside together.
    """
    return one_blas_thread() if flops < SHORT else contextlib.nullcontext()


class _State(threading.local):
    """How many `serial_kernels` a thread is inside, and the threads that its kernels had before the first."""

    depth = 0
    count = 1


_local = _State()


@contextlib.contextmanager
def serial_kernels() -> Iterator[None]:
    """Run the kernels that the calling thread starts inside the ``with`` block on that thread alone.

    For threads that compute side by side: the parallel regions of some of Numba's threading layers must not be entered
    by two threads at once. Blocks may end in another order than the reverse of their beginnings.
    """
    import numba

    if _local.depth == 0:
        _local.count = numba.get_num_threads()
        numba.set_num_threads(1)
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1
        if _local.depth == 0:
            numba.set_num_threads(_local.count)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run kernels and matrix products of the calling thread inside the ``with`` block on that thread alone."""
    with one_blas_thread(), serial_kernels():
        yield


def serial() -> bool:
    """Say whether the calling thread is inside `serial_kernels`."""
    return _local.depth > 0


_lock = threading.Lock()
_inside = 0
_before: list[int] = []


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run NumPy's matrix products on one thread each, inside the ``with`` block, in all threads of the process."""
    # The number of threads belongs to the process: the first to enter saves it, the last to leave brings it back.
    global _inside, _before  # noqa: PLW0603
    with _lock:
        if _inside == 0:
            _before = [library.get_num_threads() for library in _numpy_blas()]
            _set_blas([1] * len(_before))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _set_blas(_before)


def _set_blas(counts: list[int]) -> None:
    for library, count in zip(_numpy_blas(), counts, strict=True):
        if library.get_num_threads() != count:
            library.set_num_threads(count)


@cache
def _numpy_blas() -> list[Any]:
    """Return the BLAS libraries loaded by the time of the first call; NumPy's and SciPy's are among them."""
    import scipy.linalg.cython_blas  # noqa: F401  # the BLAS of products inside Numba's kernels

    return _blas_libraries()


def _blas_libraries() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    return [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]
