"""The forward of any recurrent cell on the host: projection of the input and recursion in one pass.

A step of a block of four samples is two products of four rows, with the input's weights and with the state's, and the
cell's functions of their sums. Only the arrays that the cell keeps are written. Time is the outer loop over all blocks
of a part, so memory is read in order. A single sample in the last block, or in the whole batch, is not computed four
times: its input is projected four steps at a time instead. As many samples as a vector has lanes go in these.

The pre-activations are a row of `columns` parts: the first `gates` get the input's products, the last `gates` the
state's, with gates in torch's order except for a GRU's input, see `gate_at`. Gates are adjacent, and only their row
is padded to whole vectors, see `part_at`: four gates of 20 units are five vectors of sixteen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    copy,
    device,
    keep_alive,
    lanes,
    load,
    load_n,
    pointer,
    prefetch_second,
    store,
)
from sparsebp.kernels.host.engine.threads import ALONE, in_parts, team
from sparsebp.kernels.host.engine.tiles import (
    multiply,
    multiply_lanes,
    multiply_row,
    panel_of,
    to_lanes,
    to_rows,
    turn_rows,
)
from sparsebp.kernels.host.rnn.equations import (
    SAMPLES,
    columns_of,
    gru_cell,
    item_of,
    lstm_cell,
    of_cell,
    padded,
    part_at,
    pointers_of,
    rnn_cell,
    states_of,
)

# Compiled functions have no annotations: their arguments are arrays, pointers and numbers.
# mypy: disable-error-code="no-untyped-def"

# Blocks of four samples, and the product with packed weights.
#
# Layout. The hidden units lie along the SIMD lanes; a row of H units is padded to `padded_width` in scratch, so inner
# loops have no tails, and rows of the caller's arrays are read and written with masked operations at their ends. Four
# samples are worked on together, so that each vector of weights that is loaded serves four multiply-adds. A block that
# runs over the end of the batch repeats its last sample: the same numbers are computed and written again, to the same
# place, by the same thread. Every sample's arithmetic is thus the same wherever it falls, and results do not depend on
# the number of threads.
#
# A sample in each lane. As many samples of a part as a vector has lanes lie along them, if there are no fewer units:
# nothing is padded. To the equations these samples are one, with the units of all. Every number is the same chain of
# operations, so the same bits. Callers' arrays have a row for each sample, so squares are transposed.

WORTH_THREADS = 1_000_000
"""Operations, some 50 µs of one thread, from which on a kernel is run on all threads. Results do not depend on it."""


# ---- in Python: launching, sizes, packing ------------------------------------------------------------------------


def launch(kernel: Any, parts: int, work: int, *args: Any) -> None:
    """Run the parts of a kernel; on one thread if its `work` (operations) is not worth waking the others."""
    kernel(team_of(parts, work), parts, *args)


def team_of(parts: int, work: int) -> int:
    """Return the address of the team; `ALONE` if the `work` of the parts is not worth waking it."""
    return team() if parts > 1 and work >= WORTH_THREADS else ALONE


def blocks_of(batch: int) -> int:
    """Return how many blocks of samples a batch has."""
    return -(-batch // SAMPLES)


@cache
def padded_width(hidden: int, dtype: Any) -> int:
    """Return `hidden` rounded up to whole vectors."""
    count = VECTOR_BYTES // np.dtype(dtype).itemsize
    return -(-hidden // count) * count


def parts_of(groups: int, work: int) -> tuple[int, int]:
    """Return the team for `work` operations on groups of samples, and the number of parts of whole groups.

    A part keeps all its samples in step, so there are no more of them than threads. No result depends on it.
    """
    parts = min(groups, threads.count()) if work >= WORTH_THREADS else 1
    return (team(parts), parts) if parts > 1 else (ALONE, 1)


def weights_of(
    w_hh: np.ndarray, w_ih: np.ndarray | None, b_ih: np.ndarray | None, b_hh: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return w_ih, b_ih, b_hh and w_hh, with empty arrays in place of None: one specialisation serves all."""
    flat, square, _ = empties(w_hh.dtype)
    return (square if w_ih is None else w_ih, flat if b_ih is None else b_ih, flat if b_hh is None else b_hh, w_hh)


