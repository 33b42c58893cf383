"""PyTorch modules over this library's kernels: `accelerate` a model, or build it from `RNN`, `GRU` and `LSTM`.

``import sparsebp.torch as st``. In this package ``torch`` is PyTorch; names and meanings are PyTorch's.

Raises
------
MissingDependencyError
    On import: PyTorch is not installed.
"""

from __future__ import annotations

from sparsebp.core.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("PyTorch is not installed, and sparsebp.torch is for its models",
                                 remedy="Install the extra: pip install 'sparsebp[torch]'") from error  # fmt: skip

from sparsebp.torch.dispatch import Outcome, accelerate, explain, restore
from sparsebp.torch.gated import MinGRU, MinLSTM
from sparsebp.torch.lru import LRU
from sparsebp.torch.modules import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from sparsebp.torch.recurrences import linear_recurrence
from sparsebp.torch.sections import sosfilt
from sparsebp.torch.selective import selective_scan
from sparsebp.torch.solves import solve
from sparsebp.torch.sparse import BatchedCSR, ProductPlan, plan_product, sparse_jacobian

__all__ = [
    "GRU", "LRU", "LSTM", "RNN", "BatchedCSR", "GRUCell", "LSTMCell", "MinGRU", "MinLSTM", "Outcome", "ProductPlan",
    "RNNCell", "accelerate", "explain", "linear_recurrence", "plan_product", "restore", "selective_scan", "solve",
    "sosfilt", "sparse_jacobian",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
