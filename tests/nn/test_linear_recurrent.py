"""MinGRU, MinLSTM and LRU against their papers' equations in PyTorch, step by step in float64."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
import torch_twins
from sparsebp import nn
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from strategies import seeds, sizes
from thread_counts import assert_same_for_any_number_of_threads

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
F8 = {"dtype": np.float64}
GATED = {"MinGRU": nn.MinGRU, "MinLSTM": nn.MinLSTM}


# ---- the references ------------------------------------------------------------------------------------------------


def gated_run(kind, nonlinearity, x, h, w, b):
    """Return the states of one sample's run, x (T, I) and h (H,): minGRU-pytorch's sequential form, and minLSTM's."""
    states = []
    for x_t in x:
        *gates, v = torch.chunk(w @ x_t + (0 if b is None else b), 2 if kind == "MinGRU" else 3)
        c = v if nonlinearity == "identity" else torch.where(v >= 0, v + 0.5, v.sigmoid())
        if kind == "MinGRU":
            h = torch.lerp(h, c, gates[0].sigmoid())
        else:
            i, f = gates[0].sigmoid(), gates[1].sigmoid()
            h = f / (f + i) * h + i / (f + i) * c
        states.append(h)
    return torch.stack(states)


def gated(layer, params, x, h0, lengths):
    """Return y and h_n of a stack, x (T, B, I)."""
    last = []
    for number in range(layer.num_layers):
        outputs = []
        for direction in range(layer.directions):
            name = f"_l{number}" + "_reverse" * direction
            samples = []
            for s, n in enumerate(lengths):
                given = x[:n, s].flip(0) if direction else x[:n, s]
                weights = params["weight_ih" + name], params.get("bias_ih" + name)
                h = gated_run(type(layer).__name__, layer.nonlinearity, given, h0[len(last), s], *weights)
                samples.append(h)
            last.append(torch.stack([h[-1] for h in samples]))
            samples = [h.flip(0) if direction else h for h in samples]
            pad = torch.nn.functional.pad
            outputs.append(torch.stack([pad(h, (0, 0, 0, len(x) - len(h))) for h in samples], 1))
        x = torch.cat(outputs, 2)
    return x, torch.stack(last)


def lru(layer, params, x, h0, lengths):
    """Return y and h_n, x (T, B, I): the equations of Orvieto et al., appendix A."""
    p = params
    lam = torch.exp(torch.complex(-p["nu_log"].exp(), p["theta_log"].exp()))
    b = torch.complex(p["B_re"], p["B_im"]) * p["gamma_log"].exp()[:, None]
    c = torch.complex(p["C_re"], p["C_im"])
    h, states = h0[0], []
    for x_t in x:
        h = lam * h + x_t.to(b.dtype) @ b.T
        states.append(h)
    h = torch.stack(states)
    valid = torch.arange(len(x))[:, None, None] < torch.tensor(lengths)[:, None]
    y = torch.where(valid, (h @ c.T).real + p["D"] * x, 0.0)
    return y, torch.stack([h[n - 1, s] if n else h0[0, s] for s, n in enumerate(lengths)])[None]


def run_torch(layer, x, h0, lengths, gy, grad_h_n):
    """Return by autograd y, h_n and the gradients by name."""
    steps, batch = x.shape[:2][:: -1 if layer.batch_first else 1]
    params = {name: torch.tensor(array, requires_grad=True) for name, array in layer.params.items()}
    tx, th = torch.tensor(x, requires_grad=True), torch.tensor(h0, requires_grad=True)
    given = tx.transpose(0, 1) if layer.batch_first else tx
    reference = lru if isinstance(layer, nn.LRU) else gated
    y, h_n = reference(layer, params, given, th, [steps] * batch if lengths is None else [int(n) for n in lengths])
    y = y.transpose(0, 1) if layer.batch_first else y
    outputs = zip((y, h_n), (gy, grad_h_n), strict=True)
    sum((torch.tensor(g).conj() * out).real.sum() for out, g in outputs if g is not None).backward()
    found = {"y": y.detach(), "h_n": h_n.detach(), "x": tx.grad, "h0": th.grad}
    found |= {name: param.grad for name, param in params.items()}
    return {name: np.zeros(()) if value is None else value.resolve_conj().numpy() for name, value in found.items()}


