"""Stages of a run: every one runs, time limits keep partial results, the summary is correct."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gpu_runs import carried, runs
from gpu_runs.compile_all import Processes
from gpu_runs.first import First
from gpu_runs.stages import Session, Stage

ROOT = carried.ROOT


def python(code: str) -> Any:
    return lambda limit: [sys.executable, "-c", code]


def summary(folder: Path, name: str = "try") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"summary-{name}.json").read_text(encoding="utf-8"))
    return found


def outcomes(folder: Path) -> list[str]:
    return [stage["outcome"] for stage in summary(folder)["stages"]]


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Where the tests were started with interrupts ignored, what they start must hear them all the same."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_stages_in_turn_and_the_summary_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        Stage("first", 1, python("print('one'); print('two')")),
        Stage("missing", 1, lambda limit: "the tool is not here"),
        Stage("last", 1, python("import os; print(os.environ['CUPY_CACHE_DIR'])")),
    ]
    assert Session("try", tmp_path, 100).run(stages) == 0
    assert outcomes(tmp_path) == ["passed", "not run", "passed"]
    found = summary(tmp_path)
    assert found["complete"] is True
    assert [stage["said"] for stage in found["stages"]] == [
        ["two"],
        ["the tool is not here"],
        [str(carried.KEPT / "cupy")],
    ]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "log-try.txt").read_text(encoding="utf-8")
    assert printed.index("one\ntwo\n") < printed.index("==== try, commit") < printed.index("NOT RUN   missing")
    assert printed.endswith("ALL WELL\n")


def test_a_stage_that_fails_is_not_the_last_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [Stage("bad", 1, python("import sys; print('why'); sys.exit(3)")), Stage("good", 1, python("print(1)"))]
    assert Session("try", tmp_path, 100).run(stages) == 1
    assert outcomes(tmp_path) == ["failed", "passed"] and summary(tmp_path)["stages"][0]["status"] == 3
    assert capsys.readouterr().out.endswith("NOT WELL: bad\n")


def test_a_stage_whose_time_is_up_is_interrupted_and_says_what_it_has_done(tmp_path: Path) -> None:
    says = "import time\ntry:\n print('begun')\n time.sleep(1000)\nexcept KeyboardInterrupt:\n print('5 of 9 done')"
    stages = [Stage("long", 1, python(says)), Stage("next", 500, python("print(1)"))]
    assert Session("try", tmp_path, 1000).run(stages) == 1
    first = summary(tmp_path)["stages"][0]
    assert (first["outcome"], first["said"]) == ("stopped", ["5 of 9 done"])
    assert outcomes(tmp_path) == ["stopped", "passed"]


def test_a_stage_that_does_not_end_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_runs.stages.GRACE", 0.5)
    deaf = "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    deaf += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], env={})\n"
    deaf += "print(child.pid); time.sleep(1000)"
    assert Session("try", tmp_path, 6).run([Stage("deaf", 1, python(deaf), list)]) == 1
    stage = summary(tmp_path)["stages"][0]
    assert stage["outcome"] == "stopped" and stage["status"] == -signal.SIGABRT
    assert [line for line in stage["said"] if 'File "<string>", line 3' in line], "it prints where it hung"
    for _ in range(100):
        try:
            state = Path(f"/proc/{int(stage['said'][0])}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the stage has started still runs")


def test_a_stage_that_cannot_begin_or_be_summed_up_is_not_the_last_one(tmp_path: Path) -> None:
    stages = [
        Stage("command", 1, lambda limit: 1 / 0),  # type: ignore[arg-type, return-value]
        Stage("no program", 1, lambda limit: ["/no/such/program"]),
        Stage("summary", 1, python("print(1)"), lambda lines: lines[7:8] + 1),  # type: ignore[operator]
        Stage("good", 1, python("print(1)")),
    ]
    assert Session("try", tmp_path, 100).run(stages) == 1
    assert outcomes(tmp_path) == ["failed", "failed", "failed", "passed"]
    assert summary(tmp_path)["stages"][0]["said"] == ["ZeroDivisionError: division by zero"]


def test_an_interrupt_outside_of_a_stage_leaves_the_summary(tmp_path: Path) -> None:
    def interrupted(lines: Any) -> list[str]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return ["summed up"]

    stages = [Stage("first", 1, python("print(1)"), interrupted), Stage("next", 1, python("print(1)"))]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert Session("try", tmp_path, 100).run(stages) == 130
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcomes(tmp_path) == ["passed", "left out"] and summary(tmp_path)["complete"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--seconds", text], "seconds must be a number above 0") for text in ("nan", "0", "-1", "inf")]
    + [(["--out", "/dev/null/out"], "Results cannot be written to /dev/null/out")],
)
def test_what_cannot_be_run_is_refused_in_a_line(options: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "gpu_runs"), "check", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr


def test_the_whole_time_is_kept_and_what_a_stage_leaves_the_next_ones_have(tmp_path: Path) -> None:
    limits: list[float] = []

    def note(limit: float) -> str:
        limits.append(limit)
        return "only noted"

    assert Session("try", tmp_path, 115).run([Stage("a", 10, note), Stage("b", 30, note), Stage("c", 60, note)]) == 0
    assert limits == pytest.approx([10, 40, 100], abs=3)


PROGRAM = """
import sys
from pathlib import Path
from gpu_runs.compile_all import Processes, sets
from gpu_runs.stages import Session, Stage
stages = [Stage("first", 1, lambda limit: [sys.executable, "-c", "print('done')"]),
          Stage("second", 9, lambda limit: [sys.executable, "-c", "import time; print('begun'); time.sleep(1000)"]),
          Stage("third", 1, lambda limit: [sys.executable, "-c", "print(3)"])]
