"""SiLU: x times its sigmoid."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.nn.activations.pointwise import Pointwise


class SiLU(Pointwise):
    """``x / (1 + exp(-x))``, as `torch.nn.SiLU`."""

    keeps = "x"  # not monotone

    def function(self, x: Array) -> Array:
        """Return ``x · sigmoid(x)``."""
        return x * stable_sigmoid(x)

    def slope(self, kept: Array) -> Array:
        """Return ``s (1 + x (1 - s))`` with s = sigmoid(x)."""
        s = stable_sigmoid(kept)
        return s * (1 + kept * (1 - s))


def stable_sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` to the last digits on both sides, without overflow."""
    xp = backend.namespace(x)
    z = xp.exp(-xp.abs(x))
    return xp.where(x > 0, 1.0, z) / (1 + z)
