"""SIMD in Numba: the vector type, pointers, loads and stores, arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic as _intrinsic
from numba.extending import lower_builtin, models, register_model

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine import compile, shipped

# The vector type, its name in LLVM, and the decorators of code that uses it.

intrinsic: Callable[..., Any] = _intrinsic  # a call inside compiled code has one argument fewer than its definition


def _vector_bytes() -> int:
    """Return 64 where the machine has AVX-512, else 32 (AVX2; two registers on SSE and NEON)."""
    return 64 if shipped.level() == "x86-64-v4" else 32


VECTOR_BYTES = _vector_bytes()
"""Bytes of a vector: the same for every type, chosen once for the machine."""

WORD = ir.IntType(64)

device: Callable[..., Any] = numba.njit(
    nogil=True, error_model="numpy", forceinline=True, boundscheck=False, **compile.OPTIONS
)
"""Decorator of functions that take or return vectors or pointers: always inlined by LLVM."""


class SimdType(types.Type):
    """Numba type of a vector of `lanes` numbers of type `dtype`, as many as the machine's vectors have if 0."""

    def __init__(self, dtype: types.Float, lanes: int = 0) -> None:
        self.dtype, self.lanes = dtype, lanes or VECTOR_BYTES * 8 // dtype.bitwidth
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


# Sets of small integers as bytes, or as counts, read 64 at a time: further intrinsics for Numba.


