"""A run that is killed at any moment and resumed has bitwise equal losses."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orders
from sparsebp import nn, optim
from sparsebp.core.errors import FileFormatError, OptionError, OutputError
from sparsebp.data import ArrayDataset, BitstreamDataset, ImageDataset, WithPositions
from sparsebp.train import (
    Callback,
    Checkpoint,
    EarlyStopping,
    ModelCheckpoint,
    Trainer,
    load_checkpoint,
    save_checkpoint,
)
from sparsebp.train.identity import fingerprint
from train import tiny

SCRIPT = Path(__file__).with_name("tiny.py")


def fit(folder, *, callbacks=(), epochs=4, **options):
    t = tiny.trainer(folder, callbacks=callbacks)
    return t.fit(tiny.dataset(), epochs=epochs, batch_size=4, validation=tiny.dataset(7), **options), t


def without_times(history):
    return [{k: v for k, v in r.to_json().items() if k != "seconds"} for r in history.epochs]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole"))


def assert_same_run(history, trainer, uninterrupted):
    whole, whole_trainer = uninterrupted
    for name in ("loss", "accuracy", "grad_norm", "lr", "samples"):
        assert getattr(history, name) == getattr(whole, name), name
    assert without_times(history) == without_times(whole)
    for name, array in trainer.model.parameters().items():
        np.testing.assert_array_equal(array, whole_trainer.model.parameters()[name])


@pytest.mark.parametrize("step", [1, 2, 3, 8, 9, 16, 31, 32])
def test_stopped_at_any_step_and_resumed(tmp_path, uninterrupted, step):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[orders.Stop(step)])
    assert_same_run(*fit(tmp_path, resume=True), uninterrupted)


@pytest.mark.parametrize("epochs", [2, 4])
def test_more_epochs_after_the_end_or_none(tmp_path, uninterrupted, epochs):
    fit(tmp_path, epochs=epochs)
    assert_same_run(*fit(tmp_path, resume=True), uninterrupted)


def test_a_run_killed_before_its_first_checkpoint_starts_at_the_beginning(tmp_path, uninterrupted, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sparsebp.train.trainer.save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path)
    assert_same_run(*fit(tmp_path, resume=True), uninterrupted)


@pytest.mark.parametrize("name", ["typo", "other"])
def test_where_no_run_ever_began_none_is_resumed(tmp_path, name):
    (tmp_path / "other").mkdir()
    with pytest.raises(FileFormatError, match=name) as caught:
        fit(tmp_path / name, resume=True)
    assert caught.value.expected and caught.value.got and caught.value.remedy
    assert [p.name for p in tmp_path.rglob("*")] == ["other"]  # nothing has been made either


def test_sigkill_then_resume(tmp_path, uninterrupted):
    process = subprocess.Popen([sys.executable, SCRIPT, tmp_path, "False", "0.05"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 11:
            process.kill()
            break
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    subprocess.run([sys.executable, SCRIPT, tmp_path, "True", "0"], check=True, capture_output=True)
    whole, trainer = uninterrupted
    checkpoint = load_checkpoint(tmp_path / "checkpoint.safetensors")
    assert checkpoint.part("history")["loss"].tolist() == whole.loss
    assert len(checkpoint.state["epochs"]) == 4
    for name, array in trainer.model.parameters().items():
        np.testing.assert_array_equal(checkpoint.part("model")[name], array)


def test_a_run_that_starts_anew_leaves_an_earlier_one_alone(tmp_path):
    _, trainer = fit(tmp_path)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    for again in (tiny.trainer(tmp_path), trainer):  # another trainer, or the same
        with pytest.raises(OutputError, match=r"holds an earlier run.*after 32 steps") as caught:
            again.fit(tiny.dataset(), epochs=1, batch_size=4)
        assert "resume=True" in caught.value.remedy and "overwrite=True" in caught.value.remedy
    with pytest.raises(OptionError, match="resumed or overwritten"):
        fit(tmp_path, resume=True, overwrite=True)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    for name in ("best.safetensors", ".sparsebp-01-best.safetensors", ".sparsebp-02-checkpoint.safetensors"):
        (tmp_path / name).write_bytes(b"of the earlier run")  # two of them left when it was killed
    assert fit(tmp_path, epochs=1, overwrite=True)[0].steps == 8
    assert len(load_checkpoint(tmp_path).part("history")["loss"]) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [".sparsebp-lock", "checkpoint.safetensors"]
    (tmp_path / "checkpoint.safetensors").rename(tmp_path / "best.safetensors")
    with pytest.raises(OutputError, match=r"Got best\.safetensors"):
        fit(tmp_path)


def test_a_folder_in_which_no_step_was_taken_is_free(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[orders.Stop(1)])
    assert not load_checkpoint(tmp_path).part("history")["loss"].size
    assert fit(tmp_path, epochs=1)[0].steps == 8


def test_an_evaluation_writes_nothing(tmp_path):
    """fit(epochs=0): in a new folder, in one of a run, and of the run that is resumed; callbacks neither."""
    kept = ModelCheckpoint(tmp_path / "kept" / "c.safetensors", save_best_only=True)
    callbacks = [kept, EarlyStopping(restore_best=True)]
    assert fit(tmp_path / "new", callbacks=callbacks, epochs=0)[0].steps == 0
    assert not list(tmp_path.iterdir())
    _, trainer = fit(tmp_path / "run", callbacks=callbacks, epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert fit(tmp_path / "run", callbacks=callbacks, epochs=0)[0].steps == 0
    for path in (tmp_path / "kept" / "c.safetensors", tmp_path / "run" / "best.safetensors"):
        path.unlink()  # as if killed before the callback: a resumed run would write it
    history, resumed = fit(tmp_path / "run", callbacks=callbacks, epochs=0, resume=True)
    assert history.steps == 8 and np.array_equal(resumed.model.weight, trainer.model.weight)
    assert list(tmp_path.rglob("*.safetensors")) == [tmp_path / "run" / "checkpoint.safetensors"]
    assert (tmp_path / "run" / "checkpoint.safetensors").read_bytes() in before.values()
    with pytest.raises(FileFormatError, match="no run to resume"):
        fit(tmp_path / "new", epochs=0, resume=True)


@pytest.mark.parametrize(
    ("options", "fit_options", "words"),
    [
        ({"rng": 8}, {}, "the seed"),
        ({"config": {"hidden": 3}}, {}, "hidden"),
        ({"inputs": 3}, {}, "head.weight"),
        ({}, {"batch_size": 5}, "batch_size"),
        ({}, {"samples": 31}, "samples"),
        ({}, {"drop_last": True}, "drop_last"),
        ({}, {"shuffle": False}, "shuffle"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, options, fit_options, words):
    fit(tmp_path, epochs=1)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    fit_options = {"samples": 30, "batch_size": 4} | fit_options
    data = tiny.dataset(fit_options.pop("samples"))
    with pytest.raises(FileFormatError, match=words) as caught:
        tiny.trainer(tmp_path, **options).fit(data, epochs=2, resume=True, **fit_options)
    assert caught.value.expected is not None
    assert caught.value.got is not None
    assert caught.value.remedy
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.parametrize("step", [3, 8])
def test_a_checkpoint_from_before_batches_had_options(tmp_path, uninterrupted, step):
    """Its batches were shuffled, the last one was kept, and samples were what counts."""
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[orders.Stop(step)])
    path = tmp_path / "checkpoint.safetensors"
    now = load_checkpoint(path)
    tensors = {name: array for name, array in now.tensors.items() if not name.endswith("_weight")}
    position = {name: value for name, value in now.state["position"].items() if name not in ("drop_last", "shuffle")}
    assert len(tensors) == len(now.tensors) - 2 and len(position) == len(now.state["position"]) - 2
    save_checkpoint(path, Checkpoint(tensors, {**now.state, "position": position}))
    assert_same_run(*fit(tmp_path, resume=True), uninterrupted)


def test_resume_needs_a_folder():
    with pytest.raises(OptionError, match="folder"):
        tiny.trainer(None).fit(tiny.dataset(), epochs=1, batch_size=4, resume=True)


def test_the_seed_of_a_run_without_one_is_kept(tmp_path):
    first = tiny.trainer(tmp_path, rng=None)
    first.fit(tiny.dataset(), epochs=1, batch_size=4)
    second = tiny.trainer(tmp_path, rng=None)
    second.fit(tiny.dataset(), epochs=2, batch_size=4, resume=True)
    assert second.seed == first.seed


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "best.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_checkpoints_that_are_no_files_are_refused_before_anything_is_moved(tmp_path, resume, name, kind):
    folder = tmp_path / "run"
    fit(folder, epochs=1)
    if (folder / name).exists():
        (folder / name).rename(tmp_path / "target")
    else:
        (tmp_path / "target").write_bytes(b"x")
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "link":
        (folder / name).symlink_to(tmp_path / "target")
    else:
        os.mkfifo(folder / name)
    before = {p.name: p.lstat() for p in folder.iterdir()}
    with pytest.raises(OutputError, match=name):
        fit(folder, resume=resume)
    after = {p.name: p.lstat() for p in folder.iterdir()}
    assert {n: (s.st_mode, s.st_ino, s.st_nlink) for n, s in after.items()} == {
        n: (s.st_mode, s.st_ino, s.st_nlink) for n, s in before.items()
    }


def test_of_another_model_says_so_before_its_other_defaults(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2, rng=0))
    data = np.zeros((4, 3), np.float32), np.zeros(4, np.int64)

    def trainer(**config):
        return Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), checkpoint_dir=tmp_path,
                       config=config)  # fmt: skip

    trainer(task="digits", model="lenet5", lr=0.003).fit(data, epochs=1, batch_size=4)
    with pytest.raises(FileFormatError, match="model differs"):
        trainer(task="digits", model="vgg11", lr=0.0005).fit(data, epochs=1, batch_size=4, resume=True)


# ---- options ---------------------------------------------------------------------------------------------------------


class Scaled:
    """A loss of one's own: `scale` is its option, `calls` its state."""

    def __init__(self, scale=1.0):
        self.scale, self.calls, self.inner = scale, 0, nn.CrossEntropyLoss()

    def forward(self, prediction, target):
        self.calls += 1
        value, saved = self.inner.forward(prediction, target)
        return self.scale * value, saved

    def input_grad(self, saved):
        return self.inner.input_grad(saved) * np.float32(self.scale)


