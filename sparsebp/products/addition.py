"""Symbolic work of sums on fixed patterns: where the entries of both operands lie in their union."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsebp.core.errors import ShapeError
from sparsebp.patterns.assembly import AssemblyPlan
from sparsebp.patterns.sparsity import KEPT, SparsityPattern, check_patterns
from sparsebp.patterns.validate import index_dtype


def plan_addition(a: SparsityPattern, b: SparsityPattern) -> AssemblyPlan:
    """Do the symbolic work of C = A + B once; entries that cancel stay entries.

    Parameters
    ----------
    a, b
        Patterns of one shape.

    Returns
    -------
    AssemblyPlan
        The same object again for equal patterns, as long as it is among the last that were asked for.

    Raises
    ------
    PatternError, ShapeError
        An operand is no pattern, or the shapes differ.
    """
    check_patterns(a=a, b=b)
    if a.shape != b.shape:
        raise ShapeError(
            "The shapes of a sum differ", expected=f"two matrices of shape {a.shape}", got=b.shape,
            remedy="Pass patterns of one shape",
        )  # fmt: skip
    return _plan(a, b)


@lru_cache(maxsize=KEPT)
def _plan(a: SparsityPattern, b: SparsityPattern) -> AssemblyPlan:
    from sparsebp.kernels.host.engine.team import team
    from sparsebp.kernels.host.sparse import union
    from sparsebp.products.symbolic import parts_for, row_cuts

    operands = (a.indptr, a.indices, b.indptr, b.indices)
    cuts = row_cuts(np.add(a.indptr, b.indptr, dtype=np.int64), parts_for(a.nnz + b.nnz))
    indptr = np.zeros(a.shape[0] + 1, np.int64)
    union.count_union(team(), len(cuts) - 1, *operands, cuts, indptr[1:])
    np.cumsum(indptr, out=indptr)
    nnz = int(indptr[-1])
    columns = np.empty(nnz, index_dtype(nnz, a.shape))
    a_index, b_index = (np.empty(p.nnz, np.int64) for p in (a, b))  # what NumPy indexes with
    union.write_union(team(), len(cuts) - 1, *operands, cuts, indptr, columns, a_index, b_index)
    return AssemblyPlan((a, b), SparsityPattern._trusted(indptr, columns, a.shape), (a_index, b_index))