@intrinsic
def take_64(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Return which of the 64 numbers from ``ptr[offset]`` on are not zero, number i as bit i, and set them to zero."""
    return _mask_64(ptr, offset, clear=True)


@intrinsic
def look_64(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Return the same, and leave the numbers unchanged."""
    return _mask_64(ptr, offset, clear=False)


def _mask_64(ptr: Any, offset: Any, clear: bool) -> Any:
    if ptr not in (types.CPointer(types.uint8), types.CPointer(types.uint16)):
        return None
    counts = ir.VectorType(ir.IntType(ptr.dtype.bitwidth), 64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        at = builder.bitcast(at, counts.as_pointer())
        none = ir.Constant(counts, None)
        mask = builder.bitcast(builder.icmp_unsigned("!=", builder.load(at, align=1), none), WORD)
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


# Operators of vectors, and functions that LLVM lowers to an instruction or two.


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
    if ty is None and not (a == b and isinstance(a, types.Float)):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right = args
        if ty is not None:
            left, right = (as_vector(context, builder, ty, v, t) for v, t in zip(args, sig.args, strict=True))
        return builder.select(builder.fcmp_ordered(comparison, left, right), left, right)

    return (ty or a)(a, b), codegen


@intrinsic
def where_positive(typingctx: Any, x: Any, value: Any) -> Any:
    """Return `value` in the lanes where `x` > 0, else 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        zero = ir.Constant(llvm_vector(x), None)
        return builder.select(builder.fcmp_ordered(">", args[0], zero), args[1], zero)

    return x(x, value), codegen


@intrinsic
def select_positive(typingctx: Any, x: Any, yes: Any, no: Any) -> Any:
    """Return `yes` in the lanes where `x` > 0, else `no`, also at a NaN. Both may be numbers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        yes, no = (as_vector(context, builder, x, v, t) for v, t in zip(args[1:], sig.args[1:], strict=True))
        return builder.select(builder.fcmp_ordered(">", args[0], ir.Constant(llvm_vector(x), None)), yes, no)

    return x(x, yes, no), codegen


@intrinsic
def select_winner(typingctx: Any, a: Any, place: Any, b: Any, other: Any, yes: Any, no: Any) -> Any:
    """Return `yes` in the lanes where `a` at `place` is the maximum, and not `b` at `other`, else `no`.

    The first maximum is; NaN is greater than all numbers, and the last NaN than others.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        first, here, second, there, won, lost = args
        earlier = builder.and_(builder.fcmp_ordered("==", first, second), builder.fcmp_ordered("<", here, there))
        above = builder.or_(builder.fcmp_ordered(">", first, second), earlier)
        later = builder.or_(builder.fcmp_ordered("ord", second, second), builder.fcmp_ordered(">", here, there))
        nan = builder.and_(builder.fcmp_unordered("uno", first, first), later)
        return builder.select(builder.or_(above, nan), won, lost)

    return a(a, place, b, other, yes, no), codegen


@intrinsic
def where_within(typingctx: Any, x: Any, low: Any, high: Any, value: Any) -> Any:
    """Return `value` in the lanes where ``low < x <= high`` or `x` is NaN, else 0. The limits are numbers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        least, most = (as_vector(context, builder, x, v, t) for v, t in zip(args[1:3], sig.args[1:3], strict=True))
        above, below = builder.fcmp_unordered(">", args[0], least), builder.fcmp_unordered("<=", args[0], most)
        return builder.select(builder.and_(above, below), args[3], ir.Constant(llvm_vector(x), None))

    return x(x, low, high, value), codegen


def _of_llvm(name: str, count: int) -> Any:
    """Return a function of vectors, lane by lane, or of numbers, that LLVM knows by name."""

    @intrinsic
    def one(typingctx: Any, x: Any) -> Any:
        return x(x), called(x)

    @intrinsic
    def two(typingctx: Any, x: Any, y: Any) -> Any:
        return y(x, y), called(y)

    def called(ty: Any) -> Any:
        of, result = (
            (f"f{ty.bitwidth}", llvm_real(ty)) if isinstance(ty, types.Float) else (vector_name(ty), llvm_vector(ty))
        )
        return lambda context, builder, sig, args: call_llvm(builder, f"llvm.{name}.{of}", result, list(args))

    return one if count == 1 else two


absolute = _of_llvm("fabs", 1)
square_root = _of_llvm("sqrt", 1)
"""Correctly rounded; NaN for negative numbers."""
copysign = _of_llvm("copysign", 2)
"""|first operand| with the sign of the second."""


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


# Four numbers at a time, whatever the machine's vectors: for runs of three or four that lie anywhere.


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


@intrinsic
def pointer(typingctx: Any, array: Any) -> Any:
    """Return the pointer to the first number of a contiguous array, which must be an argument of the function."""
    if not isinstance(array, types.Array) or array.layout != "C":
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def aligned_pointer(typingctx: Any, array: Any) -> Any:
    """Return the first pointer into `array` that is a multiple of the vector size; the array needs that much slack."""
    if not isinstance(array, types.Array) or array.layout != "C":
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        word = context.get_value_type(types.intp)
        address = builder.add(builder.ptrtoint(data, word), ir.Constant(word, VECTOR_BYTES - 1))
        return builder.inttoptr(builder.and_(address, ir.Constant(word, -VECTOR_BYTES)), data.type)

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def keep_alive(typingctx: Any, array: Any) -> Any:
    """Let an array live until here: Numba frees one after its last use, and does not count uses of pointers.

    The last line of every function that takes a pointer of an array it has made.
    """
    if not isinstance(array, types.Array):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), codegen


@intrinsic
def word_at(typingctx: Any, at: Any) -> Any:
    """Return the 64-bit integer that stands at an address in memory."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], WORD.as_pointer()), align=8)

    return types.int64(types.int64), codegen


@intrinsic
def address(typingctx: Any, at: Any, like: Any) -> Any:
    """Return the pointer to numbers of the type of `like` that stand at an address in memory."""
    if not isinstance(like, (types.Float, types.Integer)):
        return None
    number: Any = like
    element = llvm_real(number) if isinstance(like, types.Float) else ir.IntType(number.bitwidth)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], element.as_pointer())

    return types.CPointer(like)(types.int64, like), codegen


@intrinsic
def advance(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Return the pointer `offset` numbers further on."""
    if not isinstance(ptr, types.CPointer) or not isinstance(offset, types.Integer):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])

    return ptr(ptr, offset), codegen


@intrinsic
def number(typingctx: Any, ptr: Any) -> Any:
    """Return the address in memory of a pointer."""
    return types.int64(ptr), lambda context, builder, sig, args: builder.ptrtoint(args[0], WORD)


