"""Argument checks of the kernels on stacks of small dense blocks. Each returns the batch size B."""

from __future__ import annotations

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import INT64, batch_of, exact, rank, real, rows_of, starred, written


def check_dense_matmul(a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> int:
    """Check the arguments of `Kernels.dense_matmul` and return B."""
    dtype = real("a", a)
    (n_a, m, k, _), (n_b, _, n, _) = rank("a", a, 4), rank("b", b, 4)
    n_out, (steps,) = rank("out", out, 4)[0], rank("a_index", a_index, 1)
    batch = batch_of(a=a, b=b)
    starred("a", a, dtype, (n_a, m, k), batch)
    starred("b", b, dtype, (n_b, k, n), batch)
    written("out", out, dtype, (n_out, m, n, batch))
    for name, array in (("a_index", a_index), ("b_index", b_index), ("out_index", out_index)):
        exact(name, array, INT64, (steps,))
    return batch


def check_dense_matvec(
    a: Array,
    a_index: Array,
    x: Array,
    x_index: Array,
    add: Array | None,
    add_index: Array | None,
    out: Array,
    out_index: Array,
) -> int:
    """Check the arguments of `Kernels.dense_matvec` and return B."""
    dtype = real("a", a)
    n_a, m, k, _ = rank("a", a, 4)
    n_x, _, batch = rank("x", x, 3)
    n_out, (steps,) = rank("out", out, 3)[0], rank("a_index", a_index, 1)
    starred("a", a, dtype, (n_a, m, k), batch)
    exact("x", x, dtype, (n_x, k, batch))
    written("out", out, dtype, (n_out, m, batch))
    for name, array in (("a_index", a_index), ("x_index", x_index), ("out_index", out_index)):
        exact(name, array, INT64, (steps,))
    _together("add", add, "add_index", add_index)
    if add is not None and add_index is not None:
        exact("add", add, dtype, (rank("add", add, 3)[0], m, batch))
        exact("add_index", add_index, INT64, (steps,))
    return batch


def check_dense_chain(a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> int:
    """Check the arguments of `Kernels.dense_chain` and return B."""
    dtype = real("a", a)
    steps, n, _, _ = rank("a", a, 4)
    chunks, batch = rows_of("chunk_ptr", chunk_ptr), rank("x", x, 3)[2]
    starred("a", a, dtype, (steps, n, n), batch)
    exact("chunk_ptr", chunk_ptr, INT64, (chunks + 1,))
    exact("x", x, dtype, (chunks, n, batch))
    if add is not None:
        exact("add", add, dtype, (steps, n, batch))
    written("out", out, dtype, (steps, n, batch))
    return batch


def check_dense_reduce(
    a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
) -> int:
    """Check the arguments of `Kernels.dense_reduce` and return B.

    The product of shared matrices is shared too, so `out_matrix` has the last axis of `a`; the vector has B, the batch
    of `add`.
    """
    dtype = real("a", a)
    steps, n, _, own = rank("a", a, 4)
    chunks = rows_of("chunk_ptr", chunk_ptr)
    exact("a", a, dtype, (steps, n, n, own))
    exact("chunk_ptr", chunk_ptr, INT64, (chunks + 1,))
    written("out_matrix", out_matrix, dtype, (chunks, n, n, own))
    _together("add", add, "out_vector", out_vector)
    if add is None or out_vector is None:
        return own
    batch = rank("add", add, 3)[2]
    starred("a", a, dtype, (steps, n, n), batch)
    exact("add", add, dtype, (steps, n, batch))
    written("out_vector", out_vector, dtype, (chunks, n, batch))
    return batch


def _together(name: str, array: Array | None, other_name: str, other: Array | None) -> None:
    if (array is None) != (other is None):
        missing = name if array is None else other_name
        raise ShapeError(
            f"{missing} is missing",
            expected=f"{name} and {other_name} together, or neither",
            got=f"{missing}=None",
            remedy=f"Pass {missing} as well",
        )
