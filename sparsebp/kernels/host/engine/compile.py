"""How kernels are compiled: options, inner functions, the cache on disk, read-only arrays.

Inner functions are called by compiled functions alone. Numba optimises every function by itself, translates it to
machine code, and wraps it twice so that Python and C can call it; then it does so once more with each function that
calls it, into which it is copied. For a kernel's helpers all but the last is in vain, and was most of the time. So an
inner function ends as LLVM's intermediate code. What Python calls, or an address, is compiled with the other options of
`parts`.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import config
from numba.core import cgutils, types
from numba.core.caching import _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.dispatcher import Dispatcher
from numba.core.lowering import Lower
from numba.core.typed_passes import (
    AnnotateTypes,
    BaseNativeLowering,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import FixupArgs, GenericRewrites, IRProcessing, ReconstructSSA, TranslateByteCode
from numba.misc.appdirs import AppDirs

from sparsebp.core import threads
from sparsebp.core.check import Array
from sparsebp.core.subnormals import BITS
from sparsebp.kernels.host.engine import shipped

# Keeps Numba's cache on disk honest.
#
# A cached function is compiled again when the file that it stands in changes, but not when a file changes whose
# functions it inlines, or whose tuples it takes apart (`simd`, `functions`, `sparsebp.kernels.operands`, …). After an
# update of the sources, old machine code would run unnoticed.


def drop_stale(sources: Path) -> int:
    """Delete every index of functions below a folder that is older than the newest source there.

    Numba then compiles those functions anew at their next call. An index that cannot be deleted belongs to another
    user, and stays.

    Parameters
    ----------
    sources
        Folder of the functions, and of those that they inline.

    Returns
    -------
    int
        How many indices were deleted.
    """
    newest = max(source.stat().st_mtime_ns for source in sources.rglob("*.py"))
    below = {source.parent for source in sources.rglob("*.py")}
    dropped = 0
    for index in (index for folder in below for place in caches(folder) for index in place.glob("*.nbi")):
        try:
            if index.stat().st_mtime_ns < newest:
                index.unlink()
                dropped += 1
        except OSError:  # another process was faster, or a read-only installation
            continue
    return dropped


def caches(folder: Path) -> Iterator[Path]:
    """Yield where Numba may keep the functions of a folder: in it, for the user, or where the environment says."""
    name = _CacheLocator.get_suitable_cache_subpath(str(folder / "any.py"))
    yield folder / "__pycache__"
    yield Path(AppDirs(appname="numba", appauthor=False).user_cache_dir) / name
    if config.CACHE_DIR:  # type: ignore[attr-defined]
        yield Path(config.CACHE_DIR) / name  # type: ignore[attr-defined]


# Subnormal numbers are zero inside kernels: see `sparsebp.core.subnormals`. Functions that Python calls, or a helper
# thread, set the processor's mode when they begin and put the caller's back when they return. It takes 9 nanoseconds.

_FLUSH = BITS.get(platform.machine(), 0)


class _FlushingLower(Lower):
    """Numba's translator, of a function that flushes."""

    def pre_lower(self) -> None:
        """Begin the function; a name of Numba's."""
        super().pre_lower()
        read, self._write = _mode_registers(self.builder)
        self._before = read()
        self._write(self._mode())

    def _mode(self) -> Any:
        return self.builder.or_(self._before, self._before.type(_FLUSH))

    def post_lower(self) -> None:
        """End the function, at every return."""
        for block in self.function.blocks:
            if isinstance(block.terminator, ir.Ret):
                self.builder.position_before(block.terminator)
                self._write(self._before)
        super().post_lower()


