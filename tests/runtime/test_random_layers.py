"""Random layers on several ranks: each draws its part of one worker's draws."""

from __future__ import annotations

import numpy as np
import pytest

import pipelines as p
from orders import assert_close, order_for
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.nn.init import Rows, rows_of
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.replicas import ReplicaExecutor
from sparsebp.schedule.builders import data_parallel
from sparsebp.train import Trainer

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


class Noise(nn.Layer):
    """Adds noise: a layer of a user's own."""

    def __init__(self, rng, rows=True):
        super().__init__()
        self.generator, self.rows = np.random.default_rng(rng), rows

    def forward(self, x):
        if self.rows:
            return x + nn.draw_rows(self.generator, x.shape, np.random.Generator.standard_normal), None
        return x + self.generator.standard_normal(x.shape), None

    def input_grad(self, gy, saved):
        return gy


class SharedMask(Noise):
    """Drops the same features of all samples."""

    def forward(self, x):
        mask = nn.draw_rows(self.generator, x.shape[1:], np.random.Generator.standard_normal, axis=None) > 0
        return x * mask, mask

    def input_grad(self, gy, mask):
        return gy * mask


def dense(layer=lambda: nn.Dropout(0.4, rng=7)):
    options = {"dtype": np.float64}
    return nn.Sequential(
        nn.Linear(5, 8, rng=0, **options), nn.ReLU(), layer(), nn.Linear(8, 3, rng=1, **options), nn.Dropout(0.2, rng=8)
    )


def recurrent(batch_first=False):
    rnn = nn.GRU(2, 4, 3, dropout=0.5, batch_first=batch_first, dtype=np.float64, rng=0)
    return nn.SequenceClassifier(rnn, nn.Linear(4, 3, dtype=np.float64, rng=1))


def encoder(batch_first):
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.4, batch_first=batch_first, dtype=np.float64, rng=0)
    return nn.Sequential(layer, nn.MeanOverSteps(batch_first), nn.Linear(4, 3, dtype=np.float64, rng=1))


def images():
    conv = nn.Conv2d(1, 4, 3, dtype=np.float64, rng=0)
    return nn.Sequential(conv, nn.Dropout2d(0.5, rng=1), nn.Flatten(), nn.Linear(64, 3, dtype=np.float64, rng=2))


MODELS = {
    "dropout": (dense, (5,)), "noise": (lambda: dense(lambda: Noise(3)), (5,)),
    "one mask for all": (lambda: dense(lambda: SharedMask(3)), (5,)),
    "GRU": (recurrent, (6, 2)), "GRU, batch first": (lambda: recurrent(True), (6, 2)),
    "encoder": (lambda: encoder(True), (6, 4)), "encoder, time-major": (lambda: encoder(False), (6, 4)),
    "images": (images, (1, 6, 6)),
}  # fmt: skip


def train(transport, name, *, samples=11, batch_size=4, epochs=2, resume=False, schedule="data-parallel", **options):
    """Train, and return losses, parameters and the states of the random generators."""
    make, shape = MODELS[name]
    model, rng = make(), np.random.default_rng(1)
    data = rng.standard_normal((samples, *shape)), rng.integers(0, 3, samples)
    if transport is not None:
        options |= {"transport": transport, "schedule": schedule}
    trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1, 0.9), rng=5, **options)
    history = trainer.fit(data, epochs=epochs, batch_size=batch_size, resume=resume)
    states = {key: str(generator.bit_generator.state) for key, generator in model.generators().items()}
    return history.loss, {key: array.copy() for key, array in model.parameters().items()}, states


def assert_like(found, wanted):
    for losses, parameters, states in found:
        np.testing.assert_allclose(losses, wanted[0], **TIGHT)
        assert_close(parameters, wanted[1], **TIGHT)
        assert states == wanted[2]


@pytest.mark.parametrize("name", MODELS)
def test_replicas_draw_the_rows_of_one_workers_mask(name):
    """Of 11 samples in steps of 4: shares differ."""
    assert_like(run_ranks(3, lambda transport: train(transport, name)), train(None, name))


@pytest.mark.parametrize("options", [
    {"samples": 9, "batch_size": 4}, {"samples": 9, "batch_size": 8, "accumulate": 3}, {"accumulate": 2},
    {"schedule": "reverse-first-k", "epochs": 4}, {"sharded": True, "samples": 13},
])  # fmt: skip
def test_ranks_without_samples_and_micro_batches(options):
    """A rank that has no sample of a micro-batch has drawn nothing for it, and goes on as if it had."""
    alone = {key: value for key, value in options.items() if key not in ("schedule", "sharded")}
    assert_like(run_ranks(4, lambda transport: train(transport, "dropout", **options)), train(None, "dropout", **alone))


