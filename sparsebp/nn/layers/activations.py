"""Layers that work on each element by itself, and softmax."""

from __future__ import annotations

import abc
import math
from typing import Any, ClassVar, Literal

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend import memory
from sparsebp.core.arguments import check_choice, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
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
        check_input(x)
        with np.errstate(over="ignore", invalid="ignore"):
            y = self.function(x)
        return y, x if self.saves == "x" else y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``gy · f'``."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return gy * self._slope(saved)

    def jacobian_t(self, saved: Array) -> Any:
        """Return diag(f'), per sample; the batch is the first axis."""
        from sparsebp.jacobians import pointwise_jacobian_t

        if self.kernel_slope is not None:
            return pointwise_jacobian_t(saved, self.kernel_slope)
        return pointwise_jacobian_t(self._slope(saved))

    def _slope(self, saved: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return self.slope(saved)


class Clamped(Pointwise):
    """``min(max(x, low), high)``; the slope at both limits is 0, but 1 at an infinite y. A NaN stays a NaN."""

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
        """Return gy between the limits, else 0."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        gx = memory.empty(xp, gy.shape, gy.dtype)
        flat = xp.ascontiguousarray(gy).reshape(-1)
        kernels.get(xp).clamp_grad(flat, saved.reshape(-1), *self._inside(saved.dtype), gx.reshape(-1))
        return gx

    def slope(self, saved: Array) -> Array:
        """Return 1 strictly between the limits, else 0."""
        low, last = self._inside(saved.dtype)
        return ((saved > low) & (saved <= last)).astype(saved.dtype)

    def _inside(self, dtype: np.dtype) -> tuple[Any, Any]:
        """Return the lower limit, as it rounds in this dtype, and the largest y whose slope is 1."""
        low, high = (dtype.type(limit) for limit in self.limits())
        return low, high if np.isinf(high) else np.nextafter(high, low)


class ReLU(Clamped):
    """``max(x, 0)``, as `torch.nn.ReLU`; the slope at 0 is 0. A NaN stays a NaN."""

    kernel_slope = "relu"

    def limits(self) -> tuple[float, float]:
        """Return zero and infinity."""
        return 0.0, math.inf


class Hardtanh(Clamped):
    """x limited to [min_val, max_val], as `torch.nn.Hardtanh`; the slope at both limits is 0. A NaN stays a NaN.

    Parameters
    ----------
    min_val, max_val
        The limits.

    Raises
    ------
    OptionError
        `max_val` is not above `min_val`, or one of them is no number.
    """

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        super().__init__()
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


class LeakyReLU(Pointwise):
    """``x`` where x > 0, else ``negative_slope · x``, as `torch.nn.LeakyReLU`; the slope at 0 is `negative_slope`.

    Parameters
    ----------
    negative_slope
        Slope below zero, of any sign.

    Raises
    ------
    OptionError
        It is not a finite number.
    """

    saves = "x"  # with a slope of 0 or below, y does not tell the sign of x

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = check_number("negative_slope", negative_slope)

    def function(self, x: Array) -> Array:
        """Return x or ``negative_slope · x``."""
        return backend.namespace(x).where(x > 0, x, x * self.negative_slope)

    def slope(self, saved: Array) -> Array:
        """Return 1 where x > 0, else `negative_slope`; a NaN counts as not above 0."""
        return backend.namespace(saved).where(saved > 0, 1.0, self.negative_slope).astype(saved.dtype)


class ELU(Pointwise):
    """``x`` where x > 0, else ``alpha (exp(x) - 1)``, as `torch.nn.ELU`; the slope at 0 is `alpha`.

    Parameters
    ----------
    alpha
        -alpha is the limit at -∞.

    Raises
    ------
    OptionError
        It is not a finite number.
    """

    saves = "x"  # near -∞, y + alpha loses the digits of the slope

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = check_number("alpha", alpha)

    def function(self, x: Array) -> Array:
        """Return the ELU of x."""
        xp = backend.namespace(x)
        return xp.where(x > 0, x, self.alpha * xp.expm1(xp.minimum(x, 0)))

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


class SiLU(Pointwise):
    """``x / (1 + exp(-x))``, as `torch.nn.SiLU`."""

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


class Softmax(Layer):
    """``exp(x) / Σ exp(x)`` over the last axis, as `torch.nn.Softmax`.

    Parameters
    ----------
    dim
        -1, or the number of the last axis.

    Raises
    ------
    OptionError
        It is no such number.
    """

    replayable = True

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = check_integer("dim", dim, -1)

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return the softmax of x (B, …, n); `saved` is y.

        Raises
        ------
        ShapeError
            x has no axis beside the batch.
        OptionError
            `dim` is not the last axis of x.
        """
        xp = check_input(x)
        if x.ndim < 2:
            raise ShapeError("x has no axis beside the batch", expected="(B, …, n)", got=x.shape, remedy="Add an axis")
        if self.dim not in (-1, x.ndim - 1):
            raise OptionError(
                "Softmax works over the last axis only", expected=f"dim=-1 or dim={x.ndim - 1}", got=self.dim,
                remedy="Move the axis to the end before",
            )  # fmt: skip
        with np.errstate(invalid="ignore"):  # a row of infinities gives NaN
            y = xp.exp(x - x.max(axis=-1, keepdims=True)) if x.size else x.copy()
        y /= y.sum(axis=-1, keepdims=True)
        return y, y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``y (gy - Σ gy y)``."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return saved * (gy - (gy * saved).sum(axis=-1, keepdims=True))

    def jacobian_t(self, saved: Array) -> Any:
        """Return a dense block ``diag(y) - y yᵀ`` for each position between batch and last axis, per sample."""
        from sparsebp.jacobians import block_jacobian_t

        n = saved.shape[-1]
        y = saved.reshape(saved.shape[0], int(np.prod(saved.shape[1:-1])), n)
        eye = backend.namespace(saved).eye(n, dtype=saved.dtype)
        return block_jacobian_t(y[..., :, None] * (eye - y[..., None, :]))
