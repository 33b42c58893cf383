"""Symbolic phase of sparse products: the pattern of C = A @ B, and where every product lands in it.

`sparsebp.kernels.host.sparse.symbolic` does the work on all threads; this module splits it and allocates its arrays.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core.locks import cached_property
from sparsebp.patterns.pattern import SparsityPattern, index_bytes, index_dtype

_MAX_PARTS = 32
_PART_WORK = 1 << 15
"""Fewest products of a part; plus four for each column of B, for which a part keeps a few bytes."""
MOST_ROOM = 1 << 30
"""Most bytes reserved for rows of C of unknown length; beyond it, entries are counted first."""
ROW_LENGTH = 32
"""Mean length of B's rows, over all products, up to which lists of products are considered. Beyond it they gain
little or nothing, and an index of offsets is half as large or less."""
_SCATTERED = 16
"""Columns per entry of B beyond which only columns with entries are numbered."""
_MOST_CUTS = 64
_CUT_WORK = 2048
"""Fewest products of a part of the numeric phase; with a batch of 64 that is one grain of the kernels."""


def row_cuts(work: np.ndarray, parts: int) -> np.ndarray:
    """Split rows into at most `parts` parts of about equal work.

    `work` is the running sum of the rows' work, (n_rows + 1,), from 0. Returns the first row of each part and the
    number of rows, int64, strictly increasing (or 0, 0 without rows).
    """
    rows = len(work) - 1
    inner = np.searchsorted(work, work[-1] * np.arange(1, parts) // parts)
    cuts = np.unique(np.concatenate(([0], inner, [rows])).clip(0, rows))
    return cuts.astype(np.int64) if rows else np.zeros(2, np.int64)


def parts_of_rows(work: np.ndarray) -> np.ndarray:
    """Split rows for the numeric phase, by the running sum of their work; see `row_cuts`."""
    return row_cuts(work, parts_of_numeric(int(work[-1])))


def parts_of_numeric(work: int) -> int:
    """Return the number of parts of the numeric phase for `work` products."""
    return min(_MOST_CUTS, 1 + work // _CUT_WORK)


def parts_for(work: int) -> int:
    """Return the number of parts for `work` entries or products, whatever the number of threads."""
    return min(_MAX_PARTS, 1 + work // _PART_WORK)


def host_kernels() -> ModuleType:
    """Import the kernels of the symbolic phase on first use: Numba takes long to load."""
    from sparsebp.kernels.host.sparse import symbolic

    return symbolic


class SymbolicProduct:
    """Everything known about C = A @ B without values, computed on first use.

    Parameters
    ----------
    a, b
        Patterns of shapes (m, k) and (k, n).
    memory_limit
        Bytes beyond which entries of C are counted before any is stored; None for no limit.

    Attributes
    ----------
    pair_dtype
        Index type for any entry of A or B.
    """

    def __init__(self, a: SparsityPattern, b: SparsityPattern, memory_limit: int | None = None) -> None:
        self.a, self.b = a, b
        self._most_room = MOST_ROOM if memory_limit is None else min(MOST_ROOM, memory_limit)
        self.shape = (a.shape[0], b.shape[1])
        self.pair_dtype = index_dtype(max(a.nnz, b.nnz), (0, 0))

    @property
    def product_ptr(self) -> np.ndarray:
        """Number of products before every row of C, int64, shape (m + 1,)."""
        return self._before[0]

    @cached_property
    def _before(self) -> tuple[np.ndarray, np.ndarray]:
        """`product_ptr`, and an upper bound of C's row pointer."""
        product_ptr, room = np.empty((2, self.shape[0] + 1), np.int64)
        host_kernels().count_products(self.a.indptr, self.a.indices, self.b.indptr, self._width, product_ptr, room)
        return product_ptr, room

    @property
    def products(self) -> int:
        """Number of products."""
        return int(self.product_ptr[-1])

    @cached_property
    def longest_row_of_a(self) -> int:
        """Length of A's longest row; no entry of C sums more products."""
        return int(np.diff(self.a.indptr).max(initial=0))

    @cached_property
    def has_short_rows(self) -> bool:
        """Whether rows of B are short enough to consider lists of products."""
        return self.products <= ROW_LENGTH * self.a.nnz and self.longest_row_of_a < 2**16

    @cached_property
    def c_indptr(self) -> np.ndarray:
        """C's row pointer, int64, shape (m + 1,)."""
        indptr = np.zeros(self.shape[0] + 1, np.int64)
        if (self._columns.dtype.itemsize + 2) * int(self._before[1][-1]) <= self._most_room:
            np.cumsum(self._found[0], out=indptr[1:])
        else:
            host_kernels().count_entries(
                *self._parts, *self._operands, self._cuts, self._scratch(np.uint16), indptr[1:]
            )
            np.cumsum(indptr, out=indptr)
        return indptr

    @property
    def nnz(self) -> int:
        """Number of entries of C."""
        return int(self.c_indptr[-1])

    @property
    def pattern_bytes(self) -> int:
        """Bytes of C's pattern, 0 if an operand has it; C is built only if an operand has as many entries."""
        known = any(p.nnz == self.nnz and p.shape == self.shape for p in (self.a, self.b))
        return 0 if known and self.pattern in (self.a, self.b) else index_bytes(self.nnz, self.shape)

    @cached_property
    def pattern(self) -> SparsityPattern:
        """C's pattern; the operand's object if an operand has it."""
        indices = self._joined[0] if self._present is None else self._present[self._joined[0]]
        made = SparsityPattern._unchecked(self.c_indptr, indices, self.shape)
        return next((operand for operand in (self.a, self.b) if operand == made), made)

    @property
    def terms(self) -> np.ndarray:
        """Number of products per entry of C, uint16, shape (nnz,); if `has_short_rows`."""
        return self._joined[1]

    @cached_property
    def _joined(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns of all rows of C, numbered as in `_columns`, and `terms`."""
        ends = self.c_indptr[self._cuts]
        _, begins, *found = self._found
        joined = [np.empty(self.nnz if len(array) else 0, array.dtype) for array in found]
        host_kernels().join_rows(*self._parts, begins, ends, *found, *joined)
        del self._found
        columns, terms = joined
        return columns, terms

    @cached_property
    def _found(self) -> tuple[np.ndarray, ...]:
        """Entries per row of C; where each part begins in the arrays that follow; columns and terms."""
        room, parts, short = self.__dict__.get("c_indptr", self._before[1]), len(self._cuts) - 1, self.has_short_rows
        begins = room[self._cuts[:-1]] + host_kernels().SLACK * np.arange(parts)
        size = int(room[-1]) + host_kernels().SLACK * parts
        columns, terms = np.empty(size, self._columns.dtype), np.empty(size if short else 0, np.uint16)
        counts = np.empty(self.shape[0], np.int64)
        marks = self._scratch(np.uint16 if short and self.longest_row_of_a > 255 else np.uint8, extra=64)
        groups = np.zeros((parts, self._width // 64 + 65), np.uint8)
        host_kernels().find_rows(
            *self._parts, *self._operands, self.product_ptr, self._cuts, begins, marks, groups, counts, columns, terms
        )
        return counts, begins, columns, terms

    @cached_property
    def position_dtype(self) -> np.dtype:
        """The narrowest type for offsets in any row of C."""
        return np.dtype(np.uint16 if int(np.diff(self.c_indptr).max(initial=0)) <= 2**16 else np.uint32)

    @property
    def position_bytes(self) -> int:
        """Bytes of the offsets of all products."""
        return self.position_dtype.itemsize * self.products

    @cached_property
    def row_cuts(self) -> np.ndarray:
        """Rows of C in parts of about equal work; see `row_cuts`."""
        return parts_of_rows(self.product_ptr + self.c_indptr)

    def positions(self, dtype: np.dtype | type) -> np.ndarray:
        """Return each product's offset in its row of C, in Gustavson's order, (products,); `dtype` must hold them."""
        positions = np.empty(self.products, dtype)
        host_kernels().write_positions(
            *self._parts, *self._operands, *self._of_c, self.product_ptr, self._cuts, self._scratch(dtype), positions
        )
        return positions

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries of A and B that every entry of C multiplies, if each has one term."""
        a_index, b_index = (np.empty(self.nnz, self.pair_dtype) for _ in range(2))
        scratch = self._scratch(self.c_indptr.dtype)
        host_kernels().write_pairs(*self._parts, *self._operands, *self._of_c, self._cuts, scratch, a_index, b_index)
        return a_index, b_index

    def lists(
        self, tiles: np.ndarray, rows: np.ndarray, shift: int, dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return order, starts and words of `sparsebp.kernels.operands.Pairs`, and write the list counts to `tiles`.

        `rows`: the first row of every tile.
        """
        team, parts = self._parts
        order, starts = np.empty(self.nnz, np.uint16), np.empty(self.nnz, np.uint16)
        words = np.empty(self.products, dtype)
        cuts = row_cuts(tiles[:, 2] + tiles[:, 0], parts)
        host_kernels().write_lists(
            team, len(cuts) - 1, *self._operands, *self._of_c, self.terms, tiles, rows, cuts,
            (self._width, self.longest_row_of_a), shift, order, starts, words,
        )  # fmt: skip
        return order, starts, words

    def starts_of_runs(self, shapes: tuple[np.ndarray, ...], start_ptr: np.ndarray) -> np.ndarray:
        """Return `starts` of `sparsebp.kernels.operands.Runs`."""
        from sparsebp.kernels.host.engine.threads import team

        starts, cuts = np.empty(int(start_ptr[-1]), self.position_dtype), self.row_cuts
        others = (*shapes, start_ptr, self._width, cuts, starts)
        host_kernels().write_starts(team(), len(cuts) - 1, *self._operands, *self._of_c, *others)
        return starts

    @property
    def _operands(self) -> tuple[np.ndarray, ...]:
        return self.a.indptr, self.a.indices, self.b.indptr, self._columns

    @property
    def _of_c(self) -> tuple[np.ndarray, np.ndarray]:
        return self.c_indptr, self._joined[0]

    @cached_property
    def _present(self) -> np.ndarray | None:
        """The numbered columns, None for all: scratch has one element for each."""
        scattered = self.shape[1] > _SCATTERED * max(self.b.nnz, _PART_WORK)
        return np.unique(self.b.indices) if scattered else None

    @cached_property
    def _columns(self) -> np.ndarray:
        """The number of the column of each entry of B."""
        if self._present is None:
            return self.b.indices
        return np.searchsorted(self._present, self.b.indices).astype(np.int32)

    @property
    def _width(self) -> int:
        """The number of numbered columns."""
        return self.shape[1] if self._present is None else len(self._present)

    @cached_property
    def _cuts(self) -> np.ndarray:
        parts = min(_MAX_PARTS, 1 + self.products // (4 * self._width + _PART_WORK))
        return row_cuts(self.product_ptr, parts)

    @property
    def _parts(self) -> tuple[int, int]:
        """The team of threads, and the number of parts."""
        from sparsebp.kernels.host.engine.threads import team

        return team(), len(self._cuts) - 1

    def _scratch(self, dtype: np.dtype | type, extra: int = 0) -> np.ndarray:
        return np.zeros((len(self._cuts) - 1, self._width + extra), dtype)


class MaskedProduct(SymbolicProduct):
    """What is known about the entries of C = A @ B in a mask, whose pattern C has. `products` counts all products."""

    def __init__(self, a: SparsityPattern, b: SparsityPattern, mask: SparsityPattern) -> None:
        super().__init__(a, b)
        self._mask = mask

    @property
    def pattern(self) -> SparsityPattern:
        """The mask."""
        return self._mask

    @property
    def pattern_bytes(self) -> int:
        """None: the mask exists."""
        return 0

    @cached_property
    def c_indptr(self) -> np.ndarray:
        """The mask's row pointer, int64, shape (m + 1,)."""
        return self._mask.indptr.astype(np.int64)

    @cached_property
    def kept_ptr(self) -> np.ndarray:
        """Number of products in the mask before every row, int64, shape (m + 1,)."""
        ptr = np.zeros(self.shape[0] + 1, np.int64)
        host_kernels().count_masked(*self._of_mask, ptr[1:])
        return np.cumsum(ptr, out=ptr)

    @property
    def kept(self) -> int:
        """Number of products in the mask."""
        return int(self.kept_ptr[-1])

    def kept_terms(self, dtype: np.dtype | type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the entries of A and B that these multiply, and where in its row of C each lands."""
        a_index, b_index = np.empty((2, self.kept), dtype)
        positions = np.empty(self.kept, self.position_dtype)
        host_kernels().write_masked(*self._of_mask, self.kept_ptr, a_index, b_index, positions)
        return a_index, b_index, positions

    @property
    def _of_mask(self) -> tuple[Any, ...]:
        columns = self._mask.indices
        if self._present is not None:  # columns without an entry of B have the number behind the last
            where = np.searchsorted(self._present, columns)
            found = np.append(self._present, -1)[where] == columns
            columns = np.where(found, where, self._width).astype(np.int32)
        places = self._scratch(np.uint32, extra=1)
        return *self._parts, *self._operands, self._mask.indptr, columns, self._cuts, places