def run_ours(layer, x, h0, lengths, gy, grad_h_n):
    y, saved = layer.forward(x, h0, lengths)
    g = layer.gradients(gy, saved, grad_h_n)
    assert list(g.weights) == list(layer.params)
    return {"y": y, "h_n": saved.h_n, "x": g.input, "h0": g.h0, **g.weights}


def random_case(layer, steps, batch, rng, with_lengths=False, there=(0, 1)):
    """Return arrays for `run_ours`; `there` says which of the two gradients arrive."""
    lead = (batch, steps) if layer.batch_first else (steps, batch)
    runs, width, real = 1, layer.input_size, next(iter(layer.params.values())).dtype
    if not isinstance(layer, nn.LRU):
        runs, width = layer.num_layers * layer.directions, layer.directions * layer.hidden_size

    def states():
        parts = rng.standard_normal((2, runs, batch, layer.hidden_size)).astype(real)
        return parts[0] + 1j * parts[1] if isinstance(layer, nn.LRU) else parts[0]

    gradients = rng.standard_normal((*lead, width)).astype(real), states()
    lengths = rng.integers(type(layer) is not nn.LRU, steps + 1, batch) if with_lengths else None
    return (rng.standard_normal((*lead, layer.input_size)).astype(real), states(), lengths,
            *(g if number in there else None for number, g in enumerate(gradients)))  # fmt: skip


@st.composite
def layers(draw):
    rng, features, hidden = np.random.default_rng(draw(seeds)), draw(sizes(1, 9)), draw(sizes(1, 7))
    options = {"batch_first": draw(st.booleans()), "rng": rng, **F8}
    if draw(st.integers(0, 2)) == 0:
        return nn.LRU(features, hidden, **options)
    return draw(st.sampled_from([nn.MinGRU, nn.MinLSTM]))(
        features, hidden, draw(st.integers(1, 3)), draw(st.booleans()), bidirectional=draw(st.booleans()),
        nonlinearity=draw(st.sampled_from(["identity", "positive"])),
        backward=draw(st.sampled_from(["auto", "bp", "chunked", "linear", "blelloch", "hybrid"])), **options,
    )  # fmt: skip


@given(
    layer=layers(), steps=sizes(1, 13), batch=sizes(1, 5), with_lengths=st.booleans(),
    there=st.sets(st.integers(0, 1), min_size=1), seed=seeds,
)  # fmt: skip
@settings(max_examples=150)
def test_against_torch(layer, steps, batch, with_lengths, there, seed):
    case = random_case(layer, steps, batch, np.random.default_rng(seed), with_lengths, there)
    for array in case:
        if array is not None:
            array.flags.writeable = False
    found = run_ours(layer, *case)
    for name, want in run_torch(layer, *case).items():
        np.testing.assert_allclose(found[name], want, err_msg=name, **CLOSE)
        assert found[name].dtype.char in "dD" and (found[name].flags.c_contiguous or name == "y")


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize(("steps", "batch", "resident"), [(40, 20, 1 << 19), (300, 1, 1 << 19), (11, 3, 8)])
def test_blocks_of_steps(kind, steps, batch, resident, monkeypatch):
    """Several groups of samples and blocks of steps, and products over all at once; weights may be first asked for."""
    monkeypatch.setattr(nn.recurrent.gated, "RESIDENT", resident)
    for bias, there in ((True, (0, 1)), (False, (0,)), (True, (1,))):
        layer = GATED[kind](3, 5, 2, bias, rng=0, **F8)
        case = random_case(layer, steps, batch, np.random.default_rng(0), True, there)
        y, saved = layer.forward(*case[:3])
        g = layer.gradients(case[3], saved, case[4])
        weights = g.weights
        found = {"y": y, "x": g.input, "h0": g.h0, **weights}
        want = run_torch(layer, *case)
        for name, array in found.items():
            np.testing.assert_allclose(array, want[name], err_msg=name, **CLOSE)
        again = layer.gradients(case[3], saved, case[4])
        np.testing.assert_array_equal(again.input, found["x"])
        np.testing.assert_array_equal(again.input_grad(), found["x"])  # the first one is the caller's
        for name, array in again.weights.items():
            np.testing.assert_array_equal(array, weights[name], err_msg=name)


