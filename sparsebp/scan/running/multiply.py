"""The products of a scan one by one: a matrix with a vector, and two affine maps joined."""

from __future__ import annotations

from collections.abc import Mapping

from sparsebp import backend, kernels
from sparsebp.core.types import Array
from sparsebp.patterns import SparsityPattern
from sparsebp.products import ProductPlan
from sparsebp.scan.planning.sizing import is_view
from sparsebp.scan.steps import AbstractStep, Span


class Multiply:
    """``A @ x + add`` into a new array; the identity is not multiplied with."""

    def __init__(self, like: Array) -> None:
        self.xp = backend.namespace(like)
        self.kernels, self.batch, self.dtype = kernels.get(self.xp), like.shape[1], like.dtype

    def __call__(self, pattern: SparsityPattern, data: Array, x: Array, add: Array | None) -> Array:
        """Return the product with x (columns, B), of data (nnz,) or (nnz, B)."""
        if pattern.kind == "identity":
            return x.copy() if add is None else x + add
        out = self.xp.empty((pattern.shape[0], self.batch), dtype=self.dtype)
        indptr, indices = pattern.device_arrays(self.xp)
        values = data.reshape(-1, 1) if data.ndim == 1 else data
        self.kernels.csr_matvec(indptr, indices, values, x, out, add)
        return out


class Maps:
    """The affine maps of a call by their spans: values of matrices, and the vectors that they add.

    Parameters
    ----------
    data, injections
        Of every Jacobian.
    products
        Where intermediate products go.
    multiply
        For the added vectors.
    """

    def __init__(
        self, data: list[Array], injections: list[Array | None] | None, products: Mapping[Span, Array],
        multiply: Multiply,
    ) -> None:  # fmt: skip
        self.matrices = {Span(i + 1, i + 2): d for i, d in enumerate(data)}
        self.offsets: dict[Span, Array | None] = {}
        if injections is not None:
            self.offsets = {Span(i + 1, i + 2): v for i, v in enumerate(injections)}
        self.products, self.multiply = products, multiply

    def join(self, step: AbstractStep, product: ProductPlan, pattern: SparsityPattern) -> None:
        """Do what `step` says, ``A_right A_left`` and ``A_right b_left + b_right``; `pattern` is that of A_right."""
        left, right = self.matrices[step.left], self.matrices[step.right]
        if is_view(product):
            self.matrices[step.target] = left if pattern.kind == "identity" else right
        else:
            self.matrices[step.target] = product(right, left, out=self.products[step.target])
        b_left, b_right = self.offsets.get(step.left), self.offsets.get(step.right)
        added = b_right if b_left is None else self.multiply(pattern, right, b_left, b_right)
        self.offsets[step.target] = added
