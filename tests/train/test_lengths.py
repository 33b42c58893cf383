"""A loss at every step of padded sequences: padded steps do not count, in loss, gradients or accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence

import orders
import sparsebp as sb
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core import backend
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.data import ArrayDataset
from sparsebp.train import Trainer
from strategies import seeds, sizes

F8 = {"dtype": np.float64}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
CLASSES = 3

LOSSES: dict[str, tuple[Any, Any]] = {
    "classes": (nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss),
    "weights": (
        lambda: nn.CrossEntropyLoss(np.array([0.2, 1.0, 3.0]), ignore_index=0, label_smoothing=0.1),
        lambda: torch.nn.CrossEntropyLoss(
            torch.tensor([0.2, 1, 3], dtype=torch.float64), ignore_index=0, label_smoothing=0.1
        ),
    ),
    "values": (nn.MSELoss, torch.nn.MSELoss),
    "labels": (nn.BCEWithLogitsLoss, torch.nn.BCEWithLogitsLoss),
}


def model_of(layers=1):
    return nn.Sequential(nn.GRU(2, 5, layers, batch_first=True, rng=0, **F8), nn.Linear(5, CLASSES, rng=1, **F8))


def twin_of(model, layers=1):
    twin = torch.nn.ModuleList([torch.nn.GRU(2, 5, layers, batch_first=True), torch.nn.Linear(5, CLASSES)]).double()
    twin.load_state_dict({name: torch.tensor(array) for name, array in model.state_dict().items()})
    return twin


def packed(array, lengths):
    return pack_padded_sequence(torch.tensor(array), torch.tensor(lengths), batch_first=True, enforce_sorted=False)


def torch_outputs(twin, x, target, lengths):
    """Return outputs and targets of the valid steps: the packed sequences' data."""
    return twin[1](twin[0](packed(x, lengths))[0].data), packed(target, lengths).data


def data_of(kind, samples, steps, rng):
    x, lengths = rng.standard_normal((samples, steps, 2)), rng.integers(1, steps + 1, samples)
    target = rng.integers(0, CLASSES, (samples, steps))
    if kind == "values":
        target = rng.standard_normal((samples, steps, CLASSES))
    if kind == "labels":
        target = rng.random((samples, steps, CLASSES))
    if kind == "weights":
        target[0, 0] = 1  # one at least counts
    for s, length in enumerate(lengths):  # what nobody may look at
        x[s, length:] = np.nan
        target[s, length:] = 77 if target.dtype.kind == "i" else np.nan
    return x, target, lengths


def in_pytorch(kind, x, target, lengths, batch_size):
    """Train two epochs on packed sequences; return the modules, and the losses and accuracies of all steps."""
    twin, loss_of = twin_of(model_of()), LOSSES[kind][1]()
    sgd, losses, right = torch.optim.SGD(twin.parameters(), 0.1), [], []
    for _ in range(2):
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            y, t = torch_outputs(twin, x[rows], target[rows], lengths[rows])
            loss = loss_of(y, t)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.item())
            counts = t != 0 if kind == "weights" else torch.ones(len(t), dtype=bool)
            right.append((y.argmax(1) == t)[counts].double().mean().item() if t.ndim == 1 else np.nan)
    return twin, losses, right


@given(
    kind=st.sampled_from(list(LOSSES)), samples=sizes(1, 7), steps=sizes(1, 8), accumulate=st.integers(1, 3),
    batch_size=st.integers(1, 8), schedule=st.sampled_from(["conventional", "ooo"]), seed=seeds,
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_training_is_that_of_packed_sequences(kind, samples, steps, accumulate, batch_size, schedule, seed):
    x, target, lengths = data_of(kind, samples, steps, np.random.default_rng(seed))
    model, accumulate = model_of(), 1 if schedule == "ooo" else accumulate
    twin, wanted, right = in_pytorch(kind, x, target, lengths, batch_size)
    if np.isnan(wanted).any():  # all ignored
        return
    trainer = Trainer(
        model, LOSSES[kind][0](), optim.SGD(model.parameters(), 0.1), accumulate=accumulate, schedule=schedule
    )  # fmt: skip
    history = trainer.fit((x, target, lengths), epochs=2, batch_size=batch_size, shuffle=False, verbose=False)
    np.testing.assert_allclose(history.loss, wanted, **CLOSE)
    np.testing.assert_allclose(history.accuracy, right, **CLOSE)
    for name, param in twin.named_parameters():
        np.testing.assert_allclose(model.parameters()[name], param.detach().numpy(), **CLOSE)


@pytest.mark.parametrize("schedule", ["data-parallel", "reverse-first-k", "1f1b", "pipedream"])
def test_ranks_are_one_worker(schedule):
    """Ranks' shares of the valid steps differ, and one rank has no sample of the last batch."""
    x, target, lengths = data_of("classes", 9, 8, np.random.default_rng(0))

    def fit(transport):
        model, options = model_of(), {} if transport is None else {"schedule": schedule, "transport": transport}
        accumulate = 1 if schedule in ("data-parallel", "reverse-first-k", "pipedream") else 2
        options["accumulate"] = accumulate
        trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), rng=0, **options)
        history = trainer.fit((x, target, lengths), epochs=2, batch_size=4, validation=(x, target, lengths))
        return history, model.state_dict()

    wanted, state = fit(None)
    for history, found in run_ranks(2, fit):
        np.testing.assert_allclose(history.loss, wanted.loss, **CLOSE)
        np.testing.assert_allclose(history.accuracy, wanted.accuracy, **CLOSE)
        for one, other in zip(history.epochs, wanted.epochs, strict=True):
            assert one.validation_loss == pytest.approx(other.validation_loss, rel=1e-9)
            assert one.train_loss == pytest.approx(other.train_loss, rel=1e-9)
        for name, array in state.items():
            np.testing.assert_allclose(found[name], array, **CLOSE)


