"""Orders that cannot run, and updates that come too early."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import all_actions, lane, random_order, schedules
from sparsebp.core.errors import ScheduleError
from sparsebp.schedule import Action, Schedule, StepGraph, simulate, validate
from sparsebp.schedule.schedule import find_race


@given(schedules())
def test_random_valid_schedules_pass(schedule):
    validate(schedule)


def refused(graph: StepGraph, *workers) -> str:
    schedule = Schedule.of(graph, workers)
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    with pytest.raises(ScheduleError, match=r"deadlocked|overwritten|may be read"):
        simulate(schedule)
    return str(caught.value)


def test_order_within_a_lane():
    assert refused(StepGraph(2), lane("1F0 0F0 1B0 0W0")) == (
        "The schedule is deadlocked. Expected an order without a cycle. Got 1F0 (worker 0, main, 1st) waits for 0F0 "
        "(worker 0, main, 2nd) waits for 1F0 (worker 0, main, 1st). Reorder one of these lanes."
    )


def test_workers_that_wait_for_each_other():
    message = refused(StepGraph(2, 2), lane("0F0 0B0 0F1 0B1"), lane("1F0 1F1 1B0 1B1"))
    assert "0B0 (worker 0, main, 2nd) waits for 1B0 (worker 1, main, 3rd)" in message
    assert "1F1 (worker 1, main, 2nd) waits for 0F1 (worker 0, main, 3rd)" in message
    assert "1B1" not in message, "it waits too, but is not part of the cycle"


def test_streams_that_wait_for_each_other():
    graph = StepGraph(2, updates="step")
    message = refused(graph, {"main": lane("0F0 1F0 1U 1I0 0U"), "sub": lane("0W0 1W0")})
    assert "1U (worker 0, main, 3rd) waits for 1W0 (worker 0, sub, 2nd)" in message
    assert "0W0 (worker 0, sub, 1st) waits for 1I0 (worker 0, main, 4th)" in message


def test_an_overlap_that_needs_itself():
    graph = StepGraph(3)
    message = refused(graph, lane("(0F0;0B0)OVERLAP_F_B"), lane("1F0 2F0 2B0 1B0"))
    assert "(0F0;0B0)OVERLAP_F_B (worker 0, main, 1st) waits for 1B0 (worker 1, main, 4th)" in message


def test_weights_that_are_overwritten():
    message = refused(StepGraph(2, updates="step"), lane("0F0 1F0 1W0 1U 1I0 0W0 0U"))
    assert message == (
        "Weights are overwritten before they are read. Expected 1I0 before 1U: its forward had the old weights. "
        "Got 1U (worker 0, main, 4th) earlier than 1I0 (worker 0, main, 5th). Move the update behind "
        "it, or keep old versions: weights='stashed'."
    )


def test_weights_overwritten_through_other_workers():
    """The update is not in the lane of the backward, but before something that the backward waits for."""
    graph = StepGraph(3, updates="step")
    message = refused(graph, {"main": lane("0F0 1F0 2F0 2I0 2U 1I0 0W0 0U"), "sub": lane("1W0 1U 2W0")})
    assert "overwritten" in message
    assert "1U (worker 0, sub, 2nd) earlier than 1I0 (worker 0, main, 6th)" in message


def test_a_cycle_beside_an_early_update_is_a_deadlock():
    graph = StepGraph(2, updates="step")
    assert "deadlocked" in refused(graph, lane("0F0 1F0 1U 1W0 1I0 0W0 0U"))


def test_old_versions_may_be_kept_or_given_up():
    for weights in ("stashed", "latest"):
        validate(
            Schedule.of(StepGraph(2, 1, updates="microbatch", weights=weights), [lane("0F0 1F0 1W0 1U0 1I0 0W0 0U0")])
        )


ASYNCHRONOUS = StepGraph(2, 2, updates="microbatch", weights="latest")


def test_updates_beside_readers():
    message = refused(StepGraph(1, 2, updates="microbatch", weights="stashed"),
                      {"main": lane("0F0 0B0 0F1 0B1"), "sub": lane("0U0 0U1")})  # fmt: skip
    assert message == (
        "Weights are updated while they may be read. Expected one of the two to wait for the other. Got 0U0 (worker 0, "
        "sub, 1st) and 0F1 (worker 0, main, 3rd) at once. Put both into one lane."
    )


def test_updates_in_another_lane_that_the_readers_wait_for():
    """1W0 follows 0U0, 1U0 needs 1W0, and 0F1 follows 1U0."""
    sub = lane("0W0 0U0 1W0 0W1 0U1 1W1")
    validate(Schedule.of(ASYNCHRONOUS, [{"main": lane("0F0 1F0 1I0 1U0 0F1 1F1 1I1 1U1"), "sub": sub}]))
    message = refused(ASYNCHRONOUS, {"main": lane("0F0 1F0 1I0 0F1 1U0 1F1 1I1 1U1"), "sub": sub})
    assert "0U0 (worker 0, sub, 2nd) and 0F1 (worker 0, main, 4th)" in message


def test_stashed_weights_are_not_read_by_the_backward():
    streams = {
        "main": lane("0F0 1F0 1W0 1U0 0F1 1F1 1W1 1U1"),
        "sub": lane("1I0 0W0 1I1 0W1"),
        "third": lane("0U0 0U1"),
    }
    refused(ASYNCHRONOUS, streams)
    streams["main"] += streams.pop("third")
    assert "1U0 (worker 0, main, 4th) and 1I0 (worker 0, sub, 1st)" in refused(ASYNCHRONOUS, streams)
    validate(Schedule.of(StepGraph(2, 2, updates="microbatch", weights="stashed"), [streams]))


@given(
    stages=st.integers(1, 3), microbatches=st.integers(1, 3), weights=st.sampled_from(["stashed", "latest"]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_race_is_a_pair_of_which_neither_waits_for_the_other(stages, microbatches, weights, seed):
    graph, rng = StepGraph(stages, microbatches, updates="microbatch", weights=weights), random.Random(seed)
    streams = {"main": [], "sub": [], "third": []}
    order = random_order(graph, all_actions(graph), rng)
    for action in order:
        streams[rng.choice([*streams])].append(action)
    schedule = Schedule.of(graph, [{name: cells for name, cells in streams.items() if cells}])
    cells = schedule.cells
    behind: dict[int, set[int]] = {}  # cell -> all that wait for it
    for number in (cells.numbers[action] for action in reversed(order)):
        behind[number] = set().union(*({later} | behind[later] for later in cells.after(number)))
    races = [
        (update, reader)
        for update in (Action(stage, "U", m) for stage in range(stages) for m in range(microbatches))
        for reader in (Action(update.stage, kind, m) for kind in "FI" for m in range(microbatches))
        if reader in cells.numbers and (reader.kind == "F" or weights == "latest")
        if cells.numbers[reader] not in behind[cells.numbers[update]]
        if cells.numbers[update] not in behind[cells.numbers[reader]]
    ]
    found = find_race(schedule)
    assert found in races if races else found is None
