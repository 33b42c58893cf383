"""Recurrent layers without a backward: only states are written.

A step adds the products of the input's and of the state's weights to the biases, and applies the cell. The weights lie
in panels of three vectors' columns, row after row, so each panel streams past once a step and serves all of a part's
samples from the first cache. The input is projected in the same pass, for few samples some steps ahead: no array
of its size is written. Where threads outnumber the blocks of four samples, parts are pairs of samples or single ones;
if the state is large, they share its units instead.

Each number is one chain of multiply-adds for the input and one for the state, whichever rows are computed together. An
LSTM's c holds one step, which the next one overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from sparsebp.core.check import Array
from sparsebp.core.threads import count as thread_count
from sparsebp.kernels.host import equations
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    address,
    advance,
    aligned_pointer,
    copy,
    device,
    fma,
    intrinsic,
    keep_alive,
    lanes,
    load,
    load_n,
    number,
    pointer,
    store,
    store_n,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.threads import ALONE, end_part, in_parts, next_part, team, turns_of
from sparsebp.kernels.host.equations import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    SAMPLES,
    columns_of,
    item_of,
    of_cell,
    padded,
    part_at,
    pointers_of,
    rnn_cell,
    states_of,
)
from sparsebp.kernels.host.forward import (
    WORTH_THREADS,
    pack_panels,
    padded_width,
    parts_of,
    room_for_weights,
    row_of_columns,
    size_of_weights,
    weights_of,
)
from sparsebp.kernels.host.tiles import multiply_panels, multiply_panels_by_pair, multiply_panels_by_row

# Compiled functions have no annotations: their arguments are arrays, pointers and numbers.
# mypy: disable-error-code="no-untyped-def"

ROWS_AHEAD = 16
"""Rows of the input that are projected together, of several steps where there are few samples."""


@device
def _gru(extra, z, apart, state, width, j, hidden, at, kept):
    inner = load(z, part_at(3, 3, apart, item_of(z)) + j)
    v, _, _, _ = equations.gru(load(z, j), load(z, apart + j), load(z, 2 * apart + j), inner, load(state, j))
    store(state, j, v)
    store_up_to(kept[0], at + j, v, hidden - j)


@device
def _lstm(extra, z, apart, state, width, j, hidden, at, kept):
    seen, value, _, _, _, _ = equations.lstm(
        load(z, j), load(z, apart + j), load(z, 2 * apart + j), load(z, 3 * apart + j), load(state, width + j)
    )
    store(state, j, seen)
    store(state, width + j, value)
    store_up_to(kept[0], at + j, seen, hidden - j)
    store_up_to(advance(kept[1], (at - extra[2]) % extra[1]), j, value, hidden - j)


@device
def _grain(batch, parts):
    """Return the group size, four, two or one sample, with at least as many groups as parts."""
    grain = SAMPLES
    while grain > 1 and (batch + grain - 1) // grain < parts:
        grain //= 2
    return grain


@device
def _plan(rows, batch):
    """Return how many steps of the input are projected together, and the rows of one step and of all of them.

    A step's rows are those of its samples; the product of four rows writes to the fourth, too.
    """
    padded_rows = (rows + SAMPLES - 1) // SAMPLES * SAMPLES
    each = rows if rows <= 2 else padded_rows
    if rows < SAMPLES:
        ahead = ROWS_AHEAD // SAMPLES // rows * SAMPLES
    elif rows == batch and rows % SAMPLES == 0:  # rows of x are as far apart in time as in the batch
        ahead = max(1, ROWS_AHEAD // rows)
    else:
        ahead = 1
    return ahead, each, max(padded_rows, ahead * each)


@device
def _begin(first, rows, batch, low, hidden, whole, states, places, state, room):
    """Copy the state before the first step of some samples, four or a multiple, and some units; zero beyond them."""
    width = room // states
    for s in range((rows + SAMPLES - 1) // SAMPLES * SAMPLES):
        for i in range(states):
            at = min(first + s, batch - 1) * whole + low
            for j in range(0, width, lanes(state)):
                store(state, s * room + i * width + j, load_n(places[states + i], at + j, hidden - j))


@device
def _project(here, batch, features, rows, now, ahead, of_input, row, bias, before, each, stride):
    """Set the rows of pre-activations of `now` steps to the biases and the input's products."""
    for r in range(max((rows + SAMPLES - 1) // SAMPLES * SAMPLES, ahead * each)):
        copy(advance(before, r * stride), bias, stride)
    if rows < SAMPLES:  # each sample's steps by themselves
        for s in range(rows):
            own, into = advance(here, s * features), advance(before, s * stride)
            multiply_panels(own, batch * features, now, features, of_input, row, into, each * stride)
    else:
        multiply_panels(here, features, now * rows, features, of_input, row, before, stride)


@device
def _multiply_state(t, state, room, rows, hidden, weights, row, z, stride):
    if rows == 1:
        multiply_panels_by_row(state, hidden, weights, row, z, t % 2 != 0)
    elif rows == 2:
        multiply_panels_by_pair(state, room, hidden, weights, row, z, stride)
    else:
        multiply_panels(state, room, rows, hidden, weights, row, z, stride)


@numba.njit(**INNER_JIT)
def _infer_part(part, parts, cell, shape, x, w, origin, places):
    """Run a part's samples through time; w from `pack_panels`; `places`: h, an LSTM's c, and the state before.

    h begins at row `origin`.
    """
    apply, gates, columns = of_cell(cell, rnn_cell, _gru, _lstm), len(cell), columns_of(cell)
    steps, batch, hidden = shape
    states, features, extra, item = states_of(cell), x.shape[2], (cell[0], batch * hidden, origin * hidden), w.itemsize
    grain = _grain(batch, parts)
    units = (batch + grain - 1) // grain
    first = part * units // parts * grain
    rows = min((part + 1) * units // parts * grain, batch) - first
    width, padded_rows = padded(hidden, item), (rows + SAMPLES - 1) // SAMPLES * SAMPLES
    row, stride, room = padded(gates * hidden, item), row_of_columns(gates, columns, hidden, item), states * width
    ahead, each, room_ahead = _plan(rows, batch)
    scratch = np.empty(room_ahead * stride + padded_rows * room + VECTOR_BYTES, w.dtype)
    before = aligned_pointer(scratch)
    state, source, of_input = advance(before, room_ahead * stride), pointer(x), pointer(w)
    weights = advance(of_input, features * row)
    bias, into = advance(weights, hidden * row), part_at(columns - gates, gates, hidden, item)
    _begin(first, rows, batch, 0, hidden, hidden, states, places, state, room)
    for t in range(steps):
        if t % ahead == 0:
            here, now = advance(source, (t * batch + first) * features), min(ahead, steps - t)
            _project(here, batch, features, rows, now, ahead, of_input, row, bias, before, each, stride)
        z = advance(before, t % ahead * each * stride)
        _multiply_state(t, state, room, rows, hidden, weights, row, advance(z, into), stride)
        for s in range(rows):
            place = (origin + t * batch + first + s) * hidden
            for j in range(0, width, lanes(state)):
                apply(extra, advance(z, s * stride), hidden, advance(state, s * room), width, j, hidden, place, places)
    keep_alive(scratch)


@numba.njit(**JIT)
def _infer(team, parts, cell, x, w_ih, b_ih, b_hh, w_hh, *arrays):
    features, hidden, item = w_ih.shape[1], w_hh.shape[1], w_hh.itemsize
    w = room_for_weights(size_of_weights(cell, features, hidden, hidden, item), w_hh)
    pack_panels(cell, w_ih, b_ih, b_hh, w_hh, 0, hidden, w)
    in_parts(_infer_part, team, parts, (parts, cell, arrays[0].shape, x, w, 0, pointers_of(arrays)))


@numba.njit(**JIT)
def _infer_segments(team, cuts, cell, x, w_ih, b_ih, b_hh, w_hh, *arrays):
    """Run all segments; `arrays`: h (N, H), an LSTM's c (B, H), and the states before, where the last ones come to."""
    features, hidden, item = w_ih.shape[1], w_hh.shape[1], w_hh.itemsize
    w = room_for_weights(size_of_weights(cell, features, hidden, hidden, item), w_hh)
    pack_panels(cell, w_ih, b_ih, b_hh, w_hh, 0, hidden, w)
    places, states = pointers_of(arrays), states_of(cell)
    for segment in range(len(cuts)):
        first, steps, batch, parts = cuts[segment, 0], cuts[segment, 1], cuts[segment, 2], cuts[segment, 3]
        shape, rows = (steps, batch, hidden), x[first : first + steps * batch].reshape((steps, batch, features))
        in_parts(_infer_part, team if parts > 1 else ALONE, parts, (parts, cell, shape, rows, w, first, places))
        copy(places[states], advance(places[0], (first + (steps - 1) * batch) * hidden), batch * hidden)


# Few samples of a large state: threads share the units of every step, each with its part of the weights in its cache.

UNITS_WORTH = 18_000
"""Multiply-adds of a step that a thread should at least have."""


@numba.njit(**INNER_JIT)
def _infer_units(me, threads, words, cell, shape, x, weights_in, scratch, size, shared, places):
    """Run all samples, at most four, through time; a part of every step are some of the units.

    `scratch`: zeros, `size` numbers for each part: its weights, pre-activations and state. `shared`: the state h of
    all units before a step and after it.
    """
    apply, gates, columns = of_cell(cell, rnn_cell, _gru, _lstm), len(cell), columns_of(cell)
    w_ih, b_ih, b_hh, w_hh = weights_in
    steps, rows, whole = shape
    states, features, extra, item = states_of(cell), x.shape[2], (cell[0], rows * whole, 0), w_hh.itemsize
    count, full = VECTOR_BYTES // item, padded(whole, item)
    ahead, each, room_ahead = _plan(rows, rows)
    now_at = aligned_pointer(shared)
    for t in range(steps):
        part = next_part(words, me, threads, t)
        while part >= 0:
            low = part * (full // count) // threads * count
            hidden = min((part + 1) * (full // count) // threads * count, whole) - low
            width, row = padded(hidden, item), padded(gates * hidden, item)
            stride, room = row_of_columns(gates, columns, hidden, item), states * width
            own_size = size_of_weights(cell, features, whole, hidden, item)
            of_input = aligned_pointer(scratch[part * size :])
            before = advance(of_input, own_size)
            state, weights = advance(before, room_ahead * stride), advance(of_input, features * row)
            bias, into = advance(weights, whole * row), part_at(columns - gates, gates, hidden, item)
            if t == 0:
                skip = (number(of_input) - number(pointer(scratch))) // item
                pack_panels(cell, w_ih, b_ih, b_hh, w_hh, low, hidden, scratch[skip : skip + own_size])
                _begin(0, rows, rows, low, hidden, whole, states, places, state, room)
            if t % ahead == 0:
                here, now = advance(pointer(x), t * rows * features), min(ahead, steps - t)
                _project(here, rows, features, rows, now, ahead, of_input, row, bias, before, each, stride)
            z, h = advance(before, t % ahead * each * stride), advance(now_at, t % 2 * SAMPLES * full)
            _multiply_state(t, h, full, rows, whole, weights, row, advance(z, into), stride)
            following = advance(now_at, (t + 1) % 2 * SAMPLES * full + low)
            for s in range(rows):
                place, own = (t * rows + s) * whole + low, advance(state, s * room)
                for j in range(0, width, count):
                    apply(extra, advance(z, s * stride), hidden, own, width, j, hidden, place, places)
                    store(following, s * full + j, load(own, j))
            end_part(words, part, t)
            part = next_part(words, me, threads, t)
    keep_alive(scratch)
    keep_alive(shared)


@numba.njit(**JIT)
def _infer_together(team, parts, cell, x, w_ih, b_ih, b_hh, w_hh, *arrays):
    (_, batch, whole), item, states = arrays[0].shape, w_hh.itemsize, states_of(cell)
    (threads, words, first), places = turns_of(team, parts), pointers_of(arrays)
    count, full = VECTOR_BYTES // item, padded(whole, item)
    most = (full // count + threads - 1) // threads * count
    _, _, room_ahead = _plan(batch, batch)
    size = size_of_weights(cell, w_ih.shape[1], whole, most, item) + SAMPLES * states * most + count
    size += room_ahead * row_of_columns(len(cell), columns_of(cell), most, item)
    scratch, shared = np.zeros(threads * size, w_hh.dtype), np.zeros(2 * SAMPLES * full + count, w_hh.dtype)
    _begin(0, batch, batch, 0, whole, whole, 1, (places[0], places[states]), aligned_pointer(shared), full)
    given = w_ih, b_ih, b_hh, w_hh
    in_parts(
        _infer_units, team, threads,
        (threads, first, cell, arrays[0].shape, x, given, scratch, size, shared, places),
    )  # fmt: skip
    keep_alive(words)
    keep_alive(shared)


_CELLS = {"tanh": RNN_TANH, "relu": RNN_RELU, "gru": GRU, "lstm": LSTM}


def infer(
    kind: str, x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None, b_hh: Array | None, initial: tuple[Array, ...],
    h: Array, c: Array | None = None,
) -> None:  # fmt: skip
    """Run a cell over x (T, B, I), C-contiguous as all arrays, and of one dtype; parameters as torch.nn has them.

    Parameters
    ----------
    kind
        ``"tanh"``, ``"relu"``, ``"gru"`` or ``"lstm"``.
    initial
        The state before the first step, (B, H) each.
    h
        States (T, B, H), written.
    c
        An LSTM's last c (B, H), written.
    """
    steps, batch, _ = h.shape
    if not batch or not steps:
        return
    written = (h,) if c is None else (h, c)
    each, vectors = batch * (w_ih.size + w_hh.size), padded_width(h.shape[2], h.dtype) * h.itemsize // VECTOR_BYTES
    run, helped = _infer, parts_of(batch, 2 * steps * each)
    # two pairs of samples keep two threads as busy, without meeting at every step, unless there are four gates
    if (batch < SAMPLES or (batch == SAMPLES and kind == "lstm")) and 2 * steps * each >= WORTH_THREADS:
        parts = min(each // UNITS_WORTH, thread_count(), vectors)
        if parts > 1:
            run, helped = _infer_together, (team(parts), parts)
    run(*helped, _CELLS[kind], x, *weights_of(w_hh, w_ih, b_ih, b_hh), *written, *initial)


def infer_segments(
    kind: str, cuts: Sequence[tuple[int, int, int]], x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None,
    b_hh: Array | None, last: tuple[Array, ...], h: Array,
) -> None:  # fmt: skip
    """Run a cell as `infer` over the rows x (N, I) of sequences of several lengths, in segments as in `cells`.

    h (N, H) is written, and `last` (B, H), the states before each sample's first step, replaced by those after its
    last one.
    """
    most, each = thread_count(), 2 * (w_ih.size + w_hh.size)
    table = np.array([
        (*cut, min(cut[2], most) if cut[1] * cut[2] * each >= WORTH_THREADS else 1) for cut in cuts
    ], np.int64)  # fmt: skip
    helpers = team(int(table[:, 3].max()))
    _infer_segments(helpers, table, _CELLS[kind], x, *weights_of(w_hh, w_ih, b_ih, b_hh), h, *last[1:], *last)


# One step of stacked recurrent layers, for sequences that come a step at a time.
#
# The call dominates: a step of 20 units takes a fraction of a microsecond, and every array that Numba takes from
# Python some tenths of one. So everything but x is in a table of addresses. The weights are read in place, row by row:
# changes to them take effect at the next step.

KINDS = ("tanh", "relu", "gru", "lstm")
KIND, LAYERS, BATCH, HIDDEN, STATE, CELLS, ROOM, WEIGHTS = range(8)
"""Places in a stream's table: a number of `KINDS`; sizes; addresses of h (L, B, H), of an LSTM's c, and of
`room_of` numbers of scratch. From WEIGHTS on, for each layer the addresses of its two weights and two biases."""
TABLE_OF_LAYER = 4


def room_of(kind: str, batch: int, hidden: int) -> int:
    """Return the scratch of a step, in numbers: the products of input and state for every gate."""
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
def _apply(kind, a, b, b_ih, b_hh, hidden, h, c):
    """Replace a sample's state by the next one; a and b are the products of input and state."""
    for j in range(0, hidden, lanes(h)):
        n = hidden - j
        if kind == 2:
            at = 2 * hidden + j
            of_reset, of_update = _sum(a, b, b_ih, b_hh, j, n), _sum(a, b, b_ih, b_hh, hidden + j, n)
            of_new, inner = load_n(a, at, n) + load_n(b_ih, at, n), load_n(b, at, n) + load_n(b_hh, at, n)
            v, _, _, _ = equations.gru(of_new, of_reset, of_update, inner, load_n(h, j, n))
            store_n(h, j, v, n)
        elif kind == 3:
            of_enter, of_keep = _sum(a, b, b_ih, b_hh, j, n), _sum(a, b, b_ih, b_hh, hidden + j, n)
            of_new, of_show = _sum(a, b, b_ih, b_hh, 2 * hidden + j, n), _sum(a, b, b_ih, b_hh, 3 * hidden + j, n)
            v, value, _, _, _, _ = equations.lstm(of_enter, of_keep, of_new, of_show, load_n(c, j, n))
            store_n(c, j, value, n)
            store_n(h, j, v, n)
        else:
            store_n(h, j, equations.rnn(kind == 1, zeros(h), _sum(a, b, b_ih, b_hh, j, n)), n)


@numba.njit(**INNER_JIT)
def _layer(x, features, layer, table, like):
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
def step_of_stream(x, table):
    """Take all layers one step on: x (I,) or (B, I), C-contiguous, of the dtype of all that the table points to."""
    like = x.dtype.type(0)
    batch, hidden = table[BATCH], table[HIDDEN]
    _layer(pointer(x), x.size // batch, 0, table, like)
    below = address(table[STATE], like)
    for layer in range(1, table[LAYERS]):
        _layer(advance(below, (layer - 1) * batch * hidden), hidden, layer, table, like)
