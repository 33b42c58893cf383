"""Values on a pattern: an operator and what its forward saved become a sparse transposed Jacobian."""

from __future__ import annotations

from sparsebp.jacobians.function import SparseHessian, SparseJacobian, sparse_hessian, sparse_jacobian
from sparsebp.jacobians.jacobian import TransposedJacobian, dense_jacobian_t, jacobian_t
from sparsebp.jacobians.operators import (
    avg_pool_jacobian_t,
    axis_jacobian_t,
    block_jacobian_t,
    conv_jacobian_t,
    conv_transpose_jacobian_t,
    gru_hidden_jacobians,
    hidden_elements,
    linear_jacobian_t,
    lstm_hidden_jacobians,
    max_pool_jacobian_t,
    pointwise_jacobian_t,
    rnn_hidden_jacobians,
)

__all__ = [
    "SparseHessian", "SparseJacobian", "TransposedJacobian", "avg_pool_jacobian_t", "axis_jacobian_t",
    "block_jacobian_t", "conv_jacobian_t", "conv_transpose_jacobian_t", "dense_jacobian_t", "gru_hidden_jacobians",
    "hidden_elements", "jacobian_t", "linear_jacobian_t", "lstm_hidden_jacobians", "max_pool_jacobian_t",
    "pointwise_jacobian_t", "rnn_hidden_jacobians", "sparse_hessian", "sparse_jacobian",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
