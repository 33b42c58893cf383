"""SIMD values inside Numba functions: one machine vector as a first-class value, lowered to LLVM vector instructions.

Numba does not vectorise the small loops that recurrent steps consist of (16 samples, 20 hidden units). Here a vector of
`lanes` numbers is a value like any other: it lives in a register, has ``+ - * /``, and is loaded from and stored to raw
pointers. LLVM lowers it on every target (AVX-512, AVX2, SSE, NEON); a vector wider than the machine's becomes several.

Rules for those who use it
--------------------------
- The functions below exist inside ``@njit`` code only. Vector functions are compiled with `device` so that LLVM inlines
  them and no vector goes through memory.
- A pointer does not keep its array alive: take pointers only of arrays that are *arguments* of the function.
- Nothing is checked. ``load_n`` and ``store_n`` touch exactly `n` numbers, which is how the ends of rows are handled.
- Operations are IEEE, NaN and infinity included; ``fma`` rounds once, or twice where the machine cannot fuse.
- Write ``fma``, and leave ``fastmath={"contract"}`` off: LLVM may make several copies of a loop and contract each as it
  likes, and then results would depend on which copy runs.
- Numba notices a change of the file that a cached function stands in, not of the files it calls: after editing this
  file, delete the ``__pycache__`` folder beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic as _intrinsic
from numba.extending import lower_builtin, models, register_model

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
        super().__init__(dmm, fe_type, _llvm_vector(fe_type))


def _llvm_vector(ty: SimdType) -> ir.VectorType:
    return ir.VectorType(_llvm_real(ty.dtype), ty.lanes)


def _llvm_real(dtype: types.Float) -> ir.Type:
    return ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()


def _vector_name(ty: SimdType) -> str:
    return f"v{ty.lanes}f{ty.dtype.bitwidth}"


def _splat(builder: Any, ty: SimdType, scalar: Any) -> Any:
    vector = _llvm_vector(ty)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), ty.lanes), [0] * ty.lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def _as_vector(context: Any, builder: Any, ty: SimdType, value: Any, value_type: Any) -> Any:
    """Return `value` as a vector; a number is rounded to the vector's type and repeated in all lanes."""
    if isinstance(value_type, SimdType):
        return value
    return _splat(builder, ty, context.cast(builder, value, value_type, ty.dtype))


def _call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by its full name."""
    fnty = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)


# ---- memory --------------------------------------------------------------------------------------------------------


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
def word_at(typingctx: Any, at: Any) -> Any:
    """Return the 64-bit integer that stands at an address in memory."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.load(builder.inttoptr(args[0], word.as_pointer()), align=8)

    return types.int64(types.int64), codegen


@intrinsic
def address(typingctx: Any, at: Any, like: Any) -> Any:
    """Return the pointer to numbers of the type of `like` that stand at an address in memory."""
    if not isinstance(like, (types.Float, types.Integer)):
        return None
    number: Any = like
    element = _llvm_real(number) if isinstance(like, types.Float) else ir.IntType(number.bitwidth)

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


