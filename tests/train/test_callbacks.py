"""Progress on a terminal and elsewhere, early stopping, checkpoints of the best epochs; resumed, and on ranks."""

from __future__ import annotations

import io
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelines as p
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core import backend
from sparsebp.core.errors import FileFormatError, OptionError, OutputError
from sparsebp.train import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochRecord,
    History,
    JsonLines,
    ModelCheckpoint,
    ProgressBar,
    Trainer,
    WeightAveraging,
    load_checkpoint,
    save_checkpoint,
)
from sparsebp.train.callbacks import epoch_line
from train import tiny

# ---- progress ------------------------------------------------------------------------------------------------------


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return super().isatty() or self.terminal


@pytest.mark.parametrize(("terminal", "verbose", "rich", "shown"), [
    (True, None, True, "bar"), (True, True, True, "bar"), (True, None, False, "lines"), (True, False, True, "nothing"),
    (False, None, True, "nothing"), (False, True, True, "lines"), (False, False, True, "nothing"),
])  # fmt: skip
def test_fit_shows_how_far_it_is(monkeypatch, terminal, verbose, rich, shown):
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    tiny.trainer().fit(tiny.dataset(), epochs=2, batch_size=10, validation=tiny.dataset(5), verbose=verbose)
    text = stream.getvalue()
    if shown == "bar":
        assert all(part in text for part in ("\x1b", "epoch 2/2", "(test ", "6/6"))
    elif shown == "lines":
        assert [line[:9] for line in text.splitlines()] == ["epoch   1", "epoch   2"] and "\x1b" not in text
    else:
        assert text == ""


@pytest.mark.parametrize("make", [ProgressBar, lambda: JsonLines(sys.stdout)])
def test_what_a_callback_shows_is_not_shown_twice(monkeypatch, make):
    stream = Stream(True)
    monkeypatch.setattr(sys, "stderr", stream)
    tiny.trainer(callbacks=[make()]).fit(tiny.dataset(), epochs=1, batch_size=10)
    assert stream.getvalue().count("accuracy") == (make is ProgressBar)
    stream.truncate(0)
    tiny.trainer(callbacks=[JsonLines(io.StringIO())]).fit(tiny.dataset(), epochs=1, batch_size=10)
    assert stream.getvalue().count("accuracy") == 1


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=len, flush=int), Stream(True)])
def test_a_standard_error_that_is_no_file(monkeypatch, stream):
    if isinstance(stream, Stream):
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert tiny.trainer().fit(tiny.dataset(), epochs=1, batch_size=10).steps == 3


# ---- the best epoch ------------------------------------------------------------------------------------------------


def record(epoch, loss):
    return EpochRecord(epoch, epoch, loss, None, loss, None, 0.1)


def stopped_after(values, patience, min_delta, mode):
    """Return the best epoch, and the one after which Keras's rule stops."""
    best, best_epoch, waited = None, 0, 0
    for epoch, value in enumerate(values, 1):
        if best is None or (value < best - min_delta if mode == "min" else value > best + min_delta):
            best, best_epoch, waited = value, epoch, 0
            continue
        waited += 1
        if waited >= patience:
            return best_epoch, epoch
    return best_epoch, None


@given(
    values=st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=12), patience=st.integers(0, 4),
    min_delta=st.sampled_from([0.0, 1.0]), mode=st.sampled_from(["min", "max", "auto"]), cut=st.integers(0, 12),
)  # fmt: skip
def test_early_stopping_is_kerass_rule_also_across_a_resume(values, patience, min_delta, mode, cut):
    history = History()
    trainer = SimpleNamespace(history=history, should_stop=False, callbacks=(), validates=True)
    stopping = EarlyStopping("train_loss", patience, min_delta, mode)
    stopping.set_trainer(trainer)
    stopping.on_start(None)
    for epoch, value in enumerate(values, 1):
        if epoch == cut:  # another process
            stopping = EarlyStopping("train_loss", patience, min_delta, mode)
            stopping.set_trainer(trainer)
            stopping.on_start(None)
        history.epochs.append(record(epoch, value))
        stopping.on_epoch(history.epochs[-1])
        if trainer.should_stop:
            break
    best_epoch, stopped = stopped_after(values, patience, min_delta, "min" if mode == "auto" else mode)
    assert (stopping.best_epoch, stopping.stopped_epoch) == (best_epoch, stopped)
    assert stopping.best == values[best_epoch - 1] and trainer.should_stop == (stopped is not None)
    again = EarlyStopping("train_loss", patience, min_delta, mode)  # a run that has ended ends at once
    trainer.should_stop = False
    again.set_trainer(trainer)
    again.on_start(None)
    assert again.stopped_epoch == stopped and trainer.should_stop == (stopped is not None)


