"""A is a selection, at most one entry a row: rows of B are picked and scaled."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.kernels.operands import Rows
from sparsebp.products.strategies.strategy import Strategy, rows_of_one_type


class SelectRows(Strategy):
    """Whole rows are moved, and nothing is indexed."""

    name = "select_rows"
    reads = (Rows,)

    @property
    def fits(self) -> bool:
        """A is a selection."""
        return self.product.a.kind == "selection"

    def arrays(self) -> dict[str, np.ndarray]:
        """Nothing but the patterns'."""
        return rows_of_one_type(self.product)

    @staticmethod
    def run(k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Pick and scale rows of B."""
        (rows,) = operands
        k.spgemm_select_rows(rows, left, right, out)
