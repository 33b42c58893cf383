"""Argument checks of the kernels that cut off at two values."""

from __future__ import annotations

from sparsebp.errors import OptionError
from sparsebp.kernels.checks.common import exact, rank, real
from sparsebp.types import Array


def check_clamp(x: Array, low: float, high: float, out: Array, **others: Array) -> None:
    """Check the arguments of `Kernels.clamp` and, with `others` of the same length, of `Kernels.clamp_grad`."""
    dtype, shape = real("x", x), rank("x", x, 1)
    for name, array in {"x": x, **others, "out": out}.items():
        exact(name, array, dtype, shape)
    if not low < high:
        raise OptionError(
            "The limits are in the wrong order", expected="low < high", got=f"low={low}, high={high}",
            remedy="Swap them",
        )  # fmt: skip
