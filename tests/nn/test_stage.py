"""A `Stage` is a `Sequential` that its surroundings see as one layer; pipelines of them: tests/runtime."""

from __future__ import annotations

import numpy as np
import pytest

import sparsebp as sb
from sparsebp import nn
from sparsebp.core.errors import OptionError
from sparsebp.train import Trainer

F8 = {"dtype": np.float64}
X = np.random.default_rng(0).standard_normal((4, 2, 6))
SEQUENCES = np.random.default_rng(1).standard_normal((6, 5, 3))
LENGTHS = np.array([5, 1, 3, 2, 5, 4])


def model(group, **options):
    rng = np.random.default_rng(2)
    return nn.Sequential(
        group(nn.Flatten(), nn.Linear(12, 8, rng=rng, **F8), nn.ReLU()),
        nn.Sequential(nn.Tanh(),
                      group(nn.Linear(8, 6, rng=rng, **F8), group(nn.Tanh(), nn.Linear(6, 3, rng=rng, **F8)))),
        **options,
    )  # fmt: skip


def test_a_schedule_sees_one_stage_a_group():
    staged, flat = model(nn.Stage), model(nn.Sequential)
    assert [name for name, _ in staged.stages()] == ["0", "1.0", "1.1"]
    assert len(flat.stages()) == 7
    assert staged.parameters().keys() == flat.parameters().keys() >= {"0.1.weight", "1.1.1.1.bias"}
    whole = nn.Stage(staged)
    assert whole.stages("a") == [("a", whole)]


@pytest.mark.parametrize("backward", ["bp", "linear", "blelloch"])
def test_jacobian_and_gradients_are_those_of_a_sequential(backward):
    staged, flat = model(nn.Stage, backward=backward), model(nn.Sequential)
    found, wanted = sb.jacobian_t(staged, X), sb.jacobian_t(flat, X)
    np.testing.assert_allclose(found.data, wanted.data, rtol=1e-13, atol=1e-15)
    assert found.pattern == wanted.pattern
    y, saved = staged.forward(X)
    np.testing.assert_array_equal(y, flat(X))
    gy = np.random.default_rng(3).standard_normal(y.shape)
    expected = flat.gradients(gy, flat.forward(X)[1])
    got = staged.gradients(gy, saved)
    np.testing.assert_allclose(got.input, expected.input, rtol=1e-12, atol=1e-15)
    for name, grad in expected.weights.items():
        np.testing.assert_allclose(got.weights[name], grad, rtol=1e-12, atol=1e-15)


def test_states_and_pruning_are_those_of_a_sequential():
    staged, flat = model(nn.Stage).to(dtype=np.float32).to(dtype=np.float64), model(nn.Sequential)
    assert np.any(staged(X) != flat(X))
    staged.load_state_dict(flat.state_dict())
    for each in (staged, flat):
        sb.prune(each, 0.9)
    np.testing.assert_array_equal(staged(X), flat(X))
    pattern = sb.jacobian_t(staged, X).pattern
    assert pattern == sb.jacobian_t(flat, X).pattern and pattern.nnz < 36


def test_a_stage_chooses_its_own_backward():
    layers = nn.Linear(6, 6, rng=0), nn.Tanh(), nn.Linear(6, 6, rng=1), nn.Tanh()
    staged = nn.Sequential(nn.Stage(*layers, backward="blelloch"), nn.Linear(6, 2, rng=1))
    assert "0: blelloch" in staged.explain(X[:, 0].astype(np.float32))
    assert staged.backward == "bp"


def sequences(*groups):
    return nn.Sequential(nn.GRU(3, 4, batch_first=True, rng=0, **F8), *groups, nn.Linear(4, 3, rng=1, **F8))


def test_lengths_reach_the_layers_inside():
    def parts():
        return nn.Tanh(), nn.GRU(4, 4, batch_first=True, rng=2, **F8), nn.MeanOverSteps(batch_first=True)

    want = sequences(*parts()).forward(SEQUENCES, LENGTHS)[0]
    tanh, *rest = parts()
    for groups in ((nn.Stage(tanh, *rest),), (nn.Stage(tanh), nn.Stage(nn.Stage(*rest), nn.Identity()))):
        np.testing.assert_array_equal(sequences(*groups).forward(SEQUENCES, LENGTHS)[0], want)
    found = []
    for staged in (nn.Stage(*sequences(*parts()).children.values()), sequences(nn.Stage(*parts()))):
        trainer = Trainer(staged, nn.CrossEntropyLoss(), sb.optim.SGD(staged.parameters(), 0.1), rng=0)
        found.append(trainer.fit((SEQUENCES, LENGTHS % 3), lengths=LENGTHS, epochs=2, batch_size=3).loss)
    assert found[0] == found[1]
    found = []
    for model in (sequences(), nn.Stage(*sequences().children.values())):  # a loss at every valid step
        trainer = Trainer(model, nn.MSELoss(), sb.optim.SGD(model.parameters(), 0.1), rng=0)
        target = np.where(np.arange(5)[:, None] < LENGTHS[:, None, None], 0.5, np.nan) * np.ones(3)
        found.append(trainer.fit((SEQUENCES, target), lengths=LENGTHS, epochs=2, batch_size=3).loss)
    assert found[0] == found[1] and np.isfinite(found[0]).all()


def test_lengths_that_a_layer_inside_does_not_take_are_refused():
    with pytest.raises(OptionError, match=r"1\.0 does not take lengths"):
        sequences(nn.Stage(nn.Softmax(1))).forward(SEQUENCES, LENGTHS)


def test_analysis_finds_a_recurrent_layer_inside():
    rnn, before = nn.RNN(3, 4, batch_first=True, rng=0), nn.Linear(3, 3, rng=1)
    x = SEQUENCES.astype(np.float32)
    want = sb.hidden_jacobians(nn.Sequential(before, rnn), x)
    np.testing.assert_array_equal(sb.hidden_jacobians(nn.Stage(before, nn.Stage(rnn)), x), want)
    np.testing.assert_array_equal(sb.hidden_jacobians(nn.Sequential(nn.Stage(before), nn.Stage(rnn)), x), want)
