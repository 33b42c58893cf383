"""Transposed Jacobians of what maps every element, or every vector, by itself: a diagonal of numbers or of blocks."""

from __future__ import annotations

from math import prod

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array, SlopeFunction
from sparsebp.jacobians.conv import conv_jacobian_t
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns import axis_pattern, linear_pattern, pointwise_pattern
from sparsebp.patterns.masked import packed_mask


def pointwise_jacobian_t(saved: Array, function: SlopeFunction = "given") -> TransposedJacobian:
    """Return the diagonal of an operator's slopes.

    Parameters
    ----------
    saved
        f'(x), or y = f(x) for a named function; batch first, shape (B, …). An element where the slope is zero stays an
        entry.
    function
        ``"given"``: `saved` holds the slopes. ``"relu"``, ``"tanh"``, ``"sigmoid"``: they are told from y on the way.

    Returns
    -------
    TransposedJacobian
        Diagonal of the size of one sample, per sample.

    Raises
    ------
    ShapeError
        `saved` has no batch axis.
    DTypeError
        It is neither float32 nor float64.
    OptionError
        `function` is another one.
    """
    xp = backend.namespace(saved=saved)
    if saved.ndim == 0:
        raise ShapeError("saved has no batch axis", expected="(B, …)", got=saved.shape, remedy="Add an axis in front")
    batch = saved.shape[0]
    size = prod(saved.shape[1:])
    rows = xp.ascontiguousarray(saved.reshape(batch, size))
    if batch == 1 and function == "given":
        return TransposedJacobian(pointwise_pattern(size), rows.reshape(size, 1))
    data = xp.empty((size, batch), dtype=saved.dtype)
    kernels.get(xp).pointwise_slopes(rows, function, data)
    return TransposedJacobian(pointwise_pattern(size), data)


def linear_jacobian_t(weight: Array, positions: int = 1, *, mask: np.ndarray | None = None) -> TransposedJacobian:
    """Return Wᵀ of ``y = x @ W.T + b``, shared by the batch.

    Parameters
    ----------
    weight
        W as torch.nn.Linear keeps it: (out_features, in_features).
    positions
        How many vectors a sample holds; each is mapped by itself, so Wᵀ stands that often along the diagonal.
    mask
        Which weights are kept (pruning), bool in the shape of `weight` on the host; the pattern has the entries of
        these alone. None: all are.

    Raises
    ------
    ShapeError
        `weight` is not a matrix, or `mask` has another shape.
    DTypeError
        `mask` is not bool.
    PatternError
        `positions` is negative.
    """
    xp = backend.namespace(weight=weight)
    if weight.ndim != 2:
        raise ShapeError(
            "weight is not a matrix", expected="(out_features, in_features)", got=weight.shape, remedy="Reshape it"
        )
    if mask is not None and packed_mask(mask, weight.shape) is not None and positions > 0:
        # A convolution of width 1 over the positions has the same weights at each.
        return conv_jacobian_t(weight[:, :, None], (positions,), layout="hwc", mask=mask[:, :, None])
    pattern = linear_pattern(weight.shape[1], weight.shape[0], positions)
    values = xp.ascontiguousarray(weight.T).reshape(-1)
    return TransposedJacobian(pattern, values if positions == 1 else xp.tile(values, positions))


def block_jacobian_t(blocks: Array) -> TransposedJacobian:
    """Return the block diagonal of dense blocks: softmax, layer normalisation.

    Parameters
    ----------
    blocks
        Shape (B, positions, n_in, n_out): one transposed Jacobian a position.

    Returns
    -------
    TransposedJacobian
        Shape (positions * n_in, positions * n_out), per sample.

    Raises
    ------
    ShapeError
        `blocks` has not four axes.
    """
    xp = backend.namespace(blocks=blocks)
    if blocks.ndim != 4:
        raise ShapeError(
            "blocks has the wrong number of axes", expected="(B, positions, n_in, n_out)", got=blocks.shape,
            remedy="Pass one block a position of a sample",
        )  # fmt: skip
    batch, positions, n_in, n_out = blocks.shape
    values = blocks.reshape(batch, positions * n_in * n_out).T
    return TransposedJacobian(linear_pattern(n_in, n_out, positions), xp.ascontiguousarray(values))


def axis_jacobian_t(blocks: Array) -> TransposedJacobian:
    """Return the transposed Jacobian of what maps the vectors along one axis by themselves: softmax over channels.

    Parameters
    ----------
    blocks
        Shape (B, outer, n, n, inner): for each place before and behind the axis, of n elements, one transposed
        Jacobian, inputs × outputs.

    Returns
    -------
    TransposedJacobian
        Shape (outer * n * inner, outer * n * inner), per sample.

    Raises
    ------
    ShapeError
        `blocks` has another shape.
    """
    xp = backend.namespace(blocks=blocks)
    if blocks.ndim != 5 or blocks.shape[2] != blocks.shape[3]:
        raise ShapeError(
            "blocks has the wrong shape", expected="(B, outer, n, n, inner)", got=blocks.shape,
            remedy="Pass one square block a place of a sample",
        )  # fmt: skip
    batch, outer, n, _, inner = blocks.shape
    values = blocks.transpose(1, 2, 4, 3, 0).reshape(outer * n * inner * n, batch)
    return TransposedJacobian(axis_pattern(outer, n, inner), xp.ascontiguousarray(values))
