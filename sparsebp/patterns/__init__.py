"""SYMBOLIC: where the nonzeros are. Host code, run once per architecture, cached."""

from __future__ import annotations

from sparsebp.patterns.builders import AssemblyPlan
from sparsebp.patterns.builders import plan_concatenation
from sparsebp.patterns.builders import axis_pattern
from sparsebp.patterns.builders import hidden_pattern
from sparsebp.patterns.builders import linear_pattern
from sparsebp.patterns.builders import lstm_pattern
from sparsebp.patterns.builders import pointwise_pattern
from sparsebp.patterns.builders import sequence_pattern
from sparsebp.patterns.builders import step_sum_pattern
from sparsebp.patterns.builders import ConvPattern
from sparsebp.patterns.builders import conv_pattern
from sparsebp.patterns.builders import conv_transpose_pattern
from sparsebp.patterns.windows import pad_pattern
from sparsebp.patterns.builders import PoolPattern
from sparsebp.patterns.builders import adaptive_pool_pattern
from sparsebp.patterns.builders import pool_pattern
from sparsebp.patterns.pattern import SparsityPattern

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