X, Y = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32), np.arange(12) % 3


def run(folder, *, optimizer=optim.Adam, scheduler=None, loss=None, layers=(), groups=None, fit=None, data=None,
        **options):  # fmt: skip
    """Train a small model; the keywords are options of the parts."""
    extra = {name: options.pop(name) for name in ("lr", "betas", "momentum") if name in options}
    model = nn.Sequential(nn.Linear(4, 5, rng=0), *layers, nn.Linear(5, 3, rng=1))
    params = model.parameters()
    if groups is not None:
        arrays = list(params.items())
        params = [{"params": dict(arrays[:2]), "weight_decay": groups[0]},
                  {"params": dict(arrays[2:]), "weight_decay": groups[1]}]  # fmt: skip
    made = optimizer(params, **{"lr": 0.1, **extra})
    trainer = Trainer(model, loss or nn.CrossEntropyLoss(), made, rng=1, checkpoint_dir=folder,
                      lr_scheduler=None if scheduler is None else scheduler(made), **options)  # fmt: skip
    trainer.fit(data or (X, Y), **{"epochs": 1, "batch_size": 4, "verbose": False, **(fit or {})})
    return trainer


RESUME = {"resume": True, "epochs": 2}


@pytest.mark.parametrize(("then", "now", "said"), [
    ({}, {"lr": 0.2}, "lr of the optimizer differs. Expected 0.2. Got 0.1 in the file"),
    ({}, {"betas": (0.8, 0.999)}, "betas of the optimizer differs"),
    ({"optimizer": optim.SGD}, {"optimizer": optim.SGD, "momentum": 0.9}, "momentum of the optimizer differs"),
    ({}, {"optimizer": optim.AdamW}, "the optimizer differs. Expected AdamW. Got Adam"),
    ({"groups": (0.0, 0.1)}, {"groups": (0.1, 0.0)}, "weight_decay of the optimizer's group of 0.bias differs"),
    *(({"scheduler": lambda o: optim.CosineAnnealingLR(o, 9)}, {"scheduler": scheduler, **more}, said)
      for scheduler, more, said in (
          (lambda o: optim.CosineAnnealingLR(o, 8), {}, "T_max of the learning-rate schedule differs"),
          (lambda o: optim.CosineAnnealingLR(o, 9), {"lr": 0.2}, "lr of the optimizer differs. Expected 0.2. Got 0.1"),
          (lambda o: optim.ExponentialLR(o, 0.9), {}, "class of the learning-rate schedule differs"),
          (None, {}, "the learning-rate schedule differs"),
      )),
    ({"scheduler": lambda o: optim.MultiStepLR(o, [2])}, {"scheduler": lambda o: optim.MultiStepLR(o, [3])},
     "milestones of the learning-rate schedule differs"),
    ({"scheduler": lambda o: [optim.LinearLR(o, 0.5), optim.ReduceLROnPlateau(o)]},
     {"scheduler": lambda o: [optim.LinearLR(o, 0.5), optim.ReduceLROnPlateau(o, patience=3)]}, "'patience': 3"),
    ({}, {"clip_norm": 1.0}, "clip_norm differs. Expected 1.0. Got None"),
    ({}, {"accumulate": 2}, "accumulate differs"),
    ({}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "label_smoothing of the loss differs"),
    ({"loss": nn.CrossEntropyLoss(weight=np.ones(3, np.float32))},
     {"loss": nn.CrossEntropyLoss(weight=np.arange(1, 4, dtype=np.float32))}, "weight of the loss differs"),
    ({}, {"loss": nn.NLLLoss()}, "class of the loss differs"),
    ({"loss": Scaled()}, {"loss": Scaled(2.0)}, "scale of the loss differs. Expected 2.0. Got 1.0"),
    ({"layers": [nn.Dropout(0.3, rng=0)]}, {"layers": [nn.Dropout(0.4, rng=0)]}, "p of the layer 1 differs"),
    ({"layers": [nn.Unflatten(1, (1, 5)), nn.AvgPool1d(3, 1, 1), nn.Flatten()]},
     {"layers": [nn.Unflatten(1, (1, 5)), nn.AvgPool1d(5, 1, 2), nn.Flatten()]}, "kernel_size of the layer 2"),
    ({"layers": [nn.ReLU()]}, {"layers": [nn.Tanh()]}, "class of the layer 1 differs. Expected Tanh. Got ReLU"),
])  # fmt: skip
def test_an_option_that_changes_the_losses_is_not_ignored(tmp_path, then, now, said):
    run(tmp_path, **then)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(FileFormatError) as caught:
        run(tmp_path, **now, fit=RESUME)
    assert said in str(caught.value)
    assert "options of the first call" in caught.value.remedy and "weights" in caught.value.remedy
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert run(tmp_path, **then, fit=RESUME).history.steps == 6


