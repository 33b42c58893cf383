"""Locks that a child process can take after a fork, whatever other threads of the parent were at.

A fork copies one thread. A lock that another thread held stays locked in the child for good, and what it guards may be
half changed. So every lock of this library is made here: in a child, those in the hands of threads that are gone are
made new, and what they guard is dropped where it may be half changed. Half a compilation, or half an import, cannot be
dropped: a fork waits until those of other threads are done.
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
"""Every lock, and what drops what it guards: None, a function, or a method's function and its object."""
_forget = _known.pop


def forkable_lock(drop: Callable[[], None] | None = None) -> Any:
    """Return a new `threading.RLock`, which is free in a child unless the thread that forked held it."""
    # drop: A function or method without arguments. The child calls it if another thread held the lock when the process
    # forked: it drops what the lock guards. A method keeps its object alive no longer.
    lock = threading.RLock()
    if drop is None:  # nearly all, some a step
        _known[weakref.ref(lock, _forget)] = None
    elif inspect.ismethod(drop):
        _known[weakref.ref(lock, _forget)] = drop.__func__, weakref.ref(drop.__self__)
    else:
        _known[weakref.ref(lock, _forget)] = drop
    return lock


def forkable_event() -> threading.Event:
    """Return a new `threading.Event`, which can be set and waited for in a child."""
    event = threading.Event()
    _known[weakref.ref(event, _forget)] = None
    return event


def _after_fork() -> None:
    for reference, drop in list(_known.items()):
        lock = reference()
        if lock is None:
            continue
        if hasattr(lock, "acquire") and lock.acquire(blocking=False):  # it was free, or is this thread's
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
"""For which a fork waits for the imports of other threads at most: one of them may wait for the thread that forks."""
_held = threading.local()


def _compiler_locks() -> list[Any]:
    """Return the locks of Numba and llvmlite, as far as these are imported, in the order that Numba takes them."""
    numba, llvmlite = (sys.modules.get(name) for name in ("numba.core.compiler_lock", "llvmlite.binding.ffi"))
    locks = (
        getattr(getattr(numba, "global_compiler_lock", None), "_lock", None),
        getattr(getattr(getattr(llvmlite, "lib", None), "_lock", None), "_lock", None),
    )
    return [lock for lock in locks if lock is not None]


def _importing() -> set[int]:
    """Return the threads that are importing a module: Python renews no module's lock in a child."""
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
        """As `functools.cached_property` from Python 3.12 on: before, all objects of a class share a lock."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            """Return the value; two threads that ask at the same time may both compute it."""
            if instance is None:
                return self
            values = instance.__dict__
            if self.attrname not in values:
                values[self.attrname] = self.func(instance)
            return values[self.attrname]
