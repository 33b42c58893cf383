"""Convolutions with few windows: weights are read once, where they lie, and zeros around images are mostly left out.

A BLAS packs both of its operands at every call, and Winograd's tiles need weights that are mapped: few windows do not
pay for either. Here the samples are laid side by side, with zeros around: the windows of a row of all samples are then
one row of an image with the batch inside. Its windows are packed in panels of one vector, without the taps that lie
above or below the image. The panels of a block of channels stay in the second cache while all rows of the weights go
past, and a tile of eight rows is computed in registers. Every number is one chain of fused multiply-adds.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numba
import numpy as np

from sparsebp.core import host_pool
from sparsebp.core.check import Array
from sparsebp.kernels.host.conv.depthwise import contiguous, turn_in
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, JIT, span
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
    pointer,
    prefetch,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, split, team_for

Axes = tuple[int, ...]

_MOST_WINDOWS, _LEAST_CHANNELS = 256, 8
_GROUP, _BLOCK_BYTES = 8, 1 << 17
"""Vectors of a part, whose panels share what is read of the weights; panels of a block of channels."""
_LEAST_PARTS, _LEAST_ROWS = 8, 32
"""Parts that are wanted, and rows of one: panels are packed for several parts."""


def fits(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array) -> bool:
    """Whether `convolve` maps to out (B, …) in less time than others."""
    return len(out) > 1 and prod(weight.shape[2:]) > 1 and _few(weight, stride, before, dilation, groups, out)


def correlate_fits(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, y: Array) -> bool:
    """Whether `correlate` finds the gradient at the weights in less time than others."""
    return VECTOR_BYTES // y.itemsize in (8, 16) and _few(weight, stride, before, dilation, groups, y)


def _few(weight: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array) -> bool:
    kernel, windows = weight.shape[2:], prod(out.shape[2:])
    few = len(out) * windows <= _MOST_WINDOWS and min(weight.shape[:2]) >= _LEAST_CHANNELS
    around = prod(n + (k - 1) * d for n, k, d in zip(out.shape[2:], kernel, dilation, strict=True))
    # With zeros around, an image of few windows far apart has many more numbers than all windows have.
    close = around <= max(windows * prod(kernel), _MOST_WINDOWS)
    return few and close and groups == 1 and stride == (1, 1, 1) and min(before) >= 0


def convolve(weight: Array, x: Array, before: Axes, dilation: Axes, turned: bool, out: Array) -> bool:
    """Write the sums of every window's products; `turned`: of the weights with taps and channels exchanged.

    weight (rows, channels, *kernel); x (B, channels, …), out (B, rows, …) on three axes, or the other way round.

    Returns
    -------
    bool
        Whether all that was written is finite; if not, it may be wrong.
    """
    (batch, channels), rows, taps = x.shape[:2], out.shape[1], prod(weight.shape[2:])
    geometry = batch, x.shape[2:], weight.shape[2:], before, dilation, out.shape[2:]
    starts, kinds, counts, order, steps = _lines(*geometry)
    image, width = _side_by_side(x, *geometry[2:]), out.shape[4] * batch
    row, channel = (taps, weight[0].size) if turned else (weight[0].size, taps)
    vectors = len(starts) * -(-width // (VECTOR_BYTES // x.itemsize))
    groups = -(-vectors // _GROUP)
    splits = max(1, min(-(-_LEAST_PARTS // groups), rows // _LEAST_ROWS))
    block = max(1, _BLOCK_BYTES // (min(vectors, _GROUP) * taps * VECTOR_BYTES))
    sums = host_pool.empty(np, (rows, *out.shape[2:], batch), x.dtype)
    args = weight.reshape(-1), row, channel, image, starts, kinds, counts, order, steps
    places, parts = taps - 1 - order if turned else order, groups * splits
    work = out.size * channels * taps // 8
    _convolve(team_for(parts, work), parts, *args, places, width, vectors, splits, block, sums.reshape(rows, -1))
    _turn_samples(out, sums, (0, 0, 0), inwards=False)
    return bool(np.isfinite(sums).all())


def correlate(y: Array, x: Array, before: Axes, dilation: Axes, out: Array) -> None:
    """Write the gradient at the weights, out (rows, channels, *kernel), for y (B, rows, …), the gradient at outputs."""
    geometry = len(x), x.shape[2:], out.shape[2:], before, dilation, y.shape[2:]
    starts, *_, steps = _lines(*geometry)
    slopes = host_pool.empty(np, (y.shape[1], *y.shape[2:], len(y)), y.dtype)
    _turn_samples(y, slopes, (0, 0, 0), inwards=True)
    rows, lanes = slopes.reshape(len(slopes), -1), VECTOR_BYTES // x.itemsize
    size, length = rows.shape[1], out[0].size
    places, parts = (np.arange(size), contiguous(size, lanes)), -(-length // (lanes * _GROUP))
    args = rows, _side_by_side(x, *geometry[2:]), starts, steps, *places, y.shape[4] * len(y)
    _correlate(team_for(parts, rows.size * length // 8), parts, *args, out.reshape(len(out), -1))


def _side_by_side(x: Array, kernel: Axes, before: Axes, dilation: Axes, outputs: Axes) -> Array:
    """Return x (B, C, …) with zeros around as (C, numbers of all samples), the samples' next to each other."""
    sizes = [o + (k - 1) * d for o, k, d in zip(outputs, kernel, dilation, strict=True)]
    image = host_pool.empty(np, (x.shape[1], *sizes, len(x)), x.dtype)
    _turn_samples(x, image, before, inwards=True)
    return image.reshape(x.shape[1], -1)


