"""CuPy's sparse matrices in and out; everything but the pattern stays on the device.

Both functions raise `MissingDependencyError` without CuPy, and `DeviceError` without a GPU.
"""

from __future__ import annotations

from typing import Any

from sparsebp.core import backend
from sparsebp.jacobians import TransposedJacobian
from sparsebp.patterns import SparsityPattern


def from_cupyx(matrix: Any) -> TransposedJacobian:
    """Return a `cupyx.scipy.sparse.csr_matrix` as a `TransposedJacobian` whose values the batch shares.

    The values are shared; the index arrays are copied to the host once, which synchronises.

    Raises
    ------
    PatternError
        The matrix is not CSR, or not canonical (see its ``sum_duplicates``).
    DTypeError
        Its values are neither float32 nor float64.
    """
    backend.cupy()
    return TransposedJacobian(SparsityPattern.from_scipy(matrix), matrix.data)  # synchronize!


def to_cupyx(jacobian: TransposedJacobian, sample: int | None = None) -> Any:
    """Return one sample, as for `TransposedJacobian.to_scipy`, as a `cupyx.scipy.sparse.csr_matrix`.

    Index arrays are copied, and host values are copied to the device.
    """
    cp = backend.cupy()
    values = backend.to_device(jacobian.values_of(sample), "cuda")
    return jacobian.pattern.to_cupyx(cp.ascontiguousarray(values))
