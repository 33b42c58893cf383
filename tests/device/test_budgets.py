"""Budgets of a step on a GPU, checked without one: see `gpu_model`."""

from __future__ import annotations

import pytest

from gpu_model.kernels import BUDGETS, figures, room
from gpu_model.launches import recurrence
from gpu_model.step import step_counts
from sass.nvrtc import disassembler

T, B, H, MULTIPROCESSORS = 1000, 16, 20, 132

VALUES = {
    ("rnn", 1): 3.2,
    ("rnn", 64): 13.0,
    ("gru", 1): 18.1,
    ("gru", 64): 31.7,
    ("lstm", 1): 20.1,
    ("lstm", 64): 41.4,
}
"""By cell and chunks: values that the recurrent kernels of a training step read and write, over T·B·H.

The RNN's weight gradients are among them: no product follows that would read states and gradients again. So many chunks
leave as many sums, which count for what they are at this T.
"""

LAUNCHES = {("RNN", "bp"): 10, ("RNN", "chunked"): 12, ("GRU", "bp"): 13, ("GRU", "chunked"): 15}
"""By cell and algorithm: launches of a training step, from the batch to the updated parameters."""


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm (extra 'dev')")
@pytest.mark.parametrize("kernel", BUDGETS)
def test_a_time_step_keeps_within_its_budget(kernel: str) -> None:
    budget, got = BUDGETS[kernel], figures(kernel)
    chain, length = got.chain
    pairs = {
        "cycles, loads hidden": (got.cycles("hidden"), budget.hidden),
        "cycles, loads from L2": (got.cycles("L2"), budget.l2),
        "instructions": (got.issued, budget.issued),
        "cycles of the longest chain": (chain, budget.chain),
        "instructions of the longest chain": (length, budget.chain_length),
        "passes through shared memory": (got.wavefronts, budget.passes),
    }
    over = {name: pair for name, pair in pairs.items() if pair[0] > pair[1] * room()}
    assert not over, f"{kernel}: (got, at most) {over}; all of them: {pairs}"


@pytest.mark.parametrize(("cell", "chunks"), VALUES)
def test_values_moved_by_the_recurrent_kernels(cell: str, chunks: int) -> None:
    launches = recurrence(cell, T, B, H, chunks, MULTIPROCESSORS)
    assert sum(launch.bytes for launch in launches) / (4 * T * B * H) <= VALUES[cell, chunks]


@pytest.mark.parametrize(("cell", "backward"), LAUNCHES)
def test_a_training_step_asks_no_more_of_the_device(cell: str, backward: str) -> None:
    """Launched or captured, it sends nothing and reads its loss once; a captured one copies the batch to its place."""
    got = step_counts(cell, backward)
    assert got["launched"]["launches"] <= LAUNCHES[cell, backward], got
    assert (got["captured"]["graphs"], got["captured"]["launches"]) == (1, 2), got
    assert all((mode["host reads"], mode["uploads"]) == (1, 0) for mode in got.values()), got
