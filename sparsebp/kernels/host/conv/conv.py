"""Convolutions on the host: a few samples' windows at a time as columns, and one matrix product with the weights.

The columns of a part stay in the cache until the product has read them, and the memory for them does not grow with the
batch. The parts run side by side, each product on its own thread, so that the threads of Numba and of the BLAS do not
wait for each other. Convolutions with one input channel a group have no product worth that: see `depthwise`.

Zeros of padding take part in `convolve` and `correlate`, as in PyTorch: an infinite weight times one of them is NaN.
Some of the faster ways put zeros around another operand than x, where 0 · ∞ would give a NaN to sums that never meet
the infinity. They are for finite numbers: weights are looked at before, gradients at the weights afterwards.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, starmap
from itertools import product as itertools_product
from math import prod

import numba
import numpy as np

from sparsebp.core import host_pool
from sparsebp.core.check import Array
from sparsebp.core.threads import one_blas_thread
from sparsebp.kernels.host.conv import depthwise, direct, narrow, winograd
from sparsebp.kernels.host.conv.direct import add_sums, store_sums
from sparsebp.kernels.host.dense.products import blas_of, product
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, INNER_SERIAL, JIT, SERIAL, span
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    clear,
    copy,
    fma,
    keep_alive,
    lanes,
    load,
    load_up_to,
    number,
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, team_for
from sparsebp.kernels.host.pointwise import ChannelKernels, Limits

Axes = tuple[int, ...]


# Convolutions without padding and with stride 1 on the last axis: products of matrices, and no columns. Of these, 1×1
# ones and those with more weights than `direct` takes.
#
# A BLAS packs both of its operands at every call, which a plane of few elements, or few channels, does not pay. Here
# only the windows are packed, straight from the input, in panels of three vectors, each of a row of windows of any
# sample: a panel stays in the first or second cache while all rows of the weights go past, and a tile of four rows is
# computed in registers and written to the output at once. Every number is one chain of fused multiply-adds along
# channels and taps, wherever its vector lies.

_VECTORS = 3
_PACKED_MOST_BYTES = 1 << 18
"""Of a panel: half of a second cache."""
_PACKED_LEAST_PARTS, _LEAST_ROWS = 8, 32
"""Parts that are wanted, and rows of one: the panels of few elements are packed for several parts."""


def packed_fits(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, x: Array, y: Array) -> bool:
    """Whether `convolve` maps x to y: every window lies in the input, and a panel in a cache."""
    if groups != 1 or stride[2] != 1 or before != (0, 0, 0):
        return False
    sizes = zip(weight.shape[2:], stride, dilation, x.shape[2:], y.shape[2:], strict=True)
    inside = all((k - 1) * d + (o - 1) * s < n for k, s, d, n, o in sizes)
    return inside and prod(weight.shape[1:]) * _VECTORS * VECTOR_BYTES <= _PACKED_MOST_BYTES


def convolve(weight: Array, x: Array, stride: Axes, dilation: Axes, turned: bool, out: Array) -> None:
    """Write the sums of every window's products: weights (out_channels, channels, *kernel), all on three axes.

    `turned`: of weights with one tap, and with the two kinds of channels exchanged.
    """
    rows, batch = out.shape[1], len(x)
    starts, steps, width = places_of(x.shape[1], x.shape[2:], weight.shape[2:], stride, dilation, out.shape[2:])
    down, across = (1, rows) if turned else (len(steps), 1)
    panels = -(-batch * len(starts) * -(-width // (VECTOR_BYTES // x.itemsize)) // _VECTORS)
    splits = max(1, min(-(-_PACKED_LEAST_PARTS // panels), rows // _LEAST_ROWS))
    parts = panels * splits
    args = weight.reshape(-1), down, across, x.reshape(batch, -1), starts, steps, width, splits
    _packed_convolve(team_for(parts, out.size * len(steps) // 8), parts, *args, out.reshape(batch, rows, -1))


@lru_cache(maxsize=256)
def places_of(
    channels: int, inputs: Axes, kernel: Axes, stride: Axes, dilation: Axes, outputs: Axes
) -> tuple[Array, Array, int]:
    """Return where rows of windows begin in a sample, how far behind each channel and tap lies, and a row's length."""
    if inputs == outputs:  # one row, whatever the axes
        return np.zeros(1, np.int64), np.arange(channels) * prod(inputs), prod(outputs)
    apart = np.array([inputs[1] * inputs[2], inputs[2], 1])[:, None]
    starts = (np.indices((*outputs[:2], 1)).reshape(3, -1) * np.array(stride)[:, None] * apart).sum(0)
    taps = (np.indices(kernel).reshape(3, -1) * np.array(dilation)[:, None] * apart).sum(0)
    return starts, (np.arange(channels)[:, None] * prod(inputs) + taps).reshape(-1), outputs[2]


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _packed_convolve(part, parts, weight, down, across, x, starts, steps, width, splits, out):
    """Run a part: of a panel, one of `splits` parts of the rows."""
    (_, rows, size), depth, step = out.shape, len(steps), lanes(pointer(x))
    first, (low, high) = part // splits * 3, span(part % splits, splits, rows)
    room = np.empty((depth + 1) * 3 * step, x.dtype)
    panel, origin, target = aligned_pointer(room), pointer(x), advance(pointer(out), low * size)
    p, a, i = _place(first, width, step, x, starts, out)
    q, b, j = _place(first + 1, width, step, x, starts, out)
    r, c, k = _place(first + 2, width, step, x, starts, out)
    _pack(advance(origin, p), i, advance(origin, q), j, advance(origin, r), k, pointer(steps), depth, panel)
    _multiply(
        advance(pointer(weight), low * down), down, across, high - low, depth, panel, advance(target, a), i,
        advance(target, b), j, advance(target, c), k, size,
    )  # fmt: skip
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _place(vector, width, step, x, starts, out):
    """Return where a vector's windows begin, where it goes, and how many they are: none behind the last one."""
    each = (width + step - 1) // step
    there = min(vector, len(x) * len(starts) * each - 1)
    row, at = there // each, there % each * step
    sample, line = row // len(starts), row % len(starts)
    source = sample * x.shape[1] + starts[line] + at
    target = sample * out.shape[1] * out.shape[2] + line * width + at
    return source, target, min(width - at, step) if there == vector else 0


