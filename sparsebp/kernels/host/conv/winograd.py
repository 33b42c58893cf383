"""Winograd's convolutions of 3×3 on the host: 16 multiplications for 36."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core import host_pool
from sparsebp.core.check import Array
from sparsebp.core.threads import one_blas_thread
from sparsebp.kernels.host.dense.products import blas_of, gemm
from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    clear,
    device,
    keep_alive,
    lanes,
    load,
    number,
    pointer,
    store,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, team_for

CHUNK = 16
"""Channels that one part maps together: a cache line of float32."""

# The functions below are compiled: their arguments are arrays, pointers and sizes.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _channels_last(x, plane, count, height, width, before_h, before_w, rows, columns, out):
    """Copy images of `count` channels, with zeros around, to out (rows, columns, CHUNK)."""
    clear(out, rows * columns * CHUNK)
    last_h, last_w = min(height, rows - before_h), min(width, columns - before_w)
    for h in range(last_h):
        line = advance(out, ((h + before_h) * columns + before_w) * CHUNK)
        for c in range(count):
            source = advance(x, c * plane + h * width)
            for w in range(last_w):
                line[w * CHUNK + c] = source[w]


@device
def _store_row(out, at, apart, a, b, c, d):
    """Store a row of four, mapped by Bᵀ."""
    store(out, at, a - c)
    store(out, at + apart, b + c)
    store(out, at + 2 * apart, c - b)
    store(out, at + 3 * apart, b - d)


@numba.njit(**INNER_SERIAL)
def _map_tile(tile, row, count, apart, out):
    """Write Bᵀ x B of the tile of all channels."""
    for at in range(0, count, lanes(tile)):
        second, third, fourth = at + row, at + 2 * row, at + 3 * row
        a, b, c, d = (
            load(tile, at) - load(tile, third),
            load(tile, at + CHUNK) - load(tile, third + CHUNK),
            load(tile, at + 2 * CHUNK) - load(tile, third + 2 * CHUNK),
            load(tile, at + 3 * CHUNK) - load(tile, third + 3 * CHUNK),
        )
        _store_row(out, at, apart, a, b, c, d)
        a, b, c, d = (
            load(tile, second) + load(tile, third),
            load(tile, second + CHUNK) + load(tile, third + CHUNK),
            load(tile, second + 2 * CHUNK) + load(tile, third + 2 * CHUNK),
            load(tile, second + 3 * CHUNK) + load(tile, third + 3 * CHUNK),
        )
        _store_row(out, at + 4 * apart, apart, a, b, c, d)
        a, b, c, d = (
            load(tile, third) - load(tile, second),
            load(tile, third + CHUNK) - load(tile, second + CHUNK),
            load(tile, third + 2 * CHUNK) - load(tile, second + 2 * CHUNK),
            load(tile, third + 3 * CHUNK) - load(tile, second + 3 * CHUNK),
        )
        _store_row(out, at + 8 * apart, apart, a, b, c, d)
        a, b, c, d = (
            load(tile, second) - load(tile, fourth),
            load(tile, second + CHUNK) - load(tile, fourth + CHUNK),
            load(tile, second + 2 * CHUNK) - load(tile, fourth + 2 * CHUNK),
            load(tile, second + 3 * CHUNK) - load(tile, fourth + 3 * CHUNK),
        )
        _store_row(out, at + 12 * apart, apart, a, b, c, d)


@parallel(**SERIAL)
def map_inputs(part, parts, x, before_h, before_w, high, wide, length, out):
    """Write Bᵀ x B of the tiles of a chunk of one sample's channels to 16 matrices (tiles, length)."""
    samples, channels, height, width = x.shape
    chunks = parts // samples
    sample, first = part // chunks, part % chunks * CHUNK
    count, rows, columns = min(CHUNK, channels - first), 2 * high + 2, 2 * wide + 2
    image = np.empty(rows * columns * CHUNK, x.dtype)
    source = advance(pointer(x), (sample * channels + first) * height * width)
    target = advance(pointer(out), sample * high * wide * length + first)
    _channels_last(source, height * width, count, height, width, before_h, before_w, rows, columns, pointer(image))
    for i in range(high):
        for j in range(wide):
            tile = advance(pointer(image), (2 * i * columns + 2 * j) * CHUNK)
            _map_tile(tile, columns * CHUNK, count, out.shape[1], target)
            target = advance(target, length)
    keep_alive(image)