@pytest.mark.parametrize("resident", [1 << 19, 8])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", GATED)
def test_a_gradient_that_all_steps_share(kind, bidirectional, resident, monkeypatch):
    """The one of a mean is a view without memory of its own."""
    monkeypatch.setattr(nn.recurrent.gated, "RESIDENT", resident)
    layer, rng = GATED[kind](3, 5, 2, bidirectional=bidirectional, rng=0, **F8), np.random.default_rng(0)
    y, saved = layer.forward(rng.standard_normal((40, 9, 3)))
    mean = nn.MeanOverSteps()
    shared = mean.input_grad(rng.standard_normal((9, y.shape[2])), mean.forward(y)[1])
    assert shared.strides[0] == 0
    found, want = (layer.gradients(gy, saved) for gy in (shared, shared.copy()))
    np.testing.assert_array_equal(found.input, want.input)
    for name, array in want.weights.items():
        np.testing.assert_array_equal(found.weights[name], array, err_msg=name)


EACH = [
    *(lambda kind=kind, c=c, **o: kind(3, 5, nonlinearity=c, **o) for kind in GATED.values()
      for c in ("identity", "positive")),
    lambda **o: nn.LRU(3, 5, r_min=0.5, r_max=0.99, **o),
]  # fmt: skip


@pytest.mark.parametrize("make", EACH)
def test_float32_stays_float32_over_many_steps(make):
    layer, wide = make(rng=0), make(rng=0, **F8)
    case = random_case(layer, 3000, 2, np.random.default_rng(0), with_lengths=True)
    found = run_ours(layer, *case)
    double = {np.dtype(np.float32): np.float64, np.dtype(np.complex64): np.complex128}
    case = [array if array is None or array.dtype.kind == "i" else array.astype(double[array.dtype]) for array in case]
    for name, want in run_ours(wide, *case).items():
        assert found[name].dtype.char in "fF"
        np.testing.assert_allclose(found[name], want, rtol=1e-3, atol=1e-4 * np.abs(want).max(), err_msg=name)


