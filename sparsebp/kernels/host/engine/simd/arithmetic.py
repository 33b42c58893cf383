"""Operators of vectors, and functions that LLVM lowers to an instruction or two."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin

from sparsebp.kernels.host.engine.simd.types import (
    SimdType,
    as_vector,
    call_llvm,
    intrinsic,
    llvm_real,
    llvm_vector,
    vector_name,
)


def _vector_of(args: tuple[Any, ...]) -> SimdType | None:
    """Return the vector type of a mix of vectors and numbers, None if it is not such a mix."""
    found = {a for a in args if isinstance(a, SimdType)}
    if len(found) != 1 or not all(isinstance(a, (SimdType, types.Float)) for a in args):
        return None
    return found.pop()


def _define_operator(function: Callable[..., Any], instruction: str) -> None:
    """Give vectors a binary operator; the other operand may be a number."""

    @infer_global(function)
    class _Operator(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            ty = _vector_of(args)
            return None if ty is None or len(args) != 2 else signature(ty, *args)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right = (as_vector(context, builder, sig.return_type, a, t) for a, t in zip(args, sig.args, strict=True))
        return getattr(builder, instruction)(left, right)

    for operands in ((SimdType, SimdType), (SimdType, types.Float), (types.Float, SimdType)):
        lower_builtin(function, *operands)(lower)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_function, _instruction)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, fused where the machine can; of numbers of one type, or of vectors and numbers."""
    ty = _vector_of((a, b, c))
    if ty is None:
        return _fma_of_numbers(a) if a == b == c and isinstance(a, types.Float) else None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        operands = [as_vector(context, builder, ty, v, t) for v, t in zip(args, sig.args, strict=True)]
        return call_llvm(builder, f"llvm.fmuladd.{vector_name(ty)}", llvm_vector(ty), operands)

    return ty(a, b, c), codegen


def _fma_of_numbers(dtype: types.Float) -> Any:
    real = llvm_real(dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.fmuladd.f{dtype.bitwidth}", real, list(args))

    return dtype(dtype, dtype, dtype), codegen


@intrinsic
def minimum(typingctx: Any, a: Any, b: Any) -> Any:
    """Return ``a if a < b else b`` per lane; so NaN in `b` stays and NaN in `a` gives `b`. Operands may be numbers."""
    return _select_if("<", a, b)


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """Return ``a if a > b else b`` per lane; so NaN in `b` stays and NaN in `a` gives `b`. Operands may be numbers."""
    return _select_if(">", a, b)


def _select_if(comparison: str, a: Any, b: Any) -> Any:
    ty = _vector_of((a, b))
    if ty is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right = (as_vector(context, builder, ty, v, t) for v, t in zip(args, sig.args, strict=True))
        return builder.select(builder.fcmp_ordered(comparison, left, right), left, right)

    return ty(a, b), codegen


@intrinsic
def where_positive(typingctx: Any, x: Any, value: Any) -> Any:
    """Return `value` in the lanes where `x` > 0, else 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        zero = ir.Constant(llvm_vector(x), None)
        return builder.select(builder.fcmp_ordered(">", args[0], zero), args[1], zero)

    return x(x, value), codegen


@intrinsic
def where_within(typingctx: Any, x: Any, low: Any, high: Any, value: Any) -> Any:
    """Return `value` in the lanes where ``low < x <= high`` or `x` is NaN, else 0. The limits are numbers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        least, most = (as_vector(context, builder, x, v, t) for v, t in zip(args[1:3], sig.args[1:3], strict=True))
        above, below = builder.fcmp_unordered(">", args[0], least), builder.fcmp_unordered("<=", args[0], most)
        return builder.select(builder.and_(above, below), args[3], ir.Constant(llvm_vector(x), None))

    return x(x, low, high, value), codegen


@intrinsic
def absolute(typingctx: Any, x: Any) -> Any:
    """Return |x| per lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.fabs.{vector_name(x)}", llvm_vector(x), [args[0]])

    return x(x), codegen


@intrinsic
def square_root(typingctx: Any, x: Any) -> Any:
    """Return the square root per lane, correctly rounded; NaN for negative numbers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.sqrt.{vector_name(x)}", llvm_vector(x), [args[0]])

    return x(x), codegen


@intrinsic
def copysign(typingctx: Any, magnitude: Any, sign: Any) -> Any:
    """Return |magnitude| with the sign of `sign` per lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.copysign.{vector_name(sign)}", llvm_vector(sign), list(args))

    return sign(magnitude, sign), codegen


@intrinsic
def power_of_two(typingctx: Any, shifted: Any) -> Any:
    """Return 2**n per lane, where `shifted` is the integer n plus 1.5 * 2**(mantissa bits).

    Adding that constant leaves n in the low bits of the mantissa; they are shifted into the exponent. n must lie in the
    range of normal exponents. NaN gives some number, never undefined behaviour.
    """
    word = ir.IntType(shifted.dtype.bitwidth)
    vector = ir.VectorType(word, shifted.lanes)
    mantissa, bias = (23, 127) if shifted.dtype.bitwidth == 32 else (52, 1023)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], vector)
        exponent = builder.shl(bits, ir.Constant(vector, [mantissa] * shifted.lanes))
        one = ir.Constant(vector, [bias << mantissa] * shifted.lanes)
        return builder.bitcast(builder.add(exponent, one), llvm_vector(shifted))

    return shifted(shifted), codegen


@intrinsic
def is_double(typingctx: Any, x: Any) -> Any:
    """Say whether a vector or pointer is of float64: a constant to LLVM, so the other branch costs nothing."""
    return types.boolean(x), lambda context, builder, sig, args: context.get_constant(
        types.boolean, x.dtype.bitwidth == 64
    )
