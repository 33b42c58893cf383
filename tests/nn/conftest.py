"""PyTorch twins: the same layer in torch.nn, with the same weights, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torch_twins
from sparsebp import nn


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def recurrent_twin():
    """Return a function that makes torch's twin of an `nn.RNN` or `nn.GRU`."""
    return _recurrent_twin


@pytest.fixture(scope="session")
def torch_jacobian_t():
    """Return a function: the transposed Jacobian of one sample's function in torch, as a matrix."""
    return torch_twins.jacobian_t


def _recurrent_twin(layer: nn.RNN | nn.GRU) -> torch.nn.RNNBase:
    options = {
        "num_layers": layer.num_layers,
        "bias": any("bias" in name for name in layer.params),
        "batch_first": layer.batch_first,
        "bidirectional": layer.bidirectional,
        "dtype": torch.float64 if layer.dtype == np.float64 else torch.float32,
    }
    if isinstance(layer, nn.RNN):
        twin = torch.nn.RNN(layer.input_size, layer.hidden_size, nonlinearity=layer.nonlinearity, **options)
    else:
        twin = torch.nn.GRU(layer.input_size, layer.hidden_size, **options)
    twin.load_state_dict({name: torch.from_numpy(array) for name, array in layer.state_dict().items()})
    return twin
