"""A run that is killed at any moment and resumed has bitwise equal losses."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core.errors import FileFormatError, OptionError, OutputError
from sparsebp.train import Checkpoint, EarlyStopping, ModelCheckpoint, Trainer, load_checkpoint, save_checkpoint
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
    (tmp_path / "best.safetensors").write_bytes(b"of the earlier run")
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