@cache
def empties(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays of one, two and three axes without numbers, to be passed in place of None."""
    return np.empty(0, dtype), np.empty((0, 0), dtype), np.empty((0, 0, 0), dtype)


# ---- in Numba: weights ---------------------------------------------------------------------------------------------


@device
def gate_at(part, gates, columns):
    """Return which of torch's gates a part of the input's products is: a GRU's are n, r, z."""
    return part if gates == columns else (part + gates - 1) % gates


def numbers_of_row(gates: int, columns: int, hidden: int, itemsize: int) -> int:
    """Return the numbers of a row of columns, in whole vectors: a part's last vector ends in its own row.

    They are an odd number of vectors: rows that are a power of two apart fall into the same sets of a cache.
    """
    count = VECTOR_BYTES // itemsize
    before = (gates - 1) * hidden if columns == gates else gates * hidden
    return (-(-before // count) + -(-hidden // count) | 1) * count


row_of_columns = numba.njit(**INNER_JIT)(numbers_of_row)


@numba.njit(**INNER_JIT)
def pack(cell, w_ih, b_ih, b_hh, w_hh, b_hn):
    """Return the weights transposed: rows of the input's, of the state's, and of the biases.

    Rows are ``padded(gates · H)`` long, the row of biases `row_of_columns`.
    """
    gates, columns, features, item = len(cell), columns_of(cell), w_ih.shape[1], w_hh.itemsize
    hidden = w_hh.shape[1]
    row = padded(gates * hidden, item)
    out = room_for_weights(size_of_weights(cell, features, hidden, hidden, item), w_hh)
    _pack_rows(gates, columns, w_ih, w_hh, row, out)
    biases = out[(features + hidden) * row :]
    pack_biases(gates, columns, b_ih, b_hh, hidden, 0, hidden, biases)
    at = part_at(3, 3, hidden, item)
    for j in range(len(b_hn)):
        biases[at + j] = b_hn[j]
    return out


@numba.njit(**INNER_JIT)
def _pack_rows(gates, columns, w_ih, w_hh, row, out):
    """Write the transposed weights of the input, and of the state behind them."""
    hidden, features, item = w_hh.shape[1], w_ih.shape[1], w_hh.itemsize
    of_input, first = pointer(out), part_at(columns - gates, gates, hidden, item)
    for part in range(gates):
        of_state = part_at(columns - gates + part, gates, hidden, item) - first
        to = advance(of_input, features * row + of_state)
        turn_rows(advance(pointer(w_hh), part * hidden * hidden), hidden, hidden, hidden, to, row)
        if features > 0:
            of_gate = advance(pointer(w_ih), gate_at(part, gates, columns) * hidden * features)
            turn_rows(of_gate, features, features, hidden, advance(of_input, part * hidden), row)


@numba.njit(**INNER_JIT)
def rows_of(w):
    """Return w (K, H) with rows padded to whole vectors: (K, padded), for products ``x (K,) @ w``."""
    depth, hidden = w.shape
    width = padded(hidden, w.itemsize)
    out = room_for_weights(depth * width, w)[: depth * width].reshape((depth, width))
    for k in range(depth):
        for j in range(hidden):
            out[k, j] = w[k, j]
    return out


@numba.njit(**INNER_JIT)
def room_for_weights(numbers, like):
    """Return zeros for at least so many numbers, aligned to vectors, of the dtype of `like`."""
    room = np.zeros(numbers + VECTOR_BYTES, like.dtype)
    return room[(-room.ctypes.data) % VECTOR_BYTES // like.itemsize :]


@numba.njit(**INNER_JIT)
def size_of_weights(cell, features, whole, hidden, itemsize):
    """Return the numbers of the packed weights and biases of `hidden` of `whole` units."""
    gates, row = len(cell), padded(len(cell) * hidden, itemsize)
    return (features + whole) * row + row_of_columns(gates, columns_of(cell), hidden, itemsize)


@numba.njit(**INNER_JIT)
def pack_biases(gates, columns, b_ih, b_hh, whole, low, hidden, out):
    """Add both biases of some of the `whole` units, empty where there are none, to the zeros of their row."""
    if b_ih.size > 0:
        for part in range(gates):
            gate = gate_at(part, gates, columns)
            for j in range(hidden):
                out[part * hidden + j] = b_ih[gate * whole + low + j]
    if b_hh.size > 0:
        for part in range(gates):
            at = part_at(columns - gates + part, gates, hidden, out.itemsize)
            for j in range(hidden):
                out[at + j] += b_hh[part * whole + low + j]


# ---- in Numba: steps -----------------------------------------------------------------------------------------------


@device
def _start(x, rows, gates, columns, features, hidden, stride, row, weights, bias, z):
    """Set four rows of z to the biases and the input's products; `rows` are where the input's rows begin in x."""
    if features > 0:
        r0, r1, r2, r3 = rows
        for s in range(SAMPLES):
            copy(advance(z, s * stride), bias, stride)
        multiply(advance(x, r0), r1 - r0, r2 - r0, r3 - r0, features, weights, row, row, z, stride)
        return
    for s in range(SAMPLES):
        for part in range(gates):
            source, at = rows[s] + gate_at(part, gates, columns) * hidden, part * hidden
            for j in range(0, hidden, lanes(x)):  # the last vector ends in numbers yet to come
                store(z, s * stride + at + j, load_n(x, source + j, hidden - j) + load(bias, at + j))
        copy(advance(z, s * stride + row), advance(bias, row), stride - row)


@device
def ask_for(ptr, n):
    """Ask for `n` numbers: hardware does so neither for results nor for what lies backwards in time.

    In the second-level cache: the first one is full of weights.
    """
    for i in range(0, n, 64 // item_of(ptr)):
        prefetch_second(ptr, i)


@device
def blocks_in_lanes(begin, end, batch, hidden, gain, ptr):
    """Return how many of a part's blocks are computed with a sample in each lane: whole vectors of samples.

    None if a row's padding is less than a fifth, where transposing takes as long as what it saves; `gain`: it does not.
    """
    count, width = lanes(ptr), padded(hidden, item_of(ptr))
    if hidden < count or (not gain and 5 * (width - hidden) < width):
        return 0
    many = max(count // SAMPLES, 1)
    return max(min(end, batch // SAMPLES) - begin, 0) // many * many


@device
def _step_in_lanes(cell, apply, x, features, hidden, row, w, bias, of_x, z, state, at, places):
    """Take as many samples as a vector has lanes a step on: as one sample with the units of all.

    x: the first sample's row. `at`: where its row begins in an array (T, B, H). of_x, z: scratch.
    """
    gates, columns, states, count, item = len(cell), columns_of(cell), states_of(cell), lanes(z), item_of(z)
    apart = hidden * count
    if features > 0:
        to_lanes(x, features, features, of_x)
    else:
        for part in range(gates):
            gate = advance(x, gate_at(part, gates, columns) * hidden)
            to_lanes(gate, gates * hidden, hidden, advance(z, part * apart))
    for part in range(columns):
        of_bias = part_at(part, gates, hidden, item)
        for j in range(hidden):
            to, value = part * apart + j * count, broadcast(bias, of_bias + j)
            store(z, to, value if features > 0 or part >= gates else value + load(z, to))
    first = part_at(columns - gates, gates, hidden, item)
    for i in range(states):
        ask_for(advance(places[i], at), apart)
    share = 4 * apart // gates
    for part in range(gates):
        if gates > 1:
            ask_for(advance(places[states], 4 * at + part * share), share)
        if features > 0:
            multiply_lanes(advance(w, part * hidden), row, hidden, of_x, features, advance(z, part * apart))
    weights = advance(w, features * row)
    for part in range(columns - gates, columns):
        of_part = advance(weights, part_at(part, gates, hidden, item) - first)
        multiply_lanes(of_part, row, hidden, state, hidden, advance(z, part * apart))
    kept = state, advance(state, apart) if states > 1 else z, z  # gates take the places of what they come from
    for j in range(0, apart, count):
        apply(cell, z, apart, state, apart, j, apart, 0, kept)
    for i in range(states):
        to_rows(advance(state, i * apart), hidden, advance(places[i], at), hidden, SAMPLES * hidden)
    if gates > 1:
        to_rows(z, 4 * hidden, advance(places[states], 4 * at), 4 * hidden, SAMPLES * 4 * hidden)


@numba.njit(**INNER_JIT)
def forward_part(part, parts, cell, shape, x, features, w, origin, places):
    """Run a part's samples through time.

    x (…, I or gates·H) and the arrays at `places`: those that the cell keeps, h first, then the initial state.
    All but the initial state begin at row `origin`. w as `pack` returns it.
    """
    apply, gates, columns = of_cell(cell, rnn_cell, gru_cell, lstm_cell), len(cell), columns_of(cell)
    steps, batch, hidden = shape
    states, blocks = states_of(cell), (batch + SAMPLES - 1) // SAMPLES
    begin, end = part * blocks // parts, (part + 1) * blocks // parts
    width, inputs, item = padded(hidden, w.itemsize), x.shape[-1], w.itemsize
    row, stride = padded(gates * hidden, item), row_of_columns(gates, columns, hidden, item)
    room = states * SAMPLES * width
    count = VECTOR_BYTES // item
    of_lanes = (columns * width + padded(features, item)) * count
    scratch = np.empty(2 * SAMPLES * stride + (end - begin) * room + of_lanes + VECTOR_BYTES, w.dtype)
    both = aligned_pointer(scratch)
    of_one, state = advance(both, SAMPLES * stride), advance(both, 2 * SAMPLES * stride)
    of_z, in_lanes = advance(state, (end - begin) * room), blocks_in_lanes(begin, end, batch, hidden, gates == 1, state)
    of_x = advance(of_z, columns * width * count)
    source, of_input = advance(pointer(x), origin * inputs), pointer(w)
    weights = advance(of_input, features * row)
    bias, into = advance(weights, hidden * row), part_at(columns - gates, gates, hidden, item)
    for first in range(0, in_lanes * SAMPLES, count):
        for i in range(states):
            initial = advance(places[len(places) - states + i], (begin * SAMPLES + first) * hidden)
            to_lanes(initial, hidden, hidden, advance(state, first * states * width + i * hidden * count))
    for block in range(begin + in_lanes, end):
        for s in range(SAMPLES):
            sample = min(block * SAMPLES + s, batch - 1)
            for i in range(states):
                to = (block - begin) * room + (s * states + i) * width
                for j in range(0, width, lanes(state)):
                    store(state, to + j, load_n(places[len(places) - states + i], sample * hidden + j, hidden - j))
    for t in range(steps):
        for first in range(begin * SAMPLES, (begin + in_lanes) * SAMPLES, count):
            at, own = t * batch + first, advance(state, (first - begin * SAMPLES) * states * width)
            _step_in_lanes(
                cell, apply, advance(source, at * inputs), features, hidden, row, of_input, bias, of_x, of_z, own,
                (origin + at) * hidden, places,
            )  # fmt: skip
        for block in range(begin + in_lanes, end):
            first, own = block * SAMPLES, advance(state, (block - begin) * room)
            rows = min(batch - first, SAMPLES)
            if rows == 1:
                z = advance(of_one, t % SAMPLES * stride)
                if t % SAMPLES == 0:
                    at = t * batch + first
                    r0, r1 = at * inputs, min(at + batch, (steps - 1) * batch + first) * inputs
                    r2 = min(at + 2 * batch, (steps - 1) * batch + first) * inputs
                    r3 = min(at + 3 * batch, (steps - 1) * batch + first) * inputs
                    _start(source, (r0, r1, r2, r3), gates, columns, features, hidden, stride, row, of_input, bias, z)
                multiply_row(own, hidden, weights, row, row, advance(z, into))
            else:
                z, at, last = both, t * batch + first, t * batch + batch - 1
                r0, r1 = at * inputs, min(at + 1, last) * inputs
                r2, r3 = min(at + 2, last) * inputs, min(at + 3, last) * inputs
                _start(source, (r0, r1, r2, r3), gates, columns, features, hidden, stride, row, of_input, bias, z)
                apart = states * width
                multiply(own, apart, 2 * apart, 3 * apart, hidden, weights, row, row, advance(z, into), stride)
            for s in range(rows):
                place = (origin + t * batch + first + s) * hidden
                of_sample, z_row = advance(own, s * states * width), advance(z, s * stride)
                for j in range(0, width, lanes(state)):
                    apply(cell, z_row, hidden, of_sample, width, j, hidden, place, places)
    keep_alive(scratch)


@numba.njit(**JIT)
def run_forward(team, parts, cell, x, w_ih, b_ih, b_hh, w_hh, b_hn, *arrays):
    """Run all samples; `arrays` as `places` of `forward_part`, (T, B, …), and b_hn of a GRU, else empty."""
    w = pack(cell, w_ih, b_ih, b_hh, w_hh, b_hn)
    in_parts(forward_part, team, parts, (parts, cell, arrays[0].shape, x, w_ih.shape[1], w, 0, pointers_of(arrays)))


# Weights in panels, see `tiles`.


@numba.njit(**INNER_JIT)
def _pack_matrix(w, gates, columns, low, hidden, of_input, out):
    """Write rows of `hidden` units, from unit `low` on, of w (gates·H, K) in panels."""
    (rows, depth), count = w.shape, VECTOR_BYTES // w.itemsize
    vectors, whole = padded(gates * hidden, w.itemsize) // count, rows // gates
    before = 0 if of_input else part_at(columns - gates, gates, hidden, w.itemsize)
    at = 0
    while at < vectors:
        first, panel = at * count, panel_of(vectors - at) * count
        for part in range(gates):
            gate = gate_at(part, gates, columns) if of_input else part
            begin = part_at(part if of_input else columns - gates + part, gates, hidden, w.itemsize) - before - first
            j, end = max(0, -begin), min(hidden, panel - begin)
            if j < end:
                to = advance(pointer(out), first * depth + begin + j)
                turn_rows(advance(pointer(w), (gate * whole + low + j) * depth), depth, depth, end - j, to, panel)
        at += panel // count


@numba.njit(**INNER_JIT)
def pack_panels(cell, w_ih, b_ih, b_hh, w_hh, low, hidden, out):
    """Write panels of the input's weights, of the state's, and the row of biases, of `hidden` units from `low` on.

    Parts are where `part_at` says. `out` is zero.
    """
    gates, columns = len(cell), columns_of(cell)
    features, whole, row = w_ih.shape[1], w_hh.shape[1], padded(gates * hidden, w_hh.itemsize)
    _pack_matrix(w_ih, gates, columns, low, hidden, True, out)
    _pack_matrix(w_hh, gates, columns, low, hidden, False, out[features * row :])
    pack_biases(gates, columns, b_ih, b_hh, whole, low, hidden, out[(features + whole) * row :])
