"""Convolutions on the host: a few samples' windows at a time as columns, and one matrix product with the weights.

The columns of a part stay in the cache until the product has read them, and the memory for them does not grow with the
batch. The parts run side by side, each product on its own thread, so that the threads of Numba and of the BLAS do not
wait for each other. Convolutions with one input channel a group have no product worth that: see `depthwise`.

Zeros of padding take part in `convolve` and `correlate`, as in PyTorch: an infinite weight times one of them is NaN.
Some of the faster ways put zeros around another operand than x, where 0 · ∞ would give a NaN to sums that never meet
the infinity. They are for finite numbers: weights are looked at before, gradients at the weights afterwards.
"""

from __future__ import annotations

from math import prod

import numba
import numpy as np

from sparsebp.backend import memory
from sparsebp.core.threads import one_blas_thread
from sparsebp.core.types import Array
from sparsebp.kernels.host.dense.blas import blas_of, product
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, span
from sparsebp.kernels.host.engine.simd import advance, number, pointer
from sparsebp.kernels.host.engine.team import parallel, team_for
from sparsebp.kernels.host.windows import depthwise, direct, planes, rows, winograd
from sparsebp.kernels.host.windows.unfold import INPUTS, OUTPUTS, SINGLE, add_rows, copy_rows, fold, geometry_of, unfold

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
        if _in_tiles(weight, stride, before, dilation, groups, x, out) and winograd.convolve(
            weight, x, before, False, out
        ):
            return
        if weight.shape[1] > 1 and direct.fits(weight, stride, before, dilation, groups, x, out):
            direct.convolve(weight, x, stride, dilation, out)
            return
        turned = _turned_padding(weight, stride, before, dilation, groups)
        if turned is not None and _finite(weight):
            self.convolve_t(_turned(weight, groups), x, stride, turned, dilation, groups, out)
            return
        windows = weight.shape[2:], stride, before, dilation, x.shape[2:], out.shape[2:]
        if weight.shape[1] == 1:
            depthwise.convolve(weight, x, windows, out)
            return
        block, blocks = _blocks(len(x), out)
        splits = _splits(weight, groups, blocks, out)
        args, parts = (_grouped(weight, groups), x, geometry_of(*windows), block, splits), blocks * splits
        with one_blas_thread():
            _convolve(team_for(parts, _work(weight, out)), parts, blas_of(x.dtype), *args, out)

    def convolve_t(
        self, weight: Array, y: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """The transpose of `convolve`, by parts of the batch; sums over parts of the output channels if it is small."""
        if out.size == 0:
            return
        around = _padding_of_transpose(weight, before, dilation)
        if _in_tiles(weight, stride, around, dilation, groups, y, out) and winograd.convolve(
            weight, y, around, True, out
        ):
            return
        if y.shape[2:] == out.shape[2:] and direct.fits(weight, stride, before, dilation, groups, y, out):
            direct.convolve(np.ascontiguousarray(weight.swapaxes(0, 1)), y, stride, dilation, out)
            return
        turned = _turned_padding(weight, stride, before, dilation, groups)
        windows = weight.shape[2:], stride, before, dilation, out.shape[2:], y.shape[2:]
        if (turned is not None or weight.shape[1] == 1) and _finite(weight):  # both put zeros around y
            if turned is not None:
                self.convolve(_turned(weight, groups), y, stride, turned, dilation, groups, out)
            else:
                depthwise.convolve_t(weight, y, windows, out)
            return
        block, blocks = _blocks(len(y), y)
        splits = _splits(weight, groups, blocks, y)
        sums = memory.empty(np, (splits, *out.shape), out.dtype) if splits > 1 else out[None]
        args, parts = (_grouped(weight, groups), y, geometry_of(*windows), block), blocks * splits
        with one_blas_thread():
            _convolve_t(team_for(parts, _work(weight, y)), parts, blas_of(y.dtype), *args, sums)
        if splits > 1:
            np.sum(sums, axis=0, out=out)

    def correlate(
        self, y: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """The gradient at the weights, by parts of the input channels, and of the batch where these are few."""
        if y.size == 0:
            out[...] = 0
            return
        if _in_tiles(out, stride, before, dilation, groups, x, y) and winograd.correlate(y, x, before, out):
            return
        turned = _turned_padding(out, stride, before, dilation, groups)
        if turned is not None:
            weight = np.empty((x.shape[1], len(out) // groups, *out.shape[2:]), out.dtype)
            self.correlate(x, y, stride, turned, dilation, groups, weight)  # with zeros around y
            if _finite(weight):
                out[...] = _turned(weight, groups)
                return
        windows = out.shape[2:], stride, before, dilation, x.shape[2:], y.shape[2:]
        if out.shape[1] == 1:
            depthwise.correlate(y, x, windows, out)
            return
        single = prod(out.shape[2:]) == prod(stride) == groups == 1 and x.shape[2:] == y.shape[2:] and not any(before)
        if single and planes.fits(y, x):
            planes.correlate(y, x, out)
            return
        if rows.fits(out, before, groups, x, y):
            rows.correlate(y, x, stride, dilation, out)
            return
        weight, block = _grouped(out, groups), min(-(-_POSITIONS // prod(y.shape[2:])), len(y))
        chunk = max(1, _ROWS // prod(out.shape[2:]))
        chunks = groups * -(-out.shape[1] // chunk)
        splits = max(1, min(len(y), _LEAST_PARTS // chunks))
        sums = memory.empty(np, (splits, *weight.shape), weight.dtype) if splits > 1 else weight[None]
        args, parts = (y, x, geometry_of(*windows), block, chunk), chunks * splits
        with one_blas_thread():
            _correlate(team_for(parts, _work(out, y)), parts, blas_of(y.dtype), *args, sums)
        if splits > 1:
            np.sum(sums, axis=0, out=weight)


def _turned_padding(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int) -> Axes | None:
    """Return the padding with which the transpose of turned weights is the same map; None where that is no gain.

    What is laid out as columns, or added up from them, are then the output channels, which are fewer.
    """
    kernel, rows = weight.shape[2:], len(weight) // groups
    turned = _padding_of_transpose(weight, before, dilation)
    gains = rows < weight.shape[1] and prod(kernel) > 1 and stride == (1, 1, 1) and min(turned) >= 0
    return turned if gains else None


def _padding_of_transpose(weight: Array, before: Axes, dilation: Axes) -> Axes:
    """Return the padding with which the transpose of turned weights is the same map; below 0, it would cut off."""
    return tuple((k - 1) * d - b for k, d, b in zip(weight.shape[2:], dilation, before, strict=True))


def _in_tiles(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, x: Array, y: Array) -> bool:
    """Whether `winograd` maps x to y in less time; where a sum is not finite, it leaves that to others."""
    if x.shape[2] != 1 or before[0] != 0 or min(before) < 0:
        return False
    return winograd.fits(weight.shape[2:], stride, dilation, groups, weight.shape[:2], y.shape[2:], len(y))


def _finite(array: Array) -> bool:
    return bool(np.isfinite(array).all())


def _turned(weight: Array, groups: int) -> Array:
    """Return weights with rows and channels exchanged in every group, and taps from the last to the first."""
    rows, channels, kernel = len(weight) // groups, weight.shape[1], weight.shape[2:]
    turned = weight.reshape(groups, rows, channels, *kernel).swapaxes(1, 2)[..., ::-1, ::-1, ::-1]
    return np.ascontiguousarray(turned).reshape(groups * channels, rows, *kernel)


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


# The functions below are compiled: their arguments are arrays, geometries and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**SERIAL)
def _convolve(part, parts, blas, weight, x, g, block, splits, out):
    """Run a part: a block of the batch, and one of `splits` parts of the output channels."""
    low, samples, first, last = _bounds(part, block, splits, len(x), weight.shape[1])
    length = weight.shape[2]
    alone = samples == 1
    columns = np.empty(0 if alone and g[SINGLE] else length * samples * g[OUTPUTS], x.dtype)
    products = np.empty(0 if alone else (last - first) * samples * g[OUTPUTS], x.dtype)
    _convolve_block(blas, weight, x, pointer(g), low, samples, first, last, columns, products, out)


@numba.njit(**INNER_SERIAL)
def _bounds(part, block, splits, batch, rows):
    """Return the first sample of a part, the number of samples, and between which output channels of a group it is."""
    low, split = part // splits * block, part % splits
    return low, min(block, batch - low), split * rows // splits, (split + 1) * rows // splits


@numba.njit(**INNER_SERIAL)
def _convolve_block(blas, weight, x, g, low, samples, first, last, columns, products, out):
    groups, rows, length = weight.shape
    each, width, alone = x.shape[1] // groups, samples * g[OUTPUTS], samples == 1
    for group in range(groups):
        source = advance(pointer(x), (low * groups + group) * each * g[INPUTS])
        target = advance(pointer(out), ((low * groups + group) * rows + first) * g[OUTPUTS])
        if len(columns) > 0:
            unfold(source, x.shape[1] * g[INPUTS], samples, each, g, pointer(columns))
            source = pointer(columns)
        result = target if alone else pointer(products)
        left = number(advance(pointer(weight), (group * rows + first) * length))
        product(
            blas, last - first, width, length, left, False, length, number(source), False, width, number(result), width
        )
        if not alone:
            for row in range(last - first):
                to, source = advance(target, row * g[OUTPUTS]), advance(result, row * width)
                copy_rows(to, groups * rows * g[OUTPUTS], source, g[OUTPUTS], 1, samples, g[OUTPUTS])


@numba.njit(**INNER_SERIAL)
def _gather(y, apart, samples, channels, size, rows):
    """Write samples, `apart` from each other, to rows (channels, samples * size)."""
    for c in range(channels):
        copy_rows(advance(rows, c * samples * size), size, advance(y, c * size), apart, 1, samples, size)


@parallel(**SERIAL)
def _convolve_t(part, parts, blas, weight, y, g, block, sums):
    """Run a part: of a block of the batch, the sum over one part of the output channels."""
    splits = len(sums)
    low, samples, first, last = _bounds(part, block, splits, len(y), weight.shape[1])
    alone = samples == 1
    columns = np.empty(0 if alone and g[SINGLE] else weight.shape[2] * samples * g[OUTPUTS], y.dtype)
    gathered = np.empty(0 if alone else (last - first) * samples * g[OUTPUTS], y.dtype)
    _convolve_t_block(blas, weight, y, pointer(g), low, samples, first, last, columns, gathered, sums, part % splits)


@numba.njit(**INNER_SERIAL)
def _convolve_t_block(blas, weight, y, g, low, samples, first, last, columns, gathered, sums, split):
    groups, rows, length = weight.shape
    _, batch, channels, _, _, _ = sums.shape
    each, width = channels // groups, samples * g[OUTPUTS]
    for group in range(groups):
        target = advance(pointer(sums), (((split * batch) + low) * channels + group * each) * g[INPUTS])
        right = advance(pointer(y), ((low * groups + group) * rows + first) * g[OUTPUTS])
        if len(gathered) > 0:
            _gather(right, groups * rows * g[OUTPUTS], samples, last - first, g[OUTPUTS], pointer(gathered))
            right = pointer(gathered)
        result = pointer(columns) if len(columns) > 0 else target
        left = number(advance(pointer(weight), (group * rows + first) * length))
        product(
            blas, length, width, last - first, left, True, length, number(right), False, width, number(result), width
        )
        if len(columns) > 0:
            fold(result, channels * g[INPUTS], samples, each, g, target)


@parallel(**SERIAL)
def _correlate(part, parts, blas, y, x, g, block, chunk, sums):
    """Run a part: of one part of the batch, a chunk of one group's input channels."""
    splits, groups, rows, length = sums.shape
    each, batch = x.shape[1] // groups, len(x)
    chunks = -(-each // chunk)
    which, c = part // chunks, part % chunks
    split, group = which // groups, which % groups
    low, high = span(split, splits, batch)
    first, channels = c * chunk, min(chunk, each - c * chunk)
    samples = min(block, high - low)
    width = channels * (length // each)
    columns = np.empty(0 if samples == 1 and g[SINGLE] else width * samples * g[OUTPUTS], x.dtype)
    gathered = np.empty(0 if samples == 1 else rows * samples * g[OUTPUTS], x.dtype)
    products = np.empty(rows * width, x.dtype)
    at = which * rows * length + first * (length // each)
    _correlate_block(
        blas, y, x, pointer(g), low, high, block, group, groups, first, channels, columns, gathered, products, sums, at
    )


@numba.njit(**INNER_SERIAL)
def _correlate_block(
    blas, y, x, g, start, high, block, group, groups, first, channels, columns, gathered, products, sums, at
):
    rows, length = sums.shape[2:]
    width, each = len(products) // rows, x.shape[1] // groups
    for low in range(start, high, block):
        samples = min(block, high - low)
        size = samples * g[OUTPUTS]
        right = advance(pointer(x), ((low * groups + group) * each + first) * g[INPUTS])
        left = advance(pointer(y), (low * groups + group) * rows * g[OUTPUTS])
        if samples > 1 or not g[SINGLE]:
            unfold(right, x.shape[1] * g[INPUTS], samples, channels, g, pointer(columns))
            right = pointer(columns)
        if samples > 1:
            _gather(left, groups * rows * g[OUTPUTS], samples, rows, g[OUTPUTS], pointer(gathered))
            left = pointer(gathered)
        result = pointer(products)
        product(blas, rows, width, size, number(left), False, size, number(right), True, size, number(result), width)
        out = advance(pointer(sums), at)
        if low == start:
            copy_rows(out, length, result, width, 1, rows, width)
        else:
            add_rows(out, length, 1, result, width, rows, width)
