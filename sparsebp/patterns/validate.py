"""What makes index arrays a canonical CSR pattern, and the errors for those that are not."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.errors import PatternError
from sparsebp.types import Array

_INT32_END = 2**31


def index_dtype(nnz: int, shape: tuple[int, int]) -> np.dtype:
    """Return the index type of a pattern: int32 until the entries or a dimension reach 2**31, then int64."""
    return np.dtype(np.int64 if max(nnz, *shape) >= _INT32_END else np.int32)


def checked_shape(shape: Any) -> tuple[int, int]:
    """Return `shape` as two Python integers.

    Raises
    ------
    PatternError
        It is not a pair of integers that are 0 or more.
    """
    try:
        rows, columns = (int(n) for n in shape)
        valid = rows >= 0 and columns >= 0 and (rows, columns) == tuple(shape)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise PatternError(
            "The shape of a pattern is wrong",
            expected="two integers (rows, columns) of 0 or more",
            got=repr(shape),
            remedy="Pass shape=(n_rows, n_columns)",
        )
    return rows, columns


def checked_arrays(indptr: Array, indices: Array, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays as host integer arrays whose rows and columns exist; order and duplicates are not looked at.

    Raises
    ------
    PatternError
        `indptr` has the wrong length, does not start at 0, decreases or does not end at ``len(indices)``; an index is
        outside the columns; an array is not one-dimensional or not of integers.
    """
    indptr, indices = _integers("indptr", indptr), _integers("indices", indices)
    rows, columns = shape
    if len(indptr) != rows + 1:
        raise PatternError(
            "indptr has the wrong length",
            expected=f"{rows + 1} entries, one more than the {rows} rows",
            got=len(indptr),
            remedy="Pass the shape that belongs to the arrays, or complete indptr",
        )
    if indptr[0] != 0:
        raise PatternError(
            "indptr does not start at 0", expected="indptr[0] == 0", got=indptr[0], remedy="Subtract indptr[0]"
        )
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(falls):
        row = int(falls[0])
        raise PatternError(
            "indptr is not monotone",
            expected="every row to end where it begins or later",
            got=f"row {row} from {indptr[row]} to {indptr[row + 1]}",
            remedy="Build indptr as the running sum of the rows' lengths",
        )
    if indptr[-1] != len(indices):
        raise PatternError(
            "indptr and indices do not belong together",
            expected=f"indptr[-1] == len(indices) == {len(indices)}",
            got=indptr[-1],
            remedy="Pass the arrays of one matrix, without spare room at the end of indices",
        )
    if len(indices):
        outside = np.flatnonzero((indices < 0) | (indices >= columns))
        if len(outside):
            raise PatternError(
                "A column index is out of range",
                expected=f"0 <= index < {columns}",
                got=f"{indices[outside[0]]} at position {outside[0]}",
                remedy="Pass the shape that belongs to the indices, or correct them",
            )
    return indptr, indices


def check_canonical(indptr: np.ndarray, indices: np.ndarray) -> None:
    """Check that the columns of every row are strictly increasing.

    Raises
    ------
    PatternError
        They are not; the remedy names `SparsityPattern.canonical`.
    """
    bad = indices[1:] <= indices[:-1]
    starts = indptr[1:-1]
    bad[starts[(starts > 0) & (starts < len(indices))] - 1] = False  # where a new row begins, the column may fall
    where = np.flatnonzero(bad)
    if len(where) == 0:
        return
    at = int(where[0])
    row = int(np.searchsorted(indptr, at, side="right")) - 1
    twice = indices[at] == indices[at + 1]
    raise PatternError(
        f"The columns of a row are {'duplicated' if twice else 'unsorted'}",
        expected="strictly increasing columns in every row",
        got=f"{indices[at]}, {indices[at + 1]} in row {row}",
        remedy="Use SparsityPattern.canonical(indptr, indices, shape), which sorts and merges them",
    )


def _integers(name: str, array: Array) -> np.ndarray:
    if not isinstance(array, np.ndarray):
        array = np.asarray(array) if isinstance(array, (list, tuple, range)) else backend.to_host(array)
        if array.size == 0 and array.dtype == np.float64:  # what NumPy makes of an empty list
            array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PatternError(
            f"{name} is not an index array",
            expected="a one-dimensional array of integers",
            got=f"shape {array.shape} of {array.dtype}",
            remedy="Convert it with .astype(numpy.int32)",
        )
    return array
