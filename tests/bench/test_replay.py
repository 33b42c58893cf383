"""The asynchronous schedule on one thread: versions are the simulator's, numbers those of the weights' history."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn, optim
from sparsebp.bench import spectrain
from sparsebp.bench.asynchronous import networks
from sparsebp.bench.asynchronous.replay import Replay, replayed, rms, swapped
from sparsebp.schedule import Action
from sparsebp.schedule.builders import dualpipe2018, pipedream

BUILDERS = {"DualPipe": dualpipe2018, "PipeDream": pipedream}


def parts(workers, batches, momentum=0.9, rate=0.1, seed=0):
    """A chain of linear layers, one a stage, its optimizer, and batches."""
    rng = np.random.default_rng(seed)
    blocks = [nn.Sequential(nn.Linear(3, 3, rng=rng, dtype=np.float64), nn.Tanh()) for _ in range(workers)]
    optimizer = optim.SGD(nn.Sequential(*blocks).parameters(), lr=rate, momentum=momentum)
    given_ = [(rng.standard_normal((5, 3)), rng.standard_normal((5, 3))) for _ in range(batches)]
    return blocks, optimizer, given_


class Watched(Replay):
    """Notes how many updates the stage of every F and I has had when it reads its weights, and the weights."""

    def _reading(self, action):
        self.seen = getattr(self, "seen", {})
        self.read = getattr(self, "read", {})
        self.seen[action] = self._done[action.stage]
        inner = super()._reading(action)
        replay = self

        class Reading:
            def __enter__(self):
                inner.__enter__()
                block = replay.blocks[action.stage]
                replay.read[action] = {name: array.copy() for name, array in block.parameters().items()}

            def __exit__(self, *error):
                return inner.__exit__(*error)

        return Reading()


@given(workers=st.integers(1, 4), batches=st.integers(1, 9), name=st.sampled_from(sorted(BUILDERS)))
def test_actions_read_the_versions_of_the_simulation(workers, batches, name):
    blocks, optimizer, data = parts(workers, batches)
    simulation = replayed(BUILDERS[name](workers=workers, stages=workers, microbatches=batches))
    replay = Watched(blocks, nn.MSELoss(), optimizer, simulation)
    assert len(list(replay.run(data))) == batches
    for action, done in replay.seen.items():
        forward = Action(action.stage, "F", action.microbatch)
        assert simulation.version(action) == (replay.seen[forward] if name == "PipeDream" else done)
        if name == "PipeDream":
            for key, array in replay.read[forward].items():
                np.testing.assert_array_equal(replay.read[action][key], array)
    assert set(optimizer.steps.values()) == {batches}


def test_one_worker_trains_as_without_a_schedule():
    blocks, optimizer, data = parts(1, 7)
    twins, other, _ = parts(1, 7)
    replay = Replay(blocks, nn.MSELoss(), optimizer, replayed(dualpipe2018(workers=1, stages=1, microbatches=7)))
    model, loss, losses = nn.Sequential(*twins), nn.MSELoss(), []
    for x, target in data:
        y, saved = model.forward(x)
        value, kept = loss.forward(y, target)
        losses.append(value)
        other.step(model.weight_grad(loss.input_grad(kept), saved))
    assert list(replay.run(data)) == losses
    for name, array in optimizer.params.items():
        np.testing.assert_array_equal(array, other.params[name])


@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_are_those_of_the_weights_that_were_read(name):
    """Two stages with nothing but products: every update is worked out by hand from the history of both weights."""
    rng = np.random.default_rng(3)
    count, workers, rate = 8, 2, 0.05
    blocks = [nn.Sequential(nn.Linear(2, 2, bias=False, rng=rng, dtype=np.float64)) for _ in range(workers)]
    optimizer = optim.SGD(nn.Sequential(*blocks).parameters(), lr=rate)
    simulation = replayed(BUILDERS[name](workers=workers, stages=workers, microbatches=count))
    history = [[block.parameters()["0.weight"].copy()] for block in blocks]
    data = [(rng.standard_normal((3, 2)), rng.standard_normal((3, 2))) for _ in range(count)]
    losses = list(Replay(blocks, nn.MSELoss(), optimizer, simulation).run(data))
    done = 0
    while done < count:  # versions that an action reads were made by earlier micro-batches
        m = done
        x, target = data[m]
        at = lambda k, kind, m=m: history[k][simulation.version(Action(k, kind, m))]  # noqa: E731
        h = x @ at(0, "F").T
        y = h @ at(1, "F").T
        np.testing.assert_allclose(losses[m], np.mean((y - target) ** 2), rtol=1e-12)
        gy = 2 * (y - target) / y.size
        history[1].append(history[1][-1] - rate * gy.T @ h)
        history[0].append(history[0][-1] - rate * (gy @ at(1, "I")).T @ x)
        done += 1
    for k in range(workers):
        np.testing.assert_allclose(optimizer.params[f"{k}.0.weight"], history[k][-1], rtol=1e-12)


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_the_differences_are_the_papers(workers):
    """Chen et al., 2018, Eq. 5 and 6, in the steady state; PipeOptim's s = D − rank − 1 in PipeDream's schedule."""
    count = 6 * workers
    simulation = replayed(dualpipe2018(workers=workers, stages=workers, microbatches=count))
    blocks, optimizer, _ = parts(workers, 0)
    replay = Replay(blocks, None, optimizer, simulation, optim.MomentumPredictor(optimizer))
    rule = Replay(blocks, None, optimizer, replayed(pipedream(workers=workers, stages=workers, microbatches=count)),
                  optim.OptimizerRulePredictor(optimizer))  # fmt: skip
    for k in range(workers):
        assert replay.ahead(Action(k, "F", 2 * workers)) == 2 * workers - k - 2
        assert replay.ahead(Action(k, "I", 2 * workers)) == k
        assert rule.ahead(Action(k, "F", 2 * workers)) == workers - k - 1


@pytest.mark.parametrize("kind", ["momentum", "optimizer_rule", "finite_difference"])
def test_predictions_are_nearer_than_stale_weights(kind):
    blocks, optimizer, data = parts(4, 60, rate=0.01)
    found = []
    simulation = replayed(dualpipe2018(workers=4, stages=4, microbatches=60))
    replay = Replay(blocks, nn.MSELoss(), optimizer, simulation, optim.make_predictor(kind, optimizer), found.append)
    list(replay.run([data[0]] * 60))
    ahead = [distance for distance in found if distance.ahead > 0 and distance.action.kind == "F"]
    assert len(ahead) > 100
    assert sum(d.predicted for d in ahead) < 0.8 * sum(d.stale for d in ahead)


def test_vanilla_reads_what_is_newest():
    blocks, optimizer, data = parts(3, 9)
    twins, other, _ = parts(3, 9)
    simulation = replayed(dualpipe2018(workers=3, stages=3, microbatches=9))
    found = []
    losses = list(Replay(blocks, nn.MSELoss(), optimizer, simulation).run(data))
    vanilla = Replay(twins, nn.MSELoss(), other, simulation, optim.Predictor(other), found.append)
    assert list(vanilla.run(data)) == losses
    assert all(distance.predicted == distance.stale for distance in found)
    assert any(distance.stale > 0 for distance in found)


def test_a_loss_that_is_not_finite_ends_the_run():
    blocks, optimizer, data = parts(2, 6)
    data[2] = (data[2][0] * np.inf, data[2][1])
    simulation = replayed(pipedream(workers=2, stages=2, microbatches=6))
    with np.errstate(invalid="ignore"):
        losses = list(Replay(blocks, nn.MSELoss(), optimizer, simulation).run(data))
    assert len(losses) == 3 and np.isnan(losses[-1])


def test_swapped_weights_come_back_also_after_an_error():
    layer = nn.Linear(2, 2, rng=0)
    own = layer.params["weight"]
    other = np.zeros_like(own)
    with pytest.raises(ZeroDivisionError), swapped({"weight": (layer.params, "weight")}, {"weight": other}):
        assert layer.params["weight"] is other
        raise ZeroDivisionError
    assert layer.params["weight"] is own
    assert rms({"a": np.full((2, 2), 3.0)}, {"a": np.zeros((2, 2))}) == 3


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_networks_have_four_stages_and_gradients(name):
    network = networks.NETWORKS[name]
    blocks = network.build(np.random.default_rng(0), **network.quick)
    assert len(blocks) == networks.STAGES and all(block.parameters() for block in blocks)
    train, test = network.data(10)
    model, loss = nn.Sequential(*blocks), nn.CrossEntropyLoss()
    x, target = train.batch(np.arange(3))
    logits, saved = model.forward(x)
    assert logits.shape == (3, 10) and len(test) == 10
    _, kept = loss.forward(logits, target)
    grads = model.weight_grad(loss.input_grad(kept), saved)
    assert grads.keys() == model.parameters().keys()
    assert sum(float(abs(grad).sum()) for grad in grads.values()) > 0


def test_intervals_and_verdicts():
    mean, width = spectrain.interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert mean == 3 and width == pytest.approx(2.7764451 * np.sqrt(2.5 / 5))
    assert spectrain.verdict(-0.1, 0.2) == "within noise"
    assert (spectrain.verdict(-0.3, 0.2), spectrain.verdict(0.3, 0.2)) == ("below", "above")
    assert spectrain.curve([1.0, 3.0], 2) == [1.0, 3.0]
    assert np.isnan(spectrain.curve([1.0], 2)[1])
