"""Activations: ReLU and its relatives, sigmoid, tanh, GELU, SELU, PReLU, softmax."""

from __future__ import annotations

import abc
import math
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array, Function, SlopeFunction, check_choice, check_flag, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.parameters import full, parameter_dtype


class Pointwise(Layer):
    """``y = f(x)`` element by element; `saved` is y, or x if the slope needs x."""

    # Infinite and huge elements follow IEEE arithmetic without a warning: `∞ · 0` gives NaN, as in PyTorch.

    replayable = True
    stepwise = True

    # What is saved for `slope`, `"y"` or `"x"`: of a monotone f, y determines f'.
    saves: ClassVar[Literal["x", "y"]] = "y"
    kernel_grad: Any = None  # As input_grad, in one pass over memory; None: there is no such kernel
    kernel_slope: ClassVar[SlopeFunction | None] = None  # The kernels' name of f where they know its slope, else None

    @abc.abstractmethod
    def function(self, x: Array) -> Array:
        """Return f(x) as a new array."""

    @abc.abstractmethod
    def slope(self, saved: Array) -> Array:
        """Return f'(x) from the saved y = f(x) or x."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return f(x), of the shape and dtype of x."""
        xp = check_input(x)
        with np.errstate(over="ignore", invalid="ignore"):
            y = xp.asarray(self.function(x))  # of an array without axes, NumPy makes numbers
        return y, x if self.saves == "x" else y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``gy · f'``."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        if "kernel_grad" in self.valid_shortcuts:
            return self.kernel_grad(gy, saved)
        return xp.asarray(gy * self._slope(saved))

    def jacobian_t(self, saved: Array) -> Any:
        """Return diag(f'), per sample; the batch is the first axis."""
        from sparsebp.jacobians import pointwise_jacobian_t

        if self.kernel_slope is not None and "kernel_slope" in self.valid_shortcuts:
            return pointwise_jacobian_t(saved, self.kernel_slope)
        return pointwise_jacobian_t(self._slope(saved))

    def _slope(self, saved: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return self.slope(saved)


class InPlace(Pointwise):
    """A `Pointwise` that torch.nn can run in place."""

    # inplace: Has no effect: the input is never written to, as the way back may need it.

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
        y = host_pool.empty(xp, x.shape, x.dtype)
        kernels.get(xp).unchecked.clamp(xp.ascontiguousarray(x).reshape(-1), *self.limits(), y.reshape(-1))
        return y

    def kernel_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy between the limits and at a NaN, else 0, in one pass over memory."""
        xp = backend.namespace(gy)
        gx = host_pool.empty(xp, gy.shape, gy.dtype)
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
    """Return the result of `Clamped.inside`. The cache ignores the sign of zero, which changes no comparison."""
    with np.errstate(over="ignore"):  # one beyond the dtype's range is infinite
        low, high = dtype.type(lowest), dtype.type(highest)
    return low, high if np.isinf(high) else np.nextafter(high, low)


class ReLU(Clamped):
    """``max(x, 0)``, as `torch.nn.ReLU`; the slope at 0 is 0. A NaN stays one, and its slope is 1.

    `inplace` has no effect.
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
        Has no effect.
    """

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        min_val, max_val = (
            check_number(name, value, finite=False) for name, value in (("min_val", min_val), ("max_val", max_val))
        )
        if not max_val > min_val:
            raise OptionError("The limits of Hardtanh are in the wrong order", expected="max_val > min_val",
                              got=f"min_val={min_val}, max_val={max_val}", remedy="Swap them")  # fmt: skip
        self.min_val, self.max_val = min_val, max_val

    def limits(self) -> tuple[float, float]:
        """Return `min_val` and `max_val`."""
        return self.min_val, self.max_val


class Activation(Pointwise):
    """A `Pointwise` that the kernels compute; the base of those below."""

    saves: ClassVar[Literal["x", "y"]] = "x"
    kernel: ClassVar[Function]  # the kernels' name of f

    def constants(self) -> tuple[float, float, float]:
        """Return the kernel's constants; 0 for those that f has not."""
        return 0.0, 0.0, 0.0

    def function(self, x: Array) -> Array:
        """Return f(x)."""
        xp = backend.namespace(x)
        y = host_pool.empty(xp, x.shape, x.dtype)
        flat = xp.ascontiguousarray(x).reshape(-1)
        kernels.get(xp).unchecked.pointwise(flat, self.kernel, self.constants(), y.reshape(-1))
        return y

    def kernel_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``gy · f'`` in one pass over memory."""
        xp = backend.namespace(gy)
        gx = host_pool.empty(xp, gy.shape, gy.dtype)
        flat = (xp.ascontiguousarray(array).reshape(-1) for array in (gy, saved))
        kernels.get(xp).unchecked.pointwise_grad(*flat, self.kernel, self.constants(), gx.reshape(-1))
        return gx

    def slope(self, saved: Array) -> Array:
        """Return f', the gradient for ones."""
        return self.kernel_grad(backend.namespace(saved).ones_like(saved), saved)


class LeakyReLU(Activation, InPlace):
    """``x`` where x > 0, else ``negative_slope · x``, as `torch.nn.LeakyReLU`; the slope at 0 is `negative_slope`.

    Parameters
    ----------
    negative_slope
        Slope below zero, of any sign.
    inplace
        Has no effect.
    """

    kernel = "leaky_relu"

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.negative_slope = check_number("negative_slope", negative_slope)

    def constants(self) -> tuple[float, float, float]:
        """Return `negative_slope`."""
        return self.negative_slope, 0.0, 0.0


class ELU(Activation, InPlace):
    """``x`` where x > 0, else ``alpha (exp(x) - 1)``, as `torch.nn.ELU`; the slope at 0 is `alpha`.

    Parameters
    ----------
    alpha
        -alpha is the limit at -∞.
    inplace
        Has no effect.
    """

    kernel = "elu"

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.alpha = check_number("alpha", alpha)

    def constants(self) -> tuple[float, float, float]:
        """Return `alpha`, the slope above 0, and what x is divided by."""
        return self.alpha, 1.0, 1.0


class Tanh(Activation):
    """The hyperbolic tangent, as `torch.nn.Tanh`."""

    saves = "y"
    kernel = kernel_slope = "tanh"


class Sigmoid(Activation):
    """``1 / (1 + exp(-x))``, as `torch.nn.Sigmoid`."""

    saves = "y"
    kernel = kernel_slope = "sigmoid"


class SiLU(Activation, InPlace):
    """``x / (1 + exp(-x))``, as `torch.nn.SiLU`.

    `inplace` has no effect.
    """

    kernel = "silu"


class GELU(Activation):
    """``x Φ(x)``, as `torch.nn.GELU` (Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016, §2).

    Parameters
    ----------
    approximate
        ``"none"``: Φ from the error function; ``"tanh"``: ``x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))``.

    Notes
    -----
    The tanh form's slope has its limit, 0 or 1, where PyTorch's overflows to NaN (|x| above 1e154 in float64).
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = check_choice("approximation of GELU", approximate, ("none", "tanh"))

    @property
    def kernel(self) -> Function:  # type: ignore[override]
        """The kernels' name of the approximation."""
        return "gelu" if self.approximate == "none" else "gelu_tanh"


class Softplus(Activation):
    """``log(1 + exp(beta x)) / beta``, and x itself where ``beta x > threshold``, as `torch.nn.Softplus`.

    Parameters
    ----------
    beta
        The larger, the nearer to ReLU.
    threshold
        Above it the function is the identity, and its slope 1.
    """

    kernel = "softplus"

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__()
        self.beta, self.threshold = check_number("beta", beta), check_number("threshold", threshold)
        if self.beta == 0:
            raise OptionError("beta is zero", expected="another number", got=beta)

    def constants(self) -> tuple[float, float, float]:
        """Return `beta` and `threshold`."""
        return self.beta, self.threshold, 0.0


# Softmax over one axis, and its logarithm.


class Softmax(Layer):
    """``exp(x) / Σ exp(x)`` over one axis, as `torch.nn.Softmax`.

    Parameters
    ----------
    dim
        Number of the axis, from the end where negative; None: the last one. (In PyTorch None is deprecated, and not
        always the last one.)
    """

    replayable = True
    log: ClassVar[bool] = False  # whether y is the logarithm

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = -1 if dim is None else check_integer("dim", dim, -64, 63)

    @property
    def stepwise(self) -> bool:
        """Whether each step of a sequence is mapped by itself: the axis is the last one, of features."""
        return self.dim == -1

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return the softmax of x, of its shape; `saved` is y."""
        xp = check_input(x)
        if not -max(x.ndim, 1) <= self.dim < max(x.ndim, 1):
            raise OptionError("x has no such axis", expected=f"dim from {-x.ndim} to {x.ndim - 1}", got=self.dim)
        y = host_pool.empty(xp, x.shape, x.dtype)
        if x.size:
            shape = self._around(x.shape)
            kernels.get(xp).unchecked.softmax(xp.ascontiguousarray(x).reshape(shape), self.log, y.reshape(shape))
        return y, y

    def _around(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return a shape as the sizes before, along and behind the axis."""
        axis, shape = self.dim % max(len(shape), 1), shape or (1,)
        return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return the gradient through all outputs: ``y (gy - Σ gy y)``, of the logarithm ``gy - exp(y) Σ gy``."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        gx = host_pool.empty(xp, gy.shape, gy.dtype)
        if gx.size:
            shape = self._around(gx.shape)
            given = (xp.ascontiguousarray(array).reshape(shape) for array in (gy, saved))
            kernels.get(xp).unchecked.softmax_grad(*given, self.log, gx.reshape(shape))
        return gx

    def unbatched(self, saved: Array) -> bool:
        """Whether x was one vector."""
        return saved.ndim < 2

    def couples_samples(self, saved: Array) -> bool:
        """Whether the axis is the batch."""
        return saved.ndim > 1 and self.dim in (0, -saved.ndim)

    def may_couple_samples(self) -> bool:
        """Whether the axis may be the batch: it is the first, or counted from the end."""
        return self.dim == 0 or self.dim < -1

    def jacobian_t(self, saved: Array) -> Any:
        """Return a dense block ``diag(y) - y yᵀ`` for each place on a sample's other axes, per sample.

        Raises
        ------
        OptionError
            The axis is the batch.
        """
        from sparsebp.jacobians import axis_jacobian_t

        if self.couples_samples(saved):
            raise OptionError(
                f"{type(self).__name__} over the batch couples the samples, so there is no Jacobian per sample",
                expected="dim of another axis than the first", got=self.dim, remedy="Use input_grad"
            )  # fmt: skip
        axis, shape = self.dim % max(saved.ndim, 1), saved.shape
        n = shape[axis]
        y = saved.reshape(shape[0], prod(shape[1:axis]), n, prod(shape[axis + 1 :]))
        eye = backend.namespace(saved).eye(n, dtype=saved.dtype)
        return axis_jacobian_t(self._blocks(y, eye[:, :, None]))

    def _blocks(self, y: Array, eye: Array) -> Array:
        return y[:, :, :, None] * (eye - y[:, :, None])


class LogSoftmax(Softmax):
    """``x - log Σ exp(x)`` over one axis, as `torch.nn.LogSoftmax`: the logarithm of `Softmax`, without its rounding.

    Parameters
    ----------
    dim
        As for `Softmax`.
    """

    log = True

    def _blocks(self, y: Array, eye: Array) -> Array:
        """Return ``I - p 1ᵀ`` with the probabilities p down the rows, so that each row is an input's."""
        return eye - backend.namespace(y).exp(y)[:, :, :, None]


# Activations of newer networks, the rest of torch.nn's, and PReLU, whose slope is learned.

_ALPHA, _SCALE = 1.6732632423543772, 1.0507009873554805


class SELU(ELU):
    """``1.0507 x`` where x > 0, else ``1.0507 · 1.6733 (exp(x) - 1)``, as `torch.nn.SELU`.

    With weights of variance 1 / fan_in (`init.lecun_linear`) activations stay near mean 0 and variance 1 through many
    layers.

    `inplace` has no effect.

    Notes
    -----
    Source: Klambauer et al., "Self-normalizing neural networks", 2017, Eq. 2 and 14.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__(_ALPHA, inplace)

    def constants(self) -> tuple[float, float, float]:
        """Return the constants of an ELU, times its scale."""
        return self.alpha * _SCALE, _SCALE, 1.0


class ReLU6(Hardtanh):
    """``min(max(x, 0), 6)``, as `torch.nn.ReLU6`; the slope at 0 and 6 is 0, at a NaN 1.

    `inplace` has no effect.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__(0.0, 6.0, inplace)


class Mish(Activation, InPlace):
    """``x tanh(log(1 + exp(x)))``, as `torch.nn.Mish`.

    Parameters
    ----------
    inplace
        Has no effect.

    Notes
    -----
    Source: Misra, "Mish: a self regularized non-monotonic activation function", 2020, Eq. 1. With z = exp(-|x|) the
    tanh is a ratio of polynomials in z, so nothing overflows and no digits are lost far from 0.
    """

    kernel = "mish"


class CELU(Activation, InPlace):
    """``x`` where x > 0, else ``alpha (exp(x / alpha) - 1)``, as `torch.nn.CELU`; the slope at 0 is 1.

    Parameters
    ----------
    alpha
        -alpha is the limit at -∞; not 0.
    inplace
        Has no effect.
    """

    kernel = "elu"

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.alpha = check_number("alpha", alpha)
        if self.alpha == 0:
            raise OptionError("alpha is zero", expected="another number", got=alpha)

    def constants(self) -> tuple[float, float, float]:
        """Return `alpha`, the slope above 0, and what x is divided by."""
        return self.alpha, 1.0, self.alpha


class Hardsigmoid(Activation, InPlace):
    """``min(max(x + 3, 0), 6) / 6``, as `torch.nn.Hardsigmoid`; the slope at -3, at 3 and at a NaN is 0.

    `inplace` has no effect.
    """

    kernel = "hard_sigmoid"


class Hardswish(Activation, InPlace):
    """``x · min(max(x + 3, 0), 6) / 6``, as `torch.nn.Hardswish`; the slope is 0 at -3 and 1 at 3.

    `inplace` has no effect.

    Notes
    -----
    Source: Howard et al., "Searching for MobileNetV3", 2019, §5.2.
    """

    kernel = "hard_swish"


class LogSigmoid(Activation):
    """``-log(1 + exp(-x))``, as `torch.nn.LogSigmoid`."""

    kernel = "log_sigmoid"


class Softsign(Activation):
    """``x / (1 + |x|)``, as `torch.nn.Softsign`."""

    kernel = "softsign"


class PReLU(Layer):
    """``x`` where x > 0, else ``weight · x``, as `torch.nn.PReLU`; the slope at 0 is the weight.

    Parameters
    ----------
    num_parameters
        1, or the number of channels: x is (B, num_parameters, …) then.
    init
        The weight at the start.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.

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
        """Return the PReLU of x; `saved` is x."""
        weight = self.params["weight"]
        xp = check_input(x, dtype=weight.dtype, like=weight)
        if self.num_parameters > 1 and (x.ndim < 2 or x.shape[1] != self.num_parameters):
            raise ShapeError("x has another number of channels than the layer",
                             expected=f"(B, {self.num_parameters}, …)", got=x.shape)  # fmt: skip
        return self._slope(xp, x, x), x

    def _slope(self, xp: ModuleType, values: Array, x: Array) -> Array:
        """Return `values`, times the weight where x is not positive."""
        out, shape = host_pool.empty(xp, x.shape, x.dtype), self._channels(x.shape)
        given = (xp.ascontiguousarray(array).reshape(shape) for array in (values, x))
        kernels.get(xp).unchecked.channel_slope(*given, self.params["weight"], out.reshape(shape))
        return out

    def _channels(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return a shape as the numbers of samples, of weights, and of elements that share one."""
        samples, channels = shape[0] if shape else 1, self.num_parameters
        return samples, channels, prod(shape[1:]) // channels

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy where x > 0, else ``weight · gy``."""
        return self._slope(check_gy(gy, saved.shape, saved.dtype, saved), gy, saved)

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x}``, over where x <= 0."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        sums, shape = xp.empty(self.num_parameters, saved.dtype), self._channels(saved.shape)
        given = (xp.ascontiguousarray(array).reshape(shape) for array in (gy, saved))
        kernels.get(xp).unchecked.channel_slope_grad(*given, sums)
        return {"weight": sums}

    def jacobian_t(self, saved: Array) -> Any:
        """Return the diagonal of ones and weights, per sample."""
        from sparsebp.jacobians import pointwise_jacobian_t

        xp = backend.namespace(saved)
        return pointwise_jacobian_t(xp.where(saved > 0, saved.dtype.type(1), self._weight(saved)))

    def _weight(self, x: Array) -> Array:
        """Return the weights so that they fit the channels of x."""
        shape = (1,) * x.ndim if self.num_parameters == 1 else (-1, *[1] * (x.ndim - 2))
        return self.params["weight"].reshape(shape)
