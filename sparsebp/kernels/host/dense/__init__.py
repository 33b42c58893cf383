"""Dense products on the host, offered under the names that `sparsebp.kernels.device.dense` has too."""

from sparsebp.kernels.host.dense.products import column_sums, matmul, matmul_batches, row_of_ones

__all__ = ["column_sums", "matmul", "matmul_batches", "row_of_ones"]
