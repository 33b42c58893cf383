"""Ctrl-C: the message names the step and a command that resumes the run."""

import ctypes
import re
import shlex
import signal
import sys
import time
from functools import partial

import pytest

from commands import run
from sparsebp.cli.app import app
from sparsebp.cli.common import Interrupted
from sparsebp.cli.main import main
from sparsebp.train import load_checkpoint
from sparsebp.train.runner import Runner

invoke = partial(run, app)

TRAIN = ["train", "bitstream", "--hidden", "4", "--seq-len", "12", "--samples", "40", "--batch-size", "8",
         "--epochs", "2", "--threads", "1", "--checkpoint-every", "3"]  # fmt: skip
DIGITS = ["train", "digits", "--model", "lenet5", "--samples", "20", "--batch-size", "10", "--epochs", "1",
          "--threads", "1"]  # fmt: skip


def interrupted(*arguments):
    """Return the message, and the arguments of the command that it names."""
    result = invoke(*arguments)
    assert result.exit_code == 130, result.output
    assert result.stderr.startswith("Interrupted ") and result.stderr.count("\n") == 1
    told, command = result.stderr.rsplit(": sparsebp ", 1)
    return told, shlex.split(command)


@pytest.fixture
def stop(monkeypatch):
    """Return what lets a method be interrupted at its n-th call, once."""

    def at(owner, name, call):
        real, calls = getattr(owner, name), iter(range(1, 10_000))

        def maybe(*arguments, **options):
            if next(calls) == call:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, maybe)

    return at


def steps_in(folder):
    return len(load_checkpoint(folder / "checkpoint.safetensors").part("history")["loss"])


@pytest.mark.parametrize(("call", "saved"), [(1, 0), (3, 0), (5, 3), (6, 5), (10, 9)])
def test_the_step_and_the_command_to_go_on_with(tmp_path, stop, call, saved):
    folder = tmp_path / "my run"
    stop(Runner, "step", call)
    told, command = interrupted(*TRAIN, "--out", folder)
    assert (
        told == f"Interrupted at step {call} of 10 of training; the last checkpoint is of step {saved}. Go on from it"
    )
    assert command == [*TRAIN, "--out", str(folder), "--resume"] and steps_in(folder) == saved
    assert invoke(*command).exit_code == 0 and steps_in(folder) == 10


