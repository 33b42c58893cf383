"""Lyapunov exponents where they are known: linear systems, random products, maps, flows, and networks that are one."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.special import digamma

import sparsebp as sb
from sparsebp.analysis import LyapunovSpectrum, lyapunov, lyapunov_of
from sparsebp.core.errors import DTypeError, NonFiniteError, OptionError, ShapeError


def rnn(weight, bias=None, kind="tanh"):
    """An autonomous network h <- f(W h + b)."""
    size = len(weight)
    model = sb.nn.RNN(1, size, nonlinearity=kind, bias=bias is not None, dtype=np.float64, rng=0)
    model.params["weight_hh_l0"][...] = weight
    if bias is not None:
        model.params["bias_ih_l0"][...] = bias
        model.params["bias_hh_l0"][...] = 0
    return model


def still(steps, batch):
    return np.zeros((steps, batch, 1))


def test_a_linear_network_has_the_logarithms_of_its_eigenvalues():
    """A ReLU network of positive weights from positive states is linear."""
    rng = np.random.default_rng(0)
    values = np.array([0.9, 0.5, 0.2, 0.05])
    weight = np.diag(values) + np.triu(rng.uniform(0, 0.3, (4, 4)), 1)
    h0 = rng.uniform(0.5, 1, (1, 3, 4))
    spectrum = lyapunov(rnn(weight, kind="relu"), still(200, 3), h0=h0, warm_up=80)
    np.testing.assert_allclose(spectrum.exponents, np.tile(np.log(values), (3, 1)), rtol=1e-6)
    assert spectrum.steps == 120 and spectrum.largest == pytest.approx(np.log(0.9))
    np.testing.assert_allclose(lyapunov(rnn(weight, kind="relu"), still(200, 3), 2, h0=h0, warm_up=80).mean,
                               np.log(values[:2]), rtol=1e-6)  # fmt: skip


def test_a_chain_of_linear_maps_with_known_stretches():
    """Diagonals behind rotations that the next step undoes: exact, whatever the order of the diagonal."""
    rng = np.random.default_rng(0)
    turns = np.linalg.qr(rng.standard_normal((301, 2, 3, 3)))[0]
    stretches = np.array([3.0, 1.0, 0.25])
    chain = (turns[1:] * stretches) @ turns[:-1].swapaxes(-1, -2)
    found = lyapunov_of(chain, warm_up=100)
    np.testing.assert_allclose(found.exponents, np.tile(np.log(stretches), (2, 1)), atol=1e-12)
    assert np.abs(found.error).max() < 1e-12
    assert found.dimension() == pytest.approx(2 + np.log(3) / np.log(4))
    with pytest.raises(OptionError, match="more exponents"):
        lyapunov_of(chain, 2).dimension()
    assert LyapunovSpectrum(np.tile([0.0, -1.5], (4, 1, 1)), states=2).dimension() == 1


def test_products_of_gaussian_matrices():
    """Newman 1986: λ_i = (ln 2 + ψ((n - i + 1) / 2)) / 2 for independent standard normal entries."""
    n = 5
    rng = np.random.default_rng(0)
    found = lyapunov_of((rng.standard_normal((50, n, n)) for _ in range(300)), warm_up=20)
    expected = (np.log(2) + digamma((n - np.arange(n)) / 2)) / 2
    np.testing.assert_allclose(found.mean, expected, atol=0.03)
    assert (np.abs(found.exponents - expected) < 6 * found.error + 0.05).all()


def test_the_henon_map():
    """a = 1.4, b = 0.3: 0.4192 and ln 0.3 less (Sprott, Chaos and Time-Series Analysis, 2003)."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-0.1, 0.1, (2, 50))
    chain = []
    for _ in range(700):
        chain.append(np.stack([np.stack([-2.8 * x, np.ones(50)], 1), np.stack([np.full(50, 0.3), np.zeros(50)], 1)], 1))
        x, y = 1 - 1.4 * x * x + y, 0.3 * x
    found = lyapunov_of(chain, warm_up=100)
    assert found.largest == pytest.approx(0.4192, abs=0.01)
    np.testing.assert_allclose(found.exponents.sum(axis=1), np.log(0.3))
    assert found.dimension() == pytest.approx(1.258, abs=0.01)


def test_the_lorenz_system():
    """σ = 10, ρ = 28, β = 8/3: 0.906, 0, -14.57, and dimension 2.06 (Sprott 2003)."""
    step, batch = 0.02, 60

    def field(s):
        x, y, z = s
        return np.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    def slope(s):
        x, y, z = s
        one, nil = np.ones_like(x), np.zeros_like(x)
        rows = [[-10 * one, 10 * one, nil], [28 - z, -one, -x], [y, x, -8 / 3 * one]]
        return np.stack([np.stack(row, -1) for row in rows], -2)

    def advance(s):
        """One step of the classical Runge–Kutta method, and its Jacobian."""
        k1, d1 = field(s), slope(s)
        eye = np.eye(3)
        k2, d2 = field(s + step / 2 * k1), slope(s + step / 2 * k1) @ (eye + step / 2 * d1)
        k3, d3 = field(s + step / 2 * k2), slope(s + step / 2 * k2) @ (eye + step / 2 * d2)
        k4, d4 = field(s + step * k3), slope(s + step * k3) @ (eye + step * d3)
        return s + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4), eye + step / 6 * (d1 + 2 * d2 + 2 * d3 + d4)

    state = np.random.default_rng(0).uniform(-10, 10, (3, batch)) + np.array([[0], [0], [25]])

    def chain():
        nonlocal state
        for _ in range(1600):
            state, jacobian = advance(state)
            yield jacobian

    found = lyapunov_of(chain(), warm_up=400)
    exponents = found.mean / step
    np.testing.assert_allclose(exponents, [0.906, 0, -14.57], atol=0.05)
    np.testing.assert_allclose(found.exponents.sum(axis=1) / step, -(10 + 1 + 8 / 3), rtol=1e-3)  # the divergence
    assert found.dimension() == pytest.approx(2.06, abs=0.01)


