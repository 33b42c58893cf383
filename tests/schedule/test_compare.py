"""A simulated step against spans that stand for measured ones."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import costs, lane, schedules
from sparsebp.core.errors import OptionError
from sparsebp.schedule import Action, Costs, Link, Schedule, StepGraph, actions_of, parse, simulate
from sparsebp.schedule.builders import one_f_one_b
from sparsebp.schedule.simulation import Simulation, compare


def spans(found: Simulation, offset: float = 0.0, factor: float = 1.0) -> list[tuple[Action, float, float]]:
    made = [(action, offset + factor * event.start, offset + factor * event.end)
            for event in found.events for action in actions_of(event.cell)]  # fmt: skip
    random.Random(0).shuffle(made)
    return made


@given(st.data(), st.floats(-100, 100), st.sampled_from([0.5, 1.0, 2.0]))
def test_a_run_that_is_as_simulated_has_no_error(data: st.DataObject, offset: float, factor: float) -> None:
    schedule = data.draw(schedules())
    found = simulate(schedule, data.draw(costs(schedule.graph.stages)))
    if found.makespan == 0:
        with pytest.raises(OptionError, match="took no time"):
            compare(found, spans(found))
        return
    errors = compare(found, spans(found, offset, factor))
    assert errors.makespan == pytest.approx(1 / factor - 1, abs=1e-9)
    assert set(errors.starts) == set(schedule) == set(errors.durations)
    if factor == 1:
        assert errors.mean_start == pytest.approx(0, abs=1e-9)
        assert all(error == pytest.approx(0, abs=1e-9) for error in errors.durations.values() if math.isfinite(error))


def test_errors_by_hand() -> None:
    schedule = Schedule.of(StepGraph(2), [lane("0F0 0W0"), lane("1F0 1B0")])
    found = simulate(schedule, Costs({"F": 1, "I": 1, "W": 1}))  # 0F0 0-1, 1F0 1-2, 1B0 2-4, 0W0 4-5
    times = {"0F0": (10, 12), "1F0": (12, 13), "1B0": (13, 15), "0W0": (18, 20)}
    late = [(parse(name), *pair) for name, pair in times.items()]
    errors = compare(found, late)  # type: ignore[arg-type]
    assert errors.makespan == 5 / 10 - 1
    assert {str(action): share for action, share in errors.starts.items()} == {
        "0F0": 0, "1F0": -0.1, "1B0": -0.1, "0W0": -0.4}  # fmt: skip
    assert {str(action): share for action, share in errors.durations.items()} == {
        "0F0": -0.5, "1F0": 0, "1B0": 0, "0W0": -0.5}  # fmt: skip
    assert errors.mean_start == pytest.approx(0.15)


def test_durations_alone_do_not_say_what_transfers_cost() -> None:
    """The error of a simulation that knows the durations, of a run with a slow network, is its transfers'."""
    schedule = one_f_one_b(workers=3, stages=3, microbatches=4)
    measured = simulate(schedule, Costs({"F": 1, "I": 1, "W": 1}, link=Link(0.5)))
    errors = compare(simulate(schedule, Costs({"F": 1, "I": 1, "W": 1})), spans(measured))
    assert errors.makespan < -0.05 and set(errors.durations.values()) == {0}
    assert compare(simulate(schedule, Costs({"F": 1, "I": 1, "W": 1}, link=Link(0.5))), spans(measured)).makespan == 0


def changed(index: int, *times: float) -> list[tuple[Action, float, float]]:
    made = spans(simulate(one_f_one_b(workers=2, stages=2, microbatches=1)))
    made[index] = (made[index][0], *times)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("odd", [
    [], changed(0, 0, 1)[1:], changed(0, 0, 1) * 2, [*changed(0, 0, 1), (parse("5F0"), 0.0, 1.0)],
    changed(0, 2, 1), changed(0, math.nan, 1), changed(0, 0, math.inf), [*changed(0, 0, 1), (parse("0I0"), 0.0, 1.0)],
])  # fmt: skip
def test_spans_of_another_step_are_refused(odd: list[tuple[Action, float, float]]) -> None:
    found = simulate(one_f_one_b(workers=2, stages=2, microbatches=1))
    with pytest.raises(OptionError):
        compare(found, odd)


def test_several_steps_are_refused() -> None:
    schedule = one_f_one_b(workers=2, stages=2, microbatches=1)
    with pytest.raises(OptionError, match="several steps"):
        compare(simulate(schedule, steps=2), spans(simulate(schedule)))
