"""Recurrent kernels of the Elman RNN (BPPSA Eq. 9) on the host; see `recurrent` for layout and scan."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.core.types import Nonlinearity
from sparsebp.kernels.host.engine import functions
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    device,
    fma,
    lanes,
    load,
    load_n,
    maximum,
    pointer,
    store,
    store_up_to,
    where_positive,
    zeros,
)
from sparsebp.kernels.host.engine.team import in_parts
from sparsebp.kernels.host.recurrent.common import (
    SAMPLES,
    add_to_map,
    blocks_of,
    bounds_for,
    chunk_start,
    clear,
    combine,
    launch,
    load_rows,
    map_rows,
    multiply_add,
    optional_gy,
    pack_columns,
    pack_rows,
    start_map,
    step_map,
    store_map,
    store_rows,
)


@device
def _forward_block(gx: Any, w: Any, h0: Any, relu: bool, h: Any, first: int, scratch: Any) -> None:
    """Run four samples through time. w (H, padded): w_hhᵀ."""
    steps, batch, hidden = gx.shape
    width = w.shape[1]
    gates, out, weights = pointer(gx), pointer(h), pointer(w)
    state = aligned_pointer(scratch)
    z = advance(state, SAMPLES * width)
    load_rows(pointer(h0), hidden, first, batch, hidden, state, width)
    for _ in range(steps):
        load_rows(gates, hidden, first, batch, hidden, z, width)
        multiply_add(state, width, 1, 0, hidden, weights, width, width, z, width)
        for s in range(SAMPLES):
            row = min(first + s, batch - 1) * hidden
            for j in range(0, width, lanes(z)):
                v = load(z, s * width + j)
                v = maximum(zeros(z), v) if relu else functions.tanh(v)
                store(state, s * width + j, v)
                store_up_to(out, row + j, v, hidden - j)
        gates, out = advance(gates, batch * hidden), advance(out, batch * hidden)


@numba.njit(**INNER_JIT)
def _forward_part(block: int, gx: Any, w: Any, h0: Any, relu: bool, h: Any) -> None:
    scratch = np.empty(2 * SAMPLES * w.shape[1] + VECTOR_BYTES, gx.dtype)
    _forward_block(gx, w, h0, relu, h, block * SAMPLES, scratch)


@numba.njit(**JIT)
def _forward(team: int, parts: int, *args: Any) -> None:
    in_parts(_forward_part, team, parts, args)


@device
def _slope(h: Any, relu: bool, g: Any) -> Any:
    """Return g · f' at the output h: relu ``h > 0``, tanh ``1 - h²``."""
    return where_positive(h, g) if relu else g * fma(h, -1.0 * h, 1.0)


@device
def _backward_block(
    h: Any, w: Any, gy: Any, relu: bool, chunk: int, keep_edge: bool, first: int, bounds: Any, gz: Any, scratch: Any
) -> None:
    """Take four samples back through one chunk. w (H, padded): w_hh."""
    steps, batch, hidden = h.shape
    width = w.shape[1]
    chunks = bounds.shape[0] - 1
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    has_gy = gy.size > 0
    weights, step = pointer(w), batch * hidden
    saved, incoming, out = pointer(h), pointer(gy), pointer(gz)
    g = aligned_pointer(scratch)
    x = advance(g, SAMPLES * width)
    edge = pointer(bounds)
    load_rows(advance(edge, (chunk + 1) * step), hidden, first, batch, hidden, g, width)
    for t in range(stop - 1, start - 1, -1):
        for s in range(SAMPLES):
            row = t * step + min(first + s, batch - 1) * hidden
            for j in range(0, width, lanes(g)):
                total = load(g, s * width + j)
                if has_gy:
                    total = total + load_n(incoming, row + j, hidden - j)
                v = _slope(load_n(saved, row + j, hidden - j), relu, total)
                store(x, s * width + j, v)
                store_up_to(out, row + j, v, hidden - j)
        clear(g, SAMPLES * width)
        multiply_add(x, width, 1, 0, hidden, weights, width, width, g, width)
    if keep_edge:
        store_rows(g, width, hidden, advance(edge, chunk * step), hidden, first, batch)


