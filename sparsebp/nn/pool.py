"""Sliding windows over an input: what max and average pooling share.

Both run over the places of a kernel, not over windows: one place of all windows is a strided view of the padded input,
and no two windows have the same element there. So the input gradient is a sum over views, without scatter and atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.nn.layer import Layer
from sparsebp.nn.work import Work
from sparsebp.patterns import PoolPattern
from sparsebp.patterns.pool import window_pattern
from sparsebp.patterns.pool_window import PoolWindow
from sparsebp.types import Array


@dataclass(frozen=True)
class PoolSaved:
    """What the forward of a pooling layer leaves: the input's shape and dtype, and each window's winner or weight.

    `choice` is (B, C, …) places of the maxima for a max-pool, (…) weights of the windows for an average.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    choice: Array


class SlidingPool(Layer):
    """Windows that slide over the last `dims` axes of (B, C, …)."""

    replayable = True

    dims: int

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.window = PoolWindow.of(self.dims, kernel_size, stride, padding, dilation, ceil_mode)

    def input_grad_work(self, shape: tuple[int, ...], saved: PoolSaved) -> Work:
        """Return the cost of some passes over the windows for every place of the kernel."""
        places, windows = prod(self.window.kernel), prod(self._out_shape(shape))
        return Work(2 * places * windows, 6 * places * windows + 4 * prod(shape), 3 * places + 2)

    def pool(self, shape: tuple[int, ...]) -> PoolPattern:
        """Return the pattern for an input of `shape` (B, C, …)."""
        return window_pattern(shape[1], shape[2:], self.window)

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:2], *self.window.out_size(shape[2:]))

    def _padded(self, xp: ModuleType, shape: tuple[int, ...], dtype: Any, value: float) -> tuple[Array, Array]:
        """Return an array that all windows fit into, full of `value`, and the view of it where the input lies."""
        w = self.window
        lengths = [
            max(pad + length, (count - 1) * stride + reach)
            for pad, length, count, stride, reach in zip(
                w.padding, shape[2:], w.out_size(shape[2:]), w.stride, w.reach, strict=True
            )
        ]
        whole = xp.full((*shape[:2], *lengths), value, dtype=dtype)
        inside = tuple(slice(pad, pad + length) for pad, length in zip(w.padding, shape[2:], strict=True))
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
