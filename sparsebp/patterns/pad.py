"""The pattern of an image with a border: a selection."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import check_allocatable, checked_shape, checked_sizes, index_dtype


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
