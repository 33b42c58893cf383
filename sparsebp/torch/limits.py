"""The one rule of size: up to which hidden size `sparsebp.torch.accelerate` replaces a module of PyTorch."""

from __future__ import annotations

LARGEST: dict[str, int] = {"RNN": 512, "GRU": 512, "LSTM": 512, "RNNCell": 0, "GRUCell": 0, "LSTMCell": 0}
"""The hidden size, by the class of torch.nn, up to which a training step was measured to be no slower than PyTorch's.

The kernels gain where a step is small and there are many of them: PyTorch calls several operations a step, each of
which costs more than its arithmetic. The larger H is, the more both spend on the same products. A cell is one step a
call, and a call of ours costs more than PyTorch's operations of one step.
"""


def obstacle_of_size(kind: str, hidden: int) -> str:
    """Say why a module of a class and hidden size is to stay PyTorch's; empty if it is not."""
    largest = LARGEST[kind]
    if hidden <= largest:
        return ""
    if largest == 0:
        return "a cell runs one step a call, which was measured to be slower here"
    return f"hidden_size {hidden} is beyond {largest}, up to which it was measured to be no slower"
