"""Tiles of the factors of one matrix: what rows take from those before them, in registers.

The rows of a group of panels stand side by side in a dense work block: an entry of it is a *stripe*, the numbers of one
column in all rows, `wide` of them; of complex numbers all real parts, then all imaginary ones. A tile is some columns
of one, two or four panels. It is read once, takes the products with all rows of a run of panels, and is written once;
every number of U that is read serves all of its rows.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue

from sparsebp.kernels.host.engine.compile import INNER_SERIAL
from sparsebp.kernels.host.engine.real_or_complex import (
    SimdComplex,
    _complex,
    _made,
    _multiply_add,
    _real_of,
    _shuffled,
)
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    WORD,
    SimdType,
    advance,
    device,
    intrinsic,
    llvm_real,
    llvm_vector,
    splat,
)
from sparsebp.kernels.host.sparse.panels import BLOCK, PANEL

STRIPE = BLOCK * PANEL
"""Numbers of a stripe at most."""
MANY, FOUR, TWO, ONE = (0,) * (8 if VECTOR_BYTES == 64 else 3), (0,) * 4, (0,) * 2, (0,)
"""Columns and panels of a tile, by the lengths of tuples: so many columns of four panels in float64 leave registers for
a vector and a number, in AVX-512 and AVX2."""


def _kind(ptr: Any, lanes: int) -> Any:
    """Return the type of vectors of so many numbers of a pointer."""
    real = SimdType(_real_of(ptr.dtype), lanes)
    return SimdComplex(real) if _complex(ptr.dtype) else real


def _parts(builder: Any, value: Any, count: int) -> list[Any]:
    return [value] if count == 1 else [builder.extract_value(value, i) for i in range(2)]


def _whole(context: Any, builder: Any, kind: Any, parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else _made(context, builder, kind, *parts)


@intrinsic
def no_quad(typingctx: Any, ptr: Any) -> Any:
    """Return a vector of four zeros."""
    kind, count = _kind(ptr, PANEL), 2 if _complex(ptr.dtype) else 1
    none = ir.Constant(llvm_vector(SimdType(_real_of(ptr.dtype), PANEL)), None)
    return kind(ptr), lambda context, builder, sig, args: _whole(context, builder, kind, [none] * count)


@intrinsic
def lane(typingctx: Any, quad: Any, number: Any) -> Any:
    """Return a vector of four that has one of another's numbers four times."""
    if not isinstance(number, types.Literal):
        raise RequireLiteralValue("number")
    count = 2 if _complex(quad) else 1

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts = [_shuffled(builder, part, part, [number.literal_value] * 4) for part in _parts(builder, args[0], count)]
        return _whole(context, builder, quad, parts)

    return quad(quad, number), codegen


@intrinsic
def from_lane(typingctx: Any, before: Any, after: Any, first: Any) -> Any:
    """Return the first numbers of one vector of four and the others of another."""
    if not isinstance(first, types.Literal):
        raise RequireLiteralValue("first")
    count, places = 2 if _complex(before) else 1, [i if i < first.literal_value else 4 + i for i in range(4)]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pairs = zip(*(_parts(builder, arg, count) for arg in args[:2]), strict=True)
        return _whole(context, builder, before, [_shuffled(builder, a, b, places) for a, b in pairs])

    return before(before, after, first), codegen


def _in_stripe(context: Any, builder: Any, sig: Any, args: Any) -> list[Any]:
    """Return pointers to the parts of a number of a stripe: (array, index, row, wide, …)."""
    ptr = sig.args[0]
    count, real = 2 if _complex(ptr.dtype) else 1, llvm_real(_real_of(ptr.dtype))
    index, row, wide = (context.cast(builder, args[i], sig.args[i], types.intp) for i in (1, 2, 3))
    start = builder.add(builder.mul(builder.mul(index, wide), WORD(count)), row)
    first = builder.gep(builder.bitcast(args[0], real.as_pointer()), [start])
    return [first, builder.gep(first, [wide])][:count]


