"""Transposed Jacobians of convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns.conv import ConvPattern, Layout, conv_pattern, conv_transpose_pattern
from sparsebp.patterns.pad import border_pattern
from sparsebp.patterns.windows import Lengths, Padding


def conv_jacobian_t(
    weight: Array,
    input_size: Lengths,
    stride: Lengths = 1,
    padding: Padding = 0,
    dilation: Lengths = 1,
    groups: int = 1,
    *,
    layout: Layout = "chw",
    mask: np.ndarray | None = None,
    memory_limit: int | None = None,
) -> TransposedJacobian:
    """Return a convolution's transposed Jacobian, shared by the batch: its values are weights (BPPSA §3.3).

    The pattern is made once for its arguments; the values are one gather from the weights.

    Parameters
    ----------
    weight
        As torch.nn keeps it: (out_channels, in_channels // groups, *kernel_size), float32 or float64.
    input_size
        Lengths of the input's axes after the channels: (L,), (H, W), (D, H, W); an integer for one axis.
    stride, padding, dilation, groups, layout, mask, memory_limit
        As in `sparsebp.patterns.conv_pattern`: with `mask`, a host array, the pattern has the entries of the weights
        that are kept alone. The limit counts the pattern alone.

    Returns
    -------
    TransposedJacobian
        Shape (in_channels * inputs, out_channels * outputs).

    Raises
    ------
    ShapeError
        `weight` has another number of axes than the input has, `mask` has another shape than `weight`, or the kernel is
        larger than the padded input.
    OptionError, DTypeError, MemoryLimitError
        An option or the dtype is not one of those above, or the pattern exceeds the limit.
    """
    sizes = _sizes(weight, input_size)
    n_out, n_in, *kernel = weight.shape
    structure = conv_pattern(
        n_in * groups, n_out, sizes, kernel, stride, padding, dilation, groups, layout=layout, mask=mask,
        memory_limit=memory_limit,
    )  # fmt: skip
    return _gathered(structure, weight)


def border_jacobian_t(x: Array, mode: str, padding: tuple[tuple[int, int], ...]) -> TransposedJacobian:
    """Return the transposed Jacobian of a border that repeats elements of x (B, C, …): ones, shared by the batch.

    Parameters
    ----------
    x
        The input, for its shape, dtype and namespace.
    mode, padding
        As in `sparsebp.patterns.border_pattern`.

    Returns
    -------
    TransposedJacobian
        Shape (elements of a sample, elements with the border).
    """
    pattern = border_pattern(x.shape[1], x.shape[2:], padding, mode)
    return TransposedJacobian(pattern, backend.namespace(x).ones(pattern.nnz, dtype=x.dtype))


def conv_transpose_jacobian_t(
    weight: Array,
    input_size: Lengths,
    stride: Lengths = 1,
    padding: Padding = 0,
    output_padding: Lengths = 0,
    groups: int = 1,
    dilation: Lengths = 1,
    *,
    layout: Layout = "chw",
    mask: np.ndarray | None = None,
    memory_limit: int | None = None,
) -> TransposedJacobian:
    """Return a transposed convolution's transposed Jacobian, shared by the batch: the plain Jacobian of a convolution.

    Parameters
    ----------
    weight
        As torch.nn keeps it: (in_channels, out_channels // groups, *kernel_size), float32 or float64.
    input_size
        Lengths of the input's axes after the channels; an integer for one axis.
    stride, padding, output_padding, groups, dilation, layout, mask, memory_limit
        As in `sparsebp.patterns.conv_transpose_pattern`; `mask` is a host array. The limit counts the pattern alone.

    Returns
    -------
    TransposedJacobian
        Shape (in_channels * inputs, out_channels * outputs).

    Raises
    ------
    ShapeError
        `weight` has another number of axes than the input has, `mask` has another shape than `weight`, or there is no
        output.
    OptionError, DTypeError, MemoryLimitError
        An option or the dtype is not one of those above, or the pattern exceeds the limit.
    """
    sizes = _sizes(weight, input_size)
    n_in, n_out, *kernel = weight.shape
    structure = conv_transpose_pattern(
        n_in, n_out * groups, sizes, kernel, stride, padding, output_padding, groups, dilation, layout=layout,
        mask=mask, memory_limit=memory_limit,
    )  # fmt: skip
    return _gathered(structure, weight)


def _sizes(weight: Array, input_size: Lengths) -> tuple[int, ...]:
    """Return the lengths of the input's axes after checking that the weight has as many."""
    backend.namespace(weight=weight)
    backend.float_dtype(weight.dtype)
    sizes = tuple(input_size) if isinstance(input_size, Sequence) else (input_size,)
    if weight.ndim != len(sizes) + 2:
        raise ShapeError(
            "weight does not fit the input",
            expected=f"{len(sizes) + 2} axes: two of channels and {len(sizes)} of the kernel",
            got=weight.shape,
            remedy="Pass the weight of a convolution over as many axes as input_size has",
        )
    return sizes


def _gathered(structure: ConvPattern, weight: Array) -> TransposedJacobian:
    """Return the weights on their places."""
    xp = backend.namespace(weight)
    values = xp.empty((structure.pattern.nnz, 1), dtype=weight.dtype)
    kernels.get(xp).gather(xp.ascontiguousarray(weight).reshape(-1, 1), structure.device_index(xp), values)
    return TransposedJacobian(structure.pattern, values.reshape(-1))
