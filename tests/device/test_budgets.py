"""What a step may cost on a GPU, held without one: see `gpu_model`."""

from __future__ import annotations

import pytest

from gpu_model.kernels import BUDGETS, figures, room
from gpu_model.launches import recurrence
from gpu_model.step import step_counts
from sass.nvrtc import disassembler

T, B, H, MULTIPROCESSORS = 1000, 16, 20, 132

VALUES = {("rnn", 1): 5.1, ("rnn", 64): 10.8, ("gru", 1): 18.1, ("gru", 64): 30.8}
"""By cell and chunks: values that the recurrent kernels of a training step read and write, over T·B·H."""

STEP = {
    ("RNN", "bp"): {"launched": {"launches": 32, "host reads": 1, "uploads": 0}},
    ("RNN", "chunked"): {"launched": {"launches": 34, "host reads": 1, "uploads": 0}},
    ("GRU", "bp"): {"launched": {"launches": 31, "host reads": 1, "uploads": 0}},
    ("GRU", "chunked"): {"launched": {"launches": 33, "host reads": 1, "uploads": 0}},
}
"""By cell and algorithm: what a training step asks of the device, from the batch to the updated parameters."""


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


@pytest.mark.parametrize(("cell", "backward"), STEP)
def test_a_training_step_asks_no_more_of_the_device(cell: str, backward: str) -> None:
    got, bounds = step_counts(cell, backward), STEP[cell, backward]
    over = {
        (mode, name): (got[mode][name], bound)
        for mode, by_name in bounds.items()
        for name, bound in by_name.items()
        if got[mode][name] > bound
    }
    assert not over, f"(got, at most) {over}; all of them: {got}"
