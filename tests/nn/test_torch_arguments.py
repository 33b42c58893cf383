"""Arguments of torch.nn past PyTorch's own cases: edges, Jacobians, chains, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp import jacobian_t, nn, optim, train
from sparsebp.core.errors import DeviceError, DTypeError, OptionError, ShapeError
from strategies import seeds, sizes
from torch_twins import assert_gradients, loaded

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
F8 = {"dtype": np.float64}


def backward(run, *arrays):
    """Run torch's function; return its output, a gradient there, and the gradients at the arrays."""
    tensors = [torch.from_numpy(array.copy()).requires_grad_() for array in arrays]
    want = run(*tensors)
    gy = torch.from_numpy(np.random.default_rng(3).standard_normal(want.shape))
    want.backward(gy)
    return want.detach().numpy(), gy.numpy(), *(tensor.grad.numpy() for tensor in tensors)


# ---- losses --------------------------------------------------------------------------------------------------------


@given(
    shape=st.lists(sizes(0, 4), min_size=1, max_size=3), classes=sizes(1, 5), seed=seeds,
    smoothing=st.sampled_from([0.0, 0.3, 1.0]), weighted=st.booleans(), ignored=st.sampled_from([-100, 0, -1]),
    reduction=st.sampled_from(["mean", "sum", "none"]), name=st.sampled_from(["CrossEntropyLoss", "NLLLoss"]),
    scale=st.sampled_from([1.0, 100.0]), integers=st.sampled_from([np.int64, np.int8]),
)  # fmt: skip
def test_class_losses(shape, classes, seed, smoothing, weighted, ignored, reduction, name, scale, integers):
    rng = np.random.default_rng(seed)
    options = {"reduction": reduction, "ignore_index": ignored}
    if name == "CrossEntropyLoss":
        options["label_smoothing"] = smoothing
    prediction = scale * rng.standard_normal((shape[0], classes, *shape[1:]))
    target = rng.integers(0, classes, shape)
    if target.size:
        target.flat[0] = ignored
    weight = rng.random(classes) + 0.5 if weighted else None
    loss = getattr(nn, name)(weight, **options)
    twin = getattr(torch.nn, name)(None if weight is None else torch.from_numpy(weight), **options)
    if reduction == "mean" and target.size == 0:
        with pytest.raises(ShapeError, match="empty"):
            loss.forward(prediction, target)
        return
    want, gy, gradient = backward(lambda p: twin(p, torch.from_numpy(target)), prediction)
    value, saved = loss.forward(prediction, target.astype(integers))
    assert isinstance(value, np.ndarray if reduction == "none" else float)
    np.testing.assert_allclose(value, want, **CLOSE)
    gx = loss.input_grad(saved, gy if reduction == "none" else float(gy))
    np.testing.assert_allclose(gx, gradient, **CLOSE)
    assert gx.flags.c_contiguous


def test_where_all_is_ignored_the_gradient_is_zero():
    for weight in (None, np.ones(3)):
        value, saved = nn.CrossEntropyLoss(weight).forward(np.ones((2, 3)), np.array([-100, -100]))
        assert np.isnan(value) and (saved == 0).all()


def test_a_loss_owns_its_weight():
    weight = np.ones(3)
    loss = nn.CrossEntropyLoss(weight)
    before, _ = loss.forward(np.eye(3), np.arange(3))
    weight[0] = 9
    assert loss.forward(np.eye(3), np.arange(3))[0] == before


@pytest.mark.parametrize(("name", "attribute"), [
    ("CrossEntropyLoss", "weight"), ("NLLLoss", "weight"), ("BCEWithLogitsLoss", "weight"),
    ("BCEWithLogitsLoss", "pos_weight"),
])  # fmt: skip
def test_weights_of_a_loss_can_be_replaced(name, attribute):
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((7, 3)), rng.integers(0, 3, 7)
    target = np.eye(3)[target] if name[0] == "B" else target
    loss, twin = getattr(nn, name)(), getattr(torch.nn, name)()
    plain = loss.forward(x, target)[0]
    assert getattr(loss, attribute) is None
    for weight in rng.random((2, 3)):
        setattr(loss, attribute, weight)
        setattr(twin, attribute, torch.tensor(weight))
        np.testing.assert_array_equal(getattr(loss, attribute), weight)
        assert not getattr(loss, attribute).flags.writeable
        value, saved = loss.forward(x, target)
        given = torch.tensor(x, requires_grad=True)
        wanted = twin(given, torch.tensor(target))
        wanted.backward()
        assert value == pytest.approx(wanted.item(), rel=1e-12)
        np.testing.assert_allclose(loss.input_grad(saved), given.grad.numpy(), rtol=1e-10, atol=1e-14)
    with pytest.raises(ShapeError):
        setattr(loss, attribute, np.ones((2, 2)))
        loss.forward(x, target)
    setattr(loss, attribute, None)
    assert loss.forward(x, target)[0] == plain


