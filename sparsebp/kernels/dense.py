"""Dense products for arrays of either namespace, their results in pooled memory."""

from __future__ import annotations

import math
from types import ModuleType

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.backend import empty
from sparsebp.core.check import Array


def matmul(xp: ModuleType, a: Array, b: Array) -> Array:
    """Return ``a @ b``, in pooled memory on the host, for a matrix `b` and an `a` with any leading axes."""
    if not backend.is_host(xp):
        return backend.matmul(a, b)
    out = empty(xp, (*a.shape[:-1], b.shape[-1]), a.dtype)
    if a.ndim == 2:
        kernels.on_host().matmul(a, b, out)
        return out
    rows = math.prod(a.shape[:-1])
    kernels.on_host().matmul(a.reshape(rows, a.shape[-1]), b, out.reshape(rows, b.shape[1]))
    return out


def matmul_batches(xp: ModuleType, a: Array, b: Array) -> Array:
    """Return ``a @ b``, in pooled memory on the host, for (count, m, k) and (count, k, n)."""
    if not backend.is_host(xp):
        return backend.matmul(a, b)
    out = empty(xp, (*a.shape[:-1], b.shape[-1]), a.dtype)
    return kernels.on_host().matmul_batches(a, b, out)