rng = np.random.default_rng(0)
X, Y = rng.standard_normal((40, 6)), rng.integers(0, 3, 40)
HELD_OUT = X[30:], Y[30:]  # labels are random: what is learnt is soon wrong


class States(Callback):
    """Keeps the model's state after every epoch; fails there, or after the checkpoint that follows."""

    def __init__(self, fails_at=0, saved=False):
        self.seen, self.fails_at, self.saved, self.model = [], fails_at, saved, None

    def set_trainer(self, trainer):
        self.model = trainer.model

    def on_epoch(self, record):
        self.seen.append(self.model.state_dict())
        if record.epoch == self.fails_at and not self.saved:
            raise KeyboardInterrupt

    def on_checkpoint(self, path):
        if len(self.seen) == self.fails_at > 0:
            raise KeyboardInterrupt


def fit(callbacks, folder=None, transport=None, resume=False, overwrite=False, epochs=20, device="cpu", **options):
    layers = [nn.Linear(6, 16, rng=1, dtype=float), nn.BatchNorm1d(16, dtype=float), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(16, 3, rng=2, dtype=float)).to(device)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters(), 0.05), callbacks=callbacks, rng=3,
                      checkpoint_dir=folder, transport=transport, **options)  # fmt: skip
    trainer.fit((X[:30], Y[:30]), validation=HELD_OUT, epochs=epochs, batch_size=10, resume=resume,
                overwrite=overwrite)  # fmt: skip
    return trainer


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(backend.to_host(got[name]), backend.to_host(array), err_msg=name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
])])  # fmt: skip
def test_the_best_weights_come_back(device, tmp_path):
    stopping, states = EarlyStopping(patience=4, restore_best=True), States()
    trainer = fit([states, stopping], tmp_path, device=device)
    records = trainer.history.epochs
    assert 1 < stopping.best_epoch == stopping.stopped_epoch - 4 == len(records) - 4 < 16
    assert stopping.best == min(record.validation_loss for record in records)
    assert_same(trainer.model.state_dict(), states.seen[stopping.best_epoch - 1])
    assert trainer.evaluate(HELD_OUT)[0] == stopping.best
    resumed = fit([EarlyStopping(patience=4, restore_best=True)], tmp_path, device=device, resume=True)
    assert_same(resumed.model.state_dict(), states.seen[stopping.best_epoch - 1])
    last = fit([EarlyStopping(patience=4)], tmp_path, device=device, resume=True)
    assert_same(last.model.state_dict(), states.seen[-1])  # of the last epoch, unless asked for
    all_epochs = fit([EarlyStopping(patience=50, restore_best=True)])
    assert len(all_epochs.history.epochs) == 20 and all_epochs.evaluate(HELD_OUT)[0] == pytest.approx(stopping.best)


@pytest.mark.parametrize("where", range(1, 9))
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_a_stopped_run_resumes_as_if_it_had_not_been_killed(tmp_path, where, first, saved):
    """Killed before or after the callback is told of an epoch, or of its checkpoint."""
    wanted = fit([EarlyStopping(patience=3, restore_best=True)])
    stopping, killed = EarlyStopping(patience=3, restore_best=True), States(where, saved)
    last = len(wanted.history.epochs)
    if where <= last:
        with pytest.raises(KeyboardInterrupt):
            fit([killed, stopping] if first else [stopping, killed], tmp_path)
    else:
        fit([stopping], tmp_path)
    for _ in range(2):  # once more: it has ended
        resumed = fit([stopping], tmp_path, resume=True)
        assert resumed.history.loss == wanted.history.loss and stopping.stopped_epoch == last
        assert_same(resumed.model.state_dict(), wanted.model.state_dict())


