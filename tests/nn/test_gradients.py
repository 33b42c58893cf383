"""The way back from a forward: values decide, never which array object came before; work that is shared runs once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp import nn
from sparsebp.core.errors import OptionError, StaleError
from sparsebp.nn.gradients import Shared
from torch_twins import slope_at

F8 = {"dtype": np.float64}
ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Mish",
    "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh",
)  # fmt: skip


def image_chain(backward):
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, rng=0, **F8), nn.ReLU(), nn.Flatten(),
        nn.Sequential(nn.Linear(8, 5, rng=1, **F8), nn.Tanh()), nn.Linear(5, 3, rng=2, **F8), backward=backward,
    )  # fmt: skip


MODELS = {  # name -> (model, shape of x, options of forward)
    "Linear": (lambda: nn.Linear(3, 2, rng=0, **F8), (4, 3)),
    "Linear, middle axis": (lambda: nn.Linear(3, 2, rng=0, **F8), (4, 2, 3)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 2, rng=0, **F8), (2, 2, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2, rng=0, **F8), (2, 2, 4, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2, 2, rng=0, **F8), (2, 2, 3, 2)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(2, **F8), (3, 2, 2, 3)),
    "BatchNorm2d, eval": (lambda: nn.BatchNorm2d(2, **F8).eval(), (3, 2, 2, 3)),
    "LayerNorm": (lambda: nn.LayerNorm((2, 3), **F8), (1, 2, 3)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(2, **F8), (3, 2, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2, **F8), (3, 2, 2, 1, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(2, affine=True, **F8), (3, 2, 2, 3)),
    "InstanceNorm1d, eval": (lambda: nn.InstanceNorm1d(2, track_running_stats=True, **F8).eval(), (3, 2, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4, **F8), (3, 4, 2)),
    "RMSNorm": (lambda: nn.RMSNorm(3, **F8), (4, 2, 3)),
    "PReLU": (lambda: nn.PReLU(3, **F8), (4, 3, 2)),
    "ZeroPad2d": (lambda: nn.ZeroPad2d((1, 0, -1, 2)), (2, 2, 4, 5)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, -1)), (2, 6)),
    "Dropout2d": (lambda: nn.Dropout2d(0.5, rng=0), (4, 3, 2, 2)),
    "LogSoftmax": (nn.LogSoftmax, (4, 3)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), (2, 2, 4, 5)),
    "MaxPool3d": (lambda: nn.MaxPool3d(2, 1), (2, 2, 3, 4, 2)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), (2, 2, 4, 5)),
    "AvgPool3d": (lambda: nn.AvgPool3d(2, 1), (2, 2, 3, 4, 2)),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d((2, 3)), (2, 2, 4, 5)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), (2, 2, 3, 2)),
    "Upsample, linear": (lambda: nn.Upsample(7, mode="linear"), (2, 2, 3)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((2, 3)), (2, 2, 4, 5)),
    "Flatten": (nn.Flatten, (2, 3, 2)),
    "Identity": (nn.Identity, (2, 3)),
    "Dropout": (lambda: nn.Dropout(0.5, rng=0), (4, 3)),
    "Softmax": (nn.Softmax, (4, 3)),
    **{name: (getattr(nn, name), (4, 3)) for name in ACTIVATIONS},
    "RNN": (lambda: nn.RNN(3, 2, rng=0, **F8), (5, 4, 3)),
    "RNN, relu, no bias": (lambda: nn.RNN(3, 2, nonlinearity="relu", bias=False, rng=0, **F8), (5, 4, 3)),
    "GRU": (lambda: nn.GRU(3, 2, rng=0, **F8), (5, 4, 3)),
    "GRU, 2 layers, 2 directions, batch first": (
        lambda: nn.GRU(3, 2, 2, bidirectional=True, batch_first=True, rng=0, **F8), (4, 5, 3)),
    "GRU, blelloch": (lambda: nn.GRU(3, 2, backward="blelloch", rng=0, **F8), (5, 4, 3)),
    "RNN, chunked": (lambda: nn.RNN(3, 2, backward="chunked", chunks=3, rng=0, **F8), (7, 4, 3)),
    "MinGRU, 2 layers": (lambda: nn.MinGRU(3, 2, 2, rng=0, **F8), (5, 4, 3)),
    "MinLSTM": (lambda: nn.MinLSTM(3, 2, rng=0, **F8), (5, 4, 3)),
    "LRU": (lambda: nn.LRU(3, 2, rng=0, **F8), (5, 4, 3)),
    "SelectiveScan": (lambda: nn.SelectiveScan(3, 2, rng=0, **F8), (5, 4, 3)),
    "RNNCell": (lambda: nn.RNNCell(3, 2, rng=0, **F8), (4, 3)),
    "GRUCell": (lambda: nn.GRUCell(3, 2, rng=0, **F8), (4, 3)),
    "SequenceClassifier": (
        lambda: nn.SequenceClassifier(nn.RNN(3, 2, rng=0, **F8), nn.Linear(2, 3, rng=1, **F8)), (5, 4, 3)),
    "Residual": (lambda: nn.Residual(nn.Sequential(nn.Linear(3, 3, rng=0, **F8), nn.Tanh())), (4, 3)),
    "Residual, projecting": (
        lambda: nn.Residual(nn.Linear(3, 2, rng=0, **F8), nn.Linear(3, 2, rng=1, **F8)), (4, 3)),
    "Sum": (lambda: nn.Sum(nn.Identity(), nn.Linear(3, 3, rng=0, **F8), nn.Tanh()), (4, 3)),
    "Concat": (lambda: nn.Concat(nn.Identity(), nn.Linear(3, 2, rng=0, **F8)), (4, 3)),
    **{f"Sequential, {how}": (lambda how=how: image_chain(how), (2, 1, 4, 4)) for how in ("bp", "blelloch", "auto")},
    "Stage": (lambda: nn.Stage(nn.Linear(3, 3, rng=0, **F8), nn.Sequential(nn.Tanh())), (4, 3)),
    "Sequential without parameters": (lambda: nn.Sequential(nn.Flatten(), nn.Identity()), (2, 3, 2)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 5, 0.0, rng=0, **F8), (3, 2, 4)),
    "LeNet5": (lambda: sb.models.lenet5(rng=0, **F8), (2, 1, 28, 28)),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def case(request):
    make, shape = MODELS[request.param]
    return make(), np.random.default_rng(0).standard_normal(shape)


def fresh(model, gy, saved):
    """Gradients by calls that nothing is shared with."""
    return {"input": model.input_grad(gy.copy(), saved), **model.weight_grad(gy.copy(), saved)}


def same(got, want):
    assert got.keys() == want.keys()
    for name, grad in want.items():
        np.testing.assert_array_equal(got[name], grad, err_msg=name)


def test_a_gradient_buffer_that_is_used_again(case):
    model, x = case
    y, saved = model.forward(x)
    gy, rng = np.empty_like(y), np.random.default_rng(1)
    for _ in range(3):
        gy[...] = rng.standard_normal(y.shape)
        want = fresh(model, gy, saved)
        same({"input": model.input_grad(gy, saved), **model.weight_grad(gy, saved)}, want)
        gradients = model.gradients(gy, saved)
        same({"input": gradients.input, **gradients.weights}, want)


def test_vjp_owns_what_it_rests_on(case):
    model, x = case
    _, saved = model.forward(x)
    given = x.copy()
    generators = {name: g.bit_generator.state for name, g in model.generators().items()}
    y, back = model.vjp(given)
    for name, g in model.generators().items():
        g.bit_generator.state = generators[name]
    expected, saved = model.forward(x)
    np.testing.assert_array_equal(y, expected)
    gy = np.random.default_rng(1).standard_normal(y.shape)
    want = fresh(model, gy, saved)
    given[...] = np.nan
    y[...] = np.nan
    g = back(gy)
    gy[...] = np.nan
    assert list(g.weights) == list(model.parameters())
    same({"input": g.input, **g.weights}, want)
    assert g.input is g.input and g.input.shape == x.shape


def test_no_two_gradients_share_memory(case):
    model, x = case
    y, back = model.vjp(x)
    g = back(np.ones_like(y))
    arrays = {**g.weights, **{f"parameter {name}": array for name, array in model.parameters().items()}}
    arrays |= {"gy": g.gy} if arrays else {}
    for (one, a), (other, b) in combinations(arrays.items(), 2):
        assert not np.shares_memory(a, b), (one, other)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"clip_norm": 0.05}])
def test_biases_of_recurrent_layers_train_apart(kind, options):
    """The gradients of an RNN's two biases are equal; as one array they were added to, and clipped, twice."""
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((6, 7, 3)), rng.integers(0, 2, 6)
    model = nn.SequenceClassifier(kind(3, 4, rng=0, **F8), nn.Linear(4, 2, rng=1, **F8))
    before = model.state_dict()
    sgd = sb.optim.SGD(model.parameters(), lr=1.0)
    sb.train.Trainer(model, nn.CrossEntropyLoss(), sgd, rng=0, **options).fit(
        sb.data.ArrayDataset(x, target, dtype=np.float64), epochs=1, batch_size=6
    )
    moved = {name: before[name] - array for name, array in model.parameters().items()}
    model.load_state_dict(before)
    _, grads = sb.value_and_grad(model, nn.CrossEntropyLoss())(x.transpose(1, 0, 2), target)
    if "clip_norm" in options:
        sb.optim.clip_grad_norm(grads, options["clip_norm"])
    for name, grad in grads.items():
        np.testing.assert_allclose(moved[name], grad, rtol=1e-9, atol=1e-12, err_msg=name)


