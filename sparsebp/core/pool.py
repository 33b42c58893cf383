"""`Pool`: large temporary arrays whose memory is used again."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

SMALL = 1 << 17
"""Bytes of an array that the allocator keeps by itself."""


class Pool:
    """Large arrays that are used again as soon as nothing else refers to them.

    The system hands out new memory page by page, which takes longer than the arithmetic on it.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, list[np.ndarray]] = {}
        self.left = 1 << 26  # bytes that it may still keep
        self.alone = self._uses([np.empty(0)])[0]  # as this interpreter counts

    @staticmethod
    def _uses(buffers: list[np.ndarray]) -> list[int]:
        return [sys.getrefcount(buffer) for buffer in buffers]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array as `numpy.empty` does."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < SMALL:
            return np.empty(shape, dtype)
        unit = 1 << max(size.bit_length() - 4, 0)
        size = -(-size // unit) * unit  # one for arrays of nearly the same size
        buffers = self.buffers.setdefault(size, [])
        for buffer, uses in zip(buffers, self._uses(buffers), strict=True):
            if uses == self.alone:
                return np.ndarray(shape, dtype, buffer)
        if size > self.left:
            return np.empty(shape, dtype)
        self.left -= size
        buffers.append(np.empty(size, np.uint8))
        return np.ndarray(shape, dtype, buffers[-1])
