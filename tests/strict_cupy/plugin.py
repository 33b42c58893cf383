"""A pytest plugin: gpu tests run on the stand-in. ``pytest -p strict_cupy.plugin -m gpu``.

A test that it cannot run is marked ``real_gpu``, with the reason. Any other skip but for want of Numba is a failure of
the run: a test that has quietly stopped running shows nothing.
"""

from __future__ import annotations

import pytest

from strict_cupy import install
from strict_cupy.device import DEVICE

ALLOWED = ("needs a real GPU: ", "Numba cannot be imported")
"""How reasons for a skip may begin."""

install()
_skipped: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a real device."""
    for item in items:
        mark = item.get_closest_marker("real_gpu")
        if mark is not None:
            item.add_marker(pytest.mark.skip(reason=f"{ALLOWED[0]}{mark.args[0]}"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Do what a test has given to the device and not waited for; then forget streams, events and captures."""
    try:
        DEVICE.synchronize()
    finally:
        DEVICE.forget()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note skips for other reasons."""
    if report.skipped and isinstance(report.longrepr, tuple):
        why = str(report.longrepr[2]).removeprefix("Skipped: ")
        if not why.startswith(ALLOWED):
            _skipped.append(f"{report.nodeid}: {why}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was skipped without a reason that counts."""
    for each in _skipped:
        terminalreporter.line(f"SKIPPED WITHOUT NEED {each}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let the run fail for them."""
    if _skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
