"""Products and LU factors on a fixed pattern: the symbolic phase once, then the numeric phase for new values."""

from __future__ import annotations

from sparsebp.products.factor import FactorPlan, Factors, plan_factor
from sparsebp.products.product import ProductGradients, ProductPlan, plan_addition, plan_product

__all__ = ["FactorPlan", "Factors", "ProductGradients", "ProductPlan", "plan_addition", "plan_factor", "plan_product"]


def __dir__() -> list[str]:
    return sorted(__all__)