def _turn_samples(x: Array, image: Array, before: Axes, inwards: bool) -> None:
    """Copy x (B, C, …) to image (C, …, B), behind `before` elements and with zeros around, or the image to x."""
    met = tuple(max(0, min(n, room - b)) for n, room, b in zip(x.shape[2:], image.shape[1:4], before, strict=True))
    around = inwards and prod(met) < prod(image.shape[1:4])
    team, parts = split(2 * image.size, vectors=False)  # far apart on one side
    args = inwards, around, x.reshape(-1), x.shape, image.reshape(-1), image.shape, before, met
    _turn(team, min(parts, len(image)), *args)


@lru_cache(maxsize=256)
def _lines(batch: int, inputs: Axes, kernel: Axes, before: Axes, dilation: Axes, outputs: Axes) -> tuple[Array, ...]:
    """Describe the rows of windows; those whose taps meet the same rows of the image are of one kind.

    Returns
    -------
    starts, kinds
        Of each row, where its first window begins in a channel of the padded image, and its kind.
    counts, order
        Of each kind, how many taps it has, and which they are.
    steps
        Of each tap, how far it lies behind a window's first number.
    """
    height, width = (o + (k - 1) * d for o, k, d in zip(outputs[1:], kernel[1:], dilation[1:], strict=True))
    apart = np.array([height * width, width, 1]) * batch
    first = np.indices((*outputs[:2], 1)).reshape(3, -1).T
    taps = np.indices(kernel).reshape(3, -1).T * np.array(dilation)
    at = (first[:, None] + taps - before)[..., :2]
    met = ((at >= 0) & (at < inputs[:2])).all(-1)
    if not met.any(0).all():  # each weight takes part in some sum, which tells if it is not finite
        met[...] = True
    of_kinds, kinds = np.unique(met, axis=0, return_inverse=True)
    order = np.argsort(~of_kinds, axis=1, kind="stable")
    return first @ apart, kinds.reshape(-1), of_kinds.sum(1), order, taps @ apart


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _convolve(
    part, parts, weight, row_apart, channel_apart, image, starts, kinds, counts, order, steps, places, width, vectors,
    splits, block, out,
):  # fmt: skip
    """Run a part: of a group of vectors, one of `splits` parts of the rows."""
    (channels, plane), (rows, size), step = image.shape, out.shape, lanes(pointer(image))
    low, high = span(part % splits, splits, rows)
    first, last = span(part // splits, parts // splits, vectors)
    longest = block * len(steps) * step
    room = np.empty((last - first) * longest + step, image.dtype)
    panels = aligned_pointer(room)
    for begin in range(0, channels, block):
        some = min(block, channels - begin)
        for vector in range(first, last):
            line, at, n = _place(vector, width, step)
            source, kind = advance(pointer(image), begin * plane + starts[line] + at), kinds[line]
            panel = advance(panels, (vector - first) * longest)
            _pack(source, plane, some, pointer(steps), pointer(order[kind]), counts[kind], n, panel)
        for row in range(low, high, 8):
            left = advance(pointer(weight), row * row_apart + begin * channel_apart)
            for vector in range(first, last):
                line, at, n = _place(vector, width, step)
                panel, kind = advance(panels, (vector - first) * longest), kinds[line]
                target = advance(pointer(out), row * size + line * width + at)
                _multiply(
                    left, row_apart, min(high - row, 8), channel_apart, some, pointer(places[kind]), counts[kind],
                    panel, begin == 0, target, size, n,
                )  # fmt: skip
    keep_alive(room)


@parallel(**JIT)
def _correlate(part, parts, slopes, image, starts, steps, places, turned, width, out):
    """Run a part of the weights' channels and taps: panels have these in lanes, and a vector for each window."""
    (rows, size), (channels, plane), (_, length), step = slopes.shape, image.shape, out.shape, lanes(pointer(image))
    first, last = span(part, parts, (length + step - 1) // step)
    longest, taps = (len(turned) + 1) * step, length // channels
    room, lines = np.empty((last - first) * longest + step, image.dtype), np.empty(step * size, image.dtype)
    spare = np.empty((step + 1) * step, image.dtype)
    panels, place = aligned_pointer(room), aligned_pointer(spare)
    for vector in range(first, last):
        n = min(length - vector * step, step)
        for lane in range(n):
            channel, tap = (vector * step + lane) // taps, (vector * step + lane) % taps
            source, target = advance(pointer(image), channel * plane + steps[tap]), advance(pointer(lines), lane * size)
            for line in range(len(starts)):
                copy(advance(target, line * width), advance(source, starts[line]), width)
        panel = advance(panels, (vector - first) * longest)
        turn_in(pointer(lines), size, n, size, pointer(turned), place, panel)
    for row in range(0, rows, 8):
        for vector in range(first, last):
            target, panel = advance(pointer(out), row * length + vector * step), (vector - first) * longest
            _multiply(
                advance(pointer(slopes), row * size), size, min(rows - row, 8), size, 1, pointer(places), size,
                advance(panels, panel), True, target, length, min(length - vector * step, step),
            )  # fmt: skip
    keep_alive(room)
    keep_alive(lines)
    keep_alive(spare)


@parallel(**JIT)
def _turn(part, parts, inwards, around, x, given, image, sizes, before, met):
    """Run a part of the channels: `met` elements of each sample lie in the image."""
    (batch, channels, planes, height, width), (_, depth, rows, columns, _) = given, sizes
    low, high = span(part, parts, channels)
    whole, room = channels * planes * height * width, depth * rows * columns * batch
    for channel in range(low, high):
        if around:
            clear(advance(pointer(image), channel * room), room)
        for d in range(met[0]):
            for h in range(met[1]):
                line = advance(pointer(x), ((channel * planes + d) * height + h) * width)
                at = (((channel * depth + before[0] + d) * rows + before[1] + h) * columns + before[2]) * batch
                turned = advance(pointer(image), at)
                if inwards:
                    for w in range(met[2]):
                        for sample in range(batch):
                            turned[w * batch + sample] = line[sample * whole + w]
                else:
                    for w in range(met[2]):
                        for sample in range(batch):
                            line[sample * whole + w] = turned[w * batch + sample]


@numba.njit(**INNER_JIT)
def _place(vector, width, step):
    """Return the row of a vector's windows, the number of the first one, and how many they are."""
    each = (width + step - 1) // step
    at = vector % each * step
    return vector // each, at, min(width - at, step)


@numba.njit(**INNER_APART)
def _pack(image, plane, channels, steps, order, taps, n, panel):
    """Write `n` windows of channels as vectors."""
    step = lanes(panel)
    for _ in range(channels):
        for tap in range(taps):
            store(panel, tap * step, load_up_to(image, steps[order[tap]], n))
        image, panel = advance(image, plane), advance(panel, taps * step)


@numba.njit(**INNER_APART)
def _multiply(weight, apart, rows, channel, channels, places, taps, panel, fresh, out, size, n):
    """Write the products of up to eight rows with a panel of `n` windows, or add them; missing rows repeat the last."""
    step, i, j, k = lanes(panel), min(1, rows - 1), min(2, rows - 1), min(3, rows - 1)
    p, q, r, s = min(4, rows - 1), min(5, rows - 1), min(6, rows - 1), min(7, rows - 1)
    w0, w1, w2, w3 = weight, advance(weight, i * apart), advance(weight, j * apart), advance(weight, k * apart)
    w4, w5 = advance(weight, p * apart), advance(weight, q * apart)
    w6, w7 = advance(weight, r * apart), advance(weight, s * apart)
    a = b = c = d = e = f = g = h = zeros(panel)
    if not fresh:
        a, b = load_up_to(out, 0, n), load_up_to(out, i * size, n)
        c, d = load_up_to(out, j * size, n), load_up_to(out, k * size, n)
        e, f = load_up_to(out, p * size, n), load_up_to(out, q * size, n)
        g, h = load_up_to(out, r * size, n), load_up_to(out, s * size, n)
    near = rows * apart if apart < channel else 0  # of rows side by side, channels lie a page or more apart
    for _ in range(channels):
        for line in range(0, near, step):
            prefetch(w0, 6 * channel + line)
        for tap in range(taps):
            x, at = load(panel, tap * step), places[tap]
            a, b = fma(broadcast(w0, at), x, a), fma(broadcast(w1, at), x, b)
            c, d = fma(broadcast(w2, at), x, c), fma(broadcast(w3, at), x, d)
            e, f = fma(broadcast(w4, at), x, e), fma(broadcast(w5, at), x, f)
            g, h = fma(broadcast(w6, at), x, g), fma(broadcast(w7, at), x, h)
        panel = advance(panel, taps * step)
        w0, w1, w2, w3 = advance(w0, channel), advance(w1, channel), advance(w2, channel), advance(w3, channel)
        w4, w5, w6, w7 = advance(w4, channel), advance(w5, channel), advance(w6, channel), advance(w7, channel)
    store_up_to(out, 0, a, n)
    store_up_to(out, i * size, b, n)
    store_up_to(out, j * size, c, n)
    store_up_to(out, k * size, d, n)
    store_up_to(out, p * size, e, n)
    store_up_to(out, q * size, f, n)
    store_up_to(out, r * size, g, n)
    store_up_to(out, s * size, h, n)
