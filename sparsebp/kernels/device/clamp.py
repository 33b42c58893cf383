"""Launchers of ``cuda/clamp.cu``: cutting off at two values, a thread an element."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import BLOCK, Launcher, ceil_div, real_define


class ClampKernels(Launcher):
    """Device side of `Kernels.clamp` and `Kernels.clamp_grad`; shapes and dtypes are stated there."""

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """Every element between the limits."""
        self._elements("clamp", low, high, out, x)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """The gradient where y lies above the lower limit and not above the upper one."""
        self._elements("clamp_grad", low, high, out, gy, y)

    def _elements(self, name: str, low: float, high: float, out: Array, *arrays: Array) -> None:
        limit = out.dtype.type
        args = (*arrays, limit(low), limit(high), out, np.int64(out.size))
        self._launch("clamp.cu", name, real_define(out), ceil_div(out.size, BLOCK), (BLOCK,), args)