def _vector_pointer(context: Any, builder: Any, ty: SimdType, ptr: Any, offset: Any, offset_type: Any) -> Any:
    at = builder.gep(ptr, [context.cast(builder, offset, offset_type, types.intp)])
    return builder.bitcast(at, _llvm_vector(ty).as_pointer())


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
        at = _vector_pointer(context, builder, ty, args[0], args[1], offset)
        return builder.load(at, align=ty.dtype.bitwidth // 8)

    return ty(ptr, offset), codegen


@intrinsic
def load_n(typingctx: Any, ptr: Any, offset: Any, n: Any) -> Any:
    """Load the first `n` lanes (at most all) from ``ptr[offset:]`` and touch nothing beyond; the others are zero."""
    ty = SimdType(ptr.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _vector_pointer(context, builder, ty, args[0], args[1], offset)
        vector = _llvm_vector(ty)
        align = ir.Constant(ir.IntType(32), ty.dtype.bitwidth // 8)
        mask = _tail_mask(context, builder, ty, args[2], n)
        name = f"llvm.masked.load.{_vector_name(ty)}.p0"
        return _call(builder, name, vector, [at, align, mask, ir.Constant(vector, None)])

    return ty(ptr, offset, n), codegen


@intrinsic
def store(typingctx: Any, ptr: Any, offset: Any, value: Any) -> Any:
    """Store a vector to ``ptr[offset:]``; any alignment."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _vector_pointer(context, builder, value, args[0], args[1], offset)
        builder.store(args[2], at, align=value.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(ptr, offset, value), codegen


@intrinsic
def store_n(typingctx: Any, ptr: Any, offset: Any, value: Any, n: Any) -> Any:
    """Store the first `n` lanes (at most all) to ``ptr[offset:]`` and touch nothing beyond."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _vector_pointer(context, builder, value, args[0], args[1], offset)
        align = ir.Constant(ir.IntType(32), value.dtype.bitwidth // 8)
        mask = _tail_mask(context, builder, value, args[3], n)
        _call(builder, f"llvm.masked.store.{_vector_name(value)}.p0", ir.VoidType(), [args[2], at, align, mask])
        return context.get_dummy_value()

    return types.void(ptr, offset, value, n), codegen


@intrinsic
def broadcast(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Return the number ``ptr[offset]`` in all lanes."""
    ty = SimdType(ptr.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        return _splat(builder, ty, builder.load(at, align=ty.dtype.bitwidth // 8))

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
        pointers = builder.inttoptr(addresses, ir.VectorType(_llvm_real(ty.dtype).as_pointer(), ty.lanes))
        mask = ir.Constant(ir.VectorType(ir.IntType(1), ty.lanes), [1] * ty.lanes)
        align = ir.Constant(ir.IntType(32), ty.dtype.bitwidth // 8)
        vector = _llvm_vector(ty)
        name = f"llvm.masked.gather.{_vector_name(ty)}.v{ty.lanes}p0"
        return _call(builder, name, vector, [pointers, align, mask, ir.Constant(vector, None)])

    return ty(ptr, indices, offset), codegen


@intrinsic
def prefetch(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Ask for the cache line of ``ptr[offset]``: it is read soon. Never faults, whatever the address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        address = builder.bitcast(at, ir.IntType(8).as_pointer())
        read, keep, data = (ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [address, read, keep, data])
        return context.get_dummy_value()

    return types.void(ptr, offset), codegen


@intrinsic
def zeros(typingctx: Any, ptr: Any) -> Any:
    """Return the vector of zeros of the pointer's type."""
    ty = SimdType(ptr.dtype)
    return ty(ptr), lambda context, builder, sig, args: ir.Constant(_llvm_vector(ty), None)


@intrinsic
def filled(typingctx: Any, ptr: Any, value: Any) -> Any:
    """Return the vector of the pointer's type with `value` in all lanes."""
    ty = SimdType(ptr.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _as_vector(context, builder, ty, args[1], value)

    return ty(ptr, value), codegen


# ---- arithmetic ----------------------------------------------------------------------------------------------------


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
        left, right = (_as_vector(context, builder, sig.return_type, a, t) for a, t in zip(args, sig.args, strict=True))
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
        operands = [_as_vector(context, builder, ty, v, t) for v, t in zip(args, sig.args, strict=True)]
        return _call(builder, f"llvm.fmuladd.{_vector_name(ty)}", _llvm_vector(ty), operands)

    return ty(a, b, c), codegen


def _fma_of_numbers(dtype: types.Float) -> Any:
    real = _llvm_real(dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, f"llvm.fmuladd.f{dtype.bitwidth}", real, list(args))

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
        left, right = (_as_vector(context, builder, ty, v, t) for v, t in zip(args, sig.args, strict=True))
        return builder.select(builder.fcmp_ordered(comparison, left, right), left, right)

    return ty(a, b), codegen


@intrinsic
def where_positive(typingctx: Any, x: Any, value: Any) -> Any:
    """Return `value` in the lanes where `x` > 0, else 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        zero = ir.Constant(_llvm_vector(x), None)
        return builder.select(builder.fcmp_ordered(">", args[0], zero), args[1], zero)

    return x(x, value), codegen


@intrinsic
def absolute(typingctx: Any, x: Any) -> Any:
    """Return |x| per lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, f"llvm.fabs.{_vector_name(x)}", _llvm_vector(x), [args[0]])

    return x(x), codegen


@intrinsic
def square_root(typingctx: Any, x: Any) -> Any:
    """Return the square root per lane, correctly rounded; NaN for negative numbers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, f"llvm.sqrt.{_vector_name(x)}", _llvm_vector(x), [args[0]])

    return x(x), codegen


@intrinsic
def copysign(typingctx: Any, magnitude: Any, sign: Any) -> Any:
    """Return |magnitude| with the sign of `sign` per lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, f"llvm.copysign.{_vector_name(sign)}", _llvm_vector(sign), list(args))

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
        return builder.bitcast(builder.add(exponent, one), _llvm_vector(shifted))

    return shifted(shifted), codegen


@intrinsic
def is_double(typingctx: Any, x: Any) -> Any:
    """Say whether a vector or pointer is of float64: a constant to LLVM, so the other branch costs nothing."""
    return types.boolean(x), lambda context, builder, sig, args: context.get_constant(
        types.boolean, x.dtype.bitwidth == 64
    )


@intrinsic
def store_pieces(typingctx: Any, ptr: Any, offset: Any, value: Any, n: Any) -> Any:
    """Store the first `n` lanes, less than all, in pieces of 8, 4, 2 and 1 numbers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        left, vector = context.cast(builder, args[3], n, types.int64), args[2]
        none, word = ir.Constant(_llvm_vector(value), ir.Undefined), ir.IntType(32)
        place, rest = cgutils.alloca_once_value(builder, at), cgutils.alloca_once_value(builder, vector)
        size = value.lanes // 2
        while size:
            with builder.if_then(builder.icmp_signed("!=", builder.and_(left, WORD(size)), WORD(0))):
                now, here = builder.load(rest), builder.load(place)
                low = ir.Constant(ir.VectorType(word, size), list(range(size)))
                piece = builder.shuffle_vector(now, none, low)
                target = builder.bitcast(here, ir.VectorType(_llvm_real(value.dtype), size).as_pointer())
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
    """Store the first `n` lanes, `n` being possibly more than there are.

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
    """Load the first `n` lanes, `n` being possibly more than there are; the others are zero."""
    return load(ptr, offset) if n >= lanes(ptr) else load_n(ptr, offset, n)
