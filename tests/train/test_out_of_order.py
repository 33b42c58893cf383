"""Schedules found while a model trains: same numbers, measured costs, the fastest kept, the memory cap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orders
from schedules import costs as any_costs
from sparsebp import models, nn, optim
from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.runtime import PlainExecutor
from sparsebp.runtime.measure import Span, _arrays, measured_costs, measured_slowdowns, with_dispatch_latency
from sparsebp.runtime.search import (
    COSTS_NAME,
    MEASURED,
    ROUNDS,
    SCHEDULE_NAME,
    FoundSchedule,
    OutOfOrderExecutor,
    ScheduleTrial,
    all_schedules,
    candidates,
)
from sparsebp.schedule import Action, Schedule, StepGraph, read_costs, read_csv, simulate
from sparsebp.schedule.costs import Costs, StageBytes
from sparsebp.train import Trainer

IMAGES = np.random.default_rng(0).standard_normal((60, 3, 8, 8)).astype(np.float32)
MODELS = {
    "mlp": (orders.mlp, orders.images), "conv": (orders.conv, orders.images),
    "densenet": (
        lambda: models.densenet(3, 3, depth=7, growth=2, blocks=2, width=0.5, rng=0),
        lambda: orders.Rows(IMAGES[:22], orders.CLASSES),
    ),
}  # fmt: skip


EPOCHS = 20
"""Enough to find a schedule with four whole batches each."""


def trainer_of(name, schedule="ooo", **options):
    make, data = MODELS[name]
    model = make()
    optimizer = optim.Adam(model.parameters(), 0.01)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, schedule=schedule, rng=3, **options), data()


@pytest.mark.parametrize("name", MODELS)
def test_finding_a_schedule_changes_no_number(name):
    """Before, while and after: the batches of 22 samples are 5, 5, 5, 5 and 2."""
    trainer, data = trainer_of(name)
    wanted, _ = trainer_of(name, "conventional")
    history = trainer.fit(data, epochs=EPOCHS, batch_size=5)
    expected = wanted.fit(data, epochs=EPOCHS, batch_size=5)
    found = trainer.found_schedule
    names = [trial.name for trial in found.trials]
    assert names[:2] == ["conventional", "fused"] and set(names[2:]) <= {"two", "joint", "list"}
    assert (history.loss, history.grad_norm, history.samples) == (expected.loss, expected.grad_norm, expected.samples)
    orders.assert_same(
        orders.state_of(trainer.model, trainer.optimizer), orders.state_of(wanted.model, wanted.optimizer)
    )
    assert 0 < found.memory <= found.memory_ratio == 1.1
    assert found.speedup >= 1 and (found.fastest is found.trials[0] or found.fastest.slowest < found.trials[0].seconds)
    assert f"{found.memory:.2f}" in found.describe() and "at most 1.1" in found.describe()


def test_the_schedule_is_saved_and_used_again(tmp_path):
    trainer, data = trainer_of("mlp", checkpoint_dir=tmp_path)
    trainer.fit(data, epochs=EPOCHS, batch_size=5)
    found = trainer.found_schedule
    assert read_csv(tmp_path / SCHEDULE_NAME).lanes == found.schedule.lanes
    costs = read_costs(tmp_path / COSTS_NAME)
    assert simulate(found.schedule, costs).makespan == pytest.approx(simulate(found.schedule, found.costs).makespan)
    resumed, _ = trainer_of("mlp", checkpoint_dir=tmp_path)
    resumed.fit(data, epochs=EPOCHS + 1, batch_size=5, resume=True)
    assert resumed.found_schedule is None and resumed.current_schedule.lanes == found.schedule.lanes
    again, _ = trainer_of("mlp")
    again.fit(data, epochs=EPOCHS + 1, batch_size=5)
    orders.assert_same(resumed.model.state_dict(), again.model.state_dict())
    first = again.found_schedule
    again.fit(data, epochs=1, batch_size=5)
    assert again.found_schedule is first and again.current_schedule is first.schedule
    again.schedule, again.fusion = "conventional", "forward"  # no longer what was found
    again.fit(data, epochs=1, batch_size=5)
    assert again.current_schedule.graph.first == "U"
    other, images = trainer_of("conv", checkpoint_dir=tmp_path)  # another model in the same folder
    other.fit(images, epochs=1, batch_size=5, overwrite=True)
    assert other.current_schedule.name.startswith("conventional")


def test_costs_are_those_of_the_model():
    make, data = MODELS["conv"]
    model = make()
    executor = OutOfOrderExecutor(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), steps=1)
    batch = data().batch(range(4))
    for _ in range(2):
        assert executor.costs is None
        executor.step([batch])
    costs, stages = executor.costs, model.stages()
    for number, (_, layer) in enumerate(stages):
        parameters = layer.parameters()
        assert costs.bytes_of(number).weights == sum(array.nbytes for array in parameters.values())
        assert costs.duration(Action(number, "F", 0)) > 0
        assert (costs.duration(Action(number, "W", 0)) > 0) == bool(parameters)
        assert (costs.duration(Action(number, "I", 0)) > 0) == (number > 0)
    x, _ = batch
    assert costs.bytes_of(0).output == layer_output(stages, 1, x).nbytes
    assert costs.bytes_of(7).saved == 0 or costs.bytes_of(7).saved >= 4 * 20 * 4  # its input is what Flatten passed on
    for _ in range(2):
        executor.step([batch])
        assert executor.found is None
    assert all(executor.costs.slowdown_of(action) >= 1 for action in executor.schedule)
    executor.close()


def layer_output(stages, count, x):
    for _, layer in stages[:count]:
        x, _ = layer.forward(x)
    return x


def found_by(monkeypatch, seconds):
    """Return an executor of the mlp that has found a schedule; a step takes `seconds(schedule, costs)`."""
    make, data = MODELS["mlp"]
    model, now, run = make(), [0.0], PlainExecutor.step
    executor = OutOfOrderExecutor(
        model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), memory_ratio=2.0, steps=ROUNDS,
        clock=lambda: now[0],
    )  # fmt: skip

    def step(self, batches, tag=None):
        now[0] += seconds(self.schedule, executor.costs)
        return run(self, batches, tag)

    monkeypatch.setattr(PlainExecutor, "step", step)
    batch = data().batch(range(4))
    while executor.found is None:
        executor.step([batch])
    executor.close()
    return executor


@pytest.mark.parametrize("fastest", range(5))
def test_the_fastest_by_the_clock_is_kept(monkeypatch, fastest):
    """And that is the conventional order, the first one, where nothing gains."""
    names = ["conventional", "fused", "two", "joint", "list"]
    told = {name: 2.0 + number for number, name in enumerate(names)} | {names[fastest]: 1.0 if fastest else 2.0}
    executor = found_by(monkeypatch, lambda schedule, _: seconds_of(schedule, told))
    found = executor.found
    assert {trial.name: trial.seconds for trial in found.trials} == told
    assert found.fastest.name == names[fastest] and executor.schedule is found.schedule
    assert found.speedup == (2.0 if fastest else 1.0)


@pytest.mark.parametrize(("rounds", "kept"), [
    ({"fused": (0.97, 1.02)}, "conventional"),  # near equals: noise is not to decide
    ({"fused": (0.90, 0.99)}, "fused"),
    ({"fused": (0.90, 0.99), "list": (0.80, 1.01)}, "fused"),
    ({"fused": (0.90, 0.99), "list": (0.80, 0.81)}, "list"),
])  # fmt: skip
def test_the_conventional_order_stays_unless_another_is_faster_beyond_the_spread(rounds, kept):
    model, _ = MODELS["mlp"]
    size = {"stages": len(model().stages()), "unweighted": frozenset()}
    known = Costs({"F": 1.0, "W": 1.0, "I": 1.0, "U": 0.1}, (StageBytes(),) * size["stages"])
    schedules = all_schedules(size, known)
    trials = [ScheduleTrial(name, schedules[name], 1.0) for name in ("conventional", *rounds)]
    both = [rounds.get(trial.name, (1.0, 1.1)) for trial in trials]
    found = FoundSchedule(
        tuple(trial.measured(slow).measured(fast) for trial, (fast, slow) in zip(trials, both, strict=True)), known, 1.1
    )
    assert found.fastest.name == kept and found.speedup >= 1


@pytest.mark.parametrize("paused", range(3))
def test_a_pause_in_one_round_of_the_conventional_order_lets_no_other_one_win(monkeypatch, paused):
    """All take one second, but for a round of the conventional order, in which the machine did something else."""
    rounds = [0]

    def seconds(schedule, costs):
        if schedule.name != "conventional" or costs is None:
            return 1.0
        rounds[0] += 1
        return 1.0 + 9.0 * ((rounds[0] - 1) // 2 == paused)  # of the two steps of a round one is counted

    executor = found_by(monkeypatch, seconds)
    assert rounds[0] == 2 * ROUNDS
    assert {trial.seconds for trial in executor.found.trials} == {1.0}
    assert executor.found.trials[0].slowest == 10.0
    assert executor.found.fastest.name == "conventional"


def seconds_of(schedule: Schedule, told: dict[str, float]) -> float:
    if schedule.name == "out-of-order, list scheduling, backward-fusion":
        return told["list"]
    if schedule.name.startswith("out-of-order"):
        return told["joint"]
    known = {"conventional": "conventional", "conventional, backward-fusion": "fused",
             "conventional, two streams, backward-fusion": "two"}  # fmt: skip
    return told[known[schedule.name]] if schedule.name in known else 0.0


@given(st.data(), st.integers(1, 8), st.floats(0.2, 2))
def test_candidates_stay_below_the_cap(data, stages, cap):
    unweighted = data.draw(st.sets(st.integers(0, stages - 1), max_size=stages - 1))
    size = {"stages": stages, "unweighted": frozenset(unweighted)}
    known = data.draw(any_costs(stages))
    try:
        trials = candidates(size, known, cap)
    except MemoryLimitError as error:
        assert float(str(error.expected).split("=")[1].split()[0]) > cap
        return
    assert trials[0].name == "conventional" and trials[0].memory == 1
    peak = simulate(trials[0].schedule, known).peak
    for trial in trials[1:]:
        assert trial.memory <= cap
        assert simulate(trial.schedule, known).peak == pytest.approx(trial.memory * peak)
    assert FoundSchedule(tuple(trials), known, cap).memory <= cap


FORWARD, WEIGHT, UPDATE = Action(0, "F", 0), Action(0, "W", 0), Action(0, "U")
STREAMS = Schedule.of(StepGraph(1, updates="step", first="I"), [{"main": [FORWARD], "sub": [WEIGHT, UPDATE]}])


def test_slowdowns_side_by_side():
    """F of 1 s runs for 1.5 s, all of it beside W, which does as much less: both at 2/3 of their speed."""
    costs = Costs({"F": 1.0, "W": 2.0, "U": 0.5}, (StageBytes(),))
    spans = [Span(FORWARD, 0.0, 1.5), Span(WEIGHT, 0.0, 2.5), Span(UPDATE, 2.5, 3.0)]
    slowdowns = measured_slowdowns(spans, STREAMS, costs)
    for action in (FORWARD, WEIGHT, UPDATE, Action(0, "I", 0)):  # the last two ran beside nothing: as all together
        assert slowdowns(action) == pytest.approx(1.5)
    paused = [Span(action, start + 9, end + 9 + 3 * (action is FORWARD)) for action, start, end in spans]
    later = [Span(action, start + 20, end + 20) for action, start, end in spans]
    assert measured_slowdowns([*spans, *paused, *later], STREAMS, costs)(FORWARD) == pytest.approx(1.5)


def test_getting_to_work_is_part_of_it():
    """What lies between two actions counts for the second, not what lies between two steps."""
    spans = [Span(FORWARD, 1.0, 2.0), Span(WEIGHT, 2.5, 3.0), Span(UPDATE, 3.25, 4.0), Span(FORWARD, 9.0, 9.5),
             Span(WEIGHT, 9.75, 10.0)]  # fmt: skip
    assert with_dispatch_latency(spans, STREAMS) == [
        Span(FORWARD, 1.0, 2.0), Span(WEIGHT, 2.5, 3.0), Span(UPDATE, 3.0, 4.0), Span(FORWARD, 9.0, 9.5),
        Span(WEIGHT, 9.5, 10.0),
    ]  # fmt: skip


def test_waiting_for_the_gradients_inside_a_stage_is_no_work():
    own = Action(1, "I", 0)
    graph = StepGraph(2, first="I")
    schedule = Schedule.of(graph, [{"main": [own, FORWARD, Action(1, "F", 0)], "sub": [Action(1, "W", 0), WEIGHT]}])
    spans = [Span(own, 0.0, 2.0), Span(Action(1, "W", 0), 0.0, 3.0)]
    assert with_dispatch_latency(spans, schedule, {1})[1] == Span(Action(1, "W", 0), 2.0, 3.0)
    assert with_dispatch_latency(spans, schedule) == spans


def test_measured_costs_are_medians():
    spans = [Span(Action(0, "F", 0), 0.0, t) for t in (1.0, 9.0, 2.0)]
    costs = measured_costs(spans, (StageBytes(), StageBytes()))
    assert costs.duration(Action(0, "F", 0)) == 2.0
    assert costs.duration(Action(1, "W", 0)) == 0.0


def test_a_cap_that_nobody_can_meet_is_refused():
    trainer, data = trainer_of("mlp", memory_ratio=0.01)
    with pytest.raises(MemoryLimitError, match="memory ratio") as caught:
        trainer.fit(data, epochs=MEASURED, batch_size=5)
    assert "memory_ratio=" in str(caught.value.expected)
    with pytest.raises(OptionError, match="memory_ratio"):
        trainer_of("mlp", memory_ratio=0)


def test_bytes_are_those_of_all_buffers_that_are_kept_each_once():
    a, b = np.zeros(3), np.zeros((2, 5))
    assert dict(_arrays({"a": [a, (b.T, 1)], "b": b[:1], "c": None})) == {id(a): 24, id(b): 80}
