"""Budgets of a time step, hidden size 20 in float32, and what the machine code says.

The figures are upper bounds with little room. Lower them when a kernel gets better; raise one only with its reason in
the commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from sass import nvrtc
from sass.report import Report, report
from sparsebp.kernels.device.launch import Defines

ARCHITECTURE = "sm_90"
COMPILER = (13, 5)
"""NVRTC that the budgets were set with; another one schedules a little differently."""

RNN: Defines = {"REAL": "float", "HIDDEN": 20, "RELU": 0}
GRU: Defines = {"REAL": "float", "HIDDEN": 20}
"""And the LSTM's."""


TURNS = {"gru_reduce": 4, "lstm_reduce": 2}
"""Turns of an inner loop whose length hangs on the lane: the 400 entries of a Jacobian, 4 a lane and turn."""


@dataclass(frozen=True)
class Budget:
    """Bounds of one time step of one warp.

    Attributes
    ----------
    hidden, l2
        Cycles when all that is loaded from memory comes in time, and when it comes from L2.
    issued
        Instructions.
    chain, chain_length
        Cycles and instructions of the longest chain of dependent ones: what no order of the code can go below.
    passes
        Passes through shared memory.
    """

    hidden: float
    l2: float
    issued: float
    chain: float
    chain_length: float
    passes: float


BUDGETS = {
    "rnn_forward": Budget(133, 133, 56, 110, 14, 7.2),
    "rnn_backward": Budget(92, 92, 44, 62, 10, 6),
    "rnn_backward with sums": Budget(115, 122, 78, 62, 10, 14),
    "rnn_reduce": Budget(812, 812, 580, 86, 21, 325),
    "gru_forward": Budget(232, 232, 140, 170, 21, 6),
    "gru_backward": Budget(195, 195, 128, 102, 20, 18),
    "lstm_forward": Budget(303, 303, 186, 175, 22, 6),
    "lstm_backward": Budget(237, 237, 170, 126, 26, 24),
    "scan_combine": Budget(120, 120, 49, 59, 9, 43),
}
"""By kernel; the RNN forward, and sums of weight gradients, with one feature, the GRU's and the LSTM's with a projected
input, the reduction with a row a lane."""

STEPS: dict[str, tuple[str, int] | int] = {
    "rnn_forward": ("LDS.128", 5),
    "rnn_backward": ("LDS.128", 5),
    "rnn_backward with sums": ("LDS.128", 10),
    "rnn_reduce": 1,
    "gru_forward": ("LDS.128", 5),
    "gru_backward": ("LDS.128", 15),
    "gru_reduce": 1,
    "lstm_forward": ("LDS.128", 5),
    "lstm_backward": ("LDS.128", 20),
    "lstm_reduce": 1,
    "scan_combine": ("FFMA", 20),
}
"""How the steps of a round are told: an opcode and how often a step has it with 20 units, or their number."""


OWN: dict[str, Defines] = {
    "rnn_forward": {"INPUTS": 1},
    "rnn_backward with sums": {"INPUTS": 1},
    "rnn_reduce": {"ROWS": 1},
    "gru_reduce": {"ROWS": 1},
    "lstm_reduce": {"ROWS": 2},
}
"""Defines of the forms that have a budget, besides those of the cell."""


def figures(form: str, defines: Defines | None = None, architecture: str = ARCHITECTURE) -> Report:
    """Return what the machine code of a kernel says; without defines, of the one that has a budget."""
    if defines is None:
        defines = (RNN if form.startswith("rnn") else GRU) | OWN.get(form, {})
    elif form == "rnn_backward" and "INPUTS" in defines:
        form = "rnn_backward with sums"
    kernel = form.split()[0]
    return report(file_of(kernel), kernel, defines, architecture, STEPS[form], TURNS.get(kernel, 1))


def file_of(kernel: str) -> str:
    """Return the source of a kernel."""
    return f"{kernel}.cu" if kernel.endswith("forward") else f"{kernel.partition('_')[0]}.cu"


def room() -> float:
    """Return by which factor the budgets may be passed: not at all, with the compiler that they were set with."""
    return 1.0 if nvrtc.version() == COMPILER else 1.15
