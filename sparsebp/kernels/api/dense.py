"""Stacks of small dense blocks: materialised recurrent Jacobians."""

from __future__ import annotations

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import INT64, Family, batch_of, batched, exact, rank, real_dtype, rows_of, written


class DenseKernels(Family):
    """Levels of products, chains and reductions of small dense blocks."""

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """A level of dense products: ``out[out_index[s]] = a[a_index[s]] @ b[b_index[s]]`` per sample, for all s.

        a (Sa, m, k, B*); b (Sb, k, n, B*); out (So, m, n, B*) real; the indices (S,) int64; `out` is a different array
        from `a` and `b`; entries of `out` that are not named keep their values.
        """
        dtype = real_dtype("a", a)
        (n_a, m, k, _), (n_b, _, n, _) = rank("a", a, 4), rank("b", b, 4)
        n_out, (steps,) = rank("out", out, 4)[0], rank("a_index", a_index, 1)
        batch = batch_of(a=a, b=b)
        batched("a", a, dtype, (n_a, m, k), batch)
        batched("b", b, dtype, (n_b, k, n), batch)
        written("out", out, dtype, (n_out, m, n, batch))
        for name, array in (("a_index", a_index), ("b_index", b_index), ("out_index", out_index)):
            exact(name, array, INT64, (steps,))
        self._run.dense_matmul(a, a_index, b, b_index, out, out_index)

    def dense_matvec(
        self,
        a: Array,
        a_index: Array,
        x: Array,
        x_index: Array,
        add: Array | None,
        add_index: Array | None,
        out: Array,
        out_index: Array,
    ) -> None:
        """A level of dense matrix-vector products.

        For all s: ``out[out_index[s]] = a[a_index[s]] @ x[x_index[s]] + add[add_index[s]]``.

        a (Sa, m, k, B*); x (Sx, k, B); add (Sd, m, B) with add_index (S,), or both None; out (So, m, B), which may be
        the same array as `x` or `add` as long as no entry that is written is also read in this call.
        """
        dtype = real_dtype("a", a)
        n_a, m, k, _ = rank("a", a, 4)
        n_x, _, batch = rank("x", x, 3)
        n_out, (steps,) = rank("out", out, 3)[0], rank("a_index", a_index, 1)
        batched("a", a, dtype, (n_a, m, k), batch)
        exact("x", x, dtype, (n_x, k, batch))
        written("out", out, dtype, (n_out, m, batch))
        for name, array in (("a_index", a_index), ("x_index", x_index), ("out_index", out_index)):
            exact(name, array, INT64, (steps,))
        _together("add", add, "add_index", add_index)
        if add is not None and add_index is not None:
            exact("add", add, dtype, (rank("add", add, 3)[0], m, batch))
            exact("add_index", add_index, INT64, (steps,))
        self._run.dense_matvec(a, a_index, x, x_index, add, add_index, out, out_index)

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Independent chains of matrix-vector products, one per chunk.

        For chunk c: ``v = x[c]``; for s from ``chunk_ptr[c]`` to ``chunk_ptr[c + 1] - 1``: ``v = a[s] @ v + add[s]``;
        ``out[s] = v``.

        a (S, n, n, B*); chunk_ptr (C + 1,) int64 from 0 to S; x (C, n, B); add (S, n, B) or None; out (S, n, B).
        """
        dtype = real_dtype("a", a)
        steps, n, _, _ = rank("a", a, 4)
        chunks, batch = rows_of("chunk_ptr", chunk_ptr), rank("x", x, 3)[2]
        batched("a", a, dtype, (steps, n, n), batch)
        exact("chunk_ptr", chunk_ptr, INT64, (chunks + 1,))
        exact("x", x, dtype, (chunks, n, batch))
        if add is not None:
            exact("add", add, dtype, (steps, n, batch))
        written("out", out, dtype, (steps, n, batch))
        self._run.dense_chain(a, chunk_ptr, x, add, out)

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce each chunk of affine maps to one: ``P = a[last] @ … @ a[first]`` and the matching vector.

        Starting from P = I, v = 0; for s in the chunk: ``P = a[s] @ P``; ``v = a[s] @ v + add[s]``.

        a (S, n, n, B*); chunk_ptr (C + 1,) int64; add (S, n, B) or None; out_matrix (C, n, n, B*);
        out_vector (C, n, B), None exactly when `add` is None.
        """
        dtype = real_dtype("a", a)
        steps, n, _, own = rank("a", a, 4)
        chunks = rows_of("chunk_ptr", chunk_ptr)
        exact("a", a, dtype, (steps, n, n, own))
        exact("chunk_ptr", chunk_ptr, INT64, (chunks + 1,))
        written("out_matrix", out_matrix, dtype, (chunks, n, n, own))
        _together("add", add, "out_vector", out_vector)
        if add is not None and out_vector is not None:
            batch = rank("add", add, 3)[2]
            batched("a", a, dtype, (steps, n, n), batch)
            exact("add", add, dtype, (steps, n, batch))
            written("out_vector", out_vector, dtype, (chunks, n, batch))
        self._run.dense_reduce(a, chunk_ptr, add, out_matrix, out_vector)


def _together(name: str, array: Array | None, other_name: str, other: Array | None) -> None:
    if (array is None) != (other is None):
        missing = name if array is None else other_name
        raise ShapeError(
            f"{missing} is missing",
            expected=f"{name} and {other_name} together, or neither",
            got=f"{missing}=None",
            remedy=f"Pass {missing} as well",
        )
