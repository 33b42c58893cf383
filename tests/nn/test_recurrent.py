"""Recurrent layers and cells against torch.nn: outputs, last states, all gradients, by every backward algorithm."""

from __future__ import annotations

import contextlib
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import sparsebp as sb
import torch_twins
from sparsebp import nn
from sparsebp.core.errors import MemoryLimitError
from sparsebp.nn.recurrent import layers, runs
from sparsebp.patterns import hidden_pattern, lstm_pattern
from strategies import seeds, sizes
from torch_twins import assert_gradients, loaded, recurrent_twin, slope_at

ALGORITHMS = ("bp", "linear", "chunked", "blelloch", "hybrid", "auto")
KINDS = ("tanh", "relu", "gru", "lstm", "lstm with projection")
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def make(kind: str, features: int, hidden: int, num_layers: int = 1, **options):
    if kind == "gru":
        return nn.GRU(features, hidden, num_layers, **options)
    if kind.startswith("lstm"):
        proj_size = hidden // 2 if kind != "lstm" else 0
        return nn.LSTM(features, hidden, num_layers, proj_size=proj_size, **options)
    return nn.RNN(features, hidden, num_layers, nonlinearity=kind, **options)


def width_of(layer):
    return getattr(layer, "output_size", layer.hidden_size)


def first_states(layer, batch, rng):
    """Return h0, and c0 of an LSTM."""
    rows = layer.num_layers * layer.directions
    widths = (width_of(layer), layer.hidden_size) if isinstance(layer, nn.LSTM) else (layer.hidden_size,)
    return tuple(rng.standard_normal((rows, batch, width)).astype(layer.dtype) for width in widths)


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
    if draw(st.booleans()):  # as many samples and units as vectors have lanes, and some more
        batch, hidden = draw(st.sampled_from([8, 16, 17])), draw(st.sampled_from([8, 11, 17]))
        options["backward"] = "bp"
    layer = make(draw(st.sampled_from(KINDS)), features, hidden, dtype=np.float64, rng=rng, **options)
    lead = (batch, steps) if layer.batch_first else (steps, batch)
    starts = first_states(layer, batch, rng)
    gradients = [rng.standard_normal((*lead, layer.directions * width_of(layer)))]
    gradients += [rng.standard_normal(start.shape) for start in starts]
    there = draw(st.sets(st.integers(0, len(starts)), min_size=1))
    return {
        "layer": layer,
        "x": rng.standard_normal((*lead, features)),
        "starts": starts if draw(st.booleans()) else None,
        "lengths": rng.integers(1, steps + 1, batch) if draw(st.booleans()) else None,
        "gradients": [g if i in there else None for i, g in enumerate(gradients)],
    }


def run_torch(layer, x, starts, lengths, gradients):
    """Return by autograd y, the last states, and the gradients of x, the first states and the parameters, by name."""
    twin, time_axis = recurrent_twin(layer), 1 if layer.batch_first else 0
    x = torch.from_numpy(x).requires_grad_()
    if starts is None:
        starts = [np.zeros_like(a) for a in first_states(layer, x.shape[1 - time_axis], np.random.default_rng(0))]
    starts = tuple(torch.tensor(state, requires_grad=True) for state in starts)
    given = x
    if lengths is not None:
        given = pack_padded_sequence(x, torch.as_tensor(lengths), twin.batch_first, enforce_sorted=False)
    y, last = twin(given, starts if len(starts) > 1 else starts[0])
    if lengths is not None:
        y, _ = pad_packed_sequence(y, twin.batch_first, total_length=x.shape[time_axis])
    outputs = (y, *last) if len(starts) > 1 else (y, last)
    sum((a * torch.from_numpy(g)).sum() for a, g in zip(outputs, gradients, strict=True) if g is not None).backward()
    found = dict(zip(("y", "h_n", "c_n"), outputs, strict=False)) | {"x": x.grad}
    found |= dict(zip(("h0", "c0"), (state.grad for state in starts), strict=False))
    found |= {name: parameter.grad for name, parameter in twin.named_parameters()}
    return {name: np.zeros(()) if value is None else value.detach().numpy() for name, value in found.items()}


