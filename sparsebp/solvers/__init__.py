"""What stands on plans: nonlinear least squares, and multigrid hierarchies with new coefficients."""

from __future__ import annotations

from sparsebp.solvers.levenberg_marquardt import least_squares
from sparsebp.solvers.multigrid import Multigrid, from_pyamg

__all__ = ["Multigrid", "from_pyamg", "least_squares"]


def __dir__() -> list[str]:
    return sorted(__all__)
