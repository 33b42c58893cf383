"""Kernels of linear recurrences on every backend; `tests/scan/test_recurrence.py` has all forms of given factors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.kernels.checks import CANDIDATES
from sparsebp.kernels.device import rnn
from strategies import normal, reals, seeds, sizes, tolerance


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reverse", [False, True])
def test_equal_terms_are_a_geometric_series(backend, reverse, dtype):
    """With a = 1/2 and b = 1: h = 2 - 2⁻ᵗ, and the gradient at b of the sum of all h is the same from the other end."""
    steps, shape = 9, (9, 2, 35)
    a, b, h0 = (
        backend.array(np.full((1, 1, 1), 0.5, dtype)),
        backend.array(np.ones(shape, dtype)),
        backend.zeros((2, 35), dtype),
    )
    h, gb, ga, gh0 = (backend.empty(each, dtype) for each in (shape, shape, (1, 2, 35), (2, 35)))
    backend.kernels.linear_recurrence(a, b, h0, None, None, reverse, h)
    backend.kernels.linear_recurrence_grad(a, h, b, h0, None, None, reverse, ga, gb, gh0)
    series = 2 - 0.5 ** np.arange(steps)
    one, other = (series[::-1], series) if reverse else (series, series[::-1])
    np.testing.assert_array_equal(backend.numpy(h), np.broadcast_to(one[:, None, None], shape))
    np.testing.assert_array_equal(backend.numpy(gb), np.broadcast_to(other[:, None, None], shape))
    np.testing.assert_allclose(backend.numpy(ga), (series[:-1] * series[-2::-1]).sum(), rtol=1e-6)
    np.testing.assert_array_equal(backend.numpy(gh0), series[-1] / 2)


def test_factors_and_resets_that_do_not_fit_are_refused(backend):
    b, h0 = backend.zeros((5, 3, 7), np.float64), backend.zeros((3, 7), np.float64)
    for shape in ((4, 3, 7), (5, 2, 7), (5, 3, 2), (0, 3, 7)):
        with pytest.raises(ShapeError, match="a does not fit"):
            backend.kernels.linear_recurrence(backend.zeros(shape, np.float64), b, h0, None, None, False, b)
        with pytest.raises(ShapeError, match="reset does not fit"):
            backend.kernels.linear_recurrence(b, b, h0, None, backend.zeros(shape, np.bool_), False, b)


@given(
    steps=sizes(0, 40), batch=sizes(0, 5), hidden=sizes(0, 70), dtype=reals, nonlinearity=st.sampled_from(CANDIDATES),
    reverse=st.booleans(), with_lengths=st.booleans(), scale=st.sampled_from([1.0, 20.0, 400.0]),
    parts=st.sampled_from([2, 3]), seed=seeds,
)  # fmt: skip
def test_min_gru_and_its_gradients(
    backend, steps, batch, hidden, dtype, nonlinearity, reverse, with_lengths, scale, parts, seed
):  # fmt: skip
    """Against a loop in double precision and PyTorch's gradients, zeros among the inputs, gates shut and open.

    With three parts a minLSTM, both of whose gates may be too small for float32.
    """
    rng, shape = np.random.default_rng(seed), (steps, batch, hidden)
    x, gh, h0 = (
        normal(rng, (steps, batch, parts * hidden), dtype, scale),
        normal(rng, shape, dtype),
        normal(rng, shape[1:], dtype),
    )
    x[rng.random(x.shape) < 0.1] = 0
    lengths = rng.integers(0, steps + 1, batch) if with_lengths else np.full(batch, steps)
    wide_x, start = (torch.from_numpy(array.astype(np.float64)).requires_grad_() for array in (x, h0))
    *gates, v = (wide_x[..., k * hidden : (k + 1) * hidden] for k in range(parts))
    u = gates[0] if parts == 2 else torch.nn.functional.logsigmoid(gates[0]) - torch.nn.functional.logsigmoid(gates[1])
    z = torch.sigmoid(u)
    positive = torch.where(v >= 0, v + 0.5, torch.sigmoid(v))
    c = {"identity": v, "tanh": torch.tanh(v), "positive": positive}[nonlinearity]
    want, state = torch.zeros(shape, dtype=torch.float64), start
    inside = torch.from_numpy(np.arange(steps)[:, None] < lengths)[..., None]
    for t in reversed(range(steps)) if reverse else range(steps):
        state = torch.where(inside[t], state + z[t] * (c[t] - state), state)
        want[t] = torch.where(inside[t], state, 0.0)
    (want * torch.from_numpy(gh.astype(np.float64))).sum().add(0 * (wide_x.sum() + start.sum())).backward()

    on_lengths = backend.array(lengths.astype(np.int64)) if with_lengths else None
    h, gx, gh0 = (backend.empty(each, dtype) for each in (shape, x.shape, h0.shape))
    arrays = backend.array(x), backend.array(h0)
    backend.kernels.min_gru_forward(*arrays, on_lengths, nonlinearity, reverse, h)
    backend.kernels.min_gru_backward(
        arrays[0], h, backend.array(gh), arrays[1], on_lengths, nonlinearity, reverse, gx, gh0
    )
    for got, expected, size in ((h, want.detach(), scale), (gx, wide_x.grad, scale), (gh0, start.grad, 1)):
        limits = tolerance(dtype, 2)
        np.testing.assert_allclose(backend.numpy(got), expected.numpy(), limits["rtol"], limits["atol"] * size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("nonlinearity", CANDIDATES)
def test_a_min_gru_in_chunks_is_that_of_one_chunk(backend, nonlinearity, reverse, dtype, monkeypatch):
    """On a device; an infinite candidate stays where it is, and what lies behind a sample's length is zero."""
    rng, shape = np.random.default_rng(0), (40, 3, 33)
    x, gh, h0 = normal(rng, (40, 3, 66), dtype), normal(rng, shape, dtype), normal(rng, shape[1:], dtype)
    x[17, 0, 40] = np.inf
    lengths = backend.array(np.array([40, 13, 0]))
    found = []
    for least in (64, 1):
        monkeypatch.setattr(rnn, "_LEAST_STEPS", least)
        h, gx, gh0 = (backend.empty(each, dtype) for each in (shape, x.shape, h0.shape))
        arrays = backend.array(x), backend.array(h0)
        backend.kernels.min_gru_forward(*arrays, lengths, nonlinearity, reverse, h)
        backend.kernels.min_gru_backward(
            arrays[0], h, backend.array(gh), arrays[1], lengths, nonlinearity, reverse, gx, gh0
        )
        found.append([backend.numpy(array) for array in (h, gx, gh0)])
    assert rnn.linear_chunks(40, 99) == 8
    for one, cut in zip(*found, strict=True):
        np.testing.assert_allclose(cut, one, **tolerance(dtype))
    assert not found[1][0][13:, 1].any()


