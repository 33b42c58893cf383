"""Products of a few rows with a matrix, in tiles that stay in registers: a recurrence has one a step.

A BLAS packs its operands anew at every call (Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication", 2008), which few rows do not pay. Here the matrix w is read in panels of a few vectors' columns, row
after row: every vector of w that is loaded serves all rows of a tile, and every number of x that is broadcast all of
its vectors. A panel stays in the first or second cache for all rows of x.

Every result is one chain of fused multiply-adds along k: bitwise equal whatever the tile, and whatever rows are
computed together. In all functions but `add_outer` and `accumulate` the chain begins at zero, and its end is added to
what `out` holds; in these two it begins with what `out` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product as pairs
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from sparsebp.kernels.host.engine import shipped
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, JIT
from sparsebp.kernels.host.engine.shuffles import turn
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    WORD,
    SimdType,
    address,
    advance,
    broadcast,
    call_llvm,
    clear,
    device,
    fma,
    intrinsic,
    keep_alive,
    lanes,
    llvm_vector,
    load,
    load_n,
    prefetch_second,
    splat,
    store,
    store_n,
    store_up_to,
    vector_name,
)

ROWS, VECTORS = 4, 3
"""Rows and vectors of a tile: 12 sums, 3 vectors of w and a number of x fill the 16 registers of AVX2. One or two rows
go with 6 vectors, for as many chains."""


def _tiles(sizes: Sequence[tuple[int, int]], continued: bool = False) -> Any:
    """Return a function of one tile, ``out[r] += Σ_k x[r, k] · w[k]``, of any of these numbers of rows and vectors."""

    @intrinsic
    def add(
        typingctx: Any, rows: Any, vectors: Any, x: Any, x_rows: Any, x_step: Any, w: Any, w_step: Any, second: Any,
        depth: Any, out: Any, out_rows: Any,
    ) -> Any:  # fmt: skip
        """Add to `out` the products of `rows` rows of x with `vectors` vectors of w; there is at least one k.

        `x_rows` and `out_rows` say where rows begin, or how far they are apart, `x_step` and `w_step` how far the next
        k is. `x_step` may be three numbers (step, turns, other): every step of that number of turns is the other one.
        From the fourth vector on, those of w are `second` behind it, not next to each other.
        """

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            def word(place: int) -> Any:
                return context.cast(builder, args[place], sig.args[place], types.int64)

            def words(place: int) -> list[Any]:
                if not isinstance(sig.args[place], types.BaseTuple):
                    return [builder.mul(word(place), WORD(row)) for row in range(max(sizes)[0])]
                values = cgutils.unpack_tuple(builder, args[place])
                return [context.cast(builder, *one, types.int64) for one in zip(values, sig.args[place], strict=True)]

            x_steps = words(4) if isinstance(x_step, types.BaseTuple) else [word(4)]
            starts, targets, steps = words(3), words(10), (x_steps, word(6))
            end = builder.append_basic_block("added")
            chosen = builder.switch(builder.add(builder.shl(word(0), WORD(3)), word(1)), end)
            for size in sizes:
                block = builder.append_basic_block("tile")
                chosen.add_case(WORD(8 * size[0] + size[1]), block)
                builder.position_at_end(block)
                places = (args[2], starts), (args[5], word(7)), (args[9], targets)
                _write_tile(builder, SimdType(x.dtype), size, continued, *places, steps, word(8))
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(rows, vectors, x, x_rows, x_step, w, w_step, second, depth, out, out_rows), codegen

    return add


def _write_tile(
    builder: Any, ty: SimdType, size: tuple[int, int], continued: bool, of_x: tuple[Any, list[Any]],
    of_w: tuple[Any, Any], of_out: tuple[Any, list[Any]], steps: tuple[list[Any], Any], depth: Any,
) -> None:  # fmt: skip
    """Write the code of one tile, a loop along k."""
    (rows, vectors), vector, align = size, llvm_vector(ty), ty.dtype.bitwidth // 8
    tile, (x_step, w_step) = list(pairs(range(rows), range(vectors))), steps
    if rows >= ROWS:  # with a constant step LLVM does several turns of the loop at once, and runs out of registers
        w_step = builder.asm(ir.FunctionType(WORD, [WORD]), "", "=r,0", [w_step], False)

    def at(ptr: Any, offset: Any) -> Any:
        return builder.bitcast(builder.gep(ptr, [offset]), vector.as_pointer())

    places = [at(of_out[0], builder.add(of_out[1][r], WORD(v * ty.lanes))) for r, v in tile]
    columns = [WORD(v * ty.lanes) if v < VECTORS else builder.add(of_w[1], WORD((v - VECTORS) * ty.lanes))
               for v in range(vectors)]  # fmt: skip
    start = [builder.load(place, align=align) if continued else ir.Constant(vector, None) for place in places]
    entry, loop, end = builder.block, builder.append_basic_block("along_k"), builder.append_basic_block("ready")
    builder.branch(loop)
    builder.position_at_end(loop)
    k, turn, panel, source = (builder.phi(kind) for kind in (WORD, WORD, of_w[0].type, of_x[0].type))
    sums = [builder.phi(vector) for _ in tile]
    right = [builder.load(at(panel, column), align=align) for column in columns]
    left = [splat(builder, ty, builder.load(builder.gep(source, [row]), align=align)) for row in of_x[1][:rows]]
    added = [
        call_llvm(builder, f"llvm.fmuladd.{vector_name(ty)}", vector, [left[r], right[v], total])
        for (r, v), total in zip(tile, sums, strict=True)
    ]
    following, turns, step = builder.add(k, WORD(1)), builder.add(turn, WORD(1)), x_step[0]
    if len(x_step) > 1:
        ends = builder.icmp_signed("==", turns, x_step[1])
        turns, step = builder.select(ends, WORD(0), turns), builder.select(ends, x_step[2], step)
    phis, begin = (k, turn, panel, source, *sums), (WORD(0), WORD(0), of_w[0], of_x[0], *start)
    onward = following, turns, builder.gep(panel, [w_step]), builder.gep(source, [step]), *added
    for phi, first, later in zip(phis, begin, onward, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
    builder.position_at_end(end)
    for place, value in zip(places, added, strict=True):
        total = value if continued else builder.fadd(builder.load(place, align=align), value)
        builder.store(total, place, align=align)


_WIDTHS = range(1, VECTORS + 1)
_add_any, _continue_any = (_tiles(tuple(pairs(range(1, ROWS + 1), _WIDTHS)), continued) for continued in (False, True))
_add_four, _continue_four = (_tiles(tuple(pairs((ROWS,), _WIDTHS)), continued) for continued in (False, True))
LONGEST = 24 if VECTOR_BYTES == 64 else 12
"""Rows of a tile of one vector: their sums leave registers for a vector and a number."""
_add_long = _tiles([(rows, 1) for rows in (1, 2, 3, *range(4, LONGEST + 1, 4))])
_add_two, _add_one = (_tiles(tuple(pairs((rows,), (*_WIDTHS, 2 * VECTORS)))) for rows in (2, 1))

# The functions below are compiled: their arguments are pointers and sizes.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_JIT)
def panel_of(vectors):
    """Return the number of vectors in the next panel, given how many are left."""
    return 3 if vectors == 3 or vectors > 4 else min(vectors, 2)


@device
def _wide_panel_of(vectors):
    """Return the same for one or two rows, where the panel may be two of three vectors."""
    return 6 if vectors >= 6 and vectors != 7 else panel_of(vectors)


# Rows of w as long as all columns: the panels' rows are `w_stride` apart.


@device
def multiply(x, r1, r2, r3, depth, w, w_stride, width, out, out_stride):
    """``out[s] += Σ_k x[r_s + k] · w[k]`` for four rows that begin at x and r1, r2 and r3 behind it.

    w (depth, w_stride) and the rows of `out`, of which whole vectors up to `width` are used. 8 · depth · width FLOP.
    """
    count, j = lanes(x), 0
    sources, targets = (0, r1, r2, r3), (0, out_stride, 2 * out_stride, 3 * out_stride)
    while j < width:
        panel = panel_of((width - j) // count)
        _add_four(4, panel, x, sources, 1, advance(w, j), w_stride, 0, depth, advance(out, j), targets)
        j += panel * count


@device
def multiply_row(x, depth, w, w_stride, width, out):
    """`multiply` for one row; six chains at a time."""
    count, j, none = lanes(x), 0, (0, 0, 0, 0)
    while j < width:
        panel = _wide_panel_of((width - j) // count)
        _add_one(1, panel, x, none, 1, advance(w, j), w_stride, 3 * count, depth, advance(out, j), none)
        j += panel * count


@device
def accumulate(x, x_stride, depth, w, w_stride, width, out, out_stride):
    """`multiply` for rows of x `x_stride` apart, where the sums begin with what `out` holds."""
    count, j = lanes(x), 0
    sources = 0, x_stride, 2 * x_stride, 3 * x_stride
    targets = 0, out_stride, 2 * out_stride, 3 * out_stride
    while j < width:
        panel = panel_of((width - j) // count)
        _continue_four(4, panel, x, sources, 1, advance(w, j), w_stride, 0, depth, advance(out, j), targets)
        j += panel * count


@device
def add_outer(x, features, batch, samples, steps, a, a_row, width, out):
    """``out[i] += Σ_r x[r, i] · a[r]`` over the rows of some samples and steps, from the last step to the first.

    x: the first sample's row of the last step, of an array (T, batch, features); it is read where it lies. Rows of `a`
    follow each other, `a_row` apart. out (features, width), of whole vectors. 2 · steps · samples · features · width
    FLOP.
    """
    count, j = lanes(x), 0
    x_step = features, samples, (1 - samples - batch) * features
    while j < width:  # outside: a panel of `a` stays in the first cache, whatever the features
        panel = panel_of((width - j) // count)
        for i in range(0, features, 4):
            _continue_any(
                min(features - i, 4), panel, advance(x, i), (0, 1, 2, 3), x_step, advance(a, j), a_row, 0,
                steps * samples, advance(out, i * width + j), width,
            )  # fmt: skip
        j += panel * count


# A sample in each lane: vectors of the state lie one behind the other, and the numbers are those of the weights.


@device
def multiply_lanes(w, w_row, columns, x, depth, out):
    """``out[c] += Σ_k w[k, c] · x[k]`` for vectors x[k] and out[c], the same chains as in `multiply`."""
    count, c = lanes(x), 0
    while c < columns:
        left = columns - c
        rows = min(left // 4 * 4, LONGEST) if left >= 4 else left
        _add_long(rows, 1, advance(w, c), 1, w_row, x, count, 0, depth, advance(out, c * count), count)
        c += rows


@device
def to_lanes(rows, apart, width, out):
    """Write `width` numbers of as many rows as a vector has lanes, `apart` from each other, as vectors.

    `out` has room for `width` in whole vectors.
    """
    count = lanes(rows)
    if width == 1 and apart == 1:
        store(out, 0, load(rows, 0))
        return
    for j in range(0, width, count):
        square = advance(out, j * count)
        store(square, (count - 1) * count, turn(advance(rows, j), apart, width - j, square, count, 4 * count))


@device
def to_rows(vectors, width, out, apart, block):
    """Write vectors as rows `apart` from each other, every fourth `block` behind the one four before.

    Vectors are read up to whole squares. Only the last row ends where it ends: rows are a vector or more apart, and
    if they are further apart than `width`, by whole vectors.
    """
    count = lanes(vectors)
    last = (count // 4 - 1) * block + 3 * apart
    for j in range((width - 1) // count * count, -1, -count):  # what a row writes beyond its end is written again
        value = turn(advance(vectors, j * count), count, count, advance(out, j), apart, block)
        store_up_to(out, last + j, value, width - j)


@device
def turn_rows(source, apart, depth, rows, out, stride):
    """Write rows of `depth` numbers, `apart` from each other, as columns of `out`: in squares where they fit.

    Rows of `out` are `stride` apart.
    """
    count = lanes(out)
    for j in range(0, rows, count):
        some = min(count, rows - j)
        squares = depth // count * count if some == count else 0
        for k in range(0, squares, count):
            square = advance(out, k * stride + j)
            last = turn(advance(source, j * apart + k), apart, count, square, stride, 4 * stride)
            store(square, (count - 1) * stride, last)
        for r in range(j, j + some):
            for k in range(squares, depth):
                out[k * stride + r] = source[r * apart + k]


# Weights as they lie in torch.nn, rows of outputs, for a step or a few: compiled once, and called.


@numba.njit(**INNER_APART)
def multiply_unpacked(w, depth, rows, x, width, out):
    """``out[r] += Σ_k w[r, k] · x[k]`` for rows x[k] and out[r] of `width` numbers, whole vectors."""
    count, j = lanes(x), 0
    while j < width:
        panel, r = panel_of((width - j) // count), 0
        while r < rows:
            left = rows - r
            a, b, c = advance(w, r * depth), advance(x, j), advance(out, r * width + j)
            if panel == 1:
                some = min(left // 4 * 4, LONGEST) if left >= 4 else left
                _add_long(some, 1, a, depth, 1, b, width, 0, depth, c, width)
            else:
                some = min(left, 4)
                _add_any(some, panel, a, depth, 1, b, width, 0, depth, c, width)
            r += some
        j += panel * count


@numba.njit(**INNER_APART)
def multiply_back(d, samples, depth, w, width, out, apart):
    """``out[s] += Σ_r d[s, r] · w[r]`` for rows w[r] of `width` numbers; rows of `out` are `apart`."""
    count, j = lanes(d), 0
    whole = width // count * count
    while j < whole:
        left = (whole - j) // count
        if samples == 1:
            panel = _wide_panel_of(left)
            _add_one(1, panel, d, 0, 1, advance(w, j), width, 3 * count, depth, advance(out, j), 0)
        else:
            panel = panel_of(left)
            for s in range(0, samples, 4):
                _add_any(min(4, samples - s), panel, advance(d, s * depth), depth, 1, advance(w, j), width, 0, depth,
                        advance(out, s * apart + j), apart)  # fmt: skip
        j += panel * count
    n = width - whole
    if n:
        for s in range(samples):
            total = load_n(out, s * apart + whole, n)
            for r in range(depth):
                total = fma(broadcast(d, s * depth + r), load_n(w, r * width + whole, n), total)
            store_n(out, s * apart + whole, total, n)


@numba.njit(**INNER_APART)
def multiply_outer(d, samples, rows, x, width, out):
    """``out[r] = Σ_s d[s, r] · x[s]`` for rows of `width` numbers."""
    count, j = lanes(d), 0
    whole = width // count * count
    if samples == 1:
        for r in range(rows):
            factor = broadcast(d, r)
            for k in range(0, whole, count):
                store(out, r * width + k, factor * load(x, k))
    else:
        clear(out, rows * width)
        while j < whole:
            panel = panel_of((whole - j) // count)
            for r in range(0, rows, 4):
                _add_any(min(4, rows - r), panel, advance(d, r), 1, rows, advance(x, j), width, 0, samples,
                        advance(out, r * width + j), width)  # fmt: skip
            j += panel * count
    if whole < width:
        for r in range(rows):
            for k in range(whole, width):
                total = d[r] * x[k]
                for s in range(1, samples):
                    total += d[s * rows + r] * x[s * width + k]
                out[r * width + k] = total


# w in panels, one behind the other, so that a product reads them in one stream. With rows as long as all gates, the
# pieces of a panel are thousands of bytes apart, fall into a few sets of the caches and drive each other out; a third
# of the time of a step of 128 units went there.


@device
def multiply_panels(x, x_stride, rows, depth, w, width, out, out_stride):
    """``out[s] += Σ_k x[s, k] · w[k]`` for `rows` rows; `width` numbers of each.

    `out` has rows up to a multiple of four: the last row of x is repeated for those beyond `rows`.
    """
    count, at = lanes(x), 0
    vectors, targets = width // count, (0, out_stride, 2 * out_stride, 3 * out_stride)
    while at < vectors:
        panel = panel_of(vectors - at)
        for s in range(0, rows, 4):
            last = rows - 1 - s
            sources = 0, min(1, last) * x_stride, min(2, last) * x_stride, min(3, last) * x_stride
            _add_four(
                4, panel, advance(x, s * x_stride), sources, 1, advance(w, at * count * depth), panel * count, 0, depth,
                advance(out, s * out_stride + at * count), targets,
            )  # fmt: skip
        at += panel


@device
def multiply_panels_by_row(x, depth, w, width, out, turned):
    """The same of one row; two panels of three vectors at a time, so six chains of multiply-adds.

    `turned`: the last ones first, which the call before may have left in the first cache.
    """
    count, none = lanes(x), (0, 0, 0, 0)
    vectors = width // count
    pairs = max(vectors - 4, 0) // 6 if vectors % 6 == 1 else vectors // 6
    step = 3 * count
    for half in range(2):
        if turned == (half == 1):
            for i in range(pairs):
                at = (pairs - 1 - i if turned else i) * 6 * count
                _add_one(1, 6, x, none, 1, advance(w, at * depth), step, step * depth, depth, advance(out, at), none)
        else:
            at = 6 * pairs
            while at < vectors:
                panel = panel_of(vectors - at)
                weights = advance(w, at * count * depth)
                _add_one(1, panel, x, none, 1, weights, panel * count, 0, depth, advance(out, at * count), none)
                at += panel


@device
def multiply_panels_by_pair(x, x_stride, depth, w, width, out, out_stride):
    """The same of two rows, so twelve chains."""
    count, at, sources, targets = lanes(x), 0, (0, x_stride, 0, 0), (0, out_stride, 0, 0)
    while at * count < width:
        panel = _wide_panel_of(width // count - at)
        step, weights = min(panel, 3) * count, advance(w, at * count * depth)
        _add_two(2, panel, x, sources, 1, weights, step, step * depth, depth, advance(out, at * count), targets)
        at += panel


# The same for any number of rows, compiled once, and called by an address.

GROUP = 16
"""Rows of x that may lie together: whole vectors of every kind."""
DEEPEST = 128 if VECTOR_BYTES == 64 else 1 << 62
"""Rows of a panel that are multiplied at once with many rows of x. With vectors of 64 bytes, sums need twice as many
bytes of w in a cycle as the second cache may give, so a slice of a panel stays in the first one; with shorter ones
slices were measured to be no faster."""


@cache
def product_of(dtype: np.dtype) -> int:
    """Return the address of the product for compiled code, see `multiply_packed`."""
    kept: Any = shipped.cfunc(types.void(*_types(types.CPointer(numba.from_dtype(dtype)))), _multiply_packed, **JIT)
    _compiled.append(kept)
    return int(kept.address or 0)


_compiled: list[Any] = []


def _types(pointer: Any) -> tuple[Any, ...]:
    """Return the types of the product's arguments."""
    word = types.int64
    return pointer, word, word, word, word, word, pointer, word, pointer, word


