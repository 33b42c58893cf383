"""Layers that override some methods and inherit the rest: no shortcut bypasses an override."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import sparsebp as sb
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError
from sparsebp.core.shortcuts import STANDS_FOR, defines
from sparsebp.data import ArrayDataset
from sparsebp.nn.gradients import gradients_of
from sparsebp.runtime import PlainExecutor
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.time_parallel import TimeParallel
from sparsebp.train import Trainer
from sparsebp.train.setup import schedule_of
from torch_twins import slope_at

REAL = {"dtype": np.float64, "rng": 0}


def scaled(base, *args, own_saved=False, **options):
    """Return a layer of a subclass that doubles the output, all three methods overridden.

    `own_saved`: what forward saves is wrapped, so that whatever reads it otherwise would fail.
    """

    class Scaled(base):
        def forward(self, x, *more, **named):
            y, saved = super().forward(x, *more, **named)
            return 2 * y, {"inner": saved} if own_saved else saved

        def input_grad(self, gy, saved):
            return super().input_grad(2 * gy, saved["inner"] if own_saved else saved)

        def weight_grad(self, gy, saved):
            return super().weight_grad(2 * gy, saved["inner"] if own_saved else saved)

    return Scaled(*args, **options)


def by_gradients(base, *args, **options):
    """The same, by `forward` and `gradients`."""

    class Scaled(base):
        def forward(self, x, *more, **named):
            y, saved = super().forward(x, *more, **named)
            return 2 * y, saved

        def gradients(self, gy, saved, **named):
            inner = super().gradients(2 * gy, saved, **named)
            return nn.Gradients(self, gy, saved, inner.input_grad, inner.weight_grad)

    return Scaled(*args, **options)


LAYERS = {
    "Linear": (nn.Linear, (4, 4), REAL, (3, 4)),
    "Conv2d": (nn.Conv2d, (2, 2, 3), {"padding": 1, **REAL}, (3, 2, 4, 4)),
    "Conv1d with a border": (nn.Conv1d, (2, 2, 3), {"padding": 1, "padding_mode": "circular", **REAL}, (3, 2, 5)),
    "Tanh": (nn.Tanh, (), {}, (3, 4)),
    "ReLU": (nn.ReLU, (), {}, (3, 4)),
    "Identity": (nn.Identity, (), {}, (3, 4)),
    "LayerNorm": (nn.LayerNorm, (4,), {"dtype": np.float64}, (3, 4)),
    "RMSNorm": (nn.RMSNorm, (4,), {"dtype": np.float64}, (3, 4)),
    "LogSoftmax": (nn.LogSoftmax, (), {}, (3, 4)),
    "AvgPool2d": (nn.AvgPool2d, (3, 1, 1), {}, (3, 2, 4, 4)),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d, (4,), {}, (3, 2, 4, 4)),
    "Upsample": (nn.Upsample, (4,), {}, (3, 2, 4)),
    "InstanceNorm1d": (nn.InstanceNorm1d, (2,), {"dtype": np.float64, "affine": True}, (3, 2, 4)),
    "Sum": (nn.Sum, (nn.Identity(), nn.Linear(4, 4, **REAL)), {}, (3, 4)),
    "GRU": (nn.GRU, (4, 4), {"batch_first": True, **REAL}, (2, 3, 4)),
    "Residual": (nn.Residual, (nn.Linear(4, 4, **REAL),), {}, (3, 4)),
    "Sequential": (nn.Sequential, (nn.Linear(4, 4, **REAL), nn.Tanh(), nn.Linear(4, 4, **REAL)), {}, (3, 4)),
    "BatchNorm2d": (nn.BatchNorm2d, (2,), {"dtype": np.float64}, (3, 2, 4, 4)),
}  # fmt: skip
OF_SAMPLES = {"BatchNorm2d", "InstanceNorm1d", "LogSoftmax", "Residual", "Sequential", "Sum"}
"""Those with a `couples_samples` of their own, which a subclass must restate."""
WAYS = ["bp", "linear", "blelloch", "hybrid", "auto"]


def differences(model, x, gy):
    """Return the gradient at x of Σ gy·y by central differences."""
    x, found = x.copy(), np.zeros_like(x)
    for at in np.ndindex(x.shape):
        found[at] = slope_at(lambda: np.vdot(gy, model.forward(x)[0]), x, at)
    return found


@pytest.mark.parametrize("override", [scaled, by_gradients, partial(scaled, own_saved=True)])
@pytest.mark.parametrize("name", LAYERS)
def test_overridden_layers_have_their_own_gradients_whatever_runs(name, override):
    base, args, options, shape = LAYERS[name]
    rng = np.random.default_rng(1)
    x, gy = rng.standard_normal(shape), rng.standard_normal(shape)
    for mode in (False, True):
        made = override(base, *args, **options).train(mode)
        around = [nn.Tanh(), nn.Sequential(made, nn.Sigmoid()), nn.ReLU() if name != "GRU" else nn.Tanh()]
        before = made.state_dict()

        def model(backward, parts=around):
            return nn.Sequential(*parts, backward=backward)

        made.load_state_dict(before)
        expected = differences(model("bp"), x, gy)
        weights = None
        for way in WAYS:
            g = model(way).vjp(x)[1](gy)
            np.testing.assert_allclose(g.input, expected, atol=1e-7)
            weights = weights or g.weights
            for key, grad in g.weights.items():
                np.testing.assert_allclose(grad, weights[key], atol=1e-10)
        for key, array in model("bp").parameters().items():  # one entry of every parameter
            at = tuple(0 for _ in array.shape)
            slope = slope_at(lambda: np.vdot(gy, model("bp").forward(x)[0]), array, at)
            assert weights[key][at] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("override", [scaled, by_gradients])
@pytest.mark.parametrize("name", sorted(LAYERS.keys() - OF_SAMPLES))
def test_jacobians_of_overridden_layers(name, override):
    base, args, options, shape = LAYERS[name]
    x = np.random.default_rng(2).standard_normal(shape)
    ours = sb.jacobian_t(override(base, *args, **options), x)
    theirs = sb.jacobian_t(base(*args, **options), x)
    for b in range(shape[0]):
        np.testing.assert_allclose(ours.to_dense(b), 2 * theirs.to_dense(b), atol=1e-12)


def test_a_layer_without_a_sparse_jacobian_has_a_dense_one_also_with_a_replaced_method():
    class Double(nn.Layer):
        def forward(self, x):
            return 2 * x, x

        def input_grad(self, gy, saved):
            return 2 * gy

    layer, x = Double(), np.ones((2, 3))
    for _ in range(2):
        assert "jacobian_t" not in layer.valid_shortcuts
        np.testing.assert_array_equal(sb.jacobian_t(layer, x).to_dense(0), 2 * np.eye(3))
        with pytest.raises(OptionError, match=r"Double has no sparse Jacobian of its own.*sparsebp\.jacobian_t"):
            layer.jacobian_t(x)
        layer.input_grad = lambda gy, saved: 2 * gy


def test_an_unbatched_sample_is_none_with_overridden_methods_either():
    conv = scaled(nn.Conv2d, 2, 2, 3, padding=1, **REAL)
    rng = np.random.default_rng(0)
    x, gy = rng.standard_normal((2, 4, 4)), rng.standard_normal((2, 4, 4))
    expected = nn.Sequential(nn.Tanh(), conv, nn.Tanh()).vjp(x)[1](gy).input
    np.testing.assert_array_equal(
        nn.Sequential(nn.Tanh(), conv, nn.Tanh(), backward="blelloch").vjp(x)[1](gy).input, expected
    )
    with pytest.raises(sb.errors.ShapeError, match="no batch axis"):
        sb.jacobian_t(conv, x)


def test_batch_statistics_are_not_taken_for_a_layer_of_samples():
    norm, x = scaled(nn.BatchNorm2d, 2, dtype=np.float64), np.random.default_rng(0).standard_normal((3, 2, 2, 2))
    with pytest.raises(OptionError, match="but not couples_samples"):
        sb.jacobian_t(norm, x)
    norm.__class__ = type("Says", (type(norm),), {"couples_samples": nn.BatchNorm2d.couples_samples})
    with pytest.raises(OptionError, match="samples of this layer depend"):
        sb.jacobian_t(norm, x)
    plain = nn.BatchNorm2d(2, dtype=np.float64).eval()
    plain.load_state_dict(norm.eval().state_dict())
    np.testing.assert_allclose(sb.jacobian_t(norm, x).to_dense(0), 2 * sb.jacobian_t(plain, x).to_dense(), atol=1e-12)


@pytest.mark.parametrize("where", ["object", "class"])
@pytest.mark.parametrize("method", ["input_grad", "gradients"])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Tanh])
def test_a_replaced_way_back_is_the_one_that_runs(monkeypatch, where, method, kind):
    layer = nn.Linear(4, 4, **REAL) if kind is nn.Linear else nn.Tanh()
    x, gy = np.random.default_rng(0).standard_normal((2, 3, 4))
    wanted, plain = -sb.jacobian_t(layer, x).to_dense(1), kind.input_grad
    assert "jacobian_t" in layer.valid_shortcuts

    def input_grad(self, gy, saved):
        return -plain(self, gy, saved)

    def gradients(self, gy, saved):
        return nn.Gradients(self, gy, saved, lambda: input_grad(self, gy, saved))

    new = {"input_grad": input_grad, "gradients": gradients}[method]
    with monkeypatch.context() as patch:
        if where == "object":
            setattr(layer, method, new.__get__(layer))
        else:
            patch.setattr(kind, method, new)
        np.testing.assert_allclose(sb.jacobian_t(layer, x).to_dense(1), wanted, atol=1e-12)
        found = [
            nn.Sequential(nn.Sigmoid(), layer, nn.Sigmoid(), backward=way).vjp(x)[1](gy).input
            for way in ("bp", "blelloch")
        ]
        np.testing.assert_allclose(found[1], found[0], atol=1e-12)
    if where == "object":
        delattr(layer, method)
    np.testing.assert_allclose(sb.jacobian_t(layer, x).to_dense(1), -wanted, atol=1e-12)
    assert "jacobian_t" in layer.valid_shortcuts


def test_a_forward_that_only_looks_on_keeps_the_sparse_jacobian():
    seen = []

    class Logged(nn.Conv2d):
        def forward(self, x):
            seen.append(x.shape)
            return super().forward(x)

    x = np.random.default_rng(0).standard_normal((2, 1, 5, 5))
    ours, theirs = Logged(1, 2, 3, **REAL), nn.Conv2d(1, 2, 3, **REAL)
    assert sb.jacobian_t(ours, x).pattern == sb.jacobian_t(theirs, x).pattern and seen == [x.shape]


def test_a_class_may_restate_what_it_inherits():
    class Same(nn.Linear):
        def input_grad(self, gy, saved):
            return super().input_grad(gy, saved)

    class Says(Same):
        jacobian_t = nn.Linear.jacobian_t

    assert "jacobian_t" not in Same.valid_shortcuts and "jacobian_t" in Says.valid_shortcuts


def test_what_an_elementwise_layer_is_made_of():
    class Doubled(nn.Tanh):
        def function(self, x):
            return np.tanh(2 * x)

        def slope(self, y):
            return 2 * (1 - y * y)

    class Leaky(nn.ReLU):
        saves = "x"

        def function(self, x):
            return np.where(x > 0, x, 0.5 * x)

        def slope(self, x):
            return np.where(x > 0, 1.0, 0.5)

    x, gy = np.random.default_rng(0).standard_normal((2, 3, 4))
    for layer in (Doubled(), Leaky()):
        model = nn.Sequential(nn.Linear(4, 4, **REAL), layer, nn.Sigmoid())
        expected = differences(model, x, gy)
        for way in WAYS:
            model.set_backward(way)
            np.testing.assert_allclose(model.vjp(x)[1](gy).input, expected, atol=1e-8)


@pytest.mark.parametrize("override", [scaled, by_gradients])
@pytest.mark.parametrize("fusion", ["none", "forward", "backward"])
def test_a_model_that_overrides_is_trained_by_its_own_methods(override, fusion):
    """Its layers ran one by one, past them."""
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((8, 4), dtype=np.float32), rng.integers(0, 3, 8)

    def made():
        return override(nn.Sequential, nn.Linear(4, 5, rng=0), nn.Tanh(), nn.Linear(5, 3, rng=1))

    model, by_hand, loss = made(), made(), nn.CrossEntropyLoss()
    assert len(Stages(model)) == 1 and len(Stages(nn.Sequential(nn.Tanh(), model))) == 2
    ours, other = (optim.SGD(m.parameters(), lr=0.1) for m in (model, by_hand))
    Trainer(model, loss, ours, fusion=fusion).fit(ArrayDataset(x, target), epochs=3, batch_size=8)
    for _ in range(3):
        other.step(sb.value_and_grad(by_hand, loss)(x, target)[1])
    for name, array in by_hand.parameters().items():
        np.testing.assert_allclose(model.parameters()[name], array, atol=1e-6)


def test_recurrent_layers_with_a_forward_of_their_own():
    class Scaled(nn.GRU):
        def forward(self, x, h0=None, lengths=None):
            return super().forward(2 * x, h0, lengths)

        def gradients(self, gy, saved, grad_h_n=None):
            inner = super().gradients(gy, saved, grad_h_n)
            return nn.Gradients(self, gy, saved, lambda: 2 * inner.input_grad(), inner.weight_grad)

    gru, head = Scaled(2, 3, **REAL), nn.Linear(3, 2, **REAL)
    model, x = nn.SequenceClassifier(gru, head), np.random.default_rng(0).standard_normal((5, 4, 2))
    plain = nn.SequenceClassifier(nn.GRU(2, 3, **REAL), head)
    np.testing.assert_array_equal(model(x), plain(2 * x))
    gy = np.ones((4, 2))
    np.testing.assert_array_equal(model.vjp(x)[1](gy).input, 2 * plain.vjp(2 * x)[1](gy).input)
    assert model.explain(x)  # says nothing of the inherited choice
    with pytest.raises(OptionError, match="step by step"):
        gru.stream()

    def over_time(transport):
        with pytest.raises(OptionError, match="overrides methods"):
            TimeParallel(gru, transport)

    run_ranks(1, over_time)


def test_state_gradients_do_not_go_past_an_overridden_weight_grad():
    class Doubled(nn.GRU):
        def weight_grad(self, gy, saved):
            return {name: 2 * grad for name, grad in super().weight_grad(gy, saved).items()}

    ours, theirs = Doubled(2, 3, **REAL), nn.GRU(2, 3, **REAL)
    x = np.random.default_rng(0).standard_normal((5, 4, 2))
    gy = np.ones((5, 4, 3))
    mine, other = ours.vjp(x)[1](gy), theirs.vjp(x)[1](gy)
    np.testing.assert_array_equal(mine.input, other.input)
    for name, grad in other.weights.items():
        np.testing.assert_array_equal(mine.weights[name], 2 * grad)
    with pytest.raises(OptionError, match="overrides input_grad or weight_grad"):
        ours.vjp(x)[1](gy, grad_h_n=np.ones((1, 4, 3)))


def test_every_layer_says_of_its_own_shortcuts_that_they_hold():
    elsewhere = {("BatchNorm1d", "forward_between"), ("BatchNorm1d", "gradients_between")}  # of images alone
    kinds = {kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Layer)}
    for kind in kinds:
        if not kind.__abstractmethods__:
            off = {name for name in STANDS_FOR if defines(kind, name)} - kind.valid_shortcuts
            assert {(kind.__name__, name) for name in off} <= elsewhere


class Tied(nn.Layer):
    """``b(tanh(a(x)))``, with I and W by themselves: the gradients of the weights by dotted names."""

    def __init__(self, tied, every_use):
        super().__init__()
        self.children = {"a": nn.Linear(3, 3, **REAL), "t": nn.Tanh(), "b": nn.Linear(3, 3, dtype=np.float64, rng=1)}
        self.every_use = every_use
        if tied:
            self.children["b"].params["weight"] = self.children["a"].params["weight"]

    def forward(self, x):
        saved = []
        for child in self.children.values():
            x, more = child.forward(x)
            saved.append(more)
        return x, saved

    def _at(self, gy, saved):
        a, t, b = self.children.values()
        between = t.input_grad(b.input_grad(gy, saved[2]), saved[1])
        return between, a, b

    def input_grad(self, gy, saved):
        between, a, _ = self._at(gy, saved)
        return a.input_grad(between, saved[0])

    def weight_grad(self, gy, saved):
        between, a, b = self._at(gy, saved)
        found = {f"a.{name}": grad for name, grad in a.weight_grad(between, saved[0]).items()}
        found |= {f"b.{name}": grad for name, grad in b.weight_grad(gy, saved[2]).items()}
        if not self.every_use and "b.weight" not in self.parameters():
            found["a.weight"] = found["a.weight"] + found.pop("b.weight")
        return found


@pytest.mark.parametrize("every_use", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_composite_layer_gives_the_gradients_of_its_children_by_dotted_name(tied, every_use, inside):
    def made():
        layer = Tied(tied, every_use)
        return nn.Sequential(nn.Residual(layer), nn.Linear(3, 3, **REAL)) if inside else layer

    rng = np.random.default_rng(0)
    x, target, loss = rng.standard_normal((5, 3)), rng.standard_normal((5, 3)), nn.MSELoss()
    model = made()
    _, grads = sb.value_and_grad(model, loss)(x, target)
    assert grads.keys() == model.parameters().keys()
    y, back = model.vjp(x)
    for name, grad in back(loss.input_grad(loss.forward(y, target)[1])).weights.items():
        np.testing.assert_array_equal(grads[name], grad)
    for name, array in model.parameters().items():
        for at in ((0,) * array.ndim, (1,) * array.ndim):
            slope = slope_at(lambda: loss.forward(model(x), target)[0], array, at)
            assert grads[name][at] == pytest.approx(slope, abs=1e-7)
    for fusion in ("none", "forward", "backward"):
        trained, by_hand = made(), made()
        ours, other = (optim.SGD(m.parameters(), lr=0.1) for m in (trained, by_hand))
        stages = Stages(trained)
        executor = PlainExecutor(trained, loss, ours, schedule_of(stages, fusion, 1, "conventional"))
        for _ in range(2):
            executor.step([(x, target)])
            other.step(sb.value_and_grad(by_hand, loss)(x, target)[1])
        executor.flush()
        for name, array in by_hand.parameters().items():
            np.testing.assert_allclose(trained.parameters()[name], array, atol=1e-12)


def test_gradients_by_wrong_names_or_shapes_are_refused():
    layer = Tied(False, False)
    y, saved = layer.forward(np.ones((2, 3)))
    right = layer.weight_grad(y, saved)
    for wrong in ({}, right | {"a.more": y}, {name.replace("a.", "c."): grad for name, grad in right.items()}):
        layer.weight_grad = lambda gy, saved, wrong=wrong: wrong
        with pytest.raises(OptionError, match="does not give the gradients"):
            gradients_of(layer, y, saved).weight_grad()
    layer.weight_grad = lambda gy, saved: right | {"a.bias": np.ones(4)}
    with pytest.raises(sb.errors.ShapeError, match=r"a\.bias"):
        gradients_of(layer, y, saved).weight_grad()


@pytest.mark.parametrize("kind", [nn.ReLU, nn.Flatten, nn.Linear])
def test_gradients_that_call_those_of_the_parent(kind):
    class Scaled(kind):
        def forward(self, x):
            y, saved = super().forward(x)
            return 2 * y, saved

        def gradients(self, gy, saved):
            return super().gradients(2 * gy, saved)

    layer = Scaled(4, 4, **REAL) if kind is nn.Linear else Scaled()
    model = nn.Sequential(nn.Linear(3, 4, **REAL), layer)
    plain = nn.Sequential(model[0], kind(4, 4, **REAL) if kind is nn.Linear else kind())
    plain.load_state_dict(model.state_dict())
    x = np.random.default_rng(0).standard_normal((2, 3))
    (y, back), (half, plain_back) = model.vjp(x), plain.vjp(x)
    np.testing.assert_array_equal(y, 2 * half)
    found, wanted = back(y), plain_back(2 * y)
    np.testing.assert_array_equal(found.input, wanted.input)
    assert found.weights.keys() == wanted.weights.keys()
    for name in wanted.weights:
        np.testing.assert_array_equal(found.weights[name], wanted.weights[name])
