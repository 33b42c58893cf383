"""sparsebp: back-propagation as sparse linear algebra.

Names are imported when first used, so that ``import sparsebp`` stays light: Numba, SciPy and CuPy are loaded by the
first call that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from sparsebp import analysis
    from sparsebp.core import backend
    from sparsebp import bench
    from sparsebp import data
    from sparsebp import interop
    from sparsebp import jacobians
    from sparsebp import models
    from sparsebp import nn
    from sparsebp import optim
    from sparsebp import patterns
    from sparsebp import products
    from sparsebp.train import recipes
    from sparsebp import runtime
    from sparsebp import scan
    from sparsebp import schedule
    from sparsebp import train
    from sparsebp.analysis import gradient_flow
    from sparsebp.analysis import hidden_jacobians
    from sparsebp.analysis import lyapunov
    from sparsebp.core import errors
    from sparsebp.core import threads
    from sparsebp.jacobians import TransposedJacobian
    from sparsebp.jacobians import jacobian_t
    from sparsebp.nn import prune
    from sparsebp.nn import value_and_grad
    from sparsebp.patterns import SparsityPattern
    from sparsebp.products import ProductPlan
    from sparsebp.products import plan_product
    from sparsebp.train import verify
    from sparsebp.scan import ScanPlan
    from sparsebp.scan import plan_scan

_ROOMS = (
    "analysis", "backend", "bench", "data", "interop", "jacobians", "models", "nn", "optim", "patterns", "products",
    "recipes", "runtime", "scan", "schedule", "train",
)  # fmt: skip
_MODULES = {
    **{name: f"sparsebp.{name}" for name in _ROOMS},
    "errors": "sparsebp.core.errors",
    "threads": "sparsebp.core.threads",
    "verify": "sparsebp.train.verify",
}
_NAMES = {
    "SparsityPattern": "sparsebp.patterns",
    "ProductPlan": "sparsebp.products",
    "plan_product": "sparsebp.products",
    "TransposedJacobian": "sparsebp.jacobians",
    "jacobian_t": "sparsebp.jacobians",
    "gradient_flow": "sparsebp.analysis",
    "hidden_jacobians": "sparsebp.analysis",
    "lyapunov": "sparsebp.analysis",
    "prune": "sparsebp.nn",
    "value_and_grad": "sparsebp.nn",
    "ScanPlan": "sparsebp.scan",
    "plan_scan": "sparsebp.scan",
}
__all__ = [
    "ProductPlan",
    "ScanPlan",
    "SparsityPattern",
    "TransposedJacobian",
    "__version__",
    "analysis",
    "backend",
    "bench",
    "data",
    "errors",
    "gradient_flow",
    "hidden_jacobians",
    "interop",
    "jacobian_t",
    "jacobians",
    "lyapunov",
    "models",
    "nn",
    "optim",
    "patterns",
    "plan_product",
    "plan_scan",
    "products",
    "prune",
    "recipes",
    "runtime",
    "scan",
    "schedule",
    "threads",
    "train",
    "value_and_grad",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'sparsebp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
