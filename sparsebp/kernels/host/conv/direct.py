"""Convolutions of some dozen channels on the host: windows are read where they lie, in padded planes.

The planes of a few samples are copied with their padding, as `depthwise` does it: then a tap of all windows lies
equally far from each, and with a stride what the windows skip is put aside, in planes of their own. The copies stay in
the second cache. Nothing else is packed: a tile of four output channels by three vectors of windows is computed in
registers, along all channels and taps, and written at once. So every number is one chain of fused multiply-adds.

The gradient at the input is the same with the weights turned, or with a stride, for each of the planes that windows
skip, with the taps that meet it. For the gradient at the weights, a tile is of four output channels by three weights of
each, and the chain goes over the windows of a block of samples.

Zeros around the gradient at the output, and behind the rows of one, are for finite numbers: see `conv`.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numba
import numpy as np

from sparsebp.core import host_pool
from sparsebp.core.check import Array
from sparsebp.kernels.host.conv.depthwise import SLACK, Layout, collect_rows, layout_of, spread_rows
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, JIT, span
from sparsebp.kernels.host.engine.shuffles import high_in_turn, low_in_turn
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    clear,
    device,
    fma,
    keep_alive,
    lanes,
    load,
    load_up_to,
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, team_for

Axes = tuple[int, ...]

_ONES = (1, 1, 1)

_MOST_BYTES = 1 << 18
"""Of the padded planes of a block of samples: half of a second cache."""
_MOST_WEIGHTS = 640
"""Products of one number: the weights of four channels stay in the first cache."""
_MOST_STRIDE = 4
"""Along an axis: what windows skip is a plane for each of its places, and more of them are hardly read."""
_LEAST_VECTORS = 12
"""Vectors of windows of a block of samples: tiles of three waste few."""
_CHAIN = 64
"""Vectors whose products are summed before their lanes are: four rows of them fill a quarter of a first cache."""
_PARTS = 8


class _Block(NamedTuple):
    """How a block of samples lies in memory, as the compiled functions take it.

    Attributes
    ----------
    layout
        Of one plane.
    vectors
        (n, 3) of every vector of windows: where window 0's first tap lies in the padded planes, where the vector lies
        in the output, and how many windows it has.
    steps
        How far behind a window's first tap each weight's number lies, by channels and taps.
    plane
        Numbers of a padded plane.
    """

    layout: Layout
    vectors: Array
    steps: Array
    plane: int


@lru_cache(maxsize=256)
def _block(samples: int, channels: int, rows: int, windows: tuple[Axes, ...], step: int) -> _Block:
    layout = layout_of(*windows, step)
    plane, vectors = len(layout.ends) * layout.size, layout.vectors[layout.vectors[:, 2] > 0]
    apart = np.array([channels * plane, rows * prod(windows[-1]), 0])
    each = np.arange(samples)[:, None, None] * apart + vectors
    steps = (np.arange(channels)[:, None] * plane + layout.taps).reshape(-1)
    return _Block(layout, each.reshape(-1, 3), steps, plane)


def fits(weight: Array, windows: tuple[Axes, ...], groups: int) -> bool:
    """Whether a convolution with weights (rows, channels, *kernel), and `correlate` of them, are worth it."""
    return _fits(weight.shape[0], weight.shape[1], windows, groups, weight.itemsize)


@lru_cache(maxsize=256)
def transpose_fits(shape: Axes, windows: tuple[Axes, ...], groups: int, itemsize: int) -> bool:
    """Whether the transpose with weights of a shape is worth it."""
    (rows, channels), (kernel, stride, *_) = shape[:2], windows
    if stride == _ONES:
        return _fits(channels, rows, _turned(windows), groups, itemsize)
    if not _are_taken(rows, channels, windows, groups) or rows * prod(kernel) > _MOST_WEIGHTS * prod(stride):
        return False
    *_, (room, _) = _transpose(rows, channels, windows, VECTOR_BYTES // itemsize)
    return bool(rows * room * itemsize <= _MOST_BYTES)


@lru_cache(maxsize=256)
def _fits(rows: int, channels: int, windows: tuple[Axes, ...], groups: int, itemsize: int) -> bool:
    """Whether there are few weights of a number, and a cache holds the planes of `channels`."""
    kernel, stride, *_ = windows
    if not _are_taken(rows, channels, windows, groups) or prod(kernel) == prod(stride) == 1:
        return False
    return channels * prod(kernel) <= _MOST_WEIGHTS and _samples(1, channels, windows, itemsize, 0) > 0


def _are_taken(rows: int, channels: int, windows: tuple[Axes, ...], groups: int) -> bool:
    """Whether the kernels are for such windows and channels, in whatever direction."""
    _, stride, before, *_ = windows
    return groups == 1 and min(before) >= 0 and min(rows, channels) >= 2 and max(stride) <= _MOST_STRIDE


@lru_cache(maxsize=256)
def _turned(windows: tuple[Axes, ...]) -> tuple[Axes, ...]:
    """Return the windows of the convolution with turned weights that is the transpose, for a stride of 1."""
    kernel, stride, before, dilation, inputs, outputs = windows
    turned = tuple((k - 1) * d - b for k, d, b in zip(kernel, dilation, before, strict=True))
    return kernel, stride, turned, dilation, outputs, inputs


@lru_cache(maxsize=256)
def _samples(batch: int, channels: int, windows: tuple[Axes, ...], itemsize: int, least: int) -> int:
    """Return how many samples share a block, so that it has enough vectors; 0 if a cache does not hold one."""
    step, outputs = VECTOR_BYTES // itemsize, windows[-1]
    layout = layout_of(*windows, step)
    most = _MOST_BYTES // (channels * len(layout.ends) * layout.size * itemsize)
    vectors = prod(outputs[:2]) * -(-outputs[2] // step)
    return min(most, batch, max(1, -(-least // vectors)))


def convolve(weight: Array, x: Array, windows: tuple[Axes, ...], turned: bool, out: Array) -> None:
    """Write the sums of every window's products; `turned`: of weights whose two kinds of channels are exchanged."""
    (batch, channels), rows, step = x.shape[:2], out.shape[1], VECTOR_BYTES // x.itemsize
    samples = _samples(batch, channels, windows, x.itemsize, _LEAST_VECTORS)
    block, blocks = _block(samples, channels, rows, windows, step), -(-batch // samples)
    splits, tall = max(1, min(_PARTS // blocks, rows // 4)), _tall(rows)
    parts = min(blocks, _PARTS) * splits
    order = _order(rows, channels, prod(windows[0]), turned)
    layout, args = block.layout, (x.reshape(batch, channels, -1), block.vectors, block.steps, block.plane, samples)
    _convolve(
        team_for(parts, out.size * weight[0].size // 8), parts, weight.reshape(-1), *order, layout.rows, layout.phases,
        *args, splits, tall, out.reshape(batch, rows, -1),
    )  # fmt: skip


def _tall(rows: int) -> int:
    """Return how many rows a tile has, three or four: those that leave fewer of the last one idle."""
    return 3 if -(-rows // 3) * 3 < -(-rows // 4) * 4 else 4


@lru_cache(maxsize=256)
def _order(rows: int, channels: int, taps: int, turned: bool) -> tuple[int, Array]:
    """Return how far the weights of rows lie apart, and where those of one row are, in the order of `_Block.steps`."""
    if not turned:
        return channels * taps, np.arange(channels * taps)
    return taps, (np.arange(channels)[:, None] * rows * taps + np.arange(taps)[::-1]).reshape(-1)


def convolve_t(weight: Array, y: Array, windows: tuple[Axes, ...], out: Array) -> None:
    """Write the transpose of `convolve`."""
    if windows[1] == _ONES:
        convolve(weight, y, _turned(windows), True, out)
        return
    (batch, rows), channels, step = y.shape[:2], out.shape[1], VECTOR_BYTES // y.itemsize
    layout, steps, places, room = _transpose(rows, channels, windows, step)
    splits = max(1, min(_PARTS // batch, channels // 4))
    parts = min(batch, _PARTS) * splits
    sizes = layout.size - SLACK, room, prod(windows[0]), windows[-1][2]
    _convolve_t(
        team_for(parts, y.size * weight[0].size // 8), parts, weight.reshape(-1), places, steps, layout.ends,
        layout.lines, layout.rows, layout.phases, *sizes, y.reshape(batch, rows, -1), splits,
        out.reshape(batch, channels, -1),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _transpose(rows: int, channels: int, windows: tuple[Axes, ...], step: int) -> tuple[Any, ...]:
    """Return the layout of the planes that windows skip, and where, for each, by rows and taps, y and the weights lie.

    Last how far apart rows of y lie, and how many zeros are before each: as far as taps reach back.
    """
    layout, taps = layout_of(*windows, step), prod(windows[0])
    within = layout.taps[layout.order] % layout.size
    back = int(within.max())
    room = back + layout.size
    steps, places, first = [], [], 0
    for last in layout.ends:
        each = np.arange(rows)[:, None]
        steps.append((each * room + back - within[first:last]).reshape(-1))
        places.append((each * channels * taps + layout.order[first:last]).reshape(-1))
        first = last
    return layout, np.concatenate(steps), np.concatenate(places), (room, back)


def correlate(y: Array, x: Array, windows: tuple[Axes, ...], out: Array) -> bool:
    """Write the gradient at the weights, out (rows, channels, *kernel).

    Returns
    -------
    bool
        Whether all that was written is finite; if not, it may be wrong.
    """
    (batch, channels), rows, step = x.shape[:2], len(out), VECTOR_BYTES // x.itemsize
    samples = _samples(batch, channels, windows, x.itemsize, _CHAIN)
    block, blocks = _block(samples, channels, rows, windows, step), -(-batch // samples)
    splits = min(blocks, _PARTS)
    cuts = max(1, min(_PARTS // splits, -(-rows // 4)))
    sums = host_pool.empty(np, (splits, rows, out[0].size), x.dtype)
    layout, args = block.layout, (x.reshape(batch, channels, -1), block.vectors, block.steps, block.plane, samples)
    _correlate(
        team_for(splits * cuts, y.size * out[0].size // 8), splits * cuts, y.reshape(batch, rows, -1), layout.rows,
        layout.phases, *args, cuts, sums,
    )  # fmt: skip
    flat = out.reshape(rows, -1)
    if splits > 1:
        np.sum(sums, axis=0, out=flat)
    else:
        flat[...] = sums[0]
    return bool(np.isfinite(flat).all())


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_APART)
def _pad(x, channels, size, rows, phases, plane, padded):
    """Copy the planes of a sample to their places in padded ones, which have been cleared."""
    for _ in range(channels):
        spread_rows(x, size // len(rows), rows, phases, len(phases), padded)
        x, padded = advance(x, size), advance(padded, plane)


@parallel(**JIT)
def _convolve(part, parts, weight, down, places, rows, phases, x, vectors, steps, plane, samples, splits, tall, out):
    """Run a part: of blocks of samples, one of `splits` parts of the output channels."""
    (batch, channels, size), (_, filters, windows) = x.shape, out.shape
    first, last = span(part // splits, parts // splits, (batch + samples - 1) // samples)
    low, high = span(part % splits, splits, (filters + tall - 1) // tall)
    length, each = channels * plane, len(vectors) // samples
    padded = np.empty(samples * length + SLACK, x.dtype)
    clear(pointer(padded), len(padded))
    for block in range(first, last):
        some = min(samples, batch - block * samples)
        for sample in range(some):
            source = advance(pointer(x), (block * samples + sample) * channels * size)
            _pad(source, channels, size, rows, phases, plane, advance(pointer(padded), sample * length))
        source, target = pointer(padded), advance(pointer(out), block * samples * filters * windows)
        for at in range(0, some * each, 3):
            p, q, r = at, min(at + 1, some * each - 1), min(at + 2, some * each - 1)
            i, j, k = vectors[p, 2], vectors[q, 2] if q > p else 0, vectors[r, 2] if r > q else 0
            for row in range(low * tall, min(high * tall, filters), tall):
                a = advance(target, row * windows)
                _multiply(
                    advance(pointer(weight), row * down), down, min(filters - row, tall), pointer(places),
                    pointer(steps), len(steps), advance(source, vectors[p, 0]), advance(source, vectors[q, 0]),
                    advance(source, vectors[r, 0]), advance(a, vectors[p, 1]), i, advance(a, vectors[q, 1]), j,
                    advance(a, vectors[r, 1]), k, windows,
                )  # fmt: skip
    keep_alive(padded)


@numba.njit(**INNER_APART)
def _multiply(weight, down, rows, places, steps, depth, p, q, r, a, i, b, j, c, k, apart):
    """Write the products of up to four rows with three columns of vectors, with i, j and k numbers."""
    w0, w1 = weight, advance(weight, min(1, rows - 1) * down)
    w2, w3 = advance(weight, min(2, rows - 1) * down), advance(weight, 3 * down)
    a0 = b0 = c0 = a1 = b1 = c1 = a2 = b2 = c2 = a3 = b3 = c3 = zeros(p)
    for at in range(depth):
        step, place = steps[at], places[at]
        x, y, z = load(p, step), load(q, step), load(r, step)
        w = broadcast(w0, place)
        a0, b0, c0 = fma(w, x, a0), fma(w, y, b0), fma(w, z, c0)
        w = broadcast(w1, place)
        a1, b1, c1 = fma(w, x, a1), fma(w, y, b1), fma(w, z, c1)
        w = broadcast(w2, place)
        a2, b2, c2 = fma(w, x, a2), fma(w, y, b2), fma(w, z, c2)
        if rows > 3:  # LLVM makes two loops of it
            w = broadcast(w3, place)
            a3, b3, c3 = fma(w, x, a3), fma(w, y, b3), fma(w, z, c3)
    _store_row(a, i, b, j, c, k, 0, a0, b0, c0)
    if rows > 1:
        _store_row(a, i, b, j, c, k, apart, a1, b1, c1)
    if rows > 2:
        _store_row(a, i, b, j, c, k, 2 * apart, a2, b2, c2)
    if rows > 3:
        _store_row(a, i, b, j, c, k, 3 * apart, a3, b3, c3)


@numba.njit(**INNER_JIT)
def _store_row(a, i, b, j, c, k, place, x, y, z):
    """Store the first i, j and k numbers of three vectors."""
    store_up_to(a, place, x, i)
    store_up_to(b, place, y, j)
    store_up_to(c, place, z, k)


@parallel(**JIT)
def _convolve_t(
    part, parts, weight, places, steps, ends, lines, rows, phases, size, reach, taps, width, y, splits, out,
):  # fmt: skip
    """Run a part: of samples, one of `splits` parts of the input channels; a plane of each is a run of vectors."""
    (batch, filters, windows), (_, channels, inputs), (room, back) = y.shape, out.shape, reach
    first, last = span(part // splits, parts // splits, batch)
    low, high = span(part % splits, splits, (channels + 3) // 4)
    padded = np.empty(filters * room + 4 * SLACK, y.dtype)
    step, plane = lanes(pointer(y)), size + SLACK
    planes = np.empty(4 * len(ends) * plane + 4 * SLACK, y.dtype)
    clear(pointer(padded), len(padded))
    for sample in range(first, last):
        for o in range(filters):
            source = advance(pointer(y), (sample * filters + o) * windows)
            spread_rows(source, width, lines, phases, 1, advance(pointer(padded), o * room + back))
        for row in range(low * 4, min(high * 4, channels), 4):
            some, begin = min(channels - row, 4), 0
            for phase in range(len(ends)):
                depth = (pointer(ends)[phase] - (pointer(ends)[phase - 1] if phase > 0 else 0)) * filters
                target = advance(pointer(planes), phase * plane)
                for at in range(0, size, 3 * step):
                    source, to = advance(pointer(padded), at), advance(target, at)
                    _multiply(
                        advance(pointer(weight), row * taps), taps, some, advance(pointer(places), begin),
                        advance(pointer(steps), begin), depth, source, advance(source, step), advance(source, 2 * step),
                        to, step, advance(to, step), step, advance(to, 2 * step), step, len(ends) * plane,
                    )  # fmt: skip
                begin += depth
            for c in range(some):
                target = advance(pointer(out), (sample * channels + row + c) * inputs)
                source = advance(pointer(planes), c * len(ends) * plane)
                collect_rows(source, inputs // len(rows), rows, phases, len(phases), target)
    keep_alive(padded)
    keep_alive(planes)


@device
def _halved(a, b):
    """Return a vector with sums of two lanes each of `a` and of `b` in turn."""
    return low_in_turn(a, b) + high_in_turn(a, b)


@parallel(**JIT)
def _correlate(part, parts, y, rows, phases, x, vectors, steps, plane, samples, cuts, sums):
    """Run a part: of blocks of samples, one of `cuts` parts of the output channels."""
    (batch, channels, size), (_, filters, windows), step = x.shape, y.shape, lanes(pointer(x))
    splits, blocks = parts // cuts, (batch + samples - 1) // samples
    first, last = span(part // cuts, splits, blocks)
    low, high = span(part % cuts, cuts, (filters + 3) // 4)
    length, each, depth = channels * plane, len(vectors) // samples, len(steps)
    padded, slopes = np.empty(samples * length + SLACK, x.dtype), np.empty((4 * len(vectors) + 1) * step, x.dtype)
    room = np.empty(13 * step, x.dtype)
    left, place = aligned_pointer(slopes), aligned_pointer(room)
    clear(pointer(padded), len(padded))
    for block in range(first, last):
        some = min(samples, batch - block * samples)
        for sample in range(some):
            source = advance(pointer(x), (block * samples + sample) * channels * size)
            _pad(source, channels, size, rows, phases, plane, advance(pointer(padded), sample * length))
        for row in range(low * 4, min(high * 4, filters), 4):
            high_row, n = min(filters - row, 4), some * each
            for i in range(4):
                source = advance(pointer(y), (block * samples * filters + row + min(i, high_row - 1)) * windows)
                for v in range(n):
                    store(left, (v * 4 + i) * step, load_up_to(source, vectors[v, 1], vectors[v, 2]))
            for begin in range(0, n, _CHAIN):
                chain, fresh = min(n - begin, _CHAIN), block == first and begin == 0
                slope, places = advance(left, 4 * begin * step), pointer(vectors[begin])
                for column in range(0, depth, 3):
                    wide = min(depth - column, 3)
                    p, q, r = steps[column], steps[column + min(1, wide - 1)], steps[column + wide - 1]
                    _add_tile(slope, chain, pointer(padded), places, p, q, r, place)
                    target = advance(pointer(sums), ((part // cuts) * filters + row) * depth + column)
                    add_sums(place, high_row, wide, depth, 1, fresh, target)
    keep_alive(padded)
    keep_alive(slopes)
    keep_alive(room)


@numba.njit(**INNER_APART)
def _add_tile(left, n, x, vectors, p, q, r, out):
    """Write the inner products of four rows of `n` vectors and the numbers that three weights meet, as partial sums."""
    step = lanes(left)
    x0, x1, x2 = advance(x, p), advance(x, q), advance(x, r)
    a0 = b0 = c0 = a1 = b1 = c1 = a2 = b2 = c2 = a3 = b3 = c3 = zeros(left)
    for v in range(n):
        at, place = vectors[3 * v], 4 * v * step
        x, y, z = load(x0, at), load(x1, at), load(x2, at)
        g = load(left, place)
        a0, b0, c0 = fma(g, x, a0), fma(g, y, b0), fma(g, z, c0)
        g = load(left, place + step)
        a1, b1, c1 = fma(g, x, a1), fma(g, y, b1), fma(g, z, c1)
        g = load(left, place + 2 * step)
        a2, b2, c2 = fma(g, x, a2), fma(g, y, b2), fma(g, z, c2)
        g = load(left, place + 3 * step)
        a3, b3, c3 = fma(g, x, a3), fma(g, y, b3), fma(g, z, c3)
    store_sums(out, 0, a0, a1, a2, a3)
    store_sums(out, step, b0, b1, b2, b3)
    store_sums(out, 2 * step, c0, c1, c2, c3)


@device
def store_sums(out, at, a, b, c, d):
    """Store a vector that has in turn sums of lanes of each of four."""
    store(out, at, _halved(_halved(a, c), _halved(b, d)))


@numba.njit(**INNER_JIT)
def add_sums(place, rows, columns, down, across, fresh, out):
    """Write the sums of the lanes of a tile of up to four rows by three columns, or add them."""
    step = lanes(place)
    for column in range(columns):
        for row in range(rows):
            total = place[column * step + row]
            for lane in range(row + 4, step, 4):
                total += place[column * step + lane]
            at = row * down + column * across
            out[at] = total if fresh else out[at] + total
