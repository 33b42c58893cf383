"""Numbers of threads: of the kernels, and of the BLAS behind NumPy.

The kernels have their own threads, which sleep until there is work (`sparsebp.kernels.host.engine.threads`). They need
no setting: small work stays on the calling thread, work that other processes slow down returns to it, and no result
depends on the number of threads or on the calling thread. `set_threads` sets an upper limit.

A BLAS has threads too. Within this library, matrix products are split by a fixed rule and the BLAS computes each part
on one thread (`one_blas_thread`): rounding does not depend on its threads, and the two pools do not compete for cores.

Examples
--------
>>> import sparsebp as sb
>>> sb.threads.set_threads(1)["kernels"]  # doctest: +SKIP
1
>>> with sb.threads.one_core():  # next to other threads that compute  # doctest: +SKIP
...     loss.backward()
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple

from sparsebp.core import subnormals
from sparsebp.core.errors import OptionError
from sparsebp.core.locks import forkable_lock

__all__ = [
    "get_threads",
    "most_threads",
    "one_blas_thread",
    "one_core",
    "serial",
    "serial_kernels",
    "set_threads",
    "thread_counts",
]

_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


# ---- threads of the kernels ----------------------------------------------------------------------------------------

_count: int | None = None
followers: list[Callable[[int], object]] = []
"""Called with every new number of `set_threads`."""


class _Block:
    """A ``with`` block that a thread is inside, in sets that hold it weakly."""

    # An interrupt (Ctrl-C) may come before any line, even the first of an `__exit__`. A block without references has
    # ended, whichever lines were skipped.

    __slots__ = ("__weakref__", "thread")

    def __init__(self, inside: set[weakref.ref[_Block]]) -> None:
        self.thread = threading.get_ident()
        inside.add(weakref.ref(self, inside.discard))


class _Library(NamedTuple):
    """A loaded BLAS library: its file, and the two functions that a block calls."""

    filepath: str
    by_thread: bool  # whether each thread has its own number of threads
    get_num_threads: Callable[[], int]
    set_num_threads: Callable[[int], Any]


class _Numbers:
    """The numbers of threads of some BLAS libraries: one while a block is open, else the wanted numbers."""

    # `settle` restores them after any interrupt, in any order of calls, even from a signal handler inside another call.
    # inside: open blocks. wanted: threads of each library without one. one: whether the libraries are set to one
    # thread, None if unknown. told: how often `want` was called, and with which number. obeys: for a thread's own
    # numbers, `told` at the last update.

    def __init__(self) -> None:
        self.inside: set[weakref.ref[_Block]] = set()
        self.wanted: list[int] = []
        self.one: bool | None = False
        self.told = (0, 0)
        self.obeys = 0

    def look(self, libraries: tuple[_Library, ...]) -> None:
        """Take the libraries' current numbers as wanted, unless they may come from here."""
        if self.one is False:
            self.wanted = [library.get_num_threads() for library in libraries]

    def want(self, libraries: tuple[_Library, ...], threads: int) -> None:
        """Set the wanted number."""
        wanted, told = [threads] * len(libraries), (self.told[0] + 1, threads)
        self.wanted, self.one, self.told = wanted, None, told  # no call in this line, so no interrupt splits it
        self.settle(libraries)

    def settle(self, libraries: tuple[_Library, ...]) -> None:
        """Set the libraries to the numbers they should have."""
        while self.one is not bool(self.inside):
            one, known, self.one = bool(self.inside), self.one is not None, None
            for library, wanted in zip(libraries, self.wanted, strict=True):
                if wanted != 1 or not known:  # else it has one thread either way
                    _set(library, 1 if one else wanted)
            self.one = one


class _State(threading.local):
    """A thread's open blocks, of `serial_kernels` and of `one_blas_thread`, and the BLAS with a number per thread."""

    def __init__(self) -> None:
        self.serial: set[weakref.ref[_Block]] = set()
        self.products: set[weakref.ref[_Block]] = set()
        self.numbers = _Numbers()


_local = _State()


