"""Locks that a child process can take after a fork, whatever other threads of the parent were doing.

A fork copies one thread. A lock held by another thread stays locked in the child forever, and its data may be half
changed. So every lock of this library is made here: in a child, locks of vanished threads are renewed, and the data
they guard is dropped. Compilations and imports cannot be dropped, so a fork waits for those of other threads.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["cached_property", "forkable_event", "forkable_lock"]

_known: dict[weakref.ref[Any], Any] = {}
"""Every lock, and what drops its data: None, a function, or a method's function and its object."""
_forget = _known.pop


def forkable_lock(drop: Callable[[], None] | None = None) -> Any:
    """Return a new `threading.RLock`, free in a child unless the thread that forked held it."""
    # drop: a function or method that a child calls if another thread held the lock at the fork, to drop its data. The
    # lock does not keep a method's object alive.
    lock = threading.RLock()
    if drop is None:
        _known[weakref.ref(lock, _forget)] = None
    elif inspect.ismethod(drop):
        _known[weakref.ref(lock, _forget)] = drop.__func__, weakref.ref(drop.__self__)
    else:
        _known[weakref.ref(lock, _forget)] = drop
    return lock


def forkable_event() -> threading.Event:
    """Return a new `threading.Event` that works in a child too."""
    event = threading.Event()
    _known[weakref.ref(event, _forget)] = None
    return event


def _after_fork() -> None:
    for reference, drop in list(_known.items()):
        lock = reference()
        if lock is None:
            continue
        if hasattr(lock, "acquire") and lock.acquire(blocking=False):  # free, or held by this thread
            lock.release()
            continue
        lock._at_fork_reinit()
        if isinstance(drop, tuple):
            method, owner = drop
            if (alive := owner()) is not None:
                method(alive)
        elif drop is not None:
            drop()


# ---- the compiler, and imports ---------------------------------------------------------------------------------------

_IMPORT_SECONDS = 60.0
"""Longest wait of a fork for imports in other threads, one of which may wait for the forking thread."""
_held = threading.local()


def _compiler_locks() -> list[Any]:
    """Return the locks of Numba and llvmlite, if imported, in the order in which Numba takes them."""
    # Both are private. A child in which another thread's compilation, or call of LLVM, holds one never compiles again.
    numba, llvmlite = (sys.modules.get(name) for name in ("numba.core.compiler_lock", "llvmlite.binding.ffi"))
    locks = (
        getattr(getattr(numba, "global_compiler_lock", None), "_lock", None),
        getattr(getattr(getattr(llvmlite, "lib", None), "_lock", None), "_lock", None),
    )
    return [lock for lock in locks if lock is not None]


def _importing() -> set[int]:
    """Return the threads that are importing a module: a child does not get new import locks."""
    known = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", {})
    locks = [reference() for reference in list(known.values())]
    return {lock.owner for lock in locks if lock is not None} - {None}


def _let_imports_end() -> None:
    until = time.monotonic() + _IMPORT_SECONDS
    while (importing := _importing()) and threading.get_ident() not in importing and time.monotonic() < until:
        time.sleep(0.001)


def _hold_compiler() -> None:
    _let_imports_end()
    _held.locks = _compiler_locks()
    for lock in _held.locks:
        lock.acquire()


def _release_compiler() -> None:
    for lock in reversed(_held.__dict__.pop("locks", [])):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_compiler, after_in_parent=_release_compiler, after_in_child=_release_compiler)
    os.register_at_fork(after_in_child=_after_fork)


# ---- properties that are computed once -------------------------------------------------------------------------------

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property(functools.cached_property):
        """`functools.cached_property` of Python 3.12: earlier, all objects of a class share one lock."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            """Return the value; two threads at once may both compute it."""
            if instance is None:
                return self
            values = instance.__dict__
            if self.attrname not in values:
                values[self.attrname] = self.func(instance)
            return values[self.attrname]
