"""Patterns of blocks: diagonals (pointwise operators, linear layers), dense ones and triangles (recurrent layers)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import check_allocatable, checked_shape, checked_sizes, index_dtype


def pointwise_pattern(size: int) -> SparsityPattern:
    """Return the diagonal of an operator on `size` elements.

    What is zero for one input only, a ReLU that is off, stays an entry (BPPSA §3.3 and Table 1: sparsity 1 - 1/size).

    Raises
    ------
    PatternError
        `size` is no integer, or negative.
    """
    return _diagonal(*checked_sizes(size=size))


_diagonal = lru_cache(maxsize=KEPT)(SparsityPattern.diagonal)


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


def axis_pattern(outer: int, length: int, inner: int) -> SparsityPattern:
    """Return the pattern of what maps the vectors along one axis by themselves: dense along it, diagonal elsewhere.

    Parameters
    ----------
    outer, length, inner
        Elements of a sample before, on, and behind the axis.

    Returns
    -------
    SparsityPattern
        Square, of outer * length * inner rows with `length` entries each.

    Raises
    ------
    PatternError
        A size is no integer, or negative.
    """
    outer, length, inner = checked_sizes(outer=outer, length=length, inner=inner)
    return _linear(length, length, outer) if inner == 1 else _axis(outer, length, inner)


@lru_cache(maxsize=KEPT)
def _axis(outer: int, length: int, inner: int) -> SparsityPattern:
    size = outer * length * inner
    shape = checked_shape((size, size))
    check_allocatable(size * length, shape)
    entry = index_dtype(size * length, shape)
    first = np.arange(outer, dtype=entry)[:, None, None, None] * (length * inner)
    columns = first + np.arange(inner, dtype=entry)[:, None] + np.arange(length, dtype=entry) * inner
    indices = np.broadcast_to(columns, (outer, length, inner, length)).reshape(-1)
    return SparsityPattern._trusted(np.arange(size + 1, dtype=np.int64) * length, indices, shape)


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


def lstm_pattern(size: int) -> SparsityPattern:
    """Return the pattern of an LSTM's step, of (h, c)[t] with respect to (h, c)[t-1]: two blocks of four are diagonal.

    Shape (2 * size, 2 * size). Row i is dense, as every unit of h reaches all of the next h and c; row ``size + i``
    holds unit i of both alone, as c reaches them unit by unit.

    Raises
    ------
    PatternError
        `size` is no integer, or negative.
    """
    return _lstm(*checked_sizes(size=size))


@lru_cache(maxsize=KEPT)
def _lstm(size: int) -> SparsityPattern:
    shape = checked_shape((2 * size, 2 * size))
    nnz = 2 * size * (size + 1)
    check_allocatable(nnz, shape)
    lengths = np.repeat(np.array([2 * size, 2], dtype=np.int64), size)
    columns = np.arange(2 * size, dtype=index_dtype(nnz, shape))
    indices = np.concatenate([np.tile(columns, size), columns.reshape(2, size).T.reshape(-1)])
    return SparsityPattern._trusted(np.concatenate(([0], np.cumsum(lengths))), indices, shape)


def step_sum_pattern(steps: int, features: int) -> SparsityPattern:
    """Return the pattern of a sum over steps, each feature by itself: one entry a row, (steps * features, features).

    Raises
    ------
    PatternError
        A size is no integer, or negative.
    """
    return _step_sum(*checked_sizes(steps=steps, features=features))


@lru_cache(maxsize=KEPT)
def _step_sum(steps: int, features: int) -> SparsityPattern:
    shape = checked_shape((steps * features, features))
    check_allocatable(shape[0], shape)
    columns = np.tile(np.arange(features, dtype=index_dtype(shape[0], shape)), steps)
    return SparsityPattern._trusted(np.arange(shape[0] + 1), columns, shape)


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
