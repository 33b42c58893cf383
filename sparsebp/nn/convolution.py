"""The three maps of a convolution, by which `Conv` and `ConvTranspose` compute: windows side by side, one product.

A convolution with weights w maps x to y. `convolve` is that map, `convolve_t` its transpose, from y's space to x's, and
`correlate` the gradient at w. A transposed convolution is the same three with x and y exchanged. Their large arrays are
the same at every step, so they come from `nn.memory`.
"""

from __future__ import annotations

from itertools import product
from math import prod
from types import ModuleType

from sparsebp import backend
from sparsebp.nn import memory
from sparsebp.types import Array
from sparsebp.windows import Windows


def convolve(xp: ModuleType, weight: Array, x: Array, windows: Windows, groups: int) -> Array:
    """Return y (B, out_channels, *outputs) for x (B, in_channels, *inputs).

    weight (out_channels, in_channels / groups, *kernel). Takes memory for one copy of x per tap of the kernel, as the
    other two.
    """
    outputs = windows.output_size(x.shape[2:])
    y = memory.matmul(xp, _matrix(weight, groups), _columns(xp, x, windows, groups))
    return _swapped(xp, y.reshape(weight.shape[0], x.shape[0], *outputs))


def convolve_t(
    xp: ModuleType, weight: Array, y: Array, windows: Windows, groups: int, input_size: tuple[int, ...]
) -> Array:
    """Return (B, in_channels, *input_size) for y (B, out_channels, *outputs): added up where windows overlap."""
    batch, outputs = y.shape[0], y.shape[2:]
    channels = weight.shape[1] * groups
    columns = memory.matmul(xp, _matrix(weight, groups).swapaxes(1, 2), _rows(xp, y, groups))
    columns = columns.reshape(channels, *windows.kernel, batch, *outputs)
    padded = memory.zeros(xp, (channels, batch, *_room(windows, input_size)), y.dtype)
    for tap in product(*map(range, windows.kernel)):  # overlaps are between taps, never within one
        where = (
            slice(t * d, t * d + s * (n - 1) + 1, s)
            for t, d, s, n in zip(tap, windows.dilation, windows.stride, outputs, strict=True)
        )
        padded[(slice(None), slice(None), *where)] += columns[(slice(None), *tap)]
    return _swapped(xp, padded[_inside(windows, input_size)])


def correlate(xp: ModuleType, y: Array, x: Array, windows: Windows, groups: int) -> Array:
    """Return the gradient at the weights, (out_channels, in_channels / groups, *kernel), for y the gradient at y."""
    weight = memory.matmul(xp, _rows(xp, y, groups), _columns(xp, x, windows, groups).swapaxes(1, 2))
    return weight.reshape(y.shape[1], x.shape[1] // groups, *windows.kernel)


def channel_sums(xp: ModuleType, y: Array) -> Array:
    """Return the sums of y (B, channels, …) over batch and positions: the gradient at a bias."""
    flat = _rows(xp, y, 1)[0]
    return backend.matmul(flat, xp.ones(flat.shape[1], dtype=flat.dtype))


def _matrix(weight: Array, groups: int) -> Array:
    """Return the weights as (groups, out_channels / groups, in_channels / groups * taps)."""
    return weight.reshape(groups, weight.shape[0] // groups, prod(weight.shape[1:]))


def _rows(xp: ModuleType, y: Array, groups: int) -> Array:
    """Return y as (groups, out_channels / groups, B * outputs)."""
    length = y.shape[0] * prod(y.shape[2:])
    return _swapped(xp, y).reshape(groups, y.shape[1] // groups, length)


def _swapped(xp: ModuleType, array: Array) -> Array:
    """Return a C-contiguous array whose first two axes, batch and channels or channels and batch, are exchanged."""
    swapped = array.swapaxes(0, 1)
    return swapped if swapped.flags.c_contiguous else memory.copy(xp, swapped)


def _columns(xp: ModuleType, x: Array, windows: Windows, groups: int) -> Array:
    """Return every window of x as a column: (groups, in_channels / groups * taps, B * outputs)."""
    batch, channels, *sizes = x.shape
    outputs = windows.output_size(tuple(sizes))
    padded = memory.zeros(xp, (channels, batch, *_room(windows, tuple(sizes))), x.dtype)
    padded[_inside(windows, tuple(sizes))] = xp.moveaxis(x, 1, 0)
    channel, sample, *axes = padded.strides
    taps = (step * d for step, d in zip(axes, windows.dilation, strict=True))
    moves = (step * s for step, s in zip(axes, windows.stride, strict=True))
    columns = xp.lib.stride_tricks.as_strided(
        padded, (channels, *windows.kernel, batch, *outputs), (channel, *taps, sample, *moves)
    )
    shape = (groups, channels // groups * prod(windows.kernel), batch * prod(outputs))
    return columns.reshape(shape) if prod(windows.kernel) == 1 else memory.copy(xp, columns).reshape(shape)


def _room(windows: Windows, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return axes that hold the input and its padding, a negative one too, whose windows leave out the end."""
    ends = zip(sizes, windows.padding, strict=True)
    return tuple(n + before + max(after, 0) for n, (before, after) in ends)


def _inside(windows: Windows, sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """Return where the input lies in an array whose first two axes are whole."""
    inner = (slice(before, before + n) for n, (before, _) in zip(sizes, windows.padding, strict=True))
    return (slice(None), slice(None), *inner)
