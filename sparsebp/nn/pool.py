"""Max and average pooling: over sliding windows, and adaptive, with as many windows as asked for."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array, check_flag, check_integer
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.nn.layer import Fixed, Layer, check_gy, check_input
from sparsebp.nn.work import Work, total_work
from sparsebp.patterns import PoolPattern, adaptive_pool_pattern
from sparsebp.patterns.bands import adaptive_averages, sliding_averages
from sparsebp.patterns.builders import adaptive_windows, window_pattern
from sparsebp.patterns.pattern import KEPT, DeviceCopies, frozen
from sparsebp.patterns.windows import LONGEST, PoolWindows

# Layers that take a batch of samples or an unbatched one, as in torch.nn.


class UnbatchedSample(NamedTuple):
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
        return y[0], UnbatchedSample(saved)

    def input_grad(self, gy: Array, saved: Any) -> Array:
        """Return the gradient at x, of its shape."""
        if not isinstance(saved, UnbatchedSample):
            return self._input_grad(gy, saved)
        return self._input_grad(batch_of(gy), saved.batch)[0]

    def jacobian_t(self, saved: Any) -> Any:
        """Return the transposed Jacobian of a sample; its elements are counted channels first."""
        return self._jacobian_t(saved.batch if isinstance(saved, UnbatchedSample) else saved)

    def input_grad_work(self, shape: tuple[int, ...], saved: Any) -> Work:
        """Return the cost of `input_grad`."""
        if not isinstance(saved, UnbatchedSample):
            return self._input_grad_work(shape, saved)
        return self._input_grad_work((1, *shape), saved.batch)

    def unbatched(self, saved: Any) -> bool:
        """Whether the forward had an unbatched sample."""
        return isinstance(saved, UnbatchedSample)

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
    """Saved by a max-pool: the input's shape and dtype, and the place of each window's maximum."""

    # `choice` is (B, C, …).
    # With three axes, `choice` is the place on the first one, and `planes` (B, C, D, …) the places in each plane.

    shape: tuple[int, ...]
    dtype: np.dtype
    choice: Array
    planes: Array | None = None


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

    kernel_size, stride, padding, dilation, ceil_mode = (Fixed() for _ in range(5))

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.window = PoolWindows.of(self.dims, kernel_size, stride, padding, dilation, ceil_mode)
        self.kernel_size, self.stride = self.window.kernel, self.window.stride
        self.padding, self.dilation, self.ceil_mode = padding, self.window.dilation, ceil_mode

    def pool(self, shape: tuple[int, ...]) -> PoolPattern:
        """Return the pattern for an input of `shape` (B, C, …)."""
        return window_pattern(shape[1], shape[2:], self.window)

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:2], *self.window.output_size(shape[2:]))


# Max pooling. The kernels take windows on two axes. With three, one pass pools the planes, and another one the first
# axis: the first plane with the maximum wins, and the last one with a NaN, as if a window were one list of elements.


class Axis(NamedTuple):
    """The windows on an axis."""

    windows: DeviceCopies  # (outputs, 3): of each its start, its first tap within the axis, and the end of its taps
    inputs: int
    outputs: int
    kernel: int  # Taps of the longest
    dilation: int

    @classmethod
    def of(cls, inputs: int, kernel: int, dilation: int, *columns: np.ndarray) -> Axis:
        """Return the axis with these columns of `windows`."""
        table = np.stack(columns, axis=1)
        return cls(DeviceCopies(frozen(table)), inputs, len(table), kernel, dilation)


@lru_cache(maxsize=KEPT)
def _sliding(sizes: tuple[int, ...], window: PoolWindows) -> tuple[Axis, ...]:
    """Return windows that slide."""
    axes = []
    options = zip(sizes, window.output_size(sizes), window.kernel, window.stride, window.before, window.dilation,
                  strict=True)  # fmt: skip
    for length, count, kernel, stride, before, dilation in options:
        start = np.arange(count) * stride - before
        first, end = -(np.minimum(start, 0) // dilation), (length - 1 - start) // dilation + 1
        axes.append(Axis.of(length, kernel, dilation, start, first, np.minimum(end, kernel)))
    return tuple(axes)


@lru_cache(maxsize=KEPT)
def _adaptive(sizes: tuple[int, ...], counts: tuple[int, ...]) -> tuple[Axis, ...]:
    """Return as many windows as asked for."""
    axes = []
    for length, count in zip(sizes, counts, strict=True):
        start, end = adaptive_windows(length, count)
        axes.append(Axis.of(length, int((end - start).max()), 1, start, np.zeros_like(start), end - start))
    return tuple(axes)


@lru_cache(maxsize=KEPT)
def _single(length: int) -> Axis:
    """Return windows of one element."""
    start = np.arange(length)
    return Axis.of(length, 1, 1, start, np.zeros_like(start), np.ones_like(start))


class Pass(NamedTuple):
    """A call of the kernels: shapes (planes, height, width) of input and output, and the windows of both axes."""

    into: tuple[int, ...]
    out: tuple[int, ...]
    axes: tuple[Axis, Axis]

    def options(self, xp: ModuleType) -> tuple[Any, ...]:
        """Return the arguments that describe the windows."""
        down, across = self.axes
        tables = *down.windows.on(xp), *across.windows.on(xp)
        return *tables, (down.kernel, across.kernel), (down.dilation, across.dilation)


@lru_cache(maxsize=1024)  # layers ask at every call
def _passes(shape: tuple[int, ...], axes: tuple[Axis, ...]) -> list[Pass]:
    """Return the passes over x of `shape` (B, C, …)."""
    out, planes, depth = [axis.outputs for axis in axes], shape[0] * shape[1], shape[2]
    if len(axes) < 3:
        down = axes[0] if len(axes) == 2 else _single(1)
        across = axes[-1]
        return [Pass((planes, down.inputs, across.inputs), (planes, down.outputs, across.outputs), (down, across))]
    joined = out[1] * out[2]
    return [
        Pass((planes * depth, *shape[3:]), (planes * depth, *out[1:]), axes[1:]),  # type: ignore[arg-type]
        Pass((planes, depth, joined), (planes, out[0], joined), (axes[0], _single(joined))),
    ]


class Maxima(Pool):
    """The base of `MaxPool` and `AdaptiveMaxPool`: the first maximum of a window wins, and NaN wins over all else."""

    return_indices: bool

    def __call__(self, x: Array, /, *more: Any, **options: Any) -> Any:
        """Return the windows' maxima, with ``return_indices`` and where they are."""
        y, saved = self.forward(x, *more, **options)
        return (y, self.indices(saved)) if self.return_indices else y

    def _forward(self, x: Array) -> tuple[Array, PoolSaved]:
        xp = self._check_x(x)
        shape, axes = self._out_shape(x.shape), self._axes(x.shape)
        y, winners = xp.ascontiguousarray(x), []
        for one in _passes(x.shape, axes):
            found, options = host_pool.empty(xp, one.out, x.dtype), one.options(xp)
            winners.append(xp.empty(one.out, np.uint8 if prod(axis.kernel for axis in one.axes) <= 256 else np.int32))
            kernels.get(xp).unchecked.max_pool(y.reshape(one.into), *options, found, winners[-1])
            y = found
        planes = winners[0].reshape(*x.shape[:3], *shape[3:]) if len(winners) > 1 else None
        return y.reshape(shape), PoolSaved(x.shape, x.dtype, winners[-1].reshape(shape), planes)

    def _input_grad(self, gy: Array, saved: PoolSaved) -> Array:
        xp = check_gy(gy, self._out_shape(saved.shape), saved.dtype, saved.choice)
        g, winners = xp.ascontiguousarray(gy), [saved.choice] if saved.planes is None else [saved.choice, saved.planes]
        for one, winner in zip(reversed(_passes(saved.shape, self._axes(saved.shape))), winners, strict=True):
            found = host_pool.empty(xp, one.into, saved.dtype)
            options = one.options(xp)
            kernels.get(xp).unchecked.max_pool_grad(g.reshape(one.out), winner.reshape(one.out), *options, found)
            g = found
        return g.reshape(saved.shape)

    def _input_grad_work(self, shape: tuple[int, ...], saved: PoolSaved) -> Work:
        """Return the cost of the kernels, which write the gradient and read the windows' and their winners."""
        passes = _passes(shape, self._axes(shape))
        return total_work(Work(prod(one.out), prod(one.into) + 2 * prod(one.out), 1) for one in passes)

    def indices(self, saved: Any) -> Array:
        """Return where each window's maximum is among the elements of its channel: int64, of the output's shape."""
        if isinstance(saved, UnbatchedSample):
            return self.indices(saved.batch)[0]
        xp, axes = backend.namespace(saved.choice), self._axes(saved.shape)
        place, found, taps = self._places(saved).astype(np.int64), 0, prod(axis.kernel for axis in axes)
        for behind, axis in zip(reversed(range(self.dims)), axes, strict=True):
            taps //= axis.kernel
            tap, (windows,) = place // taps % axis.kernel, axis.windows.on(xp)
            found = found * axis.inputs + windows[:, 0].reshape(-1, *(1,) * behind) + tap * axis.dilation
        return found

    def _jacobian_t(self, saved: PoolSaved) -> Any:
        from sparsebp.jacobians import max_pool_jacobian_t

        return max_pool_jacobian_t(self.pool(saved.shape), self._places(saved), saved.dtype)

    def _places(self, saved: PoolSaved) -> Array:
        """Return the place of every maximum in its window, in C order over the kernel, (B, C, …)."""
        if saved.planes is None:
            return saved.choice
        xp, axes = backend.namespace(saved.choice), self._axes(saved.shape)
        (windows,) = axes[0].windows.on(xp)
        plane = windows[:, 0].reshape(-1, 1, 1) + saved.choice.astype(np.int64) * axes[0].dilation
        within = xp.take_along_axis(saved.planes, plane, axis=2)
        return saved.choice.astype(np.int32) * (axes[1].kernel * axes[2].kernel) + within

    @abc.abstractmethod
    def pool(self, shape: tuple[int, ...]) -> PoolPattern:
        """Return the pattern for an input of `shape` (B, C, …)."""

    @abc.abstractmethod
    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the output's shape for an input of `shape`."""

    @abc.abstractmethod
    def _axes(self, shape: tuple[int, ...]) -> tuple[Axis, ...]:
        """Return the windows for an input of `shape`."""


