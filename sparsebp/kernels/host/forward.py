"""The forward of any recurrent cell on the host: projection of the input and recursion in one pass.

A step of a block of four samples is two products of four rows, with the input's weights and with the state's, and the
cell's functions of their sums. Only the arrays that the cell keeps are written. Time is the outer loop over all blocks
of a part, so memory is read in order. A single sample in the last block, or in the whole batch, is not computed four
times: its input is projected four steps at a time instead.

The pre-activations are a row of `columns` parts: the first `gates` get the input's products, the last `gates` the
state's, with gates in torch's order except for a GRU's input, see `gate_at`. Gates are adjacent, and only their row
is padded to whole vectors, see `part_at`: four gates of 20 units are five vectors of sixteen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from sparsebp.core import threads
from sparsebp.kernels.host.dense import panel_of
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    WORD,
    advance,
    aligned_pointer,
    broadcast,
    copy,
    device,
    fma,
    intrinsic,
    keep_alive,
    lanes,
    load,
    load_n,
    pointer,
    store,
    zeros,
)
from sparsebp.kernels.host.engine.threads import ALONE, in_parts, team
from sparsebp.kernels.host.equations import (
    SAMPLES,
    columns_of,
    gru_cell,
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

WORTH_THREADS = 1_200_000
"""Operations, some 60 µs of one thread, from which on a kernel is run on all threads. Results do not depend on it."""


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


def aligned_zeros(size: int, dtype: Any) -> np.ndarray:
    """Return a flat array of zeros that starts at a multiple of the vector size."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(size + VECTOR_BYTES // itemsize, dtype)
    skip = -raw.ctypes.data % VECTOR_BYTES // itemsize
    return raw[skip : skip + size]


def pack_rows(w: np.ndarray) -> np.ndarray:
    """Return w (K, H) with rows padded to whole vectors: (K, padded), for products ``x (K,) @ w``."""
    depth, hidden = w.shape
    width = padded_width(hidden, w.dtype)
    packed = aligned_zeros(depth * width, w.dtype).reshape(depth, width)
    packed[:, :hidden] = w
    return packed


# ---- in Numba: blocks ----------------------------------------------------------------------------------------------


# Products of a few rows with packed weights, and sums of outer products, for recurrent steps.
#
# Each works on a tile that stays in registers: four rows by up to three vectors, of which each vector of weights that
# is loaded serves four multiply-adds and each number that is broadcast three. Every result is one chain of multiply-
# adds in the order of its terms, whatever tile it falls into, and for one row as for four.


