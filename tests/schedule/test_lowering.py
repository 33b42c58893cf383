"""Programs of ranks: every action's inputs have arrived, and no order of the ranks deadlocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import fitting, lane, schedules, worker_of
from sparsebp.core.errors import ScheduleError
from sparsebp.schedule import Action, Schedule, StepGraph, actions_of, parts_of, simulate
from sparsebp.schedule.builders import BUILDERS, build, conventional, fast_forward, gpipe, place_updates, synchronise
from sparsebp.schedule.lowering import Await, Compute, Post, Reduce, Reduced, Send, Sent, check_rendezvous, lower


def lowered(schedule: Schedule, one_stream: bool = False):
    """Lower a schedule, and check everything that a rank relies on."""
    programs = lower(schedule, one_stream=one_stream)
    check_rendezvous(programs)
    check_rendezvous(programs, one_stream=one_stream)
    assert [program.rank for program in programs] == list(range(schedule.workers))
    wanted = {
        (need, worker_of(schedule, need), worker_of(schedule, action))
        for action in schedule.places for need in schedule.graph.inputs(action)
        if need in schedule and worker_of(schedule, need) != worker_of(schedule, action)
    }  # fmt: skip
    sent = [tuple(one.message)[:3] for program in programs for one in program.instructions if isinstance(one, Send)]
    assert sorted(sent) == sorted(wanted), "everything that another worker reads is sent, once"
    for program in programs:
        _check_rank(schedule, program)
    return programs


def _check_rank(schedule: Schedule, program) -> None:
    graph, instructions = schedule.graph, program.instructions
    lanes = [[*lane.cells] for lane in schedule.lanes if lane.worker == program.rank]
    there: set[Action] = set()  # results on this rank
    sums: set[Action] = set()
    ended = Counter()
    tags: dict[tuple[int, int], list[int]] = {}
    for one in instructions:
        if isinstance(one, Await):
            there.add(one.message.source)
        elif isinstance(one, (Compute, Reduce)):
            cell = one.cell if isinstance(one, Compute) else one.action
            own = next(cells for cells in lanes if cells and cells[0] == cell)  # every lane keeps its order
            own.pop(0)
            for part in parts_of(cell):
                needs = [need for need in graph.predecessors(part) if need in schedule and need not in parts_of(cell)]
                assert there.union(parts_of(cell)).issuperset(needs)
                if isinstance(one, Compute):
                    assert sums.issuperset(need for need in needs if need.kind == "S")
                    if graph.first == "U" and part.kind == "U":
                        assert sums.issuperset(need for need in graph.carried(part) if need.kind == "S")
            there.update(parts_of(cell))
        elif isinstance(one, Reduced):
            sums.add(one.action)
        elif isinstance(one, Send):
            assert one.message.sender == program.rank and one.message.source in there
        if isinstance(one, (Post, Send)):
            pair = one.message.sender, one.message.receiver
            tags.setdefault(pair, []).append(one.message.tag)
        if isinstance(one, (Sent, Await)):
            ended[one.message] += 1
    assert not any(lanes)
    assert all(found == list(range(len(found))) for found in tags.values()), "both ends count alike"
    assert set(ended.values()) <= {1}
    assert {one.message for one in instructions if isinstance(one, (Post, Send))} == set(ended)


@given(schedules(), st.booleans())
def test_random_schedules(schedule, one_stream):
    lowered(schedule, one_stream)


@pytest.mark.parametrize("one_stream", [False, True])
@pytest.mark.parametrize("fusion", [None, "none", "forward", "backward"])
@pytest.mark.parametrize("name", BUILDERS)
def test_builders(name, fusion, one_stream):
    if fusion and name in ("pipedream", "dualpipe-2018", "dualpipe", "forward-only"):
        fusion = None
    sizes = [(1, 1, 1), (2, 2, 1), (3, 7, 5), (4, 8, 8)]
    for workers, stages, microbatches in sizes:
        options = {"chunks": 1} if stages < 2 * workers else {}
        shape = fitting(name, workers, stages, microbatches)
        schedule = build(name, strict=False, **shape, fusion=fusion, **options)
        lowered(schedule, one_stream)


def synchronised(stages: int, priority: str = "first-stage") -> Schedule:
    """Return the conventional order of a replica, with sums and no updates."""
    cells = [cell for cell in conventional(stages=stages).lanes[0].cells if cell.kind != "U"]
    return synchronise(Schedule.of(StepGraph(stages), [cells]), priority=priority)


def test_one_worker_has_no_messages():
    (program,) = lowered(place_updates(conventional(stages=2), "none"))
    assert str(program) == "rank 0\n  0F0\n  1F0\n  1W0\n  1I0\n  0W0\n  0U\n  1U"


def test_two_workers():
    """Worker 1 awaits what it reads right before, and its gradients are never answered."""
    one, other = lowered(gpipe(workers=2, stages=2, microbatches=2))
    assert str(one).split("\n  ") == [
        "rank 0", "0F0", "send 0F0 to 1", "0F1", "send 0F1 to 1",
        "post 1I0 from 1", "post 1I1 from 1", "await 1I0 from 1", "sent 0F0 to 1", "sent 0F1 to 1", "0B0",
        "await 1I1 from 1", "0B1",
    ]  # fmt: skip
    assert str(other).split("\n  ") == [
        "rank 1", "post 0F0 from 0", "post 0F1 from 0", "await 0F0 from 0", "1F0", "await 0F1 from 0", "1F1",
        "1B0", "send 1I0 to 0", "1B1", "send 1I1 to 0", "sent 1I0 to 0", "sent 1I1 to 0",
    ]  # fmt: skip


def test_what_i_and_w_read_is_sent_once():
    """Zero-bubble: the gradient at a stage's output is read by its I, and much later by its W."""
    schedule = Schedule.of(StepGraph(2, 2), [lane("0F0 0F1 0I0 0I1 0W0 0W1"), lane("1F0 1F1 1I0 1I1 1W0 1W1")])
    first = lowered(schedule)[0].instructions
    names = [str(one) for one in first]
    assert names.count("await 1I0 from 1") == 1 == names.count("post 1I0 from 1")
    assert names.index("await 1I0 from 1") + 1 <= names.index("0I0")


