"""A value that is not finite stops the run with its step and name; the last good checkpoint stays."""

import numpy as np
import pytest

from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import NonFiniteError
from sparsebp.data import ArrayDataset
from sparsebp.train import Callback, Trainer, load_checkpoint
from sparsebp.train.trainer import loss_error, nonfinite
from train import tiny


class Spoil(Callback):
    """Writes a NaN into a parameter after a step."""

    def __init__(self, step, name="head.bias", value=np.nan):
        self.step, self.name, self.value, self.trainer = step, name, value, None

    def on_step(self, history):
        if history.steps == self.step:
            self.trainer.model.parameters()[self.name][0] = self.value


def run(folder, spoil, **options):
    trainer = tiny.trainer(folder, callbacks=[spoil], **options)
    spoil.trainer = trainer
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(tiny.dataset(), epochs=3, batch_size=4)
    assert caught.value.expected is not None
    assert caught.value.got is not None
    assert caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize(("step", "value"), [(3, np.nan), (8, np.inf), (10, -np.inf), (24, np.nan)])
def test_a_parameter_that_is_not_finite_is_named_and_never_saved(tmp_path, step, value):
    message = run(tmp_path, Spoil(step, value=value))
    found = "at step 10" if step == 10 else f"after step {step - 1}"  # at the next loss, or before a checkpoint
    assert all(part in message for part in (found, "head.bias", "checkpoint.safetensors"))
    checkpoint = load_checkpoint(tmp_path / "checkpoint.safetensors")
    assert checkpoint.state["position"]["batch"] == {3: 0, 8: 6, 10: 1, 24: 5}[step]
    assert not nonfinite(checkpoint.tensors)


def test_a_gradient_that_is_not_finite(tmp_path):
    trainer = tiny.trainer(tmp_path)
    weight_grad = trainer.model.weight_grad

    def spoilt(gy, saved):
        grads = weight_grad(gy, saved)
        if trainer.history.steps == 5:
            grads["head.weight"][0, 0] = np.inf
        return grads

    trainer.model.weight_grad = spoilt
    with pytest.raises(NonFiniteError, match=r"gradient is not finite at step 5 .*head\.weight"):
        trainer.fit(tiny.dataset(), epochs=1, batch_size=4)
    assert load_checkpoint(tmp_path / "checkpoint.safetensors").state["position"]["batch"] == 3


def test_a_batch_that_is_not_finite():
    data = tiny.dataset()
    data.inputs[4, 2, 1] = np.nan
    with pytest.raises(NonFiniteError, match="batch's input"):
        tiny.trainer().fit(data, epochs=1, batch_size=4)


@pytest.mark.parametrize(
    ("x", "target", "prediction", "where"),
    [
        (1.0, np.nan, 1.0, "NaN or infinity in the batch's target"),
        (np.inf, 1.0, np.nan, "NaN or infinity in the batch's input"),
        (1.0, 1.0, np.nan, "NaN or infinity in the output of the model, with finite parameters"),
        (1.0, 1.0, 3e38, "the model's output is finite, the loss overflows (largest output 3e+38)"),
    ],
)
def test_where_a_loss_that_is_not_finite_comes_from(x, target, prediction, where):
    class Model:  # not made of layers
        def parameters(self):
            return {"w": np.ones(2)}

    arrays = [np.array([1, value], np.float32) for value in (x, target, prediction)]
    error = loss_error(7, 2, float("inf"), Model(), *arrays, "There is no checkpoint.")
    assert error.got == f"inf; {where}" and "step 7" in str(error)


@pytest.mark.parametrize("schedule", [None, "1f1b", "data-parallel"])
def test_a_part_that_the_loss_ignores_is_named(schedule):
    """The mean over nothing is NaN: a rate that is too large is not to blame."""
    targets = np.array([0, 1, 2, 2, 0, 1, 2, 2])

    def run(transport):
        layers = [nn.Linear(3, 4, rng=0), nn.Tanh(), nn.Linear(4, 3, rng=1)]
        model, options = nn.Sequential(*layers), {} if schedule is None else {"schedule": schedule}
        loss, optimizer = nn.CrossEntropyLoss(ignore_index=2), optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, loss, optimizer, accumulate=4, transport=transport, rng=0, **options)
        trainer.fit((np.ones((8, 3), np.float32), targets), epochs=1, batch_size=8)

    with pytest.raises(NonFiniteError, match=r"ignores a whole batch.*step 0 .*ignore_index=2 at all"):
        run(None) if schedule is None else run_ranks(2, run)


def test_a_model_that_starts_spoilt():
    trainer = tiny.trainer()
    trainer.model.weight[0, 0] = np.nan
    with pytest.raises(NonFiniteError, match=r"before training.*head\.weight"):
        trainer.fit(tiny.dataset(), epochs=1, batch_size=4)


def test_the_first_layer_that_overflows_is_named():
    model = nn.Sequential(
        nn.Linear(2, 3, rng=0), nn.Sequential(nn.Tanh(), nn.Linear(3, 3, rng=0)), nn.Linear(3, 3, rng=0)
    )
    for name in ("0.weight", "1.1.weight", "2.weight"):
        model.parameters()[name][...] = 1e30 if name != "1.1.weight" else 3e38

    class NoOptimizer:
        lr = 0.0

    data = ArrayDataset(np.ones((4, 2), np.float32), np.zeros(4, np.int64))
    with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match=r"output of 1\.1, with finite parameters"):
        Trainer(model, nn.CrossEntropyLoss(), NoOptimizer(), rng=0).fit(data, epochs=1, batch_size=2)
    assert "forward" not in vars(model.children["0"])