@numba.njit(**INNER_APART)
def _pack(a, i, b, j, c, k, steps, depth, panel):
    """Write three columns of vectors, with i, j and k numbers, side by side."""
    step = lanes(panel)
    if min(i, j, k) == step:
        for at in range(depth):
            place = steps[at]
            store(panel, 0, load(a, place))
            store(panel, step, load(b, place))
            store(panel, 2 * step, load(c, place))
            panel = advance(panel, 3 * step)
        return
    for at in range(depth):
        place = steps[at]
        store(panel, 0, load_up_to(a, place, i))
        store(panel, step, load_up_to(b, place, j))
        store(panel, 2 * step, load_up_to(c, place, k))
        panel = advance(panel, 3 * step)


@numba.njit(**INNER_APART)
def _multiply(weight, down, across, rows, depth, panel, a, i, b, j, c, k, apart):
    """Write the products of the rows with the panel to three columns of vectors, with i, j and k numbers."""
    step, row = lanes(panel), 0
    while row + 4 <= rows:
        w0 = advance(weight, row * down)
        w1, w2, w3 = advance(w0, down), advance(w0, 2 * down), advance(w0, 3 * down)
        a0 = b0 = c0 = a1 = b1 = c1 = a2 = b2 = c2 = a3 = b3 = c3 = zeros(panel)
        for at in range(depth):
            place = 3 * step * at
            x, y, z = load(panel, place), load(panel, place + step), load(panel, place + 2 * step)
            w = broadcast(w0, at * across)
            a0, b0, c0 = fma(w, x, a0), fma(w, y, b0), fma(w, z, c0)
            w = broadcast(w1, at * across)
            a1, b1, c1 = fma(w, x, a1), fma(w, y, b1), fma(w, z, c1)
            w = broadcast(w2, at * across)
            a2, b2, c2 = fma(w, x, a2), fma(w, y, b2), fma(w, z, c2)
            w = broadcast(w3, at * across)
            a3, b3, c3 = fma(w, x, a3), fma(w, y, b3), fma(w, z, c3)
        place = row * apart
        _store_row(a, i, b, j, c, k, place, a0, b0, c0)
        _store_row(a, i, b, j, c, k, place + apart, a1, b1, c1)
        _store_row(a, i, b, j, c, k, place + 2 * apart, a2, b2, c2)
        _store_row(a, i, b, j, c, k, place + 3 * apart, a3, b3, c3)
        row += 4
    while row < rows:
        w0 = advance(weight, row * down)
        a0 = b0 = c0 = zeros(panel)
        for at in range(depth):
            w, place = broadcast(w0, at * across), 3 * step * at
            a0, b0 = fma(w, load(panel, place), a0), fma(w, load(panel, place + step), b0)
            c0 = fma(w, load(panel, place + 2 * step), c0)
        _store_row(a, i, b, j, c, k, row * apart, a0, b0, c0)
        row += 1


