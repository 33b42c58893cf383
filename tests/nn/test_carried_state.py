"""States carried from batch to batch: forwards as of one long sequence, gradients of truncated back-propagation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp import nn
from sparsebp.core.errors import OptionError, ShapeError
from strategies import seeds, sizes

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
F8 = {"dtype": np.float64}

LAYERS: dict[str, Any] = {
    "rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM, "mingru": nn.MinGRU, "minlstm": nn.MinLSTM, "lru": nn.LRU,
    "selective": nn.SelectiveScan,
    "projected": lambda inputs, hidden, **options: nn.LSTM(inputs, hidden + 1, proj_size=hidden, **options),
    "two": lambda inputs, hidden, **options: nn.LSTM(inputs, hidden, num_layers=2, **options),
}  # fmt: skip


def parts_of(length: int, rng: np.random.Generator) -> list[slice]:
    """Cut a sequence at random places."""
    cuts = sorted({0, length, *rng.integers(1, length + 1, 3).tolist()})
    return [slice(a, b) for a, b in pairwise(cuts)]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(LAYERS)), inputs=sizes(1, 7), hidden=sizes(1, 9), steps=sizes(2, 40), batch=sizes(1, 4),
    batch_first=st.booleans(), saves=st.booleans(), seed=seeds,
)  # fmt: skip
def test_parts_of_a_sequence_are_the_sequence(kind, inputs, hidden, steps, batch, batch_first, saves, seed):
    rng = np.random.default_rng(seed)
    layer = LAYERS[kind](inputs, hidden, batch_first=batch_first, rng=rng, **F8)
    x = rng.standard_normal((batch, steps, inputs) if batch_first else (steps, batch, inputs))
    axis = 1 if batch_first else 0
    carried, parts = nn.CarriedState(layer), []
    for part in parts_of(steps, rng):
        with carried:
            given_part = x[:, part] if batch_first else x[part]
            parts.append(layer.forward(given_part)[0] if saves else layer(given_part))
    np.testing.assert_allclose(np.concatenate(parts, axis), layer(x), **CLOSE)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_thousand_steps_in_ten_parts_are_truncated_back_propagation(kind):
    """Against PyTorch, whose user detaches the state after each part."""
    model = nn.Sequential(getattr(nn, kind)(3, 6, 2, batch_first=True, rng=0, **F8), nn.Linear(6, 2, rng=1, **F8))
    theirs, head = getattr(torch.nn, kind)(3, 6, 2, batch_first=True).double(), torch.nn.Linear(6, 2).double()
    theirs.load_state_dict({n: torch.tensor(a) for n, a in model[0].state_dict().items()})
    head.load_state_dict({n: torch.tensor(a) for n, a in model[1].state_dict().items()})
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((4, 1000, 3)), rng.standard_normal((4, 1000, 2))
    run, carried, state = sb.value_and_grad(model, nn.MSELoss()), nn.CarriedState(model), None
    for start in range(0, 1000, 100):
        part = slice(start, start + 100)
        with carried:
            value, grads = run(x[:, part], target[:, part])
        theirs.zero_grad(), head.zero_grad()
        y, state = theirs(torch.tensor(x[:, part]), state)
        loss = torch.nn.functional.mse_loss(head(y), torch.tensor(target[:, part]))
        loss.backward()
        state = tuple(each.detach() for each in state) if kind == "LSTM" else state.detach()
        np.testing.assert_allclose(value, loss.item(), rtol=1e-12)
        for prefix, module in (("0", theirs), ("1", head)):
            for name, param in module.named_parameters():
                np.testing.assert_allclose(grads[f"{prefix}.{name}"], param.grad.numpy(), **CLOSE)


def test_containers_lengths_and_single_sequences():
    block = nn.Residual(nn.Sequential(nn.LayerNorm(5, **F8), nn.LRU(5, 4, rng=0, **F8), nn.GELU()))
    model = nn.Sequential(nn.Linear(3, 5, rng=1, **F8), nn.Stage(block, nn.SelectiveScan(5, 2, rng=2, **F8)))
    x = np.random.default_rng(0).standard_normal((12, 2, 3))
    carried = nn.CarriedState(model)
    with carried:
        first = model(x[:7])
    with carried:
        np.testing.assert_allclose(np.concatenate([first, model(x[7:])]), model_alone(model, x), **CLOSE)
    gru = nn.GRU(3, 4, rng=0, **F8)
    classifier, carried = nn.SequenceClassifier(gru, nn.Linear(4, 2, rng=1, **F8)), nn.CarriedState(gru)
    for lengths, part in (([7, 3], x[:7]), ([5, 5], x[7:])):
        with carried:
            logits = classifier(part, lengths=lengths)
    for s, steps in enumerate([[*range(12)], [0, 1, 2, 7, 8, 9, 10, 11]]):  # padding is no part of a sequence
        np.testing.assert_allclose(logits[s], classifier(x[steps, s : s + 1])[0], **CLOSE)
    with nn.CarriedState(gru) as alone:
        half = gru(x[:6, 1])
    with alone:
        np.testing.assert_allclose(np.concatenate([half, gru(x[6:, 1])]), model_alone(gru, x[:, 1]), **CLOSE)


def model_alone(model, x):
    """Run a model from zeros, also within a block."""
    with nn.CarriedState(model):
        return model(x)


@pytest.mark.parametrize("kind", ["lstm", "lru", "selective"])
def test_samples_are_reset_and_states_kept(kind):
    layer = LAYERS[kind](3, 4, rng=0, **F8)
    x = np.random.default_rng(0).standard_normal((9, 3, 3))
    carried, other = nn.CarriedState(layer), nn.CarriedState(layer)
    with carried:
        layer(x[:4])
    other.load_state_dict(dict(reversed(carried.state_dict().items())))  # files have any order
    carried.reset([False, True, False])
    with carried:
        y = layer(x[4:])
    with other:
        np.testing.assert_array_equal(layer(x[4:])[:, [0, 2]], y[:, [0, 2]])
    np.testing.assert_allclose(y[:, 1], layer(x[4:])[:, 1], **CLOSE)
    np.testing.assert_allclose(y[:, 2], layer(x)[4:, 2], **CLOSE)
    carried.reset()
    with carried:
        np.testing.assert_array_equal(layer(x), model_alone(layer, x))
    assert all(array.dtype == np.float64 for array in other.state_dict().values())


def test_a_failed_batch_leaves_the_state_and_a_given_one_is_taken():
    gru, x = nn.GRU(3, 4, rng=0), np.ones((5, 2, 3), np.float32)
    carried = nn.CarriedState(gru)
    with carried:
        gru(x)
    before = carried.state_dict()
    with pytest.raises(ZeroDivisionError), carried:
        gru(x)
        _ = 1 / 0
    with carried:
        y = gru(x, np.zeros((1, 2, 4), np.float32))
    np.testing.assert_array_equal(y, gru(x))
    np.testing.assert_array_equal(carried.state_dict()[".0"], before[".0"])


@pytest.mark.parametrize(
    ("make", "match"), [
        (lambda: nn.Linear(3, 3), "no state"), (lambda: nn.GRU(3, 4, bidirectional=True), "two directions"),
        (lambda: nn.GRUCell(3, 4), "a cell"), (lambda: "gru", "not a layer"),
        (lambda: nn.Sequential(*[nn.GRU(3, 3)] * 2), "twice"),
    ],
)  # fmt: skip
def test_models_that_cannot_go_on(make, match):
    with pytest.raises(OptionError, match=match):
        nn.CarriedState(make())


def test_batches_that_cannot_go_on():
    gru, other, x = nn.GRU(3, 4, rng=0), nn.GRU(3, 4, rng=0), np.ones((5, 2, 3), np.float32)
    carried = nn.CarriedState(gru)
    with pytest.raises(OptionError, match="again"), carried:
        gru(x)
        gru(x)
    with pytest.raises(OptionError, match="is not"), carried:
        other(x)
    with carried:
        gru(x)
    with pytest.raises(ShapeError, match=r"2 samples.*drop_last"), carried:
        gru(x[:, :1])
    gru.to(dtype=np.float64)
    with pytest.raises(sb.errors.DTypeError, match="h0"), carried:
        gru(x.astype(np.float64))
    for samples, error in (([0, 1], OptionError), ([True, False, True], ShapeError), (False, ShapeError)):
        with pytest.raises(error, match="reset"):
            carried.reset(samples)
    with pytest.raises(OptionError, match="not of this model"):
        carried.load_state_dict({"rnn.0": np.zeros(3)})
