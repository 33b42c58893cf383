"""Max pooling over sliding windows."""

from __future__ import annotations

from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.backend import memory
from sparsebp.core.types import Array
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.nn.layers.pool import PoolSaved, SlidingPool
from sparsebp.nn.work import Work


class MaxPool(SlidingPool):
    """Max pooling in any number of dimensions; the first maximum of a window wins, and NaN wins over all else."""

    def forward(self, x: Array) -> tuple[Array, PoolSaved]:
        """Return the windows' maxima (B, C, …) for x (B, C, …).

        Raises
        ------
        DTypeError, DeviceError
            x is not a float32 or float64 array.
        ShapeError
            x has another number of axes, or is too small for the kernel.
        """
        xp = check_input(x, shape=(None,) * (self.dims + 2))
        out_shape = self._out_shape(x.shape)
        y = memory.empty(xp, out_shape, x.dtype)
        winner = xp.empty(out_shape, dtype=np.uint8 if np.prod(self.window.kernel) <= 256 else np.int32)
        kernels.get(xp).max_pool(_planes(xp, x, self.dims), *self._options(), *_out_planes(self.dims, y, winner))
        return y, PoolSaved(x.shape, x.dtype, winner)

    def input_grad(self, gy: Array, saved: PoolSaved) -> Array:
        """Return the gradient (B, C, …) at x: every window's goes to its maximum."""
        out_shape = self._out_shape(saved.shape)
        xp = check_gy(gy, out_shape, saved.dtype, saved.choice)
        gx = memory.empty(xp, saved.shape, saved.dtype)
        arrays = _planes(xp, gy, self.dims), *_out_planes(self.dims, saved.choice)
        kernels.get(xp).max_pool_grad(*arrays, *self._options(), *_out_planes(self.dims, gx))
        return gx

    def jacobian_t(self, saved: PoolSaved) -> Any:
        """Return zeros and ones on the layer's pattern, per sample."""
        from sparsebp.jacobians import max_pool_jacobian_t

        return max_pool_jacobian_t(self.pool(saved.shape), saved.choice, saved.dtype)

    def input_grad_work(self, shape: tuple[int, ...], saved: PoolSaved) -> Work:
        """Return the cost of one kernel, which writes the gradient and reads the windows' and their winners."""
        windows = prod(self._out_shape(shape))
        return Work(windows, prod(shape) + 2 * windows, 1)

    def _options(self) -> tuple[tuple[int, ...], ...]:
        """Return kernel, stride, padding and dilation on two axes, as the kernels take them."""
        w, front = self.window, 2 - self.dims
        return (1,) * front + w.kernel, (1,) * front + w.stride, (0,) * front + w.before, (1,) * front + w.dilation


def _planes(xp: ModuleType, x: Array, dims: int) -> Array:
    """Return x (B, C, …) as contiguous planes (B * C, H, W); one axis is a plane of height 1."""
    return _out_planes(dims, xp.ascontiguousarray(x))[0]


def _out_planes(dims: int, *arrays: Array) -> tuple[Array, ...]:
    """Return contiguous arrays (B, C, …) as planes, without a copy."""
    return tuple(a.reshape(a.shape[0] * a.shape[1], *(1,) * (2 - dims), *a.shape[2:]) for a in arrays)


class MaxPool1d(MaxPool):
    """Max pooling over (B, C, L), as `torch.nn.MaxPool1d`.

    Parameters
    ----------
    kernel_size, stride, padding, dilation
        Integers; `stride` None is `kernel_size`.
    ceil_mode
        Whether the number of windows is rounded up.

    Raises
    ------
    OptionError
        A size is not positive, or the padding is more than half of the kernel.
    """

    dims = 1


class MaxPool2d(MaxPool):
    """Max pooling over (B, C, H, W), as `torch.nn.MaxPool2d`.

    Parameters
    ----------
    kernel_size, stride, padding, dilation
        An integer or a pair (height, width) each; `stride` None is `kernel_size`.
    ceil_mode
        Whether the number of windows is rounded up.

    Raises
    ------
    OptionError
        A size is not positive, or the padding is more than half of the kernel.
    """

    dims = 2
