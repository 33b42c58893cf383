"""Argument checks of the kernels that cut off at two values."""

from __future__ import annotations

from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import exact, rank, real, written


def check_clamp(x: Array, low: float, high: float, out: Array, **others: Array) -> None:
    """Check the arguments of `Kernels.clamp` and, with `others` of the same length, of `Kernels.clamp_grad`."""
    first = "gy" if others else "x"
    dtype, shape = real(first, x), rank(first, x, 1)
    for name, array in {first: x, **others}.items():
        exact(name, array, dtype, shape)
    written("out", out, dtype, shape)
    if not low < high:
        raise OptionError(
            "The limits are in the wrong order", expected="low < high", got=f"low={low}, high={high}",
            remedy="Swap them",
        )  # fmt: skip
