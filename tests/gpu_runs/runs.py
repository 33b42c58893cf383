"""All stages, how much of a run's time each is sure to have, and the runs that have them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness, load
from gpu_runs.carried import sanitizer
from gpu_runs.stages import Stage

WORKERS = 12
FINISH = 12.0
"""Seconds that a benchmark has for its picture, after its rows."""
LISTED = 12
"""Lines of failures in the summary of a stage."""
END_TO_END = "tests/device/test_end_to_end.py"
GRAPH_TESTS = ("tests/train/test_graphs.py", "tests/core/test_graph_recorder.py")
QUICK_TESTS = (
    "tests/kernels/test_csr.py::test_batches_that_differ_are_refused",
    "tests/kernels/test_values.py::test_wrong_arguments_are_refused",
)
"""Two in files that do not import PyTorch."""
TRAINED = ("bitstream", "--seq-len", "1000", "--samples", "2000", "--epochs", "2", "--backward", "chunked",
           "--compare", "--device", "cuda")  # fmt: skip
"""What the command line trains."""

RUNS: dict[str, dict[str, float]] = {
    "first-1": {
        "versions": 20, "smoke": 15, "host kernels": 0, "launches": 60, "end to end": 0, "memcheck": 0, "tests": 150,
        "gpu-peers": 60,
    },
    "first-2": {"versions": 10, "gpu-peers": 105, "gpu-grid": 80, "gpu-numbers": 75, "training": 30, "ncu": 25},
    "check": {
        "versions": 20, "host kernels": 0, "launches": 70, "end to end": 0, "memcheck": 0, "tests": 170,
        "racecheck": 60,
    },
    "peers": {"versions": 10, "gpu-peers": 300},
    "numbers": {"versions": 10, "gpu-numbers": 300, "ncu": 40},
    "grid": {"versions": 10, "gpu-grid": 300},
    "graphs": {"versions": 10, "graph tests": 100, "gpu-graphs": 250},
}  # fmt: skip
"""The stages of each run with their seconds. The first run on a GPU is `first-1`, is all of it right, and `first-2`,
how fast is it; the others are parts of them. A stage beside others has no seconds of its own."""


def stages_of(run: str, out: Path, benchmarks: Path, quick: bool) -> list[Stage]:
    """Return the stages of a run."""
    known = every(out, benchmarks, quick)
    return [replace(known[name], share=share) for name, share in RUNS[run].items()]


def every(out: Path, benchmarks: Path, quick: bool) -> dict[str, Stage]:
    """Return all stages by name; results of benchmarks go to their folder, all others to `out`."""
    small = ["--quick"] if quick else []
    chosen, workers = (QUICK_TESTS, 1) if quick else (("tests", f"--ignore={END_TO_END}"), WORKERS)
    whole = QUICK_TESTS if quick else (END_TO_END,)
    of_graphs = QUICK_TESTS if quick else GRAPH_TESTS

    def module(name: str, *options: str) -> Callable[[float], list[str]]:
        return lambda limit: _module(name, *options, "--seconds", f"{max(limit - 5, 1):.0f}", *small)

    def measuring(name: str) -> Stage:
        return Stage(name, 0, bench(name, benchmarks, quick), measured(name, benchmarks), alone=True)

    def testing(name: str, file: str, paths: Sequence[str], workers: int, beside: bool = False) -> Stage:
        return Stage(name, 0, lambda limit: tests(out, file, paths, workers), tested(out, file), beside=beside,
                     leaves=(f"{file}-tests.jsonl",))  # fmt: skip

    stages = [
        Stage("versions", 0, lambda limit: _module("versions", *small), needed=True),
        Stage("smoke", 0, lambda limit: _module("launches", "--out", str(out), "--quick"), _told, needed=True),
        Stage("host kernels", 0, module("host_kernels"), _told, beside=True, optional=True),
        Stage("launches", 0, module("launches", "--out", str(out)), _told, leaves=("check-launches.jsonl",)),
        testing("end to end", "end-to-end", whole, 0, beside=True),
        Stage("memcheck", 0, _sanitized("memcheck", out, small), _errors, leaves=("check-memcheck.txt",), beside=True),
        testing("tests", "check", chosen, workers),
        Stage("racecheck", 0, _sanitized("racecheck", out, small), _errors, leaves=("check-racecheck.txt",)),
        measuring("gpu-peers"),
        measuring("gpu-grid"),
        measuring("gpu-numbers"),
        Stage("training", 0, lambda limit: trained(out, quick), optional=True, alone=True),
        Stage("ncu", 0, lambda limit: profiled(out, small), lambda lines: _profiles(out), optional=True, alone=True,
              leaves=("numbers-ncu.txt", "numbers-ncu.ncu-rep")),
        testing("graph tests", "graphs", of_graphs, 0),
        measuring("gpu-graphs"),
    ]  # fmt: skip
    return {stage.name: stage for stage in stages}


# ---- stages --------------------------------------------------------------------------------------------------------


def bench(name: str, out: Path, quick: bool) -> Callable[[float], list[str]]:
    """Return the command of a benchmark, which keeps within the time that it has."""
    command = [sys.executable, "-m", "benchmarks", name, "--out", str(out.absolute())]
    return lambda limit: [*command, "--seconds", f"{max(limit - FINISH, 1):.0f}", *(["--quick"] if quick else [])]


def measured(name: str, folder: Path) -> Callable[[Sequence[str]], list[str]]:
    """Return what says how many rows a benchmark has left, which not, and the first of them."""

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.glob(f"{name}-*.json")}

    before = written()

    def said(lines: Sequence[str]) -> list[str]:
        found = max((set(written().items()) - set(before.items())), key=lambda each: each[1], default=(None, 0))[0]
        if found is None:
            return ["no row was measured", *list(lines)[-3:]]
        result, chosen = harness.load_result(found), load(name)
        rows = harness.measured(result)
        first = [" ".join(column.cell(row) for column in chosen.named(chosen.short)) for row in rows[:LISTED]]
        whole = "" if result["complete"] else ", the run was broken off"
        count = f"{len(rows)} rows measured, {len(result['rows']) - len(rows)} not{whole}: {found.name}"
        return [count, *result["notes"][:LISTED], *first]

    return said


def tests(out: Path, name: str, paths: Sequence[str], workers: int) -> list[str]:
    """Return the command of the gpu tests; a line each, so that a log shows how far they came."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", "faulthandler_timeout=60", "--continue-on-collection-errors"]
    command += ["--timeout=90", "--timeout-method=thread"] if importlib.util.find_spec("pytest_timeout") else []
    command += ["-p", "gpu_runs.outcomes", "--outcomes", str(out / f"{name}-tests.jsonl")]
    if workers and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers), "--dist", "worksteal"]
    return [*command, *paths]


