"""Initial values of a layer's parameters: PyTorch's default ranges, in sizes that a machine has room for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparsebp.core.errors import OptionError


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float, dtype: Any) -> np.ndarray:
    """Draw from U(-bound, bound). The same seed gives the same numbers, rounded, in both dtypes.

    Raises
    ------
    OptionError
        No machine has room for so many.
    """
    _check_size(shape)
    return rng.uniform(-bound, bound, shape).astype(dtype)


def full(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
    """Return an array of one value.

    Raises
    ------
    OptionError
        No machine has room for it.
    """
    _check_size(shape)
    return np.full(shape, value, dtype)


def _check_size(shape: tuple[int, ...]) -> None:
    if max(1, *shape) * math.prod(n or 1 for n in shape) > 2**60:  # NumPy counts bytes in 63 bits
        raise OptionError("A parameter is too large for any machine", expected="fewer than 2**60 elements", got=shape,
                          remedy="Build a smaller layer")  # fmt: skip


def fan_in_bound(fan_in: int) -> float:
    """Return ``1 / sqrt(fan_in)``, PyTorch's default bound for `Linear` and, with the hidden size, for RNN and GRU."""
    return 1.0 / math.sqrt(fan_in) if fan_in > 0 else 0.0
