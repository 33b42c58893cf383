"""What the RNN and GRU kernels share: blocks of four samples, the product with packed weights, reducing chunks.

Layout. The hidden units lie along the SIMD lanes; a row of H units is padded to `padded_width` in scratch, so inner
loops have no tails, and rows of the caller's arrays are read and written with masked operations at their ends. Four
samples are worked on together, so that each vector of weights that is loaded serves four multiply-adds. A block that
runs over the end of the batch repeats its last sample: the same numbers are computed and written again, to the same
place, by the same thread. Every sample's arithmetic is thus the same wherever it falls, and results do not depend on
the number of threads.

Reduce-then-scan. The gradient that leaves a step into the past is an affine function of the one that comes in from the
future, ``c[t] = (c[t+1] + gy[t]) @ J[t]`` in row form. A chunk of steps is reduced to one such map, kept as H + 1 rows:
row i < H is what unit vector i adds, row H the image of zero. All rows obey the same recursion as a sample's gradient,
so reducing a chunk is back-propagating H + 1 rows at once through ``J[t]``, of which only one exists at a time.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.core.threads import one_blas_thread_for
from sparsebp.kernels.host.engine.parts import JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    device,
    filled,
    fma,
    lanes,
    load,
    load_n,
    pointer,
    store,
    store_n,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.team import ALONE, team

SAMPLES = 4
"""Samples, or rows of an affine map, that are worked on together."""

WORTH_THREADS = 1_200_000
"""Operations, some 60 µs of one thread, from which on a kernel is run on all threads. Results do not depend on it."""


# ---- in Python: launching, sizes, packing ------------------------------------------------------------------------


def launch(kernel: Any, parts: int, work: int, *args: Any) -> None:
    """Run the parts of a kernel; on one thread if its `work` (operations) is not worth waking the others."""
    kernel(team() if parts > 1 and work >= WORTH_THREADS else ALONE, parts, *args)


def blocks_of(batch: int) -> int:
    """Return how many blocks of samples a batch has."""
    return -(-batch // SAMPLES)


def padded_width(hidden: int, dtype: Any) -> int:
    """Return `hidden` rounded up to whole vectors."""
    count = VECTOR_BYTES // np.dtype(dtype).itemsize
    return -(-hidden // count) * count


def aligned_zeros(size: int, dtype: Any) -> np.ndarray:
    """Return a flat array of zeros that starts at a multiple of the vector size."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(size + VECTOR_BYTES // itemsize, dtype)
    skip = -raw.ctypes.data % VECTOR_BYTES // itemsize
    return raw[skip : skip + size]


def project(
    x: np.ndarray, w_ih: np.ndarray | None, b_ih: np.ndarray | None, b_hh: np.ndarray | None, both: int
) -> np.ndarray:
    """Return x, or with its weights the projection: b_ih in all rows of it, b_hh in the first `both`."""
    if w_ih is None:
        return x
    with one_blas_thread_for(x.shape[0] * x.shape[1] * w_ih.size):
        gx = np.matmul(x.reshape(-1, x.shape[2]), w_ih.T).reshape(*x.shape[:2], len(w_ih))
    if b_ih is not None:
        gx += b_ih
    if b_hh is not None:
        gx[..., :both] += b_hh[:both]
    return gx


def pack_rows(w: np.ndarray) -> np.ndarray:
    """Return w (K, H) with rows padded to whole vectors: (K, padded), for products ``x (K,) @ w``."""
    depth, hidden = w.shape
    width = padded_width(hidden, w.dtype)
    packed = aligned_zeros(depth * width, w.dtype).reshape(depth, width)
    packed[:, :hidden] = w
    return packed


