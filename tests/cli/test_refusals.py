"""The command line refuses bad values, folders in use and runs that never began, without a traceback."""

import contextlib
import json
import os
import re
import threading
from functools import partial

import numpy as np
import pytest

from commands import run
from sparsebp.cli.app import app
from sparsebp.core.errors import OptionError
from sparsebp.core.files import hold_folder
from sparsebp.train import load_checkpoint, save_checkpoint
from sparsebp.train.config import read_config, write_config

invoke = partial(run, app)

TINY = ["train", "bitstream", "--hidden", "4", "--seq-len", "12", "--samples", "16", "--batch-size", "8",
        "--epochs", "1"]  # fmt: skip
DIGITS = ["train", "digits", "--samples", "20", "--batch-size", "10", "--epochs", "1"]
BIG, LONG = "9" * 25, "x" * 5000


pytestmark = pytest.mark.usefixtures("one_thread")


class KilledError(BaseException):
    """Stands for what no command catches."""


def killed(*arguments, **options):
    raise KilledError


@contextlib.contextmanager
def held_by_another_thread(folder):
    ready, done = threading.Event(), threading.Event()

    def hold():
        with hold_folder(folder):
            ready.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    ready.wait(60)
    try:
        yield
    finally:
        done.set()
        other.join()


def refused(result, code, *words):
    assert result.exit_code == code, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    return result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *([*TINY, option, value] for value in (BIG, "0", "-1", "1.5", "") for option in (
            "--hidden", "--layers", "--seq-len", "--samples", "--batch-size", "--accumulate", "--threads")),
        *([*TINY, option, value] for value in ("nan", "inf", "0", "-1", "x") for option in ("--lr", "--clip")),
        *(["train", "digits", "--model", "vgg11", "--width", value] for value in ("nan", "inf", "0", "-1", "1e300")),
        *(["train", "digits", "--prune", value] for value in ("nan", "inf", "1", "-1", "x")),
        ["train", "digits", "--prune", "0.5", "--retrain-lr", "nan"],
        ["train", "digits", "--prune", "0.5", "--retrain-epochs", BIG],
        ["train", "seqmnist", "--model", "vgg11"], ["train", "digits", "--model", "gru"],
        ["train", "digits", "--hidden", 3],
        ["train", "seqmnist", "--prune", "0.5"], ["train", "cifar10"], ["train", "digits", "--data", "x"],
        ["train", "digits", "--fusion", "x"], ["train", "digits", "--schedule", "ooo", "--accumulate", 2],
        ["train", "--config", "c.yaml"], [*TINY, "--resume", "--weights", "x"], ["demo", "--epochs", BIG],
        ["demo", "--epochs", 0], ["demo", "--seed", -1], ["verify", "--seed", -1], ["verify", "--threads", BIG],
        ["tune", "seqmnist", "--model", "vgg11"], ["tune", "digits", "--steps", 0],
        ["tune", "digits", "--out", "x.yaml"],
        ["tune", "digits", "--clip", "nan"],
        *(["schedule", "build", "gpipe", option, value] for value in (BIG, "0", "-1", "x") for option in (
            "--stages", "--workers", "--microbatches", "--chunks", "--group")),
        *(["schedule", "build", "ooo", option, "nan"] for option in ("--memory-ratio", "--latency", "--bandwidth")),
        *(["schedule", "build", "gpipe", "--unweighted", value] for value in ("99", "-1", "a", BIG)),
        *(["schedule", "build", "gpipe", "--cost", value] for value in ("F=nan", "F=inf", "F=", "X=1", "F=1=2", "")),
        *(["schedule", "plot", "-", "--out", "t.json", "--unit", value] for value in ("nan", "inf", "0", "1e308")),
        ["schedule", "plot", "-", "--width", BIG], ["schedule", "plot", "-", "--out", "x.gif"],
        ["nothing"], ["train"], ["train", "nothing"], [*TINY, "--backward", "x"], [*TINY, "--no-such-option"],
        ["schedule", "nothing"], ["schedule", "simulate"], ["schedule", "build"],
        ["schedule", "build", "nothing"], ["schedule", "build", "gpipe", "--fusion", "x"],
        ["schedule", "compare", "gpipe", "x"],
    ],
    ids=lambda arguments: " ".join(str(a)[:12] for a in arguments if str(a) not in TINY[2:]),
)  # fmt: skip
def test_values_that_cannot_be_had_exit_with_2(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    refused(invoke(*arguments, input="0F0,0B0"), 2)
    assert list(tmp_path.rglob("*.*")) == []  # nothing has been begun


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [("trian", "train"), ("train digits --modle x", "--model"), ("train digts", "digits"), ("schedule plto", "plot"),
     ("train digits --model lent5", "lenet5"), ("train digits --backward Chunkd", "chunked"),
     ("train digits --schedule 1f1", "1f1b"), ("tune digits --fusion bckward", "backward"),
     ("schedule build gpip", "gpipe"), ("schedule compare 1f1b gpip", "gpipe")],
)  # fmt: skip
def test_the_name_that_is_meant_is_said(arguments, meant):
    message = refused(invoke(*arguments.split()), 2)
    assert re.search(rf"(Did you mean|Possible options:) .*{meant}", message), message


