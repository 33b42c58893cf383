"""`used_by_scipy`: SciPy's own solvers, and other packages', on plans that are kept."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sparsebp.core.locks import forkable_lock
from sparsebp.solvers import direct


class _Block:
    """A block of `used_by_scipy`; it may end in another thread or task than it began in."""

    open = True


_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("sparsebp_used_by_scipy", default=())
"""The blocks that this thread, or task, has opened, and none while a call of theirs runs."""
_NAMES = ("spsolve", "splu", "factorized")


class _Substitutes:
    """The functions that stand in SciPy's places while some block is open, in all modules that hold SciPy's.

    Every module is searched once, and again when its names have become more or fewer: thousands of modules take 20 ms.
    All are when somebody else holds SciPy's functions. Modules that define them keep them, so that they can be pickled.
    """

    def __init__(self) -> None:
        self.lock = forkable_lock()
        self.open = 0
        self.pairs: dict[str, tuple[Any, Any]] = {}
        self.held = 0
        self.searched: dict[str, int] = {}
        self.places: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = {}

    def enter(self) -> None:
        from scipy.sparse import linalg

        with self.lock:
            if not self.pairs:
                for name in _NAMES:
                    theirs = getattr(linalg, name)
                    self.pairs[name] = theirs, _Choice(theirs, getattr(direct, name))
            if not self.open:
                if self.held != self.count():
                    self.searched.clear()
                self.put(1)
            self.open += 1

    def leave(self) -> None:
        with self.lock:
            self.open -= 1
            if not self.open:
                self.put(0)
                self.held = self.count()

    def count(self) -> int:
        """Return how many references SciPy's functions have; a module with another one has a new name."""
        return sum(sys.getrefcount(theirs) for theirs, _ in self.pairs.values())

    def put(self, which: int) -> None:
        """Put ours, 1, or SciPy's, 0, into all places."""
        known = {id(function): name for name, pair in self.pairs.items() for function in pair}
        for module, names in [(module, getattr(module, "__dict__", None)) for module in list(sys.modules.values())]:
            if not isinstance(names, dict):
                continue
            key = str(names.get("__name__"))
            if self.searched.get(key) == len(names) and module is sys.modules.get(key) and key != "__main__":
                continue
            self.searched[key] = len(names)
            for name, value in list(names.items()):
                if (function := known.get(id(value))) is not None and self.pairs[function][0].__module__ != key:
                    self.places[id(names), name] = names, name, function
        for names, name, function in self.places.values():
            if id(names.get(name)) in known:
                names[name] = self.pairs[function][which]


_substitutes = _Substitutes()


@contextmanager
def used_by_scipy() -> Iterator[None]:
    """Let every call of SciPy's `spsolve`, `splu` and `factorized` in this thread use plans that are kept.

    Within the block `scipy.integrate.solve_ivp` (BDF and Radau), `scipy.sparse.linalg.expm` and other functions of
    SciPy factorise matrices by `sparsebp.solvers`, and so do packages that imported these functions before, or do so in
    the block. Other threads' calls stay SciPy's. Blocks may be nested.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> from scipy.integrate import solve_ivp
    >>> from sparsebp.solvers import used_by_scipy
    >>> A = sp.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(50, 50), format="csc")
    >>> with used_by_scipy():
    ...     found = solve_ivp(lambda t, u: A @ u, (0, 1), np.ones(50), method="BDF", jac=lambda t, u: A)
    >>> found.success
    True
    """
    block = _Block()
    _substitutes.enter()
    _blocks.set((*(one for one in _blocks.get() if one.open), block))
    try:
        yield
    finally:
        block.open = False
        _substitutes.leave()


class _Choice:
    """Calls ours in threads with an open block, and SciPy's in all others; its copies and pickles are SciPy's."""

    def __init__(self, theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
        functools.update_wrapper(self, theirs)
        self.of_scipy, self._ours = theirs, ours

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not any(block.open for block in _blocks.get()):
            return self.of_scipy(*args, **options)
        token = _blocks.set(())  # what ours passes on is SciPy's
        try:
            return self._ours(*args, **options)
        finally:
            _blocks.reset(token)

    def __reduce__(self) -> tuple[Any, ...]:
        theirs = self.of_scipy
        return pkgutil.resolve_name, (f"{theirs.__module__}:{theirs.__name__}",)
