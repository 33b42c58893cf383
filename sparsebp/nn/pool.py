"""Max and average pooling over sliding windows, and adaptive average pooling: as many windows as asked for."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, check_flag, check_integer
from sparsebp.core.errors import OptionError
from sparsebp.nn.layer import Layer, Work, check_gy, check_input
from sparsebp.patterns import PoolPattern, adaptive_pool_pattern
from sparsebp.patterns.builders import window_pattern
from sparsebp.patterns.pattern import KEPT, DeviceCopies, frozen
from sparsebp.patterns.windows import LONGEST, PoolWindows

# Layers that take a batch of samples or an unbatched one, as in torch.nn.


class Lone(NamedTuple):
    """Saved by the forward of an unbatched sample: the value of a batch of one."""

    batch: Any


class SampleLayer(Layer):
    """Base of layers whose samples have `sample_axes` axes; subclasses implement a batch (B, …).

    An unbatched sample runs as a batch of one. It has no batch for a scan: in a chain, the layer runs `input_grad`.
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return the output for x (B, …) or an unbatched sample (…), and the saved value."""
        backend.namespace(x=x)
        if x.ndim != self.sample_axes:
            return self._forward(x)
        y, saved = self._forward(x[None])
        return y[0], Lone(saved)

    def input_grad(self, gy: Array, saved: Any) -> Array:
        """Return the gradient at x, of its shape."""
        if not isinstance(saved, Lone):
            return self._input_grad(gy, saved)
        return self._input_grad(batch_of(gy), saved.batch)[0]

    def jacobian_t(self, saved: Any) -> Any:
        """Return the transposed Jacobian of a sample; its elements are counted channels first."""
        return self._jacobian_t(saved.batch if isinstance(saved, Lone) else saved)

    def input_grad_work(self, shape: tuple[int, ...], saved: Any) -> Work:
        """Return the cost of `input_grad`."""
        if not isinstance(saved, Lone):
            return self._input_grad_work(shape, saved)
        return self._input_grad_work((1, *shape), saved.batch)

    def lone(self, saved: Any) -> bool:
        """Whether the forward had an unbatched sample."""
        return isinstance(saved, Lone)

    @abc.abstractmethod
    def _forward(self, x: Array) -> tuple[Array, Any]:
        """Return the output for a batch, and the saved value."""

    @abc.abstractmethod
    def _input_grad(self, gy: Array, saved: Any) -> Array:
        """Return the gradient at a batch."""

    @abc.abstractmethod
    def _jacobian_t(self, saved: Any) -> Any:
        """Return the transposed Jacobian of each sample of a batch."""

    def _input_grad_work(self, shape: tuple[int, ...], saved: Any) -> Work:
        """Return the cost for a batch of `shape`: a few elementwise passes."""
        return super().input_grad_work(shape, saved)


def batch_of(gy: Array) -> Array:
    """Return a batch of one."""
    backend.namespace(gy=gy)
    return gy[None]


@dataclass(frozen=True)
class PoolSaved:
    """Saved by a pooling layer: the input's shape and dtype, and each window's winner or weight."""

    # `choice` is (B, C, …) places of the maxima for a max-pool, (…) weights of the windows for an average.

    shape: tuple[int, ...]
    dtype: np.dtype
    choice: Array


class Pool(SampleLayer):
    """The base of all: windows on the last `dims` axes of (B, C, …)."""

    replayable = True

    dims: int

    @property
    def sample_axes(self) -> int:  # type: ignore[override]
        """The channels and the axes of the windows."""
        return self.dims + 1

    def _check_x(self, x: Array) -> ModuleType:
        return check_input(x, shape=(None,) * (self.dims + 2))


class SlidingPool(Pool):
    """Windows that slide: the base of `MaxPool` and `AvgPool`."""

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.window = PoolWindows.of(self.dims, kernel_size, stride, padding, dilation, ceil_mode)

    def pool(self, shape: tuple[int, ...]) -> PoolPattern:
        """Return the pattern for an input of `shape` (B, C, …)."""
        return window_pattern(shape[1], shape[2:], self.window)

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:2], *self.window.output_size(shape[2:]))


class MaxPool(SlidingPool):
    """The base of `MaxPool1d` and `MaxPool2d`; the first maximum of a window wins, and NaN wins over all else.

    Parameters
    ----------
    kernel_size, stride, padding, dilation
        An integer for all axes, or one per axis; `stride` None is `kernel_size`.
    return_indices
        Whether calling the layer returns ``(y, indices)`` as in PyTorch. `forward` returns ``(y, saved)`` in any case,
        and `indices` of it.
    ceil_mode
        Whether the number of windows is rounded up.
    """

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode)
        self.return_indices = check_flag("return_indices", return_indices)

    def __call__(self, x: Array, /, *more: Any, **options: Any) -> Any:
        """Return the windows' maxima, with ``return_indices`` and where they are."""
        y, saved = self.forward(x, *more, **options)
        return (y, self.indices(saved)) if self.return_indices else y

    def indices(self, saved: Any) -> Array:
        """Return where each window's maximum is among the elements of its channel: int64, of the output's shape."""
        if isinstance(saved, Lone):
            return self.indices(saved.batch)[0]
        xp, w, place, found = backend.namespace(saved.choice), self.window, saved.choice.astype(np.int64), 0
        for axis, size in enumerate(saved.shape[2:]):
            behind = self.dims - 1 - axis
            first = xp.arange(place.shape[2 + axis]) * w.stride[axis] - w.before[axis]
            tap = place // prod(w.kernel[axis + 1 :]) % w.kernel[axis]
            found = found * size + first.reshape(-1, *(1,) * behind) + tap * w.dilation[axis]
        return found

    def _forward(self, x: Array) -> tuple[Array, PoolSaved]:
        xp = self._check_x(x)
        out_shape = self._out_shape(x.shape)
        y = backend.empty(xp, out_shape, x.dtype)
        winner = xp.empty(out_shape, dtype=np.uint8 if np.prod(self.window.kernel) <= 256 else np.int32)
        kernels.get(xp).unchecked.max_pool(
            _planes(xp, x, self.dims), *self._options(), *_out_planes(self.dims, y, winner)
        )
        return y, PoolSaved(x.shape, x.dtype, winner)

    def _input_grad(self, gy: Array, saved: PoolSaved) -> Array:
        out_shape = self._out_shape(saved.shape)
        xp = check_gy(gy, out_shape, saved.dtype, saved.choice)
        gx = backend.empty(xp, saved.shape, saved.dtype)
        arrays = _planes(xp, gy, self.dims), *_out_planes(self.dims, saved.choice)
        kernels.get(xp).unchecked.max_pool_grad(*arrays, *self._options(), *_out_planes(self.dims, gx))
        return gx

    def _jacobian_t(self, saved: PoolSaved) -> Any:
        from sparsebp.jacobians import max_pool_jacobian_t

        return max_pool_jacobian_t(self.pool(saved.shape), saved.choice, saved.dtype)

    def _input_grad_work(self, shape: tuple[int, ...], saved: PoolSaved) -> Work:
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
    return tuple([a.reshape(a.shape[0] * a.shape[1], *(1,) * (2 - dims), *a.shape[2:]) for a in arrays])


