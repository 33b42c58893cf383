"""C = A @ B of sparse matrices on a kept structure: the numeric phase, a kernel a strategy."""

from __future__ import annotations

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import (
    INT64,
    UINT16,
    Family,
    batch_of,
    batched,
    exact,
    index_dtype,
    position_dtype,
    rank,
    real_dtype,
    rows_of,
    word_dtype,
    written,
)
from sparsebp.kernels.operands import Blocks, Columns, Pairs, Places, Rows, Runs, Terms


class ProductKernels(Family):
    """Products of two sparse matrices; what they read of the structures is stated in `sparsebp.kernels.operands`.

    In all: a_data (nnz_a, B*); b_data (nnz_b, B*); out (nnz_c, B*), overwritten.
    """

    def spgemm_positions(self, rows: Rows, places: Places, a_data: Array, b_data: Array, out: Array) -> None:
        """Gustavson's algorithm with every product's place kept: no search, and one order of sums."""
        _check_rows(rows, a_data, b_data, out)
        exact("product_ptr", places.product_ptr, INT64, (rows_of("a_indptr", rows.a_indptr) + 1,))
        _check_positions("positions", places.positions, rank("positions", places.positions, 1))
        _check_cuts("row_cuts", places.row_cuts)
        self._run.spgemm_positions(rows, places, a_data, b_data, out)

    def spgemm_pairs(self, pairs: Pairs, a_data: Array, b_data: Array, out: Array) -> None:
        """Every entry of C is summed from the list of its products, in one order."""
        words, order, starts, lengths, tiles, shift, tile_cuts = pairs
        (nnz_a, _), (nnz_b, _), (nnz_c, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2), rank("out", out, 2)
        dtype, batch = real_dtype("a_data", a_data), batch_of(a_data=a_data, b_data=b_data)
        batched("a_data", a_data, dtype, (nnz_a,), batch)
        batched("b_data", b_data, dtype, (nnz_b,), batch)
        exact("words", words, word_dtype("words", words), rank("words", words, 1))
        for name, array in (("order", order), ("starts", starts), ("lengths", lengths)):
            exact(name, array, UINT16, (nnz_c,))
        exact("tiles", tiles, INT64, (rank("tiles", tiles, 2)[0], 11))
        if not 0 <= shift <= 32:
            raise ShapeError(
                "The entry of B begins outside of a word",
                expected="a shift from 0 to 32",
                got=str(shift),
                remedy="Pass the number of bits that an entry of A has",
            )
        _check_cuts("tile_cuts", tile_cuts)
        written("out", out, dtype, (nnz_c, batch))
        self._run.spgemm_pairs(pairs, a_data, b_data, out)

    def spgemm_select_rows(self, rows: Rows, a_data: Array, b_data: Array, out: Array) -> None:
        """No row of A has more than one entry: rows of B, picked and scaled.

        For the entry k of row r of A, row r of `out` is ``a_data[k] *`` row ``a_indices[k]`` of B.
        """
        _check_rows(rows, a_data, b_data, out)
        self._run.spgemm_select_rows(rows, a_data, b_data, out)

    def spgemm_select_columns(self, terms: Terms, a_data: Array, b_data: Array, out: Array) -> None:
        """No row of B has more than one entry, so that an entry of A makes one product at most.

        ``a_data[a_index[p]] * b_data[b_index[p]]`` is added to ``out[c_indptr[r] + positions[p]]``, in the order of p.
        """
        product_ptr, a_index, b_index, c_indptr, positions, row_cuts = terms
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
        _check_positions("positions", positions, (products,))
        _check_cuts("row_cuts", row_cuts)
        written("out", out, dtype, (rank("out", out, 2)[0], batch))
        self._run.spgemm_select_columns(terms, a_data, b_data, out)

    def spgemm_runs(self, rows: Rows, runs: Runs, a_data: Array, b_data: Array, out: Array) -> None:
        """Rows of B are added run by run: one place stands for a run, and a group's rows meet in registers."""
        kind = _check_rows(rows, a_data, b_data, out)
        exact("b_shape", runs.b_shape, kind, (rows_of("b_indptr", rows.b_indptr),))
        exact("run_ptr", runs.run_ptr, kind, (rows_of("run_ptr", runs.run_ptr) + 1,))
        exact("run_lengths", runs.run_lengths, kind, rank("run_lengths", runs.run_lengths, 1))
        exact("start_ptr", runs.start_ptr, INT64, (rows_of("a_indptr", rows.a_indptr) + 1,))
        _check_positions("starts", runs.starts, rank("starts", runs.starts, 1))
        _check_cuts("row_cuts", runs.row_cuts)
        self._run.spgemm_runs(rows, runs, a_data, b_data, out)

    def spgemm_blocks(self, rows: Rows, blocks: Blocks, a_data: Array, b_data: Array, out: Array) -> None:
        """Gustavson's algorithm on dense blocks: one place stands for a product of two blocks."""
        _check_rows(rows, a_data, b_data, out)
        count, size = rows_of("a_indptr", rows.a_indptr), (blocks.m, blocks.k, blocks.n)
        if min(size) < 1 or count % blocks.m:
            raise ShapeError(
                "The sizes of the blocks do not fit", expected=f"m, k, n >= 1, m a divisor of {count} rows",
                got=str(size), remedy="Pass the sizes that the patterns consist of",
            )  # fmt: skip
        exact("product_ptr", blocks.product_ptr, INT64, (count // blocks.m + 1,))
        _check_positions("positions", blocks.positions, rank("positions", blocks.positions, 1))
        _check_cuts("row_cuts", blocks.row_cuts)
        self._run.spgemm_blocks(rows, blocks, a_data, b_data, out)

    def spgemm_accumulate(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """Nothing is kept per product: a dense row of sums, from which the entries of C are read.

        Scratch: n sums (times a vector, if there is a batch) for every part or block that runs.
        """
        _check_columns(rows, columns, a_data, b_data, out)
        self._run.spgemm_accumulate(rows, columns, a_data, b_data, out)

    def spgemm_filled(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """A, B and C are nearly full: the same through dense matrices, where that is the quicker.

        Values that are not finite meet entries alone, never what is not there. Scratch: the three matrices.
        """
        _check_columns(rows, columns, a_data, b_data, out)
        self._run.spgemm_filled(rows, columns, a_data, b_data, out)


def _check_columns(rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
    """Check what products without an index have."""
    kind = _check_rows(rows, a_data, b_data, out)
    exact("b_indices", columns.b_indices, kind, (len(b_data),))
    exact("c_indices", columns.c_indices, kind, (len(out),))
    if columns.n < 0:
        raise ShapeError(
            "The number of columns is negative",
            expected="columns >= 0",
            got=str(columns.n),
            remedy="Pass the number of columns of B",
        )
    _check_cuts("row_cuts", columns.row_cuts)


def _check_rows(rows: Rows, a_data: Array, b_data: Array, out: Array) -> object:
    """Check what all products by rows have; return the index type."""
    a_indptr, a_indices, b_indptr, c_indptr = rows
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
    return kind


def _check_positions(name: str, positions: Array, shape: tuple[int, ...]) -> None:
    exact(name, positions, position_dtype(name, positions), shape)


def _check_cuts(name: str, cuts: Array) -> None:
    exact(name, cuts, INT64, (rows_of(name, cuts) + 1,))
