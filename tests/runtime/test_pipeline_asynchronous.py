"""Asynchronous pipelines: every action reads its scheduled version; masters are restored bit for bit."""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines as p
import schedules
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError
from sparsebp.nn.gradients import gradients_of
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.pipeline import Versions, units
from sparsebp.schedule import Action, StepGraph, parts_of, simulate

PREDICTORS = {
    "none": None, "momentum": optim.MomentumPredictor, "rule": optim.OptimizerRulePredictor,
    "difference": optim.FiniteDifferencePredictor,
}  # fmt: skip


class Reference:
    """One thread that keeps every version of all weights, and takes which one to read from the simulator."""

    def __init__(self, model, optimizer, schedule, predictor=None, note=None):
        self.stages, self.live, self.optimizer = Stages(model).all, model.parameters(), optimizer
        self.schedule, self.predictor, self.note = schedule, predictor, note
        self.simulation = simulate(schedule, units(schedule))

    def step(self, batches):
        self.seen = []
        self.versions = [[self.copy(stage)] for stage in range(len(self.stages))]
        flow, gy, saved, grads, values = {}, {}, {}, {}, {}
        last, loss = len(self.stages) - 1, nn.CrossEntropyLoss()
        for number in self.schedule.cells.in_turn():
            for action in parts_of(self.schedule.cells.cells[number]):
                k, kind, m = action
                layer = self.stages[k].layer
                if kind == "F":
                    with self.reading(action):
                        flow[m], saved[k, m] = layer.forward(flow[m] if k else batches[m][0])
                    if k == last:
                        values[m], kept = loss.forward(flow[m], batches[m][1])
                        gy[m, k] = loss.input_grad(kept)
                elif kind == "I" and k > 0:
                    with self.reading(action):
                        gy[m, k - 1] = gradients_of(layer, gy[m, k], saved[k, m]).input_grad()
                elif kind == "W":
                    with self.reading(Action(k, "I", m), told=False):
                        found = gradients_of(layer, gy[m, k], saved[k, m]).weight_grad()
                    grads[k, m] = {self.stages[k].parameters[key]: grad for key, grad in found.items()}
                elif kind == "U":
                    self.optimizer.begin().apply(grads[k, m])
                    if self.predictor is not None:
                        self.predictor.observe(grads[k, m], grads[k, m])
                    self.versions[k].append(self.copy(k))
        counts = [len(batch[1]) for batch in batches]
        if self.note is not None:
            self.tell()
        return sum(n / sum(counts) * values[m] for m, n in enumerate(counts))

    def copy(self, stage):
        return {name: self.live[name].copy() for name in self.stages[stage].parameters.values()}

    def ahead(self, action):
        horizon = "round trip" if self.predictor is None else self.predictor.horizon
        return getattr(self.simulation, "staleness" if horizon == "update" else "version_difference")(action)

    @contextmanager
    def reading(self, action, told=True):
        stage = action.stage
        if not self.stages[stage].parameters:
            yield
            return
        versions = self.versions[stage]
        version = len(versions) - 1
        if told or self.schedule.graph.weights == "stashed":  # a W apart from its I reads the newest, or as its forward
            version = self.simulation.version(action if told else Action(stage, "F", action.microbatch))
        weights = versions[version]
        if self.predictor is not None and action.kind in self.predictor.kinds:
            weights = self.predictor.predict(list(weights), max(0, self.ahead(action)))
        if told and self.note is not None:
            self.seen.append((action, weights, len(versions) - 1))
        for name, values in weights.items():
            self.live[name][...] = values
        yield
        for name, values in versions[-1].items():
            self.live[name][...] = values

    def tell(self):
        """Turn what was read into distances."""
        found = {}
        for action, weights, newest in self.seen:
            versions = self.versions[action.stage]
            true = versions[max(newest, self.simulation.version(action) + self.ahead(action))]
            found[action] = self.ahead(action), rms(weights, true), rms(versions[newest], true)
        self.note[:] = [found]


def rms(one, other):
    return float(np.sqrt(np.mean(np.concatenate([np.square(one[name] - other[name]).ravel() for name in other]))))


