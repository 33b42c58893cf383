"""Pattern of a fully connected layer."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import check_allocatable, checked_shape, checked_sizes, index_dtype


def linear_pattern(in_features: int, out_features: int, positions: int = 1) -> SparsityPattern:
    """Return the pattern of the transposed Jacobian of ``y = x @ W.T + b``: dense, or a block diagonal of dense blocks.

    Parameters
    ----------
    in_features, out_features
        Sizes of an input and an output vector.
    positions
        How many vectors a sample holds (time steps, tokens); each is mapped by itself, by the same weights.

    Returns
    -------
    SparsityPattern
        Shape (positions * in_features, positions * out_features).

    Raises
    ------
    PatternError
        A size is no integer, or negative.
    """
    return _linear(*checked_sizes(in_features=in_features, out_features=out_features, positions=positions))


@lru_cache(maxsize=KEPT)
def _linear(in_features: int, out_features: int, positions: int) -> SparsityPattern:
    if positions == 1:
        return SparsityPattern.dense(in_features, out_features)
    shape = checked_shape((positions * in_features, positions * out_features))
    nnz = shape[0] * out_features
    check_allocatable(nnz, shape)
    indptr = np.arange(shape[0] + 1, dtype=np.int64) * out_features
    block = np.arange(out_features, dtype=index_dtype(nnz, shape))
    first = np.arange(positions, dtype=block.dtype) * out_features
    indices = np.broadcast_to((first[:, None] + block)[:, None, :], (positions, in_features, out_features))
    return SparsityPattern._trusted(indptr, indices.reshape(-1), shape)
