"""Stages that keep their inputs alone and run their forwards again: the same bits, less memory between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import orders
import pipelines as p
from sparsebp import nn
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError
from sparsebp.runtime.actions import Recomputed, Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.replicas import ReplicaExecutor
from sparsebp.schedule.builders import data_parallel


def model(generator=None):
    """Stages that draw, and have running statistics; two draw from one generator if it is given."""
    g = [generator or np.random.default_rng(n) for n in range(2)]
    return nn.Sequential(
        nn.Stage(nn.Linear(7, 9, dtype=float, rng=0), nn.BatchNorm1d(9, dtype=float), nn.Dropout(0.4, rng=g[0])),
        nn.Stage(nn.Tanh(), nn.Linear(9, 8, dtype=float, rng=1), nn.Dropout(0.3, rng=g[1])),
        nn.Tanh(), nn.Stage(nn.Linear(8, 6, dtype=float, rng=2), nn.Dropout(0.2, rng=3)),
        nn.Linear(6, 3, dtype=float, rng=4),
    )  # fmt: skip


STEPS = [p.batches("mlp", sizes, seed=seed) for seed, sizes in enumerate(([3, 4, 3], [3, 4, 3], [2, 5]))]


@pytest.mark.parametrize("recomputed", [{0}, {1, 3}, {0, 1, 2, 3, 4}])
@pytest.mark.parametrize("shared", [False, True])
def test_one_worker(recomputed, shared):
    def run(again):
        one = model(np.random.default_rng(1) if shared else None)
        schedule = replace(orders.order_for(one, microbatches=3, fusion="none"), recomputed=frozenset(again))
        optimizer = p.momentum(one)
        executor = PlainExecutor(one, nn.CrossEntropyLoss(), optimizer, schedule, graph=False)
        losses = [step.loss for batches in STEPS for step in executor.step(batches)]
        executor.flush()
        states = {name: g.bit_generator.state["state"] for name, g in one.generators().items()}
        return losses, p.digest(p.state_of(one, optimizer)), states

    assert run(recomputed) == run(())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe-v", "modulo"])
def test_pipelines(schedule):
    sizes = p.filling(schedule, 2, [3, 2, 4])
    steps = [p.batches("mlp", sizes, seed=seed) for seed in range(2)]

    def placed(one, again):
        return replace(p.schedule_of(schedule, one, 2, len(sizes)), recomputed=frozenset(again))

    wanted = p.alone(model, p.momentum, steps)
    for again in ((), {0, 3}, range(5)):
        found = p.on_ranks(2, model, p.momentum, steps, lambda one, again=again: placed(one, again))
        assert found[0] == wanted[0] and p.digest(found[1]) == p.digest(wanted[1])


def test_replicas_draw_the_same_rows_again():
    def run(again):
        def work(transport):
            one = model()
            schedule = data_parallel(stages=5, microbatches=3, unweighted=Stages(one).unweighted)
            optimizer = p.momentum(one)
            executor = ReplicaExecutor(one, nn.CrossEntropyLoss(), optimizer,
                                       replace(schedule, recomputed=frozenset(again)), transport)  # fmt: skip
            for batches in [p.batches("mlp", [5, 4, 6], seed=seed) for seed in range(2)]:
                executor.step([tuple(part[executor.own(np.arange(len(part)))] for part in one) for one in batches])
            executor.flush()
            return p.digest(one.state_dict())

        return run_ranks(2, work)

    assert run({0, 1, 3}) == run(())


def test_between_forward_and_backward_the_input_alone_is_there():
    one, kept = model(), []
    schedule = replace(orders.order_for(one, microbatches=2, fusion="none"), recomputed=frozenset({0, 1}))
    executor = PlainExecutor(one, nn.CrossEntropyLoss(), p.momentum(one), schedule, graph=False)
    loss = executor._actions.loss
    inner = loss.input_grad
    steps = []
    before = executor._actions.observer.loss
    executor._actions.observer.loss = lambda step, m, value: (steps.append(step), before(step, m, value))
    loss.input_grad = lambda saved: (kept.append([type(s) is Recomputed for s in steps[-1].saved[0]]), inner(saved))[1]
    executor.step(STEPS[0][:2])
    assert kept[0][:2] == [True, True] and not any(kept[0][2:])


def test_what_cannot_be_computed_again_is_refused():
    def asynchronous(transport):
        one = model()
        schedule = replace(p.schedule_of("pipedream", one, 2, 2), recomputed=frozenset({0}))
        p.executor(one, schedule, transport)

    with pytest.raises(OptionError, match="recomputes stages"):
        run_ranks(2, asynchronous)
