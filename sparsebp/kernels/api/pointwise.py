"""Argument checks of the kernels over channels."""

from __future__ import annotations

from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import exact, rank, real, written


def check_channels(*, arrays: dict[str, Array], channels: dict[str, Array], out: tuple[str, ...] = ("out",)) -> None:
    """Check arrays (B, C, n), all of one shape, and arrays (C,), by name; the first of `arrays` tells the dtype.

    Those named by `out` are written.
    """
    (first, array), *_ = arrays.items()
    dtype, shape = real(first, array), rank(first, array, 3)
    for name, other in arrays.items():
        (written if name in out else exact)(name, other, dtype, shape)
    for name, other in channels.items():
        (written if name in out else exact)(name, other, dtype, (shape[1],))
