"""Orders of one worker: conventional, multi-stream out of order, list scheduling on two streams, reverse first-k."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedules
from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.schedule import (
    Action,
    Costs,
    Durations,
    Link,
    Schedule,
    StageBytes,
    StepGraph,
    builders,
    simulate,
    validate,
)
from sparsebp.schedule.builders import (
    Region,
    RegionTimes,
    conventional,
    fast_forward,
    gpipe,
    largest_k,
    list_schedule,
    out_of_order,
    place_updates,
    reverse_first_k,
    search_k,
    synchronise,
    two_stream_list,
)

# ---- the conventional order and where the updates go, written out ----------------------------------------------------


def lanes(schedule: Schedule) -> dict[str, str]:
    return {lane.stream: " ".join(map(str, lane.cells)) for lane in schedule.lanes}


@pytest.mark.parametrize(("fusion", "first", "expected"), [
    ("none", "F", "0F0 1F0 2F0 2W0 2I0 1W0 1I0 0W0 0U 1U 2U"),
    ("forward", "U", "0U 0F0 1U 1F0 2U 2F0 2W0 2I0 1W0 1I0 0W0"),
    ("backward", "F", "0F0 1F0 2F0 2W0 2I0 2U 1W0 1I0 1U 0W0 0U"),
])  # fmt: skip
def test_one_stream(fusion, first, expected):
    schedule = conventional(stages=3, fusion=fusion)
    assert lanes(schedule) == {"main": expected}
    assert schedule.graph.first == first


@pytest.mark.parametrize(("fusion", "main", "sub"), [
    ("none", "0F0 1F0 2F0 2I0 1I0 0U 1U 2U", "2W0 1W0 0W0"),
    ("forward", "0U 0F0 1U 1F0 2U 2F0 2I0 1I0", "2W0 1W0 0W0"),
    ("backward", "0F0 1F0 2F0 2I0 1I0", "2W0 2U 1W0 1U 0W0 0U"),
])  # fmt: skip
def test_two_streams(fusion, main, sub):
    schedule = conventional(stages=3, fusion=fusion, streams=2)
    assert lanes(schedule) == {"main": main, "sub": sub}
    assert simulate(schedule).makespan == 3 + 3


def test_accumulation_updates_after_the_last_micro_batch():
    schedule = conventional(stages=2, microbatches=2, fusion="backward")
    assert lanes(schedule) == {"main": "0F0 1F0 1W0 1I0 0W0 0F1 1F1 1W1 1I1 1U 0W1 0U"}
    lazy = conventional(stages=2, microbatches=2, fusion="forward")
    assert lanes(lazy) == {"main": "0U 0F0 1U 1F0 1W0 1I0 0W0 0F1 1F1 1W1 1I1 0W1"}


def test_stages_without_weights():
    schedule = conventional(stages=3, unweighted=[0, 2], fusion="backward", input_gradient=True)
    assert lanes(schedule) == {"main": "0F0 1F0 2F0 2I0 1W0 1I0 1U 0I0"}
    assert lanes(conventional(stages=2, unweighted=[0, 1], streams=2)) == {"main": "0F0 1F0 1I0"}


def test_updates_in_a_pipeline():
    """Each worker updates its stages; backward-fusion does so before its other stages' last gradients."""
    schedule = place_updates(gpipe(workers=2, stages=4, microbatches=2), "backward")
    assert [" ".join(map(str, lane.cells)) for lane in schedule.lanes] == [
        "0F0 1F0 0F1 1F1 1B0 0B0 1B1 1U 0B1 0U",
        "2F0 3F0 2F1 3F1 3B0 2B0 3B1 3U 2B1 2U",
    ]


def test_backward_fusion_needs_one_gradient_at_a_time():
    """Jiang et al. (2021), §3: a gradient buffer is given back at once."""
    unfused, fused = (simulate(conventional(stages=9, fusion=fusion)) for fusion in ("none", "backward"))
    assert max(unfused.memory[0].weight_gradients) == 9
    assert max(fused.memory[0].weight_gradients) == 1