def on_ranks(size, make, schedule_of, steps, predictor=None, measured=False, optimizer=p.momentum):
    def work(transport):
        model = make()
        own = optimizer(model)
        distances = []
        options = {"predictor": predictor and predictor(own), "note": distances.append if measured else None}
        executor = p.executor(model, schedule_of(model), transport, optimizer=own, **options)
        losses = [step.loss for batches in steps for step in executor.step(batches)]
        executor.flush()
        return losses, p.state_of(model, own), executor.reads, distances

    results = run_ranks(size, work)
    for other in results[1:]:
        assert other[0] == results[0][0] and p.digest(other[1]) == p.digest(results[0][1])
    reads = {action: version for result in results for action, version in result[2].items()}
    return results[0][0], results[0][1], reads, [distance for result in results for distance in result[3]]


def one_thread(make, schedule_of, steps, predictor=None, note=None, optimizer=p.momentum):
    model = make()
    own = optimizer(model)
    reference = Reference(model, own, schedule_of(model), predictor and predictor(own), note)
    return [reference.step(batches) for batches in steps], p.state_of(model, own), reference.simulation


def versions_of(simulation):
    """Return the version that the simulator says for every F and I of a stage with weights."""
    graph = simulation.schedule.graph
    actions = [Action(k, kind, m) for k in range(graph.stages) for m in range(graph.microbatches) for kind in "FI"]
    return {a: simulation.version(a) for a in actions if a in simulation.schedule and graph.weighted(a.stage)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name, schedule", [
    ("mlp", "pipedream"), ("mlp", "dualpipe-2018"), ("gru", "pipedream"), ("densenet", "dualpipe-2018"),
])  # fmt: skip
def test_versions_and_losses_are_those_of_the_schedule(name, schedule, size):
    make = p.MODELS[name][0]
    sizes = [3, 2, 4, 3, 3] if name == "mlp" else [2, 3, 2]
    steps = [p.batches(name, sizes, seed=seed) for seed in range(2)]

    def build(model):
        return p.schedule_of(schedule, model, size, len(sizes))

    losses, state, reads, _ = on_ranks(size, make, build, steps)
    wanted_losses, wanted_state, simulation = one_thread(make, build, steps)
    assert losses == wanted_losses
    assert p.digest(state) == p.digest(wanted_state)
    expected = versions_of(simulation)
    assert {a: v for a, v in reads.items() if a in expected} == expected


def test_stashing_and_newest_weights_differ():
    steps = [p.batches("mlp", [3] * 6)]
    found = [
        on_ranks(4, p.mlp, lambda model, name=name: p.schedule_of(name, model, 4, 6), steps)[0]
        for name in ("pipedream", "dualpipe-2018")
    ]
    assert found[0] != found[1]


def adam(model):
    return optim.Adam(model.parameters(), lr=0.05)


@pytest.mark.parametrize("schedule, name, optimizer", [
    *(("dualpipe-2018", name, p.momentum) for name in PREDICTORS), ("dualpipe-2018", "rule", adam),
    ("pipedream", "none", p.momentum),
])  # fmt: skip
def test_stashed_or_predicted_weights_are_read_and_their_distances_told(schedule, name, optimizer):
    steps = [p.batches("mlp", [3] * 9, seed=seed) for seed in range(2)]

    def build(model):
        return p.schedule_of(schedule, model, 4, 9)

    found = on_ranks(4, p.mlp, build, steps, PREDICTORS[name], True, optimizer)
    notes = []
    wanted = one_thread(p.mlp, build, steps, PREDICTORS[name], notes, optimizer)
    assert found[0] == wanted[0]
    assert p.digest(found[1]) == p.digest(wanted[1])
    told = {d.action: (d.ahead, d.predicted, d.stale) for d in found[3]}  # of the last step
    assert told.keys() == notes[0].keys()
    for action, numbers in notes[0].items():
        np.testing.assert_allclose(told[action], numbers, rtol=1e-9, atol=1e-15, err_msg=str(action))
    assert len(found[3]) == 2 * len(told)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_versions_ahead_are_those_of_the_paper_in_the_steady_state(workers):
    """Chen et al. (2018), Eq. 5 and 6: 2 N - k - 2 forward, k backward."""
    model = nn.Sequential(*(nn.Linear(3, 3, rng=k) for k in range(workers)))
    schedule = p.schedule_of("dualpipe-2018", model, workers, 5 * workers)
    names = {k: [f"{k}.weight", f"{k}.bias"] for k in range(workers)}
    versions = Versions(names, model.parameters(), stashed=False, predictor=None, note=print)
    ahead = versions.ahead(schedule)
    for m in range(2 * workers, 3 * workers):
        assert [ahead[Action(k, "F", m)] for k in range(workers)] == [2 * workers - k - 2 for k in range(workers)]
        assert [ahead[Action(k, "I", m)] for k in range(workers)] == list(range(workers))


