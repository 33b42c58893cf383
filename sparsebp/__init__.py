"""sparsebp: back-propagation as sparse linear algebra.

Names are imported when first used, so that ``import sparsebp`` stays light: Numba, SciPy and CuPy are loaded by the
first call that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sparsebp import backend, bench, data, errors, interop, models, nn, optim, train, verify
    from sparsebp.jacobians import TransposedJacobian, jacobian_t
    from sparsebp.nn import prune
    from sparsebp.patterns import ProductPlan, SparsityPattern, plan_product
    from sparsebp.scan import ScanPlan, plan_scan

_MODULES = ("backend", "bench", "data", "errors", "interop", "models", "nn", "optim", "train", "verify")
_NAMES = {
    "SparsityPattern": "sparsebp.patterns",
    "ProductPlan": "sparsebp.patterns",
    "plan_product": "sparsebp.patterns",
    "TransposedJacobian": "sparsebp.jacobians",
    "jacobian_t": "sparsebp.jacobians",
    "prune": "sparsebp.nn",
    "ScanPlan": "sparsebp.scan",
    "plan_scan": "sparsebp.scan",
}
__all__ = [
    "ProductPlan",
    "ScanPlan",
    "SparsityPattern",
    "TransposedJacobian",
    "__version__",
    "backend",
    "bench",
    "data",
    "errors",
    "interop",
    "jacobian_t",
    "models",
    "nn",
    "optim",
    "plan_product",
    "plan_scan",
    "prune",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"sparsebp.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'sparsebp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
