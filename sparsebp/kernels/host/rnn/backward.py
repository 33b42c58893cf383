"""The backward of any recurrent cell on the host: by the recursion, or by reduce-then-scan over chunks of steps.

Reduce-then-scan. The gradient that leaves a step into the past is an affine function of the one that comes in from the
future, ``c[t] = (c[t+1] + gy[t]) @ J[t]`` in row form. A chunk of steps is reduced to one such map of the state's n
values (H, or 2H of an LSTM), kept as n + 1 rows: row i < n is what unit vector i adds, row n the image of zero. All
rows obey the same recursion as a sample's gradient, so reducing a chunk is back-propagating n + 1 rows at once through
``J[t]``, of which only one exists at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, span
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    copy,
    device,
    filled,
    fma,
    keep_alive,
    lanes,
    load,
    load_n,
    load_up_to,
    pointer,
    store,
    store_n,
    store_up_to,
)
from sparsebp.kernels.host.engine.simd import clear as simd_clear
from sparsebp.kernels.host.engine.threads import in_parts
from sparsebp.kernels.host.engine.tiles import (
    GROUP,
    add_outer,
    multiply,
    multiply_lanes,
    multiply_packed,
    multiply_row,
    pack_matrix,
    panel_of,
    product_of,
    to_lanes,
    to_rows,
)
from sparsebp.kernels.host.rnn.equations import (
    MAP_ROOM,
    SAMPLES,
    clear,
    columns_of,
    gru_cell,
    gru_step_back,
    gru_step_map,
    item_of,
    lstm_cell,
    lstm_step_back,
    lstm_step_map,
    map_rows,
    of_cell,
    padded,
    part_at,
    pointers_of,
    rnn_cell,
    rnn_step_back,
    rnn_step_map,
    states_of,
)
from sparsebp.kernels.host.rnn.forward import (
    ask_for,
    blocks_in_lanes,
    empties,
    gate_at,
    launch,
    numbers_of_row,
    padded_width,
    parts_of,
    row_of_columns,
    rows_of,
    team_of,
)
from sparsebp.kernels.operands import WeightSums

# Compiled functions have no annotations: their arguments are arrays, pointers and numbers.
# mypy: disable-error-code="no-untyped-def"

# A chunk of steps taken back through any recurrent cell on the host, the weight gradients summed on the way.
#
# All samples of a part go back in step, so memory is met in order. The gradients at the pre-activations are kept for
# a slice of steps, as many as stay in a core's second cache; then they are summed into the weight gradients, while
# inputs and states are still in the cache. They are written for all steps only if the caller asks for them.
#
# Every block of samples in every chunk has separate sums, over its steps from the last to the first: how steps are
# sliced and blocks shared among threads changes no result.

SLICE = 1 << 17
"""Bytes of gradients that a part keeps until it sums them."""


@numba.njit(**INNER_JIT)
def chunk_start(chunk, chunks, steps):
    """Return the first step of a chunk; chunks differ by one step at most."""
    return chunk * steps // chunks


@device
def _add_sums(gates, columns, x, before, batch, features, hidden, row, stride, a, steps, samples, sums):
    """Add a block's products over a slice to its sums.

    x and before: the first sample's rows of the slice's last step. a: rows of columns, from the last step to the first.
    """
    add_outer(x, features, batch, samples, steps, a, stride, row, sums)
    of_hidden, target = advance(a, part_at(columns - gates, gates, hidden, item_of(a))), advance(sums, features * row)
    add_outer(before, hidden, batch, samples, steps, of_hidden, stride, row, target)
    target, count = advance(target, hidden * row), lanes(a)
    for j in range(0, stride, 4 * count):  # four chains; where none is left, the last one again
        last = stride - count
        j1, j2, j3 = min(j + count, last), min(j + 2 * count, last), min(j + 3 * count, last)
        s0, s1, s2, s3 = load(target, j), load(target, j1), load(target, j2), load(target, j3)
        for r in range(0, steps * samples * stride, stride):
            s0, s1 = s0 + load(a, r + j), s1 + load(a, r + j1)
            s2, s3 = s2 + load(a, r + j2), s3 + load(a, r + j3)
        store(target, j, s0)
        store(target, j1, s1)
        store(target, j2, s2)
        store(target, j3, s3)


@device
def _bring_back(gates, columns, hidden, begin, end, batch, w, width, kept, slot, stride, of_block, g, apart):
    """Add g · w_hh of this step to each sample's gradient at h[t-1], a panel of columns at a time.

    kept: of every block the rows of columns of each slot, `of_block` before the next one's. g: rows of gradients,
    `apart` from each other.
    """
    alone = batch % SAMPLES == 1 and end * SAMPLES > batch
    for q in range(gates):
        first, of_w = part_at(columns - gates + q, gates, hidden, item_of(w)), advance(w, q * hidden * width)
        j = 0
        while j < width:
            panel = panel_of((width - j) // lanes(w)) * lanes(w)
            for block in range(begin, end - 1 if alone else end):
                last = min(batch - block * SAMPLES, SAMPLES) - 1
                of_gate = advance(kept, (block - begin) * of_block + slot * (last + 1) * stride + first)
                own = advance(g, (block - begin) * SAMPLES * apart + j)
                r2, r3 = min(2, last) * stride, min(3, last) * stride
                multiply(of_gate, stride, r2, r3, hidden, advance(of_w, j), width, panel, own, apart)
            j += panel
        if alone:
            block = end - 1 - begin
            of_gate = advance(kept, block * of_block + slot * stride + first)
            multiply_row(of_gate, hidden, of_w, width, width, advance(g, block * SAMPLES * apart))


@device
def _step_back_in_lanes(
    cell, step_back, hidden, w, width, g, now, earlier, gates_of, gy, of_gy, fed, has_gy, ga, has_ga, kept, stride,
    of_block, has_sums,
):  # fmt: skip
    """Take as many samples as a vector has lanes a step back: as one sample with the units of all.

    now, earlier: the first array that the forward kept, in lanes, of this step and the one before. gates_of, gy, ga,
    kept: the first sample's rows. of_gy, fed: scratch; the gates are in `fed` until they are replaced.
    """
    gates, columns, count, item = len(cell), columns_of(cell), lanes(g), item_of(g)
    apart = hidden * count
    if gates > 1:
        to_lanes(gates_of, 4 * hidden, 4 * hidden, fed)
    if has_gy:
        to_lanes(gy, hidden, hidden, of_gy)
    for j in range(0, apart, count):
        total = load(g, j)
        if has_gy:
            total = total + load(of_gy, j)
        total = step_back(cell, (now, fed), earlier, 0, apart, j, total, advance(fed, j), advance(g, apart + j), apart)
        store(g, j, total)
    for q in range(gates):
        of_gate = advance(fed, (columns - gates + q) * apart)
        multiply_lanes(advance(w, q * hidden * width), width, hidden, of_gate, hidden, g)
    if has_ga:
        to_rows(fed, columns * hidden, ga, columns * hidden, SAMPLES * columns * hidden)
    if has_sums:
        to_rows(fed, gates * hidden, kept, stride, of_block)
        if columns > gates:
            of_last = part_at(gates, gates, hidden, item)
            to_rows(advance(fed, gates * apart), hidden, advance(kept, of_last), stride, of_block)


@numba.njit(**INNER_JIT)
def back_part(part, groups, cell, shape, w, gy, first_chunk, bounds, ga, x, before, sums, origin, saved, initial):
    """Take the samples of a group of blocks back through one of the chunks from `first_chunk` on.

    Only `first_chunk` stores the gradient that leaves it. Those of later chunks are in `bounds` already, where the
    chunks before them read them meanwhile.
    w (gates·H, padded): w_hh. ga (…, columns·H) and gy (…, H), or empty; they and `saved` begin at row `origin`.
    sums (chunks·blocks, size), or empty.
    """
    step_back = of_cell(cell, rnn_step_back, gru_step_back, lstm_step_back)
    gates, columns, states = len(cell), columns_of(cell), states_of(cell)
    steps, batch, hidden = shape
    width, count, item = w.shape[1], lanes(pointer(w)), w.itemsize
    blocks, chunks = (batch + SAMPLES - 1) // SAMPLES, bounds.shape[0] - 1
    chunk, group = first_chunk + part // groups, part % groups
    begin, end = group * blocks // groups, (group + 1) * blocks // groups
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    row, stride = padded(gates * hidden, item), row_of_columns(gates, columns, hidden, item)
    step, samples = batch * hidden, (end - begin) * SAMPLES
    has_sums, has_ga, has_gy, features = sums.size > 0, ga.size > 0, gy.size > 0, x.shape[2]
    slots = max(1, min(stop - start, SLICE // (samples * stride * item))) if has_sums else 1
    rows_kept, of_lanes = samples * slots * stride, (columns + 1) * width * count
    scratch = np.empty(samples * (states + 2) * width + rows_kept + of_lanes + VECTOR_BYTES, w.dtype)
    g = aligned_pointer(scratch)  # of every sample, a row of `width` for each of the state's arrays
    kept = advance(g, samples * states * width)
    of_gy, both = advance(kept, rows_kept), advance(kept, rows_kept + of_lanes)
    fed_lanes, in_lanes = advance(of_gy, width * count), blocks_in_lanes(begin, end, batch, hidden, False, g) * SAMPLES
    simd_clear(of_gy, of_lanes)
    of_block = slots * SAMPLES * stride
    weights, incoming, target = pointer(w), pointer(gy), pointer(ga)
    edge = advance(pointer(bounds), chunk * states * step)
    comes = advance(edge, states * step)
    for s in range(0, in_lanes, count):
        to_lanes(
            advance(comes, (begin * SAMPLES + s) * states * hidden), states * hidden, states * hidden,
            advance(g, s * states * width),
        )  # fmt: skip
        at = (stop - 1) * step + (begin * SAMPLES + s) * hidden
        to_lanes(
            advance(saved[0], origin * hidden + at), hidden, hidden, advance(both, (2 * s + stop % 2 * count) * width)
        )
    for s in range(in_lanes, samples):
        sample = min(begin * SAMPLES + s, batch - 1)
        for i in range(states):
            for j in range(0, width, count):
                store(g, (s * states + i) * width + j, load_n(comes, (sample * states + i) * hidden + j, hidden - j))
    size = sums.shape[1]
    own_sums = advance(pointer(sums), (chunk * blocks + begin) * size)
    if has_sums:
        simd_clear(own_sums, (end - begin) * size)
    for slice_end in range(stop, start, -slots):
        slice_start = max(slice_end - slots, start)
        for t in range(slice_end - 1, slice_start - 1, -1):
            earlier = advance(saved[0], origin * hidden + (t - 1) * step) if t > 0 else initial
            slot = slice_end - 1 - t
            rows_from = begin + in_lanes // SAMPLES
            for block in range(end - 1, rows_from - 1, -1):  # samples, too, so that memory is read in one direction
                first, base = block * SAMPLES, (block - begin) * SAMPLES
                rows = min(batch - first, SAMPLES)
                fed = advance(kept, (block - begin) * of_block + slot * rows * stride)
                own = advance(g, base * states * width)
                for s in range(rows - 1, -1, -1):
                    of_sample = (first + s) * hidden
                    previous, at = advance(earlier, of_sample), origin * hidden + t * step + of_sample
                    for j in range(width - count, -1, -count):  # so a part's last vector ends in numbers yet to come
                        place, to = s * states * width + j, advance(fed, s * stride + j)
                        total = load(own, place)
                        if has_gy:
                            total = total + load_up_to(incoming, at + j, hidden - j)
                        second = advance(own, place + width)
                        total = step_back(cell, saved, previous, at, hidden, j, total, to, second, hidden)
                        store(own, place, total)
                        if has_ga:
                            for q in range(columns):
                                value = load(to, part_at(q, gates, hidden, item))
                                store_up_to(target, columns * at + q * hidden + j, value, hidden - j)
            _bring_back(
                gates, columns, hidden, rows_from, end, batch, weights, width,
                advance(kept, (rows_from - begin) * of_block), slot, stride, of_block,
                advance(g, in_lanes * states * width), states * width,
            )  # fmt: skip
            for s in range(in_lanes - count, -1, -count):
                of_sample = (begin * SAMPLES + s) * hidden
                at, pair = origin * hidden + t * step + of_sample, advance(both, 2 * s * width)
                now, before_now = advance(pair, (t + 1) % 2 * count * width), advance(pair, t % 2 * count * width)
                to_lanes(advance(earlier, of_sample), hidden, hidden, before_now)
                ask_for(advance(saved[0], at - 2 * step), hidden * count)
                ask_for(advance(saved[1 if gates > 1 else 0], 4 * (at - step)), 4 * hidden * count if gates > 1 else 0)
                _step_back_in_lanes(
                    cell, step_back, hidden, weights, width, advance(g, s * states * width), now, before_now,
                    advance(saved[1 if gates > 1 else 0], 4 * at), advance(incoming, at), of_gy, fed_lanes, has_gy,
                    advance(target, columns * at), has_ga,
                    advance(kept, s // SAMPLES * of_block + slot * SAMPLES * stride), stride, of_block, has_sums,
                )  # fmt: skip
        if has_sums:
            for block in range(begin, end):
                first = block * SAMPLES
                at = (slice_end - 1) * batch + first
                _add_sums(
                    gates, columns, advance(pointer(x), at * features), advance(pointer(before), at * hidden), batch,
                    features, hidden, row, stride, advance(kept, (block - begin) * of_block), slice_end - slice_start,
                    min(batch - first, SAMPLES), advance(own_sums, (block - begin) * size),
                )  # fmt: skip
    if chunk == first_chunk:
        for s in range(0, in_lanes, count):
            size = states * hidden
            to = advance(edge, (begin * SAMPLES + s) * size)
            to_rows(advance(g, s * states * width), size, to, size, SAMPLES * size)
        for s in range(in_lanes, min(samples, batch - begin * SAMPLES)):
            for i in range(states):
                to = ((begin * SAMPLES + s) * states + i) * hidden
                for j in range(0, width, count):
                    store_up_to(edge, to + j, load(g, (s * states + i) * width + j), hidden - j)
    keep_alive(scratch)


@numba.njit(**JIT)
def _backward(
    team, parts, groups, cell, w_hh, gy, first_chunk, bounds, last, initial, ga, x, before, sums, grads, *saved
):
    places, w = pointers_of(saved), rows_of(w_hh)
    _receive(last, first_chunk, bounds)
    args = (groups, cell, saved[0].shape, w, gy, first_chunk, bounds, ga, x, before, sums, 0, places, places[-1])
    in_parts(back_part, team, parts, args)
    _pass_on(initial, first_chunk, bounds)
    if first_chunk == 0 and sums.size > 0:
        _finish_sums(cell, sums, grads[0], grads[1], grads[2], grads[3])


@numba.njit(**INNER_JIT)
def _receive(last, first_chunk, bounds):
    """Let the gradients at the last state, empty where they are zero, come into the last chunk."""
    batch, hidden = bounds.shape[1], bounds.shape[2] // len(last)
    if first_chunk == bounds.shape[0] - 2:
        for i in range(len(last)):
            for s in range(batch):
                for j in range(hidden):
                    bounds[first_chunk + 1, s, i * hidden + j] = last[i][s, j] if last[i].size > 0 else 0


@numba.njit(**INNER_JIT)
def _pass_on(initial, first_chunk, bounds):
    """Write the gradients that leave the first chunk."""
    batch, hidden = bounds.shape[1], bounds.shape[2] // len(initial)
    if first_chunk == 0:
        for i in range(len(initial)):
            for s in range(batch):
                for j in range(hidden):
                    initial[i][s, j] = bounds[0, s, i * hidden + j]


@numba.njit(**INNER_JIT)
def _finish_sums(cell, sums, weight_ih, weight_hh, bias_ih, bias_hh):
    """Add all blocks' sums, in their order, and write them as torch.nn has them."""
    gates, columns = len(cell), columns_of(cell)
    hidden, features = weight_hh.shape[1], weight_ih.shape[1]
    item = sums.itemsize
    row, first = padded(gates * hidden, item), part_at(columns - gates, gates, hidden, item)
    values, size, count = pointer(sums), sums.shape[1], VECTOR_BYTES // sums.itemsize
    for block in range(1, len(sums)):
        for j in range(0, size, count):
            store(values, j, load(values, j) + load(values, block * size + j))
    of_bias = (features + hidden) * row
    for part in range(gates):
        gate, of_state = gate_at(part, gates, columns), part_at(columns - gates + part, gates, hidden, item)
        for j in range(hidden):
            for i in range(features):
                weight_ih[gate * hidden + j, i] = sums[0, i * row + part * hidden + j]
            for i in range(hidden):
                weight_hh[part * hidden + j, i] = sums[0, (features + i) * row + of_state - first + j]
            if bias_ih.size > 0:
                bias_ih[gate * hidden + j] = sums[0, of_bias + part * hidden + j]
            if bias_hh.size > 0:
                bias_hh[part * hidden + j] = sums[0, of_bias + of_state + j]