def test_sigterm_tells_it_too(tmp_path, monkeypatch, capsys):
    """With the status that shells have for it; how the signal was handled before is put back."""
    step, calls = Runner.step, iter(range(1, 10_000))

    def terminated(*arguments):
        if next(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return step(*arguments)

    monkeypatch.setattr(Runner, "step", terminated)
    with pytest.raises(SystemExit) as left:
        main([*TRAIN, "--out", str(tmp_path)])
    assert left.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    told, command = capsys.readouterr().err.rsplit(": sparsebp ", 1)
    assert told == "Interrupted at step 5 of 10 of training; the last checkpoint is of step 3. Go on from it"
    assert shlex.split(command) == [*TRAIN, "--out", str(tmp_path), "--resume"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_not_lost_while_llvm_calls_python(tmp_path, monkeypatch, capfd, number, code):
    """What is raised in a callback of C is dropped, and Numba would then miss what it has compiled."""
    notified = []

    @ctypes.CFUNCTYPE(None)
    def _raw_object_cache_notify():  # its name in llvmlite
        signal.raise_signal(number)
        notified.append(number)

    def compiled(*arguments):
        _raw_object_cache_notify()
        assert notified == [number]
        time.sleep(5)

    monkeypatch.setattr(Runner, "step", compiled)
    with pytest.raises(SystemExit) as left:
        main([*TRAIN, "--out", str(tmp_path)])
    told = capfd.readouterr().err
    assert left.value.code == code and told.startswith("Interrupted at step 1 of 10") and "gnored" not in told
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_a_run_that_resumes_is_interrupted(tmp_path, stop):
    assert invoke(*TRAIN, "--epochs", 1, "--lr-schedule", "constant", "--out", tmp_path).exit_code == 0
    stop(Runner, "step", 2)
    resumed = [*TRAIN, "--lr-schedule", "constant", "--resume", "--out", str(tmp_path)]
    told, command = interrupted(*resumed)
    assert "at step 7 of 10" in told and "of step 6" in told
    assert command.count("--resume") == 1 and sorted(command) == sorted(resumed)
    assert invoke(*command).exit_code == 0


def test_before_the_first_step(tmp_path, stop):
    from sparsebp.cli import train

    stop(train, "build", 1)
    told, command = interrupted(*TRAIN, "--out", tmp_path)
    assert told == "Interrupted before the first step; no checkpoint was written yet. Begin again"
    assert command == [*TRAIN, "--out", str(tmp_path)]

    stop(Runner, "__init__", 1)
    told, command = interrupted(*command)
    assert told == "Interrupted before the first step; no checkpoint was written yet. Begin again"
    stop(Runner, "captures", 1)
    told, command = interrupted(*command)
    assert told.startswith("Interrupted at step 1 of 10 of training; the last checkpoint is of step 0. Go on")
    stop(train, "build", 1)
    told, again = interrupted(*command)
    assert "the checkpoint is unchanged. Go on" in told and again == command
    assert invoke(*command).exit_code == 0


@pytest.mark.parametrize("form", ["--weights {}", "--weights={}", "--overwrite --weights={}"])
def test_weights_are_not_given_again(tmp_path, stop, form):
    assert invoke(*TRAIN, "--out", tmp_path / "first").exit_code == 0
    stop(Runner, "step", 2)
    _, command = interrupted(*TRAIN, *form.format(tmp_path / "first").split(), "--out", tmp_path / "second")
    assert command == [*TRAIN, "--out", str(tmp_path / "second"), "--resume"]
    assert invoke(*command).exit_code == 0


def test_retraining_and_the_time_after_training(tmp_path, stop):
    pytest.importorskip("sklearn")
    from sparsebp.cli import train

    stop(Runner, "step", 4)
    told, command = interrupted(*DIGITS, "--prune", 0.8, "--out", tmp_path)
    assert "at step 2 of 2 of retraining; the last checkpoint is of step 0" in told
    stop(train, "_session_print", 1)
    told, command = interrupted(*command)
    assert "after all 2 steps of retraining; the last checkpoint is of step 2" in told
    assert invoke(*command).exit_code == 0


def test_tune_and_verify(tmp_path, stop):
    from sparsebp.core import timing
    from sparsebp.train import tune, verify

    few = ["tune", "bitstream", "--hidden", "4", "--seq-len", "12", "--samples", "16", "--steps", "1", "--rounds",
           "1", "--backward", "bp", "--schedule", "conventional", "--threads", "1", "--out",
           str(tmp_path / "t.toml")]  # fmt: skip
    stop(tune, "_config", 2)
    told, command = interrupted(*few)
    assert told == ("Interrupted at combination 2 of 3, fusion=forward, schedule=conventional, backward=bp, threads=1; "
                    "nothing was written. Begin again")  # fmt: skip
    stop(timing, "measure", 1)
    told, _ = interrupted(*command)
    assert told == "Interrupted after 3 combinations, while they were measured; nothing was written. Begin again"
    assert command == few and not (tmp_path / "t.toml").exists()
    stop(verify, "check_gradient", 2)
    told, command = interrupted("verify", "--seed", "3")
    assert re.match(r"Interrupted at model 2 of \d\d, RNN tanh, float32, every step", told)
    assert command == ["verify", "--seed", "3"]


def test_prune(tmp_path, stop):
    pytest.importorskip("sklearn")
    module = sys.modules["sparsebp.train.prune"]
    assert invoke(*DIGITS, "--out", tmp_path).exit_code == 0
    stop(module, "save_checkpoint", 1)
    told, command = interrupted("prune", tmp_path, "--amount", 0.5)
    assert (
        told
        == f"Interrupted while {tmp_path / 'pruned.safetensors'} was written; the checkpoint is unchanged. Begin again"
    )
    assert not (tmp_path / "pruned.safetensors").exists()
    assert invoke(*command).exit_code == 0 and (tmp_path / "pruned.safetensors").exists()


def test_ranks_are_started_again_together(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "3")
    told = Interrupted("at step 2 of 9", resume=True).describe("sparsebp", ["train", "digits", "--schedule", "1f1b"])
    assert told.endswith(": mpiexec -n 3 sparsebp train digits --schedule 1f1b --resume")
