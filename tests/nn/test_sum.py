"""Sums of branches and residual blocks against torch: forward, gradients, scans, lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from networks import TorchResidual, TorchSum
from sparsebp import nn
from sparsebp.core.errors import OptionError, ShapeError
from torch_twins import assert_gradients, assert_like_torch, jacobian_t, loaded

F8 = {"dtype": np.float64}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
WAYS = ["bp", "linear", "blelloch", "hybrid", "chunked", "auto"]


def block():
    """A block of a ResNet, between two convolutions, and its twin."""

    def body(space, **options):
        conv, norm = space.Conv2d, space.BatchNorm2d
        return (
            space.Sequential(conv(2, 4, 3, 2, 1, bias=False, **options), norm(4, **options), space.ReLU(),
                             conv(4, 4, 3, padding=1, bias=False, **options), norm(4, **options)),
            space.Sequential(conv(2, 4, 1, 2, bias=False, **options), norm(4, **options)),
        )  # fmt: skip

    double = {"dtype": torch.float64}
    ours = nn.Sequential(nn.Conv2d(1, 2, 1, **F8), nn.Residual(*body(nn, **F8)), nn.ReLU(), nn.Conv2d(4, 1, 1, **F8))
    twin = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 1, **double), TorchResidual(*body(torch.nn, **double)), torch.nn.ReLU(),
        torch.nn.Conv2d(4, 1, 1, **double),
    )  # fmt: skip
    return ours, loaded(twin, ours)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backward", WAYS)
def test_a_resnet_block_is_torchs(training, backward):
    """Batch normalisation inside couples the samples, so that a scan leaves the block out."""
    rng = np.random.default_rng(0)
    model, twin = block()
    for layer in (model[1].children["body"][1], model[1].children["shortcut"][1]):
        layer.buffers["running_mean"][...] = rng.standard_normal(4)
    loaded(twin, model)
    model.train(training), twin.train(training)
    model.set_backward(backward)
    x = rng.standard_normal((3, 1, 6, 5))
    saved = assert_gradients(model, twin, x, rng, CLOSE)
    assert model[1].couples_samples(saved.layers[1]) == training
    assert [name for name, _ in model.stages()] == ["0", "1", "2", "3"]
    if not training:
        assert_like_torch(model, twin, x, rng, CLOSE)


@pytest.mark.parametrize(("shape", "tail"), [
    ((3, 1, 6, 5), lambda s, **o: [s.AdaptiveAvgPool2d(1), s.Flatten(), s.Linear(4, 3, **o)]),
    ((3, 1, 6, 5), lambda s, **o: [s.Flatten(), s.Linear(36, 3, **o)]),  # whose Jacobian the samples share
    ((1, 1, 6, 5), lambda s, **o: [s.Flatten(), s.Linear(36, 3, **o), s.ReLU()]),
])  # fmt: skip
def test_a_blocks_jacobian_before_a_full_one(monkeypatch, shape, tail):
    """Its columns go back through the branches, which form no Jacobian of their own."""
    rng, double = np.random.default_rng(0), {"dtype": torch.float64}
    (head, body, *_), (theirs, their_body, *_) = (list(m.children.values()) if isinstance(m, nn.Sequential)
                                                  else list(m) for m in block())  # fmt: skip
    model = nn.Sequential(head, body, nn.ReLU(), *tail(nn, **F8)).eval()
    twin = loaded(torch.nn.Sequential(theirs, their_body, torch.nn.ReLU(), *tail(torch.nn, **double)), model).eval()
    assert_like_torch(model, twin, rng.standard_normal(shape), rng, CLOSE)
    saved = model.forward(rng.standard_normal(shape))[1]
    monkeypatch.setattr(nn.Residual, "jacobian_t", lambda *_: pytest.fail("a Jacobian of its own"))
    assert model.jacobian_t(saved).pattern.kind == "dense"


def test_an_unbatched_sample():
    rng, layer = np.random.default_rng(0), nn.Residual(nn.Conv1d(2, 3, 1, **F8), nn.Conv1d(2, 3, 1, **F8))
    twin = loaded(TorchResidual(torch.nn.Conv1d(2, 3, 1), torch.nn.Conv1d(2, 3, 1)), layer)
    assert layer.unbatched(assert_gradients(layer, twin, rng.standard_normal((2, 5)), rng, CLOSE))


@pytest.mark.parametrize("make", [
    lambda s, **o: [s.Linear(3, 3, **o)], lambda s, **o: [s.Identity(), s.Identity(), s.Identity()],
    lambda s, **o: [s.Linear(3, 2, **o), s.Sequential(s.Tanh(), s.Linear(3, 2, **o)), s.Linear(3, 2, bias=False, **o)],
    lambda s, **o: [s.Identity(), s.Dropout(0.0), s.LayerNorm(3, **o), s.ReLU()],
])  # fmt: skip
def test_any_number_of_branches(make):
    rng = np.random.default_rng(0)
    layer = nn.Sum(*make(nn, **F8))
    twin = loaded(TorchSum(make(torch.nn)), layer)
    assert_like_torch(layer, twin, rng.standard_normal((4, 3)), rng, CLOSE)


def test_the_jacobian_is_on_the_union_of_the_patterns():
    layer = nn.Sum(nn.MaxPool1d(3, 1, 1), nn.Identity(), nn.Conv1d(2, 2, 1, **F8))
    x = np.random.default_rng(0).standard_normal((3, 2, 5))
    found = layer.jacobian_t(layer.forward(x)[1])
    assert found.pattern.nnz == 2 * 13 + 2 * 5
    weight, bias = (torch.from_numpy(layer.parameters()[f"2.{name}"]) for name in ("weight", "bias"))

    def function(sample):
        return (
            torch.nn.functional.max_pool1d(sample, 3, 1, 1) + sample + torch.nn.functional.conv1d(sample, weight, bias)
        )

    for b, sample in enumerate(x):
        np.testing.assert_allclose(found.to_dense(b), jacobian_t(function, sample), **CLOSE)


def test_gy_is_not_written_to():
    layer = nn.Sum(nn.Identity(), nn.Identity(), nn.Identity())
    x, gy = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    y, saved = layer.forward(x)
    np.testing.assert_array_equal(y, 3)
    np.testing.assert_array_equal(layer.input_grad(gy, saved), 3)
    np.testing.assert_array_equal(gy, 1)
    np.testing.assert_array_equal(x, 1)


@pytest.mark.parametrize("backward", ["bp", "blelloch"])
def test_lengths_go_to_the_branches_that_take_them(backward):
    """Sequences that are padded count as if they were cut; branches may join the steps, all of them."""

    def joined(seed):
        return nn.Sequential(nn.GRU(3, 4, batch_first=True, rng=seed, **F8), nn.MeanOverSteps(True))

    model = nn.Sequential(
        nn.Sum(nn.GRU(3, 3, batch_first=True, rng=0, **F8), nn.Linear(3, 3, rng=1, **F8), nn.Identity()),
        nn.Sum(joined(2), joined(3)), nn.Flatten(), nn.Linear(4, 2, rng=4, **F8), backward=backward,
    )  # fmt: skip
    rng, lengths = np.random.default_rng(0), [2, 5, 3]
    x, gy = rng.standard_normal((3, 5, 3)), rng.standard_normal((3, 2))
    y, saved = model.forward(x, lengths)
    g, total = model.gradients(gy, saved), 0
    for i, length in enumerate(lengths):
        alone, kept = model.forward(x[i : i + 1, :length])
        own = model.gradients(gy[i : i + 1], kept)
        np.testing.assert_allclose(y[i], alone[0], **CLOSE)
        np.testing.assert_allclose(g.input[i, :length], own.input[0], **CLOSE)
        total = total + own.weights["0.1.weight"]
    np.testing.assert_allclose(g.weights["0.1.weight"], total, **CLOSE)
    with pytest.raises(OptionError, match=r"Layer 1 does not take lengths.*Softmax"):
        nn.Sum(nn.Identity(), nn.Softmax(1)).forward(x, lengths)


def test_where_the_batch_is():
    steps, first = nn.GRU(3, 3, rng=0), nn.GRU(3, 3, batch_first=True, rng=0)
    assert nn.Sum(nn.Linear(3, 3), steps).batch_axes == nn.Residual(steps).batch_axes == (1, 1)
    assert nn.Sum(nn.Identity(), first).batch_axes == nn.Sum(nn.Identity()).batch_axes == (0, 0)
    with pytest.raises(OptionError, match="different axes"):
        _ = nn.Sum(steps, first).batch_axes


def test_branches_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"do not fit each other.*0: \(2, 3\).*1: \(2, 1\).*project"):
        nn.Sum(nn.Identity(), nn.Linear(3, 1)).forward(np.ones((2, 3), np.float32))