@device
def multiply(x, r1, r2, r3, depth, w, w_stride, width, out, out_stride):
    """``out[s] += Σ_k x[r_s + k] · w[k]`` for four rows that begin at x and r1, r2 and r3 behind it.

    w (depth, w_stride) and the rows of `out`, of which whole vectors up to `width` are used. 8 · depth · width FLOP.
    """
    count = lanes(x)
    j = 0
    while j < width:
        panel = panel_of((width - j) // count)
        target, weights = advance(out, j), advance(w, j)
        if panel == 3:
            multiply_3(x, r1, r2, r3, depth, weights, w_stride, target, out_stride)
        elif panel == 2:
            multiply_2(x, r1, r2, r3, depth, weights, w_stride, target, out_stride)
        else:
            multiply_1(x, r1, r2, r3, depth, weights, w_stride, target, out_stride)
        j += panel * count


@device
def multiply_3(x, r1, r2, r3, depth, w, w_stride, out, stride):
    """`multiply`, for a tile of three vectors."""
    count = lanes(x)
    a0, a1, a2, a3 = zeros(x), zeros(x), zeros(x), zeros(x)
    b0, b1, b2, b3 = zeros(x), zeros(x), zeros(x), zeros(x)
    c0, c1, c2, c3 = zeros(x), zeros(x), zeros(x), zeros(x)
    row = w
    for k in range(depth):
        wa, wb, wc = load(row, 0), load(row, count), load(row, 2 * count)
        row = advance(row, w_stride)
        v = broadcast(x, k)
        a0, b0, c0 = fma(v, wa, a0), fma(v, wb, b0), fma(v, wc, c0)
        v = broadcast(x, r1 + k)
        a1, b1, c1 = fma(v, wa, a1), fma(v, wb, b1), fma(v, wc, c1)
        v = broadcast(x, r2 + k)
        a2, b2, c2 = fma(v, wa, a2), fma(v, wb, b2), fma(v, wc, c2)
        v = broadcast(x, r3 + k)
        a3, b3, c3 = fma(v, wa, a3), fma(v, wb, b3), fma(v, wc, c3)
    _add_4(out, 0, stride, a0, a1, a2, a3)
    _add_4(out, count, stride, b0, b1, b2, b3)
    _add_4(out, 2 * count, stride, c0, c1, c2, c3)


@device
def multiply_2(x, r1, r2, r3, depth, w, w_stride, out, stride):
    """`multiply`, for a tile of two vectors."""
    count = lanes(x)
    a0, a1, a2, a3 = zeros(x), zeros(x), zeros(x), zeros(x)
    b0, b1, b2, b3 = zeros(x), zeros(x), zeros(x), zeros(x)
    row = w
    for k in range(depth):
        wa, wb = load(row, 0), load(row, count)
        row = advance(row, w_stride)
        v0, v1, v2, v3 = broadcast(x, k), broadcast(x, r1 + k), broadcast(x, r2 + k), broadcast(x, r3 + k)
        a0, a1, a2, a3 = fma(v0, wa, a0), fma(v1, wa, a1), fma(v2, wa, a2), fma(v3, wa, a3)
        b0, b1, b2, b3 = fma(v0, wb, b0), fma(v1, wb, b1), fma(v2, wb, b2), fma(v3, wb, b3)
    _add_4(out, 0, stride, a0, a1, a2, a3)
    _add_4(out, count, stride, b0, b1, b2, b3)


@device
def multiply_1(x, r1, r2, r3, depth, w, w_stride, out, stride):
    """`multiply`, for a tile of one vector."""
    a0, a1, a2, a3 = zeros(x), zeros(x), zeros(x), zeros(x)
    row = w
    for k in range(depth):
        wa = load(row, 0)
        row = advance(row, w_stride)
        a0, a1 = fma(broadcast(x, k), wa, a0), fma(broadcast(x, r1 + k), wa, a1)
        a2, a3 = fma(broadcast(x, r2 + k), wa, a2), fma(broadcast(x, r3 + k), wa, a3)
    _add_4(out, 0, stride, a0, a1, a2, a3)


@device
def _tiles_add(out, at, value):
    store(out, at, load(out, at) + value)


@device
def _add_4(out, at, stride, v0, v1, v2, v3):
    _tiles_add(out, at, v0)
    _tiles_add(out, at + stride, v1)
    _tiles_add(out, at + 2 * stride, v2)
    _tiles_add(out, at + 3 * stride, v3)


@device
def multiply_row(x, depth, w, w_stride, width, out):
    """`multiply` for one row; six chains at a time."""
    count = lanes(x)
    j = 0
    while j + 6 * count <= width:
        a, b, c, d, e, f = zeros(x), zeros(x), zeros(x), zeros(x), zeros(x), zeros(x)
        row = advance(w, j)
        for k in range(depth):
            v = broadcast(x, k)
            a, b, c = fma(v, load(row, 0), a), fma(v, load(row, count), b), fma(v, load(row, 2 * count), c)
            d, e = fma(v, load(row, 3 * count), d), fma(v, load(row, 4 * count), e)
            f = fma(v, load(row, 5 * count), f)
            row = advance(row, w_stride)
        _tiles_add(out, j, a)
        _tiles_add(out, j + count, b)
        _tiles_add(out, j + 2 * count, c)
        _tiles_add(out, j + 3 * count, d)
        _tiles_add(out, j + 4 * count, e)
        _tiles_add(out, j + 5 * count, f)
        j += 6 * count
    while j + 3 * count <= width:
        a, b, c = zeros(x), zeros(x), zeros(x)
        row = advance(w, j)
        for k in range(depth):
            v = broadcast(x, k)
            a, b, c = fma(v, load(row, 0), a), fma(v, load(row, count), b), fma(v, load(row, 2 * count), c)
            row = advance(row, w_stride)
        _tiles_add(out, j, a)
        _tiles_add(out, j + count, b)
        _tiles_add(out, j + 2 * count, c)
        j += 3 * count
    while j < width:
        a = zeros(x)
        row = advance(w, j)
        for k in range(depth):
            a = fma(broadcast(x, k), load(row, 0), a)
            row = advance(row, w_stride)
        _tiles_add(out, j, a)
        j += count


@device
def add_outer(x, x_row, features, a, a_row, rows, width, out):
    """``out[i] += Σ_r x[r·x_row + i] · a[r·a_row …]``.

    out (features, width), of whole vectors. 2 · rows · features · width FLOP. Where no four features are left the last
    is taken several times: the same sum, written again.
    """
    count = lanes(x)
    j = 0
    while j < width:  # outside: a panel of `a` stays in the first cache, whatever the features
        wide, values = panel_of((width - j) // count), advance(a, j)
        for i in range(0, features, 4):
            i1, i2, i3 = min(i + 1, features - 1), min(i + 2, features - 1), min(i + 3, features - 1)
            o0, o1, o2, o3 = i * width + j, i1 * width + j, i2 * width + j, i3 * width + j
            d1, d2, d3, of_x = i1 - i, i2 - i, i3 - i, advance(x, i)
            if wide == 3:
                _outer_3(of_x, x_row, d1, d2, d3, values, a_row, rows, out, o0, o1, o2, o3)
            elif wide == 2:
                _outer_2(of_x, x_row, d1, d2, d3, values, a_row, rows, out, o0, o1, o2, o3)
            else:
                _outer_1(of_x, x_row, d1, d2, d3, values, a_row, rows, out, o0, o1, o2, o3)
        j += wide * count


@device
def _outer_3(x, x_row, d1, d2, d3, a, a_row, rows, out, o0, o1, o2, o3):
    n = lanes(x)
    a0, a1, a2, a3 = load(out, o0), load(out, o1), load(out, o2), load(out, o3)
    b0, b1, b2, b3 = load(out, o0 + n), load(out, o1 + n), load(out, o2 + n), load(out, o3 + n)
    c0, c1, c2, c3 = load(out, o0 + 2 * n), load(out, o1 + 2 * n), load(out, o2 + 2 * n), load(out, o3 + 2 * n)
    for _ in range(rows):
        wa, wb, wc = load(a, 0), load(a, n), load(a, 2 * n)
        v = broadcast(x, 0)
        a0, b0, c0 = fma(v, wa, a0), fma(v, wb, b0), fma(v, wc, c0)
        v = broadcast(x, d1)
        a1, b1, c1 = fma(v, wa, a1), fma(v, wb, b1), fma(v, wc, c1)
        v = broadcast(x, d2)
        a2, b2, c2 = fma(v, wa, a2), fma(v, wb, b2), fma(v, wc, c2)
        v = broadcast(x, d3)
        a3, b3, c3 = fma(v, wa, a3), fma(v, wb, b3), fma(v, wc, c3)
        x, a = advance(x, x_row), advance(a, a_row)
    _store_4(out, o0, o1, o2, o3, a0, a1, a2, a3)
    _store_4(out, o0 + n, o1 + n, o2 + n, o3 + n, b0, b1, b2, b3)
    _store_4(out, o0 + 2 * n, o1 + 2 * n, o2 + 2 * n, o3 + 2 * n, c0, c1, c2, c3)


@device
def _outer_2(x, x_row, d1, d2, d3, a, a_row, rows, out, o0, o1, o2, o3):
    n = lanes(x)
    a0, a1, a2, a3 = load(out, o0), load(out, o1), load(out, o2), load(out, o3)
    b0, b1, b2, b3 = load(out, o0 + n), load(out, o1 + n), load(out, o2 + n), load(out, o3 + n)
    for _ in range(rows):
        wa, wb = load(a, 0), load(a, n)
        v0, v1, v2, v3 = broadcast(x, 0), broadcast(x, d1), broadcast(x, d2), broadcast(x, d3)
        a0, a1, a2, a3 = fma(v0, wa, a0), fma(v1, wa, a1), fma(v2, wa, a2), fma(v3, wa, a3)
        b0, b1, b2, b3 = fma(v0, wb, b0), fma(v1, wb, b1), fma(v2, wb, b2), fma(v3, wb, b3)
        x, a = advance(x, x_row), advance(a, a_row)
    _store_4(out, o0, o1, o2, o3, a0, a1, a2, a3)
    _store_4(out, o0 + n, o1 + n, o2 + n, o3 + n, b0, b1, b2, b3)


@device
def _outer_1(x, x_row, d1, d2, d3, a, a_row, rows, out, o0, o1, o2, o3):
    a0, a1, a2, a3 = load(out, o0), load(out, o1), load(out, o2), load(out, o3)
    for _ in range(rows):
        wa = load(a, 0)
        a0, a1 = fma(broadcast(x, 0), wa, a0), fma(broadcast(x, d1), wa, a1)
        a2, a3 = fma(broadcast(x, d2), wa, a2), fma(broadcast(x, d3), wa, a3)
        x, a = advance(x, x_row), advance(a, a_row)
    _store_4(out, o0, o1, o2, o3, a0, a1, a2, a3)


@device
def _store_4(out, o0, o1, o2, o3, v0, v1, v2, v3):
    store(out, o0, v0)
    store(out, o1, v1)
    store(out, o2, v2)
    store(out, o3, v3)


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
    gates, columns = len(cell), columns_of(cell)
    hidden, features = w_hh.shape[1], w_ih.shape[1]
    row = padded(gates * hidden, w_hh.itemsize)
    first = part_at(columns - gates, gates, hidden, w_hh.itemsize)
    out = room_for_weights(features + hidden, row, row_of_columns(gates, columns, hidden, w_hh.itemsize), w_hh)
    for part in range(gates):
        gate, of_state = gate_at(part, gates, columns), part_at(columns - gates + part, gates, hidden, w_hh.itemsize)
        for j in range(hidden):
            for k in range(features):
                out[k * row + part * hidden + j] = w_ih[gate * hidden + j, k]
            for k in range(hidden):
                out[(features + k) * row + of_state - first + j] = w_hh[part * hidden + j, k]
    biases = out[(features + hidden) * row :]
    pack_biases(gates, columns, b_ih, b_hh, hidden, biases)
    at = part_at(3, 3, hidden, w_hh.itemsize)
    for j in range(len(b_hn)):
        biases[at + j] = b_hn[j]
    return out


@numba.njit(**INNER_JIT)
def room_for_weights(depth, row, biases, like):
    """Return zeros for `depth` rows of weights and one of biases, aligned to vectors, of the dtype of `like`."""
    room = np.zeros(depth * row + biases + VECTOR_BYTES, like.dtype)
    return room[(-room.ctypes.data) % VECTOR_BYTES // like.itemsize :]


@numba.njit(**INNER_JIT)
def pack_biases(gates, columns, b_ih, b_hh, hidden, out):
    """Add both biases, empty where there are none, to the zeros of their row."""
    if b_ih.size > 0:
        for part in range(gates):
            gate = gate_at(part, gates, columns)
            for j in range(hidden):
                out[part * hidden + j] = b_ih[gate * hidden + j]
    if b_hh.size > 0:
        for part in range(gates):
            at = part_at(columns - gates + part, gates, hidden, out.itemsize)
            for j in range(hidden):
                out[at + j] += b_hh[part * hidden + j]


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
            source = rows[s] + gate_at(part, gates, columns) * hidden
            for j in range(0, hidden, lanes(x)):  # the last vector ends in numbers yet to come
                store(z, s * stride + part * hidden + j, load_n(x, source + j, hidden - j))
        copy(advance(z, s * stride + row), advance(bias, row), stride - row)


@numba.njit(**INNER_JIT)
def forward_part(part, parts, cell, shape, x, features, w, origin, places):
    """Run a part's samples through time.

    x (…, I or gates·H) and the arrays at `places`: those that the cell keeps, h first, then the initial state.
    All but the latter begin at row `origin`. w as `pack` returns it.
    """
    apply, gates, columns = of_cell(cell, rnn_cell, gru_cell, lstm_cell), len(cell), columns_of(cell)
    steps, batch, hidden = shape
    states, blocks = states_of(cell), (batch + SAMPLES - 1) // SAMPLES
    begin, end = part * blocks // parts, (part + 1) * blocks // parts
    width, inputs, item = padded(hidden, w.itemsize), x.shape[-1], w.itemsize
    row, stride = padded(gates * hidden, item), row_of_columns(gates, columns, hidden, item)
    room = states * SAMPLES * width
    scratch = np.empty(2 * SAMPLES * stride + (end - begin) * room + VECTOR_BYTES, w.dtype)
    both = aligned_pointer(scratch)
    of_one, state = advance(both, SAMPLES * stride), advance(both, 2 * SAMPLES * stride)
    source, of_input = advance(pointer(x), origin * inputs), pointer(w)
    weights = advance(of_input, features * row)
    bias, into = advance(weights, hidden * row), part_at(columns - gates, gates, hidden, item)
    for block in range(begin, end):
        for s in range(SAMPLES):
            sample = min(block * SAMPLES + s, batch - 1)
            for i in range(states):
                to = (block - begin) * room + (s * states + i) * width
                for j in range(0, width, lanes(state)):
                    store(state, to + j, load_n(places[len(places) - states + i], sample * hidden + j, hidden - j))
    for t in range(steps):
        for block in range(begin, end):
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


# Weights in panels: the columns of up to three vectors, row after row, so that a product reads them in one stream.
#
# With rows as long as all gates, the pieces of a panel are thousands of bytes apart, fall into a few sets of the caches
# and drive each other out; a third of the time of a step of 128 units went there.


@intrinsic
def _unknown(typingctx: Any, value: Any) -> Any:
    """Return a number and hide from the compiler that it is a constant.

    With a constant step between rows LLVM does several turns of a tile's loop at once, for which there are not enough
    registers.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.asm(ir.FunctionType(WORD, [WORD]), "", "=r,0", [args[0]], False)

    return types.int64(types.int64), codegen


@numba.njit(**INNER_JIT)
def _pack_matrix(w, gates, columns, hidden, of_input, out):
    """Write w (gates·H, K) in panels."""
    depth, count = w.shape[1], VECTOR_BYTES // w.itemsize
    vectors = padded(gates * hidden, w.itemsize) // count
    before = 0 if of_input else part_at(columns - gates, gates, hidden, w.itemsize)
    at = 0
    while at < vectors:
        low, panel = at * count, panel_of(vectors - at) * count
        for part in range(gates):
            gate = gate_at(part, gates, columns) if of_input else part
            begin = part_at(part if of_input else columns - gates + part, gates, hidden, w.itemsize) - before - low
            for j in range(max(0, -begin), min(hidden, panel - begin)):
                source = w[gate * hidden + j]
                for k in range(depth):
                    out[low * depth + k * panel + begin + j] = source[k]
        at += panel // count


@numba.njit(**INNER_JIT)
def pack_panels(cell, w_ih, b_ih, b_hh, w_hh):
    """Return panels of the input's weights, of the state's, and the row of biases; parts are where `part_at` says."""
    gates, columns = len(cell), columns_of(cell)
    hidden, features = w_hh.shape[1], w_ih.shape[1]
    row = padded(gates * hidden, w_hh.itemsize)
    out = room_for_weights(features + hidden, row, row_of_columns(gates, columns, hidden, w_hh.itemsize), w_hh)
    _pack_matrix(w_ih, gates, columns, hidden, True, out)
    _pack_matrix(w_hh, gates, columns, hidden, False, out[features * row :])
    pack_biases(gates, columns, b_ih, b_hh, hidden, out[(features + hidden) * row :])
    return out


@device
def multiply_panels(x, x_stride, rows, depth, w, width, out, out_stride):
    """``out[s] += Σ_k x[s, k] · w[k]`` for `rows` rows; `width` numbers of each, w in panels.

    `out` has rows up to a multiple of four: the last row of x is repeated for those beyond `rows`.
    """
    count = lanes(x)
    vectors, at = width // count, 0
    while at < vectors:
        panel = panel_of(vectors - at)
        weights, step = advance(w, at * count * depth), _unknown(panel * count)
        for s in range(0, rows, SAMPLES):
            last, source = rows - 1 - s, advance(x, s * x_stride)
            r1, r2, r3 = min(1, last) * x_stride, min(2, last) * x_stride, min(3, last) * x_stride
            target = advance(out, s * out_stride + at * count)
            if panel == 3:
                multiply_3(source, r1, r2, r3, depth, weights, step, target, out_stride)
            elif panel == 2:
                multiply_2(source, r1, r2, r3, depth, weights, step, target, out_stride)
            else:
                multiply_1(source, r1, r2, r3, depth, weights, step, target, out_stride)
        at += panel


@device
def multiply_panels_by_row(x, depth, w, width, out):
    """The same of one row; two panels of three vectors at a time, so six chains of multiply-adds."""
    count = lanes(x)
    vectors, at = width // count, 0
    while at < vectors:
        left, weights, target = vectors - at, advance(w, at * count * depth), advance(out, at * count)
        if left >= 6 and left != 7:
            _row_of_two_panels(x, depth, weights, target)
            at += 6
        else:
            panel = panel_of(left)
            _row_of_panel(x, depth, weights, panel, target)
            at += panel


@device
def multiply_panels_by_pair(x, x_stride, depth, w, width, out, out_stride):
    """The same of two rows; two panels of three vectors at a time, so twelve chains."""
    count = lanes(x)
    vectors, at = width // count, 0
    while at < vectors:
        left, weights, target = vectors - at, advance(w, at * count * depth), advance(out, at * count)
        if left >= 6 and left != 7:
            _pair_of_two_panels(x, x_stride, depth, weights, target, out_stride)
            at += 6
        else:
            panel = panel_of(left)
            _row_of_panel(x, depth, weights, panel, target)
            _row_of_panel(advance(x, x_stride), depth, weights, panel, advance(target, out_stride))
            at += panel


@device
def _pair_of_two_panels(x, x_stride, depth, w, out, out_stride):
    count = lanes(x)
    a0, b0, c0, d0, e0, f0 = zeros(x), zeros(x), zeros(x), zeros(x), zeros(x), zeros(x)
    a1, b1, c1, d1, e1, f1 = zeros(x), zeros(x), zeros(x), zeros(x), zeros(x), zeros(x)
    other = advance(w, 3 * count * depth)
    for k in range(depth):
        v0, v1, i = broadcast(x, k), broadcast(x, x_stride + k), 3 * k * count
        row = load(w, i)
        a0, a1 = fma(v0, row, a0), fma(v1, row, a1)
        row = load(w, i + count)
        b0, b1 = fma(v0, row, b0), fma(v1, row, b1)
        row = load(w, i + 2 * count)
        c0, c1 = fma(v0, row, c0), fma(v1, row, c1)
        row = load(other, i)
        d0, d1 = fma(v0, row, d0), fma(v1, row, d1)
        row = load(other, i + count)
        e0, e1 = fma(v0, row, e0), fma(v1, row, e1)
        row = load(other, i + 2 * count)
        f0, f1 = fma(v0, row, f0), fma(v1, row, f1)
    _add_6(out, count, a0, b0, c0, d0, e0, f0)
    _add_6(advance(out, out_stride), count, a1, b1, c1, d1, e1, f1)


@device
def _row_of_two_panels(x, depth, w, out):
    count = lanes(x)
    a, b, c = zeros(x), zeros(x), zeros(x)
    d, e, f = zeros(x), zeros(x), zeros(x)
    other = advance(w, 3 * count * depth)
    for k in range(depth):
        v, i = broadcast(x, k), 3 * k * count
        a, b, c = fma(v, load(w, i), a), fma(v, load(w, i + count), b), fma(v, load(w, i + 2 * count), c)
        d, e = fma(v, load(other, i), d), fma(v, load(other, i + count), e)
        f = fma(v, load(other, i + 2 * count), f)
    _add_6(out, count, a, b, c, d, e, f)


@device
def _row_of_panel(x, depth, w, panel, out):
    count = lanes(x)
    if panel == 3:
        a, b, c = zeros(x), zeros(x), zeros(x)
        for k in range(depth):
            v, i = broadcast(x, k), 3 * k * count
            a, b, c = fma(v, load(w, i), a), fma(v, load(w, i + count), b), fma(v, load(w, i + 2 * count), c)
        _panels_add(out, 0, a)
        _panels_add(out, count, b)
        _panels_add(out, 2 * count, c)
        return
    for part in range(panel):
        a = zeros(x)
        for k in range(depth):
            a = fma(broadcast(x, k), load(w, (k * panel + part) * count), a)
        _panels_add(out, part * count, a)


@device
def _add_6(out, count, a, b, c, d, e, f):
    _panels_add(out, 0, a)
    _panels_add(out, count, b)
    _panels_add(out, 2 * count, c)
    _panels_add(out, 3 * count, d)
    _panels_add(out, 4 * count, e)
    _panels_add(out, 5 * count, f)


@device
def _panels_add(out, at, value):
    store(out, at, load(out, at) + value)
