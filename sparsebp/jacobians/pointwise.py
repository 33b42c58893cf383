"""Transposed Jacobians of operators that map every element by itself."""

from __future__ import annotations

from math import prod

from sparsebp import backend, kernels
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array, SlopeFunction
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns import pointwise_pattern


def pointwise_jacobian_t(kept: Array, function: SlopeFunction = "given") -> TransposedJacobian:
    """Return the diagonal of an operator's slopes.

    Parameters
    ----------
    kept
        f'(x), or y = f(x) for a named function; batch first, shape (B, …). An element where the slope is zero stays an
        entry.
    function
        ``"given"``: `kept` holds the slopes. ``"relu"``, ``"tanh"``, ``"sigmoid"``: they are told from y on the way.

    Returns
    -------
    TransposedJacobian
        Diagonal of the size of one sample, per sample.

    Raises
    ------
    ShapeError
        `kept` has no batch axis.
    DTypeError
        It is neither float32 nor float64.
    OptionError
        `function` is another one.
    """
    xp = backend.namespace(kept=kept)
    if kept.ndim == 0:
        raise ShapeError("kept has no batch axis", expected="(B, …)", got=kept.shape, remedy="Add an axis in front")
    batch = kept.shape[0]
    size = prod(kept.shape[1:])
    rows = xp.ascontiguousarray(kept.reshape(batch, size))
    if batch == 1 and function == "given":
        return TransposedJacobian(pointwise_pattern(size), rows.reshape(size, 1))
    data = xp.empty((size, batch), dtype=kept.dtype)
    kernels.get(xp).pointwise_slopes(rows, function, data)
    return TransposedJacobian(pointwise_pattern(size), data)