def test_gradients_of_old_weights_are_refused():
    model = nn.Sequential(nn.Linear(3, 2, rng=0), nn.Tanh())
    y, back = model.vjp(np.ones((4, 3), np.float32))
    g = back(np.ones_like(y))
    weights = g.weights
    sb.optim.SGD(model.parameters(), lr=0.1).step(weights)
    assert g.weights.keys() == weights.keys()  # known by then
    with pytest.raises(StaleError, match="changed since the forward"):
        _ = g.input
    with pytest.raises(StaleError, match="before the update"):
        back(np.ones_like(y))
    y, back = model.vjp(np.ones((4, 3), np.float32))
    model[0].weight[1, 2] += 1  # a single number
    with pytest.raises(StaleError):
        back(np.ones_like(y))
    y, back = model.vjp(np.ones((4, 3), np.float32))
    model[0].keep_weights(np.array([[True, True, False]] * 2))
    with pytest.raises(StaleError):
        back(np.ones_like(y))


@pytest.mark.parametrize("lengths", [None, [5, 1, 3, 4]])
def test_vjp_of_recurrent_layers(lengths):
    rng = np.random.default_rng(0)
    model, x, h0 = nn.GRU(3, 2, 2, rng=0, **F8), rng.standard_normal((5, 4, 3)), rng.standard_normal((2, 4, 2))
    y, back = model.vjp(x, h0=h0, lengths=lengths)
    gy, grad_h_n = rng.standard_normal(y.shape), rng.standard_normal(back.saved.h_n.shape)
    want = model.gradients(gy.copy(), model.forward(x, h0, lengths)[1], grad_h_n.copy())
    g = back(gy, grad_h_n=grad_h_n)
    assert "h0" in dir(g) and not hasattr(g, "c0")
    gy[...] = grad_h_n[...] = np.nan
    same({"input": g.input, "h0": g.h0, **g.weights}, {"input": want.input, "h0": want.h0, **want.weights})