@numba.njit(**INNER_JIT)
def _store_row(a, i, b, j, c, k, place, x, y, z):
    """Store the first i, j and k numbers of three vectors."""
    store_up_to(a, place, x, i)
    store_up_to(b, place, y, j)
    store_up_to(c, place, z, k)


# The gradient at the weights of 1×1 convolutions: the inner products of the planes of two arrays.
#
# Both arrays have the elements that a sum goes over side by side, so whole vectors are multiplied as they lie in
# memory: a BLAS would pack them first, and several samples of small planes had to be gathered before. Tiles are of four
# by three planes, over enough samples that lanes are seldom added up. A part has planes of the larger array; the
# smaller one's are read from the second cache, once for eight of them.

_PLANES_TILE = 4
_TERMS = 512
"""Of each inner product, before its lanes are added up: eight planes of them fill half of a first cache."""
_PLANES_PARTS = 8
_LEAST_SIZE = 64
"""Of a plane: smaller ones, far apart from sample to sample, share sets of the first cache. A BLAS packs them."""


def planes_fits(y: Array, x: Array) -> bool:
    """Whether planes are whole vectors of 8 or 16 numbers, and several."""
    size, step = prod(x.shape[2:]), VECTOR_BYTES // x.itemsize
    return step in (8, 16) and size >= _LEAST_SIZE and size % step == 0


