"""A value that is not finite stops the run with its step and name; the last good checkpoint stays."""

import warnings

import numpy as np
import pytest

from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import NonFiniteError
from sparsebp.data import ArrayDataset, epoch_order
from sparsebp.train import Callback, EarlyStopping, ModelCheckpoint, Trainer, load_checkpoint
from sparsebp.train.nonfinite import Origin, loss_error, nonfinite
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
    found = "at step 11" if step == 10 else f"after step {step}"  # at the next loss, or before a checkpoint
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
    with pytest.raises(NonFiniteError, match=r"gradient is not finite at step 6 .*head\.weight"):
        trainer.fit(tiny.dataset(), epochs=1, batch_size=4)
    assert load_checkpoint(tmp_path / "checkpoint.safetensors").state["position"]["batch"] == 3


def test_a_batch_that_is_not_finite():
    data = tiny.dataset()
    data.inputs[4, 2, 1] = np.nan
    with pytest.raises(
        NonFiniteError, match=r"NaN in the batch's input: row 4 of the data set, at \(2, 1\)\. Leave such"
    ):
        tiny.trainer().fit(data, epochs=1, batch_size=4)


@pytest.mark.parametrize(
    ("x", "target", "prediction", "where"),
    [
        (1.0, np.nan, 1.0, "NaN in the batch's target: row 7 of the data set"),
        (np.inf, 1.0, np.nan, "infinity in the batch's input: row 7 of the data set"),
        (1.0, 1.0, np.nan, "NaN or infinity in the output of the model, with finite parameters"),
        (1.0, 1.0, 3e38, "the model's output is finite, the loss overflows (largest output 3e+38)"),
    ],
)
def test_where_a_loss_that_is_not_finite_comes_from(x, target, prediction, where):
    class Model:  # not made of layers
        def parameters(self):
            return {"w": np.ones(2)}

    x, target, prediction = (np.array([1, value], np.float32) for value in (x, target, prediction))
    origin = Origin(np.array([3, 7]))
    error = loss_error(7, 2, float("inf"), Model(), (x, target), prediction, origin, "There is no checkpoint.")
    assert error.got == f"inf; {where}" and "step 8 (epoch 3)" in str(error)


class Masked:
    """The mean over the targets that are not negative."""

    def forward(self, prediction, target):
        valid = target[:, None] >= 0
        return float((prediction * valid).sum() / valid.sum()) if valid.any() else np.nan, valid / valid.sum()

    def input_grad(self, saved):
        return np.broadcast_to(saved, (len(saved), 3)).astype(np.float32)

    def count(self, target):
        return (target >= 0).sum()


ABSENT = np.array([1, 1, 0], np.float32)


@pytest.mark.parametrize(("loss", "targets", "said"), [
    (nn.CrossEntropyLoss(ignore_index=2), [2] * 8, r"ignore_index=2 at all \d+ positions\. Leave such samples out"),
    (nn.NLLLoss(weight=ABSENT), [2] * 8, r"class weights that sum to 0: only the classes 2 occur\. Give these"),
    (Masked(), [-1] * 8, r"Masked\.count returns 0"),
], ids=["ignored", "weights", "own"])  # fmt: skip
@pytest.mark.parametrize("schedule", [None, "1f1b", "data-parallel"])
def test_a_step_in_which_nothing_counts_is_named(schedule, loss, targets, said):
    """The mean over nothing is NaN: a rate that is too large is not to blame."""

    def run(transport):
        layers = [nn.Linear(3, 4, rng=0), nn.Tanh(), nn.Linear(4, 3, rng=1)]
        model, options = nn.Sequential(*layers), {} if schedule is None else {"schedule": schedule}
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, loss, optimizer, accumulate=4, transport=transport, rng=0, **options)
        trainer.fit((np.ones((8, 3), np.float32), np.array(targets)), epochs=1, batch_size=8)

    with (
        np.errstate(all="ignore"),
        pytest.raises(NonFiniteError, match=rf"Nothing counts in the loss at step 1.*{said}"),
    ):
        run(None) if schedule is None else run_ranks(2, run)


