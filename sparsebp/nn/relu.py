"""ReLU: max(x, 0)."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.nn.pointwise import Pointwise
from sparsebp.types import Array


class ReLU(Pointwise):
    """``max(x, 0)``, as `torch.nn.ReLU`; the slope at 0 is 0. A NaN stays a NaN."""

    told_by = "relu"

    def function(self, x: Array) -> Array:
        """Return max(x, 0)."""
        return backend.namespace(x).maximum(x, 0)

    def slope(self, y: Array) -> Array:
        """Return 1 where y > 0, else 0."""
        return (y > 0).astype(y.dtype)
