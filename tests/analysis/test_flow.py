"""Gradient flow against products of Jacobians that are written out, and against the exponents."""

from __future__ import annotations

import numpy as np
import pytest

import sparsebp as sb
from sparsebp.analysis import gradient_flow, hidden_jacobians, lyapunov
from sparsebp.core.errors import OptionError

T, B, I, H = 9, 2, 3, 4


@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_norms_are_those_of_the_products(kind):
    rng = np.random.default_rng(0)
    model = getattr(sb.nn, kind)(I, H, dtype=np.float64, rng=rng)
    x, h0 = rng.standard_normal((T, B, I)), rng.standard_normal((1, B, H))
    steps = hidden_jacobians(model, x, h0)
    product = np.tile(np.eye(H), (B, 1, 1))
    spectral, frobenius = [], []
    for jacobian in [None, *steps[::-1]]:
        product = product if jacobian is None else product @ jacobian
        spectral.append(np.linalg.norm(product, 2, axis=(1, 2)))
        frobenius.append(np.linalg.norm(product, axis=(1, 2)) / np.sqrt(H))
    flow = gradient_flow(model, x, h0)
    np.testing.assert_allclose(flow.log_norms, np.log(spectral), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradient_flow(model, x, h0, norm="frobenius").log_norms, np.log(frobenius), rtol=1e-10,
                               atol=1e-12)  # fmt: skip
    np.testing.assert_allclose(flow.rates[3], (np.log(spectral[4])) / 4, rtol=1e-10)
    assert flow.rates.shape == (T, B)


def linear(weight):
    model = sb.nn.RNN(1, len(weight), nonlinearity="relu", bias=False, dtype=np.float64, rng=0)
    model.params["weight_hh_l0"][...] = weight
    return model


def test_neither_overflow_nor_underflow():
    """0.01⁴⁰⁰ is no double; and nothing at all is minus infinity."""
    x, h0 = np.zeros((400, 1, 1)), np.full((1, 1, 2), 1e150)
    flow = gradient_flow(linear(np.diag([0.1, 0.01])), x, h0)
    np.testing.assert_allclose(flow.log_norms[:, 0], np.arange(401) * np.log(0.1))
    nothing = gradient_flow(linear(-np.eye(2)), x[:5], h0)  # every unit is off
    np.testing.assert_array_equal(nothing.log_norms[:, 0], [0] + [-np.inf] * 5)


def test_in_the_end_it_grows_by_the_largest_exponent():
    rng = np.random.default_rng(0)
    model = sb.nn.RNN(1, 10, bias=False, dtype=np.float64, rng=0)
    model.params["weight_hh_l0"][...] = 2.5 * rng.standard_normal((10, 10)) / np.sqrt(10)
    x, h0 = np.zeros((600, 2, 1)), rng.uniform(-1, 1, (1, 2, 10))
    rates = gradient_flow(model, x, h0).rates[-1]
    np.testing.assert_allclose(rates, lyapunov(model, x, 1, h0=h0, warm_up=0).exponents[:, 0], atol=0.02)


def test_the_picture():
    pictures = pytest.importorskip("benchmarks.harness")
    pytest.importorskip("matplotlib")
    x, h0 = np.zeros((5, 3, 1)), np.ones((1, 3, 2))
    drawing, axes = pictures.figure()
    gradient_flow(linear(np.diag([0.1, 0.01])), x, h0).plot(axes[0, 0], "half", color="green")
    gradient_flow(linear(-np.eye(2)), x, h0).plot(axes[0, 0])
    (first, second) = axes[0, 0].lines
    np.testing.assert_allclose(first.get_ydata(), -np.arange(6), atol=1e-12)
    assert first.get_label() == "half" and first.get_color() == "green"
    assert list(second.get_xdata()) == [0]
    drawing.canvas.draw()


def test_an_unknown_norm_is_refused():
    with pytest.raises(OptionError, match="spectral"):
        gradient_flow(linear(np.eye(2)), np.zeros((5, 1, 1)), norm="max")