def test_a_group_that_was_added_in_the_run_is_no_other_option(tmp_path):
    """A resumed run adds it before fit; the options of the first group are compared nevertheless."""

    class Unfreeze(Callback):
        def set_trainer(self, trainer):
            self.trainer = trainer

        def on_epoch(self, record):
            if len(self.trainer.optimizer.param_groups) == 1:
                unfreeze(self.trainer)

    def unfreeze(trainer):
        params = trainer.model.parameters()
        rest = {name: array for name, array in params.items() if name[0] == "0"}
        trainer.optimizer.add_param_group({"params": rest, "lr": 0.02})

    def make(lr=0.1, callbacks=()):
        model = nn.Sequential(nn.Linear(4, 5, rng=0), nn.Linear(5, 3, rng=1))
        head = {name: array for name, array in model.parameters().items() if name[0] == "1"}
        return Trainer(model, nn.CrossEntropyLoss(), optim.SGD(head, lr), rng=1, checkpoint_dir=tmp_path,
                       callbacks=callbacks)  # fmt: skip

    make(callbacks=[Unfreeze()]).fit((X, Y), epochs=2, batch_size=4)
    again, other = make(), make(lr=0.3)
    unfreeze(other)
    with pytest.raises(FileFormatError, match=r"lr of the optimizer's group of 1\.bias differs\. Expected 0\.3"):
        other.fit((X, Y), epochs=3, batch_size=4, resume=True)
    unfreeze(again)
    assert again.fit((X, Y), epochs=3, batch_size=4, resume=True).steps == 9


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_callback_that_unfreezes_goes_on_in_a_resumed_run(tmp_path, cut):
    """The resumed run gets the groups that were added, wherever it was cut; a refused one does not."""

    class Unfreeze(Callback):
        broken = False

        def set_trainer(self, trainer):
            self.trainer = trainer

        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            if self.broken:
                raise ValueError("broken")

        def on_epoch(self, record):
            if record.epoch == 2:
                optimizer, params = self.trainer.optimizer, self.trainer.model.parameters()
                rest = {name: array for name, array in params.items() if name not in optimizer.params}
                optimizer.add_param_group({"params": rest, "lr": 0.02})

    def make(folder=None):
        model = nn.Sequential(nn.Linear(4, 5, rng=0), nn.Linear(5, 3, rng=1))
        head = {name: array for name, array in model.parameters().items() if name[0] == "1"}
        optimizer = optim.SGD(head, 0.1, momentum=0.9)
        schedules = [optim.ExponentialLR(optimizer, 0.9), optim.ReduceLROnPlateau(optimizer, patience=0)]
        return Trainer(model, nn.CrossEntropyLoss(), optimizer, rng=1, checkpoint_dir=folder, callbacks=[Unfreeze()],
                       lr_scheduler=schedules)  # fmt: skip

    whole = make()
    wanted = whole.fit((X, Y), epochs=4, batch_size=4)
    make(tmp_path).fit((X, Y), epochs=cut, batch_size=4)
    resumed = make(tmp_path)
    with pytest.raises(FileFormatError, match="samples differs"):
        resumed.fit((X[:9], Y[:9]), epochs=4, batch_size=4, resume=True)
    resumed.callbacks[0].broken = True
    with pytest.raises(FileFormatError, match="broken"):
        resumed.fit((X, Y), epochs=4, batch_size=4, resume=True)
    resumed.callbacks[0].broken = False
    assert list(resumed.optimizer.params) == ["1.weight", "1.bias"] and len(resumed.optimizer.param_groups) == 1
    assert resumed.fit((X, Y), epochs=4, batch_size=4, resume=True).loss == wanted.loss
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [g["lr"] for g in whole.optimizer.param_groups]
    for name, array in whole.model.parameters().items():
        np.testing.assert_array_equal(resumed.model.parameters()[name], array)


