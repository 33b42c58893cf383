"""Sequences of different lengths in one batch, padded at the end: masks, and time reversal sample by sample."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import DTypeError, OptionError, ShapeError


class Lengths:
    """The valid lengths of a batch, on the device of its data."""

    # values: (B,) int64.
    # valid: (T, B, 1) bool: true before a sample's end.
    # samples: `arange(B)`.
    # reversed: (T, B): for each step the step that takes its place when every sample is reversed within its length.

    def __init__(self, values: np.ndarray, steps: int, xp: ModuleType) -> None:
        self.values = xp.asarray(values)
        self.samples = xp.arange(values.size)
        time = xp.arange(steps)[:, None]
        self.valid = (time < self.values)[:, :, None]
        self.reversed = xp.where(time < self.values, self.values - 1 - time, time)

    def mask(self, array: Array) -> Array:
        """Return a copy of `array` (T, B, n) with zeros (also for NaN) past every sample's end."""
        return backend.namespace(array).where(self.valid, array, array.dtype.type(0))

    def fill(self, array: Array, value: float) -> None:
        """Write `value` into `array` (T, B, n) past every sample's end."""
        backend.namespace(array).copyto(array, array.dtype.type(value), where=~self.valid)

    def reverse(self, array: Array) -> Array:
        """Return `array` (T, B, n) with every sample's valid steps in reverse order; its own inverse."""
        return array[self.reversed, self.samples]


def parse_lengths(lengths: Any, steps: int, batch: int, xp: ModuleType) -> Lengths | None:
    """Check `lengths` against an input of shape (steps, batch, …)."""
    # Returns Lengths or None: None if no length was given or all are full.
    if lengths is None:
        return None
    try:
        values = backend.to_host(backend.asarray("lengths", lengths))
    except ValueError:  # a ragged list
        values = np.asarray(None)
    if values.dtype.kind not in "iu":
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=values.dtype)
    if values.shape != (batch,):
        raise ShapeError("lengths has the wrong shape", expected=(batch,), got=values.shape)
    if values.min() < 1 or values.max() > steps:
        raise OptionError("lengths is out of range", expected=f"1 to {steps} (the number of steps of x)",
                          got=f"{values.min()} to {values.max()}",
                          remedy="Leave empty sequences out, and pad x to the longest one")  # fmt: skip
    if values.min() == steps:
        return None
    return Lengths(values.astype(np.int64), steps, xp)


def reverse_time(array: Array, lengths: Lengths | None) -> Array:
    """Return `array` (T, B, n) reversed in time, C-contiguous; with `lengths`, each sample within its own length."""
    if lengths is not None:
        return lengths.reverse(array)
    return backend.namespace(array).ascontiguousarray(array[::-1])