@parallel(**SERIAL)
def map_gradients(part, parts, y, high, wide, length, out):
    """Write A y Aᵀ of the tiles of a chunk of one sample's channels to 16 matrices (tiles, length)."""
    samples, channels, height, width = y.shape
    chunks = parts // samples
    sample, first = part // chunks, part % chunks * CHUNK
    count, columns = min(CHUNK, channels - first), 2 * wide
    image = np.empty(4 * high * wide * CHUNK, y.dtype)
    source = advance(pointer(y), (sample * channels + first) * height * width)
    _channels_last(source, height * width, count, height, width, 0, 0, 2 * high, columns, pointer(image))
    target, apart = advance(pointer(out), sample * high * wide * length + first), out.shape[1]
    for i in range(high):
        for j in range(wide):
            tile = advance(pointer(image), (2 * i * columns + 2 * j) * CHUNK)
            for at in range(0, count, lanes(tile)):
                none = zeros(tile)
                a, b = load(tile, at), load(tile, at + CHUNK)
                c, d = load(tile, at + columns * CHUNK), load(tile, at + (columns + 1) * CHUNK)
                _store_four(target, at, apart, a, b)
                _store_four(target, at + 4 * apart, apart, a + c, b + d)
                _store_four(target, at + 8 * apart, apart, a - c, b - d)
                _store_four(target, at + 12 * apart, apart, none - c, none - d)
            target = advance(target, length)
    keep_alive(image)


@device
def _store_four(out, at, apart, a, b):
    """Store a row of two, mapped by A."""
    store(out, at, a)
    store(out, at + apart, a + b)
    store(out, at + 2 * apart, a - b)
    store(out, at + 3 * apart, zeros(out) - b)


@parallel(**SERIAL)
def map_weight(part, parts, weight, length, out):
    """Write G w Gᵀ of one row of the weights to 16 matrices (rows, length); zeros where it has no such row."""
    room = np.empty(9 * CHUNK, weight.dtype)
    rows, channels, _ = weight.shape
    apart, taps = out.shape[1], pointer(room)
    for first in range(0, channels, CHUNK):
        count = min(CHUNK, channels - first) if part < rows else 0
        clear(taps, 9 * CHUNK)
        source = advance(pointer(weight), (part * channels + first) * 9)
        for c in range(count):
            for t in range(9):
                taps[t * CHUNK + c] = source[c * 9 + t]
        target = advance(pointer(out), part * length + first)
        for at in range(0, min(CHUNK, length - first), lanes(taps)):
            a, b, c = load(taps, at), load(taps, at + CHUNK), load(taps, at + 2 * CHUNK)
            d, e, f = load(taps, at + 3 * CHUNK), load(taps, at + 4 * CHUNK), load(taps, at + 5 * CHUNK)
            g, h, i = load(taps, at + 6 * CHUNK), load(taps, at + 7 * CHUNK), load(taps, at + 8 * CHUNK)
            _store_taps(target, at, apart, a, b, c)
            p, q, r = (a + g), (b + h), (c + i)
            _store_taps(target, at + 4 * apart, apart, (p + d) * 0.5, (q + e) * 0.5, (r + f) * 0.5)
            _store_taps(target, at + 8 * apart, apart, (p - d) * 0.5, (q - e) * 0.5, (r - f) * 0.5)
            _store_taps(target, at + 12 * apart, apart, g, h, i)
    keep_alive(room)


@device
def _store_taps(out, at, apart, a, b, c):
    """Store a row of three, mapped by G; the halves are powers of two, and exact."""
    ends = a + c
    store(out, at, a)
    store(out, at + apart, (ends + b) * 0.5)
    store(out, at + 2 * apart, (ends - b) * 0.5)
    store(out, at + 3 * apart, c)