# ---- multi-stream out-of-order scheduling (Algorithm 1) --------------------------------------------------------------


def weight_gradients(schedule: Schedule, stream: str = "sub") -> list[int]:
    return [cell.stage for lane in schedule.lanes if lane.stream == stream for cell in lane.cells if cell.kind == "W"]


def test_equal_costs_hide_all_weight_gradients_but_the_last():
    schedule = out_of_order(stages=8, regions=4)
    assert [(lane.stream, lane.worker) for lane in schedule.lanes] == [("main", 0), ("sub", 0)]
    assert weight_gradients(schedule) == [7, 6, 5, 4, 3, 2, 1]
    assert simulate(schedule).makespan == 7 + 1 + 8  # I, W of stage 0, F
    assert [cell.kind for cell in schedule.lanes[1].cells] == ["W", "U"] * 7


def test_weight_gradients_of_late_stages_run_beside_the_next_forward():
    """§8.2, Fig. 8: where they do not fit beside the backward; in order they would hold up the first forwards."""
    costs = Costs({"F": 3, "I": 1, "W": 2, "U": 0})
    schedule = out_of_order(stages=12, regions=4, costs=costs, memory_ratio=10)
    in_order = place_updates(_two_streams(12), "backward")
    assert weight_gradients(schedule) != sorted(weight_gradients(schedule), reverse=True)
    assert simulate(schedule, costs).makespan < simulate(in_order, costs).makespan
    before = simulate(schedule, costs)
    late = max(weight_gradients(schedule), key=lambda stage: before.end(_w(stage)))
    assert before.start(_w(late)) > before.start(_f(0))


def test_the_pair_with_the_highest_speed_up_is_chosen_first():
    """Line 7: stage 3 gains most beside the first region of the forward, and waits for it."""
    forward = Region("F", (0, 1))
    times = RegionTimes(
        main=lambda region: 2.0,
        sub=lambda stage, region: 1.0,
        speedup=lambda stage, region: 1.5 if (stage, region) == (3, forward) else 1.1,
    )
    schedule = out_of_order(stages=4, regions=[[0, 1], [2, 3]], times=times, memory_ratio=10)
    assert weight_gradients(schedule) == [2, 1, 3]


def test_a_region_that_has_run_out_takes_no_more():
    """Stage 2 gains most beside the first region, but is ready only when that has ended."""

    def speedup(stage: int, region: Region) -> float:
        if region.stages == (3,):
            return 4.0
        return (0.1 if stage == 2 else 3.0) if region.kind == "I" else (2.0 if stage == 2 else 1.0)

    times = RegionTimes(main=lambda region: float(len(region.stages)), sub=lambda stage, region: 0.1, speedup=speedup)
    schedule = out_of_order(stages=4, regions=[[0, 1, 2], [3]], k=0, times=times, memory_ratio=10)
    assert weight_gradients(schedule) == [3, 1, 0, 2]


def test_durations_that_round():
    """0.0045… + (r - 0.0045…) is less than r, when the weight gradient of stage 1 is ready."""
    durations = {"4I": 0.0045037099729162144, "3I": 0.6483030351435694, "2I": 0.20946155834601654,
                 "1I": 0.07640195255496485, "F": 1, "U": 0, "W": 0.001}  # fmt: skip
    schedule = out_of_order(stages=5, unweighted=[2, 3], regions=[[0, 1, 2, 3], [4]], k=0, memory_ratio=9,
                            costs=Costs(Durations(durations)))  # fmt: skip
    assert weight_gradients(schedule) == [4, 1, 0]


def test_pre_scheduling_holds_the_cap():
    costs = Costs({"F": 1, "I": 1, "W": 2, "U": 0.5}, stages=StageBytes(1, 4, 1))
    reference = simulate(conventional(stages=10, fusion="backward"), costs).memory[0].peak
    makespans = []
    for cap in (1.0, 1.02, 1.05, 1.1, 1.2, 3.0):
        found = simulate(out_of_order(stages=10, regions=5, costs=costs, memory_ratio=cap), costs)
        assert found.memory[0].peak <= cap * reference
        makespans.append(found.makespan)
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] < makespans[0]