@pytest.mark.parametrize("kind", list(LOSSES))
def test_evaluation_metrics_and_value_and_grad(kind):
    x, target, lengths = data_of(kind, 9, 7, np.random.default_rng(1))
    model, twin = model_of(2), twin_of(model_of(2), 2)
    ours, theirs = (make() for make in LOSSES[kind])
    rows = []

    def count(prediction, target):
        rows.append((prediction, target))
        return float(len(prediction))

    trainer = Trainer(model, ours, optim.SGD(model.parameters(), 0.1), metrics={"rows": count})
    y, t = torch_outputs(twin, x, target, lengths)
    loss = theirs(y, t)
    loss.backward()
    for batch_size in (1, 4, 9):
        found = trainer.evaluate((x, target), lengths=lengths, batch_size=batch_size)
        np.testing.assert_allclose(found.loss, loss.item(), **CLOSE)
        assert found.metrics["rows"] == lengths.sum() == len(rows[-1][0]) == len(rows[-1][1])
    clean = np.nan_to_num(x), np.nan_to_num(target)
    value, grads = sb.value_and_grad(model, ours)(*clean, lengths=lengths)
    np.testing.assert_allclose(value, loss.item(), **CLOSE)
    for name, param in twin.named_parameters():
        np.testing.assert_allclose(grads[name], param.grad.numpy(), **CLOSE)
    assert sb.verify.check_gradient(model, ours, *clean, lengths=lengths).ok
    predicted = trainer.predict(x, lengths=lengths, batch_size=4)
    valid = np.arange(7) < lengths[:, None]
    np.testing.assert_allclose(predicted[valid], model(clean[0], lengths=lengths)[valid], **CLOSE)
    assert predicted.shape == (9, 7, CLASSES) and not predicted[~valid].any()


def test_classes_last_without_lengths_too():
    """Also where as many steps as classes would make the steps classes; a model may put them first by itself."""
    for steps in (CLASSES, 5):
        x, target, _ = data_of("classes", 6, steps, np.random.default_rng(steps))
        x, target, full = np.nan_to_num(x), target % CLASSES, np.full(6, steps)
        model, twin = model_of(), twin_of(model_of())
        trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1))
        y, t = torch_outputs(twin, x, target, full)
        wanted = torch.nn.functional.cross_entropy(y, t)
        assert trainer.evaluate((x, target)).loss == pytest.approx(wanted.item(), rel=1e-12)
        assert trainer.evaluate((x, target)).accuracy == pytest.approx((y.argmax(1) == t).double().mean().item())
        history = trainer.fit((x, target), epochs=1, batch_size=6, verbose=False)
        assert history.loss[0] == pytest.approx(wanted.item(), rel=1e-12)
        value, _ = sb.value_and_grad(twin_model := model_of(), nn.CrossEntropyLoss())(x, target)
        assert value == pytest.approx(wanted.item(), rel=1e-12) and twin_model is not model
    soft = np.random.default_rng(9).dirichlet(np.ones(CLASSES), (6, 5))
    value, _ = sb.value_and_grad(model, nn.CrossEntropyLoss())(x, soft)
    y, t = torch_outputs(twin_of(model), x, soft, full)
    assert value == pytest.approx(torch.nn.functional.cross_entropy(y, t).item(), rel=1e-12)
    conv = nn.Sequential(nn.Conv1d(2, 4, 1, rng=0, **F8), nn.Tanh())  # its classes are on axis 1
    x, rng = np.random.default_rng(0).standard_normal((5, 2, 4)), np.random.default_rng(1)
    for target in (rng.integers(0, 4, (5, 4)), rng.dirichlet(np.ones(4), (5, 4)).transpose(0, 2, 1).copy()):
        trainer = Trainer(conv, nn.CrossEntropyLoss(), optim.SGD(conv.parameters(), 0.1))
        data = ArrayDataset(x, target, batch_first=True, **F8)
        wanted = torch.nn.functional.cross_entropy(torch.tensor(conv(x)), torch.tensor(target))
        assert trainer.evaluate(data).loss == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("make", [
    lambda: nn.GRU(2, 3, batch_first=True, rng=0, **F8), lambda: nn.LRU(2, 4, batch_first=True, rng=0, **F8),
    lambda: nn.SelectiveScan(2, 4, batch_first=True, rng=0, **F8),
    lambda: nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True, rng=0, **F8),
    lambda: nn.Stage(nn.GRU(2, 3, batch_first=True, rng=0, **F8), nn.Tanh()),
    lambda: nn.Sequential(
        nn.Residual(nn.Sequential(nn.LayerNorm(2, **F8), nn.LRU(2, 4, batch_first=True, rng=0, **F8))), nn.Tanh()
    ),
])  # fmt: skip
def test_layers_that_are_the_model(make):
    """Outputs past an end are zeros or anything: they were compared with the targets there."""
    model, rng = make(), np.random.default_rng(0)
    x, lengths = rng.standard_normal((4, 6, 2)), np.array([6, 1, 3, 5])
    target = rng.standard_normal(model(x).shape)
    found = Trainer(model, nn.MSELoss(), optim.SGD(model.parameters(), 0.1)).evaluate((x, target, lengths))
    valid = np.arange(6) < lengths[:, None]
    assert found.loss == pytest.approx(((model(x, lengths=lengths) - target)[valid] ** 2).mean(), rel=1e-12)


