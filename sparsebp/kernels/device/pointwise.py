"""Launchers of kernels of one pass over memory: ``channels.cu``, ``clamp.cu``, ``gelu.cu`` and ``training.cu``."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import BLOCK, WARP, Launcher, ceil_div, check_int32, real_define


class PointwiseKernels(Launcher):
    """Device side of these kernels in `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def channel_normalise(
        self, x: Array, weight: Array | None, bias: Array | None, eps: float, mean: Array, var: Array, scale: Array,
        out: Array, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Mean and variance, a block a channel; what follows from them; a linear map, a thread an element."""
        self._channels("channel_moments", x, len(mean), x, mean, var)
        factor = self.xp.empty(mean.shape, mean.dtype)
        self.channel_factors(var, eps, weight, scale, factor)
        self.channel_scale(x, mean, factor, self.xp.zeros(mean.shape, mean.dtype) if bias is None else bias, out)
        if limits is not None:
            self.clamp(out.reshape(-1), *limits, out.reshape(-1))

    def channel_back(
        self, gy: Array, x: Array, mean: Array, scale: Array, weight: Array | None, sums: Array, products: Array,
        out: Array, known: bool = False, y: Array | None = None, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Two sums, a block a channel; what follows from them; what it takes off, a thread an element."""
        gy = self._counted(gy, y, limits)
        if not known:
            self.channel_products(gy, x, mean, sums, products)
        offset, slope = self.xp.empty(mean.shape, mean.dtype), self.xp.empty(mean.shape, mean.dtype)
        count = mean.dtype.type(x.shape[0] * x.shape[2])
        self._numbers("channel_slopes", sums, sums, products, scale, count, offset, slope)
        factor, blocks = scale if weight is None else scale * weight, ceil_div(x.size, BLOCK)
        self._channels("channel_centre", x, blocks, gy, x, mean, offset, slope, factor, out)

    def channel_scale(self, x: Array, mean: Array, factor: Array, offset: Array, out: Array) -> None:
        """A linear map for every channel; a thread an element."""
        self._channels("channel_scale", x, ceil_div(x.size, BLOCK), x, mean, factor, offset, out)

    def channel_products(
        self, gy: Array, x: Array, mean: Array, sums: Array, products: Array, y: Array | None = None,
        limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Two sums over every channel in one pass; a block a channel."""
        self._channels("channel_products", x, len(mean), self._counted(gy, y, limits), x, mean, sums, products)

    def _counted(self, gy: Array, y: Array | None, limits: tuple[float, float] | None) -> Array:
        """Return a gradient with zeros where y is not within the limits."""
        if y is None or limits is None:
            return gy
        out = self.xp.empty(gy.shape, gy.dtype)
        self.clamp_grad(gy.reshape(-1), y.reshape(-1), *limits, out.reshape(-1))
        return out

    def _channels(self, name: str, x: Array, blocks: int, *arrays: Array) -> None:
        check_int32(name, {"the elements of a channel": x.shape[0] * x.shape[2]})
        args = (*arrays, *map(np.int32, x.shape))
        self._launch("channels.cu", name, real_define(x), blocks, (BLOCK,), args)

    def channel_track(
        self, mean: Array, var: Array, momentum: float, correction: float, running_mean: Array, running_var: Array
    ) -> None:
        """Running statistics, one step on; a thread a channel."""
        number = mean.dtype.type
        factors = (number(momentum), number(1 - momentum), number(correction))
        self._numbers("channel_track", mean, mean, var, *factors, running_mean, running_var)

    def channel_factors(self, var: Array, eps: float, weight: Array | None, scale: Array, factor: Array) -> None:
        """What a channel is divided by, inverted, and what it is multiplied with; a thread a channel."""
        self._numbers("channel_factors", var, var, var.dtype.type(eps), weight, scale, factor)

    def _numbers(self, name: str, like: Array, *args: Any) -> None:
        grid = ceil_div(len(like), BLOCK)
        self._launch("channels.cu", name, real_define(like), grid, (BLOCK,), (*args, np.int32(len(like))))

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """Every element between the limits; a thread an element."""
        self._elements("clamp", low, high, out, x)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """The gradient where y lies above the lower limit and not above the upper one."""
        self._elements("clamp_grad", low, high, out, gy, y)

    def _elements(self, name: str, low: float, high: float, out: Array, *arrays: Array) -> None:
        limit = out.dtype.type
        args = (*arrays, limit(low), limit(high), out, np.int64(out.size))
        self._launch("clamp.cu", name, real_define(out), ceil_div(out.size, BLOCK), (BLOCK,), args)

    def gelu(self, x: Array, approximate: bool, out: Array) -> None:
        """Every element times its probability; a thread an element."""
        self._activation("gelu", approximate, out, x)

    def gelu_grad(self, gy: Array, x: Array, approximate: bool, out: Array) -> None:
        """The gradient times the slope; a thread an element."""
        self._activation("gelu_grad", approximate, out, gy, x)

    def _activation(self, name: str, approximate: bool, out: Array, *arrays: Array) -> None:
        args = (*arrays, np.int32(approximate), out, np.int64(out.size))
        self._launch("gelu.cu", name, real_define(out), ceil_div(out.size, BLOCK), (BLOCK,), args)

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Loss and gradient of every row; a warp a row. A target outside [0, C) makes its row NaN."""
        rows, classes = logits.shape
        block = (WARP, BLOCK // WARP)
        self._launch(
            "training.cu",
            "softmax_cross_entropy",
            real_define(logits),
            ceil_div(rows, block[1]),
            block,
            (logits, target, losses, grad, np.int64(rows), np.int64(classes)),
        )
