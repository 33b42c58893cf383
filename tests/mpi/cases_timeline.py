"""Clocks of ranks, and the timeline of a step."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from mpi import on_ranks
from sparsebp.comm.transport import Transport
from sparsebp.runtime.timeline import clock_offset, measured
from sparsebp.schedule import Action
from sparsebp.schedule.builders import build


@on_ranks(1, 2, 3)
def clocks_of_one_machine_agree(transport: Transport) -> None:
    """Linux has one such clock for all processes: what is found must be as uncertain as it says, at most."""
    offset, uncertainty = clock_offset(transport)
    assert abs(offset) <= uncertainty
    assert uncertainty == 0 if transport.rank == 0 else 0 < uncertainty < 10


@on_ranks(1, 2, 3)
def a_timeline_has_the_actions_of_all_ranks(transport: Transport) -> None:
    size = transport.size
    schedule = build("1f1b", workers=size, stages=2 * size, microbatches=4)
    own = [action for lane in schedule.lanes if lane.worker == transport.rank for action in lane.cells]
    begin = time.perf_counter()
    times = {action: (begin + number, begin + number + 0.5) for number, action in enumerate(own)}
    timeline = measured(transport, schedule, times)
    assert timeline is not None
    assert {event.cell for event in timeline.events} == {cell for lane in schedule.lanes for cell in lane.cells}
    assert timeline.events[0].start == 0
    assert all(one.start <= other.start for one, other in pairwise(timeline.events))
    for event in timeline.events:
        assert event.end - event.start == pytest.approx(0.5)
        assert event.cell in schedule.lanes[event.lane].cells
    longest = max(len(lane.cells) for lane in schedule.lanes)
    assert timeline.makespan == pytest.approx(longest - 0.5, abs=5)  # ranks did not begin at once
    simulated = timeline.simulated()
    assert simulated.costs.duration(Action(0, "F", 0)) == pytest.approx(0.5)
    assert len(simulated.events) == len(timeline.events)


@on_ranks(1, 2)
def no_step_has_no_timeline(transport: Transport) -> None:
    schedule = build("gpipe", workers=transport.size, stages=2, microbatches=2)
    assert measured(transport, schedule, {}) is None
