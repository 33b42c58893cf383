"""Affine maps of chunks of steps on a GPU, from Jacobians that are stored a block of steps at a time.

Inside reduce-then-scan the maps of the inner chunks come from fused kernels, beside the last chunk's recursion. Here
all chunks are reduced by themselves: the Jacobians are written, and read once by ``dense_reduce``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsebp.core.types import Array

STORED = 1 << 26
"""Values of Jacobians that are stored at a time, unless one chunk has more."""


def write_maps(
    kernels: Any, shape: tuple[int, int, int], jacobians: Callable[[int, int, Array], None], gy: Array | None,
    maps: Array,
) -> None:  # fmt: skip
    """Write the maps (C, B, H + 1, H) of all chunks.

    Parameters
    ----------
    kernels
        The launchers: their ``xp``, ``dense_matvec`` and ``dense_reduce``.
    shape
        (T, B, H).
    jacobians
        ``jacobians(begin, end, out)`` writes the transposed Jacobians (end - begin, H, H, B) of these steps, the last
        one first.
    gy
        (T, B, H) or None.
    """
    xp, (steps, batch, hidden), count = kernels.xp, shape, len(maps)
    if batch == 0:
        return
    bounds = [c * steps // count for c in range(count + 1)]
    first = 0
    while first < count:
        begin, last = bounds[first], first + 1
        while last < count and (bounds[last + 1] - begin) * hidden * hidden * batch <= STORED:
            last += 1
        end = bounds[last]
        stored = xp.empty((end - begin, hidden, hidden, batch), dtype=maps.dtype)
        jacobians(begin, end, stored)
        add = vectors = None
        if gy is not None:
            index = xp.arange(end - begin, dtype=np.int64)
            arriving = xp.ascontiguousarray(gy[begin:end][::-1].transpose(0, 2, 1))
            add, vectors = xp.empty_like(arriving), xp.empty((last - first, hidden, batch), dtype=maps.dtype)
            kernels.dense_matvec(stored, index, arriving, index, None, None, add, index)
        # In the order of the stored steps, which is back-propagation's, the last chunk comes first.
        pointers = xp.asarray(np.array([end - bound for bound in bounds[first : last + 1][::-1]], np.int64))
        matrices = xp.empty((last - first, hidden, hidden, batch), dtype=maps.dtype)
        kernels.dense_reduce(stored, pointers, add, matrices, vectors)
        maps[first:last, :, :hidden] = matrices[::-1].transpose(0, 3, 2, 1)
        maps[first:last, :, hidden] = 0 if vectors is None else vectors[::-1].transpose(0, 2, 1)
        first = last