# ---- value_and_grad --------------------------------------------------------------------------------------------------


def test_value_and_grad_is_forward_loss_and_gradients():
    model, loss = image_chain("bp"), nn.CrossEntropyLoss()
    x, target = np.random.default_rng(0).standard_normal((4, 1, 4, 4)), np.array([0, 1, 2, 1])
    value, grads = sb.value_and_grad(model, loss)(x, target)
    logits, saved = model.forward(x)
    expected, at_logits = loss.forward(logits, target)
    assert isinstance(value, float) and value == expected
    same(grads, model.weight_grad(loss.input_grad(at_logits), saved))
    adam = sb.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        after, grads = sb.value_and_grad(model, loss)(x, target)
        adam.step(grads)
    assert after < value / 2


def test_value_and_grad_passes_options():
    model = nn.SequenceClassifier(nn.GRU(3, 2, rng=0), nn.Linear(2, 2, rng=1))
    function = sb.value_and_grad(model, nn.CrossEntropyLoss())
    x, target = np.ones((5, 2, 3), np.float32), np.array([0, 1])
    assert function(x, target, lengths=[1, 5])[0] != function(x, target)[0]


def some_models():
    f = np.float64
    tied = nn.Linear(6, 6, dtype=f, rng=5)
    inner = nn.Sequential(nn.Linear(6, 6, dtype=f, rng=1), nn.Tanh(), nn.Linear(6, 6, dtype=f, rng=2))
    mlp = nn.Sequential(
        tied, nn.LayerNorm(6, dtype=f), nn.Residual(inner), nn.Sequential(nn.ReLU(), nn.Linear(6, 6, dtype=f, rng=3)),
        nn.Stage(tied, nn.Tanh(), nn.Linear(6, 3, dtype=f, rng=4)),
    )  # fmt: skip
    gru = nn.GRU(3, 4, 2, dtype=f, rng=0)
    return {
        "mlp": (mlp, (5, 6)), "own": (Block(nn.Linear(6, 6, dtype=f, rng=1), nn.Linear(6, 6, dtype=f, rng=2)), (5, 6)),
        "classifier": (nn.SequenceClassifier(gru, nn.Linear(4, 3, dtype=f, rng=1)), (7, 5, 3)),
        "transformer": (sb.models.transformer_classifier(3, 3, steps=5, width=4, heads=2, layers=2, dtype=f, rng=0),
                        (5, 5, 3)),
        "scan": (image_chain("blelloch"), (5, 1, 4, 4)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "own", "classifier", "transformer", "scan"])
