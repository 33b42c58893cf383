"""A pytest plugin: appends the outcome of every test to a file as soon as it is known, ``-p gpu_runs.outcomes``.

pytest reports at its end, which it may not live to see, and its XML counts a test that was interrupted as one
that has passed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="file for the outcomes, one JSON object a line")


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput"):  # workers of xdist report to the process that has started them
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    """Writes a line when a test has failed or been skipped, or has passed as a whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._bad: set[str] = set()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self._bad:
            self._bad.add(report.nodeid)
            why = str(report.longrepr).strip().rsplit("\n", 1)[-1]
            self._write({"test": report.nodeid, "outcome": "failed", "when": "collect", "why": why})

    def pytest_runtest_logreport(self, report: Any) -> None:
        known = report.nodeid in self._bad
        if known or (report.passed and report.when != "teardown") or (report.skipped and known):
            return
        row: dict[str, Any] = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "when": report.when,
            "seconds": round(report.duration, 3),
        }
        if report.user_properties:
            row["measured"] = dict(report.user_properties)
        if not report.passed:
            self._bad.add(report.nodeid)
            row["why"] = _why(report.longrepr)
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()


def _why(trace: Any) -> str:
    """Return what a report says in one line: the error, or why it was skipped."""
    crash = getattr(trace, "reprcrash", None)
    said = crash.message if crash is not None else trace[2] if isinstance(trace, tuple) else str(trace)
    return " ".join(said.split())[:300]
