"""SciPy in and out: `csr_array` and `csr_matrix`; values are shared by default."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.jacobians import TransposedJacobian
from sparsebp.patterns import SparsityPattern


def from_scipy(matrix: Any, *, copy: bool = False) -> TransposedJacobian:
    """Return a CSR matrix as a `TransposedJacobian` whose values the batch shares.

    Parameters
    ----------
    matrix
        With sorted columns and without duplicates, as ``matrix.sum_duplicates()`` leaves it. Index arrays are copied.
    copy
        Whether to copy the values too.

    Raises
    ------
    PatternError
        The matrix is not CSR, or not canonical.
    DTypeError
        Its values are neither float32 nor float64.
    """
    pattern = SparsityPattern.from_scipy(matrix)
    return TransposedJacobian(pattern, np.array(matrix.data, copy=copy or None))


def to_scipy(jacobian: TransposedJacobian, sample: int | None = None, *, copy: bool = False) -> Any:
    """Return ``jacobian.to_scipy(sample, copy=copy)``, a `scipy.sparse.csr_array`."""
    return jacobian.to_scipy(sample, copy=copy)
