"""Blocks of a product that the threads of a team take one after another."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from sparsebp.kernels.host.engine.simd import WORD, intrinsic

# Dense blocks of fixed small sizes inside Numba functions: each is read, multiplied and added without a loop.
#
# A size is given by a tuple of that many zeros: its length is part of its type, so a function is compiled for it. Rows
# of a block lie `step` numbers apart; a row is one vector, of as many lanes as it has numbers.
#
# Numba's cache does not notice changes of this file: delete ``__pycache__`` after editing it.


@intrinsic
def take_block(typingctx: Any, ptr: Any, step: Any, rows: Any, columns: Any) -> Any:
    """Return the numbers of a block, row by row, as a tuple."""
    m, n = len(rows), len(columns)
    block = types.UniTuple(ptr.dtype, m * n)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = []
        for row in _rows(builder, args[0], args[1], m):
            for j in range(n):
                numbers.append(builder.load(builder.gep(row, [WORD(j)]), align=ptr.dtype.bitwidth // 8))
        return context.make_tuple(builder, block, numbers)

    return block(ptr, types.int64, rows, columns), codegen


@intrinsic
def add_product(typingctx: Any, c: Any, c_step: Any, a: Any, b: Any, b_step: Any, m: Any, k: Any, n: Any) -> Any:
    """Add the product of a block that `take_block` returned, (m, k), and of one in memory, (k, n), to one in memory.

    Every sum takes its products one by one, in the order of k.
    """
    rows, inner, columns, real = len(m), len(k), len(n), c.dtype

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = ir.VectorType(context.get_data_type(real), columns)
        align, fused = real.bitwidth // 8, f"llvm.fmuladd.v{columns}f{real.bitwidth}"
        kind = ir.FunctionType(vector, [vector] * 3)
        targets = [builder.bitcast(row, vector.as_pointer()) for row in _rows(builder, args[0], args[1], rows)]
        sums = [builder.load(target, align=align) for target in targets]
        for e, row in enumerate(_rows(builder, args[3], args[4], inner)):
            right = builder.load(builder.bitcast(row, vector.as_pointer()), align=align)
            for r in range(rows):
                left = _repeated(builder, builder.extract_value(args[2], r * inner + e), vector)
                function = cgutils.get_or_insert_function(builder.module, kind, fused)
                sums[r] = builder.call(function, [left, right, sums[r]])
        for target, total in zip(targets, sums, strict=True):
            builder.store(total, target, align=align)
        return context.get_dummy_value()

    return types.void(c, types.int64, a, b, types.int64, m, k, n), codegen


def _rows(builder: Any, first: Any, step: Any, count: int) -> list[Any]:
    """Return pointers to the rows of a block."""
    rows = [first]
    for _ in range(count - 1):
        rows.append(builder.gep(rows[-1], [step]))
    return rows


def _repeated(builder: Any, number: Any, vector: ir.VectorType) -> Any:
    nothing, index = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    one = builder.insert_element(nothing, number, ir.Constant(index, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(index, vector.count), [0] * vector.count))