def test_a_set_in_which_nothing_counts_is_named():
    model = nn.Linear(3, 4, rng=0)
    trainer = Trainer(model, nn.CrossEntropyLoss(ignore_index=2), optim.SGD(model.parameters(), lr=0.1), rng=0)
    x = np.ones((7, 3), np.float32)
    for call in (
        lambda: trainer.evaluate((x, np.full(7, 2)), batch_size=3),
        lambda: trainer.fit((x, np.zeros(7, int)), epochs=1, batch_size=7, validation=(x, np.full(7, 2))),
    ):
        with pytest.raises(NonFiniteError, match=r"over the whole set.*ignore_index=2 at all 7 positions"):
            call()


# ---- data that are not finite ----------------------------------------------------------------------------------------


def regression(callbacks=(), lr=0.1, **options):
    model = nn.Sequential(nn.Linear(4, 3, rng=0, dtype=float), nn.ReLU(), nn.Linear(3, 2, rng=1, dtype=float))
    optimizer = optim.SGD(model.parameters(), lr=lr)
    return Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks, rng=0, **options)


def arrays(samples=20, *, x=(), target=(), value=np.nan):
    """Return inputs and targets with a value at some places."""
    g = np.random.default_rng(0)
    parts = g.standard_normal((samples, 4)), g.standard_normal((samples, 2))
    for part, places in zip(parts, (x, target), strict=True):
        for place in places:
            part[place] = value
    return parts


ROW = r"row 17 of the data set, column 1\. Leave such rows out, or fill in the missing values"


@pytest.mark.parametrize("schedule", [None, "data-parallel", "1f1b"])
@pytest.mark.parametrize(("wrong", "said"), [
    ({"x": [(17, 1)]}, f"NaN in the batch's input: {ROW}"),
    ({"target": [(17, 1)], "value": np.inf}, f"infinity in the batch's target: {ROW}"),
])  # fmt: skip
def test_training_data_that_are_not_finite_are_named(schedule, wrong, said):
    def run(transport):
        options = {} if schedule is None else {"schedule": schedule, "transport": transport}
        regression(accumulate=2, **options).fit(arrays(**wrong), epochs=1, batch_size=6)

    with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match=said):
        run(None) if schedule is None else run_ranks(2, run)


def test_data_that_only_the_gradient_shows_are_named():
    """A ReLU that is off hides an infinity from the loss, not from the weights' gradient."""
    data = arrays(x=[(17, 1)], value=-np.inf)
    trainer = regression()
    trainer.model.parameters()["0.weight"][...] = 1  # all of row 17 is off
    with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match=f"gradient is not finite.*input: {ROW}"):
        trainer.fit(data, epochs=1, batch_size=6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("wrong", "said"), [
    ({"x": [(11, 3), (12, 0)]}, "input: row 11 of the validation set, column 3, and in 1 more row of the batch"),
    ({"target": [(11, 0)]}, "target: row 11 of the validation set, column 0"),
])  # fmt: skip
def test_validation_data_that_are_not_finite_are_named(ranks, wrong, said):
    def run(transport):
        options = {} if ranks == 1 else {"schedule": "data-parallel", "transport": transport}
        given = {"validation": arrays(**wrong), "validation_batch_size": 5}
        regression(**options).fit(arrays(), epochs=1, batch_size=20, **given)

    with pytest.raises(NonFiniteError, match=rf"loss over the validation set is not finite.*{said}.*Leave such"):
        run(None) if ranks == 1 else run_ranks(2, run)
    if ranks == 1:
        with pytest.raises(NonFiniteError, match=said.replace("validation", "data")):
            regression().evaluate(arrays(**wrong))


