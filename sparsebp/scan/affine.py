"""Affine maps of gradients as one array each, so that they can be joined, kept, and sent to another worker.

A map takes a gradient g, a row of n numbers, to ``g @ M + v``. It is kept as the matrix M with the row v below it:
(n + 1, n), whatever stands before these two axes (samples, chunks). Joining is associative and does not commute.
"""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.types import Array


def join(first: Array, then: Array) -> Array:
    """Return the map that does `first`, and `then` after it; both (…, n + 1, n). 2·(n + 1)·n² FLOP."""
    size = first.shape[-1]
    out: Array = backend.namespace(first, then).matmul(first, then[..., :size, :])
    out[..., size, :] += then[..., size, :]
    return out


def join_all(maps: Array) -> Array:
    """Return the map that does all of `maps`, (C, …, n + 1, n) with C from 1 on, the first one first."""
    while len(maps) > 1:
        even = len(maps) // 2 * 2
        joined = join(maps[0:even:2], maps[1:even:2])
        maps = backend.namespace(maps).concatenate((joined, maps[even:]))
    return maps[0]


def identity(like: Array) -> Array:
    """Return the maps, of `like`'s shape and dtype, that leave a gradient as it is."""
    xp, size = backend.namespace(like), like.shape[-1]
    out = xp.zeros_like(like)
    out[..., :size, :] = xp.eye(size, dtype=like.dtype)
    return out


def constant(vectors: Array) -> Array:
    """Return the maps (…, n + 1, n) that give `vectors` (…, n), whatever comes in."""
    xp = backend.namespace(vectors)
    size = vectors.shape[-1]
    out = xp.zeros((*vectors.shape[:-1], size + 1, size), dtype=vectors.dtype)
    out[..., size, :] = vectors
    return out
