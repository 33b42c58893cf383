"""Patterns of recurrent layers."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import check_allocatable, checked_shape, checked_sizes, index_dtype


def hidden_pattern(size: int) -> SparsityPattern:
    """Return the pattern of one step's transposed Jacobian, of h[t] with respect to h[t-1]: dense (BPPSA Eq. 9, 11).

    Raises
    ------
    PatternError
        `size` is no integer, or negative.
    """
    return _square(*checked_sizes(size=size))


@lru_cache(maxsize=KEPT)
def _square(size: int) -> SparsityPattern:
    return SparsityPattern.dense(size, size)


def sequence_pattern(
    steps: int, input_size: int, hidden_size: int, *, reverse: bool = False, bidirectional: bool = False
) -> SparsityPattern:
    """Return the pattern of a whole sequence: block-triangular, because an input reaches only what comes after it.

    Parameters
    ----------
    steps, input_size, hidden_size
        T, I and H. Elements are in time order: row ``t * I + i`` is input i of step t.
    reverse
        The layer runs backward in time; then input t reaches the outputs s <= t.
    bidirectional
        Both: every step has 2H outputs, those of the forward direction first.

    Returns
    -------
    SparsityPattern
        Shape (T·I, T·H), or (T·I, T·2H): input t reaches the outputs s >= t (backward in time: s <= t).

    Raises
    ------
    PatternError
        A size is no integer, or negative.
    """
    sizes = checked_sizes(steps=steps, input_size=input_size, hidden_size=hidden_size)
    return _sequence(*sizes, bool(reverse), bool(bidirectional))


@lru_cache(maxsize=KEPT)
def _sequence(steps: int, input_size: int, hidden_size: int, reverse: bool, bidirectional: bool) -> SparsityPattern:
    directions = 1 + bidirectional
    shape = checked_shape((steps * input_size, steps * directions * hidden_size))
    check_allocatable(steps * (steps + 1) // 2 * directions * max(input_size, 1) * hidden_size, shape)
    later = np.arange(steps)[:, None] <= np.arange(steps)  # (t, s): input t reaches output s
    reached = [later, later.T] if bidirectional else [later.T if reverse else later]
    of_step = np.repeat(np.stack(reached, axis=-1).reshape(steps, steps * directions), hidden_size, axis=1)
    lengths = np.repeat(of_step.sum(axis=1, dtype=np.int64), input_size)
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    rows = [np.tile(np.flatnonzero(columns), input_size) for columns in of_step]
    indices = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return SparsityPattern._trusted(indptr, indices.astype(index_dtype(len(indices), shape)), shape)
