"""Every builder on random models and costs: valid, no faster than the critical path, no slower than serial."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import fitting
from sparsebp.schedule import Action, Costs, Schedule, actions_of, depth, simulate, validate
from sparsebp.schedule.builders import BUILDERS, place_updates, synchronise

KINDS = "FIWSU"
SHAPES = {
    "conventional": {"microbatches", "fusion", "streams", "input_gradient"},
    "ooo": {"k", "costs", "memory_ratio", "regions", "input_gradient"},
    "ooo-list": {"costs", "input_gradient"},
    "data-parallel": {"microbatches", "fusion", "costs", "priority", "input_gradient"},
    "reverse-first-k": {"k", "costs", "priority", "input_gradient"},
    "fast-forward": {"workers", "microbatches", "k", "costs", "input_gradient"},
    "modulo": {"workers", "microbatches", "k", "costs", "input_gradient", "group"},
    "gpipe": {"workers", "microbatches", "input_gradient"},
    "1f1b": {"workers", "microbatches", "input_gradient"},
    "interleaved-1f1b": {"workers", "rounds", "input_gradient", "chunks"},
    "zb-h1": {"workers", "rounds", "input_gradient", "chunks"},
    "zb-h2": {"workers", "rounds", "input_gradient", "chunks"},
    "zb-1p": {"workers", "microbatches", "input_gradient", "costs"},
    "zb-2p": {"workers", "microbatches", "input_gradient", "costs"},
    "zb-v": {"workers", "microbatches", "input_gradient"},
    "v-half": {"workers", "microbatches", "input_gradient"},
    "v-min": {"workers", "microbatches", "input_gradient"},
    "breadth-first": {"workers", "microbatches", "input_gradient", "chunks"},
    "forward-only": {"workers", "microbatches", "chunks"},
    "dualpipe": {"workers", "microbatches", "input_gradient"},
    "dualpipe-v": {"workers", "microbatches", "input_gradient"},
    "pipedream": {"workers", "microbatches"},
    "dualpipe-2018": {"workers", "microbatches"},
}
"""What to draw for each, besides stages and stages without weights."""


@st.composite
def random_costs(draw, stages: int) -> Costs:
    """Durations that are eighths, so that sums are exact."""
    eighths = st.integers(0, 24).map(lambda n: n / 8)
    table = {(stage, kind): draw(eighths) for stage in range(stages) for kind in KINDS}

    def duration(action: Action) -> float:
        return sum(table[action.stage, kind] for kind in ("IW" if action.kind == "B" else action.kind))

    return Costs(duration)


@st.composite
def built(draw, name: str) -> tuple[Schedule, Costs]:
    wanted = SHAPES[name]
    workers = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if "chunks" in wanted else 1
    group = draw(st.integers(1, 3)) if "group" in wanted else 1
    stages = workers * chunks * group + draw(st.integers(0, 5))
    workers, stages, microbatches = fitting(name, workers, stages, draw(st.integers(1, 6))).values()
    costs = draw(random_costs(stages))
    drawn = {
        "workers": workers, "chunks": chunks, "group": group, "costs": costs, "microbatches": microbatches,
        "k": draw(st.integers(0, stages)), "input_gradient": draw(st.booleans()), "memory_ratio": math.inf,
        "regions": draw(st.integers(1, 9)), "streams": draw(st.integers(1, 2)),
        "fusion": draw(st.sampled_from(["none", "forward", "backward"])),
        "priority": draw(st.sampled_from(["first-ready", "first-stage"])),
    }  # fmt: skip
    arguments = {key: value for key, value in drawn.items() if key in wanted}
    if "rounds" in wanted:
        arguments["microbatches"] = workers * draw(st.integers(1, 3))
    unweighted = draw(st.sets(st.integers(0, stages - 1), max_size=stages))
    return BUILDERS[name](stages=stages, unweighted=unweighted, **arguments), costs


def check(schedule: Schedule, costs: Costs) -> None:
    validate(schedule)
    found = simulate(schedule, costs)
    serial = sum(
        costs.duration(action) for lane in schedule.lanes for cell in lane.cells for action in actions_of(cell)
    )
    assert depth(schedule.graph, costs) <= found.makespan <= serial
    assert simulate(schedule, costs, steps=2).makespan <= 2 * serial


def test_all_builders_are_here():
    assert SHAPES.keys() == BUILDERS.keys()


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_valid_and_within_bounds(name, data):
    schedule, costs = data.draw(built(name))
    check(schedule, costs)


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"pipedream", "dualpipe-2018", "dualpipe", "forward-only"}))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_with_synchronisation_and_updates(name, data):
    """Synchronisations and updates go with every synchronous technique."""
    if name in ("ooo", "ooo-list"):
        schedule = BUILDERS[name](stages=6, fusion=None, **{"memory_ratio": math.inf} if name == "ooo" else {})
        costs = data.draw(random_costs(6))
    else:
        schedule, costs = data.draw(built(name))
    if schedule.graph.updates == "none" and not schedule.graph.synchronised:
        schedule = synchronise(schedule, costs=costs)
    before = [action for action in schedule if action.kind != "U"]
    for fusion in ("none", "forward", "backward"):
        fused = place_updates(schedule, fusion)
        check(fused, costs)
        assert [action for action in fused if action.kind != "U"] == before
        assert place_updates(fused, fusion) == fused
        assert sum(action.kind == "U" for action in fused) == sum(map(fused.graph.weighted, range(fused.graph.stages)))
        assert fused.name.count("fusion") == (fusion != "none")
