"""Hidden-state Jacobians of every step, against PyTorch's autograd through one step at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsebp as sb
from sparsebp import analysis
from sparsebp.analysis import hidden_jacobians
from sparsebp.core.errors import MemoryLimitError, NonFiniteError, OptionError, ShapeError

T, B, I, H = 7, 3, 2, 4


def models(kind, **options):
    """PyTorch's layer in float64, and ours with its weights."""
    torch.manual_seed(0)
    theirs = getattr(torch.nn, kind)(I, H, **options).double()
    ours = getattr(sb.nn, kind)(I, H, dtype=np.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def by_autograd(rnn, x, h0):
    """(T, B, H, H): each step of a single layer in one direction differentiated by itself."""
    found = []
    for step in x:
        jacobian = torch.autograd.functional.jacobian(lambda h, step=step: rnn(step[None], h[None])[1][0], h0)
        found.append(torch.stack([jacobian[b, :, b] for b in range(len(h0))]))
        h0 = rnn(step[None], h0[None])[1][0].detach()
    return torch.stack(found).numpy()


@pytest.mark.parametrize(("kind", "options"), [("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("GRU", {})])
def test_every_step_is_autograds(kind, options):
    theirs, ours = models(kind, **options)
    x, h0 = torch.randn(T, B, I, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    expected = by_autograd(theirs, x, h0)
    found = hidden_jacobians(ours, x.numpy(), h0[None].numpy())
    assert found.shape == (T, B, H, H) and found.flags.c_contiguous
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(hidden_jacobians(theirs, x, h0[None]), found)
    elements = hidden_jacobians(ours, x.numpy(), h0[None].numpy(), format="csr")
    assert [element.shape for element in elements] == [(H, H)] * T
    np.testing.assert_array_equal(np.stack([e.to_dense(b).T for e in elements for b in range(B)]).reshape(T, B, H, H),
                                  found)  # fmt: skip


@pytest.mark.parametrize("projection", [0, 3])
def test_an_lstm_has_states_of_two_kinds(projection):
    theirs, ours = models("LSTM", proj_size=projection)
    x, width = torch.randn(T, B, I, dtype=torch.float64), projection or H
    state = torch.randn(1, B, width, dtype=torch.float64), torch.randn(1, B, H, dtype=torch.float64)
    expected, now = [], torch.cat(state, 2)[0]
    for step in x:

        def advance(s, step=step):
            h, c = s[None].split((width, H), 2)
            return torch.cat(theirs(step[None], (h.contiguous(), c.contiguous()))[1], 2)[0]

        jacobian = torch.autograd.functional.jacobian(advance, now)
        expected.append(torch.stack([jacobian[b, :, b] for b in range(B)]))
        now = advance(now).detach()
    expected = torch.stack(expected).numpy()
    found = hidden_jacobians(ours, x.numpy(), tuple(part.numpy() for part in state))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_array_equal(hidden_jacobians(theirs, x, state), found)
    parts = analysis.SteppedRun(ours, x.numpy(), tuple(part.numpy() for part in state), 0, 0)
    values, pattern = parts.values(2, 4)
    np.testing.assert_array_equal(analysis._stacked(values, pattern), found[2:4])
    elements = hidden_jacobians(ours, x.numpy(), tuple(part.numpy() for part in state), format="csr")
    assert (elements[0].pattern.nnz == 2 * H * (H + 1)) == (projection == 0)
    np.testing.assert_array_equal(elements[5].to_dense(1).T, found[5, 1])
    exponents = sb.lyapunov(ours, np.zeros((300, 2, I)), 4).mean
    assert np.isfinite(exponents).all() and exponents[0] < 0


def test_layers_directions_and_models_around_them():
    _, ours = models("GRU", num_layers=2, bidirectional=True)
    x = np.random.default_rng(0).standard_normal((T, B, I))
    _, saved = ours.forward(x)
    for layer in range(2):
        for direction in range(2):
            found = hidden_jacobians(ours, x, layer=layer, direction=direction)
            expected = ours.hidden_jacobians_t(saved, layer, direction)
            np.testing.assert_array_equal(found[3, 1], expected[3].to_dense(1).T)
    dropping = sb.nn.GRU(I, H, num_layers=2, dropout=0.5, dtype=np.float64)
    dropping.load_state_dict(models("GRU", num_layers=2)[1].state_dict())
    assert dropping.training
    np.testing.assert_array_equal(hidden_jacobians(dropping, x, layer=1),
                                  hidden_jacobians(dropping, x, layer=1))  # fmt: skip
    assert dropping.training
    rnn = sb.nn.RNN(3, H, batch_first=True, rng=0)
    chain = sb.nn.Sequential(sb.nn.Embedding(5, 3, rng=0), rnn, sb.nn.Linear(H, 2))
    numbers = np.random.default_rng(0).integers(0, 5, (B, T))
    inner = hidden_jacobians(rnn, chain[0](numbers))
    assert inner.shape == (T, B, H, H) and inner.dtype == np.float32
    np.testing.assert_array_equal(hidden_jacobians(chain, numbers), inner)
    single = hidden_jacobians(rnn, chain[0](numbers)[1], np.zeros((1, H), np.float32))
    np.testing.assert_array_equal(single, hidden_jacobians(rnn, chain[0](numbers)[1:2]))
    classifier = sb.nn.SequenceClassifier(rnn, sb.nn.Linear(H, 2))
    np.testing.assert_array_equal(hidden_jacobians(classifier, chain[0](numbers)), inner)


def test_parts_are_the_whole(monkeypatch):
    _, ours = models("GRU")
    x = np.random.default_rng(0).standard_normal((T, B, I))
    whole = hidden_jacobians(ours, x)
    monkeypatch.setattr(analysis, "PART", 3 * 8 * B * H * H)
    run = analysis.SteppedRun(ours, x, None, 0, 0)
    parts = [*run.parts()]
    assert [len(part) for part in parts] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(np.concatenate([*run.parts(backwards=True)][::-1]), whole)


def test_refusals():
    _, ours = models("GRU")
    x = np.zeros((T, B, I))
    with pytest.raises(OptionError, match="recurrent"):
        hidden_jacobians(sb.nn.Linear(2, 2), x)
    with pytest.raises(OptionError, match="recurrent"):
        hidden_jacobians("GRU", x)
    with pytest.raises(OptionError, match="no layer for this module"):
        hidden_jacobians(torch.nn.Bilinear(1, 1, 1), x)
    with pytest.raises(OptionError, match="layer is too large"):
        hidden_jacobians(ours, x, layer=1)
    with pytest.raises(OptionError, match="direction"):
        hidden_jacobians(ours, x, direction=1)
    with pytest.raises(OptionError, match="format"):
        hidden_jacobians(ours, x, format="dense")
    with pytest.raises(ShapeError):
        hidden_jacobians(ours, x[0, 0])
    with pytest.raises(MemoryLimitError, match=f"T = {T}, B = {B}, {H} states"):
        hidden_jacobians(ours, x, memory_limit=T * B * H * H * 8 * 3 - 1)
    hidden_jacobians(ours, x, memory_limit=T * B * H * H * 8 * 3)
    x[2, 1] = np.inf
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteError, match="steps 0 and 7"):
        [*analysis.SteppedRun(ours, x, None, 0, 0).parts()]