def test_in_log_space():
    """Feng et al., algorithm 6: log h = a* + logcumsumexp(log b - a*) for the cumulative sum a* of log(1 - z)."""
    layer, functional = nn.MinGRU(3, 4, nonlinearity="positive", rng=0, **F8), torch.nn.functional
    x, h0 = np.random.default_rng(0).standard_normal((9, 2, 3)), np.random.default_rng(1).random((1, 2, 4))
    k, v = torch.chunk(torch.tensor(x @ layer.params["weight_ih_l0"].T + layer.params["bias_ih_l0"]), 2, -1)
    log_c = torch.where(v >= 0, (functional.relu(v) + 0.5).log(), -functional.softplus(-v))
    log_b = torch.cat([torch.tensor(h0).log(), log_c - functional.softplus(-k)])
    a_star = functional.pad(torch.cumsum(-functional.softplus(k), 0), (0, 0, 0, 0, 1, 0))
    want = (a_star + torch.logcumsumexp(log_b - a_star, 0)).exp()[1:]
    np.testing.assert_allclose(layer.forward(x, h0)[0], want.numpy(), **CLOSE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", GATED)
def test_gates_that_are_shut_or_open(kind, dtype):
    """At ±1000 a sigmoid is 0 or 1; where both gates of a MinLSTM underflow, their ratio decides."""
    layer = GATED[kind](1, 4, dtype=dtype, rng=0)
    layer.params["weight_ih_l0"][...] = 0
    bias = layer.params["bias_ih_l0"].reshape(-1, 4)
    bias[-1] = 7
    bias[0] = (-1000, 1000, -1000, 1000)
    want = np.array([3.0, 7.0, 3.0, 7.0])
    if kind == "MinLSTM":
        bias[1] = (1000, -1000, -1000 + np.log(3), 1000)
        want[2:] = 4, 5  # i' = 1/4, and 1/2
    x = np.zeros((1, 1, 1), dtype)
    y, saved = layer.forward(x, np.full((1, 1, 4), 3, dtype))
    np.testing.assert_allclose(y[0, 0], want, rtol=1e-4)
    grads = layer.gradients(np.ones_like(y), saved)
    assert all(np.isfinite(grad).all() for grad in (grads.input, grads.h0, *grads.weights.values()))
    np.testing.assert_allclose(grads.h0[0, 0], (7 - want) / 4, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", EACH)
def test_what_is_in_the_padding_has_no_influence(make):
    rng, layer = np.random.default_rng(0), make(rng=0, **F8)
    x, h0, _, gy, grad_h_n = random_case(layer, 20, 3, rng)
    results = []
    for padding in (0.0, np.nan):
        for b, length in enumerate([3, 20, 1]):
            x[length:, b], gy[length:, b] = padding, padding
        results.append(run_ours(layer, x.copy(), h0, [3, 20, 1], gy, grad_h_n))
    for name, zeros in results[0].items():
        np.testing.assert_array_equal(zeros, results[1][name], err_msg=name)


@pytest.mark.parametrize("make", EACH)
def test_one_sample_strides_threads_and_a_state_dict(make):
    rng, layer = np.random.default_rng(0), make(rng=0, **F8)
    x, h0, _, gy, grad_h_n = random_case(layer, 40, 3, rng)
    whole = run_ours(layer, x, h0, None, gy, grad_h_n)
    single = run_ours(layer, x[:, 1], h0[:, 1], None, gy[:, 1], grad_h_n[:, 1])
    for name in ("y", "h_n", "x", "h0"):
        assert single[name].shape == whole[name][:, 1].shape
        np.testing.assert_allclose(single[name], whole[name][:, 1], **CLOSE)
    views = (np.asfortranarray(x), np.asfortranarray(h0), None, gy[::-1][::-1], np.asfortranarray(grad_h_n))
    for name, array in run_ours(layer, *views).items():
        np.testing.assert_array_equal(array, whole[name], err_msg=name)
    assert_same_for_any_number_of_threads(lambda: run_ours(layer, x, h0, None, gy, grad_h_n).values())
    other = make(rng=1, **F8)
    other.load_state_dict(copy.deepcopy(layer).state_dict())
    np.testing.assert_array_equal(other(x, h0), whole["y"])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layer))(x, h0), whole["y"])


@pytest.mark.parametrize("lengths", [None, [5, 2]])
@pytest.mark.parametrize("kind", GATED)
def test_jacobians(kind, lengths):
    layer = GATED[kind](2, 3, 2, bidirectional=True, rng=0, **F8)
    x, h0, *_ = random_case(layer, 5, 2, np.random.default_rng(0))
    _, saved = layer.forward(x, h0, lengths)
    params, given = {name: torch.tensor(array) for name, array in layer.params.items()}, torch.tensor(x)
    jacobian = layer.jacobian_t(saved)
    for s in range(2):

        def outputs(sample, s=s):
            length = 5 if lengths is None else lengths[s]
            return gated(layer, params, sample[:, None], torch.tensor(h0[:, s : s + 1]), [length])[0]

        np.testing.assert_allclose(jacobian.to_dense(s), torch_twins.jacobian_t(outputs, x[:, s]), **CLOSE)
    if lengths is not None:
        return
    elements = layer.hidden_jacobians_t(saved)
    states, weights = saved.runs[0].states[0], (params["weight_ih_l0"], params["bias_ih_l0"])
    for t, element in enumerate(elements):
        assert element.pattern.kind == "diagonal"

        def next_state(h, t=t):
            return gated_run(kind, "identity", given[t : t + 1, 1], h, *weights)[0]

        np.testing.assert_allclose(element.to_dense(1), torch_twins.jacobian_t(next_state, states[t, 1]), **CLOSE)