def test_a_receive_is_not_posted_before_a_send_that_comes_first_on_one_stream():
    """On one stream of NCCL a rank that receives first waits for ever for one that does so too."""
    schedule = fast_forward(workers=2, stages=2, microbatches=3)
    free, streamed = ([str(one) for one in lower(schedule, one_stream=flag)[0].instructions] for flag in (False, True))
    assert free.index("post 1I0 from 1") < free.index("send 0F2 to 1")
    assert streamed.index("post 1I0 from 1") > streamed.index("send 0F2 to 1")
    with pytest.raises(ScheduleError, match="deadlocked"):
        check_rendezvous(lower(schedule), one_stream=True)


def test_sums_begin_as_soon_as_their_gradients_are_there():
    schedule = place_updates(synchronised(3, "first-ready"), "none")
    (program,) = lowered(schedule)
    assert str(program).split("\n  ")[1:] == [
        "0F0", "1F0", "2F0", "2W0", "reduce 2S", "2I0", "1W0", "reduce 1S", "1I0", "0W0", "reduce 0S",
        "reduced 0S", "0U", "reduced 1S", "1U", "reduced 2S", "2U",
    ]  # fmt: skip


def test_sums_are_waited_for_by_the_next_forward():
    """Reverse first-k without updates: the forward of a stage reads its sums; with none that reads them, at the end."""
    (program,) = lowered(build("reverse-first-k", stages=3, k=2))
    names = [str(one) for one in program.instructions]
    assert [names.index(f"reduced {stage}S") + 1 == names.index(f"{stage}F0") for stage in range(3)] == [True] * 3
    (program,) = lowered(synchronised(2))
    assert [str(one) for one in program.instructions[-2:]] == ["reduced 1S", "reduced 0S"]


def test_a_step_that_begins_with_updates_waits_for_the_sums_before():
    (program,) = lowered(place_updates(synchronised(2), "forward"))
    names = [str(one) for one in program.instructions]
    assert names[:3] == ["reduced 0S", "0U", "0F0"] and names[-1] == "reduce 0S"


def test_streams_of_a_worker_are_interleaved():
    (program,) = lowered(build("ooo-list", stages=4, fusion="backward"))
    done = [action for one in program.instructions for action in actions_of(one.cell)]
    assert done.index(Action(3, "U")) < done.index(Action(1, "I", 0)), "not one stream after the other"


def test_a_schedule_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="deadlocked"):
        lower(Schedule.of(StepGraph(2, 2), [lane("0F0 0B0 0F1 0B1"), lane("1F0 1F1 1B0 1B1")]))


@pytest.mark.parametrize(
    ("name", "most"),
    [("1f1b", 4), ("zb-h1", 4), ("zb-h2", 7), ("zb-v", 8), ("dualpipe-v", 9), ("dualpipe", 6), ("pipedream", 4)],
)
def test_arrays_do_not_pile_up(name, most):
    """No rank holds more messages of a kind than the pipeline is deep, whatever the number of micro-batches."""
    for program in lower(build(name, **fitting(name, 4, 4, 30))):
        held, peak = Counter(), Counter()
        for one in program.instructions:
            if isinstance(one, (Post, Send)):
                key = type(one), one.message.source.kind
                held[key] += 1
                peak[key] = max(peak[key], held[key])
            elif isinstance(one, (Await, Sent)):
                held[Post if isinstance(one, Await) else Send, one.message.source.kind] -= 1
        assert max(peak.values()) <= most
        assert all(count <= 3 for (kind, _), count in peak.items() if kind is Post)


@given(schedules())
def test_every_action_reads_the_version_that_the_simulation_says(schedule):
    """One order of a worker's streams, and any times: the lanes alone settle which weights are read."""
    found = simulate(schedule)
    updates: Counter[int] = Counter()
    for one in (one for program in lower(schedule) for one in program.instructions if isinstance(one, Compute)):
        for part in parts_of(one.cell):
            reads = part.kind == "F" or (part.kind == "I" and schedule.graph.weights != "stashed")
            if reads and schedule.graph.weighted(part.stage):
                assert updates[part.stage] == found.version(part)
        updates.update(part.stage for part in parts_of(one.cell) if part.kind == "U")
