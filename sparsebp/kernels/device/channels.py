"""Launchers of the kernels over channels (``cuda/channels.cu``): a block a channel, or a thread an element."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import BLOCK, Launcher, ceil_div, real_define


class ChannelKernels(Launcher):
    """Device side of the kernels over channels in `sparsebp.kernels.api.Kernels`; shapes are stated there."""

    def channel_moments(self, x: Array, mean: Array, var: Array) -> None:
        """Mean and variance of every channel."""
        self._channels("channel_moments", x, len(mean), x, mean, var)

    def channel_scale(self, x: Array, mean: Array, factor: Array, offset: Array, out: Array) -> None:
        """A linear map for every channel."""
        self._channels("channel_scale", x, ceil_div(x.size, BLOCK), x, mean, factor, offset, out)

    def channel_products(self, gy: Array, x: Array, mean: Array, sums: Array, products: Array) -> None:
        """Two sums over every channel in one pass."""
        self._channels("channel_products", x, len(mean), gy, x, mean, sums, products)

    def channel_centre(
        self, gy: Array, x: Array, mean: Array, offset: Array, slope: Array, factor: Array, out: Array
    ) -> None:
        """What the statistics take off a gradient."""
        blocks = ceil_div(x.size, BLOCK)
        self._channels("channel_centre", x, blocks, gy, x, mean, offset, slope, factor, out)

    def _channels(self, name: str, x: Array, blocks: int, *arrays: Array) -> None:
        args = (*arrays, *map(np.int32, x.shape))
        self._launch("channels.cu", name, real_define(x), blocks, (BLOCK,), args)
