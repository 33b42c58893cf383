"""The one rule of size: from how many steps on a call of an accelerated module is run by this library's kernels.

The kernels gain where there are many steps: PyTorch calls several operations a step, each of which costs more than its
arithmetic, while a call of ours costs what PyTorch takes for some eight steps. The larger H is, the more both spend on
the same products. An LSTM in float32 is another matter: PyTorch has one call of oneDNN for all steps of sequences of
one length, packed or not. `FEWEST_STEPS` was measured on a CPU with one and two threads, ours and PyTorch's calls in
turn, with 1 and 16 samples of up to 128 steps in float32; it is rounded up to where none was slower. In float64 no row
is below that of float32 but for the LSTM's, of which one thread was measured, and longer sequences are expected to gain
as those of 128 steps. A cell is one step a call.
"""

from __future__ import annotations

from typing import NamedTuple

FEWEST_STEPS: dict[tuple[str, bool, bool, bool], tuple[tuple[int, int], ...]] = {
    # cell, float64, packed, trains: (hidden size up to which, steps from which), …
    ("RNN", False, False, True): ((64, 32), (512, 64)),
    ("RNN", False, False, False): ((128, 16), (512, 32)),
    ("RNN", False, True, True): ((64, 32), (256, 64), (512, 128)),
    ("RNN", False, True, False): ((20, 32), (128, 64), (512, 256)),
    ("RNN", True, False, True): ((64, 32), (512, 64)),
    ("RNN", True, False, False): ((128, 16), (512, 32)),
    ("RNN", True, True, True): ((64, 32), (128, 64), (512, 128)),
    ("RNN", True, True, False): ((20, 32), (128, 64), (512, 256)),
    ("GRU", False, False, True): ((32, 8), (128, 16), (512, 32)),
    ("GRU", False, False, False): ((64, 8), (128, 16), (512, 32)),
    ("GRU", False, True, True): ((64, 16), (256, 64), (512, 128)),
    ("GRU", False, True, False): ((64, 32), (128, 64)),
    ("GRU", True, False, True): ((32, 8), (128, 16), (512, 32)),
    ("GRU", True, False, False): ((64, 8), (128, 16), (256, 32), (512, 128)),
    ("GRU", True, True, True): ((64, 16), (256, 64), (512, 128)),
    ("GRU", True, True, False): ((64, 32), (128, 64)),
    ("LSTM", False, False, True): ((20, 100), (64, 256), (128, 512)),
    ("LSTM", False, False, False): ((20, 16), (64, 256)),
    ("LSTM", False, True, True): ((64, 16), (128, 64), (256, 128)),
    ("LSTM", False, True, False): ((20, 16), (64, 32), (128, 128)),
    ("LSTM", True, False, True): ((64, 16), (128, 32), (512, 64)),
    ("LSTM", True, False, False): ((64, 16), (128, 32), (256, 64), (512, 128)),
    ("LSTM", True, True, True): ((64, 16), (128, 64), (256, 128)),
    ("LSTM", True, True, False): ((20, 16), (64, 32), (128, 64), (256, 128)),
}
"""By the cell, float64 or not, packed sequences or one length, gradients recorded or not: pairs of a hidden size, up to
which, and the number of steps from which calls are run by the kernels. Beyond the last hidden size none is."""

OF_CELLS = "a cell runs one step a call, which was measured to be slower here"


class Case(NamedTuple):
    """What the rule tells apart, besides the hidden size and the number of steps."""

    cell: str
    in_float64: bool
    packed: bool
    trains: bool

    def __str__(self) -> str:
        packed, trains = ", packed" if self.packed else "", "" if self.trains else ", no gradients"
        return f"{'float64' if self.in_float64 else 'float32'} {self.cell}{packed}{trains}"

    @property
    def largest(self) -> int:
        """The hidden size beyond which no call is run by the kernels."""
        return FEWEST_STEPS[self][-1][0]

    def fewest_steps(self, hidden: int) -> int | None:
        """Return the steps from which a call is run by the kernels; None: it never is."""
        return next((steps for largest, steps in FEWEST_STEPS[self] if hidden <= largest), None)


def is_faster(kind: str, hidden: int, in_float64: bool, steps: int, packed: bool, trains: bool = True) -> bool:
    """Say whether a call of so many steps is run by the kernels."""
    fewest = Case(kind, in_float64, packed, trains).fewest_steps(hidden)
    return fewest is not None and steps >= fewest
