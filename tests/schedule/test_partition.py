"""Parts of a model that take equally long: as good as any cut, by trying all."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp.core.errors import OptionError
from sparsebp.schedule import Costs, Durations, StageBytes, partition


@given(st.lists(st.floats(0, 1e3) | st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9))
@settings(max_examples=200)
def test_no_cut_has_a_shorter_longest_part(each, workers):
    if workers > len(each):
        with pytest.raises(OptionError, match="fewer stages than workers"):
            partition(each, workers)
        return
    parts = partition(each, workers)
    assert len(parts) == workers and all(parts)
    assert [stage for part in parts for stage in part] == list(range(len(each)))
    best = min(
        max(sum(each[a:b]) for a, b in zip((0, *cuts), (*cuts, len(each)), strict=True))
        for cuts in combinations(range(1, len(each)), workers - 1)
    )
    assert max(sum(each[stage] for stage in part) for part in parts) <= best * (1 + 1e-12)


def test_costs_of_a_schedule_count_forward_and_both_gradients():
    costs = Costs(Durations({"0F": 4, "1F": 1, "2F": 1, "I": 1, "W": 0}), (StageBytes(),) * 3)
    assert partition(costs, 2) == [range(1), range(1, 3)]
    assert partition(Costs(), 2, stages=4) == [range(2), range(2, 4)]
    for wrong in (lambda: partition(Costs(), 2), lambda: partition([1, -1], 1), lambda: partition([1.0], 0)):
        with pytest.raises(OptionError):
            wrong()