def run_ours(layer, x, starts, lengths, gradients):
    """Return the same of a layer of ours."""
    starts = None if starts is None else starts if len(starts) > 1 else starts[0]
    y, saved = layer.forward(x, starts, lengths)
    g = layer.gradients(gradients[0], saved, *gradients[1:])
    assert list(g.weights) == list(layer.params)
    found = {"y": y, "h_n": saved.h_n, "x": g.input, "h0": g.h0, **g.weights}
    return found | ({"c_n": saved.c_n, "c0": g.c0} if isinstance(layer, nn.LSTM) else {})


@given(case=cases(), skipped=st.sampled_from([0, layers.SKIPPED]))
@settings(max_examples=200)
def test_against_torch(case, skipped):
    with mock.patch.object(layers, "SKIPPED", skipped):  # steps past the samples' ends run, or are left out
        found = run_ours(**case)
    for name, want in run_torch(**case).items():
        np.testing.assert_allclose(found[name], want, err_msg=name, **CLOSE)
        assert found[name].dtype == np.float64 and (found[name].flags.c_contiguous or name == "y")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_float32(kind, algorithm):
    rng = np.random.default_rng(3)
    layer = make(kind, 3, 5, backward=algorithm, rng=0)
    x, gy = (rng.standard_normal(s).astype(np.float32) for s in ((37, 4, 3), (37, 4, width_of(layer))))
    nothing = [None] * (2 if isinstance(layer, nn.LSTM) else 1)
    case = {"layer": layer, "x": x, "starts": None, "lengths": None, "gradients": [gy, *nothing]}
    found = run_ours(**case)
    for name, want in run_torch(**case).items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], want, rtol=2e-3, atol=2e-4 * max(1, np.abs(want).max()), err_msg=name)


def test_i_and_w_share_the_scans(monkeypatch):
    calls = []
    real = runs.backward
    monkeypatch.setattr(runs, "backward", lambda *a: (calls.append(1), real(*a))[1])
    layer = nn.RNN(2, 3, num_layers=2, bidirectional=True, rng=0)
    x = np.ones((4, 2, 2), np.float32)
    y, saved = layer.forward(x)
    gy, other = np.ones_like(y), np.zeros_like(y)
    first = layer.gradients(gy, saved)
    assert calls == []
    assert np.abs(first.weights["weight_hh_l0"]).max() > 0 and first.input.shape == x.shape and len(first.h0) == 4
    assert len(calls) == 6  # the first layer's two again: for the weights alone, its sums are made on the way
    assert np.abs(layer.gradients(other, saved).weights["weight_hh_l0"]).max() == 0
    assert len(calls) == 10


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [0, layers.SKIPPED])
def test_what_is_in_the_padding_has_no_influence(kind, algorithm, skipped, monkeypatch):
    monkeypatch.setattr(layers, "SKIPPED", skipped)
    rng = np.random.default_rng(0)
    layer = make(kind, 2, 4, num_layers=2, bidirectional=True, dtype=np.float64, rng=0, backward=algorithm)
    for name in layer.params:  # unstable, so that products over padded steps would overflow
        layer.params[name] *= 60
    lengths = [3, 4, 1]
    x, gy = rng.standard_normal((200, 3, 2)), rng.standard_normal((200, 3, 2 * width_of(layer)))
    results = []
    for padding in (0.0, np.nan):
        for b, length in enumerate(lengths):
            x[length:, b], gy[length:, b] = padding, padding
        results.append(run_ours(layer, x.copy(), None, lengths, [gy, *[None] * len(first_states(layer, 1, rng))]))
    for name, zeros in results[0].items():
        np.testing.assert_array_equal(zeros, results[1][name], err_msg=name)
    y, gx = results[0]["y"], results[0]["x"]
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
    for name, index in (("weight_ih_l0", (1, 1)), ("weight_hh_l1", (2, 0)), ("bias_ih_l2", (3,))):
        slope = slope_at(lambda: (run()[0] ** 2).sum() / 2, layer.params[name], index)
        np.testing.assert_allclose(gw[name][index], slope, rtol=1e-6, atol=1e-8)
    layer.eval()
    np.testing.assert_array_equal(layer(x), layer(x))


