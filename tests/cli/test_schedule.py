"""``sparsebp schedule``: from a builder's name to a file, a picture and a table; errors as one message."""

from __future__ import annotations

import json
from functools import partial

import pytest

from commands import one_message, run
from sparsebp.cli.app import app
from sparsebp.schedule.builders import BUILDERS

invoke = partial(run, app, "schedule")

GPIPE = ["build", "gpipe", "--workers", "2", "--stages", "2", "--microbatches", "3"]


@pytest.fixture
def gpipe(tmp_path):
    path = tmp_path / "gpipe.csv"
    result = invoke(*GPIPE, "--out", path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    return path


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_to_a_file_and_back(tmp_path, name):
    path = tmp_path / "x.csv"
    assert invoke("build", name, "--out", path).exit_code == 0
    assert invoke("build", name).stdout == path.read_text().replace("\r\n", "\n")
    assert invoke("validate", path).exit_code == 0
    found = json.loads(invoke("simulate", path, "--json").stdout)
    assert found["event"] == "result" and found["stages"] == 8 and 0 <= found["bubble"] < 1
    assert found["peak_memory"] == max(worker["peak_memory"] for worker in found["per_worker"])
    copies = 2 if name == "dualpipe" else 1
    stages = sorted(stage for worker in found["per_worker"] for stage in worker["stages"])
    assert stages == sorted([*range(8)] * copies)
    text = invoke("simulate", path).stdout
    assert "makespan" in text and ("stale F" in text) == bool(found["per_stage"])


def test_validate_and_simulate(gpipe):
    assert invoke("validate", gpipe).stdout == (
        "GPipe is valid: 2 workers, 2 streams, 2 stages, 3 micro-batches, 12 actions\n"
    )
    assert json.loads(invoke("validate", gpipe, "--json").stdout)["actions"] == 12
    assert json.loads(invoke("simulate", gpipe, "--json").stdout)["makespan"] == 12
    slow = invoke("simulate", gpipe, "--json", "--cost", "F=2", "--cost", "1B=5", "--latency", "0.5").stdout
    assert json.loads(slow)["makespan"] == 2 + 0.5 + 3 * 2 + 3 * 5 + 0.5 + 2
    assert json.loads(invoke("simulate", gpipe, "--json", "--steps", "2").stdout)["makespan"] == 24


def test_stages_of_a_worker_are_listed_in_short():
    built = invoke("build", "interleaved-1f1b", "--stages", 12, "--workers", 3, "--chunks", 2)
    assert "0–1 6–7" in invoke("simulate", "-", input=built.stdout).stdout
    assert "  0–23 " in invoke("simulate", "-", input=invoke("build", "ooo", "--stages", 24).stdout).stdout


def test_costs_of_a_file_and_options_above_them(tmp_path, gpipe):
    costs = tmp_path / "costs.json"
    costs.write_text('{"durations": {"F": 2, "B": 3}, "stages": [{"saved": 10}, {}], "latency": 1, "slowdown": 2}')
    found = json.loads(invoke("simulate", gpipe, "--costs", costs, "--json").stdout)
    assert found["makespan"] == 4 * 2 + 4 * 3 + 2
    assert found["per_worker"][0]["peak_memory"] > 30
    found = json.loads(invoke("simulate", gpipe, "--costs", costs, "--cost", "F=1", "--latency", 0, "--json").stdout)
    assert found["makespan"] == 4 + 4 * 3
    for text, words, code in (
        ("[]", "has no costs", 1), ("{", "has no costs", 1), ("[" * 100_000, "too deeply", 1),
        ('{"x": 1}', "unknown keys", 1), ('{"durations": {"X": 1}}', "of no action", 2),
        ('{"durations": {"F": -1}}', "0 or more", 2), ('{"durations": {"F": "1"}}', "0 or more", 2),
        ('{"durations": {"F": 1' + "0" * 400 + "}}", "0 or more", 2), ('{"stages": [{"bytes": 1}]}', "unknown keys", 1),
        ('{"stages": [{}]}', "another model", 2), ('{"latency": NaN}', "latency", 2),
        ('{"durations": 1}', "has no costs", 1),
    ):  # fmt: skip
        costs.write_text(text)
        assert words in one_message(invoke("simulate", gpipe, "--costs", costs), code)
    assert "has no costs" in one_message(invoke("simulate", gpipe, "--costs", tmp_path / "no.json"))


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".json", b'{"traceEvents"'), (".txt", b"GPipe: ")]
)
def test_plot_to_a_file(tmp_path, gpipe, suffix, start):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"out{suffix}"
    assert invoke("plot", gpipe, "--out", out).exit_code == 0
    assert out.read_bytes().startswith(start)
    assert "cannot be written" in one_message(invoke("plot", gpipe, "--out", tmp_path / "no" / f"out{suffix}"))


def test_plot_as_text_from_a_pipe():
    built = invoke(*GPIPE)
    result = invoke("plot", "-", "--width", "60", "--no-memory", input=built.stdout)
    assert result.exit_code == 0
    row = "worker 0  F0──F1──F2──" + "·" * 12 + "B0──────B1──────B2──────"
    assert result.stdout.splitlines()[:2] == ["GPipe: makespan 12, bubble 25.0%", row]
    assert "not a text file" in one_message(invoke("plot", "-", input=b"\xff\xfe"))


def test_colours_of_a_terminal():
    from sparsebp.cli.schedule import coloured

    text = coloured("GPipe: makespan F2\nworker 0  F0─F1·X──B0──\nmemory 0  ▁▁ 3")
    assert [text.plain[span.start : span.end] for span in text.spans] == ["F0─", "F1", "B0──"]


