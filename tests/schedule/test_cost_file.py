"""Costs from text and JSON."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.schedule import Action, Costs, Durations, Link, StageBytes, read_costs, write_costs
from sparsebp.schedule.builders import conventional
from sparsebp.schedule.files import costs_of, parse_durations


def test_the_most_specific_entry_counts():
    durations = Durations({"F": 2, "1F": 3, "1F0": 4, "W": 5, "2I": 6, "1B": 7})
    actions = {Action(0, "F", 0): 2, Action(1, "F", 1): 3, Action(1, "F", 0): 4, Action(0, "B", 0): 1 + 5,
               Action(2, "B", 0): 6 + 5, Action(1, "B", 3): 7, Action(0, "U"): 0, Action(0, "S"): 0}  # fmt: skip
    for action, duration in actions.items():
        assert durations(action) == duration


def test_texts():
    assert parse_durations(["F=1", " 2W = 0.5", "2W0=1e-3"]) == {"F": 1, "2W": 0.5, "2W0": 1e-3}
    for text in ("F", "F=", "=1x", "F=x"):
        with pytest.raises(OptionError):
            parse_durations([text])
    for key in ("", "X", "F0", "2", "2W0 "):
        with pytest.raises(OptionError):
            Durations({key: 1})
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(OptionError):
            Durations({"F": value})


def test_all_keys():
    costs = costs_of({"durations": {"F": 3}, "stages": [{"output": 1}, {"saved": 5}], "latency": 1, "bandwidth": 2,
                      "slowdown": 1.5})  # fmt: skip
    assert costs.duration(Action(0, "F", 0)) == 3 and costs.slowdown == 1.5
    assert (costs.link.latency, costs.link.bandwidth) == (1, 2)
    assert costs.stages == (StageBytes(1), StageBytes(saved=5))
    assert costs_of({}).stages == StageBytes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["durations", "stages", "latency", "bandwidth", "slowdown", "F", "saved", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def test_slowdowns_of_actions(tmp_path):
    costs = costs_of({"slowdown": {"W": 1.5, "2W": 2, "2W0": 3, "I": 1.25}})
    wanted = {"0W0": 1.5, "2W1": 2, "2W0": 3, "1I0": 1.25, "1F0": 1}
    assert {key: costs.slowdown_of(Action(int(key[0]), key[1], int(key[2]))) for key in wanted} == wanted
    schedule = conventional(stages=3, streams=2)
    write_costs(costs, schedule, tmp_path / "costs.json")
    read = read_costs(tmp_path / "costs.json")
    assert all(read.slowdown_of(action) == costs.slowdown_of(action) for action in schedule)
    for wrong in ({"W": -1}, {"X": 2}):
        with pytest.raises(OptionError, match="slowdown"):
            costs_of({"slowdown": wrong})
    with pytest.raises(OptionError, match="slowdown is out of range"):
        costs_of({"slowdown": {"W": 0.5}}).slowdown_of(Action(0, "W", 0))


@given(JSON)
def test_any_other_content_is_refused(content):
    try:
        costs = costs_of(content)
    except (FileFormatError, OptionError) as error:
        assert error.expected
    else:
        assert costs.duration(Action(0, "B", 0)) >= 0


@given(
    durations=st.dictionaries(st.sampled_from("FIWU"), st.floats(0, 1e6), min_size=4), slowdown=st.floats(1, 9),
    latency=st.floats(0, 9), bandwidth=st.sampled_from([math.inf, 2.5]), saved=st.lists(st.floats(0, 1e9), max_size=3),
)  # fmt: skip
def test_what_is_written_is_read(tmp_path_factory, durations, slowdown, latency, bandwidth, saved):
    schedule = conventional(stages=3, fusion="backward")
    stages = tuple(StageBytes(saved=s) for s in saved) if saved else StageBytes(2, 3, 4)
    costs = Costs(durations, stages, Link(latency, bandwidth), slowdown)
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    write_costs(costs, schedule, path)
    read = read_costs(path)
    assert (read.stages, read.link, read.slowdown) == (costs.stages, costs.link, costs.slowdown)
    assert all(read.duration(action) == costs.duration(action) for action in schedule)
