"""Transposed Jacobians of operators: convolutions, pointwise and linear layers, pooling, recurrent steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, Nonlinearity, SlopeFunction
from sparsebp.core.errors import ShapeError
from sparsebp.jacobians.jacobian import TransposedJacobian
from sparsebp.patterns import (
    PoolPattern,
    SparsityPattern,
    axis_pattern,
    hidden_pattern,
    linear_pattern,
    lstm_pattern,
    pointwise_pattern,
)
from sparsebp.patterns.builders import ConvPattern, conv_pattern, conv_transpose_pattern
from sparsebp.patterns.windows import Layout, Lengths, Padding, border_pattern, packed_mask


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
    """Return the transposed Jacobian of a border that repeats elements of x (B, C, …): ones, shared by the batch."""
    # x: The input, for its shape, dtype and namespace.
    # Returns TransposedJacobian: Shape (elements of a sample, elements with the border).
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
        raise ShapeError("weight does not fit the input",
                         expected=f"{len(sizes) + 2} axes: two of channels and {len(sizes)} of the kernel",
                         got=weight.shape)  # fmt: skip
    return sizes


def _gathered(structure: ConvPattern, weight: Array) -> TransposedJacobian:
    """Return the weights on their places."""
    xp = backend.namespace(weight)
    values = xp.empty((structure.pattern.nnz, 1), dtype=weight.dtype)
    kernels.get(xp).gather(xp.ascontiguousarray(weight).reshape(-1, 1), structure.device_index(xp), values)
    return TransposedJacobian(structure.pattern, values.reshape(-1))


# Transposed Jacobians of what maps every element, or every vector, by itself: a diagonal of numbers or of blocks.


def pointwise_jacobian_t(saved: Array, function: SlopeFunction = "given") -> TransposedJacobian:
    """Return the diagonal of an operator's slopes.

    Parameters
    ----------
    saved
        f'(x), or y = f(x) for a named function; batch first, shape (B, …). An element where the slope is zero stays an
        entry.
    function
        ``"given"``: `saved` holds the slopes. ``"relu"``, ``"tanh"``, ``"sigmoid"``: they are told from y on the way.

    Returns
    -------
    TransposedJacobian
        Diagonal of the size of one sample, per sample.

    Raises
    ------
    ShapeError
        `saved` has no batch axis.
    DTypeError
        It is neither float32 nor float64.
    OptionError
        `function` is another one.
    """
    xp = backend.namespace(saved=saved)
    if saved.ndim == 0:
        raise ShapeError("saved has no batch axis", expected="(B, …)", got=saved.shape)
    batch = saved.shape[0]
    size = prod(saved.shape[1:])
    rows = xp.ascontiguousarray(saved.reshape(batch, size))
    if batch == 1 and function == "given":
        return TransposedJacobian(pointwise_pattern(size), rows.reshape(size, 1))
    data = xp.empty((size, batch), dtype=saved.dtype)
    kernels.get(xp).pointwise_slopes(rows, function, data)
    return TransposedJacobian(pointwise_pattern(size), data)


def linear_jacobian_t(weight: Array, positions: int = 1, *, mask: np.ndarray | None = None) -> TransposedJacobian:
    """Return Wᵀ of ``y = x @ W.T + b``, shared by the batch.

    Parameters
    ----------
    weight
        W as torch.nn.Linear keeps it: (out_features, in_features).
    positions
        How many vectors a sample holds; each is mapped by itself, so Wᵀ stands that often along the diagonal.
    mask
        Which weights are kept (pruning), bool in the shape of `weight` on the host; the pattern has the entries of
        these alone. None: all are.

    Raises
    ------
    ShapeError
        `weight` is not a matrix, or `mask` has another shape.
    DTypeError
        `mask` is not bool.
    PatternError
        `positions` is negative.
    """
    xp = backend.namespace(weight=weight)
    if weight.ndim != 2:
        raise ShapeError("weight is not a matrix", expected="(out_features, in_features)", got=weight.shape)
    if mask is not None and packed_mask(mask, weight.shape) is not None and positions > 0:
        # A convolution of width 1 over the positions has the same weights at each.
        return conv_jacobian_t(weight[:, :, None], (positions,), layout="hwc", mask=mask[:, :, None])
    pattern = linear_pattern(weight.shape[1], weight.shape[0], positions)
    values = xp.ascontiguousarray(weight.T).reshape(-1)
    return TransposedJacobian(pattern, values if positions == 1 else xp.tile(values, positions))


def block_jacobian_t(blocks: Array) -> TransposedJacobian:
    """Return the block diagonal of dense blocks: softmax, layer normalisation.

    Parameters
    ----------
    blocks
        Shape (B, positions, n_in, n_out): one transposed Jacobian a position.

    Returns
    -------
    TransposedJacobian
        Shape (positions * n_in, positions * n_out), per sample.

    Raises
    ------
    ShapeError
        `blocks` has not four axes.
    """
    xp = backend.namespace(blocks=blocks)
    if blocks.ndim != 4:
        raise ShapeError("blocks has the wrong number of axes", expected="(B, positions, n_in, n_out)",
                         got=blocks.shape)  # fmt: skip
    batch, positions, n_in, n_out = blocks.shape
    values = blocks.reshape(batch, positions * n_in * n_out).T
    return TransposedJacobian(linear_pattern(n_in, n_out, positions), xp.ascontiguousarray(values))


def axis_jacobian_t(blocks: Array) -> TransposedJacobian:
    """Return the transposed Jacobian of what maps the vectors along one axis by themselves: softmax over channels.

    Parameters
    ----------
    blocks
        Shape (B, outer, n, n, inner): for each place before and behind the axis, of n elements, one transposed
        Jacobian, inputs × outputs.

    Returns
    -------
    TransposedJacobian
        Shape (outer * n * inner, outer * n * inner), per sample.

    Raises
    ------
    ShapeError
        `blocks` has another shape.
    """
    xp = backend.namespace(blocks=blocks)
    if blocks.ndim != 5 or blocks.shape[2] != blocks.shape[3]:
        raise ShapeError("blocks has the wrong shape", expected="(B, outer, n, n, inner)", got=blocks.shape)
    batch, outer, n, _, inner = blocks.shape
    values = blocks.transpose(1, 2, 4, 3, 0).reshape(outer * n * inner * n, batch)
    return TransposedJacobian(axis_pattern(outer, n, inner), xp.ascontiguousarray(values))


# Transposed Jacobians of pooling: zeros and ones by the argmax for a max-pool, constants for an average.


def max_pool_jacobian_t(pool: PoolPattern, winner: Array, dtype: Any = np.float32) -> TransposedJacobian:
    """Return the transposed Jacobian of max pooling: 1 where a window takes its maximum, 0 elsewhere (BPPSA §3.3).

    Parameters
    ----------
    pool
        The layer's `pool_pattern`.
    winner
        Place of the maximum inside every window, counted as `PoolPattern.offset` counts. Integers, batch first, shape
        (B, …) with as many elements a sample as the pattern has columns, in their order.
    dtype
        float32 or float64.

    Returns
    -------
    TransposedJacobian
        Shape (n_in, n_out), per sample.

    Raises
    ------
    ShapeError
        `winner` does not have one element for every window.
    DTypeError
        `dtype` is another one.
    """
    xp = backend.namespace(winner=winner)
    n_out = pool.pattern.shape[1]
    if winner.ndim == 0 or winner.size != winner.shape[0] * n_out:
        raise ShapeError(
            "winner does not fit the pattern", expected=f"(B, …) with {n_out} windows a sample", got=winner.shape
        )
    if winner.dtype not in ("uint8", "int32"):
        winner = winner.astype("int32")
    data = xp.empty((pool.pattern.nnz, winner.shape[0]), dtype=backend.float_dtype(dtype))
    rows = xp.ascontiguousarray(winner.reshape(winner.shape[0], n_out))
    kernels.get(xp).max_pool_values(rows, *pool.lines_on(xp), *pool.line, data)
    return TransposedJacobian(pool.pattern, data)


def avg_pool_jacobian_t(
    pool: PoolPattern,
    xp: ModuleType = np,
    dtype: Any = np.float32,
    *,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> TransposedJacobian:
    """Return the transposed Jacobian of average pooling: one over what each window is divided by.

    Parameters
    ----------
    pool
        The layer's `pool_pattern`, or `adaptive_pool_pattern`.
    xp
        Where the values shall be: ``numpy`` or ``cupy``.
    dtype
        float32 or float64.
    count_include_pad
        Whether padding counts as elements of a window.
    divisor
        Divide by this number instead.

    Returns
    -------
    TransposedJacobian
        Shape (n_in, n_out), shared by the batch: the values depend on the configuration only.

    Raises
    ------
    DTypeError
        `dtype` is another one.
    """
    weights = avg_pool_weights(pool, count_include_pad=count_include_pad, divisor=divisor)
    data = weights.astype(backend.float_dtype(dtype))[pool.pattern.indices]
    return TransposedJacobian(pool.pattern, backend.constant(xp, data))


def avg_pool_weights(pool: PoolPattern, *, count_include_pad: bool = True, divisor: int | None = None) -> np.ndarray:
    """Return what each window's sum is multiplied by: float64, shape (n_out,)."""
    if divisor is not None:
        return np.full(pool.pattern.shape[1], 1.0 / divisor)
    return 1.0 / (pool.extent if count_include_pad else pool.inputs)


