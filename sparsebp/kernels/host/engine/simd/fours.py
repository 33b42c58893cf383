"""Four numbers at a time, whatever the machine's vectors: for runs of three or four that lie anywhere."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from sparsebp.kernels.host.engine.simd.types import intrinsic, llvm_real


@intrinsic
def multiply_four(typingctx: Any, out: Any, k: Any, a: Any, i: Any, b: Any, j: Any) -> Any:
    """``out[k + u] = a[i + u] * b[j + u]`` for u from 0 to 3; any alignment."""
    if not (isinstance(out, types.CPointer) and isinstance(out.dtype, types.Float) and out == a == b):
        return None
    real: Any = out.dtype
    four, size = ir.VectorType(llvm_real(real), 4), real.bitwidth // 8

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def at(pointer: int) -> Any:
            offset = context.cast(builder, args[pointer + 1], sig.args[pointer + 1], types.intp)
            return builder.bitcast(builder.gep(args[pointer], [offset]), four.as_pointer())

        product = builder.fmul(builder.load(at(2), align=size), builder.load(at(4), align=size))
        builder.store(product, at(0), align=size)
        return context.get_dummy_value()

    return types.void(out, k, a, i, b, j), codegen
