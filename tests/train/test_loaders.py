"""Iterables as data: the steps of the arrays that they are cut from, whatever makes the batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import orders
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import DTypeError, NonFiniteError, OptionError, ShapeError
from sparsebp.train import Callback, ProgressBar, Trainer

IMAGES, CLASSES = orders.IMAGES, orders.CLASSES
SIZE = 5


def trainer(model=None, **options):
    model = orders.mlp() if model is None else model
    return Trainer(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters(), 0.01), rng=3, **options)


def batches(size=SIZE, as_given=np.asarray):
    return [(as_given(IMAGES[s : s + size]), as_given(CLASSES[s : s + size])) for s in range(0, len(CLASSES), size)]


def tensors():
    return TensorDataset(torch.tensor(IMAGES), torch.tensor(CLASSES))


class Stream(IterableDataset):
    """Samples one by one, of a number that nobody knows."""

    def __iter__(self):
        return zip(torch.tensor(IMAGES), CLASSES.tolist(), strict=True)


class Twice:
    """No list, but can be gone through again."""

    def __iter__(self):
        return iter(batches())


SOURCES = {
    "list": batches, "lists": lambda: batches(as_given=np.ndarray.tolist),
    "tensors": lambda: batches(as_given=torch.tensor), "function": lambda: lambda: iter(batches()),
    "of the epoch": lambda: lambda epoch: batches()[:: 1 if epoch < 9 else -1], "object": Twice,
    "DataLoader": lambda: DataLoader(tensors(), SIZE), "stream": lambda: DataLoader(Stream(), SIZE),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_source_trains_as_its_arrays_do(name, accumulate):
    wanted, found = trainer(accumulate=accumulate), trainer(accumulate=accumulate)
    history = wanted.fit((IMAGES, CLASSES), epochs=3, batch_size=SIZE, shuffle=False, validation=(IMAGES, CLASSES))
    source = SOURCES[name]()
    loaded = found.fit(source, epochs=3, validation=source)
    assert loaded.loss == history.loss and loaded.samples == history.samples
    orders.assert_same(found.model.state_dict(), wanted.model.state_dict())
    for one, other in zip(loaded.epochs, history.epochs, strict=True):
        assert (one.step, one.train_loss) == (other.step, other.train_loss)
        assert one.validation_loss == pytest.approx(other.validation_loss, rel=1e-6)
    assert found.evaluate(source) == wanted.evaluate((IMAGES, CLASSES), batch_size=SIZE)
    if not isinstance(source, list):  # which is an array
        np.testing.assert_array_equal(found.predict(source), wanted.predict(IMAGES, batch_size=SIZE))
    inputs = [x for x, _ in batches()]
    np.testing.assert_array_equal(found.predict(lambda: inputs), wanted.predict(IMAGES, batch_size=SIZE))


def test_single_samples_are_a_data_set():
    """A map-style Dataset of PyTorch: shuffled, cut and resumed as arrays are; plain numbers are targets too."""

    class Plain:
        def __getitem__(self, index):
            return IMAGES[index].tolist(), int(CLASSES[index])

        def __len__(self):
            return len(CLASSES)

    wanted = trainer().fit((IMAGES, CLASSES), epochs=2, batch_size=SIZE)
    for samples in (tensors(), Plain()):
        assert trainer().fit(samples, epochs=2, batch_size=SIZE).loss == wanted.loss
    one = trainer()
    np.testing.assert_array_equal(one.predict(tensors()), one.predict(IMAGES))

    class Padded:
        def __getitem__(self, index):
            return orders.SEQUENCES[index], [index / 3], 1 + index % 5

        def __len__(self):
            return 22

    net, rows = nn.SequenceClassifier(nn.GRU(3, 4, rng=0), nn.Linear(4, 1, rng=1)), np.arange(22)
    made = Trainer(net, nn.MSELoss(), optim.SGD(net.parameters(), 0.1))
    arrays = orders.SEQUENCES, (rows[:, None] / 3).astype(np.float32), 1 + rows % 5
    assert made.evaluate(Padded()) == made.evaluate(arrays)


@pytest.mark.parametrize("given", [
    (IMAGES, CLASSES), (IMAGES, IMAGES), (IMAGES,), batches(), [(x,) for x, _ in batches()],
    TensorDataset(torch.tensor(IMAGES)), DataLoader(TensorDataset(torch.tensor(IMAGES)), SIZE),
    list(IMAGES), IMAGES.tolist(), tuple(map(tuple, IMAGES.tolist())),
], ids=range(10))  # fmt: skip
def test_predictions_take_what_fit_and_evaluate_take(given):
    """With targets, which are not read, or without."""
    made = trainer()
    np.testing.assert_allclose(made.predict(given), made.predict(IMAGES), rtol=1e-6)


def test_predictions_of_arrays_with_lengths():
    net, lengths = nn.SequenceClassifier(nn.GRU(3, 4, rng=0), nn.Linear(4, 3, rng=1)), np.arange(22) % 5 + 1
    made = trainer(net)
    wanted = made.predict(orders.SEQUENCES, lengths=lengths)
    np.testing.assert_array_equal(made.predict((orders.SEQUENCES, CLASSES, lengths)), wanted)
    assert abs(made.predict(orders.SEQUENCES) - wanted).max() > 0.01
    orders.refused(lambda: made.predict((orders.SEQUENCES, CLASSES, lengths), lengths=lengths), "3 arrays and lengths=")


def test_sizes_may_vary_and_lengths_and_a_time_major_model():
    rng = np.random.default_rng(0)
    cuts = [slice(0, 3), slice(3, 4), slice(4, 12), slice(12, 22)]
    lengths = rng.integers(1, 6, 22)
    net = lambda: nn.SequenceClassifier(nn.GRU(3, 4, rng=0), nn.Linear(4, 3, rng=1))  # noqa: E731
    made, twin = trainer(net()), net()
    opt, loss, losses = optim.Adam(twin.parameters(), 0.01), nn.CrossEntropyLoss(), []
    history = made.fit([(orders.SEQUENCES[c], CLASSES[c], lengths[c]) for c in cuts], epochs=1)
    for c in cuts:
        x = np.ascontiguousarray(orders.SEQUENCES[c].transpose(1, 0, 2))
        y, saved = twin.forward(x, lengths[c])
        value, loss_saved = loss.forward(y, CLASSES[c])
        losses.append(value)
        opt.step(twin.weight_grad(loss.input_grad(loss_saved), saved))
    assert history.loss == losses and history.samples == [3, 1, 8, 10]
    weights = np.array([3, 1, 8, 10])
    assert history.epochs[0].train_loss == pytest.approx(np.average(losses, weights=weights))
    value = loss.forward(made.predict(orders.SEQUENCES, lengths=lengths), CLASSES)[0]
    found = made.evaluate([(orders.SEQUENCES[c], CLASSES[c], lengths[c].tolist()) for c in cuts])
    assert found.loss == pytest.approx(value, rel=1e-5)
    longer = [(orders.SEQUENCES[:2], CLASSES[:2]), (orders.SEQUENCES[2:4, :3], CLASSES[2:4])]
    assert made.predict(longer.__iter__).shape == (4, 3)
    steps = trainer(nn.GRU(3, 4, batch_first=True, rng=0))
    with pytest.raises(ShapeError, match="Pad all"):
        steps.predict(longer.__iter__)


def test_a_generator_serves_for_one_epoch():
    made = trainer()
    history = made.fit((batch for batch in batches()), epochs=1)
    assert history.loss == trainer().fit(batches(), epochs=1).loss
    spent = (batch for batch in batches())
    for call in (
        lambda: made.fit(spent, epochs=2),
        lambda: made.fit(batches(), epochs=2, validation=(batch for batch in batches())),
    ):
        orders.refused(call, "function that makes it")
    assert made.fit(spent, epochs=1).steps == 5  # it was not touched
    orders.refused(lambda: made.fit(spent, epochs=1), "gone through once", error=ShapeError)
    orders.refused(lambda: made.evaluate(spent), "gone through once", error=ShapeError)
    orders.refused(lambda: made.evaluate([]), "at least one", error=ShapeError)


def test_what_is_no_batch_is_refused():
    made, (x, t) = trainer(), batches()[0]
    for source in ([x, t], [(x,)], [{"x": x, "t": t}], x, lambda: 3, "abc", lambda: [x], [(x, t, None, None, None)]):
        orders.refused(lambda s=source: made.fit(s, epochs=1))
    orders.refused(lambda: made.fit([(x, t[:3])], epochs=1), error=ShapeError)
    orders.refused(lambda: made.fit([(x[:0], t[:0])], epochs=1), error=ShapeError)
    orders.refused(lambda: made.fit([(x, t.astype(float))], epochs=1), error=DTypeError)
    orders.refused(lambda: made.fit([(torch.tensor(x, requires_grad=True), t)], epochs=1), "detach", error=DTypeError)
    orders.refused(lambda: made.fit([(x, t, None, True)], epochs=1), "stateful")
    for options in ({"batch_size": 5}, {"drop_last": True}, {"shuffle": True}, {"validation_batch_size": 3},
                    {"lengths": [1] * 22}):  # fmt: skip
        orders.refused(lambda o=options: made.fit(batches(), epochs=1, validation=batches(), **o))
    orders.refused(lambda: made.evaluate(batches(), batch_size=5))
    orders.refused(lambda: made.fit((IMAGES, CLASSES), epochs=1), "batch_size")


def test_values_that_are_not_finite_are_named_by_batch():
    made, cut = trainer(accumulate=2), batches(as_given=np.array)
    cut[2][0][3, 0, 1, 2] = np.nan
    for call in (lambda: made.fit(cut, epochs=1), lambda: made.evaluate(cut)):
        orders.refused(call, "row 3 of the batch", error=NonFiniteError)


class Told(Callback):
    reads_model = False

    def on_start(self, info):
        self.info = info


class Killed(Callback):
    """Ends the process, as far as the trainer can see, after some steps."""

    def __init__(self, after):
        self.after = after

    def on_step(self, history):
        if history.steps == self.after:
            raise KeyboardInterrupt


def shuffled(epoch):
    order = np.random.default_rng((1, epoch)).permutation(len(CLASSES))
    return ((IMAGES[rows], CLASSES[rows]) for rows in np.array_split(order, 5))


@pytest.mark.parametrize("after", [3, 5, 7, 10])
def test_a_resumed_run_is_the_whole_one(after, tmp_path):
    wanted = trainer(orders.mlp())
    wanted.fit(shuffled, epochs=3)
    with pytest.raises(KeyboardInterrupt):
        trainer(checkpoint_dir=tmp_path, checkpoint_every=1, callbacks=[Killed(after)]).fit(shuffled, epochs=3)
    told = Told()
    again = trainer(checkpoint_dir=tmp_path, checkpoint_every=1, callbacks=[told])
    history = again.fit(shuffled, epochs=3, resume=True)
    assert told.info.resumed and told.info.steps_per_epoch is None
    assert history.loss == wanted.history.loss
    assert [e.train_loss for e in history.epochs] == [e.train_loss for e in wanted.history.epochs]
    orders.assert_same(again.model.state_dict(), wanted.model.state_dict())


def test_other_batches_after_a_resume_are_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trainer(checkpoint_dir=tmp_path, checkpoint_every=1, callbacks=[Killed(8)]).fit(shuffled, epochs=3)
    again = trainer(checkpoint_dir=tmp_path, checkpoint_every=1)
    orders.refused(lambda: again.fit(lambda: shuffled(7), epochs=3, resume=True), "batch 2 of epoch 2")
    orders.refused(lambda: again.fit(batches()[:1], epochs=3, resume=True), "no such batch")
    with pytest.raises(Exception, match="batch_size"):
        again.fit((IMAGES, CLASSES), epochs=3, batch_size=5, resume=True)


def test_steps_that_nobody_has_counted_have_a_bar():
    from rich.console import Console

    console = Console(force_terminal=True, width=120)
    for source, steps in ((SOURCES["stream"](), None), (batches(), 5)):
        told = Told()
        with console.capture() as said:
            trainer(callbacks=[ProgressBar(console), told]).fit(source, epochs=2)
        assert told.info.steps_per_epoch == steps and "epoch   2" in said.get()


@pytest.mark.parametrize("schedule", ["data-parallel", "1f1b"])
def test_ranks_share_every_batch(schedule):
    def fit(transport, source):
        options = {} if transport is None else {"schedule": schedule, "transport": transport}
        made = trainer(orders.mlp(), accumulate=2, **options)
        history = made.fit(source(transport), epochs=2, validation=source(transport))
        return history.loss, [e.validation_loss for e in history.epochs], made.model.state_dict()

    wanted = fit(None, lambda _: batches())
    for loss, validation, state in run_ranks(2, lambda transport: fit(transport, lambda _: batches())):
        np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(validation, wanted[1], rtol=1e-5)
        orders.assert_close(state, wanted[2], rtol=1e-4, atol=1e-6)

    def other(transport):
        return batches()[:: 1 if transport.rank == 0 else -1]

    def fewer(transport):
        return batches()[: 5 - transport.rank]

    for source, said in ((other, "batch 1 of epoch 1"), (fewer, "batch 5 of epoch 1")):
        with pytest.raises(OptionError, match=said):
            run_ranks(2, lambda transport, source=source: fit(transport, source))
