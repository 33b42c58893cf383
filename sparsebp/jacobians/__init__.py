"""Values on a pattern: an operator and what its forward saved become a sparse transposed Jacobian."""

from __future__ import annotations

from sparsebp.jacobians.api import dense_jacobian_t, jacobian_t
from sparsebp.jacobians.conv import conv_jacobian_t, conv_transpose_jacobian_t
from sparsebp.jacobians.layers import axis_jacobian_t, block_jacobian_t, linear_jacobian_t, pointwise_jacobian_t
from sparsebp.jacobians.pool import avg_pool_jacobian_t, max_pool_jacobian_t
from sparsebp.jacobians.recurrent import (
    gru_hidden_jacobians,
    hidden_elements,
    lstm_hidden_jacobians,
    rnn_hidden_jacobians,
)
from sparsebp.jacobians.transposed import TransposedJacobian

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