def test_best_weights_of_another_run_are_not_taken(tmp_path):
    fit([EarlyStopping(patience=50, restore_best=True)], tmp_path, epochs=10)
    with pytest.raises(FileFormatError, match=r"best\.safetensors has not the run's best weights"):
        fit([EarlyStopping("train_loss", 50, mode="max", restore_best=True)], tmp_path, resume=True)
    path = tmp_path / "best.safetensors"
    kept = load_checkpoint(path)
    save_checkpoint(path, Checkpoint(kept.tensors, {**kept.state, "best": kept.state["best"] + 1}))
    with pytest.raises(FileFormatError, match=r"best\.safetensors has not the run's best weights"):
        fit([EarlyStopping(patience=50, restore_best=True)], tmp_path, resume=True)
    path.unlink()
    with pytest.raises(FileFormatError, match=r"best\.safetensors"):
        fit([EarlyStopping(patience=50, restore_best=True)], tmp_path, resume=True)
    assert len(fit([EarlyStopping(patience=50)], tmp_path, resume=True).history.epochs) == 20


def test_checkpoints_of_the_best_epochs(tmp_path):
    states = States()
    best = ModelCheckpoint(tmp_path / "a" / "best.safetensors", save_best_only=True)
    every = ModelCheckpoint(tmp_path / "b" / "{epoch:02d} {validation_loss:.2f}.safetensors")
    trainer = fit([states, best, every], tmp_path / "run")
    records = trainer.history.epochs
    losses = [record.validation_loss for record in records]
    assert best.best == min(losses) and best.best_epoch == losses.index(min(losses)) + 1
    checkpoint = load_checkpoint(best.last_path)
    assert best.last_path == tmp_path / "a" / "best.safetensors"
    assert checkpoint.state["position"]["epoch"] == best.best_epoch
    assert_same(checkpoint.part("model"), states.seen[best.best_epoch - 1])
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        f"{record.epoch:02d} {record.validation_loss:.2f}.safetensors" for record in records
    ]
    last, kept = load_checkpoint(every.last_path), load_checkpoint(tmp_path / "run")
    assert_same(last.tensors, kept.tensors)
    assert last.state == kept.state
    folder = tmp_path / "again"
    folder.mkdir()
    os.link(best.last_path, folder / "checkpoint.safetensors")
    assert fit([], folder, resume=True).history.loss == trainer.history.loss


def test_a_resumed_run_keeps_its_best_checkpoint(tmp_path):
    def run(folder, epochs, resume):
        best = ModelCheckpoint(tmp_path / folder / "best" / "c.safetensors", save_best_only=True)
        fit([best], tmp_path / folder, epochs=epochs, resume=resume)
        return best

    whole = run("whole", 20, resume=False)
    assert whole.best_epoch <= 12
    run("parts", 12, resume=False)
    before = (tmp_path / "parts" / "best" / "c.safetensors").read_bytes()
    parts = run("parts", 20, resume=True)
    assert (parts.best, parts.best_epoch, parts.last_path) == (whole.best, whole.best_epoch, None)
    assert (tmp_path / "parts" / "best" / "c.safetensors").read_bytes() == before


@pytest.mark.parametrize("best_only", [True, False])
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("where", range(1, 5))
def test_no_checkpoint_is_missing_after_a_kill(tmp_path, where, saved, best_only):
    """Before the trainer's own checkpoint of the epoch, or after it."""

    def contents(folder):
        return {path.name: load_checkpoint(path) for path in (tmp_path / folder / "kept").iterdir()}

    def run(folder, *others, resume=False):
        path = tmp_path / folder / "kept" / ("best" if best_only else "{epoch}")
        fit([*others, ModelCheckpoint(path, save_best_only=best_only)], tmp_path / folder, epochs=5, resume=resume)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", States(where, saved))
    run("parts", resume=True)
    found, wanted = contents("parts"), contents("whole")
    assert found.keys() == wanted.keys()
    for name, checkpoint in wanted.items():
        assert found[name].state["position"] == checkpoint.state["position"]
        seconds = {"history.seconds": checkpoint.tensors["history.seconds"]}
        assert_same({**found[name].tensors, **seconds}, checkpoint.tensors)


