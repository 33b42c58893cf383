"""What a training step asks of a GPU, counted on the stand-in for CuPy."""

from __future__ import annotations

import pytest

from device.step_counts import step_counts

LAUNCHES = {("RNN", "bp"): 10, ("RNN", "chunked"): 12, ("GRU", "bp"): 13, ("GRU", "chunked"): 15}
"""By cell and algorithm: launches of a training step, from the batch to the updated parameters."""


@pytest.mark.parametrize(("cell", "backward"), LAUNCHES)
def test_a_training_step_asks_no_more_of_the_device(cell: str, backward: str) -> None:
    """Launched or captured, it sends nothing and reads its loss once; a captured one copies the batch to its place."""
    got = step_counts(cell, backward)
    assert got["launched"]["launches"] <= LAUNCHES[cell, backward], got
    assert (got["captured"]["graphs"], got["captured"]["launches"]) == (1, 2), got
    assert all((mode["host reads"], mode["uploads"]) == (1, 0) for mode in got.values()), got