sys.exit(Session("try", Path(sys.argv[1]), 1000).run(stages))
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_what_it_has(kind: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=carried.environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "begun\n":
            break
    process.send_signal(kind)
    lines += process.stdout.readlines() if kind is not signal.SIGKILL else []
    status = process.wait(60)
    assert "done\n" in lines and "begun\n" in (tmp_path / "log-try.txt").read_text(encoding="utf-8").splitlines(True)
    assert summary(tmp_path)["complete"] is False
    if kind is signal.SIGKILL:
        assert outcomes(tmp_path) == ["passed"]
        return
    assert status == 130 and lines[-1] == "NOT WELL: second, third\n"
    assert outcomes(tmp_path) == ["passed", "stopped", "left out"]


# ---- pieces of stages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupted_pytest_says_what_it_has_done(workers: int, tmp_path: Path) -> None:
    """The gpu tests' command: a test that hangs is interrupted, what ran before is in the report."""
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import time, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\ndef test_bad(): assert 1 == 2\ndef test_hangs(): time.sleep(1000)\n"
    )
    command = runs.tests(tmp_path, "try", [str(tests)], workers)
    process = subprocess.Popen(
        command, env=carried.environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "test_bad" in line and "FAILED" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 2
    assert "1 failed, 1 passed" in rest
    said = runs.tested(tmp_path, "try")([])
    assert said[0] == "1 passed, 1 failed, 0 skipped"
    assert said[1].endswith("test_some.py::test_bad: assert 1 == 2") and len(said) == 2
    assert ElementTree.parse(tmp_path / "try-tests.xml").find(".//failure") is not None


def test_machine_code_travels_as_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "KEPT", tmp_path / "there")
    out = tmp_path / "out"
    out.mkdir()
    assert carried.pack(out) == "no archive of 0 modules" and not [*out.iterdir()]
    (tmp_path / "there" / "cupy").mkdir(parents=True)
    (tmp_path / "there" / "cupy" / "abc.cubin").write_bytes(os.urandom(1000))
    assert carried.pack(out).startswith("cupy-cache.tar.gz: 1 modules")
    monkeypatch.setattr(carried, "KEPT", tmp_path / "here")
    monkeypatch.setattr(carried, "CACHE", tmp_path / "carried")
    carried.CACHE.mkdir()
    assert carried.unpack() == "0 modules of an earlier run"
    (tmp_path / "carried" / "cupy-cache.tar.gz").write_bytes((out / "cupy-cache.tar.gz").read_bytes())
    assert carried.unpack() == "1 modules of an earlier run"
    shutil.rmtree(carried.CACHE)  # the next call carries another one
    carried.CACHE.mkdir()
    assert carried.unpack() == "1 modules of an earlier run"
    both = [(tmp_path / side / "cupy" / "abc.cubin").read_bytes() for side in ("here", "there")]
    assert both[0] == both[1]
    monkeypatch.setattr(carried, "MOST_ARCHIVED", 500)
    assert "are too many" in carried.pack(out) and not [*out.iterdir()]


