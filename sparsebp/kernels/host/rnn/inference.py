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

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.core.threads import count as thread_count
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    copy,
    device,
    keep_alive,
    lanes,
    load,
    load_n,
    number,
    pointer,
    store,
    store_up_to,
)
from sparsebp.kernels.host.engine.threads import ALONE, end_part, in_parts, next_part, team, turns_of
from sparsebp.kernels.host.engine.tiles import multiply_panels, multiply_panels_by_pair, multiply_panels_by_row
from sparsebp.kernels.host.rnn import equations
from sparsebp.kernels.host.rnn.equations import (
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
from sparsebp.kernels.host.rnn.forward import (
    WORTH_THREADS,
    pack_panels,
    padded_width,
    parts_of,
    room_for_weights,
    row_of_columns,
    size_of_weights,
    weights_of,
)

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