@pytest.mark.parametrize("lengths", [None, [5, 2]])
def test_jacobian_of_an_lru(lengths):
    layer = nn.LRU(2, 3, rng=0, **F8)
    x = np.random.default_rng(0).standard_normal((5, 2, 2))
    params, none = {name: torch.tensor(array) for name, array in layer.params.items()}, torch.zeros(1, 1, 3)
    jacobian = layer.jacobian_t(layer.forward(x, lengths=lengths)[1])
    assert jacobian.batch == (None if lengths is None else 2)  # it is linear
    for s, length in enumerate(lengths or [5, 5]):

        def outputs(sample, length=length):
            return lru(layer, params, sample[:, None], none.to(torch.complex128), [length])[0]

        np.testing.assert_allclose(jacobian.to_dense(s), torch_twins.jacobian_t(outputs, x[:, s]), **CLOSE)
    with pytest.raises(sb.core.errors.MemoryLimitError, match="input_grad"):
        layer.jacobian_t(layer.forward(x)[1], memory_limit=10 * 10 * 8)  # of the values: indices take memory too


@pytest.mark.parametrize("kind", GATED)
def test_streams(kind):
    """More in test_inference.py."""
    layer = GATED[kind](3, 5, 2, rng=0)
    x, h0, *_ = random_case(layer, 4, 2, np.random.default_rng(0))
    stream = layer.stream(2, h0)
    y = stream.step(x[0])
    with pytest.raises(ValueError, match="read-only"):
        y[...] = 0
    twins = [copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))]
    for name in layer.params:
        layer.params[name] = layer.params[name] + 0.1
        for twin in twins:
            twin._layer.params[name] = layer.params[name].copy()
    expected = layer.forward(x[1:2], stream.h.copy())[0][0]
    for one in (stream, *twins):
        np.testing.assert_allclose(one.step(x[1]), expected, atol=1e-6)
    assert stream.c is None
    stream.reset()
    np.testing.assert_allclose(stream.step(x[2]), layer.forward(x[2:3])[0][0], atol=1e-6)
    for make in (lambda: GATED[kind](3, 5, bidirectional=True).stream(), lambda: layer.stream(0)):
        with pytest.raises(OptionError):
            make()
    with pytest.raises(ShapeError):
        stream.step(x[0, 0])
    layer.to(dtype=np.float64)
    with pytest.raises(OptionError, match="converted"):
        stream.step(x[0])


# ---- inside models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GATED)
def test_in_a_classifier_and_in_chains(kind):
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((12, 6, 3)), rng.integers(0, 4, 6)
    classifier = nn.SequenceClassifier(GATED[kind](3, 5, 2, rng=0, **F8), nn.Linear(5, 4, rng=1, **F8))
    report = sb.verify.check_gradient(classifier, nn.CrossEntropyLoss(), x, target)
    assert report.ok, str(report)
    blocks = (nn.Sequential(nn.Linear(3, 3, rng=n, **F8), layer)
              for n, layer in enumerate((GATED[kind](3, 3, rng=0, **F8), nn.LRU(3, 7, rng=0, **F8))))  # fmt: skip
    chain = nn.Sequential(*map(nn.Residual, blocks), nn.RMSNorm(3, **F8))
    report = sb.verify.check_gradient(chain, nn.MSELoss(), x, rng.standard_normal((12, 6, 3)))
    assert report.ok, str(report)
    pooled = nn.Sequential(GATED[kind](3, 5, rng=0, **F8), nn.LRU(5, 4, rng=0, **F8), nn.MeanOverSteps())
    lengths = np.array([12, 1, 5, 7, 12, 3])
    report = sb.verify.check_gradient(pooled, nn.MSELoss(), x, rng.standard_normal((6, 5)), lengths=lengths)
    assert report.ok, str(report)
    y = pooled(x, lengths=lengths)
    np.testing.assert_allclose(y[3], pooled(x[:7, 3:4])[0], **CLOSE)


def test_lyapunov_exponents():
    """Their sum is the mean of the log determinant, of a diagonal chain that of Σ log(1 - z)."""
    layer = nn.MinGRU(2, 3, rng=0, **F8)
    x = np.random.default_rng(0).standard_normal((50, 1, 2))
    stacked = sb.hidden_jacobians(layer, x)
    assert stacked.shape == (50, 1, 3, 3) and (stacked[..., ~np.eye(3, dtype=bool)] == 0).all()
    found = sb.lyapunov(layer, x, warm_up=0).exponents
    want = np.log(stacked.diagonal(axis1=2, axis2=3)).mean(axis=0).sum(axis=-1)
    np.testing.assert_allclose(found.sum(axis=-1), want, rtol=1e-9)


