"""sparsebp: back-propagation as sparse linear algebra.

Names are imported when first used, so that ``import sparsebp`` stays light: Numba, SciPy and CuPy are loaded by the
first call that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from sparsebp import (
        analysis,
        data,
        interop,
        jacobians,
        models,
        nn,
        optim,
        patterns,
        products,
        returns,
        runtime,
        scan,
        schedule,
        solvers,
        train,
    )
    from sparsebp.analysis import gradient_flow, hidden_jacobians, lyapunov
    from sparsebp.comm.threads import run_ranks
    from sparsebp.core import backend, errors, threads
    from sparsebp.jacobians import TransposedJacobian, jacobian_t, sparse_hessian, sparse_jacobian
    from sparsebp.nn import prune, value_and_grad
    from sparsebp.patterns import SparsityPattern
    from sparsebp.products import FactorPlan, ProductPlan, plan_assembly, plan_factor, plan_product
    from sparsebp.returns import ewm, gae, td_lambda, vtrace
    from sparsebp.runtime.launch import connect
    from sparsebp.scan import (
        ScanPlan,
        linear_recurrence,
        linear_recurrence_vjp,
        plan_scan,
        selective_scan,
        selective_scan_vjp,
        sosfilt,
        sosfilt_vjp,
    )
    from sparsebp.solvers import least_squares, multigrid
    from sparsebp.train import verify

_ROOMS = (
    "analysis", "data", "interop", "jacobians", "models", "nn", "optim", "patterns", "products", "returns", "runtime",
    "scan", "schedule", "solvers", "train",
)  # fmt: skip
_MODULES = {
    **{name: f"sparsebp.{name}" for name in _ROOMS},
    "backend": "sparsebp.core.backend",
    "errors": "sparsebp.core.errors",
    "multigrid": "sparsebp.solvers.multigrid",
    "threads": "sparsebp.core.threads",
    "verify": "sparsebp.train.verify",
}
_HOMES = {
    "sparsebp.analysis": ("gradient_flow", "hidden_jacobians", "lyapunov"),
    "sparsebp.comm.threads": ("run_ranks",),
    "sparsebp.jacobians": ("TransposedJacobian", "jacobian_t", "sparse_hessian", "sparse_jacobian"),
    "sparsebp.nn": ("prune", "value_and_grad"),
    "sparsebp.patterns": ("SparsityPattern",),
    "sparsebp.products": ("FactorPlan", "ProductPlan", "plan_assembly", "plan_factor", "plan_product"),
    "sparsebp.returns": ("ewm", "gae", "td_lambda", "vtrace"),
    "sparsebp.runtime.launch": ("connect",),
    "sparsebp.scan": (
        "ScanPlan", "linear_recurrence", "linear_recurrence_vjp", "plan_scan", "selective_scan", "selective_scan_vjp",
        "sosfilt", "sosfilt_vjp",
    ),
    "sparsebp.solvers": ("least_squares",),
}  # fmt: skip
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "FactorPlan", "ProductPlan", "ScanPlan", "SparsityPattern", "TransposedJacobian", "__version__", "analysis",
    "backend", "connect", "data", "errors", "ewm", "gae", "gradient_flow", "hidden_jacobians", "interop", "jacobian_t",
    "jacobians", "least_squares", "linear_recurrence", "linear_recurrence_vjp", "lyapunov", "models", "multigrid", "nn",
    "optim", "patterns", "plan_assembly", "plan_factor", "plan_product", "plan_scan", "products", "prune", "returns",
    "run_ranks", "runtime", "scan", "schedule", "selective_scan", "selective_scan_vjp", "solvers", "sosfilt",
    "sosfilt_vjp", "sparse_hessian", "sparse_jacobian", "td_lambda", "threads", "train", "value_and_grad", "verify",
    "vtrace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'sparsebp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
