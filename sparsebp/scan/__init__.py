"""Back-propagation as a scan over transposed Jacobians: plan it once, run it on values. Knows no layers."""

from __future__ import annotations

from sparsebp.scan.algorithms import ScanStep, Span
from sparsebp.scan.plan import ScanPlan, plan_scan
from sparsebp.scan.recurrence import RecurrenceGrads, linear_recurrence, linear_recurrence_vjp
from sparsebp.scan.report import LayerByLayer
from sparsebp.scan.rules import Choice, choose_recurrent_backward
from sparsebp.scan.sections import Filtered, FilterGrads, sosfilt, sosfilt_vjp
from sparsebp.scan.selective import SelectiveScan, SelectiveScanGrads, selective_scan, selective_scan_vjp

__all__ = [
    "Choice",
    "FilterGrads",
    "Filtered",
    "LayerByLayer",
    "RecurrenceGrads",
    "ScanPlan",
    "ScanStep",
    "SelectiveScan",
    "SelectiveScanGrads",
    "Span",
    "choose_recurrent_backward",
    "linear_recurrence",
    "linear_recurrence_vjp",
    "plan_scan",
    "selective_scan",
    "selective_scan_vjp",
    "sosfilt",
    "sosfilt_vjp",
]


def __dir__() -> list[str]:
    return sorted(__all__)