# Materialised hidden-state Jacobians of recurrent layers, through the kernels: for the general scan engine and users.
#
# Training does not need them: the fused kernels work with the factors (BPPSA Eq. 9 and 11) and store no Jacobian.


def rnn_hidden_jacobians(h: Array, w_hh: Array, nonlinearity: Nonlinearity) -> Array:
    """Return ``w_hhᵀ · diag(f'(h[t]))`` of every step (BPPSA Eq. 9).

    Parameters
    ----------
    h
        Hidden states, (T, B, H).
    w_hh
        (H, H), as in torch.nn.
    nonlinearity
        "tanh" or "relu".

    Returns
    -------
    Array
        (T, H·H, B): for every step the values on `hidden_pattern(H)`; rows are the input h[t-1].

    Raises
    ------
    ShapeError, DTypeError, LayoutError, OptionError
        An argument does not fit.
    """
    xp = backend.namespace(h=h, w_hh=w_hh)
    steps, batch, size = h.shape
    out = xp.empty((steps, size, size, batch), dtype=h.dtype)
    kernels.get(xp).rnn_jacobians(h, w_hh, nonlinearity, out)
    return out.reshape(steps, size * size, batch)


def gru_hidden_jacobians(h: Array, h0: Array, gates: Array, w_hh: Array) -> Array:
    """Return the hidden-state Jacobians of every step of a GRU (BPPSA Eq. 11).

    Parameters
    ----------
    h, h0
        Hidden states (T, B, H) and the one before them (B, H).
    gates
        (T, B, 4H), in the order r, z, n, M, as `Kernels.gru_forward` keeps them.
    w_hh
        (3H, H), as in torch.nn.

    Returns
    -------
    Array
        (T, H·H, B): for every step the values on `hidden_pattern(H)`; rows are the input h[t-1].

    Raises
    ------
    ShapeError, DTypeError, LayoutError
        An argument does not fit.
    """
    xp = backend.namespace(h=h, h0=h0, gates=gates, w_hh=w_hh)
    steps, batch, size = h.shape
    out = xp.empty((steps, size, size, batch), dtype=h.dtype)
    kernels.get(xp).gru_jacobians(h, h0, gates, w_hh, out)
    return out.reshape(steps, size * size, batch)


