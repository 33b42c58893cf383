"""sparsebp: back-propagation as sparse linear algebra.

Names are imported when first used, so that ``import sparsebp`` stays light: Numba, SciPy and CuPy are loaded by the
first call that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sparsebp import (
        backend,
        bench,
        data,
        errors,
        interop,
        jacobians,
        models,
        nn,
        optim,
        patterns,
        scan,
        schedule,
        threads,
        train,
        verify,
    )
    from sparsebp.jacobians import TransposedJacobian, jacobian_t
    from sparsebp.nn import prune, value_and_grad
    from sparsebp.patterns import ProductPlan, SparsityPattern, plan_product
    from sparsebp.scan import ScanPlan, plan_scan

_MODULES = (
    "backend", "bench", "data", "errors", "interop", "jacobians", "models", "nn", "optim", "patterns", "scan",
    "schedule", "threads", "train", "verify",
)  # fmt: skip
_NAMES = {
    "SparsityPattern": "sparsebp.patterns",
    "ProductPlan": "sparsebp.patterns",
    "plan_product": "sparsebp.patterns",
    "TransposedJacobian": "sparsebp.jacobians",
    "jacobian_t": "sparsebp.jacobians",
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
    "backend",
    "bench",
    "data",
    "errors",
    "interop",
    "jacobian_t",
    "jacobians",
    "models",
    "nn",
    "optim",
    "patterns",
    "plan_product",
    "plan_scan",
    "prune",
    "scan",
    "schedule",
    "threads",
    "train",
    "value_and_grad",
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