def test_build_for_pytorch(tmp_path):
    options = ["--stages", 2, "--workers", 2, "--microbatches", 2, "--fusion", "backward"]
    assert "0U" in invoke("build", "1f1b", *options).stdout
    assert "U" not in invoke("build", "1f1b", *options, "--torch").stdout
    assert "every micro-batch" in one_message(invoke("build", "pipedream", "--torch"))


def test_compare():
    result = invoke("compare", "gpipe", "1f1b", "zb-h1", "--stages", 4, "--json")
    assert result.exit_code == 0
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["builder"] for row in rows] == ["gpipe", "1f1b", "zb-h1"]
    assert rows[0]["speedup"] == 1 and rows[2]["speedup"] > 1 and rows[1]["peak_memory"] < rows[0]["peak_memory"]
    paper = ["compare", "gpipe", "fast-forward", "modulo", "--stages", 16, "--microbatches", 4, "--no-input-gradient"]
    rows = [json.loads(line) for line in invoke(*paper, "--json").stdout.splitlines()]
    assert [row["makespan"] for row in rows] == [83, 68, 51]  # Oh et al. 2022, Fig. 12
    ways = ["compare", "1f1b", "zb-h1", "zb-v", "dualpipe-v", "dualpipe", "--microbatches", 16]
    for slowdown, makespans in (("2", [114, 102, 99, 102, 100]), ("1", [114, 102, 99, 76, 76])):
        rows = [json.loads(line) for line in invoke(*ways, "--slowdown", slowdown, "--json").stdout.splitlines()]
        assert [row["makespan"] for row in rows] == makespans and {row["microbatches"] for row in rows} == {16}
    table = invoke("compare").stdout
    for name in BUILDERS:
        assert name in table


def test_compare_takes_files(tmp_path):
    """A schedule of a user's own stands beside those of the builders, at the same costs."""
    file = tmp_path / "mine.csv"
    assert invoke("build", "zb-h1", "--stages", 4, "--out", file).exit_code == 0
    found = invoke("compare", "1f1b", "zb-h1", file, "--stages", 4, "--cost", "F=2", "--json").stdout
    _, built, read = [json.loads(line) for line in found.splitlines()]
    assert read.pop("builder") == str(file) and built.pop("builder") == "zb-h1"
    assert read == built and built["speedup"] > 1
    assert "nowhere.csv" in one_message(invoke("compare", "1f1b", tmp_path / "nowhere.csv"))


def test_compare_lists_what_cannot_be_built_unless_it_was_asked_for():
    result = invoke("compare", "--stages", 2)
    assert result.exit_code == 0
    assert "gpipe: " in result.stdout and "conventional" in result.stdout
    assert "Error" in one_message(invoke("compare", "gpipe", "--stages", 2), code=2)


def test_errors(tmp_path, gpipe):
    assert "No such file" in one_message(invoke("validate", tmp_path / "no.csv"))
    gpipe.write_text("0F0,0B0\n1B0,1F0\n")
    message = one_message(invoke("validate", gpipe))
    assert "deadlocked" in message and "line 2, column 1" in message
    assert "does not take chunks" in one_message(invoke("build", "gpipe", "--chunks", 2), code=2)
    assert "memory ratio" in one_message(invoke("build", "ooo", "--memory-ratio", 0.01)).lower()
    assert "Not a duration" in one_message(invoke("build", "gpipe", "--cost", "F"), code=2)
    assert "0 or more" in one_message(invoke("build", "gpipe", "--cost", "F=-1"), code=2)
    assert "Unknown kind of picture" in one_message(invoke("plot", "-", "--out", "x.gif", input="0F0,0B0"), code=2)


def test_lower(gpipe, tmp_path):
    text = invoke("lower", gpipe).stdout
    assert text.startswith("rank 0\n  0F0\n  send 0F0 to 1\n") and "\nrank 1\n  post 0F0 from 0\n" in text
    assert invoke("lower", gpipe, "--out", tmp_path / "programs.txt").stdout == ""
    assert (tmp_path / "programs.txt").read_text() == text
    assert invoke("lower", gpipe, "--out", tmp_path / "programs.csv").exit_code == 0
    assert (tmp_path / "programs.csv").read_text().startswith("0F0,0SEND_F0,0F1,0SEND_F1,")
    assert invoke("validate", tmp_path / "programs.csv").exit_code == 0
    assert "Expected .csv or .txt" in one_message(invoke("lower", gpipe, "--out", tmp_path / "x.json"), 2)


def test_lower_for_one_stream_and_for_pytorch(tmp_path):
    path = tmp_path / "schedule.csv"
    invoke(
        "build", "fast-forward", "--workers", 2, "--stages", 2, "--microbatches", 3, "--input-gradient", "--out", path
    )
    free, streamed = (invoke("lower", path, *more).stdout for more in ((), ("--one-stream",)))
    assert free.index("post 1I0") < free.index("send 0F2") and streamed.index("post 1I0") > streamed.index("send 0F2")
    invoke("lower", path, "--torch", "--out", tmp_path / "torch.csv")
    first = (tmp_path / "torch.csv").read_text().splitlines()[0]
    assert first.endswith(",0W2,0REDUCE_GRAD") and first.index("0SEND_F2") < first.index("0RECV_B0")


def test_lower_refuses_what_cannot_run(tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert "deadlocked" in one_message(invoke("lower", path))
    path.write_text("0F0,0W0,0I0\n")
    assert "PyTorch cannot run the schedule" in one_message(invoke("lower", path, "--torch"))