class MaxPool(SlidingPool, Maxima):
    """The base of `MaxPool1d`, `MaxPool2d` and `MaxPool3d`; the first maximum of a window wins, NaN over all else.

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

    def _axes(self, shape: tuple[int, ...]) -> tuple[Axis, ...]:
        return _sliding(shape[2:], self.window)


class MaxPool1d(MaxPool):
    """Max pooling over (B, C, L) or (C, L), as `torch.nn.MaxPool1d`; see `MaxPool`."""

    dims = 1


class MaxPool2d(MaxPool):
    """Max pooling over (B, C, H, W) or (C, H, W), as `torch.nn.MaxPool2d`; see `MaxPool`."""

    dims = 2


class MaxPool3d(MaxPool):
    """Max pooling over (B, C, D, H, W) or (C, D, H, W), as `torch.nn.MaxPool3d`; see `MaxPool`."""

    dims = 3


# Layers that multiply every axis by one banded matrix: averages, and `Upsample`.


@dataclass(frozen=True)
class ChannelSaved:
    """The input's shape and dtype, and for every axis the arrays of its matrix and of the transpose."""

    shape: tuple[int, ...]
    dtype: np.dtype
    bands: list[tuple[Array, ...]]

    @property
    def first(self) -> Array:
        """An array on the input's device."""
        return self.bands[0][0]


