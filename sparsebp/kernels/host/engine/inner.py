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
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.typed_passes import (
    AnnotateTypes,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import FixupArgs, GenericRewrites, IRProcessing, ReconstructSSA, TranslateByteCode

_PASSES = (
    TranslateByteCode,
    FixupArgs,
    IRProcessing,
    GenericRewrites,
    ReconstructSSA,
    NopythonTypeInference,
    PreLowerStripPhis,
    IRLegalization,
    AnnotateTypes,
    NativeLowering,
    NoPythonBackend,
)
"""Numba's passes without those for what kernels have not: closures, objects, whole arrays as operands."""


class KernelCompiler(CompilerBase):
    """Numba's compiler with the passes that kernels need."""

    def define_pipelines(self) -> list[PassManager]:
        """Return the passes; a name that Numba asks for."""
        passes = PassManager("kernel")
        for one in _PASSES:
            passes.add_pass(one, one.__name__)
        passes.finalize()
        return [passes]


class _Code(JITCodeLibrary):
    """Code to be linked into that of others and optimised there."""

    def _optimize_functions(self, ll_module: Any) -> None:
        if not hasattr(self._codegen, "_pass_builder"):  # an older Numba, whose passes are built once a module
            super()._optimize_functions(ll_module)
            return
        ll_module.data_layout = self._codegen._data_layout
        passes, builder = self._codegen._function_pass_manager()
        for function in ll_module.functions:
            if not function.is_declaration:  # of which Numba builds passes too
                passes.run(function, builder)

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _ApartCode(_Code):
    """The same of functions that are called, not copied."""

    def add_ir_module(self, ir_module: Any) -> None:
        """Mark what it defines; a name that Numba calls."""
        for function in ir_module.functions:
            if not function.is_declaration:
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)


class _InnerCompiler(KernelCompiler):
    """Numba's compiler, stopped before the machine code."""

    library: type[_Code] = _Code

    def _compile_core(self) -> Any:
        say_once()
        state = self.state
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        result = super()._compile_core()
        nobody: Any = [].append  # Numba keeps results by what Python calls: any built-in function of its own
        state.targetctx.insert_user_function(nobody, result.fndesc, [result.library])
        return result._replace(entry_point=nobody)


class _ApartCompiler(_InnerCompiler):
    """The same for functions that are called, not copied."""

    library = _ApartCode


@cache
def say_once() -> None:
    """Say on a terminal why nothing seems to happen. Every kernel has inner functions, which are kept nowhere."""
    if sys.stderr is not None and sys.stderr.isatty():
        print("Compiling kernels for this machine, once …", file=sys.stderr, flush=True)


OPTIONS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _InnerCompiler}
"""Options of `numba.njit` that make a function an inner one."""
APART: dict[str, Any] = {**OPTIONS, "pipeline_class": _ApartCompiler}
"""The same of a function with loops that many call: a copy for each would be optimised for each."""
