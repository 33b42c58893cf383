"""RNN and GRU against torch.nn: outputs, last states, all gradients, by every backward algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sparsebp import nn
from sparsebp.core.errors import DeviceError, DTypeError, MemoryLimitError, OptionError, ShapeError
from sparsebp.nn import recurrent as recurrent_module
from strategies import seeds, sizes

ALGORITHMS = ("bp", "linear", "chunked", "blelloch", "hybrid", "auto")
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def make(cell: str, *args, **options):
    if cell == "gru":
        return nn.GRU(*args, **options)
    return nn.RNN(*args, nonlinearity=cell, **options)


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(seeds))
    options = {
        "num_layers": draw(st.sampled_from([1, 1, 2, 3])),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
        "backward": draw(st.sampled_from(ALGORITHMS)),
        "chunks": draw(st.sampled_from([None, 1, 2, 3, 100])),
        "up_levels": draw(st.sampled_from([0, 1, 2, 5])),
    }
    steps, batch = draw(sizes(1, 13)), draw(sizes(1, 5))
    features, hidden = draw(st.sampled_from([1, 2, 3, 8, 9])), draw(sizes(1, 7))
    layer = make(draw(st.sampled_from(["tanh", "relu", "gru"])), features, hidden, dtype=np.float64, rng=rng, **options)
    rows = layer.num_layers * layer.directions
    x_shape = (batch, steps) if layer.batch_first else (steps, batch)
    gy = rng.standard_normal((*x_shape, layer.directions * hidden))
    grad_h_n = rng.standard_normal((rows, batch, hidden))
    arriving = draw(st.sampled_from(["both", "gy", "grad_h_n"]))
    return {
        "layer": layer,
        "x": rng.standard_normal((*x_shape, features)),
        "h0": rng.standard_normal((rows, batch, hidden)) if draw(st.booleans()) else None,
        "lengths": rng.integers(1, steps + 1, batch) if draw(st.booleans()) else None,
        "gy": None if arriving == "grad_h_n" else gy,
        "grad_h_n": None if arriving == "gy" else grad_h_n,
    }


def run_torch(twin, x, h0, lengths, gy, grad_h_n):
    """Return y, h_n and the gradients of x, h0 and the parameters, by autograd."""
    x = torch.from_numpy(x).requires_grad_()
    time_axis = 1 if twin.batch_first else 0
    rows = twin.num_layers * (2 if twin.bidirectional else 1)
    batch = x.shape[1 - time_axis]
    h0 = torch.zeros(rows, batch, twin.hidden_size, dtype=x.dtype) if h0 is None else torch.from_numpy(h0)
    h0.requires_grad_()
    given = x
    if lengths is not None:
        given = pack_padded_sequence(x, torch.from_numpy(lengths), twin.batch_first, enforce_sorted=False)
    y, h_n = twin(given, h0)
    if lengths is not None:
        y, _ = pad_packed_sequence(y, twin.batch_first, total_length=x.shape[time_axis])
    total = 0
    if gy is not None:
        total = total + (y * torch.from_numpy(gy)).sum()
    if grad_h_n is not None:
        total = total + (h_n * torch.from_numpy(grad_h_n)).sum()
    total.backward()
    grads = {name: p.grad.numpy() for name, p in twin.named_parameters()}
    return y.detach().numpy(), h_n.detach().numpy(), x.grad.numpy(), h0.grad.numpy(), grads


@given(case=cases())
@settings(max_examples=150)
def test_against_torch(recurrent_twin, case):
    layer = case["layer"]
    y, h_n, gx, gh0, gw = run_torch(recurrent_twin(layer), *(case[k] for k in ("x", "h0", "lengths", "gy", "grad_h_n")))
    out, saved = layer.forward(case["x"], case["h0"], case["lengths"])
    gradients = layer.gradients(case["gy"], saved, case["grad_h_n"])
    np.testing.assert_allclose(out, y, **CLOSE)
    np.testing.assert_allclose(saved.h_n, h_n, **CLOSE)
    np.testing.assert_allclose(gradients.input, gx, **CLOSE)
    np.testing.assert_allclose(gradients.h0, gh0, **CLOSE)
    grads = gradients.weights
    assert list(grads) == list(layer.params)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, gw[name], err_msg=name, **CLOSE)
        assert grad.flags.c_contiguous and grad.dtype == np.float64


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("cell", ["tanh", "relu", "gru"])
def test_float32_stays_float32(cell, algorithm, recurrent_twin):
    rng = np.random.default_rng(3)
    layer = make(cell, 3, 5, backward=algorithm, rng=0)
    x, gy = (rng.standard_normal(s).astype(np.float32) for s in ((37, 4, 3), (37, 4, 5)))
    y, h_n, gx, _, gw = run_torch(recurrent_twin(layer), x, None, None, gy, None)
    out, saved = layer.forward(x)
    got = {"y": out, "h_n": saved.h_n, "x": layer.input_grad(gy, saved), **layer.weight_grad(gy, saved)}
    for name, want in {"y": y, "h_n": h_n, "x": gx, **gw}.items():
        assert got[name].dtype == np.float32
        np.testing.assert_allclose(got[name], want, rtol=2e-3, atol=2e-4 * max(1, np.abs(want).max()), err_msg=name)


@pytest.mark.parametrize("cell", ["tanh", "gru"])
def test_names_and_shapes_are_torchs_and_weights_move_both_ways(cell, recurrent_twin):
    options = {"num_layers": 2, "bidirectional": True, "dtype": np.float64}
    ours = make(cell, 3, 4, rng=1, **options)
    twin = recurrent_twin(ours)
    other = make(cell, 3, 4, rng=2, **options)
    assert list(ours.state_dict()) == list(twin.state_dict())
    other.load_state_dict(twin.state_dict())
    x = np.random.default_rng(0).standard_normal((6, 2, 3))
    np.testing.assert_array_equal(other(x), ours(x))


def test_initial_values_are_in_torchs_range_and_seeded():
    layer = nn.GRU(3, 25, num_layers=2, rng=7)
    for name, array in layer.params.items():
        assert np.abs(array).max() <= 0.2, name
        assert array.dtype == np.float32
    assert np.abs(layer.params["weight_hh_l0"]).max() > 0.19
    again = nn.GRU(3, 25, num_layers=2, rng=7)
    for name, array in again.params.items():
        np.testing.assert_array_equal(array, layer.params[name])


def test_i_and_w_share_the_scans(monkeypatch):
    calls = []
    real = recurrent_module.run_backward
    monkeypatch.setattr(recurrent_module, "run_backward", lambda *a: (calls.append(1), real(*a))[1])
    layer = nn.RNN(2, 3, num_layers=2, bidirectional=True, rng=0)
    x = np.ones((4, 2, 2), np.float32)
    y, saved = layer.forward(x)
    gy, other = np.ones_like(y), np.zeros_like(y)
    first = layer.gradients(gy, saved)
    assert calls == []
    assert np.abs(first.weights["weight_hh_l0"]).max() > 0 and first.input.shape == x.shape and len(first.h0) == 4
    assert len(calls) == 4
    assert np.abs(layer.gradients(other, saved).weights["weight_hh_l0"]).max() == 0
    assert len(calls) == 6  # the weights of the first layer alone: its sums are made on the way


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("cell", ["tanh", "relu", "gru"])
def test_what_is_in_the_padding_has_no_influence(cell, algorithm):
    rng = np.random.default_rng(0)
    layer = make(cell, 2, 3, num_layers=2, bidirectional=True, dtype=np.float64, rng=0, backward=algorithm)
    for name in layer.params:  # unstable, so that products over padded steps would overflow
        layer.params[name] *= 60
    lengths = [3, 4, 1]
    x, gy = rng.standard_normal((200, 3, 2)), rng.standard_normal((200, 3, 6))
    results = []
    for padding in (0.0, np.nan):
        for b, length in enumerate(lengths):
            x[length:, b], gy[length:, b] = padding, padding
        y, saved = layer.forward(x, lengths=lengths)
        results.append([y, saved.h_n, layer.input_grad(gy, saved), *layer.weight_grad(gy, saved).values()])
    for zeros, nans in zip(*results, strict=True):
        np.testing.assert_array_equal(zeros, nans)
    y, gx = results[0][0], results[0][2]
    assert (y[3:, 0] == 0).all() and (gx[3:, 0] == 0).all() and (gx[1:, 2] == 0).all()


@pytest.mark.parametrize("cell", ["tanh", "gru"])
def test_strides_are_free(cell):
    rng = np.random.default_rng(0)
    layer = make(cell, 2, 3, bidirectional=True, dtype=np.float64, rng=0)
    x, h0, gy = rng.standard_normal((8, 3, 4)), rng.standard_normal((3, 2, 3)), rng.standard_normal((6, 3, 4))
    views = x[::2, :, 1:3], h0.transpose(1, 0, 2), gy.T
    results = []
    for x, h0, gy in (views, tuple(np.ascontiguousarray(v) for v in views)):
        y, saved = layer.forward(x, h0)
        results.append([y, layer.input_grad(gy, saved), *layer.weight_grad(gy, saved).values()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_full_lengths_change_nothing():
    layer = nn.GRU(2, 3, bidirectional=True, rng=0)
    x = np.random.default_rng(0).standard_normal((5, 2, 2)).astype(np.float32)
    y, saved = layer.forward(x, lengths=np.array([5, 5]))
    np.testing.assert_array_equal(y, layer(x))
    assert saved.lengths is None


@pytest.mark.parametrize("cell", ["tanh", "gru"])
def test_dropout_between_layers(cell):
    layer = make(cell, 2, 4, num_layers=3, dropout=0.5, dtype=np.float64, rng=5)
    x = np.random.default_rng(0).standard_normal((6, 3, 2))
    start = layer.generator.bit_generator.state

    def run():
        layer.generator.bit_generator.state = start
        return layer.forward(x)

    y, saved = run()
    assert saved.masks[0] is None and set(np.unique(saved.masks[1])) == {0.0, 2.0}
    np.testing.assert_array_equal(run()[0], y)
    assert not np.array_equal(layer.forward(x)[0], y)
    gw = layer.weight_grad(y, saved)  # of the loss Σ y² / 2
    eps = 1e-6
    for name, index in (("weight_ih_l0", (1, 1)), ("weight_hh_l1", (2, 0)), ("bias_ih_l2", (3,))):
        losses = []
        for sign in (1, -1):
            layer.params[name][index] += sign * eps
            losses.append((run()[0] ** 2).sum() / 2)
            layer.params[name][index] -= sign * eps
        np.testing.assert_allclose(gw[name][index], (losses[0] - losses[1]) / (2 * eps), rtol=1e-6, atol=1e-8)
    layer.eval()
    np.testing.assert_array_equal(layer(x), layer(x))


@given(
    cell=st.sampled_from(["tanh", "relu", "gru"]),
    num_layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    steps=sizes(1, 6),
    with_lengths=st.booleans(),
    seed=seeds,
)
@settings(max_examples=40)
def test_jacobian_t(
    recurrent_twin, torch_jacobian_t, cell, num_layers, bidirectional, batch_first, steps, with_lengths, seed
):
    rng = np.random.default_rng(seed)
    layer = make(
        cell,
        2,
        3,
        num_layers=num_layers,
        bidirectional=bidirectional,
        batch_first=batch_first,
        dtype=np.float64,
        rng=rng,
    )
    twin = recurrent_twin(layer)
    batch = 2
    x = rng.standard_normal((batch, steps, 2) if batch_first else (steps, batch, 2))
    lengths = rng.integers(1, steps + 1, batch) if with_lengths else None
    _, saved = layer.forward(x, lengths=lengths)
    jacobian = layer.jacobian_t(saved)
    assert jacobian.shape == (steps * 2, steps * layer.directions * 3)
    if num_layers == 1 and not bidirectional:
        assert jacobian.pattern.nnz == steps * (steps + 1) // 2 * 6  # block-triangular
    for b in range(batch):
        length = steps if lengths is None else int(lengths[b])

        def function(sample, length=length):
            y = twin(sample[:length].unsqueeze(0 if batch_first else 1))[0].reshape(length, -1)
            return torch.nn.functional.pad(y, (0, 0, 0, steps - length))

        want = torch_jacobian_t(function, x[b] if batch_first else x[:, b])
        np.testing.assert_allclose(jacobian.to_dense(b), want, **CLOSE)


@pytest.mark.parametrize("cell", ["tanh", "relu", "gru"])
def test_hidden_jacobians_chain_to_the_gradient_of_h0(cell, recurrent_twin):
    rng = np.random.default_rng(1)
    layer = make(cell, 2, 4, num_layers=2, bidirectional=True, dtype=np.float64, rng=rng)
    x, h0 = rng.standard_normal((5, 3, 2)), rng.standard_normal((4, 3, 4))
    _, saved = layer.forward(x, h0)
    grad_h_n = np.zeros((4, 3, 4))
    grad_h_n[3] = rng.standard_normal((3, 4))
    elements = layer.hidden_jacobians_t(saved, layer=1, direction=1)
    assert len(elements) == 5 and elements[0].shape == (4, 4)
    g = np.ascontiguousarray(grad_h_n[3].T)
    for element in reversed(elements):
        g = element @ g
    np.testing.assert_allclose(g.T, layer.gradients(None, saved, grad_h_n).h0[3], **CLOSE)


def test_the_choice_is_explained():
    x = np.ones((4, 2, 3), np.float32)
    for algorithm in ALGORITHMS:
        _, saved = nn.GRU(3, 2, backward=algorithm, chunks=2, rng=0).forward(x)
        assert saved.backward_choice.reason
        if algorithm != "auto":
            assert saved.backward_choice.algorithm == algorithm
    assert nn.GRU(3, 2, backward="hybrid", rng=0).backward == "hybrid"


X = np.ones((4, 2, 3))


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ShapeError, "at least one step", lambda m: m.forward(np.ones((0, 2, 3)))),
        (ShapeError, "at least one step", lambda m: m.forward(np.ones((4, 0, 3)))),
        (ShapeError, "x has the wrong shape", lambda m: m.forward(np.ones((4, 2, 5)))),
        (ShapeError, "x has the wrong shape", lambda m: m.forward(np.ones((4, 2, 3, 1)))),
        (DTypeError, "x has the wrong dtype", lambda m: m.forward(X.astype(np.float32))),
        (DTypeError, "x has the wrong dtype", lambda m: m.forward(X.astype(int))),
        (DeviceError, "not an array", lambda m: m.forward([[1.0]])),
        (DeviceError, "not an array", lambda m: m.forward(torch.ones(4, 2, 3))),
        (ShapeError, "h0 has the wrong shape", lambda m: m.forward(X, np.ones((1, 3, 5)))),
        (DTypeError, "h0 has the wrong dtype", lambda m: m.forward(X, np.ones((1, 2, 5), np.float32))),
        (OptionError, "lengths is out of range", lambda m: m.forward(X, lengths=[4, 5])),
        (OptionError, "lengths is out of range", lambda m: m.forward(X, lengths=[0, 4])),
        (ShapeError, "lengths has the wrong shape", lambda m: m.forward(X, lengths=[4])),
        (DTypeError, "lengths has the wrong dtype", lambda m: m.forward(X, lengths=[4.0, 1.0])),
        (OptionError, "No gradient", lambda m: m.input_grad(None, m.forward(X)[1])),
        (ShapeError, "gy has the wrong shape", lambda m: m.input_grad(np.ones((2, 4, 5)), m.forward(X)[1])),
        (DTypeError, "gy has", lambda m: m.weight_grad(np.ones((4, 2, 5), np.float32), m.forward(X)[1])),
        (ShapeError, "grad_h_n has", lambda m: m.gradients(None, m.forward(X)[1], np.ones((2, 5)))),
        (MemoryLimitError, "input_grad", lambda m: m.jacobian_t(m.forward(X)[1], memory_limit=1000)),
    ],
)
@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU])
def test_bad_input_is_refused(cell, error, text, call):
    with pytest.raises(error, match=text):
        call(cell(3, 5, dtype=np.float64, rng=0))


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (OptionError, "Unknown backward algorithm", lambda: nn.RNN(1, 2, backward="fast")),
        (OptionError, "Unknown nonlinearity", lambda: nn.RNN(1, 2, nonlinearity="gelu")),
        (OptionError, "hidden_size is too small", lambda: nn.GRU(1, 0)),
        (OptionError, "num_layers is too small", lambda: nn.GRU(1, 2, num_layers=0)),
        (OptionError, "chunks is too small", lambda: nn.GRU(1, 2, chunks=0)),
        (OptionError, "dropout is out of range", lambda: nn.GRU(1, 2, dropout=1.5)),
        (DTypeError, "Unsupported dtype", lambda: nn.GRU(1, 2, dtype=np.float16)),
    ],
)
def test_bad_options_are_refused(error, text, call):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("algorithm", ["blelloch", "hybrid"])
def test_a_memory_limit_is_said_before_allocation(algorithm):
    layer = nn.GRU(1, 8, backward=algorithm, memory_limit=10_000, rng=0)
    y, saved = layer.forward(np.ones((100, 2, 1), np.float32))
    with pytest.raises(MemoryLimitError):
        layer.weight_grad(y, saved)


@pytest.mark.parametrize("hidden", [3, 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_relu_lets_gradients_through_at_a_nan_as_torchs_does(value, dtype, hidden):
    rng = np.random.default_rng(0)
    layer = nn.RNN(2, hidden, nonlinearity="relu", dtype=dtype, rng=rng, backward="bp")
    twin = torch.nn.RNN(2, hidden, nonlinearity="relu", dtype=getattr(torch, np.dtype(dtype).name))
    twin.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in layer.state_dict().items()})
    x, gy = (rng.standard_normal((4, 3, n)).astype(dtype) for n in (2, hidden))
    x[1, 1, 0] = value
    tx = torch.from_numpy(x).requires_grad_()
    ty, _ = twin(tx)
    ty.backward(torch.from_numpy(gy))
    with np.errstate(invalid="ignore"):
        y, saved = layer.forward(x)
        gx = layer.gradients(gy, saved).input_grad()
    np.testing.assert_allclose(y, ty.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gx, tx.grad, rtol=1e-4, atol=1e-5)
    assert np.isfinite(gx).all()