@pytest.mark.parametrize("own", [False, True])
def test_what_a_callback_does_after_an_epoch_is_in_its_checkpoint(tmp_path, own):
    """In the trainer's, and in one of ModelCheckpoint, which stands before it."""

    class Halve(Callback):
        halved = 0

        def set_trainer(self, trainer):
            self.trainer = trainer

        def on_epoch(self, record):
            self.trainer.optimizer.lr /= 2
            self.halved += 1

        def state_dict(self):
            return {"halved": self.halved}

        def load_state_dict(self, state):
            self.halved = state["halved"]

    wanted = fit([Halve()], epochs=4)
    run, kept = tmp_path / "run", tmp_path / "kept"
    fit([ModelCheckpoint(kept / "checkpoint.safetensors"), Halve()], run, epochs=2)
    halve = Halve()
    resumed = fit([halve], kept if own else run, epochs=4, resume=True)
    assert halve.halved == 4 and resumed.history.lr == wanted.history.lr == [
        0.05 / 2**e for e in range(4) for _ in "abc"
    ]
    assert resumed.history.loss == wanted.history.loss


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    fit([ModelCheckpoint(path)], epochs=1)
    before = path.read_bytes()
    with pytest.raises(OutputError, match="of an earlier run"):
        fit([ModelCheckpoint(path)], epochs=1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="No space left"):
        fit([ModelCheckpoint(path)], epochs=1, overwrite=True)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]


@pytest.mark.parametrize("make", [
    lambda: EarlyStopping("val_loss"), lambda: EarlyStopping(patience=-1), lambda: EarlyStopping(patience=1.5),
    lambda: EarlyStopping(min_delta=-0.1), lambda: EarlyStopping(mode="least"), lambda: EarlyStopping(restore_best=1),
    lambda: ModelCheckpoint(3), lambda: ModelCheckpoint("{step_}.safetensors"), lambda: ModelCheckpoint("{"),
    lambda: ModelCheckpoint("c", save_best_only="yes"), lambda: ModelCheckpoint("c", monitor="loss"),
    lambda: ModelCheckpoint("{epoch}/c.safetensors"),
])  # fmt: skip
def test_bad_arguments(make):
    with pytest.raises(OptionError) as caught:
        make()
    assert caught.value.expected is not None and caught.value.got is not None


@pytest.mark.parametrize("callbacks", [
    lambda folder: [EarlyStopping("train_loss", restore_best=True), EarlyStopping("train_loss", 9, restore_best=True)],
    *(lambda folder, name=name: [ModelCheckpoint(folder / f"{name}.safetensors")]
      for name in ("best", "checkpoint")),
])  # fmt: skip
def test_two_that_write_one_file_are_refused(tmp_path, callbacks):
    model = nn.Linear(6, 2, rng=0, dtype=float)
    trainer = Trainer(model, nn.MSELoss(), optim.SGD(model.parameters()), callbacks=callbacks(tmp_path),
                      checkpoint_dir=tmp_path)  # fmt: skip
    with pytest.raises(OptionError, match=r"Several callbacks restore|The trainer writes .* itself"):
        trainer.fit((X, X[:, :2]), epochs=1, batch_size=10)
    assert trainer.history.steps == 0


def test_what_is_not_measured_is_refused(tmp_path):
    model = nn.Linear(6, 2, rng=0, dtype=float)
    for callback in (EarlyStopping(), ModelCheckpoint(tmp_path / "c", save_best_only=True)):
        trainer = Trainer(model, nn.MSELoss(), optim.SGD(model.parameters()), callbacks=[callback])
        with pytest.raises(OptionError, match="validation_loss is not measured"):
            trainer.fit((X, X[:, :2]), epochs=1, batch_size=10)
        assert trainer.history.steps == 0
    trainer = Trainer(model, nn.MSELoss(), optim.SGD(model.parameters()), callbacks=[EarlyStopping("train_accuracy")])
    with pytest.raises(OptionError, match="Epoch 1 has no train_accuracy"):
        trainer.fit((X, X[:, :2]), epochs=1, batch_size=10)


