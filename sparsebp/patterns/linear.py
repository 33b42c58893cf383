"""Pattern of a fully connected layer."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsebp.errors import PatternError
from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import index_dtype


@lru_cache(maxsize=KEPT)
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
        A size is negative.
    """
    if positions == 1:
        return SparsityPattern.dense(in_features, out_features)
    shape = (positions * in_features, positions * out_features)
    if min(in_features, out_features, positions) < 0:
        raise PatternError(
            "A size is negative",
            expected="0 or more",
            got=f"in_features={in_features}, out_features={out_features}, positions={positions}",
            remedy="Pass the layer's sizes",
        )
    nnz = shape[0] * out_features
    indptr = np.arange(shape[0] + 1, dtype=np.int64) * out_features
    block = np.arange(out_features, dtype=index_dtype(nnz, shape))
    first = np.arange(positions, dtype=block.dtype) * out_features
    indices = np.broadcast_to((first[:, None] + block)[:, None, :], (positions, in_features, out_features))
    return SparsityPattern._trusted(indptr, indices.reshape(-1), shape)
