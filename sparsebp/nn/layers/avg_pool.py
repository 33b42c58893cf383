"""Average pooling over sliding windows.

It runs over the places of a kernel, not over windows: one place of all windows is a strided view of the padded input,
and no two windows have the same element there. So the input gradient is a sum over views, without scatter and atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from types import ModuleType
from typing import Any

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_integer
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.nn.layers.pool import PoolSaved, SlidingPool
from sparsebp.nn.work import Work


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
        if divisor_override is not None:
            divisor_override = check_integer("divisor_override", divisor_override, -(2**31), 2**31)
            if divisor_override == 0:
                raise OptionError(
                    "divisor_override is zero", expected="None or another integer", got=0, remedy="Leave it out"
                )
        self.count_include_pad = check_flag("count_include_pad", count_include_pad)
        self.divisor_override = divisor_override

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
        whole, inside = self._padded(xp, x.shape, x.dtype)
        inside[...] = x
        y = xp.zeros(out_shape, dtype=x.dtype)
        for _, values in self._places(whole, out_shape):
            y += values
        weights = avg_pool_weights(self.pool((1, 1, *x.shape[2:])), **self._divisors())
        weight = backend.constant(xp, weights.astype(x.dtype).reshape(out_shape[2:]))
        y *= weight
        return y, PoolSaved(x.shape, x.dtype, weight)

    def input_grad(self, gy: Array, saved: PoolSaved) -> Array:
        """Return the gradient (B, C, …) at x: every window's is shared by its elements."""
        out_shape = self._out_shape(saved.shape)
        xp = check_gy(gy, out_shape, saved.dtype, saved.choice)
        whole, inside = self._padded(xp, saved.shape, saved.dtype)
        share = gy * saved.choice
        for _, values in self._places(whole, out_shape):
            values[...] += share
        return xp.ascontiguousarray(inside)

    def input_grad_work(self, shape: tuple[int, ...], saved: PoolSaved) -> Work:
        """Return the cost of some passes over the windows for every place of the kernel."""
        places, windows = prod(self.window.kernel), prod(self._out_shape(shape))
        return Work(2 * places * windows, 6 * places * windows + 4 * prod(shape), 3 * places + 2)

    def jacobian_t(self, saved: PoolSaved) -> Any:
        """Return the windows' weights on the layer's pattern, shared by the batch."""
        from sparsebp.jacobians import avg_pool_jacobian_t

        xp = backend.namespace(saved.choice)
        return avg_pool_jacobian_t(self.pool(saved.shape), xp, saved.dtype, **self._divisors())

    def _divisors(self) -> dict[str, Any]:
        return {"count_include_pad": self.count_include_pad, "divisor": self.divisor_override}

    def _padded(self, xp: ModuleType, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
        """Return an array that all windows fit into, of zeros, and the view of it where the input lies."""
        w = self.window
        lengths = [
            max(pad + length, (count - 1) * stride + reach)
            for pad, length, count, stride, reach in zip(
                w.before, shape[2:], w.output_size(shape[2:]), w.stride, w.reach, strict=True
            )
        ]
        whole = xp.zeros((*shape[:2], *lengths), dtype=dtype)
        inside = tuple(slice(pad, pad + length) for pad, length in zip(w.before, shape[2:], strict=True))
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
