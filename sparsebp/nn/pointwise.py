"""The base of layers that act on every element alone: their transposed Jacobian is diagonal."""

from __future__ import annotations

import abc
from typing import Any

from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.types import Array


class Pointwise(Layer):
    """``y = f(x)`` element by element; `saved` is y, from which subclasses compute f'."""

    @abc.abstractmethod
    def function(self, x: Array) -> Array:
        """Return f(x) as a new array."""

    @abc.abstractmethod
    def slope(self, y: Array) -> Array:
        """Return f'(x) from y = f(x)."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return f(x), of the shape and dtype of x."""
        check_input(x)
        y = self.function(x)
        return y, y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``gy · f'``."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return gy * self.slope(saved)

    def jacobian_t(self, saved: Array) -> Any:
        """Return diag(f'), per sample; the batch is the first axis."""
        from sparsebp.jacobians import pointwise_jacobian_t

        return pointwise_jacobian_t(self.slope(saved))