@given(data=st.data())
@settings(max_examples=15)
def test_gradients_of_some_parameters_are_those_of_all(name, data):
    model, shape = some_models()[name]
    loss, x = nn.CrossEntropyLoss(), np.random.default_rng(0).standard_normal(shape)
    target = np.arange(5) % 3
    names = data.draw(st.lists(st.sampled_from(list(model.parameters())), unique=True))
    value, grads = sb.value_and_grad(model, loss)(x, target)
    for given_names in (names, dict.fromkeys(names), set(names)):
        found, some = sb.value_and_grad(model, loss, given_names)(x, target)
        assert found == value and list(some) == [n for n in model.parameters() if n in names]
        same(some, {n: grads[n] for n in names})


def test_gradients_of_some_parameters_take_no_work_for_others():
    linears = [nn.Linear(6, 6, rng=number, **F8) for number in range(4)]
    model, done = nn.Sequential(linears[0], nn.Residual(nn.Sequential(*linears[1:3])), linears[3]), []

    def noting(run, what):
        return lambda *args: (done.append(what), run(*args))[1]

    for number, layer in enumerate(linears):
        for part in ("input_grad", "weight_grad"):
            setattr(layer, part, noting(getattr(layer, part), f"{number} {part}"))
    opt = sb.optim.SGD(
        {n: array for n, array in model.parameters().items() if n in ("1.body.1.weight", "1.body.1.bias")}
    )
    _, grads = sb.value_and_grad(model, nn.CrossEntropyLoss(), opt.params)(np.ones((5, 6)), np.arange(5))
    assert done == ["3 input_grad", "2 weight_grad"]
    opt.step(grads)
    for wrong in (["3.body"], "3.weight", 3, [3]):
        with pytest.raises(OptionError, match="names of the model's parameters"):
            sb.value_and_grad(model, nn.CrossEntropyLoss(), wrong)


