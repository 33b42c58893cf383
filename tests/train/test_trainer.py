"""The training loop: order of samples, clipping, callbacks, evaluation, bad input."""

import numpy as np
import pytest

from sparsebp import nn, optim
from sparsebp.train import Callback, Trainer
from train import tiny


def test_the_loss_falls_and_classes_are_found():
    history = tiny.trainer(noise=0.0).fit(tiny.dataset(60), epochs=20, batch_size=7, validation=tiny.dataset(31))
    assert history.epochs[-1].train_loss < 0.6 * history.epochs[0].train_loss
    assert history.epochs[-1].validation_accuracy > 0.8
    assert history.steps == 20 * 9
    assert history.samples[:9] == [7] * 8 + [4]


def test_a_step_is_forward_gradient_clip_update():
    trainer = tiny.trainer(noise=0.0, clip_norm=0.05)
    model = tiny.TinyModel()
    optimizer = tiny.TinyMomentum(model.parameters())
    from sparsebp.data import epoch_order

    data = tiny.dataset()
    history = trainer.fit(data, epochs=1, batch_size=30)
    x, target = data.batch(epoch_order(30, seed=7, epoch=0))
    y, saved = model.forward(x)
    value, loss_saved = tiny.TinyLoss().forward(y, target)
    grads = model.weight_grad(tiny.TinyLoss().input_grad(loss_saved), saved)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    optimizer.step({name: g * np.float32(0.05 / norm) for name, g in grads.items()})
    assert history.loss == [value]
    assert history.grad_norm[0] == pytest.approx(norm, rel=1e-6)
    assert history.accuracy[0] == (y.argmax(axis=1) == target).mean()
    for name, array in model.parameters().items():
        np.testing.assert_allclose(trainer.model.parameters()[name], array, rtol=1e-5, atol=1e-7)


def test_callbacks_are_told_in_order(tmp_path):
    told = []

    class Note(Callback):
        def on_start(self, info):
            told.append(("start", info.epochs, info.steps_per_epoch, info.first_step, info.resumed))

        def on_step(self, history):
            told.append(("step", history.steps))

        def on_epoch(self, record):
            told.append(("epoch", record.epoch))

        def on_checkpoint(self, path):
            told.append(("checkpoint", path.name))

        def on_end(self, history):
            told.append(("end", history.steps))

        def on_close(self):
            told.append(("close",))

    tiny.trainer(tmp_path, callbacks=[Note()], every=None).fit(tiny.dataset(8), epochs=2, batch_size=4)
    saved = ("checkpoint", "checkpoint.safetensors")
    assert told == [
        saved, ("start", 2, 2, 0, False),
        ("step", 1), ("step", 2), saved, ("epoch", 0),
        ("step", 3), ("step", 4), saved, ("epoch", 1),
        ("end", 4), ("close",),
    ]  # fmt: skip


def test_evaluate_is_a_mean_over_samples_in_eval_mode():
    trainer, data = tiny.trainer(noise=5.0), tiny.dataset(17)
    results = {trainer.evaluate(data, batch_size=size) for size in (17, 17)}
    assert len(results) == 1
    loss, accuracy = results.pop()
    for size in (1, 5, 100):
        assert trainer.evaluate(data, batch_size=size)[0] == pytest.approx(loss, rel=1e-6)
        assert trainer.evaluate(data, batch_size=size)[1] == pytest.approx(accuracy)
    assert trainer.model.training


@pytest.mark.parametrize("length", [3, 4])  # as many places as classes, or more
def test_accuracy_of_classes_at_every_place(length):
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(5, 3 * length, rng=1), nn.Unflatten(1, (3, length)))
    x, target = rng.normal(size=(10, 5)).astype(np.float32), rng.integers(0, 3, (10, length))
    trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), accumulate=2, rng=0)
    history = trainer.fit((x, target), epochs=1, batch_size=10, validation=(x, target))
    found = float((trainer.predict(x).argmax(axis=1) == target).mean())
    assert history.epochs[-1].validation_accuracy == pytest.approx(found)
    assert trainer.evaluate((x, target))[1] == pytest.approx(found)


def test_real_targets_have_no_accuracy():
    from sparsebp.data import ArrayDataset

    class Squares:
        def forward(self, prediction, target):
            difference = prediction - target
            return float((difference**2).mean()), difference

        def input_grad(self, saved):
            return saved * np.float32(2 / saved.size)

    g = np.random.default_rng(0)
    data = ArrayDataset(g.normal(size=(9, 4, 2)), g.normal(size=(9, 3)).astype(np.float32))
    model = tiny.TinyModel()
    history = Trainer(model, Squares(), tiny.TinyMomentum(model.parameters()), rng=0).fit(
        data, epochs=2, batch_size=4, validation=data
    )
    assert history.epochs[-1].train_accuracy is None
    assert history.epochs[-1].validation_accuracy is None
    assert history.epochs[-1].validation_loss < history.epochs[0].train_loss


def test_a_generator_as_seed():
    runs = [tiny.trainer(rng=np.random.default_rng(5)).fit(tiny.dataset(), epochs=1, batch_size=4) for _ in range(2)]
    assert runs[0].loss == runs[1].loss
