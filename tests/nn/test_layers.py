"""Layers without recurrence, Sequential, and the base class, against torch.nn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsebp as sb
from sparsebp import nn, optim
from sparsebp.core.errors import DTypeError, FileFormatError, NonFiniteError, ShapeError
from sparsebp.data import ArrayDataset
from sparsebp.interop.torch import load_from_torch
from sparsebp.train import Trainer


def test_sequential_shares_gradients_and_skips_the_first_input_grad(monkeypatch):
    calls = []

    class Counted(nn.Linear):
        def input_grad(self, gy, saved):
            calls.append(self)
            return super().input_grad(gy, saved)

    layers = [Counted(2, 2, rng=i) for i in range(3)]
    model = nn.Sequential(*layers)
    y, saved = model.forward(np.ones((4, 2), np.float32))
    gy = np.ones_like(y)
    gradients = model.gradients(gy, saved)
    assert calls == [] and len(gradients.weights) == 6
    assert calls == layers[:0:-1]
    assert gradients.input.shape == (4, 2)
    assert calls == layers[::-1]
    assert len(model) == 3 and model[1] is layers[1]


def test_dropout():
    layer = nn.Dropout(0.25, rng=0)
    x = np.ones((50, 40))
    y, saved = layer.forward(x)
    assert set(np.unique(y)) == {0.0, 1 / 0.75}
    assert 0.2 < (y == 0).mean() < 0.3
    np.testing.assert_array_equal(layer.input_grad(x, saved), y)
    np.testing.assert_array_equal(layer.jacobian_t(saved).to_dense(3), np.diag(y[3]))
    assert not np.array_equal(layer(x), y)
    np.testing.assert_array_equal(nn.Dropout(0.25, rng=0)(x), y)
    assert nn.Dropout(0.25, rng=0)(x.astype(np.float32)).dtype == np.float32
    assert (nn.Dropout(1.0, rng=0)(x) == 0).all()
    layer.eval()
    out, saved = layer.forward(x)
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(layer.input_grad(x, saved), x)
    assert layer.jacobian_t(saved).pattern.kind == "identity"
    assert list(nn.Sequential(nn.Tanh(), layer).generators()) == ["1"]


@pytest.mark.parametrize(("layer", "shape", "out_shape"), [
    (nn.Conv2d(2, 3, 3), (0, 2, 5, 5), (0, 3, 3, 3)), (nn.ConvTranspose2d(2, 3, 3), (0, 2, 4, 4), (0, 3, 6, 6)),
    (nn.MaxPool2d(2), (0, 2, 5, 4), (0, 2, 2, 2)), (nn.AvgPool2d(2), (0, 2, 5, 4), (0, 2, 2, 2)),
    (nn.AdaptiveAvgPool2d(2), (0, 2, 5, 4), (0, 2, 2, 2)), (nn.AdaptiveMaxPool2d(2), (0, 2, 5, 4), (0, 2, 2, 2)),
    (nn.MaxPool3d(2), (0, 2, 5, 4, 2), (0, 2, 2, 2, 1)), (nn.AvgPool3d(2), (0, 2, 5, 4, 2), (0, 2, 2, 2, 1)),
    (nn.Upsample(scale_factor=2), (0, 2, 5, 4), (0, 2, 10, 8)), (nn.InstanceNorm2d(2), (0, 2, 5, 4), (0, 2, 5, 4)),
    (nn.BatchNorm3d(2), (0, 2, 5, 4, 2), (0, 2, 5, 4, 2)), (nn.Sum(nn.Identity(), nn.Tanh()), (0, 2), (0, 2)),
    *((nn.TransformerEncoderLayer(4, 2, 5, batch_first=first), shape, shape)
      for first in (False, True) for shape in ((0, 3, 4), (3, 0, 4), (0, 0, 4))),
])  # fmt: skip
def test_a_batch_of_none(layer, shape, out_shape):
    y, saved = layer.forward(np.zeros(shape, np.float32))
    g = layer.gradients(y, saved)
    assert y.shape == out_shape and g.input.shape == shape
    assert all((grad == 0).all() for grad in g.weights.values())
    if isinstance(layer, nn.Conv2d):
        assert layer.jacobian_t(saved).shape == (50, 27)


@pytest.mark.parametrize(("name", "arguments"), [
    ("Linear", (30, 20)), ("Linear", (30, 20, False)), ("Conv2d", (4, 6, (3, 2), 1, 0, 1, 2)), ("Conv1d", (4, 6, 3)),
    ("ConvTranspose2d", (4, 6, (3, 2), 1, 0, 0, 2)), ("Embedding", (300, 40)), ("RNN", (3, 25, 2)), ("GRU", (3, 25, 2)),
    ("LSTM", (3, 25)), ("GRUCell", (3, 25)), ("MultiheadAttention", (60, 5)), ("TransformerEncoderLayer", (60, 5)),
])  # fmt: skip
def test_initial_values_are_torchs_and_seeded(name, arguments):
    # A bias has few elements, whose deviation is known to a tenth only from several layers.
    ours = [getattr(nn, name)(*arguments, rng=seed) for seed in range(24)]
    theirs = [getattr(torch.nn, name)(*arguments) for _ in ours]
    expected = dict(theirs[0].named_parameters())
    assert {n: a.shape for n, a in ours[0].parameters().items()} == {n: tuple(p.shape) for n, p in expected.items()}
    for key in expected:
        arrays = np.stack([layer.parameters()[key] for layer in ours])
        wants = np.stack([layer.get_parameter(key).detach().numpy() for layer in theirs])
        assert arrays.dtype == np.float32 and (arrays.std() == 0 or (arrays[0] != arrays[1]).any())
        if name != "Embedding":  # normal: no bound
            np.testing.assert_allclose(np.abs(arrays).max(), np.abs(wants).max(), rtol=0.06, atol=0, err_msg=key)
        np.testing.assert_allclose(arrays.std(), wants.std(), rtol=0.1, atol=0, err_msg=key)
    for dtype in (np.float32, np.float64):  # the same seed, the same numbers
        for key, array in getattr(nn, name)(*arguments, rng=3, dtype=dtype).parameters().items():
            np.testing.assert_array_equal(array.astype(np.float32), ours[3].parameters()[key])


# ---- the base class ------------------------------------------------------------------------------------------------


def test_parameters_are_live_and_state_dict_is_a_copy():
    model = nn.Sequential(nn.Linear(2, 3, rng=0), nn.ReLU(), nn.Linear(3, 1, rng=1))
    parameters, state = model.parameters(), model.state_dict()
    assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    parameters["0.weight"][...] = 5
    assert (model[0].params["weight"] == 5).all() and not (state["0.weight"] == 5).any()
    model.load_state_dict(state)
    np.testing.assert_array_equal(parameters["0.weight"], state["0.weight"])  # the same arrays still


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (FileFormatError, "missing \\['bias'\\]", lambda s: s.pop("bias")),
        (FileFormatError, "unexpected \\['extra'\\]", lambda s: s.update(extra=s["bias"])),
        (ShapeError, "weight has the wrong shape", lambda s: s.update(weight=s["weight"].T)),
        (DTypeError, "bias has the wrong dtype", lambda s: s.update(bias=s["bias"].astype(np.float64))),
        (NonFiniteError, "bias holds NaN", lambda s: s.update(bias=s["bias"] * np.nan)),
        (NonFiniteError, "bias holds NaN or infinity", lambda s: s.update(bias=s["bias"] * np.inf)),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(error, text, change):
    layer = nn.Linear(2, 3, rng=0)
    before = layer.state_dict()
    state = nn.Linear(2, 3, rng=1).state_dict()
    change(state)
    with pytest.raises(error, match=text):
        layer.load_state_dict(state)
    for name, array in before.items():
        np.testing.assert_array_equal(layer.params[name], array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wanted", [np.float32, np.float64])
def test_half_precision_is_loaded_as_it_is(dtype, wanted):
    """Every value of half precision is one of float32 and float64."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(getattr(torch, dtype))
    ours = [nn.Sequential(nn.Linear(3, 2, dtype=wanted), nn.BatchNorm1d(2, dtype=wanted)) for _ in range(3)]
    ours[0].load_state_dict(module.state_dict())
    load_from_torch(ours[1], module)
    ours[2].load_state_dict({name: tensor.numpy() for name, tensor in module.half().state_dict().items()})
    exact = {name: tensor.to(torch.float64).numpy() for name, tensor in module.state_dict().items()}
    for model in ours:
        for name, array in model.state_dict().items():
            assert array.dtype == (np.int64 if name.endswith("tracked") else wanted)
            if dtype == "float16" or model is not ours[2]:
                np.testing.assert_allclose(array, exact[name], rtol=0 if dtype == "float16" else 1e-2, atol=1e-7)
    if dtype == "bfloat16":
        np.testing.assert_array_equal(ours[0].state_dict()["0.weight"], ours[1].state_dict()["0.weight"])


