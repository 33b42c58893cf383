"""Arrays in place of data sets, predictions and lengths; modes, generators and statistics are restored."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch

import orders
from sparsebp import nn, optim
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.data import ArrayDataset
from sparsebp.train import Callback, Trainer

LENGTHS = np.random.default_rng(8).integers(1, 6, size=22)


def trainer(model, loss=None, **options):
    return Trainer(model, loss or nn.CrossEntropyLoss(), optim.Adam(model.parameters(), 0.01), rng=3, **options)


def classifier(batch_first, dtype=np.float32):
    return nn.SequenceClassifier(nn.GRU(3, 4, 2, batch_first=batch_first, rng=0, dtype=dtype),
                                 nn.Linear(4, 3, rng=1, dtype=dtype))  # fmt: skip


@pytest.mark.parametrize("as_given", [np.asarray, torch.as_tensor, np.ndarray.tolist, np.asfortranarray])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_of_images_are_a_data_set(as_given, dtype):
    images = orders.IMAGES.astype(dtype)
    one, two = trainer(orders.conv().to(dtype=dtype)), trainer(orders.conv().to(dtype=dtype))
    arrays = (as_given(images), as_given(orders.CLASSES))
    first = one.fit(arrays, epochs=2, batch_size=6, validation=arrays)
    data = orders.Rows(images, orders.CLASSES)
    second = two.fit(data, epochs=2, batch_size=6, validation=data)
    assert first.loss == second.loss
    assert [e.validation_loss for e in first.epochs] == [e.validation_loss for e in second.epochs]
    assert one.evaluate(arrays) == two.evaluate(data)
    predicted = one.predict(arrays[0], batch_size=7)
    one.model.eval()
    assert predicted.dtype == dtype and isinstance(predicted, np.ndarray)
    np.testing.assert_allclose(predicted, one.model(images), rtol=1e-4, atol=1e-5)


def test_a_table_is_an_array():
    """Whatever its columns are called."""
    table = pandas.DataFrame(np.random.default_rng(0).standard_normal((22, 3)), columns=["batch", "x", "y"])
    model = nn.Sequential(nn.Linear(3, 3, rng=0))
    made, target = trainer(model), pandas.Series(orders.CLASSES, index=range(50, 72))
    history = made.fit((table, target), epochs=1, batch_size=6)
    assert history.loss == trainer(nn.Sequential(nn.Linear(3, 3, rng=0))).fit(
        (table.to_numpy(), orders.CLASSES), epochs=1, batch_size=6
    ).loss  # fmt: skip
    np.testing.assert_array_equal(made.predict(table), made.predict(table.to_numpy()))
    orders.refused(lambda: made.predict(torch.ones(2, 3, requires_grad=True)), "detach", error=DTypeError)
    orders.refused(lambda: made.fit(table, epochs=1, batch_size=6))


def test_words_reach_an_embedding_as_integers():
    arrays = (orders.WORDS, orders.CLASSES)
    one, two = trainer(orders.transformer(5, True)), trainer(orders.transformer(5, True))
    first = one.fit(arrays, epochs=2, batch_size=6, validation=arrays)
    second = two.fit(ArrayDataset(*arrays, dtype=np.int64), epochs=2, batch_size=6)
    assert first.loss == second.loss
    assert one.predict(orders.WORDS).dtype == np.float32
    assert one.evaluate(arrays) == two.evaluate(arrays)
    with pytest.raises(DTypeError, match="integers"):
        trainer(orders.transformer(5, True)).fit((orders.WORDS / 2, orders.CLASSES), epochs=1, batch_size=6)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS, LENGTHS.tolist()])
def test_sequences(batch_first, lengths):
    """The sample comes first in the arrays, wherever the model has it."""
    model, twin = classifier(batch_first), classifier(batch_first)
    made, opt, loss = trainer(model), optim.Adam(twin.parameters(), 0.01), nn.CrossEntropyLoss()
    history = made.fit((orders.SEQUENCES, orders.CLASSES), epochs=2, batch_size=5, lengths=lengths,
                       validation=(orders.SEQUENCES, orders.CLASSES, LENGTHS))  # fmt: skip
    losses = []
    for epoch in range(2):
        order = orders.epoch_order(22, seed=3, epoch=epoch)
        for start in range(0, 22, 5):
            rows = order[start : start + 5]
            x = orders.SEQUENCES[rows] if batch_first else orders.SEQUENCES[rows].transpose(1, 0, 2)
            y, saved = twin.forward(np.ascontiguousarray(x), None if lengths is None else LENGTHS[rows])
            value, loss_saved = loss.forward(y, orders.CLASSES[rows])
            losses.append(value)
            opt.step(twin.weight_grad(loss.input_grad(loss_saved), saved))
    assert history.loss == losses
    x = orders.SEQUENCES if batch_first else orders.SEQUENCES.transpose(1, 0, 2)
    wanted = twin(np.ascontiguousarray(x), lengths=lengths)
    np.testing.assert_allclose(
        made.predict(orders.SEQUENCES, batch_size=5, lengths=lengths), wanted, rtol=1e-5, atol=1e-6
    )
    value = loss.forward(wanted, orders.CLASSES)[0]
    evaluated = made.evaluate((orders.SEQUENCES, orders.CLASSES), lengths=lengths, batch_size=4)
    assert evaluated[0] == pytest.approx(value, rel=1e-5)
    data = ArrayDataset(orders.SEQUENCES, orders.CLASSES, lengths=lengths, batch_first=batch_first)
    assert made.evaluate(data, batch_size=4) == evaluated


def test_a_sequence_to_sequence_model_with_the_batch_first():
    model = nn.GRU(3, 2, batch_first=True, rng=0)
    target = np.zeros((22, 5, 2), np.float32)
    made = trainer(model, nn.MSELoss())
    history = made.fit((orders.SEQUENCES, target), epochs=5, batch_size=6)
    assert history.loss[-1] < history.loss[0]
    assert made.predict(orders.SEQUENCES, batch_size=4).shape == (22, 5, 2)


def test_what_does_not_fit_is_refused():
    x, t = orders.SEQUENCES, orders.CLASSES
    first, second, rows = trainer(classifier(True)), trainer(classifier(False)), trainer(orders.mlp())
    for call in (first.fit, second.fit, rows.fit):
        fit = lambda *a, call=call, **k: call(*a, epochs=1, batch_size=6, **k)  # noqa: E731
        orders.refused(lambda f=fit: f((x,)))
        orders.refused(lambda f=fit: f((x, t, None, None)))
        orders.refused(lambda f=fit: f(None))
        orders.refused(lambda f=fit: f([x, t]))
        orders.refused(lambda f=fit: f(x))
        orders.refused(lambda f=fit: f("data.csv"))
        orders.refused(lambda f=fit: f({"x": x, "target": t}))
        orders.refused(lambda f=fit: f((x, t[:5])), error=ShapeError)
        orders.refused(lambda f=fit: f((x[:0], t[:0])), error=ShapeError)
        orders.refused(lambda f=fit: f(([[1.0], [1.0, 2.0]], [0, 1])), error=ShapeError)
        orders.refused(lambda f=fit: f((np.array([["a"]]), [0])), error=DTypeError)
        orders.refused(lambda f=fit: f((x, t.astype(bool))), error=DTypeError)
        orders.refused(lambda f=fit: f((x, t), validation=(x[:0], t[:0])), error=ShapeError)
    for lengths, error in (
        (LENGTHS[:3], ShapeError), (LENGTHS * 1.0, DTypeError), (LENGTHS - 1, OptionError), (LENGTHS + 5, OptionError),
    ):  # fmt: skip
        orders.refused(lambda n=lengths: first.fit((x, t), epochs=1, batch_size=6, lengths=n), error=error)
        orders.refused(lambda n=lengths: first.predict(x, lengths=n), error=error)
    data = ArrayDataset(x, t, batch_first=True)
    orders.refused(lambda: first.fit(data, epochs=1, batch_size=6, lengths=LENGTHS))
    orders.refused(lambda: second.fit(data, epochs=1, batch_size=6))  # its axes are the other's
    orders.refused(lambda: first.evaluate(ArrayDataset(x, t)))
    orders.refused(lambda: second.fit((orders.IMAGES, t), epochs=1, batch_size=6), error=ShapeError)
    orders.refused(lambda: rows.predict(orders.IMAGES[:0]), error=ShapeError)
    orders.refused(lambda: rows.predict(3.0), error=ShapeError)
    bare = trainer(nn.GRU(3, 2, rng=0), nn.MSELoss())
    orders.refused(lambda: bare.fit((x, np.zeros((22, 5, 2), np.float32)), epochs=1, batch_size=6))


def test_a_model_that_takes_no_lengths_says_so():
    chain = trainer(nn.Sequential(nn.GRU(3, 4, batch_first=True, rng=0), nn.Flatten()), nn.MSELoss())
    target = np.zeros((22, 20), np.float32)
    orders.refused(lambda: chain.fit((orders.SEQUENCES, target), lengths=LENGTHS, epochs=1, batch_size=5))
    orders.refused(lambda: chain.predict(orders.SEQUENCES, lengths=LENGTHS))

    class Given(orders.Rows):
        def batch(self, indices):
            return (*super().batch(indices), LENGTHS[indices])

    orders.refused(lambda: chain.evaluate(Given(orders.SEQUENCES, target)))


# ---- modes, generators, statistics ---------------------------------------------------------------------------------


def modes(model):
    return {name: layer.training for name, layer in model.modules()}


def drawn(model):
    return {name: g.bit_generator.state for name, g in model.generators().items()}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_predictions_and_evaluation_change_nothing(net, whole):
    made = trainer(orders.MODELS[net][0]())
    made.model.train(whole)
    made.model[1].training = not whole
    kept, state, generators = modes(made.model), made.model.state_dict(), drawn(made.model)
    first = made.predict(orders.IMAGES, batch_size=4)
    value = made.evaluate(orders.images())
    np.testing.assert_array_equal(made.predict(orders.IMAGES, batch_size=4), first)
    with pytest.raises(ShapeError):
        made.predict(orders.IMAGES[:, :, :5])
    assert made.evaluate(orders.images()) == value
    assert (modes(made.model), drawn(made.model)) == (kept, generators)
    orders.assert_same(made.model.state_dict(), state)


def test_a_layer_in_evaluation_stays_so_while_training():
    model = orders.conv()
    model[1].eval()
    before = model[1].buffers["running_mean"].copy()
    seen = []

    class Look(Callback):
        def on_step(self, history):
            seen.append(modes(model))

    kept = modes(model)
    trainer(model, callbacks=[Look()]).fit(orders.images(), epochs=2, batch_size=6, validation=orders.images(7))
    assert all(each == kept for each in seen) and modes(model) == kept
    np.testing.assert_array_equal(model[1].buffers["running_mean"], before)


def test_a_model_in_evaluation_is_trained_in_training_mode_and_put_back():
    model, twin = orders.mlp(), orders.mlp()
    model.eval()
    history = trainer(model).fit(orders.images(), epochs=1, batch_size=6)
    assert not any(modes(model).values())
    assert history.loss == trainer(twin).fit(orders.images(), epochs=1, batch_size=6).loss


@pytest.mark.parametrize("call", ["fit", "predict", "evaluate"])
def test_an_error_leaves_the_modes(call, monkeypatch):
    made = trainer(orders.mlp())
    made.model[2].eval()
    kept = modes(made.model)
    monkeypatch.setattr(made.model[4], "forward", lambda x: 1 / 0)
    monkeypatch.setattr(made.model[4][0], "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        if call == "fit":
            made.fit(orders.images(), epochs=1, batch_size=6)
        else:
            getattr(made, call)(orders.IMAGES if call == "predict" else orders.images())
    assert modes(made.model) == kept


def test_a_prediction_within_training_sees_what_is_there():
    """Also where updates are put off."""
    seen = {}
    for fusion in ("none", "forward"):

        class Predict(Callback):
            reads_model = False  # it does not look itself: the trainer sees to it

            def on_step(self, history, key=fusion):
                seen.setdefault(key, []).append(self.trainer.predict(orders.IMAGES[:3]))

        callback = Predict()
        callback.trainer = trainer(orders.mlp(), fusion=fusion, callbacks=[callback])
        callback.trainer.fit(orders.images(), epochs=1, batch_size=6)
    np.testing.assert_array_equal(seen["none"], seen["forward"])
