"""What makes index arrays a canonical CSR pattern, and the errors for those that are not."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import MemoryLimitError, PatternError
from sparsebp.core.types import Array

_INT32_END, _INT64_END = 2**31, 2**63
_LAST = _INT64_END - 1


def index_dtype(nnz: int, shape: tuple[int, int]) -> np.dtype:
    """Return the index type of a pattern: int32 until the entries or a dimension reach 2**31, then int64."""
    return np.dtype(np.int64 if max(nnz, *shape) >= _INT32_END else np.int32)


def index_bytes(nnz: int, shape: tuple[int, int]) -> int:
    """Return the bytes of a pattern's two index arrays."""
    return (nnz + shape[0] + 1) * index_dtype(nnz, shape).itemsize


def checked_shape(shape: Any) -> tuple[int, int]:
    """Return `shape` as two Python integers.

    Raises
    ------
    PatternError
        It is not a pair of integers from 0 to 2**63 - 1, what an index can say.
    """
    try:
        rows, columns = map(index, shape)
        valid = 0 <= rows < _INT64_END and 0 <= columns < _INT64_END
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise PatternError(
            "The shape of a pattern is wrong",
            expected="two integers (rows, columns), 0 or more and less than 2**63",
            got=repr(shape),
            remedy="Pass shape=(n_rows, n_columns)",
        )
    return rows, columns


def checked_sizes(**sizes: Any) -> tuple[int, ...]:
    """Return sizes as Python integers.

    Raises
    ------
    PatternError
        One is no integer from 0 on.
    """
    try:
        found = tuple(map(index, sizes.values()))
    except TypeError:
        found = (-1,)
    if min(found) < 0:
        raise PatternError(
            "A size is no integer, or negative",
            expected="integers of 0 or more",
            got=", ".join(f"{name}={size!r}" for name, size in sizes.items()),
            remedy="Pass the layer's sizes",
        )
    return found


def check_allocatable(nnz: int, shape: tuple[int, int]) -> None:
    """Check that a structure of so many entries can be in this process's memory at all.

    Raises
    ------
    MemoryLimitError
        Its arrays would take more than the process can address.
    """
    need = index_bytes(nnz, shape)
    try:
        np.empty(need, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than NumPy counts
        raise MemoryLimitError(
            f"A pattern of shape {shape} does not fit in memory", expected="memory for its indices",
            got=f"{need} bytes for {nnz} entries", remedy="Use a smaller matrix",
        ) from error  # fmt: skip


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
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        row = int(np.argmax(falls))
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
            remedy="Pass the arrays of one matrix; of a SciPy matrix A, A.prune() removes spare room at their end",
        )
    if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
        at = int(np.argmax((indices < 0) | (indices >= columns)))
        raise PatternError(
            "A column index is out of range",
            expected=f"0 <= index < {columns}",
            got=f"{indices[at]} at position {at}",
            remedy="Pass the shape that belongs to the indices, or correct them",
        )
    return indptr, indices


def check_canonical(indptr: np.ndarray, indices: np.ndarray) -> None:
    """Check that the columns of every row are strictly increasing.

    Raises
    ------
    PatternError
        They are not; the remedy is one that moves the values along.
    """
    bad = np.empty(len(indices) + 1, bool)
    np.less_equal(indices[1:], indices[:-1], out=bad[1:-1])
    bad[indptr] = False  # where a new row begins, the column may fall
    if not bad.any():
        return
    at = int(np.argmax(bad)) - 1
    row = int(np.searchsorted(indptr, at, side="right")) - 1
    twice = indices[at] == indices[at + 1]
    raise PatternError(
        f"The columns of a row are {'duplicated' if twice else 'unsorted'}",
        expected="strictly increasing columns in every row",
        got=f"{indices[at]}, {indices[at + 1]} in row {row}",
        remedy="For a SciPy matrix A call A.sum_duplicates() first, which sorts and merges its columns and its values; "
        "SparsityPattern.canonical(...) does so for a structure that has no values yet",
    )


def _integers(name: str, array: Array) -> np.ndarray:
    """Return a one-dimensional host array of int32 or int64."""
    if isinstance(array, (list, tuple, range)):
        try:
            array = np.asarray(array)
        except (ValueError, OverflowError):  # lists of different lengths
            array = np.asarray(None)
        if array.size == 0 and array.dtype == np.float64:  # what NumPy makes of an empty list
            array = array.astype(np.int32)
    else:
        backend.namespace(**{name: array})
        array = backend.to_host(array)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.max(initial=0) > _LAST):
        raise PatternError(
            f"{name} is not an index array",
            expected="a one-dimensional array of integers, less than 2**63",
            got=f"shape {array.shape} of {array.dtype}",
            remedy="Convert it with .astype(numpy.int32)",
        )
    return array if array.dtype in backend.INDEX_DTYPES else array.astype(np.int64)