class ChannelProduct(SampleLayer):
    """Base of layers that multiply every channel by one sparse matrix, which the values of x do not change.

    It is a Kronecker product of a banded matrix for every axis, so that one axis follows the other.
    """

    replayable = True

    @abc.abstractmethod
    def _check_x(self, x: Array) -> ModuleType:
        """Check x and return its namespace."""

    @abc.abstractmethod
    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the output's shape for an input of `shape` (B, C, …)."""

    @abc.abstractmethod
    def _bands(self, shape: tuple[int, ...], dtype: np.dtype) -> list[DeviceCopies]:
        """Return for each axis behind the channels its matrix, outputs × inputs, and the transpose: see `Band`."""

    def _forward(self, x: Array) -> tuple[Array, ChannelSaved]:
        xp = self._check_x(x)
        self._out_shape(x.shape)  # refuses what does not fit
        bands = [band.on(xp) for band in self._bands(x.shape, x.dtype)]
        return _along_axes(xp, x, [band[:3] for band in bands]), ChannelSaved(x.shape, x.dtype, bands)

    def _input_grad(self, gy: Array, saved: ChannelSaved) -> Array:
        xp = check_gy(gy, self._out_shape(saved.shape), saved.dtype, saved.first)
        return _along_axes(xp, gy, [band[3:] for band in saved.bands])

    def _input_grad_work(self, shape: tuple[int, ...], saved: ChannelSaved) -> Work:
        """Return the cost of a product along every axis."""
        planes, axes = shape[0] * shape[1], len(saved.bands)
        entries = prod(len(data) for *_, data in saved.bands)
        ends = prod(shape) + prod(self._out_shape(shape))
        return Work(2 * planes * entries, axes * ends, axes, shape[1] * entries)


