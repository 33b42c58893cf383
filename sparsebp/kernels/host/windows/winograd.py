"""Convolutions of 3 by 3 with stride 1 and many channels, with 16 multiplications for every 2 by 2 outputs, not 36.

The minimal filtering algorithm F(2×2, 3×3): y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A for each tile of 2 by 2 outputs and the 4 by
4 inputs that it meets, whose products, summed over the channels, are 16 matrix products. The gradient at the input is
the same with the weights turned, which exchanges rows and columns 0 and 3 of G w Gᵀ; that at the weights is
Gᵀ [Σ (A gy Aᵀ) ⊙ (Bᵀ x B)] G. Channels come last inside, so that the maps of tiles run in vectors for any image.

An error is relative to the largest numbers of a tile, not of one window: a few roundings more than the direct sums. A
number that is not finite, or whose sum with its neighbours is not, reaches windows that do not meet it; so every
function here says whether all it wrote is finite. Where it is, so are the direct sums.

Source: Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", 2016, §4.1.
"""

from __future__ import annotations

import numpy as np

from sparsebp.backend import memory
from sparsebp.core.threads import one_blas_thread
from sparsebp.core.types import Array
from sparsebp.kernels.host.dense.blas import blas_of
from sparsebp.kernels.host.engine.simd import VECTOR_BYTES
from sparsebp.kernels.host.engine.team import team_for
from sparsebp.kernels.host.windows import tiles

Axes = tuple[int, ...]

_TILES = 256
"""Tiles of one matrix product that are enough for the BLAS: more only take memory."""
_PAGE, _APART = 1024, 64
"""Numbers that a matrix is rounded up to, and what is put between two of them."""
_LEAST_GAIN = 1.5
"""How much fewer multiplications there must be, of 2.25 at most: tiles at odd ends compute more than is asked for."""
_LEAST_CHANNELS = 32
_LEAST_TILES = 24
"""Below, to map the weights takes longer than what they are multiplied with."""


def fits(kernel: Axes, stride: Axes, dilation: Axes, groups: int, channels: tuple[int, int], outputs: tuple[int, ...],
         batch: int) -> bool:  # fmt: skip
    """Whether a convolution is one of 3 by 3 with stride 1 worth mapping tiles; outputs (depth, height, width)."""
    if (kernel, stride, dilation, groups) != ((1, 3, 3), (1, 1, 1), (1, 1, 1), 1) or outputs[0] != 1:
        return False
    (high, wide), (_, height, width) = _tiles(outputs), outputs
    gain = 9 * height * width / (16 * high * wide)
    return gain >= _LEAST_GAIN and min(channels) >= _LEAST_CHANNELS and batch * high * wide >= _LEAST_TILES


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
        tiles.map_inputs(*_parts(some, high, wide), some, before[1], before[2], high, wide, length, inputs)
        count = len(some) * high * wide
        with one_blas_thread():
            team = team_for(16, 16 * count * rows * channels)
            tiles.multiply(team, 16, blas_of(x.dtype), rows, channels, mapped, inputs, products, count, turned)
        team, parts = _parts(target, high, wide)
        checks = np.empty((parts, tiles.CHUNK), x.dtype)
        tiles.map_products(team, parts, products, high, wide, width, target, checks)
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
        tiles.map_inputs(*_parts(some, high, wide), some, before[1], before[2], high, wide, channels, inputs)
        tiles.map_gradients(*_parts(other, high, wide), other, high, wide, rows, gradients)
        count = len(some) * high * wide
        with one_blas_thread():
            team = team_for(16, 16 * count * rows * channels)
            tiles.accumulate(team, 16, blas_of(x.dtype), rows, channels, gradients, inputs, count, low > 0, sums)
    checks = np.empty((len(out), tiles.CHUNK), x.dtype)
    team = team_for(len(out), 16 * rows * channels)
    tiles.collect(team, len(out), channels, sums, out.reshape(*out.shape[:2], 9), checks)
    return not checks.any()


def _tiles(outputs: tuple[int, ...]) -> tuple[int, int]:
    """Return how many tiles lie on each axis of an image."""
    return -(-outputs[1] // 2), -(-outputs[2] // 2)


def _images(x: Array) -> Array:
    """Return x (B, C, 1, H, W) without the axis of length 1."""
    return x.reshape(*x.shape[:2], *x.shape[3:])


def _whole(channels: int, dtype: np.dtype) -> int:
    """Return the numbers of a row of so many channels: whole vectors, so that no map has an end of its own."""
    each = VECTOR_BYTES // dtype.itemsize
    return -(-channels // each) * each


def _parts(x: Array, high: int, wide: int) -> tuple[int, int]:
    """Return the team and the number of parts that map the tiles of images (B, C, H, W): chunks of their channels."""
    parts = len(x) * -(-x.shape[1] // tiles.CHUNK)
    return team_for(parts, 16 * len(x) * x.shape[1] * high * wide), parts


def _places(size: int, dtype: np.dtype) -> Array:
    """Return room for 16 matrices of `size` numbers, whose first numbers share no set of the cache."""
    return memory.empty(np, (16, -(-size // _PAGE) * _PAGE + _APART), dtype)


def _mapped_weight(weight: Array) -> Array:
    """Return G w Gᵀ at 16 places, with rows and columns of zeros up to whole vectors."""
    rows, channels = (_whole(n, weight.dtype) for n in weight.shape[:2])
    mapped = _places(rows * channels, weight.dtype)
    tiles.map_weight(team_for(rows, 16 * rows * channels), rows, weight.reshape(*weight.shape[:2], 9), channels, mapped)
    return mapped
