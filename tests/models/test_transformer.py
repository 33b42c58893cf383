"""The sequence-classifying Transformer against its torch.nn twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsebp import models, nn, optim, value_and_grad
from sparsebp.core.errors import OptionError
from torch_twins import assert_gradients, loaded

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SMALL = {"steps": 7, "width": 12, "heads": 3, "layers": 2}


class Positions(torch.nn.Module):
    def __init__(self, steps, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(steps, width))

    def forward(self, x):
        return x + self.weight[: x.shape[1]]


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean(dim=1)


def twin(inputs, classes, *, steps, width, heads, layers, tokens):
    t = torch.nn
    return t.Sequential(
        (t.Embedding if tokens else t.Linear)(inputs, width),
        Positions(steps, width),
        *(
            t.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        ),
        t.LayerNorm(width),
        Mean(),
        t.Linear(width, classes),
    )


def sequences(rng, tokens, batch=4, steps=7):
    return rng.integers(0, 5, (batch, steps)) if tokens else rng.standard_normal((batch, steps, 5))


@pytest.mark.parametrize("steps", [1, 5, 7])
@pytest.mark.parametrize("tokens", [False, True])
def test_parity_with_torch(tokens, steps):
    ours = models.transformer_classifier(5, 3, tokens=tokens, dtype=np.float64, rng=0, **SMALL)
    theirs = loaded(twin(5, 3, tokens=tokens, **SMALL), ours)
    rng = np.random.default_rng(1)
    assert_gradients(ours, theirs, sequences(rng, tokens, steps=steps), rng, CLOSE)


def test_every_layer_is_a_stage():
    stages = [type(layer).__name__ for _, layer in models.transformer_classifier(5, 3, tokens=True, **SMALL).stages()]
    assert stages == [
        "Embedding", "PositionalEmbedding", *["TransformerEncoderLayer"] * 2, "LayerNorm", "MeanOverSteps", "Linear",
    ]  # fmt: skip


def test_the_seed_decides_the_weights():
    first, same, other = (models.transformer_classifier(5, rng=seed, **SMALL).state_dict() for seed in (3, 3, 4))
    assert all((first[key] == same[key]).all() for key in first)
    assert (first["2.linear1.weight"] != other["2.linear1.weight"]).any()
    assert (first["2.linear1.weight"] != first["3.linear1.weight"]).any()
    assert first["0.weight"].dtype == np.float32


@pytest.mark.parametrize("tokens", [False, True])
def test_it_learns(tokens):
    rng = np.random.default_rng(0)
    x = sequences(rng, tokens, batch=48)
    target = ((x == 2) if tokens else (x[..., 0] > 1)).any(axis=1).astype(np.int64)
    x = x if tokens else x.astype(np.float32)
    model = models.transformer_classifier(5, 2, tokens=tokens, dropout=0.1, rng=1, **SMALL)
    adam, step, losses = optim.Adam(model.parameters(), lr=3e-3), value_and_grad(model, nn.CrossEntropyLoss()), []
    for _ in range(60):
        value, grads = step(x, target)
        adam.step(grads)
        losses.append(value)
    assert losses[0] > 0.5 and np.mean(losses[-5:]) < 0.15
    prediction = model.eval()(x).argmax(axis=1)
    assert (prediction == target).mean() > 0.95


def run_padded(theirs, x, lengths):
    """Run torch's model on sequences padded at the end, as its own layers have it."""
    padding = torch.arange(x.shape[1]) >= torch.tensor(lengths)[:, None]
    for layer in theirs:
        if isinstance(layer, torch.nn.TransformerEncoderLayer):
            x = layer(x, src_key_padding_mask=padding)
        elif isinstance(layer, Mean):
            x = x.masked_fill(padding[:, :, None], 0).sum(dim=1) / torch.tensor(lengths)[:, None]
        else:
            x = layer(x)
    return x


