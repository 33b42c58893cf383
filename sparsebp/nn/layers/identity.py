"""Identity."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.nn.layer import Layer, check_gy, check_input


class Identity(Layer):
    """Return the input unchanged, as `torch.nn.Identity`."""

    replayable = True

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x itself."""
        check_input(x)
        return x, x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy itself."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return gy

    def jacobian_t(self, saved: Array) -> Any:
        """Return the identity, shared by the batch; products skip it."""
        return identity_jacobian(saved)


def identity_jacobian(x: Array) -> Any:
    """Return the identity `TransposedJacobian` for one sample of `x` (batch first)."""
    from sparsebp.jacobians import TransposedJacobian
    from sparsebp.patterns import SparsityPattern

    size = int(np.prod(x.shape[1:]))
    return TransposedJacobian(SparsityPattern.identity(size), backend.namespace(x).ones(size, dtype=x.dtype))
