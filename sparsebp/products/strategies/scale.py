"""A diagonal operand: rows or columns of the other one are scaled, on its pattern."""

from __future__ import annotations

from typing import Any

from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.products.strategies.scale_runs import ScaleRuns
from sparsebp.products.strategies.strategy import StrategyOfKinds


class ScaleRows(StrategyOfKinds):
    """A is diagonal."""

    name = "scale_rows"
    reads = ("b_indptr",)
    own_pattern = False

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        """A is diagonal."""
        return bool(a.kind == "diagonal")

    @staticmethod
    def result(a: Any, b: Any) -> Any:
        """B."""
        return b

    @staticmethod
    def count(a: Any, b: Any) -> int:
        """One an entry of B."""
        return int(b.nnz)

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Scale rows of B."""
        (indptr,) = operands
        k.scale_rows(indptr, right, left, out)


class ScaleColumns(StrategyOfKinds):
    """B is diagonal."""

    name = "scale_columns"
    reads = ("a_indices",)
    own_pattern = False
    quicker = (ScaleRuns,)

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        """B is diagonal."""
        return bool(b.kind == "diagonal")

    @staticmethod
    def result(a: Any, b: Any) -> Any:
        """A."""
        return a

    @staticmethod
    def count(a: Any, b: Any) -> int:
        """One an entry of A."""
        return int(a.nnz)

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Scale columns of A."""
        (indices,) = operands
        k.scale_columns(indices, left, right, out)
