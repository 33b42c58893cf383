"""Hardtanh: x cut off at two values."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.errors import OptionError
from sparsebp.nn.pointwise import Pointwise
from sparsebp.types import Array


class Hardtanh(Pointwise):
    """x limited to [min_val, max_val], as `torch.nn.Hardtanh`; the slope at both limits is 0. A NaN stays a NaN.

    Parameters
    ----------
    min_val, max_val
        The limits.

    Raises
    ------
    OptionError
        `max_val` is not above `min_val`.
    """

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        super().__init__()
        if not max_val > min_val:
            raise OptionError(
                "The limits of Hardtanh are in the wrong order", expected="max_val > min_val",
                got=f"min_val={min_val}, max_val={max_val}", remedy="Swap them",
            )  # fmt: skip
        self.min_val, self.max_val = float(min_val), float(max_val)

    def function(self, x: Array) -> Array:
        """Return x between the limits."""
        xp = backend.namespace(x)
        return xp.minimum(xp.maximum(x, self.min_val), self.max_val)

    def slope(self, kept: Array) -> Array:
        """Return 1 strictly between the limits, else 0."""
        # y against the limits as they round in this dtype
        low, high = kept.dtype.type(self.min_val), kept.dtype.type(self.max_val)
        return ((kept > low) & (kept < high)).astype(kept.dtype)
