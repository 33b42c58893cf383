"""A batch of sparse matrices of one structure, with PyTorch's tensors as values."""

from __future__ import annotations

from typing import Any

import torch

from sparsebp.core.errors import PatternError, ShapeError
from sparsebp.patterns import SparsityPattern
from sparsebp.torch.sparse.products import ProductPlan, checked, plan_product
from sparsebp.torch.sparse.structure import pattern_of


class BatchedCSR:
    """A batch of sparse matrices that differ in their values alone; products and transposes are differentiable.

    `torch.compile` breaks its graph at these; a `ProductPlan` made beforehand is one operator of it.

    Parameters
    ----------
    structure
        What `plan_product` takes.
    values
        (B, nnz), or (nnz,) for one matrix for all samples, in the order of the entries; kept, not copied: whatever is
        written to them later counts. None: those of `structure`, a `torch.sparse_csr` tensor.

    Raises
    ------
    PatternError
        The structure is none, or has no values and none are given.
    ShapeError, DTypeError, DeviceError
        The values do not fit.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> A = st.BatchedCSR(torch.tensor([[1.0, 0.0], [2.0, 3.0]]).to_sparse_csr(), torch.ones(5, 3))
    >>> (A @ A).to_dense()[0]
    tensor([[1., 0.],
            [2., 1.]])
    """

    @torch.compiler.disable
    def __init__(self, structure: Any, values: torch.Tensor | None = None) -> None:
        self.pattern: SparsityPattern = pattern_of("structure", structure)
        if values is None:
            if not isinstance(structure, torch.Tensor):
                raise PatternError("The matrices have no values", expected="values, or a torch.sparse_csr tensor",
                                   got=type(structure).__name__, remedy="Pass values of shape (B, nnz)")  # fmt: skip
            values = structure.values()
        self.values = checked("values", values, self.pattern.nnz)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, m, n), or (m, n) of one matrix for all samples."""
        return (*self.values.shape[:-1], *self.pattern.shape)

    @property
    @torch.compiler.disable
    def T(self) -> BatchedCSR:
        """The transposed matrices; their values are copied into the order of the transposed structure."""
        order = torch.from_numpy(self.pattern.transpose_permutation.astype("int64")).to(self.values.device)
        return BatchedCSR(self.pattern.T, self.values[..., order])

    @torch.compiler.disable
    def __matmul__(self, other: BatchedCSR | torch.Tensor) -> BatchedCSR | torch.Tensor:
        """Multiply by another batch of sparse matrices, or by dense ones.

        Parameters
        ----------
        other
            A `BatchedCSR` (B, n, p) or (n, p); or a dense tensor (n,), (n, p) or (B, n, p).

        Returns
        -------
        BatchedCSR or torch.Tensor
            Of dense ones dense, (…, m, p), or (…, m) of a vector.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            They do not go together.
        """
        if isinstance(other, BatchedCSR):
            plan = self._plan(other)
            return BatchedCSR(plan.pattern, plan(self.values, other.values))
        if not isinstance(other, torch.Tensor):
            return NotImplemented
        if other.dim() not in (1, 2, 3) or other.layout is not torch.strided:
            raise ShapeError("The operand is no dense matrix", expected="a dense tensor (n,), (n, p) or (B, n, p)",
                             got=f"{tuple(other.shape)}, {other.layout}", remedy="Make a BatchedCSR of it")  # fmt: skip
        wide = other[:, None] if other.dim() == 1 else other
        dense = BatchedCSR(SparsityPattern.dense(*wide.shape[-2:]), wide.flatten(-2))
        plan = self._plan(dense)
        found = BatchedCSR(plan.pattern, plan(self.values, dense.values)).to_dense()
        return found.squeeze(-1) if other.dim() == 1 else found

    def _plan(self, other: BatchedCSR) -> ProductPlan:
        return plan_product(self.pattern, other.pattern)

    @torch.compiler.disable
    def to_dense(self) -> torch.Tensor:
        """Return the matrices as a dense tensor of `shape`; differentiable."""
        m, n = self.pattern.shape
        places = torch.from_numpy(self.pattern.row_of_entry.astype("int64") * n + self.pattern.indices)
        zeros = self.values.new_zeros(*self.values.shape[:-1], m * n)
        return zeros.index_copy(-1, places.to(zeros.device), self.values).reshape(self.shape)

    def to_sparse_csr(self) -> torch.Tensor:
        """Return a `torch.sparse_csr` tensor of `shape` that shares the values, without their autograd graph."""
        indptr, indices = (torch.from_numpy(array.copy()).to(self.values.device)
                           for array in (self.pattern.indptr, self.pattern.indices))  # fmt: skip
        batch = self.values.shape[:-1]
        values = self.values.detach()
        return torch.sparse_csr_tensor(indptr.expand(*batch, -1), indices.expand(*batch, -1), values, size=self.shape,
                                       check_invariants=False)  # fmt: skip

    def __repr__(self) -> str:
        return f"BatchedCSR({tuple(self.shape)}, nnz={self.pattern.nnz}, {self.values.dtype}, {self.values.device})"
