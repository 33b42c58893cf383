"""Parameters an optimizer trains: a subset is enough, arrays of another model are refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orders
from sparsebp import nn, optim, runtime
from sparsebp.runtime.actions import Stages
from sparsebp.schedule import StepGraph
from sparsebp.train import Callback, Trainer


class Look(Callback):
    """Looks at the model after every step."""

    def on_step(self, history):
        pass


@given(
    name=st.sampled_from(sorted(orders.MODELS)), optimizer=st.sampled_from(sorted(orders.OPTIMIZERS)),
    seed=st.integers(0, 2**32 - 1), part=st.booleans(), scheduled=st.booleans(),
    order=st.sampled_from(["none", "forward", "backward", "F", "U", "I"]), streams=st.sampled_from([1, 2]),
    accumulate=st.integers(1, 4), clip=st.sampled_from([None, 0.4]), batch_size=st.sampled_from([1, 7, 8, 22]),
    read=st.booleans(),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_every_order_is_the_plain_loop(
    name, optimizer, seed, part, scheduled, order, streams, accumulate, clip, batch_size, read
):
    """Bit for bit, of all parameters or some of them, and whether somebody looks after every step or not."""
    make, data = orders.MODELS[name]
    model, twin, rng = make(), make(), np.random.default_rng(seed)
    names = list(model.parameters())
    chosen = sorted(rng.permutation(len(names))[: rng.integers(1, len(names) + 1)]) if part else range(len(names))
    opt, twin_opt = (
        orders.OPTIMIZERS[optimizer]({names[i]: net.parameters()[names[i]] for i in chosen}) for net in (model, twin)
    )
    rates = [optim.ExponentialLR(each, 0.9) if scheduled else None for each in (opt, twin_opt)]
    frozen = {n: a.copy() for n, a in model.parameters().items() if n not in opt.params}
    clip = clip if order in ("none", "forward") else None
    if order in ("none", "forward", "backward"):
        options = {"fusion": order}
    else:  # a schedule for the whole model
        if "shared" in name or name == "gru" or "hybrid" in name or "blelloch" in name:
            order, streams = "F", 1
        stages = Stages(model)
        graph = StepGraph(len(stages), accumulate, stages.unweighted, "step", first=order)
        options = {"schedule": orders.random_order(rng, graph, streams, order)}
    trainer = Trainer(model, nn.CrossEntropyLoss(), opt, rng=3, lr_scheduler=rates[0], clip_norm=clip,
                      accumulate=accumulate, callbacks=[Look()] if read else [], **options)  # fmt: skip
    history = trainer.fit(data(), epochs=2, batch_size=batch_size)
    losses, norms = orders.plain(twin, data(), twin_opt, epochs=2, batch_size=batch_size, accumulate=accumulate,
                                 clip_norm=clip, scheduler=rates[1])  # fmt: skip
    assert (history.loss, history.grad_norm) == (losses, norms)
    orders.assert_same(orders.state_of(model, opt), orders.state_of(twin, twin_opt))
    for n, array in frozen.items():
        np.testing.assert_array_equal(model.parameters()[n], array)


def test_frozen_layers_cost_no_gradients(monkeypatch):
    """Those in front of the first layer that is trained have neither weight gradients nor input gradients."""
    model = orders.mlp()
    calls = []
    for name, layer in model.modules():
        if isinstance(layer, nn.Linear):
            for what in ("input_grad", "weight_grad", "weight_grad_factors"):
                kept = getattr(layer, what)
                monkeypatch.setattr(layer, what, lambda *a, k=kept, n=name, w=what: (calls.append((n, w)), k(*a))[1])
    opt = optim.SGD({n: a for n, a in model.parameters().items() if n.startswith("4.")}, 0.1)
    Trainer(model, nn.CrossEntropyLoss(), opt, rng=0).fit(orders.images(8), epochs=1, batch_size=8)
    assert sorted(set(calls)) == [("4.0", "weight_grad"), ("5", "input_grad")]


@pytest.mark.parametrize("schedule", ["conventional", "ooo"])
def test_a_part_resumes_bit_for_bit(schedule, tmp_path):
    def build(folder):
        model = orders.mlp()
        opt = optim.Adam({n: a for n, a in model.parameters().items() if not n.startswith("1.")}, 0.01)
        return Trainer(model, nn.CrossEntropyLoss(), opt, schedule=schedule, rng=3, checkpoint_dir=tmp_path / folder)

    whole = build("whole")
    whole.fit(orders.images(), epochs=3, batch_size=6)
    build("parts").fit(orders.images(), epochs=1, batch_size=6)
    resumed = build("parts")
    resumed.fit(orders.images(), epochs=3, batch_size=6, resume=True)
    assert resumed.history.loss == whole.history.loss
    orders.assert_same(orders.state_of(resumed.model, resumed.optimizer), orders.state_of(whole.model, whole.optimizer))


def trainer(model, opt, **options):
    return Trainer(model, nn.CrossEntropyLoss(), opt, rng=0, **options)


def test_an_optimizer_of_other_arrays_is_refused():
    model, other = orders.mlp(), orders.mlp()
    orders.refused(lambda: trainer(model, optim.SGD(other.parameters())), "other arrays", "1.weight", "5.bias")
    orders.refused(lambda: trainer(model, optim.SGD({"w": np.ones(2)})), "not in the model: w")
    opt = optim.SGD(model.parameters())
    model.to(dtype=np.float64)
    orders.refused(lambda: trainer(model, opt), "1.weight", "to(...)")
    opt = optim.SGD(model.parameters())
    made = trainer(model, opt)
    model[5].params["bias"] = model[5].params["bias"].copy()
    orders.refused(lambda: made.fit(orders.images(), epochs=1, batch_size=8), "5.bias")
    model = nn.Sequential(nn.Flatten(), nn.Tanh())
    orders.refused(lambda: trainer(model, optim.SGD({"w": np.ones(2)})), "no parameters")


@pytest.mark.parametrize("fusion", ["none", "forward", "backward"])
@pytest.mark.parametrize("how", ["array", "layer"])
def test_a_parameter_that_is_replaced_during_training_is_found(fusion, how):
    class Replace(Callback):
        def on_step(self, history):
            if history.steps == 2:
                if how == "array":
                    model[1].params["weight"] = model[1].params["weight"].copy()
                else:
                    model.children["1"] = nn.Linear(72, 9, rng=0)

    model = orders.mlp()
    made = trainer(model, optim.SGD(model.parameters(), 0.1), fusion=fusion, callbacks=[Replace()])
    orders.refused(lambda: made.fit(orders.images(), epochs=1, batch_size=4), "1.weight")
    assert made.history.steps == 2


def test_a_frozen_parameter_may_be_replaced():
    class Replace(Callback):
        def on_step(self, history):
            model[1].params["weight"] = model[1].params["weight"].copy()

    model = orders.mlp()
    opt = optim.SGD({n: a for n, a in model.parameters().items() if not n.startswith("1.")}, 0.1)
    assert trainer(model, opt, callbacks=[Replace()]).fit(orders.images(), epochs=1, batch_size=4).steps == 6


@pytest.mark.parametrize("streams", [1, 2])
def test_a_backward_fusion_that_was_broken_off_is_not_gone_on_with(streams, tmp_path, monkeypatch):
    class BrokenError(Exception):
        pass

    def build(folder):
        model = orders.mlp()
        order = orders.order_for(model, fusion="backward", streams=streams)
        opt = optim.Adam(model.parameters(), 0.01)
        return Trainer(model, nn.CrossEntropyLoss(), opt, schedule=order, rng=3, checkpoint_dir=tmp_path / folder,
                       checkpoint_every=2)  # fmt: skip

    broken = build("broken")
    calls = []

    def failing(layer, gy, saved):
        if layer is broken.model[1]:
            calls.append(gy)
            if len(calls) == 4:
                raise BrokenError
        return kept(layer, gy, saved)

    kept = nn.Linear.weight_grad
    monkeypatch.setattr(nn.Linear, "weight_grad", failing)
    monkeypatch.setattr(runtime.streams, "MOST_JOINED_TASKS", 1)  # in one call, all might fail before the first update
    with pytest.raises(BrokenError):
        broken.fit(orders.images(), epochs=1, batch_size=4)
    assert len(set(broken.optimizer.steps.values())) == 2
    before = (tmp_path / "broken" / "checkpoint.safetensors").read_bytes()
    again = partial(broken.fit, orders.images(), epochs=1, batch_size=4, overwrite=True)
    orders.refused(again, "interrupted", "1.weight", "resume")
    assert (tmp_path / "broken" / "checkpoint.safetensors").read_bytes() == before
    broken.fit(orders.images(), epochs=1, batch_size=4, resume=True)
    whole = build("whole")
    whole.fit(orders.images(), epochs=1, batch_size=4)
    orders.assert_same(orders.state_of(broken.model, broken.optimizer), orders.state_of(whole.model, whole.optimizer))


# ---- learning-rate schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["alone", "chained", "in a sequence"])
def test_a_schedule_that_follows_the_loss_is_told_after_every_epoch_and_resumes(kind, tmp_path):
    chained = kind == "chained"

    def build(folder):
        model = orders.mlp()
        opt = optim.SGD(model.parameters(), 0.1)
        plateau = optim.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=1e9)  # nothing is an improvement
        if chained:
            plateau = [optim.LinearLR(opt, 0.5, total_iters=4), optim.ExponentialLR(opt, 0.9), plateau]
        elif kind != "alone":
            plateau = optim.SequentialLR(opt, [optim.LinearLR(opt, 0.5, total_iters=2), plateau], [2])
        return Trainer(model, nn.CrossEntropyLoss(), opt, lr_scheduler=plateau, rng=3, checkpoint_dir=tmp_path / folder)

    def fit(folder, epochs, resume=False):
        data, held_out = orders.images(20), None if chained else orders.images(10)
        return build(folder).fit(data, epochs=epochs, batch_size=10, validation=held_out, resume=resume).lr

    factor = [(0.5 + 0.5 * min(step, 4) / 4) * 0.9**step if chained else 1.0 for step in range(6)]
    factor = [0.5, 0.75, 1, 1, 1, 1] if kind == "in a sequence" else factor
    whole = fit("whole", 3)
    assert whole == pytest.approx([0.1 * factor[step] * 0.5 ** (step // 2) for step in range(6)])
    fit("parts", 1)
    assert fit("parts", 3, resume=True) == whole


def test_schedules_of_another_optimizer_or_of_none_are_refused():
    model = orders.mlp()
    opt, other = optim.SGD(model.parameters(), 0.1), optim.SGD(orders.mlp().parameters(), 0.1)
    orders.refused(lambda: trainer(model, opt, lr_scheduler=optim.StepLR(other, 3)), "another optimizer")
    orders.refused(lambda: trainer(model, opt, lr_scheduler="cosine"), "Not a schedule")
