"""Back-propagation of chains by scan: gradients of every algorithm equal those layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import networks
from sparsebp import nn
from sparsebp.core.errors import MemoryLimitError, OptionError, ShapeError
from sparsebp.nn import sequential as chain
from sparsebp.nn.sequential import ChainBackward
from strategies import reals, seeds

SCANS = [
    {"backward": "linear"}, {"backward": "blelloch"}, {"backward": "hybrid", "up_levels": 1}, {"backward": "hybrid"},
    {"backward": "chunked", "chunks": 3}, {"backward": "auto"}, {"backward": "auto", "workers": 64},
]  # fmt: skip


@st.composite
def nets(draw):
    """Draw ``(chain, x, rng)``; batch normalisation may be by the batch."""
    network, x = draw(networks(draw(reals), training=True))
    return network.layer, x, np.random.default_rng(draw(seeds))


def gradients(model, gy, saved):
    """W first, then I, which continues from what W computed."""
    grads = {name: grad.copy() for name, grad in model.weight_grad(gy, saved).items()}
    return grads | {"x": model.input_grad(gy, saved)}


@given(net=nets(), scan=st.sampled_from(SCANS))
@settings(max_examples=60)
def test_every_algorithm_gives_the_gradients_of_bp(net, scan):
    model, x, rng = net
    y, saved = model.forward(x)
    gy = rng.standard_normal(y.shape).astype(x.dtype)
    expected = gradients(model, gy, saved)
    model.set_backward(**scan)
    got = gradients(model, gy.copy(), saved)
    assert list(got) == list(expected)
    tolerance = 1e-12 if x.dtype == np.float64 else 2e-5
    for name, grad in expected.items():
        assert got[name].shape == grad.shape and got[name].dtype == grad.dtype
        scale = max(1.0, float(np.abs(grad).max(initial=0)))
        np.testing.assert_allclose(got[name], grad, rtol=tolerance, atol=tolerance * scale, err_msg=name)


def lenet(**options):
    rng = np.random.default_rng(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 3, 3, rng=rng), nn.ReLU(), nn.MaxPool2d(2)), nn.Flatten(), nn.Identity(),
        nn.Linear(27, 5, rng=rng), nn.Tanh(), nn.Linear(5, 3, rng=rng), **options,
    )  # fmt: skip


X = np.random.default_rng(1).standard_normal((2, 1, 8, 8)).astype(np.float32)


def test_weights_alone_need_no_jacobian_of_the_first_layer(monkeypatch):
    model = lenet(backward="blelloch")
    y, saved = model.forward(X)
    gy = np.ones_like(y)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Conv2d, "jacobian_t", None)
        gradients = model.gradients(gy, saved)
        assert list(gradients.weights) == list(model.parameters())
    np.testing.assert_allclose(gradients.input, model.input_grad(gy, saved), rtol=0)


@pytest.mark.parametrize("backward", ["bp", "blelloch"])
def test_the_chain_between_the_layers_runs_once(monkeypatch, backward):
    model = lenet(backward=backward)
    y, saved = model.forward(X)
    calls = []
    run = ChainBackward.gradients
    monkeypatch.setattr(
        ChainBackward, "gradients", lambda self, links, last: calls.append(len(links)) or run(self, links, last)
    )
    gradients = model.gradients(np.ones_like(y), saved)
    for _ in range(2):
        assert gradients.input.shape == X.shape and len(gradients.weights) == 6
    assert calls == [7, 1]  # what is behind the first convolution, and that one


def saved_of_activations():
    return nn.Sequential(nn.ReLU(), nn.Tanh()).forward(X)[1]


def test_a_plan_is_made_once_and_leaves_out_what_changes_nothing(monkeypatch):
    planned = []
    original = chain._plan
    monkeypatch.setattr(chain, "_plan", lambda *a: planned.append(original(*a)) or planned[-1])
    model = lenet(backward="hybrid", up_levels=1)
    for _ in range(2):
        y, saved = model.forward(X)
        model.weight_grad(np.ones_like(y), saved)
    assert planned[0] is planned[1] and planned[0].algorithm == "hybrid" and planned[0].up_levels == 1
    assert len(planned[0].patterns) == 5  # ReLU, MaxPool, Linear, Tanh, Linear
    assert model.scan_plans(saved) == planned[:1]
    model.set_backward("bp")
    assert model.scan_plans(saved) == []
    assert nn.Sequential(nn.ReLU(), nn.Tanh(), backward="linear").weight_grad(X, saved_of_activations()) == {}


def test_a_layer_that_couples_the_samples_splits_the_chain(monkeypatch):
    lengths = []
    original = chain._plan
    monkeypatch.setattr(chain, "_plan", lambda patterns, *a: lengths.append(len(patterns)) or original(patterns, *a))
    rng = np.random.default_rng(0)
    norm = nn.BatchNorm2d(2)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, rng=rng), nn.ReLU(), norm, nn.Tanh(), nn.Conv2d(2, 1, 3, rng=rng), nn.ReLU(),
        backward="linear",
    )  # fmt: skip
    y, saved = model.forward(X)
    assert model.couples_samples(saved)
    model.input_grad(np.ones_like(y), saved)
    assert lengths == [3]  # in front of the norm there is ReLU alone, and the first convolution, which comes last
    y, saved = model.eval().forward(X)
    assert not model.couples_samples(saved)
    model.input_grad(np.ones_like(y), saved)
    assert lengths[1:] == [5]


def test_options():
    assert lenet().backward == "bp" and lenet(backward="auto").backward == "auto"
    with pytest.raises(OptionError, match="Unknown backward"):
        lenet(backward="fast")
    with pytest.raises(OptionError, match="up_levels"):
        lenet(backward="hybrid", up_levels=-1)
    with pytest.raises(OptionError):
        lenet(memory_limit=-1)
    model = lenet(backward="hybrid", up_levels=1)
    for options in ({"up_levels": 2}, {"chunks": 2}):
        (name,) = options
        for backward in ("bp", "auto", "linear", "blelloch"):
            with pytest.raises(OptionError, match=f"{name} belongs to the .* scan alone.*Got backward='{backward}'"):
                lenet(backward=backward, **options)
            with pytest.raises(OptionError, match=name):
                model.set_backward(backward, **options)
    assert model.backward == "hybrid"  # refusals change nothing


@pytest.mark.parametrize("option", ["up_levels", "workers", "chunks", "memory_limit"])
@pytest.mark.parametrize("value", [1.5, "1G"])
def test_options_that_are_no_integers(option, value):
    with pytest.raises(OptionError, match=f"{option} is not an integer"):
        lenet(backward="hybrid", **{option: value})


@pytest.mark.parametrize("backward", ["bp", "linear", "blelloch", "hybrid", "chunked", "auto"])
def test_an_empty_batch(backward):
    model = lenet(backward=backward)
    y, saved = model.forward(X[:0])
    assert model.input_grad(y, saved).shape == X[:0].shape
    assert all((g == 0).all() for g in model.weight_grad(y, saved).values())
    assert model.scan_plans(saved) == []


@pytest.mark.parametrize("backward", ["bp", "blelloch"])
def test_strides_do_not_matter(backward):
    model = lenet(backward=backward)
    strided = np.repeat(X, 2, axis=0)[::2].transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)
    gradients = []
    for x in (X, strided):
        y, saved = model.forward(x)
        gradients.append(model.weight_grad(np.asfortranarray(y) if x is strided else y, saved))
    assert not strided.flags.c_contiguous
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], gradient, rtol=1e-5, atol=1e-6)


def test_an_input_that_does_not_fit_names_the_layer():
    with pytest.raises(ShapeError, match=r"x of shape \(1, 2\) does not fit .* layer 1 \(Linear\).*Got \(1, 3\)"):
        nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 1))(np.ones((1, 2), np.float32))


def test_memory_limit():
    model = lenet(backward="blelloch", memory_limit=2_000)
    y, saved = model.forward(X)
    with pytest.raises(MemoryLimitError, match="bytes of Jacobians") as caught:
        model.input_grad(np.ones_like(y), saved)
    assert "backward='bp'" in str(caught.value)
    model.set_backward("blelloch", memory_limit=10_000_000)
    model.input_grad(np.ones_like(y), saved)


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize(("steps", "batch"), [(3, 3), (4, 2)])  # as many steps as samples: shapes would fit
@pytest.mark.parametrize("batch_first", [False, True])
def test_time_major_layers_are_no_part_of_a_scan(scan, steps, batch, batch_first):
    rng = np.random.default_rng(0)
    gru = nn.GRU(2, 2, batch_first=batch_first, dtype=np.float64, rng=rng)
    model = nn.Sequential(nn.Tanh(), gru, nn.Residual(nn.GRU(2, 2, batch_first=batch_first, dtype=np.float64, rng=rng)),
                          nn.Linear(2, 3, dtype=np.float64, rng=rng), nn.Tanh())  # fmt: skip
    x = rng.standard_normal((batch, steps, 2) if batch_first else (steps, batch, 2))
    y, saved = model.forward(x)
    gy = rng.standard_normal(y.shape)
    expected = gradients(model, gy, saved)
    model.set_backward(**scan)
    got = gradients(model, gy.copy(), saved)
    for name, grad in expected.items():
        np.testing.assert_allclose(got[name], grad, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "out", "bias", "together"), [
    ((5, 4), 7, True, True), ((2, 3, 4), 7, True, True), ((4,), 7, True, True), ((0, 4), 7, True, True),
    ((5, 4), 7, False, False), ((5, 4), 0, True, False),
])  # fmt: skip
def test_a_linear_layer_adds_its_bias_in_the_pass_of_the_relu_behind(monkeypatch, shape, out, bias, together, dtype):
    """Every number is bit for bit that of the two by themselves; NaN and infinity included."""
    linear, relu = nn.Linear(4, out, bias, dtype=dtype, rng=0), nn.ReLU()
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    if x.size > 4:
        x[0, ..., 0], x[-1, ..., 1] = np.nan, np.inf
    y = relu.forward(linear.forward(x)[0])[0]
    found, between = [], nn.Linear.forward_between

    def spy(self, *args):
        found.append(between(self, *args))
        return found[-1]

    monkeypatch.setattr(nn.Linear, "forward_between", spy)
    got, saved = nn.Sequential(linear, relu).forward(x)
    assert got.tobytes() == y.tobytes() and got.shape == y.shape
    assert (found[0] is not None) == together and saved.layers[0] is x and saved.layers[1] is got


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("clamp", "low", "high"), [
    (nn.ReLU(), 0, np.inf), (nn.ReLU6(), 0, 6), (nn.Hardtanh(-0.1, 0.2), -0.1, 0.2),
])  # fmt: skip
@pytest.mark.parametrize(("kind", "bias"), [
    ("Conv1d", True), ("Conv2d", True), ("Conv2d", False), ("Conv3d", False), ("ConvTranspose2d", True),
])  # fmt: skip
def test_a_convolution_adds_its_bias_in_the_pass_of_the_clamp_behind(monkeypatch, kind, bias, clamp, low, high, dtype):
    """Every number is bit for bit NumPy's, from the same sums; NaN and infinity included. So are the gradients."""
    rng, axes = np.random.default_rng(0), int(kind[-2])
    layer = getattr(nn, kind)(3, 5, 2, bias=bias, dtype=dtype, rng=rng)
    without = getattr(nn, kind)(3, 5, 2, bias=False, dtype=dtype)
    without.params["weight"] = layer.params["weight"]
    x = rng.standard_normal((4, 3, *(7,) * axes)).astype(dtype)
    x[0, 0, ..., 0], x[-1, 1, ..., 1] = np.nan, np.inf
    sums = without.forward(x)[0]
    if bias:
        sums = sums + layer.params["bias"].reshape(-1, *(1,) * axes)
    y, model = np.clip(sums, dtype(low), dtype(high)), nn.Sequential(layer, clamp)
    found, between = [], type(layer).forward_between

    def spy(self, *args):
        found.append(between(self, *args))
        return found[-1]

    monkeypatch.setattr(type(layer), "forward_between", spy)
    got, saved = model.forward(x)
    assert found[0][0] is got
    np.testing.assert_array_equal(got, y)
    assert saved.layers[0] is x and saved.layers[1] is got and (np.isnan(got).any() and (got == low).any())
    gy = rng.standard_normal(y.shape).astype(dtype)
    apart = layer.weight_grad(clamp.input_grad(gy, clamp.forward(layer.forward(x)[0])[1]), x)
    for name, grad in model.weight_grad(gy, saved).items():
        np.testing.assert_array_equal(grad, apart[name.removeprefix("0.")])
    np.testing.assert_array_equal(model.forward(x[1])[0], y[1])
    assert found[1] is None  # of an unbatched sample


def test_a_linear_layer_of_ones_own_runs_by_itself():
    class Twice(nn.Linear):
        def forward(self, x):
            y, saved = super().forward(x)
            return 2 * y, saved

    layer, x = Twice(3, 2, rng=0), np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(nn.Sequential(layer, nn.ReLU())(x), np.maximum(layer.forward(x)[0], 0))


@pytest.mark.parametrize(("first", "replaced"), [("Linear", "Linear"), ("Linear", "ReLU"), ("BatchNorm2d", "ReLU")])
def test_methods_replaced_in_a_class_are_called(monkeypatch, first, replaced):
    """As those of an object: by a profiler, say, or a mock."""
    layer = nn.Linear(4, 5, rng=0) if first == "Linear" else nn.BatchNorm2d(2)
    shape, calls, forward = (3, 4) if first == "Linear" else (3, 2, 4, 4), [], getattr(nn, replaced).forward
    model, x = nn.Sequential(layer, nn.ReLU()), np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected = model.forward(x)[0]

    def noting(self, x):
        calls.append(type(self).__name__)
        return forward(self, x)

    monkeypatch.setattr(getattr(nn, replaced), "forward", noting)
    np.testing.assert_array_equal(model.forward(x)[0], expected)
    assert calls == [replaced]
