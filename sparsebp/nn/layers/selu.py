"""SELU, the activation of self-normalizing networks."""

from __future__ import annotations

from sparsebp.core.types import Array
from sparsebp.nn.layers.activations import ELU

_ALPHA, _SCALE = 1.6732632423543772, 1.0507009873554805


class SELU(ELU):
    """``1.0507 x`` where x > 0, else ``1.0507 · 1.6733 (exp(x) - 1)``, as `torch.nn.SELU`.

    With weights of variance 1 / fan_in (`init.lecun_linear`) activations stay near mean 0 and variance 1 through many
    layers.

    Parameters
    ----------
    inplace
        Has no effect: the input is never written to.

    Notes
    -----
    Source: Klambauer et al., "Self-normalizing neural networks", 2017, Eq. 2 and 14.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__(_ALPHA, inplace)

    def function(self, x: Array) -> Array:
        """Return the SELU of x."""
        return super().function(x) * _SCALE

    def slope(self, saved: Array) -> Array:
        """Return 1.0507 where x > 0, else ``1.0507 · 1.6733 exp(x)``."""
        return super().slope(saved) * _SCALE
