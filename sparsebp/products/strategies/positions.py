"""Gustavson's algorithm with each product's place in its row of C kept."""

from __future__ import annotations

import numpy as np

from sparsebp.kernels.operands import Places, Rows
from sparsebp.products.strategies.strategy import Strategy, rows_of_one_type

INDEX_LIMIT = 2**30
"""Most bytes that an index of all products takes where no limit is given; beyond, nothing is kept per product."""


class Positions(Strategy):
    """No search: a product is two loads, a multiply-add and a store."""

    name = "positions"
    kernel = "spgemm_positions"
    reads = (Rows, Places)

    @property
    def fits(self) -> bool:
        """Some entry is a sum, and the index is not too large."""
        return self.product.products != self.product.nnz and self.product.position_bytes <= INDEX_LIMIT

    @property
    def index_bytes(self) -> int:
        """Of the fields of `Places`."""
        return self.product.position_bytes + self.product.product_ptr.nbytes + self.product.row_cuts.nbytes

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields of `Places`."""
        product = self.product
        own = {
            "product_ptr": product.product_ptr,
            "positions": product.positions(product.position_dtype),
            "row_cuts": product.row_cuts,
        }
        return own | rows_of_one_type(product)

    @staticmethod
    def estimated_bytes(shape: tuple[int, int], nnz: int, products: int) -> int:
        """As `index_bytes`, with the widest row as long as there are columns."""
        rows, columns = shape
        return 8 * (rows + 1) + (2 if columns <= 2**16 else 4) * products

    @staticmethod
    def least_bytes(products: int) -> int:
        """Two bytes a product."""
        return 2 * products
