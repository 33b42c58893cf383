"""Benchmarks one after the other, each in a process of its own: one that fails, or leaks, does not stop the rest."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.tools import report
from benchmarks.tools.environment import commit
from sparsebp.core.errors import FileFormatError, SparseBPError

_PATIENCE = 5
"""Seconds in which a benchmark that is interrupted has to end, before it is told again, and before it is killed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one benchmark.

    Attributes
    ----------
    name
        The benchmark.
    state
        ``"done"``, or what went wrong.
    seconds
        What it took, start and end of its process included.
    rows, missed
        How many rows it has, and those that miss their target, as texts.
    """

    name: str
    state: str
    seconds: float
    rows: int = 0
    missed: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether every row was measured."""
        return self.state == "done"

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return dataclasses.asdict(self) | {"seconds": round(self.seconds, 1)}


def run(
    names: Sequence[str], out: Path | None, *, quick: bool, json: bool, told: Callable[[int, float | None], None]
) -> list[Outcome]:
    """Run benchmarks as ``python -m benchmarks`` does, their output on this process's own; return what came of each.

    Parameters
    ----------
    names
        Which, in order.
    out, quick, json
        As the command takes them.
    told
        Is called before each, with its number from 0 and the seconds that its last such run took, None if not known.

    Raises
    ------
    SparseBPError
        Files of the package differ from the commit that its numbers would stand under, in a run that is not `quick`.
    """
    found = commit()
    if found.endswith("+") and not quick:
        raise SparseBPError(
            "Files of the package differ from its last commit, which the numbers would stand under",
            expected="a clean working tree", got=f"commit {found}", remedy="Commit, or stash, what has changed",
        )  # fmt: skip
    outcomes = []
    for number, name in enumerate(names):
        told(number, _last_seconds(_path(name, out), quick))
        command = [sys.executable, "-m", "benchmarks", name, *(["--quick"] if quick else [])]
        command += [*(["--out", str(out)] if out is not None else []), *(["--json"] if json else [])]
        outcomes.append(_one(name, command, _path(name, out)))
    return outcomes


def _one(name: str, command: Sequence[str], path: Path) -> Outcome:
    sys.stdout.flush()
    begin, before = time.monotonic(), _stamp(path)
    status = _status(command)
    seconds = time.monotonic() - begin
    if _stamp(path) == before:  # what is there is of another run
        return Outcome(name, f"failed, exit status {status}: no result", seconds)
    try:
        result = report.load(path)
    except FileFormatError as error:
        return Outcome(name, f"failed, exit status {status}: {error}", seconds)
    errors = len(result["rows"]) - len(report.measured(result))
    state = "done" if status == 0 else f"failed, exit status {status}: {errors} rows could not be measured"
    return Outcome(name, state, seconds, len(result["rows"]), tuple(missed(name, result)))


def _status(command: Sequence[str]) -> int:
    """Run a command; return its exit status. Ctrl-C reaches it as well, and it is waited for."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            for stop in (lambda: process.send_signal(signal.SIGINT), process.kill):  # if it came to this process alone
                try:
                    process.wait(_PATIENCE)
                    break
                except subprocess.TimeoutExpired:
                    stop()
            raise


def missed(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return the rows of a result that miss their target, each as the benchmark prints it."""
    return [load(name).said(row) for row in result["rows"] if _misses(row.get("met"))]


def _misses(met: Any) -> bool:
    return met is False or (isinstance(met, str) and met.startswith("missed"))


def _path(name: str, out: Path | None) -> Path:
    return (report.DEFAULT_FOLDER if out is None else out) / f"{name}.json"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from the one that replaces it; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _last_seconds(path: Path, quick: bool) -> float | None:
    try:
        result = report.load(path)
    except FileFormatError:
        return None
    seconds = result.get("seconds") if result["quick"] == quick else None
    return float(seconds) if isinstance(seconds, int | float) else None