def tested(out: Path, name: str) -> Callable[[Sequence[str]], list[str]]:
    """Return what says how many tests passed and which did not; where none ran, what pytest said last."""

    def said(lines: Sequence[str]) -> list[str]:
        rows = rows_of(out / f"{name}-tests.jsonl")
        bad = [row for row in rows if row["outcome"] == "failed"]
        counts = ", ".join(
            f"{sum(row['outcome'] == word for row in rows)} {word}" for word in ("passed", "failed", "skipped")
        )
        named = [f"{row['test']}: {row['why'][:140]}" for row in bad[:LISTED]]
        more = [f"and {len(bad) - LISTED} more"] if len(bad) > LISTED else []
        return [counts, *named, *more, *([] if rows else list(lines)[-5:])]

    return said


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that has one a line; half a line, of a process that was killed, is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _sanitized(tool: str, out: Path, small: Sequence[str]) -> Callable[[float], list[str] | str]:
    def command(limit: float) -> list[str] | str:
        program = sanitizer()
        if program is None:
            return "compute-sanitizer is not here"
        options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9", "--print-limit", "50"]
        log = str(out / f"check-{tool}.txt")
        return [str(program), *options, "--log-file", log, *_module("launches", "--bare", "--out", str(out), *small)]

    return command


def _errors(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line] + list(lines)[-1:]


def profiled(out: Path, small: Sequence[str]) -> list[str] | str:
    """Return the command that profiles one backward of each kind."""
    program = shutil.which("ncu")
    if program is None:
        return "ncu is not here"
    sections = [part for name in ("SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats")
                for part in ("--section", name)]  # fmt: skip
    # by default ncu empties the caches before each kernel, whose input is in L2 otherwise
    return [program, "--clock-control", "none", "--cache-control", "none", "-o", str(out / "numbers-ncu.ncu-rep"),
            "--kernel-name", "regex:rnn_|gru_|lstm_|scan_", *sections, sys.executable, "-m",
            "gpu_runs.one_backward", *small]  # fmt: skip


def trained(out: Path, quick: bool) -> list[str]:
    """Return the command that trains a network on the device, and compares scans with back-propagation."""
    small = ["--samples", "8", "--seq-len", "5", "--epochs", "1"] if quick else []
    return [sys.executable, "-m", "sparsebp", "train", *TRAINED, *small, "--out", str(out / "trained"), "--overwrite"]


def _profiles(out: Path) -> list[str]:
    """Write what the report says as text; return how many launches were profiled, or why none was."""
    path, report, program = out / "numbers-ncu.txt", out / "numbers-ncu.ncu-rep", shutil.which("ncu")
    if report.exists() and program is not None:
        subprocess.run([program, "--import", str(report), "--log-file", str(path)], check=False, timeout=30)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    errors = [line for line in lines if "==ERROR==" in line]
    return [f"{sum('GPU Speed Of Light' in line for line in lines)} launches profiled", *errors[:3]]


def _module(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", f"gpu_runs.{name}", *options]


def _told(lines: Sequence[str]) -> list[str]:
    """Return the last lines but those that show progress."""
    return [line for line in lines if line and not line.startswith("[")][-LISTED:]
