"""Cutting off at two values, and its gradient, on the host: one pass over memory each."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for, share
from sparsebp.kernels.host.engine.team import in_parts, team


class ClampKernels:
    """Host side of `Kernels.clamp` and `Kernels.clamp_grad`; shapes and dtypes are stated there."""

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """Every element between the limits."""
        args, parts = (x, x.dtype.type(low), x.dtype.type(high), out), parts_for(x.size)
        _clamp_parallel(team(parts), parts, *args, parts)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """The gradient where y lies above the lower limit and not above the upper one."""
        args, parts = (gy, y, y.dtype.type(low), y.dtype.type(high), out), parts_for(y.size)
        _clamp_grad_parallel(team(parts), parts, *args, parts)


# The functions below are compiled: their arguments are flat arrays, limits and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _clamp(x, low, high, out, start, stop):
    for i in range(start, stop):
        value = x[np.uint64(i)]
        value = low if value < low else value  # a NaN stays
        out[np.uint64(i)] = high if value > high else value


@numba.njit(**INNER_SERIAL)
def _clamp_part(part, x, low, high, out, parts):
    n = len(x)
    _clamp(x, low, high, out, share(part, parts, n), share(part + 1, parts, n))


@numba.njit(**SERIAL)
def _clamp_parallel(team, parts, *args):
    in_parts(_clamp_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _clamp_grad(gy, y, low, high, out, start, stop):
    zero = gy.dtype.type(0)
    for i in range(start, stop):
        value, gradient = y[np.uint64(i)], gy[np.uint64(i)]
        out[np.uint64(i)] = gradient if (value > low) & (value <= high) else zero


@numba.njit(**INNER_SERIAL)
def _clamp_grad_part(part, gy, y, low, high, out, parts):
    n = len(y)
    _clamp_grad(gy, y, low, high, out, share(part, parts, n), share(part + 1, parts, n))


@numba.njit(**SERIAL)
def _clamp_grad_parallel(team, parts, *args):
    in_parts(_clamp_grad_part, team, parts, args)