def test_what_changes_no_loss_may_change(tmp_path):
    run(tmp_path, lr=0.1)
    more = {"fusion": "backward", "checkpoint_every": 1, "callbacks": [EarlyStopping("train_loss", 9)]}
    assert run(tmp_path, **more, fit=RESUME).history.loss == run(None, fit={"epochs": 2}).history.loss


class Halve(Callback):
    """Sets the rate after every epoch; may stop in the middle of the next one."""

    def __init__(self, stop):
        self.stop, self.trainer = stop, None

    def set_trainer(self, trainer):
        self.trainer = trainer

    def on_epoch(self, record):
        self.trainer.optimizer.lr /= 2

    def on_step(self, history):
        if history.steps == self.stop:
            self.stop = None
            raise KeyboardInterrupt


@pytest.mark.parametrize("scheduler", [
    None, lambda o: optim.OneCycleLR(o, 0.1, 12), lambda o: optim.ReduceLROnPlateau(o, patience=0),
    tiny.TinyDecay,
])  # fmt: skip
@pytest.mark.parametrize("again", ["the same trainer", "another one"])
def test_a_rate_that_training_has_moved_is_no_other_option(tmp_path, scheduler, again):
    """Options count as they were given, and where the same trainer goes on, as its last fit has left them."""

    def make(stop):
        model = nn.Sequential(nn.Linear(4, 5, rng=0), nn.Linear(5, 3, rng=1))
        sgd = optim.SGD(model.parameters(), lr=0.1)
        callbacks = [Halve(stop)] if scheduler is None else [orders.Stop(stop)] if stop else []
        return Trainer(model, Scaled(), sgd, lr_scheduler=scheduler and scheduler(sgd), callbacks=callbacks, rng=1,
                       checkpoint_dir=tmp_path)  # fmt: skip

    trainer = make(5)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit((X, Y), epochs=3, batch_size=4)
    trainer = trainer if again == "the same trainer" else make(None)
    if scheduler is not None:
        trainer.callbacks = ()
    assert trainer.fit((X, Y), epochs=3, batch_size=4, resume=True).steps == 9
    trainer.optimizer.lr = 0.7  # by hand
    with pytest.raises(FileFormatError, match=r"lr of the optimizer differs. Expected 0\.7"):
        trainer.fit((X, Y), epochs=4, batch_size=4, resume=True)