@intrinsic
def multiply_packed(
    typingctx: Any, function: Any, x: Any, x_group: Any, x_row: Any, x_step: Any, rows: Any, depth: Any, w: Any,
    vectors: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """``out[r] += x[r] @ w`` for `rows` rows of `depth` numbers.

    In x, `GROUP` rows are `x_group` numbers from the next ones, a row is `x_row` from the next one, and its numbers are
    `x_step` apart; rows of `out` are `out_stride` apart. w from `pack_matrix`, whose rows are `vectors` vectors long,
    as are the rows of `out`. `function` from `product_of`.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args[1:]])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, *_types(x)), codegen


def pack_matrix(w: np.ndarray) -> np.ndarray:
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


def _multiply_packed(x, x_group, x_row, x_step, rows, depth, w, vectors, out, out_stride):
    """``out[r] += x[r] @ w`` for `rows` rows, see `multiply_packed`."""
    count, at = lanes(x), 0
    sources, targets = (0, x_row, 2 * x_row, 3 * x_row), (0, out_stride, 2 * out_stride, 3 * out_stride)
    sliced = depth > DEEPEST and rows >= GROUP
    room = np.empty((rows * VECTORS + 1) * VECTOR_BYTES if sliced else 0, np.uint8)
    sums = address((room.ctypes.data + VECTOR_BYTES - 1) // VECTOR_BYTES * VECTOR_BYTES, out[0])
    while at < vectors:
        width = panel_of(vectors - at)
        panel, target, step = advance(w, at * count * depth), advance(out, at * count), width * count
        if sliced:
            _multiply_slices(x, x_group, x_row, x_step, rows, depth, panel, width, DEEPEST, sums)
            for row in range(rows):
                place, own = advance(target, row * out_stride), advance(sums, row * step)
                for j in range(0, step, count):
                    store(place, j, load(place, j) + load(own, j))
        else:
            for row in range(0, rows, 4):
                source = advance(x, row // GROUP * x_group + row % GROUP * x_row)
                some, place = min(rows - row, 4), advance(target, row * out_stride)
                _add_any(some, width, source, sources, x_step, panel, step, 0, depth, place, targets)
        at += width
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _multiply_slices(x, x_group, x_row, x_step, rows, depth, panel, width, deepest, sums):
    """``sums[r] = x[r] @ panel``, in slices of at most `deepest` rows of the panel."""
    step, sources = width * lanes(x), (0, x_row, 2 * x_row, 3 * x_row)
    clear(sums, rows * step)
    for k in range(0, depth, deepest):
        for row in range(0, rows, 4):
            source = advance(x, row // GROUP * x_group + row % GROUP * x_row + k * x_step)
            _continue_any(
                min(rows - row, 4), width, source, sources, x_step, advance(panel, k * step), step, 0,
                min(depth - k, deepest), advance(sums, row * step), step,
            )  # fmt: skip


# The product of any two matrices, with the interface of a BLAS.
#
# NumPy's OpenBLAS 0.3.31 takes a Zen 5 for a machine with vectors of 32 bytes, and computes at half its speed. This
# stands in where a machine has longer vectors than its BLAS uses. A is read where it lies, transposed or not; a slice
# of B is packed in panels for all rows of A.

SLICE, ACROSS, DOWN = 128, 768, 128
"""Numbers along k, columns of B that are packed at a time, and rows of A that meet them."""
_AHEAD = 4  # rows of B that are asked for before they are packed
TURNED = 84  # the letter T


@cache
def gemm_of(dtype: np.dtype) -> int:
    """Return the address of a ``gemm`` as Fortran calls it, with integers of 64 bits; see `_gemm`."""
    word, real = types.CPointer(types.int64), types.CPointer(numba.from_dtype(dtype))
    arguments = (word, word, word, word, word, real, real, word, real, word, real, real, word)
    kept: Any = shipped.cfunc(types.void(*arguments), _gemm, **JIT)
    _compiled.append(kept)
    return int(kept.address or 0)


def _gemm(of_b, of_a, n, m, k, one, b, ldb, a, lda, before, c, ldc):
    """``C = A B``, or ``C += A B`` where `before` points to 1, for row-major C: to Fortran that is ``Cᵀ = Bᵀ Aᵀ``.

    `of_a` and `of_b` point to the letter T for a transposed matrix.
    """
    count, rows, columns, depth = lanes(c), m[0], n[0], k[0]
    x_row, x_step = (1, lda[0]) if of_a[0] == TURNED else (lda[0], 1)
    if before[0] == 0:
        for i in range(rows):
            clear(advance(c, i * ldc[0]), columns)
    collide = x_row == 1 and x_step % 512 == 0  # a column of A falls into few sets of the first cache
    vectors = min(depth, SLICE) * ((min(columns, ACROSS) + count - 1) // count)
    room = np.empty((vectors + ROWS * VECTORS + SLICE * DOWN // count + 1) * VECTOR_BYTES, np.uint8)
    packed = address((room.ctypes.data + VECTOR_BYTES - 1) // VECTOR_BYTES * VECTOR_BYTES, before[0])
    edge = advance(packed, vectors * count)
    beside = advance(edge, ROWS * VECTORS * count)
    for first in range(0, depth, SLICE):
        length = min(SLICE, depth - first)
        if x_row == 1:
            for q in range(first, first + length):
                for i in range(0, rows, count):
                    prefetch_second(a, q * x_step + i)
        for begin in range(0, columns, ACROSS):
            width, turned = min(ACROSS, columns - begin), of_b[0] == TURNED
            source = advance(b, begin * ldb[0] + first if turned else first * ldb[0] + begin)
            _pack_slice(source, ldb[0], turned, length, width, packed)
            for low in range(0, rows, DOWN):
                some, x, step = min(DOWN, rows - low), advance(a, low * x_row + first * x_step), x_step
                if collide:
                    for q in range(length):
                        for i in range(0, some, count):
                            store(beside, q * DOWN + i, load_n(x, q * step + i, some - i))
                    x, step = beside, DOWN
                target = advance(c, low * ldc[0] + begin)
                _multiply_slice(x, x_row, step, some, length, packed, width, target, ldc[0], edge)
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _pack_slice(b, apart, turned, depth, width, out):
    """Write `width` columns of `depth` numbers in panels, the last vector filled up with zeros."""
    count = lanes(out)
    for r in range(1 if turned else depth):  # rows are read in the order of memory
        at = 0
        while at < width:
            panel = panel_of((width - at + count - 1) // count) * count
            to, some = advance(out, at * depth), min(panel, width - at)
            if turned:
                if some < panel:
                    clear(to, panel * depth)
                turn_rows(advance(b, at * apart), apart, depth, some, to, panel)
            else:
                for j in range(0, panel, count):
                    prefetch_second(b, (r + _AHEAD) * apart + at + j)
                    store(to, r * panel + j, load_n(b, r * apart + at + j, some - j))
            at += panel


@numba.njit(**INNER_JIT)
def _multiply_slice(x, x_row, x_step, rows, depth, packed, width, out, apart, edge):
    """Add the products of some rows with a packed slice to rows of `out`; `edge`: room for a tile."""
    count, at = lanes(out), 0
    vectors = (width + count - 1) // count
    while at < vectors:
        panel = panel_of(vectors - at)
        end = width - at * count
        inside, w = panel * count <= end, advance(packed, at * count * depth)
        for i in range(0, rows, ROWS):
            some, place = min(ROWS, rows - i), advance(out, i * apart + at * count)
            target, step = (place, apart) if inside else (edge, panel * count)
            if not inside:
                clear(edge, ROWS * panel * count)
            _add_any(some, panel, advance(x, i * x_row), x_row, x_step, w, panel * count, 0, depth, target, step)
            if not inside:
                for r in range(some):
                    for j in range(0, panel * count, count):
                        total = load_n(place, r * apart + j, end - j) + load(edge, r * step + j)
                        store_up_to(place, r * apart + j, total, end - j)
        at += panel