@intrinsic
def clear(typingctx: Any, ptr: Any, n: Any) -> Any:
    """Write `n` zeros from a pointer on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        size = builder.mul(context.cast(builder, args[1], n, types.intp), WORD(ptr.dtype.bitwidth // 8))
        cgutils.memset(builder, args[0], size, 0)
        return context.get_dummy_value()

    return types.void(ptr, n), codegen


@intrinsic
def put_number(typingctx: Any, ptr: Any, offset: Any, value: Any) -> Any:
    """``ptr[offset] = value``, rounded to the pointer's type."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        builder.store(context.cast(builder, args[2], value, ptr.dtype), at)
        return context.get_dummy_value()

    return types.void(ptr, offset, value), codegen


@intrinsic
def copy(typingctx: Any, out: Any, source: Any, n: Any) -> Any:
    """Copy `n` numbers from one pointer to another; they do not overlap."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        cgutils.raw_memcpy(builder, args[0], args[1], args[2], source.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(out, source, types.intp), codegen


@intrinsic
def lanes(typingctx: Any, ptr: Any) -> Any:
    """Return how many numbers of the pointer's type fit a vector."""
    if not isinstance(ptr, types.CPointer):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_constant(types.intp, SimdType(ptr.dtype).lanes)

    return types.intp(ptr), codegen


def vector_pointer(context: Any, builder: Any, ty: SimdType, ptr: Any, offset: Any, offset_type: Any) -> Any:
    """Return ``ptr + offset`` as a pointer to vectors."""
    at = builder.gep(ptr, [context.cast(builder, offset, offset_type, types.intp)])
    return builder.bitcast(at, llvm_vector(ty).as_pointer())


def _tail_mask(context: Any, builder: Any, ty: SimdType, n: Any, n_type: Any) -> Any:
    """Return the mask of the first `n` lanes (all of them if n is larger, none if it is not positive)."""
    word = ir.IntType(ty.dtype.bitwidth)
    wide = context.cast(builder, n, n_type, types.int64)
    count = ir.Constant(ir.IntType(64), ty.lanes)
    low = builder.select(builder.icmp_signed("<", wide, count), wide, count)
    low = low if ty.dtype.bitwidth == 64 else builder.trunc(low, word)
    vector = ir.VectorType(word, ty.lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), low, ir.Constant(ir.IntType(32), 0))
    every = ir.Constant(ir.VectorType(ir.IntType(32), ty.lanes), [0] * ty.lanes)
    return builder.icmp_signed(
        "<",
        ir.Constant(vector, list(range(ty.lanes))),
        builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), every),
    )


