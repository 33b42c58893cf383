"""One step, or a few, of a recurrent layer, forward and back: its weights are read where they lie.

The other kernels pack weights for many steps. A call of one step takes microseconds, and the arrays that Numba takes
from Python some tenths of one each: so arrays are given by their addresses.

Few samples have a row each, and a number is a product along a row of the weights. More samples lie in the lanes of
vectors, each of which meets a number of the weights. On the way back rows are those of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    address,
    advance,
    aligned_pointer,
    broadcast,
    clear,
    copy,
    device,
    fma,
    intrinsic,
    keep_alive,
    lanes,
    load,
    load_n,
    load_up_to,
    number,
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.tiles import multiply_back, multiply_outer, multiply_unpacked, turn_rows
from sparsebp.kernels.host.rnn import equations
from sparsebp.kernels.host.rnn.equations import (
    GRU,
    LSTM,
    gru_step_back,
    item_of,
    lstm_step_back,
    padded,
    part_at,
    rnn_step_back,
)

# Compiled functions have no annotations: their arguments are arrays, pointers and numbers.
# mypy: disable-error-code="no-untyped-def"

ROW_BYTES = VECTOR_BYTES // 4
"""A unit of all samples, up to which each sample has its row."""
KINDS = ("tanh", "relu", "gru", "lstm")
GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}
GRU_KIND, LSTM_KIND = 2, 3


def table_of(kind: str, steps: int, batch: int, features: int, hidden: int, weights: Sequence[int]) -> Array:
    """Return the table that `forward` and `backward` take; `weights`: the addresses of two weights and two biases."""
    return np.array((KINDS.index(kind), steps, batch, features, hidden, *weights), np.int64)


def saved_of(kind: str, steps: int, batch: int, hidden: int) -> int:
    """Return how many numbers a forward keeps for the backward.

    They are h (T + 1, B, H), from the initial one on; of an LSTM c likewise; and its gates, or a GRU's (T, B, 4 H).
    """
    states, gates = {"gru": (1, 4), "lstm": (2, 4)}.get(kind, (1, 0))
    return ((steps + 1) * states + steps * gates) * batch * hidden


@device
def _given(ptr):
    """Whether there is an array: the address of none is 0."""
    return number(ptr) != 0


@device
def _gates_of(kind):
    return 3 if kind == 2 else (4 if kind == 3 else 1)


# A row for each sample.


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
def _products(w, x, depth, rows, out):
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
def _sum(a, b, b_ih, b_hh, at, n):
    """Return the sum of a gate's parts."""
    return (load_n(a, at, n) + load_n(b_ih, at, n)) + (load_n(b, at, n) + load_n(b_hh, at, n))


@device
def _apply(kind, a, b, b_ih, b_hh, hidden, h, c, h_n, c_n, gates):
    """Write a sample's next state, and its gates if asked to; a and b are the products of input and state."""
    for j in range(0, hidden, lanes(h)):
        n = hidden - j
        if kind == 2:
            at = 2 * hidden + j
            a_r, a_z = _sum(a, b, b_ih, b_hh, j, n), _sum(a, b, b_ih, b_hh, hidden + j, n)
            a_n, inner = load_n(a, at, n) + load_n(b_ih, at, n), load_n(b, at, n) + load_n(b_hh, at, n)
            v, reset, update, new = equations.gru(a_n, a_r, a_z, inner, load_n(h, j, n))
            _keep(gates, hidden, j, reset, update, new, inner)
            store_up_to(h_n, j, v, n)
        elif kind == 3:
            a_i, a_f = _sum(a, b, b_ih, b_hh, j, n), _sum(a, b, b_ih, b_hh, hidden + j, n)
            a_g, a_o = _sum(a, b, b_ih, b_hh, 2 * hidden + j, n), _sum(a, b, b_ih, b_hh, 3 * hidden + j, n)
            v, value, i, f, g, o = equations.lstm(a_i, a_f, a_g, a_o, load_n(c, j, n))
            _keep(gates, hidden, j, i, f, g, o)
            store_up_to(c_n, j, value, n)
            store_up_to(h_n, j, v, n)
        else:
            store_up_to(h_n, j, equations.rnn(kind == 1, zeros(h), _sum(a, b, b_ih, b_hh, j, n)), n)


@device
def _keep(gates, hidden, j, first, second, third, fourth):
    if _given(gates):
        n = hidden - j
        store_up_to(gates, j, first, n)
        store_up_to(gates, hidden + j, second, n)
        store_up_to(gates, 2 * hidden + j, third, n)
        store_up_to(gates, 3 * hidden + j, fourth, n)