def set_threads(threads: int) -> dict[str, int]:
    """Let kernels and NumPy's BLAS use at most `threads` threads from now on, in the whole process.

    Results of this library do not depend on it. Products that a program computes with NumPy may round differently for
    another number of BLAS threads. Where a BLAS has a number per thread (MKL, OpenBLAS with OpenMP), other threads
    follow with their next call of this library, unless that BLAS was loaded after the first one.

    Parameters
    ----------
    threads
        From 1 to `most_threads`.

    Returns
    -------
    dict of str to int
        `thread_counts` afterwards.

    Raises
    ------
    OptionError
        `threads` is less than 1 or more than `most_threads`, or not an integer.
    """
    global _count  # noqa: PLW0603
    most = most_threads()
    if isinstance(threads, bool) or not hasattr(threads, "__index__") or not 1 <= threads <= most:
        raise OptionError("The number of threads cannot be set", expected=f"1 to {most}", got=threads,
                          remedy="Raise the limit by NUMBA_NUM_THREADS in the environment before starting")  # fmt: skip
    _count = int(threads)
    for variable in _VARIABLES:  # for libraries loaded later
        os.environ[variable] = str(_count)
    everywhere, here = _numpy_blas()
    ours = {library.filepath for library in (*everywhere, *here)}
    with lock:
        for library in _blas_libraries():
            if library.filepath not in ours:
                _set(library, _count)
        _process.want(everywhere, _count)
        _own_numbers(here)
    for follow in followers:
        follow(_count)
    return thread_counts()


def thread_counts() -> dict[str, int]:
    """Return the threads of the kernels and of each loaded BLAS, by name (``"kernels"``, the library's file)."""
    _settle()
    counts = {"kernels": count()}
    for library in _blas_libraries():
        counts[os.path.basename(library.filepath)] = int(library.get_num_threads())
    return counts


