"""Every entry of C is one product."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.products.strategies.strategy import Strategy


class Gather(Strategy):
    """The entries of A and B that an entry of C multiplies are kept."""

    name = "gather"
    reads = ("a_index", "b_index")

    @property
    def fits(self) -> bool:
        """There are as many products as entries."""
        return self.product.products == self.product.nnz

    @property
    def index_bytes(self) -> int:
        """Of two entry numbers a product."""
        return 2 * self.product.pair_dtype.itemsize * self.product.products

    def arrays(self) -> dict[str, np.ndarray]:
        """The entry numbers."""
        a_index, b_index = self.product.pairs()
        return {"a_index": a_index, "b_index": b_index}

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Multiply pairs."""
        a_index, b_index = operands
        k.gather_multiply(left, a_index, right, b_index, out)

    @staticmethod
    def estimated_bytes(shape: tuple[int, int], nnz: int, products: int) -> int:
        """As `index_bytes`, of 4-byte numbers."""
        return 8 * nnz
