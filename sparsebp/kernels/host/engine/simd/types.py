"""The vector type, what LLVM calls it, and the decorators of code that uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic as _intrinsic
from numba.extending import models, register_model

from sparsebp.kernels.host.engine import inner

intrinsic: Callable[..., Any] = _intrinsic  # a call inside compiled code has one argument fewer than its definition


def _vector_bytes() -> int:
    """Return 64 where the machine has AVX-512, else 32 (AVX2; two registers on SSE and NEON)."""
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on this platform
        return 32
    return 64 if features.get("avx512f", False) else 32


VECTOR_BYTES = _vector_bytes()
"""Bytes of a vector: the same for every type, chosen once for the machine."""

WORD = ir.IntType(64)

device: Callable[..., Any] = numba.njit(
    nogil=True, error_model="numpy", forceinline=True, boundscheck=False, **inner.OPTIONS
)
"""Decorator of functions that take or return vectors or pointers: always inlined by LLVM."""


class SimdType(types.Type):
    """Numba type of a vector of `lanes` numbers of type `dtype`."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype, self.lanes = dtype, VECTOR_BYTES * 8 // dtype.bitwidth
        super().__init__(name=f"simd({dtype} x {self.lanes})")


@register_model(SimdType)
class _SimdModel(models.PrimitiveModel):
    """A vector is represented by LLVM's own vector type, so locals become registers."""

    def __init__(self, dmm: Any, fe_type: SimdType) -> None:
        super().__init__(dmm, fe_type, llvm_vector(fe_type))


def llvm_vector(ty: SimdType) -> ir.VectorType:
    """Return LLVM's type of the vector."""
    return ir.VectorType(llvm_real(ty.dtype), ty.lanes)


def llvm_real(dtype: types.Float) -> ir.Type:
    """Return LLVM's type of the numbers in the vector."""
    return ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()


def vector_name(ty: SimdType) -> str:
    """Return how the names of LLVM intrinsics end for the vector: ``v8f32``, say."""
    return f"v{ty.lanes}f{ty.dtype.bitwidth}"


def splat(builder: Any, ty: SimdType, scalar: Any) -> Any:
    """Return a vector with `scalar` in all lanes."""
    vector = llvm_vector(ty)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), ty.lanes), [0] * ty.lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def as_vector(context: Any, builder: Any, ty: SimdType, value: Any, value_type: Any) -> Any:
    """Return `value` as a vector; a number is rounded to the vector's type and repeated in all lanes."""
    if isinstance(value_type, SimdType):
        return value
    return splat(builder, ty, context.cast(builder, value, value_type, ty.dtype))


def call_llvm(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by its full name."""
    fnty = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)
