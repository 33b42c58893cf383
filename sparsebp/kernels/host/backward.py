"""The way back through any recurrent cell on the host: by the recursion, or by reduce-then-scan over chunks of steps.

Reduce-then-scan. The gradient that leaves a step into the past is an affine function of the one that comes in from the
future, ``c[t] = (c[t+1] + gy[t]) @ J[t]`` in row form. A chunk of steps is reduced to one such map of the state's n
values (H, or 2H of an LSTM), kept as n + 1 rows: row i < n is what unit vector i adds, row n the image of zero. All
rows obey the same recursion as a sample's gradient, so reducing a chunk is back-propagating n + 1 rows at once through
``J[t]``, of which only one exists at a time.

A cell brings two functions. `saved` is a tuple of what they read, the pointer to the state's last array first;
`previous` points to the sample's row of that array before the step; `at` is where its row begins at the step, in an
array (T, B, H). `states` is the number of arrays of H values that the cell's state consists of, 1 or 2.

step_back(saved, previous, at, hidden, j, g, out, beside, width)
    For units j … and the gradient g at their h, write the gradients at what the weights feed to `out`, `width` apart,
    the last ones those that the weights bring back; return what comes to the h before without weights. A second array
    of the state has its gradient `beside`, which is read and replaced.
step_map(saved, previous, at, hidden, w, width, rows, out, room)
    Take a map's rows, `states` parts of `width` each, one step into the past. There is room for
    ``states * hidden + MAP_ROOM`` rows of `width`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.kernels.host.dense import GROUP, PANEL_ROWS, pack, panel_of, product_of
from sparsebp.kernels.host.dense import multiply as packed_multiply
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
from sparsebp.kernels.host.forward import (
    SAMPLES,
    add_outer,
    blocks_of,
    clear,
    gate_at,
    item_of,
    launch,
    multiply,
    multiply_add,
    multiply_row,
    numbers_of_row,
    pack_rows,
    padded,
    padded_width,
    part_at,
    parts_of,
    row_of_columns,
)
from sparsebp.kernels.operands import WeightSums

# A chunk of steps taken back through any recurrent cell on the host, the weight gradients summed on the way.
#
# All samples of a part go back in step, so memory is met in order. The gradients at what the weights feed are kept for
# a slice of steps, as many as stay in a core's second cache; then they are summed into the weight gradients, and what
# is read of inputs and states is there from the recursion. Only who asks for them has them written for all steps.
#
# Every block of samples, in every chunk, has sums of its own, over its steps from the last to the first: how steps are
# sliced and blocks shared among threads changes no result.

SLICE = 1 << 17
"""Bytes of gradients that a part keeps until it sums them."""


@numba.njit(**INNER_JIT)
def chunk_start(chunk: int, chunks: int, steps: int) -> int:
    """Return the first step of a chunk; chunks differ by one step at most."""
    return chunk * steps // chunks


@device
def _gather(rows_of: Any, batch: int, length: int, steps: int, rows: int, out: Any) -> None:
    """Write the rows of a block's samples in so many steps one behind the other, from the last step to the first.

    Where they lie, steps may be a power of two apart, and a few of them then fill the sets of the first cache that they
    fall into. A sum over a single run of rows is also one loop, not one of four turns in another.
    """
    for t in range(steps):
        for s in range(rows):
            source, to = advance(rows_of, ((steps - 1 - t) * batch + s) * length), (t * rows + s) * length
            for j in range(0, length, lanes(out)):  # the last vector ends in a row that is yet to come
                store(out, to + j, load_up_to(source, j, length - j))


@device
def _add_sums(
    gates: int, columns: int, x: Any, before: Any, at: int, batch: int, features: int, hidden: int, row: int,
    stride: int, a: Any, steps: int, rows: int, room: Any, sums: Any,
) -> None:  # fmt: skip
    """Add a block's products over a slice to its sums.

    x and before begin at row `at` of (T·B, …). a: rows of columns as `_gather` orders them. room: for what it writes.
    """
    if features > 0:
        _gather(advance(x, at * features), batch, features, steps, rows, room)
        add_outer(room, features, features, a, stride, steps * rows, row, sums)
    of_hidden, target = advance(a, part_at(columns - gates, gates, hidden, item_of(a))), advance(sums, features * row)
    _gather(advance(before, at * hidden), batch, hidden, steps, rows, room)
    add_outer(room, hidden, hidden, of_hidden, stride, steps * rows, row, target)
    target = advance(target, hidden * row)
    for j in range(0, stride, lanes(a)):
        total = load(target, j)
        for r in range(steps * rows):
            total = total + load(a, r * stride + j)
        store(target, j, total)


@device
def _bring_back(
    gates: int, columns: int, hidden: int, begin: int, end: int, batch: int, w: Any, width: int, kept: Any, slot: int,
    stride: int, of_block: int, g: Any, apart: int,
) -> None:  # fmt: skip
    """Add to the blocks' gradients at h what comes to the step before through the state's weights, panel by panel.

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
def back_part(
    step_back: Any, gates: int, columns: int, states: int, saved: Any, initial: Any, part: int, groups: int, shape: Any,
    w: Any, gy: Any, first_chunk: int, bounds: Any, ga: Any, x: Any, before: Any, sums: Any,
) -> None:  # fmt: skip
    """Take the samples of a group of blocks back through one of the chunks from `first_chunk` on.

    What leaves is stored for the first of these chunks only: the others' is there and is being read by neighbours.
    w (gates·H, padded): w_hh. ga (T, B, columns·H), or empty. sums (chunks·blocks, size), or empty.
    """
    steps, batch, hidden = shape
    width, count, item = w.shape[1], lanes(pointer(w)), w.itemsize
    blocks, chunks = (batch + SAMPLES - 1) // SAMPLES, bounds.shape[0] - 1
    chunk, group = first_chunk + part // groups, part % groups
    begin, end = group * blocks // groups, (group + 1) * blocks // groups
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    row, stride = padded(gates * hidden, item), row_of_columns(gates, columns, hidden, item)
    step, samples = batch * hidden, (end - begin) * SAMPLES
    has_sums, has_ga, features = sums.size > 0, ga.size > 0, x.shape[2]
    slots = max(1, min(stop - start, SLICE // (samples * stride * item))) if has_sums else 1
    gathered = slots * SAMPLES * max(features, hidden) + count if has_sums else 0
    scratch = np.empty(samples * (states * width + slots * stride) + gathered + VECTOR_BYTES, w.dtype)
    g = aligned_pointer(scratch)  # of every sample, a row of `width` for each of the state's arrays
    kept = advance(g, samples * states * width)
    room, of_block = advance(kept, samples * slots * stride), slots * SAMPLES * stride
    weights, incoming, target = pointer(w), pointer(gy), pointer(ga)
    edge = advance(pointer(bounds), chunk * states * step)
    comes = advance(edge, states * step)
    for s in range(samples):
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
            arrives = t < gy.shape[0]
            earlier = advance(saved[0], (t - 1) * step) if t > 0 else initial
            slot = slice_end - 1 - t
            for block in range(begin, end):
                first, base = block * SAMPLES, (block - begin) * SAMPLES
                rows = min(batch - first, SAMPLES)
                fed = advance(kept, (block - begin) * of_block + slot * rows * stride)
                own = advance(g, base * states * width)
                for s in range(rows):
                    of_sample = (first + s) * hidden
                    previous, at = advance(earlier, of_sample), t * step + of_sample
                    for j in range(width - count, -1, -count):  # so a part's last vector ends in numbers yet to come
                        place, to = s * states * width + j, advance(fed, s * stride + j)
                        total = load(own, place)
                        if arrives:
                            total = total + load_up_to(incoming, at + j, hidden - j)
                        beside = advance(own, place + width)
                        store(own, place, step_back(saved, previous, at, hidden, j, total, to, beside, hidden))
                        if has_ga:
                            for q in range(columns):
                                value = load(to, part_at(q, gates, hidden, item))
                                store_up_to(target, columns * at + q * hidden + j, value, hidden - j)
            _bring_back(
                gates, columns, hidden, begin, end, batch, weights, width, kept, slot, stride, of_block, g,
                states * width,
            )  # fmt: skip
        if has_sums:
            for block in range(begin, end):
                first = block * SAMPLES
                _add_sums(
                    gates, columns, pointer(x), pointer(before), slice_start * batch + first, batch, features, hidden,
                    row, stride, advance(kept, (block - begin) * of_block), slice_end - slice_start,
                    min(batch - first, SAMPLES), room, advance(own_sums, (block - begin) * size),
                )  # fmt: skip
    if chunk == first_chunk:
        for s in range(min(samples, batch - begin * SAMPLES)):
            for i in range(states):
                to = ((begin * SAMPLES + s) * states + i) * hidden
                for j in range(0, width, count):
                    store_up_to(edge, to + j, load(g, (s * states + i) * width + j), hidden - j)
    keep_alive(scratch)


@numba.njit(**JIT)
def finish_sums(
    gates: int, columns: int, sums: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any
) -> None:
    """Add all blocks' sums, in their order, and write them as torch.nn has them."""
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


# Large hidden states: recurrences whose weights are packed once for all steps, see `dense.packed`.
#
# Blocks are of any number of samples, so that a panel of the weights serves them all from the first cache. Every number
# is the same chain of operations as in `forward` and `backward`: which kernel runs, and how a batch is cut, changes no
# bit. Cells bring the same functions.

LEAST = 128
"""Hidden units from which on these kernels are the faster ones, and products over many steps for weight gradients."""
_TILES = 4
"""Tiles of `ROWS` rows that a block should hold: the weights then come from the outer caches a quarter as often."""


# ---- in Python -----------------------------------------------------------------------------------------------------


def wide_blocks_of(batch: int) -> int:
    """Return into how many blocks of samples a batch is cut: as many for each thread."""
    tiles, many = -(-batch // PANEL_ROWS), threads.count()
    return min(tiles, many * -(-tiles // (many * _TILES)))


def wide_weights(
    gates: int, columns: int, w_ih: np.ndarray | None, b_ih: np.ndarray | None, b_hh: np.ndarray | None,
    w_hh: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Return the weights of the input, or an empty array, and of the state, packed, and the row of biases.

    Parts are in the order of `forward`, each padded to whole vectors.
    """
    hidden = w_hh.shape[1]
    width, order = padded_width(hidden, w_hh.dtype), np.arange(gates)
    of_input = order if gates == columns else np.roll(order, 1)  # as `gate_at` has them
    bias = np.zeros((columns, width), w_hh.dtype)
    if b_ih is not None:
        bias[:gates, :hidden] = b_ih.reshape(gates, hidden)[of_input]
    if b_hh is not None:
        bias[columns - gates :, :hidden] += b_hh.reshape(gates, hidden)
    none = np.empty(0, w_hh.dtype)
    return none if w_ih is None else _packed(w_ih, of_input, width), _packed(w_hh, order, width), bias.reshape(-1)


def _packed(w: np.ndarray, order: np.ndarray, width: int) -> np.ndarray:
    """Return w (gates·H, K) packed for ``x (K,) @ wᵀ``, its gates in that order."""
    gates, (rows, depth) = len(order), w.shape
    hidden = rows // gates
    turned = np.zeros((depth, gates, width), w.dtype)
    for part, gate in enumerate(order):
        turned[:, part, :hidden] = w[gate * hidden : (gate + 1) * hidden].T
    return pack(turned.reshape(depth, gates * width))


def wide_rows(w: np.ndarray, gates: int) -> np.ndarray:
    """Return w (gates·H, H) packed for ``x (H,) @ w``, a matrix for each gate."""
    hidden = w.shape[1]
    return np.concatenate([pack(part) for part in w.reshape(gates, hidden, hidden)])


# ---- in Numba ------------------------------------------------------------------------------------------------------


@device
def _block_of(block: int, blocks: int, batch: int) -> Any:
    """Return the first sample of a block and how many it has: whole tiles, but at the batch's end."""
    low, high = span(block, blocks, (batch + PANEL_ROWS - 1) // PANEL_ROWS)
    return low * PANEL_ROWS, min(high * PANEL_ROWS, batch) - low * PANEL_ROWS


@device
def _product(
    product: int, x: Any, stride: int, rows: int, depth: int, w: Any, width: int, out: Any, out_stride: int
) -> None:
    """``out[r] += x[r] @ w`` for rows so far apart; w has padded rows of `width`."""
    packed_multiply(product, x, GROUP * stride, stride, 1, rows, depth, w, width // lanes(x), out, out_stride)


@device
def _load_rows(source: Any, stride: int, rows: int, n: int, out: Any, out_stride: int) -> None:
    for s in range(rows):
        for j in range(0, n, lanes(source)):
            store(out, s * out_stride + j, load_up_to(source, s * stride + j, n - j))


@device
def _store_rows(source: Any, source_stride: int, rows: int, n: int, out: Any, stride: int) -> None:
    for s in range(rows):
        for j in range(0, n, lanes(source)):
            store_up_to(out, s * stride + j, load(source, s * source_stride + j), n - j)


@device
def wide_forward(
    cell: Any, gates: int, columns: int, extra: Any, block: int, blocks: int, product: int, shape: Any, x: Any,
    w_ih: Any, w_hh: Any, bias: Any, initial: Any, kept: Any,
) -> None:  # fmt: skip
    """Run a block of samples through time. x (T, B, I or gates·H); the weights of `wide_weights`."""
    first, rows = _block_of(block, blocks, shape[1])
    ahead = (
        max(1, GROUP // rows) if rows == shape[1] else 1
    )  # steps projected at once, where their inputs are one piece
    width = padded(shape[2], x.itemsize)
    scratch = np.empty((len(initial) + columns * ahead) * rows * width + VECTOR_BYTES, x.dtype)
    _forward_block(
        cell, gates, columns, extra, first, rows, ahead, product, shape, x, w_ih, w_hh, bias, initial, kept, scratch
    )


@device
def _start(
    gates: int, columns: int, product: int, source: Any, x: Any, rows: int, hidden: int, width: int, w_ih: Any,
    bias: Any, z: Any,
) -> None:  # fmt: skip
    """Set so many rows of z to the biases and the input's products."""
    stride, fed = columns * width, gates * width
    if w_ih.size > 0:
        for s in range(rows):
            copy(advance(z, s * stride), pointer(bias), stride)
        _product(product, source, x.shape[2], rows, x.shape[2], pointer(w_ih), fed, z, stride)
        return
    for part in range(gates):
        gate = advance(source, gate_at(part, gates, columns) * hidden)
        _load_rows(gate, gates * hidden, rows, hidden, advance(z, part * width), stride)
    for s in range(rows):
        copy(advance(z, s * stride + fed), advance(pointer(bias), fed), stride - fed)


@device
def _forward_block(
    cell: Any, gates: int, columns: int, extra: Any, first: int, rows: int, ahead: int, product: int, shape: Any,
    x: Any, w_ih: Any, w_hh: Any, bias: Any, initial: Any, kept: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    states, width = len(initial), padded(hidden, x.itemsize)
    stride, own = columns * width, states * width
    state = aligned_pointer(scratch)
    z, weights = advance(state, rows * own), pointer(w_hh)
    for i in range(states):
        _load_rows(advance(initial[i], first * hidden), hidden, rows, hidden, advance(state, i * width), own)
    for t in range(steps):
        if t % ahead == 0:
            source, many = advance(pointer(x), (t * batch + first) * x.shape[2]), rows * min(ahead, steps - t)
            _start(gates, columns, product, source, x, many, hidden, width, w_ih, bias, z)
        now = advance(z, t % ahead * rows * stride)
        of_state = advance(now, (columns - gates) * width)
        _product(product, state, own, rows, hidden, weights, gates * width, of_state, stride)
        for s in range(rows):
            at = (t * batch + first + s) * hidden
            for j in range(0, width, lanes(state)):
                cell(extra, advance(now, s * stride), width, advance(state, s * own), width, j, hidden, at, kept)


@device
def wide_back(
    step_back: Any, gates: int, columns: int, saved: Any, initial: Any, task: int, blocks: int, product: int,
    shape: Any, w: Any, gy: Any, first_chunk: int, bounds: Any, ga: Any,
) -> None:  # fmt: skip
    """Take a block of samples back through one of the chunks, as `backward.back_part`; w of `wide_rows`."""
    chunk, states = first_chunk + task // blocks, bounds.shape[2] // shape[2]
    first, rows = _block_of(task % blocks, blocks, shape[1])
    scratch = np.empty((columns + states) * rows * padded(shape[2], ga.itemsize) + VECTOR_BYTES, ga.dtype)
    _back_block(
        step_back, gates, columns, states, saved, initial, first, rows, product, shape, w, gy, chunk,
        chunk == first_chunk, bounds, ga, scratch,
    )  # fmt: skip


@device
def _back_block(
    step_back: Any, gates: int, columns: int, states: int, saved: Any, initial: Any, first: int, rows: int,
    product: int, shape: Any, w: Any, gy: Any, chunk: int, keep_edge: bool, bounds: Any, ga: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    width, chunks = padded(hidden, ga.itemsize), bounds.shape[0] - 1
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
        arrives = t < gy.shape[0]
        earlier = advance(saved[0], (t - 1) * step) if t > 0 else initial
        for s in range(rows):
            row = (first + s) * hidden
            previous, at = advance(earlier, row), t * step + row
            for j in range(0, width, lanes(g)):
                place, to = s * own + j, advance(fed, s * stride + j)
                total = load(g, place)
                if arrives:
                    total = total + load_up_to(incoming, at + j, hidden - j)
                store(g, place, step_back(saved, previous, at, hidden, j, total, to, advance(g, place + width), width))
                for q in range(columns):
                    store_up_to(target, columns * at + q * hidden + j, load(to, q * width), hidden - j)
        for q in range(gates):
            of_gate, of_w = advance(fed, (columns - gates + q) * width), advance(weights, q * hidden * width)
            _product(product, of_gate, stride, rows, hidden, of_w, width, g, own)
    if keep_edge:  # the others' is there and is being read by neighbours
        for i in range(states):
            _store_rows(advance(g, i * width), own, rows, hidden, advance(edge, i * hidden), states * hidden)


MAP_ROOM = 16
"""Rows of scratch that `step_map` may use beside those of a Jacobian."""


# ---- in Python -----------------------------------------------------------------------------------------------------


def back_propagate(
    backward: Any,
    wide: Any,
    reduce: Any,
    columns: int,
    saved: tuple[Any, ...],
    w_hh: np.ndarray,
    gy: np.ndarray | None,
    last: tuple[np.ndarray | None, ...],
    out: np.ndarray | None,
    initial: tuple[np.ndarray, ...],
    chunks: int,
    sums: WeightSums | None,
) -> None:
    """Back-propagate through a cell: the recursion, which is one chunk, or reduce-then-scan.

    The last chunk needs no map, as what comes into it is known; the first none, as nothing lies before it.

    Parameters
    ----------
    backward, wide, reduce
        The cell's kernels: parts of `back_part`, of `wide_back` and of `reduce_part`.
    columns
        Columns of `out`, in multiples of the hidden size.
    saved
        What forward left, an array (T, B, H) first: the first arguments of both.
    last
        The gradients (B, H) that come to the arrays of the last state; None stands for zero.
    out
        The gradients at what the weights feed, written, or None.
    initial
        The gradients (B, H) at the arrays of the state before the first step, written.
    sums
        What else is written, where it is not None.
    """
    steps, batch, hidden = saved[0].shape
    if not batch:
        for array in () if sums is None else sums[2:]:
            if array is not None:
                array[...] = 0
        return
    none = np.empty((0, 0, 0), w_hh.dtype)  # one Numba specialisation serves both what is there and what is not
    incoming, out = none if gy is None else gy, none if out is None else out
    weights, size = pack_rows(w_hh), len(last) * hidden
    bounds = np.empty((chunks + 1, batch, size), w_hh.dtype)  # what comes into chunk c is entry c + 1, what leaves it c
    for number, array in enumerate(last):
        bounds[chunks, :, number * hidden : (number + 1) * hidden] = 0 if array is None else array
    work = 2 * steps * batch * w_hh.size

    def scan() -> None:
        """Compute from what comes into the last chunk but one, `bounds[chunks - 1]`, what comes into the others."""
        if chunks > 2:
            maps = np.empty((chunks - 2, batch, size + 1, size), w_hh.dtype)
            args = (*saved, weights, incoming, 1, chunks, maps)
            launch(reduce, (chunks - 2) * batch, _reducing(steps, batch, size, hidden), *args)
            _combine(maps, bounds)

    if hidden >= LEAST and sums is None:
        _recur_wide(wide, saved, w_hh, incoming, bounds, work, scan, out)
    else:
        x, before, room = none, none, np.empty((0, 0), w_hh.dtype)
        if sums is not None:
            gates, features = len(w_hh) // hidden, sums.x.shape[2]
            numbers = (features + hidden) * padded_width(len(w_hh), w_hh.dtype)
            numbers += numbers_of_row(gates, columns, hidden, w_hh.itemsize)
            x, before, room = sums.x, sums.before, np.empty((chunks * blocks_of(batch), numbers), w_hh.dtype)
        _recur(backward, (*saved, weights, incoming), bounds, work, scan, (out, x, before, room))
    if sums is not None:
        biases = (np.empty(0, w_hh.dtype) if bias is None else bias for bias in (sums.bias_ih, sums.bias_hh))
        finish_sums(gates, columns, room, sums.weight_ih, sums.weight_hh, *biases)
    for number, array in enumerate(initial):
        array[...] = bounds[0, :, number * hidden : (number + 1) * hidden]


def _recur(
    backward: Any, args: tuple[Any, ...], bounds: np.ndarray, work: int, scan: Callable[[], None],
    written: tuple[np.ndarray, ...],
) -> None:  # fmt: skip
    """Run the recursion in the last chunk, then, after the scan, in those before it."""
    chunks, batch = len(bounds) - 1, bounds.shape[1]
    team, groups = parts_of(blocks_of(batch), work // chunks)
    backward(team, groups, groups, *args, chunks - 1, bounds, *written)
    scan()
    if chunks > 1:
        blocks = blocks_of(batch)
        launch(backward, (chunks - 1) * blocks, work, blocks, *args, 0, bounds, *written)


def _recur_wide(
    wide: Any, saved: tuple[Any, ...], w_hh: np.ndarray, incoming: np.ndarray, bounds: np.ndarray, work: int,
    scan: Callable[[], None], out: np.ndarray,
) -> None:  # fmt: skip
    """The same for large hidden sizes, by products with packed weights."""
    chunks, batch, hidden = len(bounds) - 1, bounds.shape[1], w_hh.shape[1]
    packed, blocks = wide_rows(w_hh, len(w_hh) // hidden), wide_blocks_of(batch)
    args = blocks, product_of(w_hh.dtype), *saved, packed, incoming
    launch(wide, blocks, work // chunks, *args, chunks - 1, bounds, out)
    scan()
    if chunks > 1:
        launch(wide, (chunks - 1) * blocks, work, *args, 0, bounds, out)


def reduce_all(reduce: Any, saved: tuple[Any, ...], w_hh: np.ndarray, gy: np.ndarray | None, maps: np.ndarray) -> None:
    """Reduce all chunks of a sequence to affine maps; `reduce` and `saved` as in `back_propagate`.

    Parameters
    ----------
    maps
        (chunks, B, n + 1, n), written.
    """
    steps, batch, hidden = saved[0].shape
    if not batch:
        return
    incoming = np.empty((0, 0, 0), maps.dtype) if gy is None else gy
    chunks, work = len(maps), _reducing(steps, batch, maps.shape[3], hidden)
    launch(reduce, chunks * batch, work, *saved, pack_rows(w_hh), incoming, 0, chunks, maps)


def _reducing(steps: int, batch: int, size: int, hidden: int) -> int:
    """Return the operations of reducing all steps: of maps of `size` values, by as many products of H × H as arrays."""
    return 2 * steps * batch * size * size * hidden


# ---- in Numba: affine maps of chunks -------------------------------------------------------------------------------


@device
def map_rows(size: int) -> int:
    """Return how many scratch rows an affine map of `size` values takes: one more, in whole blocks."""
    return (size + SAMPLES) // SAMPLES * SAMPLES


@device
def start_map(rows: Any, states: int, hidden: int, width: int) -> None:
    """Set the rows to the identity map."""
    clear(rows, map_rows(states * hidden) * states * width)
    for k in range(states):
        for i in range(hidden):
            store_n(rows, (k * hidden + i) * states * width + k * width + i, filled(rows, 1.0), 1)


@device
def add_to_map(row: Any, hidden: int, gy: Any) -> None:
    """Add the gradient that arrives at a step, H numbers, to the map's constant row."""
    for j in range(0, hidden, lanes(row)):
        store(row, j, load(row, j) + load_n(gy, j, hidden - j))


@device
def multiply_map(rows: Any, jacobian: Any, hidden: int, width: int, out: Any) -> None:
    """``out = rows @ jacobian``: take a map of one state one step into the past. 2 · (H + 1) · H² FLOP."""
    clear(out, map_rows(hidden) * width)
    for first in range(0, map_rows(hidden), SAMPLES):
        at = first * width
        multiply_add(advance(rows, at), width, 1, 0, hidden, jacobian, width, width, advance(out, at), width)


@device
def store_map(rows: Any, states: int, hidden: int, width: int, out: Any) -> None:
    """Write the map's rows, one more than it has values, without their padding."""
    for i in range((states * hidden + 1) * states):  # a part of a row after the other
        for j in range(0, hidden, lanes(rows)):
            store_up_to(out, i * hidden + j, load(rows, i * width + j), hidden - j)


@numba.njit(**JIT)
def _combine(maps: Any, bounds: Any) -> None:
    """Apply the chunks' maps one after the other: what comes into every chunk, written into `bounds`.

    maps (chunks - 2, B, n + 1, n): of all chunks but the first and the last in time. bounds (chunks + 1, B, n), where
    entry chunks - 1, what leaves the last chunk, is read and entries chunks - 2 … 1 are written.
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


@device
def reduce_part(
    step_map: Any, states: int, saved: Any, initial: Any, task: int, shape: Any, w: Any, gy: Any, first_chunk: int,
    chunks: int, maps: Any,
) -> None:  # fmt: skip
    """Reduce one chunk, from `first_chunk` on, of one sample to an affine map; theirs is the first entry of `maps`."""
    _, batch, hidden = shape
    size = states * hidden
    scratch = np.empty((2 * map_rows(size) * states + size + MAP_ROOM) * w.shape[1] + VECTOR_BYTES, w.dtype)
    target = advance(pointer(maps), task * (size + 1) * size)
    chunk = first_chunk + task // batch
    _reduce_chunk(step_map, states, saved, initial, shape, w, gy, chunk, chunks, task % batch, target, scratch)


@device
def _reduce_chunk(
    step_map: Any, states: int, saved: Any, initial: Any, shape: Any, w: Any, gy: Any, chunk: int, chunks: int, b: int,
    target: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    width, size = w.shape[1], states * hidden
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
        step_map(saved, previous, at, hidden, weights, width, rows, other, room)
        rows, other = other, rows
    store_map(rows, states, hidden, width, target)


# ---- in Numba: Jacobians ---------------------------------------------------------------------------------------------


@device
def write_row(gates: int, factors: Any, weights: Any, i: int, hidden: int, batch: int, out: Any) -> None:
    """Write row i of one step's block ``Σ w_hhᵀ · diag(factor)``: (H, B). factors (gates, H, B)."""
    square, plane = hidden * hidden, hidden * batch
    for j in range(hidden):
        at = j * hidden + i
        for b in range(0, batch, lanes(factors)):
            k, n = j * batch + b, batch - b
            value = broadcast(weights, at) * load_n(factors, k, n)
            for q in range(1, gates):
                value = fma(broadcast(weights, q * square + at), load_n(factors, q * plane + k, n), value)
            store_up_to(out, k, value, n)


@device
def write_jacobian(gates: int, factors: Any, w_hh: Any, t: int, out: Any) -> None:
    """Write one step's (H, H, B) block ``Σ w_hhᵀ · diag(factor)``, plus the diagonal of a factor beyond the gates.

    factors (gates or gates + 1, H, B).
    """
    _, hidden, batch = factors.shape
    plane = hidden * batch
    target, source, weights = advance(pointer(out), t * hidden * plane), pointer(factors), pointer(w_hh)
    for i in range(hidden):
        write_row(gates, source, weights, i, hidden, batch, target)
        if factors.shape[0] > gates:
            for b in range(0, batch, lanes(source)):
                k, n = i * batch + b, batch - b
                store_n(target, k, load_n(target, k, n) + load_n(source, gates * plane + k, n), n)
        target = advance(target, plane)
