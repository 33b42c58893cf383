"""Argument checks of the kernels over channels."""

from __future__ import annotations

from sparsebp.kernels.checks.common import exact, rank, real
from sparsebp.types import Array


def check_channels(*, arrays: dict[str, Array], channels: dict[str, Array]) -> None:
    """Check arrays (B, C, n), all of one shape, and arrays (C,), by name; the first of `arrays` tells the dtype."""
    (first, array), *_ = arrays.items()
    dtype, shape = real(first, array), rank(first, array, 3)
    for name, other in arrays.items():
        exact(name, other, dtype, shape)
    for name, other in channels.items():
        exact(name, other, dtype, (shape[1],))
