"""The transposed Jacobian of a layer that may have none of its own."""

from __future__ import annotations

from typing import Any

from sparsebp.core.types import Array


def jacobian_of(layer: Any, saved: Any, shape: tuple[int, ...], out_shape: tuple[int, ...], like: Array) -> Any:
    """Return the `TransposedJacobian` of `layer` at one forward: its own, or the dense one from its input gradient.

    Parameters
    ----------
    layer, saved
        The layer, and what its forward saved.
    shape, out_shape
        Of the forward's input and output, batch first.
    like
        An array of their dtype, on their device.
    """
    if layer.jacobian_t is not None:
        return layer.jacobian_t(saved)
    from sparsebp.jacobians.api import dense_jacobian_t

    return dense_jacobian_t(
        lambda gy: layer.gradients(gy, saved).input_grad(), shape[1:], out_shape[1:], shape[0], like
    )
