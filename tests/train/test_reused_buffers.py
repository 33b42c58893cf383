"""User data sets and layers that refill the same arrays; copies of optimizers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from sparsebp import nn, optim
from sparsebp.train import Trainer

X = np.random.default_rng(0).standard_normal((18, 5))
Y = np.arange(18) % 4


class Samples:
    """With `again`, every batch is in the same two arrays."""

    def __init__(self, again):
        self.again, self.x, self.y = again, np.empty((6, 5)), np.empty(6, int)

    def __len__(self):
        return len(X)

    def batch(self, indices):
        if not self.again:
            return X[indices], Y[indices]
        count = len(indices)
        self.x[:count], self.y[:count] = X[indices], Y[indices]
        return self.x[:count], self.y[:count]


def net():
    rng = np.random.default_rng(0)
    return nn.Sequential(nn.Linear(5, 6, dtype="f8", rng=rng), nn.Tanh(), nn.Linear(6, 4, dtype="f8", rng=rng))


@pytest.mark.parametrize("options", [
    {}, {"accumulate": 3}, {"accumulate": 2, "fusion": "forward"}, {"accumulate": 2, "fusion": "backward"},
    {"schedule": "ooo"},
], ids=str)  # fmt: skip
def test_a_data_set_may_fill_the_same_arrays_again(options):
    runs = []
    for again in (False, True):
        model = net()
        trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), rng=0, **options)
        runs.append((trainer.fit(Samples(again), epochs=3, batch_size=6).loss, model.state_dict()))
    (loss, state), (got, after) = runs
    assert got == loss
    for name, array in state.items():
        np.testing.assert_array_equal(after[name], array)


def test_predictions_of_a_layer_that_uses_its_output_again():
    class Again(nn.Layer):
        def __init__(self):
            super().__init__()
            self.room = np.empty((3, 4))

        def forward(self, x):
            self.room[: len(x)] = 2 * x
            return self.room[: len(x)], None

        def input_grad(self, gy, saved):
            return 2 * gy

    model = nn.Sequential(nn.Linear(5, 4, dtype="f8", rng=0), Again())
    trainer = Trainer(model, nn.MSELoss(), optim.SGD(model.parameters(), lr=0.1))
    np.testing.assert_array_equal(trainer.predict(X, batch_size=3), 2 * model[0](X))


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.RMSprop])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_model_and_its_optimizer_can_be_copied_together(kind, copied):
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    twin, other = copied((model, optimizer))
    assert other.params["0.weight"] is twin.parameters()["0.weight"]
    loss = nn.CrossEntropyLoss()
    for _ in range(3):
        for each, updates in ((model, optimizer), (twin, other)):
            updates.step(each.weight_grad(loss.forward(each(X), Y)[1], each.forward(X)[1]))
    for name, array in model.parameters().items():
        np.testing.assert_array_equal(twin.parameters()[name], array)
