"""The kernels of RNN, GRU and LSTM on the host, over all steps of a batch or over sequences of several lengths.

A cell's equations are in `equations`, the frames that run any of them in `forward` and `backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.check import Array, Nonlinearity
from sparsebp.kernels.host.dense.products import column_sums
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import VECTOR_BYTES, advance, copy, device, keep_alive, pointer
from sparsebp.kernels.host.engine.threads import ALONE, in_parts, team
from sparsebp.kernels.host.engine.tiles import product_of
from sparsebp.kernels.host.rnn.backward import (
    LEAST,
    back_part,
    back_propagate,
    reduce_all,
    run_wide_forward,
    wide_back_part,
    wide_blocks_of,
    wide_forward_part,
    wide_rows,
    wide_weights,
)
from sparsebp.kernels.host.rnn.equations import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    SAMPLES,
    gru_jacobian,
    lstm_jacobian,
    of_cell,
    pointers_of,
    rnn_jacobian,
    states_of,
)
from sparsebp.kernels.host.rnn.forward import (
    WORTH_THREADS,
    blocks_of,
    empties,
    forward_part,
    launch,
    pack,
    padded_width,
    parts_of,
    rows_of,
    run_forward,
    weights_of,
)
from sparsebp.kernels.operands import WeightSums

# Compiled functions have no annotations: their arguments are arrays, pointers and numbers.
# mypy: disable-error-code="no-untyped-def"

INPUT_WEIGHTS = 1 << 17
"""Bytes of the input's weights up to which steps project the input as they go."""

_RNN = {"tanh": RNN_TANH, "relu": RNN_RELU}


@numba.njit(**JIT)
def _jacobians(team, parts, cell, w_hh, out, *saved):
    in_parts(of_cell(cell, rnn_jacobian, gru_jacobian, lstm_jacobian), team, parts, (cell, w_hh, out, saved))


