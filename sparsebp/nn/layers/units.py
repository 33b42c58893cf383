"""Activations of newer networks: SELU, ReLU6 and Mish, and PReLU, whose slope is learned."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_integer, check_number
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.arrays import full, parameter_dtype
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.layers.activations import ELU, Hardtanh, InPlace

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


class ReLU6(Hardtanh):
    """``min(max(x, 0), 6)``, as `torch.nn.ReLU6`; the slope at 0 and 6 is 0, at a NaN 1.

    Parameters
    ----------
    inplace
        Has no effect: the input is never written to.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__(0.0, 6.0, inplace)


class Mish(InPlace):
    """``x tanh(log(1 + exp(x)))``, as `torch.nn.Mish`.

    Parameters
    ----------
    inplace
        Has no effect: the input is never written to.

    Notes
    -----
    Source: Misra, "Mish: a self regularized non-monotonic activation function", 2020, Eq. 1. With z = exp(-|x|) the
    tanh is a ratio of polynomials in z, so nothing overflows and no digits are lost far from 0.
    """

    saves = "x"  # not monotone

    def function(self, x: Array) -> Array:
        """Return the Mish of x."""
        gate, _ = _gate(x)
        return x * gate

    def slope(self, saved: Array) -> Array:
        """Return ``t + x (1 - t²) sigmoid(x)`` with t the tanh."""
        gate, slope = _gate(saved)
        return gate + saved * slope


def _gate(x: Array) -> tuple[Array, Array]:
    """Return tanh(log(1 + exp(x))) and its slope."""
    xp = backend.namespace(x)
    z = xp.exp(-xp.abs(x))
    above = x > 0
    # w = exp(x), or 1/w = z where x > 0: t = (w² + 2w) / (w² + 2w + 2), t' = 4 w (1 + w) / (w² + 2w + 2)²
    top = xp.where(above, 1 + 2 * z, z * (z + 2))
    bottom = top + 2 * xp.where(above, z * z, 1)
    return top / bottom, 4 * z * (1 + z) * xp.where(above, z, 1) / (bottom * bottom)


class PReLU(Layer):
    """``x`` where x > 0, else ``weight · x``, as `torch.nn.PReLU`; the slope at 0 is the weight.

    Parameters
    ----------
    num_parameters
        1, or the number of channels: x is (B, num_parameters, …) then.
    init
        The weight at the start.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64, of the weight.

    Raises
    ------
    OptionError
        `num_parameters` is below 1, or `init` is not a finite number.

    Notes
    -----
    Parameter: ``weight`` (num_parameters,). Source: He et al., "Delving deep into rectifiers", 2015, Eq. 1.
    """

    replayable = True

    def __init__(
        self, num_parameters: int = 1, init: float = 0.25, device: Any = None, dtype: Any = np.float32
    ) -> None:
        super().__init__()
        self.num_parameters, self.init = check_integer("num_parameters", num_parameters, 1), check_number("init", init)
        self.params["weight"] = full((self.num_parameters,), self.init, parameter_dtype(dtype, device))

    @property
    def stepwise(self) -> bool:
        """Whether each step of a sequence is mapped by itself: one weight serves all."""
        return self.num_parameters == 1

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return the PReLU of x; `saved` is x.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x has another number of channels than weights, or another dtype.
        """
        weight = self.params["weight"]
        xp = check_input(x, dtype=weight.dtype, like=weight)
        if self.num_parameters > 1 and (x.ndim < 2 or x.shape[1] != self.num_parameters):
            raise ShapeError(
                "x has another number of channels than the layer", expected=f"(B, {self.num_parameters}, …)",
                got=x.shape, remedy="Pass num_parameters=1, or the number of channels",
            )  # fmt: skip
        return xp.asarray(xp.where(x > 0, x, x * self._weight(x))), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy where x > 0, else ``weight · gy``."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        return xp.asarray(xp.where(saved > 0, gy, gy * self._weight(saved)))

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x}``, over where x <= 0."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        below = xp.where(saved > 0, saved.dtype.type(0), gy * saved)
        axes = tuple(axis for axis in range(saved.ndim) if axis != 1 or self.num_parameters == 1)
        return {"weight": below.sum(axis=axes).reshape(self.num_parameters)}

    def jacobian_t(self, saved: Array) -> Any:
        """Return the diagonal of ones and weights, per sample."""
        from sparsebp.jacobians import pointwise_jacobian_t

        xp = backend.namespace(saved)
        return pointwise_jacobian_t(xp.where(saved > 0, saved.dtype.type(1), self._weight(saved)))

    def _weight(self, x: Array) -> Array:
        """Return the weights so that they fit the channels of x."""
        shape = (1,) * x.ndim if self.num_parameters == 1 else (-1, *[1] * (x.ndim - 2))
        return self.params["weight"].reshape(shape)