def planes_correlate(y: Array, x: Array, out: Array) -> None:
    """Write ``out[r, c] = Σ y[b, r] · x[b, c]`` over samples and the elements of planes; out (rows, channels, …)."""
    batch, rows, channels = len(x), y.shape[1], x.shape[1]
    left, right = (a.reshape(batch, a.shape[1], -1) for a in (y, x))
    apart = channels, 1
    if rows < channels:
        left, right, apart = right, left, (1, channels)
    parts = min(_PLANES_PARTS, -(-left.shape[1] // _PLANES_TILE))
    _planes_correlate(team_for(parts, y.size * channels // 8), parts, left, right, *apart, out.reshape(-1))


# The functions below are compiled: their arguments are arrays, pointers and bounds.


@parallel(**JIT)
def _planes_correlate(part, parts, left, right, down, across, out):
    """Run a part of the planes of `left`."""
    batch, rows, size = left.shape
    begin, end = span(part, parts, (rows + 3) // 4)
    low, high, step = begin * 4, min(end * 4, rows), lanes(pointer(left))
    room = np.empty(4 * step, left.dtype)
    columns, block, place = right.shape[1], max(1, _TERMS // size), aligned_pointer(room)
    for first in range(0, batch, block):
        samples = min(block, batch - first)
        for begin in range(low, high, 8):
            for column in range(0, columns, 3):
                b, wide = advance(pointer(right), (first * columns + column) * size), min(columns - column, 3)
                for row in range(begin, min(begin + 8, high), 4):
                    a = advance(pointer(left), (first * rows + row) * size)
                    tall = min(high - row, 4)
                    _multiply_tile(a, tall, rows * size, b, wide, columns * size, samples, size, place)
                    target = advance(pointer(out), row * down + column * across)
                    add_sums(place, tall, wide, down, across, first == 0, target)
    keep_alive(room)


@numba.njit(**INNER_APART)
def _multiply_tile(a, rows, a_apart, b, columns, b_apart, samples, size, out):
    """Write the inner products of four planes and three over samples as partial sums; missing ones repeat the last."""
    step = lanes(a)
    a1, a2, a3 = min(1, rows - 1) * size, min(2, rows - 1) * size, min(3, rows - 1) * size
    b1, b2 = min(1, columns - 1) * size, (columns - 1) * size
    c0 = d0 = e0 = c1 = d1 = e1 = c2 = d2 = e2 = c3 = d3 = e3 = zeros(a)
    for sample in range(samples):
        left, right = advance(a, sample * a_apart), advance(b, sample * b_apart)
        for i in range(0, size, step):
            x, y, z = load(right, i), load(right, b1 + i), load(right, b2 + i)
            v = load(left, i)
            c0, d0, e0 = fma(v, x, c0), fma(v, y, d0), fma(v, z, e0)
            v = load(left, a1 + i)
            c1, d1, e1 = fma(v, x, c1), fma(v, y, d1), fma(v, z, e1)
            v = load(left, a2 + i)
            c2, d2, e2 = fma(v, x, c2), fma(v, y, d2), fma(v, z, e2)
            v = load(left, a3 + i)
            c3, d3, e3 = fma(v, x, c3), fma(v, y, d3), fma(v, z, e3)
    store_sums(out, 0, c0, c1, c2, c3)
    store_sums(out, step, d0, d1, d2, d3)
    store_sums(out, 2 * step, e0, e1, e2, e3)


# Windows laid side by side as columns, and added up again, for the matrix products of convolutions.
#
# Where the windows of a tap meet the input is found before, once for each geometry, so that the loops over elements
# have no condition.

TAPS, SINGLE, INPUTS, OUTPUTS, _WIDTH, _DEPTH, _PLANE, _OUT_D, _OUT_W, _STRIDE_D, _STRIDE_H, _STRIDE_W = range(12)
"""Places in a geometry: the number of taps; whether the windows are the elements of the input, one by
one; how many elements an input and an output have on all axes together; the input's width, depth and elements of a
plane; the sizes of outputs, and strides. A row for each tap comes behind."""
_HEAD = 12
_FIRST_D, _LOW_H, _HIGH_H, _LOW_W, _HIGH_W, _SHIFT, _ROW = range(7)
"""Places in a tap's row: the depth at which it meets window 0; the rows and columns of outputs for which it lies in the
input; where it meets window 0 in a plane."""


@lru_cache(maxsize=256)  # small, and it takes as long as a small convolution
def geometry_of(kernel: Axes, stride: Axes, before: Axes, dilation: Axes, inputs: Axes, outputs: Axes) -> Array:
    """Return the geometry of windows for the compiled functions: int64, a head and a row for each tap."""
    plane, taps = inputs[1] * inputs[2], []
    for tap in itertools_product(*map(range, kernel)):
        first = [t * d - b for t, d, b in zip(tap, dilation, before, strict=True)]
        met = starmap(_met, zip(outputs[1:], inputs[1:], stride[1:], first[1:], strict=True))
        taps.append([first[0], *next(met), *next(met), first[1] * inputs[2] + first[2]])
    ones, nothing = (1, 1, 1), (0, 0, 0)
    single = (kernel, stride, before, outputs) == (ones, ones, nothing, inputs)
    head = len(taps), single, prod(inputs), prod(outputs), inputs[2], inputs[0], plane, outputs[0], outputs[2], *stride
    return np.array([*head, *chain.from_iterable(taps)], np.int64)


def _met(outputs: int, length: int, stride: int, shift: int) -> tuple[int, int]:
    """Return from where, and to where, output o meets an input: ``0 <= o * stride + shift < length``."""
    low = min(max(0, -(shift // stride)), outputs)
    return low, max(low, min(outputs, (length - 1 - shift) // stride + 1))


# The functions below are compiled: their arguments are pointers and sizes.


@numba.njit(**INNER_APART)
def copy_rows(out, out_row, source, row, stride, rows, n):
    """Copy rows of `n` numbers, ``out_row`` and ``row`` apart; those of `source` are `stride` apart."""
    for _ in range(rows):
        if stride == 1:
            for i in range(n):
                out[i] = source[i]
        else:
            for i in range(n):
                out[i] = source[i * stride]
        out, source = advance(out, out_row), advance(source, row)


@numba.njit(**INNER_APART)
def add_rows(out, out_row, stride, source, row, rows, n):
    """Add rows of `n` numbers, ``out_row`` and ``row`` apart, to others; those of `out` are `stride` apart."""
    for _ in range(rows):
        if stride == 1:
            for i in range(n):
                out[i] += source[i]
        else:
            for i in range(n):
                out[i * stride] += source[i]
        out, source = advance(out, out_row), advance(source, row)


@numba.njit(**INNER_SERIAL)
def _clear_outside(plane, size, g, tap):
    """Clear the places outside the rows and columns that meet the input, which are not empty."""
    low_w, high_w, width = tap[_LOW_W], tap[_HIGH_W], g[_OUT_W]
    at = tap[_LOW_H] * width + low_w
    clear(plane, at)
    gap = width - high_w + low_w
    for _ in range(tap[_LOW_H] + 1, tap[_HIGH_H]):
        if gap > 0:
            clear(advance(plane, at + high_w - low_w), gap)
        at += width
    at += high_w - low_w
    clear(advance(plane, at), size - at)


@numba.njit(**INNER_SERIAL)
def unfold(x, sample, samples, channels, g, columns):
    """Write the windows of samples to columns (channels * taps, samples * outputs).

    Samples are `sample` numbers apart. Where windows are as many as inputs on the last axis, the rows of a tap lie one
    after the other in both: they are copied as one, over the elements in between that are cleared afterwards.
    """
    whole = g[_STRIDE_H] == 1 and g[_STRIDE_W] == 1 and g[_OUT_W] == g[_WIDTH]
    size, stride = g[OUTPUTS] // g[_OUT_D], g[_STRIDE_W]
    for c in range(channels):
        for t in range(g[TAPS]):
            tap = advance(g, _HEAD + t * _ROW)
            low_h, high_h, low_w, n = tap[_LOW_H], tap[_HIGH_H], tap[_LOW_W], tap[_HIGH_W] - tap[_LOW_W]
            for b in range(samples):
                for od in range(g[_OUT_D]):
                    d = od * g[_STRIDE_D] + tap[_FIRST_D]
                    if d < 0 or d >= g[_DEPTH] or low_h == high_h or n == 0:
                        clear(columns, size)
                    else:
                        plane = advance(x, b * sample + (c * g[_DEPTH] + d) * g[_PLANE] + tap[_SHIFT])
                        at = low_h * g[_OUT_W] + low_w
                        if whole:
                            copy(advance(columns, at), advance(plane, at), (high_h - 1 - low_h) * g[_OUT_W] + n)
                        else:
                            apart = g[_STRIDE_H] * g[_WIDTH]
                            source = advance(plane, low_h * apart + low_w * stride)
                            copy_rows(advance(columns, at), g[_OUT_W], source, apart, stride, high_h - low_h, n)
                        _clear_outside(columns, size, g, tap)
                    columns = advance(columns, size)


@numba.njit(**INNER_SERIAL)
def fold(columns, sample, samples, channels, g, x):
    """Write to samples, `sample` numbers apart, the sums of the values that `unfold` copies, in the order of taps.

    The columns that stand for padding are cleared where rows are added as one.
    """
    whole = g[_STRIDE_H] == 1 and g[_STRIDE_W] == 1 and g[_OUT_W] == g[_WIDTH]
    size, stride = g[OUTPUTS] // g[_OUT_D], g[_STRIDE_W]
    for c in range(channels):
        for b in range(samples):
            clear(advance(x, b * sample + c * g[INPUTS]), g[INPUTS])
        for t in range(g[TAPS]):
            tap = advance(g, _HEAD + t * _ROW)
            low_h, high_h, low_w, n = tap[_LOW_H], tap[_HIGH_H], tap[_LOW_W], tap[_HIGH_W] - tap[_LOW_W]
            for b in range(samples):
                for od in range(g[_OUT_D]):
                    d = od * g[_STRIDE_D] + tap[_FIRST_D]
                    if d >= 0 and d < g[_DEPTH] and low_h < high_h and n > 0:
                        plane = advance(x, b * sample + (c * g[_DEPTH] + d) * g[_PLANE] + tap[_SHIFT])
                        at = low_h * g[_OUT_W] + low_w
                        source = advance(columns, at)
                        if whole:
                            _clear_outside(columns, size, g, tap)
                            add_rows(advance(plane, at), 0, 1, source, 0, 1, (high_h - 1 - low_h) * g[_OUT_W] + n)
                        else:
                            apart = g[_STRIDE_H] * g[_WIDTH]
                            target = advance(plane, low_h * apart + low_w * stride)
                            add_rows(target, apart, stride, source, g[_OUT_W], high_h - low_h, n)
                    columns = advance(columns, size)


_POSITIONS = 256
"""Columns of one product that are enough for the BLAS: more only take memory."""
_ROWS = 288
"""Rows of columns of one product for the weights' gradient."""
_CONVOLUTION_LEAST_PARTS = 4
_SPLITS = 2
"""Parts of a single product: every further one lays out the columns once more, for thinner products."""
_LEAST_WORK = 1 << 20
"""Multiply-adds of a part: below, its product is not worth laying out the columns."""


class ConvolutionKernels(ChannelKernels):
    """Host side of the convolutions in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def convolve(
        self, weight: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array,
        bias: Array | None = None, limits: Limits = None,
    ) -> None:  # fmt: skip
        """Every window's products with the weights, by parts of the batch; of the output channels if it is small."""
        self._convolve(weight, x, stride, before, dilation, groups, out)
        self._between(out, bias, limits)

    def convolve_t(
        self, weight: Array, y: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array,
        bias: Array | None = None, limits: Limits = None,
    ) -> None:  # fmt: skip
        """The transpose of `convolve`, by parts of the batch; sums over parts of the output channels if it is small."""
        self._convolve_t(weight, y, stride, before, dilation, groups, out)
        self._between(out, bias, limits)

    def _between(self, out: Array, bias: Array | None, limits: Limits) -> None:
        """Add the bias and clamp the sums, in place and in one pass."""
        if bias is not None or limits is not None:
            flat = out.reshape(*out.shape[:2], prod(out.shape[2:]))
            self.channel_scale(flat, None, None, bias, flat, limits)

    def _convolve(
        self, weight: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        if out.size == 0:
            return
        if narrow.fits(weight, stride, before, dilation, groups, out) and narrow.convolve(
            weight, x, before, dilation, False, out
        ):
            return
        if _in_tiles(weight, stride, before, dilation, groups, x, out) and winograd.convolve(
            weight, x, before, False, out
        ):
            return
        windows = weight.shape[2:], stride, before, dilation, x.shape[2:], out.shape[2:]
        if direct.fits(weight, windows, groups):
            direct.convolve(weight, x, windows, False, out)
            return
        if weight.shape[1] > 1 and packed_fits(weight, stride, before, dilation, groups, x, out):
            convolve(weight, x, stride, dilation, False, out)
            return
        turned = _turned_padding(weight, stride, before, dilation, groups)
        if turned is not None and _finite(weight):
            self._convolve_t(_turned(weight, groups), x, stride, turned, dilation, groups, out)
            return
        if weight.shape[1] == 1:
            depthwise.convolve(weight, x, windows, out)
            return
        block, blocks = _blocks(len(x), out)
        splits = _splits(weight, groups, blocks, out)
        args, parts = (_grouped(weight, groups), x, geometry_of(*windows), block, splits), blocks * splits
        with one_blas_thread():
            _convolution_convolve(team_for(parts, _work(weight, out)), parts, blas_of(x.dtype), *args, out)

    def _convolve_t(
        self, weight: Array, y: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        if out.size == 0:
            return
        around = _padding_of_transpose(weight, before, dilation)
        if narrow.fits(weight, stride, around, dilation, groups, out) and narrow.convolve(
            weight, y, around, dilation, True, out
        ):
            return
        if _in_tiles(weight, stride, around, dilation, groups, y, out) and winograd.convolve(
            weight, y, around, True, out
        ):
            return
        if y.shape[2:] == out.shape[2:] and packed_fits(weight, stride, before, dilation, groups, y, out):
            convolve(weight, y, stride, dilation, True, out)
            return
        windows = weight.shape[2:], stride, before, dilation, out.shape[2:], y.shape[2:]
        if direct.transpose_fits(weight.shape, windows, groups, weight.itemsize) and _finite(weight):
            direct.convolve_t(weight, y, windows, out)
            return
        turned = _turned_padding(weight, stride, before, dilation, groups)
        if (turned is not None or weight.shape[1] == 1) and _finite(weight):  # both put zeros around y
            if turned is not None:
                self._convolve(_turned(weight, groups), y, stride, turned, dilation, groups, out)
            else:
                depthwise.convolve_t(weight, y, windows, out)
            return
        block, blocks = _blocks(len(y), y)
        splits = _splits(weight, groups, blocks, y)
        sums = host_pool.empty(np, (splits, *out.shape), out.dtype) if splits > 1 else out[None]
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
        single = prod(out.shape[2:]) == prod(stride) == groups == 1 and x.shape[2:] == y.shape[2:] and not any(before)
        if single and planes_fits(y, x):
            planes_correlate(y, x, out)
            return
        if narrow.correlate_fits(out, stride, before, dilation, groups, y):
            narrow.correlate(y, x, before, dilation, out)
            return
        if _in_tiles(out, stride, before, dilation, groups, x, y) and winograd.correlate(y, x, before, out):
            return
        windows = out.shape[2:], stride, before, dilation, x.shape[2:], y.shape[2:]
        if direct.fits(out, windows, groups) and direct.correlate(y, x, windows, out):
            return
        turned = _turned_padding(out, stride, before, dilation, groups)
        if turned is not None and _all_meet(*windows):
            weight = np.empty((x.shape[1], len(out) // groups, *out.shape[2:]), out.dtype)
            self.correlate(x, y, stride, turned, dilation, groups, weight)  # with zeros around y
            if _finite(weight):
                out[...] = _turned(weight, groups)
                return
        if out.shape[1] == 1:
            depthwise.correlate(y, x, windows, out)
            return
        weight, block = _grouped(out, groups), min(-(-_POSITIONS // prod(y.shape[2:])), len(y))
        chunk = max(1, _ROWS // prod(out.shape[2:]))
        chunks = groups * -(-out.shape[1] // chunk)
        splits = max(1, min(len(y), _CONVOLUTION_LEAST_PARTS // chunks))
        sums = host_pool.empty(np, (splits, *weight.shape), weight.dtype) if splits > 1 else weight[None]
        args, parts = (y, x, geometry_of(*windows), block, chunk), chunks * splits
        with one_blas_thread():
            _convolution_correlate(team_for(parts, _work(out, y)), parts, blas_of(y.dtype), *args, sums)
        if splits > 1:
            np.sum(sums, axis=0, out=weight)


def _turned_padding(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int) -> Axes | None:
    """Return the padding with which the transpose of turned weights is the same map; None if that is not faster.

    The output channels, which are fewer, are then laid out as columns, or added up from them.
    """
    kernel, rows = weight.shape[2:], len(weight) // groups
    if rows >= weight.shape[1] or prod(kernel) == 1 or stride != (1, 1, 1):
        return None
    turned = _padding_of_transpose(weight, before, dilation)
    return turned if min(turned) >= 0 else None


def _all_meet(kernel: Axes, stride: Axes, before: Axes, dilation: Axes, inputs: Axes, outputs: Axes) -> bool:
    """Whether every window has a tap in the input: else the transpose, which reads no zeros, would not read it at all.

    The stride is 1, and the first window's last tap is not before the input.
    """
    axes = zip(kernel, before, dilation, inputs, outputs, strict=True)
    return all(o - b <= n and (k == 1 or d <= n) for k, b, d, n, o in axes)


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
    block = max(1, min(-(-_POSITIONS // prod(y.shape[2:])), batch // _CONVOLUTION_LEAST_PARTS))
    return block, -(-batch // block)


def _splits(weight: Array, groups: int, blocks: int, y: Array) -> int:
    """Return into how many parts the output channels of a group are split where there is one block of the batch."""
    work = _work(weight, y) // groups
    return max(1, min(_SPLITS // blocks, len(weight) // groups, work // _LEAST_WORK))


# The functions below are compiled: their arguments are arrays, geometries and bounds.


@parallel(**SERIAL)
def _convolution_convolve(part, parts, blas, weight, x, geometry, block, splits, out):
    """Run a part: a block of the batch, and one of `splits` parts of the output channels."""
    (groups, rows, length), g = weight.shape, pointer(geometry)
    low, samples, first, last = _bounds(part, block, splits, len(x), rows)
    each, width, alone = x.shape[1] // groups, samples * g[OUTPUTS], samples == 1
    columns = np.empty(0 if alone and g[SINGLE] else length * width, x.dtype)
    products = np.empty(0 if alone else (last - first) * width, x.dtype)
    for group in range(groups):
        source = advance(pointer(x), (low * groups + group) * each * g[INPUTS])
        target = advance(pointer(out), ((low * groups + group) * rows + first) * g[OUTPUTS])
        if len(columns) > 0:
            unfold(source, x.shape[1] * g[INPUTS], samples, each, g, pointer(columns))
            source = pointer(columns)
        result = target if alone else pointer(products)
        left = number(advance(pointer(weight), (group * rows + first) * length))
        product(
            blas,
            last - first,
            width,
            length,
            left,
            False,
            length,
            number(source),
            False,
            width,
            False,
            number(result),
            width,
        )
        if not alone:
            for row in range(last - first):
                to, source = advance(target, row * g[OUTPUTS]), advance(result, row * width)
                copy_rows(to, groups * rows * g[OUTPUTS], source, g[OUTPUTS], 1, samples, g[OUTPUTS])
    keep_alive(columns)
    keep_alive(products)


@numba.njit(**INNER_SERIAL)
def _bounds(part, block, splits, batch, rows):
    """Return the first sample of a part, the number of samples, and between which output channels of a group it is."""
    low, split = part // splits * block, part % splits
    return low, min(block, batch - low), split * rows // splits, (split + 1) * rows // splits


@numba.njit(**INNER_SERIAL)
def _gather(y, apart, samples, channels, size, rows):
    """Write samples, `apart` from each other, to rows (channels, samples * size)."""
    for c in range(channels):
        copy_rows(advance(rows, c * samples * size), size, advance(y, c * size), apart, 1, samples, size)


@parallel(**SERIAL)
def _convolve_t(part, parts, blas, weight, y, geometry, block, sums):
    """Run a part: of a block of the batch, the sum over one part of the output channels."""
    (groups, rows, length), (splits, batch, channels, _, _, _), g = weight.shape, sums.shape, pointer(geometry)
    low, samples, first, last = _bounds(part, block, splits, batch, rows)
    each, width, alone = channels // groups, samples * g[OUTPUTS], samples == 1
    columns = np.empty(0 if alone and g[SINGLE] else length * width, y.dtype)
    gathered = np.empty(0 if alone else (last - first) * width, y.dtype)
    for group in range(groups):
        target = advance(pointer(sums), ((part % splits * batch + low) * channels + group * each) * g[INPUTS])
        right = advance(pointer(y), ((low * groups + group) * rows + first) * g[OUTPUTS])
        if len(gathered) > 0:
            _gather(right, groups * rows * g[OUTPUTS], samples, last - first, g[OUTPUTS], pointer(gathered))
            right = pointer(gathered)
        result = pointer(columns) if len(columns) > 0 else target
        left = number(advance(pointer(weight), (group * rows + first) * length))
        product(
            blas,
            length,
            width,
            last - first,
            left,
            True,
            length,
            number(right),
            False,
            width,
            False,
            number(result),
            width,
        )
        if len(columns) > 0:
            fold(result, channels * g[INPUTS], samples, each, g, target)
    keep_alive(columns)
    keep_alive(gathered)


@parallel(**SERIAL)
def _convolution_correlate(part, parts, blas, y, x, geometry, block, chunk, sums):
    """Run a part: of one part of the batch, a chunk of one group's input channels."""
    (splits, groups, rows, length), g = sums.shape, pointer(geometry)
    each, batch = x.shape[1] // groups, len(x)
    chunks = -(-each // chunk)
    which, c = part // chunks, part % chunks
    split, group = which // groups, which % groups
    start, high = span(split, splits, batch)
    first, channels = c * chunk, min(chunk, each - c * chunk)
    samples = min(block, high - start)
    width = channels * (length // each)
    columns = np.empty(0 if samples == 1 and g[SINGLE] else width * samples * g[OUTPUTS], x.dtype)
    gathered = np.empty(0 if samples == 1 else rows * samples * g[OUTPUTS], x.dtype)
    out = number(advance(pointer(sums), which * rows * length + first * (length // each)))
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
        added = low > start
        product(blas, rows, width, size, number(left), False, size, number(right), True, size, added, out, length)
    keep_alive(columns)
    keep_alive(gathered)
