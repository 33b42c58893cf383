"""Recurrent layers without a way back: states are written, gates are not, and nothing else is kept.

A step adds the products of the input's and of the state's weights to the biases, and applies the cell. The weights lie
in panels of three vectors' columns, row after row, so each panel streams past once a step and serves all of a part's
samples from the first cache. The input is projected on the way too, that of few samples some steps ahead: nothing
of its size is written. Where threads outnumber the blocks of four samples, parts are pairs of samples or single ones.

Each number is one chain of multiply-adds for the input and one for the state, whatever rows are computed together. An
LSTM's c has room for one step, which the next one writes over.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
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
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.team import in_parts
from sparsebp.kernels.host.recurrent import cells
from sparsebp.kernels.host.recurrent.common import SAMPLES
from sparsebp.kernels.host.recurrent.forward import (
    item_of,
    padded,
    part_at,
    parts_of,
    row_of_columns,
    weights_of,
)
from sparsebp.kernels.host.recurrent.panels import (
    multiply_panels,
    multiply_panels_by_pair,
    multiply_panels_by_row,
    pack,
)

ROWS_AHEAD = 16
"""Rows of the input that are projected together, of several steps where there are few samples."""


@device
def _rnn(relu: bool, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any) -> None:
    v = cells.rnn(relu, zeros(z), load(z, j))
    store(state, j, v)
    store_up_to(kept, at + j, v, hidden - j)


@device
def _gru(extra: None, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any) -> None:
    inner = load(z, part_at(3, 3, apart, item_of(z)) + j)
    v, _, _, _ = cells.gru(load(z, j), load(z, apart + j), load(z, 2 * apart + j), inner, load(state, j))
    store(state, j, v)
    store_up_to(kept, at + j, v, hidden - j)


@device
def _lstm(step: int, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any) -> None:
    seen, value, _, _, _, _ = cells.lstm(
        load(z, j), load(z, apart + j), load(z, 2 * apart + j), load(z, 3 * apart + j), load(state, width + j)
    )
    store(state, j, seen)
    store(state, width + j, value)
    store_up_to(kept[0], at + j, seen, hidden - j)
    store_up_to(advance(kept[1], at % step), j, value, hidden - j)


@device
def _grain(batch: int, parts: int) -> int:
    """Return of how many samples, four, two or one, a batch has at least as many groups as there are parts."""
    grain = SAMPLES
    while grain > 1 and (batch + grain - 1) // grain < parts:
        grain //= 2
    return grain


@device
def _infer_part(
    cell: Any, gates: int, columns: int, extra: Any, part: int, parts: int, shape: Any, x: Any, w: Any, initial: Any,
    kept: Any,
) -> None:  # fmt: skip
    """Run a part's samples through time; arguments as `forward.forward_part`'s, w from `panels.pack`."""
    steps, batch, hidden = shape
    states, features = len(initial), x.shape[2]
    grain = _grain(batch, parts)
    units = (batch + grain - 1) // grain
    first = part * units // parts * grain
    rows = min((part + 1) * units // parts * grain, batch) - first
    width, item = padded(hidden, w.itemsize), w.itemsize
    row, stride, room = padded(gates * hidden, item), row_of_columns(gates, columns, hidden, item), states * width
    padded_rows = (rows + SAMPLES - 1) // SAMPLES * SAMPLES
    each = rows if rows <= 2 else padded_rows  # a step's rows: the product of four rows writes to the fourth, too
    if rows < SAMPLES:
        ahead = ROWS_AHEAD // SAMPLES // rows * SAMPLES
    elif rows == batch and rows % SAMPLES == 0:  # rows of x are as far apart in time as in the batch
        ahead = max(1, ROWS_AHEAD // rows)
    else:
        ahead = 1
    room_ahead = max(padded_rows, ahead * each)
    scratch = np.empty(room_ahead * stride + padded_rows * room + VECTOR_BYTES, w.dtype)
    before = aligned_pointer(scratch)
    state = advance(before, room_ahead * stride)
    source, of_input = pointer(x), pointer(w)
    weights = advance(of_input, features * row)
    bias, into = advance(weights, hidden * row), part_at(columns - gates, gates, hidden, item)
    for s in range(padded_rows):
        for i in range(states):
            at = min(first + s, batch - 1) * hidden
            for j in range(0, width, lanes(state)):
                store(state, s * room + i * width + j, load_n(initial[i], at + j, hidden - j))
    for t in range(steps):
        if t % ahead == 0:
            for s in range(room_ahead):
                copy(advance(before, s * stride), bias, stride)
            here, now = advance(source, (t * batch + first) * features), min(ahead, steps - t)
            if rows < SAMPLES:  # each sample's steps by themselves
                for s in range(rows):
                    own, into_own = advance(here, s * features), advance(before, s * stride)
                    multiply_panels(own, batch * features, now, features, of_input, row, into_own, each * stride)
            else:
                multiply_panels(here, features, now * rows, features, of_input, row, before, stride)
        z = advance(before, t % ahead * each * stride)
        if rows == 1:
            multiply_panels_by_row(state, hidden, weights, row, advance(z, into))
        elif rows == 2:
            multiply_panels_by_pair(state, room, hidden, weights, row, advance(z, into), stride)
        else:
            multiply_panels(state, room, rows, hidden, weights, row, advance(z, into), stride)
        for s in range(rows):
            place = (t * batch + first + s) * hidden
            for j in range(0, width, lanes(state)):
                cell(extra, advance(z, s * stride), hidden, advance(state, s * room), width, j, hidden, place, kept)
    keep_alive(scratch)


@numba.njit(**INNER_JIT)
def _rnn_part(part: int, parts: int, x: Any, w: Any, h0: Any, relu: bool, h: Any) -> None:
    initial = (pointer(h0),)
    _infer_part(_rnn, 1, 1, relu, part, parts, h.shape, x, w, initial, pointer(h))


@numba.njit(**JIT)
def _run_rnn(team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h0: Any, relu: bool,
             h: Any) -> None:  # fmt: skip
    w = pack(1, 1, w_ih, b_ih, b_hh, w_hh)
    in_parts(_rnn_part, team, parts, (parts, x, w, h0, relu, h))


@numba.njit(**INNER_JIT)
def _gru_part(part: int, parts: int, x: Any, w: Any, h0: Any, h: Any) -> None:
    initial = (pointer(h0),)
    _infer_part(_gru, 3, 4, None, part, parts, h.shape, x, w, initial, pointer(h))


@numba.njit(**JIT)
def _run_gru(team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h0: Any, h: Any) -> None:
    w = pack(3, 4, w_ih, b_ih, b_hh, w_hh)
    in_parts(_gru_part, team, parts, (parts, x, w, h0, h))


@numba.njit(**INNER_JIT)
def _lstm_part(part: int, parts: int, x: Any, w: Any, h0: Any, c0: Any, h: Any, c: Any) -> None:
    initial, kept = (pointer(h0), pointer(c0)), (pointer(h), pointer(c))
    _infer_part(_lstm, 4, 4, c.size, part, parts, h.shape, x, w, initial, kept)


@numba.njit(**JIT)
def _run_lstm(
    team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h0: Any, c0: Any, h: Any, c: Any
) -> None:
    w = pack(4, 4, w_ih, b_ih, b_hh, w_hh)
    in_parts(_lstm_part, team, parts, (parts, x, w, h0, c0, h, c))


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
    args = (x, *weights_of(w_hh, w_ih, b_ih, b_hh), w_hh, *initial)
    team = parts_of(batch, 2 * steps * batch * (w_ih.size + w_hh.size))
    if kind == "gru":
        _run_gru(*team, *args, h)
    elif kind == "lstm":
        _run_lstm(*team, *args, h, c)
    else:
        _run_rnn(*team, *args, kind == "relu", h)
