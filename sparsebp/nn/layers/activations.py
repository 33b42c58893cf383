"""Layers that work on each element by itself."""

from __future__ import annotations

import abc
import math
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend import memory
from sparsebp.core.arguments import check_choice, check_flag, check_number
from sparsebp.core.errors import OptionError
from sparsebp.core.shortcuts import belongs
from sparsebp.core.types import Array, SlopeFunction
from sparsebp.nn.layer import Layer, check_gy, check_input


class Pointwise(Layer):
    """``y = f(x)`` element by element; `saved` is y, or x where a subclass says that its slope needs x.

    Attributes
    ----------
    saves
        ``"y"`` or ``"x"``: what is saved for `slope`. An f that is monotone tells f' from y.
    kernel_slope
        The kernels' name of f where they know its slope, else None.

    Notes
    -----
    Infinite and huge elements follow IEEE arithmetic without a warning: ``∞ · 0`` gives NaN, as in PyTorch.
    """

    replayable = True
    stepwise = True

    saves: ClassVar[Literal["x", "y"]] = "y"
    kernel_slope: ClassVar[SlopeFunction | None] = None

    @abc.abstractmethod
    def function(self, x: Array) -> Array:
        """Return f(x) as a new array."""

    @abc.abstractmethod
    def slope(self, saved: Array) -> Array:
        """Return f'(x) from what is saved: y = f(x), or x."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return f(x), of the shape and dtype of x."""
        xp = check_input(x)
        with np.errstate(over="ignore", invalid="ignore"):
            y = xp.asarray(self.function(x))  # of an array without axes, NumPy makes numbers
        return y, x if self.saves == "x" else y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``gy · f'``."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        return xp.asarray(gy * self._slope(saved))

    def jacobian_t(self, saved: Array) -> Any:
        """Return diag(f'), per sample; the batch is the first axis."""
        from sparsebp.jacobians import pointwise_jacobian_t

        if self.kernel_slope is not None and belongs(self, "kernel_slope"):
            return pointwise_jacobian_t(saved, self.kernel_slope)
        return pointwise_jacobian_t(self._slope(saved))

    def _slope(self, saved: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return self.slope(saved)


class InPlace(Pointwise):
    """A `Pointwise` that torch.nn can run in place.

    Parameters
    ----------
    inplace
        Has no effect: the input is never written to, as the way back may need it.

    Raises
    ------
    OptionError
        It is no truth value.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = check_flag("inplace", inplace)


class Clamped(InPlace):
    """``min(max(x, low), high)``; the slope at both limits is 0, but 1 at an infinite y. A NaN stays, slope 1."""

    @abc.abstractmethod
    def limits(self) -> tuple[float, float]:
        """Return the two values; the upper one may be infinite."""

    def function(self, x: Array) -> Array:
        """Return x between the limits."""
        xp = backend.namespace(x)
        y = memory.empty(xp, x.shape, x.dtype)
        kernels.get(xp).clamp(xp.ascontiguousarray(x).reshape(-1), *self.limits(), y.reshape(-1))
        return y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy between the limits and at a NaN, else 0."""
        if not belongs(self, "inside", ("slope",)):
            return super().input_grad(gy, saved)
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        gx = memory.empty(xp, gy.shape, gy.dtype)
        flat, inside = xp.ascontiguousarray(gy).reshape(-1), self.inside(saved.dtype)
        kernels.get(xp).unchecked.clamp_grad(flat, saved.reshape(-1), *inside, gx.reshape(-1))
        return gx

    def slope(self, saved: Array) -> Array:
        """Return 1 strictly between the limits and at a NaN, else 0."""
        low, last = self.inside(saved.dtype)
        return (~((saved <= low) | (saved > last))).astype(saved.dtype)

    def inside(self, dtype: np.dtype) -> tuple[Any, Any]:
        """Return the lower limit, as it rounds in this dtype, and the largest y whose slope is 1."""
        return _inside(*self.limits(), dtype)


@lru_cache(maxsize=256)
def _inside(lowest: float, highest: float, dtype: np.dtype) -> tuple[Any, Any]:
    """Return what `Clamped.inside` does; the sign of a zero, which the cache does not see, changes no comparison."""
    with np.errstate(over="ignore"):  # one beyond the dtype's range is infinite
        low, high = dtype.type(lowest), dtype.type(highest)
    return low, high if np.isinf(high) else np.nextafter(high, low)


class ReLU(Clamped):
    """``max(x, 0)``, as `torch.nn.ReLU`; the slope at 0 is 0. A NaN stays one, and its slope is 1.

    Parameters
    ----------
    inplace
        Has no effect: the input is never written to.
    """

    kernel_slope = "relu"

    def limits(self) -> tuple[float, float]:
        """Return zero and infinity."""
        return 0.0, math.inf


class Hardtanh(Clamped):
    """x limited to [min_val, max_val], as `torch.nn.Hardtanh`; the slope at both limits is 0, at a NaN 1.

    Parameters
    ----------
    min_val, max_val
        The limits.
    inplace
        Has no effect: the input is never written to.

    Raises
    ------
    OptionError
        `max_val` is not above `min_val`, or one of them is no number.
    """

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        min_val, max_val = (
            check_number(name, value, finite=False) for name, value in (("min_val", min_val), ("max_val", max_val))
        )
        if not max_val > min_val:
            raise OptionError(
                "The limits of Hardtanh are in the wrong order", expected="max_val > min_val",
                got=f"min_val={min_val}, max_val={max_val}", remedy="Swap them",
            )  # fmt: skip
        self.min_val, self.max_val = min_val, max_val

    def limits(self) -> tuple[float, float]:
        """Return `min_val` and `max_val`."""
        return self.min_val, self.max_val


class LeakyReLU(InPlace):
    """``x`` where x > 0, else ``negative_slope · x``, as `torch.nn.LeakyReLU`; the slope at 0 is `negative_slope`.

    Parameters
    ----------
    negative_slope
        Slope below zero, of any sign.
    inplace
        Has no effect: the input is never written to.

    Raises
    ------
    OptionError
        It is not a finite number.
    """

    saves = "x"  # with a slope of 0 or below, y does not tell the sign of x

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.negative_slope = check_number("negative_slope", negative_slope)

    def function(self, x: Array) -> Array:
        """Return x or ``negative_slope · x``."""
        return backend.namespace(x).where(x > 0, x, x * self.negative_slope)

    def slope(self, saved: Array) -> Array:
        """Return 1 where x > 0, else `negative_slope`; a NaN counts as not above 0."""
        return backend.namespace(saved).where(saved > 0, 1.0, self.negative_slope).astype(saved.dtype)


class ELU(InPlace):
    """``x`` where x > 0, else ``alpha (exp(x) - 1)``, as `torch.nn.ELU`; the slope at 0 is `alpha`.

    Parameters
    ----------
    alpha
        -alpha is the limit at -∞.
    inplace
        Has no effect: the input is never written to.

    Raises
    ------
    OptionError
        It is not a finite number.
    """

    saves = "x"  # near -∞, y + alpha loses the digits of the slope

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.alpha = check_number("alpha", alpha)

    def function(self, x: Array) -> Array:
        """Return the ELU of x."""
        xp = backend.namespace(x)
        return xp.where(x < 0, self.alpha * xp.expm1(xp.minimum(x, 0)), x)  # -0.0 stays as it is

    def slope(self, saved: Array) -> Array:
        """Return 1 where x > 0, else ``alpha · exp(x)``."""
        xp = backend.namespace(saved)
        return xp.where(saved > 0, 1.0, self.alpha * xp.exp(xp.minimum(saved, 0)))


class Tanh(Pointwise):
    """The hyperbolic tangent, as `torch.nn.Tanh`."""

    kernel_slope = "tanh"

    def function(self, x: Array) -> Array:
        """Return tanh(x)."""
        return backend.namespace(x).tanh(x)

    def slope(self, y: Array) -> Array:
        """Return 1 - y²."""
        return 1 - y * y


class Sigmoid(Pointwise):
    """``1 / (1 + exp(-x))``, as `torch.nn.Sigmoid`."""

    kernel_slope = "sigmoid"

    def function(self, x: Array) -> Array:
        """Return the sigmoid as ``(1 + tanh(x / 2)) / 2``, which overflows nowhere."""
        y = backend.namespace(x).tanh(x * 0.5)
        y *= 0.5
        y += 0.5
        return y

    def slope(self, y: Array) -> Array:
        """Return y (1 - y)."""
        return y * (1 - y)


class SiLU(InPlace):
    """``x / (1 + exp(-x))``, as `torch.nn.SiLU`.

    Parameters
    ----------
    inplace
        Has no effect: the input is never written to.
    """

    saves = "x"  # not monotone

    def function(self, x: Array) -> Array:
        """Return ``x · sigmoid(x)``."""
        return x * _sigmoid(x)

    def slope(self, saved: Array) -> Array:
        """Return ``s (1 + x (1 - s))`` with s = sigmoid(x)."""
        s = _sigmoid(saved)
        return s * (1 + saved * (1 - s))


def _sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` to the last digits on both sides, without overflow."""
    xp = backend.namespace(x)
    z = xp.exp(-xp.abs(x))
    return xp.where(x > 0, 1.0, z) / (1 + z)


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

    saves = "x"  # not monotone

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = check_choice("approximation of GELU", approximate, ("none", "tanh"))

    def function(self, x: Array) -> Array:
        """Return the GELU of x."""
        xp = backend.namespace(x)
        y = memory.empty(xp, x.shape, x.dtype)
        kernels.get(xp).gelu(xp.ascontiguousarray(x).reshape(-1), self.approximate == "tanh", y.reshape(-1))
        return y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``gy · f'``."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        gx = memory.empty(xp, gy.shape, gy.dtype)
        flat_gy, flat_x = (xp.ascontiguousarray(array).reshape(-1) for array in (gy, saved))
        kernels.get(xp).gelu_grad(flat_gy, flat_x, self.approximate == "tanh", gx.reshape(-1))
        return gx

    def slope(self, saved: Array) -> Array:
        """Return ``Φ(x) + x Φ'(x)``."""
        return self.input_grad(backend.namespace(saved).ones_like(saved), saved)


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

    saves = "x"

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

    def slope(self, saved: Array) -> Array:
        """Return sigmoid(beta x), and 1 above the threshold."""
        scaled = saved * self.beta
        return backend.namespace(saved).where(scaled > self.threshold, 1.0, _sigmoid(scaled))
