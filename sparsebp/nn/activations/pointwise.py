"""The base of layers that act on every element alone: their transposed Jacobian is diagonal."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal

import numpy as np

from sparsebp.core.types import Array, SlopeFunction
from sparsebp.nn.layer import Layer, check_gy, check_input


class Pointwise(Layer):
    """``y = f(x)`` element by element; `saved` is y, or x where a subclass says that its slope needs x.

    Attributes
    ----------
    keeps
        ``"y"`` or ``"x"``: what is saved for `slope`. An f that is monotone tells f' from y.
    told_by
        The kernels' name of f where they know its slope, else None.

    Notes
    -----
    Infinite and huge elements follow IEEE arithmetic without a warning: ``∞ · 0`` gives NaN, as in PyTorch.
    """

    replayable = True

    keeps: ClassVar[Literal["x", "y"]] = "y"
    told_by: ClassVar[SlopeFunction | None] = None

    @abc.abstractmethod
    def function(self, x: Array) -> Array:
        """Return f(x) as a new array."""

    @abc.abstractmethod
    def slope(self, kept: Array) -> Array:
        """Return f'(x) from what is kept: y = f(x), or x."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return f(x), of the shape and dtype of x."""
        check_input(x)
        with np.errstate(over="ignore", invalid="ignore"):
            y = self.function(x)
        return y, x if self.keeps == "x" else y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``gy · f'``."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return gy * self._slope(saved)

    def jacobian_t(self, saved: Array) -> Any:
        """Return diag(f'), per sample; the batch is the first axis."""
        from sparsebp.jacobians import pointwise_jacobian_t

        if self.told_by is not None:
            return pointwise_jacobian_t(saved, self.told_by)
        return pointwise_jacobian_t(self._slope(saved))

    def _slope(self, saved: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return self.slope(saved)
