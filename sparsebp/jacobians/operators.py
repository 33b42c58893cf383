"""Transposed Jacobians of operators: convolutions, pointwise and linear layers, pooling, recurrent steps.

All of them raise `ShapeError`, `DTypeError`, `LayoutError` or `DeviceError` for an array that does not fit, and
`OptionError` for an option outside its choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs
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
    weight: Array, input_size: Lengths, stride: Lengths = 1, padding: Padding = 0, dilation: Lengths = 1,
    groups: int = 1, *, layout: Layout = "chw", mask: np.ndarray | None = None, memory_limit: int | None = None,
) -> TransposedJacobian:  # fmt: skip
    """Return a convolution's transposed Jacobian, shared by the batch: its values are the weights (BPPSA §3.3).

    The pattern is cached by its arguments; the values are one gather from the weights.

    Parameters
    ----------
    weight
        As in torch.nn: (out_channels, in_channels // groups, *kernel_size), float32 or float64.
    input_size
        Lengths of the input's axes after the channels: (L,), (H, W), (D, H, W); an integer for one axis.
    stride, padding, dilation, groups, layout, mask, memory_limit
        As in `sparsebp.patterns.conv_pattern`. `mask` is a host array: the pattern only has entries of kept weights.
        The limit counts the pattern alone.

    Returns
    -------
    TransposedJacobian
        Shape (in_channels * inputs, out_channels * outputs).

    Raises
    ------
    MemoryLimitError
        The pattern exceeds the limit.
    """
    sizes = _sizes(weight, input_size)
    n_out, n_in, *kernel = weight.shape
    structure = conv_pattern(
        n_in * groups, n_out, sizes, kernel, stride, padding, dilation, groups, layout=layout, mask=mask,
        memory_limit=memory_limit,
    )  # fmt: skip
    return _gathered(structure, weight)


def border_jacobian_t(x: Array, mode: str, padding: tuple[tuple[int, int], ...]) -> TransposedJacobian:
    """Return the transposed Jacobian of padding x (B, C, …) with its own elements: ones, shared by the batch."""
    pattern = border_pattern(x.shape[1], x.shape[2:], padding, mode)
    return TransposedJacobian(pattern, backend.namespace(x).ones(pattern.nnz, dtype=x.dtype))


def conv_transpose_jacobian_t(
    weight: Array, input_size: Lengths, stride: Lengths = 1, padding: Padding = 0, output_padding: Lengths = 0,
    groups: int = 1, dilation: Lengths = 1, *, layout: Layout = "chw", mask: np.ndarray | None = None,
    memory_limit: int | None = None,
) -> TransposedJacobian:  # fmt: skip
    """Return a transposed convolution's transposed Jacobian, shared by the batch: the plain Jacobian of a convolution.

    Parameters
    ----------
    weight
        As in torch.nn: (in_channels, out_channels // groups, *kernel_size), float32 or float64.
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
    MemoryLimitError
        The pattern exceeds the limit.
    """
    sizes = _sizes(weight, input_size)
    n_in, n_out, *kernel = weight.shape
    structure = conv_transpose_pattern(
        n_in, n_out * groups, sizes, kernel, stride, padding, output_padding, groups, dilation, layout=layout,
        mask=mask, memory_limit=memory_limit,
    )  # fmt: skip
    return _gathered(structure, weight)


def _sizes(weight: Array, input_size: Lengths) -> tuple[int, ...]:
    """Return the lengths of the input's axes, checked against the weight's."""
    backend.namespace(weight=weight)
    backend.float_dtype(weight.dtype)
    sizes = tuple(input_size) if isinstance(input_size, Sequence) else (input_size,)
    if weight.ndim != len(sizes) + 2:
        raise ShapeError("weight does not fit the input",
                         expected=f"{len(sizes) + 2} axes: two of channels and {len(sizes)} of the kernel",
                         got=weight.shape)  # fmt: skip
    return sizes


def _gathered(structure: ConvPattern, weight: Array) -> TransposedJacobian:
    """Return the values on the structure, gathered from the weights."""
    xp = backend.namespace(weight)
    values = xp.empty((structure.pattern.nnz, 1), dtype=weight.dtype)
    kernels.get(xp).gather(xp.ascontiguousarray(weight).reshape(-1, 1), structure.device_index(xp), values)
    return TransposedJacobian._unchecked(structure.pattern, values.reshape(-1))


# Transposed Jacobians of operators on single elements or vectors: a diagonal of numbers or of blocks.


def pointwise_jacobian_t(saved: Array, function: SlopeFunction = "given") -> TransposedJacobian:
    """Return the diagonal of an elementwise operator's slopes.

    Parameters
    ----------
    saved
        f'(x), or y = f(x) for a named function; batch first, shape (B, …). Elements of slope zero stay entries.
    function
        ``"given"``: `saved` holds the slopes. ``"relu"``, ``"tanh"``, ``"sigmoid"``: they are computed from y.

    Returns
    -------
    TransposedJacobian
        Diagonal of the size of one sample, per sample.
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
    return TransposedJacobian._unchecked(pointwise_pattern(size), data)


def linear_jacobian_t(weight: Array, positions: int = 1, *, mask: np.ndarray | None = None) -> TransposedJacobian:
    """Return Wᵀ of ``y = x @ W.T + b``, shared by the batch.

    Parameters
    ----------
    weight
        W as in torch.nn.Linear: (out_features, in_features).
    positions
        Number of vectors per sample; each is mapped separately, so Wᵀ repeats along the diagonal.
    mask
        Bool host array in the shape of `weight`: the weights to keep (pruning); the pattern only has their entries.

    Raises
    ------
    PatternError
        `positions` is negative.
    """
    xp = backend.namespace(weight=weight)
    if weight.ndim != 2:
        raise ShapeError("weight is not a matrix", expected="(out_features, in_features)", got=weight.shape)
    if mask is not None and packed_mask(mask, weight.shape) is not None and positions > 0:
        # a convolution of width 1 over the positions has the same weights at each
        return conv_jacobian_t(weight[:, :, None], (positions,), layout="hwc", mask=mask[:, :, None])
    pattern = linear_pattern(weight.shape[1], weight.shape[0], positions)
    values = xp.ascontiguousarray(weight.T).reshape(-1)
    return TransposedJacobian(pattern, values if positions == 1 else xp.tile(values, positions))


def block_jacobian_t(blocks: Array) -> TransposedJacobian:
    """Return the block diagonal of dense blocks: softmax, layer normalisation.

    `blocks` has shape (B, positions, n_in, n_out): one transposed Jacobian per position. The result has shape
    (positions * n_in, positions * n_out), per sample.
    """
    xp = backend.namespace(blocks=blocks)
    if blocks.ndim != 4:
        raise ShapeError("blocks has the wrong number of axes", expected="(B, positions, n_in, n_out)",
                         got=blocks.shape)  # fmt: skip
    batch, positions, n_in, n_out = blocks.shape
    values = blocks.reshape(batch, positions * n_in * n_out).T
    return TransposedJacobian(linear_pattern(n_in, n_out, positions), xp.ascontiguousarray(values))


def axis_jacobian_t(blocks: Array) -> TransposedJacobian:
    """Return the transposed Jacobian of an operator on the vectors along one axis: softmax over channels.

    `blocks` has shape (B, outer, n, n, inner): one transposed Jacobian, inputs × outputs, per place before and behind
    the axis of n elements. The result has shape (outer * n * inner, outer * n * inner), per sample.
    """
    xp = backend.namespace(blocks=blocks)
    if blocks.ndim != 5 or blocks.shape[2] != blocks.shape[3]:
        raise ShapeError("blocks has the wrong shape", expected="(B, outer, n, n, inner)", got=blocks.shape)
    batch, outer, n, _, inner = blocks.shape
    values = blocks.transpose(1, 2, 4, 3, 0).reshape(outer * n * inner * n, batch)
    return TransposedJacobian(axis_pattern(outer, n, inner), xp.ascontiguousarray(values))


# Transposed Jacobians of pooling: zeros and ones by the argmax for a max-pool, constants for an average-pool.


def max_pool_jacobian_t(pool: PoolPattern, winner: Array, dtype: Any = np.float32) -> TransposedJacobian:
    """Return the transposed Jacobian of max pooling: 1 where a window takes its maximum, 0 elsewhere (BPPSA §3.3).

    Parameters
    ----------
    pool
        The layer's `pool_pattern`.
    winner
        Offset of the maximum in every window, as in `PoolPattern.offset`. Integers, batch first, (B, …), one per column
        of the pattern, in order.
    dtype
        float32 or float64.

    Returns
    -------
    TransposedJacobian
        Shape (n_in, n_out), per sample.
    """
    xp = backend.namespace(winner=winner)
    n_out = pool.pattern.shape[1]
    if winner.ndim == 0 or winner.size != winner.shape[0] * n_out:
        expected = f"(B, …) with {n_out} windows a sample"
        raise ShapeError("winner does not fit the pattern", expected=expected, got=winner.shape)
    if winner.dtype not in ("uint8", "int32"):
        winner = winner.astype("int32")
    data = xp.empty((pool.pattern.nnz, winner.shape[0]), dtype=backend.float_dtype(dtype))
    rows = xp.ascontiguousarray(winner.reshape(winner.shape[0], n_out))
    kernels.get(xp).max_pool_values(rows, *pool.lines_on(xp), *pool.line, data)
    return TransposedJacobian._unchecked(pool.pattern, data)


def avg_pool_jacobian_t(
    pool: PoolPattern, xp: ModuleType = np, dtype: Any = np.float32, *, count_include_pad: bool = True,
    divisor: int | None = None,
) -> TransposedJacobian:  # fmt: skip
    """Return the transposed Jacobian of average pooling: the inverse of each window's divisor.

    Parameters
    ----------
    pool
        The layer's `pool_pattern`, or `adaptive_pool_pattern`.
    xp
        Module of the values: ``numpy`` or ``cupy``.
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
    """
    weights = avg_pool_weights(pool, count_include_pad=count_include_pad, divisor=divisor)
    data = weights.astype(backend.float_dtype(dtype))[pool.pattern.indices]
    return TransposedJacobian._unchecked(pool.pattern, graphs.constant(xp, data))


def avg_pool_weights(pool: PoolPattern, *, count_include_pad: bool = True, divisor: int | None = None) -> np.ndarray:
    """Return the factor of each window's sum: float64, shape (n_out,)."""
    if divisor is not None:
        return np.full(pool.pattern.shape[1], 1.0 / divisor)
    return 1.0 / (pool.extent if count_include_pad else pool.inputs)


# Materialised hidden-state Jacobians of recurrent layers, for the general scan engine and for users. Training needs
# none: the fused kernels work with the factors (BPPSA Eq. 9 and 11).


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
    """
    xp = backend.namespace(c=c, c0=c0, gates=gates, w_hh=w_hh)
    steps, batch, size = c.shape
    out = xp.empty((steps, lstm_pattern(size).nnz, batch), dtype=c.dtype)
    kernels.get(xp).lstm_jacobians(c, c0, gates, w_hh, out)
    return out


def hidden_elements(data: Array, pattern: SparsityPattern | None = None) -> list[TransposedJacobian]:
    """Return the steps of (T, nnz, B) values as `TransposedJacobian` views; None stands for `hidden_pattern(H)`."""
    pattern = hidden_pattern(round(data.shape[1] ** 0.5)) if pattern is None else pattern
    return [TransposedJacobian(pattern, step) for step in data]