@pytest.mark.parametrize("nonlinearity", CANDIDATES)
def test_a_nan_in_a_min_gru_stays_in_its_unit(backend, nonlinearity):
    rng = np.random.default_rng(0)
    h0, gh = backend.zeros((2, 33), np.float32), backend.array(np.ones((5, 2, 33), np.float32))
    for column in (32, 65):  # of the gate and of the candidate
        x = normal(rng, (5, 2, 66), np.float32)
        x[2, 1, column] = np.nan
        h, gx, gh0 = (backend.empty(shape, np.float32) for shape in ((5, 2, 33), (5, 2, 66), (2, 33)))
        backend.kernels.min_gru_forward(backend.array(x), h0, None, nonlinearity, False, h)
        backend.kernels.min_gru_backward(backend.array(x), h, gh, h0, None, nonlinearity, False, gx, gh0)
        of_h, of_gx = np.isnan(backend.numpy(h)), np.isnan(backend.numpy(gx))
        assert of_h[2:, 1, 32].all()
        assert of_h.sum() == 3
        assert of_gx[2, 1, column] == (column == 32 or nonlinearity != "identity")  # whose slope is 1
        of_gx[:, 1, [32, 65]] = False
        assert not of_gx.any()


def test_an_unknown_candidate_is_refused(backend):
    x, h = backend.zeros((3, 2, 8), np.float32), backend.zeros((3, 2, 4), np.float32)
    with pytest.raises(OptionError, match="nonlinearity"):
        backend.kernels.min_gru_forward(x, h[0], None, "relu", False, h)


def test_kept_states_of_another_number_of_steps_are_refused(backend):
    """`tests/scan/test_selective.py` has the values of the selective scan."""
    x, a, b, d = (backend.zeros(shape, np.float32) for shape in ((33, 2, 5), (3, 5), (33, 2, 3), (5,)))
    y, gd, ga, states = (backend.zeros(shape, np.float32) for shape in (x.shape, (2, 5), (2, 3, 5), (2, 2, 3, 5)))
    with pytest.raises(ShapeError, match="states"):
        backend.kernels.selective_scan(x, x, a, b, b, d, ga, None, y, states)
    with pytest.raises(ShapeError, match="states"):
        backend.kernels.selective_scan_grad(x, x, a, b, b, d, x, ga, states, None, y, y, ga, b, b, gd, ga)
