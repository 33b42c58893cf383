"""Argument checks of the CSR kernels. Each takes what its kernel takes and returns the batch size B."""

from __future__ import annotations

from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import batch_of, exact, index, rank, real, rows_of, starred, written


def check_csr_matvec(indptr: Array, indices: Array, data: Array, x: Array, out: Array, add: Array | None = None) -> int:
    """Check the arguments of `Kernels.csr_matvec` and return B."""
    kind, dtype = index("indptr", indptr), real("data", data)
    n_rows, (nnz,) = rows_of("indptr", indptr), rank("indices", indices, 1)
    n_cols, batch = rank("x", x, 2)
    exact("indptr", indptr, kind, (n_rows + 1,))
    exact("indices", indices, kind, (nnz,))
    starred("data", data, dtype, (nnz,), batch)
    exact("x", x, dtype, (n_cols, batch))
    written("out", out, dtype, (n_rows, batch))
    if add is not None:
        exact("add", add, dtype, (n_rows, batch))
    return batch


def check_scale_rows(indptr: Array, data: Array, scale: Array, out: Array) -> int:
    """Check the arguments of `Kernels.scale_rows` and return B."""
    kind, dtype = index("indptr", indptr), real("data", data)
    n_rows, nnz = rows_of("indptr", indptr), rank("data", data, 2)[0]
    rank("scale", scale, 2)
    batch = batch_of(data=data, scale=scale)
    exact("indptr", indptr, kind, (n_rows + 1,))
    starred("data", data, dtype, (nnz,), batch)
    starred("scale", scale, dtype, (n_rows,), batch)
    written("out", out, dtype, (nnz, batch))
    return batch


def check_scale_columns(indices: Array, data: Array, scale: Array, out: Array) -> int:
    """Check the arguments of `Kernels.scale_columns` and return B."""
    kind, dtype = index("indices", indices), real("data", data)
    (nnz,), n_cols = rank("indices", indices, 1), rank("scale", scale, 2)[0]
    rank("data", data, 2)
    batch = batch_of(data=data, scale=scale)
    exact("indices", indices, kind, (nnz,))
    starred("data", data, dtype, (nnz,), batch)
    starred("scale", scale, dtype, (n_cols,), batch)
    written("out", out, dtype, (nnz, batch))
    return batch


def check_gather(data: Array, index_: Array, out: Array) -> int:
    """Check the arguments of `Kernels.gather` and return B."""
    dtype, kind = real("data", data), index("index", index_)
    (n, batch), (m,) = rank("data", data, 2), rank("index", index_, 1)
    exact("data", data, dtype, (n, batch))
    exact("index", index_, kind, (m,))
    written("out", out, dtype, (m, batch))
    return batch


def check_gather_multiply(a_data: Array, a_index: Array, b_data: Array, b_index: Array, out: Array) -> int:
    """Check the arguments of `Kernels.gather_multiply` and return B."""
    dtype, kind = real("a_data", a_data), index("a_index", a_index)
    (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
    (nnz_c,) = rank("a_index", a_index, 1)
    batch = batch_of(a_data=a_data, b_data=b_data)
    starred("a_data", a_data, dtype, (nnz_a,), batch)
    starred("b_data", b_data, dtype, (nnz_b,), batch)
    exact("a_index", a_index, kind, (nnz_c,))
    exact("b_index", b_index, kind, (nnz_c,))
    written("out", out, dtype, (nnz_c, batch))
    return batch
