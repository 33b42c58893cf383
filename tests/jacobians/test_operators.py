"""Jacobians that are built from an operator's arrays are those of the layers, which tests/nn compares with PyTorch."""

import numpy as np
import pytest
from hypothesis import given

from sparsebp import jacobian_t, nn
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.jacobians import (
    gru_hidden_jacobians,
    hidden_elements,
    linear_jacobian_t,
    lstm_hidden_jacobians,
    pointwise_jacobian_t,
    rnn_hidden_jacobians,
)
from sparsebp.patterns import lstm_pattern
from strategies import seeds, sizes


@given(n_in=sizes(1, 7), n_out=sizes(1, 7), batch=sizes(1, 5), positions=sizes(1, 4), seed=seeds)
def test_linear_layers(n_in, n_out, batch, positions, seed):
    layer = nn.Linear(n_in, n_out, dtype=np.float64, rng=seed)
    j = jacobian_t(layer, np.ones((batch, n_in) if positions == 1 else (batch, positions, n_in)))
    built = linear_jacobian_t(layer.params["weight"], positions)
    assert j.pattern == built.pattern and j.batch is None
    np.testing.assert_array_equal(j.data, built.data)


@pytest.mark.parametrize("kind", ["tanh", "relu", "gru", "lstm"])
def test_hidden_elements(kind):
    rng, options = np.random.default_rng(0), {"dtype": np.float64, "rng": 0}
    layer = {"gru": nn.GRU, "lstm": nn.LSTM}.get(kind, lambda *n, **o: nn.RNN(*n, nonlinearity=kind, **o))(
        2, 4, **options
    )
    _, saved = layer.forward(rng.standard_normal((5, 3, 2)))
    run, w_hh = saved.runs[0], layer.params["weight_hh_l0"]
    if kind == "gru":
        built = hidden_elements(gru_hidden_jacobians(run.h, run.h0, run.gates, w_hh))
    elif kind == "lstm":
        built = hidden_elements(lstm_hidden_jacobians(run.c, run.c0, run.gates, w_hh), lstm_pattern(4))
    else:
        built = hidden_elements(rnn_hidden_jacobians(run.h, w_hh, kind))
    for found, want in zip(built, layer.hidden_jacobians_t(saved), strict=True):
        assert found.pattern == want.pattern
        np.testing.assert_array_equal(found.data, want.data)


def test_refusals():
    with pytest.raises(DTypeError, match="not an array"):
        jacobian_t(nn.ReLU(), [[1.0]])
    with pytest.raises(ShapeError, match="batch axis"):
        pointwise_jacobian_t(np.float64(1))
    with pytest.raises(ShapeError, match="matrix"):
        linear_jacobian_t(np.ones(3))
