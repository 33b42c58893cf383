"""Sets of small integers as bytes, or as counts, read 64 at a time: intrinsics for Numba, beside those of `simd`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from sparsebp.kernels.host.engine.simd import intrinsic

_WORD = ir.IntType(64)


@intrinsic
def take_64(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Return which of the 64 numbers from ``ptr[offset]`` on are not zero, number i as bit i, and set them to zero."""
    return _mask_64(ptr, offset, clear=True)


@intrinsic
def look_64(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Return the same, and leave them as they are."""
    return _mask_64(ptr, offset, clear=False)


def _mask_64(ptr: Any, offset: Any, clear: bool) -> Any:
    if ptr not in (types.CPointer(types.uint8), types.CPointer(types.uint16)):
        return None
    counts = ir.VectorType(ir.IntType(ptr.dtype.bitwidth), 64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        at = builder.bitcast(at, counts.as_pointer())
        none = ir.Constant(counts, None)
        mask = builder.bitcast(builder.icmp_unsigned("!=", builder.load(at, align=1), none), _WORD)
        if clear:
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
