"""Stages of a run: every one runs, time limits keep partial results, the summary is correct."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_runs import carried, digest, runs
from gpu_runs.stages import Session, Stage
from sparsebp.kernels.device.launch import MACHINE_CODE

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
    assert printed == (tmp_path / "summary-try.txt").read_text(encoding="utf-8")
    assert (tmp_path / "first.log").read_text(encoding="utf-8") == "one\ntwo\n"
    assert "one" not in printed and printed.index("==== try, commit") < printed.index("NOT RUN   missing")
    assert printed.endswith("ALL WELL\n")


def test_stages_beside_others_end_before_one_that_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runs.stages.GRACE", 0.5)

    def notes(name: str, seconds: float) -> Any:
        begun = f"import pathlib, time; here = pathlib.Path({str(tmp_path)!r}); (here / '{name}.begun').touch(); "
        return python(begun + f"time.sleep({seconds}); (here / '{name}.ended').touch()")

    waits = "import pathlib, sys, time; here = pathlib.Path(sys.argv[1])\nwhile not (here / 'slow.begun').exists(): "
    waits += "time.sleep(0.01)\nassert not (here / 'slow.ended').exists()"
    ended = "import pathlib, sys; assert (pathlib.Path(sys.argv[1]) / 'slow.ended').exists()"
    stages = [
        Stage("slow", 0, notes("slow", 1.5), beside=True),
        Stage("next", 1, lambda limit: [sys.executable, "-c", waits, str(tmp_path)]),
        Stage("measures", 1, lambda limit: [sys.executable, "-c", ended, str(tmp_path)], alone=True),
        Stage("hangs", 0, notes("hangs", 1000), beside=True),
    ]
    assert Session("try", tmp_path, 8).run(stages, lambda: ["a digest"]) == 1
    assert outcomes(tmp_path) == ["passed", "passed", "passed", "stopped"]
    assert "\na digest\nNOT WELL: hangs\n" in (tmp_path / "summary-try.txt").read_text(encoding="utf-8")


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

    assert Session("try", tmp_path, 111).run([Stage("a", 10, note), Stage("b", 30, note), Stage("c", 60, note)]) == 0
    assert limits == pytest.approx([10, 40, 100], abs=3)


PROGRAM = """
import sys
from pathlib import Path
from gpu_runs.stages import Session, Stage
from sparsebp.kernels.device.launch import MACHINE_CODE
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
    while not (tmp_path / "second.log").exists() or not (tmp_path / "second.log").read_bytes():
        time.sleep(0.02)
    process.send_signal(kind)
    lines = process.stdout.readlines() if kind is not signal.SIGKILL else []
    status = process.wait(60)
    assert (tmp_path / "first.log").read_text(encoding="utf-8") == "done\n"
    assert (tmp_path / "second.log").read_text(encoding="utf-8").startswith("begun\n")
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


def test_machine_code_is_unpacked_where_launches_look_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(carried, "CACHE", tmp_path / "carried")
    carried.CACHE.mkdir()
    assert carried.unpack() == "machine code of 0 sets of defines" and carried.missing() == []
    (tmp_path / "abc-sm_90.cubin").write_bytes(b"code")
    with tarfile.open(carried.CACHE / carried.ARCHIVE, "w:gz") as packed:
        packed.add(tmp_path / "abc-sm_90.cubin", "abc-sm_90.cubin")
    assert carried.unpack() == "machine code of 1 sets of defines"
    folder = Path(carried.environment()[MACHINE_CODE])
    assert (folder / "abc-sm_90.cubin").read_bytes() == b"code"
    (folder / "missing.txt").write_text("0-sm_90.cubin csr.cu -DREAL=float\n" * 2, encoding="utf-8")
    assert carried.missing() == ["csr.cu -DREAL=float"]
    (tmp_path / "def-sm_90.cubin").write_bytes(os.urandom(1 << 17))
    with tarfile.open(carried.CACHE / carried.ARCHIVE, "w:gz") as packed:
        packed.add(tmp_path / "abc-sm_90.cubin", "abc-sm_90.cubin")
        packed.add(tmp_path / "def-sm_90.cubin", "def-sm_90.cubin")
    whole = (carried.CACHE / carried.ARCHIVE).read_bytes()
    for content in (b"half an archive", whole[: len(whole) // 2]):  # no half of a file is left where launches look
        (carried.CACHE / carried.ARCHIVE).write_bytes(content)
        assert "cannot be unpacked" in carried.unpack()
        assert [path.name for path in folder.glob("*.cubin")] == ["abc-sm_90.cubin"]


def test_what_makes_an_archive_too_large_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "MOST_ARCHIVED", 5000)
    for name, size in (("a.json", 3000), ("b.ncu-rep", 4000), ("c.log", 100)):
        (tmp_path / name).write_bytes(os.urandom(size))
    archive = tmp_path / "out" / "gpu-try.tar.gz"
    assert carried.parcel(tmp_path, archive) == "gpu-try.tar.gz: 2 files, without b.ncu-rep: too large"
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["c.log", "a.json"]


def test_a_digest_says_what_failed_and_the_worst_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "KEPT", tmp_path / "kept")
    tested = [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed", "why": "no"}]
    (tmp_path / "check-tests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tested) + '{"te')
    rows = [{"cell": "GRU", "length": n, "step_ratio": {"median": float(n)}, "time": 1.0} for n in range(1, 13)]
    (tmp_path / "gpu-grid-x.json").write_text(json.dumps({"benchmark": "gpu-grid", "rows": rows}))
    said = digest.of(tmp_path)
    assert said[0] == "check-tests: 1 failed, 1 passed"
    assert said[1] == "the 10 worst of 12 ratios to peers:" and len(said) == 12
    assert said[2].split() == ["1.000", "gpu-grid", "GRU", "1:", "step_ratio"]


def packed_of(**files: bytes) -> bytes:
    """Return an archive of JSON files."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as packed:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{name}.json".replace("_", "-"))
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    return memory.getvalue()


CUT = packed_of(gpu_grid_cut=os.urandom(10_000))[:5000]


@pytest.mark.parametrize("content", [None, b"no archive", CUT, packed_of(gpu_grid_half=b'{"rows": [')])
def test_what_is_no_archive_is_refused_in_a_line(content: bytes | None, tmp_path: Path) -> None:
    archive = tmp_path / "archive.tar.gz"
    if content is not None:
        archive.write_bytes(content)
    for command in (["tests/gpu_runs/digest.py"], ["docs/make_gpu_expectations.py", "--from"]):
        given = [sys.executable, *command, str(archive)]
        done = subprocess.run(given, cwd=ROOT, env=carried.environment(), capture_output=True, text=True, check=False)
        assert done.returncode and "archive" in done.stderr and "Traceback" not in done.stderr
    assert not [*(ROOT / "docs" / "benchmarks").glob("gpu-grid-half*")]
