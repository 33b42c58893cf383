"""The transposed Jacobian of a layer or a whole model at an input."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.errors import OptionError
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.types import Array, Differentiable


def jacobian_t(layer: Differentiable, x: Array) -> TransposedJacobian:
    """Run `layer` forward on `x` and return its transposed Jacobian there.

    Parameters
    ----------
    layer
        A layer or model of `sparsebp.nn`, or any object with `forward` and `jacobian_t`.
    x
        Input, batch first as in torch.nn (recurrent layers: as their `batch_first` says).

    Returns
    -------
    TransposedJacobian
        Shape (n_in, n_out), the sizes of one flattened sample of `x` and of the output.

    Raises
    ------
    OptionError
        `layer` is not such an object.
    ShapeError, DTypeError, DeviceError
        `x` does not fit the layer.
    """
    if not callable(getattr(layer, "forward", None)) or not callable(getattr(layer, "jacobian_t", None)):
        raise OptionError(
            "There is no transposed Jacobian of this object",
            expected="a layer or model with forward and jacobian_t",
            got=type(layer).__qualname__,
            remedy="Pass a layer of sparsebp.nn",
        )
    backend.namespace(x)
    _, saved = layer.forward(x)
    return layer.jacobian_t(saved)
