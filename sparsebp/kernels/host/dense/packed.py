"""Products with a matrix that is packed once: ``out += x @ w`` for many x of few rows, as a recurrence has one a step.

A BLAS packs its operands anew at every call (Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication", 2008), which few rows do not pay. Here w lies in panels of a few vectors' columns, row after row, so
that a tile of the result, `ROWS` × `VECTORS` vectors, stays in registers while a panel streams past from the caches,
and the panel stays in the first or second one for all rows of x.

Every number is one chain of fused multiply-adds along k, added to what `out` holds: the same bits whatever the tile,
and whatever rows are computed together.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    WORD,
    SimdType,
    advance,
    intrinsic,
    lanes,
)
from sparsebp.kernels.host.engine.simd.types import call_llvm, llvm_vector, splat, vector_name

ROWS, VECTORS = 4, 3
"""Rows and vectors of a tile: 12 sums, 3 vectors of w and a number of x fill the 16 registers of AVX2."""
GROUP = 16
"""Rows of x that may lie together: whole vectors of every kind."""


@cache
def product_of(dtype: np.dtype) -> int:
    """Return the address of the product for compiled code, see `multiply`: compiled once, and not into each kernel."""
    kept: Any = numba.cfunc(types.void(*_types(types.CPointer(numba.from_dtype(dtype)))), **JIT)(_multiply)
    _compiled.append(kept)
    return int(kept.address or 0)


_compiled: list[Any] = []


def _types(pointer: Any) -> tuple[Any, ...]:
    """Return the types of the product's arguments."""
    word = types.int64
    return pointer, word, word, word, word, word, pointer, word, pointer, word