def test_older_checkpoints_say_less_and_are_resumed(tmp_path):
    """Those of version 0.2 have neither options nor numbers of the data, and count epochs from 0."""
    run(tmp_path)
    kept = load_checkpoint(tmp_path)
    state = {name: value for name, value in kept.state.items() if name not in ("options", "earlier_steps")}
    state["epochs"] = [record | {"epoch": record["epoch"] - 1} for record in state["epochs"]]
    tensors = {name: array for name, array in kept.tensors.items() if not name.startswith("data.")}
    save_checkpoint(tmp_path / "checkpoint.safetensors", Checkpoint(tensors, state))
    trainer = run(tmp_path, fit=RESUME)
    assert [record.epoch for record in trainer.history.epochs] == [1, 2]
    assert trainer.history.loss == run(None, fit={"epochs": 2}).history.loss
    with pytest.raises(FileFormatError, match="lr of the optimizer"):  # from now on they are known
        run(tmp_path, lr=0.3, fit={"resume": True, "epochs": 3})


# ---- data ------------------------------------------------------------------------------------------------------------


def other(change):
    """Return the data after a change of one part."""
    x, y = X.copy(), Y.copy()
    change(x, y)
    return x, y


@pytest.mark.parametrize(("data", "said"), [
    (other(lambda x, y: x.__setitem__((5, 2), x[5, 2] + 0.01)), "inputs in 1 of 12 samples"),
    (other(lambda x, y: y.__setitem__(7, 0)), "targets in 1 of 12"), ((X, np.roll(Y, 1)), "targets in 12 of 12"),
    ((X[::-1].copy(), Y[::-1].copy()), "inputs in 12 of 12"), ((X[:, ::-1].copy(), Y), "inputs in 12 of 12"),
    (ArrayDataset(X, Y, scale=2.0), "inputs in 12 of 12"),
    (other(lambda x, y: x.__setitem__((0, 0), np.nan)), "inputs in 1 of 12"),
])  # fmt: skip
def test_other_data_of_the_same_size_is_noticed(tmp_path, data, said):
    run(tmp_path, fit={"validation": (X, Y)})
    for sets, which in (({"data": data}, "training"), ({"fit": {"validation": data}}, "validation")):
        with pytest.raises(FileFormatError, match=f"other data: the {which} set differs") as caught:
            run(tmp_path, **sets | {"fit": RESUME | sets.get("fit", {})})
        assert said in caught.value.got and "same samples" in caught.value.remedy
    assert run(tmp_path, fit=RESUME).history.steps == 6  # without a validation set, of which the file knows
    with pytest.raises(FileFormatError, match="the validation set differs"):
        run(tmp_path, fit={"resume": True, "epochs": 3, "validation": data})


