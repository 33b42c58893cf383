"""Gustavson's algorithm through a dense row of sums: nothing is kept per product, so it always fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp.kernels.operands import Columns, Rows
from sparsebp.patterns import SparsityPattern
from sparsebp.products.strategies.strategy import Strategy, rows_of_one_type


class Accumulate(Strategy):
    """For products too many to index."""

    name = "accumulate"
    kernel = "spgemm_accumulate"
    reads = (Rows, Columns)

    @property
    def index_bytes(self) -> int:
        """Of the row's cuts alone."""
        return self.product.row_cuts.nbytes

    def arrays(self) -> dict[str, np.ndarray]:
        """Nothing but the patterns'."""
        product = self.product
        columns = {"b_indices": product.b.indices, "c_indices": product.pattern.indices}
        return rows_of_one_type(product, **columns) | {"row_cuts": product.row_cuts}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """`Rows` and `Columns`."""
        return super().operands(a, b, dict(arrays) | {"n": b.shape[1]})
