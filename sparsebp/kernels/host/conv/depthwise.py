"""Convolutions with one input channel a group, on the host: every tap is a multiple of the plane, moved.

A plane is first copied with its padding, so that the taps of all windows lie as far from each other as the windows do:
the loops over a plane have no conditions. With a stride s, what the windows skip is put aside: the plane is stored as s
planes (on each axis), its phases, each with every s-th element.

All loops are over whole vectors. Rows are written in ascending order, with zeros or garbage up to a whole vector behind
each, over which the next one is written; phases have `SLACK` elements behind them for the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.shuffles import evens, high_in_turn, low_in_turn, odds
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
from sparsebp.kernels.host.engine.threads import parallel, team

Axes = tuple[int, ...]


# Depthwise convolutions with a channel in every lane: for planes narrower than a vector, and for their weights.
#
# The planes of as many channels as a vector has lanes are turned, so that the elements at one place of all of them
# stand side by side. A tap is then one vector whatever the plane's width, its stride and dilation are only where things
# lie, and the gradient at the weights needs no sum over lanes. Turned planes, padded with zeros, stay in the second
# cache.
#
# `depthwise` decides what comes here. A matrix of vectors is turned by interleaving its first half with its second one,
# as often as its length is halved until 1 is left; two of these steps at a time stay in registers.

_LEAST_LANES, _MOST_LANES = 8, 16
_MOST_BYTES = 1 << 19
"""Of turned planes: half of a second cache."""


class _Places(NamedTuple):
    """Offsets in transposed planes, in numbers, as the compiled functions take them.

    Attributes
    ----------
    inputs
        Of every element of a plane; up to whole vectors, of none.
    windows
        Of every window's first element; up to a multiple of 4, of the last one's.
    taps
        How far behind that each tap lies.
    size
        Numbers of a padded plane in every lane, including padding.
    """

    inputs: Array
    windows: Array
    taps: Array
    size: int


def fits(weight: Array, windows: Sequence[Axes]) -> bool:
    """Whether depthwise weights (channels, 1, *kernel) of a dtype can be taken with these windows, and are worth it."""
    kernel, stride, before, dilation, inputs, outputs = windows
    step = VECTOR_BYTES // weight.itemsize
    if not _LEAST_LANES <= step <= _MOST_LANES or 2 * len(weight) < step or min(before) < 0:
        return False
    ends = zip(inputs, kernel, stride, before, dilation, outputs, strict=True)
    padded = prod(max(b + n, (o - 1) * s + (k - 1) * d + 1) for n, k, s, b, d, o in ends)
    return (padded + prod(outputs)) * VECTOR_BYTES <= _MOST_BYTES


def abreast_convolve(weight: Array, x: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write the sums of every window's products: weights (channels, 1, *kernel), one output channel each."""
    places, step = _places(*windows, VECTOR_BYTES // x.itemsize), VECTOR_BYTES // x.itemsize
    batch, channels = x.shape[:2]
    groups, taps = -(-channels // step), len(places.taps)
    factors = np.zeros((groups * step, taps), x.dtype)
    factors[:channels] = weight.reshape(channels, taps)
    factors = np.ascontiguousarray(factors.reshape(groups, step, taps).swapaxes(1, 2))
    parts = min(parts_for(out.size * taps), batch * groups)
    planes = x.reshape(batch, channels, -1), out.reshape(batch, channels, -1)
    _abreast_convolve(team(parts), parts, factors, planes[0], *places, planes[1])


def abreast_correlate(y: Array, x: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write the gradient at the weights (channels, 1, *kernel)."""
    places, step = _places(*windows, VECTOR_BYTES // x.itemsize), VECTOR_BYTES // x.itemsize
    batch, channels = x.shape[:2]
    groups, taps = -(-channels // step), len(places.taps)
    parts = min(parts_for(y.size * taps), groups)
    sums = np.empty((groups, taps, step), x.dtype)
    planes = y.reshape(batch, channels, -1), x.reshape(batch, channels, -1)
    _abreast_correlate(team(parts), parts, *planes, *places, contiguous(prod(windows[-1]), step), sums)
    out[...] = sums.swapaxes(1, 2).reshape(groups * step, taps)[:channels].reshape(out.shape)


@lru_cache(maxsize=256)  # small, and it takes as long as a small convolution
def _places(
    kernel: Axes, stride: Axes, before: Axes, dilation: Axes, inputs: Axes, outputs: Axes, step: int
) -> _Places:
    axes = zip(inputs, kernel, stride, before, dilation, outputs, strict=True)
    padded = tuple(max(b + n, (o - 1) * s + (k - 1) * d + 1) for n, k, s, b, d, o in axes)
    size = prod(padded)

    def at(lengths: Axes, apart: Axes, first: Axes) -> Array:
        """Return where the elements of a grid begin."""
        indices = np.indices(lengths).reshape(3, -1) * np.array(apart)[:, None] + np.array(first)[:, None]
        return np.asarray(np.ravel_multi_index(tuple(indices), padded), np.int64)

    ones, none = (1, 1, 1), (0, 0, 0)
    elements, starts = at(inputs, ones, before), at(outputs, stride, none)
    elements = np.concatenate([elements, np.full(-len(elements) % step, size)])
    starts = np.concatenate([starts, np.full(-len(starts) % 4, starts[-1])])
    return _Places(elements * step, starts * step, at(kernel, dilation, none) * step, (size + 1) * step)


@lru_cache(maxsize=256)
def contiguous(count: int, step: int) -> Array:
    """Return the places of elements one after the other, up to whole vectors."""
    return np.arange(-(-count // step) * step, dtype=np.int64) * step


# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@device
def _four(a, b, c, d):
    """Return four rows of a matrix that is turned by two steps, from those a quarter of its length apart."""
    e, f, g, h = low_in_turn(a, c), high_in_turn(a, c), low_in_turn(b, d), high_in_turn(b, d)
    return low_in_turn(e, g), high_in_turn(e, g), low_in_turn(f, h), high_in_turn(f, h)


@numba.njit(**INNER_APART)
def turn_in(planes, apart, channels, n, places, room, out):
    """Write the numbers of planes, `apart` from each other, to their places: a channel a lane; the last repeats."""
    step = lanes(planes)
    quarter, last = step // 4, channels - 1
    for first in range(0, n, step):
        left, source = n - first, advance(planes, first)
        for i in range(quarter):
            a, b = (
                load_up_to(source, min(i, last) * apart, left),
                load_up_to(source, min(i + quarter, last) * apart, left),
            )
            c = load_up_to(source, min(i + 2 * quarter, last) * apart, left)
            d = load_up_to(source, min(i + 3 * quarter, last) * apart, left)
            a, b, c, d = _four(a, b, c, d)
            store(room, 4 * i * step, a)
            store(room, (4 * i + 1) * step, b)
            store(room, (4 * i + 2) * step, c)
            store(room, (4 * i + 3) * step, d)
        if step == 16:
            for i in range(4):
                a, b = load(room, i * step), load(room, (i + 4) * step)
                c, d = load(room, (i + 8) * step), load(room, (i + 12) * step)
                a, b, c, d = _four(a, b, c, d)
                store(out, places[first + 4 * i], a)
                store(out, places[first + 4 * i + 1], b)
                store(out, places[first + 4 * i + 2], c)
                store(out, places[first + 4 * i + 3], d)
        else:
            for i in range(4):
                a, b = load(room, i * step), load(room, (i + 4) * step)
                store(out, places[first + 2 * i], low_in_turn(a, b))
                store(out, places[first + 2 * i + 1], high_in_turn(a, b))


@device
def _store_plane(planes, channel, channels, apart, value, left):
    """Store a vector of an existing channel."""
    if channel < channels:
        store_up_to(planes, channel * apart, value, left)


@numba.njit(**INNER_APART)
def _turn_out(rows, n, room, planes, apart, channels):
    """Write `n` rows, a channel a lane, to planes: the inverse of `turn_in`."""
    step = lanes(planes)
    quarter = step // 4
    for first in range(0, n, step):
        left, source, target = n - first, advance(rows, first * step), advance(planes, first)
        for i in range(quarter):
            a, b = load(source, i * step), load(source, (i + quarter) * step)
            c, d = load(source, (i + 2 * quarter) * step), load(source, (i + 3 * quarter) * step)
            a, b, c, d = _four(a, b, c, d)
            store(room, 4 * i * step, a)
            store(room, (4 * i + 1) * step, b)
            store(room, (4 * i + 2) * step, c)
            store(room, (4 * i + 3) * step, d)
        if step == 16:
            for i in range(4):
                a, b = load(room, i * step), load(room, (i + 4) * step)
                c, d = load(room, (i + 8) * step), load(room, (i + 12) * step)
                a, b, c, d = _four(a, b, c, d)
                _store_plane(target, 4 * i, channels, apart, a, left)
                _store_plane(target, 4 * i + 1, channels, apart, b, left)
                _store_plane(target, 4 * i + 2, channels, apart, c, left)
                _store_plane(target, 4 * i + 3, channels, apart, d, left)
        else:
            for i in range(4):
                a, b = load(room, i * step), load(room, (i + 4) * step)
                _store_plane(target, 2 * i, channels, apart, low_in_turn(a, b), left)
                _store_plane(target, 2 * i + 1, channels, apart, high_in_turn(a, b), left)


@numba.njit(**INNER_APART)
def _abreast_sum_taps(factors, source, taps, count, windows, n, out):
    """Write the sums of the taps' products for `n` windows, four at a time, to rows one after the other."""
    step = lanes(source)
    for i in range(0, n, 4):
        w, x = advance(source, windows[i]), advance(source, windows[i + 1])
        y, z = advance(source, windows[i + 2]), advance(source, windows[i + 3])
        a = b = c = d = zeros(source)
        for tap in range(count):
            factor, at = load(factors, tap * step), taps[tap]
            a, b = fma(factor, load(w, at), a), fma(factor, load(x, at), b)
            c, d = fma(factor, load(y, at), c), fma(factor, load(z, at), d)
        target = advance(out, i * step)
        store(target, 0, a)
        store(target, step, b)
        store(target, 2 * step, c)
        store(target, 3 * step, d)


@parallel(**JIT)
def _abreast_convolve(part, parts, factors, x, inputs, windows, taps, size, out):
    """Run a part of the samples' groups of channels."""
    groups, count, step = factors.shape
    low, high = span(part, parts, len(x) * groups)
    space = -(-max(out.shape[2], 4) // step) * step + 4
    padded, turned = np.empty(size + step, x.dtype), np.empty((space + 1) * step, x.dtype)
    room = np.empty((step + 1) * step, x.dtype)
    channels, n, outputs = x.shape[1], x.shape[2], out.shape[2]
    plane, rows, place = aligned_pointer(padded), aligned_pointer(turned), aligned_pointer(room)
    clear(plane, size)
    for number in range(low, high):
        sample, first = number // groups, number % groups * step
        some = min(channels - first, step)
        source = advance(pointer(x), (sample * channels + first) * n)
        turn_in(source, n, some, n, pointer(inputs), place, plane)
        weights = advance(pointer(factors), number % groups * count * step)
        _abreast_sum_taps(weights, plane, pointer(taps), count, pointer(windows), len(windows), rows)
        _turn_out(rows, outputs, place, advance(pointer(out), (sample * channels + first) * outputs), outputs, some)
    keep_alive(padded)
    keep_alive(turned)
    keep_alive(room)


@numba.njit(**INNER_APART)
def _abreast_add_products(y, source, windows, n, taps, count, sums):
    """Add to a vector for every tap the products of `n` rows with the tap's inputs; three taps share each load."""
    step, whole = lanes(y), count // 3 * 3
    for tap in range(0, whole, 3):
        p, q, r = advance(source, taps[tap]), advance(source, taps[tap + 1]), advance(source, taps[tap + 2])
        a = b = c = d = e = f = zeros(y)
        for i in range(0, n - 1, 2):
            left, right, at, to = load(y, i * step), load(y, (i + 1) * step), windows[i], windows[i + 1]
            a, d = fma(left, load(p, at), a), fma(right, load(p, to), d)
            b, e = fma(left, load(q, at), b), fma(right, load(q, to), e)
            c, f = fma(left, load(r, at), c), fma(right, load(r, to), f)
        if n % 2 == 1:
            left, at = load(y, (n - 1) * step), windows[n - 1]
            a, b, c = fma(left, load(p, at), a), fma(left, load(q, at), b), fma(left, load(r, at), c)
        store(sums, tap * step, load(sums, tap * step) + (a + d))
        store(sums, (tap + 1) * step, load(sums, (tap + 1) * step) + (b + e))
        store(sums, (tap + 2) * step, load(sums, (tap + 2) * step) + (c + f))
    for tap in range(whole, count):
        p, a = advance(source, taps[tap]), zeros(y)
        for i in range(n):
            a = fma(load(y, i * step), load(p, windows[i]), a)
        store(sums, tap * step, load(sums, tap * step) + a)


@parallel(**JIT)
def _abreast_correlate(part, parts, y, x, inputs, windows, taps, size, rows, sums):
    """Run a part of the groups of channels."""
    low, high = span(part, parts, len(sums))
    batch, channels, n = x.shape
    outputs, count, step = y.shape[2], sums.shape[1], sums.shape[2]
    padded, turned = np.empty(size + step, x.dtype), np.empty((len(rows) + 1) * step, x.dtype)
    room = np.empty((step + 1) * step, x.dtype)
    plane, slopes, place = aligned_pointer(padded), aligned_pointer(turned), aligned_pointer(room)
    clear(plane, size)
    for group in range(low, high):
        first, target = group * step, advance(pointer(sums), group * count * step)
        some = min(channels - first, step)
        clear(target, count * step)
        for sample in range(batch):
            at = sample * channels + first
            turn_in(advance(pointer(x), at * n), n, some, n, pointer(inputs), place, plane)
            turn_in(advance(pointer(y), at * outputs), outputs, some, outputs, pointer(rows), place, slopes)
            _abreast_add_products(slopes, plane, pointer(windows), outputs, pointer(taps), count, target)
    keep_alive(padded)
    keep_alive(turned)
    keep_alive(room)


SLACK = 64
"""Numbers: four vectors of the widest kind, the block that all loops over a run go by."""


class Layout(NamedTuple):
    """Offsets in the planes of a padded plane, in the order in which the compiled functions take them.

    Attributes
    ----------
    rows
        Beginning of every row of the input (or output), at its first element.
    phases
        Of the first `stride` elements of a row, how far behind its beginning they lie.
    lines
        Beginning of every row of windows in a run over them.
    vectors
        (n, 3), n a multiple of 4: of every vector of windows, where window 0's element lies in the padded plane, where
        the vector lies in the output, and how many windows of its row it has; 0 of those that only fill up.
    taps
        Where each tap of window 0 lies.
    order, ends
        The taps by the phase that they lie in, and how many of them lie in each phase or one before it.
    size, run
        Elements of a phase, and of a run over all windows.
    """

    rows: Array
    phases: Array
    lines: Array
    vectors: Array
    taps: Array
    order: Array
    ends: Array
    size: int
    run: int


def convolve(weight: Array, x: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write `Kernels.convolve` for weights (out_channels, 1, *kernel)."""
    narrow = windows[-1][2] * x.itemsize < VECTOR_BYTES
    if narrow and x.size > 0 and len(weight) == x.shape[1] and fits(weight, windows):
        abreast_convolve(weight, x, windows, out)
        return
    layout, planes = layout_of(*windows, VECTOR_BYTES // x.itemsize), x.shape[0] * x.shape[1]
    parts, factors = _parts(out, layout, planes), weight.reshape(len(weight), -1)
    args = layout.rows, layout.phases, layout.vectors, layout.taps, len(layout.ends) * layout.size
    _convolve(team(parts), parts, factors, x.reshape(planes, -1), *args, out.reshape(out.shape[0] * out.shape[1], -1))


def convolve_t(weight: Array, y: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write `Kernels.convolve_t` for weights (out_channels, 1, *kernel)."""
    kernel, stride, before, dilation, inputs, outputs = windows
    turned = tuple((k - 1) * d - b for k, d, b in zip(kernel, dilation, before, strict=True))
    if stride == (1, 1, 1) and len(weight) == out.shape[1] and min(turned) >= 0:
        flipped = np.ascontiguousarray(weight[..., ::-1, ::-1, ::-1])
        convolve(flipped, y, (kernel, stride, turned, dilation, outputs, inputs), out)
        return
    layout, planes = layout_of(*windows, VECTOR_BYTES // y.itemsize), out.shape[0] * out.shape[1]
    parts, factors = _parts(y, layout, planes), np.take(weight.reshape(len(weight), -1), layout.order, axis=1)
    within = layout.taps[layout.order] % layout.size
    args = layout.rows, layout.phases, layout.lines, within, layout.ends, layout.size, layout.run
    _convolve_t(team(parts), parts, factors, y, *args, out.reshape(planes, -1))


def correlate(y: Array, x: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write `Kernels.correlate` for weights (out_channels, 1, *kernel)."""
    if x.size > 0 and len(out) == x.shape[1] and fits(out, windows):
        abreast_correlate(y, x, windows, out)
        return
    layout, (batch, channels) = layout_of(*windows, VECTOR_BYTES // x.itemsize), x.shape[:2]
    parts, gradients = _parts(y, layout, len(out)), y.reshape(batch, len(out), -1)
    args = layout.rows, layout.phases, layout.vectors, layout.taps, len(layout.ends) * layout.size
    _correlate(team(parts), parts, gradients, x.reshape(batch, channels, -1), *args, out.reshape(len(out), -1))


@lru_cache(maxsize=256)  # small, and it takes as long as a small convolution
def layout_of(
    kernel: Axes, stride: Axes, before: Axes, dilation: Axes, inputs: Axes, outputs: Axes, lanes: int
) -> Layout:
    """Return where the elements, windows and taps of a plane lie."""
    axes = zip(inputs, kernel, stride, before, dilation, outputs, strict=True)
    rooms = tuple(max(-(-(b + n) // s), o + (k - 1) * d // s) for n, k, s, b, d, o in axes)
    size, steps = prod(rooms) + SLACK, np.array(stride)[:, None]

    def at(places: Array) -> Array:
        """Return where elements (3, n) of the padded plane lie in its planes."""
        which = np.ravel_multi_index(tuple(places % steps), stride)
        inner = np.ravel_multi_index(tuple(places // steps), rooms)
        return np.asarray(which * size + inner)

    rows = np.indices((*inputs[:2], 1)).reshape(3, -1) + np.array(before)[:, None]
    first = np.array(before)[:, None] + np.array([[0], [0], [1]]) * np.arange(min(stride[2], inputs[2]))
    lines = np.asarray(np.ravel_multi_index(tuple(np.indices((*outputs[:2], 1)).reshape(3, -1)), rooms))
    taps, phases = at(np.indices(kernel).reshape(3, -1) * np.array(dilation)[:, None]), at(first)
    which = taps // size
    ends = np.searchsorted(np.sort(which), np.arange(prod(stride)), side="right")
    starts, width = np.arange(0, outputs[2], lanes), outputs[2]
    places, targets = lines[:, None] + starts, np.arange(len(lines))[:, None] * width + starts
    counts = np.broadcast_to(np.minimum(width - starts, lanes), places.shape)
    vectors = np.stack([places, targets, counts], axis=-1).reshape(-1, 3)
    filling = np.tile(vectors[-1] * (1, 1, 0), (-len(vectors) % 4, 1))
    return Layout(
        at(rows), phases - phases[0], lines, np.concatenate([vectors, filling]), taps,
        np.argsort(which, kind="stable"), ends, size, int(lines[-1]) + width,
    )  # fmt: skip


def _parts(y: Array, layout: Layout, most: int) -> int:
    return min(parts_for(y.size * len(layout.taps)), most)


# The functions below are compiled: their arguments are arrays, a layout and bounds.


@numba.njit(**INNER_JIT)
def _cleared(numbers):
    """Write zeros to an array: `np.zeros` would be compiled anew for each size's type."""
    clear(pointer(numbers), len(numbers))


@numba.njit(**INNER_APART)
def spread_rows(plane, width, rows, phases, stride, padded):
    """Copy the rows of a plane to their places, with zeros behind; all other places have been cleared, and stay so."""
    first, step = pointer(rows), lanes(plane)
    for row in range(len(rows)):
        source, target = advance(plane, row * width), advance(padded, first[row])
        if stride == 1:
            for w in range(0, width, step):
                store(target, w, load_up_to(source, w, width - w))
        elif stride == 2:
            other = advance(target, pointer(phases)[1])
            for w in range(0, width, 2 * step):
                a, b = load_up_to(source, w, width - w), load_up_to(source, w + step, width - w - step)
                store(target, w // 2, evens(a, b))
                store(other, w // 2, odds(a, b))
        else:
            for phase in range(stride):
                at = pointer(phases)[phase]
                for w in range((width - phase + stride - 1) // stride):
                    target[at + w] = source[phase + w * stride]


@numba.njit(**INNER_APART)
def collect_rows(padded, width, rows, phases, stride, plane):
    """Copy the rows of a plane from their places: the inverse of `spread_rows`."""
    first, step, left = pointer(rows), lanes(plane), len(rows) * width
    for row in range(len(rows)):
        source = advance(padded, first[row])
        if stride == 1:
            for w in range(0, width, step):
                store_up_to(plane, w, load(source, w), left - w)
        elif stride == 2:
            other = advance(source, pointer(phases)[1])
            for w in range(0, width, 2 * step):
                a, b = load(source, w // 2), load(other, w // 2)
                store_up_to(plane, w, low_in_turn(a, b), left - w)
                store_up_to(plane, w + step, high_in_turn(a, b), left - w - step)
        else:
            for phase in range(stride):
                at = pointer(phases)[phase]
                for w in range((width - phase + stride - 1) // stride):
                    plane[phase + w * stride] = source[at + w]
        plane, left = advance(plane, width), left - width


@numba.njit(**INNER_JIT)
def _add_taps(factors, source, taps, sign, low, high, fresh, n, out):
    """Write to `n` numbers, and up to a block behind, the sum of the multiples of `source` that the taps meet.

    They are the taps from `low` to `high`, `sign` times as far away; unless `fresh`, the sum is added.
    """
    step = lanes(source)
    for i in range(0, n, 4 * step):
        here, target = advance(source, i), advance(out, i)
        if fresh:
            a = b = c = d = zeros(source)
        else:
            a, b, c, d = load(target, 0), load(target, step), load(target, 2 * step), load(target, 3 * step)
        for tap in range(low, high):
            factor, met = broadcast(factors, tap), advance(here, sign * taps[tap])
            a, b = fma(factor, load(met, 0), a), fma(factor, load(met, step), b)
            c, d = fma(factor, load(met, 2 * step), c), fma(factor, load(met, 3 * step), d)
        store(target, 0, a)
        store(target, step, b)
        store(target, 2 * step, c)
        store(target, 3 * step, d)


@parallel(**JIT)
def _convolve(part, parts, weight, x, rows, phases, vectors, taps, length, out):
    """Run a part of the planes."""
    planes, size = x.shape
    low, high = span(part, parts, planes)
    padded = np.empty(length + SLACK, x.dtype)
    _cleared(padded)
    each, out_size, count = len(out) // planes, out.shape[1], len(vectors)
    for plane in range(low, high):
        source = advance(pointer(x), plane * size)
        spread_rows(source, size // len(rows), rows, phases, len(phases), pointer(padded))
        for o in range(plane * each, (plane + 1) * each):
            factors, target = advance(pointer(weight), o % len(weight) * len(taps)), advance(pointer(out), o * out_size)
            _sum_taps(factors, pointer(padded), pointer(taps), len(taps), pointer(vectors), count, target, out_size)
    keep_alive(padded)


@numba.njit(**INNER_JIT)
def _sum_taps(factors, source, taps, count, vectors, n, out, size):
    """Write to a plane the sums of the multiples of `source` that the taps meet, four vectors at a time."""
    for i in range(0, 3 * n, 12):
        w, x = advance(source, vectors[i]), advance(source, vectors[i + 3])
        y, z = advance(source, vectors[i + 6]), advance(source, vectors[i + 9])
        a = b = c = d = zeros(source)
        for tap in range(count):
            factor, at = broadcast(factors, tap), taps[tap]
            a, b = fma(factor, load(w, at), a), fma(factor, load(x, at), b)
            c, d = fma(factor, load(y, at), c), fma(factor, load(z, at), d)
        store_up_to(out, vectors[i + 1], a, size - vectors[i + 1])
        store_up_to(out, vectors[i + 4], b, size - vectors[i + 4])
        store_up_to(out, vectors[i + 7], c, size - vectors[i + 7])
        store_up_to(out, vectors[i + 10], d, size - vectors[i + 10])


@parallel(**JIT)
def _convolve_t(part, parts, weight, y, rows, phases, lines, taps, ends, size, longest, out):
    """Run a part of the planes: an element of a phase is the sum over its taps' inputs, backwards, in a run."""
    planes, length = out.shape
    low, high = span(part, parts, planes)
    run, padded = np.empty(longest + 2 * (size + SLACK), y.dtype), np.empty(len(ends) * size + SLACK, y.dtype)
    _cleared(run)  # before, behind and between the rows it stays zero
    each, y_size = len(y) * len(weight) // planes, y.shape[2] * y.shape[3] * y.shape[4]
    inner = advance(pointer(run), size)
    for plane in range(low, high):
        for o in range(plane * each, (plane + 1) * each):
            spread_rows(advance(pointer(y), o * y_size), y.shape[4], lines, phases, 1, inner)
            factors, first = advance(pointer(weight), o % len(weight) * len(taps)), 0
            for phase in range(len(ends)):
                target, last = advance(pointer(padded), phase * size), pointer(ends)[phase]
                _add_taps(factors, inner, pointer(taps), -1, first, last, o == plane * each, size - SLACK, target)
                first = last
        target = advance(pointer(out), plane * length)
        collect_rows(pointer(padded), length // len(rows), rows, phases, len(phases), target)
    keep_alive(run)
    keep_alive(padded)


@numba.njit(**INNER_JIT)
def _add_products(y, padded, vectors, n, taps, count, sums):
    """Add to a vector for every tap the inner product, lane by lane, of a plane and the tap's inputs.

    Three taps at a time share each load.
    """
    step, whole = lanes(y), count // 3 * 3
    for tap in range(0, whole, 3):
        p, q, r = advance(padded, taps[tap]), advance(padded, taps[tap + 1]), advance(padded, taps[tap + 2])
        a = b = c = d = e = f = zeros(y)
        for i in range(0, 3 * n, 6):
            at, to = vectors[i], vectors[i + 3]
            left, right = load_up_to(y, vectors[i + 1], vectors[i + 2]), load_up_to(y, vectors[i + 4], vectors[i + 5])
            a, d = fma(left, load(p, at), a), fma(right, load(p, to), d)
            b, e = fma(left, load(q, at), b), fma(right, load(q, to), e)
            c, f = fma(left, load(r, at), c), fma(right, load(r, to), f)
        store(sums, tap * step, load(sums, tap * step) + (a + d))
        store(sums, (tap + 1) * step, load(sums, (tap + 1) * step) + (b + e))
        store(sums, (tap + 2) * step, load(sums, (tap + 2) * step) + (c + f))
    for tap in range(whole, count):
        p, a = advance(padded, taps[tap]), zeros(y)
        for i in range(0, 3 * n, 3):
            a = fma(load_up_to(y, vectors[i + 1], vectors[i + 2]), load(p, vectors[i]), a)
        store(sums, tap * step, load(sums, tap * step) + a)


@parallel(**JIT)
def _correlate(part, parts, y, x, rows, phases, vectors, taps, length, out):
    """Run a part of the output channels; those of one input channel share its planes."""
    batch, channels, size = x.shape
    low, high = span(part, parts, len(out))
    each, step = len(out) // channels, lanes(pointer(x))
    room = len(taps) * step
    padded, sums = np.empty(length + SLACK, x.dtype), np.empty(each * room, x.dtype)
    _cleared(padded)
    for c in range(low // each, (high + each - 1) // each):
        first, last = max(low - c * each, 0), min(high - c * each, each)
        _cleared(sums)
        for b in range(batch):
            plane = advance(pointer(x), (b * channels + c) * size)
            spread_rows(plane, size // len(rows), rows, phases, len(phases), pointer(padded))
            for o in range(first, last):
                source = advance(pointer(y), (b * len(out) + c * each + o) * y.shape[2])
                target = advance(pointer(sums), o * room)
                _add_products(source, pointer(padded), pointer(vectors), len(vectors), pointer(taps), len(taps), target)
        target = advance(pointer(out), c * each * len(taps))
        for i in range(first * len(taps), last * len(taps)):
            total = sums[i * step]
            for lane in range(1, step):
                total += sums[i * step + lane]
            if not np.isfinite(total):  # zeros after a row may have met infinity or NaN
                total = _single_tap(
                    y, x, rows, phases, vectors, taps[i % len(taps)], c, c * each + i // len(taps), padded
                )
            target[i] = total
    keep_alive(padded)
    keep_alive(sums)


@numba.njit(**INNER_APART)
def _single_tap(y, x, rows, phases, vectors, tap, c, o, padded):
    """Return the inner product of an output channel and a tap's inputs, over windows only."""
    batch, channels, size = x.shape
    total = x.dtype.type(0)
    for b in range(batch):
        plane = advance(pointer(x), (b * channels + c) * size)
        spread_rows(plane, size // len(rows), rows, phases, len(phases), pointer(padded))
        for i in range(len(vectors)):
            for lane in range(vectors[i, 2]):
                total += y[b, o, vectors[i, 1] + lane] * padded[vectors[i, 0] + tap + lane]
    return total
