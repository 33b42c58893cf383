"""Two patterns for every strategy of products, by its name."""

from __future__ import annotations

import numpy as np

from benchmarks.workloads import convolution_t
from matrices import disjoint, of_blocks, of_runs, random_pattern
from sparsebp import SparsityPattern

GENERAL = random_pattern(200, 300, 0.05)
SELECTION = SparsityPattern(np.arange(301), np.arange(300) // 4, (300, 75))
OPERANDS = {
    "pairs": (GENERAL, random_pattern(300, 250, 0.05, 1)),
    "positions": (GENERAL, random_pattern(300, 250, 0.3, 1)),
    "scale_rows": (SparsityPattern.diagonal(200), GENERAL),
    "scale_columns": (GENERAL, SparsityPattern.diagonal(300)),
    "scale_runs": (SparsityPattern.from_scipy(convolution_t(3, 8, 16)), SparsityPattern.diagonal(8 * 16 * 16)),
    "identity": (GENERAL, SparsityPattern.identity(300)),
    "select_rows": (SELECTION, random_pattern(75, 300, 0.2)),
    "select_columns": (GENERAL, SELECTION),
    "gather": (GENERAL, disjoint(300)),
    "runs": (GENERAL, of_runs(300, 100)),
    "blocks": (of_blocks(60, 70, 3, 3), of_blocks(70, 50, 3, 2)),
    "filled": (random_pattern(270, 280, 0.4), random_pattern(280, 290, 0.4, 1)),
    "dense": (SparsityPattern.dense(60, 50), SparsityPattern.dense(50, 70)),
}
