"""The simulator, on schedules whose times can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedules import lane
from sparsebp.core.errors import OptionError
from sparsebp.schedule import (
    Action,
    Costs,
    Durations,
    Link,
    Network,
    Schedule,
    StageBytes,
    StepGraph,
    depth,
    parse,
    simulate,
)
from sparsebp.schedule.builders import conventional
from sparsebp.schedule.costs import Slowdowns


def times(found, text: str) -> list[tuple[float, float]]:
    return [(found.start(parse(name)), found.end(parse(name))) for name in text.split()]


def pipeline(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    workers = [
        [Action(k, "F", m) for m in range(microbatches)] + [Action(k, "B", m) for m in reversed(range(microbatches))]
        for k in range(stages)
    ]
    return Schedule.of(StepGraph(stages, microbatches), workers, "GPipe")


def test_one_worker():
    schedule = Schedule.of(StepGraph(2, updates="step"), [lane("0F0 1F0 1I0 1W0 0W0 0U 1U")])
    found = simulate(schedule, Costs({"F": 1, "I": 2, "W": 3, "U": 0.5}))
    assert [(event.start, event.end) for event in found.events] == [
        (0, 1), (1, 2), (2, 4), (4, 7), (7, 10), (10, 10.5), (10.5, 11)]  # fmt: skip
    assert found.bubble == 0
    assert [str(event.cell) for event in found.critical_path] == ["0F0", "1F0", "1I0", "1W0", "0W0", "0U", "1U"]
    assert [event.versions[0] for event in found.events] == [0, 0, 0, None, None, None, None]


def test_durations_by_action_kind_and_function():
    schedule = Schedule.of(StepGraph(2), [lane("0F0 1F0 1B0 0W0")])
    by_action = Costs({"F": 1, "I": 2, "W": 3, parse("1F0"): 5})
    assert simulate(schedule, by_action).makespan == 1 + 5 + 5 + 3
    assert simulate(schedule, Costs(lambda action: action.stage + 1)).makespan == 1 + 2 + 2 + 1
    assert simulate(schedule, Costs({"F": 1, "W": 3, "B": 7})).makespan == 1 + 1 + 7 + 3


def test_streams_share_a_worker():
    """From 2 on I and W run at two thirds of their speed; I ends after 3, W has 2 left and does it alone."""
    schedule = Schedule.of(StepGraph(2), [{"main": lane("0F0 1F0 1I0"), "sub": lane("1W0 0W0")}])
    costs = {"F": 1, "I": 2, "W": 4}
    found = simulate(schedule, Costs(costs, slowdown=1.5))
    assert times(found, "1I0 1W0 0W0") == [(2, 5), (2, 7), (7, 11)]
    assert times(simulate(schedule, Costs(costs)), "1I0 1W0 0W0") == [(2, 4), (2, 6), (6, 10)]
    assert simulate(schedule, Costs(costs, slowdown=2)).makespan == 1 + 1 + 2 + 4 + 4


def test_streams_of_a_worker_may_be_slowed_down_differently():
    """From 2 on I runs at half of its speed, W at two thirds: I ends after 4, W has 4/3 left."""
    schedule = Schedule.of(StepGraph(2), [{"main": lane("0F0 1F0 1I0"), "sub": lane("1W0 0W0")}])
    slowdowns = {"I": 2, "W": 1.5}
    costs = Costs({"F": 1, "I": 2, "W": 4}, slowdown=lambda action: slowdowns.get(action.kind, 1))
    found = simulate(schedule, costs)
    assert times(found, "1I0 1W0")[0] == (2, 6)
    assert found.end(parse("1W0")) == pytest.approx(6 + 4 / 3)
    overlap = Schedule.of(StepGraph(1, 2), [lane("0F0 (0F1;0B0)OVERLAP_F_B 0B1")])
    durations = {"F": 0, "B": 0, parse("0F1"): 2, parse("0B0"): 3}
    costs = Costs(durations, slowdown=lambda action: 2 if action.kind == "B" else 1.5)
    assert simulate(overlap, costs).makespan == pytest.approx(3 + 1.5)  # F takes 3; B has done 1.5 of 3 by then


def test_three_streams_share_a_worker():
    schedule = Schedule.of(StepGraph(1, 3), [{str(m): lane(f"0F{m} 0W{m}") for m in range(3)}])
    assert simulate(schedule, Costs({"F": 1, "W": 1}, slowdown=2)).makespan == 6
    assert simulate(schedule, Costs({"F": 1, "W": 1}, slowdown=1.5)).makespan == 4


def test_the_network_slows_no_stream_down():
    schedule = Schedule.of(
        StepGraph(2, synchronised=True), [{"main": lane("0F0 1F0 1W0 1I0 0W0"), "link": lane("1S 0S")}]
    )
    found = simulate(schedule, Costs({"F": 1, "I": 1, "W": 1, "S": 5}, slowdown=2))
    assert times(found, "1I0 0W0 1S 0S") == [(3, 4), (4, 5), (3, 8), (8, 13)]
    assert found.bubble == pytest.approx(8 / 13)


@pytest.mark.parametrize(("forward", "backward", "slowdown", "expected"), [
    (2, 3, 1, 3), (3, 2, 1, 3), (2, 3, 2, 5), (2, 3, 1.5, 4), (0, 3, 1.5, 3),
])  # fmt: skip
def test_overlapped_cells(forward, backward, slowdown, expected):
    schedule = Schedule.of(StepGraph(1, 2), [lane("0F0 (0F1;0B0)OVERLAP_F_B 0B1")])
    durations = {"F": 0, "B": 0, parse("0F1"): forward, parse("0B0"): backward}
    assert simulate(schedule, Costs(durations, slowdown=slowdown)).makespan == expected


def test_an_overlap_at_the_loss_runs_one_after_the_other():
    schedule = Schedule.of(StepGraph(2), [lane("0F0 0B0"), lane("(1F0;1B0)OVERLAP_F_B")])
    assert simulate(schedule, Costs({"F": 1, "B": 2}, slowdown=1.5)).makespan == 1 + 3 + 2


def test_transfers_queue_for_their_link():
    """Four bytes at two a unit: the second output waits for the first."""
    schedule = Schedule.of(StepGraph(2, 2), [lane("0F0 0F1 0W0 0W1"), lane("1F0 1F1 1I0 1I1 1W0 1W1")])
    found = simulate(schedule, Costs(stages=(StageBytes(output=4), StageBytes()), link=Link(0.5, 2)))
    assert times(found, "0F0 0F1 1F0 1F1") == [(0, 1), (1, 2), (3.5, 4.5), (5.5, 6.5)]
    assert [(str(sent.source), sent.sender, sent.receiver, sent.start, sent.end) for sent in found.transfers] == [
        ("0F0", 0, 1, 1, 3.5), ("0F1", 0, 1, 3, 5.5), ("1I0", 1, 0, 7.5, 10), ("1I1", 1, 0, 9.5, 12)]  # fmt: skip
    assert [str(event.cell) for event in found.critical_path] == ["0F0", "1F1", "1I0", "0W1"], (
        "the second transfers start when the first ones leave the link"
    )


def test_both_readers_of_a_gradient_get_one_transfer():
    schedule = Schedule.of(StepGraph(2), [{"main": lane("0F0 0I0"), "sub": lane("0W0")}, lane("1F0 1B0")])
    found = simulate(schedule, Costs(link=Link(1)))
    assert [str(sent.source) for sent in found.transfers] == ["0F0", "1I0"]
    assert times(found, "0I0 0W0") == [(6, 7), (6, 7)]


def test_recomputation_is_paid_once_by_the_first_gradient():
    graph = StepGraph(2)
    costs = Costs({"F": 1, "I": 2, "W": 3})
    one = Schedule.of(graph, [lane("0F0 1F0 1W0 1I0 0W0")], recomputed=[1])
    assert times(simulate(one, costs), "1W0 1I0 0W0") == [(2, 6), (6, 8), (8, 11)]
    two = Schedule.of(graph, [{"main": lane("0F0 1F0 1I0"), "sub": lane("1W0 0W0")}], recomputed=[0, 1])
    assert times(simulate(two, costs), "1I0 1W0 0W0") == [(2, 5), (3, 6), (6, 10)]


@pytest.mark.parametrize(("first", "streams", "starts"), [
    ("F", {"main": "0F0 0B0", "sub": "0U"}, [0, 8]),  # the second forward waits for the update: 1 + 2 + 5
    ("I", {"main": "0W0 0F0", "sub": "0U"}, [6, 13]),
    ("U", {"main": "0F0 0W0", "sub": "0U"}, [5, 12]),
])  # fmt: skip
def test_steps_wait_for_the_weights_of_the_step_before(first, streams, starts):
    schedule = Schedule.of(
        StepGraph(1, updates="step", first=first), [{name: lane(text) for name, text in streams.items()}]
    )
    found = simulate(schedule, Costs({"F": 1, "I": 1, "W": 1, "U": 5}), steps=2)
    assert [found.start(parse("0F0"), step) for step in range(2)] == starts
    assert [found.version(parse("0F0"), step) for step in range(2)] == ([0, 1] if first == "F" else [1, 2])


@pytest.mark.parametrize("first", ["F", "I"])
def test_steps_without_updates_wait_for_the_gradients(first):
    streams = {"F": {"main": "0F0 1F0 1I0", "sub": "1W0 0W0"}, "I": {"main": "1I0 0F0 1F0", "sub": "1W0 0W0"}}[first]
    schedule = Schedule.of(StepGraph(2, first=first), [{name: lane(text) for name, text in streams.items()}])
    found = simulate(schedule, Costs({"F": 1, "I": 1, "W": 3}), steps=3)
    forward = [found.start(parse("0F0"), step) for step in range(3)]
    assert forward == ([0, 8, 16] if first == "F" else [6, 14, 22])


def test_steps_overlap_where_they_may():
    schedule = Schedule.of(StepGraph(2), [lane("0F0 0W0"), lane("1F0 1I0 1W0")])
    found = simulate(schedule, Costs({"F": 1, "I": 1, "W": 1, parse("1W0"): 9}), steps=2)
    assert times(found, "0F0 1F0 1I0 0W0 1W0") == [(0, 1), (1, 2), (2, 3), (3, 4), (3, 12)]
    assert [found.start(parse(name), 1) for name in ("0F0", "1F0", "1I0", "0W0", "1W0")] == [4, 12, 13, 14, 14]
    assert found.makespan == 23


def test_versions_go_on_over_steps():
    graph = StepGraph(2, 2, updates="microbatch", weights="stashed")
    schedule = Schedule.of(graph, [lane("0F0 0F1 0B0 0U0 0B1 0U1"), lane("1F0 1B0 1U0 1F1 1B1 1U1")])
    found = simulate(schedule, steps=2)
    assert len(found.events) == 2 * len(simulate(schedule).events)
    assert [found.version(parse(name), step) for step in (0, 1) for name in ("0F0", "0B0", "0F1", "0B1")] == [
        0, 0, 0, 0, 2, 2, 2, 2]  # fmt: skip
    assert [found.staleness(parse(name), 1) for name in ("0F0", "0F1", "1F1")] == [0, 1, 0]


def test_staleness_and_version_of_the_latest_weights():
    graph = StepGraph(2, 2, updates="microbatch", weights="latest")
    schedule = Schedule.of(graph, [lane("0F0 0F1 1F0 1F1 1B0 1U0 0B0 0U0 1B1 1U1 0B1 0U1")])
    found = simulate(schedule)
    assert [found.version(parse(name)) for name in ("1F1", "1B1", "0F1", "0B1")] == [0, 1, 0, 1]
    assert [found.staleness(parse(name)) for name in ("1F0", "1B0", "1F1", "1B1")] == [0, 0, 1, 0]
    assert [found.version_difference(parse(name)) for name in ("1F0", "1B0", "0F1", "0B1")] == [1, 1, 1, 0]


def test_versions_where_nothing_is_read():
    schedule = Schedule.of(StepGraph(2, unweighted=frozenset({1})), [lane("0F0 1F0 1I0 0W0")])
    found = simulate(schedule)
    assert [event.versions[0] for event in found.events] == [0, None, None, None]
    for name in ("1F0", "0W0"):
        with pytest.raises(OptionError, match="no weights"):
            found.version(parse(name))


def test_version_difference_of_a_round_trip_in_the_next_step():
    schedule = Schedule.of(StepGraph(1, updates="step", first="I"), [lane("0W0 0U 0F0")])
    assert simulate(schedule, steps=2).version_difference(parse("0F0")) == 0
    with pytest.raises(OptionError, match="step 1"):
        simulate(schedule).version_difference(parse("0F0"))


def test_depth():
    assert depth(StepGraph(1)) == 2
    assert depth(StepGraph(4, updates="step", synchronised=True)) == 4 + 3 + 1 + 1 + 1
    assert depth(StepGraph(4, 3), Costs({"F": 1, "I": 2, "W": 5})) == 4 + 6 + 5
    assert depth(StepGraph(3, updates="step", first="U")) == 1 + 3 + 2 + 1
    assert depth(StepGraph(3, updates="step", first="I")) == 2 + 1 + 1 + 3


@pytest.mark.parametrize("make", [
    lambda: Link(-1), lambda: Link(bandwidth=0), lambda: Link(bandwidth=float("nan")), lambda: Link(float("inf")),
    lambda: StageBytes(output=-1), lambda: StageBytes(weights=float("nan")), lambda: StageBytes(saved="much"),
    lambda: Costs(1), lambda: Costs(slowdown=0.5), lambda: Costs({"F": -1}), lambda: Costs({"F": float("nan"), "B": 1}),
    lambda: Costs({"F": "long", "B": 1}), lambda: Costs({"F": 1, Action(0, "I", 0): -1, "W": 1}),
    lambda: Costs(slowdown=float("nan")), lambda: Costs(slowdown=float("inf")),
    lambda: Costs({"F": 1, "I": 1, "W": 1, "2W": 3}), lambda: Costs({"X": 1}),
])  # fmt: skip
def test_costs_that_cannot_be(make):
    with pytest.raises(OptionError):
        make()


@pytest.mark.parametrize(("costs", "problem"), [
    (Costs({"F": 1}), "no duration of 0I0"), (Costs(lambda action: None), "no duration of 0F0"),
    (Costs(lambda action: float("inf")), "duration of 0F0"), (Costs(lambda action: -1), "duration of 0F0"),
    (Costs(stages=(StageBytes(),)), "StageBytes of 2 stages. Got 1"), (Costs(stages=()), "another model"),
])  # fmt: skip
def test_costs_that_do_not_fit(costs, problem):
    with pytest.raises(OptionError, match=problem):
        simulate(pipeline(2, 1), costs)


def test_times_beyond_all_numbers_are_refused():
    graph = StepGraph(1, 2)
    overlapped = Schedule.of(graph, [[parse(cell) for cell in ("0F0", "(0F1;0B0)OVERLAP_F_B", "0B1")]], "overlapped")
    for costs in (Costs(slowdown=1e308), Costs(lambda action: 1e308), Costs(slowdown=1e308, link=Link(1e308))):
        with pytest.raises(OptionError, match="longer than numbers go"):
            simulate(overlapped, costs, steps=3)


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_no_steps(steps):
    with pytest.raises(OptionError, match="steps"):
        simulate(pipeline(2, 1), steps=steps)


@pytest.mark.parametrize(("name", "step"), [("2F0", 0), ("0F1", 0), ("0F0", 1), ("0F0", -1), ("0U", 0)])
def test_results_that_are_not_there(name, step):
    with pytest.raises(OptionError, match="not simulated"):
        simulate(pipeline(2, 1)).event(parse(name), step)


def test_steps_beyond_all_memory_are_refused():
    with pytest.raises(OptionError, match="steps is too large"):
        simulate(conventional(stages=1), steps=2**63)


# ---- collective calls, blocking sends, a barrier, stages that are not there ------------------------------------------


def test_collective_calls_lengthen_their_actions_and_occupy_the_port():
    schedule = Schedule.of(StepGraph(2, 2), [lane("0F0 0F1 0B0 0B1"), lane("1F0 1F1 1B0 1B1")])
    plain = Costs({"F": 1.5, "I": 1.25, "W": 1})
    with_calls = Costs(collectives={"F": 0.5, "I": 0.25})
    assert [event[:4] for event in simulate(schedule, plain).events] == [
        event[:4] for event in simulate(schedule, with_calls).events
    ]
    assert with_calls.duration(parse("0B0")) == 2.25 == 2 + with_calls.collective(parse("0B0"))
    # the output of 0F0 is sent at 1.5 and takes a unit of time; the all-gather of 0F1 waits for the port
    network = Costs(collectives={"F": 0.5}, stages=StageBytes(output=1), link=Network(bandwidth=1))
    assert simulate(schedule, network).start(parse("0F1")) == 2.5


def test_a_worker_waits_for_what_it_sends_and_at_the_barrier():
    schedule = Schedule.of(StepGraph(2, 2), [lane("0F0 0F1 0B0 0B1"), lane("1F0 1F1 1B0 1B1")])
    late = Costs(link=Link(latency=0.5))
    found = simulate(schedule, replace(late, blocking_sends=True), steps=2)
    assert found.start(parse("0F1")) == 1.5 and found.start(parse("1F1")) == 3
    assert simulate(schedule, late).start(parse("0F1")) == 1
    for barrier in (0, 0.25):
        steps = simulate(schedule, replace(late, barrier=barrier), steps=3)
        ends = [max(event.end for event in steps.events if event.step == step) for step in range(3)]
        assert [min(event.start for event in steps.events if event.step == step) for step in (1, 2)] == [
            end + barrier for end in ends[:2]
        ]
    assert simulate(schedule, late, steps=3).makespan < steps.makespan


def test_the_bubble_of_the_longest_span():
    """Worker 1 idles from 0 to 1 before its first action, and worker 0 from 2 to 4 within its span of 8."""
    schedule = Schedule.of(StepGraph(2, 2), [lane("0F0 0F1 0B0 0B1"), lane("1F0 1B0 1F1 1B1")])
    found = simulate(schedule)
    assert found.makespan == 9 and found.span_bubble == pytest.approx(3 / 9) and found.bubble == pytest.approx(1 / 3)


@pytest.mark.parametrize("costs", [
    Costs({"F": 1, "I": 1, "W": 1, parse("2F0"): 2}), Costs(Durations({"2W": 1})), Costs(Durations({"2W0": 1})),
    Costs(slowdown=Slowdowns({"7W": 2})), Costs(collectives={parse("3F0"): 2}),
])  # fmt: skip
def test_costs_of_stages_that_are_not_there_are_refused(costs):
    with pytest.raises(OptionError, match="a stage that the schedule does not have"):
        simulate(Schedule.of(StepGraph(2), [lane("0F0 1F0 1B0 0B0")]), costs)
