"""Statements of the papers, read off simulated schedules."""

from __future__ import annotations

import pytest

from schedules import lane
from sparsebp.schedule import Action, Cell, Costs, Overlap, Schedule, StepGraph, depth, simulate


def dualpipe(devices: int, microbatches: int) -> Schedule:
    """Chen et al., 2018, Algorithm 1: a forward and a backward of two batches in one time unit, then the update."""
    workers: list[list[Cell]] = []
    for k in range(devices):
        cells: list[Cell] = []
        for unit in range(microbatches + 2 * devices - 2):
            ahead, back = unit - k, unit - (2 * devices - 2 - k)
            forward = Action(k, "F", ahead) if 0 <= ahead < microbatches else None
            backward = Action(k, "B", back) if 0 <= back < microbatches else None
            if forward and backward:
                cells.append(Overlap(forward, backward))
            elif forward or backward:
                cells.append(forward or backward)
            if backward:
                cells.append(Action(k, "U", back))
        workers.append(cells)
    graph = StepGraph(devices, microbatches, updates="microbatch", weights="latest")
    return Schedule.of(graph, workers, "DualPipe (2018)")


@pytest.mark.parametrize("devices", range(2, 9))
def test_version_differences_of_dualpipe(devices):
    """Equations 5 and 6. The last device runs its forward and backward one after the other within a unit."""
    microbatches = 6 * devices
    costs = Costs(lambda action: 0 if action.kind == "U" else 0.5 if action.stage == devices - 1 else 1)
    found = simulate(dualpipe(devices, microbatches), costs)
    assert found.makespan == microbatches + 2 * devices - 2
    for m in range(2 * devices - 2, microbatches - devices):  # the pipeline is full
        for k in range(devices):
            assert found.version_difference(Action(k, "F", m)) == 2 * devices - k - 2
            assert found.version_difference(Action(k, "B", m)) == k


def test_fifth_batch_of_dualpipe():
    """Figure 8b: three devices; a batch reads five versions on its way, one more a unit, and ends with the newest."""
    costs = Costs(lambda action: 0 if action.kind == "U" else 0.5 if action.stage == 2 else 1)
    found = simulate(dualpipe(3, 20), costs)
    seen = [Action(0, "F", 9), Action(1, "F", 9), Action(2, "F", 9), Action(1, "B", 9), Action(0, "B", 9)]
    assert [found.start(action) for action in seen] == [9, 10, 11, 12, 13]
    assert [found.version_difference(action) for action in seen] == [4, 3, 2, 1, 0]
    assert found.version_difference(Action(2, "B", 9)) == 2, "in the unit of its forward"


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_staleness_of_pipedream(stages):
    """One forward, one backward with stashed weights: as many updates behind as there are stages to come."""
    microbatches = 4 * stages
    workers = []
    for k in range(stages):
        ahead = [Action(k, "F", m) for m in range(stages - k)]
        rest = [Action(k, kind, m + (stages - k if kind == "F" else 0)) for m in range(microbatches) for kind in "BUF"]
        rest = [action for action in rest if action.microbatch < microbatches]
        workers.append(ahead + rest)
    graph = StepGraph(stages, microbatches, updates="microbatch", weights="stashed")
    found = simulate(Schedule.of(graph, workers, "PipeDream"))
    for k in range(stages):
        for m in range(stages - k - 1, microbatches):
            assert found.staleness(Action(k, "F", m)) == found.staleness(Action(k, "B", m)) == stages - 1 - k
        assert max(found.memory[k].weights) == stages - k, "weight versions"


@pytest.mark.parametrize("layers", [1, 2, 3, 10])
def test_depth_of_optimizer_fusion(layers):
    """Jiang et al., 2021, §3, Figure 1: 3n in phases, 2n + 1 if every update is done as early as it can be."""
    graph = StepGraph(layers, updates="step")
    forward = [Action(l, "F", 0) for l in range(layers)]
    backward = [Action(l, "B", 0) for l in reversed(range(layers))]
    updates = [Action(l, "U") for l in range(layers)]
    costs = Costs({"F": 1, "B": 1, "U": 1})
    phases = Schedule.of(graph, [forward + backward + updates])
    assert simulate(phases, costs).makespan == 3 * layers
    fused = Schedule.of(graph, [{"main": forward + backward, **{str(update): [update] for update in updates}}])
    assert simulate(fused, costs).makespan == 2 * layers + 1
    assert depth(graph) == 2 * layers + 1


def test_prioritised_communication_and_reverse_first_k():
    """Oh et al., 2022, §5.1, Figure 4: priorities save one unit, reverse first-3 three more: 16 % and 12 %.

    The text does not give the durations of the figure; these fit its statements.
    """
    graph = StepGraph(5, synchronised=True, first="I")
    costs = Costs({"F": 2, "I": 1, "W": 2, "S": 3, Action(4, "S"): 4})
    conventional = "4I0 4W0 3I0 3W0 2I0 2W0 1I0 1W0 0W0"
    reverse_first_3 = "4I0 4W0 3I0 3W0 2I0 1I0 0W0 1W0 2W0"

    def makespan(backward: str, link: str) -> float:
        streams = {"main": lane(backward + " 0F0 1F0 2F0 3F0 4F0"), "link": lane(link)}
        return simulate(Schedule.of(graph, [streams]), costs).makespan

    a = makespan(conventional, "4S 3S 2S 1S 0S")
    b = makespan(conventional, "2S 1S 0S 3S 4S")
    c = makespan(reverse_first_3, "3S 0S 1S 2S 4S")
    assert (a - b, b - c) == (1, 3)
    assert (a / c, b / c) == (1.16, 1.12)
