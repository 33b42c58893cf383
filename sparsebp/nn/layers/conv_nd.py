"""What convolutions and transposed convolutions share: channels, initial values, checks of what comes in."""

from __future__ import annotations

import abc
from math import prod
from types import ModuleType
from typing import Any, ClassVar

from sparsebp import backend
from sparsebp.core.arguments import check_choice, check_flag, check_generator
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array, Seed
from sparsebp.nn import initial
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.nn.layers import convolution
from sparsebp.nn.prunable import Prunable
from sparsebp.nn.work import Work
from sparsebp.patterns.conv import conv_entries
from sparsebp.patterns.windows import Windows, check_channels


class ConvNd(Prunable):
    """The base of `Conv` and `ConvTranspose`, over `ndim` axes.

    Parameters
    ----------
    in_channels, out_channels, groups, bias, padding_mode, dtype, rng
        As the subclasses state.
    windows
        Those of the convolution; of a transposed one, they slide over the output.
    transposed
        Whether the weight is laid out with the input's channels first.
    """

    replayable = True

    ndim: ClassVar[int]

    def __init__(
        self, in_channels: int, out_channels: int, windows: Windows, groups: int, bias: bool, padding_mode: str,
        transposed: bool, dtype: Any, rng: Seed,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("padding_mode", padding_mode, ("zeros",))
        in_channels, out_channels, groups = check_channels(in_channels, out_channels, groups)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.windows = windows
        first, second = (in_channels, out_channels) if transposed else (out_channels, in_channels)
        shape = (first, second // groups, *windows.kernel)
        rng, dtype = check_generator("rng", rng), backend.float_dtype(dtype)
        bound = initial.fan_in_bound(prod(shape[1:]))
        self.params["weight"] = initial.uniform(rng, shape, bound, dtype)
        if check_flag("bias", bias):
            self.params["bias"] = initial.uniform(rng, (out_channels,), bound, dtype)

    @abc.abstractmethod
    def output_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the output's axes after the channels.

        Raises
        ------
        ShapeError
            There is no output.
        """

    def input_grad_work(self, shape: tuple[int, ...], saved: Array) -> Work:
        """Return the cost of one kernel: a matrix product and its windows, which are written and added up (or read)."""
        sizes = self._windowed_size(shape[2:])
        weight = self.params["weight"]
        positions = shape[0] * prod(self.windows.output_size(sizes))
        taps, channels = prod(self.windows.kernel), weight.shape[1] * self.groups  # of what the windows slide over
        inputs, outputs = shape[0] * channels * prod(sizes), positions * weight.shape[0]
        kept = self._kept()
        return Work(
            flops=2 * positions * weight.size,
            values=weight.size + 2 * positions * channels * taps + 2 * (inputs + outputs),
            calls=1,
            entries=conv_entries(channels, weight.shape[0], sizes, self.windows, self.groups, kept),
        )

    @abc.abstractmethod
    def _windowed_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the axes that the windows slide over: the input's, or the output's."""

    def _check_x(self, x: Array) -> ModuleType:
        weight = self.params["weight"]
        shape = (None, self.in_channels, *(None for _ in range(self.ndim)))
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

    def _add_bias(self, y: Array) -> Array:
        """Add the bias to y, in place, and return it."""
        if "bias" in self.params:
            y += self.params["bias"].reshape(-1, *(1 for _ in y.shape[2:]))
        return y

    def _with_bias(self, xp: ModuleType, weight_grad: Array, gy: Array) -> dict[str, Array]:
        """Return the gradient at the weight, and at the bias if there is one."""
        grads = {"weight": self._masked(weight_grad)}
        if "bias" in self.params:
            grads["bias"] = convolution.channel_sums(xp, gy)
        return grads