def pack_columns(w: np.ndarray, gates: int) -> np.ndarray:
    """Return w (gates·H, H) transposed, each gate padded: (H, gates·padded), for products ``h (H,) @ wᵀ``."""
    hidden = w.shape[1]
    width = padded_width(hidden, w.dtype)
    packed = aligned_zeros(hidden * gates * width, w.dtype).reshape(hidden, gates, width)
    packed[:, :, :hidden] = w.reshape(gates, hidden, hidden).transpose(2, 0, 1)
    return packed.reshape(hidden, gates * width)


def back_propagate(
    backward: Any,
    reduce: Any,
    saved: tuple[Any, ...],
    w_hh: np.ndarray,
    gy: np.ndarray | None,
    grad_h_n: np.ndarray | None,
    out: np.ndarray,
    gh0: np.ndarray,
    chunks: int,
) -> None:
    """Back-propagate through a cell: the recursion, which is one chunk, or reduce-then-scan.

    The last chunk needs no map, as what comes into it is known; the first none, as nothing lies before it.

    Parameters
    ----------
    backward, reduce
        The cell's kernels: parts of `back_part` and of `reduce_part`.
    saved
        What forward left, h (T, B, H) first: the first arguments of both.
    out
        The gradients at what the weights feed, written.
    """
    steps, batch, hidden = saved[0].shape
    if not batch:
        return
    incoming = np.empty((0, 0, 0), out.dtype) if gy is None else gy  # one Numba specialisation serves both
    args = (*saved, pack_rows(w_hh), incoming)
    bounds = np.empty(
        (chunks + 1, batch, hidden), out.dtype
    )  # what comes into chunk c is entry c + 1, what leaves it c
    bounds[chunks] = 0 if grad_h_n is None else grad_h_n
    blocks, work = blocks_of(batch), 2 * steps * batch * w_hh.size
    launch(backward, blocks, work // chunks, *args, chunks - 1, bounds, out)
    if chunks > 2:
        maps = np.empty((chunks - 2, batch, hidden + 1, hidden), out.dtype)
        launch(reduce, (chunks - 2) * batch, 2 * steps * batch * hidden**3, *args, 1, chunks, maps)
        _combine(maps, bounds)
    if chunks > 1:
        launch(backward, (chunks - 1) * blocks, work, *args, 0, bounds, out)
    gh0[...] = bounds[0]


def reduce_all(reduce: Any, saved: tuple[Any, ...], w_hh: np.ndarray, gy: np.ndarray | None, maps: np.ndarray) -> None:
    """Reduce all chunks of a sequence to affine maps; `reduce` and `saved` as in `back_propagate`.

    Parameters
    ----------
    maps
        (chunks, B, H + 1, H), written.
    """
    steps, batch, hidden = saved[0].shape
    if not batch:
        return
    incoming = np.empty((0, 0, 0), maps.dtype) if gy is None else gy
    chunks, work = len(maps), 2 * steps * batch * hidden**3
    launch(reduce, chunks * batch, work, *saved, pack_rows(w_hh), incoming, 0, chunks, maps)


# ---- in Numba: blocks ----------------------------------------------------------------------------------------------


@device
def chunk_start(chunk: int, chunks: int, steps: int) -> int:
    """Return the first step of a chunk; chunks differ by one step at most."""
    return chunk * steps // chunks


@device
def load_rows(source: Any, stride: int, first: int, batch: int, n: int, out: Any, out_stride: int) -> None:
    """Copy n numbers of each of four samples' rows into padded scratch rows; padding becomes zero."""
    count = lanes(source)
    for s in range(SAMPLES):
        row = min(first + s, batch - 1) * stride
        for j in range(0, n, count):
            store(out, s * out_stride + j, load_n(source, row + j, n - j))


@device
def store_rows(source: Any, source_stride: int, n: int, out: Any, stride: int, first: int, batch: int) -> None:
    """Copy n numbers of each of four padded scratch rows into the samples' rows."""
    count = lanes(source)
    for s in range(SAMPLES):
        row = min(first + s, batch - 1) * stride
        for j in range(0, n, count):
            store_up_to(out, row + j, load(source, s * source_stride + j), n - j)


@device
def clear(out: Any, size: int) -> None:
    """Set whole vectors of scratch to zero."""
    for j in range(0, size, lanes(out)):
        store(out, j, zeros(out))


@device
def multiply_add(
    x: Any, x_stride: int, groups: int, group_stride: int, depth: int, w: Any, w_stride: int, width: int, out: Any,
    out_stride: int,
) -> None:  # fmt: skip
    """``out[s] += Σ_g Σ_k x[s, g·group_stride + k] · w[g·depth + k]`` for four rows s, each `width` numbers long.

    8 · groups · depth · width FLOP. Two vectors of weights and four of sums are in registers twice over: 8 independent
    chains of multiply-adds, which is what it takes to fill two units of latency 4.
    """
    count = lanes(x)
    x1, x2, x3 = advance(x, x_stride), advance(x, 2 * x_stride), advance(x, 3 * x_stride)
    o1, o2, o3 = advance(out, out_stride), advance(out, 2 * out_stride), advance(out, 3 * out_stride)
    j = 0
    while j + 2 * count <= width:
        i = j + count
        a0, a1, a2, a3 = load(out, j), load(o1, j), load(o2, j), load(o3, j)
        b0, b1, b2, b3 = load(out, i), load(o1, i), load(o2, i), load(o3, i)
        row = advance(w, j)
        for g in range(groups):
            for k in range(g * group_stride, g * group_stride + depth):
                wa, wb = load(row, 0), load(row, count)
                row = advance(row, w_stride)
                v0, v1, v2, v3 = broadcast(x, k), broadcast(x1, k), broadcast(x2, k), broadcast(x3, k)
                a0, a1, a2, a3 = fma(v0, wa, a0), fma(v1, wa, a1), fma(v2, wa, a2), fma(v3, wa, a3)
                b0, b1, b2, b3 = fma(v0, wb, b0), fma(v1, wb, b1), fma(v2, wb, b2), fma(v3, wb, b3)
        store(out, j, a0)
        store(o1, j, a1)
        store(o2, j, a2)
        store(o3, j, a3)
        store(out, i, b0)
        store(o1, i, b1)
        store(o2, i, b2)
        store(o3, i, b3)
        j += 2 * count
    if j < width:
        a0, a1, a2, a3 = load(out, j), load(o1, j), load(o2, j), load(o3, j)
        row = advance(w, j)
        for g in range(groups):
            for k in range(g * group_stride, g * group_stride + depth):
                wa = load(row, 0)
                row = advance(row, w_stride)
                a0, a1 = fma(broadcast(x, k), wa, a0), fma(broadcast(x1, k), wa, a1)
                a2, a3 = fma(broadcast(x2, k), wa, a2), fma(broadcast(x3, k), wa, a3)
        store(out, j, a0)
        store(o1, j, a1)
        store(o2, j, a2)
        store(o3, j, a3)


# ---- in Numba: affine maps of chunks -------------------------------------------------------------------------------


@device
def map_rows(hidden: int) -> int:
    """Return how many scratch rows an affine map takes: H + 1, in whole blocks."""
    return (hidden + SAMPLES) // SAMPLES * SAMPLES


@device
def start_map(rows: Any, hidden: int, width: int) -> None:
    """Set the rows to the identity map."""
    clear(rows, map_rows(hidden) * width)
    for i in range(hidden):
        store_n(rows, i * width + i, filled(rows, 1.0), 1)


@device
def add_to_map(rows: Any, hidden: int, width: int, gy: Any) -> None:
    """Add the gradient that arrives at a step, H numbers, to the map's constant row."""
    for j in range(0, hidden, lanes(rows)):
        at = hidden * width + j
        store(rows, at, load(rows, at) + load_n(gy, j, hidden - j))


@device
def step_map(rows: Any, jacobian: Any, hidden: int, width: int, out: Any) -> None:
    """``out = rows @ jacobian``: take the map one step into the past. 2 · (H + 1) · H² FLOP."""
    clear(out, map_rows(hidden) * width)
    for first in range(0, map_rows(hidden), SAMPLES):
        at = first * width
        multiply_add(advance(rows, at), width, 1, 0, hidden, jacobian, width, width, advance(out, at), width)


@device
def store_map(rows: Any, hidden: int, width: int, out: Any) -> None:
    """Write the map's H + 1 rows, H numbers each."""
    for i in range(hidden + 1):
        for j in range(0, hidden, lanes(rows)):
            store_up_to(out, i * hidden + j, load(rows, i * width + j), hidden - j)


@numba.njit(**JIT)
def _combine(maps: Any, bounds: Any) -> None:
    """Apply the chunks' maps one after the other: what comes into every chunk, written into `bounds`.

    maps (chunks - 2, B, H + 1, H): of all chunks but the first and the last in time. bounds (chunks + 1, B, H), where
    entry chunks - 1, what leaves the last chunk, is read and entries chunks - 2 … 1 are written.
    """
    chunks, batch, hidden = maps.shape[0] + 2, bounds.shape[1], bounds.shape[2]
    m, v = pointer(maps), pointer(bounds)
    for c in range(chunks - 2, 0, -1):
        for b in range(batch):
            rows = advance(m, ((c - 1) * batch + b) * (hidden + 1) * hidden)
            incoming, outgoing = ((c + 1) * batch + b) * hidden, (c * batch + b) * hidden
            for j in range(0, hidden, lanes(m)):
                total = load_n(rows, hidden * hidden + j, hidden - j)
                for k in range(hidden):
                    total = fma(broadcast(v, incoming + k), load_n(rows, k * hidden + j, hidden - j), total)
                store_up_to(v, outgoing + j, total, hidden - j)


# ---- in Numba: the way back, for any cell ------------------------------------------------------------------------
#
# A cell brings two functions. `saved` is a tuple of what they read, the pointer to h first; `previous` points to the
# sample's row of the state before the step; `at` is where its row begins at the step, in an array (T, B, H).
#
# step_back(saved, previous, at, hidden, j, g, out, x, width): for units j … and their gradient g, write the gradients
#     at what the weights feed to `out`, and those that the weights bring back, a row of `width` each, to `x`; return
#     what comes to the state before without weights.
# form_jacobian(saved, previous, at, hidden, w, width, out, factors): write a step's Jacobian in row form, padded rows;
#     factors (4, width) is scratch.


@device
def back_part(
    step_back: Any, gates: int, saved: Any, initial: Any, task: int, shape: Any, w: Any, gy: Any, first_chunk: int,
    bounds: Any, out: Any,
) -> None:  # fmt: skip
    """Take four samples back through one of the chunks from `first_chunk` on, from what `bounds` says comes in.

    What leaves is stored for the first of these chunks only: the others' is there and is being read by neighbours.
    """
    blocks = (shape[1] + SAMPLES - 1) // SAMPLES
    chunk, first = first_chunk + task // blocks, task % blocks * SAMPLES
    scratch = np.empty((1 + gates) * SAMPLES * w.shape[1] + VECTOR_BYTES, w.dtype)
    _back_block(
        step_back, gates, saved, initial, shape, w, gy, chunk, chunk == first_chunk, first, bounds, out, scratch
    )


@device
def _back_block(
    step_back: Any, gates: int, saved: Any, initial: Any, shape: Any, w: Any, gy: Any, chunk: int, keep_edge: bool,
    first: int, bounds: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    """Take four samples back through one chunk. w (gates·H, padded): w_hh."""
    steps, batch, hidden = shape
    width = w.shape[1]
    chunks = bounds.shape[0] - 1
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    weights, incoming, edge, target, step = pointer(w), pointer(gy), pointer(bounds), pointer(out), batch * hidden
    g = aligned_pointer(scratch)
    x = advance(g, SAMPLES * width)
    load_rows(advance(edge, (chunk + 1) * step), hidden, first, batch, hidden, g, width)
    for t in range(stop - 1, start - 1, -1):
        arrives = t < gy.shape[0]  # asked at every step, so that LLVM makes no second copy of the loop for no gy
        before = advance(saved[0], (t - 1) * step) if t > 0 else initial
        for s in range(SAMPLES):
            row = min(first + s, batch - 1) * hidden
            previous, at = advance(before, row), t * step + row
            for j in range(0, width, lanes(g)):
                total = load(g, s * width + j)
                if arrives:
                    total = total + load_n(incoming, at + j, hidden - j)
                fed = advance(x, s * gates * width + j)
                store(g, s * width + j, step_back(saved, previous, at, hidden, j, total, target, fed, width))
        multiply_add(x, gates * width, gates, width, hidden, weights, width, width, g, width)
    if keep_edge:
        store_rows(g, width, hidden, advance(edge, chunk * step), hidden, first, batch)


@device
def reduce_part(
    form_jacobian: Any, saved: Any, initial: Any, task: int, shape: Any, w: Any, gy: Any, first_chunk: int, chunks: int,
    maps: Any,
) -> None:  # fmt: skip
    """Reduce one chunk, from `first_chunk` on, of one sample to an affine map; theirs is the first entry of `maps`."""
    _, batch, hidden = shape
    scratch = np.empty((2 * map_rows(hidden) + hidden + 4) * w.shape[1] + VECTOR_BYTES, w.dtype)
    target = advance(pointer(maps), task * (hidden + 1) * hidden)
    chunk = first_chunk + task // batch
    _reduce_chunk(form_jacobian, saved, initial, shape, w, gy, chunk, chunks, task % batch, target, scratch)


@device
def _reduce_chunk(
    form_jacobian: Any, saved: Any, initial: Any, shape: Any, w: Any, gy: Any, chunk: int, chunks: int, b: int,
    target: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    width = w.shape[1]
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    has_gy = gy.size > 0
    weights, incoming, step = pointer(w), pointer(gy), batch * hidden
    rows = aligned_pointer(scratch)
    other = advance(rows, map_rows(hidden) * width)
    jacobian = advance(other, map_rows(hidden) * width)
    factors = advance(jacobian, hidden * width)
    start_map(rows, hidden, width)
    for t in range(stop - 1, start - 1, -1):
        at = t * step + b * hidden
        if has_gy:
            add_to_map(rows, hidden, width, advance(incoming, at))
        previous = advance(saved[0], at - step) if t > 0 else advance(initial, b * hidden)
        form_jacobian(saved, previous, at, hidden, weights, width, jacobian, factors)
        step_map(rows, jacobian, hidden, width, other)
        rows, other = other, rows
    store_map(rows, hidden, width, target)


@device
def write_jacobian(gates: int, factors: Any, w_hh: Any, t: int, out: Any) -> None:
    """Write one step's (H, H, B) block ``Σ w_hhᵀ · diag(factor)``, plus the diagonal of a factor beyond the gates.

    factors (gates or gates + 1, H, B).
    """
    _, hidden, batch = factors.shape
    target, source = advance(pointer(out), t * hidden * hidden * batch), pointer(factors)
    weights = pointer(w_hh)
    square, plane = hidden * hidden, hidden * batch
    for i in range(hidden):
        for j in range(hidden):
            at = j * hidden + i
            for b in range(0, batch, lanes(source)):
                k, n = j * batch + b, batch - b
                value = broadcast(weights, at) * load_n(source, k, n)
                for q in range(1, gates):
                    value = fma(broadcast(weights, q * square + at), load_n(source, q * plane + k, n), value)
                if i == j and factors.shape[0] > gates:
                    value = value + load_n(source, gates * plane + k, n)
                store_up_to(target, b, value, n)
            target = advance(target, batch)
