"""Products of dense matrices on the kernels' threads, in blocks for mini-batches: one matrix large, two of them thin.

Three things make them faster than NumPy's, and results the same for every number of threads:

- Small products have kernels of their own in OpenBLAS for AVX-512, which do not copy their operands first (Goto and van
  de Geijn's packing). A large matrix in blocks is read once, without that copy. Where a BLAS has none, it is left to
  pack large parts: in small blocks it reached half the speed there.
- The large matrix is cut along its outer axis, always alike. So the same thread meets the same rows of a weight in
  forward, input gradient and update: they stay in its cache, and do not wander to and fro between two.
- The threads are those of the other kernels. A library's own go on spinning after each product, and those that are
  woken next wait for their cores.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import written
from sparsebp.kernels.host.dense.blas import blas_of, gemm, has_small_kernels
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT, span
from sparsebp.kernels.host.engine.team import parallel, team_for
from sparsebp.kernels.host.optim.optimizers import CHUNK

SMALL = 1_000_000
"""Multiply-adds up to which OpenBLAS does not pack."""
THIN = 64
"""Length of the thin matrices' common axis up to which a product is cut into small ones: beyond, packing pays."""
_INNER, _INNER_THIN = 512, 32  # numbers of a block's rows, and the thin axis up to which they are as many
_MOST_ROWS = 256
_LEAST_ROWS = 8  # of a block; below that it is not worth its call
_BLOCK_BYTES = 1 << 18  # of the gradient that an update takes at once: a quarter of a core's second cache
_PART = 1 << 19  # multiply-adds that one part should hold, some 10 microseconds
_SUMS = ((32, 1 << 19), (256, 1 << 21))
"""Up to what thin axis, and from what size of the large matrix on, a cut along k is worth its partial results."""
_PACKED_PART, _PACKED_HALF, _PACKED_ROWS = 1 << 22, 1 << 20, 64
"""The same, and rows, where packing has to pay; halves are worth it earlier."""
_MAX_PARTS, _MAX_SUMS = 16, 8
_SUM_PART = 1 << 14
_FAST = 4  # multiply-adds of a BLAS in the time of one of another kernel

M, N, K, LDA, LDB, LDC, A_TRANSPOSED, B_TRANSPOSED, OUTER, INNER, PARTS, STEP, ROWS, WIDTH, ITEM = range(15)
"""What a product's description says at which place: the sizes; the lengths of rows in memory, and whether they are the
matrix's columns; the `Plan`; the bytes of a number."""


class Plan(NamedTuple):
    """How a product is cut: all that decides about the rounding, and it depends on shapes alone.

    Attributes
    ----------
    outer, inner
        The large matrix's axes, 0 for m, 1 for n, 2 for k.
    parts
        Parts along the outer axis; those along k each have a result of their own, added afterwards.
    step
        Rows of the large matrix that belong together: parts begin at multiples of it.
    rows, width
        A block of the large matrix.
    """

    outer: int
    inner: int
    parts: int
    step: int
    rows: int
    width: int


@lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, itemsize: int, a_transposed: bool, b_transposed: bool, small: bool) -> Plan:
    """Return how C (m, n) = A (m, k) B (k, n) is cut; `small`: whether the BLAS has kernels for small products."""
    largest = max(m * n, m * k, k * n)
    if m * n == largest:
        outer, inner = M, N
    elif k * n == largest:
        outer, inner = (N, K) if b_transposed else (K, N)
    else:
        outer, inner = (K, M) if a_transposed else (M, K)
    sizes = (m, n, k)
    thin = sizes[3 - outer - inner]
    result = (outer, inner) == (M, N) and n <= CHUNK  # a gradient of weights: its blocks also go into an update
    packed = thin > THIN or not (small or result)
    if outer == K and not any(thin <= most and largest >= least for most, least in _SUMS):
        outer, inner, packed = inner, K, True
    length, across = sizes[outer], sizes[inner]
    width = across if inner == K or not small else min(across, _INNER if thin <= _INNER_THIN else _INNER // 2)
    rows = 0 if packed else min(SMALL // max(thin * width, 1) // _LEAST_ROWS * _LEAST_ROWS, _MOST_ROWS)
    step = rows
    if (outer, inner) == (M, N) and not packed:  # whole chunks of a sum of squares, as `product_update` takes them
        chunk = max(CHUNK // n, 1)
        step = max(_BLOCK_BYTES // (itemsize * max(n, 1)) // chunk, 1) * chunk
        rows = rows if small else step
    most, work = _MAX_SUMS if outer == K else _MAX_PARTS, m * n * k
    if rows:
        parts = max(1, min(work // _PART, most, length // step))
    else:  # not thin: whole parts for a BLAS that packs
        wanted = max(work // _PACKED_PART, min(work // _PACKED_HALF, 2))
        parts = max(1, min(wanted, most, length // _PACKED_ROWS))
        step, rows, width = (-(-length // parts),) * 2 + (across,)
    return Plan(outer, inner, parts, step, rows, width)


def matmul(a: Array, b: Array, out: Array) -> Array:
    """Write ``a @ b`` into `out` and return it.

    Parameters
    ----------
    a, b
        (m, k) and (k, n), of one real dtype; one whose rows are not contiguous each, nor its columns, is copied.
    out
        (m, n), C-contiguous, of that dtype.
    """
    (m, k), n = a.shape, b.shape[1]
    written("out", out, a.dtype, (m, n))
    if m * n * k <= SMALL:
        if k == 1:
            return np.multiply(a, b, out=out)
        with threads.one_blas_thread_for(m * n * k):
            return np.matmul(a, b, out=out)
    a, b = _in_rows(a), _in_rows(b)
    cut, sizes = describe(a, b)
    sums = np.empty((cut.parts, m, n), out.dtype) if cut.outer == K and cut.parts > 1 else None
    target = (out if sums is None else sums).ctypes.data
    helpers = team_for(cut.parts, m * n * k // _FAST)
    with threads.one_blas_thread():
        _product(helpers, cut.parts, blas_of(out.dtype), sizes, a.ctypes.data, b.ctypes.data, target)
    if sums is not None:
        flat = out.reshape(-1)
        parts = max(1, flat.size // _SUM_PART)
        _add(team_for(parts, sums.size), parts, sums.reshape(cut.parts, -1), flat)
    return out


def describe(a: Array, b: Array) -> tuple[Plan, np.ndarray]:
    """Return how the product of two matrices is cut, and all that compiled code wants to know of them."""
    (m, k), n = a.shape, b.shape[1]
    (a_turned, lda), (b_turned, ldb) = layout_of(a) or (False, k), layout_of(b) or (False, n)
    cut = plan(m, n, k, a.itemsize, a_turned, b_turned, has_small_kernels())
    return cut, np.array([m, n, k, lda, ldb, n, a_turned, b_turned, *cut, a.itemsize], np.int64)


def layout_of(matrix: Array) -> tuple[bool, int] | None:
    """Return whether a matrix lies in memory by columns, and how far they are apart, or rows; None if neither fits."""
    (rows, columns), item = matrix.shape, matrix.itemsize
    if matrix.flags.c_contiguous or matrix.flags.f_contiguous:
        return (False, columns) if matrix.flags.c_contiguous else (True, rows)
    down, across = matrix.strides
    if across == item and down % item == 0 and down >= columns * item:
        return False, down // item
    if down == item and across % item == 0 and across >= rows * item:
        return True, across // item
    return None


def _in_rows(matrix: Array) -> Array:
    """Return a matrix that has a `layout_of`."""
    return matrix if layout_of(matrix) is not None else np.ascontiguousarray(matrix)


@numba.njit(**INNER_JIT)
def part_range(part, parts, step, length):  # type: ignore[no-untyped-def]
    """Return where a part begins and ends: at multiples of `step`."""
    low, high = span(part, parts, -(-length // step))
    return min(low * step, length), min(high * step, length)


@parallel(**JIT)
def _product(part, parts, blas, sizes, a, b, c):  # type: ignore[no-untyped-def]
    outer, step = sizes[OUTER], sizes[STEP]
    low, high = part_range(part, parts, step, sizes[outer])
    if outer == K and parts > 1:
        c += part * sizes[M] * sizes[N] * sizes[ITEM]
    for first in range(low, high, step):
        strip(blas, sizes, a, b, c, low, first, min(first + step, high))


@numba.njit(**INNER_JIT)
def _of(axis, outer, along_outer, inner, along_inner, other):  # type: ignore[no-untyped-def]
    """Return what belongs to an axis: the outer one's, the inner one's, or the other's."""
    return along_outer if axis == outer else along_inner if axis == inner else other


@numba.njit(**INNER_JIT)
def strip(blas, sizes, a, b, c, low, first, last):  # type: ignore[no-untyped-def]
    """Compute with the rows from `first` to `last` of the large matrix; `low` is where its part begins."""
    outer, inner, rows, width = sizes[OUTER], sizes[INNER], sizes[ROWS], sizes[WIDTH]
    lda, ldb, ldc, item = sizes[LDA], sizes[LDB], sizes[LDC], sizes[ITEM]
    a_turned, b_turned = sizes[A_TRANSPOSED], sizes[B_TRANSPOSED]
    for i in range(first, last, rows):
        high = min(rows, last - i)
        for j in range(0, sizes[inner], width):
            wide = min(width, sizes[inner] - j)
            m, n, k = _of(M, outer, i, inner, j, 0), _of(N, outer, i, inner, j, 0), _of(K, outer, i, inner, j, 0)
            at = a + (k * lda + m if a_turned else m * lda + k) * item
            bt = b + (n * ldb + k if b_turned else k * ldb + n) * item
            fresh = k == (low if outer == K else 0)
            gemm(
                blas, _of(M, outer, high, inner, wide, sizes[M]), _of(N, outer, high, inner, wide, sizes[N]),
                _of(K, outer, high, inner, wide, sizes[K]), at, a_turned, lda, bt, b_turned, ldb, not fresh,
                c + (m * ldc + n) * item, ldc,
            )  # fmt: skip


@parallel(**JIT)
def _add(part, parts, sums, out):  # type: ignore[no-untyped-def]
    low, high = span(part, parts, len(out))
    for i in range(low, high):
        total = sums[0, i]
        for j in range(1, len(sums)):
            total += sums[j, i]
        out[i] = total