def test_first_k_stages_in_reverse_on_the_main_stream():
    """§6: multi-stream for the last L - k stages, reverse first-k for the others, with their synchronisations."""
    schedule = out_of_order(stages=6, regions=2, k=3, fusion=None, memory_ratio=10)
    assert weight_gradients(schedule, "main") == [0, 1, 2]
    assert sorted(weight_gradients(schedule)) == [3, 4, 5]
    with_network = place_updates(synchronise(schedule, costs=Costs({"F": 1, "I": 1, "W": 1, "S": 1})), "forward")
    assert {lane.stream for lane in with_network.lanes} == {"main", "sub", "link"}
    simulate(with_network, Costs({"F": 1, "I": 1, "W": 1, "S": 1, "U": 0}))


def test_search_for_k_shares_heavy_weight_gradients_between_equal_streams():
    costs = Costs({"F": 1, "I": 1, "W": 3, "U": 0})
    fixed, searched = (simulate(out_of_order(stages=16, costs=costs, memory_ratio=10, k=k), costs) for k in (1, None))
    assert searched.makespan < fixed.makespan
    assert len(weight_gradients(searched.schedule, "main")) > 1
    tight = simulate(out_of_order(stages=16, costs=costs, memory_ratio=1.0, k=None), costs)
    assert tight.peak <= simulate(conventional(stages=16, fusion="backward"), costs).peak


@pytest.mark.parametrize("regions", [1, 4, 16])
def test_the_number_of_regions_matters_little_where_all_pairs_gain_equally(regions):
    """A weight gradient that outlasts its region delays what runs beside the next one."""
    costs = Costs({"F": 1, "I": 1, "W": 1.7, "U": 0})
    found = simulate(out_of_order(stages=16, regions=regions, costs=costs, memory_ratio=10), costs)
    assert found.makespan <= 1.1 * (31 + 1.7)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_small_models(stages):
    schedule = out_of_order(stages=stages)
    assert sorted(weight_gradients(schedule) + weight_gradients(schedule, "main")) == list(range(stages))
    assert out_of_order(stages=stages, unweighted=range(stages)).lanes[-1].stream == "main"


def _two_streams(stages: int) -> Schedule:
    """Weight gradients beside the backward in the conventional order, then the next forward."""
    plain = out_of_order(stages=stages, regions=1, k=0, fusion=None, memory_ratio=10)
    backward = [cell for cell in plain.lanes[0].cells if cell.kind == "I"]
    forward = [cell for cell in plain.lanes[0].cells if cell.kind == "F"]
    return Schedule.of(plain.graph, [{"main": backward + forward, "sub": [_w(s) for s in reversed(range(stages))]}])


def _w(stage: int) -> Action:
    return Action(stage, "W", 0)


def _f(stage: int) -> Action:
    return Action(stage, "F", 0)


def test_what_costs_say_of_regions():
    """Times beside the other stream; two slowed down by s and s' get 1/s + 1/s' times as much done as one."""
    slowdowns = {"I": 2.0, "F": 2.0, "W": 4.0, "U": 4.0}
    costs = Costs({"F": 1.0, "I": 3.0, "W": 5.0, "U": 0.5}, slowdown=lambda action: slowdowns[action.kind])
    backward, forward = Region("I", (1, 0)), Region("F", (0, 1, 2))
    times = RegionTimes.from_costs(costs)
    assert times.main(backward) == 2 * 3.0  # the input has no gradient, so I of stage 0 is not there
    assert times.main(forward) == 2 * 3 * 1.0
    assert times.sub(1, forward) == 4 * 5.5
    assert times.speedup(1, forward) == 1 / 2 + 1 / 4
    assert RegionTimes.from_costs(costs, input_gradient=True).main(backward) == 2 * 6.0


# ---- list scheduling: as short as a step can be, and no longer than without reordering -------------------------------


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


# ---- reverse first-k scheduling (Algorithm 2), its bound and its search for k ----------------------------------------


SLOW_NETWORK = Costs({"F": 2, "I": 2, "W": 2, "S": 3, "U": 0})


