"""Transposed Jacobian of a fully connected layer."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.errors import ShapeError
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns import linear_pattern
from sparsebp.types import Array


def linear_jacobian_t(weight: Array, positions: int = 1) -> TransposedJacobian:
    """Return Wᵀ of ``y = x @ W.T + b``, shared by the batch.

    Parameters
    ----------
    weight
        W as torch.nn.Linear keeps it: (out_features, in_features).
    positions
        How many vectors a sample holds; each is mapped by itself, so Wᵀ stands that often along the diagonal.

    Raises
    ------
    ShapeError
        `weight` is not a matrix.
    PatternError
        `positions` is negative.
    """
    xp = backend.namespace(weight)
    if weight.ndim != 2:
        raise ShapeError(
            "weight is not a matrix", expected="(out_features, in_features)", got=weight.shape, remedy="Reshape it"
        )
    pattern = linear_pattern(weight.shape[1], weight.shape[0], positions)
    values = xp.ascontiguousarray(weight.T).reshape(-1)
    return TransposedJacobian(pattern, values if positions == 1 else xp.tile(values, positions))
