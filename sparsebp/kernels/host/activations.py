"""Activations and their gradients on the host: one pass over memory each, in vectors.

A function is a pair of functions of vectors: `f(x, a, b, c)`, and `f_grad(g, kept, a, b, c)`, which takes the gradient
at y and what the forward kept (x, or y of a sigmoid and a tanh). Compiled code is given it as a tuple of as many zeros
as its place in `FUNCTIONS`: the length is part of its type, so that each is compiled by itself, when first called.
"""

from __future__ import annotations

import math

from sparsebp.core.check import FUNCTIONS, Array
from sparsebp.kernels.host.engine.compile import JIT, span
from sparsebp.kernels.host.engine.math import decay, exp, expm1, log1p, normal, tanh
from sparsebp.kernels.host.engine.simd import (
    absolute,
    copysign,
    device,
    fma,
    intrinsic,
    is_double,
    lanes,
    load,
    load_n,
    maximum,
    minimum,
    pointer,
    select_positive,
    store,
    store_n,
)
from sparsebp.kernels.host.engine.threads import parallel, split

_WEIGHT = 32  # multiply-adds of an element, about
_ROOT, _CUBE, _DENSITY = math.sqrt(2 / math.pi), 0.044715, 1 / math.sqrt(2 * math.pi)
_FAR = 1e4  # an x² from which on the probability is 0 or 1 to the last digit
_PLACES: dict[str, tuple[int, ...]] = {name: (0,) * (place + 1) for place, name in enumerate(FUNCTIONS)}

Constants = tuple[float, float, float]


class ActivationKernels:
    """Host side of these kernels in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def pointwise(self, x: Array, function: str, constants: Constants, out: Array) -> None:
        """Every element's f."""
        _pointwise(*split(x.size * _WEIGHT), x, _PLACES[function], *map(x.dtype.type, constants), out)

    def pointwise_grad(self, gy: Array, kept: Array, function: str, constants: Constants, out: Array) -> None:
        """The gradient times the slope."""
        number = kept.dtype.type
        _pointwise_grad(*split(kept.size * _WEIGHT), gy, kept, _PLACES[function], *map(number, constants), out)


# The functions below are compiled: their arguments are vectors, arrays and bounds.
# mypy: disable-error-code="no-untyped-def"


@device
def _gelu(x, a, b, c):
    return x * normal(x)[0]


@device
def _gelu_grad(g, x, a, b, c):
    probability, e = normal(x)
    return g * fma(x * _DENSITY, e, probability)


@device
def _by_tanh(x):
    """Return ``(1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``."""
    return fma(tanh(_ROOT * fma(_CUBE * x * x, x, x)), 0.5, 0.5)


@device
def _gelu_tanh(x, a, b, c):
    return x * _by_tanh(x)


@device
def _gelu_tanh_grad(g, x, a, b, c):
    p = _by_tanh(x)
    inner = _ROOT * fma(3.0 * _CUBE, minimum(_FAR, x * x), 1.0)
    return g * fma(2.0 * p * (1.0 - p) * x, inner, p)


@device
def _tanh(x, a, b, c):
    """Near 0 by a polynomial, where `tanh` of the recurrent layers is not rounded as well."""
    u = x * x
    near = fma(x * u, _tanh_64(u) if is_double(x) else _tanh_32(u), x)
    return copysign(select_positive(_NEAR - u, near, tanh(x)), x)  # -0.0 stays as it is


_NEAR = 0.3025  # an x²


@device
def _tanh_32(u):
    """Return (tanh(x) / x - 1) / x² at u = x² <= 0.3025, interpolated at Chebyshev nodes: relative error 1e-10."""
    p = fma(u, 0.00252639071057, -0.0085263330578)
    p = fma(p, u, 0.0218184491286)
    p = fma(p, u, -0.0539647004452)
    p = fma(p, u, 0.133333242)
    return fma(p, u, -0.33333333295)


@device
def _tanh_64(u):
    """Return the same for float64: relative error 6e-20."""
    p = fma(u, 7.8742743453444191e-6, -0.0000337208011204631638)
    p = fma(p, u, 0.0000945513305292485796)
    p = fma(p, u, -0.000238472724801525213)
    p = fma(p, u, 0.0005899052969492733)
    p = fma(p, u, -0.00145581909715135121)
    p = fma(p, u, 0.00359212676996263471)
    p = fma(p, u, -0.00886323546314680007)
    p = fma(p, u, 0.0218694885340739077)
    p = fma(p, u, -0.0539682539682203745)
    p = fma(p, u, 0.133333333333333121)
    return fma(p, u, -0.333333333333333333)


@device
def _tanh_grad(g, y, a, b, c):
    return g * (1.0 - y * y)


@device
def _both_sigmoids(x):
    """Return the sigmoids of x and of -x, each to its last digits."""
    z = decay(x)
    share = 1.0 / (1.0 + z)
    return select_positive(x, 1.0, z) * share, select_positive(x, z, 1.0) * share


@device
def _sigmoid(x, a, b, c):
    z = decay(x)
    return select_positive(x, 1.0, z) / (1.0 + z)


@device
def _sigmoid_grad(g, y, a, b, c):
    return g * (y * (1.0 - y))


@device
def _silu(x, a, b, c):
    return x * _sigmoid(x, a, b, c)


@device
def _silu_grad(g, x, a, b, c):
    s, rest = _both_sigmoids(x)
    return g * (s * fma(x, rest, 1.0))


@device
def _log_sigmoid(x, a, b, c):
    return minimum(0.0, x) - log1p(decay(x))


@device
def _log_sigmoid_grad(g, x, a, b, c):
    return g * _sigmoid(-1.0 * x, a, b, c)


