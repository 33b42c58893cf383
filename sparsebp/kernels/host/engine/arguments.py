"""The addresses of the arrays in a list, and a check of dtype, shape and layout, in one compiled call.

Fifty arrays cost a product's plan some 30 µs when Python looks at each dtype, shape and layout and asks for its address
(``array.ctypes``: 1 µs). Here the interpreter's own buffer protocol says all of that at once, some 50 ns an array, and
nothing of the interpreter's memory is read but the `Py_buffer` that it fills, whose layout is part of its stable ABI.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import SERIAL

_get_item: Any = types.ExternalFunction("PyList_GetItem", types.intp(types.intp, types.intp))
_get_buffer: Any = types.ExternalFunction("PyObject_GetBuffer", types.int32(types.intp, types.intp, types.int32))
_release: Any = types.ExternalFunction("PyBuffer_Release", types.void(types.intp))
_forget_error: Any = types.ExternalFunction("PyErr_Clear", types.void())

_FORMATS = {np.dtype(np.float32): ord("f"), np.dtype(np.float64): ord("d")}
"""How the buffer protocol writes the dtypes, aligned and in the machine's order of bytes; anything else is longer."""
_LIKE = np.int32(0x0008 | 0x0004 | 0x0010 | 0x0020)  # PyBUF_ND, FORMAT, STRIDES and C_CONTIGUOUS
_BUFFER, _AXES, _FORMAT, _SHAPE, _WORDS = 0, 4, 5, 6, 12
"""Words of a `Py_buffer`: the address, the number of axes (its upper half), and where the format and shape stand."""
_AXES_SHIFT = 32 if sys.byteorder == "little" else 0


class Found(NamedTuple):
    """Addresses and axes of arrays, as `find` returns them.

    Attributes
    ----------
    places
        (n,) int64: the address of every array, 0 for None.
    wide
        (n,) bool: whether it has a batch axis.
    """

    places: Array
    wide: Array


def find(arrays: list[Any], rows: Array, least: Array, most: int, batch: int, dtype: np.dtype) -> Found | None:
    """Find C-contiguous arrays of `dtype` and of shape (rows,) or (rows, batch); None stands for no array.

    Parameters
    ----------
    arrays
        Plain NumPy arrays that the caller keeps alive, in a list that nobody else knows.
    rows
        (n,) int64: their lengths.
    least, most
        Axes that they have: at most `most`, 1 or 2, and at least ``least[i]``, (n,) int64, where that is not more.
    batch
        Length of the second axis.
    dtype
        float32 or float64.

    Returns
    -------
    Found, or None where one of them is anything else.
    """
    places, wide = np.empty(len(arrays) + _WORDS, np.int64), np.empty(len(arrays), np.bool_)
    if len(arrays) != len(rows) or not _find(
        id(arrays), id(None), rows, least, most, batch, _FORMATS[dtype], places, wide
    ):
        return None
    return Found(places[: len(arrays)], wide)


# The functions below are compiled: their arguments are arrays, addresses and numbers.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**{**SERIAL, "nogil": False})  # the interpreter is asked, so it has to stand still
def _find(items, none, rows, least, most, batch, code, places, wide):
    view = simd.number(simd.pointer(places)) + 8 * len(rows)
    for i in range(len(rows)):
        item = _get_item(items, i)
        if item == none:
            places[i], wide[i] = 0, False
            continue
        if item == 0 or _get_buffer(item, view, _LIKE) != 0:
            _forget_error()
            return False
        axes = (simd.word_at(view + 8 * _AXES) >> _AXES_SHIFT) & 0xFFFF
        text, shape = simd.address(simd.word_at(view + 8 * _FORMAT), np.uint8(0)), simd.word_at(view + 8 * _SHAPE)
        fits = text[0] == code and text[1] == 0 and min(least[i], most) <= axes <= most
        fits = fits and simd.word_at(shape) == rows[i] and (axes == 1 or simd.word_at(shape + 8) == batch)
        places[i], wide[i] = simd.word_at(view + 8 * _BUFFER), axes == 2
        _release(view)
        if not fits:
            return False
    return True
