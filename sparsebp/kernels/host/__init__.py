"""The kernels on the host: Numba functions, parallel, cached between runs, bitwise the same for every thread count."""

from __future__ import annotations

import sys
from pathlib import Path

from sparsebp.kernels.host.engine.compile import drop_stale

_PACKAGE = Path(__file__).parents[2]
drop_stale(_PACKAGE / "kernels", _PACKAGE / "scan")  # before the imports below

from sparsebp.kernels.host.pointwise import ChannelKernels  # noqa: E402
from sparsebp.kernels.host.dense import matmul_batches  # noqa: E402
from sparsebp.kernels.host.dense import DenseKernels  # noqa: E402
from sparsebp.kernels.host.dense import matmul_many  # noqa: E402
from sparsebp.kernels.host.dense import matmul  # noqa: E402
from sparsebp.kernels.host.engine.arguments import find  # noqa: E402
from sparsebp.kernels.host.engine.compile import accept_read_only  # noqa: E402
from sparsebp.kernels.host.pointwise import GeluKernels  # noqa: E402
from sparsebp.kernels.host.optim import OptimizerKernels  # noqa: E402
from sparsebp.kernels.host.product_update import bytes_at_once
from sparsebp.kernels.host.product_update import update_by_product
from sparsebp.kernels.host.product_update import worth_update_by_product
from sparsebp.kernels.host.pointwise import PointwiseKernels  # noqa: E402
from sparsebp.kernels.host.pointwise import add_between  # noqa: E402
from sparsebp.kernels.host import inference  # noqa: E402
from sparsebp.kernels.host import cells  # noqa: E402
from sparsebp.kernels.host.cells import GruKernels  # noqa: E402
from sparsebp.kernels.host.inference import infer  # noqa: E402
from sparsebp.kernels.host.cells import LstmKernels  # noqa: E402
from sparsebp.kernels.host.cells import RnnKernels  # noqa: E402
from sparsebp.kernels.host import csr  # noqa: E402
from sparsebp.kernels.host.spgemm import BlockKernels  # noqa: E402
from sparsebp.kernels.host.csr import CsrKernels  # noqa: E402
from sparsebp.kernels.host.spgemm import FilledKernels  # noqa: E402
from sparsebp.kernels.host.spgemm import PairKernels  # noqa: E402
from sparsebp.kernels.host.spgemm import PositionKernels  # noqa: E402
from sparsebp.kernels.host.spgemm import RunKernels  # noqa: E402
from sparsebp.kernels.host.spgemm import SelectionKernels  # noqa: E402
from sparsebp.kernels.host.csr import ValueKernels  # noqa: E402
from sparsebp.kernels.host.conv import ConvolutionKernels  # noqa: E402
from sparsebp.kernels.host.pool import MaxPoolKernels  # noqa: E402

accept_read_only([module for name, module in sys.modules.items() if name.startswith(__name__ + ".")])

__all__ = [
    "HostKernels",
    "add_between",
    "bytes_at_once",
    "chain",
    "find",
    "infer",
    "matmul",
    "matmul_batches",
    "matmul_many",
    "stream",
    "stretches",
    "update_by_product",
    "worth_update_by_product",
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
    RnnKernels,
    GruKernels,
    LstmKernels,
    OptimizerKernels,
    ValueKernels,
    ConvolutionKernels,
    MaxPoolKernels,
    ChannelKernels,
    PointwiseKernels,
    GeluKernels,
):
    """What `sparsebp.kernels.spec.Kernels` calls for NumPy arrays: one mixin per family of kernels."""

    unchecked = True  # may be called past the checks: what is left out costs more than many of the kernels
