"""Host arrays that kernels read: nobody writes to them any more, and they are copied to each device once."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a view that can neither be written to nor be made writeable, of an array that nobody else writes to."""
    for owner in (array.base, array):  # a view can be made writeable while the array that it is of can be written to
        if isinstance(owner, np.ndarray):
            owner.flags.writeable = False
    return array.view()


class DeviceCopies:
    """Arrays of the host and their copies on the devices that asked for them.

    Parameters
    ----------
    arrays
        Arrays that nobody writes to afterwards.
    """

    def __init__(self, *arrays: np.ndarray) -> None:
        self._host = arrays
        self._copies: dict[tuple[str, int], tuple[Array, ...]] = {}

    def on(self, xp: ModuleType) -> tuple[Array, ...]:
        """Return the arrays as arrays of `xp`, on its current device; any stream may use them."""
        number = backend.device_number(xp)
        if number is None:
            return self._host
        key = (xp.__name__, number)
        found = self._copies.get(key)
        if found is None:  # of two threads at once, both get the first one's
            found = self._copies.setdefault(key, tuple(backend.kept(xp, array) for array in self._host))
        return found
