"""Products over all steps of a run at once, and how the threads share them."""

from __future__ import annotations

import contextlib
import math
from types import ModuleType

from sparsebp import backend
from sparsebp.backend.memory import empty
from sparsebp.core.threads import one_blas_thread_for
from sparsebp.core.types import Array
from sparsebp.kernels.matmul import matmul

FEW_FEATURES = 8
"""Inputs up to this size carry the bias as one more feature; measured: beyond, the copy costs more than it saves."""

LONG = 100_000_000
"""FLOP from which a product is worth being cut into parts: about a millisecond of one core."""


def short_products(xp: ModuleType, work: int) -> contextlib.AbstractContextManager[None]:
    """Return `one_blas_thread_for` so many multiply-adds; a GPU's products leave the host's BLAS alone."""
    return one_blas_thread_for(work) if backend.is_host(xp) else contextlib.nullcontext()


def product(a: Array, b: Array) -> Array:
    """Return what `_multiply` does, whatever a BLAS would do with threads of its own."""
    with short_products(backend.namespace(a), a.size * b.shape[1]):
        return _multiply(a, b)


def transposed_product(a: Array, b: Array) -> Array:
    """Return ``aᵀ @ b``, of two tall matrices."""
    if backend.is_host(backend.namespace(a)):  # with the narrow b on the left it is split better between threads
        return _multiply(b.T, a).T
    return backend.matmul(a.T, b)


def _multiply(a: Array, b: Array) -> Array:
    """Return ``a @ b``, as the BLAS has it, or in parts on all threads: which of the two, the shape says alone.

    On a GPU it is cuBLAS, which reads views and transposes as they lie.
    """
    xp = backend.namespace(a)
    if 2.0 * a.size * b.shape[1] >= LONG or not backend.is_host(xp):
        return matmul(xp, a, b)
    out = empty(xp, (*a.shape[:-1], b.shape[1]), a.dtype)
    rows = math.prod(a.shape[:-1])
    xp.matmul(a.reshape(rows, a.shape[-1]), b, out=out.reshape(rows, b.shape[1]))
    return out


def project(x: Array, w: Array, bias: Array | None) -> Array:
    """Return ``x wᵀ + bias`` (T, B, rows of w)."""
    xp = backend.namespace(x)
    steps, batch, features = x.shape
    if features > FEW_FEATURES:
        gx = product(x, w.T)
        if bias is not None:
            gx += bias
        return gx
    # The bias becomes one more feature that is always 1: a pass less over gx, and no GEMM with an inner length of 1,
    # which OpenBLAS does eight times slower than one with 2.
    extended_x = xp.ones((steps, batch, features + 1), dtype=x.dtype)
    extended_x[..., :-1] = x
    extended_w = xp.zeros((w.shape[0], features + 1), dtype=x.dtype)
    extended_w[:, :-1] = w
    if bias is not None:
        extended_w[:, -1] = bias
    return product(extended_x, extended_w.T)