@cache
def most_threads() -> int:
    """Return the upper limit: ``NUMBA_NUM_THREADS``, by default the cores that this process may use."""
    wanted = os.environ.get("NUMBA_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_threads() -> int:
    """Return the limit of the kernels: the last `set_threads`, by default `most_threads`."""
    return most_threads() if _count is None else _count


def count() -> int:
    """Return the number of threads for a kernel that the calling thread starts now."""
    return 1 if _local.serial else _count or most_threads()


def serial() -> bool:
    """Whether the calling thread is inside `serial_kernels`."""
    return bool(_local.serial)


@contextlib.contextmanager
def serial_kernels() -> Iterator[None]:
    """Run kernels of the calling thread inside the ``with`` block on that thread alone.

    For threads that compute concurrently, one per core. Blocks need not end in the reverse order of their beginnings.
    """
    block = _Block(_local.serial)
    try:
        yield
    finally:
        del block


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run kernels and matrix products of the calling thread inside the ``with`` block on that thread alone."""
    with one_blas_thread(), serial_kernels():
        yield


# ---- threads of the BLAS -------------------------------------------------------------------------------------------

lock = forkable_lock()
"""Held while threads start or numbers of threads change, and over a fork. Reentrant, for signal handlers."""
_process = _Numbers()
_mode = subnormals.Mode()


def one_blas_thread() -> contextlib.AbstractContextManager[None]:
    """Run each of NumPy's matrix products on one thread, inside the ``with`` block, and take subnormals for zero.

    Where the number of threads belongs to the process, as in NumPy's OpenBLAS, this holds for all its threads until the
    last one leaves its block. The earlier numbers, or those of a `set_threads` since then, return in any order of
    blocks; after an interrupt (Ctrl-C) with the next block that ends, or with `set_threads` or `thread_counts`.
    """
    return _OneThread()


ALONE = 1 << 13
"""Multiply-adds of a product up to which a BLAS wakes no second thread."""
_NOTHING = contextlib.nullcontext()


def one_blas_thread_for(work: int) -> contextlib.AbstractContextManager[None]:
    """Return `one_blas_thread` for a product of `work` multiply-adds."""
    # Nothing for a small product, or inside such a block: testing is faster than nesting.
    return _NOTHING if work <= ALONE or _held() else _OneThread()


def _held() -> bool:
    """Whether the calling thread is inside a `one_blas_thread` that has taken effect."""
    if _process.one is not True:
        return False
    blocks, here = [reference() for reference in tuple(_process.inside)], threading.get_ident()
    return any(block is not None and block.thread == here for block in blocks)


class _OneThread:
    """A block for the libraries of the process, one for those with a number per thread, one for subnormal numbers."""

    __slots__ = ("_block", "_own_block", "_products")

    def __enter__(self) -> None:
        everywhere, here = _numpy_blas()
        self._block: _Block | None = None
        self._own_block: _Block | None = None
        self._products: _Block | None = None
        try:
            self._products = _Block(_local.products)
            _mode.settle(True)
            with lock:
                _process.look(everywhere)
                self._block = _Block(_process.inside)
                _process.settle(everywhere)
                if here:
                    own = _own_numbers(here)
                    own.look(here)
                    self._own_block = _Block(own.inside)
                    own.settle(here)
        except BaseException:
            self._block = self._own_block = self._products = None  # the traceback may outlive this
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._block = self._own_block = self._products = None
        _settle()


def one_blas_thread_here() -> None:
    """Set a BLAS with a number per thread to one thread on the calling thread, permanently."""
    for library in _numpy_blas()[1]:
        _set(library, 1)


def prepare() -> None:
    """Load the libraries for `one_blas_thread_here`, so that a new thread only sets numbers."""
    _numpy_blas()


def _settle() -> None:
    _mode.settle(bool(_local.products))
    everywhere, here = _numpy_blas()
    with lock:
        _process.settle(everywhere)
        if here:
            _own_numbers(here).settle(here)


def _own_numbers(libraries: tuple[_Library, ...]) -> _Numbers:
    """Return the calling thread's numbers, updated by the last `set_threads` of any thread."""
    own, (calls, count) = _local.numbers, _process.told
    if own.obeys != calls:
        own.want(libraries, count)
        own.obeys = calls
    return own


def _after_fork() -> None:
    """Keep only the blocks of the thread that forked, which holds the lock."""
    try:
        for reference in tuple(_process.inside):
            block = reference()
            if block is None or block.thread != threading.get_ident():
                _process.inside.discard(reference)
        if _process.one is not False:
            _settle()
    finally:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=_after_fork)


def _set(library: _Library, count: int) -> None:
    library.set_num_threads(count)


@cache
def _numpy_blas() -> tuple[tuple[_Library, ...], tuple[_Library, ...]]:
    """Return the BLAS libraries loaded at the first call, including NumPy's and SciPy's."""
    # First those whose number of threads belongs to the process, then those where each thread has its own.
    import scipy.linalg.cython_blas  # noqa: F401  # the BLAS of products inside kernels

    libraries = _blas_libraries()
    return (
        tuple(library for library in libraries if not library.by_thread),
        tuple(library for library in libraries if library.by_thread),
    )


def _blas_libraries() -> list[_Library]:
    from threadpoolctl import ThreadpoolController

    return [_library(found) for found in ThreadpoolController().lib_controllers if found.user_api == "blas"]


def _library(found: Any) -> _Library:
    kind, layer = found.internal_api, getattr(found, "threading_layer", "")
    getting, setting = found.get_num_threads, found.set_num_threads
    if kind == "openblas" and layer != "openmp":
        # the library's own functions take a sixth of the time, and from threadpoolctl 3.8 on, its
        # `set_num_threads` of an OpenBLAS only works on the thread that came first
        own = [found._get_symbol(f"openblas_{name}_num_threads") for name in ("get", "set")]
        getting, setting = (mine or theirs for mine, theirs in zip(own, (getting, setting), strict=True))
    return _Library(found.filepath, kind == "mkl" or (kind == "openblas" and layer == "openmp"), getting, setting)


def __dir__() -> list[str]:
    return sorted(__all__)
