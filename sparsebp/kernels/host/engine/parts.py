"""How host kernels split their work: by a rule that looks at the problem alone, never at the number of threads.

So the answer is bitwise the same for every number of threads. Little work runs on the calling thread: waking another
one costs several microseconds, and it comes some thirty later.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import inner

SCALAR_GRAIN = 1 << 15
"""Multiply-adds that one part should at least hold where they run one by one, some 20 microseconds."""
VECTOR_GRAIN = 1 << 17
"""Multiply-adds or moved values that one part should at least hold where they run in vectors, some 10 microseconds."""
MAX_PARTS = 64
WORTH = 6 * VECTOR_GRAIN
"""The same of a kernel that is worth waking other threads for, some 60 microseconds; measured: two of them need 50."""

_ANY: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
JIT: dict[str, Any] = {**_ANY, "cache": True, "no_cfunc_wrapper": True, "pipeline_class": inner.KernelCompiler}
"""Options of functions that Python calls and that spell out their fused multiply-adds, see `simd`."""
SERIAL: dict[str, Any] = {**JIT, "fastmath": {"contract"}}  # keeps NaN, infinity and the order of sums
INNER_JIT: dict[str, Any] = {**_ANY, **inner.OPTIONS}
"""The same of functions that only compiled ones call, see `inner`."""
INNER_SERIAL: dict[str, Any] = {**INNER_JIT, "fastmath": {"contract"}}
INNER_APART: dict[str, Any] = {**INNER_SERIAL, **inner.APART}
INNER_SUMS: dict[str, Any] = {**INNER_JIT, "fastmath": {"contract", "reassoc"}}
"""Sums in several lanes: in another order than that of their terms, but always in the same."""


def parts_for(work: int, vectors: bool = True) -> int:
    """Return into how many parts `work` elementary operations are split; 1 stands for the calling thread alone.

    Parts are of independent results, so their number does not change any.
    """
    return parts_of(work, vectors) if threads.count() > 1 else 1


def parts_of(work: int, vectors: bool = True) -> int:
    """Return the same however many threads there are: for what is laid out once and run with any number of them."""
    grain = VECTOR_GRAIN if vectors else SCALAR_GRAIN
    return 1 if work * (VECTOR_GRAIN // grain) < WORTH else min(MAX_PARTS, work // grain)


@numba.njit(**INNER_SERIAL)
def share(part: int, parts: int, total: int) -> int:
    """Return where part number `part` begins when `total` items are split into `parts` equal parts."""
    return part * total // parts


@numba.njit(**INNER_SERIAL)
def span(part: int, parts: int, total: int) -> tuple[int, int]:
    """Return where part number `part` of `total` items begins and ends."""
    return part * total // parts, (part + 1) * total // parts


@numba.njit(**INNER_SERIAL)
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