def lstm_hidden_jacobians(c: Array, c0: Array, gates: Array, w_hh: Array) -> Array:
    """Return the Jacobians of every step of an LSTM: of (h, c)[t] with respect to (h, c)[t-1], transposed.

    Parameters
    ----------
    c, c0
        Cell states (T, B, H) and the one before them (B, H).
    gates
        (T, B, 4H), in the order i, f, g, o, as `Kernels.lstm_forward` keeps them.
    w_hh
        (4H, H), as in torch.nn.

    Returns
    -------
    Array
        (T, 2H·(H + 1), B): for every step the values on `lstm_pattern(H)`; rows are the inputs h[t-1], then c[t-1].

    Raises
    ------
    ShapeError, DTypeError, LayoutError
        An argument does not fit.
    """
    xp = backend.namespace(c=c, c0=c0, gates=gates, w_hh=w_hh)
    steps, batch, size = c.shape
    out = xp.empty((steps, lstm_pattern(size).nnz, batch), dtype=c.dtype)
    kernels.get(xp).lstm_jacobians(c, c0, gates, w_hh, out)
    return out


def hidden_elements(data: Array, pattern: SparsityPattern | None = None) -> list[TransposedJacobian]:
    """Return the steps of (T, nnz, B) values as `TransposedJacobian` objects on one pattern, views without a copy.

    Without a pattern, nnz is H·H.
    """
    pattern = hidden_pattern(round(data.shape[1] ** 0.5)) if pattern is None else pattern
    return [TransposedJacobian(pattern, step) for step in data]
