"""PyTorch computes the references on one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)
