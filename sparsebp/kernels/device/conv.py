"""Launchers of convolutions (``cuda/conv.cu``): products of matrices, one of which is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import cublas
from sparsebp.core.check import Array
from sparsebp.kernels.device.launch import WARP, ByValue, by_value, c_types, ceil_div, check_int32
from sparsebp.kernels.device.optim import PointwiseKernels

Axes = tuple[int, ...]
TILES = ((128, 128), (64, 64), (16, 256), (16, 16))
"""Rows and columns of a block's part of the result: for many rows (in float32: a thread has no registers for as many of
float64), for some, for few, and for a small result."""
_THREADS_OF = 64 * 64
"""Numbers for 32 threads a byte of one; larger tiles have twice as many."""
_GATHERED = 10
"""Instructions that an element of a slice takes on its way to shared memory, where a multiply-add takes one."""
_WARPS = 16
"""Warps of a multiprocessor that are wanted: sums are divided into parts until there are so many."""
_LEAST_PART = 128
"""Terms of a part's sums."""
_CHANNELS = 64
"""Channels from which on cuBLAS has the products of 1×1 convolutions: nothing is gathered there."""
_PARTS_OF = 32
"""Parts are multiples of a slice, which is at most so long."""


class _Plan(NamedTuple):
    """A launch: the tile, blocks, their threads, parts of the sum, and the numbers that the kernel gets."""

    tile: tuple[int, int]
    blocks: int
    threads: int
    parts: int
    shape: ByValue


