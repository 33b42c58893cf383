"""A and B are full: one product of dense matrices a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.validate import index_bytes
from sparsebp.products.strategies.strategy import StrategyOfKinds


class Dense(StrategyOfKinds):
    """A stack of one dense block times another."""

    name = "dense"

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        """Both are full, and not empty."""
        return bool(a.kind == b.kind == "dense" and a.nnz * b.nnz > 0)

    @staticmethod
    def count(a: Any, b: Any) -> int:
        """m · k · n."""
        return int(a.shape[0] * a.shape[1] * b.shape[1])

    @property
    def pattern(self) -> SparsityPattern:
        """A full one; an operand's object where it has the shape, so that nothing is kept twice."""
        product = self.product
        same = next((operand for operand in (product.a, product.b) if operand.shape == product.shape), None)
        return same or SparsityPattern.dense(*product.shape)

    @property
    def pattern_bytes(self) -> int:
        """Of a full pattern, if it is not an operand's."""
        (m, n), product = self.product.shape, self.product
        return 0 if product.shape in (product.a.shape, product.b.shape) else index_bytes(m * n, (m, n))

    @property
    def index_bytes(self) -> int:
        """Of one number."""
        return np.dtype(np.int64).itemsize

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the number of the one block."""
        return {"zero": np.zeros(1, np.int64)}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Array]) -> tuple[Any, ...]:
        """Return the number of the one block, and the sizes of A and B."""
        return arrays["zero"], *a.shape, b.shape[1]

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """One product of blocks."""
        zero, m, inner, n = operands
        a, b = left.reshape(1, m, inner, -1), right.reshape(1, inner, n, -1)
        k.dense_matmul(a, zero, b, zero, out.reshape(1, m, n, -1), zero)
