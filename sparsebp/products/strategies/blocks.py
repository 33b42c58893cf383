"""A and B consist of small dense blocks (several unknowns a vertex): one place stands for a product of two blocks."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import numpy as np

from sparsebp.core.locks import cached_property
from sparsebp.kernels.operands import Blocks, Rows
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.validate import index_bytes, index_dtype
from sparsebp.products.strategies.strategy import Strategy, of_one_type
from sparsebp.products.symbolic import SymbolicProduct, parts_of_rows

SIZES = (6, 4, 3, 2, 1)
"""Rows or columns of a block: what fits in registers; others are cut into these."""
LEAST = 8
"""Multiplications of a product of two blocks at least."""
WORTH = 10_000
"""Multiplications of the whole product at least: the kernel is compiled for the size of its blocks."""


class AddBlocks(Strategy):
    """Blocks (m, k) of A times blocks (k, n) of B; the symbolic phase sees a block as one entry."""

    name = "blocks"
    kernel = "spgemm_blocks"
    reads = (Rows, Blocks)

    @property
    def fits(self) -> bool:
        """The blocks are large enough, and there are enough of them."""
        if self.product.products < WORTH:
            return False
        m, k, n = self._size
        return m * k * n >= LEAST

    @cached_property
    def _size(self) -> tuple[int, int, int]:
        """Sizes m, k, n of the blocks."""
        from sparsebp.kernels.host.sparse import block_structure

        (m, k), (inner, n) = (
            block_structure.find_blocks(p.indptr, p.indices, *p.shape) for p in (self.product.a, self.product.b)
        )
        return _cut(m), _cut(gcd(k, inner)), _cut(n)

    @cached_property
    def _of_blocks(self) -> SymbolicProduct:
        """The product of the patterns of blocks."""
        (m, k, n), product = self._size, self.product
        return SymbolicProduct(_blocks_of(product.a, m, k), _blocks_of(product.b, k, n))

    @property
    def products(self) -> int:
        """Multiplications a sample."""
        m, k, n = self._size
        return m * k * n * self._of_blocks.products

    @property
    def _nnz(self) -> int:
        m, _, n = self._size
        return m * n * self._of_blocks.nnz

    @cached_property
    def pattern(self) -> SparsityPattern:
        """C's pattern; an operand's object where it is the same."""
        from sparsebp.kernels.host.sparse import block_structure

        (m, _, n), shape, blocks = self._size, self.product.shape, self._of_blocks.pattern
        dtype = index_dtype(self._nnz, shape)
        indptr, indices = np.empty(shape[0] + 1, dtype), np.empty(self._nnz, dtype)
        block_structure.write_blocks(blocks.indptr, blocks.indices, m, n, indptr, indices)
        made = SparsityPattern._trusted(indptr, indices, shape)
        return next((operand for operand in (self.product.a, self.product.b) if operand == made), made)

    @property
    def pattern_bytes(self) -> int:
        """Bytes of C's pattern, if it is not an operand's."""
        operands, shape = (self.product.a, self.product.b), self.product.shape
        known = any(p.nnz == self._nnz and p.shape == shape for p in operands)
        return 0 if known and self.pattern in operands else index_bytes(self._nnz, shape)

    @property
    def index_bytes(self) -> int:
        """Of `arrays`."""
        (m, k, n), blocks = self._size, self._of_blocks
        return blocks.position_bytes + blocks.product_ptr.nbytes + self._row_cuts.nbytes + m * k * n

    @cached_property
    def _row_cuts(self) -> np.ndarray:
        """Groups of m rows of C in parts of about equal work."""
        (m, k, n), blocks = self._size, self._of_blocks
        return parts_of_rows(m * k * n * blocks.product_ptr + m * n * blocks.c_indptr)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of `Blocks`, and `size`, whose shape tells the sizes."""
        a, b, c, blocks = self.product.a, self.product.b, self.pattern, self._of_blocks
        rows = {"a_indptr": a.indptr, "a_indices": a.indices, "b_indptr": b.indptr, "c_indptr": c.indptr}
        own = {"product_ptr": blocks.product_ptr, "positions": blocks.positions(blocks.position_dtype)}
        return of_one_type(rows) | own | {"row_cuts": self._row_cuts, "size": np.zeros(self._size, bool)}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """`Rows` and `Blocks`."""
        return super().operands(a, b, dict(arrays) | dict(zip("mkn", arrays["size"].shape, strict=True)))


def _cut(size: int) -> int:
    """Return the largest size into which such blocks can be cut."""
    return next(part for part in SIZES if size % part == 0)


def _blocks_of(pattern: SparsityPattern, m: int, n: int) -> SparsityPattern:
    """Return the pattern of the blocks (m, n) that a pattern consists of."""
    first = pattern.indptr[::m].astype(np.int64)  # entries before every row of blocks
    block_ptr = first // (m * n)
    shift = np.repeat(first[:-1] - n * block_ptr[:-1], np.diff(block_ptr))
    corners = pattern.indices[n * np.arange(len(shift)) + shift]
    shape = (pattern.shape[0] // m, pattern.shape[1] // n)
    dtype = index_dtype(len(corners), shape)
    return SparsityPattern._trusted(block_ptr.astype(dtype), (corners // n).astype(dtype), shape)