# ---- initial values and arguments ----------------------------------------------------------------------------------


def test_initial_values_are_the_papers():
    layer = nn.MinGRU(4, 300, 2, rng=0)
    for number, features in enumerate((4, 300)):
        for name in ("weight_ih", "bias_ih"):
            values = layer.params[f"{name}_l{number}"]
            bound = 1 / np.sqrt(features)  # torch.nn.Linear's
            assert 0.97 * bound < np.abs(values).max() <= bound
            np.testing.assert_allclose(values.std(), bound / np.sqrt(3), rtol=0.05)
    layer = nn.LRU(7, 2000, r_min=0.6, r_max=0.9, max_phase=1.5, rng=0, **F8)
    p = layer.params
    radius = np.exp(-np.exp(p["nu_log"]))
    assert 0.6 <= radius.min() < 0.61 and 0.899 < radius.max() <= 0.9
    np.testing.assert_allclose(np.mean(radius**2), (0.36 + 0.81) / 2, rtol=0.02)  # uniform in area
    assert 1.49 < np.exp(p["theta_log"]).max() < 1.5
    np.testing.assert_allclose(np.exp(p["gamma_log"]), np.sqrt(1 - radius**2), rtol=1e-12)
    for name, deviation in (("B_re", 1 / np.sqrt(14)), ("C_im", 1 / np.sqrt(2000)), ("B_im", 1 / np.sqrt(14))):
        np.testing.assert_allclose(p[name].std(), deviation, rtol=0.03)
    for kind in (*GATED.values(), nn.LRU):  # the same seed, the same numbers
        narrow, wide = kind(3, 5, rng=3), kind(3, 5, rng=3, **F8)
        for name, array in wide.params.items():
            np.testing.assert_array_equal(array.astype(np.float32), narrow.params[name], err_msg=name)


X, STATE = np.ones((4, 2, 3), np.float32), np.ones((1, 2, 5), np.complex64)


@pytest.mark.parametrize(("error", "text", "call"), [
    (OptionError, "Unknown nonlinearity", lambda: nn.MinGRU(3, 5, nonlinearity="tanh")),
    (OptionError, "hidden_size", lambda: nn.MinLSTM(3, 0)),
    (OptionError, "input_size", lambda: nn.LRU(0, 3)),
    (OptionError, "ring", lambda: nn.LRU(3, 5, r_min=0.5, r_max=0.5)),
    (OptionError, "ring", lambda: nn.LRU(3, 5, max_phase=0)),
    (OptionError, "r_max", lambda: nn.LRU(3, 5, r_max=1.1)),
    (DTypeError, "dtype", lambda: nn.LRU(3, 5, dtype=np.complex64)),
    (ShapeError, "x", lambda: nn.LRU(2, 5).forward(X)),
    (ShapeError, "x is empty", lambda: nn.LRU(3, 5).forward(X[:0])),
    (ShapeError, "x is empty", lambda: nn.MinGRU(3, 5).forward(X[:, :0])),
    (DTypeError, "h0", lambda: nn.LRU(3, 5).forward(X, STATE.real.copy())),
    (ShapeError, "h0", lambda: nn.LRU(3, 5).forward(X, STATE[:, :1])),
    (DTypeError, "x", lambda: nn.MinGRU(3, 5).forward(X.astype(int))),
    (OptionError, "lengths", lambda: nn.LRU(3, 5).forward(X, lengths=[-1, 4])),
    (OptionError, "No gradient", lambda: nn.LRU(3, 5).gradients(None, nn.LRU(3, 5).forward(X)[1])),
    (ShapeError, "gy", lambda: nn.LRU(3, 5).gradients(X[:1], nn.LRU(3, 5).forward(X)[1])),
    (DTypeError, "grad_h_n", lambda: nn.LRU(3, 5).gradients(X, nn.LRU(3, 5).forward(X)[1], STATE.real.copy())),
    *((OptionError, "memory_limit", lambda make=make: make(3, 5).jacobian_t(make(3, 5).forward(X)[1], "1"))
      for make in (nn.LRU, nn.MinGRU, nn.GRU)),
])  # fmt: skip
def test_refusals(error, text, call):
    with pytest.raises(error, match=text):
        call()
