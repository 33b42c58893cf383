"""Convolutions on the host: a few samples' windows at a time as columns, and one matrix product with the weights.

The columns of a part stay in the cache until the product has read them, and the memory for them does not grow with the
batch. The parts run side by side, each product on its own thread, so that the threads of Numba and of the BLAS do not
wait for each other. Convolutions with one input channel a group have no product worth that: see `depthwise`.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels import checks
from sparsebp.kernels.host import depthwise
from sparsebp.kernels.host.parts import PARALLEL, SERIAL
from sparsebp.kernels.host.unfold import fold, unfold
from sparsebp.threads import short_products
from sparsebp.types import Array

_POSITIONS = 256
"""Columns of one product that are enough for the BLAS: more only take memory."""
_ROWS = 288
"""Rows of columns of one product for the weights' gradient."""
_LEAST_PARTS = 4

Axes = tuple[int, ...]


class ConvolutionKernels:
    """Host side of the convolutions in `sparsebp.kernels.protocol.Kernels`; shapes and dtypes are stated there."""

    def convolve(
        self, weight: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """Every window's products with the weights, by parts of the batch."""
        checks.check_convolution(weight, x, out, stride, before, dilation, groups)
        if out.size == 0:
            return
        options = _options(weight, stride, before, dilation, out)
        if weight.shape[1] == 1:
            depthwise.convolve(weight, x, options, out)
            return
        block, parts = _blocks(len(x), out)
        with short_products(0.0):
            _convolve(_grouped(weight, groups), x, *options, block, parts, out)

    def convolve_t(
        self, weight: Array, y: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """The transpose of `convolve`, by parts of the batch."""
        checks.check_convolution(weight, out, y, stride, before, dilation, groups)
        if out.size == 0:
            return
        options = _options(weight, stride, before, dilation, y)
        if weight.shape[1] == 1:
            depthwise.convolve_t(weight, y, options, out)
            return
        block, parts = _blocks(len(y), y)
        with short_products(0.0):
            _convolve_t(_grouped(weight, groups), y, *options, block, parts, out)

    def correlate(
        self, y: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """The gradient at the weights, by parts of the input channels, and of the batch where these are few."""
        checks.check_convolution(out, x, y, stride, before, dilation, groups)
        if y.size == 0:
            out[...] = 0
            return
        options = _options(out, stride, before, dilation, y)
        if out.shape[1] == 1:
            depthwise.correlate(y, x, options, out)
            return
        weight, (block, _) = _grouped(out, groups), _blocks(len(y), y)
        taps = int(np.prod(out.shape[2:]))
        chunk = max(1, _ROWS // taps)
        chunks = groups * -(-out.shape[1] // chunk)
        splits = max(1, min(len(y), _LEAST_PARTS // chunks))
        sums = np.empty((splits, *weight.shape), weight.dtype) if splits > 1 else weight[None]
        with short_products(0.0):
            _correlate(y, x, *options, block, chunk, chunks * splits, sums)
        if splits > 1:
            np.sum(sums, axis=0, out=weight)


def _options(weight: Array, stride: Axes, before: Axes, dilation: Axes, y: Array) -> tuple[Axes, ...]:
    return weight.shape[2:], stride, before, dilation, y.shape[2:]


def _grouped(weight: Array, groups: int) -> Array:
    """Return the weights as (groups, out_channels / groups, in_channels / groups * taps)."""
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def _blocks(batch: int, y: Array) -> tuple[int, int]:
    """Return how many samples share a product, and how many products that makes."""
    positions = int(np.prod(y.shape[2:]))
    block = max(1, min(-(-_POSITIONS // positions), batch // _LEAST_PARTS))
    return block, -(-batch // block)


# The functions below are compiled: their arguments are arrays, tuples of sizes and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _gather(y, low, high):
    """Return samples of y (B, groups, channels, positions) as (groups, channels, samples * positions)."""
    _, groups, channels, size = y.shape
    rows = np.empty((groups, channels, (high - low) * size), y.dtype)
    for g in range(groups):
        for c in range(channels):
            for b in range(low, high):
                rows[g, c, (b - low) * size : (b - low + 1) * size] = y[b, g, c]
    return rows


@numba.njit(**SERIAL)
def _convolve_part(weight, x, kernel, stride, before, dilation, outputs, low, high, out):
    batch, channels = x.shape[0], x.shape[1]
    groups, rows, length = weight.shape
    size = outputs[0] * outputs[1] * outputs[2]
    grouped = out.reshape(batch, groups, rows, size)
    columns = np.empty((length, (high - low) * size), x.dtype)
    each = channels // groups
    for g in range(groups):
        unfold(x, (low, high), (g * each, (g + 1) * each), kernel, stride, before, dilation, outputs, columns)
        if high - low == 1:
            np.dot(weight[g], columns, grouped[low, g])
        else:
            product = np.dot(weight[g], columns)
            for b in range(low, high):
                for row in range(rows):
                    grouped[b, g, row] = product[row, (b - low) * size : (b - low + 1) * size]


@numba.njit(**PARALLEL)
def _convolve(weight, x, kernel, stride, before, dilation, outputs, block, parts, out):
    for part in numba.prange(parts):
        low, high = part * block, min((part + 1) * block, len(x))
        _convolve_part(weight, x, kernel, stride, before, dilation, outputs, low, high, out)


@numba.njit(**SERIAL)
def _convolve_t_part(weight, y, kernel, stride, before, dilation, outputs, low, high, out):
    batch, channels = out.shape[0], out.shape[1]
    groups, rows, length = weight.shape
    size = outputs[0] * outputs[1] * outputs[2]
    grouped = y.reshape(batch, groups, rows, size)
    columns = np.empty((length, (high - low) * size), y.dtype)
    each = channels // groups
    samples = grouped[low] if high - low == 1 else _gather(grouped, low, high)
    for g in range(groups):
        np.dot(weight[g].T, samples[g], columns)
        fold(columns, (low, high), (g * each, (g + 1) * each), kernel, stride, before, dilation, outputs, out)


@numba.njit(**PARALLEL)
def _convolve_t(weight, y, kernel, stride, before, dilation, outputs, block, parts, out):
    for part in numba.prange(parts):
        low, high = part * block, min((part + 1) * block, len(y))
        _convolve_t_part(weight, y, kernel, stride, before, dilation, outputs, low, high, out)


@numba.njit(**SERIAL)
def _correlate_part(y, x, kernel, stride, before, dilation, outputs, block, g, channels, samples, sums):
    """Write the gradient at the weights from `channels` of group g, summed over `samples`."""
    groups, rows, _ = sums.shape
    taps = kernel[0] * kernel[1] * kernel[2]
    size = outputs[0] * outputs[1] * outputs[2]
    grouped = y.reshape(y.shape[0], groups, rows, size)
    each = x.shape[1] // groups
    width = (channels[1] - channels[0]) * taps
    total = np.zeros((rows, width), x.dtype)
    for low in range(samples[0], samples[1], block):
        high = min(low + block, samples[1])
        columns = np.empty((width, (high - low) * size), x.dtype)
        inputs = (g * each + channels[0], g * each + channels[1])
        unfold(x, (low, high), inputs, kernel, stride, before, dilation, outputs, columns)
        if high - low == 1:
            total += np.dot(grouped[low, g], columns.T)
        else:
            total += np.dot(_gather(grouped[:, g : g + 1], low, high)[0], columns.T)
    sums[g, :, channels[0] * taps : channels[0] * taps + width] = total


@numba.njit(**PARALLEL)
def _correlate(y, x, kernel, stride, before, dilation, outputs, block, chunk, parts, sums):
    splits, groups, _, _ = sums.shape
    each, batch = x.shape[1] // groups, len(x)
    chunks = parts // splits
    for part in numba.prange(parts):
        split, which = part // chunks, part % chunks
        g, c = which // (chunks // groups), which % (chunks // groups) * chunk
        channels = (c, min(c + chunk, each))
        samples = (split * batch // splits, (split + 1) * batch // splits)
        _correlate_part(y, x, kernel, stride, before, dilation, outputs, block, g, channels, samples, sums[split])
