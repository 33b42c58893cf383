"""Versions and staleness of weights in the papers' asynchronous pipelines, read off simulated schedules."""

from __future__ import annotations

import pytest

from sparsebp.schedule import Action, Costs, simulate
from sparsebp.schedule.builders import dualpipe2018, pipedream


def test_fifth_batch_of_dualpipe():
    """Chen et al., 2018, Figure 8b: on three devices a batch reads a newer version in every unit."""
    costs = Costs(lambda action: 0 if action.kind == "U" else 0.5 if action.stage == 2 else 1)
    found = simulate(dualpipe2018(workers=3, stages=3, microbatches=20), costs)
    seen = [Action(0, "F", 9), Action(1, "F", 9), Action(2, "F", 9), Action(1, "B", 9), Action(0, "B", 9)]
    assert [found.start(action) for action in seen] == [9, 10, 11, 12, 13]
    assert [found.version_difference(action) for action in seen] == [4, 3, 2, 1, 0]
    assert found.version_difference(Action(2, "B", 9)) == 2, "in the unit of its forward"


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_staleness_of_pipedream(workers):
    """Narayanan et al., 2019, §3.3: as many updates behind as there are stages to come, and a version for each."""
    microbatches = 4 * workers
    found = simulate(pipedream(workers=workers, stages=workers, microbatches=microbatches))
    for k in range(workers):
        for m in range(workers - k - 1, microbatches):
            assert found.staleness(Action(k, "F", m)) == found.staleness(Action(k, "B", m)) == workers - 1 - k
        assert max(found.memory[k].weights) == workers - k
