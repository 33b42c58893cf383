"""The transposed Jacobian of an operator: a sparsity pattern and its values, shared by the batch or per sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import backend, kernels
from sparsebp.errors import OptionError, ShapeError
from sparsebp.patterns import SparsityPattern, plan_product
from sparsebp.types import Array


class TransposedJacobian:
    """The matrix (∂y/∂x)ᵀ of an operator y = f(x), of shape (n_in, n_out): it maps ∇y to ∇x (BPPSA Eq. 3).

    Parameters
    ----------
    pattern
        Where the entries are, of shape (n_in, n_out).
    data
        Their values: (nnz,) if the batch shares them (a linear layer: they depend on the weights only), or (nnz, B) if
        every sample has its own. float32 or float64, C-contiguous, of NumPy or CuPy; kept, not copied.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, DeviceError
        `data` does not fit.
    """

    __array_ufunc__ = None  # so that array @ J is refused instead of being taken for an array of objects

    def __init__(self, pattern: SparsityPattern, data: Array) -> None:
        backend.namespace(data)
        backend.float_dtype(data.dtype)
        if data.ndim not in (1, 2) or data.shape[0] != pattern.nnz:
            raise ShapeError(
                "data does not fit the pattern",
                expected=f"({pattern.nnz},) shared by the batch, or ({pattern.nnz}, B)",
                got=data.shape,
                remedy="Pass one value per entry of the pattern, the batch last",
            )
        backend.check_array("data", data)
        self.pattern, self.data = pattern, data

    @property
    def shape(self) -> tuple[int, int]:
        """(n_in, n_out)."""
        return self.pattern.shape

    @property
    def batch(self) -> int | None:
        """Number of samples, None if the values are shared by all."""
        return self.data.shape[1] if self.data.ndim == 2 else None

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64."""
        return self.data.dtype

    @property
    def T(self) -> TransposedJacobian:
        """The transpose: the Jacobian ∂y/∂x itself. The values are copied into the order of the transposed pattern."""
        if self.pattern.T is self.pattern:
            return self
        order = backend.constant(backend.namespace(self.data), self.pattern.transpose_permutation)
        return TransposedJacobian(self.pattern.T, self.data[order])

    def to_scipy(self, sample: int = 0) -> Any:
        """Return one sample as a `scipy.sparse.csr_array`.

        Index arrays are those of the pattern, read-only, and shared values are not copied. Device values are copied to
        the host, which synchronises.

        Raises
        ------
        OptionError
            There is no such sample.
        """
        from sparsebp.interop.scipy import csr_of

        return csr_of(self.pattern, backend.to_host(self.values_of(sample)))  # synchronize!

    def to_dense(self, sample: int = 0) -> Array:
        """Return one sample as a dense (n_in, n_out) array of the same namespace.

        Raises
        ------
        OptionError
            There is no such sample.
        """
        xp = backend.namespace(self.data)
        dense = xp.zeros(self.shape, dtype=self.dtype)
        rows = xp.asarray(self.pattern.row_of_entry)
        dense[rows, self.pattern.device_arrays(xp)[1]] = self.values_of(sample)
        return dense

    def values_of(self, sample: int) -> Array:
        """Return the (nnz,) values of one sample, a view; shared values are those of every sample.

        Raises
        ------
        OptionError
            There is no such sample.
        """
        batch = self.batch
        if batch is None:
            return self.data
        if not 0 <= sample < batch:
            raise OptionError(
                "There is no such sample", expected=f"0 <= sample < {batch}", got=sample, remedy="Count samples from 0"
            )
        return self.data[:, sample]

    def __matmul__(self, other: TransposedJacobian | Array) -> TransposedJacobian | Array:
        """Multiply by another transposed Jacobian, or by a gradient.

        Parameters
        ----------
        other
            A `TransposedJacobian` of shape (n_out, p), through the cached plan of both patterns; or a gradient (n_out,)
            or (n_out, B) of the same dtype, C-contiguous.

        Returns
        -------
        TransposedJacobian or Array
            Shape (n_in, p); or (n_in,) if both are without batch, else (n_in, B).

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            Shapes do not chain, batch sizes differ, dtypes differ, or the arrays are of different libraries.
        """
        if isinstance(other, TransposedJacobian):
            plan = plan_product(self.pattern, other.pattern)
            return TransposedJacobian(plan.pattern, plan(self.data, other.data))
        return self._apply(other)

    def _apply(self, g: Array) -> Array:
        xp = backend.namespace(self.data, g)
        n_in, n_out = self.shape
        if g.ndim not in (1, 2) or g.shape[0] != n_out:
            raise ShapeError(
                "The gradient does not fit the Jacobian",
                expected=f"({n_out},) or ({n_out}, B)",
                got=g.shape,
                remedy="Pass the gradient with respect to the operator's output, the batch last",
            )
        if self.batch is not None and g.ndim == 2 and g.shape[1] != self.batch:
            raise ShapeError(
                "The gradient has another batch size than the Jacobian",
                expected=f"({n_out}, {self.batch})",
                got=g.shape,
                remedy="Pass the gradients of the same samples",
            )
        backend.check_array("g", g, dtype=self.dtype)
        columns = g if g.ndim == 2 else g[:, None]
        if self.batch is not None and columns.shape[1] != self.batch:  # one gradient for all samples
            columns = xp.ascontiguousarray(xp.broadcast_to(columns, (n_out, self.batch)))
        out = xp.empty((n_in, columns.shape[1]), dtype=self.dtype)
        if self.pattern.kind == "identity":
            out[...] = columns
        else:
            values = self.data if self.data.ndim == 2 else self.data[:, None]
            kernels.get(xp).csr_matvec(*self.pattern.device_arrays(xp), values, columns, out)
        return out if self.batch is not None or g.ndim == 2 else out[:, 0]

    def __repr__(self) -> str:
        batch = "shared" if self.batch is None else f"batch={self.batch}"
        return f"TransposedJacobian({self.pattern!r}, {self.dtype}, {batch})"