def test_what_makes_an_archive_too_large_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "MOST_ARCHIVED", 5000)
    for name, size in (("a.json", 3000), ("b.ncu-rep", 4000), ("cupy-cache.tar.gz", 100)):
        (tmp_path / name).write_bytes(os.urandom(size))
    archive = tmp_path / "out" / "gpu-try.tar.gz"
    assert (
        carried.parcel(tmp_path, archive) == "gpu-try.tar.gz: 1 files, without cupy-cache.tar.gz, b.ncu-rep: too large"
    )
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["a.json"]


def first(folder: Path, budget: float, stages: dict[str, Stage]) -> First | str:
    """Do a call of the first run with these stages."""
    session = First(folder, 100, budget)
    found = session.stages(stages)
    if isinstance(found, str):
        return found
    session.run(found)
    return session


def test_a_budget_holds_for_all_calls_and_what_is_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def stage(name: str, code: str = "pass") -> Stage:
        return Stage(name, 1, lambda limit: (ran.append(name), [sys.executable, "-c", code])[1])

    calls = ({"a": 10, "b": 10}, {"c": 10})
    monkeypatch.setattr("gpu_runs.first.CALLS", calls)
    stages = {name: stage(name) for name in ("versions", "a", "b", "c")}
    interrupts = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT); time.sleep(9)"
    first(tmp_path, 1000, stages | {"b": stage("b", interrupts)})
    assert ran == ["versions", "a", "b"]
    first(tmp_path, 1000, stages | {"b": stage("b", "1 / 0")})  # it fails, but it has had its turn
    assert ran[3:] == ["versions", "b"]
    state = json.loads((tmp_path / "first.json").read_text(encoding="utf-8"))
    assert state["calls"] == 2 and state["done"].keys() == {"a", "b"} and 0 < state["spent"] < 100
    assert {path.name for path in tmp_path.glob("log-*")} == {"log-first-1.txt", "log-first-2.txt"}
    assert "The budget is spent" in str(first(tmp_path, state["spent"] + 20, stages))
    session = first(tmp_path, state["spent"] + 70, stages)
    assert isinstance(session, First) and session.seconds <= 60 and ran[5:] == ["versions", "c"]
    assert "All 2 calls are done" in str(first(tmp_path, 1000, stages)) and len(ran) == 7


def test_the_next_machine_goes_on_with_what_the_archive_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runs.first.CALLS", ({"a": 10}, {"b": 10}))
    monkeypatch.setattr("gpu_runs.first.CACHE", tmp_path / "carried")
    monkeypatch.setattr(carried, "KEPT", tmp_path / "kept")
    stages = {name: Stage(name, 1, python("print(1)")) for name in ("versions", "a", "b")}
    session = First(tmp_path / "here", 100, 1000, tmp_path / "carried" / "gpu-first.tar.gz")
    session.run(session.stages(stages))  # type: ignore[arg-type]
    there = first(tmp_path / "there", 1000, stages)
    assert isinstance(there, First) and [each.stage for each in there.outcomes] == ["versions", "b"]


def test_a_process_that_dies_while_compiling_costs_what_it_was_at_alone() -> None:
    pool = Processes(1)
    try:
        died, came = pool.submit(os._exit, 7), pool.submit(max, 1, 2)  # type: ignore[arg-type]
        assert died.result(60).error == "its process has died" and died.result().what == "7"
        assert came.result(60) == 2  # type: ignore[comparison-overlap]
    finally:
        pool.end()
