"""Recurrent kernels of the GRU (BPPSA Eq. 10 and 11) on the host; see `recurrent` for layout and scan."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

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
    pointer,
    store,
    store_n,
    store_up_to,
)
from sparsebp.kernels.host.engine.team import in_parts
from sparsebp.kernels.host.recurrent.common import (
    SAMPLES,
    add_to_map,
    blocks_of,
    bounds_for,
    chunk_start,
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
def _forward_block(gx: Any, w: Any, b_hn: Any, h0: Any, h: Any, gates: Any, first: int, scratch: Any) -> None:
    """Run four samples through time. w (H, 3·padded): w_hhᵀ, gates r, z, n."""
    steps, batch, hidden = h.shape
    width = w.shape[1] // 3
    projected, out, kept, weights, bias = pointer(gx), pointer(h), pointer(gates), pointer(w), pointer(b_hn)
    state = aligned_pointer(scratch)
    z = advance(state, SAMPLES * width)
    load_rows(pointer(h0), hidden, first, batch, hidden, state, width)
    for _ in range(steps):
        load_rows(projected, 3 * hidden, first, batch, hidden, z, 3 * width)
        load_rows(advance(projected, hidden), 3 * hidden, first, batch, hidden, advance(z, width), 3 * width)
        load_rows(bias, 0, first, batch, hidden, advance(z, 2 * width), 3 * width)
        multiply_add(state, width, 1, 0, hidden, weights, 3 * width, 3 * width, z, 3 * width)
        for s in range(SAMPLES):
            row = min(first + s, batch - 1)
            for j in range(0, width, lanes(z)):
                n = hidden - j
                at = s * 3 * width + j
                reset = functions.sigmoid(load(z, at))
                update = functions.sigmoid(load(z, at + width))
                inner = load(z, at + 2 * width)
                new = functions.tanh(fma(reset, inner, load_n(projected, row * 3 * hidden + 2 * hidden + j, n)))
                v = fma(update, load(state, s * width + j) - new, new)
                store(state, s * width + j, v)
                store_up_to(out, row * hidden + j, v, n)
                store_up_to(kept, row * 4 * hidden + j, reset, n)
                store_up_to(kept, row * 4 * hidden + hidden + j, update, n)
                store_up_to(kept, row * 4 * hidden + 2 * hidden + j, new, n)
                store_up_to(kept, row * 4 * hidden + 3 * hidden + j, inner, n)
        projected, out = advance(projected, 3 * batch * hidden), advance(out, batch * hidden)
        kept = advance(kept, 4 * batch * hidden)


@numba.njit(**INNER_JIT)
def _forward_part(block: int, gx: Any, w: Any, b_hn: Any, h0: Any, h: Any, gates: Any) -> None:
    scratch = np.empty(2 * SAMPLES * w.shape[1] + VECTOR_BYTES, h.dtype)
    _forward_block(gx, w, b_hn, h0, h, gates, block * SAMPLES, scratch)


@numba.njit(**JIT)
def _forward(team: int, parts: int, *args: Any) -> None:
    in_parts(_forward_part, team, parts, args)


@device
def _factors(gates: Any, at: int, hidden: int, previous: Any, j: int) -> Any:
    """Return the diagonals of Eq. 11 for hidden units j …: at N, R, Z and M, and the direct one, z.

    gates[at] is the first gate of the sample and step, `previous` points to its h[t-1]. In the paper's terms:
    N: j6·j7, R: j2·j3·j6·j7, Z: j9·j10, M: j5·j6·j7, with j2 = r(1 - r), j3 = M, j5 = r, j6 = 1 - n², j7 = 1 - z,
    j9 = z(1 - z), j10 = h[t-1] - n.
    """
    n = hidden - j
    reset, update = load_n(gates, at + j, n), load_n(gates, at + hidden + j, n)
    new, inner = load_n(gates, at + 2 * hidden + j, n), load_n(gates, at + 3 * hidden + j, n)
    keep = 1.0 - update
    to_n = keep * fma(new, -1.0 * new, 1.0)
    to_m = to_n * reset
    to_r = to_m * (1.0 - reset) * inner
    to_z = update * keep * (load_n(previous, j, n) - new)
    return to_n, to_r, to_z, to_m, update


@device
def _backward_block(
    h: Any,
    h0: Any,
    gates: Any,
    w: Any,
    gy: Any,
    chunk: int,
    keep_edge: bool,
    first: int,
    bounds: Any,
    ga: Any,
    scratch: Any,
) -> None:
    """Take four samples back through one chunk. w (3H, padded): w_hh."""
    steps, batch, hidden = h.shape
    width = w.shape[1]
    chunks = bounds.shape[0] - 1
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    has_gy = gy.size > 0
    weights, step = pointer(w), batch * hidden
    saved, initial, kept, incoming, out = pointer(h), pointer(h0), pointer(gates), pointer(gy), pointer(ga)
    g = aligned_pointer(scratch)
    x = advance(g, SAMPLES * width)
    edge = pointer(bounds)
    load_rows(advance(edge, (chunk + 1) * step), hidden, first, batch, hidden, g, width)
    for t in range(stop - 1, start - 1, -1):
        before = advance(saved, (t - 1) * step) if t > 0 else initial
        for s in range(SAMPLES):
            row = min(first + s, batch - 1) * hidden
            previous = advance(before, row)
            at = 4 * (t * step + row)
            for j in range(0, width, lanes(g)):
                n = hidden - j
                total = load(g, s * width + j)
                if has_gy:
                    total = total + load_n(incoming, t * step + row + j, n)
                to_n, to_r, to_z, to_m, direct = _factors(kept, at, hidden, previous, j)
                g_r, g_z, g_m = to_r * total, to_z * total, to_m * total
                store_up_to(out, at + j, to_n * total, n)
                store_up_to(out, at + hidden + j, g_r, n)
                store_up_to(out, at + 2 * hidden + j, g_z, n)
                store_up_to(out, at + 3 * hidden + j, g_m, n)
                to = s * 3 * width + j
                store(x, to, g_r)
                store(x, to + width, g_z)
                store(x, to + 2 * width, g_m)
                store(g, s * width + j, direct * total)
        multiply_add(x, 3 * width, 3, width, hidden, weights, width, width, g, width)
    if keep_edge:
        store_rows(g, width, hidden, advance(edge, chunk * step), hidden, first, batch)


@numba.njit(**INNER_JIT)
def _backward_part(
    task: int, h: Any, h0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, last_chunk: int, bounds: Any, ga: Any
) -> None:
    blocks = (h.shape[1] + SAMPLES - 1) // SAMPLES
    scratch = np.empty(4 * SAMPLES * w.shape[1] + VECTOR_BYTES, h.dtype)
    first = task % blocks * SAMPLES
    chunk = first_chunk + task // blocks
    _backward_block(h, h0, gates, w, gy, chunk, chunk == first_chunk, first, bounds, ga, scratch)


@numba.njit(**JIT)
def _backward(team: int, parts: int, *args: Any) -> None:
    """Take all samples back through the chunks first_chunk … last_chunk, each from what `bounds` says comes in.

    What leaves is stored for the first of them only: the others' is there and is being read by their neighbours.
    """
    in_parts(_backward_part, team, parts, args)


@device
def _row_jacobian(gates: Any, at: int, hidden: int, previous: Any, w: Any, width: int, factors: Any, out: Any) -> None:
    """Form the row form of Eq. 11 for one sample and step, ``Σ diag(factor) @ W + diag(z)``. 6·H² FLOP.

    The factored form would cost three products a row of the map instead of one; forming it once serves H + 1 rows.
    """
    count = lanes(w)
    for j in range(0, width, count):
        _, to_r, to_z, to_m, direct = _factors(gates, at, hidden, previous, j)
        store(factors, j, to_r)
        store(factors, width + j, to_z)
        store(factors, 2 * width + j, to_m)
        store(factors, 3 * width + j, direct)
    gate = hidden * width
    for k in range(hidden):
        to_r, to_z, to_m = broadcast(factors, k), broadcast(factors, width + k), broadcast(factors, 2 * width + k)
        for j in range(0, width, count):
            i = k * width + j
            value = to_r * load(w, i)
            value = fma(to_z, load(w, gate + i), value)
            store(out, i, fma(to_m, load(w, 2 * gate + i), value))
        i = k * width + k
        store_n(out, i, load_n(out, i, 1) + broadcast(factors, 3 * width + k), 1)


@device
def _reduce_chunk(
    h: Any, h0: Any, gates: Any, w: Any, gy: Any, chunk: int, chunks: int, b: int, maps: Any, scratch: Any
) -> None:
    """Reduce one chunk, not the first, of one sample to an affine map."""
    steps, batch, hidden = h.shape
    width = w.shape[1]
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    has_gy = gy.size > 0
    weights, saved, kept, incoming = pointer(w), pointer(h), pointer(gates), pointer(gy)
    rows = aligned_pointer(scratch)
    other = advance(rows, map_rows(hidden) * width)
    jacobian = advance(other, map_rows(hidden) * width)
    factors = advance(jacobian, hidden * width)
    start_map(rows, hidden, width)
    for t in range(stop - 1, start - 1, -1):
        at = (t * batch + b) * hidden
        if has_gy:
            add_to_map(rows, hidden, width, advance(incoming, at))
        previous = advance(saved, at - batch * hidden)
        _row_jacobian(kept, 4 * at, hidden, previous, weights, width, factors, jacobian)
        step_map(rows, jacobian, hidden, width, other)
        rows, other = other, rows
    store_map(rows, hidden, width, advance(pointer(maps), ((chunk - 1) * batch + b) * (hidden + 1) * hidden))


@numba.njit(**INNER_JIT)
def _reduce_part(task: int, h: Any, h0: Any, gates: Any, w: Any, gy: Any, chunks: int, maps: Any) -> None:
    batch, hidden = h.shape[1], h.shape[2]
    scratch = np.empty((2 * map_rows(hidden) + hidden + 4) * w.shape[1] + VECTOR_BYTES, h.dtype)
    _reduce_chunk(h, h0, gates, w, gy, 1 + task // batch, chunks, task % batch, maps, scratch)


@numba.njit(**JIT)
def _reduce(team: int, parts: int, *args: Any) -> None:
    in_parts(_reduce_part, team, parts, args)


@device
def _jacobian_step(h: Any, h0: Any, gates: Any, w_hh: Any, t: int, out: Any, factors: Any) -> None:
    """Write one step's (H, H, B) block; factors (4, H, B) is scratch."""
    _, batch, hidden = h.shape
    for b in range(batch):
        for j in range(hidden):
            previous = h[t - 1, b, j] if t > 0 else h0[b, j]
            reset, update = gates[t, b, j], gates[t, b, hidden + j]
            new, inner = gates[t, b, 2 * hidden + j], gates[t, b, 3 * hidden + j]
            to_m = (1.0 - update) * (1.0 - new * new) * reset
            factors[0, j, b] = to_m * (1.0 - reset) * inner
            factors[1, j, b] = update * (1.0 - update) * (previous - new)
            factors[2, j, b] = to_m
            factors[3, j, b] = update
    target, source = advance(pointer(out), t * hidden * hidden * batch), pointer(factors)
    weights = pointer(w_hh)
    gate, plane = hidden * hidden, hidden * batch
    for i in range(hidden):
        for j in range(hidden):
            at = j * hidden + i
            w_r, w_z, w_n = broadcast(weights, at), broadcast(weights, gate + at), broadcast(weights, 2 * gate + at)
            for b in range(0, batch, lanes(source)):
                k, n = j * batch + b, batch - b
                value = w_r * load_n(source, k, n)
                value = fma(w_z, load_n(source, plane + k, n), value)
                value = fma(w_n, load_n(source, 2 * plane + k, n), value)
                if i == j:
                    value = value + load_n(source, 3 * plane + k, n)
                store_up_to(target, b, value, n)
            target = advance(target, batch)