@numba.njit(**INNER_JIT)
def _backward_part(
    task: int, h: Any, w: Any, gy: Any, relu: bool, first_chunk: int, last_chunk: int, bounds: Any, gz: Any
) -> None:
    blocks = (h.shape[1] + SAMPLES - 1) // SAMPLES
    scratch = np.empty(2 * SAMPLES * w.shape[1] + VECTOR_BYTES, h.dtype)
    first = task % blocks * SAMPLES
    chunk = first_chunk + task // blocks
    _backward_block(h, w, gy, relu, chunk, chunk == first_chunk, first, bounds, gz, scratch)


@numba.njit(**JIT)
def _backward(team: int, parts: int, *args: Any) -> None:
    """Take all samples back through the chunks first_chunk … last_chunk, each from what `bounds` says comes in.

    What leaves is stored for the first of them only: the others' is there and is being read by their neighbours.
    """
    in_parts(_backward_part, team, parts, args)


@device
def _reduce_chunk(
    h: Any, w: Any, gy: Any, relu: bool, chunk: int, chunks: int, b: int, maps: Any, scratch: Any
) -> None:
    """Reduce one chunk of one sample to an affine map. The row form of a step's Jacobian is ``diag(f') @ w_hh``."""
    steps, batch, hidden = h.shape
    width = w.shape[1]
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    has_gy = gy.size > 0
    weights, saved, incoming = pointer(w), pointer(h), pointer(gy)
    rows = aligned_pointer(scratch)
    other = advance(rows, map_rows(hidden) * width)
    jacobian = advance(other, map_rows(hidden) * width)
    start_map(rows, hidden, width)
    for t in range(stop - 1, start - 1, -1):
        at = (t * batch + b) * hidden
        if has_gy:
            add_to_map(rows, hidden, width, advance(incoming, at))
        for k in range(hidden):
            value = broadcast(saved, at + k)
            for j in range(0, width, lanes(rows)):
                store(jacobian, k * width + j, _slope(value, relu, load(weights, k * width + j)))
        step_map(rows, jacobian, hidden, width, other)
        rows, other = other, rows
    store_map(rows, hidden, width, advance(pointer(maps), ((chunk - 1) * batch + b) * (hidden + 1) * hidden))


