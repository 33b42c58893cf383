"""The conventional order and where the updates go, written out."""

from __future__ import annotations

import pytest

from sparsebp.schedule import Schedule, simulate
from sparsebp.schedule.builders import conventional, gpipe, place_updates


def lanes(schedule: Schedule) -> dict[str, str]:
    return {lane.stream: " ".join(map(str, lane.cells)) for lane in schedule.lanes}


@pytest.mark.parametrize(("fusion", "first", "expected"), [
    ("none", "F", "0F0 1F0 2F0 2W0 2I0 1W0 1I0 0W0 0U 1U 2U"),
    ("forward", "U", "0U 0F0 1U 1F0 2U 2F0 2W0 2I0 1W0 1I0 0W0"),
    ("backward", "F", "0F0 1F0 2F0 2W0 2I0 2U 1W0 1I0 1U 0W0 0U"),
])  # fmt: skip
def test_one_stream(fusion, first, expected):
    schedule = conventional(stages=3, fusion=fusion)
    assert lanes(schedule) == {"main": expected}
    assert schedule.graph.first == first


@pytest.mark.parametrize(("fusion", "main", "sub"), [
    ("none", "0F0 1F0 2F0 2I0 1I0 0U 1U 2U", "2W0 1W0 0W0"),
    ("forward", "0U 0F0 1U 1F0 2U 2F0 2I0 1I0", "2W0 1W0 0W0"),
    ("backward", "0F0 1F0 2F0 2I0 1I0", "2W0 2U 1W0 1U 0W0 0U"),
])  # fmt: skip
def test_two_streams(fusion, main, sub):
    schedule = conventional(stages=3, fusion=fusion, streams=2)
    assert lanes(schedule) == {"main": main, "sub": sub}
    assert simulate(schedule).makespan == 3 + 3


def test_accumulation_updates_after_the_last_micro_batch():
    schedule = conventional(stages=2, microbatches=2, fusion="backward")
    assert lanes(schedule) == {"main": "0F0 1F0 1W0 1I0 0W0 0F1 1F1 1W1 1I1 1U 0W1 0U"}
    lazy = conventional(stages=2, microbatches=2, fusion="forward")
    assert lanes(lazy) == {"main": "0U 0F0 1U 1F0 1W0 1I0 0W0 0F1 1F1 1W1 1I1 0W1"}


def test_stages_without_weights():
    schedule = conventional(stages=3, unweighted=[0, 2], fusion="backward", input_gradient=True)
    assert lanes(schedule) == {"main": "0F0 1F0 2F0 2I0 1W0 1I0 1U 0I0"}
    assert lanes(conventional(stages=2, unweighted=[0, 1], streams=2)) == {"main": "0F0 1F0 1I0"}


def test_updates_in_a_pipeline():
    """Each worker updates its stages; backward-fusion does so before its other stages' last gradients."""
    schedule = place_updates(gpipe(workers=2, stages=4, microbatches=2), "backward")
    assert [" ".join(map(str, lane.cells)) for lane in schedule.lanes] == [
        "0F0 1F0 0F1 1F1 1B0 0B0 1B1 1U 0B1 0U",
        "2F0 3F0 2F1 3F1 3B0 2B0 3B1 3U 2B1 2U",
    ]


def test_backward_fusion_needs_one_gradient_at_a_time():
    """Jiang et al. (2021), §3: a gradient buffer is given back at once."""
    unfused, fused = (simulate(conventional(stages=9, fusion=fusion)) for fusion in ("none", "backward"))
    assert max(unfused.memory[0].weight_gradients) == 9
    assert max(fused.memory[0].weight_gradients) == 1
