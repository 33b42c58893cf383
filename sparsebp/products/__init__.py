"""Products, factors and assembly on a fixed pattern: the symbolic phase once, then numeric ones for new values."""

from __future__ import annotations

from sparsebp.products.assembly import TripletAssembly, plan_assembly
from sparsebp.products.factor import FactorPlan, Factors, plan_factor
from sparsebp.products.product import ProductGradients, ProductPlan, plan_addition, plan_product

__all__ = [
    "FactorPlan", "Factors", "ProductGradients", "ProductPlan", "TripletAssembly", "plan_addition", "plan_assembly",
    "plan_factor", "plan_product",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