@numba.njit(**INNER_JIT)
def _jacobians_part(t: int, h: Any, h0: Any, gates: Any, w_hh: Any, out: Any) -> None:
    _jacobian_step(h, h0, gates, w_hh, t, out, np.empty((4, h.shape[2], h.shape[1]), h.dtype))


@numba.njit(**JIT)
def _jacobians(team: int, parts: int, *args: Any) -> None:
    in_parts(_jacobians_part, team, parts, args)


class GruKernels:
    """The kernels ``gru_*`` of `sparsebp.kernels.api.Kernels` in Numba."""

    def gru_forward(
        self, gx: np.ndarray, w_hh: np.ndarray, b_hn: np.ndarray, h0: np.ndarray, h: np.ndarray, gates: np.ndarray
    ) -> None:
        """Forward over all steps (BPPSA Eq. 10), keeping the gates. 6·T·B·H² FLOP, parallel over blocks of samples."""
        _, batch, hidden = h.shape
        if batch:
            launch(_forward, blocks_of(batch), 6 * h.size * hidden, gx, pack_columns(w_hh, 3), b_hn, h0, h, gates)

    def gru_backward(
        self,
        h: np.ndarray,
        h0: np.ndarray,
        gates: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        grad_h_n: np.ndarray | None,
        ga: np.ndarray,
        gh0: np.ndarray,
    ) -> None:
        """Sequential back-propagation. 6·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _scan_backward(h, h0, gates, w_hh, gy, grad_h_n, 1, ga, gh0)

    def gru_scan_backward(
        self,
        h: np.ndarray,
        h0: np.ndarray,
        gates: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        grad_h_n: np.ndarray | None,
        chunks: int,
        ga: np.ndarray,
        gh0: np.ndarray,
    ) -> None:
        """Back-propagation by reduce-then-scan over `chunks` chunks of about T/chunks steps (BPPSA Eq. 11).

        With C chunks: 6·T·B·H² FLOP for the gradients themselves, as in `gru_backward`, and
        (2·(H + 1)·H² + 6·H²)·T·B·(C - 2)/C for the maps of all chunks but the first and the last in time, which need
        none: about H/3 times the work of `gru_backward`. Scratch: (C - 2)·B·H·(H + 1) numbers, and two maps and one
        Jacobian a thread.
        """
        _scan_backward(h, h0, gates, w_hh, gy, grad_h_n, chunks, ga, gh0)

    def gru_jacobians(
        self, h: np.ndarray, h0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, out: np.ndarray
    ) -> None:
        """Materialise the scan's elements (BPPSA Eq. 11). 5·T·H²·B FLOP, T·H²·B numbers written."""
        _, batch, _ = h.shape
        if batch:
            launch(_jacobians, len(h), 5 * out.size, h, h0, gates, w_hh, out)