def main(schedule) -> list[str]:
    return [str(cell) for lane in schedule.lanes if lane.stream == "main" for cell in lane.cells]


def test_algorithm_2():
    schedule = reverse_first_k(stages=4, k=2)
    assert main(schedule) == ["3W0", "3I0", "2W0", "2I0", "1I0", "0W0", "1W0", "0F0", "1F0", "2F0", "3F0"]
    assert sorted(map(str, schedule.lanes[1].cells)) == ["0S", "1S", "2S", "3S"]
    conventional = reverse_first_k(stages=4, k=0)
    assert main(conventional) == ["3W0", "3I0", "2W0", "2I0", "1W0", "1I0", "0W0", "0F0", "1F0", "2F0", "3F0"]


def test_fig_4():
    """§5.1: priorities save one unit, reversing the first three layers three more: 16 % and 12 %; the first four too.

    The text gives no durations; with these all of its statements hold.
    """
    network = [4, 1, 4, 4, 4]
    costs = Costs(lambda action: network[action.stage] if action.kind == "S" else {"F": 2, "I": 1, "W": 2}[action.kind])
    settings = [(0, "first-ready"), (0, "first-stage"), (3, "first-stage"), (4, "first-stage")]
    schedules = [reverse_first_k(stages=5, k=k, costs=costs, priority=priority) for k, priority in settings]
    a, b, c, four = [simulate(schedule, costs).makespan for schedule in schedules]
    assert (a - b, b - c, a / c, b / c, four) == (1, 3, 1.16, 1.12, c)
    assert min(simulate(reverse_first_k(stages=5, k=k, costs=costs), costs).makespan for k in range(6)) == c


@pytest.mark.parametrize("limit", [0.5, 5, 10.5, 22, 23, 100])
def test_memory_bound(limit):
    """Line 1: f(k) = M_fwd - sum of M(dO) behind k + sum of M(dW) up to k, below the limit."""
    stages = (StageBytes(1, 3), StageBytes(2, 4), StageBytes(1, 1), StageBytes(3, 7))
    saved, held = [entry.saved for entry in stages], [entry.output for entry in stages]
    f = [sum(saved) - sum(saved[k:]) + sum(held[:k]) for k in range(5)]
    expected = max(k for k in range(5) if k == 0 or f[k] < limit)
    assert largest_k(4, limit, Costs(stages=stages)) == expected


def test_memory_limit_lowers_k():
    """The more weight gradients wait, the more gradients are held; nothing but activations is saved here."""
    costs = Costs(stages=StageBytes(output=1, saved=4, weights=0))
    peaks = [simulate(reverse_first_k(stages=12, k=k, costs=costs), costs).memory[0].peak for k in range(13)]
    assert min(peaks) == peaks[0] == 12 * 4 + 1 + 1
    assert reverse_first_k(stages=12, k=12, costs=costs, memory_limit=peaks[0]).name == "reverse first-9"  # 5 k < 50


@pytest.mark.parametrize("stages", [1, 2, 7, 10, 23, 64, 100])
@pytest.mark.parametrize("share", [0, 0.1, 0.37, 0.5, 0.99])
def test_search_finds_the_top_of_a_concave_function(stages, share):
    """§5.1: steps of L/10, then halved around the best."""
    best = int(share * stages)
    tried = []

    def throughput(k: int) -> float:
        tried.append(k)
        return -abs(k - best)

    assert search_k(throughput, stages) == best
    assert len(tried) == len(set(tried)) <= 11 + stages // 10 + 6
    assert all(0 <= k < stages for k in tried)


def test_search_keeps_to_the_bound():
    assert search_k(lambda k: k, 40, most=17) == 17
    assert search_k(lambda k: 0.0, 40) == 0


def test_search_by_simulation():
    found = reverse_first_k(stages=20, costs=SLOW_NETWORK)
    makespans = [
        simulate(reverse_first_k(stages=20, k=k, costs=SLOW_NETWORK), SLOW_NETWORK).makespan for k in range(20)
    ]
    assert simulate(found, SLOW_NETWORK).makespan == min(makespans) < makespans[0]


