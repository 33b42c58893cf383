"""Convolutions over one, two and three axes: windows are laid side by side, and the weights are one matrix product."""

from __future__ import annotations

from itertools import product
from math import prod
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from sparsebp import backend
from sparsebp.errors import OptionError
from sparsebp.nn import init
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.types import Array, Seed
from sparsebp.windows import Lengths, Padding, Windows, check_channels, lengths


class Conv(Layer):
    """The base of `Conv1d`, `Conv2d` and `Conv3d`, with torch.nn's arguments.

    Parameters
    ----------
    in_channels, out_channels
        Channels of the input and the output.
    kernel_size, stride, dilation
        An integer for all axes, or one per axis.
    padding
        Zeros at both ends: an integer, one per axis, ``"same"`` or ``"valid"``; past torch.nn, a pair (before, after)
        per axis.
    groups
        Must divide both numbers of channels; ``groups=in_channels`` is a depthwise convolution.
    bias
        Whether to add a bias.
    padding_mode
        Only ``"zeros"``.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, U(±1/√(in_channels / groups · taps)).

    Raises
    ------
    OptionError
        An option is out of range.

    Notes
    -----
    Parameters: ``weight`` (out_channels, in_channels / groups, *kernel_size), ``bias`` (out_channels,). `forward` takes
    memory for one copy of the input per tap of the kernel, `weight_grad` and `input_grad` as well.
    """

    ndim: ClassVar[int]

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
        *,
        dtype: Any = np.float32,
        rng: Seed = None,
    ) -> None:
        super().__init__()
        if padding_mode != "zeros":
            raise OptionError(
                "Unknown padding_mode",
                expected="'zeros'",
                got=repr(padding_mode),
                remedy="Pad the input yourself for another mode",
            )
        self.in_channels, self.out_channels = lengths("channels", (in_channels, out_channels), 2, 1)
        (self.groups,) = lengths("groups", groups, 1, 1)
        check_channels(self.in_channels, self.out_channels, self.groups)
        self.windows = Windows.of(self.ndim, kernel_size, stride, padding, dilation)
        rng, dtype = init.generator(rng), backend.float_dtype(dtype)
        shape = (self.out_channels, self.in_channels // self.groups, *self.windows.kernel)
        bound = init.fan_in_bound(prod(shape[1:]))
        self.params["weight"] = init.uniform(rng, shape, bound, dtype)
        if bias:
            self.params["bias"] = init.uniform(rng, (self.out_channels,), bound, dtype)

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return y (B, out_channels, *outputs) for x (B, in_channels, *inputs); `saved` is x.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x has another number of axes or channels, or is smaller than a window; or its dtype is not the weights'.
        """
        weight = self.params["weight"]
        shape = (None, self.in_channels, *(None for _ in range(self.ndim)))
        xp = check_input(x, dtype=weight.dtype, shape=shape, like=weight)
        outputs = self.windows.output_size(x.shape[2:])
        y = self._matrix(weight) @ self._columns(xp, x)  # (groups, out_channels / groups, B * outputs)
        y = y.reshape(self.out_channels, x.shape[0], *outputs)
        if "bias" in self.params:
            y += self.params["bias"].reshape(-1, *(1 for _ in y.shape[1:]))
        return xp.ascontiguousarray(xp.moveaxis(y, 0, 1)), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return the gradient at x, of its shape: Wᵀ gy, added up where windows overlap."""
        xp = self._check(gy, saved)
        w, batch, outputs = self.windows, gy.shape[0], gy.shape[2:]
        columns = self._matrix(self.params["weight"]).swapaxes(1, 2) @ self._rows(xp, gy)
        columns = columns.reshape(self.in_channels, *w.kernel, batch, *outputs)
        padded = xp.zeros((self.in_channels, batch, *w.padded_size(saved.shape[2:])), dtype=gy.dtype)
        for tap in product(*map(range, w.kernel)):  # overlaps are between taps, never within one
            where = (
                slice(t * d, t * d + s * (n - 1) + 1, s)
                for t, d, s, n in zip(tap, w.dilation, w.stride, outputs, strict=True)
            )
            padded[(slice(None), slice(None), *where)] += columns[(slice(None), *tap)]
        return xp.ascontiguousarray(xp.moveaxis(padded[self._inside(saved)], 0, 1))

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return the gradients of ``weight`` and ``bias``, summed over batch and positions."""
        xp = self._check(gy, saved)
        rows = self._rows(xp, gy)
        weight = rows @ self._columns(xp, saved).swapaxes(1, 2)
        grads = {"weight": weight.reshape(self.params["weight"].shape)}
        if "bias" in self.params:
            flat = rows.reshape(self.out_channels, -1)
            grads["bias"] = flat @ xp.ones(flat.shape[1], dtype=flat.dtype)
        return grads

    def jacobian_t(self, saved: Array) -> Any:
        """Return the transposed Jacobian, shared by the batch; a sample's elements are counted channels first."""
        from sparsebp.jacobians.conv import conv_jacobian_t

        w = self.windows
        return conv_jacobian_t(
            self.params["weight"], saved.shape[2:], w.stride, w.padding, w.dilation, self.groups, layout="chw"
        )

    def _matrix(self, weight: Array) -> Array:
        """Return the weights as (groups, out_channels / groups, in_channels / groups * taps)."""
        return weight.reshape(self.groups, self.out_channels // self.groups, prod(weight.shape[1:]))

    def _rows(self, xp: ModuleType, gy: Array) -> Array:
        """Return gy as (groups, out_channels / groups, B * outputs)."""
        length = gy.shape[0] * prod(gy.shape[2:])
        return xp.moveaxis(gy, 1, 0).reshape(self.groups, self.out_channels // self.groups, length)

    def _columns(self, xp: ModuleType, x: Array) -> Array:
        """Return every window of x as a column: (groups, in_channels / groups * taps, B * outputs)."""
        w, batch = self.windows, x.shape[0]
        outputs = w.output_size(x.shape[2:])
        padded = xp.zeros((self.in_channels, batch, *w.padded_size(x.shape[2:])), dtype=x.dtype)
        padded[self._inside(x)] = xp.moveaxis(x, 1, 0)
        channel, sample, *axes = padded.strides
        taps = (step * d for step, d in zip(axes, w.dilation, strict=True))
        moves = (step * s for step, s in zip(axes, w.stride, strict=True))
        windows = xp.lib.stride_tricks.as_strided(
            padded, (self.in_channels, *w.kernel, batch, *outputs), (channel, *taps, sample, *moves)
        )
        of_group = self.in_channels // self.groups * prod(w.kernel)
        return windows.reshape(self.groups, of_group, batch * prod(outputs))

    def _inside(self, x: Array) -> tuple[slice, ...]:
        """Return where x lies in the padded input, whose first two axes are whole."""
        inner = (slice(before, before + n) for n, (before, _) in zip(x.shape[2:], self.windows.padding, strict=True))
        return (slice(None), slice(None), *inner)

    def _check(self, gy: Array, saved: Array) -> ModuleType:
        weight = self.params["weight"]
        shape = (saved.shape[0], self.out_channels, *self.windows.output_size(saved.shape[2:]))
        return check_gy(gy, shape, weight.dtype, weight)


class Conv1d(Conv):
    """A convolution of (B, in_channels, L), as `torch.nn.Conv1d`; the arguments are those of `Conv`."""

    ndim = 1


class Conv2d(Conv):
    """A convolution of (B, in_channels, H, W), as `torch.nn.Conv2d`; the arguments are those of `Conv`."""

    ndim = 2


class Conv3d(Conv):
    """A convolution of (B, in_channels, D, H, W), as `torch.nn.Conv3d`; the arguments are those of `Conv`."""

    ndim = 3
