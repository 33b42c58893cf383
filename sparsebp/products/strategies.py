"""The numeric strategies of a product that has to be worked out, and the arrays that each one's kernel reads.

A strategy's arrays are made when it has been chosen; before, only their sizes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsebp.patterns.sparsity import SparsityPattern
from sparsebp.patterns.validate import index_dtype
from sparsebp.products.plan import ProductPlan, Strategy
from sparsebp.products.runs import Runs, count_starts, find_runs, write_starts
from sparsebp.products.symbolic import SymbolicProduct, row_cuts

INDEX_LIMIT = 2**30
"""Most bytes that an index of all products takes where no limit is given; beyond, nothing is kept per product."""

RUN_LENGTH = 8
"""Mean length of B's runs, over all products, from which vectors along the runs pay."""

_MOST_PARTS = 64
_PART_WORK = 2048  # products in one part at least; with a batch of 64 that is one grain of the kernels


@dataclass(frozen=True)
class Candidate:
    """A strategy that fits the structure: bytes of its arrays, and how to make them once C's pattern is there."""

    strategy: Strategy
    index_bytes: int
    make: Callable[[SparsityPattern], dict[str, np.ndarray]]


class Product:
    """C = A @ B on the way to a plan.

    Parameters
    ----------
    a, b
        Patterns of shapes (m, k) and (k, n).
    """

    def __init__(self, a: SparsityPattern, b: SparsityPattern) -> None:
        self.a, self.b = a, b
        self.symbolic = SymbolicProduct(a, b)
        self.products = self.symbolic.products
        self.c_indptr = self.symbolic.count()
        self.nnz = int(self.c_indptr[-1])
        rows = a.shape[0]
        self.pattern_bytes = index_dtype(self.nnz, (rows, b.shape[1])).itemsize * (rows + 1 + self.nnz)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the strategies that fit, the quickest first; the last keeps nothing per product and always fits."""
        positions, cuts = self._position.itemsize * self.products, self._row_cuts.nbytes
        pairs = 2 * self.symbolic.pair_dtype.itemsize * self.products
        if self.a.kind == "selection":
            yield Candidate("select_rows", 0, self._select_rows)
        elif self.b.kind == "selection":
            listed = self._list_dtype.itemsize * (2 * self.products + len(self.c_indptr)) if self._lists_products else 0
            yield Candidate("select_columns", positions + listed + cuts, self._select_columns)
        start_ptr, pieces = self._starts
        if self.products >= RUN_LENGTH * pieces:
            size = sum(array.nbytes for array in self._runs) + start_ptr.nbytes + cuts
            yield Candidate("runs", size + self._position.itemsize * int(start_ptr[-1]), self._run_arrays)
        if self.products == self.nnz:
            yield Candidate("gather", pairs, self._gather)
        elif positions <= INDEX_LIMIT:
            yield Candidate("positions", positions + self.symbolic.product_ptr.nbytes + cuts, self._positions)
        yield Candidate("accumulate", cuts, self._accumulate)

    def plan(self, candidate: Candidate) -> ProductPlan:
        """Make C's pattern and the plan."""
        c = self.symbolic.pattern(self.c_indptr)
        return ProductPlan(self.a, self.b, c, candidate.strategy, self.products, candidate.make(c))

    # ---- what several strategies need ------------------------------------------------------------------------------

    @cached_property
    def _position(self) -> np.dtype:
        """The narrowest type that holds a place in any row of C."""
        return np.dtype(np.uint16 if int(np.diff(self.c_indptr).max(initial=0)) <= 2**16 else np.uint32)

    @cached_property
    def _row_cuts(self) -> np.ndarray:
        work = self.symbolic.product_ptr + self.c_indptr
        return row_cuts(work, min(_MOST_PARTS, 1 + int(work[-1]) // _PART_WORK))

    @cached_property
    def _runs(self) -> Runs:
        return find_runs(self.b)

    @cached_property
    def _starts(self) -> tuple[np.ndarray, int]:
        """Where each row's starts of runs begin, and of how many runs all products consist."""
        counts = np.zeros(self.a.shape[0] + 1, np.int64)
        pieces = count_starts(self.a.indptr, self.a.indices, self._runs.shapes, self._runs.run_ptr, counts[1:])
        return np.cumsum(counts), int(pieces)

    @property
    def _lists_products(self) -> bool:
        """Whether a selection B leaves columns of A without a product, so that the products must be listed."""
        return self.b.nnz < self.b.shape[0]

    @property
    def _list_dtype(self) -> np.dtype:
        return np.promote_types(self.symbolic.pair_dtype, index_dtype(self.nnz, self.symbolic.shape))

    # ---- the kernels' arrays ---------------------------------------------------------------------------------------

    def _select_rows(self, c: SparsityPattern) -> dict[str, np.ndarray]:
        return self._mixed(c)

    def _select_columns(self, c: SparsityPattern) -> dict[str, np.ndarray]:
        arrays = {"product_ptr": self.a.indptr, "b_index": self.a.indices, "c_indptr": c.indptr}
        if self._lists_products:
            present = np.diff(self.b.indptr)[self.a.indices] > 0
            dtype = self._list_dtype
            arrays = {
                "product_ptr": self.symbolic.product_ptr.astype(dtype),
                "a_index": np.flatnonzero(present).astype(dtype),
                "b_index": self.b.indptr[self.a.indices[present]].astype(dtype),
            } | ({} if dtype == c.indptr.dtype else {"c_indptr": c.indptr.astype(dtype)})
        else:
            arrays = _of_one_type(arrays)
        return arrays | {"positions": self.symbolic.positions(c, self._position), "row_cuts": self._row_cuts}

    def _run_arrays(self, c: SparsityPattern) -> dict[str, np.ndarray]:
        start_ptr, _ = self._starts
        starts = np.empty(int(start_ptr[-1]), self._position)
        write_starts(self.a, self.b, self._runs, c, start_ptr, self._row_cuts, starts)
        shapes = {"b_shape": self._runs.shapes, "run_ptr": self._runs.run_ptr, "run_lengths": self._runs.lengths}
        own = {"start_ptr": start_ptr, "starts": starts, "row_cuts": self._row_cuts}
        return shapes | self._mixed(c, **shapes) | own

    def _gather(self, c: SparsityPattern) -> dict[str, np.ndarray]:
        a_index, b_index = self.symbolic.pairs(c)
        return {"a_index": a_index, "b_index": b_index}

    def _positions(self, c: SparsityPattern) -> dict[str, np.ndarray]:
        own = {
            "product_ptr": self.symbolic.product_ptr,
            "positions": self.symbolic.positions(c, self._position),
            "row_cuts": self._row_cuts,
        }
        return own | self._mixed(c)

    def _accumulate(self, c: SparsityPattern) -> dict[str, np.ndarray]:
        return self._mixed(c, b_indices=self.b.indices, c_indices=c.indices) | {"row_cuts": self._row_cuts}

    def _mixed(self, c: SparsityPattern, **others: np.ndarray) -> dict[str, np.ndarray]:
        a, b = self.a, self.b
        arrays = {"a_indptr": a.indptr, "a_indices": a.indices, "b_indptr": b.indptr, "c_indptr": c.indptr}
        return _of_one_type(arrays | others)


def _of_one_type(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return int64 copies of index arrays if their types differ, else nothing: the patterns' own serve."""
    if len({array.dtype for array in arrays.values()}) == 1:
        return {}
    return {name: array.astype(np.int64) for name, array in arrays.items()}
