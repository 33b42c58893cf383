"""A diagonal operand: rows or columns of the other one are scaled, on its pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.patterns import SparsityPattern
from sparsebp.products.strategies.strategy import StrategyOfKinds


class ScaleRows(StrategyOfKinds):
    """A is diagonal."""

    name = "scale_rows"
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
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Array]) -> tuple[Array]:
        """Where B's rows begin."""
        return (arrays["b_indptr"],)

    @staticmethod
    def run(k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Scale rows of B."""
        (indptr,) = operands
        k.scale_rows(indptr, right, left, out)


class ScaleColumns(StrategyOfKinds):
    """B is diagonal."""

    name = "scale_columns"
    own_pattern = False

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
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Array]) -> tuple[Array]:
        """The columns of A's entries."""
        return (arrays["a_indices"],)

    @staticmethod
    def run(k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Scale columns of A."""
        (indices,) = operands
        k.scale_columns(indices, left, right, out)
