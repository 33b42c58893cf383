"""Transposed Jacobians of pooling: zeros and ones by the argmax for a max-pool, constants for an average."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns import PoolPattern


def max_pool_jacobian_t(pool: PoolPattern, winner: Array, dtype: Any = np.float32) -> TransposedJacobian:
    """Return the transposed Jacobian of max pooling: 1 where a window takes its maximum, 0 elsewhere (BPPSA §3.3).

    Parameters
    ----------
    pool
        The layer's `pool_pattern`.
    winner
        Place of the maximum inside every window, counted as `PoolPattern.offset` counts. Integers, batch first, shape
        (B, …) with as many elements a sample as the pattern has columns, in their order.
    dtype
        float32 or float64.

    Returns
    -------
    TransposedJacobian
        Shape (n_in, n_out), per sample.

    Raises
    ------
    ShapeError
        `winner` does not have one element for every window.
    DTypeError
        `dtype` is another one.
    """
    xp = backend.namespace(winner=winner)
    n_out = pool.pattern.shape[1]
    if winner.ndim == 0 or winner.size != winner.shape[0] * n_out:
        raise ShapeError(
            "winner does not fit the pattern",
            expected=f"(B, …) with {n_out} windows a sample",
            got=winner.shape,
            remedy="Pass the place of the maximum in every window",
        )
    if winner.dtype not in ("uint8", "int32"):
        winner = winner.astype("int32")
    data = xp.empty((pool.pattern.nnz, winner.shape[0]), dtype=backend.float_dtype(dtype))
    rows = xp.ascontiguousarray(winner.reshape(winner.shape[0], n_out))
    kernels.get(xp).max_pool_values(rows, *pool.lines_on(xp), *pool.line, data)
    return TransposedJacobian(pool.pattern, data)


def avg_pool_jacobian_t(
    pool: PoolPattern,
    xp: ModuleType = np,
    dtype: Any = np.float32,
    *,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> TransposedJacobian:
    """Return the transposed Jacobian of average pooling: one over what each window is divided by.

    Parameters
    ----------
    pool
        The layer's `pool_pattern`, or `adaptive_pool_pattern`.
    xp
        Where the values shall be: ``numpy`` or ``cupy``.
    dtype
        float32 or float64.
    count_include_pad
        Whether padding counts as elements of a window.
    divisor
        Divide by this number instead.

    Returns
    -------
    TransposedJacobian
        Shape (n_in, n_out), shared by the batch: the values depend on the configuration only.

    Raises
    ------
    DTypeError
        `dtype` is another one.
    """
    weights = avg_pool_weights(pool, count_include_pad=count_include_pad, divisor=divisor)
    data = weights.astype(backend.float_dtype(dtype))[pool.pattern.indices]
    return TransposedJacobian(pool.pattern, backend.constant(xp, data))


def avg_pool_weights(pool: PoolPattern, *, count_include_pad: bool = True, divisor: int | None = None) -> np.ndarray:
    """Return what each window's sum is multiplied by: float64, shape (n_out,)."""
    if divisor is not None:
        return np.full(pool.pattern.shape[1], 1.0 / divisor)
    return 1.0 / (pool.extent if count_include_pad else pool.inputs)