@pytest.mark.parametrize("make", [
    lambda folder: EarlyStopping(), lambda folder: ModelCheckpoint(folder / "file" / "c.safetensors"),
    lambda folder: ModelCheckpoint(folder / "c", save_best_only=True),
    lambda folder: ModelCheckpoint(folder / "{validation_loss:.2f}.safetensors"),
])  # fmt: skip
def test_a_refused_start_leaves_the_earlier_runs_checkpoint(tmp_path, make):
    (tmp_path / "file").write_text("")

    def begin(*callbacks):
        model = nn.Linear(6, 2, rng=0, dtype=float)
        adam = optim.Adam(model.parameters())
        trainer = Trainer(model, nn.MSELoss(), adam, callbacks=callbacks, checkpoint_dir=tmp_path / "run", rng=0)
        return trainer.fit((X, X[:, :2]), epochs=1, batch_size=10)

    begin()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    for _ in range(2):
        with pytest.raises((OptionError, OutputError)):
            begin(make(tmp_path))
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(("name", "earlier", "free"), [
    ("best.safetensors", "best.safetensors", "best.safetensors.old"),
    ("{epoch:03d} {validation_loss:.2f}.safetensors", "017 1.25.safetensors", "017.safetensors"),
    ("e{epoch}", "e3", "else"), ("{epoch}.safetensors", "2.safetensors", "checkpoint.safetensors"),
    ("{train_loss:e}{{}}", "-1.5e+02{}", "1{}x"), ("{validation_loss}", "nan", "names"),
])  # fmt: skip
def test_files_of_an_earlier_run_are_not_replaced(tmp_path, name, earlier, free):
    """Whatever numbers their names have; they are with `overwrite`, and in the run that wrote them."""
    (tmp_path / free).write_text("free")
    fit([ModelCheckpoint(tmp_path / name)], tmp_path / "run", epochs=1)
    assert len(list(tmp_path.iterdir())) == 3
    for path in tmp_path.iterdir():
        if path.is_file() and path.name != free:
            path.rename(tmp_path / earlier)
    with pytest.raises(OutputError, match="of an earlier run") as caught:
        fit([ModelCheckpoint(tmp_path / name)], epochs=1)
    assert str(tmp_path / earlier) in str(caught.value) and "overwrite=True" in caught.value.remedy
    assert fit([ModelCheckpoint(tmp_path / name)], tmp_path / "run", resume=True, epochs=2).history.steps == 6
    assert fit([ModelCheckpoint(tmp_path / name)], epochs=1, overwrite=True).history.steps == 3
    assert (tmp_path / free).read_text() == "free"


def test_a_class_is_not_a_callback():
    with pytest.raises(OptionError, match="EarlyStopping itself"):
        tiny.trainer(callbacks=[EarlyStopping])


def test_a_name_with_a_number_that_is_not_measured_is_refused_at_the_start(tmp_path):
    with pytest.raises(OptionError, match="train_loss, train_accuracy, seconds"):
        tiny.trainer(callbacks=[ModelCheckpoint(tmp_path / "{validation_loss:.2f}")]).fit(
            tiny.dataset(), epochs=1, batch_size=10
        )


# ---- further numbers -----------------------------------------------------------------------------------------------


def auc(prediction, target):
    """The share of pairs of a sample of class 0 and another one that class 0's output ranks rightly."""
    inside, outside = prediction[target == 0, 0], prediction[target != 0, 0]
    return (inside[:, None] > outside).mean()


def measuring(callbacks=(), folder=None, *, validates=True, metrics=None, scheduler=None, rate=0.05, **options):
    model = nn.Sequential(nn.Linear(6, 16, rng=1, dtype=float), nn.Tanh(), nn.Linear(16, 3, rng=2, dtype=float))
    optimizer = optim.Adam(model.parameters(), rate)
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, checkpoint_dir=folder, rng=3,
        metrics={"auc": auc, "rows": lambda y, t: len(y)} if metrics is None else metrics,
        lr_scheduler=None if scheduler is None else scheduler(optimizer), **options,
    )  # fmt: skip
    validation = {"validation": HELD_OUT, "validation_batch_size": 3} if validates else {}
    return trainer, lambda **more: trainer.fit((X[:30], Y[:30]), **{"epochs": 8, "batch_size": 10} | validation | more)


