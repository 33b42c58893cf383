"""The benchmark of asynchronous pipelines: four stages, all sides, and verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import schedules, workloads
from sparsebp import nn

pytest.importorskip("mlxtend")
SIDES = [side for side, (schedule, *_) in schedules.SIDES.items() if schedule]


def trained(name, side, *, rate=1e-2, steps=12, seed=0, measured=True):
    network = workloads.NETWORKS[name]
    return schedules.train(name, network.quick, network.data(10), side, rate, 8, steps, seed, measured=measured)


@pytest.mark.parametrize("name", workloads.NETWORKS)
def test_networks_have_four_stages_with_gradients_of_the_whole_chain(name):
    network = workloads.NETWORKS[name]
    model, loss = network.build(np.random.default_rng(0), **network.quick), nn.CrossEntropyLoss()
    parts = [layer for _, layer in model.stages()]
    assert len(parts) == workloads.STAGES and all(part.parameters() for part in parts)
    train, test = network.data(10)
    x, target = train.batch(np.arange(3))
    flat = nn.Sequential(*(layer for part in parts for layer in part.body.children.values()))
    logits, saved = model.forward(x)
    expected, own = flat.forward(x)
    np.testing.assert_array_equal(logits, expected)
    assert logits.shape == (3, 10) and len(test) == 10
    gy = loss.input_grad(loss.forward(logits, target)[1])
    grads, twins = model.weight_grad(gy, saved), flat.weight_grad(gy, own)
    assert grads.keys() == model.parameters().keys()
    for one, other in zip(grads.values(), twins.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert sum(float(abs(grad).sum()) for grad in grads.values()) > 0


@pytest.mark.parametrize("layer", [workloads.LastStep(), workloads.BatchFirst()])
def test_gradients_of_the_small_layers(layer):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 3, 2))
    y, saved = layer.forward(x)
    gy = rng.standard_normal(y.shape)
    change = rng.standard_normal(x.shape)
    moved, _ = layer.forward(x + change)  # linear: a difference is exact
    np.testing.assert_allclose((gy * (moved - y)).sum(), (layer.input_grad(gy, saved) * change).sum(), rtol=1e-12)


def test_every_side_sees_the_same_first_batch_and_only_the_weights_differ():
    runs = {side: trained("SNN", side) for side in schedules.SIDES}
    first = {run.losses[0] for run in runs.values()}
    assert len(first) == 1 and math.isfinite(first.pop())
    assert len({tuple(run.losses) for side, run in runs.items() if side != "finite difference"}) == len(runs) - 1
    same = runs["SpecTrain"].losses, runs["finite difference"].losses
    np.testing.assert_allclose(*same, rtol=1e-3, err_msg="with momentum, at one rate, both are one predictor")


@pytest.mark.parametrize("side", SIDES)
def test_runs_can_be_repeated_and_measuring_changes_nothing(side):
    one, other = trained("GRU", side), trained("GRU", side, measured=False)
    assert one.losses == other.losses and one.accuracy == other.accuracy
    assert one.distances and not other.distances


def test_the_steady_differences_are_the_papers():
    """Chen et al., 2018, Eq. 5 and 6, for N = 4: s = 2 N − k − 2 of forwards and k of backwards."""
    seen = {(d.action.kind, d.action.stage): d.ahead for d in trained("SNN", "SpecTrain", steps=20).distances
            if d.action.microbatch == 9}  # fmt: skip
    assert [seen["F", k] for k in range(4)] == [6, 5, 4, 3]
    assert [seen["I", k] for k in range(4)] == [0, 1, 2, 3]


def test_a_run_that_diverges_counts_as_guessing():
    run = trained("SNN", "vanilla", rate=1e6)
    assert not math.isfinite(run.losses[-1]) and run.accuracy == 0.1
    row = schedules.summary([run, run], [run, run])
    assert row["diverged"] == 2 and row["loss"][-1] is None


def test_intervals_verdicts_and_curves():
    mean, width = schedules.interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert mean == 3 and width == pytest.approx(2.7764451 * np.sqrt(2.5 / 5))
    assert schedules.verdict(-0.1, 0.2) == "within noise"
    assert (schedules.verdict(-0.3, 0.2), schedules.verdict(0.3, 0.2)) == ("below", "above")
    assert schedules.curve([1.0, 3.0], 2) == [1.0, 3.0]
    assert np.isnan(schedules.curve([1.0], 2)[1])