@pytest.mark.parametrize(("make", "options"), [
    (lambda **o: nn.Conv2d(3, 2, **{"kernel_size": 3} | o),
     {"kernel_size": 1, "stride": 2, "padding": 1, "dilation": 2, "padding_mode": "reflect"}),
    (lambda **o: nn.ConvTranspose1d(3, 2, **{"kernel_size": 3, "stride": 2} | o),
     {"kernel_size": 2, "stride": 3, "padding": 1, "dilation": 2, "output_padding": 1}),
    (lambda **o: nn.MaxPool2d(**{"kernel_size": 2} | o),
     {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2, "ceil_mode": True}),
    (lambda **o: nn.AvgPool1d(**{"kernel_size": 2} | o), {"kernel_size": 3, "stride": 1, "padding": 1}),
    (lambda **o: nn.BatchNorm1d(3, **o), {"affine": False, "track_running_stats": False}),
    (lambda **o: nn.RNN(3, 2, **o), {"nonlinearity": "relu"}),
])  # fmt: skip
def test_options_that_a_built_layer_would_ignore_are_refused(make, options):
    """They are there to be read, also of a copy, and another value would change nothing."""
    for name, value in options.items():
        layer = copy.deepcopy(make())
        before = getattr(layer, name)
        with pytest.raises(OptionError, match=f"The {name} of a {type(layer).__name__} stays as it was built"):
            setattr(layer, name, value)
        assert getattr(layer, name) == before != getattr(make(**{name: value}), name)


def test_rms_norms_epsilon():
    x = np.random.default_rng(0).standard_normal((4, 5))
    for eps in (None, 0.5):
        layer, twin = nn.RMSNorm(5, dtype=float), torch.nn.RMSNorm(5, dtype=torch.float64)
        assert layer.eps is twin.eps is None
        layer.eps = twin.eps = eps
        np.testing.assert_allclose(layer.forward(x)[0], twin(torch.tensor(x)).detach().numpy(), rtol=1e-12)


def test_training_takes_means():
    model = nn.Linear(2, 2, rng=0)
    for loss in (nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(reduction="none")):
        with pytest.raises(OptionError, match="mean"):
            train.Trainer(model, loss, optim.SGD(model.parameters(), 0.1))
    with pytest.raises(OptionError, match="missing"):
        sb.value_and_grad(model, nn.MSELoss(reduction="none"))(np.ones((1, 2), np.float32), np.ones((1, 2), np.float32))


# ---- layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(1, -1), (1, 2), (-2, 3), (0, -1), (0, 0), (2, 2)])
def test_flatten(axes):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    layer = nn.Flatten(*axes)
    saved = assert_gradients(layer, torch.nn.Flatten(*axes), x, np.random.default_rng(3), CLOSE)
    if axes == (0, -1):
        assert layer.couples_samples(saved)
        with pytest.raises((OptionError, ShapeError)):
            jacobian_t(layer, x)
    else:
        assert jacobian_t(layer, x).pattern.kind == "identity"
    for wrong in (nn.Flatten(3, 1), nn.Flatten(1, 4), nn.Flatten(-5)):
        with pytest.raises(ShapeError, match="no such axes"):
            wrong.forward(x)


@given(data=st.data(), seed=seeds)
def test_indices_of_max_pools(data, seed):
    dims = data.draw(st.integers(1, 2))
    size = data.draw(st.lists(st.integers(4, 8), min_size=dims, max_size=dims))
    options = {"kernel_size": data.draw(st.integers(1, 3)), "stride": data.draw(st.integers(1, 3)),
               "dilation": data.draw(st.integers(1, 2)), "ceil_mode": data.draw(st.booleans())}  # fmt: skip
    options["padding"] = options["kernel_size"] // 2
    x = np.random.default_rng(seed).standard_normal((2, 3, *size))
    layer, twin = (getattr(space, f"MaxPool{dims}d")(return_indices=True, **options) for space in (nn, torch.nn))
    try:
        y, indices = layer(x)
    except ShapeError:
        return
    for found, want in zip((y, indices, *layer(x[0])), (*twin(torch.from_numpy(x)), y[0], indices[0]), strict=True):
        np.testing.assert_array_equal(found, want)
    assert indices.dtype == np.int64


