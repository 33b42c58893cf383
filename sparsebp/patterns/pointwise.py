"""Pattern of operators that map every element by itself: ReLU, Tanh, Sigmoid."""

from __future__ import annotations

from functools import lru_cache

from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import checked_sizes


def pointwise_pattern(size: int) -> SparsityPattern:
    """Return the diagonal of an operator on `size` elements.

    What is zero for one input only, a ReLU that is off, stays an entry (BPPSA §3.3 and Table 1: sparsity 1 - 1/size).

    Raises
    ------
    PatternError
        `size` is no integer, or negative.
    """
    return _diagonal(*checked_sizes(size=size))


_diagonal = lru_cache(maxsize=KEPT)(SparsityPattern.diagonal)
