"""C = A @ B of sparse matrices on a kept structure: the numeric phase, a kernel a strategy."""

from __future__ import annotations

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import (
    INT64,
    Family,
    batch_of,
    batched,
    exact,
    index_dtype,
    position_dtype,
    rank,
    real_dtype,
    rows_of,
    written,
)


class ProductKernels(Family):
    """Products of two sparse matrices."""

    def spgemm_numeric(
        self,
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
    ) -> None:
        """Numeric phase of C = A @ B on a kept structure.

        For row r, products are numbered in the order of Gustavson's algorithm (entries k of row r of A, for each the
        entries q of row ``a_indices[k]`` of B), starting at ``product_ptr[r]``; product p is added to
        ``out[c_indptr[r] + positions[p]]``.

        a_indptr (m + 1,), a_indices (nnz_a,), b_indptr (k + 1,), c_indptr (m + 1,) index; a_data (nnz_a, B*);
        b_data (nnz_b, B*); product_ptr (m + 1,) int64; positions (n_products,) uint16 or uint32;
        row_cuts (n_parts + 1,) int64: rows split into parts of about equal work, fixed by the plan;
        out (nnz_c, B*), overwritten.
        """
        m = _operands(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)
        exact("product_ptr", product_ptr, INT64, (m + 1,))
        exact("positions", positions, position_dtype("positions", positions), rank("positions", positions, 1))
        _cuts(row_cuts)
        self._run.spgemm_numeric(
            a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, product_ptr, positions, row_cuts, out
        )

    def spgemm_select_rows(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_data: Array,
        c_indptr: Array,
        out: Array,
    ) -> None:
        """C = A @ B where no row of A has more than one entry: rows of B, picked and scaled.

        For the entry k of row r of A, row r of `out` is ``a_data[k] *`` row ``a_indices[k]`` of B.

        a_indptr (m + 1,), a_indices (nnz_a,), b_indptr (k + 1,), c_indptr (m + 1,) index; a_data (nnz_a, B*);
        b_data (nnz_b, B*); out (nnz_c, B*), overwritten.
        """
        _operands(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)
        self._run.spgemm_select_rows(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)

    def spgemm_select_columns(
        self,
        product_ptr: Array,
        a_index: Array | None,
        a_data: Array,
        b_index: Array,
        b_data: Array,
        c_indptr: Array,
        positions: Array,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """C = A @ B where no row of B has more than one entry, so that an entry of A makes one product at most.

        Row r has the products p from ``product_ptr[r]`` to ``product_ptr[r + 1] - 1``;
        ``a_data[a_index[p]] * b_data[b_index[p]]`` is added to ``out[c_indptr[r] + positions[p]]``, in this order.
        Without `a_index` product p belongs to entry p of A.

        product_ptr (m + 1,), a_index (n_products,) or None, b_index (n_products,), c_indptr (m + 1,) index;
        a_data (nnz_a, B*); b_data (nnz_b, B*); positions (n_products,) uint16 or uint32; row_cuts (n_parts + 1,) int64;
        out (nnz_c, B*), overwritten.
        """
        kind, dtype = index_dtype("product_ptr", product_ptr), real_dtype("a_data", a_data)
        m, (products,) = rows_of("product_ptr", product_ptr), rank("b_index", b_index, 1)
        (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
        batch = batch_of(a_data=a_data, b_data=b_data)
        exact("product_ptr", product_ptr, kind, (m + 1,))
        if a_index is None:
            nnz_a = products
        else:
            exact("a_index", a_index, kind, (products,))
        batched("a_data", a_data, dtype, (nnz_a,), batch)
        exact("b_index", b_index, kind, (products,))
        batched("b_data", b_data, dtype, (nnz_b,), batch)
        exact("c_indptr", c_indptr, kind, (m + 1,))
        exact("positions", positions, position_dtype("positions", positions), (products,))
        _cuts(row_cuts)
        written("out", out, dtype, (rank("out", out, 2)[0], batch))
        self._run.spgemm_select_columns(
            product_ptr, a_index, a_data, b_index, b_data, c_indptr, positions, row_cuts, out
        )

    def spgemm_runs(
        self,
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
    ) -> None:
        """C = A @ B where the rows of B are runs of neighbouring columns, each of which is a run of C as well.

        Rows of B with the same `b_shape` have the same columns. Shape s has the runs u from ``run_ptr[s]`` to
        ``run_ptr[s + 1] - 1``, which cut a row of B into pieces of ``run_lengths[u]`` entries. Entries of a row of A
        that follow one another and name rows of one shape form a group; `starts` holds, for every group of row r and
        every run of its shape, from ``start_ptr[r]`` on, where in the row of C the run begins.

        a_indptr (m + 1,), a_indices (nnz_a,), b_indptr (k + 1,), b_shape (k,), run_ptr (n_shapes + 1,),
        run_lengths (n_runs,), c_indptr (m + 1,) index; a_data (nnz_a, B*); b_data (nnz_b, B*); start_ptr (m + 1,)
        int64; starts (n_starts,) uint16 or uint32; row_cuts (n_parts + 1,) int64; out (nnz_c, B*), overwritten.
        """
        m = _operands(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)
        kind = index_dtype("a_indptr", a_indptr)
        exact("b_shape", b_shape, kind, (rows_of("b_indptr", b_indptr),))
        exact("run_ptr", run_ptr, kind, (rows_of("run_ptr", run_ptr) + 1,))
        exact("run_lengths", run_lengths, kind, rank("run_lengths", run_lengths, 1))
        exact("start_ptr", start_ptr, INT64, (m + 1,))
        exact("starts", starts, position_dtype("starts", starts), rank("starts", starts, 1))
        _cuts(row_cuts)
        self._run.spgemm_runs(
            a_indptr,
            a_indices,
            a_data,
            b_indptr,
            b_data,
            b_shape,
            run_ptr,
            run_lengths,
            c_indptr,
            start_ptr,
            starts,
            row_cuts,
            out,
        )

    def spgemm_accumulate(
        self,
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
    ) -> None:
        """C = A @ B with nothing kept per product: a dense row of sums, from which the entries of C are read.

        Scratch: `columns` sums (times a vector, if there is a batch) for every part or block that runs.

        a_indptr (m + 1,), a_indices (nnz_a,), b_indptr (k + 1,), b_indices (nnz_b,), c_indptr (m + 1,),
        c_indices (nnz_c,) index; a_data (nnz_a, B*); b_data (nnz_b, B*); columns: of B; row_cuts (n_parts + 1,) int64;
        out (nnz_c, B*), overwritten.
        """
        _operands(a_indptr, a_indices, a_data, b_indptr, b_data, c_indptr, out)
        kind = index_dtype("a_indptr", a_indptr)
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
        self._run.spgemm_accumulate(
            a_indptr, a_indices, a_data, b_indptr, b_indices, b_data, c_indptr, c_indices, columns, row_cuts, out
        )


def _operands(
    a_indptr: Array, a_indices: Array, a_data: Array, b_indptr: Array, b_data: Array, c_indptr: Array, out: Array
) -> int:
    """Check what all products have; return the number of rows of A."""
    kind, dtype = index_dtype("a_indptr", a_indptr), real_dtype("a_data", a_data)
    m, k = rows_of("a_indptr", a_indptr), rows_of("b_indptr", b_indptr)
    (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
    batch = batch_of(a_data=a_data, b_data=b_data)
    exact("a_indptr", a_indptr, kind, (m + 1,))
    exact("a_indices", a_indices, kind, (nnz_a,))
    batched("a_data", a_data, dtype, (nnz_a,), batch)
    exact("b_indptr", b_indptr, kind, (k + 1,))
    batched("b_data", b_data, dtype, (nnz_b,), batch)
    exact("c_indptr", c_indptr, kind, (m + 1,))
    written("out", out, dtype, (rank("out", out, 2)[0], batch))
    return m


def _cuts(row_cuts: Array) -> None:
    exact("row_cuts", row_cuts, INT64, (rows_of("row_cuts", row_cuts) + 1,))
