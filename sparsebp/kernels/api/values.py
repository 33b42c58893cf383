"""Argument checks of the kernels that make values of transposed Jacobians. Each returns the batch size B."""

from __future__ import annotations

from sparsebp.backend import namespace
from sparsebp.core.errors import DTypeError, OptionError
from sparsebp.core.types import SLOPES, Array
from sparsebp.kernels.api.checks import exact, index, rank, real, written

_WINNERS = ("uint8", "int32")


def check_pointwise_slopes(kept: Array, function: str, out: Array) -> int:
    """Check the arguments of `Kernels.pointwise_slopes` and return B."""
    dtype, (batch, size) = real("kept", kept), rank("kept", kept, 2)
    if function not in SLOPES:
        raise OptionError(
            "Unknown function", expected=" or ".join(map(repr, SLOPES)), got=repr(function), remedy="Pass one of these"
        )
    exact("kept", kept, dtype, (batch, size))
    written("out", out, dtype, (size, batch))
    return batch


def check_max_pool_values(winner: Array, window: Array, offset: Array, windows: int, taps: int, out: Array) -> int:
    """Check the arguments of `Kernels.max_pool_values` and return B."""
    namespace(winner=winner)
    if winner.dtype not in _WINNERS:
        raise DTypeError(
            "winner has the wrong dtype", expected="uint8 or int32", got=winner.dtype,
            remedy="Convert it with winner.astype(...); nothing is converted silently",
        )  # fmt: skip
    kind, (batch, columns), (lines,) = index("window", window), rank("winner", winner, 2), rank("window", window, 1)
    if windows < 1 or taps < 1:
        raise OptionError(
            "A line holds at least one window and one tap", expected="windows >= 1 and taps >= 1",
            got=f"windows={windows}, taps={taps}", remedy="Pass 1 and 1 for entries without structure",
        )  # fmt: skip
    exact("winner", winner, winner.dtype, (batch, columns))
    exact("window", window, kind, (lines,))
    exact("offset", offset, "int32", (lines,))
    written("out", out, real("out", out), (lines * windows * taps, batch))
    return batch
