"""Several benchmarks in one command: each in a process of its own, and what came of all of them."""

import json
import subprocess
import sys

import pytest

from benchmarks import processes
from sparsebp.core.errors import SparseBPError

pytest.importorskip("typer", exc_type=ImportError)
pytest.importorskip("rich", exc_type=ImportError)


def left(path, rows, **more):
    path.write_text(json.dumps({
        "benchmark": path.stem, "title": "t", "leaves_out": "nothing", "quick": True, "complete": True,
        "environment": {}, "settings": {}, "rows": rows, "notes": [], **more,
    }))  # fmt: skip


def outcome(name, tmp_path, monkeypatch, what):
    """Run one benchmark whose process does `what` and returns its exit status."""
    monkeypatch.setattr(processes, "_status", what)
    (found,) = processes.run_series([name], tmp_path, quick=True, json=False, told=lambda number, last: None)
    return found


def test_rows_and_missed_targets_are_read_from_the_result(tmp_path, monkeypatch):
    rows = [{"models": 1, "met": met} for met in ("met", "missed: 2×", True, False, None)]
    found = outcome("scan", tmp_path, monkeypatch, lambda command: left(tmp_path / "scan.json", rows) or 0)
    assert found.done and (found.rows, len(found.missed)) == (5, 2)


def test_a_row_that_was_not_measured_is_a_failure(tmp_path, monkeypatch):
    rows = [{"error": "no room"}, {}]
    found = outcome("scan", tmp_path, monkeypatch, lambda command: left(tmp_path / "scan.json", rows) or 1)
    assert not found.done and "1 rows" in found.state


@pytest.mark.parametrize("status", [0, 1, -9])
def test_the_result_of_another_run_is_not_taken_for_this_ones(status, tmp_path, monkeypatch):
    left(tmp_path / "scan.json", [{}])
    found = outcome("scan", tmp_path, monkeypatch, lambda command: status)
    assert not found.done and found.rows == 0 and str(status) in found.state


def test_the_last_time_is_that_of_a_run_of_the_same_kind(tmp_path, monkeypatch):
    left(tmp_path / "scan.json", [{}], seconds=12.5)
    left(tmp_path / "chains.json", [{}], seconds=12.5, quick=False)
    told = []
    monkeypatch.setattr(processes, "_status", lambda command: 1)
    names = ["scan", "chains", "torch"]
    found = processes.run_series(
        names, tmp_path, quick=True, json=False, told=lambda number, last: told.append((number, last))
    )
    assert told == [(0, 12.5), (1, None), (2, None)]
    assert [o.name for o in found] == names  # one that fails does not stop the rest


def test_numbers_of_a_changed_package_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "commit", lambda: "abc1234+")
    monkeypatch.setattr(processes, "_status", lambda command: pytest.fail("measured"))
    with pytest.raises(SparseBPError, match=r"abc1234\+"):
        processes.run_series(["scan"], tmp_path, quick=False, json=False, told=lambda number, last: None)


def test_an_interrupted_benchmark_is_waited_for(monkeypatch):
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)"
    waited = []
    wait = subprocess.Popen.wait

    def interrupted(process, timeout=None):
        waited.append(process)
        if len(waited) == 1:
            raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(processes, "_PATIENCE", 0.3)
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes._status([sys.executable, "-c", code])
    assert waited[0].returncode == -9  # it would neither end by itself nor when told again


def test_two_benchmarks_from_the_command_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "scaling-papers", "scaling", "--quick"]
    found = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "1 of 2: scaling-papers" in found.stdout and "2 of 2: scaling" in found.stdout
    assert "failed: none" in found.stdout.splitlines()[-1]
    assert {path.name for path in tmp_path.glob("*.json")} == {"scaling-papers.json", "scaling.json"}


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_run(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from benchmarks.command import app

    monkeypatch.setattr(processes, "run_series", lambda *_, **options: pytest.fail("it was run"))
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["scan", "schedule", "--quick", "--out", str(tmp_path / "file")])
    assert result.exit_code == 1 and "cannot be written" in result.stderr
