"""Products over all steps or rows at once, and how the threads share them."""

from __future__ import annotations

import contextlib
from types import ModuleType

from sparsebp import kernels
from sparsebp.core import backend, cublas
from sparsebp.core.check import Array
from sparsebp.core.threads import one_blas_thread_for

FEW_FEATURES = 8
"""Inputs up to this size carry the bias as one more feature; measured: beyond, the copy costs more than it saves."""


def short_products(xp: ModuleType, work: int) -> contextlib.AbstractContextManager[None]:
    """Return `one_blas_thread_for` that many multiply-adds on the host, a null context on a GPU."""
    return one_blas_thread_for(work) if backend.is_host(xp) else contextlib.nullcontext()


def product(a: Array, b: Array) -> Array:
    """Return ``a @ b``, rounded the same for any number of threads; on a GPU views and transposes are read in place."""
    return kernels.dense(backend.namespace(a)).matmul(a, b)


def transposed_product(a: Array, b: Array) -> Array:
    """Return ``aᵀ @ b``, of two tall matrices."""
    if backend.is_host(backend.namespace(a)):  # with the narrow b on the left threads share the work better
        return product(b.T, a).T
    return cublas.matmul(a.T, b)


def project(x: Array, w: Array, bias: Array | None) -> Array:
    """Return ``x wᵀ + bias`` (T, B, rows of w)."""
    xp = backend.namespace(x)
    steps, batch, features = x.shape
    if features > FEW_FEATURES:
        gx = product(x, w.T)
        if bias is not None:
            kernels.get(xp).unchecked.add_bias(gx.reshape(steps * batch, len(w)), bias)
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