@pytest.mark.parametrize(
    "content",
    ['{"task": 5}', '{"task": ["digits"]}', '{"task": "digits", "model": 5}', '{"task": "digits", "seed": -1}',
     '{"task": "digits", "epochs": 1.5}', '{"task": "digits", "lr": 1' + "0" * 400 + "}",
     '{"task": "digits", "graph": "x"}', '{"task": "digits", "threads": true}', '{"task": "digits", "device": "tpu"}',
     '{"task": "digits", "schedule": 3}', '{"task": "digits", "clip_norm": "x"}', '{"task": "digits", "": 3}',
     '{"task": "digits", "self": 3}', "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "", "nul\0", '{"task": "\\ud800"}'],
)  # fmt: skip
def test_files_of_options_with_anything_in_them(tmp_path, content):
    path = tmp_path / "c.json"
    path.write_text(content)
    result = invoke("train", "--config", path, "--out", tmp_path / "run")
    refused(result, 1 if "has no options" in result.stderr else 2)
    assert not (tmp_path / "run").exists()


def test_files_of_options_that_are_nested_too_deeply(tmp_path):
    toml = tmp_path / "c.toml"
    toml.write_text("a = " + "[" * 20_000)
    refused(invoke("train", "--config", toml, "--out", tmp_path / "run"), 1, "nested too deeply")
    toml.write_text("a" + ".a" * 5000 + "=1")
    assert len(refused(invoke("train", "--config", toml, "--out", tmp_path / "run"), 1, "a = ")) < 1000
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", [LONG, "", "/dev/null", "."])
def test_paths_that_cannot_be(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.csv").write_text("0F0,0B0\n")
    for arguments in (
        [*TINY, "--weights", path], [*TINY, "--schedule", path], ["prune", path, "--amount", "0.5"],
        ["schedule", "validate", path], ["schedule", "simulate", "g.csv", "--costs", path],
        ["schedule", "plot", "g.csv", "--out", path + ".png" if path == LONG else "folder/x.png"],
        ["train", "cifar10", "--data", path],
    ):  # fmt: skip
        if path != "" or "--out" not in arguments:
            result = invoke(*arguments)
            refused(result, result.exit_code)
            assert result.exit_code in (1, 2)
    if path in (LONG, "/dev/null"):
        refused(invoke(*TINY, "--out", path), 1, "cannot be written")


@pytest.mark.parametrize(
    "arguments",
    [TINY, ["demo"], ["tune", "digits"], ["prune", ".", "--amount", "0.5"],
     ["schedule", "build", "gpipe"], ["schedule", "plot", "-"]],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_an_empty_out_is_not_the_current_folder(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    refused(invoke(*arguments, "--out", "", input="0F0,0B0"), 1, "Error: --out is empty.")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_never_began_is_not_resumed(tmp_path):
    assert invoke(*TINY, "--out", tmp_path / "run").exit_code == 0
    message = refused(invoke(*TINY, "--resume", "--out", tmp_path / "rum"), 1, "no run to resume")
    assert str(tmp_path / "rum") in message and "no such folder" in message
    (tmp_path / "empty").mkdir()
    message = refused(invoke(*TINY, "--resume", "--out", tmp_path / "empty"), 1, "no run to resume")
    assert "no such file" in message
    refused(invoke("demo", "--resume", "--out", tmp_path / "demo"), 1, "no run to resume")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "run"] and not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_folder_in_use_is_said_and_left_alone(tmp_path, resume):
    assert invoke(*TINY, "--out", tmp_path).exit_code == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".sparsebp-lock"}
    with held_by_another_thread(tmp_path):
        refused(invoke(*TINY, *resume, "--out", tmp_path), 1, "in use by another run", str(tmp_path))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".sparsebp-lock"} == before
    assert invoke(*TINY, *(resume or ["--overwrite"]), "--out", tmp_path).exit_code == 0


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".sparsebp-lock"}