@pytest.mark.parametrize("tokens", [False, True])
def test_padded_sequences_are_classified_as_if_cut(tokens):
    ours = models.transformer_classifier(5, 3, tokens=tokens, dtype=np.float64, rng=0, **SMALL)
    theirs = loaded(twin(5, 3, tokens=tokens, **SMALL), ours)
    rng, lengths = np.random.default_rng(1), [7, 1, 4, 6]
    x, named = sequences(rng, tokens), dict(theirs.named_parameters())
    saved = assert_gradients(ours, lambda tx: run_padded(theirs, tx, lengths), x, rng, CLOSE, named, lengths=lengths)
    y, gy = ours(x, lengths), rng.standard_normal((4, 3))
    grads = ours.weight_grad(gy, saved)
    cut = [ours.forward(one[None, :steps]) for one, steps in zip(x, lengths, strict=True)]
    np.testing.assert_allclose(y, np.concatenate([one for one, _ in cut]), atol=1e-12)
    parts = [ours.weight_grad(g[None], one) for g, (_, one) in zip(gy, cut, strict=True)]
    for key, grad in grads.items():
        np.testing.assert_allclose(grad, sum(part[key] for part in parts), atol=1e-12, err_msg=key)
    if not tokens:
        input_grad = ours.input_grad(gy, saved)
        assert all((g[steps:] == 0).all() and g[:steps].any() for g, steps in zip(input_grad, lengths, strict=True))


def test_lengths_reach_no_layer_that_mixes_steps():
    mixing = nn.Sequential(nn.Linear(5, 4, rng=0), nn.Flatten(), nn.Linear(28, 3, rng=1))
    with pytest.raises(OptionError, match=r"Layer 1 does not take lengths.*Flatten"):
        mixing.forward(np.zeros((2, 7, 5), np.float32), [7, 3])
    after = nn.Sequential(nn.Sequential(nn.Linear(5, 4, rng=0), nn.MeanOverSteps(True)), nn.Flatten())
    x = np.random.default_rng(0).standard_normal((2, 7, 5)).astype(np.float32)
    alone, _ = after.forward(x[1:, :3])
    np.testing.assert_allclose(after.forward(x, [7, 3])[0][1:], alone, rtol=1e-5)


@pytest.mark.parametrize("backward", ["bp", "blelloch"])
def test_lengths_go_past_all_that_works_on_each_step_by_itself(backward):
    """Blocks that are residual, PReLU with one weight, softmax over features: as if the sequences were cut."""
    real = {"dtype": np.float64}
    block = nn.Residual(nn.Sequential(nn.RMSNorm(4, **real), nn.Linear(4, 4, **real, rng=0), nn.PReLU(**real)))
    model = nn.Sequential(
        block, nn.GRU(4, 4, batch_first=True, rng=1, **real), nn.LogSoftmax(-1), nn.MeanOverSteps(True),
        backward=backward,
    )  # fmt: skip
    rng, lengths = np.random.default_rng(2), [2, 5, 3]
    x, gy = rng.normal(size=(3, 5, 4)), rng.normal(size=(3, 4))
    y, saved = model.forward(x, lengths=lengths)
    g, total = model.gradients(gy, saved), {}
    for i, length in enumerate(lengths):
        alone, kept = model.forward(x[i : i + 1, :length])
        own = model.gradients(gy[i : i + 1], kept)
        np.testing.assert_allclose(y[i], alone[0], atol=1e-12)
        np.testing.assert_allclose(g.input_grad()[i, :length], own.input_grad()[0], atol=1e-12)
        total = {name: total.get(name, 0) + array for name, array in own.weight_grad().items()}
    for name, array in g.weight_grad().items():
        np.testing.assert_allclose(array, total[name], atol=1e-12)
    for mixing in (nn.LogSoftmax(1), nn.PReLU(5, **real), nn.Residual(nn.Softmax(1)), nn.Concat(nn.Identity())):
        with pytest.raises(OptionError, match="lengths"):
            nn.Sequential(mixing, nn.MeanOverSteps(True)).forward(x, lengths=lengths)
