"""The way forward through any recurrent cell on the host: projection of the input and recursion in one pass.

A step of a block of four samples is two products of four rows, with the input's weights and with the state's, and the
cell's functions on what they add up to. Nothing is written but what the cell keeps, and time is the outer loop over all
blocks of a part, so memory is met in order, whatever the length. A sample that is left alone in the last block, or in
the whole batch, is not computed four times: its input is projected four steps at a time instead.

What the weights feed is a row of `columns` parts: the first `gates` of them get the input's products, the last `gates`
the state's, with every weight's gates in torch's order but for a GRU's input, see `gate_at`. Gates lie one behind the
other, and only their row is padded to whole vectors, see `part_at`: four gates of 20 units are five vectors of sixteen.

A cell brings ``cell(extra, z, apart, state, width, j, hidden, at, kept)``: for units j … of a sample's row z, whose
gates begin `apart` from each other, update its row of the state, `width` for each of its arrays, and write what is
kept: `at` is where the sample's row begins in an array (T, B, H), `kept` are pointers to all of those.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.kernels.host.engine.parts import INNER_JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    copy,
    device,
    keep_alive,
    lanes,
    load_n,
    pointer,
    store,
)
from sparsebp.kernels.host.engine.team import ALONE, team
from sparsebp.kernels.host.recurrent.common import SAMPLES, WORTH_THREADS
from sparsebp.kernels.host.recurrent.tiles import multiply, multiply_row


def parts_of(groups: int, work: int) -> tuple[int, int]:
    """Return the team for so many operations on groups of samples, and in how many parts of whole groups they are cut.

    A part keeps all its samples in step, so there are no more of them than threads. No result depends on it.
    """
    parts = min(groups, threads.count()) if work >= WORTH_THREADS else 1
    return (team(parts), parts) if parts > 1 else (ALONE, 1)


def weights_of(
    like: np.ndarray, w_ih: np.ndarray | None, b_ih: np.ndarray | None, b_hh: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what projects the input as arrays, empty ones for what is not there: one specialisation serves all."""
    flat = np.empty(0, like.dtype)
    return (
        np.empty((0, 0), like.dtype) if w_ih is None else w_ih,
        flat if b_ih is None else b_ih,
        flat if b_hh is None else b_hh,
    )


# ---- in Numba: weights ---------------------------------------------------------------------------------------------


@device
def gate_at(part: int, gates: int, columns: int) -> int:
    """Return which of torch's gates a part of the input's products is: a GRU's are n, r, z."""
    return part if gates == columns else (part + gates - 1) % gates


@numba.njit(**INNER_JIT)
def padded(numbers: int, itemsize: int) -> int:
    """Return so many numbers rounded up to whole vectors."""
    count = VECTOR_BYTES // itemsize
    return (numbers + count - 1) // count * count


@numba.njit(**INNER_JIT)
def part_at(part: int, gates: int, apart: int, itemsize: int) -> int:
    """Return where a part begins in a row of columns: `apart` from the one before, those beyond the gates after a pad.

    The state's products, as long as the input's, begin at part ``columns - gates`` and pass over that pad. What is an
    input's infinity times the zeros of a pad, NaN, so stays in it.
    """
    return part * apart if part < gates else padded(gates * apart, itemsize) + (part - gates) * apart


def numbers_of_row(gates: int, columns: int, hidden: int, itemsize: int) -> int:
    """Return the numbers of a row of columns, in whole vectors: a part's last vector ends in its own row.

    They are an odd number of vectors: rows that are a power of two apart fall into the same sets of a cache.
    """
    count = VECTOR_BYTES // itemsize
    before = (gates - 1) * hidden if columns == gates else gates * hidden
    return (-(-before // count) + -(-hidden // count) | 1) * count


row_of_columns = numba.njit(**INNER_JIT)(numbers_of_row)


@device
def item_of(ptr: Any) -> int:
    """Return the bytes of a number that a pointer points to."""
    return VECTOR_BYTES // lanes(ptr)


@numba.njit(**INNER_JIT)
def pack(gates: int, columns: int, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any) -> Any:
    """Return the weights transposed: rows of the input's, of the state's, and of the biases.

    Rows are ``padded(gates · H)`` long, that of the biases `row_of_columns`.
    """
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
    pack_biases(gates, columns, b_ih, b_hh, hidden, out[(features + hidden) * row :])
    return out


@numba.njit(**INNER_JIT)
def room_for_weights(depth: int, row: int, biases: int, like: Any) -> Any:
    """Return zeros for so many rows of weights and one of biases, aligned to vectors, of the dtype of `like`."""
    room = np.zeros(depth * row + biases + VECTOR_BYTES, like.dtype)
    return room[(-room.ctypes.data) % VECTOR_BYTES // like.itemsize :]


@numba.njit(**INNER_JIT)
def pack_biases(gates: int, columns: int, b_ih: Any, b_hh: Any, hidden: int, out: Any) -> None:
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


@numba.njit(**INNER_JIT)
def set_bias(w: Any, features: int, part: int, gates: int, values: Any) -> None:
    """Set one part of the biases of packed weights."""
    hidden = len(values)
    at = (features + hidden) * padded(gates * hidden, w.itemsize) + part_at(part, gates, hidden, w.itemsize)
    for j in range(hidden):
        w[at + j] = values[j]


# ---- in Numba: steps -----------------------------------------------------------------------------------------------


@device
def _start(
    x: Any, rows: Any, gates: int, columns: int, features: int, hidden: int, stride: int, row: int, weights: Any,
    bias: Any, z: Any,
) -> None:  # fmt: skip
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


@device
def forward_part(
    cell: Any, gates: int, columns: int, extra: Any, part: int, parts: int, shape: Any, x: Any, features: int, w: Any,
    initial: Any, kept: Any,
) -> None:  # fmt: skip
    """Run a part's samples through time. x (T, B, I or gates·H), w from `pack`, `initial` the state's arrays."""
    steps, batch, hidden = shape
    states, blocks = len(initial), (batch + SAMPLES - 1) // SAMPLES
    begin, end = part * blocks // parts, (part + 1) * blocks // parts
    width, inputs, item = padded(hidden, w.itemsize), x.shape[2], w.itemsize
    row, stride = padded(gates * hidden, item), row_of_columns(gates, columns, hidden, item)
    room = states * SAMPLES * width
    scratch = np.empty(2 * SAMPLES * stride + (end - begin) * room + VECTOR_BYTES, w.dtype)
    both = aligned_pointer(scratch)
    of_one, state = advance(both, SAMPLES * stride), advance(both, 2 * SAMPLES * stride)
    source, of_input = pointer(x), pointer(w)
    weights = advance(of_input, features * row)
    bias, into = advance(weights, hidden * row), part_at(columns - gates, gates, hidden, item)
    for block in range(begin, end):
        for s in range(SAMPLES):
            sample = min(block * SAMPLES + s, batch - 1)
            for i in range(states):
                to = (block - begin) * room + (s * states + i) * width
                for j in range(0, width, lanes(state)):
                    store(state, to + j, load_n(initial[i], sample * hidden + j, hidden - j))
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
                place = (t * batch + first + s) * hidden
                of_sample, z_row = advance(own, s * states * width), advance(z, s * stride)
                for j in range(0, width, lanes(state)):
                    cell(extra, z_row, hidden, of_sample, width, j, hidden, place, kept)
    keep_alive(scratch)
