"""What the Jacobians of a recurrent model say about it: Lyapunov exponents, and how gradients grow over time."""

from __future__ import annotations

from sparsebp.analysis.exponents import LyapunovSpectrum, lyapunov, lyapunov_of
from sparsebp.analysis.flow import GradientFlow, gradient_flow
from sparsebp.analysis.steps import hidden_jacobians

__all__ = ["GradientFlow", "LyapunovSpectrum", "gradient_flow", "hidden_jacobians", "lyapunov", "lyapunov_of"]


def __dir__() -> list[str]:
    return sorted(__all__)
