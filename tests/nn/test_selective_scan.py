"""SelectiveScan against mamba_ssm's `selective_scan_ref` in PyTorch, step by step in float64."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import sparsebp as sb
import torch_twins
from sparsebp import nn
from sparsebp.core.errors import OptionError, ShapeError
from strategies import seeds, sizes
from thread_counts import assert_same_for_any_number_of_threads

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
F8 = {"dtype": np.float64}


def reference(layer, p, x, h=None):
    """Return y (T, B, E) and the last state: mamba_ssm's projections, and selective_scan_ref's loop."""
    r, b, c = torch.split(x @ p["x_proj.weight"].T, [layer.dt_rank, layer.d_state, layer.d_state], -1)
    dt = functional.softplus(r @ p["dt_proj.weight"].T + p["dt_proj.bias"], threshold=1e9)
    h, ys = x.new_zeros(*x.shape[1:], layer.d_state) if h is None else h, []
    for t in range(len(x)):
        h = torch.exp(dt[t, ..., None] * -p["A_log"].exp()) * h + (dt[t] * x[t])[..., None] * b[t, :, None]
        ys.append((h * c[t, :, None]).sum(-1) + p["D"] * x[t])
    return torch.stack(ys) if ys else x, h


def run_torch(layer, x, gy, lengths, h0, grad_h_n):
    """Return y, h_n and the gradients by name; each sample runs alone."""
    params = {name: torch.tensor(array, requires_grad=True) for name, array in layer.params.items()}
    tx, start = torch.tensor(x, requires_grad=True), torch.tensor(h0, requires_grad=True)
    given = tx.transpose(0, 1) if layer.batch_first else tx
    ys, ends = zip(*(
        reference(layer, params, given[:n, s : s + 1], start[s : s + 1])
        for s, n in enumerate([len(given)] * given.shape[1] if lengths is None else lengths)
    ), strict=True)  # fmt: skip
    y = torch.cat([functional.pad(y, (0, 0, 0, 0, 0, len(given) - len(y))) for y in ys], 1)
    y, h_n = y.transpose(0, 1) if layer.batch_first else y, torch.cat(ends)
    of_all = 0 * (tx.sum() + sum(param.sum() for param in params.values()))  # also where all sequences are empty
    ((y * torch.tensor(gy)).sum() + (h_n * torch.tensor(grad_h_n)).sum() + of_all).backward()
    return {"y": y, "h_n": h_n, "x": tx.grad, "h0": start.grad} | {name: param.grad for name, param in params.items()}


def run_ours(layer, x, gy, lengths=None, h0=None, grad_h_n=None):
    y, saved = layer.forward(x, h0, lengths)
    g = layer.gradients(gy, saved, grad_h_n)
    assert list(g.weights) == list(layer.params)
    return {"y": y, "h_n": saved.h_n, "x": g.input, "h0": g.h0, **g.weights}


def case_of(layer, steps, batch, rng):
    shape = (batch, steps) if layer.batch_first else (steps, batch)
    return tuple(rng.standard_normal((*shape, layer.d_inner)).astype(layer.dtype) for _ in range(2))


@given(
    features=sizes(1, 40), states=sizes(1, 9), rank=st.sampled_from(["auto", 1, 5]), steps=sizes(1, 70),
    batch=sizes(1, 4), batch_first=st.booleans(), with_lengths=st.booleans(), with_state=st.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=60)
def test_against_torch(features, states, rank, steps, batch, batch_first, with_lengths, with_state, seed):
    rng = np.random.default_rng(seed)
    layer = nn.SelectiveScan(features, states, rank, batch_first, dt_max=1.0, rng=rng, **F8)
    x, gy = case_of(layer, steps, batch, rng)
    lengths = rng.integers(0, steps + 1, batch) if with_lengths else None
    h0, grad_h_n = rng.standard_normal((2, batch, features, states)) * with_state
    for array in (x, gy, h0, grad_h_n):
        array.flags.writeable = False
    found = run_ours(layer, x, gy, lengths, *((h0, grad_h_n) if with_state else ()))
    for name, want in run_torch(layer, x, gy, lengths, h0, grad_h_n).items():
        np.testing.assert_allclose(found[name], want.detach().numpy(), err_msg=name, **CLOSE)
        assert found[name].dtype == np.float64 and found[name].flags.c_contiguous, name


@pytest.mark.parametrize("lengths", [None, [6, 2]])
def test_jacobian(lengths):
    layer = nn.SelectiveScan(5, 3, 2, dt_max=1.0, rng=0, **F8)
    x, _ = case_of(layer, 6, 2, np.random.default_rng(0))
    params = {name: torch.tensor(array) for name, array in layer.params.items()}
    h0 = np.random.default_rng(1).standard_normal((2, 5, 3))
    jacobian = layer.jacobian_t(layer.forward(x, h0, lengths)[1])
    assert jacobian.pattern.nnz == 21 * 25  # steps s ≤ t
    for s, length in enumerate(lengths or [6, 6]):

        def outputs(sample, s=s, length=length):
            y, _ = reference(layer, params, sample[:length, None], torch.tensor(h0[s : s + 1]))
            return functional.pad(y, (0, 0, 0, 0, 0, 6 - length))

        np.testing.assert_allclose(jacobian.to_dense(s), torch_twins.jacobian_t(outputs, x[:, s]), **CLOSE)


def test_float32_stays_float32_over_many_steps():
    layer, wide = nn.SelectiveScan(5, 4, rng=0), nn.SelectiveScan(5, 4, rng=0, **F8)
    x, gy = case_of(layer, 2000, 2, np.random.default_rng(0))
    found = run_ours(layer, x, gy, [2000, 1300])
    for name, want in run_ours(wide, x.astype(np.float64), gy.astype(np.float64), [2000, 1300]).items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], want, rtol=1e-3, atol=1e-4 * np.abs(want).max(), err_msg=name)


def test_step_sizes_that_are_tiny_or_large_are_softplus():
    layer = nn.SelectiveScan(1, 1, rng=0)
    for bias in (-80.0, -17.0, -9.0, 0.0, 30.0):
        layer.params["dt_proj.bias"][:] = bias
        dt = layer.forward(np.zeros((1, 1, 1), np.float32))[1].dt.item()
        np.testing.assert_allclose(dt, np.logaddexp(0, bias), rtol=1e-6)


def test_padding_one_sample_threads_and_a_state_dict():
    layer, rng = nn.SelectiveScan(7, 3, rng=0, **F8), np.random.default_rng(0)
    x, gy = case_of(layer, 40, 3, rng)
    whole, lengths = run_ours(layer, x, gy), [3, 40, 1]
    single = run_ours(layer, x[:, 1], gy[:, 1])
    for name in ("y", "x"):
        np.testing.assert_allclose(single[name], whole[name][:, 1], **CLOSE)
    for name in ("h_n", "h0"):
        np.testing.assert_allclose(single[name], whole[name][1], **CLOSE)
    halves = [layer.forward(x[:17, 1])]
    halves.append(layer.forward(x[17:, 1], halves[0][1].h_n))
    np.testing.assert_allclose(np.concatenate([y for y, _ in halves]), single["y"], **CLOSE)
    for name, array in run_ours(layer, np.asfortranarray(x), gy[::-1][::-1]).items():
        np.testing.assert_array_equal(array, whole[name], err_msg=name)
    assert_same_for_any_number_of_threads(lambda: run_ours(layer, x, gy).values())
    other = nn.SelectiveScan(7, 3, rng=1, **F8)
    other.load_state_dict(copy.deepcopy(layer).state_dict())
    np.testing.assert_array_equal(other(x), whole["y"])
    results = []
    for padding in (0.0, np.nan):
        for b, length in enumerate(lengths):
            x[length:, b], gy[length:, b] = padding, padding
        results.append(run_ours(layer, x.copy(), gy, lengths))
    for name, zeros in results[0].items():
        np.testing.assert_array_equal(zeros, results[1][name], err_msg=name)


@pytest.mark.parametrize("make", [lambda **o: nn.SelectiveScan(5, 4, **o), lambda **o: nn.LRU(5, 4, **o)])
@pytest.mark.parametrize("batch", [None, 2])
def test_streams(make, batch):
    layer = make(rng=0, **F8)
    x = np.random.default_rng(0).standard_normal((9, 5) if batch is None else (9, batch, 5))
    expected, stream = layer(x), layer.stream(batch)
    for t, x_t in enumerate(x):
        np.testing.assert_allclose(stream.step(x_t), expected[t], **CLOSE)
        if t == 4:
            stream = pickle.loads(pickle.dumps(stream))
    copied = layer.stream(batch, stream.h)
    h_n = layer.forward(x)[1].h_n
    np.testing.assert_allclose(layer.stream(batch, h_n).h, stream.h, **CLOSE)  # laid out alike
    for name in layer.params:
        layer.params[name] = layer.params[name] + 0.1
    twin = pickle.loads(pickle.dumps(layer)).stream(batch, stream.h)
    np.testing.assert_array_equal(copied.step(x[0]), twin.step(x[0]))
    copied.reset()
    np.testing.assert_allclose(copied.step(x[2]), layer(x[2:3])[0], **CLOSE)
    with pytest.raises(ShapeError):
        copied.step(x[:, :4])
    layer.to(dtype=np.float32)
    with pytest.raises(OptionError, match="converted"):
        copied.step(x[0])


def test_in_a_chain_with_lengths():
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Linear(3, 6, rng=0, **F8), nn.SelectiveScan(6, 2, rng=0, **F8), nn.SiLU(), nn.MeanOverSteps(),
    )  # fmt: skip
    x = rng.standard_normal((12, 4, 3))
    report = sb.verify.check_gradient(
        model, nn.MSELoss(), x, rng.standard_normal((4, 6)), lengths=np.array([12, 1, 5, 7])
    )
    assert report.ok, str(report)


def test_initial_values_are_mambas():
    layer = nn.SelectiveScan(4000, 3, dt_min=0.01, dt_max=0.2, rng=0, **F8)
    dt = np.logaddexp(0, layer.params["dt_proj.bias"])
    assert layer.dt_rank == 250 and 0.01 <= dt.min() < 0.0105 and 0.195 < dt.max() <= 0.2
    np.testing.assert_allclose(np.exp(layer.params["A_log"]), np.tile([1, 2, 3], (4000, 1)))
    for name, rank in (("x_proj.weight", 4000), ("dt_proj.weight", 250)):
        values = np.abs(layer.params[name])
        assert 0.97 / np.sqrt(rank) < values.max() <= 1 / np.sqrt(rank)


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.SelectiveScan(3, dt_min=0.2, dt_max=0.1),
        lambda: nn.SelectiveScan(3, dt_rank=0),
        lambda: nn.SelectiveScan(3, dt_rank="automatic"),
        lambda: nn.SelectiveScan(3)(np.ones((0, 2, 3), np.float32)),
        lambda: nn.SelectiveScan(3)(np.ones((4, 2, 3), np.float32), lengths=[5, 4]),
        lambda: nn.SelectiveScan(3)(np.ones((4, 2, 3), np.float32), np.ones((1, 2, 3, 16), np.float32)),
        lambda: (layer := nn.SelectiveScan(3)).gradients(None, layer.forward(np.ones((4, 2, 3), np.float32))[1]),
    ],
)
def test_refusals(call):
    with pytest.raises((OptionError, ShapeError), match="Expected"):
        call()


@pytest.mark.parametrize("make", [nn.LRU, nn.MinGRU, nn.GRU, nn.SelectiveScan])
def test_initial_states_are_the_layers_own(make):
    """A caller may carry the state on in one array."""
    layer = make(4, 3, rng=0)
    x = np.random.default_rng(0).standard_normal((5, 2, 4)).astype(np.float32)
    h0 = np.ones_like(layer.forward(x)[1].h_n)
    y, saved = layer.forward(x, h0)
    expected = layer.gradients(y, saved).weights
    h0[...] = saved.h_n
    for name, grad in layer.gradients(y, saved).weights.items():
        np.testing.assert_array_equal(grad, expected[name])


@pytest.mark.parametrize(
    "layer", [
        nn.SelectiveScan(4, 2, rng=0), nn.LRU(4, 3, rng=0), nn.MinGRU(4, 3, rng=0),
        nn.GRU(4, 3, rng=0, num_layers=2, bidirectional=True),
    ],
)  # fmt: skip
def test_gradients_belong_to_the_caller(layer):
    x = np.random.default_rng(0).standard_normal((5, 2, 4)).astype(np.float32)
    y, saved = layer.forward(x)
    found = layer.gradients(np.ones_like(y), saved)

    def states():
        return found.others() if hasattr(found, "others") else ()

    first, others = found.weight_grad(), [array.copy() for array in states()]
    kept = {name: grad.copy() for name, grad in first.items()}
    for array in (*first.values(), *states()):
        array[...] = 7
    for name, grad in found.weight_grad().items():
        np.testing.assert_array_equal(grad, kept[name], err_msg=name)
    for array, wanted in zip(states(), others, strict=True):
        np.testing.assert_array_equal(array, wanted)
