"""Symbolic phase of sparse products: the pattern of C = A @ B and where every product lands in it.

`sparsebp.kernels.host.sparse.structure` does the work, on all threads; here it is split into parts, and its arrays are
made.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from sparsebp.patterns.sparsity import SparsityPattern
from sparsebp.patterns.validate import index_bytes, index_dtype

_MAX_PARTS = 32
_PART_WORK = 1 << 15
"""Products of one part at least; in addition four for each column of B, for which a part keeps a few bytes."""
_MOST_CUTS = 64
_CUT_WORK = 2048
"""Products in one part of the numeric phase at least; with a batch of 64 that is one grain of the kernels."""


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


def parts_of_rows(work: np.ndarray) -> np.ndarray:
    """Return the rows' parts for the numeric phase, from the running sum of the rows' work; see `row_cuts`."""
    return row_cuts(work, min(_MOST_CUTS, 1 + int(work[-1]) // _CUT_WORK))


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
    pair_dtype
        Index type that holds the number of any entry of A or B.
    """

    def __init__(self, a: SparsityPattern, b: SparsityPattern) -> None:
        self.a, self.b = a, b
        self.shape = (a.shape[0], b.shape[1])
        self.pair_dtype = index_dtype(max(a.nnz, b.nnz), (0, 0))

    @cached_property
    def product_ptr(self) -> np.ndarray:
        """Products before every row of C, int64, shape (m + 1,)."""
        before = np.zeros(self.a.nnz + 1, np.int64)
        np.cumsum(np.diff(self.b.indptr)[self.a.indices], out=before[1:])
        return before[self.a.indptr]

    @property
    def products(self) -> int:
        """Number of products."""
        return int(self.product_ptr[-1])

    @cached_property
    def c_indptr(self) -> np.ndarray:
        """Where every row of C begins, int64, shape (m + 1,)."""
        from sparsebp.kernels.host.sparse import structure

        indptr = np.zeros(self.shape[0] + 1, np.int64)
        structure.count_entries(*self._parts, *self._operands, self._cuts, self._scratch(np.uint16), indptr[1:])
        return np.cumsum(indptr, out=indptr)

    @property
    def nnz(self) -> int:
        """Number of entries of C."""
        return int(self.c_indptr[-1])

    @property
    def pattern_bytes(self) -> int:
        """Bytes of C's pattern, if it is not an operand's; only one of as many entries is made to find that out."""
        known = any(p.nnz == self.nnz and p.shape == self.shape for p in (self.a, self.b))
        return 0 if known and self.pattern in (self.a, self.b) else index_bytes(self.nnz, self.shape)

    @cached_property
    def pattern(self) -> SparsityPattern:
        """C's pattern; an operand's object where it is the same, so that nothing is kept twice."""
        from sparsebp.kernels.host.sparse import structure

        indices = np.empty(self.nnz, index_dtype(self.nnz, self.shape))
        scratch = self._scratch(np.uint8, extra=64)
        structure.write_columns(*self._parts, *self._operands, self.c_indptr, indices, self._cuts, scratch)
        made = SparsityPattern._trusted(self.c_indptr, indices, self.shape)
        return next((operand for operand in (self.a, self.b) if operand == made), made)

    @cached_property
    def position_dtype(self) -> np.dtype:
        """The narrowest type that holds a place in any row of C."""
        return np.dtype(np.uint16 if int(np.diff(self.c_indptr).max(initial=0)) <= 2**16 else np.uint32)

    @property
    def position_bytes(self) -> int:
        """Bytes of the places of all products."""
        return self.position_dtype.itemsize * self.products

    @cached_property
    def row_cuts(self) -> np.ndarray:
        """Rows of C in parts of about equal work for the numeric phase, see `row_cuts`."""
        return parts_of_rows(self.product_ptr + self.c_indptr)

    def positions(self, dtype: np.dtype | type) -> np.ndarray:
        """Return where in its row of C every product lands, in Gustavson's order, shape (products,).

        `dtype` must hold the entries of the longest row.
        """
        from sparsebp.kernels.host.sparse import structure

        positions, c = np.empty(self.products, dtype), self.pattern
        structure.write_positions(
            *self._parts, *self._operands, c.indptr, c.indices, self.product_ptr, self._cuts, self._scratch(dtype),
            positions,
        )  # fmt: skip
        return positions

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which entries of A and B every entry of C multiplies; for products with one term an entry."""
        from sparsebp.kernels.host.sparse import structure

        c = self.pattern
        a_index, b_index = (np.empty(c.nnz, self.pair_dtype) for _ in range(2))
        scratch = self._scratch(c.indptr.dtype)
        structure.write_pairs(*self._parts, *self._operands, c.indptr, c.indices, self._cuts, scratch, a_index, b_index)
        return a_index, b_index

    @cached_property
    def terms(self) -> np.ndarray:
        """How many products every entry of C is the sum of, uint16, shape (nnz,); for rows of A that are no longer."""
        from sparsebp.kernels.host.sparse import pair_lists

        c = self.pattern
        counts, scratch = np.empty(c.nnz, np.uint16), self._scratch(c.indptr.dtype)
        pair_lists.count_pairs(*self._parts, *self._operands, c.indptr, c.indices, self._cuts, scratch, counts)
        return counts

    def words(self, first: np.ndarray, begins: np.ndarray, shift: int, dtype: np.dtype) -> np.ndarray:
        """Return the words of `sparsebp.kernels.operands.Pairs`.

        Entries of A in row r are counted from ``first[r]``; `begins`, where every list begins, is overwritten.
        """
        from sparsebp.kernels.host.sparse import pair_lists

        words, c = np.empty(self.products, dtype), self.pattern
        scratch = self._scratch(c.indptr.dtype)
        pair_lists.write_words(
            *self._parts, *self._operands, c.indptr, c.indices, self._cuts, scratch, first, shift, begins, words
        )
        return words

    @property
    def _operands(self) -> tuple[np.ndarray, ...]:
        return self.a.indptr, self.a.indices, self.b.indptr, self.b.indices

    @cached_property
    def _cuts(self) -> np.ndarray:
        parts = min(_MAX_PARTS, 1 + self.products // (4 * self.shape[1] + _PART_WORK))
        return row_cuts(self.product_ptr, parts)

    @property
    def _parts(self) -> tuple[int, int]:
        """Who works, and in how many parts."""
        from sparsebp.kernels.host.engine.team import team

        return team(), len(self._cuts) - 1

    def _scratch(self, dtype: np.dtype | type, extra: int = 0) -> np.ndarray:
        return np.zeros((len(self._cuts) - 1, self.shape[1] + extra), dtype)
