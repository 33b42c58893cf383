"""An activation with the earlier ones that a later layer is to read: skip connections, from stage to stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError


class Packed:
    """An array between two layers, and stashed ones that pass by; or the gradients at all of them."""

    # names: Of the stashed arrays, the latest last.

    __slots__ = ("names", "stashed", "x")

    def __init__(self, x: Array, names: tuple[str, ...], stashed: tuple[Array, ...]) -> None:
        self.x, self.names, self.stashed = x, names, stashed

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array between the layers."""
        return tuple(self.x.shape)

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        return self.x.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return int(sum(array.nbytes for array in arrays_of(self)))


def arrays_of(value: Any) -> tuple[Array, ...]:
    """Return all arrays of an activation, the one between the layers first."""
    return (value.x, *value.stashed) if type(value) is Packed else (value,)


def names_of(value: Any) -> tuple[str, ...]:
    """Return the names of the stashed arrays of an activation."""
    return value.names if type(value) is Packed else ()


def packed(names: tuple[str, ...], arrays: tuple[Array, ...]) -> Any:
    """Return the activation of these arrays, as `arrays_of` gives them: an array if nothing is stashed."""
    return Packed(arrays[0], names, arrays[1:]) if names else arrays[0]


def passes_by(layer: Any, value: Any) -> bool:
    """Whether stashed arrays, or gradients at them, do not go through a layer."""
    return type(value) is Packed and not getattr(layer, "takes_stashed", False)


def unpacked(value: Any) -> Array:
    """Return the output of a model, which must not leave anything stashed."""
    if type(value) is Packed:
        raise never_joined(value.names[-1])
    return value


def never_joined(name: str) -> OptionError:
    """Return the error of a stash that no later layer joins."""
    return OptionError(f"What Stash({name!r}) has kept is not joined", expected=f"Pop({name!r}) further on in the "
                       "chain", got="none")  # fmt: skip


def no_scan() -> OptionError:
    """Return the error of a scan over a chain with connections past its layers."""
    return OptionError("A chain with Stash and Pop is no product of its layers' Jacobians", expected="backward='bp'",
                       got="a scan, or a Jacobian of the chain", remedy="Use Residual or Concat instead")  # fmt: skip