def test_search_by_measurement():
    """The throughput may be measured in any way."""
    found = reverse_first_k(stages=20, throughput=lambda schedule: -abs(main(schedule).index("0W0") - 30))
    assert abs(main(found).index("0W0") - 30) <= 1


def test_with_fast_forwarding_and_recomputation():
    """§6: the first k stages' weight gradients come last and in reverse, in a pipeline and with recomputation."""
    schedule = fast_forward(workers=2, stages=8, microbatches=2, k=3, recomputed=[0, 1, 2])
    order = [cell for cell in main(schedule) if cell[1] == "W" and cell[0] in "012"]
    assert order == ["0W0", "0W1", "1W0", "1W1", "2W0", "2W1"]
    assert main(schedule).index("3W1") < main(schedule).index("0W0")
    assert schedule.recomputed == {0, 1, 2}
    alone = reverse_first_k(stages=8, k=3, recomputed=[1, 3, 5])
    assert simulate(alone).makespan > simulate(reverse_first_k(stages=8, k=3)).makespan


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_list_schedules_stay_within_a_bound_of_memory(data):
    """Whatever is urgent, whoever has which stage: the step ends, and no worker saves more."""
    stages, microbatches = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    workers = data.draw(st.integers(1, stages))
    allocation = [*range(workers), *data.draw(st.lists(st.integers(0, workers - 1), min_size=stages - workers,
                                                       max_size=stages - workers))]  # fmt: skip
    size = st.builds(lambda saved, kept: StageBytes(saved=saved, saved_for_weights=kept * saved / 4),
                     st.integers(1, 8), st.integers(0, 4))  # fmt: skip
    costs = Costs({"F": 1.0, "I": 1.25, "W": 0.5}, tuple(data.draw(size) for _ in range(stages)), Link(0.25, 4))
    whole = max(sum(costs.bytes_of(s).saved for s in range(stages) if allocation[s] == w) for w in range(workers))
    memory = whole * data.draw(st.floats(1, 4))
    order = data.draw(st.permutations("FIW"))
    flip = data.draw(st.sampled_from([1, -1]))
    found = list_schedule(StepGraph(stages, microbatches), allocation,
                          lambda a: (order.index(a.kind), flip * (a.microbatch or 0), a.stage), costs, memory=memory,
                          patience=data.draw(st.sampled_from([0, 0.5])))  # fmt: skip
    assert max(max(curve.saved) for curve in simulate(found, costs).memory) <= memory * (1 + 1e-6)
    with pytest.raises(MemoryLimitError):
        list_schedule(StepGraph(stages), allocation, lambda a: a, costs, memory=whole / 2)


def test_builders_of_ones_own_have_names(monkeypatch):
    class Point:
        name = "of-a-package"

        def load(self):
            return lambda *, workers, stages: fast_forward(workers=workers, stages=stages)

    monkeypatch.setattr(builders, "BUILDERS", dict(builders.BUILDERS))
    monkeypatch.setattr(builders, "entry_points", lambda group: [Point()] * (group == "sparsebp.schedules"))
    builders.register_builder("mine", lambda *, stages: conventional(stages=stages))
    assert builders.build("mine", stages=3) == conventional(stages=3)
    assert builders.build("of-a-package", workers=2, stages=4) == fast_forward(workers=2, stages=4)
    builders.register_builder("anything", lambda *, stages=5, **options: options and conventional(stages=stages))
    assert builders.build("anything", microbatches=2) == conventional(stages=5)
    monkeypatch.setitem(builders.BUILDERS, "empty", lambda: None)
    with pytest.raises(OptionError, match="returns no schedule"):
        builders.build("empty")
    for name, build in (("gpipe", conventional), ("new", 3), (3, conventional), ("", conventional)):
        with pytest.raises(OptionError, match="cannot be registered"):
            builders.register_builder(name, build)
    assert builders.build("gpipe", stages=4, recomputed=[0, 2]).recomputed == {0, 2}
    with pytest.raises(OptionError, match="Unknown stages are recomputed"):
        builders.build("gpipe", stages=4, recomputed=[4])
