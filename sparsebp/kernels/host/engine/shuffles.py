"""Vectors whose lanes change places: every second number of two vectors, two vectors in turn, transposed squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import types

from sparsebp.kernels.host.engine.simd import (
    WORD,
    SimdType,
    as_vector,
    intrinsic,
    llvm_vector,
    load_masked,
    store_first,
    vector_pointer,
)


def _shuffle(places: Callable[[int], list[int]]) -> Any:
    """Return the function of two vectors whose lane i is ``places(lanes)[i]`` of both, one behind the other."""

    @intrinsic
    def shuffled(typingctx: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, SimdType) or a != b:
            return None
        order = ir.Constant(ir.VectorType(ir.IntType(32), a.lanes), places(a.lanes))
        return a(a, b), lambda context, builder, sig, args: builder.shuffle_vector(args[0], args[1], order)

    return shuffled


evens = _shuffle(lambda lanes: list(range(0, 2 * lanes, 2)))
odds = _shuffle(lambda lanes: list(range(1, 2 * lanes, 2)))
low_in_turn = _shuffle(lambda lanes: [i // 2 + i % 2 * lanes for i in range(lanes)])
high_in_turn = _shuffle(lambda lanes: [i // 2 + i % 2 * lanes for i in range(lanes, 2 * lanes)])


def _turned(builder: Any, ty: SimdType, rows: list[Any]) -> list[Any]:
    """Return the columns of a square of as many rows as lanes."""
    half, width = ty.lanes // 2, 1
    turns = [
        ir.Constant(ir.VectorType(ir.IntType(32), ty.lanes), [i // 2 + i % 2 * ty.lanes for i in range(low, high)])
        for low, high in ((0, ty.lanes), (ty.lanes, 2 * ty.lanes))
    ]
    while width < ty.lanes:
        rows = [builder.shuffle_vector(rows[i], rows[i + half], turn) for i in range(half) for turn in turns]
        width *= 2
    return rows


# Rows of vectors in a buffer, from and to arrays of the same numbers or of narrower ones, float32 for float64.


def _square(builder: Any, ty: SimdType, ptr: Any, apart: Any, rows: Any, n: Any) -> Iterator[tuple[Any, Any]]:
    """Yield, for every lane, where its row of a square begins, and how many numbers of it there are: maybe none."""
    for i in range(ty.lanes):
        there = builder.icmp_signed("<", WORD(i), rows)
        # Of a row that is not there, another's place: masks hide a page fault, but only slowly.
        step = builder.select(there, builder.mul(apart, WORD(i)), WORD(0))
        yield builder.gep(ptr, [step]), builder.select(there, n, WORD(0))


@intrinsic
def take_turned(typingctx: Any, source: Any, apart: Any, rows: Any, n: Any, out: Any) -> Any:
    """Write the first `n` columns of some rows, `apart`, as rows of whole vectors: at most a vector of each."""
    ty = SimdType(out.dtype)
    narrow = SimdType(source.dtype, ty.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = types.int64
        sizes = [context.cast(builder, args[i], sig.args[i], word) for i in (1, 2, 3)]
        found = []
        for at, here in _square(builder, ty, args[0], *sizes):
            row = load_masked(context, builder, narrow, (at, WORD(0), here), (source, word, word))
            found.append(_widened(builder, ty, narrow, row))
        for i, column in enumerate(_turned(builder, ty, found)):
            at = vector_pointer(context, builder, ty, args[4], WORD(i * ty.lanes), types.int64)
            builder.store(column, at, align=ty.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(source, apart, rows, n, out), codegen


@intrinsic
def put_turned(typingctx: Any, target: Any, apart: Any, rows: Any, n: Any, source: Any) -> Any:
    """The way back: write `n` rows of whole vectors as columns of some rows, `apart`."""
    ty = SimdType(source.dtype)
    narrow = SimdType(target.dtype, ty.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        sizes = [context.cast(builder, args[i], sig.args[i], types.int64) for i in (1, 2, 3)]
        word = types.int64
        places = [vector_pointer(context, builder, ty, args[4], WORD(i * ty.lanes), word) for i in range(ty.lanes)]
        found = [builder.load(at, align=ty.dtype.bitwidth // 8) for at in places]
        square = _square(builder, ty, args[0], *sizes)
        for (at, here), column in zip(square, _turned(builder, ty, found), strict=True):
            value = column if narrow == ty else builder.fptrunc(column, llvm_vector(narrow))
            store_first(context, builder, narrow, (at, WORD(0), value, here), (target, word, narrow, word))
        return context.get_dummy_value()

    return types.void(target, apart, rows, n, source), codegen


@intrinsic
def take_row(typingctx: Any, source: Any, offset: Any, n: Any, out: Any, row: Any) -> Any:
    """Write the first `n` numbers from ``source[offset:]`` as a whole vector at ``out[row:]``."""
    ty = SimdType(out.dtype)
    narrow = SimdType(source.dtype, ty.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = load_masked(context, builder, narrow, args[:3], sig.args[:3])
        at = vector_pointer(context, builder, ty, args[3], args[4], row)
        builder.store(_widened(builder, ty, narrow, found), at, align=ty.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(source, offset, n, out, row), codegen


@intrinsic
def put_row(typingctx: Any, target: Any, offset: Any, n: Any, source: Any, row: Any) -> Any:
    """Write the first `n` numbers of the vector at ``source[row:]`` to ``target[offset:]``."""
    ty = SimdType(source.dtype)
    narrow = SimdType(target.dtype, ty.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.load(vector_pointer(context, builder, ty, args[3], args[4], row), align=ty.dtype.bitwidth // 8)
        value = value if narrow == ty else builder.fptrunc(value, llvm_vector(narrow))
        store_first(context, builder, narrow, (*args[:2], value, args[2]), (*sig.args[:2], narrow, n))
        return context.get_dummy_value()

    return types.void(target, offset, n, source, row), codegen


def _widened(builder: Any, ty: SimdType, narrow: SimdType, value: Any) -> Any:
    return value if narrow == ty else builder.fpext(value, llvm_vector(ty))


@intrinsic
def shift_in(typingctx: Any, number: Any, x: Any) -> Any:
    """Return a number in the first lane, and in each other one what the lane before it had in `x`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        one = as_vector(context, builder, x, args[0], number)
        order = [x.lanes, *range(x.lanes - 1)]
        return builder.shuffle_vector(args[1], one, ir.Constant(ir.VectorType(ir.IntType(32), x.lanes), order))

    return x(number, x), codegen


@intrinsic
def turn(typingctx: Any, source: Any, apart: Any, n: Any, out: Any, row: Any, block: Any) -> Any:
    """Transpose a square, a vector each way: store all its columns as rows but the last, and return that.

    Rows of the source are `apart`, and only their first `n` numbers are read. Rows of `out` are `row` apart, but
    every fourth is `block` behind the one four before.
    """
    ty = SimdType(source.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        distance, each, four = (context.cast(builder, args[i], sig.args[i], types.intp) for i in (1, 4, 5))
        rows, vector = [], llvm_vector(ty)
        for i in range(ty.lanes):
            start = builder.gep(args[0], [builder.mul(distance, WORD(i))])
            rows.append(load_masked(context, builder, ty, (start, WORD(0), args[2]), (source, types.int64, n)))
        rows = _turned(builder, ty, rows)
        for i in range(ty.lanes - 1):
            at = builder.gep(args[3], [builder.add(builder.mul(four, WORD(i // 4)), builder.mul(each, WORD(i % 4)))])
            builder.store(rows[i], builder.bitcast(at, vector.as_pointer()), align=ty.dtype.bitwidth // 8)
        return rows[-1]

    return ty(source, apart, n, out, row, block), codegen
