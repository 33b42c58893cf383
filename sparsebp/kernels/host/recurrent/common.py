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

from sparsebp.kernels.host.engine.parts import JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
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


def bounds_for(chunks: int, batch: int, hidden: int, dtype: Any, grad_h_n: np.ndarray | None) -> np.ndarray:
    """Return (chunks + 1, B, H): entry c + 1 is the gradient that comes into chunk c, entry c what leaves it."""
    bounds = np.empty((chunks + 1, batch, hidden), dtype)
    bounds[chunks] = 0 if grad_h_n is None else grad_h_n
    return bounds


def optional_gy(gy: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Return `gy`, or an empty array in its place: one Numba specialisation serves both."""
    return np.empty((0, 0, 0), dtype) if gy is None else gy


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


def combine(maps: np.ndarray, bounds: np.ndarray) -> None:
    """Apply the chunks' maps one after the other: what comes into every chunk, written into `bounds`.

    maps (chunks - 2, B, H + 1, H): of all chunks but the first and the last in time. bounds (chunks + 1, B, H), where
    entry chunks - 1, what leaves the last chunk, is read and entries chunks - 2 … 1 are written.
    """
    if len(maps):
        _combine(maps, bounds)