def _mode_registers(builder: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return what reads and what writes the floating-point control register."""

    def function(name: str, returned: Any, *given: Any) -> Any:
        return cgutils.get_or_insert_function(builder.module, ir.FunctionType(returned, given), name)

    if platform.machine() in ("aarch64", "arm64"):
        read = function("llvm.aarch64.get.fpcr", ir.IntType(64))
        write = function("llvm.aarch64.set.fpcr", ir.VoidType(), ir.IntType(64))
        return partial(builder.call, read, []), lambda mode: builder.call(write, [mode])
    place = cgutils.alloca_once(builder, ir.IntType(32))
    address = builder.bitcast(place, cgutils.voidptr_t)
    store = function("llvm.x86.sse.stmxcsr", ir.VoidType(), cgutils.voidptr_t)
    load = function("llvm.x86.sse.ldmxcsr", ir.VoidType(), cgutils.voidptr_t)

    def stored() -> Any:
        builder.call(store, [address])
        return builder.load(place)

    def loaded(mode: Any) -> None:
        builder.store(mode, place)
        builder.call(load, [address])

    return stored, loaded


@register_pass(mutates_CFG=True, analysis_only=False)
class _FlushingLowering(BaseNativeLowering):
    """Numba's pass with that translator."""

    _name: Any = "flushing_native_lowering"
    _translator: type[Lower] = _FlushingLower

    @property
    def lowering_class(self) -> type[Lower]:
        """The translator; a name of Numba's."""
        return self._translator if _FLUSH else Lower


class _ExactLower(_FlushingLower):
    """The same of a function that flushes nothing, whoever calls it."""

    def _mode(self) -> Any:
        return self.builder.and_(self._before, self._before.type(~_FLUSH))


@register_pass(mutates_CFG=True, analysis_only=False)
class ExactLowering(_FlushingLowering):
    """Numba's pass with that translator, for what threads of a team run: their mode flushes."""

    _name: Any = "exact_native_lowering"
    _translator = _ExactLower


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
)
"""Numba's passes that kernels need: none for closures, objects, or whole arrays as operands. Then translation."""


class KernelCompiler(CompilerBase):
    """Numba's compiler with the passes that kernels need."""

    lowering: type[BaseNativeLowering] = _FlushingLowering

    def define_pipelines(self) -> list[PassManager]:
        """Return the passes; a name that Numba asks for."""
        passes = PassManager("kernel")
        for one in (*_PASSES, self.lowering, NoPythonBackend):
            passes.add_pass(one, one.__name__)
        passes.finalize()
        return [passes]


class _Code(JITCodeLibrary):
    """Code to be linked into callers and optimised there."""

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
        """Mark the functions as not to be inlined; Numba calls this method."""
        for function in ir_module.functions:
            if not function.is_declaration:
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)


class _InnerCompiler(KernelCompiler):
    """Numba's compiler, stopped before the machine code."""

    lowering: type[BaseNativeLowering] = NativeLowering
    library: type[_Code] = _Code

    def _compile_core(self) -> Any:
        NOTICE()
        state = self.state
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        result = super()._compile_core()
        nobody: Any = [].append  # Numba's key for the result: any unique built-in function
        state.targetctx.insert_user_function(nobody, result.fndesc, [result.library])
        return result._replace(entry_point=nobody)


class _ApartCompiler(_InnerCompiler):
    """The same for functions that are called, not copied."""

    library = _ApartCode


class Notice:
    """Says once why nothing seems to happen: on a terminal or in a notebook at once, elsewhere after two seconds.

    Attributes
    ----------
    told
        Whether it was said, or is not to be.
    """

    def __init__(self) -> None:
        self.told, self._last, self._seconds = False, time.monotonic(), 0.0

    def __call__(self) -> None:
        """Note that a function is about to be compiled; every kernel has several inner ones."""
        if self.told:
            return
        now = time.monotonic()
        self._seconds += min(now - self._last, 1.0)  # at most: what passes between kernels is no compilation
        self._last = now
        shown = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
        if shown or (self._seconds > _PATIENCE and sys.stderr is not None):
            self.told = True
            print(
                "sparsebp: compiling kernels for this machine, once; some seconds for each kind of layer or product.\n"
                "          They are kept on disk. `sparsebp warm-up` compiles all of them ahead.",
                file=sys.stderr,
                flush=True,
            )


_PATIENCE = 2.0
"""Seconds."""
NOTICE = Notice()


