"""Transposed convolutions over one, two and three axes: the convolution's maps, with input and output exchanged."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.types import Array, Seed
from sparsebp.nn.layers.conv_nd import ConvNd
from sparsebp.nn.layers.convolution import convolve, convolve_t, correlate
from sparsebp.patterns.windows import Lengths, Padding, Windows, lengths


class ConvTranspose(ConvNd):
    """The base of `ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d`, with torch.nn's arguments.

    Parameters
    ----------
    in_channels, out_channels
        Channels of the input and the output.
    kernel_size, stride, dilation
        An integer for all axes, or one per axis.
    padding
        What is cut off at both ends of the output: an integer, one per axis; past torch.nn, a pair (before, after) per
        axis.
    output_padding
        Elements added at the end of the output, less than the stride or the dilation.
    groups
        Must divide both numbers of channels.
    bias
        Whether to add a bias.
    padding_mode
        Only ``"zeros"``.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, U(±1/√(out_channels / groups · taps)).

    Raises
    ------
    OptionError
        An option is out of range.

    Notes
    -----
    Parameters: ``weight`` (in_channels, out_channels / groups, *kernel_size), ``bias`` (out_channels,).
    """

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
        *,
        dtype: Any = np.float32,
        rng: Seed = None,
    ) -> None:
        windows = Windows.transposed(self.ndim, kernel_size, stride, padding, output_padding, dilation)
        super().__init__(in_channels, out_channels, windows, groups, bias, padding_mode, True, dtype, rng)
        self.padding, self.output_padding = padding, lengths("output_padding", output_padding, self.ndim, 0)

    def output_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the output's axes after the channels.

        Raises
        ------
        ShapeError
            There is no output.
        """
        return self.windows.input_size(input_size)

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return y (B, out_channels, *outputs) for x (B, in_channels, *inputs); `saved` is x.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x has another number of axes or channels, or there is no output; or its dtype is not the weights'.
        """
        xp = self._check_x(x)
        outputs = self.output_size(x.shape[2:])
        return self._add_bias(convolve_t(xp, self._weight(), x, self.windows, self.groups, outputs)), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return the gradient at x, of its shape: the convolution of gy."""
        xp = self._check_gy(gy, saved)
        return convolve(xp, self.params["weight"], gy, self.windows, self.groups)

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return the gradients of ``weight`` and ``bias``, summed over batch and positions."""
        xp = self._check_gy(gy, saved)
        return self._with_bias(xp, correlate(xp, saved, gy, self.windows, self.groups), gy)

    def jacobian_t(self, saved: Array) -> Any:
        """Return the transposed Jacobian, shared by the batch; a sample's elements are counted channels first."""
        from sparsebp.jacobians import conv_transpose_jacobian_t

        w = self.windows
        return conv_transpose_jacobian_t(
            self.params["weight"], saved.shape[2:], w.stride, self.padding, self.output_padding, self.groups,
            w.dilation, mask=self._kept(),
        )  # fmt: skip

    def _windowed_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        return self.output_size(input_size)


class ConvTranspose1d(ConvTranspose):
    """A transposed convolution of (B, in_channels, L), as `torch.nn.ConvTranspose1d`."""

    ndim = 1


class ConvTranspose2d(ConvTranspose):
    """A transposed convolution of (B, in_channels, H, W), as `torch.nn.ConvTranspose2d`."""

    ndim = 2


class ConvTranspose3d(ConvTranspose):
    """A transposed convolution of (B, in_channels, D, H, W), as `torch.nn.ConvTranspose3d`."""

    ndim = 3
