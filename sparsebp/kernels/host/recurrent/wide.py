"""Large hidden states: recurrences whose weights are packed once for all steps, see `dense.packed`.

Blocks are of any number of samples, so that a panel of the weights serves them all from the first cache, and a batch of
one computes one row. Every number is the same chain of operations as in the kernels for blocks of four samples: which
of the two runs, and how a batch is cut, changes no bit.

A cell brings ``step(saved, at, hidden, j, z, state, width, given)``: from the pre-activations `z` of units j …, a gate
every `width` numbers, and the arrays of the state before, likewise, compute the state after and keep what is `saved`;
`at` is where the sample's row begins in an array (T, B, H), `given` the projected input, a gate every `hidden` numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core import threads
from sparsebp.kernels.host.dense.packed import GROUP, ROWS, multiply, pack
from sparsebp.kernels.host.engine.parts import span
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    device,
    lanes,
    load,
    load_n,
    pointer,
    store,
    store_up_to,
)
from sparsebp.kernels.host.recurrent.common import padded_width

LEAST = 64
"""Hidden units from which on these kernels are the faster ones."""
_TILES = 4  # of `ROWS` samples that a block should hold: the weights then come from memory a quarter as often


# ---- in Python -----------------------------------------------------------------------------------------------------


def wide_blocks_of(batch: int) -> int:
    """Return into how many blocks of samples a batch is cut: as many for each thread."""
    tiles, many = -(-batch // ROWS), threads.count()
    return min(tiles, many * -(-tiles // (many * _TILES)))


def pack_gates(w: np.ndarray, gates: int) -> np.ndarray:
    """Return w (gates·H, H) packed for ``h (H,) @ wᵀ``, each gate padded to whole vectors."""
    hidden = w.shape[1]
    width = padded_width(hidden, w.dtype)
    if width == hidden:
        return pack(w.T)
    columns = np.zeros((hidden, gates, width), w.dtype)
    columns[:, :, :hidden] = w.reshape(gates, hidden, hidden).transpose(2, 0, 1)
    return pack(columns.reshape(hidden, gates * width))


def pack_groups(w: np.ndarray, gates: int) -> np.ndarray:
    """Return w (gates·H, H) packed for ``Σ x_g (H,) @ w_g``, a matrix a gate where H is no whole vectors."""
    hidden = w.shape[1]
    if padded_width(hidden, w.dtype) == hidden:
        return pack(w)
    return np.concatenate([pack(part) for part in w.reshape(gates, hidden, hidden)])


# ---- in Numba: forward -----------------------------------------------------------------------------------------------


@device
def _block_of(block: int, blocks: int, batch: int) -> Any:
    """Return the first sample of a block and how many it has: whole tiles, but at the batch's end."""
    low, high = span(block, blocks, (batch + ROWS - 1) // ROWS)
    return low * ROWS, min(high * ROWS, batch) - low * ROWS


@device
def _padded(hidden: int, like: Any) -> int:
    count = lanes(like)
    return (hidden + count - 1) // count * count


@device
def _load_rows(source: Any, stride: int, rows: int, n: int, out: Any, out_stride: int) -> None:
    for s in range(rows):
        for j in range(0, n, lanes(source)):
            store(out, s * out_stride + j, load_n(source, s * stride + j, n - j))


@device
def _store_rows(source: Any, source_stride: int, rows: int, n: int, out: Any, stride: int) -> None:
    for s in range(rows):
        for j in range(0, n, lanes(source)):
            store_up_to(out, s * stride + j, load(source, s * source_stride + j), n - j)


@device
def _product(
    product: int, x: Any, stride: int, rows: int, depth: int, w: Any, vectors: int, out: Any, out_stride: int
) -> None:
    multiply(product, x, GROUP * stride, stride, 1, rows, depth, w, vectors, out, out_stride, False)


@device
def wide_forward(
    step: Any, gates: int, states: int, block: int, blocks: int, product: int, gx: Any, w: Any, inner_bias: Any,
    initial: Any, shape: Any, saved: Any,
) -> None:  # fmt: skip
    """Run a block of samples through time.

    gx (T, B, gates·H); w of `pack_gates`; inner_bias (H,), with which the last gate begins instead, or empty;
    initial: pointers to the arrays (B, H) of the first state.
    """
    first, rows = _block_of(block, blocks, shape[1])
    width = _padded(shape[2], pointer(gx))
    scratch = np.empty(rows * (states + gates) * width + VECTOR_BYTES, gx.dtype)
    _forward_block(step, gates, states, first, rows, product, gx, w, inner_bias, initial, shape, saved, scratch)


@device
def _forward_block(
    step: Any, gates: int, states: int, first: int, rows: int, product: int, gx: Any, w: Any, inner_bias: Any,
    initial: Any, shape: Any, saved: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    count, width = lanes(pointer(gx)), _padded(hidden, pointer(gx))
    state = aligned_pointer(scratch)
    z, weights = advance(state, rows * states * width), pointer(w)
    for k in range(states):
        source = advance(initial[k], first * hidden)
        _load_rows(source, hidden, rows, hidden, advance(state, k * width), states * width)
    fed = gates if inner_bias.size == 0 else gates - 1
    for t in range(steps):
        at = (t * batch + first) * hidden
        given = advance(pointer(gx), gates * at)
        for gate in range(fed):
            place = advance(z, gate * width)
            _load_rows(advance(given, gate * hidden), gates * hidden, rows, hidden, place, gates * width)
        if fed < gates:
            _load_rows(pointer(inner_bias), 0, rows, hidden, advance(z, fed * width), gates * width)
        _product(product, state, states * width, rows, hidden, weights, gates * width // count, z, gates * width)
        for s in range(rows):
            row, own, projected = advance(z, s * gates * width), advance(state, s * states * width), s * gates * hidden
            for j in range(0, width, count):
                source = advance(given, projected + j)
                step(saved, at + s * hidden, hidden, j, advance(row, j), advance(own, j), width, source)


# ---- in Numba: backward ----------------------------------------------------------------------------------------------


@device
def wide_back(
    step_back: Any, gates: int, states: int, saved: Any, initial: Any, task: int, blocks: int, product: int, shape: Any,
    w: Any, gy: Any, first_chunk: int, bounds: Any, out: Any,
) -> None:  # fmt: skip
    """Take a block of samples back through one of the chunks: as `back.back_part`, with weights of `pack_groups`."""
    chunk = first_chunk + task // blocks
    first, rows = _block_of(task % blocks, blocks, shape[1])
    scratch = np.empty((gates + states) * rows * _padded(shape[2], pointer(gy)) + VECTOR_BYTES, gy.dtype)
    _back_block(
        step_back, gates, states, saved, initial, first, rows, product, shape, w, gy, chunk, first_chunk == chunk,
        bounds, out, scratch,
    )  # fmt: skip


@device
def _back_block(
    step_back: Any, gates: int, states: int, saved: Any, initial: Any, first: int, rows: int, product: int, shape: Any,
    w: Any, gy: Any, chunk: int, keep_edge: bool, bounds: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    chunks, count, width = bounds.shape[0] - 1, lanes(pointer(gy)), _padded(hidden, pointer(gy))
    start, stop = chunk * steps // chunks, (chunk + 1) * steps // chunks
    row_of_edge, row_of_x = states * hidden, (gates + states - 1) * width
    edge = advance(pointer(bounds), (chunk * batch + first) * row_of_edge)
    comes = advance(edge, batch * row_of_edge)
    incoming, target, weights = pointer(gy), pointer(out), pointer(w)
    groups = 1 if width == hidden else gates
    depth, vectors = gates * hidden // groups, width // count
    g = aligned_pointer(scratch)
    x = advance(g, rows * width)
    beside = advance(x, gates * width)  # where the second array's gradient is, in every row of x
    _load_rows(comes, row_of_edge, rows, hidden, g, width)
    if states > 1:
        _load_rows(advance(comes, hidden), row_of_edge, rows, hidden, beside, row_of_x)
    for t in range(stop - 1, start - 1, -1):
        arrives = t < gy.shape[0]
        before = advance(saved[0], (t - 1) * batch * hidden) if t > 0 else initial
        for s in range(rows):
            row = (first + s) * hidden
            previous, at = advance(before, row), t * batch * hidden + row
            for j in range(0, width, count):
                total = load(g, s * width + j)
                if arrives:
                    total = total + load_n(incoming, at + j, hidden - j)
                fed = advance(x, s * row_of_x + j)
                store(g, s * width + j, step_back(saved, previous, at, hidden, j, total, target, fed, width))
        for group in range(groups):
            source, panels = advance(x, group * width), advance(weights, group * depth * width)
            _product(product, source, row_of_x, rows, depth, panels, vectors, g, width)
    if keep_edge:  # the others' is there and is being read by neighbours
        _store_rows(g, width, rows, hidden, edge, row_of_edge)
        if states > 1:
            _store_rows(beside, row_of_x, rows, hidden, advance(edge, hidden), row_of_edge)
