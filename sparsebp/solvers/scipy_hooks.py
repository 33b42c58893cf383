"""`used_by_scipy`: SciPy's own solvers, and other packages', on plans that are kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any
from weakref import ReferenceType, WeakSet, ref

from sparsebp.core.locks import forkable_lock
from sparsebp.solvers import direct


class _Block:
    """A block of `used_by_scipy`; it may end in another thread or task than it began in.

    It lives as long as the block runs: an interrupt while a block begins or ends leaves nothing open.
    """

    open = True


_blocks: ContextVar[tuple[ReferenceType[_Block], ...]] = ContextVar("sparsebp_used_by_scipy", default=())
"""The blocks that this thread, or task, has opened, and none while a call of theirs runs."""
_NAMES = ("spsolve", "splu", "factorized")


class _Exchanged:
    """A function of SciPy's whose code is ours while some block is open.

    It stays the same object, so whoever holds it calls ours: modules under any name, closures, classes, tables.
    """

    def __init__(self, name: str, function: Any) -> None:
        self.function, self.codes = function, (function.__code__, _of_name(name))
        self.of_scipy = FunctionType(
            function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
        )  # fmt: skip
        self.of_scipy.__kwdefaults__ = function.__kwdefaults__

    def enter(self) -> None:
        self.function.of_scipy, self.function.__signature__ = self.of_scipy, inspect.signature(self.function)
        self.function.__code__ = self.codes[1]

    def leave(self) -> None:
        self.function.__code__ = self.codes[0]
        for name in ("of_scipy", "__signature__"):
            vars(self.function).pop(name, None)


def _of_name(name: str) -> CodeType:
    """Return code that calls the `_chosen` function of a name, which it imports: it runs in SciPy's module."""

    def call(*args: Any, **options: Any) -> Any:
        from sparsebp.solvers.scipy_hooks import _chosen

        with _chosen("name") as function:
            return function(*args, **options)

    code = call.__code__
    return code.replace(co_consts=tuple(name if one == "name" else one for one in code.co_consts), co_name=name)


@contextmanager
def _chosen(name: str) -> Iterator[Callable[..., Any]]:
    """Give ours to a thread with an open block, and SciPy's to all others, and to what ours passes on."""
    if not any(map(_is_open, _blocks.get())):
        yield _exchanged[name].of_scipy
        return
    token = _blocks.set(())
    try:
        yield getattr(direct, name)
    finally:
        _blocks.reset(token)


def _is_open(reference: ReferenceType[_Block]) -> bool:
    block = reference()
    return block is not None and block.open


_lock = forkable_lock()
_exchanged: dict[str, _Exchanged] = {}
_open = WeakSet[_Block]()


def _exchange() -> None:
    """Exchange SciPy's functions, which are others once its modules are loaded again."""
    from scipy.sparse import linalg

    for name in _NAMES:
        function: Any = inspect.unwrap(getattr(linalg, name))
        if isinstance(function, FunctionType) and (name not in _exchanged or _exchanged[name].function is not function):
            _exchanged[name] = _Exchanged(name, function)
    for each in _exchanged.values():
        each.enter()


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
    try:
        with _lock:
            if not _open:
                _exchange()
            _open.add(block)
        _blocks.set((*filter(_is_open, _blocks.get()), ref(block)))
        yield
    finally:
        block.open = False
        with _lock:
            _open.discard(block)
            if not _open:
                for function in _exchanged.values():
                    function.leave()
