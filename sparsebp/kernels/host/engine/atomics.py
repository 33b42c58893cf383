"""Atomic words, and the few functions of the C library that `team` needs, inside Numba functions.

A word is an int64 at an address that is a multiple of eight. All accesses are sequentially consistent.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import intrinsic

WORD = ir.IntType(64)
ORDER = "seq_cst"
_WALL, _OWN = np.int32(time.CLOCK_MONOTONIC), np.int32(time.CLOCK_THREAD_CPUTIME_ID)

sem_post: Any = types.ExternalFunction("sem_post", types.int32(types.intp))
sem_wait: Any = types.ExternalFunction("sem_wait", types.int32(types.intp))
usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))

if sys.platform == "linux":
    sched_getcpu: Any = types.ExternalFunction("sched_getcpu", types.int32())
    sched_setaffinity: Any = types.ExternalFunction(
        "sched_setaffinity", types.int32(types.int32, types.intp, types.intp)
    )
else:

    @numba.njit(**JIT)
    def sched_setaffinity(thread, size, cores):  # type: ignore[no-untyped-def]
        """Return -1: nobody may choose cores."""
        return np.int32(-1)

    @numba.njit(**JIT)
    def sched_getcpu():  # type: ignore[no-untyped-def]
        """Return -1: nobody knows on which core the calling thread runs."""
        return np.int32(-1)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, WORD.as_pointer())


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    """Return the word at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), ORDER, 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the word at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the word at an address; return what it was."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Make the word at an address `new` if it is `old`; return whether it was."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_value(builder.cmpxchg(_word(builder, args[0]), args[1], args[2], ORDER, ORDER), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def _clock(typingctx: Any, kind: Any) -> Any:
    """Return a clock's nanoseconds; without memory of Numba's, which it might refuse."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = cgutils.alloca_once(builder, ir.ArrayType(WORD, 2))
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(32), place.type])
        builder.call(cgutils.get_or_insert_function(builder.module, function, "clock_gettime"), [args[0], place])
        seconds, nanoseconds = cgutils.unpack_tuple(builder, builder.load(place), 2)
        return builder.add(builder.mul(seconds, WORD(1_000_000_000)), nanoseconds)

    return types.int64(types.int32), codegen


@numba.njit(**INNER_JIT)
def wall_clock():  # type: ignore[no-untyped-def]
    """Return nanoseconds that have passed since some beginning."""
    return _clock(_WALL)


@numba.njit(**INNER_JIT)
def own_clock():  # type: ignore[no-untyped-def]
    """Return nanoseconds for which the calling thread has had a core."""
    return _clock(_OWN)
