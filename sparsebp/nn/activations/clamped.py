"""The base of layers that cut x off at two values."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend import memory
from sparsebp.core.types import Array
from sparsebp.nn.activations.pointwise import Pointwise
from sparsebp.nn.layer import check_gy


class Clamped(Pointwise):
    """``min(max(x, low), high)``; the slope at both limits is 0, but 1 at an infinite y. A NaN stays a NaN."""

    @abc.abstractmethod
    def limits(self) -> tuple[float, float]:
        """Return the two values; the upper one may be infinite."""

    def function(self, x: Array) -> Array:
        """Return x between the limits."""
        xp = backend.namespace(x)
        y = memory.empty(xp, x.shape, x.dtype)
        kernels.get(xp).clamp(xp.ascontiguousarray(x).reshape(-1), *self.limits(), y.reshape(-1))
        return y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy between the limits, else 0."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        gx = memory.empty(xp, gy.shape, gy.dtype)
        flat = xp.ascontiguousarray(gy).reshape(-1)
        kernels.get(xp).clamp_grad(flat, saved.reshape(-1), *self._inside(saved.dtype), gx.reshape(-1))
        return gx

    def slope(self, kept: Array) -> Array:
        """Return 1 strictly between the limits, else 0."""
        low, last = self._inside(kept.dtype)
        return ((kept > low) & (kept <= last)).astype(kept.dtype)

    def _inside(self, dtype: np.dtype) -> tuple[Any, Any]:
        """Return the lower limit, as it rounds in this dtype, and the largest y whose slope is 1."""
        low, high = (dtype.type(limit) for limit in self.limits())
        return low, high if np.isinf(high) else np.nextafter(high, low)
