"""List scheduling on two streams: as short as a step can be, and no longer than without reordering."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedules
from sparsebp.schedule import Action, Costs, simulate, validate
from sparsebp.schedule.builders import conventional, two_stream_list


@pytest.mark.parametrize("stages", [*range(1, 9), 40])
def test_equal_actions_take_two_units_a_stage(stages):
    """No order takes less: I of all stages but the first, W of the first, F of all need each other."""
    found = simulate(two_stream_list(stages=stages), steps=5)
    assert found.makespan == 5 * 2 * stages


def test_the_streams_meet_in_the_middle():
    """W takes as long as all else: the second stream takes those of the last stages, the main one of the first."""
    order = two_stream_list(stages=6, costs=Costs({"F": 1, "I": 1, "W": 3, "U": 0}))
    sub = [action.stage for action in order.lanes[1].cells if action.kind == "W"]
    main = [action.stage for action in order.lanes[0].cells if action.kind == "W"]
    assert sub == sorted(sub, reverse=True) and main == sorted(main) and max(main) < min(sub)
    assert simulate(order, Costs({"F": 1, "I": 1, "W": 3, "U": 0})).makespan < 6 * 5 - 1


def test_nothing_to_weigh_is_one_stream():
    order = two_stream_list(stages=3, unweighted=[0, 1, 2], input_gradient=True)
    assert [lane.stream for lane in order.lanes] == ["main"] and Action(0, "I", 0) in order


@given(st.data(), st.integers(1, 12))
def test_all_of_it_is_work(data, stages):
    """Neither stream slows the other down: at most the serial time, and valid whatever the costs."""
    unweighted = data.draw(st.sets(st.integers(0, stages - 1)))
    costs = Costs(data.draw(schedules.costs(stages)).durations)
    order = two_stream_list(stages=stages, costs=costs, unweighted=unweighted)
    validate(order)
    serial = simulate(conventional(stages=stages, unweighted=unweighted, fusion="backward"), costs).makespan
    assert simulate(order, costs).makespan <= serial
