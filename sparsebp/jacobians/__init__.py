"""Values on a pattern: an operator and what its forward saved become a sparse transposed Jacobian."""

from __future__ import annotations

from sparsebp.jacobians.jacobian import dense_jacobian_t
from sparsebp.jacobians.jacobian import jacobian_t
from sparsebp.jacobians.operators import conv_jacobian_t
from sparsebp.jacobians.operators import conv_transpose_jacobian_t
from sparsebp.jacobians.operators import axis_jacobian_t
from sparsebp.jacobians.operators import block_jacobian_t
from sparsebp.jacobians.operators import linear_jacobian_t
from sparsebp.jacobians.operators import pointwise_jacobian_t
from sparsebp.jacobians.operators import avg_pool_jacobian_t
from sparsebp.jacobians.operators import max_pool_jacobian_t
from sparsebp.jacobians.operators import gru_hidden_jacobians
from sparsebp.jacobians.operators import hidden_elements
from sparsebp.jacobians.operators import lstm_hidden_jacobians
from sparsebp.jacobians.operators import rnn_hidden_jacobians
from sparsebp.jacobians.jacobian import TransposedJacobian

__all__ = [
    "TransposedJacobian",
    "avg_pool_jacobian_t",
    "axis_jacobian_t",
    "block_jacobian_t",
    "conv_jacobian_t",
    "conv_transpose_jacobian_t",
    "dense_jacobian_t",
    "gru_hidden_jacobians",
    "hidden_elements",
    "jacobian_t",
    "linear_jacobian_t",
    "lstm_hidden_jacobians",
    "max_pool_jacobian_t",
    "pointwise_jacobian_t",
    "rnn_hidden_jacobians",
]


def __dir__() -> list[str]:
    return sorted(__all__)