def test_data_computed_anew_may_be_rounded_otherwise(tmp_path):
    run(tmp_path, data=(X, Y), fit={"validation": (X, Y)})
    noisy = X * (1 + np.random.default_rng(1).uniform(-1e-7, 1e-7, X.shape)).astype(np.float32)
    assert (noisy != X).any()
    assert run(tmp_path, data=(noisy, Y), fit=RESUME | {"validation": (noisy.astype(float), Y)}).history.steps == 6


def test_of_a_data_set_of_ones_own_only_the_size_is_known(tmp_path):
    class Own:
        asked = 0

        def __len__(self):
            return 12

        def batch(self, indices):
            self.asked += 1
            return X[indices] + np.float32(self.asked), Y[indices]

    run(tmp_path, data=Own())
    own = Own()
    assert run(tmp_path, data=own, fit=RESUME).history.steps == 6 and own.asked == 3
    assert not any(name.startswith("data.") for name in load_checkpoint(tmp_path).tensors)
    assert run(tmp_path, fit={"resume": True, "epochs": 3}).history.steps == 9  # nothing to compare with


@given(seed=st.integers(0, 9), kind=st.sampled_from(["arrays", "words", "lengths", "bits", "places", "images"]))
def test_every_data_set_has_numbers_of_its_own(seed, kind):
    def make(seed):
        rng = np.random.default_rng(seed)
        targets = rng.integers(0, 5, 70)
        if kind in ("bits", "places"):
            bits = BitstreamDataset(11, 70, rng=seed)
            return bits if kind == "bits" else WithPositions(bits, 2)
        if kind == "images":
            return ImageDataset(rng.integers(0, 256, (70, 1, 3, 3)).astype(np.uint8), targets, mean=[0.5], std=[0.5])
        if kind == "words":
            return ArrayDataset(rng.integers(0, 50_000, (70, 9)), targets, dtype=int)
        lengths = rng.integers(1, 5, 70) if kind == "lengths" else None
        return ArrayDataset(rng.standard_normal((70, 4, 3)), targets, lengths=lengths)

    first, same, another = fingerprint(make(seed)), fingerprint(make(seed)), fingerprint(make(seed + 10))
    assert list(first) == ["inputs", "targets", *(["lengths"] if kind == "lengths" else [])]
    for name, numbers in first.items():
        assert numbers.shape == (2, 70) and (abs(numbers[0] - same[name][0]) <= numbers[1]).all()
        assert (abs(numbers[0] - another[name][0]) > numbers[1]).sum() > 35
    if kind == "words":
        words = make(seed)
        words.inputs[3, 4] += 1
        assert (abs(fingerprint(words)["inputs"][0] - first["inputs"][0]) > first["inputs"][1]).sum() == 1


