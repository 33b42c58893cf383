"""Reverse first-k scheduling (Algorithm 2), its bound and its search for k."""

from __future__ import annotations

import pytest

from sparsebp.schedule import Costs, StageBytes, simulate
from sparsebp.schedule.builders import fast_forward, largest_k, reverse_first_k, search_k

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