@intrinsic
def multiply(
    typingctx: Any, function: Any, x: Any, x_group: Any, x_row: Any, x_step: Any, rows: Any, depth: Any, w: Any,
    vectors: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """``out[r] += x[r] @ w`` for `rows` rows of `depth` numbers.

    In x, `GROUP` rows are `x_group` numbers from the next ones, a row is `x_row` from the next one, and its numbers are
    `x_step` apart; rows of `out` are `out_stride` apart. w is what `pack` returns, `vectors` how many vectors its rows
    are; rows of `out` have room for as many. `function` is what `product_of` returns.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args[1:]])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, *_types(x)), codegen


@numba.njit(**INNER_JIT)
def panel_of(vectors: int) -> int:
    """Return how many vectors' columns the next panel has, of so many that are left."""
    return 3 if vectors == 3 or vectors > 4 else min(vectors, 2)


def pack(w: np.ndarray) -> np.ndarray:
    """Return w (K, N) in panels, its columns padded with zeros to whole vectors: a flat array, aligned to vectors."""
    depth, columns = w.shape
    count = VECTOR_BYTES // w.itemsize
    vectors = -(-columns // count)
    raw = np.empty(depth * vectors * count + count, w.dtype)
    skip = -raw.ctypes.data % VECTOR_BYTES // w.itemsize
    packed = raw[skip : skip + depth * vectors * count]
    at = 0
    while at < vectors:
        width = panel_of.py_func(vectors - at)
        panel = packed[at * depth * count : (at + width) * depth * count].reshape(depth, width * count)
        source = w[:, at * count : (at + width) * count]
        panel[:, : source.shape[1]] = source
        panel[:, source.shape[1] :] = 0
        at += width
    return packed


def _tile(rows: int, vectors: int) -> Any:
    """Return the function for one tile: ``out[r] += Σ_k x[r, k] · w[k]``, of so many rows and vectors."""

    @intrinsic
    def tile(typingctx: Any, x: Any, x_row: Any, x_step: Any, w: Any, depth: Any, out: Any, out_stride: Any) -> Any:
        ty = SimdType(x.dtype)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_at, x_apart, x_step, w_at, count, out_at, out_apart = args
            vector, align = llvm_vector(ty), ty.dtype.bitwidth // 8
            places = [
                builder.bitcast(
                    builder.gep(out_at, [builder.add(builder.mul(out_apart, WORD(r)), WORD(v * ty.lanes))]),
                    vector.as_pointer(),
                )
                for r in range(rows)
                for v in range(vectors)
            ]
            row_of_x = [builder.mul(x_apart, WORD(r)) for r in range(rows)]
            entry = builder.block
            loop, end = builder.append_basic_block("along_k"), builder.append_basic_block("ready")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(WORD)
            k.add_incoming(WORD(0), entry)
            panel, source = builder.phi(w_at.type), builder.phi(x_at.type)
            panel.add_incoming(w_at, entry)
            source.add_incoming(x_at, entry)
            sums = [builder.phi(vector) for _ in places]
            for total in sums:
                total.add_incoming(ir.Constant(vector, None), entry)
            columns = [builder.gep(panel, [WORD(v * ty.lanes)]) for v in range(vectors)]
            right = [builder.load(builder.bitcast(at, vector.as_pointer()), align=align) for at in columns]
            added = []
            for r in range(rows):
                left = splat(builder, ty, builder.load(builder.gep(source, [row_of_x[r]]), align=align))
                for v in range(vectors):
                    added.append(
                        call_llvm(builder, f"llvm.fmuladd.{vector_name(ty)}", vector,
                              [left, right[v], sums[r * vectors + v]])
                    )  # fmt: skip
            following = builder.add(k, WORD(1))
            k.add_incoming(following, loop)
            source.add_incoming(builder.gep(source, [x_step]), loop)
            panel.add_incoming(builder.gep(panel, [WORD(vectors * ty.lanes)]), loop)
            for total, value in zip(sums, added, strict=True):
                total.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
            builder.position_at_end(end)
            for place, value in zip(places, added, strict=True):
                builder.store(builder.fadd(builder.load(place, align=align), value), place, align=align)
            return context.get_dummy_value()

        word = types.int64
        return types.void(x, word, word, w, word, out, word), codegen

    return tile


_TILES = {(rows, vectors): _tile(rows, vectors) for rows in range(1, ROWS + 1) for vectors in range(1, VECTORS + 1)}
_tile_11, _tile_21, _tile_31, _tile_41 = (_TILES[rows, 1] for rows in range(1, ROWS + 1))
_tile_12, _tile_22, _tile_32, _tile_42 = (_TILES[rows, 2] for rows in range(1, ROWS + 1))
_tile_13, _tile_23, _tile_33, _tile_43 = (_TILES[rows, 3] for rows in range(1, ROWS + 1))

# The functions below are compiled: their arguments are pointers and sizes.
# mypy: disable-error-code="no-untyped-def"


def _multiply(x, x_group, x_row, x_step, rows, depth, w, vectors, out, out_stride):
    """``out[r] += x[r] @ w`` for so many rows, see `multiply`."""
    count, at = lanes(x), 0
    while at < vectors:
        width = panel_of(vectors - at)
        panel, target, row = advance(w, at * count * depth), advance(out, at * count), 0
        while row < rows:
            left, source, place = (
                rows - row,
                advance(x, row // GROUP * x_group + row % GROUP * x_row),
                advance(target, row * out_stride),
            )
            if width == 3:
                if left >= 4:
                    _tile_43(source, x_row, x_step, panel, depth, place, out_stride)
                elif left == 3:
                    _tile_33(source, x_row, x_step, panel, depth, place, out_stride)
                elif left == 2:
                    _tile_23(source, x_row, x_step, panel, depth, place, out_stride)
                else:
                    _tile_13(source, x_row, x_step, panel, depth, place, out_stride)
            elif width == 2:
                if left >= 4:
                    _tile_42(source, x_row, x_step, panel, depth, place, out_stride)
                elif left == 3:
                    _tile_32(source, x_row, x_step, panel, depth, place, out_stride)
                elif left == 2:
                    _tile_22(source, x_row, x_step, panel, depth, place, out_stride)
                else:
                    _tile_12(source, x_row, x_step, panel, depth, place, out_stride)
            elif left >= 4:
                _tile_41(source, x_row, x_step, panel, depth, place, out_stride)
            elif left == 3:
                _tile_31(source, x_row, x_step, panel, depth, place, out_stride)
            elif left == 2:
                _tile_21(source, x_row, x_step, panel, depth, place, out_stride)
            else:
                _tile_11(source, x_row, x_step, panel, depth, place, out_stride)
            row += 4
        at += width
