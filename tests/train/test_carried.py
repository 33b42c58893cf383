"""Stateful training: batches go on with the sequences of the last one, as loops that detach the state do in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import orders
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core import backend
from sparsebp.core.errors import FileFormatError, OptionError, ShapeError
from sparsebp.train import Callback, Trainer

F8 = {"dtype": np.float64}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
BATCH, STEPS, PART = 4, 60, 10
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((BATCH, STEPS, 3)), RNG.standard_normal((BATCH, STEPS, 2))
FIRSTS = range(0, STEPS, PART)


def parts(*resets: int) -> list[tuple[Any, ...]]:
    """Return the batches: parts of long sequences; the numbers are those of steps at which all begin anew."""
    cut = [(X[:, s : s + PART], Y[:, s : s + PART]) for s in FIRSTS]
    return [(*batch, None, s in resets) for s, batch in zip(FIRSTS, cut, strict=True)] if resets else cut


def model_of(kind: str = "GRU", hidden: int = 6) -> nn.Sequential:
    return nn.Sequential(
        getattr(nn, kind)(3, hidden, batch_first=True, rng=0, **F8),
        nn.Linear(3 if kind in ("LRU", "SelectiveScan") else hidden, 2, rng=1, **F8),
    )


def trainer(model: Any = None, **options: Any) -> Trainer:
    model = model_of() if model is None else model
    return Trainer(model, nn.MSELoss(), optim.SGD(model.parameters(), 0.2), rng=3, **options)


def in_pytorch(kind: str, made: Trainer) -> tuple[list[float], Any, Any]:
    """Train two epochs of parts, with detached states; return the losses, the recurrent layer and the linear one."""
    rnn, head = getattr(torch.nn, kind)(3, 6, batch_first=True).double(), torch.nn.Linear(6, 2).double()
    for module, layer in ((rnn, made.model[0]), (head, made.model[1])):
        module.load_state_dict({n: torch.tensor(backend.to_host(a)) for n, a in layer.state_dict().items()})
    sgd, losses = torch.optim.SGD([*rnn.parameters(), *head.parameters()], 0.2), []
    for _ in range(2):
        state = None
        for x, target in parts():
            sgd.zero_grad()
            y, state = rnn(torch.tensor(x), state)
            loss = torch.nn.functional.mse_loss(head(y), torch.tensor(target))
            loss.backward()
            sgd.step()
            state = tuple(s.detach() for s in state) if kind == "LSTM" else state.detach()
            losses.append(loss.item())
    return losses, rnn, head


@pytest.mark.parametrize("options", [
    {}, {"accumulate": 3}, {"schedule": "ooo"}, {"fusion": "forward"}, {"fusion": "backward"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_truncated_back_propagation_as_in_pytorch(kind, options):
    made = trainer(model_of(kind), **options)
    losses, rnn, head = in_pytorch(kind, made)
    history = made.fit(parts(), epochs=2, stateful=True, validation=parts())
    np.testing.assert_allclose(history.loss, losses, **CLOSE)
    for module, layer in ((rnn, made.model[0]), (head, made.model[1])):
        for name, param in module.named_parameters():
            np.testing.assert_allclose(layer.params[name], param.detach().numpy(), **CLOSE)
    y, _ = rnn(torch.tensor(X))  # validation begins anew, and goes on by itself
    whole = torch.nn.functional.mse_loss(head(y), torch.tensor(Y)).item()
    assert history.epochs[-1].validation_loss == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM", "MinGRU", "MinLSTM", "LRU", "SelectiveScan"])
def test_evaluation_and_prediction_are_those_of_the_whole_sequence(kind):
    made = trainer(model_of(kind))
    wanted = made.evaluate((X, Y))
    for _ in range(2):  # nothing is left behind
        assert made.evaluate(parts(), stateful=True).loss == pytest.approx(wanted.loss, rel=1e-9)
        found = made.predict(lambda: (x for x, _ in parts()), stateful=True)
        found = np.concatenate(np.split(found, len(FIRSTS)), axis=1)  # part by part, one below the other
        np.testing.assert_allclose(found, made.predict(X), **CLOSE)
    assert abs(made.evaluate(parts()).loss - wanted.loss) > 1e-6


def test_arrays_go_on_batch_by_batch():
    """As in Keras: sample j of a batch goes on with sample j of the one before, in the order of the array."""
    rows = [np.concatenate([batch[i] for batch in parts()]) for i in (0, 1)]
    wanted, made, held = trainer(), trainer(), trainer()
    losses = wanted.fit(parts(), epochs=2, stateful=True).loss
    assert made.fit(tuple(rows), epochs=2, batch_size=BATCH, stateful=True).loss == losses
    history = held.fit(tuple(rows), epochs=2, batch_size=BATCH, stateful=True, validation=tuple(rows))
    assert history.loss == losses
    assert history.epochs[-1].validation_loss == pytest.approx(held.evaluate((X, Y)).loss, rel=1e-9)
    assert made.evaluate(tuple(rows), batch_size=BATCH, stateful=True) == made.evaluate(parts(), stateful=True)
    np.testing.assert_array_equal(
        made.predict(rows[0], batch_size=BATCH, stateful=True),
        made.predict(lambda: [x for x, _ in parts()], stateful=True),
    )
    more = tuple(np.concatenate([array, array[:1]]) for array in rows)
    assert trainer().fit(more, epochs=2, batch_size=BATCH, stateful=True, drop_last=True).loss == losses


def test_a_classifier_with_lengths_goes_on():
    """Padding is no part of a sequence: the next batch goes on where each sample ended."""
    net = nn.SequenceClassifier(nn.GRU(3, 5, rng=0, **F8), nn.Linear(5, 2, rng=1, **F8))
    x, lengths = RNG.standard_normal((2, 3, 7, 3)), np.array([[7, 2, 4], [1, 7, 5]])
    found = trainer(net).predict(
        [(part, None, n) for part, n in zip(x, lengths, strict=True)].__iter__, stateful=True
    )[3:]  # fmt: skip
    for s in range(3):
        joined = np.concatenate([x[part, s, : lengths[part, s]] for part in range(2)])
        np.testing.assert_allclose(found[s], net(joined[:, None])[0], **CLOSE)


class Rows:
    """A data set whose batches say where sequences begin."""

    def __len__(self):
        return BATCH * len(FIRSTS)

    def batch(self, indices):
        part, rows = indices // BATCH * PART, indices % BATCH
        x, y = (np.stack([a[r, s : s + PART] for r, s in zip(rows, part, strict=True)]) for a in (X, Y))
        return x, y, None, part == 30


class Resets(Callback):
    reads_model = False

    def set_trainer(self, trainer):
        self.trainer = trainer

    def on_step(self, history):
        if history.steps == 3:
            self.trainer.reset_states()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resets(accumulate):
    wanted = trainer(accumulate=accumulate)
    losses = [loss for cut in (parts()[:3], parts()[3:]) for loss in wanted.fit(cut, epochs=1, stateful=True).loss]
    assert trainer(accumulate=accumulate).fit(parts(30), epochs=1, stateful=True).loss == losses
    assert trainer(accumulate=accumulate).fit(Rows(), epochs=1, batch_size=BATCH, stateful=True).loss == losses
    assert trainer(callbacks=[Resets()], accumulate=accumulate).fit(parts(), epochs=1, stateful=True).loss == losses
    some = [(*batch, None, [False, s == 30, False, True]) for s, batch in zip(FIRSTS, parts(), strict=True)]
    made, begun = trainer(accumulate=accumulate), [0, 30, 0, None]
    y = np.concatenate(np.split(made.predict(some.__iter__, stateful=True), len(FIRSTS)), axis=1)
    for s, first in enumerate(begun):
        alone = [X[s, :first]] if first is None else [X[s, :first], X[s, first:]]
        if first is None:
            alone = [X[s, a : a + PART] for a in FIRSTS]
        wanted_y = np.concatenate([made.model(x[None])[0] for x in alone if len(x)])
        np.testing.assert_allclose(y[s], wanted_y, **CLOSE)
    history = trainer(accumulate=accumulate).fit(some, epochs=1, stateful=True)
    assert abs(history.loss[-1] - losses[-1]) > 1e-9


class Killed(Callback):
    def on_step(self, history):
        if history.steps == 9:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["LSTM", "LRU", "SelectiveScan", "MinGRU"])
def test_a_resumed_run_is_the_whole_one(kind, tmp_path):
    whole = trainer(model_of(kind), accumulate=2)
    whole.fit(parts(), epochs=3, stateful=True)
    options = {"accumulate": 2, "checkpoint_dir": tmp_path, "checkpoint_every": 4}
    with pytest.raises(KeyboardInterrupt):
        trainer(model_of(kind), callbacks=[Killed()], **options).fit(parts(), epochs=3, stateful=True)
    again = trainer(model_of(kind), **options)
    with pytest.raises(FileFormatError, match="stateful"):
        again.fit(parts(), epochs=3, resume=True)
    assert again.fit(parts(), epochs=3, stateful=True, resume=True).loss == whole.history.loss
    orders.assert_same(again.model.state_dict(), whole.model.state_dict())


def test_what_cannot_go_on_is_refused():
    made, rows = trainer(), (X.reshape(24, 10, 3), Y.reshape(24, 10, 2))
    for model, said in (
        (nn.Sequential(nn.GRU(3, 4, batch_first=True, bidirectional=True, rng=0, **F8), nn.Linear(8, 2, **F8)), "two"),
        (nn.Sequential(nn.Linear(3, 2, **F8)), "no state"),
    ):
        orders.refused(lambda m=model: trainer(m).fit(parts(), epochs=1, stateful=True), said)
        orders.refused(lambda m=model: trainer(m).evaluate(parts(), stateful=True), said)
    for options, said in (
        ({"shuffle": True, "batch_size": 4}, "shuffle=False"), ({"batch_size": 5}, "drop_last"), ({}, "batch_size"),
        ({"batch_size": 4, "validation": (X[:3], Y[:3])}, "divisor"),
    ):  # fmt: skip
        orders.refused(lambda o=options: made.fit(rows, epochs=1, stateful=True, **o), said)
    orders.refused(lambda: made.evaluate(rows, stateful=True), "batch_size")
    orders.refused(lambda: made.evaluate(rows, batch_size=5, stateful=True), "divisor")
    orders.refused(lambda: made.fit(parts(10), epochs=1), "stateful=True")
    orders.refused(lambda: made.evaluate(parts(10)), "stateful=True")
    orders.refused(made.reset_states, "stateful")
    smaller = [*parts()[:2], (X[:3, :PART], Y[:3, :PART])]
    orders.refused(lambda: made.fit(smaller, epochs=1, stateful=True), "drop_last", error=ShapeError)
    made.fit([*parts()[:2], (X[:3, :PART], Y[:3, :PART], None, True)], epochs=1, stateful=True)  # all begin anew
    for reset in ([True], "yes", [1, 0, 0, 0]):
        orders.refused(lambda r=reset: made.fit([(*parts()[0], None, r)], epochs=1, stateful=True), "reset")
    with pytest.raises(OptionError, match="one rank"):
        run_ranks(2, lambda t: trainer(transport=t, schedule="data-parallel").fit(parts(), epochs=1, stateful=True))


def test_steps_with_states_are_not_captured():
    told = []

    class Told(Callback):
        reads_model = False

        def on_start(self, info):
            told.append(info.graph)

    trainer(graph=True, callbacks=[Told()]).fit(parts(), epochs=1, stateful=True)
    assert "a carried state" in told[0]


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "MinGRU", "LRU", "SelectiveScan"])
def test_on_a_device(kind, tmp_path):
    made = trainer(model_of(kind).to("cuda"), accumulate=2)
    whole, cut = made.evaluate((X, Y)).loss, parts()
    assert made.evaluate(cut, stateful=True).loss == pytest.approx(whole, rel=1e-9)
    some = [(*batch, None, [s == 30, False, True, s == 10]) for s, batch in zip(FIRSTS, cut, strict=True)]
    losses = made.fit(some, epochs=2, stateful=True).loss
    options = {"accumulate": 2, "checkpoint_dir": tmp_path, "checkpoint_every": 4}
    with pytest.raises(KeyboardInterrupt):
        trainer(model_of(kind).to("cuda"), callbacks=[Killed()], **options).fit(some, epochs=2, stateful=True)
    again = trainer(model_of(kind).to("cuda"), **options)
    assert again.fit(some, epochs=2, stateful=True, resume=True).loss == losses
    if kind in ("GRU", "LSTM"):
        wanted, _, _ = in_pytorch(kind, made := trainer(model_of(kind).to("cuda")))
        np.testing.assert_allclose(made.fit(cut, epochs=2, stateful=True).loss, wanted, **CLOSE)
