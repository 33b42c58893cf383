"""Sliding windows over an input: what max and average pooling share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.nn.layer import Layer
from sparsebp.patterns import PoolPattern
from sparsebp.patterns.pool import window_pattern
from sparsebp.patterns.windows import PoolWindows


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
        self.window = PoolWindows.of(self.dims, kernel_size, stride, padding, dilation, ceil_mode)

    def pool(self, shape: tuple[int, ...]) -> PoolPattern:
        """Return the pattern for an input of `shape` (B, C, …)."""
        return window_pattern(shape[1], shape[2:], self.window)

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:2], *self.window.output_size(shape[2:]))
