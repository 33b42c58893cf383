"""Patterns of recurrent layers."""

from __future__ import annotations

import numpy as np

from sparsebp.errors import PatternError
from sparsebp.patterns.sparsity import SparsityPattern
from sparsebp.patterns.validate import index_dtype


def hidden_pattern(size: int) -> SparsityPattern:
    """Return the pattern of one step's transposed Jacobian, of h[t] with respect to h[t-1]: dense (BPPSA Eq. 9, 11).

    Raises
    ------
    PatternError
        `size` is negative.
    """
    return SparsityPattern.dense(size, size)


def sequence_pattern(steps: int, input_size: int, hidden_size: int, *, reverse: bool = False) -> SparsityPattern:
    """Return the pattern of a whole sequence: block-triangular, because an input reaches only what comes after it.

    Parameters
    ----------
    steps, input_size, hidden_size
        T, I and H. Elements are in time order: row ``t * I + i`` is input i of step t.
    reverse
        The layer runs backward in time; then input t reaches the outputs s <= t.

    Returns
    -------
    SparsityPattern
        Shape (T·I, T·H): input t reaches the outputs s >= t.

    Raises
    ------
    PatternError
        A size is negative.
    """
    if min(steps, input_size, hidden_size) < 0:
        raise PatternError(
            "A size is negative",
            expected="0 or more",
            got=f"steps={steps}, input_size={input_size}, hidden_size={hidden_size}",
            remedy="Pass the layer's sizes",
        )
    shape = (steps * input_size, steps * hidden_size)
    reached = (
        np.arange(1, steps + 1) if reverse else np.arange(steps, 0, -1)
    )  # outputs that the input of a step reaches
    lengths = np.repeat(reached * hidden_size, input_size)
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    first = np.repeat(np.arange(steps) * (0 if reverse else hidden_size), input_size)
    # each row is a run of columns: count on from where the row began
    offset = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - first, lengths)
    return SparsityPattern._trusted(indptr, offset.astype(index_dtype(len(offset), shape)), shape)