class ConvolutionKernels(PointwiseKernels):
    """Device side of the convolutions in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def convolve(
        self, weight: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array,
        bias: Array | None = None, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Weights times windows; a block a tile of output channels and windows."""
        options = stride, before, dilation, groups
        if _is_product(weight.shape, x.shape, out.shape, *options):
            self._product(weight.reshape(weight.shape[:2]), x, out, bias, limits)
            return
        self._multiply("convolve", (weight, x, bias), out, weight.shape, x.shape, out.shape, *options)
        self._limit(out, limits)

    def convolve_t(
        self, weight: Array, y: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array,
        bias: Array | None = None, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """The transpose of `convolve`; a block a tile of input channels and elements that meet the same taps."""
        options = stride, before, dilation, groups
        if _is_product(weight.shape, out.shape, y.shape, *options):
            self._product(weight.reshape(weight.shape[:2]).T, y, out, bias, limits)
            return
        self._multiply("convolve_t", (weight, y, bias), out, weight.shape, out.shape, y.shape, *options)
        self._limit(out, limits)

    def correlate(
        self, y: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """Gradients times windows; a block a tile of weights and a part of the windows."""
        self._multiply("correlate", (y, x), out, out.shape, x.shape, y.shape, stride, before, dilation, groups)

    def _product(
        self, weight: Array, x: Array, out: Array, bias: Array | None, limits: tuple[float, float] | None
    ) -> None:
        """Multiply every sample's channels by the weights (rows, channels), with cuBLAS."""
        batch, channels, rows, size = len(x), x.shape[1], out.shape[1], prod(x.shape[2:])
        flat = out.reshape(batch, rows, size)
        every = self.xp.broadcast_to(weight, (batch, rows, channels))
        cublas.matmul(every, x.reshape(batch, channels, size), flat)
        if bias is not None or limits is not None:
            self.channel_scale(flat, None, None, bias, flat, limits)

    def _limit(self, out: Array, limits: tuple[float, float] | None) -> None:
        if limits is not None:
            self.clamp(out.reshape(-1), *limits, out.reshape(-1))

    def _multiply(
        self, name: str, arrays: tuple[Array | None, ...], out: Array, weight: Axes, x: Axes, y: Axes, *options: Any
    ) -> None:
        """Launch a product, and add up its parts; `weight`, x and y are shapes."""
        if out.size == 0:
            return
        plan = _plan(name, weight, x, y, *options, out.dtype.itemsize, self.loader.multiprocessors)
        rows, columns = plan.tile
        parts = out if plan.parts == 1 else self.xp.empty((plan.parts, *out.shape), out.dtype)
        defines = c_types(REAL=out) | {"ROWS": rows, "COLUMNS": columns}
        args = (*arrays, parts, np.int64(out.size), plan.shape)
        self._launch("conv.cu", name, defines, plan.blocks, (plan.threads,), args)
        if plan.parts > 1:
            self.xp.sum(parts, axis=0, out=out)


def _is_product(weight: Axes, x: Axes, y: Axes, stride: Axes, before: Axes, dilation: Axes, groups: int) -> bool:
    """Whether a convolution of these shapes is a product of whole matrices, large enough for cuBLAS to be faster."""
    pointwise = prod(weight[2:]) == prod(stride) == groups == 1 and x[2:] == y[2:] and not any(before)
    return pointwise and min(weight[:2]) >= _CHANNELS


@lru_cache(maxsize=1024)
def _plan(
    name: str, weight: Axes, x: Axes, y: Axes, stride: Axes, before: Axes, dilation: Axes, groups: int, itemsize: int,
    multiprocessors: int,
) -> _Plan:  # fmt: skip
    """Return the launch of a product for these shapes and options."""
    batch, (outputs, channels), kernel = x[0], weight[:2], weight[2:]
    # the axes as far as windows and padding reach; strides and dilations beyond that mean nothing else
    reach = [
        max(n + p, (m - 1) * s + (k - 1) * d + 1)
        for n, m, k, s, p, d in zip(x[2:], y[2:], kernel, stride, before, dilation, strict=True)
    ]
    stride, dilation = (tuple(map(min, option, reach)) for option in (stride, dilation))
    transposed = name == "convolve_t"
    source, target = (y, x) if transposed else (x, y)
    apart = [s // gcd(s, d) for s, d in zip(stride, dilation, strict=True)]
    back = [d // gcd(s, d) for s, d in zip(stride, dilation, strict=True)]
    phases = prod(map(min, stride, x[2:])) if transposed else 1
    positions = tuple(map(ceil_div, x[2:], stride)) if transposed else y[2:]
    most = tuple(map(ceil_div, kernel, apart)) if transposed else kernel  # taps that meet; in some phases one less
    windows, taps = batch * prod(positions), prod(most)
    rows, columns, inner = {
        "convolve": (outputs // groups, windows, channels * taps),
        "convolve_t": (channels, windows, outputs // groups * taps),
        "correlate": (outputs // groups, channels * prod(kernel), windows),
    }[name]
    counted = {
        "the windows of all samples": batch * max(prod(y[2:]), prod(x[2:])),
        "the elements of a padded sample": max(x[1] * prod(reach), y[1] * prod(y[2:])),
        "the weights": prod(weight),
    }
    check_int32(name, counted)
    pitch = columns if name == "correlate" else prod(target[2:])
    wide = pitch % (16 // itemsize) == 0 and phases == 1
    tiles_of = [tile for tile in TILES if itemsize == 4 or prod(tile) <= _THREADS_OF]
    tile = min(tiles_of, key=lambda tile: _cost(rows, columns, *tile))
    threads = 32 * itemsize * (1 if prod(tile) <= _THREADS_OF else 2)
    tiles = ceil_div(rows, tile[0]), ceil_div(columns, tile[1])
    blocks = prod(tiles) * groups * phases
    parts = max(1, min(ceil_div(_WARPS * WARP * multiprocessors, threads * blocks), inner // _LEAST_PART))
    part = ceil_div(ceil_div(inner, parts), _PARTS_OF) * _PARTS_OF
    parts = max(1, ceil_div(inner, max(part, 1)))
    fewer = tuple(max(1, k // a) for k, a in zip(kernel, apart, strict=True))
    digits = (*kernel, *y[2:], *y[2:]) if name == "correlate" else (*positions, *most, *fewer)
    axes = zip(source[2:], target[2:], positions, kernel, stride, before, dilation, apart, back, strict=True)
    summed = outputs // groups if transposed else channels
    numbers = [n for axis in axes for n in axis]
    numbers += [n for by in (*digits, *tiles, groups, phases) for n in _divider(max(by, 1))]
    numbers += [rows, columns, summed, source[1], target[1], inner, part, wide]
    return _Plan(tile, blocks * parts, threads, parts, by_value(np.array(numbers, np.int64).astype(np.uint32)))


def _cost(rows: int, columns: int, tile_rows: int, tile_columns: int) -> int:
    """Return the instructions for a term of all sums, in tiles of this size."""
    tiles = ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns)
    return tiles * (tile_rows * tile_columns + _GATHERED * (tile_rows + tile_columns))


def _divider(by: int) -> Sequence[int]:
    """Return a number and what divides by it with a product and a shift: as `Divider` in the source."""
    shift = (by - 1).bit_length()
    return by, ((1 << 32) * ((1 << shift) - by)) // by + 1, shift
