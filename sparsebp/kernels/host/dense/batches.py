"""Products of many pairs of matrices of one size: what attention computes for every sample and head."""

from __future__ import annotations

import numpy as np

from sparsebp.core import threads
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import written
from sparsebp.kernels.host.dense.blas import blas_of, gemm
from sparsebp.kernels.host.dense.products import layout_of
from sparsebp.kernels.host.engine.parts import JIT, parts_for, span
from sparsebp.kernels.host.engine.team import parallel, team

_FAST = 4  # multiply-adds of a BLAS in the time of one of another kernel
COUNT, M, N, K, LDA, LDB, A_TURNED, B_TURNED, A_APART, B_APART, ITEM = range(11)
"""What a description says at which place: as of a single product; and how many bytes the matrices lie apart."""


def matmul_batches(a: Array, b: Array, out: Array) -> Array:
    """Write ``a[i] @ b[i]`` for every i into `out` and return it; parts are of pairs.

    Parameters
    ----------
    a, b
        (count, m, k) and (count, k, n), of one real dtype; their matrices may lie in memory by rows or by columns, and
        are copied where neither is so.
    out
        (count, m, n), C-contiguous, of that dtype.
    """
    (count, m, k), n = a.shape, b.shape[2]
    written("out", out, a.dtype, (count, m, n))
    if out.size == 0 or k == 0:
        out.fill(0)
        return out
    (a, a_turned, lda), (b, b_turned, ldb) = _readable(a), _readable(b)
    apart = a.strides[0], b.strides[0]
    sizes = np.array([count, m, n, k, lda, ldb, a_turned, b_turned, *apart, a.itemsize], np.int64)
    parts = min(parts_for(count * m * n * k // _FAST), count)
    with threads.one_blas_thread():
        _products(team(parts), parts, blas_of(out.dtype), sizes, a.ctypes.data, b.ctypes.data, out.ctypes.data)
    return out


def _readable(matrices: Array) -> tuple[Array, bool, int]:
    """Return matrices that BLAS reads as they lie, whether they lie by columns, and how far those are apart."""
    found = layout_of(matrices[0])
    if found is None:
        matrices = np.ascontiguousarray(matrices)
        found = False, matrices.shape[2]
    return matrices, *found


@parallel(**JIT)
def _products(part, parts, blas, sizes, a, b, c):  # type: ignore[no-untyped-def]
    m, n, k = sizes[M], sizes[N], sizes[K]
    low, high = span(part, parts, sizes[COUNT])
    for i in range(low, high):
        gemm(
            blas, m, n, k, a + i * sizes[A_APART], sizes[A_TURNED], sizes[LDA], b + i * sizes[B_APART],
            sizes[B_TURNED], sizes[LDB], False, c + i * m * n * sizes[ITEM], n,
        )  # fmt: skip