@pytest.mark.parametrize(("given", "layer", "remedy"), [
    (np.float64, np.float32, r"asarray\(value, 'float32'\), or call model\.to\(dtype='float64'\)"),
    (np.float32, np.float64, r"asarray\(value, 'float64'\), or call model\.to\(dtype='float32'\)"),
    (np.int64, np.float32, r"asarray\(value, 'float32'\)\.$"),
])  # fmt: skip
def test_another_dtype_is_refused_with_a_remedy_that_works(given, layer, remedy):
    state = {"weight": np.ones((2, 3), given), "bias": np.ones(2, given)}
    ours = nn.Linear(3, 2, dtype=layer)
    with pytest.raises(DTypeError, match=remedy):
        ours.load_state_dict(state)
    ours.load_state_dict({name: np.asarray(value, np.dtype(layer).name) for name, value in state.items()})
    if "model.to" in remedy:
        ours.to(dtype=np.dtype(given).name).load_state_dict(state)


def test_a_state_with_some_names_is_loaded_as_torch_does_it():
    ours, theirs = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.nn.Sequential(torch.nn.Linear(3, 2))
    theirs.append(torch.nn.BatchNorm1d(2))
    state = {"0.weight": np.ones((2, 3), np.float32), "1.running_mean": np.ones(2, np.float32), "other": np.ones(1)}
    want = theirs.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()}, strict=False)
    found = ours.load_state_dict(state, strict=False)
    missing = sorted([*want.missing_keys, "1.num_batches_tracked"])  # which old states of torch do not have
    assert found == (missing, want.unexpected_keys) == (found.missing_keys, found.unexpected_keys)
    assert (ours[0].weight == 1).all() and (ours[1].running_mean == 1).all() and not (ours[0].bias == 1).any()
    assert ours.load_state_dict(ours.state_dict()) == ([], [])
    before = ours.state_dict()
    with pytest.raises(ShapeError, match=r"0\.bias"):
        ours.load_state_dict({"0.weight": np.zeros((2, 3), np.float32), "0.bias": np.ones(3, np.float32)}, strict=False)
    with pytest.raises(FileFormatError, match="strict=False"):
        ours.load_state_dict(state)
    for name, array in ours.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    tied = nn.Sequential(*[nn.Linear(2, 2)] * 2)
    assert tied.load_state_dict({"1.weight": np.ones((2, 2), np.float32)}, strict=False).missing_keys[0] == "0.bias"
    assert (tied[0].weight == 1).all()


