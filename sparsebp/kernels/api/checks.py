"""What the checks of arguments share: quick tests that pass in a fraction of a microsecond, the full error behind them.

They look at dtypes, shapes and layout, never at values: that would cost a pass over the data (on a device a
synchronisation) at every call. What indices hold is checked where a pattern is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.backend import FLOAT_DTYPES, INDEX_DTYPES, check_array, namespace
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.core.types import Array

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
UINT16, UINT32, UINT64 = (np.dtype(kind) for kind in (np.uint16, np.uint32, np.uint64))
POSITION_DTYPES = (UINT16, UINT32)


class Family:
    """Some kernels that belong together: each method checks its arguments, then calls the implementation's.

    Parameters
    ----------
    run
        `sparsebp.kernels.host.HostKernels` or `sparsebp.kernels.device.DeviceKernels`. Their methods have the names and
        arguments of those here, and look at nothing.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def unchecked(self) -> Any:
        """The host's kernels without their checks, for arrays that a caller has looked at; on a device, these.

        Every argument has to be given; None stands for what is the default here.
        """
        return self._run if self._run.unchecked else self


def exact(name: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    """Check dtype, shape and C-contiguity of one array that is read.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, LayoutError
        From `sparsebp.backend.check_array`, which words the error.
    """
    if getattr(array, "shape", None) == shape and array.dtype == dtype and array.flags.c_contiguous:
        return
    check_array(name, array, dtype=dtype, shape=shape)


def written(name: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    """Check one array as `exact` does, and that it may be written."""
    exact(name, array, dtype, shape)
    if not getattr(array.flags, "writeable", True):
        check_array(name, array, written=True)


def rank(name: str, array: Array, ndim: int) -> tuple[int, ...]:
    """Return the shape of `array`, after checking that it has `ndim` axes."""
    if getattr(array, "ndim", None) != ndim:
        check_array(name, array, shape=(None,) * ndim, contiguous=False)
    return array.shape


def real_dtype(name: str, array: Array) -> np.dtype:
    """Return the dtype of `array`, after checking that it is one that kernels take.

    Raises
    ------
    DTypeError
        It is neither float32 nor float64.
    """
    if getattr(array, "dtype", bool) not in FLOAT_DTYPES:
        _wrong_dtype(name, array, "float32 or float64")
    return array.dtype


def index_dtype(name: str, array: Array) -> np.dtype:
    """Return the dtype of an index array, after checking that it is int32 or int64."""
    if getattr(array, "dtype", bool) not in INDEX_DTYPES:
        _wrong_dtype(name, array, "int32 or int64")
    return array.dtype


def position_dtype(name: str, array: Array) -> np.dtype:
    """Return the dtype of an array of output positions, after checking that it is uint16 or uint32."""
    if getattr(array, "dtype", bool) not in POSITION_DTYPES:
        _wrong_dtype(name, array, "uint16 or uint32")
    return array.dtype


def word_dtype(name: str, array: Array) -> np.dtype:
    """Return the dtype of an array of words that name two entries, after checking that it is uint32 or uint64."""
    if getattr(array, "dtype", bool) not in (UINT32, UINT64):
        _wrong_dtype(name, array, "uint32 or uint64")
    return array.dtype


def rows_of(name: str, indptr: Array) -> int:
    """Return the number of rows that `indptr` describes.

    Raises
    ------
    ShapeError
        It is not one-dimensional, or empty (even without rows it holds one zero).
    """
    (length,) = rank(name, indptr, 1)
    if length == 0:
        raise ShapeError(
            f"{name} is empty", expected="n_rows + 1 entries", got="0", remedy="Start it with a zero, also for no rows"
        )
    return length - 1


def batch_of(**arrays: Array) -> int:
    """Return the batch size of operands whose last axis is 1 (shared) or B (per sample).

    Raises
    ------
    ShapeError
        Two operands have different batch sizes, neither of them 1.
    """
    batch = 1
    for array in arrays.values():
        length = array.shape[-1]
        if length in (1, batch):
            continue
        if batch != 1:
            raise ShapeError(
                "Operands have different batch sizes",
                expected="a last axis of 1 or of one batch size B in all",
                got=", ".join(f"{name} {value.shape}" for name, value in arrays.items()),
                remedy="Pass values for the same samples, or shared values with a last axis of 1",
            )
        batch = length
    return batch


def batched(name: str, array: Array, dtype: Any, lead: tuple[int, ...], batch: int) -> None:
    """Check an array of shape ``(*lead, B*)``: values per sample, or shared by the batch."""
    shared = array.ndim == len(lead) + 1 and array.shape[-1] == 1
    exact(name, array, dtype, (*lead, 1 if shared else batch))


def _wrong_dtype(name: str, array: Array, expected: str) -> None:
    namespace(**{name: array})
    raise DTypeError(
        f"{name} has the wrong dtype",
        expected=expected,
        got=array.dtype,
        remedy=f"Convert it with {name}.astype(...); nothing is converted silently",
    )