@device
def _softplus(x, beta, threshold, c):
    s = x * beta
    smooth = (maximum(0.0, s) + log1p(decay(s))) / beta
    return select_positive(s - threshold, x, smooth)


@device
def _softplus_grad(g, x, beta, threshold, c):
    s = x * beta
    return g * select_positive(s - threshold, 1.0, _sigmoid(s, beta, threshold, c))


@device
def _mish_parts(x):
    """Return t = tanh(log(1 + exp(x))) and its slope, as ratios of polynomials in z = exp(-|x|)."""
    z = decay(x)
    # w = exp(x), or 1/w = z where x > 0: t = (w² + 2w) / (w² + 2w + 2), t' = 4 w (1 + w) / (w² + 2w + 2)²
    top = select_positive(x, fma(z, 2.0, 1.0), z * (z + 2.0))
    bottom = fma(select_positive(x, z * z, 1.0), 2.0, top)
    return top / bottom, 4.0 * z * (1.0 + z) * select_positive(x, z, 1.0) / (bottom * bottom)


@device
def _mish(x, a, b, c):
    return x * _mish_parts(x)[0]


@device
def _mish_grad(g, x, a, b, c):
    t, slope = _mish_parts(x)
    return g * fma(x, slope, t)


@device
def _elu(x, below, above, width):
    y = below * _growth(minimum(0.0, x) / width)
    return select_positive(-1.0 * x, y, x * above)  # -0.0 stays as it is


@device
def _elu_grad(g, x, below, above, width):
    return g * select_positive(x, above, below / width * _power(minimum(0.0, x) / width))


@device
def _most(x):
    """Return the end of the range of `exp`."""
    return 709.0 if is_double(x) else 88.0


@device
def _power(x):
    """Return eˣ, 0 or infinite far out."""
    near = select_positive(1.0 - _most(x) - x, 0.0, exp(x))
    return select_positive(x - _most(x), exp(x - 1.0) * math.e, near)


@device
def _growth(x):
    """Return eˣ - 1, infinite far out."""
    return select_positive(x - _most(x), exp(x - 1.0) * math.e, expm1(x))


@device
def _leaky_relu(x, slope, b, c):
    return select_positive(x, x, x * slope)


@device
def _leaky_relu_grad(g, x, slope, b, c):
    return g * select_positive(x, 1.0, slope)


@device
def _hard_sigmoid(x, a, b, c):
    return minimum(6.0, maximum(0.0, x + 3.0)) / 6.0


@device
def _hard_sigmoid_grad(g, x, a, b, c):
    return select_positive(3.0 - absolute(x), g * (1.0 / 6.0), 0.0)


@device
def _hard_swish(x, a, b, c):
    return x * (minimum(6.0, maximum(0.0, x + 3.0)) / 6.0)


@device
def _hard_swish_grad(g, x, a, b, c):
    outside = select_positive(x, g, select_positive(-1.0 * x, 0.0, x))  # a NaN stays
    return select_positive(3.0 - absolute(x), g * (x / 3.0 + 0.5), outside)


@device
def _softsign(x, a, b, c):
    return x / (1.0 + absolute(x))


@device
def _softsign_grad(g, x, a, b, c):
    root = 1.0 / (1.0 + absolute(x))
    return g * (root * root)


@intrinsic
def _of_function(
    typingctx, function, gelu, gelu_tanh, tanh, sigmoid, silu, log_sigmoid, softplus, mish, elu, leaky_relu,
    hard_sigmoid, hard_swish, softsign,
):  # fmt: skip
    """Return one of the compiled functions: the number of zeros in `function` says which, from 1 on."""
    functions = (gelu, gelu_tanh, tanh, sigmoid, silu, log_sigmoid, softplus, mish, elu, leaky_relu, hard_sigmoid,
                 hard_swish, softsign)  # fmt: skip
    chosen = functions[len(function) - 1]
    return chosen(function, *functions), lambda context, builder, sig, args: context.get_dummy_value()


@parallel(**JIT)
def _pointwise(part, parts, x, function, a, b, c, out):
    f = _of_function(
        function,
        _gelu, _gelu_tanh, _tanh, _sigmoid, _silu, _log_sigmoid, _softplus, _mish, _elu, _leaky_relu,
        _hard_sigmoid, _hard_swish, _softsign,
    )  # fmt: skip
    low, high = span(part, parts, len(x))
    source, target = pointer(x), pointer(out)
    step = lanes(source)
    whole = low + (high - low) // step * step
    for i in range(low, whole, step):
        store(target, i, f(load(source, i), a, b, c))
    if whole < high:
        store_n(target, whole, f(load_n(source, whole, high - whole), a, b, c), high - whole)


@parallel(**JIT)
def _pointwise_grad(part, parts, gy, kept, function, a, b, c, out):
    f = _of_function(
        function,
        _gelu_grad, _gelu_tanh_grad, _tanh_grad, _sigmoid_grad, _silu_grad, _log_sigmoid_grad, _softplus_grad,
        _mish_grad, _elu_grad, _leaky_relu_grad, _hard_sigmoid_grad, _hard_swish_grad, _softsign_grad,
    )  # fmt: skip
    low, high = span(part, parts, len(kept))
    gradients, source, target = pointer(gy), pointer(kept), pointer(out)
    step = lanes(source)
    whole = low + (high - low) // step * step
    for i in range(low, whole, step):
        store(target, i, f(load(gradients, i), load(source, i), a, b, c))
    if whole < high:
        n = high - whole
        store_n(target, whole, f(load_n(gradients, whole, n), load_n(source, whole, n), a, b, c), n)