@parallel(**SERIAL)
def multiply(part, parts, blas, rows, channels, weight, inputs, products, tiles, turned):
    """Multiply the mapped inputs with the mapped weights at one of 16 places."""
    length, width, which = channels, rows, part
    if turned:
        length, width, i, j = rows, channels, part // 4, part % 4
        which = 4 * (3 - i if i % 3 == 0 else i) + (3 - j if j % 3 == 0 else j)
    left = number(advance(pointer(inputs), part * inputs.shape[1]))
    right = number(advance(pointer(weight), which * weight.shape[1]))
    result = number(advance(pointer(products), part * products.shape[1]))
    gemm(blas, tiles, width, length, left, False, length, right, not turned, channels, False, result, width)


@parallel(**SERIAL)
def accumulate(part, parts, blas, rows, channels, gradients, inputs, tiles, added, sums):
    """Multiply the mapped gradients with the mapped inputs at one of 16 places."""
    left = number(advance(pointer(gradients), part * gradients.shape[1]))
    right = number(advance(pointer(inputs), part * inputs.shape[1]))
    result = number(advance(pointer(sums), part * sums.shape[1]))
    gemm(blas, rows, channels, tiles, left, True, rows, right, False, channels, added, result, channels)


@parallel(**SERIAL)
def map_products(part, parts, products, high, wide, length, out, checks):
    """Write Aᵀ m A of the tiles of a chunk of one sample's channels to images."""
    samples, channels, height, width = out.shape
    chunks = parts // samples
    sample, first = part // chunks, part % chunks * CHUNK
    count = min(CHUNK, channels - first)
    image = np.empty(4 * high * wide * CHUNK, out.dtype)
    target, check = (
        advance(pointer(out), (sample * channels + first) * height * width),
        advance(pointer(checks), part * CHUNK),
    )
    columns, source, apart = (
        2 * wide,
        advance(pointer(products), sample * high * wide * length + first),
        products.shape[1],
    )
    clear(check, CHUNK)
    wrong = zeros(target)
    for i in range(high):
        for j in range(wide):
            tile = advance(pointer(image), (2 * i * columns + 2 * j) * CHUNK)
            for at in range(0, count, lanes(target)):
                a, b, c, d = _sums_of_rows(source, at, apart)
                e, f, g, h = _differences_of_rows(source, at, apart)
                left, right, lower_left, lower_right = a + b + c, b - c - d, e + f + g, f - g - h
                store(tile, at, left)
                store(tile, at + CHUNK, right)
                store(tile, at + columns * CHUNK, lower_left)
                store(tile, at + (columns + 1) * CHUNK, lower_right)
                both, other = left + right, lower_left + lower_right
                total = both + other
                wrong = wrong + (total - total)
            source = advance(source, length)
    store(check, 0, wrong)
    for h in range(height):
        line = advance(pointer(image), h * columns * CHUNK)
        for c in range(count):
            row = advance(target, (c * height + h) * width)
            for w in range(width):
                row[w] = line[w * CHUNK + c]
    keep_alive(image)


@device
def _sums_of_rows(m, at, apart):
    """Return the first row of Aᵀ m."""
    return (
        load(m, at) + load(m, at + 4 * apart) + load(m, at + 8 * apart),
        load(m, at + apart) + load(m, at + 5 * apart) + load(m, at + 9 * apart),
        load(m, at + 2 * apart) + load(m, at + 6 * apart) + load(m, at + 10 * apart),
        load(m, at + 3 * apart) + load(m, at + 7 * apart) + load(m, at + 11 * apart),
    )


@device
def _differences_of_rows(m, at, apart):
    """Return the second row of Aᵀ m."""
    return (
        load(m, at + 4 * apart) - load(m, at + 8 * apart) - load(m, at + 12 * apart),
        load(m, at + 5 * apart) - load(m, at + 9 * apart) - load(m, at + 13 * apart),
        load(m, at + 6 * apart) - load(m, at + 10 * apart) - load(m, at + 14 * apart),
        load(m, at + 7 * apart) - load(m, at + 11 * apart) - load(m, at + 15 * apart),
    )


