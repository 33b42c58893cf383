"""Depthwise convolutions with a channel in every lane: for planes narrower than a vector, and for their weights.

The planes of as many channels as a vector has lanes are turned, so that the elements at one place of all of them stand
side by side. A tap is then one vector whatever the plane's width, its stride and dilation are only where things lie,
and the gradient at the weights needs no sum over lanes. Turned planes, padded with zeros, stay in the second cache.

`depthwise` decides what comes here. A matrix of vectors is turned by interleaving its first half with its second one,
as often as its length is halved until 1 is left; two of these steps at a time stay in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_APART, INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.shuffles import high_in_turn, low_in_turn
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    clear,
    device,
    fma,
    lanes,
    load,
    load_up_to,
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.team import parallel, team

Axes = tuple[int, ...]

_LEAST_LANES, _MOST_LANES = 8, 16
_MOST_BYTES = 1 << 19
"""Of turned planes: half of a second cache."""


class _Places(NamedTuple):
    """Where things lie among turned planes, in numbers: what the compiled functions take.

    Attributes
    ----------
    inputs
        Of every element of a plane; up to whole vectors, of none.
    windows
        Of every window's first element; up to a multiple of 4, of the last one's.
    taps
        How far behind that each tap lies.
    size
        Numbers of a padded plane in every lane, with room for what is none.
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


def convolve(weight: Array, x: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write the sums of every window's products: weights (channels, 1, *kernel), one output channel each."""
    places, step = _places(*windows, VECTOR_BYTES // x.itemsize), VECTOR_BYTES // x.itemsize
    batch, channels = x.shape[:2]
    groups, taps = -(-channels // step), len(places.taps)
    factors = np.zeros((groups * step, taps), x.dtype)
    factors[:channels] = weight.reshape(channels, taps)
    factors = np.ascontiguousarray(factors.reshape(groups, step, taps).swapaxes(1, 2))
    parts = min(parts_for(out.size * taps), batch * groups)
    planes = x.reshape(batch, channels, -1), out.reshape(batch, channels, -1)
    _convolve(team(parts), parts, factors, planes[0], *places, planes[1])


def correlate(y: Array, x: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write the gradient at the weights (channels, 1, *kernel)."""
    places, step = _places(*windows, VECTOR_BYTES // x.itemsize), VECTOR_BYTES // x.itemsize
    batch, channels = x.shape[:2]
    groups, taps = -(-channels // step), len(places.taps)
    parts = min(parts_for(y.size * taps), groups)
    sums = np.empty((groups, taps, step), x.dtype)
    planes = y.reshape(batch, channels, -1), x.reshape(batch, channels, -1)
    _correlate(team(parts), parts, *planes, *places, contiguous(prod(windows[-1]), step), sums)
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
    """Store a vector of a channel that is there."""
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
def _sum_taps(factors, source, taps, count, windows, n, out):
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
def _convolve(part, parts, factors, x, inputs, windows, taps, size, out):
    """Run a part of the samples' groups of channels."""
    low, high = span(part, parts, len(x) * len(factors))
    step = lanes(pointer(x))
    rows = -(-max(out.shape[2], 4) // step) * step + 4
    padded, turned = np.empty(size + step, x.dtype), np.empty((rows + 1) * step, x.dtype)
    room = np.empty((step + 1) * step, x.dtype)
    _convolve_groups(low, high, factors, x, inputs, windows, taps, size, padded, turned, room, out)


@numba.njit(**INNER_JIT)
def _convolve_groups(low, high, factors, x, inputs, windows, taps, size, padded, turned, room, out):
    groups, count, step = factors.shape
    channels, n, outputs = x.shape[1], x.shape[2], out.shape[2]
    plane, rows, place = aligned_pointer(padded), aligned_pointer(turned), aligned_pointer(room)
    clear(plane, size)
    for number in range(low, high):
        sample, first = number // groups, number % groups * step
        some = min(channels - first, step)
        source = advance(pointer(x), (sample * channels + first) * n)
        turn_in(source, n, some, n, pointer(inputs), place, plane)
        weights = advance(pointer(factors), number % groups * count * step)
        _sum_taps(weights, plane, pointer(taps), count, pointer(windows), len(windows), rows)
        _turn_out(rows, outputs, place, advance(pointer(out), (sample * channels + first) * outputs), outputs, some)


@numba.njit(**INNER_APART)
def _add_products(y, source, windows, n, taps, count, sums):
    """Add to a vector for every tap the products of `n` rows with what the tap meets; three taps share what is read."""
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
def _correlate(part, parts, y, x, inputs, windows, taps, size, rows, sums):
    """Run a part of the groups of channels."""
    low, high = span(part, parts, len(sums))
    step = lanes(pointer(x))
    padded, turned = np.empty(size + step, x.dtype), np.empty((len(rows) + 1) * step, x.dtype)
    room = np.empty((step + 1) * step, x.dtype)
    _correlate_groups(low, high, y, x, inputs, windows, taps, size, rows, padded, turned, room, sums)


@numba.njit(**INNER_JIT)
def _correlate_groups(low, high, y, x, inputs, windows, taps, size, rows, padded, turned, room, sums):
    batch, channels, n = x.shape
    outputs, count, step = y.shape[2], sums.shape[1], sums.shape[2]
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
            _add_products(slopes, plane, pointer(windows), outputs, pointer(taps), count, target)
