"""Argument checks of the products on a kept structure. Each takes what its kernel takes and returns B."""

from __future__ import annotations

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import (
    INT64,
    batch_of,
    exact,
    index,
    position,
    rank,
    real,
    rows_of,
    starred,
    written,
)


def check_spgemm_numeric(
    a_indptr: Array,
    a_indices: Array,
    a_data: Array,
    b_indptr: Array,
    b_data: Array,
    c_indptr: Array,
    product_ptr: Array,
    positions: Array,
    row_cuts: Array,
    out: Array,
) -> int:
    """Check the arguments of `Kernels.spgemm_numeric` and return B."""
    m, batch = _operands(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)
    exact("product_ptr", product_ptr, INT64, (m + 1,))
    exact("positions", positions, position("positions", positions), rank("positions", positions, 1))
    _cuts(row_cuts)
    return batch


def check_spgemm_select_rows(
    a_indptr: Array, a_indices: Array, a_data: Array, b_indptr: Array, b_data: Array, c_indptr: Array, out: Array
) -> int:
    """Check the arguments of `Kernels.spgemm_select_rows` and return B."""
    return _operands(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)[1]


def check_spgemm_select_columns(
    product_ptr: Array,
    a_index: Array | None,
    a_data: Array,
    b_index: Array,
    b_data: Array,
    c_indptr: Array,
    positions: Array,
    row_cuts: Array,
    out: Array,
) -> int:
    """Check the arguments of `Kernels.spgemm_select_columns` and return B."""
    kind, dtype = index("product_ptr", product_ptr), real("a_data", a_data)
    m, (products,) = rows_of("product_ptr", product_ptr), rank("b_index", b_index, 1)
    (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
    batch = batch_of(a_data=a_data, b_data=b_data)
    exact("product_ptr", product_ptr, kind, (m + 1,))
    if a_index is None:
        nnz_a = products
    else:
        exact("a_index", a_index, kind, (products,))
    starred("a_data", a_data, dtype, (nnz_a,), batch)
    exact("b_index", b_index, kind, (products,))
    starred("b_data", b_data, dtype, (nnz_b,), batch)
    exact("c_indptr", c_indptr, kind, (m + 1,))
    exact("positions", positions, position("positions", positions), (products,))
    _cuts(row_cuts)
    written("out", out, dtype, (rank("out", out, 2)[0], batch))
    return batch


def check_spgemm_runs(
    a_indptr: Array,
    a_indices: Array,
    a_data: Array,
    b_indptr: Array,
    b_data: Array,
    b_shape: Array,
    run_ptr: Array,
    run_lengths: Array,
    c_indptr: Array,
    start_ptr: Array,
    starts: Array,
    row_cuts: Array,
    out: Array,
) -> int:
    """Check the arguments of `Kernels.spgemm_runs` and return B."""
    m, batch = _operands(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)
    kind = index("a_indptr", a_indptr)
    exact("b_shape", b_shape, kind, (rows_of("b_indptr", b_indptr),))
    exact("run_ptr", run_ptr, kind, (rows_of("run_ptr", run_ptr) + 1,))
    exact("run_lengths", run_lengths, kind, rank("run_lengths", run_lengths, 1))
    exact("start_ptr", start_ptr, INT64, (m + 1,))
    exact("starts", starts, position("starts", starts), rank("starts", starts, 1))
    _cuts(row_cuts)
    return batch


def check_spgemm_accumulate(
    a_indptr: Array,
    a_indices: Array,
    a_data: Array,
    b_indptr: Array,
    b_indices: Array,
    b_data: Array,
    c_indptr: Array,
    c_indices: Array,
    columns: int,
    row_cuts: Array,
    out: Array,
) -> int:
    """Check the arguments of `Kernels.spgemm_accumulate` and return B."""
    _, batch = _operands(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)
    kind = index("a_indptr", a_indptr)
    exact("b_indices", b_indices, kind, (len(b_data),))
    exact("c_indices", c_indices, kind, (len(out),))
    if columns < 0:
        raise ShapeError(
            "The number of columns is negative",
            expected="columns >= 0",
            got=str(columns),
            remedy="Pass the number of columns of B",
        )
    _cuts(row_cuts)
    return batch


def _operands(
    a_indptr: Array, a_indices: Array, a_data: Array, b_indptr: Array, b_data: Array, c_indptr: Array, out: Array
) -> tuple[int, int]:
    """Check what all products have; return the number of rows of A and B, the batch size."""
    kind, dtype = index("a_indptr", a_indptr), real("a_data", a_data)
    m, k = rows_of("a_indptr", a_indptr), rows_of("b_indptr", b_indptr)
    (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
    batch = batch_of(a_data=a_data, b_data=b_data)
    exact("a_indptr", a_indptr, kind, (m + 1,))
    exact("a_indices", a_indices, kind, (nnz_a,))
    starred("a_data", a_data, dtype, (nnz_a,), batch)
    exact("b_indptr", b_indptr, kind, (k + 1,))
    starred("b_data", b_data, dtype, (nnz_b,), batch)
    exact("c_indptr", c_indptr, kind, (m + 1,))
    written("out", out, dtype, (rank("out", out, 2)[0], batch))
    return m, batch


def _cuts(row_cuts: Array) -> None:
    exact("row_cuts", row_cuts, INT64, (rows_of("row_cuts", row_cuts) + 1,))
