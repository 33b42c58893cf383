"""Losses against torch.nn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp import nn
from sparsebp.core import backend
from sparsebp.core.errors import OptionError, ShapeError
from strategies import reals, seeds, sizes

CLOSE = {np.dtype(np.float32): {"rtol": 1e-4, "atol": 1e-5}, np.dtype(np.float64): {"rtol": 1e-10, "atol": 1e-12}}
MEAN, SUM, NONE = ({"reduction": reduction} for reduction in ("mean", "sum", "none"))
BATCH = {"reduction": "batchmean"}
TRIPLETS = st.fixed_dictionaries({
    "margin": st.sampled_from([1.0, 0.3]), "p": st.sampled_from([2.0, 1.0, 3.0, 0.5, float("inf")]),
    "eps": st.sampled_from([1e-6, 0.0]), "swap": st.booleans(), "reduction": st.sampled_from(["mean", "sum", "none"]),
})  # fmt: skip


def check(name, options, arrays, rng, inputs):
    """Compare the loss and the gradients of the first `inputs` arrays with torch."""
    loss, twin, close = getattr(nn, name)(**options), getattr(torch.nn, name)(**options), CLOSE[arrays[0].dtype]
    given = [torch.from_numpy(a.copy()).requires_grad_(i < inputs) for i, a in enumerate(arrays)]
    want = twin(*given)
    value, saved = loss.forward(*arrays)
    np.testing.assert_allclose(value, want.detach().numpy(), **close)
    gy = rng.standard_normal(want.shape).astype(arrays[0].dtype)
    want.backward(torch.from_numpy(np.asarray(gy)))
    grads = loss.input_grad(saved, gy if loss.reduction == "none" else float(gy))
    for grad, tensor in zip(grads if inputs > 1 else (grads,), given, strict=False):
        assert grad.dtype == arrays[0].dtype
        np.testing.assert_allclose(grad, tensor.grad.numpy(), **close)


@given(shape=st.lists(sizes(1, 5), max_size=3), delta=st.sampled_from([1.0, 0.2, 3.0]),
       options=st.sampled_from([MEAN, SUM, NONE]), dtype=reals, seed=seeds)  # fmt: skip
def test_huber(shape, delta, options, dtype, seed):
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(2 * rng.standard_normal(shape)).astype(dtype) for _ in range(2)]
    check("HuberLoss", {**options, "delta": delta}, arrays, rng, 1)


@pytest.mark.filterwarnings("ignore:reduction")  # torch's, of what the mean divides by
@given(shape=st.lists(sizes(1, 5), min_size=1, max_size=3), log_target=st.booleans(),
       options=st.sampled_from([MEAN, SUM, NONE, BATCH]), dtype=reals, seed=seeds)  # fmt: skip
def test_kl_divergence(shape, log_target, options, dtype, seed):
    rng = np.random.default_rng(seed)
    prediction, target = (np.log(rng.random(shape)).astype(dtype) for _ in range(2))
    if not log_target:
        target = np.exp(target) * (rng.random(shape) < 0.7)  # some are 0
    check("KLDivLoss", {**options, "log_target": log_target}, [prediction, target.astype(dtype)], rng, 1)


@given(shape=st.lists(sizes(1, 5), max_size=2), features=sizes(1, 5), options=TRIPLETS, dtype=reals, seed=seeds)
def test_triplet_margin(shape, features, options, dtype, seed):
    rng = np.random.default_rng(seed)
    arrays = list(rng.standard_normal((3, *shape, features)).astype(dtype))
    if options["eps"] == 0:
        arrays[1][..., 0] = arrays[0][..., 0]  # a difference of 0
    check("TripletMarginLoss", options, arrays, rng, 3)


def test_equal_distances_and_an_equal_margin_have_torchs_slopes():
    rng = np.random.default_rng(0)
    a, p, n = (np.array([row]) for row in ([0.0, 0.0], [0.0, 1.0], [1.0, 1.0]))
    for swap in (False, True):  # d(a, p) = d(p, n) = 1
        check("TripletMarginLoss", {"swap": swap, "p": float("inf"), "eps": 0.0}, [a, p, n], rng, 3)
    check("TripletMarginLoss", {"eps": 0.0, "margin": 1.0}, [a, p, 2 * p], rng, 3)  # the loss is 0


def test_triplets_are_trained_by_a_step_of_ones_own():
    rng = np.random.default_rng(0)
    model, loss = nn.Linear(4, 2, rng=0, dtype=np.float64), nn.TripletMarginLoss()
    optimizer, triplets, values = sb.optim.SGD(model.parameters(), 0.1), rng.standard_normal((24, 4)), []
    for _ in range(60):
        y, saved = model.forward(triplets)
        value, at = loss.forward(*np.split(y, 3))
        optimizer.step(model.weight_grad(np.concatenate(loss.input_grad(at)), saved))
        values.append(value)
    assert values[-1] < values[0] / 2
    with pytest.raises(OptionError, match="a prediction and a target"):
        sb.train.Trainer(model, loss, optimizer)


@pytest.mark.parametrize(("reduction", "count"), [("mean", 24), ("batchmean", 8)])
def test_a_divergence_is_trained_in_parts(reduction, count):
    """Micro-batches of 3, 3 and 2 samples give the step of all 8."""
    rng, states = np.random.default_rng(0), []
    target = rng.random((8, 3))
    target /= target.sum(1, keepdims=True)
    data = sb.data.ArrayDataset(rng.standard_normal((8, 3)), target, dtype=np.float64)
    loss = nn.KLDivLoss(reduction=reduction)
    assert loss.count(target) == count
    for accumulate in (1, 3):
        model = nn.Sequential(nn.Linear(3, 3, rng=0, dtype=np.float64), nn.LogSoftmax())
        trainer = sb.train.Trainer(model, loss, sb.optim.SGD(model.parameters(), 0.5), rng=0, accumulate=accumulate)
        trainer.fit(data, epochs=1, batch_size=8)
        states.append(model.state_dict()["0.weight"])
    np.testing.assert_allclose(*states, rtol=1e-12)
    with pytest.raises(OptionError, match="mean over samples"):
        sb.train.Trainer(model, nn.KLDivLoss(reduction="sum"), sb.optim.SGD(model.parameters(), 0.5))


@pytest.mark.parametrize(("error", "text", "call"), [
    (OptionError, "delta", lambda: nn.HuberLoss(delta=0)),
    (OptionError, "reduction", lambda: nn.HuberLoss("batchmean")),
    (OptionError, "log_target", lambda: nn.KLDivLoss(log_target=1)),
    (OptionError, "p is", lambda: nn.TripletMarginLoss(p=0)),
    (OptionError, "margin", lambda: nn.TripletMarginLoss(-1.0)),
    (ShapeError, "empty", lambda: nn.KLDivLoss(reduction="batchmean").forward(np.ones((0, 2)), np.ones((0, 2)))),
    (ShapeError, "negative", lambda: nn.TripletMarginLoss().forward(np.ones((2, 3)), np.ones((2, 3)), np.ones((1, 3)))),
    (ShapeError, "no vector", lambda: nn.TripletMarginLoss().forward(*[np.ones(())] * 3)),
])  # fmt: skip
def test_refusals(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_a_nan_comes_through():
    value, _ = nn.CrossEntropyLoss().forward(np.array([[np.nan, 1.0], [0.0, 1.0]]), np.array([0, 1]))
    assert np.isnan(value)


@pytest.mark.parametrize("weight", [None, np.ones(2)])
def test_a_class_beyond_int64_is_not_taken_for_the_ignored_one(weight):
    target = np.array([0, 2**64 - 100], np.uint64)
    with pytest.raises(OptionError, match="target"):
        nn.CrossEntropyLoss(weight=weight).forward(np.ones((2, 2)), target)
    target[1] = 7
    value, _ = nn.CrossEntropyLoss(weight=weight, ignore_index=7).forward(np.ones((2, 2)), target)
    assert value == pytest.approx(np.log(2))


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": -1}])
def test_what_is_ignored_on_a_device(options):
    cp = backend.cupy()
    rng = np.random.default_rng(0)
    loss, prediction = nn.CrossEntropyLoss(**options), rng.standard_normal((5, 3))
    target = np.array([0, 2, loss.ignore_index, 1, loss.ignore_index])
    twin = torch.from_numpy(prediction.copy()).requires_grad_()
    want = torch.nn.CrossEntropyLoss(**options)(twin, torch.from_numpy(target))
    want.sum().backward()
    value, saved = loss.forward(cp.asarray(prediction), cp.asarray(target))
    np.testing.assert_allclose(cp.asnumpy(cp.asarray(value)), want.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(cp.asnumpy(saved), twin.grad.numpy(), rtol=1e-12, atol=1e-15)
    unread, _ = loss.on_device(cp.asarray(prediction), cp.asarray(target))
    assert bool(cp.isnan(unread).any()) is (loss.ignore_index == -100)
    with pytest.raises(OptionError, match="a class that is not there"):
        loss.forward(cp.asarray(prediction), cp.asarray(np.array([0, 3, -100, 1, 1])))


def test_an_element_of_ones_own_is_asked_of_a_class_and_of_an_object():
    """The loss that the kernels compute in one pass belongs to the inherited one alone."""

    def element(prediction, target):
        return 7 * np.abs(prediction - target), np.full_like(prediction, 7)

    class Steep(nn.MSELoss):
        def element(self, prediction, target):
            return element(prediction, target)

    assigned = nn.MSELoss()
    assigned.element = element
    for loss in (Steep(), assigned):
        value, saved = loss.forward(np.ones((2, 3)), np.zeros((2, 3)))
        assert value == 7
        np.testing.assert_allclose(loss.input_grad(saved), 7 / 6)
