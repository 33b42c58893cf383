"""Actions, graphs and schedules: their properties and refusals."""

from __future__ import annotations

import pytest

from schedules import lane
from sparsebp.core.errors import FileFormatError, OptionError, ScheduleError
from sparsebp.schedule import Action, Lane, Overlap, Schedule, StepGraph, actions_of, parse, parts_of


@pytest.mark.parametrize("text", ["0F0", "12I3", "7W11", "3B2", "4S", "4S1", "0U", "0U5", "(0F1;7B0)OVERLAP_F_B"])
def test_parse_is_the_inverse_of_str(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0F-1", "(0F1)OVERLAP_F_B", "(0F1;7B0)", "0F0 1F0"])
def test_text_that_is_no_action(text):
    with pytest.raises((FileFormatError, OptionError)):
        parse(text)


def test_parts():
    overlap = parse("(0F1;7B0)OVERLAP_F_B")
    assert isinstance(overlap, Overlap)
    assert actions_of(overlap) == (Action(0, "F", 1), Action(7, "B", 0))
    assert parts_of(overlap.backward) == (Action(7, "I", 0), Action(7, "W", 0))


@pytest.mark.parametrize("arguments", [(-1, "F", 0), (0, "F", -1), (0, "X", 0), (0, "F")])
def test_action_refuses(arguments):
    with pytest.raises(OptionError):
        Action(*arguments)


def test_overlap_refuses():
    with pytest.raises(OptionError, match="forward and a backward"):
        Overlap(Action(0, "W", 0), Action(0, "I", 0))


@pytest.mark.parametrize("options", [
    {"stages": 0}, {"stages": 1, "microbatches": 0}, {"stages": 2, "unweighted": frozenset({2})},
    {"stages": 1, "updates": "never"}, {"stages": 1, "first": "W"}, {"stages": 1, "weights": "old"},
    {"stages": 1, "updates": "microbatch"}, {"stages": 1, "weights": "stashed"}, {"stages": 1, "first": "U"},
    {"stages": 1, "updates": "microbatch", "weights": "latest", "first": "I"},
])  # fmt: skip
def test_graph_refuses(options):
    with pytest.raises(OptionError):
        StepGraph(**options)


def test_allocation_and_places():
    schedule = Schedule.of(StepGraph(3), [lane("0F0 2F0 2B0 0B0"), {"main": lane("1F0 1I0"), "sub": lane("1W0")}])
    assert schedule.workers == 2
    assert schedule.allocation == (0, 1, 0)
    assert Action(2, "I", 0) in schedule and Action(2, "W", 0) in schedule
    assert schedule.places[Action(2, "W", 0)] == (0, 2)
    assert str(schedule.lanes[schedule.places[Action(1, "W", 0)][0]]) == "worker 1, sub"


@pytest.mark.parametrize(("workers", "problem"), [
    (["0F0 1F0 1I0 1W0"], "missing.*none of 0W0"),
    (["0F0 0F0 1F0 1I0 1W0 0W0"], "twice.*0F0"),
    (["0F0 1F0 1B0 1W0 0W0"], "twice.*1W0"),
    (["0F0 1F0 1I0 1W0 0W0 2F0"], "has not.*2F0"),
    (["0F0 1F0 1I0 1W0 0W0 0U"], "has not.*0U"),
    (["0F0 1F0 1I0 1W0 0W0 0F1"], "has not.*0F1"),
    (["0F0 1F0 1I0 1W0 0W0", ""], r"nothing to do.*\[1\]"),
    (["0F0 1F0 1I0 1W0", "0W0"], "several workers.*0W0 on worker 1"),
])  # fmt: skip
def test_incomplete_schedules_are_refused(workers, problem):
    with pytest.raises(ScheduleError, match=problem):
        Schedule.of(StepGraph(2), [lane(text) for text in workers])


def test_replicated_stages():
    """Every micro-batch is on one worker, and the weights where its actions are."""
    both = lane("0F0 1F0 1B0 0B0"), lane("0F1 1F1 1B1 0B1")
    schedule = Schedule.of(StepGraph(2, 2), both, replicated=[0, 1])
    assert [schedule.worker_of(1, m) for m in range(2)] == [0, 1] and schedule.workers_of(1) == (0, 1)
    assert schedule.allocation == (0, 0)
    with pytest.raises(ScheduleError, match=r"several workers.*stage 1 on worker 0.*1F1 on worker 1"):
        Schedule.of(StepGraph(2, 2), both, replicated=[0])
    with pytest.raises(ScheduleError, match=r"several workers.*stage 0 on worker 1.*0B?.?1 on worker 0"):
        Schedule.of(StepGraph(1, 2), [lane("0F0 0B0 0W1"), lane("0F1 0I1")], replicated=[0])
    with pytest.raises(ScheduleError, match=r"replicated stage has S or U.*0U"):
        Schedule.of(StepGraph(1, 2, updates="step"), [lane("0F0 0B0 0U"), lane("0F1 0B1")], replicated=[0])
    with pytest.raises(ScheduleError, match=r'begins with the forwards.*first="F"'):
        Schedule.of(StepGraph(1, 2, first="I"), [lane("0B0 0F0"), lane("0B1 0F1")], replicated=[0])


@pytest.mark.parametrize("cell", ["0F0", None, ["0F0"], (0, "F", 0)])
def test_cells_are_actions(cell):
    with pytest.raises(OptionError, match="A cell is not an action"):
        Schedule.of(StepGraph(1), [[cell]])


@pytest.mark.parametrize("workers", [5, [5], ["0F0 0W0"], "0F0 0W0", [{"main": None}]])
def test_workers_are_lists_of_cells(workers):
    with pytest.raises(OptionError, match="is not a sequence"):
        Schedule.of(StepGraph(1), workers)


def test_a_stream_is_there_once():
    lanes = (Lane(0, "main", tuple(lane("0F0"))), Lane(0, "main", tuple(lane("0W0"))))
    with pytest.raises(ScheduleError, match="twice"):
        Schedule(StepGraph(1), lanes)


def test_no_lanes():
    with pytest.raises(ScheduleError):
        Schedule(StepGraph(1), ())


@pytest.mark.parametrize("lanes", [(5,), (None,), ("0F0",), ([Action(0, "F", 0)],), (Lane(0, "main", 5),), 5])
def test_entries_that_are_no_lanes_are_refused(lanes):
    with pytest.raises(OptionError):
        Schedule(StepGraph(1, 1), lanes)