def _scan_backward(
    h: np.ndarray,
    h0: np.ndarray,
    gates: np.ndarray,
    w_hh: np.ndarray,
    gy: np.ndarray | None,
    grad_h_n: np.ndarray | None,
    chunks: int,
    ga: np.ndarray,
    gh0: np.ndarray,
) -> None:
    """The last chunk needs no map, as what comes into it is known; the first none, as nothing lies before it."""
    steps, batch, hidden = h.shape
    if not batch:
        return
    packed, incoming = pack_rows(w_hh), optional_gy(gy, h.dtype)
    bounds = bounds_for(chunks, batch, hidden, h.dtype, grad_h_n)
    blocks, work = blocks_of(batch), 6 * steps * batch * hidden**2
    launch(_backward, blocks, work // chunks, h, h0, gates, packed, incoming, chunks - 1, chunks - 1, bounds, ga)
    if chunks > 2:
        maps = np.empty((chunks - 2, batch, hidden + 1, hidden), h.dtype)
        launch(_reduce, (chunks - 2) * batch, work * hidden // 3, h, h0, gates, packed, incoming, chunks, maps)
        combine(maps, bounds)
    if chunks > 1:
        launch(_backward, (chunks - 1) * blocks, work, h, h0, gates, packed, incoming, 0, chunks - 2, bounds, ga)
    gh0[...] = bounds[0]
