"""Matrices put together of others on a fixed pattern: sums, and matrices side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.core.locks import cached_property
from sparsebp.core.types import Array
from sparsebp.patterns.copies import DeviceCopies, frozen
from sparsebp.patterns.sparsity import KEPT, SparsityPattern, check_patterns


@dataclass(frozen=True, eq=False)
class AssemblyPlan:
    """How C is put together of other matrices, any number of times; entries that meet are added.

    Made by `plan_addition` and `plan_concatenation`.

    Attributes
    ----------
    parts : tuple of SparsityPattern
        Patterns of the matrices.
    pattern : SparsityPattern
        Pattern of C.
    indices : tuple of numpy.ndarray
        Place of every entry of each part among the entries of C, shapes (nnz,), read-only. No place is twice in one of
        them, and every place is in at least one.
    """

    parts: tuple[SparsityPattern, ...]
    pattern: SparsityPattern
    indices: tuple[np.ndarray, ...] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(map(frozen, self.indices)))

    def __call__(self, *data: Array) -> Array:
        """Return the values of C.

        Parameters
        ----------
        data
            Values on the parts: (nnz,) shared by the batch or (nnz, B) per sample, of one dtype, all of NumPy or all of
            CuPy.

        Returns
        -------
        Array
            (nnz,) if all parts are shared, else (nnz, B).

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            An array does not fit.
        """
        xp = backend.namespace(*data)
        wanted = [pattern.nnz for pattern in self.parts]
        if [a.shape[:1] for a in data] != [(n,) for n in wanted] or any(a.ndim > 2 for a in data):
            raise ShapeError(
                "The values do not fit the parts", expected=f"(nnz,) or (nnz, B) each, with nnz {wanted}",
                got=[a.shape for a in data], remedy="Pass one value per entry of every part, the batch last",
            )  # fmt: skip
        if len({a.dtype for a in data}) > 1:
            raise DTypeError(
                "The parts have different dtypes", expected="one dtype for all", got=[str(a.dtype) for a in data],
                remedy="Convert them with .astype(...); nothing is converted silently",
            )  # fmt: skip
        batches = {a.shape[1:] for a in data if a.ndim == 2}
        if len(batches) > 1:
            raise ShapeError(
                "The parts have different batch sizes", expected="one batch size, or shared values of shape (nnz,)",
                got=[a.shape for a in data], remedy="Pass values of the same samples",
            )  # fmt: skip
        shape = (self.pattern.nnz, *(batches.pop() if batches else ()))
        apart = sum(wanted) == self.pattern.nnz  # no entries meet
        out = (xp.empty if apart else xp.zeros)(shape, dtype=data[0].dtype)
        for part, (values, index) in enumerate(zip(data, self._copies.on(xp), strict=True)):
            wide = values if values.ndim == out.ndim else values[:, None]
            if apart or part == 0:
                out[index] = wide
            else:
                out[index] += wide
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies from what defines the plan, so that their arrays are read-only again."""
        return AssemblyPlan, (self.parts, self.pattern, self.indices)

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(*self.indices)


def plan_concatenation(*parts: SparsityPattern) -> AssemblyPlan:
    """Do the symbolic work of C = [A₁ A₂ …] once.

    Parameters
    ----------
    parts
        One pattern or more, with one number of rows.

    Returns
    -------
    AssemblyPlan
        The same object again for equal patterns, as long as it is among the last that were asked for.

    Raises
    ------
    PatternError, ShapeError
        A part is no pattern, there is none, or the numbers of rows differ.
    """
    check_patterns(**{f"parts[{i}]": part for i, part in enumerate(parts)})
    if len({part.shape[0] for part in parts}) != 1:
        raise ShapeError(
            "Only matrices with one number of rows stand side by side", expected="one number of rows, one part or more",
            got=[part.shape for part in parts], remedy="Pass patterns of operators on one input",
        )  # fmt: skip
    return _plan(parts)


@lru_cache(maxsize=KEPT)
def _plan(parts: tuple[SparsityPattern, ...]) -> AssemblyPlan:
    rows = parts[0].shape[0]
    lengths = np.array([np.diff(part.indptr) for part in parts], dtype=np.int64)  # (parts, rows)
    ends = np.cumsum(lengths.T.reshape(-1))  # of every row's stretch of every part, in the order of C
    starts = (ends - lengths.T.reshape(-1)).reshape(rows, len(parts))
    n_columns = np.cumsum([0, *(part.shape[1] for part in parts)])
    columns = np.empty(sum(part.nnz for part in parts), dtype=np.int64)
    indices = []
    for part, start, first in zip(parts, starts.T, n_columns[:-1], strict=True):
        index = np.arange(part.nnz) + np.repeat(start - part.indptr[:-1], np.diff(part.indptr))
        columns[index] = part.indices + first
        indices.append(index)
    indptr = np.concatenate(([0], np.cumsum(lengths.sum(axis=0))))
    pattern = SparsityPattern._trusted(indptr, columns, (rows, int(n_columns[-1])))
    return AssemblyPlan(parts, pattern, tuple(indices))