@pytest.mark.parametrize("sizes", [(3, 2), (None, 4), (2, None)])
def test_they_go_on_from_a_checkpoint(sizes, tmp_path):
    def run(size, **options):
        options |= {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
        if size is None:
            return [train(None, "GRU", **options)]
        return run_ranks(size, lambda transport: train(transport, "GRU", **options))

    first, second = sizes
    run(first, epochs=1, samples=9)
    assert_like(run(second, epochs=2, samples=9, resume=True), train(None, "GRU", samples=9))


def test_unequal_shares_of_a_callers_own():
    """Shares are what each rank passes, whatever `own` would say: here rank 0 has none of the first micro-batch."""
    x, target = np.random.default_rng(0).standard_normal((7, 5)), np.arange(7) % 3
    parts = [([], [0, 1, 2]), ([3], [4, 5, 6])]  # of micro-batch 0 and 1: what ranks 0 and 1 have

    def work(transport):
        model = dense()
        schedule = order_for(model, data_parallel, microbatches=2)
        executor = ReplicaExecutor(
            model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), schedule, transport
        )
        own = [np.array(ranks[transport.rank], np.int64) for ranks in parts]
        done = executor.step([(x[part], target[part]) for part in own]) + executor.flush()
        return done[0].loss, model.parameters(), {}

    def alone(_):
        model = dense()
        schedule = order_for(model, microbatches=2)
        executor = PlainExecutor(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), schedule)
        (step,) = executor.step([(x[:3], target[:3]), (x[3:], target[3:])])
        return step.loss, model.parameters(), {}

    assert_like(run_ranks(2, work), alone(None))


def test_generators_without_a_seed_begin_as_rank_0s():
    def work(transport):
        model = dense(lambda: nn.Dropout(0.5))
        optimizer = optim.SGD(model.parameters(), 0.1)
        schedule = order_for(model, data_parallel)
        ReplicaExecutor(model, nn.CrossEntropyLoss(), optimizer, schedule, transport)
        return str(model.generators()["2"].bit_generator.state)

    assert len(set(run_ranks(3, work))) == 1


def test_a_layer_that_draws_by_itself_is_refused(monkeypatch):
    monkeypatch.setitem(MODELS, "by itself", (lambda: dense(lambda: Noise(3, rows=False)), (5,)))
    with pytest.raises(OptionError, match=r"The layer 2 draws random numbers by itself.*draw_rows"):
        run_ranks(2, lambda transport: train(transport, "by itself"))


def test_rows():
    whole = nn.draw_rows(np.random.default_rng(0), (6, 3, 2), np.random.Generator.standard_normal)
    with rows_of(lambda: Rows(1, 2, 3)):
        rows = nn.draw_rows(np.random.default_rng(0), (4, 3, 2), np.random.Generator.standard_normal)
        with pytest.raises(ShapeError, match="multiple of 2 samples"):
            nn.draw_rows(np.random.default_rng(0), (3, 2), np.random.Generator.standard_normal)
    np.testing.assert_array_equal(rows, whole[2:])


@pytest.mark.parametrize("schedule", [name for name in p.SYNCHRONOUS if name != "dualpipe"])
def test_pipelines_draw_as_one_worker(schedule):
    options = {"samples": 17, "batch_size": 8, "accumulate": 4}
    found = run_ranks(2, lambda transport: train(transport, "dropout", schedule=schedule, **options))
    assert_like(found, train(None, "dropout", **options))


@pytest.mark.parametrize(("schedule", "second"), [("gpipe", 2), ("gpipe", 4), ("interleaved-1f1b", 4)])
def test_one_generator_of_several_stages(schedule, second, monkeypatch):
    """On several ranks, or on one that runs their forwards in another order, they would not draw as one worker."""

    def make():
        generator, options = np.random.default_rng(7), {"dtype": np.float64}
        layers = [nn.Linear(5, 8, rng=0, **options), nn.Dropout(0.4, rng=generator), nn.Tanh(), nn.ReLU(), nn.Tanh(),
                  nn.Linear(8, 8, rng=2, **options), nn.ReLU(), nn.Linear(8, 3, rng=1, **options)]  # fmt: skip
        layers[second] = nn.Dropout(0.3, rng=generator)
        return nn.Sequential(*layers)

    monkeypatch.setitem(MODELS, "one generator", (make, (5,)))
    options = {"samples": 16, "batch_size": 8, "accumulate": 4}

    def work(transport):
        return train(transport, "one generator", schedule=schedule, **options)

    if (schedule, second) == ("gpipe", 2):  # both on rank 0, one behind the other
        assert_like(run_ranks(2, work), train(None, "one generator", **options))
    else:
        with pytest.raises(OptionError, match="draw from one random generator"):
            run_ranks(2, work)