class RecurrentKernels:
    """The recurrences of `sparsebp.kernels.spec.Kernels` in Numba.

    A forward is sequential in T and parallel over blocks of samples, a backward also over chunks.
    """

    MOST_INPUTS = 1 << 31

    @cache  # noqa: B019 - asked in every step, of one object
    def projected_inputs(self, gates: int, hidden: int, itemsize: int) -> int:
        """Inputs whose weights stay in a core's second cache; for large states, panels stay in the first one."""
        return INPUT_WEIGHTS // (gates * padded_width(hidden, f"f{itemsize}") * itemsize) if hidden < LEAST else 1 << 31

    @cache  # noqa: B019
    def sums_for(self, gates: int, hidden: int, features: int, itemsize: int) -> tuple[int, int]:
        """Each block of samples has its sums."""
        inside = hidden < LEAST and features <= self.projected_inputs(gates, hidden, itemsize)
        return (features if inside else 0), SAMPLES

    def rnn_forward(
        self, x: Array, w_hh: Array, h0: Array, nonlinearity: Nonlinearity, h: Array, w_ih: Array | None,
        b_ih: Array | None, b_hh: Array | None, fresh: bool,
    ) -> None:  # fmt: skip
        """2·T·B·H² FLOP."""
        _forward(_RNN[nonlinearity], x, w_hh, None, (w_ih, b_ih, b_hh), (h0,), fresh, h)

    def rnn_backward(
        self, h: Array, w_hh: Array, gy: Array | None, grad_h_n: Array | None, nonlinearity: Nonlinearity,
        gz: Array | None, gh0: Array, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """See `back_propagate`."""
        back_propagate(_RNN[nonlinearity], (h,), w_hh, gy, (grad_h_n,), gz, (gh0,), chunks, sums)

    def rnn_maps(self, h: Array, w_hh: Array, gy: Array | None, nonlinearity: Nonlinearity, maps: Array) -> None:
        """Parallel over samples and chunks."""
        reduce_all(_RNN[nonlinearity], (h,), w_hh, gy, maps)

    def rnn_jacobians(self, h: Array, w_hh: Array, nonlinearity: Nonlinearity, out: Array) -> None:
        """T·H²·B multiplications and as many numbers written."""
        if h.shape[1]:
            launch(_jacobians, len(h), out.size, _RNN[nonlinearity], w_hh, out, h)

    def gru_forward(
        self, x: Array, w_hh: Array, b_hn: Array, h0: Array, h: Array, gates: Array, w_ih: Array | None,
        b_ih: Array | None, b_hh: Array | None, fresh: bool,
    ) -> None:  # fmt: skip
        """6·T·B·H² FLOP."""
        _forward(GRU, x, w_hh, b_hn, (w_ih, b_ih, b_hh), (h0,), fresh, h, gates)

    def gru_backward(
        self, h: Array, h0: Array, gates: Array, w_hh: Array, gy: Array | None, grad_h_n: Array | None,
        ga: Array | None, gh0: Array, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """See `back_propagate`."""
        back_propagate(GRU, (h, gates, h0), w_hh, gy, (grad_h_n,), ga, (gh0,), chunks, sums)

    def sum_gates(
        self, ga: Array, first: int, product: Array | None, w_ih: Array | None, b_ih: Array | None, b_hh: Array | None
    ) -> None:
        """A GEMV: four times faster than ``ga.sum(axis=0)``."""
        rows = ga.shape[1] - first
        if product is not None and w_ih is not None:
            w_ih[: rows - first], w_ih[rows - first :] = product[first:], product[:first]
        if b_ih is not None or b_hh is not None:
            sums = column_sums(ga)
            if b_ih is not None:
                b_ih[: rows - first], b_ih[rows - first :] = sums[first:rows], sums[:first]
            if b_hh is not None:
                b_hh[...] = sums[first:]

    def gru_maps(self, h: Array, h0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Parallel over samples and chunks."""
        reduce_all(GRU, (h, gates, h0), w_hh, gy, maps)

    def gru_jacobians(self, h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """5·T·H²·B FLOP, T·H²·B numbers written."""
        if h.shape[1]:
            launch(_jacobians, len(h), 5 * out.size, GRU, w_hh, out, h, gates, h0)

    def lstm_forward(
        self, x: Array, w_hh: Array, h0: Array, c0: Array, h: Array, c: Array, gates: Array, w_ih: Array | None,
        b_ih: Array | None, b_hh: Array | None, fresh: bool,
    ) -> None:  # fmt: skip
        """8·T·B·H² FLOP."""
        _forward(LSTM, x, w_hh, None, (w_ih, b_ih, b_hh), (h0, c0), fresh, h, c, gates)

    def lstm_backward(
        self, c: Array, c0: Array, gates: Array, w_hh: Array, gy: Array | None, grad_h_n: Array | None,
        grad_c_n: Array | None, ga: Array | None, gh0: Array, gc0: Array, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """See `back_propagate`."""
        back_propagate(LSTM, (c, gates, c0), w_hh, gy, (grad_h_n, grad_c_n), ga, (gh0, gc0), chunks, sums)

    def lstm_maps(self, c: Array, c0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Parallel over samples and chunks."""
        reduce_all(LSTM, (c, gates, c0), w_hh, gy, maps)

    def lstm_jacobians(self, c: Array, c0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """14·T·H²·B FLOP, 2·T·H·(H + 1)·B numbers written."""
        if c.shape[1]:
            launch(_jacobians, len(c), 7 * out.size, LSTM, w_hh, out, c, gates, c0)


def _forward(
    cell: tuple[int, ...], x: Array, w_hh: Array, b_hn: Array | None, projection: Sequence[Array | None],
    initial: tuple[Array, ...], fresh: bool, *kept: Array,
) -> None:  # fmt: skip
    """Run a cell forward; `projection` are w_ih and both biases or None, `kept` what the cell keeps, h first."""
    for array in initial if fresh else ():
        array[...] = 0
    arrays, (_, batch, hidden) = (*kept, *initial), kept[0].shape
    work = 2 * len(x) * batch * w_hh.size
    if batch and hidden >= LEAST:
        blocks, weights = wide_blocks_of(batch), wide_weights(cell, w_hh, b_hn, *projection)
        launch(run_wide_forward, blocks, work, cell, product_of(w_hh.dtype), x, *weights, *arrays)
    elif batch:
        b_hn = empties(w_hh.dtype)[0] if b_hn is None else b_hn
        count = VECTOR_BYTES // w_hh.itemsize
        # an RNN's step of a vector's samples takes no longer than that of half of them in rows
        group = count if len(cell) == 1 and hidden >= count and batch % count == 0 else SAMPLES
        run_forward(*parts_of(-(-batch // group), work), cell, x, *weights_of(w_hh, *projection), b_hn, *arrays)


# Runs over the rows of sequences of several lengths: all segments in one call, forward and back.
#
# A segment is some steps with the same samples, whose rows are one array (steps, samples, features); between two of
# them sequences end. Weights are packed once for all of them. The numbers are bitwise equal to those of one call for
# each segment.

Cuts = Sequence[tuple[int, int, int]]
"""For each segment the first row, the steps and the samples, the first ones of the batch; in the order of time."""
_KINDS = {"rnn_tanh": RNN_TANH, "rnn_relu": RNN_RELU, "gru": GRU, "lstm": LSTM}


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
        weight_ih and both biases, as the kernels of one run take them; None if x is projected.
    states, gates
        Arrays (N, H), one for each array of the state, and gates (N, 4H) of a GRU or an LSTM, written.
    last
        The state before each sample's first step (B, H), replaced by that after its last one.
    """
    cell, hidden, b_hn = _KINDS[kind], w_hh.shape[1], empties(w_hh.dtype)[0]
    if kind == "gru":
        b_hn = np.zeros(hidden, x.dtype) if b_hh is None else b_hh[2 * hidden :]
    arrays = (*states, *last) if gates is None else (*states, gates, *last)
    parts = _team_and_table(cuts, w_hh)
    if hidden >= LEAST:
        packed = wide_weights(cell, w_hh, b_hn if kind == "gru" else None, *projection)
        _run_wide_segments(*parts, cell, product_of(x.dtype), x, *packed, *arrays)
    else:
        _run_segments(*parts, cell, x, *weights_of(w_hh, *projection), b_hn, *arrays)


def backward(
    kind: str, cuts: Cuts, w_hh: Array, start: tuple[Array, ...], states: tuple[Array, ...], gates: Array | None,
    gy: Array | None, ga: Array, arriving: tuple[Array, ...],
) -> None:  # fmt: skip
    """Take gradients back through `forward`, each segment by the recursion.

    Parameters
    ----------
    start
        The state before each sample's first step (B, H).
    gy
        The gradient that arrives at h (N, H), or None.
    ga
        The gradients at the pre-activations (N, columns·H), written.
    arriving
        The gradients at the state after each sample's last step (B, H), replaced by those at `start`.
    """
    incoming = empties(w_hh.dtype)[1] if gy is None else gy
    saved = (states[-1], start[-1]) if gates is None else (states[-1], gates, start[-1])
    cell, parts, arrays = _KINDS[kind], _team_and_table(cuts, w_hh), (incoming, ga, *saved, *arriving)
    if w_hh.shape[1] >= LEAST:
        _wide_segments_back(*parts, cell, product_of(w_hh.dtype), wide_rows(w_hh, len(cell)), *arrays)
    else:
        _segments_back(*parts, cell, w_hh, *arrays)


def _team_and_table(cuts: Cuts, w_hh: Array) -> tuple[int, np.ndarray]:
    """Return the team for the segment of most work, and for each segment a row with its number of parts at the end."""
    most, each, wide = threads.count(), 2 * w_hh.size, w_hh.shape[1] >= LEAST
    parts = [
        (wide_blocks_of(batch) if wide else min(blocks_of(batch), most)) if steps * batch * each >= WORTH_THREADS else 1
        for _, steps, batch in cuts
    ]
    table = np.array([(*cut, count) for cut, count in zip(cuts, parts, strict=True)], np.int64)
    return team(max(parts)), table


@numba.njit(**JIT)
def _run_segments(team, cuts, cell, x, w_ih, b_ih, b_hh, w_hh, b_hn, *arrays):
    """Run all segments; `arrays` as `places` of `forward_part`, where the state before becomes the last one."""
    w, places, states = pack(cell, w_ih, b_ih, b_hh, w_hh, b_hn), pointers_of(arrays), states_of(cell)
    hidden = w_hh.shape[1]
    for number in range(len(cuts)):
        first, steps, batch, parts = cuts[number, 0], cuts[number, 1], cuts[number, 2], cuts[number, 3]
        args = (parts, cell, (steps, batch, hidden), x, w_ih.shape[1], w, first, places)
        in_parts(forward_part, team if parts > 1 else ALONE, parts, args)
        _take_over(states, first + (steps - 1) * batch, batch, hidden, places)


@numba.njit(**JIT)
def _run_wide_segments(team, cuts, cell, product, x, w_ih, w_hh, bias, *arrays):
    """The same with the weights of `wide_weights`."""
    places, states, hidden = pointers_of(arrays), states_of(cell), arrays[0].shape[1]
    for number in range(len(cuts)):
        first, steps, batch, parts = cuts[number, 0], cuts[number, 1], cuts[number, 2], cuts[number, 3]
        args = (parts, cell, product, (steps, batch, hidden), x, w_ih, w_hh, bias, first, places)
        in_parts(wide_forward_part, team if parts > 1 else ALONE, parts, args)
        _take_over(states, first + (steps - 1) * batch, batch, hidden, places)


@device
def _take_over(states, row, batch, hidden, places):
    """Copy the states of the last step of a segment, from `row` on, to where the next one begins."""
    for i in range(states):
        copy(places[len(places) - states + i], advance(places[i], row * hidden), batch * hidden)


@numba.njit(**JIT)
def _segments_back(team, cuts, cell, w_hh, gy, ga, *arrays):
    """Take all segments back; `arrays`: those that were saved, the state before them, and the arriving gradients."""
    w, places, hidden = rows_of(w_hh), pointers_of(arrays), w_hh.shape[1]
    none, sums = np.empty((0, 0, 0), w.dtype), np.empty((0, 0), w.dtype)
    for number in range(len(cuts) - 1, -1, -1):
        bounds = np.empty((2, cuts[number, 2], states_of(cell) * hidden), w.dtype)
        shape, parts, initial = _come_in(cuts, number, cell, hidden, bounds, places)
        first = cuts[number, 0]
        args = (parts, cell, shape, w, gy, 0, bounds, ga, none, none, sums, first, places, initial)
        in_parts(back_part, team if parts > 1 else ALONE, parts, args)
        _go_out(cell, bounds, hidden, places)


@numba.njit(**JIT)
def _wide_segments_back(team, cuts, cell, product, w, gy, ga, *arrays):
    """The same with the weights of `wide_rows`."""
    places, hidden = pointers_of(arrays), arrays[0].shape[1]
    for number in range(len(cuts) - 1, -1, -1):
        bounds = np.empty((2, cuts[number, 2], states_of(cell) * hidden), w.dtype)
        shape, parts, initial = _come_in(cuts, number, cell, hidden, bounds, places)
        args = (parts, cell, product, shape, w, gy, 0, bounds, ga, cuts[number, 0], places, initial)
        in_parts(wide_back_part, team if parts > 1 else ALONE, parts, args)
        _go_out(cell, bounds, hidden, places)


@numba.njit(**INNER_JIT)
def _come_in(cuts, number, cell, hidden, bounds, places):
    """Write the arriving gradients to a segment's `bounds`; return its shape and parts, and the state before it."""
    first, steps, batch, parts = cuts[number, 0], cuts[number, 1], cuts[number, 2], cuts[number, 3]
    states = states_of(cell)
    arriving = len(places) - states
    edge = advance(pointer(bounds), batch * states * hidden)
    for s in range(batch):
        for i in range(states):
            copy(advance(edge, (s * states + i) * hidden), advance(places[arriving + i], s * hidden), hidden)
    initial = places[arriving - 1]
    if number > 0:  # the last step of the segment before
        initial = advance(places[0], (first - cuts[number - 1, 2]) * hidden)
    return (steps, batch, hidden), parts, initial


@numba.njit(**INNER_JIT)
def _go_out(cell, bounds, hidden, places):
    """Let the gradients at the state before a segment arrive at the one before it."""
    states, edge = states_of(cell), pointer(bounds)
    for s in range(bounds.shape[1]):
        for i in range(states):
            to = advance(places[len(places) - states + i], s * hidden)
            copy(to, advance(edge, (s * states + i) * hidden), hidden)
    keep_alive(bounds)