@intrinsic
def from_stripe(typingctx: Any, ptr: Any, index: Any, row: Any, wide: Any) -> Any:
    """Return one number of a stripe."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts = [builder.load(place) for place in _in_stripe(context, builder, sig, args)]
        return _whole(context, builder, ptr.dtype, parts)

    return ptr.dtype(ptr, index, row, wide), codegen


@intrinsic
def quad_of_stripe(typingctx: Any, ptr: Any, index: Any, row: Any, wide: Any) -> Any:
    """Return four numbers of a stripe."""
    kind, real = _kind(ptr, PANEL), SimdType(_real_of(ptr.dtype), PANEL)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        places = [builder.bitcast(place, llvm_vector(real).as_pointer())
                  for place in _in_stripe(context, builder, sig, args)]  # fmt: skip
        parts = [builder.load(place, align=real.dtype.bitwidth // 8) for place in places]
        return _whole(context, builder, kind, parts)

    return kind(ptr, index, row, wide), codegen


@intrinsic
def put_in_stripe(typingctx: Any, ptr: Any, index: Any, row: Any, wide: Any, value: Any) -> Any:
    """Write one number of a stripe, or four."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        places = _in_stripe(context, builder, sig, args)
        for place, part in zip(places, _parts(builder, args[4], len(places)), strict=True):
            at = builder.bitcast(place, part.type.as_pointer())
            builder.store(part, at, align=_real_of(ptr.dtype).bitwidth // 8)
        return context.get_dummy_value()

    return types.void(ptr, index, row, wide, value), codegen


@intrinsic
def _expect(typingctx: Any, work: Any, index: Any, row: Any, wide: Any, panels: Any) -> Any:
    """Ask for the numbers of a stripe in some panels."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        places = _in_stripe(context, builder, sig, args)
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for place in places:
            for line in range(0, PANEL * len(panels) * _real_of(work.dtype).bitwidth // 8, 64):
                at = builder.gep(builder.bitcast(place, byte), [WORD(line)])
                builder.call(function, [at, word(1), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(work, index, row, wide, panels), codegen


@intrinsic
def _subtract_tile(
    typingctx: Any, work: Any, slot: Any, columns: Any, row: Any, wide: Any, panels: Any, size: Any, left: Any,
    data: Any, source: Any, behind: Any,
) -> Any:  # fmt: skip
    """Add the products of packed, negated multiples with the rows of a run of panels to a tile of the work block.

    `slot`: where each column is; `columns`: those of the tile, as many as `size` is long; `row`: the first one of as
    many panels as `panels` is long. `left`: a stripe for each row of the run. `source`: (ends, whole, rest), the ends
    of the run's panels among `data`, the number of those of four rows, and how many rows the one behind them has, or 0;
    `behind`: how many columns these have from the tile's first one on.
    """
    real, parts, align = _real_of(data.dtype), 2 if _complex(data.dtype) else 1, _real_of(data.dtype).bitwidth // 8
    rows = SimdType(real, PANEL * len(panels))

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = llvm_vector(rows)
        block, lefts, reals = (builder.bitcast(args[i], vector.element.as_pointer()) for i in (0, 7, 8))
        first, apart, last = (context.cast(builder, args[i], sig.args[i], types.int64) for i in (3, 4, 10))
        ends, whole, rest = cgutils.unpack_tuple(builder, args[9])

        def stripe(base: Any, index: Any) -> list[Any]:
            at = builder.gep(base, [builder.add(builder.mul(builder.mul(index, apart), WORD(parts)), first)])
            return [builder.bitcast(place, vector.as_pointer()) for place in (at, builder.gep(at, [apart]))[:parts]]

        places: list[list[Any]] = []
        sums: list[list[Any]] = []
        for c in range(len(size)):
            column = builder.sext(builder.load(builder.gep(args[2], [WORD(c)])), WORD)
            places.append(stripe(block, builder.sext(builder.load(builder.gep(args[1], [column])), WORD)))
            sums.append([cgutils.alloca_once(builder, vector) for _ in range(parts)])
            for place, total in zip(places[-1], sums[-1], strict=True):
                builder.store(builder.load(place, align=align), total)

        def add(k: Any, at: Any, step: Any) -> None:
            a = [builder.load(place, align=align) for place in stripe(lefts, k)]
            for c in range(len(size)):
                value = builder.gep(at, [builder.mul(step, WORD(c * parts))])
                b = [splat(builder, rows, builder.load(builder.gep(value, [WORD(i)]))) for i in range(parts)]
                found = [builder.load(total) for total in sums[c]]
                found[0] = _multiply_add(builder, rows, a[0], b[0], found[0])
                if parts == 2:  # in the order of other products of complex numbers
                    found[0] = _multiply_add(builder, rows, builder.fneg(a[1]), b[1], found[0])
                    found[1] = _multiply_add(builder, rows, a[0], b[1], found[1])
                    found[1] = _multiply_add(builder, rows, a[1], b[0], found[1])
                for total, value in zip(sums[c], found, strict=True):
                    builder.store(value, total)

        def begin_of(panel: Any, rows: Any) -> Any:
            end = builder.load(builder.gep(ends, [panel]))
            return builder.gep(reals, [builder.mul(builder.sub(end, builder.mul(last, rows)), WORD(parts))])

        with cgutils.for_range(builder, whole) as loop:
            at = begin_of(loop.index, WORD(PANEL))
            for i in range(PANEL):
                k = builder.add(builder.mul(loop.index, WORD(PANEL)), WORD(i))
                add(k, builder.gep(at, [WORD(parts * i)]), WORD(PANEL))
        with cgutils.for_range(builder, rest) as loop:
            at = builder.gep(begin_of(whole, rest), [builder.mul(loop.index, WORD(parts))])
            add(builder.add(builder.mul(whole, WORD(PANEL)), loop.index), at, rest)
        for at_column, total in zip(places, sums, strict=True):
            for place, part in zip(at_column, total, strict=True):
                builder.store(builder.load(part), place, align=align)
        return context.get_dummy_value()

    return types.void(work, slot, columns, row, wide, panels, size, left, data, source, behind), codegen


# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def subtract_columns(work, slot, columns, count, row, step, wide, panels, left, data, source, behind):
    """``A[P, c] -= L[P, Q] U[Q, c]`` for some columns c of one, two or four panels P, and of those `step` rows behind
    them, if any; see `_subtract_tile`.
    """
    c = 0
    while c + len(MANY) <= count:
        for i in range(c + len(MANY), min(c + 2 * len(MANY), count)):
            _expect(work, slot[columns[i]], row, wide, panels)
        _subtract_both(work, slot, advance(columns, c), row, step, wide, panels, MANY, left, data, source, behind - c)
        c += len(MANY)
    while c + 4 <= count:
        _subtract_both(work, slot, advance(columns, c), row, step, wide, panels, FOUR, left, data, source, behind - c)
        c += 4
    if c + 2 <= count:
        _subtract_both(work, slot, advance(columns, c), row, step, wide, panels, TWO, left, data, source, behind - c)
        c += 2
    if c < count:
        _subtract_both(work, slot, advance(columns, c), row, step, wide, panels, ONE, left, data, source, behind - c)


@device
def _subtract_both(work, slot, columns, row, step, wide, panels, size, left, data, source, behind):
    _subtract_tile(work, slot, columns, row, wide, panels, size, left, data, source, behind)
    if step > 0:
        _subtract_tile(work, slot, columns, row + step, wide, panels, size, left, data, source, behind)
