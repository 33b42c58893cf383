"""Read-only arrays run the code that was compiled for all others.

To Numba they are another type, so every kernel would be compiled a second time for them, for seconds each. But the
code is the same, and that a kernel writes to no read-only array is what `sparsebp.kernels.api` look after. So the
first call with one enters the compiled function under the other type too; no call pays for it. Constants, each a type
of its own to Numba, are treated alike: LLVM sees their values when it inlines.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from numba.core import types
from numba.core.dispatcher import Dispatcher


def accept_read_only(modules: Iterable[ModuleType]) -> None:
    """Let every compiled function of `modules` take read-only arrays without being compiled for them."""
    for module in modules:
        for function in vars(module).values():
            if isinstance(function, Dispatcher) and "compile" not in vars(function):
                _accept(function)


def _accept(function: Any) -> None:
    compile_for = function.compile

    def compile_writeable(signature: Any) -> Any:
        given = signature if isinstance(signature, tuple) else signature.args
        writeable = tuple(map(_writeable, given))
        if writeable == tuple(given):
            return compile_for(signature)
        entry = compile_for(writeable)
        function._insert([t._code for t in given], entry, False)
        return entry

    function.compile = compile_writeable


def _writeable(kind: Any) -> Any:
    """Return a type with the arrays in it writeable and constants any numbers; arguments behind a star are a tuple."""
    if isinstance(kind, types.Array):
        return kind.copy(readonly=False)
    if isinstance(kind, types.BaseTuple):
        inside: Any = kind  # of which Numba's hints do not say that it has members
        return types.BaseTuple.from_types([_writeable(t) for t in inside.types], getattr(kind, "instance_class", None))
    return types.unliteral(kind)
