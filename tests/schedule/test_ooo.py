"""Multi-stream out-of-order scheduling (Algorithm 1)."""

from __future__ import annotations

import pytest

from sparsebp.schedule import Action, Costs, Durations, Schedule, StageBytes, simulate
from sparsebp.schedule.builders import Region, RegionTimes, conventional, out_of_order, place_updates, synchronise


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
