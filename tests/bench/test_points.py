"""Points in a process of their own: whatever happens at one, the others are measured and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.points_example import Point, make, make_fails, make_slowly
from benchmarks.harness import Run
from benchmarks.processes import measure_apart, named

TESTS = Path(__file__).resolve().parents[1]


def run_of(seconds: float | None = None) -> Run:
    return Run(False, {}, {}, {"notes": []}, print, "points", seconds)


def outcomes(rows: list[dict[str, Any]]) -> list[Any]:
    return [row.get("error", row.get("value")) for row in rows]


def test_every_point_gets_a_row_whatever_the_others_do(tmp_path: Path) -> None:
    points = [Point("well", 1), Point("raises"), Point("well", 2), Point("dies"), Point("well", 3), Point("sticks"),
              Point("well", 4), Point("hangs"), Point("well", 5)]  # fmt: skip
    run = run_of()
    rows = [*measure_apart(run, points, make, tmp_path, limit=5.0)]
    assert outcomes(rows) == [
        1, "ValueError: no such size", 2, "its process has died, status 7", 3,
        "CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered", 4, "stopped after 5 s",
        5,
    ]  # fmt: skip
    assert all(row["does"] == point.does and row["dtype"] == "float" for row, point in zip(rows, points, strict=True))
    json.dumps(rows)
    assert len([*tmp_path.iterdir()]) == 4  # one more after each death, none after what was only raised
    wrong = [(point, row) for point, row in zip(points, rows, strict=True) if "error" in row]
    assert run.result["notes"] == [f"{named(point)}: {row['error']}" for point, row in wrong]


def test_when_time_is_up_what_is_left_is_noted(tmp_path: Path) -> None:
    run, rows = run_of(1000.0), []
    for row in measure_apart(run, [Point("well", number) for number in range(7)], make, tmp_path):
        rows.append(row)
        run.seconds = 1000.0 if len(rows) < 2 else 0.0
    assert outcomes(rows) == [0, 1]
    why = "5 of 7 points not measured, 0 s were up, from this one on: does well, number 2, dtype float"
    assert run.result["notes"] == [why]


def test_a_process_that_never_gets_ready_is_not_started_for_ever(tmp_path: Path) -> None:
    run = run_of()
    rows = [*measure_apart(run, [Point("well", n) for n in range(9)], make_fails, tmp_path)]
    assert outcomes(rows) == ["RuntimeError: no GPU"] * 5
    assert "4 of 9 points not measured, the process that measures does not start" in run.result["notes"][-1]


def test_processes_that_die_at_their_first_point_do_start(tmp_path: Path) -> None:
    run = run_of()
    rows = [*measure_apart(run, [Point("dies", n) for n in range(6)] + [Point("well", 6)], make, tmp_path)]
    assert outcomes(rows) == ["its process has died, status 7"] * 6 + [6]


def test_a_quick_run_waits_for_slow_points(tmp_path: Path) -> None:
    run = run_of()
    run.quick = True
    assert outcomes([*measure_apart(run, [Point("well", 1), Point("waits")], make, tmp_path, limit=0.1)]) == [1, "late"]


def test_the_start_of_a_process_does_not_count_as_time_of_a_point(tmp_path: Path) -> None:
    run = run_of()
    assert outcomes([*measure_apart(run, [Point("well", 1)], make_slowly, tmp_path, limit=1.0)]) == [1]


PROGRAM = """
import sys
from pathlib import Path
from bench.points_example import Point, make
from bench.test_points import run_of
from dataclasses import replace
from bench.test_report import BENCHMARK
from benchmarks.processes import measure_apart

def measure(run):
    points = [Point("well", 1), Point("well", 2), Point("hangs"), Point("well", 3)]
    for row in measure_apart(run, points, make, Path(sys.argv[2])):
        yield row | {"model": "RNN", "ratio": 1.0, "ours": 1.0}

if __name__ == "__main__":
    replace(BENCHMARK, measure=measure, seconds=100.0).run(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_benchmark_that_is_killed_leaves_the_points_that_it_has_measured(
    kind: signal.Signals, tmp_path: Path
) -> None:
    from benchmarks import documents, harness

    (tmp_path / "out").mkdir()
    (tmp_path / "pids").mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "out"), str(tmp_path / "pids")],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    partial = tmp_path / "out" / "recurrent.partial.json"
    for _ in range(1200):
        if partial.exists() and len(harness.load_result(partial)["rows"]) == 2:
            break
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(kind)
    assert process.wait(60) != 0
    result = harness.load_result(partial)
    assert [row["value"] for row in result["rows"]] == [1, 2] and result["complete"] is False
    assert list(documents.find_results(partial.parent)) == ["recurrent"]
    for pid in (tmp_path / "pids").iterdir():  # the process that hangs at its point, if nobody could end it
        if kind is signal.SIGKILL:
            os.kill(int(pid.name), signal.SIGKILL)
