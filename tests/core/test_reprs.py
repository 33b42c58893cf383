"""An object's text is the call that builds its like: what it says is tried."""

from __future__ import annotations

import numpy as np
import pytest

import sparsebp as sb
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks

LAYERS = [
    "Linear(4, 5)", "Linear(4, 5, bias=False)", "Conv2d(1, 2, (3, 5), stride=(2, 2), padding=(1, 2), bias=False)",
    "GRU(3, 4, num_layers=2, batch_first=True)", "LSTM(3, 4, bias=False, proj_size=2)", "LSTMCell(3, 4, bias=False)",
    "RNN(3, 4, nonlinearity='relu')", "MinGRU(3, 4)", "LRU(3, 4)", "SelectiveScan(4, d_state=3, dt_rank=2)",
    "BatchNorm2d(3)", "BatchNorm2d(3, affine=False)", "LayerNorm((4,), bias=False)", "GroupNorm(2, 4)",
    "Dropout(p=0.3)", "MaxPool2d((2, 2), stride=(1, 1))", "AdaptiveAvgPool2d((2, None))", "Softmax(dim=-1)",
    "Unflatten(1, (2, 3))", "Embedding(3, 4, padding_idx=0)", "ReLU()", "PReLU(num_parameters=3)",
    "CrossEntropyLoss(ignore_index=2, label_smoothing=0.1)", "MSELoss(reduction='sum')", "HuberLoss(delta=2.0)",
]  # fmt: skip


@pytest.mark.parametrize("text", LAYERS)
def test_layers_and_losses_show_the_call_that_builds_them(text: str) -> None:
    """Options at their default are left out, and nothing else."""
    built = eval(text, vars(nn))
    assert repr(built) == text
    again = eval(repr(built), vars(nn))
    if isinstance(built, nn.Layer):
        shapes = [{name: array.shape for name, array in layer.state_dict().items()} for layer in (built, again)]
        assert shapes[0] == shapes[1]


def test_models_show_their_layers_under_their_names() -> None:
    """As PyTorch shows a model; a layer of a user's as well, also half built."""

    class Net(nn.Layer):
        def __init__(self, width: int, weight: object) -> None:
            self.early = repr(self)
            super().__init__()
            self.width, self.weight_of_classes = width, weight
            self.head = nn.Sequential(nn.Linear(3, width), nn.ReLU())

        @property
        def weight(self) -> object:
            raise RuntimeError("not yet")

        def forward(self, x):
            return self.head.forward(x)

    net = Net(5, np.ones(3))
    assert net.early == "Net()"
    assert repr(net) == "Net(5,\n  (head): Sequential(\n    (0): Linear(3, 5)\n    (1): ReLU()\n  )\n)"


def test_optimizers_and_schedules_show_their_present_rates() -> None:
    """A group of parameters is a line, and a rate that a schedule has changed is the changed one."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    adam = optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99))
    assert repr(adam) == "AdamW(<3 parameters, 12 values>, lr=0.1, betas=(0.8, 0.99))"
    step = optim.StepLR(adam, 2, gamma=0.5)
    plateau = optim.ReduceLROnPlateau(adam, min_lr=0.01)
    for _ in range(2):
        step.step()
    assert repr(step) == "<StepLR(2, gamma=0.5) after 2 steps, lr 0.05>"
    assert repr(plateau) == "<ReduceLROnPlateau(min_lr=0.01), lr 0.05>"
    assert repr(adam).startswith("AdamW(<3 parameters, 12 values>, lr=0.05")
    extra = {"params": {"more": np.zeros((2, 2), np.float32)}, "lr": 1e-4}
    adam.add_param_group(extra)
    assert repr(adam).splitlines()[1] == "AdamW(<1 parameters, 4 values>, lr=0.0001, betas=(0.8, 0.99))"


def test_a_trainer_and_its_history_are_tables() -> None:
    """A history of many epochs shows the first and the last of them."""
    model = nn.Sequential(nn.Linear(2, 3, rng=0))
    trainer = sb.train.Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters()), clip_norm=1.0)
    text = repr(trainer)
    assert text.startswith(
        "Trainer(clip_norm=1.0,\n  (model): Sequential(\n    (0): Linear(2, 3)\n  )\n  (loss): Cross"
    )
    x, y = np.ones((7, 2), np.float32), np.zeros(7, np.int64)
    history = trainer.fit((x, y), epochs=12, batch_size=4, verbose=False)
    lines = repr(history).splitlines()
    assert lines[0] == "History: 12 epochs, 24 steps"
    assert lines[1].split() == ["epoch", "step", "train_loss", "train_accuracy", "seconds"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3", "4", "5", "…", "8", "9", "10", "11", "12"]
    assert float(lines[-1].split()[2]) == pytest.approx(history.epochs[-1].train_loss, rel=1e-3)
    assert repr(sb.train.History()) == "History: 0 epochs, 0 steps"


def test_callbacks_and_data_sets_show_the_call_that_builds_them() -> None:
    """A user's callback as well."""

    class Mine(sb.train.Callback):
        pass

    assert repr(Mine()) == "Mine()"
    text = "EarlyStopping(monitor='train_accuracy', patience=4, mode='max', restore_best=True)"
    assert repr(eval(text, vars(sb.train))) == text
    bits = "WithPositions(BitstreamDataset(10, samples=3), 2)"
    assert repr(eval(bits, vars(sb.data))) == bits
    table = sb.data.ArrayDataset([[1.0, 2.0]], [0], batch_first=True)
    assert repr(table) == "ArrayDataset(<float64 array (1, 2)>, <int64 array (1,)>, batch_first=True)"


def test_states_and_transports_show_whose_they_are() -> None:
    carried = nn.CarriedState(nn.Sequential(nn.GRU(3, 4), nn.ReLU()))
    assert repr(carried) == "CarriedState(\n  (0): GRU(3, 4)\n)"
    texts = run_ranks(2, repr)
    assert texts == [f"<InProcess: rank {rank} of 2>" for rank in range(2)]
