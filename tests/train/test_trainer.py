"""The training loop: order of samples, clipping, callbacks, evaluation, bad input."""

import re

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.data import ArrayDataset
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
        ("step", 1), ("step", 2), ("epoch", 1), saved,
        ("step", 3), ("step", 4), ("epoch", 2), saved,
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


class Asked:
    """A data set that keeps the rows that it was asked for."""

    reads_model = False

    def __init__(self, samples):
        self.rows, self.inner = [], tiny.dataset(samples)

    def __len__(self):
        return len(self.inner)

    def batch(self, indices):
        self.rows.append(indices.tolist())
        return self.inner.batch(indices)


def test_batches_in_order_of_one_size_and_those_of_a_validation():
    data, held_out = Asked(11), Asked(7)
    options = {"validation": held_out, "validation_batch_size": 3, "shuffle": False, "drop_last": True}
    history = tiny.trainer().fit(data, epochs=2, batch_size=4, **options)
    assert data.rows == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 and history.samples == [4] * 4
    assert held_out.rows == [[0, 1, 2], *([0, 1, 2], [3, 4, 5], [6]) * 2]  # the first is tried before any step
    shuffled = Asked(11)
    history = tiny.trainer().fit(shuffled, epochs=2, batch_size=4, drop_last=True)
    assert [len(rows) for rows in shuffled.rows] == history.samples == [4] * 4
    assert shuffled.rows[:2] != shuffled.rows[2:]
    whole = Asked(11)
    tiny.trainer().fit(whole, epochs=2, batch_size=4)
    assert [rows for rows in whole.rows if len(rows) == 4] == shuffled.rows
    with pytest.raises(OptionError, match="drop_last leaves no batch"):
        tiny.trainer().fit(data, epochs=1, batch_size=12, drop_last=True)


def test_batches_of_one_size_on_ranks_and_of_a_stopped_run(tmp_path):
    """The same steps, however they are run."""

    def fit(transport=None, folder=None, resume=False, callbacks=(), accumulate=1):
        model = nn.Linear(3, 2, rng=0, dtype=float)
        more = {} if transport is None else {"transport": transport, "schedule": "data-parallel"}
        trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), rng=0, callbacks=callbacks,
                          checkpoint_dir=folder, checkpoint_every=1, accumulate=accumulate, **more)  # fmt: skip
        g = np.random.default_rng(0)
        data = g.standard_normal((11, 3)), g.integers(0, 2, 11)
        return trainer.fit(data, epochs=3, batch_size=4, drop_last=True, shuffle=False, resume=resume)

    want = fit()
    for history in (fit(accumulate=3), *run_ranks(3, fit)):
        np.testing.assert_allclose(history.loss, want.loss, rtol=1e-12)
        assert history.samples == want.samples == [4] * 6
    with pytest.raises(KeyboardInterrupt):
        fit(folder=tmp_path, callbacks=[orders.Stop(3)])
    assert fit(folder=tmp_path, resume=True).loss == want.loss


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 1), (5, 3, 1, 1)])
def test_a_last_batch_of_one_that_a_batch_normalisation_cannot_take(shape):
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    model = nn.Sequential(kind(3, dtype=float), nn.Flatten(), nn.Linear(3, 2, rng=0, dtype=float))
    trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), rng=0)
    data = ArrayDataset(np.ones(shape), np.zeros(5, int), dtype=float, batch_first=True)
    with pytest.raises(ShapeError, match=rf"2 or more a channel.*{re.escape(str((1, *shape[1:])))}.*drop_last=True"):
        trainer.fit(data, epochs=1, batch_size=2)
    assert trainer.fit(data, epochs=1, batch_size=2, drop_last=True).samples == [2, 2]


REPLACED = {
    "model": lambda t: nn.Linear(2, 3), "loss": lambda t: nn.CrossEntropyLoss(label_smoothing=0.1),
    "optimizer": lambda t: optim.SGD(t.model.parameters(), 0.2), "clip_norm": lambda t: 0.1, "accumulate": lambda t: 2,
}  # fmt: skip


@pytest.mark.parametrize("event", ["on_step", "on_epoch"])
@pytest.mark.parametrize("name", REPLACED)
def test_parts_that_are_replaced_in_a_run_are_not_ignored(name, event, tmp_path):
    """Between two calls of fit they may be; what belongs to another optimizer is refused then."""

    def replace(*_):
        setattr(made, name, REPLACED[name](made))

    replacing = Callback()
    setattr(replacing, event, replace)
    model = nn.Linear(2, 3, rng=0)
    optimizer = optim.SGD(model.parameters(), 0.1)
    made = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[replacing], clip_norm=9.0, rng=0,
                   lr_scheduler=optim.ExponentialLR(optimizer, 0.9), checkpoint_dir=tmp_path)  # fmt: skip
    data = np.ones((6, 2), np.float32), np.arange(6) % 3
    with pytest.raises(OptionError, match=rf"replaced during a run.* Got another {name}\."):
        made.fit(data, epochs=2, batch_size=3)
    made.callbacks = ()
    go = lambda: made.fit(data, epochs=1, batch_size=3, overwrite=True)  # noqa: E731
    if name == "model":
        made.optimizer, made.lr_scheduler = optim.SGD(made.model.parameters(), 0.1), None
    if name == "optimizer":
        with pytest.raises(OptionError, match="schedule is of another optimizer"):
            go()
        made.lr_scheduler = [optim.ExponentialLR(made.optimizer, 0.5)]
        assert go().lr == [0.2, 0.1]
    assert go().steps == 2


def test_one_output_has_no_accuracy():
    """Of a count, say: the largest of one number is always the first."""

    class Squares:
        def forward(self, prediction, target):
            difference = prediction[:, 0] - target
            return float((difference**2).mean()), difference

        def input_grad(self, saved):
            return (2 / len(saved) * saved)[:, None]

    model = nn.Linear(2, 1, rng=0, dtype=float)
    made = Trainer(model, Squares(), optim.SGD(model.parameters(), 0.1), rng=0)
    data = np.ones((6, 2)), np.arange(6) % 2
    record = made.fit(data, epochs=1, batch_size=3, validation=data).epochs[0]
    assert record.train_accuracy is record.validation_accuracy is made.evaluate(data).accuracy is None


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