def test_gradients_of_some_parameters_of_a_part_that_is_replaced():
    model, x = nn.Sequential(nn.Linear(3, 3, rng=0, **F8), nn.Tanh()), np.ones((2, 3))
    function = sb.value_and_grad(model, nn.MSELoss(), ["0.bias"])
    model[0] = nn.Linear(3, 3, rng=1, **F8)
    assert function(x, x)[1]["0.bias"].tobytes() == sb.value_and_grad(model, nn.MSELoss())(x, x)[1]["0.bias"].tobytes()
    model[0] = nn.Linear(3, 3, bias=False, rng=1, **F8)
    with pytest.raises(OptionError, match=r"not names of the model's parameters.*Got '0.bias'"):
        function(x, x)


# ---- layers of the user's own ----------------------------------------------------------------------------------------


class Square(nn.Layer):
    """Nothing but forward and the way back."""

    def forward(self, x):
        return x * x, x

    def input_grad(self, gy, saved):
        return 2 * saved * gy


class Block(nn.Layer):
    """``x + b(tanh(a(x)))``, of children; their gradients get the prefixes by themselves."""

    def __init__(self, a, b):
        super().__init__()
        self.children = {"a": a, "tanh": nn.Tanh(), "b": b}

    def forward(self, x):
        y, saved = x, []
        for layer in self.children.values():
            y, kept = layer.forward(y)
            saved.append(kept)
        return x + y, saved

    def gradients(self, gy, saved):
        a, tanh, b = self.children.values()
        at_b = b.gradients(gy, saved[2])
        at_tanh = tanh.gradients(at_b.input, saved[1])
        at_a = a.gradients(at_tanh.input, saved[0])
        return nn.Gradients(self, gy, saved, lambda: gy + at_a.input, lambda: {"a": at_a, "b": at_b})


