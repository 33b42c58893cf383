"""SequenceClassifier against the same model in torch, and chrono initialisation."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
import torch_twins
from sparsebp import nn
from strategies import seeds
from torch_twins import assert_gradients, recurrent_twin

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@given(
    kind=st.sampled_from([nn.RNN, nn.GRU]), bidirectional=st.booleans(), num_layers=st.integers(1, 2),
    batch_first=st.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=20)
def test_against_torch(kind, bidirectional, num_layers, batch_first, seed):
    rng = np.random.default_rng(seed)
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first}
    rnn = kind(2, 3, dtype=np.float64, rng=rng, **options)
    head = nn.Linear(3 * rnn.directions, 4, dtype=np.float64, rng=rng)
    model = nn.SequenceClassifier(rnn, head)
    twin = recurrent_twin(rnn)
    weight, bias = (torch.from_numpy(head.params[n].copy()).requires_grad_() for n in ("weight", "bias"))
    batch, steps = 3, 5
    x = rng.standard_normal((batch, steps, 2) if batch_first else (steps, batch, 2))

    def run(inputs):
        h_n = twin(inputs)[1][-rnn.directions :]
        return torch.cat(list(h_n), dim=1) @ weight.T + bias

    named = {f"rnn.{name}": param for name, param in twin.named_parameters()}
    assert_gradients(model, run, x, rng, CLOSE, named | {"head.weight": weight, "head.bias": bias})
    jacobian = sb.jacobian_t(model, x)
    for b in range(batch):
        sample = x[b] if batch_first else x[:, b]
        expected = torch_twins.jacobian_t(lambda s: run(s.unsqueeze(0 if batch_first else 1))[0], sample)
        np.testing.assert_allclose(jacobian.to_dense(b), expected, **CLOSE)


def test_lengths_pick_each_samples_last_state():
    rnn = nn.GRU(2, 3, rng=0)
    model = nn.SequenceClassifier(rnn, nn.Linear(3, 2, rng=1))
    x = np.random.default_rng(0).standard_normal((6, 2, 2)).astype(np.float32)
    both = model(x, lengths=[4, 6])
    np.testing.assert_allclose(both[0], model(x[:4])[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(both[1], model(x)[1], rtol=1e-5, atol=1e-6)


def test_chrono_initialisation():
    rnn = nn.GRU(1, 50, num_layers=2, rng=0)
    nn.init.chrono_update_gate(rnn.parameters(), 50, 784, rng=1)
    for k in range(2):
        value = rnn.params[f"bias_ih_l{k}"][50:100]
        assert (value >= 0).all() and (value <= np.log(783)).all()
        time_constants = 1 + np.exp(value)  # 1 / (1 - sigmoid(b))
        assert time_constants.max() > 600 and time_constants.min() < 200
        assert (rnn.params[f"bias_hh_l{k}"][50:100] == 0).all()
        assert np.abs(rnn.params[f"bias_ih_l{k}"][:50]).max() <= 1 / np.sqrt(50)