class MaxPool1d(MaxPool):
    """Max pooling over (B, C, L) or (C, L), as `torch.nn.MaxPool1d`; see `MaxPool`."""

    dims = 1


class MaxPool2d(MaxPool):
    """Max pooling over (B, C, H, W) or (C, H, W), as `torch.nn.MaxPool2d`; see `MaxPool`."""

    dims = 2


@lru_cache(maxsize=KEPT)
def _window_weights(windows: PoolWindows, size: tuple[int, ...], dtype: np.dtype, **divisors: Any) -> DeviceCopies:
    """Return the factor of each window's sum, of the windows' shape; it is sent to a device once."""
    from sparsebp.jacobians.operators import avg_pool_weights

    weights = avg_pool_weights(window_pattern(1, size, windows), **divisors).astype(dtype)
    return DeviceCopies(frozen(weights.reshape(windows.output_size(size))))


class AvgPool(SlidingPool):
    """The base of `AvgPool1d` and `AvgPool2d`.

    Parameters
    ----------
    kernel_size, stride, padding
        An integer for all axes, or one per axis; `stride` None is `kernel_size`.
    ceil_mode
        Whether the number of windows is rounded up.
    count_include_pad
        Whether padding counts in the average.

    Notes
    -----
    It runs over the places of a kernel, not over windows: one place of all windows is a strided view of the padded
    input, and no two windows have the same element there. So the input gradient is a sum over views, without scatter
    and atomics.
    """

    divisor_override: int | None = None

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, 1, ceil_mode)
        self.count_include_pad = check_flag("count_include_pad", count_include_pad)

    def _forward(self, x: Array) -> tuple[Array, PoolSaved]:
        xp = self._check_x(x)
        out_shape = self._out_shape(x.shape)
        whole, inside = self._padded(xp, x.shape, x.dtype)
        inside[...] = x
        y = xp.zeros(out_shape, dtype=x.dtype)
        for values in self._places(whole, out_shape):
            y += values
        (weight,) = _window_weights(self.window, x.shape[2:], x.dtype, **self._divisors()).on(xp)
        y *= weight
        return y, PoolSaved(x.shape, x.dtype, weight)

    def _input_grad(self, gy: Array, saved: PoolSaved) -> Array:
        out_shape = self._out_shape(saved.shape)
        xp = check_gy(gy, out_shape, saved.dtype, saved.choice)
        whole, inside = self._padded(xp, saved.shape, saved.dtype)
        share = gy * saved.choice
        for values in self._places(whole, out_shape):
            values[...] += share
        return xp.ascontiguousarray(inside)

    def _input_grad_work(self, shape: tuple[int, ...], saved: PoolSaved) -> Work:
        """Return the cost of some passes over the windows for every place of the kernel."""
        places, windows = prod(self.window.kernel), prod(self._out_shape(shape))
        return Work(2 * places * windows, 6 * places * windows + 4 * prod(shape), 3 * places + 2)

    def _jacobian_t(self, saved: PoolSaved) -> Any:
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

    def _places(self, whole: Array, out_shape: tuple[int, ...]) -> Iterator[Array]:
        """Yield for every place of the kernel, in C order, the view of `whole` with that place of all windows."""
        w = self.window
        for place in product(*map(range, w.kernel)):
            view = tuple(
                slice(first, first + (count - 1) * stride + 1, stride)
                for first, count, stride in zip(place, out_shape[2:], w.stride, strict=True)
            )
            yield whole[:, :, *view]


