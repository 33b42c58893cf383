"""Means of what counts: over micro-batches, ranks, batches of an evaluation and steps of an epoch, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core import backend
from sparsebp.core.errors import NonFiniteError, OptionError
from sparsebp.nn.loss import count_of
from sparsebp.train import Trainer

CLASSES, IGNORED = 4, 2
WEIGHT = np.array([0.5, 2.0, 1.0, 0.0])
LOSSES = {
    "ignored": (nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss, {"ignore_index": IGNORED}),
    "weights": (nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss, {"weight": WEIGHT}),
    "both": (nn.NLLLoss, torch.nn.NLLLoss, {"weight": WEIGHT, "ignore_index": IGNORED}),
    "smooth": (nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss,
               {"weight": WEIGHT, "ignore_index": IGNORED, "label_smoothing": 0.1}),
    "probabilities": (nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss, {"weight": WEIGHT}),
    "mse": (nn.MSELoss, torch.nn.MSELoss, {}),
}  # fmt: skip
SCHEDULES = {
    "accumulate": (1, {}), "backward-fusion": (1, {"fusion": "backward"}), "forward-fusion": (1, {"fusion": "forward"}),
    "1f1b": (2, {"schedule": "1f1b"}), "gpipe": (2, {"schedule": "gpipe"}), "zb-h1": (2, {"schedule": "zb-h1"}),
    "replicas": (2, {"schedule": "data-parallel"}), "three replicas": (3, {"schedule": "data-parallel"}),
    "sharded": (2, {"schedule": "data-parallel", "sharded": True}),
    "first-k": (2, {"schedule": "reverse-first-k"}),
}  # fmt: skip


def losses(name):
    ours, theirs, options = LOSSES[name]
    tensors = {key: torch.from_numpy(value) if key == "weight" else value for key, value in options.items()}
    return ours(**options), theirs(**tensors)


def model():
    """Classes at every pixel, on axis 1."""
    layers = [nn.Conv2d(2, 3, 1, rng=0, dtype=float), nn.Tanh(), nn.Conv2d(3, CLASSES, 1, rng=1, dtype=float)]
    return nn.Sequential(*layers)


def twin(ours):
    layers = [torch.nn.Conv2d(2, 3, 1), torch.nn.Tanh(), torch.nn.Conv2d(3, CLASSES, 1)]
    theirs = torch.nn.Sequential(*layers).double()
    theirs.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in ours.state_dict().items()})
    return theirs


@st.composite
def data(draw, name):
    """Images whose targets count unevenly: in some nothing does, in one something."""
    samples, g = draw(st.integers(2, 9)), np.random.default_rng(draw(st.integers(0, 99)))
    x = g.standard_normal((samples, 2, 1, 3))
    if name == "mse":
        return x, g.standard_normal((samples, CLASSES, 1, 3))
    if name == "probabilities":
        return x, g.dirichlet(np.ones(CLASSES), (samples, 1, 3)).transpose(0, 3, 1, 2).copy()
    target = g.integers(0, CLASSES, (samples, 1, 3))
    target[g.random(samples) < draw(st.sampled_from([0.0, 0.4, 0.9]))] = 3 if name == "weights" else IGNORED
    target[draw(st.integers(0, samples - 1)), 0, 1] = 1
    return x, target


def right_of(prediction, target, name):
    if target.dtype.kind == "f":
        return None
    counts = np.ones(target.shape, bool) if name == "weights" else target != IGNORED
    return float((prediction.argmax(1) == target)[counts].mean())


def assert_no_worse(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.data(), st.sampled_from(list(LOSSES)))
@settings(max_examples=10)
def test_a_step_is_that_of_the_whole_batch(schedule, draws, name):
    """Loss, accuracy and parameters, after two steps: a part in which nothing counts has no weight."""
    x, target = draws.draw(data(name))
    ranks, options = SCHEDULES[schedule]
    micro = 1 if schedule == "first-k" else draws.draw(st.integers(1 if ranks == 1 else ranks, 5))
    micro = min(micro, len(x)) if schedule in ("1f1b", "gpipe", "zb-h1") else micro
    loss, other = losses(name)
    theirs, wanted = twin(model()), []
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.3)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(target)
    for _ in range(2):
        prediction = theirs(inputs)
        value = other(prediction, targets)
        wanted.append((value.item(), right_of(prediction.detach().numpy(), target, name)))
        sgd.zero_grad()
        value.backward()
        sgd.step()

    def run(transport):
        ours, more = model(), dict(options) if transport is None else {"transport": transport, **options}
        trainer = Trainer(ours, loss, optim.SGD(ours.parameters(), lr=0.3), accumulate=micro, rng=0, **more)
        return ours, trainer.fit((x, target), epochs=2, batch_size=len(x), shuffle=False)

    for ours, history in [run(None)] if ranks == 1 else run_ranks(ranks, run):
        assert_no_worse(history.loss, [value for value, _ in wanted])
        assert [record.train_loss for record in history.epochs] == pytest.approx(history.loss, rel=1e-14)
        if wanted[0][1] is not None:
            assert_no_worse(history.accuracy, [right for _, right in wanted])
        for key, array in theirs.state_dict().items():
            np.testing.assert_allclose(ours.state_dict()[key], array.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ranks", [1, 3])
@given(st.data(), st.sampled_from(list(LOSSES)), st.integers(1, 5))
@settings(max_examples=15)
def test_epochs_and_evaluation_are_those_of_the_whole_set(ranks, draws, name, batch_size):
    """Whatever the batches, and where the rates are 0."""
    x, target = draws.draw(data(name))
    trained = target.copy()
    if name not in ("mse", "probabilities"):
        trained[:, 0, 1] = 1  # in training, something must count in every step
    loss, other = losses(name)
    with torch.no_grad():
        prediction = twin(model())(torch.from_numpy(x))
        want = [(other(prediction, torch.from_numpy(t)).item(), right_of(prediction.numpy(), t, name))
                for t in (trained, target)]  # fmt: skip

    def run(transport):
        more = {} if transport is None else {"transport": transport, "schedule": "data-parallel"}
        ours = model()
        trainer = Trainer(ours, loss, optim.SGD(ours.parameters(), lr=1e-300), accumulate=2, rng=0, **more)
        sizes = {"batch_size": batch_size, "validation_batch_size": batch_size}
        (record,) = trainer.fit((x, trained), epochs=1, validation=(x, target), **sizes).epochs
        again = trainer.evaluate((x, target), batch_size=batch_size)
        assert (again.loss, again.accuracy) == (record.validation_loss, record.validation_accuracy) == again
        return record

    for record in [run(None)] if ranks == 1 else run_ranks(ranks, run):
        found = [(record.train_loss, record.train_accuracy), (record.validation_loss, record.validation_accuracy)]
        for (value, right), (wanted, share) in zip(found, want, strict=True):
            assert_no_worse(value, wanted)
            assert right is None if share is None else right == pytest.approx(share, rel=1e-12)


def test_a_batch_with_an_ignored_sample():
    """In closed form; weighted by samples, the loss would be 1.330."""
    logits = np.log(np.array([[0.1, 0.9], [0.5, 0.5], [0.3, 0.7], [0.3, 0.7]]))
    ours = nn.Linear(2, 2, bias=False, dtype=float)
    ours.params["weight"][...] = np.eye(2)
    trainer = Trainer(ours, nn.CrossEntropyLoss(), optim.SGD(ours.parameters(), lr=1.0))
    loss, accuracy = trainer.evaluate((logits, np.array([0, -100, 1, 1])), batch_size=2)
    assert loss == pytest.approx(-(np.log(0.1) + 2 * np.log(0.7)) / 3) and accuracy == pytest.approx(2 / 3)


class MaskedMSE:
    """A user's loss, whose mean is over the targets that are not NaN."""

    def forward(self, prediction, target):
        difference = np.where(np.isnan(target), 0, prediction - target)
        count = (~np.isnan(target)).sum()
        return float((difference**2).sum() / max(1, count)), (difference, max(1, count))

    def input_grad(self, saved):
        return 2 * saved[0] / saved[1]


