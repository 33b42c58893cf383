"""A layer's buffers, such as running statistics, survive checkpoints."""

import numpy as np

from sparsebp import nn, optim
from sparsebp.train import Trainer


class Images:
    """Twelve small images with a class each."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.x, self.y = rng.standard_normal((12, 2, 4, 4), dtype=np.float32), rng.integers(0, 3, 12)

    def __len__(self):
        return len(self.y)

    def batch(self, indices):
        return self.x[indices], self.y[indices]


def trainer(folder):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, rng=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3, rng=2)
    )
    return Trainer(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters()), checkpoint_dir=folder, rng=0)


def test_a_resumed_run_has_the_running_statistics_of_an_uninterrupted_one(tmp_path):
    whole = trainer(tmp_path / "whole")
    losses = whole.fit(Images(), epochs=3, batch_size=4).loss
    trainer(tmp_path / "parts").fit(Images(), epochs=1, batch_size=4)
    resumed = trainer(tmp_path / "parts")
    assert resumed.fit(Images(), epochs=3, batch_size=4, resume=True).loss == losses
    for name, array in whole.model.state_dict().items():
        np.testing.assert_array_equal(resumed.model.state_dict()[name], array)
    assert int(resumed.model.state_dict()["1.num_batches_tracked"]) == 9
