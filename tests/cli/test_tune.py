"""sparsebp tune, and the file that it writes for sparsebp train."""

from __future__ import annotations

import json
from functools import partial

import pytest

from commands import run
from sparsebp.cli.app import app
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.threads import thread_counts
from sparsebp.train import tune as tuning
from sparsebp.train.config import config_for, read_config

invoke = partial(run, app)

TINY = {"task": "bitstream", "hidden": 4, "seq_len": 12, "samples": 16, "batch_size": 8}
DIGITS = ["digits", "--model", "lenet5", "--samples", "4", "--batch-size", "4"]
FEW = ["--steps", "1", "--rounds", "1"]


def test_the_fastest_is_written_and_trains(tmp_path):
    path = tmp_path / "deep" / "tuned.toml"
    choice = ["--fusion", "none", "--fusion", "backward", "--backward", "bp", "--threads", "1", "--schedule"]
    result = invoke("tune", *DIGITS, *FEW, *choice, "conventional", "--out", path, "--json")
    assert result.exit_code == 0, result.stderr
    *trials, last = map(json.loads, result.stdout.splitlines())
    assert {trial["fusion"] for trial in trials} == {"none", "backward"} and len(trials) == 2
    seconds = [trial["seconds"]["median"] for trial in trials]
    assert seconds == sorted(seconds) and all(trial["refused"] is None for trial in trials)
    written = read_config(path)
    assert written["fusion"] == trials[0]["fusion"] == last["best"]["fusion"]
    assert written["model"] == "lenet5" and written["threads"] == 1 and written["samples"] == 4
    out = tmp_path / "run"
    result = invoke("train", "--config", path, "--epochs", 1, "--batch-size", 2, "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    config = json.loads(result.stdout.splitlines()[-1])["config"]
    assert (config["fusion"], config["batch_size"], config["task"]) == (written["fusion"], 2, "digits")


def test_what_cannot_be_combined_has_its_reason():
    tried = [
        {"fusion": "none", "schedule": "conventional", "backward": "bp", "threads": 1},
        {"fusion": "backward", "schedule": "conventional", "backward": "bp", "threads": 1},  # clips by the norm
        {"fusion": "none", "schedule": "ooo", "backward": "bp", "threads": 1},
        {"fusion": "none", "schedule": "conventional", "backward": "fast", "threads": 1},
    ]
    lines = []
    trials = tuning.tune(TINY, tried, steps=1, rounds=1, progress=lambda *told: lines.append(told))
    assert [trial.refused is None for trial in trials] == [True, False, False, False]
    clipped, streams, unknown = (trial.refused for trial in trials[1:])
    assert "norm" in clipped and "two threads" in streams and "backward" in unknown
    assert [line[1:] for line in lines] == [(number, 4) for number in range(5)]
    assert lines[2][0] == "fusion=none, schedule=ooo, backward=bp, threads=1"
    with pytest.raises(OptionError, match="No combination"):
        tuning.tune(TINY, tried[1:], steps=1, rounds=1)


def test_out_of_order_is_tried_with_the_schedule_that_it_finds():
    if thread_counts()["kernels"] < 2:
        pytest.skip("one thread here")
    options = {"task": "digits", "model": "lenet5", "samples": 4, "batch_size": 4}
    tried = [{"fusion": "none", "schedule": "ooo", "backward": "bp", "threads": 2}]
    (trial,) = tuning.tune(options, tried, steps=1, rounds=1)
    assert trial.seconds is not None and trial.seconds.median > 0


def test_combinations():
    config = config_for("digits")
    here = thread_counts()["kernels"]
    tried = tuning.combinations(config)
    assert len(tried) == 3 * 2 * 2 * (1 if here == 1 else 2)
    assert tuning.combinations(config, ["none"], ["ooo"], ["bp"], [2]) == [
        {"fusion": "none", "schedule": "ooo", "backward": "bp", "threads": 2}
    ]


def test_table(tmp_path):
    result = invoke("tune", *DIGITS, *FEW, "--threads", 1, "--backward", "bp", "--out", tmp_path / "t.json")
    assert result.exit_code == 0, result.stderr
    assert "refused" in result.stdout and "two threads" in result.stdout and "t.json" in result.stdout
    assert read_config(tmp_path / "t.json")["backward"] == "bp"


@pytest.mark.parametrize(
    ("name", "content"),
    [("c.toml", "a = [1]"), ("c.toml", "x"), ("c.json", "[1]"), ("c.json", "{"), ("c.json", '{"a": null}'),
     ("missing.toml", None), ("c.toml", b"\xff")],
)  # fmt: skip
def test_files_of_another_form_are_refused(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileFormatError) as caught:
        read_config(path)
    assert caught.value.expected and caught.value.remedy


@pytest.mark.parametrize(
    ("content", "arguments", "text"),
    [
        ("", [], "task"), ('task = "digits"', ["mnist"], "another task"), ('task = "digits"\nx = 1', [], "belong"),
        ('task = "digits"\nbatch_size = "x"', [], "not an integer"),
        ('task = "digits"\nthreads = "2"', [], "threads is not an integer"),
        ('task = "digits"\nfusion = "x"', [], "fusion"),
    ],
)  # fmt: skip
def test_bad_options_in_a_file_are_one_message(tmp_path, content, arguments, text):
    path = tmp_path / "c.toml"
    path.write_text(content)
    result = invoke("train", *arguments, "--config", path, "--out", tmp_path / "run")
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert text in result.stderr


def test_another_suffix_is_refused_before_any_work(tmp_path):
    result = invoke("tune", *DIGITS, "--out", tmp_path / "c.yaml")
    assert result.exit_code == 2 and ".toml or .json" in result.stderr
    with pytest.raises(OptionError):
        read_config(tmp_path / "c.yaml")