def _along_axes(xp: ModuleType, x: Array, bands: list[tuple[Array, ...]]) -> Array:
    """Multiply each axis of x behind the channels by its matrix."""
    y, k = xp.ascontiguousarray(x), kernels.get(xp).unchecked
    axes = list(range(2, x.ndim))  # the last one, which is the slowest, while there are few elements
    grows = prod(len(first) for first, _, _ in bands) > prod(x.shape[2:])
    for axis in reversed(axes) if grows else axes:
        first, indptr, data = bands[axis - 2]
        (*before, length), behind = y.shape[: axis + 1], y.shape[axis + 1 :]
        found = host_pool.empty(xp, (*before, len(first), *behind), x.dtype)
        planes, inner = prod(before), prod(behind)
        k.band_product(y.reshape(planes, length, inner), first, indptr, data, found.reshape(planes, len(first), inner))
        y = found
    return y


class AvgPool(SlidingPool, ChannelProduct):
    """The base of `AvgPool1d`, `AvgPool2d` and `AvgPool3d`.

    Parameters
    ----------
    kernel_size, stride, padding
        An integer for all axes, or one per axis; `stride` None is `kernel_size`.
    ceil_mode
        Whether the number of windows is rounded up.
    count_include_pad
        Whether padding counts in the average.
    """

    divisor_override: int | None = None

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, 1, ceil_mode)
        self.count_include_pad = check_flag("count_include_pad", count_include_pad)

    def _bands(self, shape: tuple[int, ...], dtype: np.dtype) -> list[DeviceCopies]:
        return sliding_averages(self.window, shape[2:], dtype, self.count_include_pad, self.divisor_override)

    def _jacobian_t(self, saved: ChannelSaved) -> Any:
        from sparsebp.jacobians import avg_pool_jacobian_t

        xp, options = backend.namespace(saved.first), {"count_include_pad": self.count_include_pad}
        return avg_pool_jacobian_t(self.pool(saved.shape), xp, saved.dtype, divisor=self.divisor_override, **options)


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


class AvgPool3d(AvgPool2d):
    """Average pooling over (B, C, D, H, W) or (C, D, H, W), as `torch.nn.AvgPool3d`; arguments as for `AvgPool2d`."""

    dims = 3


# Adaptive pooling: window i of n over a length L reaches from ``floor(i L / n)`` to ``ceil((i + 1) L / n)``.


