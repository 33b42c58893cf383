"""Transposed Jacobians of operators that map every vector of a sample by itself, each with values of its own."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns import linear_pattern


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
