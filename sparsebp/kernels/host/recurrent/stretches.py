"""Runs over the rows of sequences of several lengths: all stretches in one call, forward and back.

A stretch is some steps with the same samples, whose rows are one array (steps, samples, features); between two of them
sequences end. `rnn`, `gru` and `lstm` bring what runs one: the numbers are those of a call for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.team import ALONE, in_parts, team
from sparsebp.kernels.host.recurrent import gru, lstm, rnn
from sparsebp.kernels.host.recurrent.common import WORTH_THREADS, blocks_of, pack_rows
from sparsebp.kernels.host.recurrent.forward import pack, set_bias, weights_of
from sparsebp.kernels.host.recurrent.wide import LEAST

Cuts = Sequence[tuple[int, int, int]]
"""Of each stretch the first row, the steps and the samples, the first ones of the batch; in the order of time."""


def takes(hidden: int) -> bool:
    """Say whether there are so few hidden units that these kernels are the ones to take."""
    return hidden < LEAST


def forward(
    kind: str, cuts: Cuts, x: Array, w_hh: Array, b_hh: Array | None, projection: Sequence[Array | None],
    states: tuple[Array, ...], gates: Array | None, last: tuple[Array, ...],
) -> None:  # fmt: skip
    """Run a cell over x (N, I), or its projection (N, gates·H); all arrays C-contiguous and of one dtype.

    Parameters
    ----------
    kind
        ``"rnn_tanh"``, ``"rnn_relu"``, ``"gru"`` or ``"lstm"``.
    b_hh
        Bias of the recursion (gates·H,) or None; of it a GRU adds b_hn in every step, however x is projected.
    projection
        weight_ih and both biases, as the kernels of one run take them; None for an x that is projected.
    states, gates
        Arrays (N, H) for each of the state's, and gates (N, 4H) of a GRU or an LSTM, written.
    last
        The state before each sample's first step (B, H), which becomes that after its last one.
    """
    weights = (*weights_of(w_hh, *projection), w_hh)
    helpers, table = _team_and_table(cuts, w_hh)
    if kind == "gru":
        hidden = w_hh.shape[1]
        b_hn = np.zeros(hidden, x.dtype) if b_hh is None else b_hh[2 * hidden :]
        _run_gru(helpers, table, x, *weights, b_hn, *states, gates, *last)
    elif kind == "lstm":
        _run_lstm(helpers, table, x, *weights, *states, gates, *last)
    else:
        _run_rnn(helpers, table, x, *weights, kind == "rnn_relu", *states, *last)


def backward(
    kind: str, cuts: Cuts, w_hh: Array, start: tuple[Array, ...], states: tuple[Array, ...], gates: Array | None,
    gy: Array | None, ga: Array, arriving: tuple[Array, ...],
) -> None:  # fmt: skip
    """Take gradients back through `forward`, each stretch by the recursion.

    Parameters
    ----------
    start
        The state before each sample's first step (B, H).
    gy
        What arrives at h (N, H), or None.
    ga
        The gradients at what the weights feed (N, columns·H), written.
    arriving
        The gradients at the state after each sample's last step (B, H), which become those at `start`.
    """
    none = np.empty((0, w_hh.shape[1]), w_hh.dtype)
    helpers, table = _team_and_table(cuts, w_hh)
    args = pack_rows(w_hh), none if gy is None else gy, ga
    if kind == "gru":
        _back_gru(helpers, table, *states, *start, gates, *args, *arriving)
    elif kind == "lstm":
        _back_lstm(helpers, table, states[1], start[1], gates, *args, *arriving)
    else:
        _back_rnn(helpers, table, *states, kind == "rnn_relu", *args, *arriving)


def _team_and_table(cuts: Cuts, w_hh: Array) -> tuple[int, np.ndarray]:
    """Return the team for the stretch of most work, and a row for each: it, and in how many parts it is cut."""
    most, each = threads.count(), 2 * w_hh.size
    parts = [
        min(blocks_of(batch), most) if steps * batch * each >= WORTH_THREADS else 1 for _, steps, batch in cuts
    ]  # fmt: skip
    table = np.array([(*cut, count) for cut, count in zip(cuts, parts, strict=True)], np.int64)
    return team(max(parts)), table


# ---- in Numba --------------------------------------------------------------------------------------------------------


@numba.njit(**INNER_JIT)
def _steps(rows: Any, cut: Any) -> Any:
    """Return the rows of a stretch as (steps, samples, numbers): a view; nothing where there are no rows at all."""
    if len(rows) == 0:
        return np.empty((0, 0, 0), rows.dtype)
    first, steps, batch = cut[0], cut[1], cut[2]
    return rows[first : first + steps * batch].reshape((steps, batch, rows.shape[1]))


@numba.njit(**INNER_JIT)
def _before(cuts: Any, number: int, start: Any, rows: Any) -> Any:
    """Return the state before the first step of a stretch: rows of `start`, or of the last step of the one before."""
    batch = cuts[number, 2]
    if number == 0:
        return start[:batch]
    first = cuts[number, 0] - cuts[number - 1, 2]
    return rows[first : first + batch]


@numba.njit(**INNER_JIT)
def _keep_last(rows: Any, cut: Any, last: Any) -> None:
    """Write the state after the last step of a stretch to its samples' rows."""
    end, batch = cut[0] + cut[1] * cut[2], cut[2]
    last[:batch] = rows[end - batch : end]


