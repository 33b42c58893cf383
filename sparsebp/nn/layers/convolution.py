"""The three maps of a convolution, by which `Conv` and `ConvTranspose` compute.

A convolution with weights w maps x to y. `convolve` is that map, `convolve_t` its transpose, from y's space to x's, and
`correlate` the gradient at w. A transposed convolution is the same three with x and y exchanged. Their large arrays are
the same at every step, so they come from `nn.memory`.
"""

from __future__ import annotations

from math import prod
from types import ModuleType

from sparsebp import kernels
from sparsebp.backend import memory
from sparsebp.core.types import Array
from sparsebp.patterns.windows import Windows


def convolve(xp: ModuleType, weight: Array, x: Array, windows: Windows, groups: int) -> Array:
    """Return y (B, out_channels, *outputs) for x (B, in_channels, *inputs); weight (out, in / groups, *kernel)."""
    y = memory.empty(xp, (len(x), len(weight), *windows.output_size(x.shape[2:])), x.dtype)
    kernels.get(xp).convolve(_three(xp, weight), _three(xp, x), *_options(windows), groups, _three(xp, y))
    return y


def convolve_t(
    xp: ModuleType, weight: Array, y: Array, windows: Windows, groups: int, input_size: tuple[int, ...]
) -> Array:
    """Return (B, in_channels, *input_size) for y (B, out_channels, *outputs): added up where windows overlap."""
    x = memory.empty(xp, (len(y), weight.shape[1] * groups, *input_size), y.dtype)
    kernels.get(xp).convolve_t(_three(xp, weight), _three(xp, y), *_options(windows), groups, _three(xp, x))
    return x


def correlate(xp: ModuleType, y: Array, x: Array, windows: Windows, groups: int) -> Array:
    """Return the gradient at the weights, (out_channels, in_channels / groups, *kernel), for y the gradient at y."""
    weight = memory.empty(xp, (y.shape[1], x.shape[1] // groups, *windows.kernel), x.dtype)
    kernels.get(xp).correlate(_three(xp, y), _three(xp, x), *_options(windows), groups, _three(xp, weight))
    return weight


def channel_sums(xp: ModuleType, y: Array) -> Array:
    """Return the sums of y (B, channels, …) over batch and positions: the gradient at a bias."""
    return xp.einsum("bcp->c", y.reshape(*y.shape[:2], prod(y.shape[2:])))


def _options(windows: Windows) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return stride, padding before and dilation on three axes, as the kernels take them."""
    ones, zeros = (1,) * (3 - len(windows.kernel)), (0,) * (3 - len(windows.kernel))
    return ones + windows.stride, zeros + windows.before, ones + windows.dilation


def _three(xp: ModuleType, array: Array) -> Array:
    """Return a contiguous array with three axes behind the first two: those missing are of length 1, in front."""
    return xp.ascontiguousarray(array).reshape(*array.shape[:2], *(1,) * (5 - array.ndim), *array.shape[2:])