def test_a_folder_of_a_run_is_left_alone_unless_it_is_to_be_overwritten(tmp_path):
    run, folder = ["train", "bitstream", *TINY[2:-2]], tmp_path / "run"
    refused(invoke(*run, "--resume", "--overwrite", "--out", folder), 2, "one of --resume and --overwrite")
    assert invoke(*run, "--epochs", 2, "--out", folder).exit_code == 0
    before = contents(folder)
    for more in ([], ["--epochs", 1], ["--seed", 3], ["--weights", folder]):
        message = refused(invoke(*run, *more, "--out", folder), 1, "holds an earlier run", "after 4 steps")
        assert all(option in message for option in ("--resume", "--out", "--overwrite"))
        assert contents(folder) == before
    (folder / "checkpoint.safetensors").write_bytes(b"damaged")
    refused(invoke(*run, "--out", folder), 1, "which cannot be read")
    assert invoke(*run, "--epochs", 1, "--overwrite", "--out", folder).exit_code == 0
    assert json.loads((folder / "result.json").read_text())["steps"] == 2


def test_an_evaluation_writes_nothing(tmp_path, monkeypatch):
    """With the weights drawn from the seed, those given, or those of the run in the folder: it says which."""
    monkeypatch.chdir(tmp_path)
    run, folder = ["train", "bitstream", *TINY[2:-2]], tmp_path / "runs" / "bitstream-rnn"
    assert invoke(*run, "--epochs", 2, "--lr-schedule", "onecycle").exit_code == 0
    trained, before = json.loads((folder / "result.json").read_text()), contents(tmp_path)
    os.utime(folder, (1, 1))
    checkpoint = os.path.join("runs", "bitstream-rnn", "checkpoint.safetensors")
    for more, weights in (([], "drawn from the seed 0"), (["--weights", "runs/bitstream-rnn"], "runs/bitstream-rnn"),
                          (["--resume"], checkpoint)):  # fmt: skip
        for _ in range(2):
            result = invoke(*run, "--epochs", 0, *more)
            assert result.exit_code == 0, result.output
            assert f"weights        {weights}\n" in result.stdout and "evaluation writes no file" in result.stdout
            line = json.loads(invoke(*run, "--epochs", 0, *more, "--json").stdout.splitlines()[-1])
            assert (line["steps"], line["weights"], line["checkpoint"], line["picture"]) == (0, weights, None, None)
            assert (line["test_loss"] == trained["test_loss"]) == bool(more)
    assert contents(tmp_path) == before and folder.stat().st_mtime == 1  # not even a temporary file
    assert invoke(*run, "--epochs", 0, "--out", "other").exit_code == 0 and not (tmp_path / "other").exists()
    refused(invoke(*run, "--epochs", 0, "--resume", "--out", "other"), 1, "no run to resume")
    refused(invoke(*run, "--epochs", 0, "--compare", "--backward", "chunked"), 2, "no steps to compare")
    message = refused(invoke(*run, "--epochs", 0, "--hidden", 5, "--resume"), 1, "does not fit the model")
    assert checkpoint in message


