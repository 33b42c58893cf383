"""Layers and arrays that occur in a model more than once, against torch; stages of models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import FileFormatError
from strategies import reals, seeds, tolerance
from torch_twins import assert_gradients, loaded, slope_at

NAMES = ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "4.weight", "4.bias"]


def pair(dtype, backward="bp"):
    """Return ``Linear, Tanh, Sequential(the same Linear), Tanh, another Linear with the same weight`` and its twin."""
    shared, tied = nn.Linear(3, 3, dtype=dtype, rng=0), nn.Linear(3, 3, dtype=dtype, rng=1)
    tied.params["weight"] = shared.params["weight"]
    layer = nn.Sequential(shared, nn.Tanh(), nn.Sequential(shared), nn.Tanh(), tied, backward=backward)
    linear, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    other.weight = linear.weight
    twin = torch.nn.Sequential(linear, torch.nn.Tanh(), torch.nn.Sequential(linear), torch.nn.Tanh(), other)
    return layer, loaded(twin, layer)


@given(dtype=reals, seed=seeds, backward=st.sampled_from(["bp", "blelloch"]), batch=st.integers(1, 4))
def test_against_torch(dtype, seed, backward, batch):
    layer, twin = pair(dtype, backward)
    assert list(layer.parameters()) == [name for name, _ in twin.named_parameters()] == ["0.weight", "0.bias", "4.bias"]
    assert list(layer.state_dict()) == list(twin.state_dict()) == NAMES
    rng = np.random.default_rng(seed)
    assert_gradients(layer, twin, rng.standard_normal((batch, 3)).astype(dtype), rng, tolerance(dtype, 4))


@pytest.mark.parametrize("branches", [1, 3])
def test_a_layer_in_several_branches(branches):
    linear = nn.Linear(2, 2, rng=0, dtype=np.float64)
    layer = nn.Residual(nn.Sequential(nn.Concat(*[linear] * branches), nn.Linear(2 * branches, 2, rng=1, dtype="f8")))
    x = np.random.default_rng(0).standard_normal((4, 2))
    y, saved = layer.forward(x)
    grads = layer.weight_grad(np.ones_like(y), saved)
    assert list(grads) == list(layer.parameters())
    assert list(layer.parameters())[:2] == ["body.0.0.weight", "body.0.0.bias"]
    for name, param in layer.parameters().items():
        for i in np.ndindex(param.shape):
            assert grads[name][i] == pytest.approx(slope_at(lambda: layer(x).sum(), param, i), rel=1e-6, abs=1e-8)


def test_moving_keeps_the_sharing():
    layer, _ = pair(np.float32)
    layer.to(dtype=np.float64)
    assert layer[0].params["weight"] is layer[4].params["weight"]
    assert list(layer.parameters()) == ["0.weight", "0.bias", "4.bias"]
    assert all(array.dtype == np.float64 for array in layer.state_dict().values())


def test_a_state_must_agree_with_itself():
    layer, _ = pair(np.float32)
    before = layer.state_dict()
    state = {name: array + 1 for name, array in before.items()}
    state["4.weight"][0, 0] += 1
    with pytest.raises(FileFormatError, match=r"4\.weight and 0\.weight are one parameter"):
        layer.load_state_dict(state)
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_shared_layer_is_pruned_once():
    linear = nn.Linear(4, 4, rng=0)
    report = nn.prune(nn.Sequential(linear, nn.ReLU(), linear), 0.5)
    assert report.kept == {"0": 8}


def test_stages_are_the_links_of_chains():
    linear, relu, tanh = nn.Linear(2, 2), nn.ReLU(), nn.Tanh()
    residual = nn.Residual(nn.Sequential(linear))
    model = nn.Sequential(linear, nn.Sequential(relu, nn.Sequential(residual)), tanh)
    assert model.stages() == [("0", linear), ("1.0", relu), ("1.1.0", residual), ("2", tanh)]
    assert residual.stages() == [("", residual)]
    assert residual.stages("body") == [("body", residual)]


@pytest.mark.parametrize("backward", ["bp", "linear", "blelloch"])
def test_gradients_of_stages_are_those_of_the_chain(backward):
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Linear(3, 4, rng=rng), nn.Sequential(nn.Tanh(), nn.Linear(4, 5, rng=rng)), nn.ReLU(), backward=backward
    )
    x, gy = rng.standard_normal((2, 3)).astype("f4"), rng.standard_normal((2, 5)).astype("f4")
    saved, shapes, y = [], [], x
    for _, layer in model.stages():
        shapes.append(y.shape)
        y, kept = layer.forward(y)
        saved.append(kept)
    last = model.stages()[-1][1].gradients(gy, saved[-1])
    at, stages = model.stage_gradients(1, saved[1:], shapes[1:], last)
    assert len(stages) == 3 and stages[-1] is last
    want = model.weight_grad(gy, model.forward(x)[1])
    got = {f"1.1.{name}": grad for name, grad in stages[1].weights.items()}
    got |= {f"0.{name}": grad for name, grad in model[0].gradients(at, saved[0]).weights.items()}
    assert got.keys() == want.keys()
    for name, grad in want.items():
        np.testing.assert_array_equal(got[name], grad)
