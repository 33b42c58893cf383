"""SYMBOLIC: where the nonzeros are. Host code, run once per architecture, cached."""

from __future__ import annotations

from sparsebp.patterns.bicoloring import color_both
from sparsebp.patterns.builders import (
    AssemblyPlan,
    ConvPattern,
    PoolPattern,
    adaptive_pool_pattern,
    axis_pattern,
    conv_pattern,
    conv_transpose_pattern,
    hidden_pattern,
    linear_pattern,
    lstm_pattern,
    plan_concatenation,
    pointwise_pattern,
    pool_pattern,
    sequence_pattern,
    step_sum_pattern,
)
from sparsebp.patterns.pattern import SparsityPattern, color_columns, color_symmetric
from sparsebp.patterns.windows import pad_pattern

__all__ = [
    "AssemblyPlan", "ConvPattern", "PoolPattern", "SparsityPattern", "adaptive_pool_pattern", "axis_pattern",
    "color_both", "color_columns", "color_symmetric", "conv_pattern", "conv_transpose_pattern", "hidden_pattern",
    "linear_pattern", "lstm_pattern", "pad_pattern", "plan_concatenation", "pointwise_pattern", "pool_pattern",
    "sequence_pattern", "step_sum_pattern",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
