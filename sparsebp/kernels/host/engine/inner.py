"""Inner functions: compiled code that only other compiled functions call.

Numba optimises every function by itself, translates it to machine code, and wraps it twice so that Python and C can
call it; then it does so once more with each function that calls it, into which it is copied. For a kernel's helpers all
but the last is in vain, and was most of the time. So an inner function ends as LLVM's intermediate code. What Python
calls, or an address, is compiled with the other options of `parts`.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _Code(JITCodeLibrary):
    """Code to be linked into that of others and optimised there."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _InnerCompiler(Compiler):
    """Numba's compiler, stopped before the machine code."""

    def _compile_core(self) -> Any:
        say_once()
        state = self.state
        state.library = _Code(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        result = super()._compile_core()
        nobody: Any = [].append  # Numba keeps results by what Python calls: any built-in function of its own
        state.targetctx.insert_user_function(nobody, result.fndesc, [result.library])
        return result._replace(entry_point=nobody)


@cache
def say_once() -> None:
    """Say on a terminal why nothing seems to happen. Every kernel has inner functions, which are kept nowhere."""
    if sys.stderr is not None and sys.stderr.isatty():
        print("Compiling kernels for this machine, once …", file=sys.stderr, flush=True)


OPTIONS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _InnerCompiler}
"""Options of `numba.njit` that make a function an inner one."""
