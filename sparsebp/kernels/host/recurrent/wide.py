"""Large hidden states: recurrences whose weights are packed once for all steps, see `dense.packed`.

Blocks are of any number of samples, so that a panel of the weights serves them all from the first cache, and a batch of
one computes one row. How a batch is cut changes no bit: every number is the same chain of operations.

Cells are those of `forward` and `backward`, and rows of what the weights feed are laid out as there.
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
from sparsebp.kernels.host.recurrent.backward import chunk_start
from sparsebp.kernels.host.recurrent.common import padded_width
from sparsebp.kernels.host.recurrent.forward import gate_at

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
    cell: Any, gates: int, columns: int, extra: Any, block: int, blocks: int, product: int, gx: Any, w: Any,
    inner_bias: Any, initial: Any, shape: Any, kept: Any,
) -> None:  # fmt: skip
    """Run a block of samples through time.

    gx (T, B, gates·H); w of `pack_gates`; inner_bias (H,), with which the last column begins where there are more of
    them than gates, else not read; initial: pointers to the arrays (B, H) of the first state.
    """
    first, rows = _block_of(block, blocks, shape[1])
    width = _padded(shape[2], pointer(gx))
    scratch = np.empty(rows * (len(initial) + columns) * width + VECTOR_BYTES, gx.dtype)
    _forward_block(cell, gates, columns, extra, first, rows, product, gx, w, inner_bias, initial, shape, kept, scratch)


@device
def _forward_block(
    cell: Any, gates: int, columns: int, extra: Any, first: int, rows: int, product: int, gx: Any, w: Any,
    inner_bias: Any, initial: Any, shape: Any, kept: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    states, count, width = len(initial), lanes(pointer(gx)), _padded(hidden, pointer(gx))
    stride, state = columns * width, aligned_pointer(scratch)
    z, weights = advance(state, rows * states * width), pointer(w)
    for k in range(states):
        source = advance(initial[k], first * hidden)
        _load_rows(source, hidden, rows, hidden, advance(state, k * width), states * width)
    for t in range(steps):
        at = (t * batch + first) * hidden
        given = advance(pointer(gx), gates * at)
        for part in range(gates):
            source = advance(given, gate_at(part, gates, columns) * hidden)
            _load_rows(source, gates * hidden, rows, hidden, advance(z, part * width), stride)
        if columns > gates:
            _load_rows(pointer(inner_bias), 0, rows, hidden, advance(z, gates * width), stride)
        fed = advance(z, (columns - gates) * width)
        _product(product, state, states * width, rows, hidden, weights, gates * width // count, fed, stride)
        for s in range(rows):
            for j in range(0, width, count):
                row, own = advance(z, s * stride), advance(state, s * states * width)
                cell(extra, row, own, width, j, hidden, at + s * hidden, kept)


# ---- in Numba: backward ----------------------------------------------------------------------------------------------


@device
def wide_back(
    step_back: Any, gates: int, columns: int, states: int, saved: Any, initial: Any, task: int, blocks: int,
    product: int, shape: Any, w: Any, gy: Any, first_chunk: int, bounds: Any, ga: Any,
) -> None:  # fmt: skip
    """Take a block of samples back through one of the chunks: as `backward.back_part`, with weights of `pack_groups`.

    ga (T, B, columns·H), or empty.
    """
    chunk = first_chunk + task // blocks
    first, rows = _block_of(task % blocks, blocks, shape[1])
    scratch = np.empty((columns + states) * rows * _padded(shape[2], pointer(gy)) + VECTOR_BYTES, gy.dtype)
    _back_block(
        step_back, gates, columns, states, saved, initial, first, rows, product, shape, w, gy, chunk,
        first_chunk == chunk, bounds, ga, scratch,
    )  # fmt: skip


@device
def _back_block(
    step_back: Any, gates: int, columns: int, states: int, saved: Any, initial: Any, first: int, rows: int,
    product: int, shape: Any, w: Any, gy: Any, chunk: int, keep_edge: bool, bounds: Any, ga: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    chunks, count, width = bounds.shape[0] - 1, lanes(pointer(gy)), _padded(hidden, pointer(gy))
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    row_of_edge, row_of_g, stride, has_ga = states * hidden, states * width, columns * width, ga.size > 0
    edge = advance(pointer(bounds), (chunk * batch + first) * row_of_edge)
    comes = advance(edge, batch * row_of_edge)
    incoming, target, weights = pointer(gy), pointer(ga), pointer(w)
    groups = 1 if width == hidden else gates
    depth, vectors = gates * hidden // groups, width // count
    g = aligned_pointer(scratch)  # of every sample, a row of `width` for each of the state's arrays
    fed = advance(g, rows * row_of_g)
    of_state = advance(fed, (columns - gates) * width)
    for k in range(states):
        _load_rows(advance(comes, k * hidden), row_of_edge, rows, hidden, advance(g, k * width), row_of_g)
    for t in range(stop - 1, start - 1, -1):
        arrives = t < gy.shape[0]
        before = advance(saved[0], (t - 1) * batch * hidden) if t > 0 else initial
        for s in range(rows):
            row = (first + s) * hidden
            previous, at = advance(before, row), t * batch * hidden + row
            for j in range(0, width, count):
                own, to = advance(g, s * row_of_g + j), advance(fed, s * stride + j)
                total = load(own, 0)
                if arrives:
                    total = total + load_n(incoming, at + j, hidden - j)
                store(own, 0, step_back(saved, previous, at, hidden, j, total, to, advance(own, width), width))
                if has_ga:
                    for q in range(columns):
                        store_up_to(target, columns * at + q * hidden + j, load(to, q * width), hidden - j)
        for group in range(groups):
            source, panels = advance(of_state, group * width), advance(weights, group * depth * width)
            _product(product, source, stride, rows, depth, panels, vectors, g, row_of_g)
    if keep_edge:  # the others' is there and is being read by neighbours
        for k in range(states):
            _store_rows(advance(g, k * width), row_of_g, rows, hidden, advance(edge, k * hidden), row_of_edge)
