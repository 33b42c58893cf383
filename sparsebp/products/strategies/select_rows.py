"""A is a selection, at most one entry a row: rows of B are picked and scaled."""

from __future__ import annotations

import numpy as np

from sparsebp.kernels.operands import Rows
from sparsebp.products.strategies.strategy import Strategy, rows_of_one_type


class SelectRows(Strategy):
    """Whole rows are moved, and nothing is indexed."""

    name = "select_rows"
    kernel = "spgemm_select_rows"
    reads = (Rows,)

    @property
    def fits(self) -> bool:
        """A is a selection."""
        return self.product.a.kind == "selection"

    def arrays(self) -> dict[str, np.ndarray]:
        """Nothing but the patterns'."""
        return rows_of_one_type(self.product)
