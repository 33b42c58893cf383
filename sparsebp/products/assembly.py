"""`plan_assembly` and `TripletAssembly`: a sparse matrix from triplets, whose places are found once.

    data[e] = Σ values[t] over the triplets t at entry e

That is a product with a sparse matrix of ones, (nnz, triplets). Its rows list the triplets of each entry, in the order
in which they were given, so sums are bitwise equal at every number of threads. Its transpose is a gather.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import LayoutError, PatternError, within_memory
from sparsebp.core.locks import cached_property
from sparsebp.patterns.pattern import DeviceCopies, SparsityPattern, checked_shape, frozen, index_dtype, values_on
from sparsebp.products.product import _as_columns, _check_values


def plan_assembly(rows: Array, cols: Array, shape: tuple[int, int]) -> TripletAssembly:
    """Find the places of triplets (row, column, value) in a sparse matrix once; triplets of one place are added.

    Parameters
    ----------
    rows, cols
        Row and column of every triplet: lists or NumPy arrays of integers, of one shape, read in C order. For k × k
        element matrices it is (elements, k, k), say.
    shape
        (n_rows, n_columns) of the matrix.

    Returns
    -------
    TripletAssembly
        Call it with the values of the triplets.

    Raises
    ------
    PatternError
        `rows` and `cols` are not such arrays, an index is out of range, or `shape` is wrong.
    MemoryLimitError
        The system has no memory for the plan.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> plan = sb.plan_assembly([0, 1, 0], [2, 0, 2], (2, 3))
    >>> plan.pattern.to_scipy(plan(np.array([1.0, 10.0, 100.0]))).toarray()
    array([[  0.,   0., 101.],
           [ 10.,   0.,   0.]])
    """
    shape = checked_shape(shape)
    row, column = _indices("rows", rows, shape[0]), _indices("cols", cols, shape[1])
    if row.shape != column.shape:
        raise PatternError("rows and cols do not belong together", expected="one shape",
                           got=f"{row.shape} and {column.shape}")  # fmt: skip
    row, column = row.ravel(), column.ravel()
    count = len(row)
    with within_memory(f"The plan of {count} triplets does not fit in memory", "Assemble parts, and add them"):
        order = np.lexsort((column, row))  # stable
        row, column = row[order], column[order]
        new = np.ones(count, bool)
        new[1:] = (row[1:] != row[:-1]) | (column[1:] != column[:-1])
        first = np.flatnonzero(new)
        indptr = np.concatenate(([0], np.cumsum(np.bincount(row[first], minlength=shape[0]))))
        pattern = SparsityPattern._unchecked(indptr, column[first].astype(index_dtype(len(first), shape)), shape)
        dtype, place = index_dtype(count, (0, 0)), np.empty(count, np.int64)
        place[order] = np.cumsum(new) - 1
        arrays = np.append(first, count).astype(dtype), order.astype(dtype), place.astype(dtype)
    return TripletAssembly(pattern, *arrays)


def _indices(name: str, array: Array, size: int) -> np.ndarray:
    """Check row or column numbers, all in 0 … size - 1."""
    backend.check_plain(array, name)
    try:
        found = np.asarray(array) if isinstance(array, (list, tuple)) else array
    except ValueError as error:
        raise PatternError(
            f"{name} is not an index array", expected="integers, of NumPy or a list", got="lists of different lengths"
        ) from error
    if isinstance(found, np.ndarray) and not found.size and isinstance(array, (list, tuple)):
        found = found.astype(np.int64)  # NumPy's empty lists are floats
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise PatternError(f"{name} is not an index array", expected="integers, of NumPy or a list",
                           got=getattr(found, "dtype", type(found).__name__))  # fmt: skip
    wrong = (found < 0) | (found >= size)
    if wrong.any():
        raise PatternError(f"{name} has an index out of range", expected=f"0 <= index < {size}", got=found[wrong][0])
    return found.astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class TripletAssembly:
    """How a sparse matrix is assembled from triplets, any number of times. Made by `plan_assembly`.

    Attributes
    ----------
    pattern : SparsityPattern
        Pattern of the matrix. Entries whose triplets cancel stay.
    indptr, triplets : numpy.ndarray
        Entry e adds the triplets ``triplets[indptr[e]] … triplets[indptr[e + 1] - 1]``; read-only.
    places : numpy.ndarray
        The entry of every triplet; read-only.
    """

    pattern: SparsityPattern
    indptr: np.ndarray = field(repr=False)
    triplets: np.ndarray = field(repr=False)
    places: np.ndarray = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("indptr", "triplets", "places"):
            object.__setattr__(self, name, frozen(getattr(self, name)))

    def __call__(self, values: Array, out: Array | None = None) -> Array:
        """Compute the values of the matrix.

        Parameters
        ----------
        values
            (T,) for T triplets in the order of `plan_assembly`, or (T, B); float32 or float64, C-contiguous, of NumPy
            or CuPy. Pass element matrices of shape (elements, k, k) with ``.ravel()``.
        out
            Array for the result, writeable and not overlapping `values`; None makes a new one.

        Returns
        -------
        Array
            (nnz,), or (nnz, B), on `pattern`.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            `values` or `out` do not fit.
        """
        xp = _checked("values", values, len(self.places), out)
        out = _result(xp, values, self.pattern.nnz, out)
        if out.size:
            indptr, triplets, _ = self._copies.on(xp)
            kernels.get(xp).csr_matvec(indptr, triplets, self._ones(xp, values.dtype), *map(_as_columns, (values, out)))
        return out

    def vjp(self, grad: Array, out: Array | None = None) -> Array:
        """Compute the gradient with respect to the triplets' values from that with respect to the matrix's: a gather.

        Parameters
        ----------
        grad
            (nnz,) or (nnz, B) on `pattern`; float32 or float64, C-contiguous, of NumPy or CuPy; or a sparse matrix.
        out
            Array for the result, writeable and not overlapping `grad`; None makes a new one.

        Returns
        -------
        Array
            (T,), or (T, B), in the order of the triplets.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            `grad` or `out` do not fit.
        """
        grad = values_on(self.pattern, grad)
        xp = _checked("grad", grad, self.pattern.nnz, out)
        out = _result(xp, grad, len(self.places), out)
        if out.size:
            kernels.get(xp).gather(_as_columns(grad), self._copies.on(xp)[2], _as_columns(out))
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy by the constructor: arrays are read-only again, and device copies stay behind."""
        return TripletAssembly, (self.pattern, self.indptr, self.triplets, self.places)

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(self.indptr, self.triplets, self.places)

    def _ones(self, xp: ModuleType, dtype: np.dtype) -> Array:
        """Return the values of the matrix of ones."""
        found = self._of_dtype.get(dtype)
        if found is None:
            ones = frozen(np.ones((len(self.places), 1), dtype))
            found = self._of_dtype.setdefault(dtype, DeviceCopies(ones))
        return found.on(xp)[0]

    @cached_property
    def _of_dtype(self) -> dict[np.dtype, DeviceCopies]:
        return {}


def _checked(name: str, array: Array, count: int, out: Array | None) -> ModuleType:
    xp = backend.namespace(**{name: array}, **backend.given(out=out))
    _check_values(name, array, count)
    return xp


def _result(xp: ModuleType, array: Array, count: int, out: Array | None) -> Array:
    """Return the array for `count` results of `array`: `out`, checked, or a new one."""
    shape = (count, *array.shape[1:])
    if out is None:
        return xp.empty(shape, dtype=array.dtype)
    backend.check_array("out", out, dtype=array.dtype, shape=shape, written=True)
    if xp.may_share_memory(out, array):
        raise LayoutError("out overlaps the input", expected="an array with its own memory", got="shared memory")
    return out