@numba.njit(**JIT)
def _run_rnn(
    team: int, cuts: Any, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, relu: bool, h: Any, last: Any
) -> None:
    w = pack(1, 1, w_ih, b_ih, b_hh, w_hh)
    for n in range(len(cuts)):
        cut, parts = cuts[n], cuts[n, 3]
        args = (parts, _steps(x, cut), w_ih.shape[1], w, last, relu, _steps(h, cut))
        in_parts(rnn.run_part, team if parts > 1 else ALONE, parts, args)
        _keep_last(h, cut, last)


@numba.njit(**JIT)
def _run_gru(
    team: int, cuts: Any, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, b_hn: Any, h: Any, gates: Any, last: Any
) -> None:
    w = pack(3, 4, w_ih, b_ih, b_hh, w_hh)
    set_bias(w, w_ih.shape[1], 3, 3, b_hn)
    for n in range(len(cuts)):
        cut, parts = cuts[n], cuts[n, 3]
        args = (parts, _steps(x, cut), w_ih.shape[1], w, last, _steps(h, cut), _steps(gates, cut))
        in_parts(gru.run_part, team if parts > 1 else ALONE, parts, args)
        _keep_last(h, cut, last)


@numba.njit(**JIT)
def _run_lstm(
    team: int, cuts: Any, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h: Any, c: Any, gates: Any, last_h: Any,
    last_c: Any,
) -> None:  # fmt: skip
    w = pack(lstm.GATES, lstm.GATES, w_ih, b_ih, b_hh, w_hh)
    for n in range(len(cuts)):
        cut, parts = cuts[n], cuts[n, 3]
        written = _steps(h, cut), _steps(c, cut), _steps(gates, cut)
        args = (parts, _steps(x, cut), w_ih.shape[1], w, last_h, last_c, *written)
        in_parts(lstm.run_part, team if parts > 1 else ALONE, parts, args)
        _keep_last(h, cut, last_h)
        _keep_last(c, cut, last_c)


@numba.njit(**JIT)
def _back_rnn(team: int, cuts: Any, h: Any, relu: bool, w: Any, gy: Any, gz: Any, arriving: Any) -> None:
    none, sums = np.empty((0, 0, 0), h.dtype), np.empty((0, 0), h.dtype)
    for n in range(len(cuts) - 1, -1, -1):
        cut, batch, parts = cuts[n], cuts[n, 2], cuts[n, 3]
        bounds = np.empty((2, batch, h.shape[1]), h.dtype)
        bounds[1] = arriving[:batch]
        args = (parts, _steps(h, cut), relu, w, _steps(gy, cut), 0, bounds, _steps(gz, cut), none, none, sums)
        in_parts(rnn.back_part_of, team if parts > 1 else ALONE, parts, args)
        arriving[:batch] = bounds[0]


@numba.njit(**JIT)
def _back_gru(team: int, cuts: Any, h: Any, start: Any, gates: Any, w: Any, gy: Any, ga: Any, arriving: Any) -> None:
    none, sums = np.empty((0, 0, 0), h.dtype), np.empty((0, 0), h.dtype)
    for n in range(len(cuts) - 1, -1, -1):
        cut, batch, parts = cuts[n], cuts[n, 2], cuts[n, 3]
        bounds = np.empty((2, batch, h.shape[1]), h.dtype)
        bounds[1] = arriving[:batch]
        saved = (_steps(h, cut), _before(cuts, n, start, h), _steps(gates, cut))
        args = (parts, *saved, w, _steps(gy, cut), 0, bounds, _steps(ga, cut), none, none, sums)
        in_parts(gru.back_part_of, team if parts > 1 else ALONE, parts, args)
        arriving[:batch] = bounds[0]


@numba.njit(**JIT)
def _back_lstm(
    team: int, cuts: Any, c: Any, start: Any, gates: Any, w: Any, gy: Any, ga: Any, at_h: Any, at_c: Any
) -> None:
    none, sums, hidden = np.empty((0, 0, 0), c.dtype), np.empty((0, 0), c.dtype), c.shape[1]
    for n in range(len(cuts) - 1, -1, -1):
        cut, batch, parts = cuts[n], cuts[n, 2], cuts[n, 3]
        bounds = np.empty((2, batch, 2 * hidden), c.dtype)
        bounds[1, :, :hidden] = at_h[:batch]
        bounds[1, :, hidden:] = at_c[:batch]
        saved = (_steps(c, cut), _before(cuts, n, start, c), _steps(gates, cut))
        args = (parts, *saved, w, _steps(gy, cut), 0, bounds, _steps(ga, cut), none, none, sums)
        in_parts(lstm.back_part_of, team if parts > 1 else ALONE, parts, args)
        at_h[:batch] = bounds[0, :, :hidden]
        at_c[:batch] = bounds[0, :, hidden:]
