"""Softplus: a smooth ReLU."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.arguments import check_number
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.nn.activations.pointwise import Pointwise
from sparsebp.nn.activations.silu import stable_sigmoid


class Softplus(Pointwise):
    """``log(1 + exp(beta x)) / beta``, and x itself where ``beta x > threshold``, as `torch.nn.Softplus`.

    Parameters
    ----------
    beta
        The larger, the nearer to ReLU.
    threshold
        Above it the function is the identity, and its slope 1.

    Raises
    ------
    OptionError
        One of them is not a finite number, or `beta` is 0.
    """

    keeps = "x"

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__()
        self.beta, self.threshold = check_number("beta", beta), check_number("threshold", threshold)
        if self.beta == 0:
            raise OptionError("beta is zero", expected="another number", got=beta, remedy="Pass beta=1, say")

    def function(self, x: Array) -> Array:
        """Return the softplus of x."""
        xp, scaled = backend.namespace(x), x * self.beta
        # log(1 + exp(s)) = max(s, 0) + log(1 + exp(-|s|)), which overflows nowhere
        smooth = (xp.maximum(scaled, 0) + xp.log1p(xp.exp(-xp.abs(scaled)))) / self.beta
        return xp.where(scaled > self.threshold, x, smooth)

    def slope(self, kept: Array) -> Array:
        """Return sigmoid(beta x), and 1 above the threshold."""
        scaled = kept * self.beta
        return backend.namespace(kept).where(scaled > self.threshold, 1.0, stable_sigmoid(scaled))
