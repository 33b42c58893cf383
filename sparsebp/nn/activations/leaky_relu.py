"""LeakyReLU: x, or a small multiple of it below zero."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.arguments import check_number
from sparsebp.core.types import Array
from sparsebp.nn.activations.pointwise import Pointwise


class LeakyReLU(Pointwise):
    """``x`` where x > 0, else ``negative_slope · x``, as `torch.nn.LeakyReLU`; the slope at 0 is `negative_slope`.

    Parameters
    ----------
    negative_slope
        Slope below zero, of any sign.

    Raises
    ------
    OptionError
        It is not a finite number.
    """

    keeps = "x"  # with a slope of 0 or below, y does not tell the sign of x

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = check_number("negative_slope", negative_slope)

    def function(self, x: Array) -> Array:
        """Return x or ``negative_slope · x``."""
        return backend.namespace(x).where(x > 0, x, x * self.negative_slope)

    def slope(self, kept: Array) -> Array:
        """Return 1 where x > 0, else `negative_slope`; a NaN counts as not above 0."""
        return backend.namespace(kept).where(kept > 0, 1.0, self.negative_slope).astype(kept.dtype)
