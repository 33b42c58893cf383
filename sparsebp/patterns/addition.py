"""Symbolic work of sums on fixed patterns: where the entries of both operands lie in their union."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from sparsebp import backend
from sparsebp.errors import DTypeError, ShapeError
from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.types import Array


@dataclass(frozen=True, eq=False)
class AdditionPlan:
    """How C = A + B is computed for two patterns, any number of times. Made by `plan_addition`.

    Attributes
    ----------
    a, b, pattern : SparsityPattern
        Patterns of the operands and of the sum: their union.
    a_index, b_index : numpy.ndarray
        Place of every entry of A and of B among the entries of C, shapes (a.nnz,) and (b.nnz,).
    """

    a: SparsityPattern
    b: SparsityPattern
    pattern: SparsityPattern
    a_index: np.ndarray = field(repr=False)
    b_index: np.ndarray = field(repr=False)

    def __call__(self, a_data: Array, b_data: Array) -> Array:
        """Compute the values of C.

        Parameters
        ----------
        a_data, b_data
            Values on the patterns `a` and `b`: (nnz,) shared by the batch or (nnz, B) per sample, of one dtype, both of
            NumPy or both of CuPy.

        Returns
        -------
        Array
            (nnz,) if both operands are shared, else (nnz, B).

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            An array does not fit.
        """
        xp = backend.namespace(a_data, b_data)
        for name, array, pattern in (("a_data", a_data, self.a), ("b_data", b_data, self.b)):
            if array.ndim not in (1, 2) or array.shape[0] != pattern.nnz:
                raise ShapeError(
                    f"{name} does not fit its pattern", expected=f"({pattern.nnz},) or ({pattern.nnz}, B)",
                    got=array.shape, remedy="Pass one value per entry of the pattern, the batch last",
                )  # fmt: skip
        if a_data.dtype != b_data.dtype:
            raise DTypeError(
                "The operands have different dtypes", expected="one dtype for both",
                got=f"a_data {a_data.dtype}, b_data {b_data.dtype}",
                remedy="Convert one with .astype(...); nothing is converted silently",
            )  # fmt: skip
        batches = {array.shape[1:] for array in (a_data, b_data) if array.ndim == 2}
        if len(batches) > 1:
            raise ShapeError(
                "The operands have different batch sizes", expected="one batch size, or shared values of shape (nnz,)",
                got=f"a_data {a_data.shape}, b_data {b_data.shape}", remedy="Pass values of the same samples",
            )  # fmt: skip
        out = xp.zeros((self.pattern.nnz, *(batches.pop() if batches else ())), dtype=a_data.dtype)
        for data, index in ((a_data, self.a_index), (b_data, self.b_index)):
            out[xp.asarray(index)] += data if data.ndim == out.ndim else data[:, None]  # no place twice in an index
        return out


@lru_cache(maxsize=KEPT)
def plan_addition(a: SparsityPattern, b: SparsityPattern) -> AdditionPlan:
    """Do the symbolic work of C = A + B once; entries that cancel stay entries.

    Parameters
    ----------
    a, b
        Patterns of one shape.

    Returns
    -------
    AdditionPlan
        The same object again for equal patterns, as long as it is among the last that were asked for.

    Raises
    ------
    ShapeError
        The shapes differ.
    """
    if a.shape != b.shape:
        raise ShapeError(
            "The shapes of a sum differ", expected=f"two matrices of shape {a.shape}", got=b.shape,
            remedy="Pass patterns of one shape",
        )  # fmt: skip
    rows, columns = a.shape
    a_keys, b_keys = (p.row_of_entry.astype(np.int64) * columns + p.indices for p in (a, b))
    keys = np.union1d(a_keys, b_keys)
    row, column = np.divmod(keys, max(columns, 1))
    indptr = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=rows))))
    union = SparsityPattern._trusted(indptr, column, a.shape)
    return AdditionPlan(a, b, union, np.searchsorted(keys, a_keys), np.searchsorted(keys, b_keys))
