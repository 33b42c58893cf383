"""Convolutions on the host: a few samples' windows at a time as columns, and one matrix product with the weights.

The columns of a part stay in the cache until the product has read them, and the memory for them does not grow with the
batch. The parts run side by side, each product on its own thread, so that the threads of Numba and of the BLAS do not
wait for each other. Convolutions with one input channel a group have no product worth that: see `depthwise`.
"""

from __future__ import annotations

from math import prod

import numba
import numpy as np

from sparsebp.core.threads import one_blas_thread
from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.team import in_parts, team_for
from sparsebp.kernels.host.windows import depthwise
from sparsebp.kernels.host.windows.unfold import axes, fold, single, unfold

_POSITIONS = 256
"""Columns of one product that are enough for the BLAS: more only take memory."""
_ROWS = 288
"""Rows of columns of one product for the weights' gradient."""
_LEAST_PARTS = 4
_SPLITS = 2
"""Parts of a single product: every further one lays out the columns once more, for thinner products."""
_LEAST_WORK = 1 << 20
"""Multiply-adds of a part: below, its product is not worth what it takes to lay out the columns."""

Axes = tuple[int, ...]


class ConvolutionKernels:
    """Host side of the convolutions in `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def convolve(
        self, weight: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """Every window's products with the weights, by parts of the batch; of the output channels if it is small."""
        if out.size == 0:
            return
        turned = _turned_padding(weight, stride, before, dilation, groups)
        if turned is not None:
            self.convolve_t(_turned(weight, groups), x, stride, turned, dilation, groups, out)
            return
        geometry = _geometry(weight, stride, before, dilation, out)
        if weight.shape[1] == 1:
            depthwise.convolve(weight, x, geometry, out)
            return
        block, blocks = _blocks(len(x), out)
        splits = _splits(weight, groups, blocks, out)
        args, parts = (_grouped(weight, groups), x, geometry, block, splits), blocks * splits
        with one_blas_thread():
            _convolve_parallel(team_for(parts, _work(weight, out)), parts, *args, out)

    def convolve_t(
        self, weight: Array, y: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """The transpose of `convolve`, by parts of the batch; sums over parts of the output channels if it is small."""
        if out.size == 0:
            return
        turned = _turned_padding(weight, stride, before, dilation, groups)
        if turned is not None:
            self.convolve(_turned(weight, groups), y, stride, turned, dilation, groups, out)
            return
        geometry = _geometry(weight, stride, before, dilation, y)
        if weight.shape[1] == 1:
            depthwise.convolve_t(weight, y, geometry, out)
            return
        block, blocks = _blocks(len(y), y)
        splits = _splits(weight, groups, blocks, y)
        sums = np.empty((splits, *out.shape), out.dtype) if splits > 1 else out[None]
        args, parts = (_grouped(weight, groups), y, geometry, block), blocks * splits
        with one_blas_thread():
            _convolve_t_parallel(team_for(parts, _work(weight, y)), parts, *args, sums)
        if splits > 1:
            np.sum(sums, axis=0, out=out)

    def correlate(
        self, y: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """The gradient at the weights, by parts of the input channels, and of the batch where these are few."""
        if y.size == 0:
            out[...] = 0
            return
        turned = _turned_padding(out, stride, before, dilation, groups)
        if turned is not None:
            weight = np.empty((x.shape[1], len(out) // groups, *out.shape[2:]), out.dtype)
            self.correlate(x, y, stride, turned, dilation, groups, weight)
            out[...] = _turned(weight, groups)
            return
        geometry = _geometry(out, stride, before, dilation, y)
        if out.shape[1] == 1:
            depthwise.correlate(y, x, geometry, out)
            return
        weight, block = _grouped(out, groups), min(-(-_POSITIONS // prod(y.shape[2:])), len(y))
        chunk = max(1, _ROWS // prod(out.shape[2:]))
        chunks = groups * -(-out.shape[1] // chunk)
        splits = max(1, min(len(y), _LEAST_PARTS // chunks))
        sums = np.empty((splits, *weight.shape), weight.dtype) if splits > 1 else weight[None]
        parts = chunks * splits
        with one_blas_thread():
            _correlate_parallel(team_for(parts, _work(out, y)), parts, y, x, geometry, block, chunk, sums)
        if splits > 1:
            np.sum(sums, axis=0, out=weight)


def _turned_padding(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int) -> Axes | None:
    """Return the padding with which the transpose of turned weights is the same map; None where that is no gain.

    What is laid out as columns, or added up from them, are then the output channels, which are fewer.
    """
    kernel, rows = weight.shape[2:], len(weight) // groups
    turned = tuple((k - 1) * d - b for k, d, b in zip(kernel, dilation, before, strict=True))
    gains = rows < weight.shape[1] and prod(kernel) > 1 and stride == (1, 1, 1) and min(turned) >= 0
    return turned if gains else None


def _turned(weight: Array, groups: int) -> Array:
    """Return weights with rows and channels exchanged in every group, and taps from the last to the first."""
    rows, channels, kernel = len(weight) // groups, weight.shape[1], weight.shape[2:]
    turned = weight.reshape(groups, rows, channels, *kernel).swapaxes(1, 2)[..., ::-1, ::-1, ::-1]
    return np.ascontiguousarray(turned).reshape(groups * channels, rows, *kernel)


def _geometry(weight: Array, stride: Axes, before: Axes, dilation: Axes, y: Array) -> Axes:
    """Return kernel, stride, padding before, dilation and outputs on the three axes, one after the other."""
    return (*weight.shape[2:], *stride, *before, *dilation, *y.shape[2:])


def _work(weight: Array, y: Array) -> int:
    """Return the multiply-adds of a convolution."""
    return int(y.size) * prod(weight.shape[1:])


def _grouped(weight: Array, groups: int) -> Array:
    """Return the weights as (groups, out_channels / groups, in_channels / groups * taps)."""
    return weight.reshape(groups, weight.shape[0] // groups, prod(weight.shape[1:]))


def _blocks(batch: int, y: Array) -> tuple[int, int]:
    """Return how many samples share a product, and how many products that makes."""
    block = max(1, min(-(-_POSITIONS // prod(y.shape[2:])), batch // _LEAST_PARTS))
    return block, -(-batch // block)


def _splits(weight: Array, groups: int, blocks: int, y: Array) -> int:
    """Return into how many parts the output channels of a group are split where there is one block of the batch."""
    work = _work(weight, y) // groups
    return max(1, min(_SPLITS // blocks, len(weight) // groups, work // _LEAST_WORK))


# The functions below are compiled: their arguments are arrays, tuples of sizes and bounds.
# mypy: disable-error-code="no-untyped-def"


# Rows are copied by loops: an assignment of one array to another takes Numba seconds, for the words of its errors.


@numba.njit(**INNER_SERIAL)
def _copy(source, begin, out, at, size):
    """Copy `size` numbers of one flat array to another."""
    for i in range(size):
        out[np.uint64(at + i)] = source[np.uint64(begin + i)]


@numba.njit(**INNER_SERIAL)
def _gather(y, samples, groups):
    """Return samples and groups of y (B, groups, channels, positions) as (groups, channels, samples * positions)."""
    _, all_groups, channels, size = y.shape
    rows = np.empty((groups[1] - groups[0], channels, (samples[1] - samples[0]) * size), y.dtype)
    source, out, at = y.reshape(y.size), rows.reshape(rows.size), 0
    for g in range(groups[0], groups[1]):
        for c in range(channels):
            for b in range(samples[0], samples[1]):
                _copy(source, ((b * all_groups + g) * channels + c) * size, out, at, size)
                at += size
    return rows


@numba.njit(**INNER_SERIAL)
def _columns(x, samples, channels, geometry):
    """Return the windows of samples and channels as columns: those of x itself where windows are single elements."""
    (kernel, _, _, _, outputs), low = axes(geometry), samples[0]
    size = outputs[0] * outputs[1] * outputs[2]
    if samples[1] - low == 1 and single(geometry, x.shape[2:]):
        return x[low, channels[0] : channels[1]].reshape(channels[1] - channels[0], size)
    taps = kernel[0] * kernel[1] * kernel[2]
    columns = np.empty(((channels[1] - channels[0]) * taps, (samples[1] - low) * size), x.dtype)
    unfold(x, samples, channels, geometry, columns)
    return columns


@numba.njit(**INNER_SERIAL)
def _convolve_part(part, weight, x, geometry, block, splits, out):
    """Run a part: a block of the batch, and one of `splits` parts of the output channels."""
    groups, rows, _ = weight.shape
    grouped, flat = out.reshape(len(x), groups, rows, out.size // (len(out) * groups * rows)), out.reshape(out.size)
    size, each = grouped.shape[3], x.shape[1] // groups
    which, split = divmod(part, splits)
    samples = (which * block, min((which + 1) * block, len(x)))
    first, last = split * rows // splits, (split + 1) * rows // splits
    alone = samples[1] - samples[0] == 1
    for g in range(groups):
        columns = _columns(x, samples, (g * each, (g + 1) * each), geometry)
        product = grouped[samples[0], g, first:last] if alone else np.empty((last - first, columns.shape[1]), x.dtype)
        np.dot(weight[g, first:last], columns, product)
        if not alone:
            source = product.reshape(product.size)
            for b in range(samples[0], samples[1]):
                for row in range(last - first):
                    begin = row * product.shape[1] + (b - samples[0]) * size
                    _copy(source, begin, flat, ((b * groups + g) * rows + first + row) * size, size)


@numba.njit(**SERIAL)
def _convolve_parallel(team, parts, *args):
    in_parts(_convolve_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _convolve_t_part(part, weight, y, geometry, block, sums):
    """Run a part: of a block of the batch, the sum over one part of the output channels."""
    groups, rows, length = weight.shape
    grouped = y.reshape(len(y), groups, rows, y.size // (len(y) * groups * rows))
    splits, _, channels = sums.shape[:3]
    each = channels // groups
    inputs = sums.reshape(splits, len(y), groups, each, sums.size // (splits * len(y) * channels))
    which, split = divmod(part, splits)
    samples = (which * block, min((which + 1) * block, len(y)))
    first, last = split * rows // splits, (split + 1) * rows // splits
    alone = samples[1] - samples[0] == 1
    whole = alone and single(geometry, sums.shape[3:])
    gathered = grouped[samples[0]] if alone else _gather(grouped, samples, (0, groups))
    for g in range(groups):
        columns = inputs[split, samples[0], g] if whole else np.empty((length, gathered.shape[2]), y.dtype)
        np.dot(weight[g, first:last].T, gathered[g, first:last], columns)
        if not whole:
            fold(columns, samples, (g * each, (g + 1) * each), geometry, sums[split])


@numba.njit(**SERIAL)
def _convolve_t_parallel(team, parts, *args):
    in_parts(_convolve_t_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _correlate_part(part, y, x, geometry, block, chunk, sums):
    """Run a part: of one part of the batch, a chunk of one group's input channels."""
    splits, groups, rows, length = sums.shape
    grouped, out = y.reshape(len(y), groups, rows, y.size // (len(y) * groups * rows)), sums.reshape(sums.size)
    each, batch = x.shape[1] // groups, len(x)
    taps, chunks = length // each, -(-each // chunk)
    which, c = divmod(part, chunks)
    split, g = divmod(which, groups)
    first, last = c * chunk, min((c + 1) * chunk, each)
    width, begin = (last - first) * taps, which * rows * length + first * taps
    product = np.empty((rows, width), y.dtype)
    values, start = product.reshape(product.size), split * batch // splits
    for low in range(start, (split + 1) * batch // splits, block):
        samples = (low, min(low + block, (split + 1) * batch // splits))
        columns = _columns(x, samples, (g * each + first, g * each + last), geometry)
        gradients = grouped[low, g] if samples[1] - low == 1 else _gather(grouped, samples, (g, g + 1))[0]
        np.dot(gradients, columns.T, product)
        for row in range(rows):
            at, source = begin + row * length, row * width
            if low == start:
                _copy(values, source, out, at, width)
            else:
                for i in range(width):
                    out[np.uint64(at + i)] += values[np.uint64(source + i)]


@numba.njit(**SERIAL)
def _correlate_parallel(team, parts, *args):
    in_parts(_correlate_part, team, parts, args)
