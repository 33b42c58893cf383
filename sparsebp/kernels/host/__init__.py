"""The kernels on the host: Numba functions, parallel, cached between runs, bitwise the same for every thread count."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from sparsebp.kernels.host.engine.compile import drop_stale

drop_stale(Path(__file__).parents[1])  # before the imports below

from sparsebp.kernels.host import averages, sections, xla  # noqa: E402
from sparsebp.kernels.host.activations import ActivationKernels  # noqa: E402
from sparsebp.kernels.host.conv.band import BandKernels  # noqa: E402
from sparsebp.kernels.host.conv.conv import ConvolutionKernels  # noqa: E402
from sparsebp.kernels.host.conv.pool import MaxPoolKernels  # noqa: E402
from sparsebp.kernels.host.dense.products import (  # noqa: E402
    DenseKernels,
    bytes_at_once,
    matmul,
    matmul_batches,
    matmul_many,
    update_by_product,
    worth_update_by_product,
)
from sparsebp.kernels.host.engine.arguments import find  # noqa: E402
from sparsebp.kernels.host.engine.compile import accept_read_only  # noqa: E402
from sparsebp.kernels.host.losses import LossKernels  # noqa: E402
from sparsebp.kernels.host.norm import NormKernels  # noqa: E402
from sparsebp.kernels.host.optim import OptimizerKernels  # noqa: E402
from sparsebp.kernels.host.pointwise import PointwiseKernels, add_between  # noqa: E402
from sparsebp.kernels.host.recurrence import (  # noqa: E402
    LinearRecurrenceKernels,
    gated_backward,
    gated_forward,
    lru_backward,
    lru_forward,
)
from sparsebp.kernels.host.rnn import cells, inference, one_step  # noqa: E402
from sparsebp.kernels.host.rnn.cells import RecurrentKernels  # noqa: E402
from sparsebp.kernels.host.rnn.inference import infer  # noqa: E402
from sparsebp.kernels.host.selective_scan import SelectiveScanKernels  # noqa: E402
from sparsebp.kernels.host.sparse import coloring, csr, elimination, factor, factor_solve, panels, sketches, symbolic  # noqa: E402
from sparsebp.kernels.host.sparse.csr import CsrKernels, ValueKernels  # noqa: E402
from sparsebp.kernels.host.sparse.spgemm import (  # noqa: E402
    BlockKernels,
    FilledKernels,
    PairKernels,
    PositionKernels,
    RunKernels,
    SelectionKernels,
)

accept_read_only([module for name, module in sys.modules.items() if name.startswith(__name__ + ".")])

__all__ = [
    "HostKernels",
    "add_between",
    "averages",
    "bytes_at_once",
    "cells",
    "coloring",
    "csr",
    "elimination",
    "factor",
    "factor_solve",
    "find",
    "gated_backward",
    "gated_forward",
    "infer",
    "inference",
    "lru_backward",
    "lru_forward",
    "matmul",
    "matmul_batches",
    "matmul_many",
    "one_step",
    "panels",
    "sections",
    "sketches",
    "symbolic",
    "update_by_product",
    "worth_update_by_product",
    "xla",
]


class HostKernels(
    CsrKernels,
    PositionKernels,
    PairKernels,
    SelectionKernels,
    RunKernels,
    BlockKernels,
    FilledKernels,
    DenseKernels,
    RecurrentKernels,
    LinearRecurrenceKernels,
    SelectiveScanKernels,
    OptimizerKernels,
    ValueKernels,
    ConvolutionKernels,
    MaxPoolKernels,
    BandKernels,
    PointwiseKernels,
    ActivationKernels,
    LossKernels,
    NormKernels,
):
    """The implementation behind `sparsebp.kernels.spec.Kernels` for NumPy arrays: one mixin per family of kernels."""

    xp = np
    unchecked = True  # callers may skip the checks, which cost more than many of the kernels
