"""A mask belongs to its array: every sharer, update and saved state sees zeros; no forward writes weights."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch

import pipelines
import replicas
import sparsebp as sb
from orders import Rows
from sparsebp import nn, optim
from sparsebp.train import Trainer, load_checkpoint
from torch_twins import slope_at

REAL = {"dtype": np.float64}
OPTIMIZERS = [
    optim.SGD, partial(optim.SGD, momentum=0.9, weight_decay=0.1, nesterov=True), optim.Adam,
    partial(optim.Adam, weight_decay=0.1), optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
    optim.Adadelta, optim.RMSprop,
]  # fmt: skip


def tied():
    """Return an embedding and a linear layer that share one table, with a layer in between."""
    model = nn.Sequential(nn.Embedding(6, 5, rng=0, **REAL), nn.Linear(5, 5, rng=1, **REAL), nn.Tanh(),
                          nn.Linear(5, 6, rng=2, **REAL))  # fmt: skip
    model[3].params["weight"] = model[0].params["weight"]
    return model


def nets():
    return nn.Sequential(nn.Conv2d(1, 3, 3, rng=0, **REAL), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4, rng=1, **REAL),
                         nn.BatchNorm1d(4, **REAL), nn.Tanh(), nn.Linear(4, 3, rng=2, **REAL))  # fmt: skip


def old_momentum(make, params, **options):
    """Return an optimizer with a history, which nobody has told of pruning."""
    optimizer = make(params, **options)
    for arrays in optimizer.buffers.values():
        for number, array in enumerate(arrays.values()):
            array[...] = np.random.default_rng(number).uniform(0.1, 1, array.shape)
    return optimizer


def pruned_of(model):
    """Yield every pruned array, its mask, and its names in a state."""
    for name, layer in model.modules():
        if "weight_mask" in layer.buffers:
            array = layer.params["weight"]
            names = [f"{n}.weight" for n, other in model.modules() if other.params.get("weight") is array]
            assert f"{name}.weight" in names
            yield array, layer.buffers["weight_mask"], names


def assert_zero(model, *, live=True):
    state = model.state_dict()
    for array, mask, names in pruned_of(model):
        assert not live or not array[~mask].any()
        for name in names:
            assert not state[name][~mask].any() and state[name][mask].all()


def assert_right(model, x, gy):
    """Compare the gradients with finite differences of the live arrays, and the ways back with one another."""
    grads = model.vjp(x)[1](gy).weights
    for name, array in model.parameters().items():
        for at in np.ndindex(array.shape):
            assert grads[name][at] == pytest.approx(slope_at(lambda: np.vdot(gy, model(x)), array, at), abs=1e-7), name


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("told", [True, False])
def test_a_shared_table_that_is_pruned(make, told):
    rng = np.random.default_rng(0)
    model, loss = tied(), nn.CrossEntropyLoss()
    x, target = rng.integers(0, 6, 12), rng.integers(0, 6, 12)
    optimizer = old_momentum(make, model.parameters(), lr=0.05)
    report = sb.prune(model, 0.5, optimizer=optimizer if told else None)
    before = model.state_dict()
    assert report.total == {"1": 25, "3": 30} and set(model.state_dict()) >= {"1.weight_mask", "3.weight_mask"}
    for _ in range(3):
        _, grads = sb.value_and_grad(model, loss)(x, target)
        for array, mask, names in pruned_of(model):
            name = next(name for name in names if name in grads)
            assert not grads[name][~mask].any() and array is model.parameters()[name]
        optimizer.step(grads)
        assert_zero(model)
        np.testing.assert_array_equal(model(x), model(x))
    for name, array in model.state_dict().items():  # those that are kept have moved
        assert "mask" in name or np.array_equal(array != before[name], before[name] != 0)
    assert_right(model, x, rng.standard_normal((12, 6)))


def test_two_layers_that_share_an_array_one_with_a_mask():
    rng = np.random.default_rng(0)
    one, other = nn.Linear(4, 4, rng=0, **REAL), nn.Linear(4, 4, rng=1, **REAL)
    other.params["weight"] = one.params["weight"]
    mask = rng.random((4, 4)) < 0.5
    x, gy = rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
    one.keep_weights(mask)
    one.params["weight"][...] = 1.0  # by hand, past all masks
    for order in ((one, nn.Tanh(), other), (other, nn.Tanh(), one)):
        found = []
        for way in ("bp", "blelloch", "hybrid", "auto"):
            model = nn.Sequential(*order, backward=way)
            found.append(model.vjp(x)[1](gy).input)
            np.testing.assert_allclose(found[-1], found[0], atol=1e-12)
        assert_right(model, x, gy)
    for layer in (one, other):
        jacobian = sb.jacobian_t(layer, x)
        np.testing.assert_array_equal(jacobian.to_dense(), mask.T)
        assert jacobian.pattern.nnz == mask.sum()
    other.keep_weights(~mask)  # both hold
    np.testing.assert_array_equal(one(x), np.broadcast_to(one.params["bias"], (3, 4)))


@pytest.mark.parametrize("layer", [
    nn.Linear(3, 4, rng=0, **REAL), nn.Conv2d(3, 4, 2, rng=0, **REAL), nn.ConvTranspose1d(3, 4, 2, rng=0, **REAL),
    nn.Conv1d(3, 4, 3, padding=1, padding_mode="reflect", rng=0, **REAL),
])  # fmt: skip
def test_no_forward_writes_to_the_weights(layer):
    rng = np.random.default_rng(0)
    layer.keep_weights(rng.random(layer.params["weight"].shape) < 0.6)
    weight, mask = layer.params["weight"], layer.buffers["weight_mask"]
    x = rng.standard_normal((2, 3, 5, 5)[: 2 + weight.ndim - 2])
    wanted = layer(x)
    jacobian = sb.jacobian_t(layer, x)
    for value in (7.0, np.nan, -np.inf):
        weight[~mask] = value
        before = weight.copy()
        y, saved = layer.forward(x)
        np.testing.assert_array_equal(y, wanted)
        gx, grads = layer.input_grad(y, saved), layer.weight_grad(y, saved)
        assert np.isfinite(gx).all() and not grads["weight"][~mask].any()
        np.testing.assert_array_equal(sb.jacobian_t(layer, x).data, jacobian.data)
        assert not layer.state_dict()["weight"][~mask].any()
        np.testing.assert_array_equal(weight, before)


@pytest.mark.parametrize("where", ["deepcopy", "pickle", "to"])
def test_copies_keep_the_masks_of_what_they_share(where):
    model = tied()
    sb.prune(model, 0.5)
    again = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)),
             "to": lambda m: copy.deepcopy(m).to(dtype=np.float32)}[where](model)  # fmt: skip
    weight, mask = again[0].params["weight"], again[3].buffers["weight_mask"]
    assert weight is again[3].params["weight"] and weight is not model[0].params["weight"]
    weight[~mask] = 5.0
    assert (again[0](np.arange(6)) == np.where(mask, weight, 0)).all()  # before the other one has run
    assert_zero(again, live=False)
    again.load_state_dict(again.state_dict())
    assert_zero(again)
    assert_zero(model)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("fusion", ["none", "forward", "backward"])
def test_states_and_checkpoints_hold_zeros_whatever_trains(tmp_path, make, fusion):
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((12, 1, 4, 4)).astype(np.float32), rng.integers(0, 3, 12)
    model = nets().to(dtype=np.float32)
    optimizer = old_momentum(make, model.parameters(), lr=0.01)
    sb.prune(model, 0.6)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, fusion=fusion, checkpoint_dir=tmp_path)
    trainer.fit(Rows(x, target), epochs=2, batch_size=4)
    assert_zero(model)
    saved = load_checkpoint(tmp_path).part("model")
    for _, mask, names in pruned_of(model):
        for name in names:
            assert not saved[name][~mask].any()
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(4),
        torch.nn.Tanh(), torch.nn.Linear(4, 3),
    ).eval()  # fmt: skip
    theirs.load_state_dict({n: torch.from_numpy(a) for n, a in saved.items() if not n.endswith("_mask")})
    np.testing.assert_allclose(model.eval()(x), theirs(torch.from_numpy(x)).detach().numpy(), atol=1e-6)


def makes_pruned(mlp):
    """Return a list, and a function that makes a pruned model and appends it there: each rank makes its own."""
    models = []

    def make():
        model = mlp()
        sb.prune(model, 0.5)
        models.append(model)  # ranks are threads: the last one may be another's
        return model

    return models, make


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["first-ready", "forward", "first-stage"])
def test_replicas_of_a_pruned_model(name, sharded):
    models, make = makes_pruned(replicas.mlp)

    def optimizer(params):
        return old_momentum(optim.Adam, params, lr=0.01)

    wanted = replicas.alone(make, optimizer)
    found = replicas.replicas(3, make, optimizer, name, sharded=sharded)
    replicas.assert_like_one_worker(found, wanted)
    for model in models:
        assert_zero(model)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines_of_a_pruned_model(schedule):
    models, make = makes_pruned(pipelines.mlp)

    def optimizer(model):
        return old_momentum(optim.Adam, model.parameters(), lr=0.01)

    steps = [pipelines.batches("mlp", [4, 4, 4], seed=step) for step in range(3)]
    wanted = pipelines.alone(make, optimizer, steps)
    found = pipelines.on_ranks(2, make, optimizer, steps, lambda m: pipelines.schedule_of(schedule, m, 2, 3))
    pipelines.assert_close(found, wanted, rtol=1e-8, atol=1e-12)
    for model in models:
        assert_zero(model)


@pytest.mark.parametrize("how", ["one", "all"])
def test_an_array_in_the_place_of_a_pruned_one_is_pruned_at_once(how):
    model = tied()
    sb.prune(model, 0.5)
    mask = model[3].buffers["weight_mask"]
    new = np.random.default_rng(1).standard_normal(mask.shape)
    for layer in (model[3], model[0]):
        if how == "one":
            layer.params["weight"] = new
        else:
            layer.params = dict(layer.params) | {"weight": new}
    state = model.state_dict()
    assert not state["0.weight"][~mask].any() and not state["3.weight"][~mask].any()
    ids = np.arange(6)
    assert not model[0](ids)[~mask].any()  # before the layer that has the mask runs
    first, second = model(ids), model(ids)
    np.testing.assert_array_equal(first, second)


def test_layers_with_an_equality_of_their_own_can_be_pruned():
    class Same(nn.Linear):  # noqa: PLW1641 - it has none
        def __eq__(self, other):
            return isinstance(other, Same)

    model = nn.Sequential(Same(4, 4, rng=0, **REAL), Same(4, 4, rng=1, **REAL))
    sb.prune(model, 0.5)
    for layer in model.children.values():
        layer.params["weight"] += 1
    assert_zero(model, live=False)