class CountedMSE(MaskedMSE):
    def count(self, target):
        return (~np.isnan(target)).sum()


def test_a_loss_of_the_users_says_what_it_counts():
    """Or no step is split: weighted by samples, gradients would be wrong in silence."""
    g = np.random.default_rng(0)
    x, target = g.standard_normal((8, 3)), g.standard_normal((8, 2))
    target[1:4] = np.nan

    def run(transport, loss, micro=1, **options):
        ours = nn.Sequential(nn.Linear(3, 4, rng=0, dtype=float), nn.Linear(4, 2, rng=1, dtype=float))
        trainer = Trainer(ours, loss(), optim.SGD(ours.parameters(), lr=0.1), accumulate=micro, rng=0,
                          transport=transport, **options)  # fmt: skip
        trainer.fit((x, target), epochs=1, batch_size=8, shuffle=False)
        return ours.state_dict()

    whole = run(None, MaskedMSE)
    cases = [(1, 2, {}), (2, 2, {"schedule": "1f1b"}), (2, 1, {"schedule": "data-parallel"})]
    for ranks, micro, options in cases:

        def on(loss, ranks=ranks, micro=micro, options=options):
            if ranks == 1:
                return run(None, loss, micro)
            return run_ranks(ranks, lambda transport: run(transport, loss, micro, **options))[0]

        for name, array in on(CountedMSE).items():
            np.testing.assert_allclose(array, whole[name], rtol=1e-12)
        with pytest.raises(OptionError, match=r"MaskedMSE.count\(target\)"):
            on(MaskedMSE)


