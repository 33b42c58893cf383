"""Transposed Jacobians of operators that map every element by itself."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.errors import ShapeError
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns import pointwise_pattern
from sparsebp.types import Array


def pointwise_jacobian_t(slope: Array) -> TransposedJacobian:
    """Return the diagonal of an operator's slopes.

    Parameters
    ----------
    slope
        f'(x), batch first: shape (B, …). An element where the slope is zero stays an entry.

    Returns
    -------
    TransposedJacobian
        Diagonal of the size of one sample, per sample.

    Raises
    ------
    ShapeError
        `slope` has no batch axis.
    """
    xp = backend.namespace(slope)
    if slope.ndim == 0:
        raise ShapeError("slope has no batch axis", expected="(B, …)", got=slope.shape, remedy="Add an axis in front")
    batch = slope.shape[0]
    size = 1
    for length in slope.shape[1:]:
        size *= length
    return TransposedJacobian(pointwise_pattern(size), xp.ascontiguousarray(slope.reshape(batch, size).T))
