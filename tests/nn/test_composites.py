"""Layers of layers: `children` is the one record of the parts, and what a layer inherits it asks its children."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp import nn, optim
from sparsebp.core.errors import OptionError, ShapeError, StaleError
from sparsebp.core.shortcuts import batch_axes_of
from sparsebp.nn.gradients import undisturbed
from sparsebp.runtime import PlainExecutor
from sparsebp.runtime.actions import Stages
from sparsebp.train import Trainer
from sparsebp.train.batches import sample_axis
from sparsebp.train.setup import schedule_of
from strategies import reals, seeds, tolerance

F8 = {"dtype": np.float64}
WAYS = ["bp", "linear", "blelloch", "hybrid", "chunked"]


def linear(n=3, m=3, seed=0):
    return nn.Linear(n, m, rng=seed, **F8)


# ---- children are the parts, and attributes are views of them -------------------------------------------------------


class Empty(nn.Layer):
    def forward(self, x):
        return x, None


operations = st.lists(
    st.tuples(
        st.sampled_from(["set", "item", "del", "del item", "update", "pop"]), st.sampled_from("abc"), st.integers(0, 3)
    ),
    max_size=12,
)


@given(operations)
def test_an_attribute_and_its_child_are_one_as_in_torch(steps):
    ours, theirs = Empty(), torch.nn.Module()
    layers = [(linear(2, 2, k), torch.nn.Linear(2, 2)) for k in range(4)]
    for do, name, k in steps:
        mine, other = layers[k]
        there = name in theirs._modules
        if do == "set":
            setattr(ours, name, mine), setattr(theirs, name, other)
        elif do in ("item", "update"):
            ours.children.update({name: mine}) if do == "update" else ours.children.__setitem__(name, mine)
            theirs._modules[name] = other
        elif do == "pop":
            assert ours.children.pop(name, None) is ours_at(layers, theirs._modules.pop(name, None))
        elif there:
            delattr(ours, name) if do == "del" else ours.children.__delitem__(name)
            delattr(theirs, name)
        else:
            with pytest.raises(AttributeError if do == "del" else KeyError):
                delattr(ours, name) if do == "del" else ours.children.__delitem__(name)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        for attribute in "abc":
            assert (
                getattr(ours, attribute, None)
                is ours.children.get(attribute)
                is ours_at(layers, theirs._modules.get(attribute))
            )
        assert {name: value for name, value in vars(ours).items() if isinstance(value, nn.Layer)} == ours.children


def ours_at(layers, module):
    return next((mine for mine, other in layers if other is module), None)


class Listed(nn.Layer):
    """``last(tanh(first(x)))`` whose class says all children; the attribute `body` shows the child `first`."""

    def __init__(self, first, last, teacher=None):
        super().__init__()
        self.body, self.teacher, self.tanh = first, teacher, nn.Tanh()
        self.children = {"first": first, "tanh": self.tanh, "last": last}

    def forward(self, x):
        y, at_first = self.body.forward(x)
        y, at_tanh = self.tanh.forward(y)
        y, at_last = self.last.forward(y)
        return y, (at_first, at_tanh, at_last)

    def gradients(self, gy, saved):
        last = self.last.gradients(gy, saved[2])
        tanh = self.tanh.gradients(last.input, saved[1])
        first = self.children["first"].gradients(tanh.input, saved[0])
        return nn.Gradients(self, gy, saved, lambda: first.input, lambda: {"first": first, "last": last})


def test_a_class_that_says_its_children_has_no_others():
    teacher = linear(seed=5)
    model = Listed(linear(), linear(seed=1), teacher)
    assert list(model.children) == ["first", "tanh", "last"] and model.teacher is teacher
    assert model.body is model.first is model.children["first"] and not any(
        n.startswith("t") for n in model.parameters()
    )
    new = linear(seed=2)
    model.body = new
    assert model.first is model.children["first"] is new
    model.children["first"] = newer = linear(seed=3)
    assert model.body is model.first is newer
    model.extra = linear(seed=4)
    assert list(model.children) == ["first", "tanh", "last"]
    model.children["extra"] = other = linear(seed=6)
    assert model.extra is other
    del model.extra
    del model.body
    assert not hasattr(model, "body") and not hasattr(model, "first") and list(model.children) == ["tanh", "last"]
    model.body = new
    assert model.first is new
    model.children = {"first": newer, "tanh": nn.Tanh(), "last": model.last}
    assert model.body is newer and model.teacher is teacher
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        copied.body = linear(seed=7)
        assert copied.first is copied.children["first"] is copied.body is not newer and model.body is newer


def test_what_cannot_be_a_part_is_refused():
    model = Empty()
    model.part = linear()
    for wrong in (
        lambda: setattr(model, "part", 3), lambda: setattr(model, "part", None),
        lambda: setattr(model, "eval", linear()), lambda: setattr(model, "generator", linear()),
        lambda: model.children.update(part=nn.Tanh), lambda: setattr(model, "children", {"part": 1}),
        lambda: nn.Sequential(nn.Tanh()).__delitem__(0),
    ):  # fmt: skip
        with pytest.raises(OptionError):
            wrong()
    model.none = None
    model.children["none"] = tanh = nn.Tanh()
    assert model.none is tanh


def test_layers_that_are_there_before_the_base_class_are_parts():
    @dataclasses.dataclass(eq=False)
    class Data(Around):
        inner: nn.Layer
        add: bool = False

        def __post_init__(self):
            nn.Layer.__init__(self)

    model = Data(linear())
    assert list(model.children) == ["inner"] and model.inner is model.children["inner"]
    np.testing.assert_array_equal(model(np.ones((1, 3))), model.inner(np.ones((1, 3))))


def replaced():
    """Yield models with a part to replace: (model, x, replace, the name of the part)."""
    x, steps = np.ones((4, 3)), np.ones((5, 4, 3))
    ways = {
        "attribute": setattr,
        "item": lambda model, name, new: model.children.__setitem__(name, new),
        "update": lambda model, name, new: model.children.update({name: new}),
        "all": lambda model, name, new: setattr(model, "children", {**model.children, name: new}),
        "removed before": lambda model, name, new: (delattr(model, name), setattr(model, name, new)),
    }
    made = {
        "classifier head": (
            lambda: nn.SequenceClassifier(nn.GRU(3, 3, rng=0, **F8), linear(seed=1)), steps, "head",
            lambda: linear(seed=9),
        ),
        "classifier rnn": (
            lambda: nn.SequenceClassifier(nn.GRU(3, 3, rng=0, **F8), linear(seed=1)), steps, "rnn",
            lambda: nn.GRU(3, 3, rng=9, **F8),
        ),
        "sequential": (lambda: nn.Sequential(linear(), nn.Tanh(), linear(seed=1)), x, "2", lambda: linear(seed=9)),
        "residual": (lambda: nn.Residual(linear()), x, "body", lambda: linear(seed=9)),
        "sum": (lambda: nn.Sum(linear(), linear(seed=1)), x, "1", lambda: linear(seed=9)),
        "shortcut": (lambda: nn.Residual(linear(), linear(seed=1)), x, "shortcut", lambda: linear(seed=9)),
        "concat": (lambda: nn.Concat(linear(), linear(seed=1)), x, "1", lambda: linear(seed=9)),
        "attention": (lambda: nn.MultiheadAttention(3, 1, rng=0, **F8), steps, "out_proj", lambda: linear(seed=9)),
        "encoder": (
            lambda: nn.TransformerEncoderLayer(3, 1, 3, dropout=0.0, rng=0, **F8), steps, "linear2",
            lambda: linear(seed=9),
        ),
        "own": (lambda: Listed(linear(), linear(seed=1)), x, "last", lambda: linear(seed=9)),
    }  # fmt: skip
    for name, (make, x, part, new) in made.items():
        for way, do in ways.items():
            ordered = name in ("sequential", "concat", "sum", "residual")  # the order is that of the children
            if not (way == "removed before" and ordered):
                yield pytest.param(make, x, part, new, do, id=f"{name}, {way}")
    yield pytest.param(*made["sequential"], lambda m, n, new: m.__setitem__(-1, new), id="sequential, index")


@pytest.mark.parametrize(("make", "x", "part", "new", "replace"), [*replaced()])
def test_a_replaced_part_is_the_one_that_everything_sees(make, x, part, new, replace):
    model, wanted, loss = make(), make(), nn.MSELoss()
    stale, target = optim.SGD(model.parameters(), lr=0.1), np.zeros_like(wanted.forward(x)[0])
    own = optim.SGD({n: a for n, a in model.parameters().items() if not n.startswith(f"{part}.")} or {"w": np.ones(1)})
    fresh = new()
    wanted.load_state_dict({**wanted.state_dict(), **{f"{part}.{name}": a for name, a in fresh.state_dict().items()}})
    replace(model, part, fresh)
    assert model.children[part] is fresh is dict(model.modules())[part]
    for name, array in wanted.state_dict().items():
        np.testing.assert_array_equal(model.state_dict()[name], array, err_msg=name)
    np.testing.assert_array_equal(model(x), wanted(x))
    (value, grads), (same, others) = (sb.value_and_grad(one, loss)(x, target) for one in (model, wanted))
    assert value == same and grads.keys() == others.keys()
    for name, grad in others.items():
        np.testing.assert_array_equal(grads[name], grad, err_msg=name)
    y, back = model.vjp(x)
    for given_grads in (grads, back(y).weights, {**grads}):
        with pytest.raises(OptionError, match=rf"no longer in the model.*{part}\.weight"):
            stale.step({name: given_grads[name] for name in stale.params})
        with pytest.raises(OptionError, match="no longer in the model"):
            stale.begin()
    own.step({name: grads.get(name, np.ones(1)) for name in own.params})  # of parameters that are all still there
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.step(sb.value_and_grad(model, loss)(x, target)[1])
    assert not np.array_equal(fresh.params[next(iter(fresh.params))], new().params[next(iter(fresh.params))])
    assert model.eval().children[part].training is False and fresh.training is False
    assert model.to(dtype=np.float32) is model and fresh.dtype == np.float32
    assert {array.dtype for array in model.parameters().values()} == {np.dtype("f4")}


def test_an_optimizer_of_parameters_that_are_still_there_goes_on():
    """Gradients of a copy, another model that changes, a part that comes back, and one that two models hold."""
    x, target, loss = np.ones((4, 3)), np.zeros((4, 3)), nn.MSELoss()
    model = nn.Sequential(linear(), nn.Tanh(), linear(seed=1))
    other = nn.Sequential(model[0], linear(seed=2))
    first, second, inner = (optim.SGD(m.parameters(), lr=0.1) for m in (model, other, model[2]))
    clone = copy.deepcopy(model)
    clone[2] = linear(seed=3)
    first.step(sb.value_and_grad(clone, loss)(x, target)[1])  # as first-order meta-learning does it
    kept = model[2]
    model[2] = linear(seed=4)
    with pytest.raises(OptionError, match="no longer"):
        first.step(sb.value_and_grad(model, loss)(x, target)[1])
    model[2] = kept
    first.step(sb.value_and_grad(model, loss)(x, target)[1])
    inner.step({"weight": np.ones((3, 3)), "bias": np.ones(3)})
    other[0] = linear(seed=5)
    first.step(sb.value_and_grad(model, loss)(x, target)[1])
    with pytest.raises(OptionError, match=r"no longer in the model.*0\.weight"):
        second.step(sb.value_and_grad(other, loss)(x, target)[1])
    groups = [{"params": {"a": model[0].params["weight"]}}, {"params": {"b": model[2].params["weight"]}, "lr": 1.0}]
    grouped = copy.copy(optim.SGD(groups, lr=0.1))
    model[0].params["weight"] = model[0].params["weight"].copy()
    with pytest.raises(OptionError, match=r"others as a:"):
        grouped.step({"a": np.ones((3, 3)), "b": np.ones((3, 3))})
    moved = optim.SGD(model.parameters(), lr=0.1)
    model.to(dtype=np.float32).to(dtype=np.float64)
    with pytest.raises(OptionError, match="no longer"):
        moved.step(sb.value_and_grad(model, loss)(x, target)[1])
    both, other_way = (
        copy.deepcopy((model, moved := optim.SGD(model.parameters(), lr=0.1))),
        pickle.dumps((model, moved)),
    )
    for copied, optimizer in (both, pickle.loads(other_way)):
        optimizer.step(sb.value_and_grad(copied, loss)(x, target)[1])
        copied[0] = linear(seed=6)
        with pytest.raises(OptionError, match="no longer"):
            optimizer.step(sb.value_and_grad(copied, loss)(x, target)[1])
    del model, clone
    first.step(
        {name: np.zeros_like(array) for name, array in first.params.items()}
    )  # there is no model to ask any more


def test_a_chain_takes_and_gives_up_layers_by_number():
    model = nn.Sequential(linear(), nn.Tanh(), linear(seed=1))
    model[1] = relu = nn.ReLU()
    model[-1] = last = linear(seed=2)
    del model[0]
    assert list(model.children.items()) == [("0", relu), ("1", last)] and len(model) == 2
    x = np.random.default_rng(0).standard_normal((2, 3))
    np.testing.assert_array_equal(model(x), last(relu(x)))
    with pytest.raises(IndexError):
        model[2] = relu
    model.children.clear()
    with pytest.raises(OptionError, match="no layers"):
        model.forward(x)


def test_a_layer_that_is_replaced_between_forward_and_backward():
    model, x = nn.Sequential(linear(), nn.Tanh(), linear(seed=1)), np.ones((2, 3))
    y, back = model.vjp(x)
    model[1] = nn.Sigmoid()
    with pytest.raises(StaleError, match="replaced"):
        back(y)
    y, back = model.vjp(x)
    grads = back(y)
    model[1] = nn.Tanh()
    with pytest.raises(StaleError, match="replaced"):
        _ = grads.weights


@pytest.mark.parametrize("fusion", ["none", "forward"])
def test_a_layer_without_parameters_that_is_replaced_during_a_run(fusion):
    model, loss, x = nn.Sequential(linear(), nn.Tanh(), linear(seed=1)), nn.MSELoss(), np.ones((4, 3))
    executor = PlainExecutor(
        model, loss, optim.SGD(model.parameters()), schedule_of(Stages(model), fusion, 1, "conventional")
    )
    executor.step([(x, x)])
    linear()  # another layer is made, and changes nothing here
    executor.step([(x, x)])
    model[1] = nn.Sigmoid()
    with pytest.raises(OptionError, match=r"replaced during a run.*1 \(Sigmoid\)"):
        executor.step([(x, x)])
    Trainer(model, loss, optim.SGD(model.parameters(), 0.1), fusion=fusion, rng=0).fit((x, x), epochs=1, batch_size=4)


def test_a_part_of_a_classifier_must_fit():
    model, x = nn.SequenceClassifier(nn.GRU(3, 4, rng=0, **F8), linear(4, 2)), np.ones((5, 2, 3))
    model.head = linear(3, 2)
    with pytest.raises(ShapeError, match="does not fit the recurrent layer"):
        model.forward(x)
    model.head = nn.Tanh()
    with pytest.raises(OptionError, match="GRU, Tanh"):
        model.forward(x)
    model.head, model.rnn = linear(4, 2), nn.GRU(3, 4, batch_first=True, rng=0, **F8)
    assert model(x).shape == (5, 2) and model.batch_axes == (0, 0)


def test_dropout_in_a_replaced_encoder_layer_draws_for_the_samples():
    layer = nn.TransformerEncoderLayer(4, 2, 5, rng=0)
    layer.dropout1 = nn.Dropout(0.5, rng=0)
    layer.forward(np.ones((3, 2, 4), np.float32))
    assert layer.dropout1.batch_axes == layer.dropout.batch_axes == (1, 1)


# ---- parameters and buffers as attributes ----------------------------------------------------------------------------


def test_parameters_and_buffers_are_attributes():
    layer, norm = linear(), nn.BatchNorm1d(3, **F8)
    assert layer.weight is layer.params["weight"] and norm.running_mean is norm.buffers["running_mean"]
    weight, x = np.full((3, 3), 2.0), np.ones((1, 3))
    layer.weight = weight
    assert layer.params["weight"] is weight is layer.weight
    np.testing.assert_allclose(layer(x), 6 + layer.bias[None])
    norm.running_mean = mean = np.ones(3)
    assert norm.buffers["running_mean"] is mean
    tensor = torch.ones(3, 3, dtype=torch.float64)
    for name, wrong in (
        ("weight", np.ones((3, 2))), ("weight", np.ones((3, 3), np.float32)), ("bias", None), ("bias", 1.0),
        ("weight", nn.Tanh()), ("weight", tensor),
    ):  # fmt: skip
        with pytest.raises(sb.errors.SparseBPError, match=name):
            setattr(layer, name, wrong)
    with pytest.raises(OptionError, match="cannot be removed"):
        del layer.weight
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weigth'"):
        _ = layer.weigth
    assert layer.params["weight"] is weight


@pytest.mark.parametrize(("layer", "name"), [
    (linear, "bias"), (lambda: nn.Linear(3, 3, bias=False), "bias"), (lambda: nn.Conv1d(2, 2, 1, bias=False), "bias"),
    (lambda: nn.GRU(2, 3, bias=False), "bias_ih_l0"), (lambda: nn.LSTMCell(2, 3, bias=False), "bias_hh"),
    (lambda: nn.BatchNorm1d(3, affine=False), "weight"), (lambda: nn.RMSNorm(3), "bias"),
    (lambda: nn.MultiheadAttention(2, 1), "bias_k"),
])  # fmt: skip
def test_an_array_is_not_assigned_in_vain(layer, name):
    layer = layer()
    if name in layer.params:
        setattr(layer, name, np.ones(3))
        assert layer(np.zeros((1, 3)))[0, 0] == 1
    else:
        with pytest.raises(OptionError, match=f"built without {name}"):
            setattr(layer, name, np.ones(3, np.float32))
    layer.bias_sigma = sigma = np.ones(3)  # a subclass may have others
    assert layer.bias_sigma is sigma


@pytest.mark.parametrize("assign", [
    lambda model: model.children.update({"a.b": linear()}), lambda model: model.children.update({"": linear()}),
    lambda model: model.children.update({0: linear()}), lambda model: model.children.update({"device": linear()}),
    lambda model: setattr(model, "children", {"part.x": linear()}), lambda model: setattr(model, "params", linear()),
    lambda model: model.params.update({"part": np.ones(3)}), lambda model: model.params.update({"": np.ones(3)}),
    lambda model: model.params.update({"part.weight": np.ones((3, 3))}),
    lambda model: model.buffers.update({"own": np.ones(3)}), lambda model: model.children.update({"own": linear()}),
    lambda model: setattr(model, "buffers", {"own": np.ones(3)}),
    lambda model: setattr(model, "children", {"own": linear()}),
])  # fmt: skip
def test_names_that_a_state_could_not_tell_apart_are_refused(assign):
    model = Empty()
    model.part, model.params["own"] = linear(), np.ones(3)
    before = model.state_dict()
    with pytest.raises(OptionError, match=r"Invalid name|twice|not a mapping"):
        assign(model)
    assert list(model.state_dict()) == list(before) == ["own", "part.weight", "part.bias"]
    model.params["other.weight"] = np.ones(2)  # PyTorch's names have dots
    assert "other.weight" in pickle.loads(pickle.dumps(model)).state_dict()


def test_children_change_their_mode_by_their_own_train_as_in_torch():
    def frozen(base):
        class Frozen(base):
            def train(self, mode=True):
                super().train(mode)
                self[1].eval()
                return self

        return Frozen

    ours = nn.Sequential(frozen(nn.Sequential)(linear(), nn.BatchNorm1d(3, **F8)), nn.BatchNorm1d(3, **F8))
    theirs = torch.nn.Sequential(frozen(torch.nn.Sequential)(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)),
                                 torch.nn.BatchNorm1d(3))  # fmt: skip
    for mode in (True, False, True):
        modes = dict((ours.train(mode), theirs.train(mode))[1].named_modules())
        assert {name: layer.training for name, layer in ours.modules()} == {n: m.training for n, m in modes.items()}
    before = ours[0][1].running_mean.copy()
    Trainer(ours.eval(), nn.MSELoss(), optim.SGD(ours.parameters())).fit(
        (np.eye(4, 3), np.ones((4, 3))), epochs=1, batch_size=4
    )
    np.testing.assert_array_equal(ours[0][1].running_mean, before)
    assert ours[1].num_batches_tracked == 1


def test_an_attribute_that_held_a_parameter_follows_it():
    class Scale(Empty):
        def __init__(self):
            super().__init__()
            self.factor, self.bias = np.ones(3, np.float32), True
            self.params = {"factor": self.factor, "bias": np.ones(3, np.float32)}

    layer = Scale().to(dtype=np.float64)
    assert layer.factor is layer.params["factor"] and layer.factor.dtype == np.float64 and layer.bias is True
    layer.factor = np.full(3, 2.0)
    assert layer.params["factor"][0] == 2


# ---- what a layer of layers inherits, it asks its children ----------------------------------------------------------


class Around(nn.Layer):
    """``inner(x)``, or ``x + inner(x)``: nothing but forward and gradients."""

    def __init__(self, inner, add=True):
        super().__init__()
        self.children, self.add = {"inner": inner}, add

    def forward(self, x, **options):
        y, saved = self.children["inner"].forward(x, **options)
        return x + y if self.add else y, saved

    def gradients(self, gy, saved):
        inner = self.children["inner"].gradients(gy, saved)
        at_input = lambda: gy + inner.input if self.add else inner.input  # noqa: E731
        return nn.Gradients(self, gy, saved, at_input, lambda: {"inner": inner})


class TwinAround(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def around_norm(kind, how, n, dtype):
    """Return batch normalisation inside layers of layers, and its twin."""
    options = {"affine": True, "track_running_stats": how != "no statistics"}
    inner, twin = getattr(nn, kind)(n, dtype=dtype, **options), getattr(torch.nn, kind)(n, **options)
    if how == "nested":
        inner, twin = nn.Sequential(nn.Tanh(), Around(inner)), torch.nn.Sequential(torch.nn.Tanh(), TwinAround(twin))
    return Around(inner), TwinAround(twin)


@given(
    dtype=reals, seed=seeds, batch=st.integers(2, 5), n=st.integers(1, 4), way=st.sampled_from(WAYS),
    how=st.sampled_from(["plain", "nested", "no statistics", "frozen", "evaluation", "switched"]),
)  # fmt: skip
@settings(max_examples=20)
def test_batch_statistics_inside_a_layer_of_layers_against_torch(dtype, seed, batch, n, way, how):
    rng = np.random.default_rng(seed)
    part, twin_part = around_norm("BatchNorm1d", how, n, dtype)
    options = {"dtype": dtype, "rng": rng}
    model = nn.Sequential(nn.Linear(3, n, **options), part, nn.Tanh(), nn.Linear(n, 2, **options), backward=way)
    twin = torch.nn.Sequential(torch.nn.Linear(3, n), twin_part, torch.nn.Tanh(), torch.nn.Linear(n, 2)).to(
        torch.float32 if dtype == np.float32 else torch.float64
    )
    twin.load_state_dict({name: torch.from_numpy(np.asarray(a)) for name, a in model.state_dict().items()})
    if how == "frozen":
        part.children["inner"].eval(), twin_part.inner.eval()
    if how in ("evaluation", "no statistics"):
        model.eval(), twin.eval()
    x, gy = rng.standard_normal((batch, 3)).astype(dtype), rng.standard_normal((batch, 2)).astype(dtype)
    tx = torch.from_numpy(x).requires_grad_()
    twin(tx).backward(torch.from_numpy(gy))
    _, back = model.vjp(x)
    if how == "switched":  # the mode is that of the forward
        model.eval()
    g = back(gy)
    close = tolerance(dtype, 64)
    if batch == 2 or dtype == np.float32:  # two values of a channel are ±1, whose slope is almost 0
        close = {"rtol": 1e-2, "atol": 1e-3} if dtype == np.float32 else {"rtol": 1e-6, "atol": 1e-8}
    np.testing.assert_allclose(g.input, tx.grad.numpy(), **close)
    for name, parameter in twin.named_parameters():
        np.testing.assert_allclose(g.weights[name], parameter.grad.numpy(), err_msg=name, **close)
    if how in ("frozen", "evaluation"):
        np.testing.assert_allclose(sb.jacobian_t(model, x).vjp(gy), g.input, **close)
    elif how != "switched":
        for coupled in (model, part, nn.Residual(part), nn.Concat(part, nn.Identity()), nn.Sum(part), nn.Stage(part)):
            given_x = x if coupled is model else rng.standard_normal((batch, n)).astype(dtype)
            with pytest.raises(OptionError, match="depend on each other"):
                sb.jacobian_t(coupled, given_x)


def pruned(layer):
    sb.prune(layer, 0.5)
    return layer


class Silent(nn.BatchNorm1d):
    """Overrides the backward, and does not say again whether it couples the samples."""

    def input_grad(self, gy, saved, kept=None):
        return super().input_grad(gy, saved, kept)


INSIDE = {
    "softmax over the batch": (lambda: nn.Softmax(0), (5, 3), False),
    "softmax over axis -2": (lambda: nn.Softmax(-2), (5, 3), False),
    "softmax over axis -2 of three": (lambda: nn.Softmax(-2), (5, 2, 3), True),
    "softmax": (nn.Softmax, (5, 3), True),
    "time-major": (lambda: nn.GRU(3, 3, rng=0, **F8), (4, 4, 3), False),
    "batch first": (lambda: nn.GRU(3, 3, batch_first=True, rng=0, **F8), (2, 4, 3), True),
    "an unbatched sequence": (lambda: nn.GRU(3, 3, rng=0, **F8), (5, 3), False),
    "images": (lambda: nn.Conv2d(2, 2, 3, padding=1, rng=0, **F8), (2, 2, 3, 3), True),
    "an unbatched image": (lambda: nn.Conv2d(2, 2, 3, padding=1, rng=0, **F8), (2, 3, 3), False),
    "instance norm": (lambda: nn.InstanceNorm1d(2, **F8), (3, 2, 4), True),
    "attention": (lambda: nn.MultiheadAttention(2, 1, batch_first=True, rng=0, **F8), (2, 3, 2), True),
    "time-major attention": (lambda: nn.MultiheadAttention(2, 1, rng=0, **F8), (3, 3, 2), False),
    "an encoder layer": (lambda: nn.TransformerEncoderLayer(2, 1, 3, dropout=0.3, rng=0, **F8), (3, 3, 2), False),
    "dropout": (lambda: nn.Dropout(0.5, rng=0), (4, 3), True),
    "a pruned layer": (lambda: pruned(linear()), (4, 3), True),
    "a tied layer": (lambda: nn.Sequential(*[linear()] * 2), (4, 3), True),
    "a layer that does not say": (lambda: Silent(3, **F8), (4, 3), False),
}  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", INSIDE)
def test_scans_and_jacobians_of_layers_of_layers(name, depth):
    make, shape, apart = INSIDE[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)

    def made():
        return Around(make()) if depth == 1 else nn.Residual(Around(make(), add=False))

    def slopes(model, gy):
        found = np.zeros_like(x)
        for at in np.ndindex(x.shape):
            values = []
            for sign in (1, -1):
                moved = x.copy()
                moved[at] += sign * 1e-6
                with undisturbed(model):
                    values.append(np.vdot(gy, model.forward(moved)[0]))
            found[at] = (values[0] - values[1]) / 2e-6
        return found

    model = nn.Sequential(nn.Tanh(), made(), nn.Sigmoid())
    gy = rng.standard_normal(shape)
    wanted = slopes(model, gy)
    for way in WAYS:
        chain = nn.Sequential(nn.Tanh(), made(), nn.Sigmoid(), backward=way)
        np.testing.assert_allclose(chain.vjp(x)[1](gy).input, wanted, atol=1e-7, err_msg=way)
    for layer in (made(), nn.Sequential(nn.Tanh(), made())):
        if not apart:
            with pytest.raises(sb.errors.SparseBPError):
                sb.jacobian_t(layer, x)
        else:
            with undisturbed(layer):
                jacobian = sb.jacobian_t(layer, x)
            np.testing.assert_allclose(jacobian.vjp(gy), layer.vjp(x)[1](gy).input, atol=1e-12)


def test_a_layer_of_layers_that_turns_its_input_has_a_jacobian_in_the_axes_of_its_class():
    class Turns(Around):
        def forward(self, x):
            y, saved = self.children["inner"].forward(x.transpose(1, 0, 2))
            return np.ascontiguousarray(y.transpose(1, 0, 2)), saved

        def gradients(self, gy, saved):
            inner = self.children["inner"].gradients(np.ascontiguousarray(gy.transpose(1, 0, 2)), saved)
            return nn.Gradients(self, gy, saved, lambda: inner.input.transpose(1, 0, 2), lambda: {"inner": inner})

    class TimeMajor(Around):
        batch_axes = 1, 1

    x = np.random.default_rng(0).standard_normal((3, 4, 2))
    gru = nn.GRU(2, 2, rng=0, **F8)
    wanted = sb.jacobian_t(gru, np.ascontiguousarray(x.transpose(1, 0, 2))).to_dense(1)
    np.testing.assert_allclose(sb.jacobian_t(Turns(gru), x).to_dense(1), wanted, atol=1e-12)
    found = sb.jacobian_t(TimeMajor(gru, add=False), np.ascontiguousarray(x.transpose(1, 0, 2)))
    np.testing.assert_allclose(found.to_dense(1), wanted, atol=1e-12)
    assert batch_axes_of(Turns(gru)) is None and batch_axes_of(TimeMajor(gru)) == (1, 1)
    with pytest.raises(OptionError, match=r"batch_axes in the class.*'inner'"):
        sample_axis(Around(gru))
    assert sample_axis(Around(nn.GRU(2, 2, batch_first=True, rng=0))) == 0


def test_more_questions_that_a_layer_of_layers_passes_on():
    x = np.ones((2, 3, 4))

    class Image(Around):
        sample_axes = 3

    with pytest.raises(ShapeError, match="unbatched"):
        nn.Concat(Image(nn.Conv2d(2, 2, 1, rng=0, **F8)), nn.Identity()).forward(np.ones((2, 3, 3)))
    words = Around(nn.Embedding(5, 4, rng=0), add=False)
    assert words.input_dtype == np.int64 and nn.Sequential(words).input_dtype == np.int64
    assert Around(linear()).input_dtype == np.float64
    assert "Around does not say how inner goes back" in Around(nn.GRU(4, 4, rng=0, **F8)).explain(x)
    assert "nothing was left to choose" in Around(linear(4, 4)).explain(x)
    heavy, light = Around(linear(64, 64)), Around(nn.Tanh())
    assert heavy.input_grad_work((2, 64), None).flops > 2 * 64 * 64 * 2 > light.input_grad_work((2, 64), None).flops
    assert Around(nn.Dropout(0.5, rng=0)).generators().keys() == {"inner"}

    class Draws(nn.Residual):
        def forward(self, x):
            return super().forward(x + np.random.default_rng(0).random())

    for layer, captured in ((nn.Residual(linear()), True), (Draws(linear()), False), (Around(linear()), False)):
        model = nn.Sequential(layer)
        schedule = schedule_of(Stages(model), "none", 1, "conventional")
        executor = PlainExecutor(model, nn.MSELoss(), optim.SGD(model.parameters()), schedule, graph=True)
        assert any("0 (" in why and "does not say" in why for why in executor.uncaptured) != captured


@pytest.mark.parametrize("backward", ["bp", "blelloch"])
def test_a_layer_of_layers_is_trained_as_its_gradients_say(backward):
    def made():
        return nn.Sequential(linear(), Around(nn.BatchNorm1d(3, **F8)), nn.Tanh(), linear(seed=1), backward=backward)

    rng = np.random.default_rng(0)
    x, target, loss = rng.standard_normal((6, 3)), rng.standard_normal((6, 3)), nn.MSELoss()
    trained, by_hand = made(), made()
    by_hand.set_backward("bp")
    Trainer(trained, loss, optim.SGD(trained.parameters(), 0.1), rng=0).fit((x, target), epochs=3, batch_size=6)
    optimizer = optim.SGD(by_hand.parameters(), 0.1)
    for _ in range(3):
        optimizer.step(sb.value_and_grad(by_hand, loss)(x, target)[1])
    for name, array in by_hand.state_dict().items():
        np.testing.assert_allclose(trained.state_dict()[name], array, rtol=1e-10, atol=1e-12, err_msg=name)