def test_metrics_are_of_the_whole_set_and_stand_everywhere(tmp_path):
    lines = io.StringIO()
    kept = ModelCheckpoint(tmp_path / "{epoch} {validation_auc:.4f}", "validation_auc", "max", save_best_only=True)
    stopping = EarlyStopping("validation_auc", 3, mode="max", restore_best=True)
    trainer, run = measuring([JsonLines(lines), kept, stopping], tmp_path / "run")
    records = run().epochs
    values = [record.metrics["auc"] for record in records]
    assert stopping.best == kept.best == max(values) and stopping.best_epoch == values.index(max(values)) + 1
    result = trainer.evaluate(HELD_OUT, batch_size=4)  # the best weights are back
    assert result.metrics == {"auc": auc(trainer.predict(HELD_OUT[0]), HELD_OUT[1]), "rows": 10} and len(result) == 2
    assert result.metrics["auc"] == max(values) and f"auc={max(values)!r}, rows=10.0)" in repr(result)
    said = [json.loads(line) for line in lines.getvalue().splitlines() if '"epoch"' in line]
    assert [one["validation_auc"] for one in said if one["event"] == "epoch"] == values
    assert kept.last_path.name == f"{kept.best_epoch} {max(values):.4f}"
    assert f"  auc (test {values[-1]:.4f})" in epoch_line(records[-1], 200)
    _, again = measuring([EarlyStopping("validation_auc", 3, mode="max")], tmp_path / "run")
    assert again(resume=True).epochs == records  # also what is read from the checkpoint
    _, without = measuring(folder=tmp_path / "run", metrics={})
    assert without(resume=True, epochs=len(records)).epochs == records


def test_a_metric_that_writes_into_its_arrays_changes_no_other():
    def spoil(prediction, target):
        prediction[...] = target[...] = 0
        return 0.0

    target = HELD_OUT[1].copy()
    found = measuring(metrics={"spoil": spoil, "auc": auc})[0].evaluate((HELD_OUT[0], target))
    assert found.metrics["auc"] == measuring()[0].evaluate(HELD_OUT).metrics["auc"]
    np.testing.assert_array_equal(target, HELD_OUT[1])


@pytest.mark.parametrize("schedule", ["data-parallel", "1f1b"])
def test_metrics_on_ranks(schedule):
    want = [record.metrics for record in measuring()[1]().epochs]

    def work(transport):
        history = measuring(transport=transport, schedule=schedule)[1]()
        return [record.metrics for record in history.epochs]

    for found in run_ranks(2, work):
        assert [one["auc"] for one in found] == pytest.approx([one["auc"] for one in want], rel=1e-9)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(("monitor", "mode"), [
    ("validation_auc", "max"), ("validation_accuracy", "max"), ("train_accuracy", "max"), ("train_loss", "min"),
    ("validation_loss", "min"), (None, "min"),
])  # fmt: skip
def test_reduce_on_plateau_follows_a_monitor(monitor, mode, chained):
    def plateau(optimizer):
        return optim.ReduceLROnPlateau(optimizer, mode, 0.5, 0, threshold=0.0, monitor=monitor)

    def several(optimizer):  # each follows its own
        return [optim.ReduceLROnPlateau(optimizer, "min", 0.5, 99, monitor="train_loss"), plateau(optimizer)]

    _, run = measuring(scheduler=several if chained else plateau, rate=0.5)
    history = run()
    alone = plateau(optim.SGD(nn.Linear(1, 1).parameters(), 0.5))
    for record, rate in zip(history.epochs, history.lr[2::3], strict=True):
        assert rate == alone.optimizer.lr
        alone.step(record.to_json()["validation_loss" if monitor is None else monitor])
    assert len(set(history.lr)) > 1


def test_a_schedule_that_would_follow_the_wrong_number_is_refused():
    optimizer = optim.SGD(nn.Linear(1, 1).parameters())
    for options, said in (({"monitor": "val_loss"}, "Not a number of a training"), ({"monitor": 3}, "Not a number of"),
                          ({"monitor": "validation_loss", "mode": "max"}, "mode does not fit validation_loss.*'min'"),
                          ({"monitor": "train_accuracy"}, "mode does not fit train_accuracy.*'max'")):  # fmt: skip
        with pytest.raises(OptionError, match=said):
            optim.ReduceLROnPlateau(optimizer, **options)
    for options, validates, said in (
        ({"mode": "max"}, True, "would follow the loss"),
        ({"mode": "max", "monitor": "validation_accuracy"}, False, "validation_accuracy is not measured"),
        ({"monitor": "validation_f1"}, True, "validation_f1 is not measured.*auc, rows"),
    ):
        for wrap in (lambda one: one, lambda one: [one]):
            trainer, run = measuring(
                scheduler=lambda o, w=wrap, k=options: w(optim.ReduceLROnPlateau(o, **k)), validates=validates
            )
            with pytest.raises(OptionError, match=said):
                run()
            assert trainer.history.steps == 0


