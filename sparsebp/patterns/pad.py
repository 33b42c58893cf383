"""The patterns of arrays with a border: of zeros, a selection; of what is inside, the transpose of one."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from sparsebp.patterns.kron import Factor, kron
from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import check_allocatable, checked_shape, checked_sizes, index_dtype

_OF_NUMPY = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad_pattern(channels: int, size: tuple[int, int], padding: tuple[int, int, int, int]) -> SparsityPattern:
    """Return the pattern of a border around every channel of an image: at most one entry a row.

    Parameters
    ----------
    channels, size
        Channels, and (height, width) of the input.
    padding
        Lines of the border: left, right, above, below. Where negative, lines of the input are left out.

    Returns
    -------
    SparsityPattern
        A row for each element of the input, a column for each of the output.

    Raises
    ------
    PatternError
        A size is no integer, or negative, that of the output included.
    """
    left, right, above, below = padding
    checked_sizes(height=size[0] + above + below, width=size[1] + left + right)
    return _pad(*checked_sizes(channels=channels, height=size[0], width=size[1]), *padding)


@lru_cache(maxsize=KEPT)
def _pad(channels: int, height: int, width: int, left: int, right: int, above: int, below: int) -> SparsityPattern:
    area = (height + above + below) * (width + left + right)
    shape = checked_shape((channels * height * width, channels * area))
    check_allocatable(shape[0], shape)
    entry = index_dtype(shape[0], shape)
    rows, columns = np.arange(height, dtype=entry) + above, np.arange(width, dtype=entry) + left
    kept = ((rows >= 0) & (rows < height + above + below))[:, None] & (columns >= 0) & (columns < width + left + right)
    places = rows[:, None] * (width + left + right) + columns
    first = np.arange(channels, dtype=entry)[:, None] * area
    indptr = np.concatenate([[0], np.cumsum(np.tile(kept.reshape(-1), channels))])
    return SparsityPattern._trusted(indptr, (first + places[kept]).reshape(-1).astype(entry), shape)


@lru_cache(maxsize=KEPT)
def border_pattern(
    channels: int, sizes: tuple[int, ...], padding: tuple[tuple[int, int], ...], mode: str
) -> SparsityPattern:
    """Return the pattern of a border that repeats elements of the input: one entry a column, several in some rows.

    Parameters
    ----------
    channels, sizes
        Channels, and the lengths of the axes behind them.
    padding
        Elements (before, after) on each axis, as many as the mode has something to repeat for.
    mode
        ``"reflect"``, ``"replicate"`` or ``"circular"``, as `torch.nn.functional.pad` has them.

    Returns
    -------
    SparsityPattern
        A row for each element of the input, a column for each of the padded one.
    """
    nnz = channels * prod(n + sum(pair) for n, pair in zip(sizes, padding, strict=True))
    shape = checked_shape((channels * prod(sizes), nnz))
    check_allocatable(nnz, shape)
    each = np.arange(channels + 1)
    factors = [Factor(each, each[:-1], channels, np.zeros(channels, np.int8))]
    factors += [_repeated(size, pair, mode) for size, pair in zip(sizes, padding, strict=True)]
    entries = kron(factors, np.int8)
    return SparsityPattern._trusted(entries.indptr, entries.columns, shape)


def _repeated(size: int, pair: tuple[int, int], mode: str) -> Factor:
    """Return one axis: where each element is found in the padded one."""
    source = np.pad(np.arange(size), pair, _OF_NUMPY[mode])  # type: ignore[call-overload]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(source, minlength=size))))
    return Factor(indptr, np.argsort(source, kind="stable"), len(source), np.zeros(len(source), np.int8))