def needs_grad(*shape):
    return torch.ones(*shape, dtype=torch.float64, requires_grad=True)


F8, PAIR = {"dtype": np.float64}, np.ones((2, 2))
LINEAR, RNN, ADAM = nn.Linear(2, 2, **F8), nn.GRU(2, 2, **F8), optim.Adam(nn.Linear(2, 2, **F8).parameters())
DOORS = [
    lambda t: LINEAR(t(2, 2)), lambda t: LINEAR.vjp(t(2, 2)), lambda t: LINEAR.vjp(PAIR)[1](t(2, 2)).input,
    lambda t: LINEAR.weight_grad(t(2, 2), PAIR), lambda t: nn.Sequential(LINEAR)(t(2, 2)), lambda t: nn.Tanh()(t(2, 2)),
    lambda t: setattr(LINEAR, "weight", t(2, 2)), lambda t: LINEAR.params.update(weight=t(2, 2)),
    lambda t: LINEAR.load_state_dict({"weight": t(2, 2), "bias": t(2)}), lambda t: RNN(t(3, 2, 2)),
    lambda t: RNN.forward(np.ones((3, 2, 2)), t(1, 2, 2)), lambda t: RNN.forward(np.ones((3, 2, 2)), lengths=t(2)),
    lambda t: nn.MSELoss().forward(t(2, 2), PAIR), lambda t: nn.MSELoss().forward(PAIR, t(2, 2)),
    lambda t: nn.CrossEntropyLoss(t(2)).forward(PAIR, np.zeros(2, int)), lambda t: optim.Adam({"w": t(2)}),
    lambda t: ADAM.step({"weight": t(2, 2), "bias": t(2)}), lambda t: optim.clip_grad_norm({"w": t(2)}, 1.0),
    lambda t: trainer().fit((t(2, 2), PAIR), epochs=1, batch_size=2), lambda t: trainer().predict(t(2, 2)),
    lambda t: trainer().fit((PAIR, t(2, 2)), epochs=1, batch_size=2), lambda t: sb.jacobian_t(LINEAR, t(2, 2)),
    lambda t: sb.value_and_grad(LINEAR, nn.MSELoss())(PAIR, t(2, 2)),
    lambda t: sb.linear_recurrence(t(2, 2, 2), t(2, 2, 2)),
    lambda t: sb.verify.check_gradient(LINEAR, nn.MSELoss(), t(2, 2), PAIR),
    lambda t: ArrayDataset(PAIR, np.zeros(2, int)).batch(t(2)),
]  # fmt: skip


def trainer():
    model = nn.Linear(2, 2, **F8)
    return Trainer(model, nn.MSELoss(), optim.Adam(model.parameters()))


@pytest.mark.parametrize("door", DOORS)
def test_a_tensor_that_requires_grad_is_named_and_told_what_helps(door):
    with pytest.raises(DTypeError, match=r"requires grad.*detach\(\)"):
        door(needs_grad)


def test_train_eval_to_and_modules():
    inner = nn.Dropout(0.5, rng=0)
    model = nn.Sequential(nn.Linear(2, 2, rng=0), nn.Sequential(inner))
    assert [name for name, _ in model.modules()] == ["", "0", "1", "1.0"]
    assert not model.eval()[1].training and not inner.training
    assert model.train()[1].training and inner.training
    assert model.dtype == np.float32 and nn.ReLU().dtype is None
    assert model.to("cpu", dtype=np.float64).dtype == np.float64
    with pytest.raises(DTypeError):
        model.to(dtype=np.float16)