@intrinsic
def load(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Load a vector from ``ptr[offset:]``; any alignment."""
    ty = SimdType(ptr.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = vector_pointer(context, builder, ty, args[0], args[1], offset)
        return builder.load(at, align=ty.dtype.bitwidth // 8)

    return ty(ptr, offset), codegen


@intrinsic
def load_four(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Load a vector of four numbers from ``ptr[offset:]``, whatever the machine's vectors have; any alignment."""
    ty = SimdType(ptr.dtype, 4)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = vector_pointer(context, builder, ty, args[0], args[1], offset)
        return builder.load(at, align=ty.dtype.bitwidth // 8)

    return ty(ptr, offset), codegen


@intrinsic
def load_wide(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Load a vector of float64 from as many numbers at ``ptr[offset:]``, which may be float32; any alignment."""
    ty = SimdType(types.float64)
    narrow = SimdType(ptr.dtype, ty.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = vector_pointer(context, builder, narrow, args[0], args[1], offset)
        found = builder.load(at, align=narrow.dtype.bitwidth // 8)
        return found if narrow == ty else builder.fpext(found, llvm_vector(ty))

    return ty(ptr, offset), codegen


@intrinsic
def load_n(typingctx: Any, ptr: Any, offset: Any, n: Any) -> Any:
    """Load the first `n` lanes (at most all) from ``ptr[offset:]`` and touch nothing beyond; the others are zero."""
    ty = SimdType(ptr.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return load_masked(context, builder, ty, args, sig.args)

    return ty(ptr, offset, n), codegen


def load_masked(context: Any, builder: Any, ty: SimdType, args: Any, kinds: Any) -> Any:
    """Return the first lanes from a pointer and an offset, as many as the third argument says, the others zero."""
    at = vector_pointer(context, builder, ty, args[0], args[1], kinds[1])
    vector = llvm_vector(ty)
    align = ir.Constant(ir.IntType(32), ty.dtype.bitwidth // 8)
    mask = _tail_mask(context, builder, ty, args[2], kinds[2])
    name = f"llvm.masked.load.{vector_name(ty)}.p0"
    return call_llvm(builder, name, vector, [at, align, mask, ir.Constant(vector, None)])


@intrinsic
def store(typingctx: Any, ptr: Any, offset: Any, value: Any) -> Any:
    """Store a vector to ``ptr[offset:]``; any alignment."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = vector_pointer(context, builder, value, args[0], args[1], offset)
        builder.store(args[2], at, align=value.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(ptr, offset, value), codegen


@intrinsic
def store_n(typingctx: Any, ptr: Any, offset: Any, value: Any, n: Any) -> Any:
    """Store the first `n` lanes (at most all) to ``ptr[offset:]`` and touch nothing beyond."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store_masked(context, builder, value, args, sig.args)
        return context.get_dummy_value()

    return types.void(ptr, offset, value, n), codegen


def _store_masked(context: Any, builder: Any, ty: SimdType, args: Any, kinds: Any) -> None:
    at = vector_pointer(context, builder, ty, args[0], args[1], kinds[1])
    align = ir.Constant(ir.IntType(32), ty.dtype.bitwidth // 8)
    mask = _tail_mask(context, builder, ty, args[3], kinds[3])
    call_llvm(builder, f"llvm.masked.store.{vector_name(ty)}.p0", ir.VoidType(), [args[2], at, align, mask])


def store_first(context: Any, builder: Any, ty: SimdType, args: Any, kinds: Any) -> None:
    """Store the first lanes, all plainly: see `store_up_to`."""
    whole = builder.icmp_signed(">=", context.cast(builder, args[3], kinds[3], types.int64), WORD(ty.lanes))
    with builder.if_else(whole, likely=True) as (plain, masked):
        with plain:
            at = vector_pointer(context, builder, ty, args[0], args[1], kinds[1])
            builder.store(args[2], at, align=ty.dtype.bitwidth // 8)
        with masked:
            _store_masked(context, builder, ty, args, kinds)


@intrinsic
def broadcast(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Return the number ``ptr[offset]`` in all lanes."""
    ty = SimdType(ptr.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        return splat(builder, ty, builder.load(at, align=ty.dtype.bitwidth // 8))

    return ty(ptr, offset), codegen


@intrinsic
def load_at(typingctx: Any, ptr: Any, indices: Any, offset: Any) -> Any:
    """Load the vector of ``ptr[indices[offset + lane]]``, one number from anywhere for every lane."""
    if not isinstance(ptr, types.CPointer) or not isinstance(indices.dtype, types.Integer):
        return None
    ty = SimdType(ptr.dtype)
    entry: Any = indices.dtype

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        narrow = ir.VectorType(ir.IntType(entry.bitwidth), ty.lanes)
        wide = ir.VectorType(ir.IntType(64), ty.lanes)
        at = builder.gep(args[1], [context.cast(builder, args[2], offset, types.intp)])
        index = builder.load(builder.bitcast(at, narrow.as_pointer()), align=entry.bitwidth // 8)
        if entry.bitwidth < 64:
            index = builder.sext(index, wide) if entry.signed else builder.zext(index, wide)
        size = ir.Constant(wide, [(ty.dtype.bitwidth // 8).bit_length() - 1] * ty.lanes)
        first = builder.ptrtoint(args[0], ir.IntType(64))
        none = ir.Constant(wide, ir.Undefined)
        one = builder.insert_element(none, first, ir.Constant(ir.IntType(32), 0))
        every = ir.Constant(ir.VectorType(ir.IntType(32), ty.lanes), [0] * ty.lanes)
        addresses = builder.add(builder.shuffle_vector(one, none, every), builder.shl(index, size))
        pointers = builder.inttoptr(addresses, ir.VectorType(llvm_real(ty.dtype).as_pointer(), ty.lanes))
        mask = ir.Constant(ir.VectorType(ir.IntType(1), ty.lanes), [1] * ty.lanes)
        align = ir.Constant(ir.IntType(32), ty.dtype.bitwidth // 8)
        vector = llvm_vector(ty)
        name = f"llvm.masked.gather.{vector_name(ty)}.v{ty.lanes}p0"
        return call_llvm(builder, name, vector, [pointers, align, mask, ir.Constant(vector, None)])

    return ty(ptr, indices, offset), codegen


def _prefetch(level: int, write: bool = False) -> Any:
    """Return the function that asks for the cache line of ``ptr[offset]``, to read or write it soon. Never faults."""

    @intrinsic
    def prefetched(typingctx: Any, ptr: Any, offset: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
            address = builder.bitcast(at, ir.IntType(8).as_pointer())
            read, keep, data = (ir.Constant(ir.IntType(32), value) for value in (int(write), 4 - level, 1))
            call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [address, read, keep, data])
            return context.get_dummy_value()

        return types.void(ptr, offset), codegen

    return prefetched


prefetch, prefetch_second, prefetch_written = _prefetch(1), _prefetch(2), _prefetch(1, write=True)
"""Into the first-level cache, the second-level one alone, or the first-level one in order to write."""


@intrinsic
def zeros(typingctx: Any, ptr: Any) -> Any:
    """Return the vector of zeros of the pointer's type."""
    ty = SimdType(ptr.dtype)
    return ty(ptr), lambda context, builder, sig, args: ir.Constant(llvm_vector(ty), None)


@intrinsic
def zeros_of(typingctx: Any, ptr: Any, size: Any) -> Any:
    """Return the vector of zeros of the pointer's type that has so many bytes, a constant."""
    if not isinstance(size, types.Literal):
        raise RequireLiteralValue("size")
    ty = SimdType(ptr.dtype, size.literal_value * 8 // ptr.dtype.bitwidth)
    return ty(ptr, size), lambda context, builder, sig, args: ir.Constant(llvm_vector(ty), None)


@intrinsic
def filled(typingctx: Any, ptr: Any, value: Any) -> Any:
    """Return the vector of the pointer's type with `value` in all lanes."""
    ty = SimdType(ptr.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return as_vector(context, builder, ty, args[1], value)

    return ty(ptr, value), codegen


@intrinsic
def store_pieces(typingctx: Any, ptr: Any, offset: Any, value: Any, n: Any) -> Any:
    """Store the first `n` lanes, less than all, in pieces of 8, 4, 2 and 1 numbers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        left, vector = context.cast(builder, args[3], n, types.int64), args[2]
        none, word = ir.Constant(llvm_vector(value), ir.Undefined), ir.IntType(32)
        place, rest = cgutils.alloca_once_value(builder, at), cgutils.alloca_once_value(builder, vector)
        size = value.lanes // 2
        while size:
            with builder.if_then(builder.icmp_signed("!=", builder.and_(left, WORD(size)), WORD(0))):
                now, here = builder.load(rest), builder.load(place)
                low = ir.Constant(ir.VectorType(word, size), list(range(size)))
                piece = builder.shuffle_vector(now, none, low)
                target = builder.bitcast(here, ir.VectorType(llvm_real(value.dtype), size).as_pointer())
                builder.store(piece, target, align=value.dtype.bitwidth // 8)
                down = ir.Constant(
                    ir.VectorType(word, value.lanes), [(lane + size) % value.lanes for lane in range(value.lanes)]
                )
                builder.store(builder.shuffle_vector(now, none, down), rest)
                builder.store(builder.gep(here, [WORD(size)]), place)
            size //= 2
        return context.get_dummy_value()

    return types.void(ptr, offset, value, n), codegen


@device
def store_up_to(ptr: Any, offset: int, value: Any, n: int) -> None:
    """Store the first `n` lanes; `n` may exceed their number.

    A masked store to memory beyond the caches takes three to four times as long as a plain one, and on AMD's AVX2 it
    is a microprogram of some 20 cycles wherever it goes: whole vectors are stored plainly, and others in pieces, whose
    branches go the same way at every row.
    """
    if n >= lanes(ptr):
        store(ptr, offset, value)
    elif n > 0:
        store_pieces(ptr, offset, value, n)


@device
def load_up_to(ptr: Any, offset: int, n: int) -> Any:
    """Load the first `n` lanes, `n` may exceed their number; the others are zero."""
    return load(ptr, offset) if n >= lanes(ptr) else load_n(ptr, offset, n)


# Operands that are either shared by the batch or per sample, read a vector of samples at a time.
#
# An entry's values lie side by side (batch last). A *block* is as many samples as fit a vector, from sample `s` on; its
# `n` may be fewer at the end of the batch. The flags `batched` (per sample) and `full` (the block is whole) are
# constants at every call, so that LLVM, which inlines these functions, drops the branch that is not taken. Whole blocks
# have a separate path: beyond the caches, masked stores run at a third of the speed of plain ones.
#
# Numba's cache does not notice changes of this file: delete ``__pycache__`` after editing it.


class Values(NamedTuple):
    """Two operands and their result, flat; inside compiled code, pointers."""

    a: Any
    b: Any
    out: Any
    batch: int
    a_batched: bool
    b_batched: bool


def flat(a: Array, b: Array, out: Array) -> Values:
    """Return the values of arrays (nnz, B*), and whether they are per sample."""
    batch = out.shape[1]
    return Values(a.reshape(-1), b.reshape(-1), out.reshape(-1), batch, a.shape[1] == batch, b.shape[1] == batch)


@device
def pointers(values: Any) -> Any:
    """Return the same with pointers in place of arrays."""
    a, b, out = pointer(values.a), pointer(values.b), pointer(values.out)
    return Values(a, b, out, values.batch, values.a_batched, values.b_batched)


@device
def take(values: Any, entry: int, batch: int, s: int, n: int, batched: bool, full: bool) -> Any:
    """Return the values of one entry for a block; a shared value in all lanes."""
    if not batched:
        return broadcast(values, entry)
    if full:
        return load(values, entry * batch + s)
    return load_n(values, entry * batch + s, n)


@device
def put(values: Any, entry: int, batch: int, s: int, n: int, full: bool, value: Any) -> None:
    """Store the values of one entry for a block."""
    if full:
        store(values, entry * batch + s, value)
    else:
        store_n(values, entry * batch + s, value, n)


# For kernels that are written once, for vectors and for single numbers: `like` is a value of the type that is meant.


def _entry_pointer(context: Any, builder: Any, ty: Any, args: Any, kinds: Any, step: int) -> Any:
    at = builder.gep(args[0], [builder.mul(context.cast(builder, args[1], kinds[1], types.intp), WORD(step))])
    return builder.bitcast(at, llvm_vector(ty).as_pointer()) if isinstance(ty, SimdType) else at


@intrinsic
def entry(typingctx: Any, ptr: Any, index: Any, like: Any) -> Any:
    """Load entry number `index` of an array of such vectors or numbers."""
    real, step = (like.dtype, like.lanes) if isinstance(like, SimdType) else (like, 1)
    if ptr != types.CPointer(real):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _entry_pointer(context, builder, like, args, sig.args, step)
        return builder.load(at, align=real.bitwidth // 8)

    return like(ptr, index, like), codegen


@intrinsic
def set_entry(typingctx: Any, ptr: Any, index: Any, value: Any) -> Any:
    """Store a vector or number as entry number `index` of an array of such."""
    real, step = (value.dtype, value.lanes) if isinstance(value, SimdType) else (value, 1)
    if ptr != types.CPointer(real):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _entry_pointer(context, builder, value, args, sig.args, step), align=real.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(ptr, index, value), codegen


@intrinsic
def samples(typingctx: Any, ptr: Any, offset: Any, n: Any, like: Any) -> Any:
    """Load the first `n` lanes from ``ptr[offset:]``, the others zero; or the number ``ptr[offset]``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if isinstance(like, SimdType):
            return load_masked(context, builder, like, args, sig.args)
        return builder.load(_entry_pointer(context, builder, like, args, sig.args, 1), align=like.bitwidth // 8)

    return like(ptr, offset, n, like), codegen


@intrinsic
def set_samples(typingctx: Any, ptr: Any, offset: Any, value: Any, n: Any) -> Any:
    """Store the first `n` lanes to ``ptr[offset:]``, or a number to ``ptr[offset]``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if isinstance(value, SimdType):
            store_first(context, builder, value, args, sig.args)
        else:
            at = _entry_pointer(context, builder, value, args, sig.args, 1)
            builder.store(args[2], at, align=value.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(ptr, offset, value, n), codegen