# ---- a second fit ----------------------------------------------------------------------------------------------------


def test_a_second_fit_is_a_run_of_its_own_that_says_what_it_stands_on(tmp_path, capsys):
    """It goes on from the weights, as in Keras; its history does not mix with the first one."""
    heard = []

    class Hear(Callback):
        def on_start(self, info):
            heard.append((info.earlier_steps, info.resumed, info.first_step))

    trainer = tiny.trainer(callbacks=[Hear()])
    first = trainer.fit(tiny.dataset(), epochs=2, batch_size=10, verbose=True)
    assert capsys.readouterr().err.startswith("epoch   1")
    second = trainer.fit(tiny.dataset(20), epochs=1, batch_size=10, verbose=True)
    assert capsys.readouterr().err.startswith("The model goes on from 6 earlier steps; epochs and history start anew")
    assert first is not second and trainer.history is second
    assert (first.steps, second.steps, first.earlier_steps, second.earlier_steps) == (6, 2, 0, 6)
    assert [record.epoch for record in second.epochs] == [1] and trainer.optimizer.count == 8
    assert heard == [(None, False, 0), (6, False, 0)]
    kept = tiny.trainer(tmp_path)
    kept.fit(tiny.dataset(), epochs=1, batch_size=10)
    kept.fit(tiny.dataset(), epochs=1, batch_size=10, overwrite=True)
    resumed = tiny.trainer(tmp_path, callbacks=[Hear()]).fit(tiny.dataset(), epochs=2, batch_size=10, resume=True)
    assert (resumed.steps, resumed.earlier_steps, heard[-1]) == (6, 3, (3, True, 3))


def test_a_resume_that_is_refused_leaves_the_history(tmp_path):
    run(tmp_path)
    trainer = run(None)
    trainer.checkpoint_dir, history = tmp_path, trainer.history
    with pytest.raises(FileFormatError, match="samples differs"):
        trainer.fit((X[:9], Y[:9]), epochs=2, batch_size=4, resume=True)
    assert trainer.history is history and history.steps == 3