@numba.njit(**INNER_JIT)
def _step_of_rows(kind, batch, features, hidden, x, h, c, w_ih, w_hh, b_ih, b_hh, h_n, c_n, gates, room):
    """Take one step; h_n and c_n may be h and c. `room`: 2 · gates · batch · hidden numbers."""
    rows = _gates_of(kind) * hidden
    for s in range(batch):  # before any state changes
        out = advance(room, s * 2 * rows)
        _products(w_ih, advance(x, s * features), features, rows, out)
        _products(w_hh, advance(h, s * hidden), hidden, rows, advance(out, rows))
    for s in range(batch):
        a, at = advance(room, s * 2 * rows), s * hidden
        own = advance(gates, 4 * at) if _given(gates) else gates
        _apply(kind, a, advance(a, rows), b_ih, b_hh, hidden, advance(h, at), advance(c, at), advance(h_n, at),
               advance(c_n, at), own)  # fmt: skip


# A sample in each lane: rows of `width` numbers, a unit each.


@device
def _begin(kind, b_ih, b_hh, hidden, width, z):
    """Set the pre-activations to the biases; a GRU's n has two, the state's fourth."""
    rows = _gates_of(kind) * hidden
    for r in range(rows):
        bias, other = broadcast(b_ih, r), broadcast(b_hh, r)
        apart = kind == 2 and r >= 2 * hidden
        total = bias if apart else bias + other
        for j in range(0, width, lanes(z)):
            store(z, r * width + j, total)
            if apart:
                store(z, (r + hidden) * width + j, other)


@device
def _apply_lanes(kind, z, apart, h, c):
    """Replace the state by the next one, and the pre-activations by the gates."""
    for j in range(0, apart, lanes(z)):
        if kind == 2:
            inner = load(z, j + 3 * apart)
            v, reset, update, new = equations.gru(
                load(z, j + 2 * apart), load(z, j), load(z, j + apart), inner, load(h, j)
            )
            store(z, j, reset)
            store(z, j + apart, update)
            store(z, j + 2 * apart, new)
            store(h, j, v)
        elif kind == 3:
            v, value, i, f, g, o = equations.lstm(
                load(z, j), load(z, j + apart), load(z, j + 2 * apart), load(z, j + 3 * apart), load(c, j)
            )
            store(z, j, i)
            store(z, j + apart, f)
            store(z, j + 2 * apart, g)
            store(z, j + 3 * apart, o)
            store(h, j, v)
            store(c, j, value)
        else:
            store(h, j, equations.rnn(kind == 1, zeros(z), load(z, j)))


@numba.njit(**INNER_JIT)
def _step_of_lanes(kind, batch, features, hidden, x, h, c, w_ih, w_hh, b_ih, b_hh, h_n, c_n, gates, room):
    """Take one step; h_n and c_n may be h and c. `room`: ``(features + 6 · hidden) · width`` numbers."""
    width = padded(batch, item_of(x))
    in_lanes = advance(room, features * width)
    cells = advance(in_lanes, hidden * width)
    z = advance(cells, hidden * width)
    clear(room, (features + 2 * hidden) * width)  # the lanes beyond the last sample
    turn_rows(x, features, features, batch, room, width)
    turn_rows(h, hidden, hidden, batch, in_lanes, width)
    if kind == 3:
        turn_rows(c, hidden, hidden, batch, cells, width)
    _begin(kind, b_ih, b_hh, hidden, width, z)
    rows = _gates_of(kind) * hidden
    multiply_unpacked(w_ih, features, rows, room, width, z)
    if kind == 2:
        multiply_unpacked(w_hh, hidden, 2 * hidden, in_lanes, width, z)
        multiply_unpacked(advance(w_hh, 2 * hidden * hidden), hidden, hidden, in_lanes, width, advance(z, rows * width))
    else:
        multiply_unpacked(w_hh, hidden, rows, in_lanes, width, z)
    _apply_lanes(kind, z, hidden * width, in_lanes, cells)
    turn_rows(in_lanes, width, batch, hidden, h_n, hidden)
    if kind == 3:
        turn_rows(cells, width, batch, hidden, c_n, hidden)
    if _given(gates):
        turn_rows(z, width, batch, 4 * hidden, gates, 4 * hidden)


# Forward.


