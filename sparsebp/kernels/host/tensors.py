"""Lists of arrays inside compiled code: one call for all parameters of a network, without a Python step for each.

Numba has no cheap list of arrays, and asking NumPy for an address takes a microsecond. So the kernels are told where
the array *objects* are (`id`), and read type, dtype, shape, flags and address from NumPy's C structure, whose layout is
part of its binary interface (``PyArrayObject_fields``). A list that is not all plain arrays that fit is looked at once
more in Python, which finds the words for the error.

Work is split over the concatenation of all arrays, so that large and small ones share the threads evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numba
import numpy as np

from sparsebp.kernels.host.parts import JIT
from sparsebp.kernels.host.simd import word_at

GRAIN = 64
"""Numbers: where an array is cut, it is cut at a multiple of it."""

_HEAD = object.__basicsize__
_TYPE, _DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS = _HEAD - 8, _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48
"""Where an array keeps things, in bytes from its beginning; the type is the last field of every object's head."""
_READ, _WRITE = 0x101, 0x501
"""Flags that an array must have: C-contiguous, aligned, and writeable."""
_OPTIONAL = 1 << 40
"""Not one of an array's flags: None may stand here."""


def table_of(columns: Sequence[Sequence[Any]], access: str, check: Callable[[], Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses of arrays, and where each begins in the concatenation of a column.

    Parameters
    ----------
    columns
        Sequences of equal length, at least 1. Arrays at the same place have the same shape, and all have one dtype.
    access
        A letter for each column: ``r``, its arrays are read; ``w``, they are written; ``o``, they are written, and None
        may stand in their place.
    check
        Called if anything looks wrong: raises the error, or returns because all is well (subclasses of arrays, say).

    Returns
    -------
    addresses : numpy.ndarray
        (n, len(columns)) int64; 0 for None.
    begins : numpy.ndarray
        (n + 1,) int64.
    """
    n, trusted = len(columns[0]), False
    if type(columns[0][0]) is not np.ndarray or any(len(column) != n for column in columns):
        check()
        trusted = True
    ids = np.fromiter(map(id, chain.from_iterable(columns)), np.int64, n * len(columns))
    addresses, begins = np.empty((n, len(columns)), np.int64), np.empty(n + 1, np.int64)
    wanted = _wanted(columns[0][0].dtype, access)
    if not _read(ids, wanted, trusted, addresses, begins):
        check()
        _read(ids, wanted, True, addresses, begins)
    return addresses, begins


@cache
def _wanted(dtype: np.dtype, access: str) -> np.ndarray:
    """Return the addresses of the type, the dtype and None, then the flags that each column needs."""
    flags = {"r": _READ, "w": _WRITE, "o": _WRITE | _OPTIONAL}
    return np.array([id(np.ndarray), id(dtype), id(None), *(flags[letter] for letter in access)], np.int64)


@numba.njit(**JIT)
def _read(ids: Any, wanted: Any, trusted: bool, addresses: Any, begins: Any) -> bool:
    """Fill the tables; False, with tables half filled, at the first entry that is not as wanted, unless `trusted`."""
    n, columns = addresses.shape
    array_type, dtype, none = wanted[0], wanted[1], wanted[2]
    begins[0] = 0
    for i in range(n):
        first, ndim, size = ids[i], np.int64(0), np.int64(1)
        for column in range(columns):
            entry = ids[column * n + i]
            flags = wanted[3 + column]
            if entry == none and flags >= _OPTIONAL:
                addresses[i, column] = 0
                continue
            if not trusted:  # nothing behind the head may be read before the type is known
                if word_at(entry + _TYPE) != array_type or word_at(entry + _DTYPE) != dtype:
                    return False
                flags &= _WRITE
                if word_at(entry + _FLAGS) & flags != flags:
                    return False
                if (word_at(entry + _NDIM) ^ word_at(first + _NDIM)) & 0xFFFF != 0:
                    return False
            if column == 0:
                ndim = word_at(first + _NDIM) & 0xFFFF
                for axis in range(ndim):
                    size *= word_at(word_at(first + _SHAPE) + 8 * axis)
            elif not trusted:
                for axis in range(ndim):
                    if word_at(word_at(entry + _SHAPE) + 8 * axis) != word_at(word_at(first + _SHAPE) + 8 * axis):
                        return False
            addresses[i, column] = word_at(entry + _DATA)
        begins[i + 1] = begins[i] + size
    return True


@numba.njit(**JIT)
def entry_at(begins: Any, position: int) -> int:
    """Return the array in which `position` of the concatenation lies, by bisection."""
    low, high = 0, len(begins) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if begins[middle] <= position:
            low = middle
        else:
            high = middle
    return low
