"""SYMBOLIC: where the nonzeros are. Host code, run once per architecture, cached."""

from __future__ import annotations

from sparsebp.patterns.assembly import AssemblyPlan, plan_concatenation
from sparsebp.patterns.blocks import (
    axis_pattern,
    hidden_pattern,
    linear_pattern,
    lstm_pattern,
    pointwise_pattern,
    sequence_pattern,
    step_sum_pattern,
)
from sparsebp.patterns.conv import ConvPattern, conv_pattern, conv_transpose_pattern
from sparsebp.patterns.pad import pad_pattern
from sparsebp.patterns.pool import PoolPattern, adaptive_pool_pattern, pool_pattern
from sparsebp.patterns.sparsity import SparsityPattern

__all__ = [
    "AssemblyPlan",
    "ConvPattern",
    "PoolPattern",
    "SparsityPattern",
    "adaptive_pool_pattern",
    "axis_pattern",
    "conv_pattern",
    "conv_transpose_pattern",
    "hidden_pattern",
    "linear_pattern",
    "lstm_pattern",
    "pad_pattern",
    "plan_concatenation",
    "pointwise_pattern",
    "pool_pattern",
    "sequence_pattern",
    "step_sum_pattern",
]


def __dir__() -> list[str]:
    return sorted(__all__)
