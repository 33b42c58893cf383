"""Transposed Jacobian of a fully connected layer."""

from __future__ import annotations

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.jacobians.conv import conv_jacobian_t
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns import linear_pattern
from sparsebp.patterns.masked import packed_mask


def linear_jacobian_t(weight: Array, positions: int = 1, *, kept: np.ndarray | None = None) -> TransposedJacobian:
    """Return Wᵀ of ``y = x @ W.T + b``, shared by the batch.

    Parameters
    ----------
    weight
        W as torch.nn.Linear keeps it: (out_features, in_features).
    positions
        How many vectors a sample holds; each is mapped by itself, so Wᵀ stands that often along the diagonal.
    kept
        Which weights are there (pruning), bool in the shape of `weight` on the host; the pattern has the entries of
        these alone. None: all are there.

    Raises
    ------
    ShapeError
        `weight` is not a matrix, or `kept` has another shape.
    DTypeError
        `kept` is not bool.
    PatternError
        `positions` is negative.
    """
    xp = backend.namespace(weight=weight)
    if weight.ndim != 2:
        raise ShapeError(
            "weight is not a matrix", expected="(out_features, in_features)", got=weight.shape, remedy="Reshape it"
        )
    if kept is not None and packed_mask(kept, weight.shape) is not None and positions > 0:
        # A convolution of width 1 over the positions has the same weights at each.
        return conv_jacobian_t(weight[:, :, None], (positions,), layout="hwc", kept=kept[:, :, None])
    pattern = linear_pattern(weight.shape[1], weight.shape[0], positions)
    values = xp.ascontiguousarray(weight.T).reshape(-1)
    return TransposedJacobian(pattern, values if positions == 1 else xp.tile(values, positions))
