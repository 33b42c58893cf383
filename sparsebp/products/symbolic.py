"""Symbolic phase of sparse products: the pattern of C = A @ B and where every product lands in it.

`sparsebp.kernels.host.sparse.structure` does the work, on all threads; here it is split into parts, and its arrays are
made.
"""

from __future__ import annotations

import numpy as np

from sparsebp.kernels.host.engine.team import team
from sparsebp.kernels.host.sparse import structure
from sparsebp.patterns.sparsity import SparsityPattern
from sparsebp.patterns.validate import index_dtype

_MAX_PARTS = 32
_PART_WORK = 1 << 15
"""Products of one part at least; in addition four for each column of B, for which a part keeps a few bytes."""


def row_cuts(work: np.ndarray, parts: int) -> np.ndarray:
    """Split rows into at most `parts` parts of about equal work.

    Parameters
    ----------
    work
        Running sum of the rows' work, shape (n_rows + 1,), from 0.
    parts
        How many parts to aim at.

    Returns
    -------
    numpy.ndarray
        Row numbers where parts begin, and the number of rows last; int64, strictly increasing (or 0, 0 for no rows).
    """
    rows = len(work) - 1
    inner = np.searchsorted(work, work[-1] * np.arange(1, parts) // parts)
    cuts = np.unique(np.concatenate(([0], inner, [rows])).clip(0, rows))
    return cuts.astype(np.int64) if rows else np.zeros(2, np.int64)


def parts_for(work: int) -> int:
    """Return into how many parts `work` entries or products are split; as always, whatever the number of threads."""
    return min(_MAX_PARTS, 1 + work // _PART_WORK)


class SymbolicProduct:
    """What is known of C = A @ B without values, found step by step: nothing is made that is not asked for.

    Parameters
    ----------
    a, b
        Patterns of shapes (m, k) and (k, n).

    Attributes
    ----------
    product_ptr
        Products before every row of C, int64, shape (m + 1,).
    products
        Number of products.
    pair_dtype
        Index type that holds the number of any entry of A or B.
    """

    def __init__(self, a: SparsityPattern, b: SparsityPattern) -> None:
        self._operands = (a.indptr, a.indices, b.indptr, b.indices)
        self.pair_dtype = index_dtype(max(a.nnz, b.nnz), (0, 0))
        self.shape = (a.shape[0], b.shape[1])
        self.product_ptr = np.zeros(self.shape[0] + 1, np.int64)
        by_entries = row_cuts(a.indptr, parts_for(a.nnz))
        structure.count_products(team(), len(by_entries) - 1, *self._operands[:3], by_entries, self.product_ptr[1:])
        np.cumsum(self.product_ptr, out=self.product_ptr)
        self.products = int(self.product_ptr[-1])
        parts = min(_MAX_PARTS, 1 + self.products // (4 * self.shape[1] + _PART_WORK))
        self._cuts = row_cuts(self.product_ptr, parts)

    def count(self) -> np.ndarray:
        """Return where every row of C begins, int64, shape (m + 1,)."""
        indptr = np.zeros(self.shape[0] + 1, np.int64)
        structure.count_entries(*self._parts(), *self._operands, self._cuts, self._scratch(np.uint16), indptr[1:])
        return np.cumsum(indptr, out=indptr)

    def pattern(self, indptr: np.ndarray) -> SparsityPattern:
        """Return C's pattern; `indptr` as `count` gave it."""
        indices = np.empty(int(indptr[-1]), index_dtype(int(indptr[-1]), self.shape))
        scratch = self._scratch(np.uint8, extra=64)
        structure.write_columns(*self._parts(), *self._operands, indptr, indices, self._cuts, scratch)
        return SparsityPattern._trusted(indptr, indices, self.shape)

    def positions(self, c: SparsityPattern, dtype: np.dtype) -> np.ndarray:
        """Return where in its row of C every product lands, in Gustavson's order, shape (products,).

        `dtype` must hold the entries of the longest row.
        """
        positions = np.empty(self.products, dtype)
        structure.write_positions(
            *self._parts(), *self._operands, c.indptr, c.indices, self.product_ptr, self._cuts, self._scratch(dtype),
            positions,
        )  # fmt: skip
        return positions

    def pairs(self, c: SparsityPattern) -> tuple[np.ndarray, np.ndarray]:
        """Return which entries of A and B every entry of C multiplies; for products with one term an entry."""
        a_index, b_index = (np.empty(c.nnz, self.pair_dtype) for _ in range(2))
        scratch = self._scratch(c.indptr.dtype)
        structure.write_pairs(
            *self._parts(), *self._operands, c.indptr, c.indices, self._cuts, scratch, a_index, b_index
        )
        return a_index, b_index

    def _parts(self) -> tuple[int, int]:
        """Return who works, and in how many parts."""
        return team(), len(self._cuts) - 1

    def _scratch(self, dtype: np.dtype | type, extra: int = 0) -> np.ndarray:
        return np.zeros((len(self._cuts) - 1, self.shape[1] + extra), dtype)
