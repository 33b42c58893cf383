"""Max pooling over sliding windows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.nn.pool import PoolSaved, SlidingPool
from sparsebp.types import Array


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
        whole, inside = self._padded(xp, x.shape, x.dtype, -np.inf)
        inside[...] = x
        y = xp.full(out_shape, -np.inf, dtype=x.dtype)
        winner = self._first_places(xp, x.shape, out_shape)
        for place, values in self._places(whole, out_shape):
            better = (values > y) | xp.isnan(values)  # so the last of several NaN, as in PyTorch
            y = xp.where(better, values, y)
            xp.copyto(winner, winner.dtype.type(place), where=better)
        return y, PoolSaved(x.shape, x.dtype, winner)

    def input_grad(self, gy: Array, saved: PoolSaved) -> Array:
        """Return the gradient (B, C, …) at x: every window's goes to its maximum."""
        out_shape = self._out_shape(saved.shape)
        xp = check_gy(gy, out_shape, saved.dtype, saved.choice)
        whole, inside = self._padded(xp, saved.shape, saved.dtype, 0.0)
        for place, values in self._places(whole, out_shape):
            values[...] += xp.where(saved.choice == place, gy, gy.dtype.type(0))
        return xp.ascontiguousarray(inside)

    def jacobian_t(self, saved: PoolSaved) -> Any:
        """Return zeros and ones on the layer's pattern, per sample."""
        from sparsebp.jacobians import max_pool_jacobian_t

        return max_pool_jacobian_t(self.pool(saved.shape), saved.choice, saved.dtype)

    def _first_places(self, xp: ModuleType, shape: tuple[int, ...], out_shape: tuple[int, ...]) -> Array:
        """Return each window's first place that is not padding: the winner where all are minus infinity."""
        w = self.window
        first = np.zeros((1,) * self.dims, dtype=np.int64)
        for a, (count, kernel) in enumerate(zip(out_shape[2:], w.kernel, strict=True)):
            before = np.maximum(w.padding[a] - np.arange(count) * w.stride[a], 0)  # padding at the window's start
            along = np.ones(self.dims, dtype=np.int64)
            along[a] = count
            first = first * kernel + (-(-before // w.dilation[a])).reshape(along)
        dtype = np.uint8 if np.prod(w.kernel) <= 256 else np.int32
        return xp.array(xp.broadcast_to(backend.constant(xp, first.astype(dtype)), out_shape))


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
