"""Optimizer fusion: bitwise equal results, no late updates seen, gradients freed at once, refusals."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core.errors import NonFiniteError
from sparsebp.nn.gradients import Gradients
from sparsebp.train import Callback, Trainer, load_checkpoint

FUSIONS = ("none", "forward", "backward")


def fit(model, data, optimizer, *, epochs=2, batch_size=8, loss=None, resume=False, **options):
    trainer = Trainer(model, loss or nn.CrossEntropyLoss(), optimizer, rng=3, **options)
    return trainer, trainer.fit(data, epochs=epochs, batch_size=batch_size, resume=resume)


def both(name, optimizer):
    """Return a model, data and optimizer, twice the same."""
    make, data = orders.MODELS[name]
    for _ in range(2):
        model = make()
        yield model, data(), orders.OPTIMIZERS[optimizer](model.parameters())


@pytest.mark.parametrize("fusion", ["forward", "backward"])
@pytest.mark.parametrize("name", ["shared", "shared, linear"])
def test_shared_parameters_accumulate_alike_in_every_fusion(name, fusion):
    (model, data, opt), (twin, _, twin_opt) = both(name, "adam")
    _, history = fit(model, data, opt, fusion=fusion, accumulate=3)
    _, wanted = fit(twin, data, twin_opt, accumulate=3)
    assert (history.loss, history.grad_norm) == (wanted.loss, wanted.grad_norm)
    orders.assert_same(orders.state_of(model, opt), orders.state_of(twin, twin_opt))


class Reader(Callback):
    """Notes the parameters at some events."""

    def __init__(self, model, events):
        self.model, self.seen = model, []
        for event in events:
            setattr(self, f"on_{event}", self.note)

    def note(self, *_):
        self.seen.append(self.model.state_dict())


@pytest.mark.parametrize("events", [("step",), ("epoch",), ("end",), ("close",), ("step", "epoch", "checkpoint")])
def test_late_updates_are_never_seen(events, tmp_path):
    seen = {}
    for fusion in ("none", "forward"):
        model = orders.mlp()
        reader = Reader(model, events)
        opt = orders.OPTIMIZERS["adam"](model.parameters())
        fit(model, orders.images(), opt, fusion=fusion, callbacks=[reader], checkpoint_dir=tmp_path / fusion,
            checkpoint_every=2)  # fmt: skip
        seen[fusion] = reader.seen
    assert len(seen["none"]) == len(seen["forward"]) > 0
    for got, want in zip(seen["forward"], seen["none"], strict=True):
        orders.assert_same(got, want)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_evaluation_and_checkpoints_between_steps(fusion, tmp_path):
    (model, data, opt), (twin, _, twin_opt) = both("conv", "nesterov")
    results = []
    for net, o, how in ((model, opt, fusion), (twin, twin_opt, "none")):
        folder = tmp_path / "x" / str(len(results))
        trainer = Trainer(net, nn.CrossEntropyLoss(), o, fusion=how, rng=3, checkpoint_dir=folder, checkpoint_every=2)
        trainer.fit(data, epochs=1, batch_size=4, validation=orders.images(9))
        tensors = load_checkpoint(folder / "checkpoint.safetensors").tensors
        results.append((trainer.history.epochs[0].validation_loss, tensors))
    assert results[0][0] == results[1][0]
    for tensors in (results[0][1], results[1][1]):
        tensors.pop("history.seconds")
    orders.assert_same(results[0][1], results[1][1])


def test_an_interruption_amid_late_updates(monkeypatch):
    (model, data, opt), (twin, _, twin_opt) = both("mlp", "adam")
    calls = []

    def interrupted(x):
        calls.append(x)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return nn.Tanh.forward(model[2], x)

    monkeypatch.setattr(model[2], "forward", interrupted)  # the first Linear has its update by then, others have not
    with pytest.raises(KeyboardInterrupt):
        fit(model, data, opt, fusion="forward")
    with pytest.raises(KeyboardInterrupt):
        fit(twin, data, twin_opt, callbacks=[orders.Stop(2)])
    orders.assert_same(orders.state_of(model, opt), orders.state_of(twin, twin_opt))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_run_resumes_bit_for_bit_with_any_fusion(fusion, tmp_path):
    (model, data, opt), (twin, _, twin_opt) = both("conv", "adam")
    with pytest.raises(KeyboardInterrupt):
        fit(model, data, opt, fusion=fusion, callbacks=[orders.Stop(4)], checkpoint_dir=tmp_path,
            checkpoint_every=2, accumulate=2)  # fmt: skip
    model = orders.conv()
    opt = orders.OPTIMIZERS["adam"](model.parameters())
    _, history = fit(model, data, opt, fusion=fusion, checkpoint_dir=tmp_path, checkpoint_every=2, accumulate=2,
                     resume=True)  # fmt: skip
    _, wanted = fit(twin, data, twin_opt, accumulate=2)
    assert (history.loss, history.grad_norm) == (wanted.loss, wanted.grad_norm)
    orders.assert_same(orders.state_of(model, opt), orders.state_of(twin, twin_opt))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_gradient_that_is_not_finite_is_found_before_its_update(fusion, monkeypatch):
    model = orders.mlp()
    before = model.state_dict()

    def spoilt(gy, saved):
        grads = nn.Linear.weight_grad(model[1], gy, saved)
        grads["weight"][0, 0] = np.nan
        return grads

    monkeypatch.setattr(model[1], "weight_grad", spoilt)
    with pytest.raises(NonFiniteError, match=r"gradient is not finite at step 1 .*1\.weight"):
        fit(model, orders.images(), optim.SGD(model.parameters(), 0.1), fusion=fusion)
    for name, array in model.state_dict().items():
        if fusion != "backward" or name.startswith("1."):
            np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize(("fusion", "layers"), [("none", 6), ("forward", 6), ("backward", 1)])
def test_gradients_go_with_their_updates(fusion, layers, monkeypatch):
    model = nn.Sequential(*(nn.Linear(8, 8, rng=i) for i in range(6)))
    made, most = [], []

    def weight_grad(layer, gy, saved):
        grads = kept(layer, gy, saved)
        made.extend(weakref.ref(grad) for grad in grads.values())
        most.append(sum(grad().nbytes for grad in made if grad() is not None))
        return grads

    kept = nn.Linear.weight_grad
    monkeypatch.setattr(nn.Linear, "weight_grad", weight_grad)
    x = np.ones((4, 8), np.float32)
    fit(model, orders.Rows(x, x), optim.SGD(model.parameters(), 0.0), epochs=1, loss=nn.MSELoss(), fusion=fusion)
    assert max(most) == layers * (64 + 8) * 4


def test_large_products_are_used_row_by_row(monkeypatch):
    """Backward-fusion: the gradient of a large weight is never there."""
    model = orders.wide()
    large = model[3]
    optimizer = optim.Adam(model.parameters())
    before, factors = large.params["weight"].copy(), large.weight_grad_factors
    monkeypatch.setattr(large, "weight_grad", lambda gy, saved: pytest.fail("the whole gradient was computed"))
    monkeypatch.setattr(large, "weight_grad_factors", factors)  # it stands for that one
    fit(model, orders.images(), optimizer, epochs=1, batch_size=11, fusion="backward")
    assert (large.params["weight"] != before).mean() > 0.9


def test_a_large_product_that_is_not_finite_is_refused_by_name(monkeypatch):
    model = orders.wide()
    factors = model[3].weight_grad_factors

    def broken(gy, saved):
        products, rest = factors(gy, saved)
        return {"weight": (products["weight"][0] * np.float32(np.nan), products["weight"][1])}, rest

    monkeypatch.setattr(model[3], "weight_grad_factors", broken)
    before = model[3].params["weight"].copy()
    with pytest.raises(NonFiniteError, match=r"3\.weight"):
        fit(model, orders.images(), optim.SGD(model.parameters(), lr=1.0), batch_size=11, fusion="backward")
    np.testing.assert_array_equal(model[3].params["weight"], before)


def zero(grads):
    return {name: 0 * grad for name, grad in grads.items()}


class Still(nn.Linear):
    """Learns nothing."""

    def weight_grad(self, gy, saved):
        return zero(super().weight_grad(gy, saved))


class Handed(nn.Linear):
    """Learns nothing, by gradients of its own."""

    def gradients(self, gy, saved):
        return Gradients(self, gy, saved, weights=lambda: zero(self.weight_grad(gy, saved)))


@pytest.mark.parametrize("how", ["object", "class", Still, Handed])
def test_a_large_gradient_of_ones_own_is_used(monkeypatch, how):
    """Backward-fusion took the factors that the layer of the package has, and trained by another gradient."""
    model = orders.wide()
    large, inner = model[3], nn.Linear.weight_grad
    if how == "object":
        monkeypatch.setattr(large, "weight_grad", lambda gy, saved: zero(inner(large, gy, saved)))
    elif how == "class":
        monkeypatch.setattr(nn.Linear, "weight_grad", lambda self, gy, saved: zero(inner(self, gy, saved)))
    else:
        large.__class__ = how
    before = large.params["weight"].copy()
    fit(model, orders.images(), optim.SGD(model.parameters(), lr=1.0), epochs=1, batch_size=11, fusion="backward")
    np.testing.assert_array_equal(large.params["weight"], before)