class AdaptivePool(Pool):
    """The base of `AdaptiveAvgPool` and `AdaptiveMaxPool`: the number of windows is given."""

    # output_size: As the subclasses state.

    def __init__(self, output_size: Any) -> None:
        super().__init__()
        sizes = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * self.dims
        if len(sizes) != self.dims:
            raise OptionError(f"output_size does not fit {self.dims} axes", expected=f"one size, or {self.dims}",
                              got=repr(output_size),
                              remedy="Pass the sizes as torch.nn takes them, None to keep an axis")  # fmt: skip
        self.output_size = tuple(None if n is None else check_integer("output_size", n, 1, LONGEST) for n in sizes)

    def _check_x(self, x: Array) -> ModuleType:
        xp = super()._check_x(x)
        if 0 in x.shape[2:]:
            raise ShapeError("An axis of x behind the channels is empty", expected="at least one element on each",
                             got=x.shape, remedy="Skip empty images")  # fmt: skip
        return xp

    def pool(self, shape: tuple[int, ...]) -> PoolPattern:
        """Return the pattern for an input of `shape` (B, C, …)."""
        return adaptive_pool_pattern(shape[1], shape[2:], self._out_shape(shape)[2:])

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = (n if want is None else want for n, want in zip(shape[2:], self.output_size, strict=True))
        return (*shape[:2], *sizes)


class AdaptiveAvgPool(AdaptivePool, ChannelProduct):
    """The base of `AdaptiveAvgPool1d`, `AdaptiveAvgPool2d` and `AdaptiveAvgPool3d`.

    Parameters
    ----------
    output_size
        Number of windows: an integer for all axes, or one per axis; None keeps an axis.
    """

    def _bands(self, shape: tuple[int, ...], dtype: np.dtype) -> list[DeviceCopies]:
        return adaptive_averages(shape[2:], self._out_shape(shape)[2:], dtype)

    def _jacobian_t(self, saved: ChannelSaved) -> Any:
        from sparsebp.jacobians import avg_pool_jacobian_t

        return avg_pool_jacobian_t(self.pool(saved.shape), backend.namespace(saved.first), saved.dtype)


class AdaptiveAvgPool1d(AdaptiveAvgPool):
    """Adaptive average pooling over (B, C, L) or (C, L), as `torch.nn.AdaptiveAvgPool1d`; see `AdaptiveAvgPool`."""

    dims = 1


class AdaptiveAvgPool2d(AdaptiveAvgPool):
    """Adaptive average pooling over (B, C, H, W) or (C, H, W), as `torch.nn.AdaptiveAvgPool2d`.

    See `AdaptiveAvgPool`.
    """

    dims = 2


class AdaptiveAvgPool3d(AdaptiveAvgPool):
    """Adaptive average pooling over (B, C, D, H, W) or (C, D, H, W), as `torch.nn.AdaptiveAvgPool3d`.

    See `AdaptiveAvgPool`.
    """

    dims = 3


class AdaptiveMaxPool(AdaptivePool, Maxima):
    """The base of `AdaptiveMaxPool1d/2d/3d`; the first maximum of a window wins, NaN over all else.

    Parameters
    ----------
    output_size
        Number of windows: an integer for all axes, or one per axis; None keeps an axis.
    return_indices
        As for `MaxPool`.
    """

    def __init__(self, output_size: Any, return_indices: bool = False) -> None:
        super().__init__(output_size)
        self.return_indices = check_flag("return_indices", return_indices)

    def _axes(self, shape: tuple[int, ...]) -> tuple[Axis, ...]:
        return _adaptive(shape[2:], self._out_shape(shape)[2:])


class AdaptiveMaxPool1d(AdaptiveMaxPool):
    """Adaptive max pooling over (B, C, L) or (C, L), as `torch.nn.AdaptiveMaxPool1d`; see `AdaptiveMaxPool`."""

    dims = 1


class AdaptiveMaxPool2d(AdaptiveMaxPool):
    """Adaptive max pooling over (B, C, H, W) or (C, H, W), as `torch.nn.AdaptiveMaxPool2d`; see `AdaptiveMaxPool`."""

    dims = 2


class AdaptiveMaxPool3d(AdaptiveMaxPool):
    """Adaptive max pooling over (B, C, D, H, W) or (C, D, H, W), as `torch.nn.AdaptiveMaxPool3d`.

    See `AdaptiveMaxPool`.
    """

    dims = 3
