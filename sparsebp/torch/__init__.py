"""PyTorch modules over this library's kernels: `accelerate` a model, or build it from `RNN`, `GRU` and `LSTM`.

``import sparsebp.torch as st``. Inside this room ``torch`` is PyTorch, whose names and meanings everything has.

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
    raise MissingDependencyError(
        "PyTorch is not installed, and sparsebp.torch is for its models",
        remedy="Install the extra: pip install 'sparsebp[torch]'",
    ) from error

from sparsebp.torch.modules import GRUCell
from sparsebp.torch.modules import LSTMCell
from sparsebp.torch.modules import RNNCell
from sparsebp.torch.modules import GRU
from sparsebp.torch.modules import LSTM
from sparsebp.torch.modules import RNN
from sparsebp.torch.modules import Outcome
from sparsebp.torch.modules import accelerate
from sparsebp.torch.modules import explain
from sparsebp.torch.modules import restore
from sparsebp.torch.sparse import BatchedCSR
from sparsebp.torch.sparse import ProductPlan
from sparsebp.torch.sparse import plan_product
from sparsebp.torch.sparse import sparse_jacobian

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BatchedCSR",
    "GRUCell",
    "LSTMCell",
    "Outcome",
    "ProductPlan",
    "RNNCell",
    "accelerate",
    "explain",
    "plan_product",
    "restore",
    "sparse_jacobian",
]


def __dir__() -> list[str]:
    return sorted(__all__)
