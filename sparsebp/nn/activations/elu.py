"""ELU: x, or an exponential that levels off below zero."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.arguments import check_number
from sparsebp.core.types import Array
from sparsebp.nn.activations.pointwise import Pointwise


class ELU(Pointwise):
    """``x`` where x > 0, else ``alpha (exp(x) - 1)``, as `torch.nn.ELU`; the slope at 0 is `alpha`.

    Parameters
    ----------
    alpha
        -alpha is the limit at -∞.

    Raises
    ------
    OptionError
        It is not a finite number.
    """

    keeps = "x"  # near -∞, y + alpha loses the digits of the slope

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = check_number("alpha", alpha)

    def function(self, x: Array) -> Array:
        """Return the ELU of x."""
        xp = backend.namespace(x)
        return xp.where(x > 0, x, self.alpha * xp.expm1(xp.minimum(x, 0)))

    def slope(self, kept: Array) -> Array:
        """Return 1 where x > 0, else ``alpha · exp(x)``."""
        xp = backend.namespace(kept)
        return xp.where(kept > 0, 1.0, self.alpha * xp.exp(xp.minimum(kept, 0)))
