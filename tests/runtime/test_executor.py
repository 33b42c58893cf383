"""The executor: any order, on one or two streams, gives the plain loop's numbers; errors end both streams."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core import threads
from sparsebp.core.errors import NonFiniteError, OptionError, ScheduleError
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.schedule import Action, Schedule
from sparsebp.schedule.builders import conventional, data_parallel, gpipe, out_of_order
from sparsebp.schedule.files import write_csv
from sparsebp.train import Trainer

TWO_STREAMS = {"ooo": out_of_order, "two streams": partial(conventional, streams=2)}


def train(model, data, optimizer, schedule, *, epochs=2, batch_size=6, **options):
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, schedule=schedule, rng=3, **options)
    return trainer.fit(data, epochs=epochs, batch_size=batch_size)


def second_streams(alive):
    """Return the second streams' threads that were not in `alive`: another test's executor may not be collected yet."""
    return [t for t in threading.enumerate() if "second stream" in t.name and t not in alive]


@pytest.mark.parametrize("name", ["mlp", "conv"])
@pytest.mark.parametrize("build", ["ooo", "two streams", "csv"])
def test_built_schedules_of_two_streams(name, build, tmp_path):
    make, data = orders.MODELS[name]
    model, twin = make(), make()
    schedule = build
    if build == "two streams":
        schedule = orders.order_for(model, streams=2, fusion="backward")
    elif build == "csv":
        schedule = orders.order_for(model, out_of_order, regions=3)
        write_csv(schedule, tmp_path / "order.csv")
        schedule = tmp_path / "order.csv"
    opt, twin_opt = (optim.Adam(m.parameters()) for m in (model, twin))
    before, alive = threads.thread_counts(), threading.enumerate()
    history = train(model, data(), opt, schedule)
    assert threads.thread_counts() == before
    assert not second_streams(alive)
    wanted = train(twin, data(), twin_opt, "conventional")
    assert (history.loss, history.grad_norm) == (wanted.loss, wanted.grad_norm)
    orders.assert_same(orders.state_of(model, opt), orders.state_of(twin, twin_opt))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["forward", "input_grad", "weight_grad"])
@pytest.mark.parametrize("schedule", TWO_STREAMS)
def test_what_a_stream_raises_ends_both_and_comes_out_once(schedule, part, error, monkeypatch):
    model = orders.conv()
    schedule = orders.order_for(model, TWO_STREAMS[schedule], fusion="backward")
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise error("here")
        return getattr(nn.BatchNorm2d, part)(model[1], *args)

    monkeypatch.setattr(model[1], part, failing)
    alive = threading.enumerate()
    with pytest.raises(error, match="here"):
        train(model, orders.images(), optim.SGD(model.parameters()), schedule)
    assert not second_streams(alive)
    assert len(calls) == 3


@pytest.mark.parametrize("schedule", TWO_STREAMS)
def test_a_gradient_that_is_not_finite_on_the_second_stream(schedule, monkeypatch):
    model = orders.mlp()
    stages = Stages(model)
    schedule = orders.order_for(model, TWO_STREAMS[schedule], fusion="backward")
    calls = []

    def spoilt(gy, saved):
        grads = nn.Linear.weight_grad(stages[6].layer, gy, saved)
        calls.append(gy)
        if len(calls) == 3:
            grads["weight"][0, 0] = np.inf
        return grads

    monkeypatch.setattr(stages[6].layer, "weight_grad", spoilt)
    with pytest.raises(NonFiniteError, match=r"gradient is not finite at step 3 .*5\.weight"):
        train(model, orders.images(), optim.SGD(model.parameters()), schedule)


def test_a_step_and_what_it_leaves_over():
    model = orders.mlp()
    opt = optim.SGD(model.parameters(), 0.1)
    order = orders.order_for(model, fusion="forward")
    executor = PlainExecutor(model, nn.CrossEntropyLoss(), opt, order)
    assert executor.flush() == [] and not executor.pending
    before = model.state_dict()
    (step,) = executor.step([(orders.IMAGES, orders.CLASSES)], "tag")
    assert (step.tag, executor.pending, len(step.values)) == ("tag", True, 1)
    orders.assert_same(model.state_dict(), before)
    assert executor.flush() == [] and not executor.pending
    assert any((array != before[name]).any() for name, array in model.state_dict().items())


def refused(schedule, model, **options):
    with pytest.raises((OptionError, ScheduleError)) as caught:
        train(model, orders.images(), optim.SGD(model.parameters()), schedule, **options)
    assert caught.value.expected is not None and caught.value.got is not None and caught.value.remedy
    return str(caught.value)


def test_schedules_that_do_not_fit():
    model = orders.mlp()
    assert "not of this model" in refused(conventional(stages=3), model)
    assert "number of micro-batches" in refused(orders.order_for(model, microbatches=2), model)
    assert "several workers" in refused(orders.order_for(model, gpipe, workers=2, microbatches=1), model)
    plain = orders.order_for(model)
    lane = replace(plain.lanes[0], cells=tuple(cell for cell in plain.lanes[0].cells if cell.kind != "U"))
    without = Schedule(replace(plain.graph, updates="none"), (lane,))
    assert "does not update" in refused(without, model)
    scans = orders.mlp()
    scans.set_backward("blelloch")
    assert "recomputes" in refused(replace(plain, recomputed=frozenset({1})), scans)
    lanes = {"main": [], "sub": []}
    for action in plain:
        lanes["sub" if action == Action(0, "F", 0) else "main"].append(action)
    assert "forwards on both" in refused(Schedule.of(plain.graph, [lanes]), model)
    backward = list(reversed(list(plain)))
    assert "deadlocked" in refused(Schedule.of(plain.graph, [backward]), model)


def test_what_does_not_go_with_schedules():
    assert "scan" in refused("ooo", orders.mlp("hybrid"))
    assert "share" in refused("ooo", orders.shared())
    assert "norm" in refused("ooo", orders.mlp(), clip_norm=1.0)
    assert "micro-batch" in refused("ooo", orders.mlp(), accumulate=2)
    assert "itself" in refused("ooo", orders.mlp(), fusion="backward")
    model = orders.mlp()
    assert "norm" in refused(orders.order_for(model, fusion="backward"), model, clip_norm=1.0)


def test_a_schedule_with_sums_is_refused_as_such_where_a_stage_is_frozen():
    model = nn.Sequential(nn.Linear(3, 4, rng=0), nn.Linear(4, 3, rng=1))
    first = {name: array for name, array in model.parameters().items() if name.startswith("0.")}
    with pytest.raises(OptionError, match="synchronises gradients of one device"):
        PlainExecutor(model, nn.CrossEntropyLoss(), optim.SGD(first, lr=0.1), data_parallel(stages=2, microbatches=1))