@given(seed=st.integers(0, 2**32 - 1), workers=st.integers(1, 4), microbatches=st.integers(1, 5),
       weights=st.sampled_from(["stashed", "latest"]))  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_any_asynchronous_schedule(seed, workers, microbatches, weights):
    """Updates may come before the input gradient of their own micro-batch, and stages lie anywhere."""
    steps = [p.batches("mlp", [2] * microbatches, seed=s) for s in range(2)]
    stages = Stages(p.mlp())
    graph = StepGraph(len(stages), microbatches, stages.unweighted, "microbatch", weights=weights)
    schedule = schedules.random_schedule(graph, random.Random(seed), workers, input_gradient=True, joined=0.5)
    found = on_ranks(schedule.workers, p.mlp, lambda _: schedule, steps)
    wanted = one_thread(p.mlp, lambda _: schedule, steps)
    assert found[0] == wanted[0]
    assert p.digest(found[1]) == p.digest(wanted[1])
    expected = versions_of(wanted[2])
    assert {a: v for a, v in found[2].items() if a in expected} == expected


@pytest.mark.parametrize("schedule", ["pipedream", "dualpipe-2018"])
def test_fewer_and_other_micro_batches(schedule):
    sizes = [[3, 3, 3, 3, 3], [2, 4], [3, 3, 3, 3, 3], [1], [3, 3, 3, 3]]
    steps = [p.batches("mlp", counts, seed=number) for number, counts in enumerate(sizes)]
    losses, state, _, _ = on_ranks(3, p.mlp, lambda model: p.schedule_of(schedule, model, 3, 5), steps)
    model = p.mlp()
    optimizer, wanted = p.momentum(model), []
    for batches in steps:
        wanted.append(Reference(model, optimizer, p.schedule_of(schedule, model, 3, len(batches))).step(batches))
    assert losses == wanted
    assert p.digest(state) == p.digest(p.state_of(model, optimizer))


def test_parameters_that_are_not_trained():
    def trains(model):
        return optim.SGD({k: v for k, v in model.parameters().items() if not k.startswith(("1.", "5."))}, lr=0.1)

    steps = [p.batches("mlp", [3] * 5, seed=seed) for seed in range(2)]
    before = p.mlp().parameters()
    for name in ("pipedream", "dualpipe-2018"):
        found = on_ranks(3, p.mlp, lambda model, n=name: p.schedule_of(n, model, 3, 5), steps, optimizer=trains)
        assert all(np.isfinite(found[0]))
        for key, value in before.items():
            assert np.array_equal(found[1][f"model.{key}"], value) == key.startswith(("1.", "5."))


def test_what_does_not_go_with_asynchronous_schedules_is_refused():
    def work(transport, name, **options):
        model = p.mlp()
        own = p.momentum(model)
        if options.pop("predicts", False):
            options["predictor"] = optim.MomentumPredictor(own)
        p.executor(model, name, transport, 3, own, **options)

    with pytest.raises(OptionError, match="norm of all gradients"):
        run_ranks(2, lambda t: work(t, "pipedream", clip_norm=1.0))
    for name in ("pipedream", "1f1b"):
        with pytest.raises(OptionError, match="predictor"):
            run_ranks(2, lambda t, name=name: work(t, name, predicts=True))
