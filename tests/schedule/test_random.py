"""Properties of every schedule, on random ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import costs, graphs, schedules, worker_of
from sparsebp.schedule import Action, Costs, Link, Schedule, Simulation, actions_of, depth, parts_of, simulate


@st.composite
def cases(draw, **options):
    schedule = draw(schedules(**options))
    return schedule, draw(costs(schedule.graph.stages))


def recomputations(schedule: Schedule, costs: Costs) -> float:
    """What computing activations again takes altogether."""
    again = {(part.stage, part.microbatch) for action in schedule for part in parts_of(action)
             if part.kind in "IW" and part.stage in schedule.recomputed and part in schedule}  # fmt: skip
    return sum(costs.duration(Action(stage, "F", m)) for stage, m in again)


@given(cases(), st.integers(1, 3))
def test_cells_and_transfers_start_as_soon_as_they_can(case, steps):
    """In the order of the lanes; with recomputation a cell may also wait for another that recomputes."""
    schedule, costs = case
    _check_starts(simulate(schedule, costs, steps=steps))
    _check_starts(simulate(replace(schedule, recomputed=frozenset()), costs, steps=steps))


def _check_starts(found: Simulation) -> None:
    schedule, costs = found.schedule, found.costs
    starts = [event.start for event in found.events]
    assert starts == sorted(starts) and min(starts) == 0
    for number, lane in enumerate(schedule.lanes):
        own = [event for event in found.events if event.lane == number]
        assert [event.cell for event in own] == list(lane.cells) * found.steps
    arrivals = {(sent.source, sent.receiver, sent.step): sent.end for sent in found.transfers}
    lane_end = [0.0] * len(schedule.lanes)
    for event in found.events:
        worker = schedule.lanes[event.lane].worker
        expected, parts = [lane_end[event.lane]], parts_of(event.cell)
        for part in parts:
            for need in schedule.graph.predecessors(part):
                if need in schedule and need not in parts:
                    away = worker_of(schedule, need) != worker
                    expected.append(arrivals[need, worker, event.step] if away else found.end(need, event.step))
            if event.step > 0:
                before = [need for need in schedule.graph.carried(part) if need in schedule]
                expected += [found.end(need, event.step - 1) for need in before]
        assert event.start >= max(expected) if schedule.recomputed else event.start == max(expected)
        lane_end[event.lane] = event.end
    free: dict[tuple[int, int], float] = {}
    for sent in found.transfers:  # sorted by start, so in the order of their link
        pair = sent.sender, sent.receiver
        boundary = sent.source.stage - (sent.source.kind == "I")
        sending = costs.bytes_of(boundary).output / costs.link.bandwidth
        assert sent.start == max(found.end(sent.source, sent.step), free.get(pair, 0.0))
        assert sent.end == sent.start + sending + costs.link.latency
        free[pair] = sent.start + sending


@settings(max_examples=150)
@given(cases())
def test_memory_at_every_moment(case):
    """What is kept, counted moment by moment from the events alone, for one step that begins with its forwards."""
    schedule, costs = replace(case[0], recomputed=frozenset()), case[1]
    graph = schedule.graph
    if graph.first != "F" or graph.weights == "stashed":
        return
    found = simulate(schedule, costs)
    for curve in found.memory:
        for at, (begin, end) in enumerate(pairwise([*curve.times, found.makespan])):
            now = (begin + end) / 2
            if begin >= end:
                continue
            saved = held = gradients = 0.0
            for stage in range(graph.stages):
                size = costs.bytes_of(stage)
                applied = [found.end(action) for action in schedule if action.kind == "U" and action.stage == stage]
                begun = []
                for m in range(graph.microbatches):
                    both = (Action(stage, "I", m), Action(stage, "W", m))
                    users = [a for a in both if a in schedule and worker_of(schedule, a) == curve.worker]
                    if not users:
                        continue
                    over = max(map(found.end, users))
                    saved += size.saved * (found.start(Action(stage, "F", m)) <= now < over)
                    maker = Action(stage + 1, "I", m)
                    made = min(map(found.start, users))
                    if stage + 1 < graph.stages:
                        sent = [transfer.end for transfer in found.transfers if transfer.source == maker]
                        made = sent[0] if sent else found.start(maker)
                    held += size.output * (made <= now < over)
                    if graph.updates == "microbatch" and graph.weighted(stage):
                        gradients += size.weights * (found.start(both[1]) <= now < found.end(Action(stage, "U", m)))
                    elif graph.weighted(stage):
                        begun.append(found.start(both[1]))
                gradients += size.weights * bool(begun and min(begun) <= now < min(applied, default=math.inf))
            assert (curve.saved[at], curve.output_gradients[at], curve.weight_gradients[at]) == (saved, held, gradients)


@given(cases())
def test_critical_path(case):
    """It begins at the beginning, ends at the end, and nothing on it waits but for transfers."""
    schedule, costs = case
    found = simulate(replace(schedule, recomputed=frozenset()), replace(costs, link=Link()))
    path = found.critical_path
    assert path[0].start == 0 and path[-1].end == found.makespan
    assert all(before.end == after.start for before, after in pairwise(path))
    sending = simulate(replace(schedule, recomputed=frozenset()), costs)
    gaps = sum(after.start - before.end for before, after in pairwise(sending.critical_path))
    assert gaps <= sum(transfer.end - transfer.start for transfer in sending.transfers) + 1e-9


@given(cases(), st.integers(1, 2))
def test_memory_is_never_negative_and_ends_with_what_is_kept(case, steps):
    schedule, costs = case
    graph = schedule.graph
    found = simulate(schedule, costs, steps=steps)
    kept = [0.0] * schedule.workers
    for stage, worker in sorted({(a.stage, worker_of(schedule, a)) for a in schedule.places}):
        size = costs.bytes_of(stage)
        if graph.weighted(stage):
            kept[worker] += size.weights
            if graph.updates == "none" or graph.first == "U":
                kept[worker] += size.weights
        if graph.first == "I" and (graph.weighted(stage) or Action(stage, "I", 0) in schedule):
            saved = size.saved
            if stage in schedule.recomputed:
                saved = costs.bytes_of(stage - 1).output if stage > 0 else 0
            kept[worker] += graph.microbatches * saved
    for curve, expected in zip(found.memory, kept, strict=True):
        assert list(curve.times) == sorted(set(curve.times)) and curve.times[0] == 0
        for use in (curve.saved, curve.output_gradients, curve.weight_gradients, curve.weights):
            assert min(use) >= 0
        assert curve.bytes[-1] == expected
        assert curve.peak >= expected


@given(cases(), st.integers(1, 2))
def test_versions(case, steps):
    schedule, costs = case
    graph = schedule.graph
    found = simulate(schedule, costs, steps=steps)
    done = [action for event in found.events for action in actions_of(event.cell)]
    updates = Counter(action.stage for action in done if action.kind == "U")
    for event in found.events:
        for action, version in zip(actions_of(event.cell), event.versions, strict=True):
            assert (version is not None) == (action.kind in "FIB" and graph.weighted(action.stage))
            if version is None:
                continue
            assert version == found.version(action, event.step)
            assert 0 <= version <= updates[action.stage]
            if graph.weights != "latest" or action.kind == "F":
                assert found.staleness(action, event.step) >= 0
            if graph.updates == "none":
                assert version == 0
            elif graph.updates == "step":
                assert version == event.step + (graph.first == "U" or (graph.first == "I" and action.kind == "F"))
                assert found.staleness(action, event.step) == 0
            elif graph.weights == "stashed" and action.kind != "F":
                assert version == found.version(Action(action.stage, "F", action.microbatch), event.step)


@given(graphs())
def test_depth_is_reached_without_limits(graph):
    """The depth is the longest chain, counted here over the graph itself."""
    longest: dict[Action, int] = {}

    def chain(action: Action) -> int:
        if action not in longest:
            needs = [need for need in graph.predecessors(action) if need in wanted]
            longest[action] = 1 + max(map(chain, needs), default=0)
        return longest[action]

    wanted = set(graph.required())
    assert depth(graph) == max(map(chain, wanted))


@given(cases())
def test_makespan_lies_between_the_longest_chain_and_the_serial_sum(case):
    schedule, costs = case
    found = simulate(schedule, costs)
    serial = sum(map(costs.duration, schedule)) + recomputations(schedule, costs)
    sent = sum(transfer.end - transfer.start for transfer in found.transfers)
    assert depth(schedule.graph, costs) <= found.makespan * (1 + 1e-12)
    assert found.makespan <= (serial + sent) * (1 + 1e-12)
    assert 0 <= found.bubble <= 1
