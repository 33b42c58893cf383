"""How full the products of sparse Jacobians become, estimated level by level without multiplying patterns.

The number of multiplications of a product follows exactly from the degrees of its operands, ``Σ_k columns of right (k)
· rows of left (k)``. Where an operand is a product itself, its degrees are estimated by Cohen's sketches: give every
column random keys; the least keys of a row's entries, carried through the factors one after the other, are the least
keys of the product's row (E. Cohen, "Structure prediction and jump-start in sparse matrix multiplication", J. Comb.
Optim. 2, 1998). That costs a few matrix–vector products, where planning a product costs as much as the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp import kernels
from sparsebp.core.check import PatternKind
from sparsebp.core.locks import cached_property
from sparsebp.patterns import SparsityPattern
from sparsebp.products.strategies import by_kinds

KEYS = 32
"""Keys of a row. The standard error of a count is ``1 / sqrt(KEYS - 2)``, 18 %, and less for a sum over rows."""

Members: TypeAlias = tuple[SparsityPattern, ...]
"""The factors of a product in the chain's order, without those that leave its pattern as it is."""


@dataclass(eq=False)
class EstimatedPattern:
    """The pattern of a product that is not planned: its shape and kind; entries are estimated when asked for."""

    shape: tuple[int, int]
    kind: PatternKind
    members: Members
    fill_in: FillIn

    @cached_property
    def nnz(self) -> int:
        """Number of entries."""
        rows, columns = self.shape
        if self.kind == "dense":
            return rows * columns
        return min(round(float(self.fill_in.counts(self.members, rows=True).sum())), rows * columns)


class EstimatedProduct(NamedTuple):
    """A product that is not planned, with the attributes of `ProductPlan` that are counted; its index is left out."""

    pattern: Any
    strategy: str
    products: int
    index_bytes: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations per sample."""
        return 2 * self.products


class FillIn:
    """Estimates products of a chain's patterns, and products of such products. Deterministic."""

    def __init__(self) -> None:
        self._keys: dict[int, np.ndarray] = {}
        self._carried: dict[tuple[Members, bool], np.ndarray] = {}
        self._products: dict[tuple[Any, Any], EstimatedProduct] = {}

    def __call__(self, right: Any, left: Any, memory_limit: int | None = None) -> EstimatedProduct:
        """Estimate ``right · left``; without an index there is nothing to limit."""
        if (right, left) not in self._products:
            self._products[right, left] = self._product(right, left)
        return self._products[right, left]

    def _product(self, right: Any, left: Any) -> EstimatedProduct:
        told = by_kinds(right, left)
        if told is not None and not told.own_pattern:
            return EstimatedProduct(told.result(right, left), told.name, told.count(right, left))
        before, after = _members(left), _members(right)
        kind: PatternKind = "selection" if right.kind == left.kind == "selection" else "general"
        pattern = EstimatedPattern(
            (right.shape[0], left.shape[1]), kind if told is None else "dense", before + after, self
        )
        if told is not None:
            return EstimatedProduct(pattern, told.name, told.count(right, left))
        products = round(float(self.counts(after, rows=False) @ self.counts(before, rows=True)))
        return EstimatedProduct(pattern, "estimated", products)

    def counts(self, members: Members, *, rows: bool) -> np.ndarray:
        """Return the entries of every row, or column, of a product; exact for one member."""
        if len(members) == 1 and rows:
            return np.diff(members[0].indptr).astype(np.float64)
        if len(members) == 1:
            return np.bincount(members[0].indices, minlength=members[0].shape[1]).astype(np.float64)
        way = members if rows else members[::-1]
        size = way[0].shape[1 if rows else 0]
        done = next((d for d in range(len(way), 0, -1) if (way[:d], rows) in self._carried), 0)
        keys = self._carried[way[:done], rows] if done else self._random(size)
        for member in way[done:]:
            keys = _carried(member, keys, rows=rows)
        self._carried[way, rows] = keys
        return self._counts(keys, size)

    def _counts(self, keys: np.ndarray, most: int) -> np.ndarray:
        """Return how many of `most` keys each row has met: the least of n exponential keys has the mean 1 / n.

        Rows that have met the same keys have the same error, so it does not average out as they fill up. The error of
        a full row is known, and each row is corrected by the fraction of it to which the row is full.
        """
        counts = np.asarray((KEYS - 1) / np.sum(keys, axis=1, dtype=np.float64))
        if most == 0:
            return counts
        full = (KEYS - 1) / float(np.sum(self._random(most).min(axis=0), dtype=np.float64))
        return np.asarray(np.minimum(counts * (most / full) ** (counts / full), most))

    def _random(self, size: int) -> np.ndarray:
        """Return exponentially distributed keys (size, KEYS)."""
        if size not in self._keys:
            rng = np.random.default_rng(size)
            self._keys[size] = rng.standard_exponential((size, KEYS), dtype=np.float32)
        return self._keys[size]


def _members(pattern: Any) -> Members:
    return pattern.members if isinstance(pattern, EstimatedPattern) else (pattern,)


def _carried(member: SparsityPattern, keys: np.ndarray, *, rows: bool) -> np.ndarray:
    """Carry keys through one member."""
    out = np.empty((member.shape[0 if rows else 1], KEYS), np.float32)
    if member.kind == "dense":
        out[:] = keys.min(axis=0, initial=np.inf)
    elif rows:
        kernels.on_host().sketches.row_minima(member.indptr, member.indices, keys, out)
    else:
        kernels.on_host().sketches.column_minima(member.indptr, member.indices, keys, out)
    return out
