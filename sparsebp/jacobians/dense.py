"""The transposed Jacobian of any operator, dense, from its input gradient alone: one backward pass an output."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from sparsebp import backend
from sparsebp.core.errors import MemoryLimitError, ShapeError
from sparsebp.core.types import Array
from sparsebp.jacobians.transposed import TransposedJacobian, with_batch
from sparsebp.patterns import SparsityPattern

DEFAULT_MEMORY_LIMIT = 2 << 30
"""Bytes that a materialised Jacobian may take when nobody said otherwise."""


def dense_jacobian_t(
    input_grad: Callable[[Array], Array],
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    batch: int,
    like: Array,
    *,
    batch_axes: tuple[int, int] = (0, 0),
    memory_limit: int | None = None,
) -> TransposedJacobian:
    """Return the transposed Jacobian of an operator that gives nothing but its input gradient.

    Parameters
    ----------
    input_grad
        Maps the gradient at the output to the one at the input, a sample by itself (not as batch statistics do).
    input_shape, output_shape
        Shapes of one sample of the input and of the output.
    batch
        Number of samples B.
    like
        An array of the gradients' dtype (float32 or float64) and library.
    batch_axes
        Where the batch is in the gradients at the input and at the output: 0 for (B, *shape), 1 for time-major ones.
    memory_limit
        Most bytes that the result may take; None: 2 GiB.

    Returns
    -------
    TransposedJacobian
        Every entry, per sample, with the shapes of a sample.

    Raises
    ------
    MemoryLimitError
        The result would take more than `memory_limit`; said before anything is allocated.
    ShapeError
        `input_grad` gives another shape.
    """
    xp, dtype = backend.namespace(like=like), backend.float_dtype(like.dtype)
    n_in, n_out = prod(input_shape), prod(output_shape)
    need = n_in * n_out * (batch * dtype.itemsize + 4) + 4 * n_in
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else memory_limit
    if need > limit:
        raise MemoryLimitError(
            "The dense Jacobian would need too much memory", expected=f"at most {limit} bytes",
            got=f"{need} bytes for {batch} samples of {n_in} x {n_out}",
            remedy="Use input_grad, which multiplies with it without building it, or pass fewer samples",
        )  # fmt: skip
    in_axis, out_axis = batch_axes
    expected = with_batch(input_shape, batch, in_axis)
    data = xp.empty((n_in, n_out, batch), dtype=dtype)
    for output in range(n_out):
        gy = xp.zeros((batch, n_out), dtype=dtype)
        gy[:, output] = 1
        gx = input_grad(xp.moveaxis(gy.reshape(batch, *output_shape), 0, out_axis))
        if gx.shape != expected:
            raise ShapeError(
                "input_grad returns another shape than the input's", expected=expected, got=gx.shape,
                remedy="Return the gradient with respect to the input, in its shape",
            )  # fmt: skip
        data[:, output] = xp.moveaxis(gx, in_axis, 0).reshape(batch, n_in).T
    return TransposedJacobian(
        SparsityPattern.dense(n_in, n_out), data.reshape(n_in * n_out, batch),
        input_shape=input_shape, output_shape=output_shape, batch_axes=batch_axes,
    )  # fmt: skip
