"""Several products of dense matrices in one call, for a thread beside others that run Python.

Between two calls a thread needs the interpreter's lock, and waits until another one gives it up: in a net of small
layers that takes longer than the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.types import Array
from sparsebp.kernels.host.dense.blas import blas_of, is_numpys, product
from sparsebp.kernels.host.dense.products import (
    A_TRANSPOSED,
    B_TRANSPOSED,
    LDA,
    LDB,
    LDC,
    OUTER,
    PARTS,
    SMALL,
    STEP,
    K,
    M,
    N,
    describe,
    layout_of,
    part_range,
    strip,
)
from sparsebp.kernels.host.engine.parts import JIT


def matmul_many(pairs: Sequence[tuple[Array, Array]]) -> list[Array] | None:
    """Return ``a @ b`` of every pair, bit for bit what `matmul` writes; None where it would have to be another way.

    The thread that calls computes alone.

    Parameters
    ----------
    pairs
        (m, k) and (k, n) each, all of one real dtype.
    """
    dtype = pairs[0][0].dtype
    found = [_description(a, b) if a.dtype == b.dtype == dtype else None for a, b in pairs if is_numpys()]
    if None in found or not found:
        return None
    outs = [np.empty((a.shape[0], b.shape[1]), dtype) for a, b in pairs]
    addresses = [(a.ctypes.data, b.ctypes.data, out.ctypes.data) for (a, b), out in zip(pairs, outs, strict=True)]
    with threads.one_blas_thread():
        _products(blas_of(dtype), np.array(found, np.int64), np.array(addresses, np.int64))
    return outs


def _description(a: Array, b: Array) -> tuple[int, ...] | None:
    """Return a product's description, without parts if it is computed as a whole; None if it is not computed here."""
    (m, k), n = a.shape, b.shape[1]
    if m * n * k > SMALL:
        cut, sizes = describe(a, b)
        return None if cut.outer == K or layout_of(a) is None or layout_of(b) is None else tuple(sizes.tolist())
    a_layout, b_layout = layout_of(a), layout_of(b)
    # NumPy does not ask the BLAS for these, or for another function.
    if a_layout is None or b_layout is None or k == 1 or m * n <= 1 or m * n * k == 0:
        return None
    (a_turned, lda), (b_turned, ldb) = a_layout, b_layout
    return m, n, k, lda, ldb, n, a_turned, b_turned, 0, 0, 0, 0, 0, 0, a.itemsize


@numba.njit(**JIT)
def _products(blas, sizes, addresses):  # type: ignore[no-untyped-def]
    for i in range(len(sizes)):
        own, (a, b, c) = sizes[i], (addresses[i, 0], addresses[i, 1], addresses[i, 2])
        if own[PARTS] == 0:
            product(
                blas, own[M], own[N], own[K], a, own[A_TRANSPOSED], own[LDA], b, own[B_TRANSPOSED], own[LDB], c,
                own[LDC],
            )  # fmt: skip
        for part in range(own[PARTS]):
            low, high = part_range(part, own[PARTS], own[STEP], own[own[OUTER]])
            for first in range(low, high, own[STEP]):
                strip(blas, own, a, b, c, low, first, min(first + own[STEP], high))
