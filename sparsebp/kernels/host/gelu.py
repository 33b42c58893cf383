"""GELU and its gradient on the host: one pass over memory each, in vectors."""

from __future__ import annotations

import math

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.functions import normal, tanh
from sparsebp.kernels.host.engine.parts import JIT, parts_for, span
from sparsebp.kernels.host.engine.simd import device, fma, lanes, load_n, minimum, pointer, store_n
from sparsebp.kernels.host.engine.team import parallel, team

_WEIGHT = 32  # multiply-adds of an element, about
_ROOT, _CUBE, _DENSITY = math.sqrt(2 / math.pi), 0.044715, 1 / math.sqrt(2 * math.pi)
_FAR = 1e4  # an x² from which on the probability is 0 or 1 to the last digit


class GeluKernels:
    """Host side of these kernels in `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def gelu(self, x: Array, approximate: bool, out: Array) -> None:
        """Every element times its probability."""
        parts = parts_for(x.size * _WEIGHT)
        _gelu(team(parts), parts, x, approximate, out)

    def gelu_grad(self, gy: Array, x: Array, approximate: bool, out: Array) -> None:
        """The gradient times the slope."""
        parts = parts_for(x.size * _WEIGHT)
        _gelu_grad(team(parts), parts, gy, x, approximate, out)


# The functions below are compiled: their arguments are vectors, arrays and bounds.
# mypy: disable-error-code="no-untyped-def"


@device
def _by_tanh(x):
    """Return ``(1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``."""
    return fma(tanh(_ROOT * fma(_CUBE * x * x, x, x)), 0.5, 0.5)


@device
def _slope(x):
    probability, e = normal(x)
    return fma(x * _DENSITY, e, probability)


@device
def _slope_by_tanh(x):
    p = _by_tanh(x)
    inner = _ROOT * fma(3.0 * _CUBE, minimum(_FAR, x * x), 1.0)
    return fma(2.0 * p * (1.0 - p) * x, inner, p)


@parallel(**JIT)
def _gelu(part, parts, x, approximate, out):
    low, high = span(part, parts, len(x))
    source, target = pointer(x), pointer(out)
    if approximate:
        for i in range(low, high, lanes(source)):
            v = load_n(source, i, high - i)
            store_n(target, i, v * _by_tanh(v), high - i)
    else:
        for i in range(low, high, lanes(source)):
            v = load_n(source, i, high - i)
            store_n(target, i, v * normal(v)[0], high - i)


@parallel(**JIT)
def _gelu_grad(part, parts, gy, x, approximate, out):
    low, high = span(part, parts, len(x))
    gradients, source, target = pointer(gy), pointer(x), pointer(out)
    if approximate:
        for i in range(low, high, lanes(source)):
            slope = _slope_by_tanh(load_n(source, i, high - i))
            store_n(target, i, load_n(gradients, i, high - i) * slope, high - i)
    else:
        for i in range(low, high, lanes(source)):
            slope = _slope(load_n(source, i, high - i))
            store_n(target, i, load_n(gradients, i, high - i) * slope, high - i)