def test_what_a_target_counts():
    assert count_of(nn.CrossEntropyLoss(), np.array([[1, -100, 0]])) == 2
    assert count_of(nn.CrossEntropyLoss(weight=WEIGHT), np.array([1, 1, -100, 3], np.int8)) == 4
    assert count_of(nn.CrossEntropyLoss(), np.zeros((2, 4, 5))) == 10  # probabilities
    assert count_of(nn.CrossEntropyLoss(), np.array([2**64 - 100], np.uint64)) == 1  # not the ignored one
    assert count_of(nn.BCEWithLogitsLoss(weight=np.ones(3)), np.zeros((2, 3))) == 6
    assert count_of(MaskedMSE(), np.zeros((2, 3))) == 2
    for shape in ((0,), (0, 3), (3, 0)):
        assert count_of(nn.NLLLoss(ignore_index=0), np.zeros(shape, int)) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("name", ["both", "ignored", "probabilities"])
@pytest.mark.parametrize(("schedule", "graph"), [("accumulate", None), ("accumulate", False), ("replicas", False),
                                                 ("sharded", False), ("1f1b", False)])  # fmt: skip
def test_on_a_device(name, schedule, graph):
    """The numbers of a host, with counts that it does not read before the step is over."""
    g = np.random.default_rng(0)
    x, target = g.standard_normal((6, 2, 1, 3)), g.integers(0, CLASSES, (6, 1, 3))
    target[2:5], target[0, 0, 1] = IGNORED, 1
    if name == "probabilities":
        target = np.eye(CLASSES)[target].transpose(0, 3, 1, 2).copy()
    ranks, options = SCHEDULES[schedule]

    def run(transport, device):
        ours, more = model().to(device), {} if transport is None else {"transport": transport, **options}
        trainer = Trainer(ours, losses(name)[0], optim.SGD(ours.parameters(), lr=0.3), accumulate=3, graph=graph,
                          rng=0, **more)  # fmt: skip
        history = trainer.fit((x, target), epochs=5, batch_size=6, validation=(x, target), validation_batch_size=2)
        records = [(one.train_loss, one.train_accuracy, one.validation_loss) for one in history.epochs]
        return history.loss, history.accuracy, records

    wanted, found = (
        [run(None, device)] if ranks == 1 else run_ranks(ranks, lambda t, at=device: run(t, at))
        for device in ("cpu", "cuda")
    )
    for numbers, others in zip(zip(*wanted, strict=True), zip(*found, strict=True), strict=True):
        others, numbers = np.array(others, float), np.array(numbers, float)  # noqa: PLW2901
        np.testing.assert_allclose(others, numbers, rtol=1e-10)
        assert np.array_equal(others, others[:1].repeat(ranks, 0), equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_in_which_nothing_counts_on_a_device(ranks):
    x, target = np.ones((4, 2, 1, 3)), np.full((4, 1, 3), IGNORED)

    def run(transport):
        ours, more = (
            model().to("cuda"),
            {} if transport is None else SCHEDULES["replicas"][1] | {"transport": transport},
        )
        trainer = Trainer(ours, losses("ignored")[0], optim.SGD(ours.parameters(), lr=0.3), accumulate=2, **more)
        trainer.fit((x, target), epochs=3, batch_size=4)

    with pytest.raises(NonFiniteError, match=r"Nothing counts in the loss at step 1 .*ignore_index=2 at all"):
        run(None) if ranks == 1 else run_ranks(ranks, run)


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
def test_the_default_ignore_index_on_a_device():
    """Training does not look for it there, and says so; an evaluation does."""
    ours, x, target = model().to("cuda"), np.ones((2, 2, 1, 3)), np.array([[[1, -100, 0]], [[-100, -100, -100]]])
    trainer = Trainer(ours, nn.CrossEntropyLoss(), optim.SGD(ours.parameters(), lr=0.3))
    loss, accuracy = trainer.evaluate((x, target), batch_size=1)
    prediction = trainer.predict(x)[0, :, 0]
    assert loss == pytest.approx(nn.CrossEntropyLoss().forward(prediction[:, [0, 2]].T.copy(), np.array([1, 0]))[0])
    assert accuracy == (prediction.argmax(0)[[0, 2]] == [1, 0]).mean()
    with pytest.raises(OptionError, match="does not look for its default ignore_index"):
        trainer.fit((x, target), epochs=2, batch_size=2)
