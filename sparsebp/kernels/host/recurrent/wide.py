"""Large hidden states: recurrences whose weights are packed once for all steps, see `dense.packed`.

Blocks are of any number of samples, so that a panel of the weights serves them all from the first cache. Every number
is the same chain of operations as in `forward` and `backward`: which kernel runs, and how a batch is cut, changes no
bit. Cells bring the same functions.
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
    copy,
    device,
    lanes,
    load,
    load_up_to,
    pointer,
    store,
    store_up_to,
)
from sparsebp.kernels.host.recurrent.backward import chunk_start
from sparsebp.kernels.host.recurrent.common import padded_width
from sparsebp.kernels.host.recurrent.forward import gate_at, padded

LEAST = 128
"""Hidden units from which on these kernels are the faster ones, and products over many steps for weight gradients."""
_TILES = 4
"""Tiles of `ROWS` rows that a block should hold: the weights then come from the outer caches a quarter as often."""


# ---- in Python -----------------------------------------------------------------------------------------------------


def wide_blocks_of(batch: int) -> int:
    """Return into how many blocks of samples a batch is cut: as many for each thread."""
    tiles, many = -(-batch // ROWS), threads.count()
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
    low, high = span(block, blocks, (batch + ROWS - 1) // ROWS)
    return low * ROWS, min(high * ROWS, batch) - low * ROWS


@device
def _product(
    product: int, x: Any, stride: int, rows: int, depth: int, w: Any, width: int, out: Any, out_stride: int
) -> None:
    """``out[r] += x[r] @ w`` for rows so far apart; w has padded rows of `width`."""
    multiply(product, x, GROUP * stride, stride, 1, rows, depth, w, width // lanes(x), out, out_stride)


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
