"""``mpiexec -n … sparsebp train``: one process prints and writes, and the numbers are those of one worker."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from mpi.launch import apart, completed, run
from mpi.test_ends import tracebacks
from sparsebp.train.checkpoint import load_checkpoint
from sparsebp.train.config import build, config_for
from sparsebp.train.state import FILE_NAME

pytest.importorskip("typer")
SECONDS = 120.0
TRAIN = ("-m", "mpi.programs", "command_line", "train", "digits", "--samples", "64", "--epochs", "1", "--seed", "3")


def test_a_pipeline_trains_from_the_command_line(tmp_path: Path) -> None:
    done = run(2, *TRAIN, "--schedule", "1f1b", "--accumulate", "4", "--out", str(tmp_path / "run"), seconds=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("test accuracy") == 1
    assert "on 2 ranks" in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["ranks"] == 2
    assert result["step"]["simulated_seconds"] > 0
    assert (tmp_path / "run" / "step.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    alone = build(config_for("digits", samples=64, epochs=1, accumulate=4, seed=3))
    alone.fit()
    loss, accuracy = alone.trainer.evaluate(alone.test_set)
    assert result["test_loss"] == pytest.approx(loss, rel=1e-4)
    assert result["test_accuracy"] == pytest.approx(accuracy, abs=0.02)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "Several ranks need a schedule of theirs"),
        (("--schedule", "gpipe", "--accumulate", "none"), "--accumulate"),
    ],
)
def test_a_refusal_is_said_once(options: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = run(2, *TRAIN, *options, "--out", str(tmp_path / "run"), seconds=SECONDS)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("Error") == 1, done.stderr
    assert text in done.stderr


def test_ranks_of_other_options_are_named(tmp_path: Path) -> None:
    one, other = ([*TRAIN, "--schedule", "gpipe", "--out", str(tmp_path), "--lr", lr] for lr in ("0.001", "0.002"))
    done = completed(apart(one, other), SECONDS)
    assert done.returncode != 0
    assert done.stderr.count("Error") == 1, done.stderr
    assert "Ranks differ in config" in done.stderr
    assert "on rank 1" in done.stderr


def test_a_failure_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    done = run(2, "-m", "mpi.programs", "fails_in_training", str(tmp_path), seconds=SECONDS)
    assert done.returncode != 0
    assert tracebacks(done) == ["ValueError: out of paper"], done.stderr
    assert len(load_checkpoint(tmp_path / FILE_NAME).state["epochs"]) == 1


@pytest.mark.parametrize(("name", "rank"), [("SIGINT", 1), ("SIGTERM", 0)])
def test_a_signal_to_one_rank_tells_how_to_go_on(name: str, rank: int, tmp_path: Path) -> None:
    train = [*TRAIN[3:], "--batch-size", "16", "--schedule", "gpipe", "--accumulate", "2", "--checkpoint-every", "1",
             "--out", str(tmp_path)]  # fmt: skip
    done = run(2, "-m", "mpi.programs", "signalled", name, str(rank), *train, seconds=SECONDS)
    assert done.returncode != 0  # of mpiexec, which joins the ranks' own
    told = "Interrupted at step 3 of 4 of training; the last checkpoint is of step 2. Go on from it: "
    said = [line for line in done.stderr.splitlines() if "Interrupted" in line]
    assert said == [f"{told}mpiexec -n 2 sparsebp {' '.join(train)} --resume"], done.stderr
    assert load_checkpoint(tmp_path / FILE_NAME).state["position"]["batch"] == 2