@numba.njit(**JIT)
def forward(zeros, table, x, h, c, y, h_n, c_n, saved):
    """Run one layer: `zeros` is any array of the dtype, `table` from `table_of`, all others are addresses.

    x (T, B, I), h and c (B, H), weights and biases as in torch.nn; written are y (T, B, H), h_n and c_n (B, H) and
    what `saved_of` says. y and saved may be 0 for none, and c and c_n without an LSTM. y may be x.
    """
    kind, steps, batch, features, hidden = table[0], table[1], table[2], table[3], table[4]
    like, size = zeros.dtype.type(0), batch * hidden
    w_ih, w_hh = address(table[5], like), address(table[6], like)
    b_ih, b_hh = address(table[7], like), address(table[8], like)
    item = item_of(address(x, like))
    by_rows = batch * item <= ROW_BYTES
    room = 2 * _gates_of(kind) * size if by_rows else (features + 6 * hidden) * padded(batch, item)
    scratch = np.empty(room * item + VECTOR_BYTES, np.uint8)
    place = address(number(aligned_pointer(scratch)), like)
    before, cells = address(h, like), address(c, like)
    last, last_c = address(h_n, like), address(c_n, like)
    of_h = address(saved, like)
    of_c = advance(of_h, (steps + 1) * size)
    of_gates = advance(of_h, (2 if kind == 3 else 1) * (steps + 1) * size)
    if saved != 0:
        copy(of_h, before, size)
        if kind == 3:
            copy(of_c, cells, size)
    for t in range(steps):
        source = advance(address(x, like), t * batch * features)
        gates = advance(of_gates, t * 4 * size) if saved != 0 and kind >= 2 else address(0, like)
        if by_rows:
            _step_of_rows(
                kind, batch, features, hidden, source, before, cells, w_ih, w_hh, b_ih, b_hh, last, last_c, gates, place
            )
        else:
            _step_of_lanes(
                kind, batch, features, hidden, source, before, cells, w_ih, w_hh, b_ih, b_hh, last, last_c, gates, place
            )
        if y != 0:
            copy(advance(address(y, like), t * size), last, size)
        if saved != 0:
            copy(advance(of_h, (t + 1) * size), last, size)
            if kind == 3:
                copy(advance(of_c, (t + 1) * size), last_c, size)
        before, cells = last, last_c
    keep_alive(scratch)


# Backward.


@device
def _sum_rows(d, samples, rows, out):
    for r in range(0, rows, lanes(d)):
        total = load_up_to(d, r, rows - r)
        for s in range(1, samples):
            total = total + load_up_to(d, s * rows + r, rows - r)
        store_up_to(out, r, total, rows - r)


@device
def _back(kind, of_h, of_c, gates, t, batch, hidden, s, j, g, row, second, width):
    """Write the gradients at the pre-activations; return the part at h before the step that does not pass w_hh."""
    at, size = (t * batch + s) * hidden, batch * hidden
    if kind == 2:
        kept = advance(of_h, size), gates
        return gru_step_back(GRU, kept, advance(of_h, at), at, hidden, j, g, row, second, width)
    if kind == 3:
        kept = advance(of_c, size), gates
        return lstm_step_back(LSTM, kept, advance(of_c, at), at, hidden, j, g, row, second, width)
    return rnn_step_back((kind,), (advance(of_h, size),), of_h, at, hidden, j, g, row, second, width)