OPTIONS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _InnerCompiler}
"""Options of `numba.njit` that make a function an inner one."""
APART: dict[str, Any] = {**OPTIONS, "pipeline_class": _ApartCompiler}
"""The same of a function with loops that many call: a copy for each would be optimised for each."""


# How host kernels split their work: by a rule that looks at the problem alone, never at the number of threads.
#
# So the answer is bitwise the same for every number of threads. Little work runs on the calling thread: waking another
# one costs several microseconds, and it comes some thirty later.

SCALAR_GRAIN = 1 << 15
"""Multiply-adds that one part should at least hold where they run one by one, some 20 microseconds."""
VECTOR_GRAIN = 1 << 17
"""Multiply-adds or moved values that one part should at least hold where they run in vectors, some 10 microseconds."""
MAX_PARTS = 64
WORTH = 6 * VECTOR_GRAIN
"""The same of a kernel that is worth waking other threads for, some 60 microseconds; measured: two of them need 50."""

_ANY: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
JIT: dict[str, Any] = {**_ANY, "cache": True, "no_cfunc_wrapper": True, "pipeline_class": KernelCompiler}
"""Options of functions that Python calls and that spell out their fused multiply-adds, see `simd`."""
SERIAL: dict[str, Any] = {**JIT, "fastmath": {"contract"}}  # keeps NaN, infinity and the order of sums
INNER_JIT: dict[str, Any] = {**_ANY, **OPTIONS}
"""The same of functions that only compiled ones call, see `inner`."""
INNER_SERIAL: dict[str, Any] = {**INNER_JIT, "fastmath": {"contract"}}
INNER_APART: dict[str, Any] = {**INNER_SERIAL, **APART}
INNER_SUMS: dict[str, Any] = {**INNER_JIT, "fastmath": {"contract", "reassoc"}}
"""Sums in several lanes: not in the order of their terms, but always in the same order."""


def parts_for(work: int, vectors: bool = True) -> int:
    """Return into how many parts `work` elementary operations are split; 1 stands for the calling thread alone.

    Parts are of independent results, so their number does not change any.
    """
    grain = VECTOR_GRAIN if vectors else SCALAR_GRAIN
    if threads.count() == 1 or work * (VECTOR_GRAIN // grain) < WORTH:
        return 1
    return min(MAX_PARTS, work // grain)


@numba.njit(**INNER_SERIAL)
def share(part: int, parts: int, total: int) -> int:
    """Return where part number `part` begins when `total` items are split into `parts` equal parts."""
    return part * total // parts


@numba.njit(**INNER_SERIAL)
def span(part: int, parts: int, total: int) -> tuple[int, int]:
    """Return where part number `part` of `total` items begins and ends."""
    return part * total // parts, (part + 1) * total // parts


@numba.njit(**INNER_SERIAL)
def lower_bound(values: Array, low: int, high: int, least: int) -> int:
    """Return the first place from `low` on, before `high`, whose value is not below `least`; `high` if there is none.

    The values ascend.
    """
    while low < high:
        middle = (low + high) // 2
        if np.int64(values[np.uint64(middle)]) < least:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(**INNER_SERIAL)
def row_at(indptr: Array, entry: int) -> int:
    """Return the first row that starts at `entry` or later: parts then hold about as many entries."""
    return lower_bound(indptr, 0, len(indptr) - 1, entry)


# Read-only arrays run the code that was compiled for all others.
#
# To Numba they are another type, so every kernel would be compiled a second time for them, for seconds each. But the
# code is the same, and `sparsebp.kernels.spec` checks that a kernel writes to no read-only array. So the
# first call with one enters the compiled function under the other type too; no call pays for it. Constants, each a type
# of their own to Numba, are treated alike: LLVM sees their values when it inlines.


def accept_read_only(modules: Iterable[ModuleType]) -> None:
    """Let every compiled function of `modules` take read-only arrays without being compiled for them."""
    for module in modules:
        for function in vars(module).values():
            if isinstance(function, Dispatcher) and "compile" not in vars(function):
                _accept(function)
                shipped.keep(function)


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
