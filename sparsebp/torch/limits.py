"""The one rule of size: up to which hidden size `sparsebp.torch.accelerate` replaces a module of PyTorch."""

from __future__ import annotations

LARGEST: dict[str, int] = {"RNN": 256, "GRU": 128, "LSTM": 0, "RNNCell": 0, "GRUCell": 0, "LSTMCell": 0}
"""The hidden size, by the class of torch.nn, up to which training steps were measured to be no slower than PyTorch's.

In float32, on a CPU, sequences of one length, batches of 1 to 256. The kernels gain where a step is small and there are
many of them: PyTorch calls several operations a step, each of which costs more than its arithmetic. The larger H is,
the more both spend on the same products. An LSTM is another matter: PyTorch has one call of oneDNN for all of its
steps. A cell is one step a call, and a call of ours costs more than PyTorch's operations of one step.
"""

LARGEST_IN_FLOAT64 = {"LSTM": 128}
"""The same in float64, where it is another: oneDNN has none."""

_REASONS = {
    "LSTM": "PyTorch's, of oneDNN, was measured to be as fast in float32; ours is faster with packed sequences",
    "RNNCell": "a cell runs one step a call, which was measured to be slower here",
}
_REASONS |= {"GRUCell": _REASONS["RNNCell"], "LSTMCell": _REASONS["RNNCell"]}


def obstacle_of_size(kind: str, hidden: int, in_float64: bool) -> str:
    """Say why a module of a class and hidden size is to stay PyTorch's; empty if it is not."""
    largest = LARGEST_IN_FLOAT64.get(kind, LARGEST[kind]) if in_float64 else LARGEST[kind]
    if hidden <= largest:
        return ""
    reason = f"hidden_size {hidden} is beyond {largest}, up to which it was measured to be no slower"
    return f"{reason if largest else _REASONS[kind]} (faster_only=False replaces it)"