@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_of_layers(shared):
    a = nn.Linear(3, 3, rng=0, **F8)
    b = a if shared else nn.Linear(3, 3, rng=1, **F8)
    block = Block(a, b)
    twin = nn.Residual(nn.Sequential(a, nn.Tanh(), b))
    x = np.random.default_rng(0).standard_normal((4, 3))
    y, back = block.vjp(x)
    want, back_of_twin = twin.vjp(x)
    np.testing.assert_array_equal(y, want)
    gy = np.random.default_rng(1).standard_normal(y.shape)
    got, want = back(gy), back_of_twin(gy)
    assert (
        list(got.weights)
        == list(block.parameters())
        == (["a.weight", "a.bias"] + ([] if shared else ["b.weight", "b.bias"]))
    )
    np.testing.assert_array_equal(got.input, want.input)
    for ours, theirs in zip(got.weights.values(), want.weights.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for jacobian in (sb.jacobian_t(block, x), sb.jacobian_t(twin, x)):
        np.testing.assert_allclose(jacobian.vjp(gy), got.input, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backward", ["bp", "blelloch", "hybrid", "chunked", "auto"])
def test_layers_of_the_users_own_in_a_chain(backward):
    a, b = nn.Linear(3, 3, rng=0, **F8), nn.Linear(3, 3, rng=1, **F8)
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(4, 3, rng=rng, **F8), Square(), nn.Sequential(Block(a, b)), nn.Concat(Square(), a),
                          nn.Residual(Square()), nn.Linear(6, 2, rng=rng, **F8))  # fmt: skip
    x = rng.standard_normal((5, 4))
    y, saved = model.forward(x)
    gy = rng.standard_normal(y.shape)
    want = fresh(model, gy, saved)
    for name, param in model.parameters().items():  # finite differences, of the reference itself
        i = tuple(n // 2 for n in param.shape)
        assert want[name][i] == pytest.approx(slope_at(lambda: np.vdot(gy, model(x)), param, i), rel=1e-5, abs=1e-7)
    model.set_backward(backward)
    for name, grad in fresh(model, gy, saved).items():
        np.testing.assert_allclose(grad, want[name], rtol=1e-10, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(model.jacobian_t(saved).vjp(gy), want["input"], rtol=1e-10, atol=1e-12)


def test_a_layer_without_a_way_back_says_so():
    class Forward(nn.Layer):
        def forward(self, x):
            return x, None

    class Forgotten(nn.Layer):
        def __init__(self):
            super().__init__()
            self.params = {"scale": np.ones(3, np.float32)}

        def forward(self, x):
            return x * self.params["scale"], x

        def input_grad(self, gy, saved):
            return gy * self.params["scale"]

    x = np.ones((2, 3), np.float32)
    with pytest.raises(OptionError, match="Forward has no way back"):
        _ = Forward().vjp(x)[1](x).input
    assert Forward().vjp(x)[1](x).weights == {}
    with pytest.raises(OptionError, match="Forgotten has no way back"):
        _ = Forgotten().vjp(x)[1](x).weights
    target = np.array([0, 1])
    with pytest.raises(OptionError, match="Forgotten has no way back"):
        sb.value_and_grad(Forgotten(), nn.CrossEntropyLoss())(x, target)
    Forgotten.weight_grad = lambda self, gy, saved: {}
    with pytest.raises(OptionError, match=r"Expected scale\. Got none"):
        sb.value_and_grad(Forgotten(), nn.CrossEntropyLoss())(x, target)


# ---- shared work -----------------------------------------------------------------------------------------------------


def test_shared_work_runs_once_from_many_threads_and_again_after_an_error():
    calls, start = [], threading.Barrier(4)

    def compute():
        calls.append(threading.get_ident())
        if len(calls) == 1:
            raise ValueError("the first time")
        return object()

    shared = Shared(compute, np)
    with pytest.raises(ValueError, match="the first time"):
        shared()

    def ask():
        start.wait()
        return shared()

    with ThreadPoolExecutor(4) as pool:
        found = {future.result() for future in [pool.submit(ask) for _ in range(4)]}
    assert len(found) == 1 and len(calls) == 2


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_says_what_was_chosen_and_leaves_no_trace():
    gru = nn.GRU(3, 2, rng=0)
    body = nn.Residual(nn.Linear(3, 3, rng=1))
    model = nn.Sequential(nn.Linear(4, 3, rng=0), nn.Tanh(), nn.Dropout(0.5, rng=0), body, backward="auto")
    x = np.ones((2, 4), np.float32)
    before = model.generators()["2"].bit_generator.state
    assert model.explain(x).startswith("Sequential: bp. Layer by layer: ")
    assert model.generators()["2"].bit_generator.state == before
    model.set_backward("blelloch")
    assert model.explain(x).startswith("Sequential: blelloch. ")
    assert (
        nn.Linear(3, 2).explain(np.ones((1, 3), np.float32))
        == "Linear: bp, plain back-propagation; nothing was left to choose."
    )
    sequence = np.ones((9, 2, 3), np.float32)
    assert gru.explain(sequence).startswith("GRU: bp. On a host auto takes plain back-propagation")
    classifier = nn.SequenceClassifier(nn.RNN(3, 2, backward="chunked", rng=0), nn.Linear(2, 2))
    assert classifier.explain(sequence, lengths=[1, 9]).startswith("rnn: chunked. ")
    nested = nn.Concat(nn.Identity(), nn.Residual(nn.Sequential(nn.GRU(3, 3, batch_first=True, rng=0))))
    assert nested.explain(np.ones((2, 4, 3), np.float32)).startswith("1.body.0: bp. ")
    norm = nn.BatchNorm2d(1)
    norm.explain(np.random.default_rng(0).standard_normal((2, 1, 3, 3)).astype(np.float32))
    assert norm.buffers["num_batches_tracked"] == 0 and (norm.buffers["running_mean"] == 0).all()


# ---- layers of the user's own that are wrong -------------------------------------------------------------------------


class Bias(nn.Layer):
    """Returns gy itself, which is allowed."""

    def __init__(self, size):
        super().__init__()
        self.params = {"bias": np.zeros(size)}

    def forward(self, x):
        return x + self.params["bias"], None

    def input_grad(self, gy, saved):
        return gy

    def weight_grad(self, gy, saved):
        return {"bias": gy.sum(axis=0)}


@pytest.mark.parametrize("make", [
    lambda: Bias(3), lambda: nn.Sequential(Bias(3), Bias(3)), lambda: nn.Residual(Bias(3)),
    lambda: nn.Sequential(nn.Identity(), Bias(3), nn.Identity(), nn.Flatten()), lambda: nn.Concat(Bias(3)),
])  # fmt: skip
def test_the_input_gradient_is_the_callers_to_write_to(make):
    model = make()
    y, back = model.vjp(np.ones((2, 3)))
    want = back(np.ones_like(y)).weights
    g = back(np.ones_like(y))
    at_input = g.input
    at_input *= 5
    same(g.weights, want)


WRONG_FORWARDS = {
    "no saved": lambda x: x * 2, "None": lambda x: None, "three": lambda x: (x, x, x), "no output": lambda x: (None, x),
    "a list": lambda x: ([1.0], None), "a list of two": lambda x: [x, x],
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_FORWARDS)
@pytest.mark.parametrize("inside", [lambda f: f, nn.Sequential, nn.Residual, nn.Concat])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_forward_that_returns_something_else(wrong, inside, batch):
    class Wrong(nn.Layer):
        def forward(self, x):
            return WRONG_FORWARDS[wrong](x)

        def input_grad(self, gy, saved):
            return 2 * gy

    model, x = inside(Wrong()), np.ones((batch, 3))
    calls = [model.vjp, model, model.explain, lambda x: sb.jacobian_t(model, x),
             lambda x: sb.value_and_grad(model, nn.MSELoss())(x, x)]  # fmt: skip
    for call in calls:
        with pytest.raises(OptionError, match=r"Wrong\.forward does not return"):
            call(x)


WRONG_GRADS = [
    None, {}, {"v": np.ones(3)}, {"w": None}, {"w": [1.0]}, {"w": np.ones((4, 3))}, {"w": np.ones(3, np.float32)},
    {"w": np.ones(3), "u": np.ones(3)},
]  # fmt: skip


@pytest.mark.parametrize("grads", WRONG_GRADS, ids=str)
@pytest.mark.parametrize("inside", [lambda f: f, lambda f: nn.Sequential(nn.Linear(3, 3, rng=0, **F8), f), nn.Residual])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"fusion": "backward"}])
def test_a_weight_gradient_that_is_something_else(grads, inside, options):
    class Scale(nn.Layer):
        def __init__(self):
            super().__init__()
            self.params = {"w": np.ones(3)}

        def forward(self, x):
            return x * self.params["w"], x

        def input_grad(self, gy, saved):
            return gy * self.params["w"]

        def weight_grad(self, gy, saved):
            return grads

    model, x = inside(Scale()), np.ones((4, 3))
    y, back = model.vjp(x)
    with pytest.raises(sb.errors.SparseBPError):
        _ = back(y).weights
    with pytest.raises(sb.errors.SparseBPError):
        sb.value_and_grad(model, nn.MSELoss())(x, x)
    trainer = sb.train.Trainer(model, nn.MSELoss(), sb.optim.Adam(model.parameters()), rng=0, **options)
    with pytest.raises(sb.errors.SparseBPError):
        trainer.fit((x, x), epochs=1, batch_size=4)


def test_a_block_that_forgets_a_child():
    class Forgetful(Block):
        def gradients(self, gy, saved):
            a = self.children["a"].gradients(gy, saved[0])
            return nn.Gradients(self, gy, saved, lambda: gy, lambda: {"a": a})

    y, back = Forgetful(nn.Linear(3, 3, rng=0, **F8), nn.Linear(3, 3, rng=1, **F8)).vjp(np.ones((2, 3)))
    with pytest.raises(OptionError, match="does not give the gradients"):
        _ = back(y).weights
