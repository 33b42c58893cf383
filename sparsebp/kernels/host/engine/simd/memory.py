"""Pointers into arrays, and vectors to and from memory: whole, or the first few numbers of one."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from sparsebp.kernels.host.engine.simd.types import (
    VECTOR_BYTES,
    WORD,
    SimdType,
    as_vector,
    call_llvm,
    device,
    intrinsic,
    llvm_real,
    llvm_vector,
    splat,
    vector_name,
)


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
    """Let an array live until here: Numba frees one after its last use, and does not count what pointers do.

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
        word = ir.IntType(64)
        return builder.load(builder.inttoptr(args[0], word.as_pointer()), align=8)

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
        at = _vector_pointer(context, builder, ty, args[0], args[1], offset)
        return builder.load(at, align=ty.dtype.bitwidth // 8)

    return ty(ptr, offset), codegen


@intrinsic
def load_n(typingctx: Any, ptr: Any, offset: Any, n: Any) -> Any:
    """Load the first `n` lanes (at most all) from ``ptr[offset:]`` and touch nothing beyond; the others are zero."""
    ty = SimdType(ptr.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _vector_pointer(context, builder, ty, args[0], args[1], offset)
        vector = llvm_vector(ty)
        align = ir.Constant(ir.IntType(32), ty.dtype.bitwidth // 8)
        mask = _tail_mask(context, builder, ty, args[2], n)
        name = f"llvm.masked.load.{vector_name(ty)}.p0"
        return call_llvm(builder, name, vector, [at, align, mask, ir.Constant(vector, None)])

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
        call_llvm(builder, f"llvm.masked.store.{vector_name(value)}.p0", ir.VoidType(), [args[2], at, align, mask])
        return context.get_dummy_value()

    return types.void(ptr, offset, value, n), codegen


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


@intrinsic
def prefetch(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Ask for the cache line of ``ptr[offset]``: it is read soon. Never faults, whatever the address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        address = builder.bitcast(at, ir.IntType(8).as_pointer())
        read, keep, data = (ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [address, read, keep, data])
        return context.get_dummy_value()

    return types.void(ptr, offset), codegen


@intrinsic
def zeros(typingctx: Any, ptr: Any) -> Any:
    """Return the vector of zeros of the pointer's type."""
    ty = SimdType(ptr.dtype)
    return ty(ptr), lambda context, builder, sig, args: ir.Constant(llvm_vector(ty), None)


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
