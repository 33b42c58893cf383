"""Symbolic work of matrices side by side: where the entries of each lie in the whole."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsebp.core.errors import ShapeError
from sparsebp.patterns.assembly import AssemblyPlan
from sparsebp.patterns.sparsity import KEPT, SparsityPattern, check_patterns


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
