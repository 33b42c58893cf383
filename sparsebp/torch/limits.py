"""The one rule of size: up to which hidden size `sparsebp.torch.accelerate` replaces a module of PyTorch."""

from __future__ import annotations

LARGEST: dict[str, int] = {"RNN": 512, "GRU": 512, "LSTM": 512}
"""The hidden size, by the class of torch.nn, up to which a training step was measured to be no slower than PyTorch's.

The kernels gain where a step is small: PyTorch calls several operations a step, each of which costs more than its
arithmetic. The larger H is, the more both spend on the same products.
"""


def obstacle_of_size(kind: str, hidden: int) -> str:
    """Say why a module of a class and hidden size is to stay PyTorch's; empty if it is not."""
    largest = LARGEST.get(kind)
    if largest is None or hidden <= largest:
        return ""
    return f"hidden_size {hidden} is beyond {largest}, up to which it was measured to be no slower"
