"""CSR: a sparse matrix times vectors and diagonals, gathers, and the values of transposed Jacobians."""

from __future__ import annotations

from sparsebp.backend import namespace
from sparsebp.core.errors import DTypeError, OptionError
from sparsebp.core.types import SLOPES, Array, SlopeFunction
from sparsebp.kernels.api.checks import (
    INT32,
    INT64,
    Family,
    batch_of,
    batched,
    exact,
    index_dtype,
    rank,
    real_dtype,
    rows_of,
    written,
)
from sparsebp.kernels.operands import RowShapes

_WINNERS = ("uint8", "int32")


class SparseKernels(Family):
    """Kernels on the values of one sparse matrix, and those that make values of transposed Jacobians, batch last."""

    def csr_matvec(
        self, indptr: Array, indices: Array, data: Array, x: Array, out: Array, add: Array | None = None
    ) -> None:
        """Batched SpMV: ``out[i, b] = add[i, b] + sum_k data[k, b] * x[indices[k], b]`` over the entries k of row i.

        With shared values this is SpMM of one CSR matrix with a dense one.

        indptr (n_rows + 1,) index; indices (nnz,) index; data (nnz, B*) real; x (n_cols, B) real; out (n_rows, B) real;
        add (n_rows, B) real or None.
        """
        kind, dtype = index_dtype("indptr", indptr), real_dtype("data", data)
        n_rows, (nnz,) = rows_of("indptr", indptr), rank("indices", indices, 1)
        n_cols, batch = rank("x", x, 2)
        exact("indptr", indptr, kind, (n_rows + 1,))
        exact("indices", indices, kind, (nnz,))
        batched("data", data, dtype, (nnz,), batch)
        exact("x", x, dtype, (n_cols, batch))
        written("out", out, dtype, (n_rows, batch))
        if add is not None:
            exact("add", add, dtype, (n_rows, batch))
        self._run.csr_matvec(indptr, indices, data, x, out, add)

    def scale_rows(self, indptr: Array, data: Array, scale: Array, out: Array) -> None:
        """Diagonal times CSR on the same pattern: ``out[k] = scale[row(k)] * data[k]``.

        indptr (n_rows + 1,) index; data (nnz, B*); scale (n_rows, B*); out (nnz, B*).
        """
        kind, dtype = index_dtype("indptr", indptr), real_dtype("data", data)
        n_rows, nnz = rows_of("indptr", indptr), rank("data", data, 2)[0]
        rank("scale", scale, 2)
        batch = batch_of(data=data, scale=scale)
        exact("indptr", indptr, kind, (n_rows + 1,))
        batched("data", data, dtype, (nnz,), batch)
        batched("scale", scale, dtype, (n_rows,), batch)
        written("out", out, dtype, (nnz, batch))
        self._run.scale_rows(indptr, data, scale, out)

    def scale_columns(self, indices: Array, data: Array, scale: Array, out: Array) -> None:
        """CSR times diagonal on the same pattern: ``out[k] = data[k] * scale[indices[k]]``.

        indices (nnz,) index; data (nnz, B*); scale (n_cols, B*); out (nnz, B*).
        """
        kind, dtype = index_dtype("indices", indices), real_dtype("data", data)
        (nnz,), n_cols = rank("indices", indices, 1), rank("scale", scale, 2)[0]
        rank("data", data, 2)
        batch = batch_of(data=data, scale=scale)
        exact("indices", indices, kind, (nnz,))
        batched("data", data, dtype, (nnz,), batch)
        batched("scale", scale, dtype, (n_cols,), batch)
        written("out", out, dtype, (nnz, batch))
        self._run.scale_columns(indices, data, scale, out)

    def scale_runs(self, indices: Array, shapes: RowShapes, data: Array, scale: Array, out: Array) -> None:
        """As `scale_columns`, with what is known of A's rows besides; no column is read where values have no batch.

        indices, data, scale, out as there; `shapes` describes the same pattern.
        """
        kind, dtype = index_dtype("indices", indices), real_dtype("data", data)
        (nnz,), n_cols = rank("indices", indices, 1), rank("scale", scale, 2)[0]
        rank("data", data, 2)
        batch, m = batch_of(data=data, scale=scale), rows_of("indptr", shapes.indptr)
        exact("indices", indices, kind, (nnz,))
        exact("indptr", shapes.indptr, kind, (m + 1,))
        exact("shape", shapes.shape, INT32, (m,))
        exact("first", shapes.first, kind, (m,))
        exact("run_ptr", shapes.run_ptr, INT64, (rows_of("run_ptr", shapes.run_ptr) + 1,))
        exact("whole", shapes.whole, INT64, (rows_of("run_ptr", shapes.run_ptr),))
        exact("run_columns", shapes.run_columns, INT32, rank("run_columns", shapes.run_columns, 1))
        exact("run_ends", shapes.run_ends, INT32, rank("run_columns", shapes.run_columns, 1))
        batched("data", data, dtype, (nnz,), batch)
        batched("scale", scale, dtype, (n_cols,), batch)
        written("out", out, dtype, (nnz, batch))
        self._run.scale_runs(indices, shapes, data, scale, out)

    def gather(self, data: Array, index: Array, out: Array) -> None:
        """``out[k] = data[index[k]]``. data (n, B); index (m,) index, all in range; out (m, B)."""
        dtype, kind = real_dtype("data", data), index_dtype("index", index)
        (n, batch), (m,) = rank("data", data, 2), rank("index", index, 1)
        exact("data", data, dtype, (n, batch))
        exact("index", index, kind, (m,))
        written("out", out, dtype, (m, batch))
        self._run.gather(data, index, out)

    def gather_multiply(self, a_data: Array, a_index: Array, b_data: Array, b_index: Array, out: Array) -> None:
        """A product with exactly one term per output entry: ``out[k] = a_data[a_index[k]] * b_data[b_index[k]]``.

        a_data (nnz_a, B*); b_data (nnz_b, B*); a_index, b_index (nnz_c,) index; out (nnz_c, B*).
        """
        dtype, kind = real_dtype("a_data", a_data), index_dtype("a_index", a_index)
        (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
        (nnz_c,) = rank("a_index", a_index, 1)
        batch = batch_of(a_data=a_data, b_data=b_data)
        batched("a_data", a_data, dtype, (nnz_a,), batch)
        batched("b_data", b_data, dtype, (nnz_b,), batch)
        exact("a_index", a_index, kind, (nnz_c,))
        exact("b_index", b_index, kind, (nnz_c,))
        written("out", out, dtype, (nnz_c, batch))
        self._run.gather_multiply(a_data, a_index, b_data, b_index, out)

    def pointwise_slopes(self, kept: Array, function: SlopeFunction, out: Array) -> None:
        """The diagonal of a pointwise operator: ``out[i, b] = slope(kept[b, i])``.

        `function` "given": the slope is what was kept; "relu", "tanh", "sigmoid": it is f' as told from y.

        kept (B, n); out (n, B).
        """
        dtype, (batch, size) = real_dtype("kept", kept), rank("kept", kept, 2)
        if function not in SLOPES:
            raise OptionError(
                "Unknown function",
                expected=" or ".join(map(repr, SLOPES)),
                got=repr(function),
                remedy="Pass one of these",
            )
        exact("kept", kept, dtype, (batch, size))
        written("out", out, dtype, (size, batch))
        self._run.pointwise_slopes(kept, function, out)

    def max_pool_values(self, winner: Array, window: Array, offset: Array, windows: int, taps: int, out: Array) -> None:
        """Max pooling: one where a window takes its maximum, else zero.

        Entries come in lines of ``windows * taps``: `windows` windows beside each other from ``window[l]`` on, of each
        `taps` places beside each other from ``offset[l]`` on. ``out[(l, w, t), b]`` is 1 if
        ``winner[b, window[l] + w] == offset[l] + t``.

        winner (B, n_out) uint8 or int32; window (lines,) index; offset (lines,) int32; out (lines * windows * taps, B).
        """
        namespace(winner=winner)
        if winner.dtype not in _WINNERS:
            raise DTypeError(
                "winner has the wrong dtype", expected="uint8 or int32", got=winner.dtype,
                remedy="Convert it with winner.astype(...); nothing is converted silently",
            )  # fmt: skip
        kind, (batch, columns), (lines,) = (
            index_dtype("window", window),
            rank("winner", winner, 2),
            rank("window", window, 1),
        )
        if windows < 1 or taps < 1:
            raise OptionError(
                "A line holds at least one window and one tap", expected="windows >= 1 and taps >= 1",
                got=f"windows={windows}, taps={taps}", remedy="Pass 1 and 1 for entries without structure",
            )  # fmt: skip
        exact("winner", winner, winner.dtype, (batch, columns))
        exact("window", window, kind, (lines,))
        exact("offset", offset, "int32", (lines,))
        written("out", out, real_dtype("out", out), (lines * windows * taps, batch))
        self._run.max_pool_values(winner, window, offset, windows, taps, out)