@parallel(**SERIAL)
def collect(part, parts, length, sums, out, checks):
    """Write Gᵀ s G of one row to out (rows, channels, 9)."""
    room = np.empty(9 * CHUNK, out.dtype)
    channels, apart, taps, check = out.shape[1], sums.shape[1], pointer(room), advance(pointer(checks), part * CHUNK)
    clear(check, CHUNK)
    wrong = zeros(taps)
    for first in range(0, channels, CHUNK):
        count = min(CHUNK, channels - first)
        source = advance(pointer(sums), part * length + first)
        for at in range(0, count, lanes(taps)):
            a, e, i = _column(source, at, apart)
            b, f, j = _column(source, at + apart, apart)
            c, g, k = _column(source, at + 2 * apart, apart)
            d, h, m = _column(source, at + 3 * apart, apart)
            total = _store_three(taps, at, a, b, c, d) + _store_three(taps, at + 3 * CHUNK, e, f, g, h)
            total = total + _store_three(taps, at + 6 * CHUNK, i, j, k, m)
            wrong = wrong + (total - total)
        target = advance(pointer(out), (part * channels + first) * 9)
        for c in range(count):
            for t in range(9):
                target[c * 9 + t] = taps[t * CHUNK + c]
    store(check, 0, wrong)
    keep_alive(room)


@device
def _column(s, at, apart):
    """Return one column of Gᵀ s."""
    b, c = load(s, at + 4 * apart), load(s, at + 8 * apart)
    both = (b + c) * 0.5
    return load(s, at) + both, (b - c) * 0.5, both + load(s, at + 12 * apart)


@device
def _store_three(taps, at, a, b, c, d):
    """Store a row of four, mapped by G's transpose; return the sum of the stored values."""
    both = (b + c) * 0.5
    first, second, third = a + both, (b - c) * 0.5, both + d
    store(taps, at, first)
    store(taps, at + CHUNK, second)
    store(taps, at + 2 * CHUNK, third)
    return first + second + third


# Convolutions of 3 by 3 with stride 1 and many channels, with 16 multiplications for every 2 by 2 outputs, not 36.
#
# The minimal filtering algorithm F(2×2, 3×3): y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A for each tile of 2 by 2 outputs and the 4
# by 4 inputs that it meets, whose products, summed over the channels, are 16 matrix products. The gradient at the input
# is the same with the weights turned, which exchanges rows and columns 0 and 3 of G w Gᵀ; that at the weights is Gᵀ [Σ
# (A gy Aᵀ) ⊙ (Bᵀ x B)] G. Channels come last inside, so that the maps of tiles run in vectors for any image.
#
# An error is relative to the largest numbers of a tile, not of one window: a few roundings more than the direct sums. A
# number that is not finite, or whose sum with its neighbours is not, reaches windows that do not meet it; so every
# function here says whether all it wrote is finite. Where it is, so are the direct sums.
#
# Source: Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", 2016, §4.1.

Axes = tuple[int, ...]

_TILES = 256
"""Tiles of one matrix product that are enough for the BLAS: more only take memory."""
_PAGE, _APART = 1024, 64
"""Numbers that a matrix is rounded up to, and the gap between two matrices."""
_LEAST_GAIN = 1.5
"""How much fewer multiplications there must be, of 2.25 at most: tiles at odd ends compute more than is asked for."""
_LEAST_CHANNELS = 48
"""Of the harmonic mean of both kinds: below, windows are read where they lie in less time than tiles are mapped."""
_LEAST_TILES = 24
"""Below, mapping the weights takes longer than mapping the tiles."""


def fits(kernel: Axes, stride: Axes, dilation: Axes, groups: int, channels: tuple[int, int], outputs: tuple[int, ...],
         batch: int) -> bool:  # fmt: skip
    """Whether a convolution is one of 3 by 3 with stride 1 worth mapping tiles; outputs (depth, height, width)."""
    rows, given = channels
    if 2 * rows * given < _LEAST_CHANNELS * (rows + given) or outputs[0] != 1:
        return False
    if (kernel, stride, dilation, groups) != ((1, 3, 3), (1, 1, 1), (1, 1, 1), 1):
        return False
    (high, wide), (_, height, width) = _tiles(outputs), outputs
    gain = 9 * height * width / (16 * high * wide)
    return gain >= _LEAST_GAIN and batch * high * wide >= _LEAST_TILES


