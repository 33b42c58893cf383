"""LSTM and its cell against torch.nn: outputs, last states, all gradients, by every backward algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sparsebp import nn
from sparsebp.core.errors import DTypeError, MemoryLimitError, OptionError, ShapeError
from sparsebp.patterns import hidden_pattern, lstm_pattern
from strategies import seeds, sizes

ALGORITHMS = ("bp", "linear", "chunked", "blelloch", "hybrid", "auto")
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def twin_of(layer: nn.LSTM) -> torch.nn.LSTM:
    """Return torch's layer with the same weights."""
    options = {name: getattr(layer, name) for name in ("num_layers", "batch_first", "bidirectional", "proj_size")}
    weight = layer.params["weight_hh_l0"]
    twin = torch.nn.LSTM(layer.input_size, layer.hidden_size, bias="bias_ih_l0" in layer.params, **options)
    twin = twin.to(torch.from_numpy(weight).dtype)
    assert list(twin.state_dict()) == list(layer.state_dict())
    twin.load_state_dict({name: torch.from_numpy(array) for name, array in layer.state_dict().items()})
    return twin


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
    proj_size = draw(st.integers(1, hidden - 1)) if hidden > 1 and draw(st.booleans()) else 0
    layer = nn.LSTM(features, hidden, proj_size=proj_size, dtype=np.float64, rng=rng, **options)
    lead = (batch, steps) if layer.batch_first else (steps, batch)
    h, c = (rng.standard_normal(shape) for shape in layer.state_shapes(batch))
    gradients = {
        "gy": rng.standard_normal((*lead, layer.directions * layer.output_size)),
        "grad_h_n": rng.standard_normal(h.shape), "grad_c_n": rng.standard_normal(c.shape),
    }  # fmt: skip
    there = draw(st.sets(st.sampled_from(list(gradients)), min_size=1))
    return {
        "layer": layer,
        "x": rng.standard_normal((*lead, features)),
        "hx": (h, c) if draw(st.booleans()) else None,
        "lengths": rng.integers(1, steps + 1, batch) if draw(st.booleans()) else None,
        "gradients": {name: g if name in there else None for name, g in gradients.items()},
    }


def run_torch(twin, x, hx, lengths, gradients):
    """Return by autograd y, h_n, c_n, and the gradients of x, h0, c0 and the parameters, by name."""
    x = torch.from_numpy(x).requires_grad_()
    time_axis = 1 if twin.batch_first else 0
    rows, batch = twin.num_layers * (2 if twin.bidirectional else 1), x.shape[1 - time_axis]
    if hx is None:
        hx = (np.zeros((rows, batch, width), x.detach().numpy().dtype)
              for width in (twin.proj_size or twin.hidden_size, twin.hidden_size))  # fmt: skip
    h0, c0 = (torch.tensor(state, requires_grad=True) for state in hx)
    given = x
    if lengths is not None:
        given = pack_padded_sequence(x, torch.from_numpy(lengths), twin.batch_first, enforce_sorted=False)
    y, (h_n, c_n) = twin(given, (h0, c0))
    if lengths is not None:
        y, _ = pad_packed_sequence(y, twin.batch_first, total_length=x.shape[time_axis])
    pairs = zip((y, h_n, c_n), gradients.values(), strict=True)
    sum((value * torch.from_numpy(g)).sum() for value, g in pairs if g is not None).backward()
    found = {"y": y, "h_n": h_n, "c_n": c_n, "x": x.grad, "h0": h0.grad, "c0": c0.grad}
    found |= {name: parameter.grad for name, parameter in twin.named_parameters()}
    return {name: np.zeros(()) if value is None else value.detach().numpy() for name, value in found.items()}


def run_ours(layer, x, hx, lengths, gradients):
    """Return the same of a layer of ours."""
    y, saved = layer.forward(x, hx, lengths)
    h_n, c_n = saved
    g = layer.gradients(gradients["gy"], saved, gradients["grad_h_n"], gradients["grad_c_n"])
    assert list(g.weights) == list(layer.params)
    return {"y": y, "h_n": h_n, "c_n": c_n, "x": g.input, "h0": g.h0, "c0": g.c0, **g.weights}


