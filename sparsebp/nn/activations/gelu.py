"""GELU: x times the normal distribution's cumulative probability, exact or through tanh."""

from __future__ import annotations

import math

from sparsebp import backend
from sparsebp.core.arguments import check_choice
from sparsebp.core.types import Array
from sparsebp.nn.activations.pointwise import Pointwise

_ROOT = math.sqrt(2 / math.pi)
_CUBE = 0.044715


class GELU(Pointwise):
    """``x Φ(x)``, as `torch.nn.GELU` (Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016, §2).

    Parameters
    ----------
    approximate
        ``"none"``: Φ from the error function; ``"tanh"``: ``x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))``.

    Raises
    ------
    OptionError
        `approximate` is neither.

    Notes
    -----
    The tanh form's slope has its limit, 0 or 1, where PyTorch's overflows to NaN (|x| above 1e154 in float64).
    """

    keeps = "x"  # not monotone

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = check_choice("approximation of GELU", approximate, ("none", "tanh"))

    def function(self, x: Array) -> Array:
        """Return the GELU of x."""
        return x * self._probability(x)

    def slope(self, kept: Array) -> Array:
        """Return ``Φ(x) + x Φ'(x)``."""
        xp = backend.namespace(kept)
        probability = self._probability(kept)
        if self.approximate == "none":
            density = xp.exp(-0.5 * kept * kept) * (1 / math.sqrt(2 * math.pi))
        else:
            square = xp.minimum(kept * kept, 1e4)  # from there on the probability is 0 or 1 to the last digit
            density = 2 * probability * (1 - probability) * (_ROOT * (1 + 3 * _CUBE * square))
        return probability + kept * density

    def _probability(self, x: Array) -> Array:
        if self.approximate == "none":
            return 0.5 * (1 + backend.erf(x * math.sqrt(0.5)))
        return 0.5 * (1 + backend.namespace(x).tanh(_ROOT * (x + _CUBE * x * x * x)))
