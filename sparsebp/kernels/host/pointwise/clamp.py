"""Cutting off at two values, and its gradient, on the host: one pass over memory each."""

from __future__ import annotations

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import pointer
from sparsebp.kernels.host.engine.team import parallel, team


class ClampKernels:
    """Host side of `Kernels.clamp` and `Kernels.clamp_grad`; shapes and dtypes are stated there."""

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """Every element between the limits."""
        parts = parts_for(x.size)
        _clamp(team(parts), parts, x, x.dtype.type(low), x.dtype.type(high), out)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """The gradient where y lies above the lower limit and not above the upper one."""
        parts = parts_for(y.size)
        _clamp_grad(team(parts), parts, gy, y, y.dtype.type(low), y.dtype.type(high), out)


# The functions below are compiled: their arguments are flat arrays, limits and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**SERIAL)
def _clamp(part, parts, x, low, high, out):
    start, stop = span(part, parts, len(x))
    source, target = pointer(x), pointer(out)
    for i in range(start, stop):
        value = source[i]
        value = low if value < low else value  # a NaN stays
        target[i] = high if value > high else value


@parallel(**SERIAL)
def _clamp_grad(part, parts, gy, y, low, high, out):
    start, stop = span(part, parts, len(y))
    gradients, values, target = pointer(gy), pointer(y), pointer(out)
    zero = gy.dtype.type(0)
    for i in range(start, stop):
        value, gradient = values[i], gradients[i]
        target[i] = gradient if (value > low) & (value <= high) else zero