def test_predictions_that_are_not_finite_are_told():
    trainer, (x, _) = regression(), arrays(x=[(13, 2)])
    with pytest.warns(RuntimeWarning, match="not finite: NaN in the batch's input: row 13 of x, column 2$"):
        y = trainer.predict(x, batch_size=6)
    assert np.isfinite(np.delete(y, 13, 0)).all() and np.isnan(y[13]).all()
    trainer.model.parameters()["2.bias"][0] = np.nan
    with pytest.warns(RuntimeWarning, match=r"not finite: NaN or infinity in the parameters 2\.bias"):
        trainer.predict(arrays()[0])
    trainer.model.parameters()["2.bias"][0] = -np.inf  # the logarithm of a probability of 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isneginf(trainer.predict(arrays()[0])[:, 0]).all()


def test_a_model_that_overflows_in_evaluation_is_told():
    """The data are finite: `fit` goes on, and says where finiteness is lost."""

    class Far(nn.Tanh):
        def forward(self, x):
            return (x if self.training else x * np.inf), x

    trainer = regression()
    trainer.model = nn.Sequential(trainer.model, Far())
    trainer.optimizer = optim.SGD(trainer.model.parameters(), lr=1e-3)
    with pytest.warns(RuntimeWarning, match="loss over the validation set is inf: .* output of 1, with finite param"):
        trainer.fit(arrays(), epochs=1, batch_size=20, validation=arrays())


@pytest.mark.parametrize("values", [[np.nan] * 4, [1.0, np.nan, np.nan, np.nan], [np.nan, 2.0, 1.0, np.nan]])
def test_epochs_without_a_number_are_told(tmp_path, values):
    """They are no improvement; what is restored or written is the best of the others, or nothing, with a word."""

    class Moves(Callback):
        def on_epoch(self, record):
            self.trainer.model.parameters()["2.bias"][...] = record.epoch

        def set_trainer(self, trainer):
            self.trainer = trainer

    given, best = iter(values), int(np.nanargmin(values)) + 1 if np.isfinite(values).any() else None
    stopping = EarlyStopping("validation_own", patience=9, mode="min", restore_best=True)
    kept = ModelCheckpoint(tmp_path / "kept", "validation_own", mode="min", save_best_only=True)
    trainer = regression([Moves(), stopping, kept], lr=1e-300, metrics={"own": lambda y, t: next(given)})
    with pytest.warns(RuntimeWarning) as told:
        trainer.fit(arrays(), epochs=4, batch_size=20, validation=arrays())
    said = " ".join(str(one.message) for one in told)
    for epoch, value in enumerate(values, 1):
        assert (f"validation_own of epoch {epoch} is NaN" in said) == np.isnan(value)
    assert ("No epoch had a finite validation_own: no weights are restored" in said) == (best is None)
    assert ("No epoch had a finite validation_own: no checkpoint has been written" in said) == (best is None)
    assert (trainer.model.parameters()["2.bias"] == (4 if best is None else best)).all()
    assert (tmp_path / "kept").exists() == (best is not None)


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


def test_running_statistics_that_overflow_stop_the_run_and_are_never_saved(tmp_path):
    """The squares of a batch overflow, the loss does not: a checkpoint with such statistics could not be loaded."""

    def trainer():
        model = nn.Sequential(nn.Linear(2, 3, rng=0), nn.BatchNorm1d(3), nn.Linear(3, 2, rng=1))
        optimizer = optim.SGD(model.parameters(), lr=1e-30)
        return Trainer(model, nn.CrossEntropyLoss(), optimizer, checkpoint_dir=tmp_path, checkpoint_every=1, rng=0)

    x, target = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32), np.arange(8) % 2
    x[epoch_order(8, seed=0, epoch=0)[5]] = 1e25  # in the second batch
    with pytest.raises(
        NonFiniteError, match=r"Running statistics .*after step 2 \(epoch 1\).*1\.running_var"
    ) as caught:
        trainer().fit((x, target), epochs=1, batch_size=4)
    assert "scale the data" in caught.value.remedy and str(tmp_path) in caught.value.remedy
    assert load_checkpoint(tmp_path).state["position"]["batch"] == 1  # of the step before
    with pytest.raises(NonFiniteError, match=r"Running statistics .*after step 2"):
        trainer().fit((x, target), epochs=1, batch_size=4, resume=True)
