"""The kernels on the host: Numba functions, parallel, cached between runs, bitwise the same for every thread count."""

from __future__ import annotations

import sys
from pathlib import Path

from sparsebp.kernels.host.engine.cache import drop_stale

_PACKAGE = Path(__file__).parents[2]
drop_stale(_PACKAGE / "kernels", _PACKAGE / "scan")  # before the imports below

from sparsebp.kernels.host.channels import ChannelKernels  # noqa: E402
from sparsebp.kernels.host.dense.batches import matmul_batches  # noqa: E402
from sparsebp.kernels.host.dense.dense import DenseKernels  # noqa: E402
from sparsebp.kernels.host.dense.many import matmul_many  # noqa: E402
from sparsebp.kernels.host.dense.products import matmul  # noqa: E402
from sparsebp.kernels.host.engine.lists import find  # noqa: E402
from sparsebp.kernels.host.engine.read_only import accept_read_only  # noqa: E402
from sparsebp.kernels.host.gelu import GeluKernels  # noqa: E402
from sparsebp.kernels.host.optim.optimizers import OptimizerKernels  # noqa: E402
from sparsebp.kernels.host.optim.product_update import (  # noqa: E402
    bytes_at_once,
    update_by_product,
    worth_update_by_product,
)
from sparsebp.kernels.host.pointwise import PointwiseKernels, add_between  # noqa: E402
from sparsebp.kernels.host.recurrent import stream, stretches  # noqa: E402
from sparsebp.kernels.host.recurrent.gru import GruKernels  # noqa: E402
from sparsebp.kernels.host.recurrent.inference import infer  # noqa: E402
from sparsebp.kernels.host.recurrent.lstm import LstmKernels  # noqa: E402
from sparsebp.kernels.host.recurrent.rnn import RnnKernels  # noqa: E402
from sparsebp.kernels.host.sparse import chain  # noqa: E402
from sparsebp.kernels.host.sparse.blocks import BlockKernels  # noqa: E402
from sparsebp.kernels.host.sparse.csr import CsrKernels  # noqa: E402
from sparsebp.kernels.host.sparse.filled import FilledKernels  # noqa: E402
from sparsebp.kernels.host.sparse.pairs import PairKernels  # noqa: E402
from sparsebp.kernels.host.sparse.positions import PositionKernels  # noqa: E402
from sparsebp.kernels.host.sparse.runs import RunKernels  # noqa: E402
from sparsebp.kernels.host.sparse.select import SelectionKernels  # noqa: E402
from sparsebp.kernels.host.sparse.values import ValueKernels  # noqa: E402
from sparsebp.kernels.host.windows.convolution import ConvolutionKernels  # noqa: E402
from sparsebp.kernels.host.windows.max_pool import MaxPoolKernels  # noqa: E402

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
    """What `sparsebp.kernels.api.Kernels` calls for NumPy arrays: one mixin per family of kernels."""

    unchecked = True  # may be called past the checks: what is left out costs more than many of the kernels
