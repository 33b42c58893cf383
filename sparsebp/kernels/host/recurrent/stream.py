"""One step of stacked recurrent layers, for sequences that come a step at a time.

The call is what costs: a step of 20 units takes a fraction of a microsecond, and every array that Numba takes from
Python some tenths of one. So all but x is in a table of addresses. The weights are used where they lie, row by row:
what is written into them counts from the next step on.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import types

from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    address,
    advance,
    device,
    fma,
    intrinsic,
    lanes,
    load,
    load_n,
    pointer,
    store_n,
    zeros,
)
from sparsebp.kernels.host.recurrent import cells

KINDS = ("tanh", "relu", "gru", "lstm")
KIND, LAYERS, BATCH, HIDDEN, STATE, CELLS, ROOM, WEIGHTS = range(8)
"""Places in a stream's table: a number of `KINDS`; sizes; addresses of h (L, B, H), of an LSTM's c, and of room for
`room_of` numbers. From WEIGHTS on, for each layer the addresses of its two weights and two biases."""
TABLE_OF_LAYER = 4


def room_of(kind: str, batch: int, hidden: int) -> int:
    """Return how many numbers of scratch a step needs: what the input and the state bring to every gate."""
    return batch * 2 * {"gru": 3, "lstm": 4}.get(kind, 1) * hidden


@intrinsic
def _put_sum(typingctx: Any, ptr: Any, offset: Any, value: Any) -> Any:
    """Store the sum of a vector's lanes, added in pairs, as one number."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        total, left = args[2], value.lanes
        while left > 1:
            left //= 2
            kind, none = ir.VectorType(ir.IntType(32), left), ir.Constant(total.type, ir.Undefined)
            low, high = ir.Constant(kind, list(range(left))), ir.Constant(kind, list(range(left, 2 * left)))
            halves = builder.shuffle_vector(total, none, low), builder.shuffle_vector(total, none, high)
            total = builder.fadd(*halves)
        number = builder.extract_element(total, ir.IntType(32)(0))
        at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
        builder.store(number, at, align=value.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(ptr, offset, value), codegen


@device
def _products(w: Any, x: Any, depth: int, rows: int, out: Any) -> None:
    """``out[r] = w[r] · x`` for rows of `depth` numbers; four at a time, the last one again where there are fewer."""
    count = lanes(x)
    whole = depth - depth % count
    for r in range(0, rows, 4):
        r1, r2, r3 = min(r + 1, rows - 1), min(r + 2, rows - 1), min(r + 3, rows - 1)
        w0, w1, w2, w3 = advance(w, r * depth), advance(w, r1 * depth), advance(w, r2 * depth), advance(w, r3 * depth)
        s0, s1, s2, s3 = zeros(x), zeros(x), zeros(x), zeros(x)
        for k in range(0, whole, count):
            v = load(x, k)
            s0, s1 = fma(v, load(w0, k), s0), fma(v, load(w1, k), s1)
            s2, s3 = fma(v, load(w2, k), s2), fma(v, load(w3, k), s3)
        if whole < depth:
            n = depth - whole
            v = load_n(x, whole, n)
            s0, s1 = fma(v, load_n(w0, whole, n), s0), fma(v, load_n(w1, whole, n), s1)
            s2, s3 = fma(v, load_n(w2, whole, n), s2), fma(v, load_n(w3, whole, n), s3)
        _put_sum(out, r, s0)
        _put_sum(out, r1, s1)
        _put_sum(out, r2, s2)
        _put_sum(out, r3, s3)


@device
def _sum(a: Any, b: Any, b_ih: Any, b_hh: Any, at: int, n: int) -> Any:
    """Return what a gate's parts add up to."""
    return (load_n(a, at, n) + load_n(b_ih, at, n)) + (load_n(b, at, n) + load_n(b_hh, at, n))


@device
def _apply(kind: int, a: Any, b: Any, b_ih: Any, b_hh: Any, hidden: int, h: Any, c: Any) -> None:
    """Replace a sample's state by the next one; a and b are what input and state bring."""
    for j in range(0, hidden, lanes(h)):
        n = hidden - j
        if kind == 2:
            at = 2 * hidden + j
            of_reset, of_update = _sum(a, b, b_ih, b_hh, j, n), _sum(a, b, b_ih, b_hh, hidden + j, n)
            of_new, inner = load_n(a, at, n) + load_n(b_ih, at, n), load_n(b, at, n) + load_n(b_hh, at, n)
            v, _, _, _ = cells.gru(of_new, of_reset, of_update, inner, load_n(h, j, n))
            store_n(h, j, v, n)
        elif kind == 3:
            of_enter, of_keep = _sum(a, b, b_ih, b_hh, j, n), _sum(a, b, b_ih, b_hh, hidden + j, n)
            of_new, of_show = _sum(a, b, b_ih, b_hh, 2 * hidden + j, n), _sum(a, b, b_ih, b_hh, 3 * hidden + j, n)
            v, value, _, _, _, _ = cells.lstm(of_enter, of_keep, of_new, of_show, load_n(c, j, n))
            store_n(c, j, value, n)
            store_n(h, j, v, n)
        else:
            store_n(h, j, cells.rnn(kind == 1, zeros(h), _sum(a, b, b_ih, b_hh, j, n)), n)


@numba.njit(**INNER_JIT)
def _layer(x: Any, features: int, layer: int, table: Any, like: Any) -> None:
    kind, batch, hidden = table[KIND], table[BATCH], table[HIDDEN]
    gates = 3 if kind == 2 else (4 if kind == 3 else 1)
    rows, own = gates * hidden, WEIGHTS + layer * TABLE_OF_LAYER
    w_ih, w_hh = address(table[own], like), address(table[own + 1], like)
    b_ih, b_hh = address(table[own + 2], like), address(table[own + 3], like)
    h, c = address(table[STATE], like), address(table[CELLS], like)
    h, c = advance(h, layer * batch * hidden), advance(c, layer * batch * hidden)
    room = address(table[ROOM], like)
    for s in range(batch):  # before any state changes: x may be one
        out = advance(room, s * 2 * rows)
        _products(w_ih, advance(x, s * features), features, rows, out)
        _products(w_hh, advance(h, s * hidden), hidden, rows, advance(out, rows))
    for s in range(batch):
        a, at = advance(room, s * 2 * rows), s * hidden
        _apply(kind, a, advance(a, rows), b_ih, b_hh, hidden, advance(h, at), advance(c, at))


@numba.njit(**JIT)
def step_of_stream(x: Any, table: Any) -> None:
    """Take all layers one step on: x (I,) or (B, I), C-contiguous, of the dtype of all that the table points to."""
    like = x.dtype.type(0)
    batch, hidden = table[BATCH], table[HIDDEN]
    _layer(pointer(x), x.size // batch, 0, table, like)
    below = address(table[STATE], like)
    for layer in range(1, table[LAYERS]):
        _layer(advance(below, (layer - 1) * batch * hidden), hidden, layer, table, like)
