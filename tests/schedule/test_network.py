"""A network with contention: queues at ports, and the time of sums over replicas."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import costs, lane, schedules
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.schedule import (
    Action,
    Costs,
    Link,
    Network,
    Schedule,
    StageBytes,
    StepGraph,
    parse,
    read_costs,
    simulate,
    write_costs,
)

FOUR = StageBytes(output=4)


def transfers(schedule: Schedule, link: Link, **other: object) -> dict[str, tuple[float, float]]:
    found = simulate(schedule, Costs(stages=FOUR, link=link, **other))  # type: ignore[arg-type]
    return {str(sent.source): (sent.start, sent.end) for sent in found.transfers}


def star() -> Schedule:
    """Worker 1 gets the output of stage 0 from worker 0 when worker 2 sends it the gradient of stage 2."""
    return Schedule.of(StepGraph(3, 2), [lane("0F0 0F1 0W0 0W1"), lane("1F0 1F1 1I0 1W0 1I1 1W1"),
                                         lane("2F0 2I0 2F1 2I1 2W0 2W1")])  # fmt: skip


def test_two_senders_share_the_port_of_their_receiver() -> None:
    """0F1 leaves at 3 and 2I0 at 8 with pairs apart; a slow port of worker 1 lets the second wait."""
    free = transfers(star(), Link(0, 1))
    assert free["0F0"] == (1, 5) and free["0F1"] == (5, 9) and free["1F0"] == (6, 10) and free["2I0"] == (12, 16)
    shared = transfers(star(), Network(0, 0.5))
    assert shared["0F0"] == (1, 9) and shared["0F1"] == (9, 17)
    assert shared["1F0"] == (10, 18)  # sends while it receives: both directions of a port at once
    assert shared["2I0"] == (20, 28) and shared["1F1"] == (18, 26)


def test_what_waits_for_a_busy_receiver_waits_from_its_own_port_on() -> None:
    schedule = Schedule.of(StepGraph(3), [lane("0F0 0W0"), lane("2F0 2I0 2W0"), lane("1F0 1I0 1W0")])
    assert transfers(schedule, Network(1, 2)) == {"0F0": (1, 4), "1F0": (5, 8), "2I0": (10, 13), "1I0": (14, 17)}


def test_routes() -> None:
    network = Network(1, 10, node=2, uplink_latency=3, uplink_bandwidth=5)
    inside, across = network.route(2, 3), network.route(3, 0)
    assert [side.key for side in inside.sides] == [("send", 2, 0), ("receive", 3, 0)] and inside.latency == 1
    assert [side.key for side in across.sides] == [("send", 3, 0), ("receive", 0, 0), ("out", 1, 0), ("in", 0, 0)]
    assert [side.bandwidth for side in across.sides] == [10, 10, 5, 5] and across.latency == 3


@pytest.mark.parametrize(("uplink", "second"), [(1, 5), (2, 3), (8, 1.5), (math.inf, 1)])
def test_an_uplink_is_shared_by_the_workers_of_a_node(uplink: float, second: float) -> None:
    """Workers 0 and 1 have one node, 2 and 3 another; both send four bytes at 1, through ports of one byte a unit."""
    graph = StepGraph(4, 2, unweighted=frozenset(range(4)))
    cells = ["0F0 0F1", "2F0 2F1 2I0 2I1", "1F0 1F1 1I0 1I1", "3F0 3I0 3F1 3I1"]
    schedule = Schedule.of(graph, [lane(text) for text in cells])
    durations = {parse("0F0"): 1.0, parse("0F1"): 100.0, "F": 0.0, "I": 0.0}
    sizes = tuple(StageBytes(output=size) for size in (0, 0, 4, 0))
    network = Network(0, 1, node=2, uplink_bandwidth=uplink)
    # 0F0 (worker 0 to 2) of no bytes at 1; 1F0 (2 to 1) the same; 2F0 (1 to 3) has four; nothing else is under way.
    found = simulate(schedule, Costs(durations, sizes, network))  # type: ignore[arg-type]
    by_name = {str(sent.source): sent for sent in found.transfers}
    assert (by_name["2F0"].start, by_name["2F0"].end) == (1, 1 + max(4, 4 / uplink))
    assert by_name["3I0"].start == 1 + max(4, 4 / uplink) and by_name["3I0"].receiver == 1
    held = {side.key: 1 + 4 / side.bandwidth for side in network.route(0, 2).sides}
    assert max([1.0, *(held[side.key] for side in network.route(1, 3).sides if side.key in held)]) == second


def test_a_sum_holds_the_port_that_transfers_need() -> None:
    graph = StepGraph(2, synchronised=True)
    schedule = Schedule.of(graph, [{"main": lane("0F0 0B0"), "link": lane("0S")},
                                   {"main": lane("1F0 1W0 1I0"), "link": lane("1S")}])  # fmt: skip
    durations = {"F": 1, "I": 1, "W": 1, "S": 10}
    apart = simulate(schedule, Costs(durations, FOUR, Link(0, 4)))
    assert (apart.start(parse("1S")), apart.start(parse("0B0"))) == (4, 6)
    shared = simulate(schedule, Costs(durations, FOUR, Network(0, 4)))
    assert shared.start(parse("1S")) == 4  # of worker 1, from 4 to 14
    assert shared.transfers[-1].start == 14 and shared.start(parse("0B0")) == 15
    assert [str(event.cell) for event in shared.critical_path] == ["0F0", "1F0", "1W0", "1S", "0B0", "0S"]


def test_a_sum_waits_for_a_transfer() -> None:
    graph = StepGraph(2, synchronised=True)
    schedule = Schedule.of(graph, [{"main": lane("0F0 0B0"), "link": lane("0S")},
                                   {"main": lane("1F0 1I0 1W0"), "link": lane("1S")}])  # fmt: skip
    found = simulate(schedule, Costs({"F": 1, "I": 1, "W": 1, "S": 10}, FOUR, Network(0, 1)))
    assert found.transfers[-1][3:5] == (7, 11)  # the gradient, on its way when the weights' is ready at 8
    assert found.start(parse("1S")) == 11 and found.end(parse("1S")) == 21


@settings(max_examples=60)
@given(st.data(), st.integers(1, 2))
def test_between_two_workers_it_is_a_link(data: st.DataObject, steps: int) -> None:
    schedule = data.draw(schedules())
    if schedule.workers > 2 or schedule.graph.synchronised:
        return
    cost = data.draw(costs(schedule.graph.stages))
    other = replace(cost, link=Network(cost.link.latency, cost.link.bandwidth))
    one, two = simulate(schedule, cost, steps=steps), simulate(schedule, other, steps=steps)
    assert (one.events, one.transfers, one.memory) == (two.events, two.transfers, two.memory)


@settings(max_examples=100)
@given(st.data(), st.integers(1, 2))
def test_nothing_is_used_by_two_at_a_time(data: st.DataObject, steps: int) -> None:
    schedule = data.draw(schedules())
    network = Network(data.draw(st.integers(0, 3)), data.draw(st.sampled_from([0.5, 1, 4, math.inf])),
                      data.draw(st.sampled_from([None, 1, 2, 3])), 1,
                      data.draw(st.sampled_from([0.5, 1, 2, 8])))  # fmt: skip
    cost = replace(data.draw(costs(schedule.graph.stages, slowdown=1.0)), link=network)
    found = simulate(schedule, cost, steps=steps)
    used: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for sent in found.transfers:
        assert sent.start >= found.end(sent.source, sent.step)
        size = cost.bytes_of(sent.source.stage - (sent.source.kind == "I")).output
        route = network.route(sent.sender, sent.receiver)
        for side in route.sides:
            used[side.key].append((sent.start, sent.start + size / side.bandwidth))
        assert sent.end == max(sent.start + size / side.bandwidth for side in route.sides) + route.latency
    for event in found.events:
        worker = schedule.lanes[event.lane].worker
        if isinstance(event.cell, Action) and event.cell.kind == "S":
            for key, share in network.shares(worker).items():
                used[key].append((event.start, event.start + share * (event.end - event.start)))
    ends = {end for spans in used.values() for _, end in spans}
    for sent in found.transfers:  # and nothing waits without a reason
        assert sent.start == found.end(sent.source, sent.step) or sent.start in ends
    for spans in used.values():
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(sorted(spans)))
    path = found.critical_path
    assert path[-1].end == found.makespan and all(one.start <= two.start for one, two in pairwise(path))


def test_sums_over_replicas_by_hand() -> None:
    flat = Network(latency=1, bandwidth=10)
    assert flat.all_reduce(120, 1) == 0
    assert flat.all_reduce(120, 4) == 2 * 3 * (1 + 3)  # the ring
    assert flat.all_reduce(120, 64) == 2 * 6 * 1 + 2 * 12  # the tree: 126 latencies are too many
    nodes = Network(1, 10, node=4, uplink_latency=2, uplink_bandwidth=20)
    assert nodes.all_reduce(120, 4) == flat.all_reduce(120, 4)
    assert nodes.all_reduce(120, 8) == 2 * 3 * (1 + 3) + 2 * 1 * (2 + 120 / 2 / 20)
    assert nodes.all_reduce(120, 8, workers=8) == 2 * 3 * 2 + 2 * 12  # one a node, through its port: a tree
    assert nodes.all_reduce(12000, 8, workers=8) == 2 * 7 * (2 + 12000 / 8 / 10)  # of more bytes: a ring
    assert nodes.all_reduce(120, 8, workers=2) == 2 * 1 * (1 + 6) + 2 * 2 * 2 + 2 * 120 / 20


@given(st.floats(0, 1e9), st.integers(1, 4096), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([None, 8]))
def test_sums_take_at_least_what_the_bytes_take(size: float, replicas: int, workers: int, node: int | None) -> None:
    network = Network(1e-6, 1e9, node, 1e-5, 4e9)
    seconds = network.all_reduce(size, replicas, workers)
    least = 2 * (replicas - 1) / replicas * size / (1e9 if node is None else 8e9)
    assert seconds >= least * (1 - 1e-12) - 1e-12 and (replicas > 1) == (seconds > 0)
    assert network.all_reduce(size / 2, replicas, workers) <= seconds


@pytest.mark.parametrize("make", [
    lambda: Network(-1), lambda: Network(0, 0), lambda: Network(node=0), lambda: Network(node=1.5),
    lambda: Network(uplink_latency=-1), lambda: Network(uplink_bandwidth=0), lambda: Network(uplink_latency=math.nan),
    lambda: Network().all_reduce(-1, 2), lambda: Network().all_reduce(1, 0),
    lambda: Network(node=8).all_reduce(1, 2, workers=3), lambda: Network(node=8).all_reduce(1, 2, workers=12),
])  # fmt: skip
def test_networks_that_cannot_be(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OptionError):
        make()


@pytest.mark.parametrize("network", [Network(), Network(0.5, 8, 4, 1.5, 2.0), Network(node=2)])
def test_a_network_goes_to_a_file_and_back(network: Network, tmp_path) -> None:  # type: ignore[no-untyped-def]
    schedule = star()
    write_costs(Costs(link=network), schedule, tmp_path / "costs.json")
    read = read_costs(tmp_path / "costs.json").link
    assert read == network and type(read) is Network


def test_a_file_with_two_networks_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "costs.json"
    path.write_text('{"latency": 1, "network": {"node": 2}}', encoding="utf-8")
    with pytest.raises(FileFormatError, match="a network and latency"):
        read_costs(path)
    path.write_text('{"network": {"speed": 2}}', encoding="utf-8")
    with pytest.raises(FileFormatError, match="unknown keys"):
        read_costs(path)