def test_metrics_that_are_none():
    for metrics in ([auc], {"auc": 3}, {"loss": auc}, {"accuracy": auc}, {"a b": auc}, {3: auc}):
        with pytest.raises(OptionError):
            measuring(metrics=metrics)
    for value in ("0.5", None, np.zeros(2), 1j):
        with pytest.raises(OptionError, match="The metric odd is not a number"):
            measuring(metrics={"odd": lambda y, t, v=value: v})[1]()
    for callback, said in ((EarlyStopping("validation_f1", mode="max"), "validation_f1 is not measured"),
                           (ModelCheckpoint("{validation_f1}"), "name of the checkpoint is not")):  # fmt: skip
        with pytest.raises(OptionError, match=said):
            measuring([callback])[1]()
    with pytest.raises(OptionError, match="less or more of validation_auc is better is not known"):
        EarlyStopping("validation_auc")


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
def test_averages_on_a_device_are_those_of_the_host():
    """Of captured steps as well; a group that is added makes new graphs."""
    rng, f = np.random.default_rng(0), {"dtype": float}
    x, target, states = rng.standard_normal((24, 5)), np.arange(24) % 3, []
    for device in ("cpu", "cuda"):
        model = nn.Sequential(
            nn.Linear(5, 6, rng=0, **f), nn.BatchNorm1d(6, **f), nn.Tanh(), nn.Linear(6, 3, rng=1, **f)
        )
        params, ema = model.to(device).parameters(), optim.EMA(model, 0.8, warm_up=True)
        adam = optim.Adam({name: params[name] for name in params if name[0] == "3"}, lr=0.01)
        trainer = Trainer(model, nn.CrossEntropyLoss(), adam, callbacks=[WeightAveraging(ema)], rng=0)
        trainer.fit((x, target), epochs=2, batch_size=6)
        adam.add_param_group({"params": {name: params[name] for name in params if name[0] != "3"}, "lr": 0.02})
        trainer.fit((x, target), epochs=2, batch_size=6)
        again = optim.EMA(model)
        again.load_state_dict(ema.state_dict())
        with again.averaged():
            states.append({name: backend.to_host(array).copy() for name, array in model.state_dict().items()})
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=1e-8, atol=1e-10, err_msg=name)


# ---- several ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "data-parallel"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_all_ranks_stop_at_the_same_epoch_with_the_best_model(schedule, everywhere, tmp_path):
    def run(transport):
        stopping, states = EarlyStopping(patience=3, restore_best=True), States()
        callbacks = [states, stopping] if everywhere or transport.rank == 0 else []
        trainer = fit(callbacks, tmp_path, transport, schedule=schedule, accumulate=2)
        return trainer, states.seen, stopping

    found = run_ranks(2, run)
    trainer, seen, stopping = found[0]
    assert stopping.stopped_epoch == stopping.best_epoch + 3 == len(trainer.history.epochs) < 20
    for other, told, _ in found:
        assert other.history.epochs == trainer.history.epochs and other.should_stop
        assert p.digest(other.model.state_dict()) == p.digest(seen[stopping.best_epoch - 1])
        assert other is trainer or told == []


def test_what_is_not_measured_is_refused_on_all_ranks():
    def run(transport):
        model = nn.Linear(6, 2, rng=0, dtype=float)
        options = {"schedule": "data-parallel", "transport": transport, "rng": 0}
        trainer = Trainer(model, nn.MSELoss(), optim.SGD(model.parameters()), callbacks=[EarlyStopping()], **options)
        with pytest.raises(OptionError, match="validation_loss is not measured"):
            trainer.fit((X, X[:, :2]), epochs=1, batch_size=10)
        return trainer.fit((X, X[:, :2]), epochs=1, batch_size=10, validation=(X, X[:, :2])).steps

    assert len(set(run_ranks(2, run))) == 1