@given(case=cases())
@settings(max_examples=80)
def test_against_torch(case):
    found = run_ours(**case)
    for name, want in run_torch(twin_of(case.pop("layer")), **case).items():
        np.testing.assert_allclose(found[name], want, err_msg=name, **CLOSE)
        assert found[name].flags.c_contiguous or name == "y"


@pytest.mark.parametrize("algorithm", ["bp", "chunked", "blelloch"])
@pytest.mark.parametrize("proj_size", [0, 2])
def test_float32_stays_float32(algorithm, proj_size):
    rng = np.random.default_rng(3)
    layer = nn.LSTM(3, 5, proj_size=proj_size, backward=algorithm, rng=0)
    x, gy = (rng.standard_normal(s).astype(np.float32) for s in ((37, 4, 3), (37, 4, proj_size or 5)))
    case = {"x": x, "hx": None, "lengths": None, "gradients": {"gy": gy, "grad_h_n": None, "grad_c_n": None}}
    found = run_ours(layer, **case)
    for name, want in run_torch(twin_of(layer), **case).items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], want, rtol=2e-3, atol=2e-4 * max(1, np.abs(want).max()), err_msg=name)


@pytest.mark.parametrize("proj_size", [0, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_has_no_influence(bidirectional, proj_size):
    """NaN behind a sample's end reaches nothing, and what arrives there goes nowhere."""
    rng, lengths = np.random.default_rng(1), [4, 9, 1]
    layer = nn.LSTM(2, 4, 2, bidirectional=bidirectional, proj_size=proj_size, dtype=np.float64, rng=0)
    x = rng.standard_normal((9, 3, 2))
    gradients = {"gy": rng.standard_normal((9, 3, layer.directions * layer.output_size)), "grad_h_n": None}
    gradients["grad_c_n"] = rng.standard_normal(layer.state_shapes(3)[1])
    clean = run_ours(layer, x, None, lengths, gradients)
    for sample, length in enumerate(lengths):
        x[length:, sample] = np.nan
        gradients["gy"][length:, sample] = np.nan
    spoilt = run_ours(layer, x, None, lengths, gradients)
    for name, want in clean.items():
        np.testing.assert_array_equal(spoilt[name], want, err_msg=name)


def next_state(twin, x, state, width):
    """Return torch's (h, c) after one step from `state`, both flat."""
    h, c = state[:width], state[width:]
    _, (h, c) = twin(x[None, None], (h[None, None], c[None, None]))
    return torch.cat([h[0, 0], c[0, 0]])


@pytest.mark.parametrize("proj_size", [0, 2])
def test_hidden_jacobians(proj_size):
    """Of (h, c), on the pattern with two diagonal blocks; with a projection dense."""
    rng = np.random.default_rng(2)
    layer = nn.LSTM(2, 3, proj_size=proj_size, dtype=np.float64, rng=0)
    x, hx = rng.standard_normal((4, 2, 2)), tuple(rng.standard_normal(shape) for shape in layer.state_shapes(2))
    _, saved = layer.forward(x, hx)
    elements = layer.hidden_jacobians_t(saved)
    width, tape, twin = layer.output_size, saved.tapes[0], twin_of(layer)
    for step, element in enumerate(elements):
        assert element.pattern == (hidden_pattern(5) if proj_size else lstm_pattern(3))
        for sample in range(2):
            state = torch.from_numpy(np.concatenate([array[step, sample] for array in tape.states]))
            at = torch.from_numpy(x[step, sample])
            want = torch.autograd.functional.jacobian(lambda s, at=at: next_state(twin, at, s, width), state)
            np.testing.assert_allclose(element.to_dense(sample), want.numpy().T, **CLOSE)


@pytest.mark.parametrize("proj_size", [0, 2])
@pytest.mark.parametrize("options", [{"num_layers": 2, "bidirectional": True}, {"batch_first": True}])
def test_jacobian_of_the_whole_layer(options, proj_size):
    rng = np.random.default_rng(5)
    layer = nn.LSTM(2, 3, proj_size=proj_size, dtype=np.float64, rng=0, **options)
    x = rng.standard_normal((3, 4, 2) if layer.batch_first else (4, 3, 2))
    y, saved = layer.forward(x, None, [4, 2, 1])
    jacobian, gy = layer.jacobian_t(saved), rng.standard_normal(y.shape)
    gx = layer.input_grad(gy, saved)
    for sample in range(3):
        at = (sample,) if layer.batch_first else (slice(None), sample)
        np.testing.assert_allclose(jacobian.to_dense(sample) @ gy[at].ravel(), gx[at].ravel(), **CLOSE)


@given(data=st.data())
@settings(max_examples=20)
def test_cell_against_torch(data):
    rng = np.random.default_rng(data.draw(seeds))
    features, hidden, batch = (data.draw(sizes(1, 6)) for _ in range(3))
    cell = nn.LSTMCell(features, hidden, data.draw(st.booleans()), dtype=np.float64, rng=rng)
    twin = torch.nn.LSTMCell(features, hidden, "bias_ih" in cell.params, dtype=torch.float64)
    twin.load_state_dict({name: torch.from_numpy(array) for name, array in cell.state_dict().items()})
    x, h, c, gh, gc = (rng.standard_normal((batch, n)) for n in (features, *[hidden] * 4))
    tensors = tx, th, tc = [torch.tensor(a, requires_grad=True) for a in (x, h, c)]
    torch.autograd.backward(wanted := twin(tx, (th, tc)), [torch.from_numpy(g) for g in (gh, gc)])
    for got, want in zip(cell(x, (h, c)), wanted, strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), **CLOSE)
    _, back = cell.vjp(x, hx=(h, c))
    g = back(gh, grad_c=gc)
    for got, tensor in zip((g.input, g.hidden, g.cell), tensors, strict=True):
        np.testing.assert_allclose(got, tensor.grad.numpy(), **CLOSE)
    for name, parameter in twin.named_parameters():
        np.testing.assert_allclose(g.weights[name], parameter.grad.numpy(), err_msg=name, **CLOSE)
    for got, want in zip(cell(x), twin(tx), strict=True):  # no state: zeros
        np.testing.assert_allclose(got, want.detach().numpy(), **CLOSE)


def test_the_chunked_scan_is_chosen_and_said():
    layer = nn.LSTM(1, 4, workers=64, rng=0)
    assert "bp" in layer.explain(np.ones((20, 2, 1), np.float32))
    assert layer.forward(np.ones((3000, 1, 1), np.float32))[1].backward_choice.algorithm == "chunked"


X = np.ones((4, 2, 3), np.float32)
STATE = np.ones((1, 2, 5), np.float32)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (OptionError, r"pair of arrays \(h0, c0\)", lambda m: m.forward(X, STATE)),
        (OptionError, r"pair of arrays \(h0, c0\)", lambda m: m.forward(X, (STATE, STATE, STATE))),
        (ShapeError, "h0 has", lambda m: m.forward(X, (STATE[:, :1], STATE))),
        (ShapeError, "c0 has", lambda m: m.forward(X, (STATE, STATE[0]))),
        (DTypeError, "c0 has", lambda m: m.forward(X, (STATE, STATE.astype(np.float64)))),
        (OptionError, "No gradient was given", lambda m: m.gradients(None, m.forward(X)[1])),
        (ShapeError, "grad_c_n has", lambda m: m.gradients(None, m.forward(X)[1], None, STATE[0])),
        (MemoryLimitError, "memory", lambda m: m.jacobian_t(m.forward(X)[1], 100)),
        (OptionError, "proj_size", lambda m: nn.LSTM(3, 5, proj_size=5)),
        (OptionError, "proj_size", lambda m: nn.LSTM(3, 5, proj_size=-1)),
        (OptionError, "gy or grad_c", lambda m: (c := nn.LSTMCell(3, 5)).gradients(None, c.forward(X[0])[1])),
    ],
)
def test_bad_input_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        call(nn.LSTM(3, 5, rng=0))


def test_memory_limit_counts_what_is_stored():
    """The blocks that are diagonal take no more than their diagonals."""
    for backward in ("blelloch", "linear"):
        layer = nn.LSTM(3, 5, backward=backward, memory_limit=4 * 4 * 2 * 60 - 1, rng=0)
        y, saved = layer.forward(X)
        with pytest.raises(MemoryLimitError, match="store no Jacobian"):
            layer.weight_grad(y, saved)
