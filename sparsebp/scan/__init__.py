"""Back-propagation as a scan over transposed Jacobians: plan it once, run it on values. Knows no layers."""

from __future__ import annotations

from sparsebp.scan.algorithms import ScanStep, Span
from sparsebp.scan.plan import ScanPlan, plan_scan
from sparsebp.scan.report import LayerByLayer
from sparsebp.scan.rules import Choice, choose_recurrent_backward

__all__ = ["Choice", "LayerByLayer", "ScanPlan", "ScanStep", "Span", "choose_recurrent_backward", "plan_scan"]


def __dir__() -> list[str]:
    return sorted(__all__)
