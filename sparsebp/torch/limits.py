"""The one rule of size: where `sparsebp.torch.accelerate` lets this library's kernels run a module of PyTorch.

In float32, on a CPU, batches of 1 to 256. The kernels gain where a step is small and there are many of them: PyTorch
calls several operations a step, each of which costs more than its arithmetic, while a call of ours costs what PyTorch
takes for some eight steps. The larger H is, the more both spend on the same products. An LSTM in float32 is another
matter: PyTorch has one call of oneDNN for all steps of sequences of one length, which the kernels beat at small H and
many steps. A cell is one step a call.
"""

from __future__ import annotations

from typing import NamedTuple


class Largest(NamedTuple):
    """The hidden size up to which training steps were measured to be no slower than PyTorch's.

    Attributes
    ----------
    padded
        With sequences of one length.
    packed
        With packed sequences.
    """

    padded: int
    packed: int


LARGEST: dict[str, Largest] = {
    "RNN": Largest(256, 256),
    "GRU": Largest(128, 128),
    "LSTM": Largest(64, 128),
    "RNNCell": Largest(0, 0),
    "GRUCell": Largest(0, 0),
    "LSTMCell": Largest(0, 0),
}
"""By the class of torch.nn."""

LARGEST_IN_FLOAT64 = {"LSTM": Largest(128, 128)}
"""The same in float64, where it is another: oneDNN has none."""

_OF_CELLS = "a cell runs one step a call, which was measured to be slower here"


def largest_of(kind: str, in_float64: bool) -> Largest:
    """Return the sizes up to which a class of torch.nn is no slower here."""
    return LARGEST_IN_FLOAT64.get(kind, LARGEST[kind]) if in_float64 else LARGEST[kind]


def fewest_steps(kind: str, hidden: int, in_float64: bool, packed: bool, trains: bool) -> int:
    """Return the steps from which a call is worth its fixed cost; `trains`: with the way back."""
    if kind == "LSTM" and not in_float64 and not packed:
        return 256
    if kind == "RNN":
        return 16 if trains and hidden <= 64 else 32
    return 8 if kind == "GRU" and trains and hidden <= 32 and not packed else 16


def is_faster(kind: str, hidden: int, in_float64: bool, steps: int, packed: bool, trains: bool = True) -> bool:
    """Say whether a call of so many steps is to be run by this library's kernels."""
    largest = largest_of(kind, in_float64)
    enough = steps >= fewest_steps(kind, hidden, in_float64, packed, trains)
    return enough and hidden <= (largest.packed if packed else largest.padded)


def obstacle_of_size(kind: str, hidden: int, in_float64: bool) -> str:
    """Say why a module of a class and hidden size is to stay PyTorch's altogether; empty if it is not."""
    largest = max(largest_of(kind, in_float64))
    if hidden <= largest:
        return ""
    reason = f"hidden_size {hidden} is beyond {largest}, up to which it was measured to be no slower"
    return f"{reason if largest else _OF_CELLS} (faster_only=False replaces it)"
