"""Magnitude pruning: which weights go, that they stay away, and that all else agrees with a masked torch model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp import nn
from sparsebp.core.errors import DTypeError, FileFormatError, NonFiniteError, OptionError, ShapeError
from strategies import seeds
from torch_twins import assert_like_torch, loaded

METHODS = ["class_blind", "class_uniform", "class_distribution"]


def small(seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, dtype=dtype, rng=rng), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, groups=2, dtype=dtype, rng=rng), nn.Flatten(), nn.Linear(6, 5, dtype=dtype, rng=rng),
    )  # fmt: skip


def weights(model):
    return {name: array for name, array in model.parameters().items() if name.endswith("weight")}


def masks(model):
    return {name.removesuffix("_mask"): a for name, a in model.state_dict().items() if name.endswith("_mask")}


@given(seed=seeds, amount=st.floats(0, 0.99), method=st.sampled_from(METHODS))
def test_what_is_kept_is_what_the_method_says(seed, amount, method):
    model = small(seed)
    before = {name: np.abs(w) for name, w in weights(model).items()}
    total = sum(w.size for w in before.values())
    if method == "class_distribution":
        before = {name: w / weights(model)[name].std() for name, w in before.items()}
    report = sb.prune(model, amount, method)
    kept = masks(model)
    assert report.kept == {name.removesuffix(".weight"): mask.sum() for name, mask in kept.items()}
    assert sum(report.total.values()) == total
    for name, w in weights(model).items():
        assert (w[~kept[name]] == 0).all()
    parts = [(np.concatenate([w.ravel() for w in before.values()]), np.concatenate([m.ravel() for m in kept.values()]))]
    if method == "class_uniform":
        parts = [(before[name].ravel(), kept[name].ravel()) for name in before]
    else:
        assert report.sparsity == pytest.approx(round(amount * total) / total)
    for magnitude, mask in parts:
        assert (~mask).sum() == round(amount * len(mask))
        assert magnitude[mask].min(initial=np.inf) >= magnitude[~mask].max(initial=0)


def test_the_report_is_a_table_and_json():
    report = sb.prune(small(), 0.5)
    assert str(report).splitlines()[-1].split()[-1] == "50.00%"  # 105 of 210
    assert report.to_json()["total"] == {"0": 72, "3": 108, "5": 30}


@pytest.mark.parametrize("method", METHODS)
def test_pruning_goes_on_from_what_is_pruned(method):
    model = small()
    sb.prune(model, 0.4, method)
    first = masks(model)
    sb.prune(model, 0.8, method)
    second = masks(model)
    assert all((second[name] <= first[name]).all() for name in first)
    sb.prune(model, 0.1, method)  # less than is pruned already: nothing comes back
    assert all((masks(model)[name] == second[name]).all() for name in second)


def test_gradients_and_jacobians_are_those_of_a_masked_torch_model():
    rng = np.random.default_rng(3)
    ours = small()
    sb.prune(ours, 0.6)
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(4, 6, 3, groups=2),
        torch.nn.Flatten(), torch.nn.Linear(6, 5),
    )  # fmt: skip
    loaded(theirs, ours)
    for name, mask in masks(ours).items():  # the gradients of pruned weights are zero, in PyTorch they are not
        theirs.get_parameter(name).register_hook(torch.from_numpy(mask).mul)
    x = rng.standard_normal((3, 2, 6, 6))
    assert_like_torch(ours, theirs, x, rng, {"rtol": 1e-7, "atol": 1e-12})
    assert ours[0].jacobian_t(x).pattern.nnz < small()[0].jacobian_t(x).pattern.nnz


def test_a_layer_that_loses_everything_still_runs():
    layer = nn.Conv2d(1, 2, 3, rng=0, dtype=np.float64)
    layer.keep_weights(np.zeros((2, 1, 3, 3), bool))
    x = np.random.default_rng(0).standard_normal((2, 1, 4, 4))
    y, saved = layer.forward(x)
    np.testing.assert_array_equal(y, np.broadcast_to(layer.params["bias"][:, None, None], (2, 2, 2, 2)))
    assert layer.jacobian_t(saved).pattern.nnz == 0
    assert (layer.input_grad(y, saved) == 0).all()


def test_states_with_and_without_masks():
    plain, pruned = small(), small(1)
    assert not masks(plain)  # torch's keys
    sb.prune(pruned, 0.9)
    state = pruned.state_dict()
    fresh = small(2)
    with pytest.raises(FileFormatError, match="unexpected"):
        fresh.load_state_dict(state | {"1.weight_mask": np.ones(1, bool)})
    with pytest.raises(ShapeError):
        fresh.load_state_dict(state | {"0.weight_mask": np.ones(1, bool)})
    with pytest.raises(DTypeError):
        fresh.load_state_dict(state | {"0.weight_mask": state["0.weight_mask"].astype(float)})
    assert not masks(fresh)  # nothing is half done
    fresh.load_state_dict(state)
    assert all((fresh.state_dict()[name] == array).all() for name, array in state.items())
    assert fresh.state_dict().keys() == state.keys()
    with pytest.raises(FileFormatError, match="missing"):
        pruned.load_state_dict(plain.state_dict())
    alone = nn.Linear(3, 2, rng=0)
    sb.prune(alone, 0.5)
    nn.Linear(3, 2, rng=1).load_state_dict(alone.state_dict())
    assert pruned.to(dtype=np.float32).state_dict()["0.weight_mask"].dtype == bool


@pytest.mark.parametrize(
    ("text", "model", "amount", "method"),
    [
        ("out of range", nn.Linear(2, 2), 1.0, "class_blind"), ("out of range", nn.Linear(2, 2), -0.1, "class_blind"),
        ("out of range", nn.Linear(2, 2), float("nan"), "class_blind"),
        ("out of range", nn.Linear(2, 2), 1.5, "class_blind"), ("not a number", nn.Linear(2, 2), "half", "class_blind"),
        ("Unknown pruning method", nn.Linear(2, 2), 0.5, "blind"), ("nothing to prune", nn.ReLU(), 0.5, "class_blind"),
        ("leave no weight", nn.Linear(2, 2), 0.97, "class_uniform"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(text, model, amount, method):
    before = model.state_dict()
    with pytest.raises(OptionError, match=text) as caught:
        sb.prune(model, amount, method)
    assert caught.value.expected and caught.value.got is not None
    assert model.state_dict().keys() == before.keys()


def test_what_is_no_layer_and_a_foreign_optimizer_are_refused():
    with pytest.raises(OptionError, match="is not a layer"):
        sb.prune(3, 0.5)
    model = nn.Linear(4, 3, rng=0)
    for other in (nn.Linear(4, 3, rng=0), nn.Linear(5, 3, rng=0)):
        with pytest.raises(OptionError, match="does not belong to the model"):
            sb.prune(model, 0.5, optimizer=sb.optim.Adam(other.parameters(), lr=1e-3))
    assert not model.buffers


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_have_no_order_are_refused(value):
    model = nn.Linear(4, 3, rng=0)
    model.params["weight"][1, 2] = value
    with pytest.raises(NonFiniteError, match="1 of 12 values"):
        sb.prune(model, 0.5)
    assert not model.buffers


def test_bad_masks_are_refused():
    with pytest.raises(DTypeError):
        nn.Linear(2, 3).keep_weights(np.ones((3, 2)))
    with pytest.raises(ShapeError):
        nn.Linear(2, 3).keep_weights(np.ones((2, 3), bool))
