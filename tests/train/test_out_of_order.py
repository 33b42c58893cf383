"""Schedules that are found while a model trains: the same numbers, measured costs, files, the memory cap."""

from __future__ import annotations

import numpy as np
import pytest

import orders
from sparsebp import models, nn, optim
from sparsebp.errors import MemoryLimitError, OptionError
from sparsebp.schedule import Action, read_costs, read_csv, simulate
from sparsebp.schedule.costs import Costs, StageBytes
from sparsebp.train import Trainer
from sparsebp.train.out_of_order import COSTS_NAME, MEASURED, SCHEDULE_NAME, OutOfOrderExecutor
from sparsebp.train.profile import SideBySide, Span, measured_costs

IMAGES = np.random.default_rng(0).standard_normal((60, 3, 8, 8)).astype(np.float32)
MODELS = {
    "mlp": (orders.mlp, orders.images), "conv": (orders.conv, orders.images),
    "densenet": (
        lambda: models.densenet(3, 3, depth=7, growth=2, blocks=2, width=0.5, rng=0),
        lambda: orders.Rows(IMAGES[:22], orders.CLASSES),
    ),
}  # fmt: skip


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
    history = trainer.fit(data, epochs=5, batch_size=5)
    expected = wanted.fit(data, epochs=5, batch_size=5)
    found = trainer.found_schedule
    assert found is not None and found.schedule.name.startswith("out-of-order")
    assert (history.loss, history.grad_norm, history.samples) == (expected.loss, expected.grad_norm, expected.samples)
    orders.assert_same(
        orders.state_of(trainer.model, trainer.optimizer), orders.state_of(wanted.model, wanted.optimizer)
    )
    assert 0 < found.memory <= found.memory_cap == 1.1
    assert found.speedup > 0 and found.costs.slowdown >= 1
    assert f"{found.memory:.2f}" in found.describe() and "cap 1.1" in found.describe()


def test_the_schedule_is_saved_and_used_again(tmp_path):
    trainer, data = trainer_of("mlp", checkpoint_dir=tmp_path)
    trainer.fit(data, epochs=4, batch_size=5)
    found = trainer.found_schedule
    assert read_csv(tmp_path / SCHEDULE_NAME).lanes == found.schedule.lanes
    costs = read_costs(tmp_path / COSTS_NAME)
    assert simulate(found.schedule, costs).makespan == pytest.approx(simulate(found.schedule, found.costs).makespan)
    resumed, _ = trainer_of("mlp", checkpoint_dir=tmp_path)
    resumed.fit(data, epochs=5, batch_size=5, resume=True)
    assert resumed.found_schedule is None and resumed.order.lanes == found.schedule.lanes
    again, _ = trainer_of("mlp")
    again.fit(data, epochs=5, batch_size=5)
    orders.assert_same(resumed.model.state_dict(), again.model.state_dict())
    first = again.found_schedule
    again.fit(data, epochs=1, batch_size=5)
    assert again.found_schedule is first and again.order is first.schedule
    other, images = trainer_of("conv", checkpoint_dir=tmp_path)  # another model in the same folder
    other.fit(images, epochs=1, batch_size=5)
    assert other.order.name.startswith("conventional")


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
    executor.step([batch])
    assert executor.found is None
    executor.step([batch])
    assert executor.found is not None
    executor.flush()
    executor.close()


def layer_output(stages, count, x):
    for _, layer in stages[:count]:
        x, _ = layer.forward(x)
    return x


def test_slowdown_side_by_side():
    """F of 1 s runs for 1.5 s, all of it beside W, which does as much less: both at 2/3 of their speed."""
    forward, weight, update = Action(0, "F", 0), Action(0, "W", 0), Action(0, "U")
    from sparsebp.schedule import Schedule, StepGraph

    schedule = Schedule.of(StepGraph(1, updates="step", first="I"), [{"main": [forward], "sub": [weight, update]}])
    costs = Costs({"F": 1.0, "W": 2.0, "U": 0.5}, (StageBytes(),))
    spans = [Span(forward, 0.0, 1.5), Span(weight, 0.0, 2.5), Span(update, 2.5, 3.0)]
    beside = SideBySide.of(spans, schedule, costs)
    assert dict(beside.overlapped) == {forward: 1.5, weight: 1.5, update: 0.0}
    assert beside.slowdown([forward]) == pytest.approx(1.5)
    assert beside.slowdown([weight]) == pytest.approx(1.5)
    assert beside.slowdown() == pytest.approx(1.5)
    assert beside.slowdown([update]) == pytest.approx(1.5)  # beside nothing: that of all
    assert beside.slowdown([Action(0, "I", 0)]) == pytest.approx(1.5)


def test_measured_costs_are_medians():
    spans = [Span(Action(0, "F", 0), 0.0, t) for t in (1.0, 9.0, 2.0)]
    costs = measured_costs(spans, (StageBytes(), StageBytes()))
    assert costs.duration(Action(0, "F", 0)) == 2.0
    assert costs.duration(Action(1, "W", 0)) == 0.0


def test_a_cap_that_nobody_can_meet_is_refused():
    trainer, data = trainer_of("mlp", memory_cap=0.01)
    with pytest.raises(MemoryLimitError, match="cap") as caught:
        trainer.fit(data, epochs=MEASURED, batch_size=5)
    assert "memory_cap=" in str(caught.value.expected)
    with pytest.raises(OptionError, match="memory_cap"):
        trainer_of("mlp", memory_cap=0)
