"""A chunk of steps taken back through any recurrent cell on the host, the weight gradients summed on the way.

All samples of a part go back in step, so memory is met in order. The gradients at what the weights feed are kept for a
slice of steps, as many as stay in a core's second cache; then they are summed into the weight gradients, and what is
read of inputs and states is there from the recursion. Only who asks for them has them written for all steps.

Every block of samples, in every chunk, has sums of its own, over its steps from the last to the first: how steps are
sliced and blocks shared among threads changes no result.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.kernels.host.dense.packed import panel_of
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    clear,
    device,
    keep_alive,
    lanes,
    load,
    load_n,
    load_up_to,
    pointer,
    store,
    store_up_to,
)
from sparsebp.kernels.host.recurrent.common import SAMPLES
from sparsebp.kernels.host.recurrent.forward import gate_at, item_of, padded, part_at, row_of_columns
from sparsebp.kernels.host.recurrent.tiles import add_outer, multiply, multiply_row

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
        clear(own_sums, (end - begin) * size)
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
