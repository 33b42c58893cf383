"""What planning asks of a product of two patterns: that of a real one, and that of one which is only estimated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from sparsebp.core.types import PatternKind
from sparsebp.patterns import SparsityPattern
from sparsebp.products import ProductPlan, plan_product


class Pattern(Protocol):
    """The size of a matrix: of a `SparsityPattern`, or of one that is not there yet."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n_rows, n_columns)."""

    @property
    def nnz(self) -> int:
        """Number of entries."""

    @property
    def kind(self) -> PatternKind:
        """As `SparsityPattern.kind`."""


class Product(Protocol):
    """The size of a product: of a `ProductPlan`, or of one that is not planned yet."""

    @property
    def pattern(self) -> Pattern:
        """Of the result."""

    @property
    def strategy(self) -> str:
        """As `ProductPlan.strategy`."""

    @property
    def flops(self) -> int:
        """Of one sample."""

    @property
    def index_bytes(self) -> int:
        """Bytes that the plan holds beside the operands' patterns."""


Multiply: TypeAlias = Callable[[Pattern, Pattern, int | None], Product]
"""``multiply(right, left, memory_limit)``: the product ``right · left``; raises `MemoryLimitError` beyond the limit."""


class PlannedProducts:
    """Products that are planned for real; those of equal blocks once."""

    def __init__(self) -> None:
        self.plans: dict[tuple[SparsityPattern, SparsityPattern], ProductPlan] = {}

    def __len__(self) -> int:
        return len(self.plans)

    def __call__(self, right: Any, left: Any, memory_limit: int | None) -> ProductPlan:
        """Return the plan of ``right · left``, both of which are real."""
        plan = self.plans.get((right, left))
        if plan is None:
            plan = self.plans[right, left] = plan_product(right, left, memory_limit=memory_limit)
        return plan
