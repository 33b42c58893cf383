"""Convolutions and transposed ones over one, two and three axes.

A convolution with weights w maps x to y. `convolve` is that map, `convolve_t` its transpose, from y's space to x's, and
`correlate` the gradient at w. A transposed convolution is the same three with x and y exchanged.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array, Seed, check_choice
from sparsebp.core.errors import ShapeError
from sparsebp.nn.layer import Fixed, check_gy, check_input
from sparsebp.nn.linear import Prunable
from sparsebp.nn.pool import SampleLayer, UnbatchedSample, batch_of
from sparsebp.nn.work import Work
from sparsebp.patterns.builders import conv_entries
from sparsebp.patterns.windows import Lengths, Padding, Windows, check_channels, lengths

# Padding modes other than zeros: borders that repeat the input.


class Borders(NamedTuple):
    """The padding of an input (B, C, …), as `torch.nn.functional.pad`."""

    # `"reflect"`: mirrored at the outermost elements, which are not repeated; `"replicate"`: the outermost elements
    # again; `"circular"`: the elements of the other end.
    mode: str
    padding: tuple[tuple[int, int], ...]  # Elements (before, after) on each axis after the channels

    @classmethod
    def of(cls, mode: str, windows: Windows) -> Borders | None:
        """Return the borders of a convolution's input; None if they are zeros, or if there are none."""
        return None if mode == "zeros" or not any(map(any, windows.padding)) else cls(mode, windows.padding)

    def check(self, sizes: tuple[int, ...]) -> None:
        """Check that an input with axes of these lengths has enough elements to repeat."""
        spare = {"reflect": 1, "circular": 0}.get(self.mode)
        if spare is not None and any(max(pair) + spare > n for n, pair in zip(sizes, self.padding, strict=True)):
            raise ShapeError(f"The {self.mode} padding is larger than the axes it repeats",
                             expected=f"axes of at least {tuple(max(pair) + spare for pair in self.padding)} elements",
                             got=f"{sizes}, with padding {self.padding}",
                             remedy="Use less padding, or a larger input")  # fmt: skip

    def padded(self, xp: ModuleType, x: Array) -> Array:
        """Return x with its borders, a new array: axis by axis, so that corners repeat corners."""
        sizes = x.shape[2:]
        self.check(sizes)
        ends = [n + before + after for n, (before, after) in zip(sizes, self.padding, strict=True)]
        y = host_pool.empty(xp, (*x.shape[:2], *ends), x.dtype)
        y[self._inside(sizes)] = x
        for border, inner in self._repeats(sizes):
            y[border] = y[inner]
        return y

    def folded(self, xp: ModuleType, g: Array, sizes: tuple[int, ...]) -> Array:
        """Return the gradient at x from the one at padded x, which is overwritten: repeated elements add up."""
        for border, inner in reversed(list(self._repeats(sizes))):
            axes = tuple(axis for axis in range(2, g.ndim) if g[inner].shape[axis] != g[border].shape[axis])
            g[inner] += g[border].sum(axis=axes, keepdims=True) if axes else g[border]
        gx = host_pool.empty(xp, (*g.shape[:2], *sizes), g.dtype)
        gx[...] = g[self._inside(sizes)]
        return gx

    def _inside(self, sizes: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where the input lies in the padded one."""
        axes = zip(sizes, self.padding, strict=True)
        return (slice(None), slice(None), *(slice(before, before + n) for n, (before, _) in axes))

    def _repeats(self, sizes: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield each border of the padded input with its source, in the order of filling."""
        inside = self._inside(sizes)
        for axis, (n, (before, after)) in enumerate(zip(sizes, self.padding, strict=True), 2):
            last = before + n
            borders = [(slice(0, before), _source(self.mode, before, n, first=True))] if before else []
            if after:
                borders.append((slice(last, last + after), _source(self.mode, before, n, after, first=False)))
            for border, source in borders:
                place = ((slice(None),) * axis, inside[axis + 1 :])
                yield (*place[0], border, *place[1]), (*place[0], source, *place[1])


def _source(mode: str, before: int, n: int, after: int = 0, *, first: bool) -> slice:
    """Return the source of the border at the first or the last end of an axis."""
    last = before + n
    if mode == "circular":
        return slice(n, last) if first else slice(before, before + after)
    if mode == "replicate":
        return slice(before, before + 1) if first else slice(last - 1, last)
    if first:
        return slice(2 * before, before, -1)
    stop = last - 2 - after
    return slice(last - 2, stop if stop >= 0 else None, -1)


class ConvNd(SampleLayer, Prunable):
    """The base of `Conv` and `ConvTranspose`, over `ndim` axes."""

    # in_channels, out_channels, groups, bias, padding_mode, dtype, rng, device: As the subclasses state.
    # windows: of the convolution; of a transposed one they slide over the output.

    replayable = True
    kernel_size, stride, padding, dilation, padding_mode = (Fixed() for _ in range(5))

    ndim: ClassVar[int]
    transposed: ClassVar[bool] = False
    """Whether the windows slide over the output, and the weight is laid out with the input's channels first."""
    padding_modes: ClassVar[tuple[str, ...]] = ("zeros",)

    def __init__(
        self, in_channels: int, out_channels: int, windows: Windows, groups: int, bias: bool, padding_mode: str,
        dtype: Any, rng: Seed, device: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.padding_mode = check_choice("padding_mode", padding_mode, self.padding_modes)
        in_channels, out_channels, groups = check_channels(in_channels, out_channels, groups)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.windows = self._inner = windows
        self.kernel_size, self.stride, self.dilation = windows.kernel, windows.stride, windows.dilation
        self._borders = Borders.of(self.padding_mode, windows)
        if self._borders is not None:  # the kernels then see an input that is padded already
            self._inner = replace(windows, padding=((0, 0),) * self.ndim)
        first, second = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (first, second // groups, *windows.kernel)
        self._draw(shape, out_channels, bias, dtype, rng, device)

    def output_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the output's axes after the channels."""
        return self.windows.input_size(input_size) if self.transposed else self.windows.output_size(input_size)

    @property
    def sample_axes(self) -> int:  # type: ignore[override]
        """The channels and the axes of the windows."""
        return self.ndim + 1

    @property
    def _taps(self) -> Array:
        return self._kept(self.params["weight"])

    def forward_between(self, x: Array, limits: tuple[float, float]) -> tuple[Array, Array] | None:
        """Return the output clamped to `limits`, and the saved x; None for an unbatched sample."""
        return None if x.ndim == self.sample_axes else self._forward(x, limits)

    @abc.abstractmethod
    def _forward(self, x: Array, limits: tuple[float, float] | None = None) -> tuple[Array, Array]:
        """Return the output for a batch, between the limits, and the saved x."""

    def weight_grad(self, gy: Array, saved: Any) -> dict[str, Array]:
        """Return the gradients of the parameters, summed over batch and positions."""
        if isinstance(saved, UnbatchedSample):
            gy, saved = batch_of(gy), saved.batch
        xp = self._check_gy(gy, saved)
        inner = self._padded(xp, saved)
        y, x = (inner, gy) if self.transposed else (gy, inner)
        grads = {"weight": self._kept(correlate(xp, y, x, self._inner, self.groups))}
        if "bias" in self.params:
            grads["bias"] = _channel_sums(xp, gy)
        return grads

    def _input_grad_work(self, shape: tuple[int, ...], saved: Array) -> Work:
        """Return the cost of one kernel: a matrix product and its windows, which are written and added up (or read)."""
        sizes, windows = self._padded_sizes(shape[2:]), self._inner
        sizes = self.output_size(sizes) if self.transposed else sizes  # the axes of the windows
        weight = self.params["weight"]
        positions = shape[0] * prod(windows.output_size(sizes))
        taps, channels = prod(windows.kernel), weight.shape[1] * self.groups
        inputs, outputs = shape[0] * channels * prod(sizes), positions * weight.shape[0]
        return Work(
            flops=2 * positions * weight.size,
            values=weight.size + 2 * positions * channels * taps + 2 * (inputs + outputs),
            calls=1,
            entries=conv_entries(channels, weight.shape[0], sizes, windows, self.groups, self._host_mask()),
        )

    def _padded(self, xp: ModuleType, x: Array) -> Array:
        """Return x as the kernels take it: they add zeros themselves."""
        return x if self._borders is None else self._borders.padded(xp, x)

    def _padded_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the axes of padded x."""
        return sizes if self._borders is None else self.windows.padded_size(sizes)

    def _check_x(self, x: Array) -> ModuleType:
        weight = self.params["weight"]
        shape = (None, self.in_channels, *(None,) * self.ndim)
        xp = check_input(x, dtype=weight.dtype, shape=shape, like=weight)
        if 0 in x.shape[2:]:
            raise ShapeError("An axis of x behind the channels is empty", expected="at least one element on each",
                             got=x.shape, remedy="Skip empty images")  # fmt: skip
        return xp

    def _check_gy(self, gy: Array, saved: Array) -> ModuleType:
        weight = self.params["weight"]
        return check_gy(
            gy, (saved.shape[0], self.out_channels, *self.output_size(saved.shape[2:])), weight.dtype, weight
        )


class Conv(ConvNd):
    """The base of `Conv1d`, `Conv2d` and `Conv3d`, with torch.nn's arguments; (in_channels, …) is an unbatched sample.

    Parameters
    ----------
    in_channels, out_channels
        Channels of the input and the output.
    kernel_size, stride, dilation
        An integer for all axes, or one per axis.
    padding
        Elements at both ends: an integer, one per axis, ``"same"`` or ``"valid"``; past torch.nn, a pair (before,
        after) per axis.
    groups
        Must divide both numbers of channels; ``groups=in_channels`` is a depthwise convolution.
    bias
        Whether to add a bias.
    padding_mode
        The padding: ``"zeros"``; ``"reflect"``, a mirror image; ``"replicate"``, the outermost elements; or
        ``"circular"``, the other end. A mirror image must be smaller than the input, a circle at most as large.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    rng
        Generator or seed of the initial values, U(±1/√(in_channels / groups · taps)).

    Notes
    -----
    Parameters: ``weight`` (out_channels, in_channels / groups, *kernel_size), ``bias`` (out_channels,).
    Pruning (`sparsebp.prune`) adds the buffer ``weight_mask``. On the host, a few samples at a time are copied, once
    per tap of the kernel; on a GPU, nothing is.
    """

    padding_modes = ("zeros", "reflect", "replicate", "circular")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Lengths,
        stride: Lengths = 1,
        padding: Padding = 0,
        dilation: Lengths = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = np.float32,
        *,
        rng: Seed = None,
    ) -> None:
        windows = Windows.of(self.ndim, kernel_size, stride, padding, dilation)
        super().__init__(in_channels, out_channels, windows, groups, bias, padding_mode, dtype, rng, device)
        self.padding = padding

    def _forward(self, x: Array, limits: tuple[float, float] | None = None) -> tuple[Array, Array]:
        xp = self._check_x(x)
        bias = self.params.get("bias")
        return convolve(xp, self._taps, self._padded(xp, x), self._inner, self.groups, bias, limits), x

    def _input_grad(self, gy: Array, saved: Array) -> Array:
        xp = self._check_gy(gy, saved)
        sizes = self._padded_sizes(saved.shape[2:])
        g = convolve_t(xp, self._taps, gy, self._inner, self.groups, sizes)
        return g if self._borders is None else self._borders.folded(xp, g, saved.shape[2:])

    def _jacobian_t(self, saved: Array) -> Any:
        from sparsebp.jacobians.operators import border_jacobian_t, conv_jacobian_t

        sizes, w = self._padded_sizes(saved.shape[2:]), self._inner
        jacobian = conv_jacobian_t(
            self._taps, sizes, w.stride, w.padding, w.dilation, self.groups, layout="chw",
            mask=self._host_mask(),
        )  # fmt: skip
        if self._borders is None:
            return jacobian
        # An element that is repeated is read at several places of a window: the product adds up the weights there.
        return border_jacobian_t(saved, *self._borders) @ jacobian


class Conv1d(Conv):
    """A convolution of (B, in_channels, L), as `torch.nn.Conv1d`; see `Conv`."""

    ndim = 1


class Conv2d(Conv):
    """A convolution of (B, in_channels, H, W), as `torch.nn.Conv2d`; see `Conv`."""

    ndim = 2


class Conv3d(Conv):
    """A convolution of (B, in_channels, D, H, W), as `torch.nn.Conv3d`; see `Conv`."""

    ndim = 3


class ConvTranspose(ConvNd):
    """The base of `ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d`, with torch.nn's arguments.

    It takes batches (B, in_channels, …) and unbatched samples (in_channels, …).

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, dilation, groups, bias, device, dtype
        As for `Conv`.
    padding_mode
        Only ``"zeros"``, as in PyTorch.
    padding
        Elements cut off at both ends of the output: an integer, one per axis; past torch.nn, a pair (before, after) per
        axis.
    output_padding
        Elements added at the end of the output, less than the stride or the dilation.
    rng
        Generator or seed of the initial values, U(±1/√(out_channels / groups · taps)).

    Notes
    -----
    Parameters: ``weight`` (in_channels, out_channels / groups, *kernel_size), ``bias`` (out_channels,).
    """

    transposed = True
    output_padding = Fixed()

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Lengths,
        stride: Lengths = 1,
        padding: Padding = 0,
        output_padding: Lengths = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Lengths = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = np.float32,
        *,
        rng: Seed = None,
    ) -> None:
        windows = Windows.transposed(self.ndim, kernel_size, stride, padding, output_padding, dilation)
        super().__init__(in_channels, out_channels, windows, groups, bias, padding_mode, dtype, rng, device)
        self.padding, self.output_padding = padding, lengths("output_padding", output_padding, self.ndim, 0)

    def _forward(self, x: Array, limits: tuple[float, float] | None = None) -> tuple[Array, Array]:
        xp = self._check_x(x)
        sizes, bias = self.output_size(x.shape[2:]), self.params.get("bias")
        return convolve_t(xp, self._taps, x, self.windows, self.groups, sizes, bias, limits), x

    def _input_grad(self, gy: Array, saved: Array) -> Array:
        xp = self._check_gy(gy, saved)
        return convolve(xp, self._taps, gy, self.windows, self.groups)

    def _jacobian_t(self, saved: Array) -> Any:
        from sparsebp.jacobians import conv_transpose_jacobian_t

        w = self.windows
        return conv_transpose_jacobian_t(
            self._taps, saved.shape[2:], w.stride, self.padding, self.output_padding, self.groups,
            w.dilation, mask=self._host_mask(),
        )  # fmt: skip


class ConvTranspose1d(ConvTranspose):
    """A transposed convolution of (B, in_channels, L), as `torch.nn.ConvTranspose1d`; see `ConvTranspose`."""

    ndim = 1


class ConvTranspose2d(ConvTranspose):
    """A transposed convolution of (B, in_channels, H, W), as `torch.nn.ConvTranspose2d`; see `ConvTranspose`."""

    ndim = 2


class ConvTranspose3d(ConvTranspose):
    """A transposed convolution of (B, in_channels, D, H, W), as `torch.nn.ConvTranspose3d`; see `ConvTranspose`."""

    ndim = 3


def convolve(
    xp: ModuleType, weight: Array, x: Array, windows: Windows, groups: int, bias: Array | None = None,
    limits: tuple[float, float] | None = None,
) -> Array:  # fmt: skip
    """Return y (B, out_channels, *outputs) for x (B, in_channels, *inputs); weight (out, in / groups, *kernel)."""
    y = host_pool.empty(xp, (len(x), len(weight), *windows.output_size(x.shape[2:])), x.dtype)
    arrays, out = (_three(xp, weight), _three(xp, x)), _three(xp, y)
    kernels.get(xp).unchecked.convolve(*arrays, *_options(windows), groups, out, bias, limits)
    return y


def convolve_t(
    xp: ModuleType, weight: Array, y: Array, windows: Windows, groups: int, input_size: tuple[int, ...],
    bias: Array | None = None, limits: tuple[float, float] | None = None,
) -> Array:  # fmt: skip
    """Return (B, in_channels, *input_size) for y (B, out_channels, *outputs): added up where windows overlap."""
    x = host_pool.empty(xp, (len(y), weight.shape[1] * groups, *input_size), y.dtype)
    arrays, out = (_three(xp, weight), _three(xp, y)), _three(xp, x)
    kernels.get(xp).unchecked.convolve_t(*arrays, *_options(windows), groups, out, bias, limits)
    return x


def correlate(xp: ModuleType, y: Array, x: Array, windows: Windows, groups: int) -> Array:
    """Return the gradient at the weights, (out_channels, in_channels / groups, *kernel), for y the gradient at y."""
    weight = host_pool.empty(xp, (y.shape[1], x.shape[1] // groups, *windows.kernel), x.dtype)
    kernels.get(xp).unchecked.correlate(_three(xp, y), _three(xp, x), *_options(windows), groups, _three(xp, weight))
    return weight


def _channel_sums(xp: ModuleType, y: Array) -> Array:
    """Return the sums of y (B, channels, …) over batch and positions: the gradient at a bias."""
    flat = xp.ascontiguousarray(y).reshape(*y.shape[:2], prod(y.shape[2:]))
    if not backend.is_host(xp):  # one launch; the kernel's sums of pieces take more
        return flat.sum(axis=(0, 2))
    sums, squares = (xp.empty(y.shape[1], y.dtype) for _ in range(2))
    kernels.get(xp).unchecked.channel_products(flat, flat, xp.zeros_like(sums), sums, squares)  # bound by memory
    return sums


@lru_cache(maxsize=256)
def _options(windows: Windows) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return stride, padding before and dilation on three axes, as the kernels take them."""
    ones, zeros = (1,) * (3 - len(windows.kernel)), (0,) * (3 - len(windows.kernel))
    return ones + windows.stride, zeros + windows.before, ones + windows.dilation


def _three(xp: ModuleType, array: Array) -> Array:
    """Return a contiguous array with three axes after the first two; missing ones come first and have length 1."""
    return xp.ascontiguousarray(array).reshape(*array.shape[:2], *(1,) * (5 - array.ndim), *array.shape[2:])