def test_results_that_are_not_finite_are_null(tmp_path, monkeypatch):
    from sparsebp.cli import train

    monkeypatch.setattr(train, "_measured", lambda run: {
        "steps": 2, "training_seconds": 1.0, "test_loss": np.inf, "test_accuracy": 0.5})  # fmt: skip
    result = invoke(*TINY, "--out", tmp_path, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1])["test_loss"] is None
    assert json.loads((tmp_path / "result.json").read_text())["test_loss"] is None


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "loss.png").mkdir()
    result = invoke(*TINY, "--out", tmp_path)
    assert result.exit_code == 0
    assert "test accuracy" in result.stdout
    assert result.stderr.startswith("Warning: ") and "loss.png" in result.stderr
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 2


def test_the_picture_is_drawn_last(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    monkeypatch.setattr("sparsebp.cli.train.save_loss_curve", killed)
    with pytest.raises(KilledError):
        invoke(*TINY, "--out", tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 2


# ---- pruning a checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    assert invoke(*DIGITS, "--out", folder).exit_code == 0
    return folder


@pytest.mark.parametrize("source", [".", "checkpoint.safetensors"])
@pytest.mark.parametrize("target", ["checkpoint.safetensors", "../{}/checkpoint.safetensors", "link"])
def test_a_checkpoint_is_not_pruned_in_place(digits_run, source, target):
    before = (digits_run / "checkpoint.safetensors").read_bytes()
    out = digits_run / target.format(digits_run.name)
    if target == "link":
        out = digits_run / f"link {source}"
        out.symlink_to(digits_run / "checkpoint.safetensors")
    refused(invoke("prune", digits_run / source, "--amount", "0.5", "--out", out), 2, "the checkpoint itself")
    assert (digits_run / "checkpoint.safetensors").read_bytes() == before


def test_nothing_is_pruned_into_the_folder_of_a_run_that_goes_on(digits_run, tmp_path):
    assert invoke("prune", digits_run, "--amount", "0.5", "--out", tmp_path / "a.safetensors").exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]  # no lock file in a folder of no run
    before = {p.name: p.read_bytes() for p in digits_run.iterdir() if p.is_file()}
    with held_by_another_thread(digits_run):
        for out in ([], ["--out", digits_run / "another.safetensors"]):
            refused(invoke("prune", digits_run, "--amount", "0.5", *out), 1, "in use by another run")
    assert {p.name: p.read_bytes() for p in digits_run.iterdir() if p.is_file()} == before
    assert invoke("prune", digits_run, "--amount", "0.5").exit_code == 0
    written = (digits_run / "pruned.safetensors").read_bytes()
    refused(invoke("prune", digits_run, "--amount", "0.75"), 1, "is there already", "--overwrite")
    assert (digits_run / "pruned.safetensors").read_bytes() == written
    assert invoke("prune", digits_run, "--amount", "0.75", "--overwrite").exit_code == 0
    assert (digits_run / "pruned.safetensors").read_bytes() != written


def test_a_fifo_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    refused(invoke("prune", tmp_path / "fifo", "--amount", "0.5"), 1, "a FIFO")
    refused(invoke(*TINY, "--weights", tmp_path / "fifo", "--out", tmp_path / "run"), 1, "a FIFO")
    (tmp_path / "run" / "checkpoint.safetensors").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / "checkpoint.safetensors")
    refused(invoke(*TINY, "--resume", "--out", tmp_path / "run"), 1, "a FIFO")