def test_a_relu_network_that_is_the_tent_map():
    """x <- μ min(x, 1 - x), the map that Lorenz drew of the maxima of his flow: ln μ, and a direction that is lost.

    The states are a = x and b = max(x - 1/2, 0): μ min(a, 1 - a) = μ (a - 2 b).
    """
    mu = 1.9
    model = rnn(np.array([[mu, -2 * mu], [mu, -2 * mu]]), bias=np.array([0, -0.5]), kind="relu")
    x = np.random.default_rng(0).uniform(0.1, 0.9, 5)
    spectrum = lyapunov(model, still(300, 5), h0=np.stack([x, np.maximum(x - 0.5, 0)], 1)[None])
    np.testing.assert_allclose(spectrum.exponents[:, 0], np.log(mu), atol=5e-3)
    assert (spectrum.exponents[:, 1] == -np.inf).all() and np.isfinite(spectrum.error[:, 0]).all()
    assert spectrum.dimension() == pytest.approx(1)


@pytest.mark.parametrize(("gain", "chaotic"), [(0.8, False), (2.0, True)])
def test_random_networks_turn_chaotic_at_a_gain_of_one(gain, chaotic):
    """h <- tanh(g W h), W random of spectral radius about 1 (Sompolinsky et al. 1988; Engelken et al. 2023)."""
    n = 60
    weight = gain * np.random.default_rng(3).standard_normal((n, n)) / np.sqrt(n)
    spectrum = lyapunov(rnn(weight), still(300, 2), 5, warm_up=150)
    if chaotic:
        assert (spectrum.exponents[:, 0] > 0.05).all() and spectrum.mean[0] > spectrum.mean[4]
    else:  # all states end at 0, where the Jacobian is g W
        values = np.sort(np.log(np.abs(np.linalg.eigvals(weight))))[::-1]
        assert spectrum.largest < 0
        np.testing.assert_allclose(spectrum.mean.sum(), values[:5].sum(), atol=0.1)


def test_a_gru_at_its_fixed_point_also_pytorchs():
    torch.manual_seed(0)
    gru = torch.nn.GRU(1, 4).double()
    h = torch.zeros(1, 1, 4, dtype=torch.float64)
    x = torch.zeros(400, 1, 1, dtype=torch.float64)
    with torch.no_grad():
        h = gru(x, h)[1]
    jacobian = torch.autograd.functional.jacobian(lambda v: gru(x[:1], v[None, None])[1][0, 0], h[0, 0])
    expected = np.sort(np.log(np.abs(np.linalg.eigvals(jacobian.numpy()))))[::-1]
    found = lyapunov(gru, x, h0=h, warm_up=100)
    np.testing.assert_allclose(found.mean, expected, atol=0.02)
    np.testing.assert_allclose(found.mean.sum(), expected.sum(), rtol=1e-10)
    assert sb.lyapunov is lyapunov


def test_the_same_seed_gives_the_same_numbers():
    model = rnn(2 * np.random.default_rng(0).standard_normal((6, 6)) / np.sqrt(6))
    one, other, third = (lyapunov(model, still(60, 2), rng=seed).exponents for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, other)
    assert (one != third).any()
    assert np.isnan(lyapunov(model, still(20, 2)).error).all()


def test_refusals():
    model = rnn(np.eye(2))
    for options in ({"k": 0}, {"k": 3}, {"warm_up": -1}, {"warm_up": 5}, {"rng": "seed"}):
        with pytest.raises(OptionError):
            lyapunov(model, still(5, 1), **options)
    for chain in (np.empty((0, 2, 2)), [], np.ones((3, 2)), np.ones((3, 2, 3)), [np.eye(2), np.eye(3)]):
        with pytest.raises(ShapeError):
            lyapunov_of(chain)
    with pytest.raises(NonFiniteError, match="step 1"):
        lyapunov_of([np.eye(2), np.full((2, 2), np.nan)])
    for chain in (None, 3, np.float64(3)):
        with pytest.raises(OptionError, match="no chain"):
            lyapunov_of(chain)
    for chain in ("abc", {"a": np.eye(2)}, [None], [sb.nn.Linear(2, 2)], scipy.sparse.eye(2, format="csr")):
        with pytest.raises(DTypeError, match=r"step 0 is (not an array|a sparse matrix)"):
            lyapunov_of(chain)
    for chain in (1j * np.eye(2)[None], [[["a"]]], [[[1, 2], [3]]]):  # an imaginary part would be dropped
        with pytest.raises(DTypeError, match="step 0 has no real numbers"):
            lyapunov_of(chain)
    for x in ("abc", [1, 2], None, scipy.sparse.eye(2, format="csr")):
        with pytest.raises(DTypeError, match=r"x is (not an array|a sparse matrix)"):
            lyapunov(model, x)
