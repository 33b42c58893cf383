"""Sets of small integers as bytes, read 64 at a time: intrinsics for Numba functions, beside those of `simd`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from sparsebp.kernels.host.engine.simd import intrinsic

_WORD, _BYTES = ir.IntType(64), ir.VectorType(ir.IntType(8), 64)


@intrinsic
def take_64(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Return which of the 64 bytes from ``ptr[offset]`` on are set, byte i as bit i, and set them all to zero."""
    if ptr != types.CPointer(types.uint8):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        at = builder.bitcast(at, _BYTES.as_pointer())
        none = ir.Constant(_BYTES, None)
        mask = builder.bitcast(builder.icmp_unsigned("!=", builder.load(at, align=1), none), _WORD)
        builder.store(none, at, align=1)
        return mask

    return types.uint64(ptr, offset), codegen


@intrinsic
def lowest(typingctx: Any, mask: Any) -> Any:
    """Return the position of the lowest bit that is set in a uint64, 64 if none is."""
    if mask != types.uint64:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(mask), codegen


@intrinsic
def count(typingctx: Any, mask: Any) -> Any:
    """Return how many bits of a uint64 are set."""
    if mask != types.uint64:
        return None
    return types.int64(mask), lambda context, builder, sig, args: builder.ctpop(args[0])
