"""What stands on plans: direct solves with SciPy's signatures, least squares, multigrid with new coefficients."""

from __future__ import annotations

from sparsebp.solvers.direct import SparseLU, cache_clear, cache_info, factorized, splu, spsolve
from sparsebp.solvers.fit_covariance import covariance
from sparsebp.solvers.levenberg_marquardt import least_squares
from sparsebp.solvers.multigrid import Multigrid, from_pyamg
from sparsebp.solvers.scipy_hooks import used_by_scipy

__all__ = [
    "Multigrid", "SparseLU", "cache_clear", "cache_info", "covariance", "factorized", "from_pyamg", "least_squares",
    "splu", "spsolve", "used_by_scipy",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
