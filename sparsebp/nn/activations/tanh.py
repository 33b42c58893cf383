"""Tanh."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.nn.activations.pointwise import Pointwise


class Tanh(Pointwise):
    """The hyperbolic tangent, as `torch.nn.Tanh`."""

    told_by = "tanh"

    def function(self, x: Array) -> Array:
        """Return tanh(x)."""
        return backend.namespace(x).tanh(x)

    def slope(self, y: Array) -> Array:
        """Return 1 - y²."""
        return 1 - y * y
