"""SciPy in and out: `csr_array` and `csr_matrix`; values are shared by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebp.errors import ShapeError

if TYPE_CHECKING:
    from sparsebp.jacobians import TransposedJacobian
    from sparsebp.patterns import SparsityPattern


def csr_of(pattern: SparsityPattern, values: np.ndarray | None = None, *, copy: bool = False) -> Any:
    """Return a `scipy.sparse.csr_array` on `pattern`.

    Parameters
    ----------
    pattern
        The structure; its read-only index arrays are shared unless `copy`.
    values
        (nnz,) values, shared unless `copy`; float32 ones if None. Ones keep the whole structure in SciPy's products,
        which drop sums that are exactly zero.
    copy
        Whether the result owns all of its arrays, so that they may be written to, by SciPy's methods too.

    Raises
    ------
    ShapeError
        There is not one value per entry.
    """
    from scipy.sparse import csr_array

    if values is None:
        values = np.ones(pattern.nnz, np.float32)
    if values.shape != (pattern.nnz,):
        raise ShapeError(
            "values do not fit the pattern",
            expected=f"({pattern.nnz},)",
            got=values.shape,
            remedy="Pass the values of one sample, data[:, sample]",
        )
    matrix = csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape, copy=copy)
    matrix.has_canonical_format = True  # a pattern is sorted and without duplicates; SciPy need not look again
    return matrix


def from_scipy(matrix: Any, *, copy: bool = False) -> TransposedJacobian:
    """Return a CSR matrix as a `TransposedJacobian` whose values the batch shares.

    Parameters
    ----------
    matrix
        With sorted columns and without duplicates, as ``matrix.sum_duplicates()`` leaves it. Its index arrays are
        copied.
    copy
        Whether the values are copied too; else they are shared.

    Raises
    ------
    PatternError
        The matrix is not CSR, or not canonical.
    DTypeError
        Its values are neither float32 nor float64.
    """
    from sparsebp.jacobians import TransposedJacobian
    from sparsebp.patterns import SparsityPattern

    pattern = SparsityPattern.from_scipy(matrix)
    return TransposedJacobian(pattern, np.array(matrix.data, copy=copy or None))


def to_scipy(jacobian: TransposedJacobian, sample: int = 0, *, copy: bool = False) -> Any:
    """Return one sample as a `scipy.sparse.csr_array`; the same as ``jacobian.to_scipy(sample, copy=copy)``."""
    return jacobian.to_scipy(sample, copy=copy)
