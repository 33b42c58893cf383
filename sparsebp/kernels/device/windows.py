"""Launchers of the kernels over sliding windows (``cuda/windows.cu``): a thread an element that is written.

A convolution is the product of its weights with its windows, laid side by side by a kernel: the library's products.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.kernels.device.base import BLOCK, Launcher, ceil_div, check_int32, real_define, winner_define

Axes = tuple[int, ...]


class WindowKernels(Launcher):
    """Device side of convolutions and max pooling in `sparsebp.kernels.api.Kernels`, which states the shapes."""

    def convolve(
        self, weight: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """All windows as columns, and one product a group with the weights."""
        columns = self._unfolded(x, weight.shape[2:], out.shape[2:], groups, (stride, before, dilation))
        y = backend.matmul(_grouped(weight, groups), columns)
        out[...] = self.xp.moveaxis(y.reshape(out.shape[1], out.shape[0], *out.shape[2:]), 0, 1)

    def convolve_t(
        self, weight: Array, y: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """The transpose of `convolve`; every element gathers what is added to it."""
        columns = backend.matmul(_grouped(weight, groups).swapaxes(1, 2), self._outputs(y, groups))
        shape = (out.shape[1], *weight.shape[2:], out.shape[0], *y.shape[2:])
        columns = self.xp.ascontiguousarray(columns).reshape(shape)
        self._columns("fold", columns, out, out, columns, (stride, before, dilation))

    def correlate(
        self, y: Array, x: Array, stride: Axes, before: Axes, dilation: Axes, groups: int, out: Array
    ) -> None:
        """One product a group of gradients and columns."""
        columns = self._unfolded(x, out.shape[2:], y.shape[2:], groups, (stride, before, dilation))
        out[...] = backend.matmul(self._outputs(y, groups), columns.swapaxes(1, 2)).reshape(out.shape)

    def _unfolded(self, x: Array, kernel: Axes, outputs: Axes, groups: int, options: tuple[Axes, ...]) -> Array:
        """Return every window of x as a column: (groups, in_channels / groups * taps, B * outputs)."""
        batch, channels = x.shape[:2]
        columns = self.xp.empty((channels, *kernel, batch, *outputs), dtype=x.dtype)
        self._columns("unfold", x, columns, x, columns, options)
        return columns.reshape(groups, channels // groups * prod(kernel), batch * prod(outputs))

    def _outputs(self, y: Array, groups: int) -> Array:
        """Return y as (groups, out_channels / groups, B * outputs)."""
        shape = (groups, y.shape[1] // groups, y.shape[0] * prod(y.shape[2:]))
        return self.xp.ascontiguousarray(self.xp.moveaxis(y, 1, 0)).reshape(shape)

    def _columns(
        self, name: str, source: Array, out: Array, x: Array, columns: Array, options: tuple[Axes, ...]
    ) -> None:
        check_int32(name, {"the planes of x": prod(x.shape[:2]), "the elements of a plane": prod(x.shape[2:])})
        sizes = map(np.int32, (*x.shape, *columns.shape[1:4], *columns.shape[5:]))
        args = (source, out, np.int64(out.size), *sizes, *(np.int32(n) for option in options for n in option))
        self._launch("windows.cu", name, real_define(x) | {"WINNER": "int"}, ceil_div(out.size, BLOCK), (BLOCK,), args)

    def max_pool(
        self, x: Array, kernel: Axes, stride: Axes, before: Axes,
        dilation: Axes, y: Array, winner: Array,
    ) -> None:  # fmt: skip
        """The maximum of every window and its place."""
        self._pool("max_pool", (x, y, winner), winner, y.size, x, y, (kernel, stride, before, dilation))

    def max_pool_grad(
        self, gy: Array, winner: Array, kernel: Axes, stride: Axes, before: Axes,
        dilation: Axes, out: Array,
    ) -> None:  # fmt: skip
        """Every window's gradient goes to its maximum; every input gathers them in the order of the windows."""
        self._pool("max_pool_grad", (gy, winner, out), winner, out.size, out, gy, (kernel, stride, before, dilation))

    def _pool(
        self, name: str, arrays: tuple[Array, ...], winner: Array, size: int, x: Array, y: Array,
        options: tuple[Axes, ...],
    ) -> None:  # fmt: skip
        args: tuple[Any, ...] = (
            *arrays, np.int64(size), *map(np.int32, (*x.shape[1:], *y.shape[1:])),
            *(np.int32(n) for option in options for n in option),
        )  # fmt: skip
        defines = real_define(x) | winner_define(winner)
        self._launch("windows.cu", name, defines, ceil_div(size, BLOCK), (BLOCK,), args)


def _grouped(weight: Array, groups: int) -> Array:
    """Return the weights as (groups, out_channels / groups, in_channels / groups * taps)."""
    return weight.reshape(groups, weight.shape[0] // groups, prod(weight.shape[1:]))
