"""Sparse Jacobians of PyTorch's modules, and differentiable products of batches of sparse matrices."""

from __future__ import annotations

from sparsebp.torch.sparse.batched import BatchedCSR
from sparsebp.torch.sparse.jacobian import sparse_jacobian
from sparsebp.torch.sparse.products import ProductPlan, plan_product

__all__ = ["BatchedCSR", "ProductPlan", "plan_product", "sparse_jacobian"]
