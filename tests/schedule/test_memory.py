"""The memory account, on schedules that can be counted by hand."""

from __future__ import annotations

import pytest

from schedules import lane
from sparsebp.core.errors import OptionError
from sparsebp.schedule import Costs, Schedule, StageBytes, StepGraph, parse, simulate

BYTES = (StageBytes(output=10, saved=100, weights=1000), StageBytes(output=20, saved=200, weights=2000))


def curve(schedule: Schedule, worker: int = 0, steps: int = 1, **costs):
    costs = {"durations": {"F": 1, "I": 1, "W": 1, "U": 1}, "stages": BYTES[: schedule.graph.stages], **costs}
    return simulate(schedule, Costs(**costs), steps=steps).memory[worker]


def at(curve, use: str) -> list[float]:
    """The amounts at 0, 1, 2, …"""
    values = dict(zip(curve.times, getattr(curve, use), strict=True))
    amounts = [values[0]]
    for time in range(1, int(curve.times[-1]) + 1):
        amounts.append(values.get(time, amounts[-1]))
    return amounts


def test_conventional_order():
    found = curve(Schedule.of(StepGraph(2, updates="step"), [lane("0F0 1F0 1I0 1W0 1U 0W0 0U")]))
    assert at(found, "saved") == [100, 300, 300, 300, 100, 100, 0, 0]
    assert at(found, "output_gradients") == [0, 0, 30, 30, 10, 10, 0, 0]
    assert at(found, "weight_gradients") == [0, 0, 0, 2000, 2000, 1000, 1000, 0]
    assert at(found, "weights") == [3000] * 8
    assert found.peak == 3000 + 300 + 30 + 2000
    assert found.bytes[-1] == 3000


def test_recomputed_stages_keep_their_input_only():
    schedule = Schedule.of(StepGraph(2), [lane("0F0 1F0 1I0 1W0 0W0")], recomputed=[0, 1])
    assert at(curve(schedule), "saved") == [0, 10, 200, 200, 200, 100, 100, 0], "I, and the first W, take 2"


def test_stages_without_weights():
    schedule = Schedule.of(StepGraph(2, unweighted=frozenset({0})), [lane("0F0 1F0 1I0 1W0")])
    found = curve(schedule)
    assert at(found, "saved") == [0, 200, 200, 200, 0], "nobody asks for the gradients of stage 0"
    assert at(found, "weights") == [2000] * 5
    assert at(found, "output_gradients") == [0, 0, 20, 20, 0]


@pytest.mark.parametrize(("first", "text", "saved", "gradients"), [
    ("I", "0W0 0U 0F0", [100, 0, 100, 100, 0, 100, 100], [1000, 1000, 0, 1000, 1000, 0, 0]),
    ("U", "0U 0F0 0W0", [0, 100, 100, 0, 100, 100, 0], [1000, 0, 1000, 1000, 0, 1000, 1000]),
    ("F", "0F0 0W0 0U", [100, 100, 0, 100, 100, 0, 0], [0, 1000, 1000, 0, 1000, 1000, 0]),
])  # fmt: skip
def test_what_the_step_before_left(first, text, saved, gradients):
    schedule = Schedule.of(StepGraph(1, updates="step", first=first), [lane(text)])
    found = curve(schedule, steps=2)
    assert at(found, "saved") == saved[: len(at(found, "saved"))]
    assert at(found, "weight_gradients") == gradients[: len(at(found, "weight_gradients"))]
    assert found.saved[-1] == saved[-1] and found.weight_gradients[-1] == gradients[-1]


def test_gradients_without_updates_are_added_to_in_the_next_step():
    assert at(curve(Schedule.of(StepGraph(1), [lane("0F0 0W0")]), steps=3), "weight_gradients")[-1] == 1000


@pytest.mark.parametrize("weights", ["stashed", "latest"])
def test_stashed_versions(weights):
    """Two versions from the first update (2) until the backward that reads the older one is over (4)."""
    graph = StepGraph(1, 2, updates="microbatch", weights=weights)
    schedule = Schedule.of(graph, [lane("0F0 0F1 0B0 0U0 0B1 0U1")])
    found = curve(schedule, durations={"F": 0.5, "B": 1, "U": 0})
    assert at(found, "weights") == ([1000, 1000, 2000, 1000] if weights == "stashed" else [1000] * 4)
    assert max(found.saved) == 200


def test_a_version_is_freed_when_its_last_reader_ends_or_it_is_replaced():
    """Stage 0 has no I: only forwards read its weights, so that an update replaces them."""
    graph = StepGraph(2, 3, updates="microbatch", weights="stashed")
    text = "0F0 1F0 0F1 1F1 0F2 1F2 1I0 1W0 1U0 0W0 0U0 1I1 1W1 1U1 0W1 0U1 1I2 1W2 1U2 0W2 0U2"
    found = simulate(Schedule.of(graph, [lane(text)]), Costs(stages=BYTES))
    weights = dict(zip(found.memory[0].times, found.memory[0].weights, strict=True))
    assert max(weights.values()) == 1000 + 2 * 2000
    assert weights[found.end(parse("1U2"))] == 3000
    assert found.memory[0].weights[-1] == 3000


def test_inputs_wait_for_their_turn():
    """Worker 1 has 0F0 at 1 and 0F1 at 2, and reads them at 1 and 4; 1F1 has arrived at 5, before W has ended."""
    schedule = Schedule.of(StepGraph(2, 2), [lane("0F0 0F1 0W0 0W1"), lane("1F0 1I0 1W0 1F1 1I1 1W1")])
    found = curve(schedule, 1)
    assert at(found, "inputs") == [0, 0, 10, 10, 0, 0, 0, 0]
    one = curve(Schedule.of(StepGraph(2, 2), [lane("0F0 0F1 1F1 1F0 1I0 1W0 1I1 1W1 0W0 0W1")]))
    assert at(one, "inputs")[:5] == [0, 10, 10, 0, 0]


def test_bytes_of_weights_gradients_and_optimizer_differ_and_i_frees_what_w_does_not_read():
    """Mixed precision with Adam; of 100 saved W reads 30."""
    size = StageBytes(output=0, saved=100, weights=2, gradients=4, optimizer=12, saved_for_weights=30)
    found = curve(Schedule.of(StepGraph(1), [lane("0F0 0I0 0W0")]), stages=(size,))
    assert at(found, "saved") == [100, 100, 30, 0]
    assert at(found, "weights") == [2] * 4 and at(found, "optimizer") == [12] * 4
    assert at(found, "weight_gradients") == [0, 0, 4, 4]
    swapped = curve(Schedule.of(StepGraph(1), [lane("0F0 0W0 0I0")]), stages=(size,))
    assert at(swapped, "saved") == [100, 100, 100, 0], "I reads everything"
    with pytest.raises(OptionError, match="more than a forward saves"):
        StageBytes(saved=1, saved_for_weights=2)