# Large hidden states: recurrences whose weights are packed once for all steps, see `tiles.multiply_packed`.
#
# Blocks are of any number of samples, so that a panel of the weights serves them all from the first cache. Every number
# is the same chain of operations as for small states: results are bitwise equal whichever kernel runs and however a
# batch is cut.

LEAST = 128
"""Hidden units from which these kernels are faster, as are products over many steps for weight gradients."""
_TILES = 16
"""Tiles of `SAMPLES` rows that a block should hold: weights come from the outer caches once for all of them."""


# ---- in Python -----------------------------------------------------------------------------------------------------


def wide_blocks_of(batch: int) -> int:
    """Return the number of blocks of samples: a multiple of the threads, unless there are fewer tiles."""
    tiles, many = -(-batch // SAMPLES), threads.count()
    return min(tiles, many * -(-tiles // (many * _TILES)))


def wide_weights(
    cell: tuple[int, ...], w_hh: np.ndarray, b_hn: np.ndarray | None, w_ih: np.ndarray | None, b_ih: np.ndarray | None,
    b_hh: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Return the packed weights of the input, or an empty array, and of the state, and the row of biases.

    Parts are in the order of `forward`, each padded to whole vectors.
    """
    gates, hidden = len(cell), w_hh.shape[1]
    columns = 4 if gates == 3 else gates
    width, order = padded_width(hidden, w_hh.dtype), np.arange(gates)
    of_input = order if gates == columns else np.roll(order, 1)  # as `gate_at` has them
    bias = np.zeros((columns, width), w_hh.dtype)
    if b_ih is not None:
        bias[:gates, :hidden] = b_ih.reshape(gates, hidden)[of_input]
    if b_hh is not None:
        bias[columns - gates :, :hidden] += b_hh.reshape(gates, hidden)
    if b_hn is not None:
        bias[3, :hidden] = b_hn
    none = np.empty(0, w_hh.dtype)
    return none if w_ih is None else _packed(w_ih, of_input, width), _packed(w_hh, order, width), bias.reshape(-1)


def _packed(w: np.ndarray, order: np.ndarray, width: int) -> np.ndarray:
    """Return w (gates·H, K) packed for ``x (K,) @ wᵀ``, its gates in that order."""
    gates, (rows, depth) = len(order), w.shape
    hidden = rows // gates
    turned = np.zeros((depth, gates, width), w.dtype)
    for part, gate in enumerate(order):
        turned[:, part, :hidden] = w[gate * hidden : (gate + 1) * hidden].T
    return pack_matrix(turned.reshape(depth, gates * width))


def wide_rows(w: np.ndarray, gates: int) -> np.ndarray:
    """Return w (gates·H, H) packed for ``x (H,) @ w``, a matrix for each gate."""
    hidden = w.shape[1]
    return np.concatenate([pack_matrix(part) for part in w.reshape(gates, hidden, hidden)])


# ---- in Numba ------------------------------------------------------------------------------------------------------


@device
def _block_of(block, blocks, batch):
    """Return the first sample of a block and their number: whole tiles, except at the batch's end."""
    low, high = span(block, blocks, (batch + SAMPLES - 1) // SAMPLES)
    return low * SAMPLES, min(high * SAMPLES, batch) - low * SAMPLES


@device
def _product(product, x, stride, rows, depth, w, width, out, out_stride):
    """``out[r] += x[r] @ w`` for rows `stride` apart; w has padded rows of `width`."""
    multiply_packed(product, x, GROUP * stride, stride, 1, rows, depth, w, width // lanes(x), out, out_stride)


@device
def _load_rows(source, stride, rows, n, out, out_stride):
    for s in range(rows):
        for j in range(0, n, lanes(source)):
            store(out, s * out_stride + j, load_up_to(source, s * stride + j, n - j))


@device
def _store_rows(source, source_stride, rows, n, out, stride):
    for s in range(rows):
        for j in range(0, n, lanes(source)):
            store_up_to(out, s * stride + j, load(source, s * source_stride + j), n - j)


@device
def _start(gates, columns, product, source, features, rows, hidden, width, w_ih, bias, z):
    """Set rows of z to the biases and the input's products."""
    stride, fed = columns * width, gates * width
    if w_ih.size > 0:
        for s in range(rows):
            copy(advance(z, s * stride), pointer(bias), stride)
        _product(product, source, features, rows, features, pointer(w_ih), fed, z, stride)
        return
    for part in range(gates):
        gate = advance(source, gate_at(part, gates, columns) * hidden)
        for s in range(rows):
            for j in range(0, hidden, lanes(z)):
                at, value = part * width + j, load_up_to(gate, s * gates * hidden + j, hidden - j)
                store(z, s * stride + at, value + load(pointer(bias), at))
    for s in range(rows):
        copy(advance(z, s * stride + fed), advance(pointer(bias), fed), stride - fed)


@numba.njit(**INNER_JIT)
def wide_forward_part(block, blocks, cell, product, shape, x, w_ih, w_hh, bias, origin, places):
    """Run a block of samples through time, as `forward_part`. x (…, I or gates·H); the weights of `wide_weights`."""
    apply, gates, columns = of_cell(cell, rnn_cell, gru_cell, lstm_cell), len(cell), columns_of(cell)
    steps, batch, hidden = shape
    states, width = states_of(cell), padded(hidden, x.itemsize)
    first, rows = _block_of(block, blocks, batch)
    ahead = max(1, GROUP // rows) if rows == batch else 1  # steps projected at once, if their inputs are contiguous
    stride, own, features = columns * width, states * width, x.shape[-1]
    scratch = np.empty((states + columns * ahead) * rows * width + VECTOR_BYTES, x.dtype)
    state = aligned_pointer(scratch)
    z, weights = advance(state, rows * own), pointer(w_hh)
    for i in range(states):
        _load_rows(
            advance(places[len(places) - states + i], first * hidden),
            hidden,
            rows,
            hidden,
            advance(state, i * width),
            own,
        )
    for t in range(steps):
        if t % ahead == 0:
            source = advance(pointer(x), (origin + t * batch + first) * features)
            many = rows * min(ahead, steps - t)
            _start(gates, columns, product, source, features, many, hidden, width, w_ih, bias, z)
        now = advance(z, t % ahead * rows * stride)
        of_state = advance(now, (columns - gates) * width)
        _product(product, state, own, rows, hidden, weights, gates * width, of_state, stride)
        for s in range(rows):
            at = (origin + t * batch + first + s) * hidden
            for j in range(0, width, lanes(state)):
                of_sample = advance(state, s * own)
                apply(cell, advance(now, s * stride), width, of_sample, width, j, hidden, at, places)
    keep_alive(scratch)


@numba.njit(**JIT)
def run_wide_forward(team, parts, cell, product, x, w_ih, w_hh, bias, *arrays):
    """Run all samples; `arrays` as in `run_forward`."""
    args = (parts, cell, product, arrays[0].shape, x, w_ih, w_hh, bias, 0, pointers_of(arrays))
    in_parts(wide_forward_part, team, parts, args)


@numba.njit(**INNER_JIT)
def wide_back_part(task, blocks, cell, product, shape, w, gy, first_chunk, bounds, ga, origin, saved, initial):
    """Take a block of samples back through one of the chunks, as `back_part`; w of `wide_rows`."""
    step_back = of_cell(cell, rnn_step_back, gru_step_back, lstm_step_back)
    gates, columns, states = len(cell), columns_of(cell), states_of(cell)
    steps, batch, hidden = shape
    chunk = first_chunk + task // blocks
    first, rows = _block_of(task % blocks, blocks, batch)
    width, chunks = padded(hidden, ga.itemsize), bounds.shape[0] - 1
    scratch = np.empty((columns + states) * rows * width + VECTOR_BYTES, ga.dtype)
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    stride, step, own = columns * width, batch * hidden, states * width
    incoming, target, weights = pointer(gy), pointer(ga), pointer(w)
    edge = advance(pointer(bounds), (chunk * batch + first) * states * hidden)
    comes = advance(edge, states * step)
    g = aligned_pointer(scratch)  # of every sample, a row of `width` for each of the state's arrays
    fed = advance(g, rows * own)
    for i in range(states):
        _load_rows(advance(comes, i * hidden), states * hidden, rows, hidden, advance(g, i * width), own)
    for t in range(stop - 1, start - 1, -1):
        earlier = advance(saved[0], origin * hidden + (t - 1) * step) if t > 0 else initial
        for s in range(rows):
            row = (first + s) * hidden
            previous, at = advance(earlier, row), origin * hidden + t * step + row
            for j in range(0, width, lanes(g)):
                place, to = s * own + j, advance(fed, s * stride + j)
                total = load(g, place)
                if gy.size > 0:
                    total = total + load_up_to(incoming, at + j, hidden - j)
                second = advance(g, place + width)
                store(g, place, step_back(cell, saved, previous, at, hidden, j, total, to, second, width))
                for q in range(columns):
                    store_up_to(target, columns * at + q * hidden + j, load(to, q * width), hidden - j)
        for q in range(gates):
            of_gate, of_w = advance(fed, (columns - gates + q) * width), advance(weights, q * hidden * width)
            _product(product, of_gate, stride, rows, hidden, of_w, width, g, own)
    if chunk == first_chunk:  # those of later chunks are in `bounds` already, where their neighbours read them
        for i in range(states):
            _store_rows(advance(g, i * width), own, rows, hidden, advance(edge, i * hidden), states * hidden)
    keep_alive(scratch)


@numba.njit(**JIT)
def _wide_backward(team, parts, blocks, cell, product, w, gy, first_chunk, bounds, last, initial, ga, *saved):
    places = pointers_of(saved)
    _receive(last, first_chunk, bounds)
    args = (blocks, cell, product, saved[0].shape, w, gy, first_chunk, bounds, ga, 0, places, places[-1])
    in_parts(wide_back_part, team, parts, args)
    _pass_on(initial, first_chunk, bounds)


# ---- in Python -----------------------------------------------------------------------------------------------------


def back_propagate(
    cell: tuple[int, ...],
    saved: tuple[np.ndarray, ...],
    w_hh: np.ndarray,
    gy: np.ndarray | None,
    last: tuple[np.ndarray | None, ...],
    ga: np.ndarray | None,
    initial: tuple[np.ndarray, ...],
    chunks: int,
    sums: WeightSums | None,
) -> None:
    """Back-propagate through a cell: the recursion, which is one chunk, or reduce-then-scan.

    The last chunk needs no map, as its incoming gradient is known; the first needs none, as no chunk precedes it.

    Parameters
    ----------
    saved
        What the forward kept: h of an RNN or GRU, c of an LSTM (T, B, H), the gates, and that array before the first
        step; of an RNN h alone.
    last
        The gradients (B, H) that come to the arrays of the last state; None stands for zero.
    ga
        The gradients at the pre-activations (T, B, columns·H), written, or None.
    initial
        The gradients (B, H) at the arrays of the state before the first step, written.
    sums
        The weight gradients to write, or None.
    """
    steps, batch, hidden = saved[0].shape
    if not batch:
        for array in () if sums is None else sums[2:]:
            if array is not None:
                array[...] = 0
        return
    flat, square, none = empties(w_hh.dtype)
    incoming, out = none if gy is None else gy, none if ga is None else ga
    size, work = len(last) * hidden, 2 * steps * batch * w_hh.size
    bounds = np.empty((chunks + 1, batch, size), w_hh.dtype)  # into chunk c comes entry c + 1, out of it goes c
    first, second = last if len(last) > 1 else (last[0], None)
    first, second = square if first is None else first, square if second is None else second
    ends: tuple[Any, ...] = bounds, (first, second)[: len(last)], initial, out
    shared: tuple[Any, ...]
    if hidden >= LEAST and sums is None:
        blocks = parts = wide_blocks_of(batch)
        team = team_of(blocks, work // chunks)
        kernel, shared = _wide_backward, (cell, product_of(w_hh.dtype), wide_rows(w_hh, len(cell)), incoming)
    else:
        blocks = -(-batch // SAMPLES)
        team, parts = parts_of(blocks, work // chunks)
        kernel, shared = _backward, (cell, w_hh, incoming)
        if sums is None:
            ends += none, none, square, (square, square, flat, flat)
        else:
            x, before, weight_ih, weight_hh, b_ih, b_hh = sums
            room = np.empty((chunks * blocks, _numbers(cell, hidden, x.shape[2], w_hh.itemsize)), w_hh.dtype)
            biases = flat if b_ih is None else b_ih, flat if b_hh is None else b_hh
            ends += x, before, room, (weight_ih, weight_hh, *biases)
    kernel(team, parts, parts, *shared, chunks - 1, *ends, *saved)
    if chunks > 2:  # from `bounds[chunks - 1]`, the gradients between the other chunks
        maps = np.empty((chunks - 2, batch, size + 1, size), w_hh.dtype)
        mapping = _reducing(steps, batch, size, hidden)
        launch(_reduce, (chunks - 2) * batch, mapping, cell, w_hh, incoming, 1, chunks, maps, *saved)
        _combine(maps, bounds)
    if chunks > 1:
        launch(kernel, (chunks - 1) * blocks, work, blocks, *shared, 0, *ends, *saved)


@cache
def _numbers(cell: tuple[int, ...], hidden: int, features: int, itemsize: int) -> int:
    """Return the numbers of a block's sums: rows of weights, as `pack` has them, and of biases."""
    gates, count = len(cell), VECTOR_BYTES // itemsize
    row = -(-gates * hidden // count) * count
    return (features + hidden) * row + numbers_of_row(gates, 4 if gates == 3 else gates, hidden, itemsize)


def reduce_all(
    cell: tuple[int, ...], saved: tuple[Any, ...], w_hh: np.ndarray, gy: np.ndarray | None, maps: np.ndarray
) -> None:
    """Reduce all chunks of a sequence to affine maps (chunks, B, n + 1, n), written; `saved` as in `back_propagate`."""
    steps, batch, hidden = saved[0].shape
    if not batch:
        return
    incoming = empties(maps.dtype)[2] if gy is None else gy
    chunks, work = len(maps), _reducing(steps, batch, maps.shape[3], hidden)
    launch(_reduce, chunks * batch, work, cell, w_hh, incoming, 0, chunks, maps, *saved)


def _reducing(steps: int, batch: int, size: int, hidden: int) -> int:
    """Return the operations of reducing all steps to maps of `size` values."""
    return 2 * steps * batch * size * size * hidden


# ---- in Numba: affine maps of chunks -------------------------------------------------------------------------------


@device
def start_map(rows, states, hidden, width):
    """Set the rows to the identity map."""
    clear(rows, map_rows(states * hidden) * states * width)
    for k in range(states):
        for i in range(hidden):
            store_n(rows, (k * hidden + i) * states * width + k * width + i, filled(rows, 1.0), 1)


@device
def add_to_map(row, hidden, gy):
    """Add the gradient that arrives at a step, H numbers, to the map's constant row."""
    for j in range(0, hidden, lanes(row)):
        store(row, j, load(row, j) + load_n(gy, j, hidden - j))


@device
def store_map(rows, states, hidden, width, out):
    """Write the map's rows, one more than it has values, without their padding."""
    for i in range((states * hidden + 1) * states):  # a part of a row after the other
        for j in range(0, hidden, lanes(rows)):
            store_up_to(out, i * hidden + j, load(rows, i * width + j), hidden - j)


@numba.njit(**JIT)
def _combine(maps, bounds):
    """Apply the chunks' maps one after the other: write the gradient that comes into every chunk to `bounds`.

    maps (chunks - 2, B, n + 1, n): of all chunks but the first and the last in time. bounds (chunks + 1, B, n), where
    entry chunks - 1, out of the last chunk, is read and entries chunks - 2 … 1 are written.
    """
    chunks, batch, size = maps.shape[0] + 2, bounds.shape[1], bounds.shape[2]
    m, v = pointer(maps), pointer(bounds)
    for c in range(chunks - 2, 0, -1):
        for b in range(batch):
            rows = advance(m, ((c - 1) * batch + b) * (size + 1) * size)
            incoming, outgoing = ((c + 1) * batch + b) * size, (c * batch + b) * size
            for j in range(0, size, lanes(m)):
                total = load_n(rows, size * size + j, size - j)
                for k in range(size):
                    total = fma(broadcast(v, incoming + k), load_n(rows, k * size + j, size - j), total)
                store_up_to(v, outgoing + j, total, size - j)


# ---- in Numba: a chunk -----------------------------------------------------------------------------------------------


@numba.njit(**INNER_JIT)
def _reduce_part(task, cell, shape, w, gy, first_chunk, chunks, maps, saved, initial):
    """Reduce one chunk of one sample to an affine map; `maps` begins with chunk `first_chunk`."""
    step_map, states = of_cell(cell, rnn_step_map, gru_step_map, lstm_step_map), states_of(cell)
    steps, batch, hidden = shape
    width, size = w.shape[1], states * hidden
    scratch = np.empty((2 * map_rows(size) * states + size + MAP_ROOM) * width + VECTOR_BYTES, w.dtype)
    target = advance(pointer(maps), task * (size + 1) * size)
    chunk, b = first_chunk + task // batch, task % batch
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    has_gy = gy.size > 0
    weights, incoming, step = pointer(w), pointer(gy), batch * hidden
    rows = aligned_pointer(scratch)
    other = advance(rows, map_rows(size) * states * width)
    room = advance(other, map_rows(size) * states * width)
    start_map(rows, states, hidden, width)
    for t in range(stop - 1, start - 1, -1):
        at = t * step + b * hidden
        if has_gy:
            add_to_map(advance(rows, size * states * width), hidden, advance(incoming, at))
        previous = advance(saved[0], at - step) if t > 0 else advance(initial, b * hidden)
        step_map(cell, saved, previous, at, hidden, weights, width, rows, other, room)
        rows, other = other, rows
    store_map(rows, states, hidden, width, target)
    keep_alive(scratch)


@numba.njit(**JIT)
def _reduce(team, parts, cell, w_hh, gy, first_chunk, chunks, maps, *saved):
    places, w = pointers_of(saved), rows_of(w_hh)
    in_parts(_reduce_part, team, parts, (cell, saved[0].shape, w, gy, first_chunk, chunks, maps, places, places[-1]))
