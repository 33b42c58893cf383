"""What cases are drawn from: awkward sizes, dtypes, arrays in any layout, values that are no good."""

from __future__ import annotations

from typing import Any

import numpy as np

from matrices import of_mask
from sparsebp import SparsityPattern

AWKWARD = (0, 1, 1, 2, 3, 5, 7, 8, 11, 13)
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
WRONG_DTYPES = tuple(map(np.dtype, ("f2", "i4", "i8", "?", "c8", "c16", "O", "U3", "M8[s]")))


def one_of(rng: np.random.Generator, *choices: Any) -> Any:
    """Return one of the choices."""
    return choices[int(rng.integers(len(choices)))]


def chance(rng: np.random.Generator, share: float) -> bool:
    """Return whether something happens that happens with that probability."""
    return bool(rng.random() < share)


def size(rng: np.random.Generator, low: int = 0, high: int = 13) -> int:
    """Return an awkward number from `low` to `high`."""
    return int(one_of(rng, *(n for n in AWKWARD if low <= n <= high), low))


def real(rng: np.random.Generator) -> np.dtype:
    """Return float32 or float64."""
    return one_of(rng, *DTYPES)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return normally distributed values, C-contiguous."""
    return rng.standard_normal(shape).astype(dtype)


def laid_out(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Return the same values in another layout: reversed, strided, transposed or read-only memory."""
    way = int(rng.integers(6))
    if way == 0:
        array = array.copy()
        array.flags.writeable = False
    elif way == 1:
        array = np.asfortranarray(array)
    elif way == 2 and array.ndim:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    elif way == 3 and array.ndim:
        array = np.ascontiguousarray(array[::-1])[::-1]
    return array


def pattern(rng: np.random.Generator, rows: int, columns: int) -> SparsityPattern:
    """Return a pattern of that shape, of any kind that it allows."""
    kind = int(rng.integers(8))
    if rows == columns and kind < 2:
        return SparsityPattern.identity(rows) if kind else SparsityPattern.diagonal(rows)
    if kind == 2:
        return SparsityPattern.dense(rows, columns)
    if kind == 3 and columns:  # a selection
        mask = np.zeros((rows, columns), bool)
        mask[np.arange(rows), rng.integers(0, columns, rows)] = rng.random(rows) < 0.8
    elif kind == 4:  # runs of neighbouring columns
        first = rng.integers(0, columns + 1, rows)[:, None]
        place = np.arange(columns)
        mask = (place >= first) & (place < first + rng.integers(0, 6, rows)[:, None])
    else:
        mask = rng.random((rows, columns)) < one_of(rng, 0.0, 0.1, 0.3, 0.7)
    return of_mask(mask)


JUNK = (
    None,
    True,
    False,
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    -(2**63),
    "",
    "a",
    "1",
    b"1",
    (),
    (1,),
    (2, 3, 4, 5),
    [],
    [1],
    {},
    {1: 2},
    1j,
    object(),
    int,
    len,
    np.float64(2.5),
    np.int8(-3),
    np.zeros(0),
    np.zeros(3),
    np.ones((2, 2)),
    np.array("a"),
    np.array([None]),
    slice(None),
    range(3),
    np.bool_(True),
    Ellipsis,
)
"""Values that are hardly ever right."""
NO_ARRAYS = tuple(junk for junk in JUNK if junk is not None and not isinstance(junk, np.ndarray))
"""Those of them that are never right where an array is wanted: an array may happen to fit."""
