"""Lists of arrays inside compiled code: one call for all parameters of a network, without a Python step for each.

Numba has no cheap list of arrays, and asking NumPy for an address takes a microsecond. So compiled code is told where
the list *objects* are (`id`), and reads the items from CPython's structure of a list (``PyListObject``), their type,
dtype, shape, flags and address from NumPy's of an array (``PyArrayObject_fields``, part of its binary interface). Lists
that do not hold plain arrays that fit are looked at once more in Python, which finds the words for the error.

Work is split over the concatenation of all arrays, so that large and small ones share the threads evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np

from sparsebp import backend
from sparsebp.core.errors import DeviceError
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import word_at

GRAIN = 64
"""Numbers: where an array is cut, it is cut at a multiple of it."""

_HEAD = object.__basicsize__
_ITEMS = _HEAD + 8
"""Where a list keeps the pointer to its items, in bytes from its beginning, behind their number."""
_TYPE, _DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS = _HEAD - 8, _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48
"""Where an array keeps things, in bytes from its beginning; the type is the last field of every object's head."""
_READ, _WRITE = 0x101, 0x501
"""Flags that an array must have: C-contiguous, aligned, and writeable."""
_OPTIONAL = 1 << 40
"""Not one of an array's flags: None may stand here."""


class Table(NamedTuple):
    """Lists of arrays as compiled code takes them.

    Attributes
    ----------
    addresses
        (n, columns) int64; 0 for None.
    begins
        (n + 1,) int64: where each array begins in the concatenation of its column.
    rows
        (n,) int64: the lengths of their first axes, 1 for arrays without axes.
    """

    addresses: np.ndarray
    begins: np.ndarray
    rows: np.ndarray


def table_of(columns: Sequence[Sequence[Any]], access: str, check: Callable[[], Any]) -> Table:
    """Return the addresses and sizes of arrays.

    Parameters
    ----------
    columns
        Sequences of equal length, at least 1. Arrays at the same place have the same shape, and all have one dtype.
    access
        A letter for each column: ``r``, its arrays are read; ``w``, they are written; ``o``, they are written, and None
        may stand in their place.
    check
        Called if anything looks wrong: raises the error, or returns because all is well (subclasses of arrays, say).

    Raises
    ------
    DeviceError
        The arrays live on a device.
    """
    lists = [column if type(column) is list else list(column) for column in columns]
    n, first = len(lists[0]), lists[0][0]
    trusted = type(first) is not np.ndarray or first.dtype.char not in "fd" or set(map(len, lists)) != {n}
    if trusted:
        check()
        if not backend.is_host(backend.namespace(first)):  # all are of one namespace
            raise DeviceError("An array belongs to another namespace than these kernels", expected="numpy.ndarray",
                              got=type(first).__name__, remedy="Take the kernels with kernels.get(xp)")  # fmt: skip
    where, wanted = tuple(map(id, lists)), _wanted(first.dtype.char, access)
    table = Table(np.empty((n, len(lists)), np.int64), np.empty(n + 1, np.int64), np.ones(n, np.int64))
    if not _read(where, wanted, trusted, *table):
        check()
        _read(where, wanted, True, *table)
    return table


@cache
def _wanted(dtype: str, access: str) -> np.ndarray:
    """Return the addresses of the type, the dtype and None, then the flags that each column needs."""
    flags = {"r": _READ, "w": _WRITE, "o": _WRITE | _OPTIONAL}
    return np.array([id(np.ndarray), id(np.dtype(dtype)), id(None), *(flags[letter] for letter in access)], np.int64)


@numba.njit(**JIT)
def _read(lists: Any, wanted: Any, trusted: bool, addresses: Any, begins: Any, rows: Any) -> bool:
    """Fill the tables; False, with tables half filled, at the first entry that is not as wanted, unless `trusted`."""
    n, columns = addresses.shape
    array_type, dtype, none = wanted[0], wanted[1], wanted[2]
    begins[0] = 0
    for i in range(n):
        first, ndim, size = word_at(word_at(lists[0] + _ITEMS) + 8 * i), np.int64(0), np.int64(1)
        for column in range(columns):
            entry = word_at(word_at(lists[column] + _ITEMS) + 8 * i)
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
                if ndim > 0:
                    rows[i] = word_at(word_at(first + _SHAPE))
            elif not trusted:
                for axis in range(ndim):
                    if word_at(word_at(entry + _SHAPE) + 8 * axis) != word_at(word_at(first + _SHAPE) + 8 * axis):
                        return False
            addresses[i, column] = word_at(entry + _DATA)
        begins[i + 1] = begins[i] + size
    return True


@numba.njit(**INNER_JIT)
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