class AvgPool1d(AvgPool):
    """Average pooling over (B, C, L) or (C, L), as `torch.nn.AvgPool1d`; see `AvgPool`."""

    dims = 1


class AvgPool2d(AvgPool):
    """Average pooling over (B, C, H, W) or (C, H, W), as `torch.nn.AvgPool2d`.

    Parameters
    ----------
    kernel_size, stride, padding, ceil_mode, count_include_pad
        As for `AvgPool`.
    divisor_override
        Divide every window by this number instead of by its size.
    """

    dims = 2

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad)
        if divisor_override is not None:
            self.divisor_override = check_integer("divisor_override", divisor_override, -(2**31), 2**31)
            if self.divisor_override == 0:
                raise OptionError("divisor_override is zero", expected="None or another integer", got=0)


@dataclass(frozen=True)
class AdaptiveSaved:
    """The input's shape and the transposed Jacobian of one channel."""

    shape: tuple[int, ...]
    channel: Any


class AdaptiveAvgPool(Pool):
    """The base of `AdaptiveAvgPool1d` and `AdaptiveAvgPool2d`: products with one channel's Jacobian.

    Parameters
    ----------
    output_size
        Number of windows: an integer for all axes, or one per axis; None keeps an axis.
    """

    def __init__(self, output_size: Any) -> None:
        super().__init__()
        sizes = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * self.dims
        if len(sizes) != self.dims:
            raise OptionError(f"output_size does not fit {self.dims} axes", expected=f"one size, or {self.dims}",
                              got=repr(output_size),
                              remedy="Pass the sizes as torch.nn takes them, None to keep an axis")  # fmt: skip
        self.output_size = tuple(None if n is None else check_integer("output_size", n, 1, LONGEST) for n in sizes)

    def _forward(self, x: Array) -> tuple[Array, AdaptiveSaved]:
        xp = self._check_x(x)
        channel = self._jacobian(xp, 1, x.shape, x.dtype)
        return _apply(channel.T, x, self._out_shape(x.shape)), AdaptiveSaved(x.shape, channel)

    def _input_grad(self, gy: Array, saved: AdaptiveSaved) -> Array:
        check_gy(gy, self._out_shape(saved.shape), saved.channel.dtype, saved.channel.data)
        return _apply(saved.channel, gy, saved.shape)

    def _jacobian_t(self, saved: AdaptiveSaved) -> Any:
        xp = backend.namespace(saved.channel.data)
        return self._jacobian(xp, saved.shape[1], saved.shape, saved.channel.dtype)

    def _jacobian(self, xp: ModuleType, channels: int, shape: tuple[int, ...], dtype: Any) -> Any:
        from sparsebp.jacobians import avg_pool_jacobian_t

        pattern = adaptive_pool_pattern(channels, shape[2:], self._out_shape(shape)[2:])
        return avg_pool_jacobian_t(pattern, xp, dtype)

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = (n if want is None else want for n, want in zip(shape[2:], self.output_size, strict=True))
        return (*shape[:2], *sizes)


def _apply(jacobian: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Multiply every channel of every sample by `jacobian`; return the result in `shape`."""
    xp = backend.namespace(x)
    columns = xp.ascontiguousarray(x.reshape(shape[0] * shape[1], jacobian.shape[1]).T)
    return xp.ascontiguousarray((jacobian @ columns).T).reshape(shape)


class AdaptiveAvgPool1d(AdaptiveAvgPool):
    """Adaptive average pooling over (B, C, L) or (C, L), as `torch.nn.AdaptiveAvgPool1d`; see `AdaptiveAvgPool`."""

    dims = 1


class AdaptiveAvgPool2d(AdaptiveAvgPool):
    """Adaptive average pooling over (B, C, H, W) or (C, H, W), as `torch.nn.AdaptiveAvgPool2d`.

    See `AdaptiveAvgPool`.
    """

    dims = 2