@numba.njit(**JIT)
def backward(zeros, table, x, saved, gy, gh_n, gc_n, gx, gh, gc, gw_ih, gw_hh, gb_ih, gb_hh):
    """Propagate gradients at y, h_n and c_n, 0 for none, back through `forward`; write those that are not 0.

    Of the same shapes as the arrays themselves.
    """
    kind, steps, batch, features, hidden = table[0], table[1], table[2], table[3], table[4]
    like = zeros.dtype.type(0)
    size, rows, samples = batch * hidden, _gates_of(kind) * hidden, steps * batch
    item = item_of(address(x, like))
    width = padded(hidden, item)
    of_h = address(saved, like)
    of_c = advance(of_h, (steps + 1) * size)
    gates = advance(of_h, (2 if kind == 3 else 1) * (steps + 1) * size)
    room = (2 if kind == 2 else 1) * samples * rows + (2 * batch + 5) * width
    scratch = np.empty(room * item + VECTOR_BYTES, np.uint8)
    at_h = address(number(aligned_pointer(scratch)), like)  # gradients at h of every sample, and at c
    at_c = advance(at_h, batch * width)
    row = advance(at_c, batch * width)
    d = advance(row, 5 * width)
    d_h = advance(d, samples * rows) if kind == 2 else d  # behind a GRU's r, z and n stands that at W_hn h + b_hn
    clear(at_h, 2 * batch * width)
    for s in range(batch):
        if gh_n != 0:
            copy(advance(at_h, s * width), advance(address(gh_n, like), s * hidden), hidden)
        if gc_n != 0:
            copy(advance(at_c, s * width), advance(address(gc_n, like), s * hidden), hidden)
    for t in range(steps - 1, -1, -1):
        for s in range(batch):
            own = advance(at_h, s * width)
            for j in range(0, hidden, lanes(d)):
                g = load(own, j)
                if gy != 0:
                    g = g + load_up_to(address(gy, like), (t * batch + s) * hidden + j, hidden - j)
                direct = _back(kind, of_h, of_c, gates, t, batch, hidden, s, j, g, advance(row, j),
                               advance(at_c, s * width + j), width)  # fmt: skip
                store(own, j, direct)
            to = (t * batch + s) * rows
            if kind == 2:
                fourth = part_at(3, 3, width, item)
                copy(advance(d, to), advance(row, width), hidden)
                copy(advance(d, to + hidden), advance(row, 2 * width), hidden)
                copy(advance(d, to + 2 * hidden), row, hidden)
                copy(advance(d_h, to), advance(d, to), 2 * hidden)
                copy(advance(d_h, to + 2 * hidden), advance(row, fourth), hidden)
            else:
                for part in range(_gates_of(kind)):
                    copy(advance(d, to + part * hidden), advance(row, part * width), hidden)
        if t > 0 or gh != 0:
            multiply_back(advance(d_h, t * batch * rows), batch, rows, address(table[6], like), hidden, at_h, width)
    for s in range(batch):
        if gh != 0:
            copy(advance(address(gh, like), s * hidden), advance(at_h, s * width), hidden)
        if gc != 0:
            copy(advance(address(gc, like), s * hidden), advance(at_c, s * width), hidden)
    if gx != 0:
        clear(address(gx, like), samples * features)
        multiply_back(d, samples, rows, address(table[5], like), features, address(gx, like), features)
    if gw_ih != 0:
        multiply_outer(d, samples, rows, address(x, like), features, address(gw_ih, like))
    if gw_hh != 0:
        multiply_outer(d_h, samples, rows, of_h, hidden, address(gw_hh, like))
    if gb_ih != 0:
        _sum_rows(d, samples, rows, address(gb_ih, like))
    if gb_hh != 0:
        _sum_rows(d_h, samples, rows, address(gb_hh, like))
    keep_alive(scratch)


# Sequences that come a step at a time: one step of stacked layers, whose state is replaced.
#
# Everything but x is in a table of addresses. Changes to the weights take effect at the next step.

KIND, LAYERS, BATCH, HIDDEN, STATE, CELLS, ROOM, WEIGHTS = range(8)
"""Places in a stream's table: a number of `KINDS`; sizes; addresses of h (L, B, H), of an LSTM's c, and of
`room_of` numbers of scratch. From WEIGHTS on, for each layer the addresses of its two weights and two biases."""
TABLE_OF_LAYER = 4


def room_of(kind: str, batch: int, hidden: int) -> int:
    """Return the scratch of a step, in numbers: the products of input and state for every gate."""
    return batch * 2 * GATES[kind] * hidden


@numba.njit(**INNER_JIT)
def _step_of_layer(x, features, layer, table, like):
    kind, batch, hidden, own = table[KIND], table[BATCH], table[HIDDEN], WEIGHTS + layer * TABLE_OF_LAYER
    at = layer * batch * hidden
    h, c = advance(address(table[STATE], like), at), advance(address(table[CELLS], like), at)
    _step_of_rows(
        kind, batch, features, hidden, x, h, c, address(table[own], like), address(table[own + 1], like),
        address(table[own + 2], like), address(table[own + 3], like), h, c, address(0, like),
        address(table[ROOM], like),
    )  # fmt: skip


@numba.njit(**JIT)
def step_of_stream(x, table):
    """Take all layers one step on: x (I,) or (B, I), C-contiguous, of the dtype of all that the table points to."""
    like = x.dtype.type(0)
    batch, hidden = table[BATCH], table[HIDDEN]
    _step_of_layer(pointer(x), x.size // batch, 0, table, like)
    below = address(table[STATE], like)
    for layer in range(1, table[LAYERS]):
        _step_of_layer(advance(below, (layer - 1) * batch * hidden), hidden, layer, table, like)
