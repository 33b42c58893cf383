"""Argument checks of the kernels: one function per kernel, shared by the host and the device launchers.

So both raise the same errors. The checks look at dtypes, shapes and layout, never at values: that would cost a pass
over the data (on a device a synchronisation) at every call. What indices hold is checked where a pattern is made.
"""

from __future__ import annotations

from sparsebp.kernels.api.pointwise import check_channels
from sparsebp.kernels.api.clamp import check_clamp
from sparsebp.kernels.api.sparse import (
    check_csr_matvec,
    check_gather,
    check_gather_multiply,
    check_scale_columns,
    check_scale_rows,
)
from sparsebp.kernels.api.dense import (
    check_dense_chain,
    check_dense_matmul,
    check_dense_matvec,
    check_dense_reduce,
)
from sparsebp.kernels.api.optimizers import (
    check_arrays,
    check_optimizer_update,
    check_square_sums,
    check_update_options,
    check_written_arrays,
)
from sparsebp.kernels.api.products import (
    check_spgemm_accumulate,
    check_spgemm_numeric,
    check_spgemm_runs,
    check_spgemm_select_columns,
    check_spgemm_select_rows,
)
from sparsebp.kernels.api.training import check_softmax_cross_entropy
from sparsebp.kernels.api.values import check_max_pool_values, check_pointwise_slopes
from sparsebp.kernels.api.windows import check_convolution, check_max_pool, check_max_pool_grad

__all__ = [
    "check_arrays",
    "check_channels",
    "check_clamp",
    "check_convolution",
    "check_csr_matvec",
    "check_dense_chain",
    "check_dense_matmul",
    "check_dense_matvec",
    "check_dense_reduce",
    "check_gather",
    "check_gather_multiply",
    "check_max_pool",
    "check_max_pool_grad",
    "check_max_pool_values",
    "check_optimizer_update",
    "check_pointwise_slopes",
    "check_scale_columns",
    "check_scale_rows",
    "check_softmax_cross_entropy",
    "check_spgemm_accumulate",
    "check_spgemm_numeric",
    "check_spgemm_runs",
    "check_spgemm_select_columns",
    "check_spgemm_select_rows",
    "check_square_sums",
    "check_update_options",
    "check_written_arrays",
]
