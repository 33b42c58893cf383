"""Convolutions over one, two and three axes: windows are laid side by side, and the weights are one matrix product."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.types import Array, Seed
from sparsebp.nn.layers.conv_nd import ConvNd
from sparsebp.nn.layers.convolution import convolve, convolve_t, correlate
from sparsebp.patterns.windows import Lengths, Padding, Windows


class Conv(ConvNd):
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
    Parameters: ``weight`` (out_channels, in_channels / groups, *kernel_size), ``bias`` (out_channels,).
    Pruning (`sparsebp.prune`) adds the buffer ``weight_mask``. On a GPU, `forward` takes memory for one copy of the
    input per tap of the kernel, `weight_grad` and `input_grad` as well; on the host, of a few samples at a time.
    """

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
        windows = Windows.of(self.ndim, kernel_size, stride, padding, dilation)
        super().__init__(in_channels, out_channels, windows, groups, bias, padding_mode, False, dtype, rng)

    def output_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the output's axes after the channels.

        Raises
        ------
        ShapeError
            The input is smaller than a window.
        """
        return self.windows.output_size(input_size)

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return y (B, out_channels, *outputs) for x (B, in_channels, *inputs); `saved` is x.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x has another number of axes or channels, or is smaller than a window; or its dtype is not the weights'.
        """
        xp = self._check_x(x)
        return self._add_bias(convolve(xp, self._weight(), x, self.windows, self.groups)), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return the gradient at x, of its shape: Wᵀ gy, added up where windows overlap."""
        xp = self._check_gy(gy, saved)
        return convolve_t(xp, self.params["weight"], gy, self.windows, self.groups, saved.shape[2:])

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return the gradients of ``weight`` and ``bias``, summed over batch and positions."""
        xp = self._check_gy(gy, saved)
        return self._with_bias(xp, correlate(xp, gy, saved, self.windows, self.groups), gy)

    def jacobian_t(self, saved: Array) -> Any:
        """Return the transposed Jacobian, shared by the batch; a sample's elements are counted channels first."""
        from sparsebp.jacobians.conv import conv_jacobian_t

        w = self.windows
        return conv_jacobian_t(
            self.params["weight"], saved.shape[2:], w.stride, w.padding, w.dilation, self.groups,
            layout="chw", mask=self._kept(),
        )  # fmt: skip

    def _windowed_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        return input_size


class Conv1d(Conv):
    """A convolution of (B, in_channels, L), as `torch.nn.Conv1d`; the arguments are those of `Conv`."""

    ndim = 1


class Conv2d(Conv):
    """A convolution of (B, in_channels, H, W), as `torch.nn.Conv2d`; the arguments are those of `Conv`."""

    ndim = 2


class Conv3d(Conv):
    """A convolution of (B, in_channels, D, H, W), as `torch.nn.Conv3d`; the arguments are those of `Conv`."""

    ndim = 3
