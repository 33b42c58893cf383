"""Max and average pooling over sliding windows.

Both run over the places of a kernel, not over windows: one place of all windows is a strided view of the padded input,
and no two windows have the same element there. So the input gradient is a sum over views, without scatter and atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.errors import OptionError
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.patterns import PoolPattern, pool_pattern
from sparsebp.patterns.pool_window import PoolWindow
from sparsebp.types import Array


@dataclass(frozen=True)
class PoolSaved:
    """What the forward of a pooling layer leaves: the input's shape and dtype, and each window's winner or weight.

    `choice` is (B, C, …) places of the maxima for a max-pool, (…) weights of the windows for an average.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    choice: Array


class SlidingPool(Layer):
    """Windows that slide over the last `dims` axes of (B, C, …)."""

    dims: int

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.window = PoolWindow.of(self.dims, kernel_size, stride, padding, dilation, ceil_mode)

    def pool(self, shape: tuple[int, ...]) -> PoolPattern:
        """Return the pattern for an input of `shape` (B, C, …)."""
        w = self.window
        return pool_pattern(shape[1], shape[2:], w.kernel, w.stride, w.padding, w.dilation, w.ceil_mode)

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:2], *self.window.out_size(shape[2:]))

    def _padded(self, xp: ModuleType, shape: tuple[int, ...], dtype: Any, value: float) -> tuple[Array, Array]:
        """Return an array that all windows fit into, full of `value`, and the view of it where the input lies."""
        w = self.window
        lengths = [
            max(pad + length, (count - 1) * stride + reach)
            for pad, length, count, stride, reach in zip(
                w.padding, shape[2:], w.out_size(shape[2:]), w.stride, w.reach, strict=True
            )
        ]
        whole = xp.full((*shape[:2], *lengths), value, dtype=dtype)
        inside = tuple(slice(pad, pad + length) for pad, length in zip(w.padding, shape[2:], strict=True))
        return whole, whole[:, :, *inside]

    def _places(self, whole: Array, out_shape: tuple[int, ...]) -> Iterator[tuple[int, Array]]:
        """Yield every place of the kernel, in C order, and the view of `whole` with that place of all windows."""
        w = self.window
        for place, k in enumerate(product(*map(range, w.kernel))):
            starts = [i * d for i, d in zip(k, w.dilation, strict=True)]
            view = tuple(
                slice(a, a + (count - 1) * stride + 1, stride)
                for a, count, stride in zip(starts, out_shape[2:], w.stride, strict=True)
            )
            yield place, whole[:, :, *view]


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
            winner[better] = place
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
        return xp.array(xp.broadcast_to(xp.asarray(first.astype(dtype)), out_shape))


class AvgPool(SlidingPool):
    """Average pooling in any number of dimensions."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, padding, 1, ceil_mode)
        if divisor_override == 0:
            raise OptionError(
                "divisor_override is zero", expected="None or another integer", got=0, remedy="Leave it out"
            )
        self.count_include_pad, self.divisor_override = bool(count_include_pad), divisor_override

    def forward(self, x: Array) -> tuple[Array, PoolSaved]:
        """Return the windows' averages (B, C, …) for x (B, C, …).

        Raises
        ------
        DTypeError, DeviceError
            x is not a float32 or float64 array.
        ShapeError
            x has another number of axes, or is too small for the kernel.
        """
        from sparsebp.jacobians.pool import avg_pool_weights

        xp = check_input(x, shape=(None,) * (self.dims + 2))
        out_shape = self._out_shape(x.shape)
        whole, inside = self._padded(xp, x.shape, x.dtype, 0.0)
        inside[...] = x
        y = xp.zeros(out_shape, dtype=x.dtype)
        for _, values in self._places(whole, out_shape):
            y += values
        weights = avg_pool_weights(self.pool((1, 1, *x.shape[2:])), **self._divisors())
        weight = xp.asarray(weights.astype(x.dtype).reshape(out_shape[2:]))
        y *= weight
        return y, PoolSaved(x.shape, x.dtype, weight)

    def input_grad(self, gy: Array, saved: PoolSaved) -> Array:
        """Return the gradient (B, C, …) at x: every window's is shared by its elements."""
        out_shape = self._out_shape(saved.shape)
        xp = check_gy(gy, out_shape, saved.dtype, saved.choice)
        whole, inside = self._padded(xp, saved.shape, saved.dtype, 0.0)
        share = gy * saved.choice
        for _, values in self._places(whole, out_shape):
            values[...] += share
        return xp.ascontiguousarray(inside)

    def jacobian_t(self, saved: PoolSaved) -> Any:
        """Return the windows' weights on the layer's pattern, shared by the batch."""
        from sparsebp.jacobians import avg_pool_jacobian_t

        xp = backend.namespace(saved.choice)
        return avg_pool_jacobian_t(self.pool(saved.shape), xp, saved.dtype, **self._divisors())

    def _divisors(self) -> dict[str, Any]:
        return {"count_include_pad": self.count_include_pad, "divisor": self.divisor_override}


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


class AvgPool1d(AvgPool):
    """Average pooling over (B, C, L), as `torch.nn.AvgPool1d`.

    Parameters
    ----------
    kernel_size, stride, padding
        Integers; `stride` None is `kernel_size`.
    ceil_mode
        Whether the number of windows is rounded up.
    count_include_pad
        Whether padding counts in the average.

    Raises
    ------
    OptionError
        A size is not positive, or the padding is more than half of the kernel.
    """

    dims = 1

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad)


class AvgPool2d(AvgPool):
    """Average pooling over (B, C, H, W), as `torch.nn.AvgPool2d`.

    Parameters
    ----------
    kernel_size, stride, padding
        An integer or a pair (height, width) each; `stride` None is `kernel_size`.
    ceil_mode
        Whether the number of windows is rounded up.
    count_include_pad
        Whether padding counts in the average.
    divisor_override
        Divide every window by this number instead of by its size.

    Raises
    ------
    OptionError
        A size is not positive, the padding is more than half of the kernel, or the divisor is zero.
    """

    dims = 2