@pytest.mark.parametrize("chain", [False, True])
def test_a_time_major_model_by_hand(chain):
    gru, rng = nn.GRU(2, 3, rng=0, **F8), np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(2, 2, rng=1, **F8), gru, nn.Linear(3, 3, rng=2, **F8)) if chain else gru
    x, target, lengths = rng.standard_normal((6, 4, 2)), rng.standard_normal((6, 4, 3)), np.array([6, 1, 3, 5])
    valid = np.arange(6)[:, None] < lengths
    value, _ = sb.value_and_grad(model, nn.MSELoss())(x, target, lengths=lengths)
    assert value == pytest.approx(((model(x, lengths=lengths) - target)[valid] ** 2).mean(), rel=1e-12)
    assert sb.verify.check_gradient(model, nn.MSELoss(), x, target, lengths=lengths).ok


class Unsaid(nn.SequenceClassifier):
    joins_steps = None


def test_what_does_not_fit_is_refused():
    x, target, lengths = data_of("values", 6, 4, np.random.default_rng(0))
    model = model_of()
    trainer = Trainer(model, nn.MSELoss(), optim.SGD(model.parameters(), 0.1))
    for wrong in (target[:, 0], target[:, :2], target[:, 0, 0]):
        orders.refused(lambda t=wrong: trainer.evaluate((x, t, lengths)), "MeanOverSteps", error=ShapeError)
        orders.refused(lambda t=wrong: trainer.fit((x, t, lengths), epochs=1, batch_size=6), error=ShapeError)
    x, target, lengths = data_of("values", 6, 3, np.random.default_rng(0))
    unsaid = Unsaid(nn.GRU(2, 5, batch_first=True, rng=0, **F8), nn.Linear(5, 3, rng=1, **F8))
    trainer = Trainer(unsaid, nn.MSELoss(), optim.SGD(unsaid.parameters(), 0.1))
    # Three numbers a sample, or one a step?
    orders.refused(lambda: trainer.evaluate((x, target[:, 0], lengths)), "joins_steps", error=OptionError)
    said = nn.SequenceClassifier(unsaid.rnn, unsaid.head)
    trainer = Trainer(said, nn.MSELoss(), optim.SGD(said.parameters(), 0.1))
    values = np.nan_to_num(target[:, 0])
    assert trainer.evaluate((x, values, lengths)).loss == pytest.approx(
        ((said(np.nan_to_num(x), lengths=lengths) - values) ** 2).mean(), rel=1e-12
    )


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("kind", list(LOSSES))
@pytest.mark.parametrize("padded", [True, False])
def test_on_a_device(kind, padded):
    """Without lengths, steps are captured into graphs, those whose classes are last as well."""
    x, target, lengths = data_of(kind, 8, 6, np.random.default_rng(3))
    if not padded:
        x, target, lengths = np.nan_to_num(x), np.nan_to_num(target), np.full(8, 6)
        target = target % CLASSES if target.dtype.kind == "i" else target
    twin, wanted, right = in_pytorch(kind, x, target, lengths, 2)
    model = model_of().to("cuda")
    trainer = Trainer(model, LOSSES[kind][0](), optim.SGD(model.parameters(), 0.1))
    given = (x, target, lengths) if padded else (x, target)
    history = trainer.fit(given, epochs=2, batch_size=2, shuffle=False)
    np.testing.assert_allclose(history.loss, wanted, **CLOSE)
    np.testing.assert_allclose(history.accuracy, right, **CLOSE)
    for name, param in twin.named_parameters():
        np.testing.assert_allclose(backend.to_host(model.parameters()[name]), param.detach().numpy(), **CLOSE)
    y, t = torch_outputs(twin, x, target, lengths)
    assert trainer.evaluate(given, batch_size=3).loss == pytest.approx(LOSSES[kind][1]()(y, t).item(), rel=1e-9)