@numba.njit(**INNER_JIT)
def _reduce_part(task: int, h: Any, w: Any, gy: Any, relu: bool, chunks: int, maps: Any) -> None:
    batch, hidden = h.shape[1], h.shape[2]
    scratch = np.empty((2 * map_rows(hidden) + hidden) * w.shape[1] + VECTOR_BYTES, h.dtype)
    _reduce_chunk(h, w, gy, relu, 1 + task // batch, chunks, task % batch, maps, scratch)


@numba.njit(**JIT)
def _reduce(team: int, parts: int, *args: Any) -> None:
    in_parts(_reduce_part, team, parts, args)


@device
def _jacobian_step(h: Any, w_hh: Any, relu: bool, t: int, out: Any, slopes: Any) -> None:
    """Write one step's (H, H, B) block; slopes (H, B) is scratch."""
    _, batch, hidden = h.shape
    for b in range(batch):
        for j in range(hidden):
            value = h[t, b, j]
            slopes[j, b] = (1.0 if value > 0.0 else 0.0) if relu else 1.0 - value * value
    target, source = advance(pointer(out), t * hidden * hidden * batch), pointer(slopes)
    weights = pointer(w_hh)
    for i in range(hidden):
        for j in range(hidden):
            weight = broadcast(weights, j * hidden + i)
            for b in range(0, batch, lanes(source)):
                store_up_to(target, b, weight * load_n(source, j * batch + b, batch - b), batch - b)
            target = advance(target, batch)


@numba.njit(**INNER_JIT)
def _jacobians_part(t: int, h: Any, w_hh: Any, relu: bool, out: Any) -> None:
    _jacobian_step(h, w_hh, relu, t, out, np.empty((h.shape[2], h.shape[1]), h.dtype))


@numba.njit(**JIT)
def _jacobians(team: int, parts: int, *args: Any) -> None:
    in_parts(_jacobians_part, team, parts, args)


class RnnKernels:
    """The kernels ``rnn_*`` of `sparsebp.kernels.api.Kernels` in Numba."""

    def rnn_forward(
        self, gx: np.ndarray, w_hh: np.ndarray, h0: np.ndarray, nonlinearity: Nonlinearity, h: np.ndarray
    ) -> None:
        """Forward over all steps (BPPSA Eq. 9). 2·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _, batch, hidden = h.shape
        if batch:
            work, packed = 2 * gx.size * hidden, pack_columns(w_hh, 1)
            launch(_forward, blocks_of(batch), work, gx, packed, h0, nonlinearity == "relu", h)

    def rnn_backward(
        self,
        h: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        grad_h_n: np.ndarray | None,
        nonlinearity: Nonlinearity,
        gz: np.ndarray,
        gh0: np.ndarray,
    ) -> None:
        """Sequential back-propagation. 2·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _scan_backward(h, w_hh, gy, grad_h_n, nonlinearity, 1, gz, gh0)

    def rnn_scan_backward(
        self,
        h: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        grad_h_n: np.ndarray | None,
        nonlinearity: Nonlinearity,
        chunks: int,
        gz: np.ndarray,
        gh0: np.ndarray,
    ) -> None:
        """Back-propagation by reduce-then-scan over `chunks` chunks of about T/chunks steps.

        With C chunks: 2·T·B·H² FLOP for the gradients themselves, as in `rnn_backward`, and 2·(H + 1)·T·B·H²·(C - 2)/C
        for the maps of all chunks but the first and the last in time, which need none. So the whole does about H times
        the work of `rnn_backward` and pays only where far more than H workers are idle. Scratch: (C - 2)·B·H·(H + 1)
        numbers, and two maps and one Jacobian a thread.
        """
        _scan_backward(h, w_hh, gy, grad_h_n, nonlinearity, chunks, gz, gh0)

    def rnn_jacobians(self, h: np.ndarray, w_hh: np.ndarray, nonlinearity: Nonlinearity, out: np.ndarray) -> None:
        """Materialise the scan's elements, ``w_hhᵀ @ diag(f')``. T·H²·B multiplications and as many numbers written."""
        _, batch, _ = h.shape
        if batch:
            launch(_jacobians, len(h), out.size, h, w_hh, nonlinearity == "relu", out)


def _scan_backward(
    h: np.ndarray,
    w_hh: np.ndarray,
    gy: np.ndarray | None,
    grad_h_n: np.ndarray | None,
    nonlinearity: Nonlinearity,
    chunks: int,
    gz: np.ndarray,
    gh0: np.ndarray,
) -> None:
    """The last chunk needs no map, as what comes into it is known; the first none, as nothing lies before it."""
    steps, batch, hidden = h.shape
    if not batch:
        return
    relu, packed, incoming = nonlinearity == "relu", pack_rows(w_hh), optional_gy(gy, h.dtype)
    bounds = bounds_for(chunks, batch, hidden, h.dtype, grad_h_n)
    blocks, work = blocks_of(batch), 2 * steps * batch * hidden**2
    launch(_backward, blocks, work // chunks, h, packed, incoming, relu, chunks - 1, chunks - 1, bounds, gz)
    if chunks > 2:
        maps = np.empty((chunks - 2, batch, hidden + 1, hidden), h.dtype)
        launch(_reduce, (chunks - 2) * batch, work * hidden, h, packed, incoming, relu, chunks, maps)
        combine(maps, bounds)
    if chunks > 1:
        launch(_backward, (chunks - 1) * blocks, work, h, packed, incoming, relu, 0, chunks - 2, bounds, gz)
    gh0[...] = bounds[0]
