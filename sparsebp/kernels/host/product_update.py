"""An optimizer's update by a gradient that is a matrix product and is never there as a whole.

Backward-fusion to its end (Jiang et al. 2021, §3): some rows of the gradient are computed, looked at and used while
they are in the cache. They go neither to memory nor back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.check import Array, UpdateRule
from sparsebp.kernels.host.dense import ITEM, SMALL, STEP, THIN, M, N, Plan, blas_of, describe, part_range, strip
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
from sparsebp.kernels.host.engine.threads import atomic_exchange, atomic_store, parallel, team_for
from sparsebp.kernels.host.optim import CHUNK, add_chunks, chunk_rows, rule_address, square_sum, update_range
from sparsebp.kernels.spec import check_update

LEAST = 1 << 17
"""Numbers of a gradient from which this is worth it: half a second cache's, in float32."""
_ROOM = 1 << 22
"""Bytes for each thread's rows. So much is laid in pages of 2 MiB where the system has them: in small ones, some of it
falls out of the cache while parameter and buffers stream by, and the whole takes up to 1.6 times as long."""
_local = threading.local()


def worth_update_by_product(a: Array, b: Array) -> bool:
    """Say whether `update_by_product` takes the gradient ``a @ b``: it is large, and its factors are thin."""
    (m, k), n = a.shape, b.shape[1]
    contiguous = all(matrix.flags.c_contiguous or matrix.flags.f_contiguous for matrix in (a, b))
    return contiguous and k <= min(THIN, m, n) and m * n >= LEAST and m * n * k > SMALL and n <= CHUNK


def bytes_at_once(a: Array, b: Array) -> int:
    """Return how many bytes of the gradient ``a @ b`` `update_by_product` has at once, on all threads together."""
    cut, _ = describe(a, b)
    return _workers(cut) * cut.step * b.shape[1] * b.itemsize


def update_by_product(
    rule: UpdateRule, param: Array, a: Array, b: Array, buffers: Sequence[Array | None], options: np.ndarray,
    steps: np.ndarray,
) -> float:  # fmt: skip
    """Update a parameter by the gradient ``a @ b``; return the sum of the gradient's squares.

    Parameters are those of `Kernels.optimizer_update`, for one parameter; the factors are as in
    `sparsebp.kernels.host.matmul`, and `worth_update_by_product`. Results are bitwise those of ``matmul``,
    ``square_sums`` and ``optimizer_update``. Where the squares of some rows are not finite, those rows are not updated.
    """
    check_update(rule, [param], [param], [[buffer] for buffer in buffers], options, steps)
    (m, n), k = param.shape, a.shape[1]
    cut, sizes = describe(a, b)
    addresses = np.array([0 if array is None else array.ctypes.data for array in (param, None, *buffers)], np.int64)
    sums = np.empty(-(-m // (CHUNK // n)))
    count = _workers(cut)
    room = _room(count, cut.step * n, param.dtype)
    taken = np.zeros(count, np.int64)
    with threads.one_blas_thread():
        _update(
            team_for(cut.parts, m * n * k), cut.parts, rule_address(rule, param.dtype), blas_of(param.dtype),
            param.dtype.type(0), sizes, a.ctypes.data, b.ctypes.data, addresses, options, steps, sums, room, taken,
        )  # fmt: skip
    total = np.empty(1)
    add_chunks(np.array([0, len(sums)]), sums, total)
    return float(total[0])


def _room(count: int, size: int, dtype: np.dtype) -> np.ndarray:
    """Return room for a few rows of a gradient for each thread; the next call uses it again."""
    room: np.ndarray | None = getattr(_local, dtype.char, None)
    if room is None or room.shape[0] < count or room.shape[1] < size:
        room = np.empty((count, max(size, _ROOM // dtype.itemsize)), dtype)
        setattr(_local, dtype.char, room)
    return room


def _workers(cut: Plan) -> int:
    """Return how many parts may be worked on at a time."""
    return min(cut.parts, threads.count())


@parallel(**JIT)
def _update(part, parts, rule, blas, like, sizes, a, b, addresses, options, steps, sums, room, taken):  # type: ignore[no-untyped-def]
    """Run a part in rows that no other part is using."""
    place, at = 0, taken.ctypes.data
    while not atomic_exchange(at + 8 * place, 0, 1):  # there are as many as threads, so one is free
        place = (place + 1) % len(taken)
    _update_part(part, parts, rule, blas, like, sizes, a, b, addresses, options, steps, sums, room[place])
    atomic_store(at + 8 * place, 0)


@numba.njit(**INNER_JIT)
def _update_part(part, parts, rule, blas, like, sizes, a, b, addresses, options, steps, sums, rows):  # type: ignore[no-untyped-def]
    m, n, item, step = sizes[M], sizes[N], sizes[ITEM], sizes[STEP]
    at = np.empty((1, len(addresses)), np.int64)
    begins = np.zeros(2, np.int64)
    low, high = part_range(part, parts, step, m)
    chunk = chunk_rows(n)
    for first in range(low, high, step):
        last, skipped = min(first + step, high), first * n * item
        strip(blas, sizes, a, b, rows.ctypes.data - skipped, low, first, last)
        finite = True
        for row in range(first, last, chunk):
            total = square_sum(rows[(row - first) * n : (min(row + chunk, last) - first) * n])
            sums[row // chunk] = total
            finite &= math.isfinite(total)
        if finite:
            for column in range(len(addresses)):
                at[0, column] = 0 if addresses[column] == 0 else addresses[column] + skipped
            at[0, 1] = rows.ctypes.data
            begins[1] = (last - first) * n
            update_range(rule, like, at, begins, options, steps, 0, begins[1])