# ---- files of options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize("text", ["\U0001f600 \x7f", "\x00\x1f\t\r\n", 'a "b" \\ ü\n', '"\\', "\u2028", ""])
def test_texts_of_any_kind_come_back(tmp_path, suffix, text):
    path = tmp_path / f"c{suffix}"
    options = {"data": text, "lr": 1e-300, "width": 0.5, "epochs": 10**30, "graph": True}
    write_config(options | {"model": None}, path)
    assert read_config(path) == options


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize("value", [np.nan, [1], {"a": 1}, object(), (1, 2), "\ud800", np.int64(3)])
def test_options_that_no_file_holds_are_refused(tmp_path, suffix, value):
    if suffix == ".json" and value == "\ud800":
        pytest.skip("JSON has an escape for it")
    with pytest.raises(OptionError, match="cannot be kept"):
        write_config({"lr": value}, tmp_path / f"c{suffix}")
    assert list(tmp_path.iterdir()) == []


# ---- pruning, retraining, resuming ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "options"), [(1, ["--optimizer", "sgd", "--lr", "0.01", "--lr-schedule", "constant"]), (4, [])]
)
def test_killed_in_the_retraining_and_resumed(tmp_path, monkeypatch, step, options):
    """Both parts, their files and all that is reported are those of a run that was never interrupted."""
    pytest.importorskip("sklearn")
    from sparsebp.train import JsonLines

    run = ["train", "digits", "--samples", "30", "--batch-size", "10", "--epochs", "1", "--prune", "0.8",
           "--retrain-epochs", "2", "--checkpoint-every", "1", "--json", *options]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert invoke(*run, "--out", whole).exit_code == 0
    seen = []

    def on_step(self, history):
        seen.append(history.steps)
        if len(seen) == 3 + step:  # three steps before pruning
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "on_step", on_step)
        with pytest.raises(KilledError):
            invoke(*run, "--out", parts)
    dense = (parts / "checkpoint.safetensors").read_bytes()
    assert len(load_checkpoint(parts / "pruned").part("history")["loss"]) == step - 1
    assert invoke(*run, "--resume", "--out", parts).exit_code == 0
    assert (parts / "checkpoint.safetensors").read_bytes() == dense
    for inner in (".", "pruned"):
        first, second = load_checkpoint(whole / inner), load_checkpoint(parts / inner)
        assert first.tensors.keys() == second.tensors.keys()
        for name, array in first.tensors.items():
            if name != "history.seconds":
                assert array.tobytes() == second.tensors[name].tobytes(), name
    stored = [json.loads((folder / "pruned" / "result.json").read_text()) for folder in (whole, parts)]
    for result in stored:
        for entry in (result, result["before_pruning"]):
            del entry["training_seconds"]
        for name in ("checkpoint", "picture"):
            del result[name]
    assert stored[0] == stored[1]
    assert stored[0]["steps"] == 6 and stored[0]["before_pruning"]["steps"] == 3


def test_killed_between_pruning_and_retraining(tmp_path, monkeypatch):
    """There is no folder of the retraining yet: its first part is done, and the second one begins."""
    pytest.importorskip("sklearn")
    from sparsebp.cli import train

    run = [*DIGITS, "--prune", "0.8"]
    assert invoke(*run, "--out", tmp_path / "whole").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(train, "_pruned", killed)
        with pytest.raises(KilledError):
            invoke(*run, "--out", tmp_path / "parts")
    assert invoke(*run, "--resume", "--out", tmp_path / "parts").exit_code == 0
    first, second = (load_checkpoint(tmp_path / name / "pruned") for name in ("whole", "parts"))
    for name, array in first.part("model").items():
        assert array.tobytes() == second.part("model")[name].tobytes(), name


