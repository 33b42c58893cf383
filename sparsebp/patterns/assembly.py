"""Matrices put together of others on a fixed pattern: sums, and matrices side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.core.types import Array
from sparsebp.patterns.copies import DeviceCopies, frozen
from sparsebp.patterns.sparsity import SparsityPattern


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

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(*self.indices)