def convolve(weight: Array, x: Array, before: Axes, turned: bool, out: Array) -> bool:
    """Write the sums of every window's products to `out`; with `turned` weights, taps and channels are exchanged.

    weight (rows, channels, 1, 3, 3); x (B, channels, 1, H, W), out (B, rows, 1, …), or the other way round.

    Returns
    -------
    bool
        Whether all that was written is finite; if not, it may be wrong.
    """
    (high, wide), images, targets = _tiles(out.shape[2:]), _images(x), _images(out)
    block = min(len(x), -(-_TILES // (high * wide)))
    (rows, channels), mapped = (_whole(n, x.dtype) for n in weight.shape[:2]), _mapped_weight(weight)
    length, width = (rows, channels) if turned else (channels, rows)
    inputs, products = (_places(block * high * wide * n, x.dtype) for n in (length, width))
    fine = True
    for low in range(0, len(x), block):
        some, target = images[low : low + block], targets[low : low + block]
        map_inputs(*_parts(some, high, wide), some, before[1], before[2], high, wide, length, inputs)
        count = len(some) * high * wide
        with one_blas_thread():
            team = team_for(16, 16 * count * rows * channels)
            multiply(team, 16, blas_of(x.dtype), rows, channels, mapped, inputs, products, count, turned)
        team, parts = _parts(target, high, wide)
        checks = np.empty((parts, CHUNK), x.dtype)
        map_products(team, parts, products, high, wide, width, target, checks)
        fine = fine and not checks.any()
    return fine


def correlate(y: Array, x: Array, before: Axes, out: Array) -> bool:
    """Write the gradient at the weights, out (rows, channels, 1, 3, 3), for y (B, rows, 1, …), the gradient at outputs.

    Returns
    -------
    bool
        Whether all that was written is finite; if not, it may be wrong.
    """
    (high, wide), images, slopes = _tiles(y.shape[2:]), _images(x), _images(y)
    block = min(len(x), -(-_TILES // (high * wide)))
    rows, channels = (_whole(n, x.dtype) for n in out.shape[:2])
    inputs, gradients = (_places(block * high * wide * n, x.dtype) for n in (channels, rows))
    sums = _places(rows * channels, x.dtype)
    for low in range(0, len(x), block):
        some, other = images[low : low + block], slopes[low : low + block]
        map_inputs(*_parts(some, high, wide), some, before[1], before[2], high, wide, channels, inputs)
        map_gradients(*_parts(other, high, wide), other, high, wide, rows, gradients)
        count = len(some) * high * wide
        with one_blas_thread():
            team = team_for(16, 16 * count * rows * channels)
            accumulate(team, 16, blas_of(x.dtype), rows, channels, gradients, inputs, count, low > 0, sums)
    checks = np.empty((len(out), CHUNK), x.dtype)
    team = team_for(len(out), 16 * rows * channels)
    collect(team, len(out), channels, sums, out.reshape(*out.shape[:2], 9), checks)
    return not checks.any()


def _tiles(outputs: tuple[int, ...]) -> tuple[int, int]:
    """Return how many tiles lie on each axis of an image."""
    return -(-outputs[1] // 2), -(-outputs[2] // 2)


def _images(x: Array) -> Array:
    """Return x (B, C, 1, H, W) without the axis of length 1."""
    return x.reshape(*x.shape[:2], *x.shape[3:])


def _whole(channels: int, dtype: np.dtype) -> int:
    """Return the numbers of a row of channels: whole vectors, so maps have no tails."""
    each = VECTOR_BYTES // dtype.itemsize
    return -(-channels // each) * each


def _parts(x: Array, high: int, wide: int) -> tuple[int, int]:
    """Return the team and the number of parts that map the tiles of images (B, C, H, W): chunks of their channels."""
    parts = len(x) * -(-x.shape[1] // CHUNK)
    return team_for(parts, 16 * len(x) * x.shape[1] * high * wide), parts


def _places(size: int, dtype: np.dtype) -> Array:
    """Return scratch for 16 matrices of `size` numbers, whose first numbers share no set of the cache."""
    return host_pool.empty(np, (16, -(-size // _PAGE) * _PAGE + _APART), dtype)


def _mapped_weight(weight: Array) -> Array:
    """Return G w Gᵀ at 16 places, with rows and columns of zeros up to whole vectors."""
    rows, channels = (_whole(n, weight.dtype) for n in weight.shape[:2])
    mapped = _places(rows * channels, weight.dtype)
    map_weight(team_for(rows, 16 * rows * channels), rows, weight.reshape(*weight.shape[:2], 9), channels, mapped)
    return mapped
