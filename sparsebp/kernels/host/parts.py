"""How host kernels split their work: by a rule that looks at the problem alone, never at the number of threads.

So the answer is bitwise the same for every number of threads. Work below one grain runs on the calling thread: entering
a parallel region costs several microseconds, as much as some ten thousand multiply-adds.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.types import Array

GRAIN = 1 << 15
"""Multiply-adds (or moved values) that one part should at least hold."""
MAX_PARTS = 64

SERIAL: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract"},  # fused multiply-adds keep NaN, infinity and the order of sums
}
PARALLEL: dict[str, Any] = {**SERIAL, "parallel": True}

_UNSIGNED = {np.dtype(np.int32): np.dtype(np.uint32), np.dtype(np.int64): np.dtype(np.uint64)}


def unsigned(array: Array) -> Array:
    """View an index array as unsigned: Numba then emits no test for negative indices, and loops vectorise."""
    return array.view(_UNSIGNED[array.dtype])


def parts_for(work: int) -> int:
    """Return into how many parts `work` elementary operations are split."""
    return min(MAX_PARTS, max(1, work // GRAIN))


@numba.njit(**SERIAL)
def share(part: int, parts: int, total: int) -> int:
    """Return where part number `part` begins when `total` items are split into `parts` equal parts."""
    return part * total // parts


@numba.njit(**SERIAL)
def row_at(indptr: Array, entry: int) -> int:
    """Return the first row that starts at `entry` or later, by bisection: parts then hold about as many entries."""
    low, high = 0, len(indptr) - 1
    while low < high:
        middle = (low + high) // 2
        if np.int64(indptr[np.uint64(middle)]) < entry:
            low = middle + 1
        else:
            high = middle
    return low
