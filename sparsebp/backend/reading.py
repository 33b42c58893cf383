"""Reading from a device without waiting for what it has been given since."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array


class Reading:
    """The values of an array on their way to the host, as the array is when the current stream comes to it.

    Work that the device is given afterwards does not delay them: they go to memory that the driver writes to by itself.

    Parameters
    ----------
    array
        C-contiguous.
    """

    def __init__(self, array: Array) -> None:
        xp = backend.namespace(array)
        self._array: Array = array
        self._event: Any = None
        if backend.is_host(xp):
            self._host = array.copy()
            return
        memory = xp.cuda.alloc_pinned_memory(array.nbytes)
        self._host = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
        array.get(out=self._host, blocking=False)
        self._event = backend.record(xp)

    def __call__(self) -> np.ndarray:
        """Return the values; the host waits until they are there."""
        if self._event is not None:
            self._event.synchronize()  # synchronize!
            self._array = self._event = None
        return self._host

    def __del__(self) -> None:
        """Wait as well: the memory goes to others."""
        if getattr(self, "_event", None) is not None and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):  # the device has failed
                self()