@given(
    kind=st.sampled_from(KINDS), num_layers=st.integers(1, 2), bidirectional=st.booleans(), batch_first=st.booleans(),
    steps=sizes(1, 6), with_lengths=st.booleans(), skipped=st.sampled_from([0, layers.SKIPPED]), seed=seeds,
)  # fmt: skip
@settings(max_examples=50)
def test_jacobian_t(kind, num_layers, bidirectional, batch_first, steps, with_lengths, skipped, seed):
    rng = np.random.default_rng(seed)
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first}
    layer = make(kind, 2, 3, dtype=np.float64, rng=rng, **options)
    twin = recurrent_twin(layer)
    batch = 2
    x = rng.standard_normal((batch, steps, 2) if batch_first else (steps, batch, 2))
    lengths = rng.integers(1, steps + 1, batch) if with_lengths else None
    with mock.patch.object(layers, "SKIPPED", skipped):
        _, saved = layer.forward(x, lengths=lengths)
    jacobian = layer.jacobian_t(saved)
    assert jacobian.shape == (steps * 2, steps * layer.directions * width_of(layer))
    if num_layers == 1 and not bidirectional:
        assert jacobian.pattern.nnz == steps * (steps + 1) // 2 * 2 * width_of(layer)  # block-triangular
    for b in range(batch):
        length = steps if lengths is None else int(lengths[b])

        def function(sample, length=length):
            y = twin(sample[:length].unsqueeze(0 if batch_first else 1))[0].reshape(length, -1)
            return torch.nn.functional.pad(y, (0, 0, 0, steps - length))

        want = torch_twins.jacobian_t(function, x[b] if batch_first else x[:, b])
        np.testing.assert_allclose(jacobian.to_dense(b), want, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_jacobians(kind):
    """Of the state, h or (h, c), against torch's of one step; those of an LSTM have two diagonal blocks."""
    rng = np.random.default_rng(2)
    layer = make(kind, 2, 4, num_layers=2, bidirectional=True, dtype=np.float64, rng=0)
    x, starts = rng.standard_normal((5, 3, 2)), first_states(layer, 3, rng)
    _, saved = layer.forward(x, starts if len(starts) > 1 else starts[0])
    elements, tape, twin = layer.hidden_jacobians_t(saved, direction=1), saved.runs[1], recurrent_twin(layer)
    assert len(elements) == 5
    widths = [state.shape[2] for state in tape.states]

    def next_state(state, at):
        """Return torch's flat state after one step of the first layer's second direction."""
        parts = [torch.stack([part] * 4)[:, None] for part in state.split(widths)]
        _, last = twin(at[None, None], tuple(parts) if len(parts) > 1 else parts[0])
        return torch.cat([part[1, 0] for part in (last if len(parts) > 1 else (last,))])

    for step, element in enumerate(elements):
        assert element.pattern == (lstm_pattern(4) if kind == "lstm" else hidden_pattern(sum(widths)))
        for sample in range(3):
            state = torch.from_numpy(np.concatenate([array[step, sample] for array in tape.states]))
            at = torch.from_numpy(x[4 - step, sample])
            want = torch.autograd.functional.jacobian(lambda s, at=at: next_state(s, at), state)
            np.testing.assert_allclose(element.to_dense(sample), want.numpy().T, **CLOSE)
    # The second layer's chain to the gradient at the first state.
    arriving = [np.where(np.arange(4)[:, None, None] == 3, rng.standard_normal(a.shape), 0) for a in starts]
    grads, g = layer.gradients(None, saved, *arriving), np.ascontiguousarray(np.concatenate([a[3].T for a in arriving]))
    for element in reversed(layer.hidden_jacobians_t(saved, layer=1, direction=1)):
        g = element @ g
    at_first = [grads.h0, grads.c0] if len(starts) > 1 else [grads.h0]
    np.testing.assert_allclose(g, np.concatenate([a[3].T for a in at_first]), **CLOSE)


def test_the_choice_is_explained():
    x = np.ones((4, 2, 3), np.float32)
    for algorithm in ALGORITHMS:
        _, saved = nn.GRU(3, 2, backward=algorithm, chunks=2, rng=0).forward(x)
        assert saved.backward_choice.reason
        if algorithm != "auto":
            assert saved.backward_choice.algorithm == algorithm
    assert nn.GRU(3, 2, backward="hybrid", rng=0).backward == "hybrid"


def test_the_chunked_scan_is_chosen_and_said():
    layer = nn.LSTM(1, 4, workers=64, rng=0)
    assert "bp" in layer.explain(np.ones((20, 2, 1), np.float32))
    assert layer.forward(np.ones((3000, 1, 1), np.float32))[1].backward_choice.algorithm == "chunked"


X = np.ones((4, 2, 3))


def test_memory_limit_counts_what_is_stored():
    """The blocks that are diagonal take no more than their diagonals."""
    for backward in ("blelloch", "linear", "hybrid"):
        layer = nn.LSTM(3, 5, backward=backward, memory_limit=4 * 4 * 2 * 60 - 1, rng=0)
        y, saved = layer.forward(X.astype(np.float32))
        with pytest.raises(MemoryLimitError, match="store no Jacobian"):
            layer.weight_grad(y, saved)


@pytest.mark.parametrize("hidden", [3, 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_relu_lets_gradients_through_at_a_nan_as_torchs_does(value, dtype, hidden):
    rng = np.random.default_rng(0)
    layer = nn.RNN(2, hidden, nonlinearity="relu", dtype=dtype, rng=rng, backward="bp")
    twin = recurrent_twin(layer)
    x = rng.standard_normal((4, 3, 2)).astype(dtype)
    x[1, 1, 0] = value
    close, named = {"rtol": 1e-4, "atol": 1e-5}, dict(twin.named_parameters())
    with np.errstate(invalid="ignore"):
        saved = assert_gradients(layer, lambda tx: twin(tx)[0], x, rng, close, named)
        assert np.isfinite(layer.input_grad(np.ones((4, 3, hidden), dtype), saved)).all()


# ---- cells ---------------------------------------------------------------------------------------------------------


def cell_pair(kind: str, features: int, hidden: int, bias: bool, rng):
    options = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
    name = "RNNCell" if options else f"{kind.upper()}Cell"
    ours = getattr(nn, name)(features, hidden, bias, **options, dtype=np.float64, rng=rng)
    twin = getattr(torch.nn, name)(features, hidden, bias, **options)
    assert list(ours.state_dict()) == list(twin.state_dict())
    return ours, loaded(twin, ours)


@given(
    kind=st.sampled_from(["tanh", "relu", "gru", "lstm"]), features=sizes(1, 6), hidden=sizes(1, 7), batch=sizes(1, 5),
    bias=st.booleans(), with_state=st.booleans(), seed=seeds,
)  # fmt: skip
def test_cells_against_torch(kind, features, hidden, batch, bias, with_state, seed):
    rng, states = np.random.default_rng(seed), 2 if kind == "lstm" else 1
    ours, twin = cell_pair(kind, features, hidden, bias, rng)
    x, *gradients = (rng.standard_normal((batch, n)) for n in (features, *[hidden] * states))
    given_states = [rng.standard_normal((batch, hidden)) * with_state for _ in range(states)]
    tx, *ts = (torch.tensor(a, requires_grad=True) for a in (x, *given_states))
    wanted = twin(tx, tuple(ts) if states > 1 else ts[0])
    wanted = wanted if states > 1 else (wanted,)
    torch.autograd.backward(wanted, [torch.from_numpy(g) for g in gradients])
    hx = None if not with_state else given_states[0] if states == 1 else tuple(given_states)
    found = ours(x, hx)
    for got, want in zip(found if states > 1 else (found,), wanted, strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), **CLOSE)
    _, saved = ours.forward(x, hx)
    g = ours.gradients(gradients[0], saved, *gradients[1:])
    for got, tensor in zip((g.input, g.hidden, *((g.cell,) if states > 1 else ())), (tx, *ts), strict=True):
        np.testing.assert_allclose(got, tensor.grad.numpy(), **CLOSE)
    for name, param in twin.named_parameters():
        np.testing.assert_allclose(g.weights[name], param.grad.numpy(), err_msg=name, **CLOSE)
    if states > 1:
        return
    jacobian = ours.hidden_jacobian_t(saved)
    for b in range(batch):
        expected = torch_twins.jacobian_t(lambda s, b=b: twin(tx[b].detach(), s), ts[0][b].detach().numpy())
        np.testing.assert_allclose(jacobian.to_dense(b), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["tanh", "relu", "gru"])
@pytest.mark.parametrize("features", [2, 3])
def test_the_jacobian_of_a_cell_is_that_of_its_input(kind, features):
    """As large as the hidden one where the sizes are equal, and not to be taken for it."""
    rng = np.random.default_rng(0)
    cell, _ = cell_pair(kind, features, 3, True, rng)
    x, gy = rng.standard_normal((4, features)), rng.standard_normal((4, 3))
    _, back = cell.vjp(x)
    np.testing.assert_allclose(sb.jacobian_t(cell, x).vjp(gy), back(gy).input, rtol=1e-12, atol=1e-14)


def test_parameters_tied_inside_a_layer_have_one_gradient():
    layer = nn.GRU(4, 4, 2, rng=0, dtype=np.float64)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        layer.params[f"{name}_l1"] = layer.params[f"{name}_l0"]
    x = np.random.default_rng(1).standard_normal((5, 2, 4))
    y, saved = layer.forward(x)
    grads = layer.gradients(np.ones_like(y), saved).weights
    assert grads.keys() == layer.parameters().keys()
    bias = layer.params["bias_ih_l0"]
    for at in (0, 7):
        sums = []
        for step in (1e-6, -2e-6):
            bias[at] += step
            sums.append(layer.forward(x)[0].sum())
        bias[at] += 1e-6
        np.testing.assert_allclose(grads["bias_ih_l0"][at], (sums[0] - sums[1]) / 2e-6, rtol=1e-6)


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM, nn.MinGRU])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_last_state_may_be_written_to(layer, layers):
    model = layer(3, 4, layers, rng=0)
    x = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)
    y, saved = model.forward(x)
    expected, before = model.weight_grad(np.ones_like(y), saved), y.copy()
    for keeping in (contextlib.nullcontext(), nn.inference_mode()):
        with keeping:
            y, saved = model.forward(x)
        for state in saved.last:
            state.fill(np.nan)
        np.testing.assert_array_equal(y, before)
    y, saved = model.forward(x)
    saved.h_n.fill(np.nan)
    for name, grad in model.weight_grad(np.ones_like(y), saved).items():
        np.testing.assert_array_equal(grad, expected[name])


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM", "MinGRU"])
def test_dropout_between_layers_of_which_there_is_one(kind):
    with pytest.warns(UserWarning, match=r"dropout=0\.5 has no effect with num_layers=1") as seen:
        getattr(nn, kind)(2, 3, dropout=0.5)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(nn, kind)(2, 3, num_layers=2, dropout=0.5)
        getattr(nn, kind)(2, 3)
    if kind != "MinGRU":
        with pytest.warns(UserWarning, match="num_layers"):
            getattr(torch.nn, kind)(2, 3, dropout=0.5)
