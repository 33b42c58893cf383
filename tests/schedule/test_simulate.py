"""The simulator, on schedules whose times can be counted by hand."""

from __future__ import annotations

import pytest

from sparsebp.schedule import Action, Costs, Schedule, StepGraph, parse, simulate


def lane(text: str):
    return [parse(cell) for cell in text.split()]


def pipeline(stages: int, microbatches: int) -> Schedule:
    """GPipe's order: all forwards, then all backwards."""
    workers = [
        [Action(k, "F", m) for m in range(microbatches)] + [Action(k, "B", m) for m in reversed(range(microbatches))]
        for k in range(stages)
    ]
    return Schedule.of(StepGraph(stages, microbatches), workers, "GPipe")


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gpipe_bubble(stages, microbatches):
    """Huang et al., GPipe, 2019: (N - 1) / (M + N - 1)."""
    found = simulate(pipeline(stages, microbatches))
    assert found.makespan == 3 * (microbatches + stages - 1)
    assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_one_worker():
    schedule = Schedule.of(StepGraph(2, updates="step"), [lane("0F0 1F0 1I0 1W0 0W0 0U 1U")])
    found = simulate(schedule, Costs({"F": 1, "I": 2, "W": 3, "U": 0.5}))
    assert [(event.start, event.end) for event in found.events] == [
        (0, 1), (1, 2), (2, 4), (4, 7), (7, 10), (10, 10.5), (10.5, 11)]  # fmt: skip
    assert found.bubble == 0
    assert [str(event.cell) for event in found.critical_path] == ["0F0", "1F0", "1I0", "1W0", "0W0", "0U", "1U"]
    assert [event.version for event in found.events] == [0, 0, 0, None, None, None, None]
