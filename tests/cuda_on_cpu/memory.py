"""Memory that nobody has written carries a bit pattern that the executor recognises when a kernel reads it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

UNWRITTEN = {4: 0x7FC5BEAD, 8: 0x7FFC5BEADFEEDFAC}
"""By item size. As floats: quiet NaNs with a payload that arithmetic does not produce; ``checker.cpp`` knows them."""


def uninitialised(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array as `numpy.empty` does, but filled with the pattern of unwritten memory.

    Items of other sizes than 4 and 8 bytes are filled with 0xA5 bytes, which the executor does not recognise.
    """
    array = np.empty(shape, dtype)
    if array.dtype.itemsize in UNWRITTEN:
        array.view(f"u{array.dtype.itemsize}")[...] = UNWRITTEN[array.dtype.itemsize]
    else:
        array.view(np.uint8).reshape(-1)[...] = 0xA5
    return array


class CheckedNumpy(ModuleType):
    """NumPy, except that ``empty`` and ``empty_like`` return recognisably unwritten memory: the launchers' scratch."""

    def __init__(self) -> None:
        super().__init__("checked_numpy")

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
        """See `uninitialised`."""
        return uninitialised(shape, dtype)

    @staticmethod
    def empty_like(prototype: np.ndarray, dtype: Any = None) -> np.ndarray:
        """See `uninitialised`."""
        return uninitialised(prototype.shape, prototype.dtype if dtype is None else dtype)
