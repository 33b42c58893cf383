"""Flatten: all axes but the batch into one."""

from __future__ import annotations

from typing import Any

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.layers.identity import identity_jacobian


class Flatten(Layer):
    """``(B, …) -> (B, product of the rest)``, as `torch.nn.Flatten`."""

    replayable = True

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x reshaped to two axes."""
        check_input(x)
        if x.ndim == 0:
            raise ShapeError("x has no batch axis", expected="(B, …)", got=x.shape, remedy="Add an axis in front")
        return x.reshape(x.shape[0], self._size(x)), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy in the shape of x."""
        check_gy(gy, (saved.shape[0], self._size(saved)), saved.dtype, saved)
        return gy.reshape(saved.shape)

    def jacobian_t(self, saved: Array) -> Any:
        """Return the identity: a sample's elements keep their order."""
        return identity_jacobian(saved)

    @staticmethod
    def _size(x: Array) -> int:
        size = 1
        for n in x.shape[1:]:
            size *= n
        return size
