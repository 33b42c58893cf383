"""Products of a fixed pattern (SpGEMM): the symbolic phase once, then the numeric phase for new values."""

from __future__ import annotations

from sparsebp.products.product import ProductGradients, ProductPlan, plan_addition, plan_product

__all__ = ["ProductGradients", "ProductPlan", "plan_addition", "plan_product"]


def __dir__() -> list[str]:
    return sorted(__all__)