def test_unbatched_samples_in_chains():
    x = np.random.default_rng(0).standard_normal((2, 7, 7))
    for backward_by in ("bp", "blelloch", "auto"):
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3, rng=0, **F8), nn.ReLU(), nn.MaxPool2d(2), nn.Tanh(), nn.Flatten(0),
            nn.Linear(12, 4, rng=1, **F8), nn.Softmax(-1), backward=backward_by,
        )  # fmt: skip
        y, back = model.vjp(x)
        batch = nn.Sequential(*list(model.children.values())[:4], nn.Flatten(), *list(model.children.values())[5:])
        want, want_back = batch.vjp(x[None])
        gy = np.random.default_rng(1).standard_normal(4)
        np.testing.assert_allclose(y, want[0], **CLOSE)
        np.testing.assert_allclose(back(gy).input, want_back(gy[None]).input[0], **CLOSE)
        for name, grad in want_back(gy[None]).weights.items():
            np.testing.assert_allclose(back(gy).weights[name], grad, **CLOSE)
        with pytest.raises(ShapeError, match=r"x\[None\]"):
            jacobian_t(model, x)
    with pytest.raises(ShapeError, match="unbatched sample"):
        nn.Concat(nn.Conv2d(2, 3, 1, rng=0, **F8), nn.Conv2d(2, 3, 1, rng=1, **F8)).forward(x)
    layer = nn.Conv2d(2, 3, 3, rng=0, **F8)
    _, saved = layer.forward(x)
    np.testing.assert_array_equal(layer.jacobian_t(saved).data, jacobian_t(layer, x[None]).data)
    for part in (layer.input_grad, layer.weight_grad):
        with pytest.raises(ShapeError, match="gy"):
            part(np.ones((1, 3, 5, 5)), saved)


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU])
def test_unbatched_sequences(cell):
    layer = cell(3, 4, 2, bidirectional=True, batch_first=True, rng=0, **F8)
    rng = np.random.default_rng(0)
    x, h0 = rng.standard_normal((5, 3)), rng.standard_normal((4, 4))
    y, saved = layer.forward(x, h0)
    batch_y, batch_saved = layer.forward(x[None], h0[:, None])
    np.testing.assert_array_equal(y, batch_y[0])
    np.testing.assert_array_equal(saved.h_n, batch_saved.h_n[:, 0])
    gy, grad_h_n = rng.standard_normal(y.shape), rng.standard_normal(h0.shape)
    g, want = layer.gradients(gy, saved, grad_h_n), layer.gradients(gy[None], batch_saved, grad_h_n[:, None])
    np.testing.assert_array_equal(g.input, want.input[0])
    np.testing.assert_array_equal(g.h0, want.h0[:, 0])
    assert layer.unbatched(saved) and list(layer.choices(saved)) == list(layer.choices(batch_saved))
    np.testing.assert_array_equal(layer.jacobian_t(saved).data, layer.jacobian_t(batch_saved).data)
    with pytest.raises(ShapeError, match="h0"):
        layer.forward(x, h0[:, None])
    with pytest.raises(ShapeError):
        jacobian_t(layer, x)


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_to_another_sequence(batch_first):
    rng = np.random.default_rng(0)
    options = {"batch_first": batch_first, "add_bias_kv": True, "add_zero_attn": True}
    layer = nn.MultiheadAttention(6, 2, rng=0, **options, **F8)
    twin = loaded(torch.nn.MultiheadAttention(6, 2, **options), layer)
    turn = (lambda a: a.transpose(1, 0, 2)) if batch_first else (lambda a: a)
    query, key, value = (turn(rng.standard_normal((steps, 3, 6))).copy() for steps in (4, 5, 5))
    padding, mask = rng.standard_normal((3, 5)), np.triu(np.ones((4, 5), bool), 2)
    masks = {"key_padding_mask": torch.from_numpy(padding), "attn_mask": torch.from_numpy(mask)}
    want, gy, *grads = backward(lambda *a: twin(*a, **masks)[0], query, key, value)
    y, saved = layer.forward(query, key, value, key_padding_mask=padding, attn_mask=mask)
    g = layer.gradients(gy, saved)
    np.testing.assert_allclose(y, want, **CLOSE)
    for found, grad in zip((g.input, g.key, g.value), grads, strict=True):
        np.testing.assert_allclose(found, grad, **CLOSE)
    for name, param in twin.named_parameters():
        np.testing.assert_allclose(g.weights[name], param.grad.numpy(), err_msg=name, **CLOSE)
    lengths = layer.forward(query, key, value, lengths=[5, 1, 3])[0]
    behind = np.arange(5) >= np.array([5, 1, 3])[:, None]
    np.testing.assert_array_equal(lengths, layer.forward(query, key, value, key_padding_mask=behind)[0])
    with pytest.raises(OptionError, match="no key"):
        _ = layer.gradients(query, layer.forward(query)[1]).key


@pytest.mark.parametrize("make", [
    lambda **o: nn.Linear(2, 3, **o), lambda **o: nn.Conv1d(2, 3, 1, **o), lambda **o: nn.ConvTranspose2d(2, 3, 1, **o),
    lambda **o: nn.BatchNorm2d(2, **o), lambda **o: nn.LayerNorm(2, **o), lambda **o: nn.Embedding(2, 3, **o),
    lambda **o: nn.MultiheadAttention(2, 1, **o), lambda **o: nn.TransformerEncoderLayer(2, 1, **o),
    lambda **o: nn.RNN(2, 3, **o), lambda **o: nn.GRU(2, 3, **o), lambda **o: nn.RNNCell(2, 3, **o),
    lambda **o: nn.GRUCell(2, 3, **o), lambda **o: nn.LSTM(2, 3, **o), lambda **o: nn.LSTMCell(2, 3, **o),
])  # fmt: skip
def test_devices_and_dtypes(make):
    assert make(device="cpu", dtype=None).dtype == make(device=torch.device("cpu")).dtype == np.float32
    with pytest.raises(DeviceError, match=r"to\('cuda'\)"):
        make(device="cuda")
    with pytest.raises(DTypeError):
        make(dtype=np.float16)
