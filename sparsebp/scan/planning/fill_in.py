"""How full products of sparse Jacobians become, level by level, without multiplying them.

A product's number of multiplications follows exactly from the degrees of its operands, ``Σ_k columns of right (k) ·
rows of left (k)``, and where an operand is a product itself its degrees are estimated from random keys (Cohen's
sketches, `sparsebp.scan.planning.sketch`). Reading every member of a span costs as much as a few matrix–vector
products, where planning the product costs as much as the product itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.locks import cached_property
from sparsebp.core.types import PatternKind
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.validate import index_bytes
from sparsebp.products import ProductPlan
from sparsebp.products.strategies import Filled, Gather, Positions, Strategy, by_kinds
from sparsebp.products.strategies.filled import worth

KEYS = 32
"""Keys of a row. A count's standard error is ``1 / sqrt(KEYS - 2)``, 18 %, and that of a sum over rows less."""

Members: TypeAlias = tuple[SparsityPattern, ...]
"""What a span multiplies, in the chain's order, without the members that leave its pattern as it is."""


@dataclass(eq=False)
class EstimatedPattern:
    """A product's pattern that is not there yet: its shape, its kind, and its entries once somebody asks."""

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


@dataclass(eq=False)
class EstimatedProduct:
    """A product that is not planned yet: what `ProductPlan` says of itself."""

    pattern: Any
    how: type[Strategy]
    products: int

    @property
    def strategy(self) -> str:
        """As `ProductPlan.strategy`."""
        return self.how.name

    @property
    def flops(self) -> int:
        """Of one sample."""
        return 2 * self.products

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the plan's index arrays: the result's pattern, and a position of every product in its row."""
        if not self.how.own_pattern:
            return 0
        shape, nnz = self.pattern.shape, self.pattern.nnz
        return index_bytes(nnz, shape) + self.how.estimated_bytes(shape, nnz, self.products)


Pattern: TypeAlias = SparsityPattern | EstimatedPattern
Product: TypeAlias = ProductPlan | EstimatedProduct
Multiply: TypeAlias = Callable[[Any, Any, int | None], Product]
"""``multiply(right, left, memory_limit)``: the product ``right · left``; raises `MemoryLimitError` beyond the limit."""


class FillIn:
    """Estimates products of a chain's patterns, and products of such products. Its answers are the same every time."""

    def __init__(self) -> None:
        self._keys: dict[int, np.ndarray] = {}
        self._carried: dict[tuple[Members, bool], np.ndarray] = {}
        self._products: dict[tuple[Any, Any], EstimatedProduct] = {}

    def __call__(self, right: Any, left: Any, memory_limit: int | None) -> EstimatedProduct:
        """Estimate ``right · left``; raises `MemoryLimitError` where the products' index alone is beyond the limit."""
        product = self._products.get((right, left))
        if product is None:
            product = self._products[right, left] = self._product(right, left)
        least = product.how.least_bytes(product.products)
        if memory_limit is not None and least > memory_limit:
            raise MemoryLimitError("The product's index is too large", got=f"{least} bytes or more, by an estimate")
        return product

    def _product(self, right: Any, left: Any) -> EstimatedProduct:
        told = by_kinds(right, left)
        if told is not None and not told.own_pattern:
            return EstimatedProduct(told.result(right, left), told, told.count(right, left))
        shape, before, after = (right.shape[0], left.shape[1]), _members(left), _members(right)
        if told is not None:
            pattern = EstimatedPattern(shape, "dense", before + after, self)
            return EstimatedProduct(pattern, told, told.count(right, left))
        kind: PatternKind = "selection" if right.kind == left.kind == "selection" else "general"
        products = round(float(self.counts(after, rows=False) @ self.counts(before, rows=True)))
        how: type[Strategy] = Positions
        if right.kind == "selection":  # one multiplication an entry
            how = Gather
        elif left.kind != "selection" and worth(shape[0], right.shape[1], shape[1], products):
            how = Filled
        return EstimatedProduct(EstimatedPattern(shape, kind, before + after, self), how, products)

    def counts(self, members: Members, *, rows: bool) -> np.ndarray:
        """Return the entries of every row, or column, of a product, exact for one member."""
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
        """Return how many of `most` keys each row has met: the least of n exponential ones has the mean 1 / n.

        Rows that have met the same keys have the same error, so it does not average out as they fill up. That of a full
        row is known, and a row is rid of as much of it as it is full.
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
        return out
    from sparsebp.scan.planning import sketch

    (sketch.row_minima if rows else sketch.column_minima)(member.indptr, member.indices, keys, out)
    return out
