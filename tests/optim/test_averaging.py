"""Averages of weights against torch.optim.swa_utils, by themselves and in the trainer."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pipelines as p
import sparsebp as sb
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import DTypeError, FileFormatError, OptionError, ShapeError, SparseBPError
from sparsebp.train import Callback, EarlyStopping, Trainer, WeightAveraging, load_checkpoint
from strategies import seeds


def twins(seed=0):
    f = {"dtype": float}
    ours = nn.Sequential(nn.Conv2d(1, 2, 3, rng=seed, **f), nn.BatchNorm2d(2, **f), nn.ReLU(), nn.Flatten(),
                         nn.Linear(8, 3, rng=seed, **f))  # fmt: skip
    theirs = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.Flatten(),
                                 torch.nn.Linear(8, 3)).double()  # fmt: skip
    theirs.load_state_dict({name: torch.tensor(array) for name, array in ours.state_dict().items()})
    return ours, theirs


@given(decay=st.sampled_from([0.0, 0.5, 0.99]), count=st.integers(0, 5), seed=seeds)
def test_averages_are_torchs(decay, count, seed):
    """Of parameters, with buffers copied; the model has them inside of a block, and its own weights back to the bit."""
    rng = np.random.default_rng(seed)
    ours, theirs = twins()
    ema = optim.EMA(ours, decay)
    swa = torch.optim.swa_utils.AveragedModel(
        theirs, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )  # fmt: skip
    for _ in range(count):
        x = rng.standard_normal((4, 1, 4, 4))
        ours.forward(x)
        theirs(torch.from_numpy(x))
        for name, twin in theirs.named_parameters():
            change = rng.standard_normal(twin.shape)
            ours.parameters()[name][...] += change
            twin.data += torch.from_numpy(change)
        ema.update()
        swa.update_parameters(theirs)
    x = rng.standard_normal((4, 1, 4, 4))
    ours.forward(x)  # statistics that the averages have not seen
    before, wanted = ours.state_dict(), dict(swa.module.state_dict())
    with ema.averaged():
        for name, array in ours.state_dict().items():
            np.testing.assert_allclose(array, wanted[name].numpy(), rtol=1e-12, atol=1e-14)
        y = ours.eval()(x)
        np.testing.assert_allclose(y, swa.eval()(torch.from_numpy(x)).detach().numpy(), rtol=1e-9, atol=1e-12)
        with pytest.raises(OptionError, match="would be averaged"):
            ema.update()
        ours.train().forward(x)
    np.testing.assert_equal(ours.state_dict(), before)
    again = optim.EMA(twins(1)[0], decay)
    again.load_state_dict(ema.state_dict())
    again.apply()
    assert again.updates == count
    with ema.averaged():
        np.testing.assert_equal(again._model.state_dict(), ours.state_dict())


def test_the_first_weights_are_soon_forgotten():
    w = {"w": np.array([0.0])}
    ema, expected = optim.EMA(w, 0.9, warm_up=True), 0.0
    for n in range(40):
        w["w"][0] = n
        ema.update()
        decay = min(0.9, (1 + n) / (10 + n))
        expected = n if n == 0 else decay * expected + (1 - decay) * n
        assert ema.averages["w"][0] == pytest.approx(expected, rel=1e-12)
    assert decay == pytest.approx(40 / 49)


def test_what_averages_refuse():
    model = nn.Linear(3, 2, rng=0)
    for wrong in (-0.1, 1.0, "a", None):
        with pytest.raises(OptionError):
            optim.EMA(model, wrong)
    with pytest.raises(OptionError):
        optim.EMA(nn.ReLU(), 0.9)
    ema = optim.EMA(model, 0.9)
    ema.update()
    state = ema.state_dict()
    for error, wrong in (
        (OptionError, None), (FileFormatError, {}), (FileFormatError, state | {"EMA.version": 3}),
        (FileFormatError, {key: value for key, value in state.items() if key != "updates"}),
        (OptionError, state | {"updates": -1}), (ShapeError, state | {"averages.bias": np.ones(3, np.float32)}),
        (DTypeError, state | {"averages.bias": np.ones(2)}), (DTypeError, state | {"averages.bias": None}),
    ):  # fmt: skip
        with pytest.raises(error):
            ema.load_state_dict(wrong)
        np.testing.assert_equal(ema.state_dict(), state)
    model.params["bias"] = np.full(2, 7, np.float32)  # another array in its place is followed
    ema.update()
    np.testing.assert_allclose(ema.averages["bias"], 0.9 * state["averages.bias"] + 0.7, rtol=1e-6)
    model.to(dtype=np.float64)
    with pytest.raises(DTypeError):
        ema.update()
    parts = nn.Sequential(nn.Linear(3, 2, rng=0))
    ema = optim.EMA(parts)
    parts.children["more"] = nn.Linear(2, 2, rng=1)
    with pytest.raises(OptionError, match="not those that are averaged"):
        ema.update()


def test_pruned_weights_stay_zero_in_averages():
    model = nn.Linear(6, 4, rng=0)
    ema = optim.EMA(model, 0.9)
    ema.update()
    sb.prune(model, 0.5)
    zeros = model.state_dict()["weight"] == 0
    ema.update()
    with ema.averaged():
        assert (model.state_dict()["weight"][zeros] == 0).all() and (model.state_dict()["weight"][~zeros] != 0).all()


# ---- in the trainer -------------------------------------------------------------------------------------------------

DATA = np.random.default_rng(0).standard_normal((24, 1, 4, 4)), np.arange(24) % 3
HELD_OUT = np.random.default_rng(1).standard_normal((9, 1, 4, 4)), np.arange(9) % 3


def trainer(folder=None, callbacks=(), **options):
    model, _ = twins()
    ema = optim.EMA(model, 0.8)
    sgd = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = [WeightAveraging(ema), *callbacks]
    return Trainer(model, nn.CrossEntropyLoss(), sgd, callbacks=parts, checkpoint_dir=folder, rng=0, **options), ema


@pytest.mark.parametrize("fusion", ["none", "forward", "backward"])
def test_the_trainer_validates_the_averages_of_every_step(fusion):
    plain, seen = twins()[0], []

    class Follow(Callback):
        def set_trainer(self, owner):
            self.model = owner.model
            self.twin = optim.EMA(plain, 0.8)

        def on_step(self, history):
            for name, array in self.model.parameters().items():
                plain.parameters()[name][...] = array
            self.twin.update()
            seen.append(history.loss[-1])

    follow = Follow()
    t, ema = trainer(callbacks=[follow], fusion=fusion)
    history = t.fit(DATA, epochs=2, batch_size=6, validation=HELD_OUT)
    assert ema.updates == len(seen) == 8
    np.testing.assert_equal(ema.averages, follow.twin.averages)
    own = t.evaluate(HELD_OUT)[0]
    with ema.averaged():
        assert t.evaluate(HELD_OUT)[0] == history.epochs[-1].validation_loss != own
    assert t.evaluate(HELD_OUT)[0] == own


@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_a_resumed_run_has_the_same_averages(tmp_path, stop):
    class Stop(Callback):
        def on_step(self, history):
            if history.steps == stop:
                raise KeyboardInterrupt

    whole, averages = trainer(tmp_path / "whole")
    history = whole.fit(DATA, epochs=3, batch_size=6, validation=HELD_OUT)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "parts", [Stop()], checkpoint_every=2)[0].fit(
            DATA, epochs=3, batch_size=6, validation=HELD_OUT
        )
    t, ema = trainer(tmp_path / "parts")
    found = t.fit(DATA, epochs=3, batch_size=6, validation=HELD_OUT, resume=True)
    assert [r.validation_loss for r in found.epochs] == [r.validation_loss for r in history.epochs]
    np.testing.assert_equal(ema.state_dict(), averages.state_dict())
    ema.apply()
    kept, _ = twins(3)
    kept.load_state_dict(load_checkpoint(tmp_path / "parts").part("callbacks.WeightAveraging.averages"))
    np.testing.assert_equal(kept.state_dict(), t.model.state_dict())
    t.callbacks = ()
    with pytest.raises(FileFormatError, match="callbacks with a state differs"):
        t.fit(DATA, epochs=3, batch_size=6, validation=HELD_OUT, resume=True)


def test_the_best_weights_are_the_averages_that_were_validated(tmp_path):
    stopping = EarlyStopping("validation_loss", patience=9, restore_best=True)
    t, _ = trainer(callbacks=[stopping])
    t.fit(DATA, epochs=4, batch_size=6, validation=HELD_OUT)
    assert t.evaluate(HELD_OUT)[0] == stopping.best
    with pytest.raises(OptionError, match="another model"):
        trainer(callbacks=[WeightAveraging(optim.EMA(twins()[0]))])[0].fit(DATA, epochs=1, batch_size=6)
    with pytest.raises(OptionError, match=r"WeightAveraging\(sb.optim.EMA"):
        WeightAveraging(t.model)


@pytest.mark.parametrize("schedule", ["data-parallel", "1f1b"])
def test_averages_on_ranks_are_those_of_one(schedule):
    def fit(transport):
        model = p.mlp()
        ema = optim.EMA(model, 0.8)
        options = {} if transport is None else {"transport": transport, "schedule": schedule}
        t = Trainer(model, nn.CrossEntropyLoss(), p.momentum(model), callbacks=[WeightAveraging(ema)], rng=0,
                    accumulate=2, **options)  # fmt: skip
        x = np.random.default_rng(0).standard_normal((20, 7))
        history = t.fit((x, np.arange(20) % 3), epochs=2, batch_size=5, validation=(x[:7] + 1, np.arange(7) % 3))
        return [record.validation_loss for record in history.epochs], model.state_dict(), copy.deepcopy(ema.averages)

    losses, weights, averages = fit(None)
    for rank, found in enumerate(run_ranks(2, fit)):
        np.testing.assert_allclose(found[0], losses, rtol=1e-9)
        for name, array in weights.items():
            np.testing.assert_allclose(found[1][name], array, rtol=1e-9, atol=1e-12)
        for name, array in averages.items() if rank == 0 else ():
            np.testing.assert_allclose(found[2][name], array, rtol=1e-9, atol=1e-12)


def test_an_error_while_validating_gives_the_weights_back():
    class Broken(nn.CrossEntropyLoss):
        tries = 0  # of the validation set; the first is before training

        def forward(self, prediction, target):
            self.tries += len(target) == 9
            if self.tries == 2:
                raise OptionError("broken", expected="", got="")
            return super().forward(prediction, target)

    t, ema = trainer()
    t.loss = Broken()
    with pytest.raises(SparseBPError, match="broken"):
        t.fit(DATA, epochs=1, batch_size=6, validation=HELD_OUT)
    assert any((array != ema.averages[name]).any() for name, array in t.model.parameters().items())
    assert not ema._inside
