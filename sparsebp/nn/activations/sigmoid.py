"""Sigmoid."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.nn.activations.pointwise import Pointwise


class Sigmoid(Pointwise):
    """``1 / (1 + exp(-x))``, as `torch.nn.Sigmoid`."""

    told_by = "sigmoid"

    def function(self, x: Array) -> Array:
        """Return the sigmoid as ``(1 + tanh(x / 2)) / 2``, which overflows nowhere."""
        y = backend.namespace(x).tanh(x * 0.5)
        y *= 0.5
        y += 0.5
        return y

    def slope(self, y: Array) -> Array:
        """Return y (1 - y)."""
        return y * (1 - y)
