"""What the recurrent kernels share: blocks of four samples, and the product with packed weights; `back` has the rest.

Layout. The hidden units lie along the SIMD lanes; a row of H units is padded to `padded_width` in scratch, so inner
loops have no tails, and rows of the caller's arrays are read and written with masked operations at their ends. Four
samples are worked on together, so that each vector of weights that is loaded serves four multiply-adds. A block that
runs over the end of the batch repeats its last sample: the same numbers are computed and written again, to the same
place, by the same thread. Every sample's arithmetic is thus the same wherever it falls, and results do not depend on
the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    broadcast,
    device,
    fma,
    lanes,
    load,
    store,
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


# ---- in Numba: blocks ----------------------------------------------------------------------------------------------


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