def test_the_retraining_of_an_earlier_run_is_not_gone_on_with(tmp_path, monkeypatch):
    """A new run in the folder, killed before its pruning: what is in the folder `pruned` is not its own."""
    pytest.importorskip("sklearn")
    run = [*DIGITS, "--prune", "0.8"]
    assert invoke(*run, "--seed", 1, "--out", tmp_path).exit_code == 0
    assert invoke(*run, "--seed", 2, "--out", tmp_path / "whole").exit_code == 0
    (tmp_path / "checkpoint.safetensors").unlink()
    before = contents(tmp_path)
    refused(invoke(*run, "--seed", 2, "--out", tmp_path), 1, "pruned holds an earlier run")
    assert contents(tmp_path) == before
    with monkeypatch.context() as patch:
        patch.setattr("sparsebp.cli.train._pruned", killed)
        with pytest.raises(KilledError):
            invoke(*run, "--seed", 2, "--out", tmp_path, "--overwrite")
    left = [place / name for place in (tmp_path, tmp_path / "pruned") for name in ("result.json", "loss.png")]
    assert not any(path.exists() for path in left)  # of the earlier run
    assert invoke(*run, "--seed", 2, "--out", tmp_path, "--resume").exit_code == 0
    new, whole = load_checkpoint(tmp_path / "pruned"), load_checkpoint(tmp_path / "whole" / "pruned")
    for name, array in whole.part("model").items():
        assert array.tobytes() == new.part("model")[name].tobytes(), name


def test_pruning_a_pruned_checkpoint(tmp_path):
    """Amounts are shares of all weights; what has gone stays away, also where a weight is not 0 under its mask."""
    pytest.importorskip("sklearn")
    assert invoke(*DIGITS, "--out", tmp_path).exit_code == 0
    last, total = tmp_path / "checkpoint.safetensors", None
    masks: dict[str, np.ndarray] = {}
    rounds = ((0.5, "class_blind"), (0.75, "class_uniform"), (0.2, "class_blind"), (0.9, "class_distribution"))
    for amount, method in rounds:
        out = tmp_path / f"{amount}.safetensors"
        result = invoke("prune", last, "--amount", amount, "--method", method, "--out", out, "--json")
        report = json.loads(result.stdout)
        pruned = load_checkpoint(out)
        new = {n: a for n, a in pruned.part("model").items() if n.endswith("_mask")}
        total = sum(mask.size for mask in new.values())
        gone = total - sum(int(mask.sum()) for mask in new.values())
        before = total - sum(int(mask.sum()) for mask in masks.values()) if masks else 0
        assert report["sparsity"] == pytest.approx(gone / total)
        if method == "class_uniform":
            for name, mask in new.items():
                assert mask.sum() == min(mask.size - round(amount * mask.size), masks[name].sum())
        else:
            assert gone == max(round(amount * total), before)
        for name, mask in new.items():
            assert not (mask & ~masks.get(name, np.ones_like(mask))).any()
            weight = pruned.part("model")[name.removesuffix("_mask")]
            assert (weight[~mask] == 0).all() and (weight[mask] != 0).all()
        masks = new
        tensors = dict(pruned.tensors)  # as momentum leaves it: large where there is nothing to keep
        for name, mask in masks.items():
            tensors[f"model.{name.removesuffix('_mask')}"] = np.where(
                mask, tensors[f"model.{name.removesuffix('_mask')}"], np.float32(7))  # fmt: skip
        last = tmp_path / "moved.safetensors"
        save_checkpoint(last, type(pruned)(tensors, pruned.state))


def test_another_task_is_said_first(tmp_path):
    assert invoke(*TINY, "--out", tmp_path).exit_code == 0
    run = ["train", "seqmnist", "--samples", "16", "--epochs", "1", "--hidden", "4"]
    message = refused(invoke(*run, "--resume", "--out", tmp_path), 1, "bitstream", "seqmnist")
    assert message.index("task") < message.index("Expected")
